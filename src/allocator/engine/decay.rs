//! Decay: releases idle memory when it is due, in calls that enter the heap anyway.

use std::time::Duration;

use crate::allocator::config::Config;
use crate::clock::Clock;
use crate::locks::held::Mutex;

/// When idle memory is checked next.
#[derive(Debug)]
pub(crate) struct Decay {
    after: Duration,
    pub keep: f64,
    last: Mutex<Look>,
}

#[derive(Debug)]
struct Look {
    clock: Clock,
    due: Duration,
    /// The clock of views at the last check: a view whose last block was freed before it has been idle since then.
    views: u64,
}

impl Decay {
    /// Returns `None` if decay is off.
    pub(crate) fn of(config: &Config) -> Option<Decay> {
        let after = config.decay?;
        let clock = Clock::default();
        let due = clock.now().saturating_add(after);
        Some(Decay {
            after,
            keep: config.keep.unwrap_or(0.0),
            last: Mutex::new(Look {
                clock,
                due,
                views: 0,
            }),
        })
    }

    /// Replaces the clock.
    pub(crate) fn set_clock(&self, clock: Clock) {
        let mut last = self.last.lock();
        last.due = clock.now().saturating_add(self.after);
        last.clock = clock;
    }

    /// Whether a check is due. Only one caller receives true for each check.
    pub(crate) fn is_due(&self) -> bool {
        // The thread that holds the lock makes the check.
        let Some(mut last) = self.last.try_lock() else {
            return false;
        };
        let now = last.clock.now();
        let due = now >= last.due;
        if due {
            last.due = now.saturating_add(self.after);
        }
        due
    }

    /// Returns the clock of views at the last check, and stores the given one.
    pub(crate) fn turn(&self, views: u64) -> u64 {
        let mut last = self.last.lock();
        std::mem::replace(&mut last.views, views)
    }
}
