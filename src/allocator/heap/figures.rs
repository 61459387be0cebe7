//! How the memory that is held lies: what is free in which pieces and for whom, what views show, and
//! why there is as much of it.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::allocator::extent::record::COMPLETE;
use crate::allocator::extent::want::Want;
use crate::allocator::heap::Heap;
use crate::allocator::report::{Fragmentation, GrowthInfo, GrowthReason, Packing};
use crate::allocator::size::GRANULE;
use crate::error::StreamBytes;

impl Heap {
    /// The figures of how memory lies that cost little.
    pub(crate) fn packing(&self) -> Packing {
        let view_granules: u64 = self.views.map.values().map(|v| u64::from(v.granules)).sum();
        Packing {
            soft_cap: match self.rules.maps() && self.peak_live > 0 {
                true => self.soft_cap(),
                false => 0,
            },
            level: self.physical.level as u32,
            views: self.views.map.len() as u64,
            view_maps: self.views.view_maps() as u64,
            view_bytes: view_granules * GRANULE,
            view_live: self.views.aliased_bytes,
            guarded: self.guards.bytes(),
            last_growth: self.physical.last_growth,
            bursts: self.physical.bursts.figures(),
            self_test: self.views.self_test,
        }
    }

    /// A walk over all free memory.
    pub(crate) fn fragmentation(&self) -> Fragmentation {
        Fragmentation {
            free: self.extents.free_bytes(),
            largest: self.extents.largest_run(),
            stranded: self.stranded(),
            view_live: self.views.aliased_bytes,
        }
    }

    /// Free bytes that wait for each stream, and what of them no marker covers, by slot.
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

    /// Free bytes that wait for each stream, most first.
    pub(crate) fn pending_bytes(&self) -> Vec<StreamBytes> {
        self.by_stream(self.waiting())
    }

    /// What each stream keeps from the others, the free part of its pages included, most first.
    fn stranded(&self) -> Vec<StreamBytes> {
        let mut by_slot = self.waiting();
        for (slot, bytes) in self.caches.free_in_caches() {
            by_slot.entry(slot).or_default().0 += bytes;
        }
        self.by_stream(by_slot)
    }

    /// Why a request needs more memory. `claimed` are the free bytes that a plan has taken for it
    /// already.
    pub(crate) fn growth_reason(&self, want: &Want, claimed: u64) -> GrowthReason {
        let pending = self.streams.several()
            && self
                .finder(want.space, want.stream)
                .is_some_and(|finder| finder.tightest_run(want, u64::MAX).is_some());
        if pending {
            return GrowthReason::Pending;
        }
        let free = self.extents.space(want.space).map_or(0, |s| s.free_bytes());
        if free + claimed >= u64::from(want.granules) * GRANULE {
            GrowthReason::Fragmented
        } else {
            GrowthReason::Short
        }
    }

    /// Notes a growth that has just been booked.
    pub(crate) fn note_growth(&mut self, reason: GrowthReason, want: &Want, added: u64) {
        self.physical.last_growth = Some(GrowthInfo {
            reason,
            requested: want.requested,
            added,
            beyond_cap: self.rules.maps() && self.held() > self.soft_cap(),
        });
    }
}

/// Bytes of free memory among what a plan has claimed.
pub(crate) fn free_among(shards: &[crate::allocator::extent::space::Shard]) -> u64 {
    let mapped = shards.iter().filter(|s| s.mapped);
    mapped.map(|s| u64::from(s.granules) * GRANULE).sum()
}
