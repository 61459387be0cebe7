//! What a resource holds and hands out.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::allocator::{Counter, Stats};
use crate::driver::{MemInfo, process};

/// What a resource holds and hands out, as every source, pool and adaptor answers it. Bytes, unless a field
/// says otherwise; zero or none is what the resource does not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Usage {
    /// Bytes in live blocks, as they were asked for.
    pub requested: Counter,
    /// Bytes in live blocks, as the source rounds them.
    pub used: Counter,
    /// Bytes held from the driver.
    pub reserved: Counter,
    /// Live blocks (a number).
    pub blocks: Counter,
    /// Bytes in blocks that were deallocated while work on their stream may still use them.
    pub pending: u64,
    /// Free blocks that are kept for later requests (a number).
    pub cached_blocks: u64,
    /// Requests since the start (a number).
    pub requests: u64,
    /// Requests that were served from cached memory.
    pub hits: u64,
    /// Requests that needed memory from the driver, or failed.
    pub misses: u64,
    /// Requests that failed.
    pub failures: u64,
    /// Requests that failed at first, and went through after hooks or a policy had done their work.
    pub recoveries: u64,
    /// The bound on live and pending bytes, if there is one.
    pub limit: Option<u64>,
    /// Memory of the device, by the driver's account; none if it was not asked.
    pub device_memory: Option<MemInfo>,
}

impl Usage {
    /// Bytes held from the driver and not in live blocks.
    pub fn cached_bytes(&self) -> u64 {
        self.reserved.current.saturating_sub(self.used.current)
    }

    /// That of an allocator.
    pub(crate) fn of(stats: &Stats) -> Usage {
        Usage {
            requested: stats.all.requested,
            used: stats.all.allocated,
            reserved: stats.all.reserved,
            blocks: stats.all.allocations,
            cached_blocks: stats.free_blocks,
            requests: stats.hits + stats.misses,
            hits: stats.hits,
            misses: stats.misses,
            failures: stats.ooms,
            ..Usage::default()
        }
    }

    /// Bytes that have not left: live and pending ones together.
    pub fn outstanding(&self) -> u64 {
        self.requested.current.saturating_add(self.pending)
    }

    /// Bytes that could be asked for under the limit; none without one.
    pub fn remaining(&self) -> Option<u64> {
        Some(self.limit?.saturating_sub(self.outstanding()))
    }
}

/// A quantity that several threads move, and the most it was.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    current: AtomicU64,
    peak: AtomicU64,
}

impl Tally {
    /// Counts what came.
    #[inline]
    pub(crate) fn add(&self, amount: u64) {
        let before = self.current.fetch_add(amount, Ordering::SeqCst);
        self.raise(before + amount);
    }

    /// Counts what came, if `allowed` accepts the sum; whether it did.
    #[inline]
    pub(crate) fn try_add(&self, amount: u64, allowed: impl Fn(u64) -> bool) -> bool {
        let added = self
            .current
            .fetch_update(Ordering::SeqCst, Ordering::Acquire, |now| {
                now.checked_add(amount).filter(|sum| allowed(*sum))
            });
        if let Ok(before) = added {
            self.raise(before + amount);
        }
        added.is_ok()
    }

    #[inline]
    fn raise(&self, now: u64) {
        // Mostly it stands higher, and then nothing need be written.
        if self.peak.load(Ordering::SeqCst) < now {
            self.peak.fetch_max(now, Ordering::AcqRel);
        }
    }

    /// Counts what went, of what came.
    #[inline]
    pub(crate) fn sub(&self, amount: u64) {
        self.current.fetch_sub(amount, Ordering::AcqRel);
    }

    /// Counts what went. What did not come through here does not make the count wrap.
    pub(crate) fn sub_at_most(&self, amount: u64) {
        let less = |now: u64| Some(now.saturating_sub(amount));
        let taken = self
            .current
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, less);
        debug_assert!(taken.is_ok(), "every count has a lower one, or is 0");
    }

    /// What is there now.
    #[inline]
    pub(crate) fn current(&self) -> u64 {
        self.current.load(Ordering::Acquire)
    }

    /// Both figures, of which a forked child has none. No observer sees a peak below what is there.
    pub(crate) fn counter(&self) -> Counter {
        if process::is_forked_child() {
            return Counter::default();
        }
        let peak = self.peak.load(Ordering::Acquire);
        let current = self.current();
        Counter {
            current,
            peak: peak.max(current),
            ..Counter::default()
        }
    }

    /// Sets the peak to what is there. Whoever adds meanwhile raises either the count that is read here or
    /// the peak after it was set down: no peak is lost.
    pub(crate) fn reset_peak(&self) {
        // In one order with the steps of `add`, which sees this one or is seen by the next.
        self.peak.store(0, Ordering::SeqCst);
        let now = self.current.load(Ordering::SeqCst);
        self.peak.fetch_max(now, Ordering::AcqRel);
    }
}
