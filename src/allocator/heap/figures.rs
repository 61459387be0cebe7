//! How the memory that is held lies: what is free in which pieces and for whom, what views show, and what a want of
//! memory looks like.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::allocator::extent::record::{COMPLETE, State as Extent};
use crate::allocator::heap::Heap;
use crate::allocator::report::{Fragmentation, Packing};
use crate::allocator::size::GRANULE;
use crate::error::{Hole, OutOfMemory, PinnedSegment, StreamBytes};

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
            bursts: self.physical.bursts.figures,
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

    /// Counts a request that found no memory. What the error reports of the heap.
    pub(crate) fn out_of_memory(&mut self, requested: u64) -> OutOfMemory {
        self.stats.misses += 1;
        self.stats.ooms += 1;
        self.short_of(requested)
    }

    /// The picture of an allocator that lacks so many bytes, where no request is to be counted.
    pub(crate) fn short_of(&mut self, requested: u64) -> OutOfMemory {
        let (_, allocated) = self.live_totals();
        OutOfMemory {
            requested,
            limit: self.physical.limit,
            reserved: self.stats.all.reserved.current,
            allocated,
            cached: self.stats.all.reserved.current.saturating_sub(allocated),
            largest_free: self
                .extents
                .spaces()
                .map(|s| s.largest_piece())
                .max()
                .unwrap_or(0),
            largest_run: self.extents.largest_run(),
            in_views: self.views.aliased_bytes,
            guarded: self.guards.bytes(),
            graph_pools: self.graphs.held,
            pending: self.pending_bytes(),
            pinned: self.pinned(),
            holes: self.holes(),
            mapped: self.rules.maps(),
            ..OutOfMemory::default()
        }
    }

    /// The longest runs of adjacent free memory, longest first.
    fn holes(&self) -> Vec<Hole> {
        let mut holes = self.extents.free_runs();
        holes.sort_by_key(|(_, bytes)| Reverse(*bytes));
        holes.truncate(HOLES_NAMED);
        let bounded = |(address, bytes): (u64, u64)| {
            let below = address.checked_sub(1);
            let before = below.and_then(|at| self.extents.lookup.at_or_below(at));
            let before = before.map(|id| &self.extents.records[id]);
            let before = before.filter(|block| block.end() == address);
            let after = self.extents.lookup.exact(address + bytes);
            let after = after.map(|id| self.extents.records[id].addr);
            Hole::new((address, bytes), before.map(|block| block.addr), after)
        };
        holes.into_iter().map(bounded).collect()
    }

    /// Where few live bytes hold the most memory.
    pub(crate) fn pinned(&self) -> Vec<PinnedSegment> {
        let mut live: BTreeMap<u64, PinnedSegment> = BTreeMap::new();
        for (_, hot) in self.extents.records.iter() {
            if hot.state != Extent::Used {
                continue;
            }
            let (mut addr, end) = (hot.addr, hot.end());
            while addr < end {
                let Some((base, holding)) = self.physical.holdings.range(..=addr).next_back()
                else {
                    break;
                };
                let top = base + holding.bytes;
                if top <= addr {
                    break;
                }
                let entry = live.entry(*base).or_insert(PinnedSegment {
                    address: *base,
                    bytes: holding.bytes,
                    live: 0,
                    block: hot.addr,
                });
                entry.live += end.min(top) - addr;
                entry.block = entry.block.min(hot.addr);
                addr = top;
            }
        }
        let mut pinned: Vec<PinnedSegment> =
            live.into_values().filter(|p| p.live < p.bytes).collect();
        pinned.sort_by_key(|p| Reverse(p.bytes - p.live));
        pinned.truncate(PINNED_NAMED);
        pinned
    }
}

/// How many pinned segments an out-of-memory error names.
pub(crate) const PINNED_NAMED: usize = 3;
/// How many holes an out-of-memory error names.
const HOLES_NAMED: usize = 4;
