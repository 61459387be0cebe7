//! The budget adaptor.

use std::sync::Arc;

use crate::allocator::Request;
use crate::block::BlockState;
use crate::driver::Stream;
use crate::error::{Error, Refused};

use super::block::RawBlock;
use super::meter::{Charge, Meter};
use super::pressure::Pressure;
use super::traits::MemoryResource;
use super::usage::Usage;

/// Bounds the bytes outstanding below it: live and pending bytes together never exceed the limit, from any number of
/// threads. Reports their [`Pressure`] and calls listeners when it changes.
///
/// What is outstanding below when the budget is created counts, as far as the resource there reports it. A request
/// above the limit fails immediately; one that does not fit now is tried once more after a reap. Bytes are released
/// when they have left the resource below: at the deallocation if it is synchronous, otherwise at a reap.
///
/// A budget [of live bytes](Self::of_live) releases them at the deallocation in any case, and counts requests and
/// failures. To bound pending bytes as well, put a second budget below it.
///
/// ```
/// use cualloc::resource::{Budget, MemoryResource, Pressure};
/// use cualloc::{Error, Request};
/// # use cualloc::{sim::{SimConfig, Simulator}, Allocator, Config};
/// # let sim = Simulator::new(SimConfig::default())?;
/// # let allocator = Allocator::with_config(&sim.driver()?.context(0)?, Config::new())?;
/// # let stream = allocator.create_stream()?;
/// let budget = Budget::new(allocator, Some(1024));
/// let block = budget.allocate_block(&Request::new(1024), &stream)?;
/// assert_eq!(budget.pressure(), Pressure::Critical);
/// let refused = budget.allocate_block(&Request::new(1), &stream);
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
}

impl<R: MemoryResource> Budget<R> {
    /// A budget of `limit` bytes; `None` for no limit.
    pub fn new(inner: R, limit: Option<u64>) -> Budget<R> {
        let before = inner.usage().map_or(0, |usage| usage.outstanding());
        Budget {
            inner,
            meter: Meter::new(limit, before),
            live_only: false,
        }
    }

    /// Creates a budget of live bytes: a block no longer counts once it is deallocated, even if its memory is pending
    /// below. Counts the blocks allocated through it, exact to the byte, and its requests and failures.
    pub fn of_live(inner: R, limit: Option<u64>) -> Budget<R> {
        Budget {
            inner,
            meter: Meter::new(limit, 0),
            live_only: true,
        }
    }

    /// The limit in bytes.
    pub fn limit(&self) -> Option<u64> {
        self.meter.lock().usage.limit
    }

    /// Sets or lifts the limit. Outstanding bytes stay, also above a lowered one.
    pub fn set_limit(&self, bytes: Option<u64>) {
        self.meter.set_limit(bytes);
    }

    /// Bytes that could be allocated now; none without a limit.
    pub fn remaining(&self) -> Option<u64> {
        self.meter.lock().usage.remaining()
    }

    /// Whether `bytes` would fit now, without taking them.
    ///
    /// # Errors
    /// [`Error::OverBudget`].
    pub fn check(&self, bytes: u64) -> Result<(), Error> {
        self.meter.lock().check(bytes)
    }

    /// How scarce the budget is now.
    pub fn pressure(&self) -> Pressure {
        let usage = self.meter.lock().usage;
        Pressure::of(usage.requested.current, usage.limit)
    }

    /// Adds a listener, which gets the old and the new level at each change. It runs without a lock, possibly on
    /// several threads at the same time, and may use the budget.
    pub fn on_pressure(&self, listener: impl Fn(Pressure, Pressure) + Send + Sync + 'static) {
        self.meter.listeners.add(listener);
    }

    /// The resource below.
    pub fn get_ref(&self) -> &R {
        &self.inner
    }

    /// Retries a charge that did not fit. If the bytes alone are within the limit, it reaps first.
    #[cold]
    fn charge_after_reap(&self, bytes: u64) -> Result<Charge, Error> {
        if self.limit().is_none_or(|limit| bytes <= limit) {
            self.reap().inspect_err(|_| self.meter.failed(false))?;
        }
        self.meter.charge(bytes).ok_or_else(|| {
            self.meter.failed(false);
            self.meter.lock().refusal(bytes)
        })
    }
}

// SAFETY: passes everything on.
unsafe impl<R: MemoryResource> MemoryResource for Budget<R> {
    #[inline]
    fn allocate_block(&self, request: &Request, stream: &Stream) -> Result<RawBlock, Error> {
        let bytes = request.bytes() as u64;
        let charge = match self.meter.charge(bytes) {
            Some(charge) => charge,
            None => self.charge_after_reap(bytes)?,
        };
        // An error drops the charge.
        let mut allocated = self.inner.allocate_block(request, stream);
        match &mut allocated {
            Ok(block) => block.attach(charge),
            Err(_) => self.meter.failed(true),
        }
        allocated
    }

    #[inline]
    fn deallocate_block(&self, mut block: RawBlock) -> Result<(), Refused<RawBlock>> {
        if self.live_only {
            let charge = block.detach(&self.meter);
            return self.inner.deallocate_block(block).map_err(|mut failure| {
                failure.value.extend(charge);
                failure
            });
        }
        let known = block.charges().any(|charge| charge.is_of(&self.meter));
        if !known && self.inner.state(&block.id()) == BlockState::Live {
            block.extend(self.meter.charge_from_base(block.id().bytes() as u64));
        }
        self.inner.deallocate_block(block)
    }

    /// As the resource below, with the budget's own counts of requested bytes (without pending ones, except in the
    /// peak) and of blocks. A budget of live bytes also counts requests and failures.
    fn usage(&self) -> Result<Usage, Error> {
        let below = self.inner.usage()?;
        let own = self.meter.lock().usage;
        let mut usage = Usage {
            requested: own.requested,
            blocks: own.blocks,
            limit: own.limit,
            ..below
        };
        if self.live_only {
            (usage.requests, usage.failures, usage.pending) = (own.requests, own.failures, 0);
        } else {
            usage.pending = below.pending.min(own.requested.current);
            usage.requested.current -= usage.pending;
        }
        Ok(usage)
    }

    fn reset_peak_stats(&self) {
        self.meter.lock().usage.reset_peaks();
        self.inner.reset_peak_stats();
    }

    fn reset_accumulated_stats(&self) {
        self.meter.lock().usage.reset_sums();
        self.inner.reset_accumulated_stats();
    }

    fn reap(&self) -> Result<u64, Error> {
        let left = self.inner.reap()?;
        if let Ok(below) = self.inner.usage() {
            self.meter.shrink_base(below.outstanding());
        }
        Ok(left)
    }

    fn headroom(&self) -> Option<u64> {
        let below = self.inner.headroom();
        self.remaining().into_iter().chain(below).min()
    }

    fn upstream(&self) -> Option<&dyn MemoryResource> {
        Some(&self.inner)
    }
}
