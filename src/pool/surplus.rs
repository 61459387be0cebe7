//! The threshold above which an allocator's unused memory goes back to the driver.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::allocator::{Allocator, Policy};
use crate::error::{Error, RareLog};

/// The bytes that may be held unused, `u64::MAX` for any number. A pool applies it at each allocation and free.
pub(super) struct Surplus {
    threshold: AtomicU64,
    log: RareLog,
}

impl Default for Surplus {
    fn default() -> Self {
        Surplus {
            threshold: AtomicU64::new(u64::MAX),
            log: RareLog::default(),
        }
    }
}

impl Surplus {
    /// The bytes that may be held unused; `None` for any number.
    pub fn threshold(&self) -> Option<u64> {
        Some(self.threshold.load(Ordering::Relaxed)).filter(|bytes| *bytes != u64::MAX)
    }

    /// Sets the threshold, and gives back what is above it.
    pub fn set(&self, bytes: Option<u64>, allocator: Option<&Allocator>) -> Result<(), Error> {
        let bytes = bytes.unwrap_or(u64::MAX);
        self.threshold.store(bytes, Ordering::Relaxed);
        allocator.map_or(Ok(()), |allocator| allocator.trim(bytes).map(drop))
    }

    /// Gives back what is above the threshold, by a call that waits for running work only if that is allowed.
    #[inline]
    pub fn release(&self, allocator: &Allocator, may_wait: bool) {
        if let Some(threshold) = self.threshold() {
            self.release_above(threshold, allocator, may_wait);
        }
    }

    #[cold]
    fn release_above(&self, threshold: u64, allocator: &Allocator, may_wait: bool) {
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
