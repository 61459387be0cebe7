//! Identities of default streams, which are values: the driver is not asked for them, and cannot refuse them.
//!
//! The driver counts its ids up from small numbers. Those of default streams have the highest bit, the number of
//! the thread (0 for the legacy stream, which all threads share) and the number of the context.

use crate::locks::held::Mutex;
use crate::locks::thread_id::ThreadId;
use std::collections::HashMap;

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
    DEFAULT | (ThreadId::current().number() << CONTEXT_BITS) | context
}
