//! The failure callback adaptor.

use std::fmt;

use crate::allocator::Request;
use crate::driver::Stream;

use super::block::RawBlock;
use super::traits::MemoryResource;
use crate::error::{Error, Refused};

/// Asks a callback each time that memory runs out: it gets the bytes asked for and the error, and says whether to
/// try again. It may free through the same stack. Other errors are passed on without asking.
///
/// ```
/// # use cualloc::Request;
/// use cualloc::resource::{Budget, FailureCallback, MemoryResource};
/// # use cualloc::{sim::{SimConfig, Simulator}, Allocator, Config};
/// # let sim = Simulator::new(SimConfig::with_devices(1, 1 << 30))?;
/// # let driver = sim.driver()?;
/// # let context = driver.context(0)?;
/// # let allocator = Allocator::with_config(&context, Config::new())?;
/// # let stream = allocator.create_stream()?;
/// let asked = std::sync::atomic::AtomicU32::new(0);
/// let resource = FailureCallback::new(Budget::new(allocator, Some(100)), |_bytes, _error| {
///     asked.fetch_add(1, std::sync::atomic::Ordering::Relaxed) < 2
/// });
/// assert!(resource.allocate_block(&Request::new(101).tag("big"), &stream).is_err());
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
    F: Fn(u64, &Error) -> bool + Send + Sync,
{
    /// Over another resource.
    pub fn new(inner: R, callback: F) -> Self {
        FailureCallback { inner, callback }
    }

    /// The resource below.
    pub fn get_ref(&self) -> &R {
        &self.inner
    }

    /// Gives up the adaptor.
    pub fn into_inner(self) -> R {
        self.inner
    }
}

// SAFETY: passes everything on.
unsafe impl<R, F> MemoryResource for FailureCallback<R, F>
where
    R: MemoryResource,
    F: Fn(u64, &Error) -> bool + Send + Sync,
{
    fn allocate_block(&self, request: &Request, stream: &Stream) -> Result<RawBlock, Error> {
        loop {
            match self.inner.allocate_block(request, stream) {
                Err(error)
                    if error.is_out_of_memory()
                        && (self.callback)(request.bytes() as u64, &error) => {}
                other => return other,
            }
        }
    }

    #[inline]
    fn deallocate_block(&self, block: RawBlock) -> Result<(), Refused<RawBlock>> {
        self.inner.deallocate_block(block)
    }

    fn ordinal(&self) -> usize {
        self.inner.ordinal()
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
