//! Memory pressure: levels, listeners, and a monitor with thresholds of its own.

use std::fmt;
use std::sync::Arc;

use crate::driver::process;
use crate::error::{Error, InvalidArgument};
use crate::foreign::guarded;
use crate::locks::held::{Mutex, RwLock};

/// How scarce memory is: by the share of a limit that is free.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[repr(u8)]
pub enum Pressure {
    /// More than 30 % is free, or there is no limit.
    #[default]
    None,
    /// More than 10 %.
    Low,
    /// More than 5 %.
    Medium,
    /// More than nothing.
    High,
    /// Nothing is free.
    Critical,
}

impl Pressure {
    /// Returns the level with `used` bytes in use of a limit in bytes.
    #[inline]
    pub fn of(used: u64, limit: Option<u64>) -> Pressure {
        let Some(limit) = limit else {
            return Pressure::None;
        };
        let free = limit.saturating_sub(used);
        if free > limit / 2 {
            return Pressure::None;
        }
        let (free, limit) = (u128::from(free) * 100, u128::from(limit));
        match free {
            0 => Pressure::Critical,
            _ if free > limit * 30 => Pressure::None,
            _ if free > limit * 10 => Pressure::Low,
            _ if free > limit * 5 => Pressure::Medium,
            _ => Pressure::High,
        }
    }

    /// The level's name in lower case.
    pub fn name(self) -> &'static str {
        ["none", "low", "medium", "high", "critical"][self as usize]
    }
}

impl fmt::Display for Pressure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Gets the old and the new level.
type Listener = dyn Fn(Pressure, Pressure) + Send + Sync;

#[derive(Default)]
pub(super) struct Listeners(RwLock<Arc<Vec<Arc<Listener>>>>);

impl Listeners {
    pub fn add(&self, listener: impl Fn(Pressure, Pressure) + Send + Sync + 'static) {
        Arc::make_mut(&mut process::write(&self.0)).push(Arc::new(listener));
    }

    #[cold]
    pub fn call(&self, old: Pressure, new: Pressure) {
        let listeners = Arc::clone(&process::read(&self.0));
        for listener in listeners.iter() {
            guarded("a pressure listener", || listener(old, new));
        }
    }
}

/// Classifies the fraction of something that is in use, reports changes of the level, and calls a hook to free memory
/// while it is critical. `Send` and `Sync`; hooks run without a lock, on the thread that calls
/// [`observe`](Self::observe), for instance the probe of a [`Watchdog`](super::Watchdog).
///
/// ```
/// use cualloc::resource::{Pressure, PressureMonitor};
/// let monitor = PressureMonitor::new(0.5, 0.9)?.on_eviction(|bytes| bytes);
/// assert_eq!(monitor.observe(60, 100), Pressure::High);
/// assert_eq!(monitor.observe(95, 100), Pressure::Critical);
/// // Enough to be below the warning fraction again.
/// assert_eq!(monitor.evicted(), (46, 1));
/// # Ok::<(), cualloc::Error>(())
/// ```
pub struct PressureMonitor {
    warning: f64,
    critical: f64,
    observed: Mutex<Observed>,
    listeners: Listeners,
    eviction: Box<dyn Fn(u64) -> u64 + Send + Sync>,
}

#[derive(Debug, Default)]
struct Observed {
    level: Pressure,
    /// As returned by [`PressureMonitor::evicted`].
    evicted: (u64, u64),
}

impl PressureMonitor {
    /// Creates a monitor with the fractions in use from which on the level is [`Pressure::High`] and
    /// [`Pressure::Critical`].
    ///
    /// # Errors
    /// [`InvalidArgument::Setting`], with the fraction in percent, unless 0 < warning < critical <= 1.
    pub fn new(warning: f64, critical: f64) -> Result<PressureMonitor, Error> {
        let (what, share) = if !(warning > 0.0 && warning < critical) {
            ("warning percentage", warning)
        } else if critical > 1.0 {
            ("critical percentage", critical)
        } else {
            return Ok(PressureMonitor {
                warning,
                critical,
                observed: Mutex::default(),
                listeners: Listeners::default(),
                eviction: Box::new(|_| 0),
            });
        };
        let value = (share * 100.0) as u64;
        Err(InvalidArgument::Setting { what, value }.into())
    }

    /// Adds a listener, which gets the old and the new level at each change.
    pub fn on_transition(
        self,
        listener: impl Fn(Pressure, Pressure) + Send + Sync + 'static,
    ) -> PressureMonitor {
        self.listeners.add(listener);
        self
    }

    /// Sets the hook that each observation of [`Pressure::Critical`] calls. It gets the number of bytes to free for
    /// the use to fall below the warning fraction, and returns how many it freed.
    pub fn on_eviction(
        mut self,
        hook: impl Fn(u64) -> u64 + Send + Sync + 'static,
    ) -> PressureMonitor {
        self.eviction = Box::new(hook);
        self
    }

    /// Returns the level with `used` of `total` bytes in use; [`Pressure::None`] below the warning fraction.
    pub fn classify(&self, used: u64, total: u64) -> Pressure {
        let share = used as f64 / total as f64;
        match total {
            0 => Pressure::None,
            _ if share >= self.critical => Pressure::Critical,
            _ if share >= self.warning => Pressure::High,
            _ => Pressure::None,
        }
    }

    /// The level last observed.
    pub fn level(&self) -> Pressure {
        process::lock(&self.observed).level
    }

    /// Bytes that the eviction hook reports as freed, and how often it was called.
    pub fn evicted(&self) -> (u64, u64) {
        process::lock(&self.observed).evicted
    }

    /// Observes `used` of `total` bytes in use, and returns the level.
    pub fn observe(&self, used: u64, total: u64) -> Pressure {
        let level = self.classify(used, total);
        // Under the lock, so that each change begins with the level that the previous one ended with.
        let old = std::mem::replace(&mut process::lock(&self.observed).level, level);
        if old != level {
            self.listeners.call(old, level);
        }
        if level == Pressure::Critical {
            let calm = (self.warning * total as f64).ceil() as u64;
            let excess = used.saturating_add(1).saturating_sub(calm);
            let freed = guarded("an eviction hook", || (self.eviction)(excess)).unwrap_or(0);
            let (bytes, times) = &mut process::lock(&self.observed).evicted;
            (*bytes, *times) = (bytes.saturating_add(freed), *times + 1);
        }
        level
    }
}

debug_fields!(PressureMonitor, self =>
    warning: self.warning, critical: self.critical, level: self.level()
);
