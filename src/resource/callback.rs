//! The failure callback adaptor.

use std::fmt;

use crate::driver::{Context, Stream};

use super::block::{ResourceBlock, Tag};
use super::traits::MemoryResource;
use crate::error::{Error, Refused};

/// Asks a callback when memory runs out: it gets the bytes asked for, the error, and how often this
/// request has failed (1 at first), and says whether to try again. It may free through the same
/// stack. Other errors are passed on without asking.
///
/// ```
/// use cualloc::resource::{Budget, FailureCallback, MemoryResource};
/// # use cualloc::{driver::Context, sim::{SimConfig, Simulator}, Allocator, Config};
/// # let sim = Simulator::new(SimConfig::with_devices(1, 1 << 30))?;
/// # let driver = sim.driver()?;
/// # let context = driver.context(0)?;
/// # let allocator = Allocator::with_config(&context, Config::new())?;
/// # let stream = allocator.create_stream()?;
/// let asked = std::sync::atomic::AtomicU32::new(0);
/// let resource = FailureCallback::new(Budget::new(allocator, Some(100)), |_bytes, _error, times| {
///     asked.store(times, std::sync::atomic::Ordering::Relaxed);
///     times < 3
/// });
/// assert!(resource.allocate_block(101, &stream, "big".into()).is_err());
/// assert_eq!(asked.load(std::sync::atomic::Ordering::Relaxed), 3);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct FailureCallback<R, F> {
    inner: R,
    callback: F,
}

impl<R, F> FailureCallback<R, F>
where
    R: MemoryResource,
    F: Fn(usize, &Error, u32) -> bool + Send + Sync,
{
    /// Over another resource.
    pub fn new(inner: R, callback: F) -> Self {
        FailureCallback { inner, callback }
    }

    /// The resource below.
    pub fn inner(&self) -> &R {
        &self.inner
    }
}

// SAFETY: passes everything on.
unsafe impl<R, F> MemoryResource for FailureCallback<R, F>
where
    R: MemoryResource,
    F: Fn(usize, &Error, u32) -> bool + Send + Sync,
{
    fn allocate_block_aligned(
        &self,
        bytes: usize,
        alignment: usize,
        stream: &Stream,
        tag: Tag,
    ) -> Result<ResourceBlock, Error> {
        let mut times = 0;
        loop {
            match self
                .inner
                .allocate_block_aligned(bytes, alignment, stream, tag)
            {
                Err(error) if error.is_out_of_memory() => {
                    times += 1;
                    if !(self.callback)(bytes, &error, times) {
                        return Err(error);
                    }
                }
                other => return other,
            }
        }
    }

    #[inline]
    fn deallocate_block(&self, block: ResourceBlock) -> Result<(), Refused<ResourceBlock>> {
        self.inner.deallocate_block(block)
    }

    fn context(&self) -> &Context {
        self.inner.context()
    }

    #[inline]
    fn upstream(&self) -> Option<&dyn MemoryResource> {
        Some(&self.inner)
    }
}

impl<R: fmt::Debug, F> fmt::Debug for FailureCallback<R, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FailureCallback")
            .field("inner", &self.inner)
            .finish_non_exhaustive()
    }
}
