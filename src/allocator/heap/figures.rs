//! How the memory that is held lies: what is free in which pieces and for whom, what views show, and
//! why there is as much of it.

use crate::allocator::extent::record::COMPLETE;
use crate::allocator::extent::want::Want;
use crate::allocator::heap::Heap;
use crate::allocator::report::{Fragmentation, GrowthInfo, GrowthReason, Packing, Stranded};
use crate::allocator::size::GRANULE;

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
            view_live: self.views.lent_bytes,
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
            view_live: self.views.lent_bytes,
        }
    }

    fn stranded(&self) -> Vec<Stranded> {
        let mut by_slot: std::collections::BTreeMap<u32, (u64, u64)> = Default::default();
        for space in self.extents.spaces() {
            for entry in space.pieces() {
                let bytes = u64::from(entry.granules) * GRANULE;
                if self.extents.records[entry.id].stream == COMPLETE {
                    continue;
                }
                let uses = self.extents.records.cold(entry.id).uses.as_slice();
                for u in uses.iter().filter(|u| !self.streams.complete(u)) {
                    by_slot.entry(u.stream).or_default().0 += bytes;
                }
            }
        }
        for (slot, bytes) in self.fronts.free_in_fronts() {
            let sum = by_slot.entry(slot).or_default();
            *sum = (sum.0 + bytes, sum.1 + bytes);
        }
        let mut stranded: Vec<Stranded> = by_slot
            .into_iter()
            .map(|(slot, (bytes, in_pages))| Stranded {
                stream_id: self.streams[slot].key.number(),
                bytes,
                in_pages,
            })
            .collect();
        stranded.sort_by_key(|s| std::cmp::Reverse(s.bytes));
        stranded
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
        let held = self.stats.all.reserved.current + self.physical.planned;
        self.physical.last_growth = Some(GrowthInfo {
            reason,
            requested: want.requested,
            added,
            beyond_cap: self.rules.maps() && held > self.soft_cap(),
        });
    }
}

/// Bytes of free memory among what a plan has claimed.
pub(crate) fn free_among(shards: &[crate::allocator::extent::space::Shard]) -> u64 {
    let mapped = shards.iter().filter(|s| s.mapped);
    mapped.map(|s| u64::from(s.granules) * GRANULE).sum()
}
