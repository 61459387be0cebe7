//! A clock that tests can control.

use std::sync::{Arc, Condvar, Weak};
use std::time::{Duration, Instant};

use crate::driver::process;
use crate::locks::held::{Locked, Mutex};

/// A condition that wakes a sleeping thread early.
#[derive(Debug, Default)]
pub(crate) struct Wakeup {
    /// The number of notifications.
    count: Mutex<u64>,
    condition: Condvar,
}

impl Wakeup {
    /// Wakes all waiting threads.
    pub(crate) fn wake(&self) {
        *self.lock() += 1;
        self.condition.notify_all();
    }

    /// Returns the number of notifications so far. Read it before checking the condition that is waited for.
    pub(crate) fn count(&self) -> u64 {
        *self.lock()
    }

    fn lock(&self) -> Locked<'_, u64> {
        process::lock(&self.count)
    }
}

/// The source of time for policies, the watchdog and the decay of idle memory: the system's monotonic clock, or a
/// manual clock that a test advances. Clones show the same time.
#[derive(Debug, Clone)]
pub struct Clock(Arc<Kind>);

#[derive(Debug)]
enum Kind {
    System(Instant),
    Manual {
        state: Mutex<Manual>,
        arrived: Condvar,
    },
}

#[derive(Debug, Default)]
struct Manual {
    now: Duration,
    sleepers: Vec<(Duration, Weak<Wakeup>)>,
    /// The number of waits so far.
    waits: u64,
}

impl Default for Clock {
    fn default() -> Clock {
        Clock(Arc::new(Kind::System(Instant::now())))
    }
}

impl Clock {
    /// Creates a manual clock.
    pub fn manual() -> Clock {
        Clock(Arc::new(Kind::Manual {
            state: Mutex::default(),
            arrived: Condvar::new(),
        }))
    }

    fn state(&self) -> Option<(Locked<'_, Manual>, &Condvar)> {
        match &*self.0 {
            Kind::System(_) => None,
            Kind::Manual { state, arrived } => Some((process::lock(state), arrived)),
        }
    }

    /// Returns the time since a fixed moment.
    pub fn now(&self) -> Duration {
        match &*self.0 {
            Kind::System(start) => start.elapsed(),
            Kind::Manual { state, .. } => process::lock(state).now,
        }
    }

    /// Advances a manual clock, and wakes the threads whose deadline has passed.
    pub fn advance(&self, by: Duration) {
        let Some((mut state, _)) = self.state() else {
            return;
        };
        state.now += by;
        let now = state.now;
        let mut due = Vec::new();
        state.sleepers.retain(|(deadline, sleeper)| {
            if *deadline <= now {
                due.push(sleeper.clone());
            }
            *deadline > now && sleeper.strong_count() > 0
        });
        drop(state);
        for sleeper in due.iter().filter_map(Weak::upgrade) {
            sleeper.wake();
        }
    }

    /// Returns how many waits on a manual clock have begun.
    pub fn waits(&self) -> u64 {
        self.state().map_or(0, |(state, _)| state.waits)
    }

    /// Blocks until more than `seen` waits on a manual clock have begun.
    pub fn await_waiter(&self, seen: u64) {
        if process::is_forked_child() {
            return;
        }
        if let Some((mut state, arrived)) = self.state() {
            while state.waits <= seen {
                state = state.wait(arrived);
            }
        }
    }

    /// Blocks until `deadline`, or until there were more than `seen` notifications.
    pub(crate) fn wait(&self, deadline: Duration, wakeup: &Arc<Wakeup>, seen: u64) {
        if process::is_forked_child() {
            // No other thread could notify it.
            return;
        }
        let is_manual = match self.state() {
            None => false,
            Some((mut state, arrived)) => {
                state.waits += 1;
                arrived.notify_all();
                if deadline <= state.now {
                    return;
                }
                state.sleepers.push((deadline, Arc::downgrade(wakeup)));
                true
            }
        };
        let mut count = wakeup.lock();
        while *count == seen {
            if is_manual {
                count = count.wait(&wakeup.condition);
                continue;
            }
            let left = deadline.saturating_sub(self.now());
            if left.is_zero() {
                return;
            }
            count = count.wait_timeout(&wakeup.condition, left);
        }
    }
}
