//! The extents of address space: their records, and the structures that find them.
//!
//! All address space is divided into gapless lists of extents, in granules of 512 bytes. An extent is a block in use, a
//! free piece, or a hole without memory, and has one record:
//!
//! ```text
//! address   0           4 MiB         9 MiB      11 MiB        14 MiB         20 MiB
//!           +-----------+-------------+----------+-------------+--------------+
//!  extents  | used      | free        | free     | used        | unmapped     |
//!           | stream 1  | {2: ticket 7}| complete | stream 2   | (hole)       |
//!           +-----------+-------------+----------+-------------+--------------+
//!                 |            |            |          |
//!  Lookup  <------+------------|------------|----------+     address of a live block -> record
//!                              v            v
//!  FreeIndex           of stream 2     of complete pieces    one index per class of free pieces
//!                      bins by size: 32 per power of two, found by a two-level bitmap;
//!                      within a bin by size, then address: best fit, lowest address on ties
//! ```
//!
//! A free piece stores its last uses, pairs of stream and ticket. Neighbours with different uses are not merged, so
//! that a complete piece does not wait for a busy one. Adjacent pieces that one stream may use count as one run.

#![forbid(unsafe_code)]

pub(crate) mod boxed;
pub(crate) mod handle;
pub(crate) mod hash;
pub(crate) mod index;
pub(crate) mod invariant;
pub(crate) mod lookup;
pub(crate) mod origin;
pub(crate) mod record;
pub(crate) mod single_stream;
pub(crate) mod space;
pub(crate) mod uses;
pub(crate) mod want;

use crate::allocator::extent::index::Entry;
use crate::allocator::extent::lookup::Lookup;
use crate::allocator::extent::record::{COMPLETE, Hot, NIL, Records, SpaceId, State as Extent};
use crate::allocator::extent::space::Space;
use crate::allocator::extent::uses::Uses;
use crate::allocator::size::{GRANULE, PHYSICAL_GRANULE};

/// All extents of an allocator.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Extents {
    pub records: Records,
    /// Live large blocks by address.
    pub lookup: Lookup,
    pub large: Space,
    pub small: Space,
    /// Packed: the address space of views.
    pub views: Space,
    /// Scratch memory for completing pieces.
    pub pieces: Vec<Entry>,
}

impl Default for Extents {
    fn default() -> Self {
        Extents {
            records: Records::default(),
            lookup: Lookup::default(),
            large: Space::new(SpaceId::Large, true),
            small: Space::new(SpaceId::Small, true),
            views: Space::new(SpaceId::Views, true),
            pieces: Vec::new(),
        }
    }
}

impl Extents {
    /// Whether an arena has addresses for the memory of the self-test.
    pub(crate) fn has_addresses(&self, space: SpaceId) -> bool {
        match space {
            SpaceId::Views => self.views.largest_piece() >= PHYSICAL_GRANULE,
            _ => !self.large.holes().is_empty(),
        }
    }

    /// Returns the free bytes in all spaces. In the small arena, pages count as in use: their stream caches carve them.
    pub(crate) fn free_bytes(&self) -> u64 {
        self.spaces().map(|s| s.free_bytes()).sum()
    }

    /// Returns the free piece around an address.
    pub(crate) fn piece_around(&self, space: SpaceId, addr: u64) -> Option<u32> {
        let (base, region) = self.space(space)?.regions().range(..=addr).next_back()?;
        if addr >= base + region.bytes {
            return None;
        }
        // Only a few extents lie between the live block below and the piece, because free pieces are merged.
        let mut at = match self.lookup.at_or_below(addr) {
            Some(id) if self.records[id].addr >= *base && self.records[id].space == space => id,
            _ => region.first,
        };
        while at != NIL && self.records[at].end() <= addr {
            at = self.records[at].next;
        }
        (at != NIL && self.records[at].state == Extent::Free).then_some(at)
    }

    /// Returns the runs of adjacent free pieces in all spaces: first byte and size.
    pub(crate) fn free_runs(&self) -> Vec<(u64, u64)> {
        self.spaces().flat_map(Space::free_runs).collect()
    }

    pub(crate) fn largest_run(&self) -> u64 {
        self.spaces().map(Space::largest_run).max().unwrap_or(0)
    }

    /// Returns where the last address space of an arena ends, and its total size.
    pub(crate) fn addresses_of(&self, space: SpaceId) -> (Option<u64>, u64) {
        let regions = self.space(space).into_iter().flat_map(|s| s.regions());
        regions.fold((None, 0), |(_, held), (base, region)| {
            (Some(base + region.bytes), held + region.bytes)
        })
    }

    /// Returns the number of frees when the last byte of a free range was freed.
    pub(crate) fn freed_at(&self, space: SpaceId, addr: u64, bytes: u64) -> u64 {
        let overlaps =
            |e: &Entry| e.addr < addr + bytes && addr < e.addr + u64::from(e.granules) * GRANULE;
        let pieces = self.space(space).into_iter().flat_map(|s| s.pieces());
        let freed = pieces
            .filter(overlaps)
            .map(|e| self.records.cold(e.id).freed);
        freed.max().unwrap_or(0)
    }

    /// Frees memory that no stream has used yet. While only one stream is known, it merges with that stream's own.
    pub(crate) fn free_fresh(&mut self, space: SpaceId, id: u32, stream: u32) {
        let uses = self.parts(space).0.fresh_uses(stream);
        self.release(space, id, stream, uses);
    }

    /// Makes a claimed extent or a block a free piece that belonged to a stream; returns the resulting piece.
    pub(crate) fn release(&mut self, space: SpaceId, id: u32, owner: u32, uses: Uses) -> u32 {
        let (at, records) = self.parts(space);
        records.cold_mut(id).owner = owner;
        at.release(records, id, uses)
    }

    /// While only one stream exists, complete memory is equivalent to its own, and merges with it.
    #[inline(never)]
    pub(crate) fn adopt_complete(&mut self, space: SpaceId, stream: u32) {
        let (space, records) = self.parts(space);
        if !space.merge_own {
            return;
        }
        while let Some(entry) = space.index(COMPLETE).and_then(|i| i.largest()) {
            space.retag(records, entry.id, Uses::one(stream, 0));
        }
    }

    /// Marks all pieces pending on a drained stream as complete.
    pub(crate) fn release_class(&mut self, stream: u32) {
        for space in [SpaceId::Large, SpaceId::Small] {
            let (space, records) = self.parts(space);
            while let Some(entry) = space.index(stream).and_then(|i| i.largest()) {
                space.retag(records, entry.id, Uses::None);
            }
            space.forget_stream(stream);
        }
    }

    /// Returns the extents of a space, by address.
    pub(crate) fn row(&self, space: SpaceId) -> impl Iterator<Item = &Hot> {
        let regions = self.space(space).into_iter();
        let firsts = regions.flat_map(|space| space.regions().values().map(|region| region.first));
        let in_use = |id: u32| (id != NIL).then(|| &self.records[id]);
        firsts.flat_map(move |first| {
            std::iter::successors(in_use(first), move |hot| in_use(hot.next))
        })
    }

    /// Returns a space and the records that its operations need.
    pub(crate) fn parts(&mut self, space: SpaceId) -> (&mut Space, &mut Records) {
        let space = match space {
            SpaceId::Large => &mut self.large,
            SpaceId::Small => &mut self.small,
            SpaceId::Views => &mut self.views,
        };
        (space, &mut self.records)
    }

    pub(crate) fn space(&self, space: SpaceId) -> Option<&Space> {
        match space {
            SpaceId::Large => Some(&self.large),
            SpaceId::Small => Some(&self.small),
            SpaceId::Views => Some(&self.views),
        }
    }

    pub(crate) fn spaces(&self) -> impl Iterator<Item = &Space> {
        [&self.large, &self.small].into_iter()
    }

    /// Returns the free piece or hole around an address, and its start.
    pub(crate) fn piece_at(&self, space: SpaceId, addr: u64) -> Option<(u32, u64)> {
        let holes = self.space(space)?.holes();
        let hole = holes
            .range(..=addr)
            .next_back()
            .filter(|(_, id)| addr < self.records[**id].end());
        if let Some((start, id)) = hole {
            return Some((*id, *start));
        }
        let id = self.piece_around(space, addr)?;
        Some((id, self.records[id].addr))
    }

    /// Makes the range of a view available to other views.
    pub(crate) fn range_freed(&mut self, range: u32) {
        self.views.release(&mut self.records, range, Uses::None);
    }

    /// Claims address space for a new view, if there is any; returns the record of the range.
    pub(crate) fn take_range(&mut self, granules: u32) -> Option<u32> {
        let entry = self.views.index(COMPLETE)?.best_fit(granules)?;
        self.views.carve(&mut self.records, entry.id, granules);
        Some(entry.id)
    }

    /// Returns the bytes of address space that views have.
    pub(crate) fn view_addresses(&self) -> u64 {
        let regions = self.views.regions().values();
        regions.map(|region| region.bytes).sum()
    }
}
