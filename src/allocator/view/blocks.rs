//! Blocks in views, and the life of a view.
//!
//! A block may lie at any offset of a view, over any bytes that are contiguous there and free at home, and several
//! blocks may share a view. While a block lies in a view, its bytes are *aliased* at home: they cannot be allocated at
//! their home address.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::allocator::extent::Extents;
use crate::allocator::extent::record::{Records, SpaceId, State as Extent};
use crate::allocator::extent::uses::Uses;
use crate::allocator::physical::Physical;
use crate::allocator::size::GRANULE;
use crate::allocator::stream::Streams;
use crate::allocator::view::Views;
use crate::allocator::view::mapping::View;

impl Views {
    /// Adds a view.
    pub(crate) fn put(&mut self, records: &mut Records, base: u64, view: View) {
        records[view.range].state = Extent::Used;
        self.map.insert(base, view);
    }

    /// Creates a block over aliased memory; it stays claimed until it is handed out.
    pub(crate) fn add_block(
        &mut self,
        records: &mut Records,
        base: u64,
        offset: u32,
        granules: u32,
        parts: Vec<u32>,
    ) -> u32 {
        self.clock += 1;
        let clock = self.clock;
        if let Some(view) = self.map.get_mut(&base) {
            view.blocks.push((offset, offset + granules));
            view.stamp = clock;
        }
        self.aliased_bytes += u64::from(granules) * GRANULE;
        let addr = base + u64::from(offset) * GRANULE;
        let id = records.make(SpaceId::Large, Extent::Busy, addr, granules);
        for part in &parts {
            records[*part].state = Extent::Aliased;
            records.cold_mut(*part).aliased_by = id;
        }
        records.set_home(id, parts);
        id
    }

    /// Returns the memory of a block in a view to its home pieces.
    pub(crate) fn remove_block(
        &mut self,
        extents: &mut Extents,
        frees: u64,
        id: u32,
        uses: &Uses,
    ) -> Vec<u32> {
        let addr = extents.records[id].addr;
        self.aliased_bytes -= extents.records[id].bytes();
        let owner = extents.records.cold(id).owner;
        let parts = extents.records.cold_mut(id).take_home();
        if let Some((base, view)) = self.map.range_mut(..=addr).next_back() {
            let offset = ((addr - base) / GRANULE) as u32;
            view.blocks.retain(|(start, _)| *start != offset);
            view.uses = view.uses.union(uses);
        }
        extents.records.retire(id);
        let mut pieces = Vec::with_capacity(parts.len());
        for part in parts {
            extents.records.cold_mut(part).freed = frees;
            let uses = uses.clone();
            let piece = extents.release(SpaceId::Large, part, owner, uses);
            pieces.push(piece);
        }
        pieces
    }

    /// Removes an idle view from the heap, for unmapping. Its range stays claimed.
    pub(crate) fn take(
        &mut self,
        records: &mut Records,
        streams: &Streams,
        base: u64,
    ) -> Option<View> {
        let view = self.map.get(&base)?;
        if !view.is_over(streams) {
            return None;
        }
        // Its handles stay counted until it is unmapped: none of them may be released earlier.
        let view = self.map.remove(&base)?;
        records[view.range].state = Extent::Busy;
        self.segs_under_way += view.mappings.len();
        Some(view)
    }

    /// Records that a view was unmapped: its handles and its range no longer belong to it.
    pub(crate) fn count_unmapped(
        &mut self,
        extents: &mut Extents,
        physical: &mut Physical,
        view: &View,
    ) {
        self.segs_under_way -= view.mappings.len();
        let homes = view.mappings.iter().map(|mapping| mapping.home);
        physical.count_views(homes, false);
        extents.range_freed(view.range);
    }

    /// Records that a view could not be unmapped, or only in part: a later call unmaps it.
    pub(crate) fn put_dead(&mut self, records: &mut Records, base: u64, mut view: View) {
        self.segs_under_way -= view.mappings.len();
        view.dead = true;
        self.put(records, base, view);
    }

    /// Returns idle views, longest unused first, with at least `excess` mappings in total.
    pub(crate) fn idle_views(&self, streams: &Streams, excess: usize) -> Vec<u64> {
        self.idle_of(streams, excess as u64, |view| view.mappings.len() as u64)
    }

    /// Returns idle views, longest unused first, with at least `bytes` of address space in total if there are enough.
    pub(crate) fn idle_addresses(&self, streams: &Streams, bytes: u64) -> Vec<u64> {
        self.idle_of(streams, bytes, |view| u64::from(view.room) * GRANULE)
    }

    /// Returns idle views that have had no new block since the clock of views had the value `clock`.
    pub(crate) fn idle_since(&self, streams: &Streams, clock: u64) -> Vec<u64> {
        let views = self.map.iter();
        let idle = views.filter(|(_, view)| view.stamp <= clock && view.is_over(streams));
        idle.map(|(base, _)| *base).collect()
    }

    fn idle_of(&self, streams: &Streams, enough: u64, weigh: impl Fn(&View) -> u64) -> Vec<u64> {
        let views = self.map.iter();
        let idle = views.filter(|(_, view)| view.is_over(streams));
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
