//! A pool with a release threshold.

use std::mem::MaybeUninit;
use std::sync::{Arc, OnceLock};

use crate::allocator::{Allocator, Config, Request};
use crate::buffer::{DeviceBuffer, DeviceCopy};
use crate::driver::{Context, Driver, Stream};
use crate::error::{Error, InvalidArgument, Refused};
use crate::resource::{MemoryResource, RawBlock, UseTracking, check_request, device_of, forward};

use super::surplus::Surplus;

/// Device memory of one device in stream order, of which unused bytes above a threshold go back to the driver.
///
/// A view on an [`Allocator`], which accounts for all memory, and is made when memory is first needed. A
/// [`MemoryResource`]: [`DeviceBuffer`]s are made from it as from an allocator. Clones are handles to the same
/// pool; all methods may be called from any thread.
///
/// The threshold, by default none, applies whenever memory is freed: the memory that has been idle longest goes first,
/// and memory that work in flight may still use goes at a later call. A free never waits for the device: under the
/// classic policy, which gives segments back only by a call that waits for running work, surplus is left to the next
/// allocation, [`trim`](MemoryResource::trim) or [`set_release_threshold`](Self::set_release_threshold).
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
    /// The driver of the device; `None` stands for the process-wide one.
    driver: Option<Driver>,
    ordinal: usize,
    /// The settings of the allocator; `None` stands for those of the process.
    config: Option<Config>,
    allocator: OnceLock<Allocator>,
    surplus: Surplus,
}

impl ThresholdPool {
    /// A pool for a device of the process-wide driver, with the settings of `CUALLOC_CONFIG`. Driver, device and settings
    /// are needed only when memory is.
    pub fn new(ordinal: usize) -> ThresholdPool {
        Self::make(None, ordinal, None)
    }

    /// A pool for a device of a given driver, with an allocator of its own.
    pub fn on_driver(driver: &Driver, ordinal: usize, config: Config) -> ThresholdPool {
        Self::make(Some(driver.clone()), ordinal, Some(config))
    }

    /// A pool over an allocator, which others may use as well: the figures are those of the allocator.
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

    /// The allocator, made on first use. A failure is not remembered.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`], [`Error::InvalidDevice`], a driver that cannot be had, and those of
    /// [`Allocator::with_config`].
    pub fn allocator(&self) -> Result<&Allocator, Error> {
        self.0.allocator()
    }

    /// Memory for `len` elements that is not initialised, as [`DeviceBuffer::uninit`] gives it, but of at least
    /// one element.
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

    /// The release threshold in bytes; `None`, the default, keeps everything.
    pub fn release_threshold(&self) -> Option<u64> {
        self.0.surplus.threshold()
    }

    /// Sets the release threshold, and gives back what is above it; `Some(0)` keeps nothing.
    ///
    /// # Errors
    /// Those of [`Allocator::trim`]; the threshold is set all the same.
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
        // Two threads may both get here: one of the two allocators, which holds nothing yet, goes.
        let made = Allocator::with_config(&context, config)?;
        Ok(self.allocator.get_or_init(|| made))
    }
}

// SAFETY: the blocks are its allocator's.
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

    /// Nothing before the allocator is made.
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
