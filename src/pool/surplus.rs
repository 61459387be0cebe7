//! An allocator of which unused memory above a threshold goes back.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use crate::allocator::{Allocator, Config, Policy, Trimmed};
use crate::driver::{Context, Driver};

use super::error::PoolError;
use super::{RareLog, device_of};

/// An allocator that is made on first use, and the threshold for what it holds without need.
pub(super) struct Surplus {
    ordinal: i64,
    /// None: the process-wide one.
    driver: Option<Driver>,
    config: Config,
    allocator: OnceLock<Allocator>,
    threshold: AtomicU64,
    log: RareLog,
}

impl Surplus {
    /// For a device of a driver, by default the process-wide one.
    pub(super) fn new(
        driver: Option<Driver>,
        ordinal: i64,
        config: Config,
    ) -> Result<Surplus, PoolError> {
        if ordinal < 0 {
            return Err(PoolError::InvalidDevice {
                ordinal,
                devices: None,
            });
        }
        Ok(Surplus {
            ordinal,
            driver,
            config,
            allocator: OnceLock::new(),
            threshold: AtomicU64::new(u64::MAX),
            log: RareLog::default(),
        })
    }

    /// Of an allocator that is there.
    pub(super) fn over(allocator: &Allocator) -> Surplus {
        Surplus {
            ordinal: allocator.context().device().ordinal() as i64,
            driver: Some(allocator.context().driver().clone()),
            config: Config::new(),
            allocator: OnceLock::from(allocator.clone()),
            threshold: AtomicU64::new(u64::MAX),
            log: RareLog::default(),
        }
    }

    /// The device's, as it was asked for.
    pub(super) fn ordinal(&self) -> i64 {
        self.ordinal
    }

    /// The allocator, if it was made.
    pub(super) fn made(&self) -> Option<&Allocator> {
        self.allocator.get()
    }

    /// The allocator, made on first use.
    pub(super) fn allocator(&self) -> Result<&Allocator, PoolError> {
        if let Some(allocator) = self.allocator.get() {
            return Ok(allocator);
        }
        let driver = match &self.driver {
            Some(driver) => driver.clone(),
            None => Driver::load()?,
        };
        let device = device_of(&driver, self.ordinal)?;
        let context = Context::primary(&driver, device)?;
        // Two threads may both get here: one of the two allocators, which holds nothing yet, goes.
        let made = Allocator::with_config(&context, self.config.clone())?;
        Ok(self.allocator.get_or_init(|| made))
    }

    /// Whether there is a threshold.
    #[inline]
    pub(super) fn is_bounded(&self) -> bool {
        self.threshold.load(Ordering::Relaxed) != u64::MAX
    }

    /// The threshold in bytes; `u64::MAX` for none.
    pub(super) fn threshold(&self) -> u64 {
        self.threshold.load(Ordering::Relaxed)
    }

    /// Sets the threshold, and gives back at once what is above it.
    pub(super) fn set_threshold(&self, bytes: u64) -> Result<(), PoolError> {
        self.threshold.store(bytes, Ordering::Relaxed);
        self.trim(bytes).map(drop)
    }

    /// Bytes held and not in live blocks.
    pub(super) fn cached(&self) -> u64 {
        self.made()
            .map_or(0, |allocator| allocator.stats().cached())
    }

    /// Gives unused memory back until at most `keep` bytes of it are held.
    pub(super) fn trim(&self, keep: u64) -> Result<Trimmed, PoolError> {
        match self.made() {
            Some(allocator) => Ok(allocator.trim(keep)?),
            None => Ok(Trimmed::default()),
        }
    }

    /// A relief hook for others, which does not keep this.
    pub(super) fn relief(self: &Arc<Self>) -> impl Fn(u64) -> u64 + Send + Sync + use<> {
        let pool = Arc::downgrade(self);
        move |missing| {
            let Some(pool) = pool.upgrade() else {
                return 0;
            };
            let Some(allocator) = pool.allocator.get() else {
                return 0;
            };
            let keep = allocator.cached().saturating_sub(missing);
            allocator.trim(keep).map_or(0, |done| done.released)
        }
    }

    /// Gives back what is above the threshold. `may_wait` says whether that may be by a call which
    /// waits for running work.
    pub(super) fn release(&self, may_wait: bool) {
        let threshold = self.threshold.load(Ordering::Relaxed);
        let Some(allocator) = self.allocator.get() else {
            return;
        };
        if threshold == u64::MAX || allocator.cached() <= threshold {
            return;
        }
        if !may_wait && allocator.policy() == Policy::Classic {
            return;
        }
        if let Err(error) = allocator.trim(threshold)
            && let Some(count) = self.log.due()
        {
            log::warn!("surplus could not be given back ({count} such events): {error}");
        }
    }
}
