//! Numbers of sources.

#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};

/// The next number of a source of blocks that is not an allocator: in the half of the range that
/// allocators' numbers, which count up from 1, do not reach.
pub(crate) fn next_source() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1 << 63);
    NEXT.fetch_add(1, Ordering::Relaxed)
}
