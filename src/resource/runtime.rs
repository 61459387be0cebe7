//! A stack of resources with its streams, one per device where wanted.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, OnceLock};

use crate::allocator::{Allocator, Config, Limit};
use crate::driver::{Context, Device, Driver, process};
use crate::locks::held::Locked;

use super::ordered::AsyncResource;
use super::probe::{Probe, ProbeConfig};
use super::stream_pool::StreamPool;
use super::traits::MemoryResource;
use crate::error::Error;

/// Any stack of resources together with a pool of streams. Cheap to clone.
///
/// ```
/// use cualloc::resource::{Budget, MemoryResource, Runtime, Runtimes};
/// # use cualloc::{driver::Context, sim::{SimConfig, Simulator}, Allocator, Config};
/// # let sim = Simulator::new(SimConfig::with_devices(2, 1 << 30))?;
/// # let driver = sim.driver()?;
/// # let context = driver.context(0)?;
/// # let allocator = Allocator::with_config(&context, Config::new())?;
/// // A stack of one's own ...
/// let mine = Runtime::new(Budget::new(allocator, Some(1 << 20)));
/// // ... or one per device, of the usual stack.
/// let runtimes = Runtimes::new(&driver);
/// assert_eq!(runtimes.get(1)?.resource().device(), 1);
/// assert!(runtimes.get(2).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Runtime(Arc<Inner>);

struct Inner {
    resource: Arc<dyn MemoryResource>,
    streams: StreamPool,
}

impl Runtime {
    /// A runtime around a stack.
    pub fn new(resource: impl MemoryResource + 'static) -> Runtime {
        let resource: Arc<dyn MemoryResource> = Arc::new(resource);
        let streams = StreamPool::new(resource.context());
        Runtime(Arc::new(Inner { resource, streams }))
    }

    /// A runtime with the usual stack, an [`AsyncResource`] over a caching allocator, under the [`Probe`]s
    /// that the environment asks for.
    ///
    /// # Errors
    /// As [`Allocator::with_config`].
    pub fn on(context: &Context) -> Result<Runtime, Error> {
        let allocator = Allocator::with_config(context, Config::new())?;
        let ordered = AsyncResource::new(allocator);
        let probes = ProbeConfig::from_env();
        Ok(match probes.is_on() {
            true => Runtime::new(Probe::new(ordered, probes)),
            false => Runtime::new(ordered),
        })
    }

    /// The process-wide runtime of a device, on its primary context. Loads the driver on first use.
    ///
    /// # Errors
    /// [`Error::DriverUnavailable`]; as [`Runtimes::get`].
    pub fn of(ordinal: usize) -> Result<Runtime, Error> {
        static ALL: OnceLock<Runtimes> = OnceLock::new();
        if let Some(all) = ALL.get() {
            return all.get(ordinal);
        }
        // A failed load is not kept.
        let driver = Driver::load()?;
        ALL.get_or_init(|| Runtimes::new(&driver)).get(ordinal)
    }

    /// The stack.
    pub fn resource(&self) -> &Arc<dyn MemoryResource> {
        &self.0.resource
    }

    /// The streams.
    pub fn streams(&self) -> &StreamPool {
        &self.0.streams
    }

    /// The ordinal of the device.
    pub fn device(&self) -> usize {
        self.0.resource.device()
    }

    /// Whether both are the same runtime.
    pub fn is_same(&self, other: &Runtime) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Debug for Runtime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Runtime")
            .field("device", &self.device())
            .field("outstanding", &self.0.resource.outstanding())
            .field("streams", &self.0.streams.len())
            .finish()
    }
}

type Build = dyn Fn(&Context) -> Result<Runtime, Error> + Send + Sync;

/// One runtime per device of a driver: each built when it is first asked for, at most once; a build
/// that failed is tried again by the next call.
pub struct Runtimes {
    driver: Driver,
    build: Box<Build>,
    /// None: under way.
    slots: Mutex<HashMap<usize, Option<Runtime>>>,
    built: Condvar,
}

impl Runtimes {
    /// Runtimes of the usual stack.
    pub fn new(driver: &Driver) -> Runtimes {
        Runtimes::with(driver, Runtime::on)
    }

    /// Runtimes that a function builds.
    pub fn with(
        driver: &Driver,
        build: impl Fn(&Context) -> Result<Runtime, Error> + Send + Sync + 'static,
    ) -> Runtimes {
        Runtimes {
            driver: driver.clone(),
            build: Box::new(build),
            slots: Mutex::default(),
            built: Condvar::new(),
        }
    }

    fn slots(&self) -> Locked<'_, HashMap<usize, Option<Runtime>>> {
        process::lock(&self.slots)
    }

    /// The runtime of a device.
    ///
    /// # Errors
    /// [`Error::InvalidDevice`]; those of the build.
    pub fn get(&self, ordinal: usize) -> Result<Runtime, Error> {
        {
            let mut slots = self.slots();
            loop {
                match slots.get(&ordinal) {
                    Some(Some(runtime)) => return Ok(runtime.clone()),
                    Some(None) => {
                        slots = slots.wait(&self.built);
                    }
                    None => break,
                }
            }
            slots.insert(ordinal, None);
        }
        // Also on a panic, so that nobody waits for ever.
        let mut attempt = Attempt {
            all: self,
            ordinal,
            result: None,
        };
        let runtime = self.make(ordinal)?;
        attempt.result = Some(runtime.clone());
        Ok(runtime)
    }

    fn make(&self, ordinal: usize) -> Result<Runtime, Error> {
        let count = self.driver.device_count()?;
        if ordinal >= count {
            return Err(Error::InvalidDevice {
                ordinal,
                devices: count,
            });
        }
        let device: Device = self.driver.device(ordinal)?;
        (self.build)(&Context::primary(&device)?)
    }
}

struct Attempt<'a> {
    all: &'a Runtimes,
    ordinal: usize,
    result: Option<Runtime>,
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        let mut slots = self.all.slots();
        match self.result.take() {
            Some(runtime) => slots.insert(self.ordinal, Some(runtime)),
            None => slots.remove(&self.ordinal),
        };
        drop(slots);
        self.all.built.notify_all();
    }
}

impl fmt::Debug for Runtimes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Runtimes")
            .field("slots", &*self.slots())
            .finish_non_exhaustive()
    }
}

/// Name of the environment variable that [`planned_stream_budget`] reads.
const STREAM_BUDGET: &str = "CUALLOC_STREAM_BUDGET";

/// Bytes that a program may plan for each stream, for instance as the limit of a
/// [`Budget`](super::Budget): 256 MiB, or what the environment variable `CUALLOC_STREAM_BUDGET` says as
/// [`Limit::Bytes`] is written; 0 and what is no size is ignored. Nothing in this crate is sized by it, or held in reserve.
pub fn planned_stream_budget() -> u64 {
    stream_budget(std::env::var(STREAM_BUDGET).ok().as_deref())
}

fn stream_budget(setting: Option<&str>) -> u64 {
    match setting.map(|text| text.trim().parse()) {
        Some(Ok(Limit::Bytes(bytes))) => bytes,
        _ => 256 << 20,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// S5.36: 256 MiB, another number of bytes, and nothing else.
    #[test]
    fn s5_36_stream_budget_ignores_what_is_no_size() {
        assert_eq!(stream_budget(None), 256 << 20);
        assert_eq!(stream_budget(Some("4096")), 4096);
        assert_eq!(stream_budget(Some("64MiB")), 64 << 20);
        for ignored in ["", "0", "-1", "1.5", "50%", "lots", "99999999999999999999"] {
            assert_eq!(stream_budget(Some(ignored)), 256 << 20, "{ignored}");
        }
    }
}
