//! The meter of a budget: bytes charged against a limit in one atomic step.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::allocator::Counter;
use crate::driver::process;
use crate::error::Error;

use super::pressure::{Level, Pressure};

/// Stands for no limit: no count reaches it.
const UNLIMITED: u64 = u64::MAX;

/// Counts bytes against a limit. All methods may be called from any thread; the count never passes the limit.
pub(crate) struct Meter {
    limit: AtomicU64,
    used: AtomicU64,
    peak: AtomicU64,
    pub(super) level: Level,
}

impl Meter {
    pub(crate) fn new(limit: Option<u64>) -> Arc<Meter> {
        Arc::new(Meter {
            limit: AtomicU64::new(limit.unwrap_or(UNLIMITED)),
            used: AtomicU64::new(0),
            peak: AtomicU64::new(0),
            level: Level::default(),
        })
    }

    pub(crate) fn limit(&self) -> Option<u64> {
        Some(self.bound()).filter(|limit| *limit != UNLIMITED)
    }

    #[inline(always)]
    fn bound(&self) -> u64 {
        self.limit.load(Ordering::Acquire)
    }

    pub(crate) fn set_limit(&self, limit: Option<u64>) {
        let limit = limit.unwrap_or(UNLIMITED);
        self.limit.store(limit, Ordering::Release);
        self.announce();
    }

    #[inline(always)]
    fn used(&self) -> u64 {
        self.used.load(Ordering::Acquire)
    }

    /// Bytes left under the limit.
    pub(crate) fn remaining(&self) -> Option<u64> {
        self.limit().map(|limit| limit.saturating_sub(self.used()))
    }

    /// The bytes in use and their peak, none in a forked child. No observer sees a peak below the bytes in use.
    pub(crate) fn counter(&self) -> Counter {
        if process::is_forked_child() {
            return Counter::default();
        }
        let peak = self.peak.load(Ordering::Acquire);
        let current = self.used();
        Counter {
            current,
            peak: peak.max(current),
            ..Counter::default()
        }
    }

    /// Sets the peak to the count. A thread that adds meanwhile raises either the count that is read here, or
    /// the peak after it was set to 0: no peak is lost.
    pub(crate) fn reset_peak(&self) {
        // In one order with the steps of `raise_peak`, which sees this store or is seen by the load.
        self.peak.store(0, Ordering::SeqCst);
        let now = self.used.load(Ordering::SeqCst);
        self.peak.fetch_max(now, Ordering::AcqRel);
    }

    #[inline]
    fn raise_peak(&self, now: u64) {
        // Usually it is higher already, and nothing need be written.
        if self.peak.load(Ordering::SeqCst) < now {
            self.peak.fetch_max(now, Ordering::AcqRel);
        }
    }

    /// The number of charges: each holds the meter, and so does its owner, and nothing else does.
    pub(crate) fn count(self: &Arc<Self>) -> u64 {
        Arc::strong_count(self) as u64 - 1
    }

    pub(crate) fn pressure(&self) -> Pressure {
        Pressure::of(self.used(), self.limit())
    }

    #[cold]
    #[inline(never)]
    fn refusal(&self, requested: u64) -> Error {
        Error::OverBudget {
            owner: "budget",
            requested,
            limit: self.bound(),
            used: self.used(),
        }
    }

    /// Whether `bytes` would fit now.
    pub(crate) fn check(&self, bytes: u64) -> Result<(), Error> {
        match self.remaining() {
            Some(left) if bytes > left => Err(self.refusal(bytes)),
            _ => Ok(()),
        }
    }

    /// Whether `bytes` could never fit.
    pub(crate) fn is_too_small(&self, bytes: u64) -> bool {
        bytes > self.bound()
    }

    /// Takes `bytes` out of the budget, all or nothing.
    #[inline]
    pub(crate) fn charge(self: &Arc<Self>, bytes: u64) -> Result<Charge, Error> {
        let fits = |now: u64| now.checked_add(bytes).filter(|sum| *sum <= self.bound());
        match (self.used).fetch_update(Ordering::SeqCst, Ordering::Acquire, fits) {
            Ok(before) => Ok(self.charged(before, bytes)),
            Err(_) => Err(self.refusal(bytes)),
        }
    }

    /// Counts bytes that exist already, whatever the limit.
    pub(crate) fn charge_existing(self: &Arc<Self>, bytes: u64) -> Charge {
        let before = self.used.fetch_add(bytes, Ordering::SeqCst);
        self.charged(before, bytes)
    }

    #[inline]
    fn charged(self: &Arc<Self>, before: u64, bytes: u64) -> Charge {
        self.raise_peak(before + bytes);
        self.announce();
        Charge {
            meter: Arc::clone(self),
            bytes,
        }
    }

    /// Updates the level of pressure.
    #[inline]
    fn announce(&self) {
        // Usually there is plenty, as there was before.
        let limit = self.bound();
        let plenty = limit.saturating_sub(self.used()) > limit / 2;
        if !plenty || !self.level.is_none() {
            self.update_level();
        }
    }

    #[inline(never)]
    fn update_level(&self) {
        self.level.update(|| self.pressure());
    }
}

impl fmt::Debug for Meter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Meter")
            .field("limit", &self.limit())
            .field("used", &self.used())
            .finish_non_exhaustive()
    }
}

/// Bytes taken out of a budget, returned on drop. Must not be dropped under a lock: it calls listeners.
#[derive(Debug)]
pub(crate) struct Charge {
    meter: Arc<Meter>,
    bytes: u64,
}

impl Charge {
    #[inline]
    pub(crate) fn is_of(&self, meter: &Arc<Meter>) -> bool {
        Arc::ptr_eq(&self.meter, meter)
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Moves up to `bytes` of this charge into one of its own.
    pub(crate) fn split(&mut self, bytes: u64) -> Charge {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        Charge {
            meter: Arc::clone(&self.meter),
            bytes,
        }
    }
}

impl Drop for Charge {
    #[inline]
    fn drop(&mut self) {
        // Exactly what was added, so the count cannot wrap.
        self.meter.used.fetch_sub(self.bytes, Ordering::AcqRel);
        self.meter.announce();
    }
}
