//! Views: second mappings of memory that is already held.
//!
//! A view is a range of address space in which handles are mapped a second time, contiguously, in an order of its own;
//! their home mappings stay. Memory that is free but scattered at home may be one run in a view. A block may lie at any
//! offset of a view, over any bytes that are contiguous there and free at home, and several blocks may share a view.
//! While a block lies in a view, its bytes are *aliased* at home: they cannot be allocated at their home address.
//!
//! Views are kept when their blocks are freed, so that repeated work finds its layout again without a driver call.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::allocator::extent::record::{SpaceId, State as Extent};
use crate::allocator::extent::space::Shard;
use crate::allocator::extent::uses::Uses;
use crate::allocator::extent::want::Want;
use crate::allocator::heap::Heap;
use crate::allocator::size::GRANULE;
use crate::allocator::view::mapping::{Aliased, Openings, View, ViewRun};

impl Heap {
    /// Returns a place in a view that the stream may use without a wait, if views may serve the request at all.
    pub(crate) fn cached_view(
        &self,
        want: &Want,
        (views, total_memory): (bool, u64),
    ) -> Option<ViewRun> {
        if !want.fits_views(views, total_memory) || self.views.map.is_empty() {
            return None;
        }
        self.views.find(want, &self.openings(want, false)?)
    }

    /// Returns the memory at home that is available for a request.
    pub(crate) fn openings(&self, want: &Want, reachable: bool) -> Option<Openings> {
        let finder = self.finder(want.space, want.stream)?;
        Some(Openings::collect(
            &self.physical.handles,
            &finder,
            reachable,
        ))
    }

    /// Adds a view.
    pub(crate) fn put_view(&mut self, base: u64, view: View) {
        self.extents.records[view.range].state = Extent::Used;
        self.views.map.insert(base, view);
    }

    /// Claims home memory, part by part; claims nothing if one part cannot be claimed.
    pub(crate) fn alias(
        &mut self,
        space: SpaceId,
        stream: u32,
        parts: &[(u64, u32)],
    ) -> Option<Aliased> {
        let mut aliased = Aliased::default();
        for (addr, granules) in parts {
            let piece = self.extents.piece_at(space, *addr);
            let claimed = piece.and_then(|(id, start)| {
                self.claim(space, id, ((addr - start) / GRANULE) as u32, *granules)
            });
            match claimed {
                Some((id, shards)) => aliased.parts.push((id, shards)),
                None => {
                    self.give_home(space, aliased);
                    return None;
                }
            }
        }
        let shards: Vec<Shard> = aliased
            .parts
            .iter()
            .flat_map(|(_, shards)| shards.clone())
            .collect();
        aliased.waits = self.streams.waits_for(stream, &shards);
        Some(aliased)
    }

    /// Reverts a claim.
    pub(crate) fn give_home(&mut self, space: SpaceId, aliased: Aliased) {
        for (id, shards) in aliased.parts {
            self.restore(space, id, shards);
        }
    }

    /// Creates a block over aliased memory; it stays claimed until it is [born](Self::born).
    pub(crate) fn view_block(
        &mut self,
        base: u64,
        offset: u32,
        granules: u32,
        parts: Vec<u32>,
    ) -> u32 {
        self.views.clock += 1;
        let clock = self.views.clock;
        if let Some(view) = self.views.map.get_mut(&base) {
            view.blocks.push((offset, offset + granules));
            view.stamp = clock;
        }
        self.views.aliased_bytes += u64::from(granules) * GRANULE;
        let addr = base + u64::from(offset) * GRANULE;
        let id = self
            .extents
            .records
            .make(SpaceId::Large, Extent::Busy, addr, granules);
        for part in &parts {
            self.extents.records[*part].state = Extent::Aliased;
            self.extents.records.cold_mut(*part).aliased_by = id;
        }
        self.extents.records.set_home(id, parts);
        id
    }

    /// Returns the memory of a block in a view to its home pieces.
    pub(crate) fn view_block_freed(&mut self, id: u32, uses: &Uses) -> Vec<u32> {
        let addr = self.extents.records[id].addr;
        self.views.aliased_bytes -= self.extents.records[id].bytes();
        let owner = self.extents.records.cold(id).owner;
        let parts = self.extents.records.cold_mut(id).take_home();
        if let Some((base, view)) = self.views.map.range_mut(..=addr).next_back() {
            let offset = ((addr - base) / GRANULE) as u32;
            view.blocks.retain(|(start, _)| *start != offset);
            view.uses = view.uses.union(uses);
        }
        self.extents.records.retire(id);
        let frees = self.frees;
        let mut pieces = Vec::with_capacity(parts.len());
        for part in parts {
            self.extents.records.cold_mut(part).freed = frees;
            let uses = uses.clone();
            let piece = self.extents.release(SpaceId::Large, part, owner, uses);
            pieces.push(piece);
        }
        pieces
    }

    /// Removes an idle view from the heap, for unmapping. Its range stays claimed.
    pub(crate) fn take_view(&mut self, base: u64) -> Option<View> {
        let view = self.views.map.get(&base)?;
        if self.suspended.closed || !view.is_over(&self.streams) {
            return None;
        }
        // Its handles stay counted until it is unmapped: none of them may be released earlier.
        let view = self.views.map.remove(&base)?;
        self.extents.records[view.range].state = Extent::Busy;
        self.views.segs_under_way += view.mappings.len();
        Some(view)
    }

    /// Records that a view was unmapped: its handles and its range no longer belong to it.
    pub(crate) fn view_gone(&mut self, view: &View) {
        self.views.segs_under_way -= view.mappings.len();
        let homes = view.mappings.iter().map(|mapping| mapping.home);
        self.physical.viewed(homes, false);
        self.extents.range_freed(view.range);
    }

    /// Records that a view could not be unmapped, or only in part: a later call unmaps it.
    pub(crate) fn view_stays(&mut self, base: u64, mut view: View) {
        self.views.segs_under_way -= view.mappings.len();
        view.dead = true;
        self.put_view(base, view);
    }

    /// Returns idle views, longest unused first, with at least `excess` mappings in total.
    pub(crate) fn idle_views(&self, excess: usize) -> Vec<u64> {
        self.idle_of(excess as u64, |view| view.mappings.len() as u64)
    }

    /// Returns idle views, longest unused first, with at least `bytes` of address space in total if there are enough.
    pub(crate) fn idle_addresses(&self, bytes: u64) -> Vec<u64> {
        self.idle_of(bytes, |view| u64::from(view.room) * GRANULE)
    }

    /// Returns idle views that have had no new block since the clock of views had the value `clock`.
    pub(crate) fn idle_views_since(&self, clock: u64) -> Vec<u64> {
        let views = self.views.map.iter();
        let idle = views.filter(|(_, view)| view.stamp <= clock && view.is_over(&self.streams));
        idle.map(|(base, _)| *base).collect()
    }

    fn idle_of(&self, enough: u64, weigh: impl Fn(&View) -> u64) -> Vec<u64> {
        let views = self.views.map.iter();
        let idle = views.filter(|(_, view)| view.is_over(&self.streams));
        let mut idle: BinaryHeap<_> = idle
            .map(|(base, view)| (Reverse((view.stamp, *base)), weigh(view)))
            .collect();
        let (mut going, mut bases) = (0, Vec::new());
        while going < enough
            && let Some((Reverse((_, base)), weight)) = idle.pop()
        {
            going += weight;
            bases.push(base);
        }
        bases
    }
}
