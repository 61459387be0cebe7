//! The statistics adaptor.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::driver::{Context, Stream};

use super::block::{ResourceBlock, Tag};
use super::traits::MemoryResource;
use crate::error::{Error, Refused};

/// What went through a [`Statistics`] adaptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ResourceStats {
    /// Bytes in blocks that were allocated and not deallocated here.
    pub bytes: u64,
    /// The most of them since the start or the last reset.
    pub peak_bytes: u64,
    /// Bytes of all blocks ever allocated.
    pub total_bytes: u64,
    /// Blocks that were allocated and not deallocated here.
    pub blocks: u64,
    /// All blocks ever allocated.
    pub allocations: u64,
    /// All blocks ever deallocated.
    pub deallocations: u64,
    /// Requests that failed.
    pub failures: u64,
}

/// Counts what goes through it. No lock.
///
/// ```
/// use cualloc::resource::{MemoryResource, Statistics};
/// # use cualloc::{driver::Context, sim::{SimConfig, Simulator}, Allocator, Config};
/// # let sim = Simulator::new(SimConfig::with_devices(1, 1 << 30))?;
/// # let driver = sim.driver()?;
/// # let context = driver.context(0)?;
/// # let allocator = Allocator::with_config(&context, Config::new())?;
/// # let stream = allocator.create_stream()?;
/// let counted = Statistics::new(allocator);
/// let block = counted.allocate_block(1000, &stream, "x".into())?;
/// counted.deallocate_block(block)?;
/// let stats = counted.stats();
/// assert_eq!((stats.bytes, stats.peak_bytes, stats.allocations), (0, 1000, 1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Statistics<R> {
    inner: R,
    bytes: AtomicU64,
    peak: AtomicU64,
    total: AtomicU64,
    allocations: AtomicU64,
    deallocations: AtomicU64,
    failures: AtomicU64,
}

impl<R: MemoryResource> Statistics<R> {
    /// Over another resource.
    pub fn new(inner: R) -> Self {
        Statistics {
            inner,
            bytes: AtomicU64::new(0),
            peak: AtomicU64::new(0),
            total: AtomicU64::new(0),
            allocations: AtomicU64::new(0),
            deallocations: AtomicU64::new(0),
            failures: AtomicU64::new(0),
        }
    }

    /// The figures. While other threads allocate each is exact for some moment of the call.
    pub fn stats(&self) -> ResourceStats {
        let deallocations = self.deallocations.load(Ordering::Acquire);
        let bytes = self.bytes.load(Ordering::Acquire);
        let allocations = self.allocations.load(Ordering::Acquire);
        ResourceStats {
            bytes,
            peak_bytes: self.peak.load(Ordering::Acquire).max(bytes),
            total_bytes: self.total.load(Ordering::Acquire),
            blocks: allocations.saturating_sub(deallocations),
            allocations,
            deallocations,
            failures: self.failures.load(Ordering::Acquire),
        }
    }

    /// Sets the peak to the current value. No peak is lost to allocations at the same time.
    pub fn reset_peak(&self) {
        self.peak.store(0, Ordering::Release);
        let bytes = self.bytes.load(Ordering::Acquire);
        self.peak.fetch_max(bytes, Ordering::AcqRel);
    }

    /// The resource below.
    pub fn inner(&self) -> &R {
        &self.inner
    }
}

// SAFETY: passes everything on.
unsafe impl<R: MemoryResource> MemoryResource for Statistics<R> {
    fn allocate_block_aligned(
        &self,
        bytes: usize,
        alignment: usize,
        stream: &Stream,
        tag: Tag,
    ) -> Result<ResourceBlock, Error> {
        let result = self
            .inner
            .allocate_block_aligned(bytes, alignment, stream, tag);
        if result.is_ok() {
            let bytes = bytes as u64;
            let now = self.bytes.fetch_add(bytes, Ordering::AcqRel) + bytes;
            self.peak.fetch_max(now, Ordering::AcqRel);
            self.total.fetch_add(bytes, Ordering::AcqRel);
            self.allocations.fetch_add(1, Ordering::AcqRel);
        } else {
            self.failures.fetch_add(1, Ordering::AcqRel);
        }
        result
    }

    fn deallocate_block(&self, block: ResourceBlock) -> Result<(), Refused<ResourceBlock>> {
        let bytes = block.bytes() as u64;
        self.inner.deallocate_block(block)?;
        // A block that did not come through here must not make the count wrap.
        let _ = self
            .bytes
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |now| {
                Some(now.saturating_sub(bytes))
            });
        self.deallocations.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    fn context(&self) -> &Context {
        self.inner.context()
    }

    #[inline]
    fn upstream(&self) -> Option<&dyn MemoryResource> {
        Some(&self.inner)
    }
}
