//! One value for each device.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Condvar, OnceLock};

use crate::allocator::{Allocator, Config};
use crate::driver::{Context, Driver, process};
use crate::error::Error;
use crate::locks::held::{Locked, Mutex};

use super::checks::device_of;
use super::ordered::AccessOrdered;
use super::sanitizer::Sanitizer;
use super::traits::MemoryResource;

type Build<T> = dyn Fn(usize) -> Result<T, Error> + Send + Sync;

/// One `T` for each device, built on first use. Each is built once, also if many threads ask for it; a
/// build that failed is repeated by the next call.
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
    /// The values by ordinal of the device; none while one is being built.
    slots: Mutex<BTreeMap<usize, Option<T>>>,
    built: Condvar,
}

impl<T: Clone> PerDevice<T> {
    /// Values that a function builds for the ordinal of a device. The function runs without a lock; other threads that
    /// ask for the same device wait for it, so it must not ask for that device itself.
    pub fn new(build: impl Fn(usize) -> Result<T, Error> + Send + Sync + 'static) -> PerDevice<T> {
        PerDevice {
            build: Box::new(build),
            slots: Mutex::default(),
            built: Condvar::new(),
        }
    }

    /// The value of a device.
    ///
    /// # Errors
    /// Those of the function.
    pub fn get(&self, ordinal: usize) -> Result<T, Error> {
        {
            let mut slots = self.slots();
            loop {
                match slots.get(&ordinal) {
                    Some(Some(known)) => return Ok(known.clone()),
                    Some(None) => slots = slots.wait(&self.built),
                    None => break,
                }
            }
            slots.insert(ordinal, None);
        }
        // Ends also by a panic, so that no thread waits for ever.
        let mut attempt = Attempt {
            all: self,
            ordinal,
            result: None,
        };
        let built = (self.build)(ordinal)?;
        attempt.result = Some(built.clone());
        Ok(built)
    }

    /// All values that were built, by ordinal.
    pub fn all(&self) -> Vec<(usize, T)> {
        let slots = self.slots();
        let built = |(ordinal, slot): (&usize, &Option<T>)| Some((*ordinal, slot.clone()?));
        slots.iter().filter_map(built).collect()
    }
}

impl PerDevice<Arc<dyn MemoryResource>> {
    /// The [usual stacks](standard) of the process, each on the primary context of its device. The driver is loaded
    /// on first use; [`get`](Self::get) fails with [`Error::DriverUnavailable`], [`Error::InvalidDevice`], or an
    /// error of [`standard`].
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

/// The usual stack: [`AccessOrdered`] over a caching allocator with default settings, under a [`Sanitizer`] where the
/// environment asks for its checks. A runtime is such a stack, or any other, with a
/// [`StreamPool`](super::StreamPool); one for each device is a [`PerDevice`].
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
    fn slots(&self) -> Locked<'_, BTreeMap<usize, Option<T>>> {
        process::lock(&self.slots)
    }
}

struct Attempt<'a, T> {
    all: &'a PerDevice<T>,
    ordinal: usize,
    result: Option<T>,
}

impl<T> Drop for Attempt<'_, T> {
    fn drop(&mut self) {
        let result = self.result.take();
        let mut slots = self.all.slots();
        match result {
            Some(built) => slots.insert(self.ordinal, Some(built)),
            None => slots.remove(&self.ordinal),
        };
        drop(slots);
        self.all.built.notify_all();
    }
}

impl<T: fmt::Debug> fmt::Debug for PerDevice<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PerDevice")
            .field("slots", &*self.slots())
            .finish_non_exhaustive()
    }
}
