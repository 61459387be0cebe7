//! When memory gets tight.

use std::fmt;
use std::sync::Arc;

use crate::driver::process;
use crate::error::{Error, InvalidArgument};

use super::meter::Pressure;
use crate::locks::held::Mutex;

type Transition = dyn Fn(Pressure, Pressure) + Send + Sync;
type Eviction = dyn Fn(u64) -> u64 + Send + Sync;

#[derive(Default)]
struct State {
    level: Pressure,
    transition: Option<Arc<Transition>>,
    eviction: Option<Arc<Eviction>>,
    evicted: u64,
    evictions: u64,
}

/// Watches how much of something is in use, tells of changes, and asks for memory back when it is
/// critical. `Send` and `Sync`; hooks run without any lock held, on the thread that observes.
///
/// It has no thread and no clock of its own: somebody calls [`observe`](Self::observe) or
/// [`poll`](Self::poll).
///
/// ```
/// use cualloc::resource::{Pressure, PressureMonitor};
/// let monitor = PressureMonitor::new(0.5, 0.9)?;
/// monitor.on_eviction(|bytes| bytes);
/// assert_eq!(monitor.observe(60, 100), Pressure::High);
/// assert_eq!(monitor.observe(95, 100), Pressure::Critical);
/// // Enough to be below the warning fraction again.
/// assert_eq!(monitor.evicted(), (46, 1));
/// # Ok::<(), cualloc::Error>(())
/// ```
pub struct PressureMonitor {
    /// The share in use that is worth a warning.
    warning: f64,
    /// The share in use that is critical.
    critical: f64,
    state: Mutex<State>,
}

impl PressureMonitor {
    /// A monitor that has seen nothing yet, for two shares of the total in use: the one that is worth a
    /// warning, and the one that is critical.
    ///
    /// # Errors
    /// [`InvalidArgument::Setting`], with the share in percent, unless 0 < warning < critical <= 1.
    pub fn new(warning: f64, critical: f64) -> Result<PressureMonitor, Error> {
        let wrong = |what, share: f64| {
            Err(Error::Invalid(InvalidArgument::Setting {
                what,
                value: (share * 100.0) as u64,
            }))
        };
        if !(warning > 0.0 && warning < critical) {
            return wrong("warning percentage", warning);
        }
        if critical > 1.0 {
            return wrong("critical percentage", critical);
        }
        Ok(PressureMonitor {
            warning,
            critical,
            state: Mutex::default(),
        })
    }

    /// How tight memory is with `used` of `total` bytes in use: [`Pressure::None`] below the warning
    /// share, [`Pressure::High`] from there on, [`Pressure::Critical`] from the critical share on. Nothing
    /// is tight if there is nothing.
    pub fn classify(&self, used: u64, total: u64) -> Pressure {
        if total == 0 {
            return Pressure::None;
        }
        let share = used as f64 / total as f64;
        if share >= self.critical {
            Pressure::Critical
        } else if share >= self.warning {
            Pressure::High
        } else {
            Pressure::None
        }
    }

    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        change(&mut process::lock(&self.state))
    }

    /// The level last seen.
    pub fn level(&self) -> Pressure {
        self.change(|state| state.level)
    }

    /// Sets what is told of each change of the level, as (old, new). Replaces the one before.
    pub fn on_transition(&self, hook: impl Fn(Pressure, Pressure) + Send + Sync + 'static) {
        let old = self.change(|state| state.transition.replace(Arc::new(hook)));
        // What it captured is dropped without the lock.
        drop(old);
    }

    /// Sets what is asked for memory at each observation of [`Pressure::Critical`]: it gets the bytes
    /// that are in use beyond the warning fraction (and one) and returns how many it freed. Replaces
    /// the one before.
    pub fn on_eviction(&self, hook: impl Fn(u64) -> u64 + Send + Sync + 'static) {
        let old = self.change(|state| state.eviction.replace(Arc::new(hook)));
        drop(old);
    }

    /// Bytes that the eviction hook has freed, as it says, and how often it was asked.
    pub fn evicted(&self) -> (u64, u64) {
        self.change(|state| (state.evicted, state.evictions))
    }

    /// Takes note of `used` of `total` bytes in use.
    pub fn observe(&self, used: u64, total: u64) -> Pressure {
        let level = self.classify(used, total);
        let (old, transition, eviction) = self.change(|state| {
            let old = std::mem::replace(&mut state.level, level);
            (old, state.transition.clone(), state.eviction.clone())
        });
        if old != level
            && let Some(hook) = transition
        {
            hook(old, level);
        }
        if level == Pressure::Critical
            && let Some(hook) = eviction
        {
            let calm = (self.warning * total as f64).ceil() as u64;
            let freed = hook(used.saturating_add(1).saturating_sub(calm));
            self.change(|state| {
                state.evicted = state.evicted.saturating_add(freed);
                state.evictions += 1;
            });
        }
        level
    }

    /// Asks `source` for (used, total) bytes and takes note of them.
    ///
    /// # Errors
    /// Those of the source; then nothing has changed.
    pub fn poll<E>(&self, source: impl FnOnce() -> Result<(u64, u64), E>) -> Result<Pressure, E> {
        let (used, total) = source()?;
        Ok(self.observe(used, total))
    }
}

impl fmt::Debug for PressureMonitor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PressureMonitor")
            .field("warning", &self.warning)
            .field("critical", &self.critical)
            .field("level", &self.level())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// S3.24
    #[test]
    fn s3_24_fractions_are_validated_and_changes_told_once() {
        for (warning, critical) in [
            (0.0, 0.5),
            (0.5, 0.5),
            (0.9, 0.5),
            (0.5, 1.1),
            (f64::NAN, 0.5),
            (0.5, f64::NAN),
        ] {
            let made = PressureMonitor::new(warning, critical);
            assert!(made.is_err(), "{warning} {critical}");
        }
        let monitor = Arc::new(PressureMonitor::new(0.5, 1.0).unwrap());
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (log, again) = (Arc::clone(&seen), Arc::clone(&monitor));
        monitor.on_transition(move |old, new| {
            // A hook may use the monitor.
            assert_eq!(again.level(), new);
            log.lock().push((old, new));
        });
        monitor.on_eviction(|bytes| bytes / 2);
        for used in [0, 49, 50, 99, 100, 100, 10] {
            monitor.observe(used, 100);
        }
        use Pressure::{Critical, High, None};
        assert_eq!(
            *seen.lock(),
            [(None, High), (High, Critical), (Critical, None)]
        );
        assert_eq!(monitor.evicted(), (50, 2));
        assert_eq!(monitor.poll(|| Err::<(u64, u64), _>("away")), Err("away"));
        assert_eq!(monitor.poll(|| Ok::<_, ()>((0, 0))), Ok(None));
    }

    #[test]
    fn hooks_may_own_the_monitor_and_figures_may_be_any() {
        struct Asks(Arc<PressureMonitor>);
        impl Drop for Asks {
            fn drop(&mut self) {
                assert_eq!(self.0.level(), Pressure::Critical);
            }
        }
        let monitor = Arc::new(PressureMonitor::new(0.8, 0.95).unwrap());
        let asks = Asks(Arc::clone(&monitor));
        monitor.on_eviction(move |bytes| {
            let _keeps = &asks;
            bytes
        });
        monitor.observe(u64::MAX, u64::MAX);
        assert_eq!(monitor.evicted().1, 1);
        let asks = Asks(Arc::clone(&monitor));
        monitor.on_transition(move |_, _| drop(Arc::clone(&asks.0)));
        monitor.on_eviction(|_| 0);
        monitor.on_transition(|_, _| ());
    }
}
