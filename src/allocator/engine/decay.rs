//! Idle memory that goes back to the driver by itself: when it is time, in calls that come to the heap anyway.

use std::time::Duration;

use crate::allocator::config::Config;
use crate::clock::Clock;
use crate::locks::held::Mutex;

/// When memory is looked at next.
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
    /// The clock of views at the last look: views that had their last block by then are idle since.
    views: u64,
}

impl Decay {
    /// None if memory stays.
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

    /// Takes the time from another clock from here on.
    pub(crate) fn set_clock(&self, clock: Clock) {
        let mut last = self.last.lock();
        last.due = clock.now().saturating_add(self.after);
        last.clock = clock;
    }

    /// Whether it is time to look again: to nobody else then.
    pub(crate) fn is_due(&self) -> bool {
        // Whoever has the lock looks.
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

    /// The clock of views at the last look; it stands there now.
    pub(crate) fn turn(&self, views: u64) -> u64 {
        let mut last = self.last.lock();
        std::mem::replace(&mut last.views, views)
    }
}
