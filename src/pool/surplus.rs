//! What an allocator holds without need, above a threshold, goes back to the driver.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::allocator::{Allocator, Policy};
use crate::error::{Error, RareLog};

/// The threshold that keeps everything.
const NONE: u64 = u64::MAX;

/// See the text of the module. Whoever has one honours it at each allocation and free.
pub(super) struct Surplus {
    threshold: AtomicU64,
    log: RareLog,
}

impl Default for Surplus {
    fn default() -> Self {
        Surplus {
            threshold: AtomicU64::new(NONE),
            log: RareLog::default(),
        }
    }
}

impl Surplus {
    /// The bytes that may be held without need; `None` for any number.
    pub fn threshold(&self) -> Option<u64> {
        match self.threshold.load(Ordering::Relaxed) {
            NONE => None,
            bytes => Some(bytes),
        }
    }

    /// Sets the threshold, and gives back at once what is above it.
    pub fn set(&self, bytes: Option<u64>, allocator: Option<&Allocator>) -> Result<(), Error> {
        let bytes = bytes.unwrap_or(NONE);
        self.threshold.store(bytes, Ordering::Relaxed);
        match allocator {
            Some(allocator) => allocator.trim(bytes).map(drop),
            None => Ok(()),
        }
    }

    /// Gives back what is above the threshold. `may_wait` says whether that may be by a call which
    /// waits for running work.
    #[inline]
    pub fn release(&self, allocator: &Allocator, may_wait: bool) {
        if self.threshold.load(Ordering::Relaxed) != NONE {
            self.release_from(allocator, may_wait);
        }
    }

    #[cold]
    fn release_from(&self, allocator: &Allocator, may_wait: bool) {
        let threshold = self.threshold.load(Ordering::Relaxed);
        if allocator.cached() <= threshold || !may_wait && allocator.policy() == Policy::Classic {
            return;
        }
        if let Err(error) = allocator.trim(threshold)
            && let Some(count) = self.log.due()
        {
            log::warn!("cannot release surplus memory (occurrence {count}): {error}");
        }
    }
}
