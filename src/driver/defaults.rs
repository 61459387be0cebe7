//! Identities of default streams, which are values: the driver is not asked for them, and cannot refuse them.
//!
//! The driver counts its ids up from small numbers. Those of default streams have the highest bit, the number of
//! the thread (0 for the legacy stream, which all threads share) and the number of the context.

use crate::locks::held::Mutex;
use std::cell::Cell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// Every identity of a default stream has this bit, and none of another stream.
const DEFAULT: u64 = 1 << 63;
/// Numbers of contexts have so many bits.
const CONTEXT_BITS: u32 = 32;

/// The number of a context, by its key: the same for all that stand for one context, and no other's.
pub(super) fn number_of(key: u64) -> u64 {
    static KNOWN: Mutex<Option<HashMap<u64, u64>>> = Mutex::new(None);
    let mut known = KNOWN.lock();
    let known = known.get_or_insert_default();
    let next = known.len() as u64;
    *known.entry(key).or_insert(next)
}

/// The legacy default stream of a context.
#[inline]
pub(super) fn legacy(context: u64) -> u64 {
    DEFAULT | context
}

/// The calling thread's own default stream in a context.
#[inline]
pub(super) fn per_thread(context: u64) -> u64 {
    DEFAULT | (thread_number() << CONTEXT_BITS) | context
}

/// Numbers of threads that a simulated driver takes the calling one for begin here.
#[cfg(feature = "sim")]
const PRETENDED: u64 = 1 << 30;

/// Runs something as another thread as far as default streams are concerned. The same number is the same thread.
#[cfg(feature = "sim")]
pub(crate) fn as_thread<T>(thread: u32, run: impl FnOnce() -> T) -> T {
    struct Restore(u64);
    impl Drop for Restore {
        fn drop(&mut self) {
            NUMBER.set(self.0);
        }
    }
    let _restore = Restore(NUMBER.replace(PRETENDED + u64::from(thread)));
    run()
}

thread_local!(static NUMBER: Cell<u64> = const { Cell::new(0) });

/// The calling thread's number, from 1: no two threads of the process ever have the same.
#[inline]
fn thread_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NUMBER.with(|number| {
        if number.get() == 0 {
            number.set(NEXT.fetch_add(1, Ordering::Relaxed));
        }
        number.get()
    })
}
