//! Rate-limited logging of frequent failures.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::driver::process;

/// Logs the first of many equal failures, then those whose number is a power of two.
#[derive(Debug, Default)]
pub(crate) struct RareLog(AtomicU64);

impl RareLog {
    pub(crate) const fn new() -> Self {
        RareLog(AtomicU64::new(0))
    }

    /// Returns the number of this failure, counted from 1, if it should be logged.
    pub(crate) fn due(&self) -> Option<u64> {
        // A logger has locks, which a thread of the parent may have held at the fork.
        if process::is_forked_child() {
            return None;
        }
        let count = self.0.fetch_add(1, Ordering::Relaxed) + 1;
        count.is_power_of_two().then_some(count)
    }

    pub(crate) fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
