//! The meter of a budget: bytes charged against a limit in one step.

use std::fmt;
use std::sync::Arc;

use crate::driver::process;
use crate::error::Error;
use crate::locks::lock::{Held, Lock};

use super::pressure::{Listeners, Pressure};
use super::usage::Usage;

/// Counts bytes against a limit, which charges never exceed. In a forked child nothing is counted.
pub(crate) struct Meter {
    state: Lock<State>,
    pub(super) listeners: Listeners,
}

#[derive(Default)]
pub(super) struct State {
    /// The limit, charged bytes as requested ones, charged blocks, requests and failures.
    pub usage: Usage,
    /// The charged bytes that were outstanding when the budget was created.
    base: u64,
    level: Pressure,
}

impl Meter {
    pub(crate) fn new(limit: Option<u64>, base: u64) -> Arc<Meter> {
        let mut state = State {
            base,
            level: Pressure::of(base, limit),
            ..State::default()
        };
        state.usage.limit = limit;
        state.add(base);
        Arc::new(Meter {
            state: Lock::new(state),
            listeners: Listeners::default(),
        })
    }

    #[inline(always)]
    pub(super) fn lock(&self) -> Held<'_, State> {
        process::hot_lock(&self.state)
    }

    /// Changes the state, then calls the listeners without the lock if the level has changed.
    #[inline]
    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.lock();
        let result = change(&mut state);
        let usage = &state.usage;
        let now = Pressure::of(usage.requested.current, usage.limit);
        let old = std::mem::replace(&mut state.level, now);
        if old != now {
            drop(state);
            self.listeners.call(old, now);
        }
        result
    }

    pub(crate) fn set_limit(&self, limit: Option<u64>) {
        self.change(|state| state.usage.limit = limit);
    }

    /// Charges the bytes of a block; none if they do not fit.
    #[inline]
    pub(crate) fn charge(self: &Arc<Self>, bytes: u64) -> Option<Charge> {
        self.change(|state| {
            if !state.fits(bytes) {
                return None;
            }
            state.usage.requests += 1;
            state.add(bytes);
            Some(self.charged(state, bytes))
        })
    }

    /// Counts a request that failed, before or after it was charged.
    #[cold]
    pub(crate) fn failed(&self, charged: bool) {
        let mut state = self.lock();
        state.usage.requests += u64::from(!charged);
        state.usage.failures += 1;
    }

    /// Turns the bytes of a block that was live when the budget was created into a separate charge.
    pub(crate) fn charge_from_base(self: &Arc<Self>, bytes: u64) -> Option<Charge> {
        let mut state = self.lock();
        let bytes = bytes.min(state.base);
        state.base -= bytes;
        (bytes > 0).then(|| self.charged(&mut state, bytes))
    }

    /// Reduces the base to the outstanding bytes, since blocks may be deallocated without the budget.
    pub(crate) fn shrink_base(&self, outstanding: u64) {
        self.change(|state| {
            let gone = state.base.saturating_sub(outstanding);
            state.base -= gone;
            state.usage.requested.current -= gone;
        });
    }

    /// Creates a charge for bytes that are already counted.
    #[inline]
    fn charged(self: &Arc<Self>, state: &mut State, bytes: u64) -> Charge {
        state.usage.blocks.add(1);
        Charge {
            meter: Arc::clone(self),
            bytes,
        }
    }
}

impl State {
    #[inline]
    fn fits(&self, bytes: u64) -> bool {
        let limit = self.usage.limit.unwrap_or(u64::MAX);
        let sum = self.usage.requested.current.checked_add(bytes);
        sum.is_some_and(|sum| sum <= limit)
    }

    /// Whether `bytes` would fit now.
    pub fn check(&self, bytes: u64) -> Result<(), Error> {
        match self.fits(bytes) {
            true => Ok(()),
            false => Err(self.refusal(bytes)),
        }
    }

    pub fn refusal(&self, bytes: u64) -> Error {
        Error::OverBudget {
            owner: "budget",
            requested: bytes,
            limit: self.usage.limit.unwrap_or(u64::MAX),
            used: self.usage.requested.current,
        }
    }

    /// Counts bytes. There are no sums of bytes, which would include failed requests.
    #[inline]
    fn add(&mut self, bytes: u64) {
        let requested = &mut self.usage.requested;
        requested.current += bytes;
        requested.peak = requested.peak.max(requested.current);
    }
}

impl fmt::Debug for Meter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Meter").field(&self.lock().usage).finish()
    }
}

/// Charged bytes, released on drop. Must not be dropped under a lock, since it calls listeners.
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
}

impl Drop for Charge {
    #[inline]
    fn drop(&mut self) {
        if !process::is_forked_child() {
            self.meter.change(|state| {
                state.usage.requested.current -= self.bytes;
                state.usage.blocks.current -= 1;
            });
        }
    }
}
