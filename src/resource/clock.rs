//! Time that can be given by a test.

use std::sync::{Arc, Condvar, Mutex, Weak};
use std::time::{Duration, Instant};

use crate::driver::process;
use crate::locks::held::Locked;

/// Something that a sleeping thread can be woken by before its time.
#[derive(Debug, Default)]
pub struct Wakeup {
    /// How often it was woken.
    count: Mutex<u64>,
    condition: Condvar,
}

impl Wakeup {
    /// A new one, as clocks take it.
    pub fn new() -> Arc<Wakeup> {
        Arc::default()
    }

    /// Wakes all who wait.
    pub fn wake(&self) {
        *self.lock() += 1;
        self.condition.notify_all();
    }

    /// How often it was woken. To be asked before the condition that is waited for is checked.
    pub fn count(&self) -> u64 {
        *self.lock()
    }

    fn lock(&self) -> Locked<'_, u64> {
        process::lock(&self.count)
    }
}

/// Where policies and the watchdog get their time from.
pub trait Clock: std::fmt::Debug + Send + Sync {
    /// Time since some fixed moment.
    fn now(&self) -> Duration;

    /// Blocks until `deadline`, or until `wakeup` was woken more than `seen` times.
    fn wait(&self, deadline: Duration, wakeup: &Arc<Wakeup>, seen: u64);
}

/// The system's clock, which never goes back.
#[derive(Debug)]
pub struct SystemClock(Instant);

impl Default for SystemClock {
    fn default() -> SystemClock {
        SystemClock(Instant::now())
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }

    fn wait(&self, deadline: Duration, wakeup: &Arc<Wakeup>, seen: u64) {
        if process::is_forked_child() {
            // Nobody is there who could wake it.
            return;
        }
        let mut count = wakeup.lock();
        while *count == seen {
            let left = deadline.saturating_sub(self.now());
            if left.is_zero() {
                return;
            }
            count = count.wait_timeout(&wakeup.condition, left);
        }
    }
}

/// A clock that stands still until it is told to go on. Clones show the same time.
///
/// ```
/// use cualloc::resource::{Clock, ManualClock};
/// use std::time::Duration;
/// let clock = ManualClock::default();
/// clock.advance(Duration::from_secs(3600));
/// assert_eq!(clock.now(), Duration::from_secs(3600));
/// ```
#[derive(Debug, Clone, Default)]
pub struct ManualClock(Arc<Manual>);

#[derive(Debug, Default)]
struct Manual {
    state: Mutex<ManualState>,
    arrived: Condvar,
}

#[derive(Debug, Default)]
struct ManualState {
    now: Duration,
    sleepers: Vec<(Duration, Weak<Wakeup>)>,
    /// Waits so far.
    waits: u64,
}

impl ManualClock {
    fn state(&self) -> Locked<'_, ManualState> {
        process::lock(&self.0.state)
    }

    /// Goes on, and wakes whoever waits for a time that has come.
    pub fn advance(&self, by: Duration) {
        let due: Vec<_> = {
            let mut state = self.state();
            state.now += by;
            let now = state.now;
            let mut due = Vec::new();
            state.sleepers.retain(|(deadline, sleeper)| {
                if *deadline <= now {
                    due.push(sleeper.clone());
                }
                *deadline > now && sleeper.strong_count() > 0
            });
            due
        };
        for sleeper in due.iter().filter_map(Weak::upgrade) {
            sleeper.wake();
        }
    }

    /// How often somebody has begun to wait.
    pub fn waits(&self) -> u64 {
        self.state().waits
    }

    /// Blocks until somebody has begun to wait more than `seen` times: for tests that then advance.
    pub fn await_waiter(&self, seen: u64) {
        if process::is_forked_child() {
            return;
        }
        let mut state = self.state();
        while state.waits <= seen {
            state = state.wait(&self.0.arrived);
        }
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Duration {
        self.state().now
    }

    fn wait(&self, deadline: Duration, wakeup: &Arc<Wakeup>, seen: u64) {
        if process::is_forked_child() {
            return;
        }
        {
            let mut state = self.state();
            state.waits += 1;
            self.0.arrived.notify_all();
            if deadline <= state.now {
                return;
            }
            state.sleepers.push((deadline, Arc::downgrade(wakeup)));
        }
        let mut count = wakeup.lock();
        while *count == seen {
            count = count.wait(&wakeup.condition);
        }
    }
}
