//! Samples of stacks: which allocations have theirs recorded, so that each byte has the same chance.
//!
//! A thread counts the bytes that it asks for down from a random number, whose mean is the number of bytes between two
//! samples, and takes a stack when it gets to nothing. The numbers are those of a process without memory, so a block
//! of `b` bytes is sampled with the chance `1 - exp(-b / mean)`, whatever came before it, and stands for the inverse of
//! that many blocks like it.

use std::backtrace::Backtrace;
use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::event::{Event, Kind, names, session, stack};
use crate::locks::held::{Mutex, RwLock};

/// What says where a program is, instead of the stack of the thread: the number of a context, 0 for none.
pub(crate) type Source = Arc<dyn Fn() -> u32 + Send + Sync>;

/// Bytes between two samples; 0 while no stacks are taken.
static MEAN: AtomicU64 = AtomicU64::new(0);
static SOURCE: RwLock<Option<Source>> = RwLock::new(None);
/// The contexts of the stacks that are known, by their addresses.
static KNOWN: Mutex<Option<HashMap<Box<[usize]>, u32>>> = Mutex::new(None);

/// What a thread counts by.
#[derive(Clone, Copy)]
struct Countdown {
    /// The mean that it began with; 0 if it has not begun.
    mean: u64,
    left: u64,
    random: u64,
    /// It is at a sample, which may allocate itself.
    busy: bool,
}

thread_local! {
    static COUNTDOWN: Cell<Countdown> = const {
        Cell::new(Countdown { mean: 0, left: 0, random: 0, busy: false })
    };
}

impl Countdown {
    /// Whether a block of so many bytes is sampled.
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

    /// Bytes until the next sample: exponential, and at least one.
    fn draw(&mut self) -> u64 {
        // xorshift64*, of which the high bits are good.
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        let bits = self.random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11;
        let share = (bits + 1) as f64 / (1u64 << 53) as f64;
        (-share.ln() * self.mean as f64) as u64 + 1
    }
}

/// Has stacks taken with so many bytes between two of them on the average; with 0 none any more.
pub(crate) fn set_mean(bytes: u64) {
    MEAN.store(bytes, Ordering::Relaxed);
}

/// Has samples ask for the context instead of the thread's stack, where it has one. Waits until no other thread is in the
/// former one, but for so long at most: that thread may wait for this one, or be gone in a forked child.
pub(crate) fn set_source(source: Option<Source>) {
    const PATIENCE: Duration = Duration::from_secs(2);
    let mut place = SOURCE.write();
    let old = std::mem::replace(&mut *place, source);
    // What goes with it may do anything.
    drop(place);
    let Some(old) = old else { return };
    // The calling thread may be in it itself.
    let own = COUNTDOWN.try_with(|cell| usize::from(cell.get().busy));
    let (own, begun) = (own.unwrap_or(0), Instant::now());
    while Arc::strong_count(&old) > 1 + own && begun.elapsed() < PATIENCE {
        std::thread::yield_now();
    }
    drop(old);
}

/// Whether stacks are taken.
#[inline(always)]
pub(crate) fn is_on() -> bool {
    MEAN.load(Ordering::Relaxed) != 0
}

/// A block was handed out to the caller, who holds no lock of this crate: `event` says which one it is, if its stack is
/// to be recorded, and the handle of a stream that has no number in records.
#[cold]
#[inline(never)]
pub(crate) fn allocated(bytes: u64, event: impl FnOnce() -> (Event, Option<u64>)) {
    let mean = MEAN.load(Ordering::Relaxed);
    // A thread that ends has no such cell any more.
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
    let _busy = Busy;
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

/// A thread is at a sample while this lives, also where a source of contexts panics.
struct Busy;

impl Drop for Busy {
    fn drop(&mut self) {
        let _ = COUNTDOWN.try_with(|cell| {
            cell.set(Countdown {
                busy: false,
                ..cell.get()
            });
        });
    }
}

/// The context of the thread's stack.
fn of_thread() -> u32 {
    let addresses = stack::addresses();
    let known = || KNOWN.lock();
    if let Some(number) = known().get_or_insert_default().get(addresses.as_slice()) {
        return *number;
    }
    // Takes milliseconds, but in the thread that writes a file they would cost events.
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
