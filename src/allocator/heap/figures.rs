//! Figures about reserved memory: the sizes and owners of free pieces, and the contents of views.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::allocator::extent::record::COMPLETE;
use crate::allocator::heap::Heap;
use crate::allocator::report::{Fragmentation, Packing};
use crate::allocator::size::GRANULE;
use crate::error::StreamBytes;

impl Heap {
    /// Returns the cheap figures about packing.
    pub(crate) fn packing(&self) -> Packing {
        let view_granules: u64 = self.views.map.values().map(|v| u64::from(v.granules)).sum();
        Packing {
            soft_cap: match self.rules.maps() && self.peak_live > 0 {
                true => self.soft_cap(),
                false => 0,
            },
            regime: self.physical.regime,
            views: self.views.map.len() as u64,
            view_maps: self.views.view_maps() as u64,
            view_bytes: view_granules * GRANULE,
            view_live: self.views.aliased_bytes,
            guarded: self.guards.bytes(),
            last_growth: self.physical.last_growth,
            self_test: self.views.self_test,
        }
    }

    /// Computes fragmentation by a walk over all free memory.
    pub(crate) fn fragmentation(&self) -> Fragmentation {
        Fragmentation {
            free: self.extents.free_bytes(),
            largest: self.extents.largest_run(),
            stranded: self.stranded(),
            view_live: self.views.aliased_bytes,
        }
    }

    /// Free bytes pending on each stream, and the part of them that no marker covers, by slot.
    fn waiting(&self) -> BTreeMap<u32, (u64, u64)> {
        let mut by_slot: BTreeMap<u32, (u64, u64)> = BTreeMap::new();
        for entry in self.extents.spaces().flat_map(|space| space.pieces()) {
            if self.extents.records[entry.id].stream == COMPLETE {
                continue;
            }
            let bytes = u64::from(entry.granules) * GRANULE;
            let uses = self.extents.records.cold(entry.id).uses.as_slice();
            for u in uses.iter().filter(|u| !self.streams.complete(u)) {
                let sum = by_slot.entry(u.stream).or_default();
                sum.0 += bytes;
                sum.1 += if self.streams.marker(u).is_none() {
                    bytes
                } else {
                    0
                };
            }
        }
        by_slot
    }

    fn by_stream(&self, by_slot: BTreeMap<u32, (u64, u64)>) -> Vec<StreamBytes> {
        let streams = by_slot.into_iter();
        let mut streams: Vec<_> = streams
            .map(|(slot, (bytes, unmarked))| StreamBytes {
                stream_id: self.streams[slot].key.number(),
                bytes,
                unmarked,
            })
            .collect();
        streams.sort_by_key(|stream| Reverse(stream.bytes));
        streams
    }

    /// Returns the free bytes pending on each stream, in descending order.
    pub(crate) fn pending_bytes(&self) -> Vec<StreamBytes> {
        self.by_stream(self.waiting())
    }

    /// Returns the bytes that each stream keeps from the others, including the free part of its pages, in descending
    /// order.
    fn stranded(&self) -> Vec<StreamBytes> {
        let mut by_slot = self.waiting();
        for (slot, bytes) in self.caches.free_in_caches() {
            by_slot.entry(slot).or_default().0 += bytes;
        }
        self.by_stream(by_slot)
    }
}
