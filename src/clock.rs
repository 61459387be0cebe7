//! Time that can be given by a test.

use std::sync::{Arc, Condvar, Weak};
use std::time::{Duration, Instant};

use crate::driver::process;
use crate::locks::held::{Locked, Mutex};

/// Something that a sleeping thread can be woken by before its time.
#[derive(Debug, Default)]
pub(crate) struct Wakeup {
    /// How often it was woken.
    count: Mutex<u64>,
    condition: Condvar,
}

impl Wakeup {
    /// Wakes all who wait.
    pub(crate) fn wake(&self) {
        *self.lock() += 1;
        self.condition.notify_all();
    }

    /// How often it was woken. To be asked before the condition that is waited for is checked.
    pub(crate) fn count(&self) -> u64 {
        *self.lock()
    }

    fn lock(&self) -> Locked<'_, u64> {
        process::lock(&self.count)
    }
}

/// Where policies, the watchdog and the decay of idle memory get their time from: the system's clock, which never goes back, or one that
/// stands still until a test tells it to go on. Clones show the same time.
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
    /// Waits so far.
    waits: u64,
}

impl Default for Clock {
    fn default() -> Clock {
        Clock(Arc::new(Kind::System(Instant::now())))
    }
}

impl Clock {
    /// A clock that stands still.
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

    /// Time since some fixed moment.
    pub fn now(&self) -> Duration {
        match &*self.0 {
            Kind::System(start) => start.elapsed(),
            Kind::Manual { state, .. } => process::lock(state).now,
        }
    }

    /// Lets a manual clock go on, and wakes whoever waits for a time that has come.
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

    /// How often somebody has begun to wait by a manual clock.
    pub fn waits(&self) -> u64 {
        self.state().map_or(0, |(state, _)| state.waits)
    }

    /// Blocks until somebody has begun to wait more than `seen` times by a manual clock.
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

    /// Blocks until `deadline`, or until `wakeup` was woken more than `seen` times.
    pub(crate) fn wait(&self, deadline: Duration, wakeup: &Arc<Wakeup>, seen: u64) {
        if process::is_forked_child() {
            // Nobody is there who could wake it.
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
