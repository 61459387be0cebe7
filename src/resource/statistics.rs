//! The statistics adaptor.

use crate::allocator::{Counter, Request};
use crate::driver::{Stream, process};
use crate::error::{Error, Refused};
use crate::locks::held::{Locked, Mutex};

use super::block::RawBlock;
use super::traits::MemoryResource;
use super::usage::Usage;

/// Counts requests, failures, live blocks and their bytes that go through it.
///
/// ```
/// # use cualloc::Request;
/// use cualloc::resource::{MemoryResource, Statistics};
/// # use cualloc::{sim::{SimConfig, Simulator}, Allocator, Config};
/// # let sim = Simulator::new(SimConfig::with_devices(1, 1 << 30))?;
/// # let driver = sim.driver()?;
/// # let context = driver.context(0)?;
/// # let allocator = Allocator::with_config(&context, Config::new())?;
/// # let stream = allocator.create_stream()?;
/// let counted = Statistics::new(allocator);
/// let block = counted.allocate_block(&Request::new(1000).tag("x"), &stream)?;
/// counted.deallocate_block(block)?;
/// let usage = counted.usage()?;
/// assert_eq!((usage.requested.current, usage.requested.peak, usage.requests), (0, 1000, 1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Statistics<R> {
    inner: R,
    /// Only the fields that the adaptor counts.
    counts: Mutex<Usage>,
}

impl<R: MemoryResource> Statistics<R> {
    /// Over another resource.
    pub fn new(inner: R) -> Self {
        Statistics {
            inner,
            counts: Mutex::default(),
        }
    }

    /// The resource below.
    pub fn get_ref(&self) -> &R {
        &self.inner
    }

    /// Removes the adaptor.
    pub fn into_inner(self) -> R {
        self.inner
    }

    fn counts(&self) -> Locked<'_, Usage> {
        process::lock(&self.counts)
    }
}

/// Sets the sums of a counter to 0.
fn begin_again(counter: &mut Counter) {
    (counter.total_allocated, counter.total_freed) = (0, 0);
}

// SAFETY: passes everything on.
unsafe impl<R: MemoryResource> MemoryResource for Statistics<R> {
    fn allocate_block(&self, request: &Request, stream: &Stream) -> Result<RawBlock, Error> {
        let result = self.inner.allocate_block(request, stream);
        let mut counts = self.counts();
        counts.requests += 1;
        if result.is_ok() {
            counts.requested.add(request.bytes() as u64);
            counts.blocks.add(1);
        } else {
            counts.failures += 1;
        }
        drop(counts);
        result
    }

    fn deallocate_block(&self, block: RawBlock) -> Result<(), Refused<RawBlock>> {
        let bytes = block.id().bytes() as u64;
        self.inner.deallocate_block(block)?;
        let mut counts = self.counts();
        // A block that was allocated elsewhere must not make the counters wrap.
        if counts.blocks.current > 0 && counts.requested.current >= bytes {
            counts.requested.sub(bytes);
            counts.blocks.sub(1);
        }
        Ok(())
    }

    /// As the resource below, except for requests, failures, live blocks and their bytes, which are those of
    /// what went through here.
    fn usage(&self) -> Result<Usage, Error> {
        let below = self.inner.usage()?;
        let counts = *self.counts();
        Ok(Usage {
            requested: counts.requested,
            blocks: counts.blocks,
            requests: counts.requests,
            failures: counts.failures,
            ..below
        })
    }

    fn reset_peak_stats(&self) {
        {
            let mut counts = self.counts();
            counts.requested.reset_peak();
            counts.blocks.reset_peak();
        }
        self.inner.reset_peak_stats();
    }

    fn reset_accumulated_stats(&self) {
        {
            let mut counts = self.counts();
            begin_again(&mut counts.requested);
            begin_again(&mut counts.blocks);
            (counts.requests, counts.failures) = (0, 0);
        }
        self.inner.reset_accumulated_stats();
    }

    fn ordinal(&self) -> usize {
        self.inner.ordinal()
    }

    #[inline]
    fn upstream(&self) -> Option<&dyn MemoryResource> {
        Some(&self.inner)
    }
}
