//! The budget adaptor.

use std::sync::Arc;

use crate::allocator::{Counter, Request};
use crate::driver::{Stream, process};

use super::block::RawBlock;
use super::meter::{Charge, Meter};
use super::pressure::Pressure;
use super::traits::MemoryResource;
use super::usage::Usage;
use crate::block::BlockState;
use crate::error::{Error, Refused};
use crate::locks::held::Mutex;

/// Bounds the bytes outstanding below it: live and pending together never pass the limit, at any
/// instant and from any number of threads. Reports their [`Pressure`] and calls listeners when it changes.
///
/// What is outstanding below when the budget is made counts, as far as the resource there can say. A request above the
/// limit fails immediately; one that does not fit now gets one reap and one more try. Bytes are released when they have
/// really left the resource below: at the deallocation where it is synchronous, at a reap where it is not.
///
/// A budget [of live bytes](Self::of_live) releases them at the deallocation in any case. To manage the memory of one
/// device, put a [`Statistics`](super::Statistics) over such a budget, which counts its requests, and for a bound on
/// live and pending bytes a second budget below it: both apply, and refuse in the same way.
///
/// ```
/// # use cualloc::Request;
/// use cualloc::Error;
/// use cualloc::resource::{Budget, MemoryResource, Pressure};
/// # use cualloc::{sim::{SimConfig, Simulator}, Allocator, Config};
/// # let sim = Simulator::new(SimConfig::with_devices(1, 1 << 30))?;
/// # let driver = sim.driver()?;
/// # let context = driver.context(0)?;
/// # let allocator = Allocator::with_config(&context, Config::new())?;
/// # let stream = allocator.create_stream()?;
/// let budget = Budget::new(allocator, Some(1024));
/// let block = budget.allocate_block(&Request::new(1024).tag("all"), &stream)?;
/// assert_eq!(budget.pressure(), Pressure::Critical);
/// let refused = budget.allocate_block(&Request::new(1).tag("more"), &stream);
/// assert!(matches!(refused, Err(Error::OverBudget { requested: 1, .. })));
/// budget.deallocate_block(block)?;
/// assert_eq!(budget.remaining(), Some(1024));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Budget<R: MemoryResource> {
    inner: R,
    meter: Arc<Meter>,
    /// Whether bytes that are pending below do not count.
    live_only: bool,
    /// The bytes that were outstanding below at the start and have not left since. Touched only for blocks that
    /// were not allocated through here, and when a reap is asked for.
    base: Mutex<Option<Charge>>,
}

impl<R: MemoryResource> Budget<R> {
    /// A budget of `limit` bytes: none bounds nothing, 0 allows nothing.
    pub fn new(inner: R, limit: Option<u64>) -> Budget<R> {
        let meter = Meter::new(limit);
        let before = inner.usage().map_or(0, |usage| usage.outstanding());
        let base = (before > 0).then(|| meter.charge_existing(before));
        Budget {
            inner,
            meter,
            live_only: false,
            base: Mutex::new(base),
        }
    }

    /// A budget of live bytes: a block leaves it when it is deallocated, also while its memory is still pending below.
    /// Counts what is allocated through it from now on, exact to the byte.
    pub fn of_live(inner: R, limit: Option<u64>) -> Budget<R> {
        Budget {
            inner,
            meter: Meter::new(limit),
            live_only: true,
            base: Mutex::new(None),
        }
    }

    /// The limit in bytes.
    pub fn limit(&self) -> Option<u64> {
        self.meter.limit()
    }

    /// Sets or lifts the limit. What is outstanding stays, also above a lowered one.
    pub fn set_limit(&self, bytes: Option<u64>) {
        self.meter.set_limit(bytes);
    }

    /// Bytes that could be allocated now; none without a limit.
    pub fn remaining(&self) -> Option<u64> {
        self.meter.remaining()
    }

    /// Whether `bytes` would fit now, without taking them.
    ///
    /// # Errors
    /// [`Error::OverBudget`].
    pub fn check(&self, bytes: u64) -> Result<(), Error> {
        self.meter.check(bytes)
    }

    /// How scarce the budget is now.
    pub fn pressure(&self) -> Pressure {
        self.meter.pressure()
    }

    /// Adds a listener, which gets the old and the new level at each change, whichever call caused it. It runs without
    /// a lock, and may use the budget. Several threads may call it at the same time: each call's old level is another
    /// call's new one.
    pub fn on_pressure(&self, listener: impl Fn(Pressure, Pressure) + Send + Sync + 'static) {
        self.meter.level.add(listener);
    }

    /// The resource below.
    pub fn get_ref(&self) -> &R {
        &self.inner
    }

    /// Gives up the budget; what was charged for live blocks is forgotten with them.
    pub fn into_inner(self) -> R {
        self.inner
    }

    #[cold]
    fn charge_after_reap(&self, bytes: u64) -> Result<Charge, Error> {
        self.reap()?;
        self.meter.charge(bytes)
    }

    #[inline(never)]
    fn deallocate_live(&self, mut block: RawBlock) -> Result<(), Refused<RawBlock>> {
        let charge = block.detach(&self.meter);
        self.inner.deallocate_block(block).map_err(|mut failure| {
            charge
                .into_iter()
                .for_each(|charge| failure.value.attach(charge));
            failure
        })
    }

    fn take_base(&self, bytes: u64) -> Option<Charge> {
        let mut base = process::lock(&self.base);
        base.as_mut().map(|base| base.split(bytes))
    }

    /// Bytes of the start that have left by other ways than through here.
    fn shrink_base(&self) {
        let Ok(below) = self.inner.usage() else {
            return;
        };
        let outstanding = below.outstanding();
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
    fn allocate_block(&self, request: &Request, stream: &Stream) -> Result<RawBlock, Error> {
        let wanted = request.bytes() as u64;
        let charge = match self.meter.charge(wanted) {
            Ok(charge) => charge,
            Err(error) if self.meter.is_too_small(wanted) => return Err(error),
            Err(_) => self.charge_after_reap(wanted)?,
        };
        // An error drops the charge.
        let mut block = self.inner.allocate_block(request, stream)?;
        block.attach(charge);
        Ok(block)
    }

    #[inline]
    fn deallocate_block(&self, mut block: RawBlock) -> Result<(), Refused<RawBlock>> {
        if self.live_only {
            return self.deallocate_live(block);
        }
        let known = block.charges().any(|charge| charge.is_of(&self.meter));
        if !known
            && self.inner.state(&block.id()) == BlockState::Live
            && let Some(charge) = self.take_base(block.id().bytes() as u64)
        {
            block.attach(charge);
        }
        self.inner.deallocate_block(block)
    }

    /// As the resource below, except for what the budget counts: bytes requested that have not left it, less those
    /// pending below, and the blocks allocated through it that have not left. The peak of the bytes is of live and
    /// pending ones together.
    fn usage(&self) -> Result<Usage, Error> {
        let mut usage = self.inner.usage()?;
        let base = u64::from(process::lock(&self.base).is_some());
        usage.requested = self.meter.counter();
        usage.pending = match self.live_only {
            true => 0,
            false => usage.pending.min(usage.requested.current),
        };
        usage.requested.current -= usage.pending;
        usage.blocks = Counter {
            current: self.meter.count() - base,
            ..Counter::default()
        };
        usage.limit = self.limit();
        Ok(usage)
    }

    fn reset_peak_stats(&self) {
        self.meter.reset_peak();
        self.inner.reset_peak_stats();
    }

    fn reap(&self) -> Result<u64, Error> {
        let left = self.inner.reap()?;
        self.shrink_base();
        Ok(left)
    }

    fn headroom(&self) -> Option<u64> {
        let below = self.inner.headroom();
        self.remaining().into_iter().chain(below).min()
    }

    fn ordinal(&self) -> usize {
        self.inner.ordinal()
    }

    #[inline]
    fn upstream(&self) -> Option<&dyn MemoryResource> {
        Some(&self.inner)
    }
}
