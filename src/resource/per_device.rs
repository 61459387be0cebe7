//! One value for each device.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, OnceLock};

use crate::allocator::{Allocator, Config};
use crate::driver::{Context, Driver, process};
use crate::error::Error;
use crate::locks::held::{Locked, Mutex};

use super::checks::device_of;
use super::ordered::AccessOrdered;
use super::sanitizer::Sanitizer;
use super::traits::MemoryResource;

type Build<T> = dyn Fn(usize) -> Result<T, Error> + Send + Sync;
/// A value that is built or being built; none if that failed.
type Slot<T> = Arc<OnceLock<Option<T>>>;

/// One `T` for each device, built once, on first use; a failed build is repeated by the next call.
///
/// ```
/// use cualloc::resource::PerDevice;
/// let names = PerDevice::new(|ordinal| Ok(format!("GPU {ordinal}")));
/// assert_eq!(names.get(1)?, "GPU 1");
/// assert_eq!(names.all(), [(1, "GPU 1".to_owned())]);
/// # Ok::<(), cualloc::Error>(())
/// ```
pub struct PerDevice<T> {
    build: Box<Build<T>>,
    /// The values by ordinal of the device.
    slots: Mutex<BTreeMap<usize, Slot<T>>>,
}

impl<T: Clone> PerDevice<T> {
    /// Creates it with a function that builds the value of a device, by ordinal. It runs without a lock, but other
    /// threads that request the same device wait for it, and it must not request that device itself.
    pub fn new(build: impl Fn(usize) -> Result<T, Error> + Send + Sync + 'static) -> PerDevice<T> {
        PerDevice {
            build: Box::new(build),
            slots: Mutex::default(),
        }
    }

    /// The value of a device.
    ///
    /// # Errors
    /// Those of the function.
    pub fn get(&self, ordinal: usize) -> Result<T, Error> {
        loop {
            let slot = Arc::clone(self.slots().entry(ordinal).or_default());
            let mut failure = None;
            let build = || (self.build)(ordinal).map_err(|e| failure = Some(e)).ok();
            if let Some(built) = slot.get_or_init(build) {
                return Ok(built.clone());
            }
            self.slots().retain(|_, known| !Arc::ptr_eq(known, &slot));
            if let Some(error) = failure {
                return Err(error);
            }
            // The build of another thread failed, which returns the error.
        }
    }

    /// All values that were built, by ordinal.
    pub fn all(&self) -> Vec<(usize, T)> {
        let slots = self.slots();
        let built = |(ordinal, slot): (&usize, &Slot<T>)| Some((*ordinal, slot.get()?.clone()?));
        slots.iter().filter_map(built).collect()
    }
}

impl PerDevice<Arc<dyn MemoryResource>> {
    /// The [usual stacks](standard) of the process, each on the primary context of its device. The driver is loaded
    /// by the first [`get`](Self::get).
    pub fn global() -> &'static PerDevice<Arc<dyn MemoryResource>> {
        static ALL: OnceLock<PerDevice<Arc<dyn MemoryResource>>> = OnceLock::new();
        ALL.get_or_init(|| {
            PerDevice::new(|ordinal| {
                let device = device_of(&Driver::load()?, ordinal)?;
                standard(&Context::primary(&device)?)
            })
        })
    }
}

/// The usual stack: [`AccessOrdered`] over a caching allocator with default settings, under a [`Sanitizer`] if the
/// environment turns on any of its checks.
///
/// ```
/// use cualloc::resource::{PerDevice, standard};
/// # use cualloc::sim::{SimConfig, Simulator};
/// # let sim = Simulator::new(SimConfig::with_devices(2, 1 << 30))?;
/// # let driver = sim.driver()?;
/// let stacks = PerDevice::new(move |ordinal| standard(&driver.context(ordinal)?));
/// assert_eq!(stacks.get(1)?.ordinal(), 1);
/// assert!(stacks.get(2).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// As [`Allocator::with_config`].
pub fn standard(context: &Context) -> Result<Arc<dyn MemoryResource>, Error> {
    let ordered = AccessOrdered::new(Allocator::with_config(context, Config::new())?);
    let checked = Sanitizer::from_env(ordered);
    Ok(match checked.is_off() {
        true => Arc::new(checked.into_inner()),
        false => Arc::new(checked),
    })
}

impl<T> PerDevice<T> {
    fn slots(&self) -> Locked<'_, BTreeMap<usize, Slot<T>>> {
        process::lock(&self.slots)
    }
}

debug_fields!([T: fmt::Debug] PerDevice<T>, self => slots: *self.slots());
