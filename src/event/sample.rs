//! Sampling of stacks, with the same probability for each allocated byte.
//!
//! A thread counts down the bytes that it allocates from a random number, whose mean is the number of bytes between two
//! samples, and takes a stack at zero. The numbers are exponentially distributed and thus memoryless, so a block of `b`
//! bytes is sampled with probability `1 - exp(-b / mean)`, independently of earlier ones, and stands for the inverse of
//! that many blocks.

use std::backtrace::Backtrace;
use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::event::{Event, Kind, names, session, stack};
use crate::locks::held::{Mutex, RwLock};

/// A function that returns the place in the program, instead of the thread's stack: the number of a context, 0 for
/// none.
pub(crate) type Source = Arc<dyn Fn() -> u32 + Send + Sync>;

/// Bytes between two samples; 0 while no stacks are taken.
static MEAN: AtomicU64 = AtomicU64::new(0);
static SOURCE: RwLock<Option<Source>> = RwLock::new(None);
/// The contexts of known stacks, by their addresses.
static KNOWN: Mutex<Option<HashMap<Box<[usize]>, u32>>> = Mutex::new(None);

#[derive(Clone, Copy)]
struct Countdown {
    /// The mean that it started with; 0 before the start.
    mean: u64,
    left: u64,
    random: u64,
    /// Whether the thread is taking a sample, which may itself allocate.
    busy: bool,
}

thread_local! {
    static COUNTDOWN: Cell<Countdown> = const {
        Cell::new(Countdown { mean: 0, left: 0, random: 0, busy: false })
    };
}

impl Countdown {
    /// Whether a block of `bytes` bytes is sampled.
    fn counts(&mut self, bytes: u64, mean: u64) -> bool {
        if self.mean != mean {
            static THREADS: AtomicU64 = AtomicU64::new(1);
            if self.random == 0 {
                let number = THREADS.fetch_add(1, Ordering::Relaxed);
                self.random = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
            }
            self.mean = mean;
            self.left = self.draw();
        }
        if bytes < self.left {
            self.left -= bytes;
            return false;
        }
        self.left = self.draw();
        true
    }

    /// Returns the bytes until the next sample: exponentially distributed, and at least one.
    fn draw(&mut self) -> u64 {
        // xorshift64*, whose high bits are the good ones.
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        let bits = self.random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11;
        let share = (bits + 1) as f64 / (1u64 << 53) as f64;
        (-share.ln() * self.mean as f64) as u64 + 1
    }
}

/// Sets the average number of bytes between two samples; 0 turns sampling off.
pub(crate) fn set_mean(bytes: u64) {
    MEAN.store(bytes, Ordering::Relaxed);
}

/// Sets the function that samples call instead of taking the thread's stack. Waits until no other thread is in the
/// former one, up to a timeout: such a thread may be waiting for this one, or not exist in a forked child.
pub(crate) fn set_source(source: Option<Source>) {
    const PATIENCE: Duration = Duration::from_secs(2);
    let mut place = SOURCE.write();
    let old = std::mem::replace(&mut *place, source);
    // Dropping the former function may run arbitrary code.
    drop(place);
    let Some(old) = old else { return };
    // The calling thread itself may be inside the function.
    let own = COUNTDOWN.try_with(|cell| usize::from(cell.get().busy));
    let (own, begun) = (own.unwrap_or(0), Instant::now());
    while Arc::strong_count(&old) > 1 + own && begun.elapsed() < PATIENCE {
        std::thread::yield_now();
    }
    drop(old);
}

#[inline(always)]
pub(crate) fn is_on() -> bool {
    MEAN.load(Ordering::Relaxed) != 0
}

/// Handles an allocation of the calling thread, which holds no lock of this crate. If its stack is to be recorded,
/// `event` returns the event, and the handle of a stream without a number in records.
#[cold]
#[inline(never)]
pub(crate) fn allocated(bytes: u64, event: impl FnOnce() -> (Event, Option<u64>)) {
    let mean = MEAN.load(Ordering::Relaxed);
    // An ending thread no longer has the cell.
    let due = COUNTDOWN.try_with(|cell| {
        let mut countdown = cell.get();
        let due = mean != 0 && !countdown.busy && countdown.counts(bytes, mean);
        countdown.busy |= due;
        cell.set(countdown);
        due
    });
    if !due.unwrap_or(false) {
        return;
    }
    let _busy = SamplingGuard;
    let source = SOURCE.read().clone();
    let context = source.map_or(0, |source| source());
    let context = match context {
        0 => of_thread(),
        context => context,
    };
    let (event, handle) = event();
    debug_assert_eq!(event.kind, Kind::Sample);
    match handle {
        Some(handle) => session::push_of(handle, event, context),
        None => session::push_in(event, context),
    }
}

/// Marks the thread as taking a sample while it lives, even if a source of contexts panics.
struct SamplingGuard;

impl Drop for SamplingGuard {
    fn drop(&mut self) {
        let _ = COUNTDOWN.try_with(|cell| {
            cell.set(Countdown {
                busy: false,
                ..cell.get()
            });
        });
    }
}

fn of_thread() -> u32 {
    let addresses = stack::addresses();
    let known = || KNOWN.lock();
    if let Some(number) = known().get_or_insert_default().get(addresses.as_slice()) {
        return *number;
    }
    // This takes milliseconds; in the thread that writes the file, events would be lost meanwhile.
    let number = names::number_of(&stack::text(&Backtrace::force_capture()));
    if number != 0 {
        let addresses = addresses.into_boxed_slice();
        known().get_or_insert_default().insert(addresses, number);
        session::names_changed();
    }
    number
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_sampled_with_the_chance_of_its_bytes() {
        let mut countdown = Countdown {
            mean: 0,
            left: 0,
            random: 77,
            busy: false,
        };
        for (bytes, mean) in [(1_000, 10_000), (10_000, 10_000), (30_000, 10_000)] {
            let rounds = 200_000;
            let sampled = (0..rounds)
                .filter(|_| countdown.counts(bytes, mean))
                .count();
            let chance = 1.0 - (-(bytes as f64) / mean as f64).exp();
            let found = sampled as f64 / f64::from(rounds);
            assert!(
                (found / chance - 1.0).abs() < 0.03,
                "{bytes}: {found} and not {chance}"
            );
        }
    }
}
