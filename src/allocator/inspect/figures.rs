//! Figures about reserved memory: the sizes and owners of free pieces, and the contents of views.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::allocator::extent::record::COMPLETE;
use crate::allocator::heap::Heap;
use crate::allocator::report::{Fragmentation, Packing};
use crate::allocator::size::GRANULE;
use crate::allocator::stats::Stats;
use crate::error::StreamBytes;

/// Returns the cheap figures about packing.
fn packing(heap: &Heap) -> Packing {
    let view_granules: u64 = heap.views.map.values().map(|v| u64::from(v.granules)).sum();
    Packing {
        soft_cap: match heap.rules.maps() && heap.peak_live > 0 {
            true => heap.soft_cap(),
            false => 0,
        },
        regime: heap.physical.regime,
        views: heap.views.map.len() as u64,
        view_maps: heap.views.view_maps() as u64,
        view_bytes: view_granules * GRANULE,
        view_live: heap.views.aliased_bytes,
        guarded: heap.guards.bytes,
        last_growth: heap.physical.last_growth,
        self_test: heap.views.self_test,
    }
}

/// Computes fragmentation by a walk over all free memory.
pub(crate) fn fragmentation(heap: &Heap) -> Fragmentation {
    Fragmentation {
        free: heap.extents.free_bytes(),
        largest: heap.extents.largest_run(),
        stranded: stranded(heap),
        view_live: heap.views.aliased_bytes,
    }
}

/// Free and decommitted bytes pending on each stream, and the part of them that no marker covers, by slot.
fn waiting(heap: &Heap) -> BTreeMap<u32, (u64, u64)> {
    let mut by_slot: BTreeMap<u32, (u64, u64)> = BTreeMap::new();
    for entry in heap.extents.spaces().flat_map(|space| space.pieces()) {
        if heap.extents.records[entry.id].stream == COMPLETE {
            continue;
        }
        let bytes = u64::from(entry.granules) * GRANULE;
        let uses = heap.extents.records.cold(entry.id).uses.as_slice();
        for u in uses.iter().filter(|u| !heap.streams.is_complete(u)) {
            let sum = by_slot.entry(u.stream).or_default();
            sum.0 += bytes;
            sum.1 += if heap.streams.marker(u).is_none() {
                bytes
            } else {
                0
            };
        }
    }
    for (u, bytes) in heap.ranges.pending(&heap.streams) {
        let sum = by_slot.entry(u.stream).or_default();
        sum.0 += bytes;
        sum.1 += bytes * u64::from(heap.streams.marker(u).is_none());
    }
    by_slot
}

fn by_stream(heap: &Heap, by_slot: BTreeMap<u32, (u64, u64)>) -> Vec<StreamBytes> {
    let streams = by_slot.into_iter();
    let mut streams: Vec<_> = streams
        .map(|(slot, (bytes, unmarked))| StreamBytes {
            stream_id: heap.streams[slot].key.number(),
            bytes,
            unmarked,
        })
        .collect();
    streams.sort_by_key(|stream| Reverse(stream.bytes));
    streams
}

/// Returns the free bytes pending on each stream, in descending order.
pub(crate) fn pending_bytes(heap: &Heap) -> Vec<StreamBytes> {
    by_stream(heap, waiting(heap))
}

/// Returns the bytes that each stream keeps from the others, including the free part of its pages, in descending
/// order.
fn stranded(heap: &Heap) -> Vec<StreamBytes> {
    let mut by_slot = waiting(heap);
    for (slot, bytes) in heap.caches.free_in_caches() {
        by_slot.entry(slot).or_default().0 += bytes;
    }
    by_stream(heap, by_slot)
}

pub(crate) fn statistics(heap: &Heap) -> Stats {
    let mut stats = heap.stats;
    stats.free = heap.extents.free_bytes();
    stats.free_blocks = heap.extents.spaces().map(|s| s.piece_count() as u64).sum();
    stats.largest_free = heap
        .extents
        .spaces()
        .map(|s| s.largest_piece())
        .max()
        .unwrap_or(0);
    stats.nodes = heap.extents.records.len() as u64;
    stats.limit = heap.physical.limit;
    stats.headroom = heap.physical.headroom;
    stats.graph_pools = heap.graphs.held;
    stats.ranges = heap.ranges.held;
    stats.count_held(heap.graphs.held, heap.graphs.handles, heap.ranges.held);
    stats.ranges_leaving = heap.ranges.leaving;
    heap.caches.add_to(&mut stats, heap.mixed_peak);
    stats.packing = packing(heap);
    stats
}
