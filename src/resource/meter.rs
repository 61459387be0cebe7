//! The meter of a budget: charges by one atomic step, pressure, listeners.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use crate::allocator::Counter;
use crate::driver::process;
use crate::foreign::guarded;

use super::usage::Tally;
use crate::error::Error;
use crate::locks::held::RwLock;

/// How scarce memory is: by the share of a limit that is free.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[repr(u8)]
pub enum Pressure {
    /// More than 30 % are free, or there is no limit.
    #[default]
    None,
    /// More than 10 %.
    Low,
    /// More than 5 %.
    Medium,
    /// More than nothing.
    High,
    /// Nothing is free.
    Critical,
}

impl Pressure {
    /// The level of a limit in bytes with `used` bytes in use. Without a limit there is no pressure; of
    /// a limit of 0 nothing is free.
    pub fn of(used: u64, limit: Option<u64>) -> Pressure {
        let Some(limit) = limit else {
            return Pressure::None;
        };
        let free = limit.saturating_sub(used);
        // Far from all borders, which is the rule, without wide arithmetic.
        if free > limit / 2 {
            return Pressure::None;
        }
        let free = u128::from(free) * 100;
        let limit = u128::from(limit);
        match free {
            0 => Pressure::Critical,
            _ if free > limit * 30 => Pressure::None,
            _ if free > limit * 10 => Pressure::Low,
            _ if free > limit * 5 => Pressure::Medium,
            _ => Pressure::High,
        }
    }

    /// The level's name in lower case.
    pub fn name(self) -> &'static str {
        match self {
            Pressure::None => "none",
            Pressure::Low => "low",
            Pressure::Medium => "medium",
            Pressure::High => "high",
            Pressure::Critical => "critical",
        }
    }

    fn from_number(number: u8) -> Pressure {
        match number {
            1 => Pressure::Low,
            2 => Pressure::Medium,
            3 => Pressure::High,
            4 => Pressure::Critical,
            _ => Pressure::None,
        }
    }
}

impl fmt::Display for Pressure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Is told the old and the new level. Called without a lock.
pub(crate) type PressureListener = dyn Fn(Pressure, Pressure) + Send + Sync;

/// Listeners with their numbers.
type Listeners = Vec<(u64, Arc<PressureListener>)>;

/// Stands for no limit: no count reaches it.
const UNLIMITED: u64 = u64::MAX;

/// Counts bytes against a limit. All methods from any thread; the count never passes the limit.
pub(crate) struct Meter {
    /// Whose it is, for errors.
    context: &'static str,
    limit: AtomicU64,
    used: Tally,
    level: AtomicU8,
    listeners: RwLock<Arc<Listeners>>,
    next_listener: AtomicU64,
}

impl Meter {
    pub(crate) fn new(context: &'static str, limit: Option<u64>) -> Arc<Meter> {
        Arc::new(Meter {
            context,
            limit: AtomicU64::new(limit.unwrap_or(UNLIMITED)),
            used: Tally::default(),
            level: AtomicU8::new(0),
            listeners: RwLock::default(),
            next_listener: AtomicU64::new(1),
        })
    }

    pub(crate) fn limit(&self) -> Option<u64> {
        Some(self.bound()).filter(|limit| *limit != UNLIMITED)
    }

    fn bound(&self) -> u64 {
        self.limit.load(Ordering::Acquire)
    }

    pub(crate) fn set_limit(&self, limit: Option<u64>) {
        let limit = limit.unwrap_or(UNLIMITED);
        self.limit.store(limit, Ordering::Release);
        self.announce();
    }

    pub(crate) fn used(&self) -> u64 {
        self.used.current()
    }

    /// Bytes left under the limit.
    pub(crate) fn remaining(&self) -> Option<u64> {
        self.limit().map(|limit| limit.saturating_sub(self.used()))
    }

    /// What is used now, and the most that was.
    pub(crate) fn counter(&self) -> Counter {
        self.used.counter()
    }

    /// Sets the peak to the count; none is lost.
    pub(crate) fn reset_peak(&self) {
        self.used.reset_peak();
    }

    /// Charges there are: live allocations. They hold the meter, and so does its owner, but nobody
    /// else.
    pub(crate) fn count(self: &Arc<Self>) -> u64 {
        Arc::strong_count(self) as u64 - 1
    }

    pub(crate) fn pressure(&self) -> Pressure {
        Pressure::of(self.used(), self.limit())
    }

    pub(crate) fn refusal(&self, requested: u64) -> Error {
        let (limit, used) = (self.bound(), self.used());
        Error::OverBudget {
            owner: self.context,
            requested,
            limit,
            used,
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
        if !self.used.try_add(bytes, |sum| sum <= self.bound()) {
            return Err(self.refusal(bytes));
        }
        Ok(self.charged(bytes))
    }

    #[inline]
    fn charged(self: &Arc<Self>, bytes: u64) -> Charge {
        self.announce();
        Charge {
            meter: Arc::clone(self),
            bytes,
        }
    }

    /// Counts bytes that are there anyway, whatever the limit says.
    pub(crate) fn charge_existing(self: &Arc<Self>, bytes: u64) -> Charge {
        self.used.add(bytes);
        self.charged(bytes)
    }

    /// Tells the listeners of a change of level.
    #[inline]
    fn announce(&self) {
        // Mostly there is plenty, as there was before.
        let limit = self.bound();
        let plenty = limit.saturating_sub(self.used()) > limit / 2;
        if !plenty || self.level.load(Ordering::Acquire) != Pressure::None as u8 {
            self.announce_change();
        }
    }

    /// The swap makes the listeners' pairs a chain; the loop makes its end the level that holds.
    #[inline(never)]
    fn announce_change(&self) {
        loop {
            let new = self.pressure();
            if self.level.load(Ordering::Acquire) == new as u8 {
                return;
            }
            let old = Pressure::from_number(self.level.swap(new as u8, Ordering::AcqRel));
            if old != new {
                let listeners = Arc::clone(&process::read(&self.listeners));
                for (_, listener) in listeners.iter() {
                    guarded("a pressure listener", || listener(old, new));
                }
            }
        }
    }

    pub(crate) fn add_listener(&self, listener: Arc<PressureListener>) -> u64 {
        let id = self.next_listener.fetch_add(1, Ordering::Relaxed);
        let mut listeners = process::write(&self.listeners);
        Arc::make_mut(&mut listeners).push((id, listener));
        id
    }

    pub(crate) fn remove_listener(&self, id: u64) -> bool {
        let removed = {
            let mut listeners = process::write(&self.listeners);
            let at = listeners.iter().position(|(known, _)| *known == id);
            at.map(|at| Arc::make_mut(&mut listeners).remove(at))
        };
        // What it captured is dropped without the lock: it may be blocks of this budget.
        removed.is_some()
    }
}

impl fmt::Debug for Meter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Meter")
            .field("context", &self.context)
            .field("limit", &self.limit())
            .field("used", &self.used())
            .finish_non_exhaustive()
    }
}

/// Bytes taken out of a budget, given back on drop. Must not be dropped under a lock: it tells
/// listeners.
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

    /// Takes up to `bytes` of this charge into one of its own.
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
        self.meter.used.sub(self.bytes);
        self.meter.announce();
    }
}

impl fmt::Debug for Charge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Charge({}, {})", self.meter.context, self.bytes)
    }
}
