//! What all pools have in common.

use std::fmt;

use crate::allocator::{self, Allocator, Block};
use crate::driver::{Context, Stream, sys};

use super::error::{PoolError, PoolFreeError};
use super::native::NativeBlock;
use super::workspace::Lease;

/// A quantity now, and the most it was. Bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Gauge {
    /// Now.
    pub current: u64,
    /// The most since the start or the last reset.
    pub peak: u64,
}

/// What a pool holds and hands out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PoolUsage {
    /// Bytes held from the driver.
    pub reserved: Gauge,
    /// Bytes in live blocks, as the pool rounds them.
    pub used: Gauge,
}

impl PoolUsage {
    /// Bytes held and not in live blocks.
    pub fn unused(&self) -> u64 {
        self.reserved.current.saturating_sub(self.used.current)
    }
}

/// A source of device memory in stream order: ours or the driver's, so that a program can swap one
/// for the other and compare.
///
/// ```
/// # #[cfg(feature = "sim")] {
/// # use cualloc::sim::{SimConfig, Simulator};
/// # use cualloc::driver::{Context, Stream};
/// use cualloc::pool::{DevicePool, NativeConfig, NativePool, PoolError};
///
/// fn work(pool: &dyn DevicePool, stream: &Stream) -> Result<u64, PoolError> {
///     let block = pool.allocate(1 << 20, stream)?;
///     block.free()?;
///     Ok(pool.usage()?.used.peak)
/// }
///
/// # let sim = Simulator::new(SimConfig::default())?;
/// # let driver = sim.driver()?;
/// # let context = Context::primary(&driver, driver.device(0)?)?;
/// let ours = cualloc::Allocator::with_config(&context, cualloc::Config::new())?;
/// let native = NativePool::with_context(&context, NativeConfig::default())?;
/// let stream = Stream::new(&context)?;
/// assert_eq!(work(&ours, &stream)?, work(&native, &stream)?);
/// # }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait DevicePool: Send + Sync {
    /// The context that the memory belongs to.
    ///
    /// # Errors
    /// A driver or device that is not there, where the pool has not needed it before.
    fn context(&self) -> Result<Context, PoolError>;

    /// Allocates `bytes` (at least 1) for use on a stream.
    ///
    /// # Errors
    /// [`PoolError::InvalidSize`]; want of memory; a stream that is capturing or of another device;
    /// driver errors.
    fn allocate(&self, bytes: usize, stream: &Stream) -> Result<PoolBlock, PoolError>;

    /// Gives unused memory back to the driver until at most `keep` bytes of it are held; returns how
    /// many bytes went. What is in use, also by work in flight, stays. Does not wait.
    ///
    /// # Errors
    /// Driver errors: what could not be given back stays in the books.
    fn trim(&self, keep: u64) -> Result<u64, PoolError>;

    /// What the pool holds and hands out.
    ///
    /// # Errors
    /// Driver errors.
    fn usage(&self) -> Result<PoolUsage, PoolError>;

    /// Sets all peaks to the current values.
    ///
    /// # Errors
    /// Driver errors.
    fn reset_peaks(&self) -> Result<(), PoolError>;
}

pub(super) fn zero_is_invalid(error: allocator::Error) -> PoolError {
    match error {
        allocator::Error::InvalidSize { requested } => PoolError::InvalidSize { requested },
        other => other.into(),
    }
}

impl DevicePool for Allocator {
    fn context(&self) -> Result<Context, PoolError> {
        Ok(Allocator::context(self).clone())
    }

    fn allocate(&self, bytes: usize, stream: &Stream) -> Result<PoolBlock, PoolError> {
        let block = Allocator::allocate(self, bytes, stream).map_err(zero_is_invalid)?;
        Ok(PoolBlock(Owner::Ours(block)))
    }

    fn trim(&self, keep: u64) -> Result<u64, PoolError> {
        Ok(self.trim_cached(keep)?.released)
    }

    fn usage(&self) -> Result<PoolUsage, PoolError> {
        let all = self.stats().all;
        let gauge = |counter: allocator::Counter| Gauge {
            current: counter.current,
            peak: counter.peak,
        };
        Ok(PoolUsage {
            reserved: gauge(all.reserved),
            used: gauge(all.allocated),
        })
    }

    fn reset_peaks(&self) -> Result<(), PoolError> {
        Allocator::reset_peaks(self);
        Ok(())
    }
}

/// A block of any pool, with one owner. Dropping it gives the memory back in the order of its stream:
/// work queued before the drop may still use it. `Send` and `Sync`.
pub struct PoolBlock(pub(super) Owner);

pub(super) enum Owner {
    Ours(Block),
    Lease(Lease),
    Native(NativeBlock),
}

impl PoolBlock {
    /// The first byte's address.
    pub fn ptr(&self) -> sys::CUdeviceptr {
        match &self.0 {
            Owner::Ours(block) => block.ptr(),
            Owner::Lease(lease) => lease.ptr(),
            Owner::Native(block) => block.ptr(),
        }
    }

    /// Usable bytes.
    pub fn size(&self) -> u64 {
        match &self.0 {
            Owner::Ours(block) => block.size(),
            Owner::Lease(lease) => lease.size(),
            Owner::Native(block) => block.requested() as u64,
        }
    }

    /// Bytes as they were asked for.
    pub fn requested(&self) -> usize {
        match &self.0 {
            Owner::Ours(block) => block.requested(),
            Owner::Lease(lease) => lease.requested(),
            Owner::Native(block) => block.requested(),
        }
    }

    /// Says that another stream uses the block: after the free it is reused only when everything
    /// which that stream was given until the free has completed, or behind it.
    ///
    /// # Errors
    /// A stream that is capturing, and driver errors.
    pub fn record_stream(&self, stream: &Stream) -> Result<(), PoolError> {
        match &self.0 {
            Owner::Ours(block) => Ok(block.record_stream(stream)?),
            Owner::Lease(lease) => lease.record_stream(stream),
            Owner::Native(block) => block.record(stream, false),
        }
    }

    /// Says that another stream used the block and will not again: reuse waits only for what that
    /// stream was given so far.
    ///
    /// # Errors
    /// As [`record_stream`](Self::record_stream).
    pub fn record_use(&self, stream: &Stream) -> Result<(), PoolError> {
        match &self.0 {
            Owner::Ours(block) => Ok(block.record_use(stream)?),
            Owner::Lease(lease) => lease.record_use(stream),
            Owner::Native(block) => block.record(stream, true),
        }
    }

    /// Frees the block; unlike a drop it reports failures, and gives the block back with them.
    ///
    /// # Errors
    /// As [`Block::free`].
    pub fn free(self) -> Result<(), Box<PoolFreeError>> {
        let (owner, error) = match self.0 {
            Owner::Ours(block) => match block.free() {
                Ok(()) => return Ok(()),
                Err(failed) => (Owner::Ours(failed.block), failed.error.into()),
            },
            Owner::Lease(lease) => {
                drop(lease);
                return Ok(());
            }
            Owner::Native(mut block) => match block.free() {
                Ok(()) => return Ok(()),
                Err(error) => (Owner::Native(block), error),
            },
        };
        Err(Box::new(PoolFreeError {
            block: PoolBlock(owner),
            error,
        }))
    }
}

impl From<Box<PoolFreeError>> for PoolError {
    /// Drops the block, which tries once more.
    fn from(failed: Box<PoolFreeError>) -> PoolError {
        failed.error
    }
}

impl fmt::Debug for PoolBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolBlock")
            .field("ptr", &format_args!("{:#x}", self.ptr()))
            .field("size", &self.size())
            .finish_non_exhaustive()
    }
}
