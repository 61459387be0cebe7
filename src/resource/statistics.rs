//! The statistics adaptor.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::allocator::{Counter, Request};
use crate::driver::Stream;

use super::block::RawBlock;
use super::traits::MemoryResource;
use super::usage::{Tally, Usage};
use crate::error::{Error, Refused};

/// Counts what goes through it. No lock.
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
    bytes: Tally,
    blocks: Tally,
    requests: AtomicU64,
    failures: AtomicU64,
    /// The bytes and blocks that were ever allocated, and those that were ever deallocated.
    allocated: [AtomicU64; 2],
    freed: [AtomicU64; 2],
}

impl<R: MemoryResource> Statistics<R> {
    /// Over another resource.
    pub fn new(inner: R) -> Self {
        Statistics {
            inner,
            bytes: Tally::default(),
            blocks: Tally::default(),
            requests: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            allocated: Default::default(),
            freed: Default::default(),
        }
    }

    /// The resource below.
    pub fn get_ref(&self) -> &R {
        &self.inner
    }

    /// Gives up the figures.
    pub fn into_inner(self) -> R {
        self.inner
    }

    fn counter(&self, tally: &Tally, which: usize) -> Counter {
        let mut counter = tally.counter();
        counter.total_allocated = self.allocated[which].load(Ordering::Acquire);
        counter.total_freed = self.freed[which].load(Ordering::Acquire);
        counter
    }
}

fn add(sums: &[AtomicU64; 2], bytes: u64) {
    let [of_bytes, of_blocks] = sums;
    of_bytes.fetch_add(bytes, Ordering::AcqRel);
    of_blocks.fetch_add(1, Ordering::AcqRel);
}

// SAFETY: passes everything on.
unsafe impl<R: MemoryResource> MemoryResource for Statistics<R> {
    fn allocate_block(&self, request: &Request, stream: &Stream) -> Result<RawBlock, Error> {
        self.requests.fetch_add(1, Ordering::AcqRel);
        let result = self.inner.allocate_block(request, stream);
        if result.is_ok() {
            let bytes = request.bytes() as u64;
            self.bytes.add(bytes);
            self.blocks.add(1);
            add(&self.allocated, bytes);
        } else {
            self.failures.fetch_add(1, Ordering::AcqRel);
        }
        result
    }

    fn deallocate_block(&self, block: RawBlock) -> Result<(), Refused<RawBlock>> {
        let bytes = block.id().bytes() as u64;
        self.inner.deallocate_block(block)?;
        self.bytes.sub_at_most(bytes);
        self.blocks.sub_at_most(1);
        add(&self.freed, bytes);
        Ok(())
    }

    /// As the resource below says, but for requests, failures, live blocks and their bytes, which are those of
    /// what went through here. While other threads allocate each is exact for some moment of the call.
    fn usage(&self) -> Result<Usage, Error> {
        let mut usage = self.inner.usage()?;
        usage.requested = self.counter(&self.bytes, 0);
        usage.blocks = self.counter(&self.blocks, 1);
        usage.requests = self.requests.load(Ordering::Acquire);
        usage.failures = self.failures.load(Ordering::Acquire);
        Ok(usage)
    }

    fn reset_peak_stats(&self) {
        self.bytes.reset_peak();
        self.blocks.reset_peak();
        self.inner.reset_peak_stats();
    }

    fn reset_accumulated_stats(&self) {
        let sums = self.allocated.iter().chain(&self.freed);
        for sum in sums.chain([&self.requests, &self.failures]) {
            sum.store(0, Ordering::Release);
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
