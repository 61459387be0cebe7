//! Reports of segments to the hooks of the program.

use crate::allocator::engine::Engine;
use crate::allocator::engine::segment_hooks::{Segment, SegmentChange};
use crate::allocator::physical::{Fresh, Release};

/// Reports mapped or dying segments (address and bytes) of the arenas or of a graph pool to the hooks, without a lock.
pub(crate) fn report(
    engine: &Engine,
    change: SegmentChange,
    pool: Option<u64>,
    segments: impl IntoIterator<Item = (u64, u64)>,
) {
    if !engine.segment_hooks.any() {
        return;
    }
    let mut heap = engine.lock();
    let segments = segments.into_iter().map(|(address, bytes)| Segment {
        id: heap.suspended.id_of(address),
        address,
        bytes,
        pool,
    });
    let segments: Vec<Segment> = segments.collect();
    drop(heap);
    engine.segment_hooks.notify(change, &segments);
}

/// Reports memory of the arenas that has been mapped and is not published yet.
pub(crate) fn report_fresh(engine: &Engine, fresh: &Fresh) {
    report(
        engine,
        SegmentChange::Birth,
        None,
        handles_from(fresh.addr, &fresh.sizes),
    );
}

/// Returns the addresses and sizes of contiguous handles.
pub(crate) fn handles_from(home: u64, sizes: &[u64]) -> impl Iterator<Item = (u64, u64)> {
    sizes.iter().scan(home, |at, bytes| {
        let address = *at;
        *at += bytes;
        Some((address, *bytes))
    })
}

/// Reports claimed memory of the arenas before its release, or after it failed.
pub(crate) fn report_claimed<'a>(
    engine: &Engine,
    change: SegmentChange,
    claimed: impl IntoIterator<Item = &'a Release>,
) {
    let claimed = claimed.into_iter();
    report(
        engine,
        change,
        None,
        claimed.map(|release| (release.addr, release.bytes)),
    );
}
