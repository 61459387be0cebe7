//! The meter of a budget: bytes charged against a limit in one step.

use std::fmt;
use std::sync::Arc;

use crate::driver::process;
use crate::error::Error;
use crate::locks::held::{Locked, Mutex};

use super::pressure::{Level, Listeners, Pressure};
use super::usage::Usage;

/// Counts bytes against a limit. All methods may be called from any thread; a charge never exceeds the limit. In a
/// forked child nothing is counted.
#[derive(Default)]
pub(crate) struct Meter {
    state: Mutex<State>,
    pub(super) listeners: Listeners,
}

#[derive(Default)]
pub(super) struct State {
    /// The limit, charged bytes as requested ones, charged blocks, requests and failures.
    pub usage: Usage,
    /// Bytes among those charged that were outstanding when the budget was made and have not left since.
    base: u64,
    level: Level,
}

impl Meter {
    /// A meter of a resource with `base` bytes outstanding.
    pub(crate) fn new(limit: Option<u64>, base: u64) -> Arc<Meter> {
        let meter = Arc::<Meter>::default();
        meter.change(|state| {
            state.usage.limit = limit;
            state.add(base);
            state.base = base;
        });
        meter
    }

    pub(super) fn lock(&self) -> Locked<'_, State> {
        process::lock(&self.state)
    }

    /// Changes the state, then calls the listeners without the lock if the level has changed.
    #[inline]
    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.lock();
        let result = change(&mut state);
        let usage = &state.usage;
        let now = Pressure::of(usage.requested.current, usage.limit);
        if let Some(old) = state.level.adopt(now) {
            drop(state);
            self.listeners.call(old, now);
        }
        result
    }

    pub(crate) fn set_limit(&self, limit: Option<u64>) {
        self.change(|state| state.usage.limit = limit);
    }

    /// Takes `bytes` out of the budget for a block, all or nothing.
    #[inline]
    pub(crate) fn charge(self: &Arc<Self>, bytes: u64) -> Result<Charge, Error> {
        self.change(|state| {
            state.check(bytes)?;
            state.usage.requests += 1;
            state.add(bytes);
            Ok(self.charged(state, bytes))
        })
    }

    /// Counts a request that failed, before or after it was charged.
    #[cold]
    pub(crate) fn failed(&self, charged: bool) {
        let mut state = self.lock();
        state.usage.requests += u64::from(!charged);
        state.usage.failures += 1;
    }

    /// Moves the bytes of a block that was live when the budget was made into a charge of its own.
    pub(crate) fn charge_from_base(self: &Arc<Self>, bytes: u64) -> Option<Charge> {
        let mut state = self.lock();
        let bytes = bytes.min(state.base);
        state.base -= bytes;
        (bytes > 0).then(|| self.charged(&mut state, bytes))
    }

    /// Bytes of the base leave by other ways than through the budget: no more are left than are outstanding.
    pub(crate) fn shrink_base(&self, outstanding: u64) {
        self.change(|state| {
            let gone = state.base.saturating_sub(outstanding);
            state.base -= gone;
            state.usage.requested.current -= gone;
        });
    }

    /// A charge of bytes that are counted already.
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
    /// Whether `bytes` would fit now.
    #[inline]
    pub fn check(&self, bytes: u64) -> Result<(), Error> {
        let used = self.usage.requested.current;
        let limit = self.usage.limit.unwrap_or(u64::MAX);
        match used.checked_add(bytes) {
            Some(sum) if sum <= limit => Ok(()),
            _ => Err(Error::OverBudget {
                owner: "budget",
                requested: bytes,
                limit,
                used,
            }),
        }
    }

    /// Counts bytes. Sums of bytes are not kept: requests that fail would be among them.
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
