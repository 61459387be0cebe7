//! A pool with a release threshold.

use std::fmt;
use std::mem::MaybeUninit;
use std::sync::Arc;

use crate::allocator::{Allocator, Config, Trimmed};
use crate::buffer::{DeviceBuffer, DeviceCopy};
use crate::driver::{Driver, Stream};

use super::buffer::{Home, PooledBuffer};
use super::device::DevicePool;
use super::part::Part;
use crate::error::{Error, InvalidArgument};

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
    /// The release threshold in bytes; `None` keeps everything.
    pub threshold: Option<u64>,
}

/// Device memory of one device in stream order, of which unused bytes above a threshold go back to the
/// driver.
///
/// A view on an [`Allocator`], which accounts for all memory. Clones are handles to the same pool; all methods
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
/// let pool = ThresholdPool::on_driver(&driver, 0, Config::new());
/// let stream = pool.allocator()?.create_stream()?;
/// let mut buffer = pool.zeroed::<f32>(1000, &stream)?;
/// buffer.as_mut_slice().fill(1.0, &stream)?;
/// drop(buffer);
/// assert!(pool.stats().cached >= 4000);
/// pool.set_release_threshold(Some(0))?;
/// stream.synchronize()?;
/// pool.trim(0)?;
/// assert_eq!(pool.stats().cached, 0);
/// # }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct ThresholdPool(Arc<Part>);

impl ThresholdPool {
    /// A pool for a device of the process-wide driver, with the settings of `CUALLOC_CONFIG`. Neither
    /// the driver nor the device is needed before memory is.
    ///
    /// # Errors
    /// Invalid settings.
    pub fn new(ordinal: usize) -> Result<ThresholdPool, Error> {
        let config = Config::from_env().map_err(Error::from)?;
        Ok(ThresholdPool(Arc::new(Part::new(None, ordinal, config))))
    }

    /// A pool for a device of a given driver, with an allocator of its own.
    pub fn on_driver(driver: &Driver, ordinal: usize, config: Config) -> ThresholdPool {
        let part = Part::new(Some(driver.clone()), ordinal, config);
        ThresholdPool(Arc::new(part))
    }

    /// A pool over an allocator, which others may use as well: the figures are those of the allocator.
    pub fn over(allocator: &Allocator) -> ThresholdPool {
        ThresholdPool(Arc::new(Part::over(allocator)))
    }

    /// The device's ordinal. Needs no driver.
    pub fn ordinal(&self) -> usize {
        self.0.ordinal
    }

    /// The allocator, made on first use. A failure is not remembered.
    ///
    /// # Errors
    /// [`Error::InvalidDevice`], and those of [`Allocator::with_config`].
    pub fn allocator(&self) -> Result<&Allocator, Error> {
        self.0.allocator()
    }

    /// The pool as a source of memory without a type; its allocator is made if there is none yet.
    ///
    /// # Errors
    /// As [`allocator`](Self::allocator).
    pub fn open(&self) -> Result<DevicePool, Error> {
        DevicePool::new(&self.0)
    }

    /// Memory for `len` elements (at least 1) that is not initialised.
    ///
    /// # Errors
    /// [`InvalidArgument::Size`], [`InvalidArgument::TooLarge`], and those of [`Allocator::allocate`].
    pub fn uninit<T: DeviceCopy>(
        &self,
        len: usize,
        stream: &Stream,
    ) -> Result<PooledBuffer<MaybeUninit<T>>, Error> {
        if len == 0 {
            return Err(Error::Invalid(InvalidArgument::Size { bytes: 0 }));
        }
        let allocator = self.0.allocator()?;
        self.0.release(true);
        let buffer = DeviceBuffer::<T>::uninit(allocator, len, stream)?;
        let home = Home {
            part: Arc::clone(&self.0),
            entry: None,
        };
        Ok(PooledBuffer::new(buffer, home))
    }

    /// Elements whose bytes are all zero, in the order of the stream.
    ///
    /// # Errors
    /// As [`uninit`](Self::uninit), and driver errors.
    pub fn zeroed<T: DeviceCopy>(
        &self,
        len: usize,
        stream: &Stream,
    ) -> Result<PooledBuffer<T>, Error> {
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

    /// The release threshold in bytes; `None`, the default, keeps everything.
    pub fn release_threshold(&self) -> Option<u64> {
        self.0.threshold()
    }

    /// Sets the release threshold, and gives back at once what is above it; `Some(0)` keeps nothing.
    ///
    /// # Errors
    /// As [`trim`](Self::trim); the threshold is set all the same.
    pub fn set_release_threshold(&self, bytes: Option<u64>) -> Result<(), Error> {
        self.0.set_threshold(bytes)
    }

    /// Gives unused memory back to the driver until at most `keep` bytes of it are held, idle longest
    /// first. Does not wait for work in flight, whose memory stays; nor can a handle go in which a live
    /// block lies.
    ///
    /// # Errors
    /// As [`Allocator::trim`].
    pub fn trim(&self, keep: u64) -> Result<Trimmed, Error> {
        self.0.trim(keep)
    }
}

impl fmt::Debug for ThresholdPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ThresholdPool")
            .field("ordinal", &self.ordinal())
            .field("stats", &self.stats())
            .finish()
    }
}
