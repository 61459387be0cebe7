//! The budget adaptor.

use std::sync::{Arc, Mutex};

use crate::driver::{Context, Stream, process};

use super::block::{DeallocateError, ResourceBlock, Tag};
use super::error::ResourceError;
use super::gauge::{Charge, Gauge};
use super::traits::MemoryResource;

/// Bounds the bytes outstanding below it: live and pending together never pass the limit, at any
/// instant and from any number of threads.
///
/// What is outstanding below when it is made counts. A request above the limit fails at once; one
/// that does not fit now gets one reap and one more try. Bytes are released when they have really
/// left the resource below: at the deallocation where it is synchronous, at a reap where it is not.
///
/// ```
/// use cualloc::resource::{Budget, MemoryResource, ResourceError};
/// # use cualloc::{driver::Context, sim::{SimConfig, Simulator}, Allocator, Config};
/// # let sim = Simulator::new(SimConfig::with_devices(1, 1 << 30))?;
/// # let driver = sim.driver()?;
/// # let context = Context::primary(&driver, driver.device(0)?)?;
/// # let allocator = Allocator::with_config(&context, Config::new())?;
/// # let stream = allocator.create_stream()?;
/// let budget = Budget::new(allocator, 1024);
/// let block = budget.allocate_block(1024, &stream, "all".into())?;
/// let refused = budget.allocate_block(1, &stream, "more".into());
/// assert!(matches!(refused, Err(ResourceError::OutOfBudget { requested: 1, remaining: 0, .. })));
/// budget.deallocate_block(block)?;
/// assert_eq!(budget.remaining(), 1024);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Budget<R: MemoryResource> {
    inner: R,
    gauge: Arc<Gauge>,
    /// What was outstanding below at the start and has not left since. Touched only for blocks that
    /// were not allocated through here, and when a reap is asked for.
    base: Mutex<Option<Charge>>,
}

impl<R: MemoryResource> Budget<R> {
    /// A budget of `limit` bytes; 0 allows nothing.
    pub fn new(inner: R, limit: u64) -> Budget<R> {
        let gauge = Gauge::new("budget", limit);
        let before = inner.outstanding().total();
        let base = (before > 0).then(|| gauge.charge_existing(before));
        Budget {
            inner,
            gauge,
            base: Mutex::new(base),
        }
    }

    /// The limit in bytes.
    pub fn limit(&self) -> u64 {
        self.gauge.limit()
    }

    /// Bytes that count against the limit.
    pub fn reserved(&self) -> u64 {
        self.gauge.used()
    }

    /// Bytes that could be allocated now.
    pub fn remaining(&self) -> u64 {
        self.gauge.remaining()
    }

    /// The resource below.
    pub fn inner(&self) -> &R {
        &self.inner
    }

    #[cold]
    fn charge_after_reap(&self, bytes: u64) -> Result<Charge, ResourceError> {
        self.reap()?;
        self.gauge.charge(bytes)
    }

    fn take_base(&self, bytes: u64) -> Option<Charge> {
        let mut base = process::lock(&self.base);
        base.as_mut().map(|base| base.split(bytes))
    }

    /// Bytes of the start that have left by other ways than through here.
    fn shrink_base(&self) {
        let outstanding = self.inner.outstanding().total();
        let gone = {
            let mut base = process::lock(&self.base);
            base.as_mut().and_then(|base| {
                let gone = base.bytes().saturating_sub(outstanding);
                (gone > 0).then(|| base.split(gone))
            })
        };
        drop(gone);
    }
}

// SAFETY: passes everything on.
unsafe impl<R: MemoryResource> MemoryResource for Budget<R> {
    #[inline]
    fn allocate_block_aligned(
        &self,
        bytes: usize,
        alignment: usize,
        stream: &Stream,
        tag: Tag,
    ) -> Result<ResourceBlock, ResourceError> {
        let wanted = bytes as u64;
        if self.gauge.is_too_small(wanted) {
            return Err(self.gauge.refusal(wanted));
        }
        let charge = match self.gauge.charge(wanted) {
            Ok(charge) => charge,
            Err(_) => self.charge_after_reap(wanted)?,
        };
        // An error drops the charge.
        let mut block = self
            .inner
            .allocate_block_aligned(bytes, alignment, stream, tag)?;
        block.attach(charge);
        Ok(block)
    }

    #[inline]
    fn deallocate_block(&self, mut block: ResourceBlock) -> Result<(), DeallocateError> {
        let known = block.charges().any(|charge| charge.is_of(&self.gauge));
        if !known
            && self.inner.state(&block.identity()) == super::BlockState::Live
            && let Some(charge) = self.take_base(block.bytes() as u64)
        {
            block.attach(charge);
        }
        self.inner.deallocate_block(block)
    }

    fn reap(&self) -> Result<u64, ResourceError> {
        let left = self.inner.reap()?;
        self.shrink_base();
        Ok(left)
    }

    fn context(&self) -> &Context {
        self.inner.context()
    }

    #[inline]
    fn upstream(&self) -> Option<&dyn MemoryResource> {
        Some(&self.inner)
    }
}
