//! A stack of resources with its streams, one per device where wanted.

use std::fmt;
use std::sync::{Arc, OnceLock};

use crate::allocator::{Allocator, Config, Limit};
use crate::driver::{Context, Driver};
use crate::error::Error;

use super::ordered::AccessOrdered;
use super::per_device::PerDevice;
use super::sanitizer::{Checks, Sanitizer};
use super::stream_pool::StreamPool;
use super::traits::MemoryResource;

/// Any stack of resources of a device together with a pool of streams. Cheap to clone.
///
/// ```
/// use cualloc::resource::{Budget, DeviceRuntime, MemoryResource, PerDevice, StreamPool};
/// # use cualloc::{driver::Context, sim::{SimConfig, Simulator}, Allocator, Config};
/// # let sim = Simulator::new(SimConfig::with_devices(2, 1 << 30))?;
/// # let driver = sim.driver()?;
/// # let context = driver.context(0)?;
/// # let allocator = Allocator::with_config(&context, Config::new())?;
/// // A stack of one's own ...
/// let mine = DeviceRuntime::new(Budget::new(allocator, Some(1 << 20)), StreamPool::new(&context));
/// // ... or one per device, of the usual stack.
/// let runtimes = PerDevice::new(move |ordinal| DeviceRuntime::on(&driver.context(ordinal)?));
/// assert_eq!(runtimes.get(1)?.resource().ordinal(), 1);
/// assert!(runtimes.get(2).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct DeviceRuntime(Arc<Inner>);

struct Inner {
    resource: Arc<dyn MemoryResource>,
    streams: StreamPool,
}

impl DeviceRuntime {
    /// A runtime of a stack and of streams, both of one device.
    pub fn new(resource: impl MemoryResource + 'static, streams: StreamPool) -> DeviceRuntime {
        let resource: Arc<dyn MemoryResource> = Arc::new(resource);
        DeviceRuntime(Arc::new(Inner { resource, streams }))
    }

    /// A runtime with the usual stack, [`AccessOrdered`] over a caching allocator, under a [`Sanitizer`] with the
    /// checks that the environment asks for, if any.
    ///
    /// # Errors
    /// As [`Allocator::with_config`].
    pub fn on(context: &Context) -> Result<DeviceRuntime, Error> {
        let allocator = Allocator::with_config(context, Config::new())?;
        let ordered = AccessOrdered::new(allocator);
        let streams = StreamPool::new(context);
        Ok(match Checks::from_env().is_any() {
            true => DeviceRuntime::new(Sanitizer::from_env(ordered), streams),
            false => DeviceRuntime::new(ordered, streams),
        })
    }

    /// The runtimes of the process, each with the usual stack on the primary context of its device. The driver is
    /// loaded on first use; what [`get`](PerDevice::get) tells is [`Error::DriverUnavailable`],
    /// [`Error::InvalidDevice`], or an error of [`on`](Self::on).
    pub fn global() -> &'static PerDevice<DeviceRuntime> {
        static ALL: OnceLock<PerDevice<DeviceRuntime>> = OnceLock::new();
        ALL.get_or_init(|| {
            PerDevice::new(|ordinal| {
                let driver = Driver::load()?;
                let devices = driver.device_count()?;
                if ordinal >= devices {
                    return Err(Error::InvalidDevice { ordinal, devices });
                }
                DeviceRuntime::on(&driver.context(ordinal)?)
            })
        })
    }

    /// The stack.
    pub fn resource(&self) -> &Arc<dyn MemoryResource> {
        &self.0.resource
    }

    /// The streams.
    pub fn streams(&self) -> &StreamPool {
        &self.0.streams
    }

    /// Bytes that a program may plan for each stream, for instance as the limit of a
    /// [`Budget`](super::Budget): 256 MiB, or what the environment variable `CUALLOC_STREAM_BUDGET` says in
    /// bytes; 0 and what is no number is ignored. Nothing in this crate is sized by it, or held in reserve.
    pub fn planned_stream_bytes(&self) -> u64 {
        stream_budget(crate::environment::text(STREAM_BUDGET).as_deref())
    }
}

impl fmt::Debug for DeviceRuntime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceRuntime")
            .field("device", &self.0.resource.ordinal())
            .field("usage", &self.0.resource.usage().ok())
            .field("streams", &self.0.streams.len())
            .finish()
    }
}

/// Name of the environment variable that [`DeviceRuntime::planned_stream_bytes`] reads.
const STREAM_BUDGET: &str = "CUALLOC_STREAM_BUDGET";

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
