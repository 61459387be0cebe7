//! A pool with a release threshold.

use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use crate::allocator::{Allocator, Config, Policy, Request};
use crate::buffer::{DeviceBuffer, DeviceCopy};
use crate::driver::{Context, Driver, Stream};
use crate::error::{Error, InvalidArgument, RareLog, Refused};
use crate::resource::{MemoryResource, RawBlock, UseTracking, check_request, device_of, forward};

/// Device memory in stream order, of which unused bytes above a threshold are released to the driver.
///
/// A [`MemoryResource`] over an [`Allocator`], which is created when memory is first needed. Clones are handles to the
/// same pool; all methods may be called from any thread.
///
/// The threshold, by default none, applies whenever memory is freed: the memory that has been idle longest is released
/// first, and memory that work in flight may still use at a later call. A free never waits for the device; under the
/// classic policy, where releasing a segment waits for running work, the next allocation, [`trim`](MemoryResource::trim)
/// or [`set_release_threshold`](Self::set_release_threshold) releases the surplus.
///
/// ```
/// # use cualloc::sim::{SimConfig, Simulator};
/// use cualloc::{Config, DeviceBuffer, pool::ThresholdPool, resource::MemoryResource};
///
/// # let sim = Simulator::new(SimConfig::default())?;
/// let pool = ThresholdPool::on_driver(&sim.driver()?, 0, Config::new());
/// let stream = pool.allocator()?.create_stream()?;
/// let mut buffer = DeviceBuffer::<f32>::zeroed(&pool, 1000, &stream)?;
/// buffer.fill(1.0, &stream)?;
/// drop(buffer);
/// assert!(pool.usage()?.cached_bytes() >= 4000);
/// pool.set_release_threshold(Some(0))?;
/// stream.synchronize()?;
/// pool.trim(0)?;
/// assert_eq!(pool.usage()?.cached_bytes(), 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct ThresholdPool(Arc<Inner>);

struct Inner {
    /// `None` for the process-wide driver.
    driver: Option<Driver>,
    ordinal: usize,
    /// `None` for the settings of `CUALLOC_CONFIG`.
    config: Option<Config>,
    allocator: OnceLock<Allocator>,
    surplus: Surplus,
}

impl ThresholdPool {
    /// Creates a pool for a device of the process-wide driver, with the settings of `CUALLOC_CONFIG`. Nothing is loaded
    /// or read before memory is needed.
    pub fn new(ordinal: usize) -> ThresholdPool {
        Self::make(None, ordinal, None)
    }

    /// Creates a pool for a device of a given driver, with its own allocator.
    pub fn on_driver(driver: &Driver, ordinal: usize, config: Config) -> ThresholdPool {
        Self::make(Some(driver.clone()), ordinal, Some(config))
    }

    /// Creates a pool over an allocator, which others may use as well.
    pub fn over(allocator: &Allocator) -> ThresholdPool {
        let pool = Self::make(None, allocator.ordinal(), None);
        pool.0.allocator.get_or_init(|| allocator.clone());
        pool
    }

    fn make(driver: Option<Driver>, ordinal: usize, config: Option<Config>) -> ThresholdPool {
        ThresholdPool(Arc::new(Inner {
            driver,
            ordinal,
            config,
            allocator: OnceLock::new(),
            surplus: Surplus::default(),
        }))
    }

    /// Returns the allocator, created on first use. A failure is not cached.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`], [`Error::InvalidDevice`], [`Error::DriverUnavailable`], and those of
    /// [`Allocator::with_config`].
    pub fn allocator(&self) -> Result<&Allocator, Error> {
        self.0.allocator()
    }

    /// Like [`DeviceBuffer::uninit`], but for at least one element.
    ///
    /// # Errors
    /// [`InvalidArgument::Size`], [`InvalidArgument::TooLarge`], and those of [`Allocator::allocate`].
    pub fn uninit<T: DeviceCopy>(
        &self,
        len: usize,
        stream: &Stream,
    ) -> Result<DeviceBuffer<MaybeUninit<T>>, Error> {
        if len == 0 {
            return Err(InvalidArgument::Size { bytes: 0 }.into());
        }
        DeviceBuffer::<T>::uninit(self, len, stream)
    }

    /// Returns the release threshold in bytes; `None`, the default, keeps everything.
    pub fn release_threshold(&self) -> Option<u64> {
        self.0.surplus.threshold()
    }

    /// Sets the release threshold, and releases the memory above it; `Some(0)` keeps nothing.
    ///
    /// # Errors
    /// Those of [`Allocator::trim`]; the threshold is set in any case.
    pub fn set_release_threshold(&self, cached: Option<u64>) -> Result<(), Error> {
        self.0.surplus.set(cached, self.0.allocator.get())
    }
}

impl Inner {
    fn allocator(&self) -> Result<&Allocator, Error> {
        if let Some(allocator) = self.allocator.get() {
            return Ok(allocator);
        }
        let config = match &self.config {
            Some(config) => config.clone(),
            None => Config::from_env()?,
        };
        let driver = match &self.driver {
            Some(driver) => driver.clone(),
            None => Driver::load()?,
        };
        let context = Context::primary(&device_of(&driver, self.ordinal)?)?;
        // If two threads get here, one of the allocators is dropped.
        let made = Allocator::with_config(&context, config)?;
        Ok(self.allocator.get_or_init(|| made))
    }
}

// SAFETY: all blocks come from the pool's allocator, which fulfils the contract.
unsafe impl MemoryResource for Inner {
    fn allocate_block(&self, request: &Request, on: &Stream) -> Result<RawBlock, Error> {
        // Before there is an allocator.
        check_request(request, usize::MAX)?;
        let allocator = self.allocator()?;
        self.surplus.release(allocator, true);
        allocator.allocate_block(request, on)
    }

    fn deallocate_block(&self, block: RawBlock) -> Result<(), Refused<RawBlock>> {
        let Some(allocator) = self.allocator.get() else {
            let gone = block.id().gone();
            return Err(Refused::new(block, gone));
        };
        allocator.deallocate_block(block)?;
        self.surplus.release(allocator, false);
        Ok(())
    }

    fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// `None` before the allocator is created.
    fn upstream(&self) -> Option<&dyn MemoryResource> {
        let allocator: &dyn MemoryResource = self.allocator.get()?;
        Some(allocator)
    }

    fn use_tracking(&self) -> UseTracking {
        UseTracking::Reuse
    }
}

forward! {
    [] ThresholdPool, self => (*self.0), Arc::<Inner>::clone(&self.0);
}

debug_fields!(ThresholdPool, self => ordinal: self.0.ordinal, usage: self.usage());

/// The maximum number of unused bytes, `u64::MAX` for no maximum. A pool applies it at each allocation and free.
pub(super) struct Surplus {
    threshold: AtomicU64,
    log: RareLog,
}

impl Default for Surplus {
    fn default() -> Self {
        Surplus {
            threshold: AtomicU64::new(u64::MAX),
            log: RareLog::default(),
        }
    }
}

impl Surplus {
    pub fn threshold(&self) -> Option<u64> {
        Some(self.threshold.load(Ordering::Relaxed)).filter(|bytes| *bytes != u64::MAX)
    }

    /// Sets the threshold, and releases the memory above it.
    pub fn set(&self, bytes: Option<u64>, allocator: Option<&Allocator>) -> Result<(), Error> {
        let bytes = bytes.unwrap_or(u64::MAX);
        self.threshold.store(bytes, Ordering::Relaxed);
        allocator.map_or(Ok(()), |allocator| allocator.trim(bytes).map(drop))
    }

    /// Releases the memory above the threshold, unless that would wait for running work and `may_wait` is false.
    #[inline]
    pub fn release(&self, allocator: &Allocator, may_wait: bool) {
        if let Some(threshold) = self.threshold() {
            self.release_above(threshold, allocator, may_wait);
        }
    }

    #[cold]
    fn release_above(&self, threshold: u64, allocator: &Allocator, may_wait: bool) {
        if allocator.cached() <= threshold || !may_wait && allocator.policy() == Policy::Classic {
            return;
        }
        if let Err(error) = allocator.trim(threshold)
            && let Some(count) = self.log.due()
        {
            log::warn!("cannot release surplus memory (occurrence {count}): {error}");
        }
    }
}
