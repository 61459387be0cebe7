//! Shared parts of these tests.

pub use super::common::capturing::{Capturing, MODE, capture};
pub use super::common::prelude::*;
pub use cualloc::allocator::{Contents, DebugModes, Keep, Range, RangeOptions, Select, Waits};

/// Bytes of a granule unless a test asks for another one.
pub const GRANULE: u64 = 2 << 20;

/// Ranges are packed memory.
pub fn packed(test: impl Fn(&Rig)) {
    only(Policy::Packed, test);
}

pub fn options() -> RangeOptions {
    RangeOptions::new()
}

/// Granules `first` up to `end`, in bytes.
pub fn granules(first: u64, end: u64) -> std::ops::Range<u64> {
    first * GRANULE..end * GRANULE
}

/// Committed and leaving granules of a range with one stripe.
pub fn states(range: &Range) -> (u64, u64) {
    let stats = range.stats().unwrap();
    (stats.committed / GRANULE, stats.leaving / GRANULE)
}

/// Fills granules with a word.
pub fn stamp(rig: &Rig, range: &Range, at: std::ops::Range<u64>, word: u32, stream: &Stream) {
    rig.stamp(
        range.base() + at.start,
        (at.end - at.start) as usize,
        word,
        stream,
    );
}

pub fn assert_stamped(
    rig: &Rig,
    range: &Range,
    at: std::ops::Range<u64>,
    word: u32,
    stream: &Stream,
) {
    let (ptr, bytes) = (range.base() + at.start, (at.end - at.start) as usize);
    assert_eq!(rig.mismatches(ptr, bytes, word, stream), 0, "{at:?}");
}
