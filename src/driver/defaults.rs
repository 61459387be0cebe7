//! Ids of default streams. They are computed without asking the driver, so they are always available.
//!
//! The driver counts its ids up from small numbers. Ids of default streams have the highest bit set and contain the
//! number of the thread (0 for the legacy stream, which all threads share) and the number of the context.

use crate::locks::held::Mutex;
use crate::locks::thread_id::ThreadId;
use std::collections::HashMap;

/// Set in every id of a default stream, and in no other id.
const DEFAULT: u64 = 1 << 63;
/// The number of bits of a context number.
const CONTEXT_BITS: u32 = 32;

/// Returns the number of a context, by its key: equal for all objects that stand for one context, and different for
/// other contexts.
pub(super) fn number_of(key: u64) -> u64 {
    static KNOWN: Mutex<Option<HashMap<u64, u64>>> = Mutex::new(None);
    let mut known = KNOWN.lock();
    let known = known.get_or_insert_default();
    let next = known.len() as u64;
    *known.entry(key).or_insert(next)
}

/// Returns the id of the legacy default stream of a context.
#[inline]
pub(super) fn legacy(context: u64) -> u64 {
    DEFAULT | context
}

/// Returns the id of the calling thread's default stream in a context.
#[inline]
pub(super) fn per_thread(context: u64) -> u64 {
    DEFAULT | (ThreadId::current().number() << CONTEXT_BITS) | context
}
