//! Counts of the calls made through a function table.

use super::symbols::{Call, SYMBOL_COUNT, SYMBOLS};
use std::array;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The live counters of one driver. Every counted call writes here, so the counters have their own cache lines, apart
/// from the data that uncounted queries read.
#[repr(align(128))]
pub(super) struct Counters {
    calls: [AtomicU64; SYMBOL_COUNT],
    handle_ops: AtomicU64,
    nanos: AtomicU64,
    timing: AtomicBool,
}

impl Counters {
    pub(super) fn new() -> Counters {
        Counters {
            calls: array::from_fn(|_| AtomicU64::new(0)),
            handle_ops: AtomicU64::new(0),
            nanos: AtomicU64::new(0),
            timing: AtomicBool::new(false),
        }
    }

    /// Counts `call` and runs it, timed if timing is on.
    #[inline]
    pub(super) fn run<R>(&self, call: Call, run: impl FnOnce() -> R) -> R {
        if let Some(counter) = self.calls.get(call as usize) {
            counter.fetch_add(1, Ordering::Relaxed);
        }
        if !self.timing.load(Ordering::Relaxed) {
            return run();
        }
        let start = Instant::now();
        let result = run();
        self.nanos
            .fetch_add(saturating_nanos(start.elapsed()), Ordering::Relaxed);
        result
    }

    pub(super) fn add_handle_ops(&self, count: u64) {
        self.handle_ops.fetch_add(count, Ordering::Relaxed);
    }

    pub(super) fn set_timing(&self, on: bool) {
        self.timing.store(on, Ordering::Relaxed);
    }

    pub(super) fn snapshot(&self) -> CallCounts {
        CallCounts {
            calls: self
                .calls
                .iter()
                .map(|counter| counter.load(Ordering::Relaxed))
                .collect(),
            handle_ops: self.handle_ops.load(Ordering::Relaxed),
            nanos: self.nanos.load(Ordering::Relaxed),
        }
    }
}

fn saturating_nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// The number of calls of each driver function through a [`super::Driver`], since it was created or between two
/// snapshots.
///
/// All calls count, successful or not, except `cuStreamGetId`, `cuStreamIsCapturing` and `cuCtxGetCurrent`, which only
/// read. A function that the driver does not export is never called. Counters are read one by one: a snapshot taken
/// while other threads make calls may include one call and miss an earlier one of another thread.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct CallCounts {
    /// By index into `SYMBOLS`; empty means all zero.
    calls: Vec<u64>,
    handle_ops: u64,
    nanos: u64,
}

/// Functions that simulators count and drivers do not.
const UNCOUNTED: [usize; 3] = [
    Call::cuStreamGetId as usize,
    Call::cuStreamIsCapturing as usize,
    Call::cuCtxGetCurrent as usize,
];

impl CallCounts {
    /// Builds counts from another source, by name.
    #[cfg(feature = "sim")]
    pub(crate) fn of(count: impl Fn(&str) -> u64, nanos: u64) -> CallCounts {
        CallCounts {
            calls: SYMBOLS.iter().map(|symbol| count(symbol.name())).collect(),
            handle_ops: 0,
            nanos,
        }
    }

    /// Replaces the recorded time.
    pub(crate) fn with_nanos(self, nanos: u64) -> CallCounts {
        CallCounts { nanos, ..self }
    }

    /// Returns the number of calls of the function with this exported name; 0 for an unknown name.
    pub fn get(&self, name: &str) -> u64 {
        self.iter()
            .find(|(known, _)| *known == name)
            .map_or(0, |(_, count)| count)
    }

    /// Iterates over the functions that were called, with their counts, in the order of the table.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        SYMBOLS
            .iter()
            .zip(&self.calls)
            .filter(|(_, count)| **count != 0)
            .map(|(symbol, count)| (symbol.name(), *count))
    }

    /// Returns the number of all counted calls.
    pub fn total(&self) -> u64 {
        let counts = self.calls.iter().enumerate();
        counts
            .filter(|(index, _)| !UNCOUNTED.contains(index))
            .map(|(_, count)| count)
            .sum()
    }

    /// Returns the number of operations whose cost grows with the number of physical handles: handles created,
    /// released, and mapped into a view. Failed calls are not included.
    pub fn handle_ops(&self) -> u64 {
        self.handle_ops
    }

    /// Returns the wall-clock time in nanoseconds spent inside counted calls, over all threads, while
    /// [`super::Driver::set_timing`] was on.
    pub fn nanos(&self) -> u64 {
        self.nanos
    }

    /// Returns the difference to `earlier`, a snapshot of the same driver.
    pub fn since(&self, earlier: &CallCounts) -> CallCounts {
        CallCounts {
            calls: self
                .calls
                .iter()
                .enumerate()
                .map(|(index, now)| {
                    now.saturating_sub(earlier.calls.get(index).copied().unwrap_or(0))
                })
                .collect(),
            handle_ops: self.handle_ops.saturating_sub(earlier.handle_ops),
            nanos: self.nanos.saturating_sub(earlier.nanos),
        }
    }
}

impl fmt::Debug for CallCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map()
            .entries(self.iter())
            .entry(&"handle_ops", &self.handle_ops)
            .entry(&"nanos", &self.nanos)
            .finish()
    }
}
