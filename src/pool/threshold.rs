//! A pool with a release threshold.

use std::fmt;
use std::mem::MaybeUninit;
use std::sync::Arc;

use crate::allocator::{Allocator, Config, Trimmed, size};
use crate::buffer::{DeviceBuffer, DeviceCopy};
use crate::driver::{Driver, Stream};
use crate::resource::{
    DeallocateError, MemoryResource, ResourceBlock, ResourceError, Tag, forward, forward_uses,
};

use super::buffer::{Pool, PooledBuffer};
use super::error::PoolError;
use super::surplus::Surplus;

/// Figures of a [`ThresholdPool`]: those of its allocator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ThresholdStats {
    /// Bytes in live blocks, as the allocator rounds them.
    pub allocated: u64,
    /// The most of them since the start or the last reset.
    pub peak: u64,
    /// Allocations since the start.
    pub allocations: u64,
    /// Frees since the start.
    pub frees: u64,
    /// Bytes held from the driver.
    pub reserved: u64,
    /// Bytes held and not in live blocks.
    pub cached: u64,
    /// The release threshold in bytes.
    pub threshold: u64,
}

/// Device memory of one device in stream order, of which unused bytes above a threshold go back to the
/// driver.
///
/// A view on an [`Allocator`], which keeps all books. Clones are handles to the same pool; all methods
/// may be called from any thread.
///
/// The threshold, by default none, is honoured whenever memory is freed, by what has been idle
/// longest; what work in flight may still use goes at a later call. A free never waits for the device:
/// under the classic policy, whose segments can only be given back by a call that waits for running
/// work, surplus is left to the next allocation, [`trim`](Self::trim) or
/// [`set_release_threshold`](Self::set_release_threshold).
///
/// ```
/// # #[cfg(feature = "sim")] {
/// # use cualloc::sim::{SimConfig, Simulator};
/// use cualloc::{Config, pool::ThresholdPool};
///
/// # let sim = Simulator::new(SimConfig::default())?;
/// # let driver = sim.driver()?;
/// let pool = ThresholdPool::on_driver(&driver, 0, Config::new())?;
/// let stream = pool.allocator()?.create_stream()?;
/// let mut buffer = pool.zeroed::<f32>(1000, &stream)?;
/// buffer.as_mut_slice().fill(1.0, &stream)?;
/// drop(buffer);
/// assert!(pool.stats().cached >= 4000);
/// pool.set_release_threshold(0)?;
/// stream.synchronize()?;
/// pool.trim(0)?;
/// assert_eq!(pool.stats().cached, 0);
/// # }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct ThresholdPool(Arc<Surplus>);

impl ThresholdPool {
    /// A pool for a device of the process-wide driver, with the settings of `CUALLOC_CONFIG`. Neither
    /// is needed before memory is.
    ///
    /// # Errors
    /// [`PoolError::InvalidDevice`] for a negative ordinal; invalid settings.
    pub fn new(ordinal: i64) -> Result<ThresholdPool, PoolError> {
        let config = Config::from_env().map_err(crate::allocator::Error::from)?;
        Self::make(None, ordinal, config)
    }

    /// A pool for a device of a given driver, with an allocator of its own.
    ///
    /// # Errors
    /// [`PoolError::InvalidDevice`] for a negative ordinal.
    pub fn on_driver(
        driver: &Driver,
        ordinal: i64,
        config: Config,
    ) -> Result<ThresholdPool, PoolError> {
        Self::make(Some(driver.clone()), ordinal, config)
    }

    /// A pool over an allocator, which others may use as well: the figures are those of the allocator.
    pub fn over(allocator: &Allocator) -> ThresholdPool {
        ThresholdPool(Arc::new(Surplus::over(allocator)))
    }

    fn make(
        driver: Option<Driver>,
        ordinal: i64,
        config: Config,
    ) -> Result<ThresholdPool, PoolError> {
        let surplus = Surplus::new(driver, ordinal, config)?;
        Ok(ThresholdPool(Arc::new(surplus)))
    }

    /// The allocator, made on first use. A failure is not remembered.
    ///
    /// # Errors
    /// [`PoolError::InvalidDevice`], and those of [`Allocator::with_config`].
    pub fn allocator(&self) -> Result<&Allocator, PoolError> {
        self.0.allocator()
    }

    /// The pool as a source of memory without a type; its allocator is made if there is none yet.
    ///
    /// # Errors
    /// As [`allocator`](Self::allocator).
    pub fn open(&self) -> Result<OpenThresholdPool, PoolError> {
        Ok(OpenThresholdPool {
            allocator: self.0.allocator()?.clone(),
            pool: self.clone(),
        })
    }

    /// Memory for `len` elements (at least 1) that is not initialised.
    ///
    /// # Errors
    /// [`PoolError::InvalidSize`], [`PoolError::TooLarge`], and those of [`Allocator::allocate`].
    pub fn uninit<T: DeviceCopy>(
        &self,
        len: usize,
        stream: &Stream,
    ) -> Result<PooledBuffer<MaybeUninit<T>>, PoolError> {
        if len == 0 {
            return Err(PoolError::InvalidSize { requested: 0 });
        }
        let allocator = self.0.allocator()?;
        self.0.release(true);
        let buffer = DeviceBuffer::<T>::uninit(allocator, len, stream).map_err(too_large)?;
        Ok(PooledBuffer::new(
            buffer,
            Pool::Threshold(Arc::clone(&self.0)),
        ))
    }

    /// Elements whose bytes are all zero, in the order of the stream.
    ///
    /// # Errors
    /// As [`uninit`](Self::uninit), and driver errors.
    pub fn zeroed<T: DeviceCopy>(
        &self,
        len: usize,
        stream: &Stream,
    ) -> Result<PooledBuffer<T>, PoolError> {
        self.uninit::<T>(len, stream)?.zeroed(stream)
    }

    /// The figures. All 0 while no memory was needed yet.
    pub fn stats(&self) -> ThresholdStats {
        let threshold = self.release_threshold();
        let Some(allocator) = self.0.made() else {
            return ThresholdStats {
                threshold,
                ..ThresholdStats::default()
            };
        };
        let stats = allocator.stats();
        ThresholdStats {
            allocated: stats.all.allocated.current,
            peak: stats.all.allocated.peak,
            allocations: stats.all.allocations.total_allocated,
            frees: stats.all.allocations.total_freed,
            reserved: stats.all.reserved.current,
            cached: stats.cached(),
            threshold,
        }
    }

    /// The release threshold in bytes; `u64::MAX`, the default, keeps everything.
    pub fn release_threshold(&self) -> u64 {
        self.0.threshold()
    }

    /// Sets the release threshold, and gives back at once what is above it.
    ///
    /// # Errors
    /// As [`trim`](Self::trim); the threshold is set all the same.
    pub fn set_release_threshold(&self, bytes: u64) -> Result<(), PoolError> {
        self.0.set_threshold(bytes)
    }

    /// Gives unused memory back to the driver until at most `keep` bytes of it are held, idle longest
    /// first. Does not wait for work in flight, whose memory stays; nor can a handle go in which a live
    /// block lies.
    ///
    /// # Errors
    /// As [`Allocator::trim`].
    pub fn trim(&self, keep: u64) -> Result<Trimmed, PoolError> {
        self.0.trim(keep)
    }

    /// A relief hook for another allocator or program part that runs out of memory: gives up to all
    /// unused memory of this pool back to the driver.
    pub fn relief(&self) -> impl Fn(u64) -> u64 + Send + Sync + use<> {
        self.0.relief()
    }
}

pub(super) fn too_large(error: crate::buffer::BufferError) -> PoolError {
    match error {
        crate::buffer::BufferError::TooLarge { len, element_bytes } => {
            PoolError::TooLarge { len, element_bytes }
        }
        other => other.into(),
    }
}

impl fmt::Debug for ThresholdPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ThresholdPool")
            .field("device", &self.0.ordinal())
            .field("stats", &self.stats())
            .finish()
    }
}

/// A [`ThresholdPool`] that has its allocator, as a
/// [`MemoryResource`]. The threshold is honoured as with buffers.
/// Shares memory and figures with the pool; cheap to clone.
#[derive(Debug, Clone)]
pub struct OpenThresholdPool {
    pool: ThresholdPool,
    allocator: Allocator,
}

impl OpenThresholdPool {
    /// The pool.
    pub fn pool(&self) -> &ThresholdPool {
        &self.pool
    }

    /// The allocator under the pool.
    pub fn allocator(&self) -> &Allocator {
        &self.allocator
    }

    /// Gives back what is above the threshold; `may_wait`: also by calls that wait for running work.
    pub(crate) fn release_surplus(&self, may_wait: bool) {
        self.pool.0.release(may_wait);
    }
}

/// Surplus over the threshold goes when memory is given back, and under the classic policy at the next
/// allocation.
// SAFETY: the blocks are its allocator's.
unsafe impl MemoryResource for OpenThresholdPool {
    fn allocate_aligned(
        &self,
        bytes: usize,
        alignment: usize,
        stream: &Stream,
        tag: Tag,
    ) -> Result<ResourceBlock, ResourceError> {
        if bytes == 0 || size::round_size(bytes).is_none() {
            let requested = bytes as u64;
            return Err(ResourceError::InvalidSize { requested });
        }
        self.release_surplus(true);
        MemoryResource::allocate_aligned(self.allocator(), bytes, alignment, stream, tag)
    }

    fn deallocate(&self, block: ResourceBlock) -> Result<(), DeallocateError> {
        self.allocator().deallocate(block)?;
        self.release_surplus(false);
        Ok(())
    }

    fn reap(&self) -> Result<u64, ResourceError> {
        self.allocator().reap()
    }

    forward!(allocator());
    forward_uses!(allocator());
}
