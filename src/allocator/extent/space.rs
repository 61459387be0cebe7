//! A collection of extents in address order: carving, coalescing, mapping state.
//!
//! Pure bookkeeping without driver calls. Each region (a reserved range, a segment or a page) is a gapless list of
//! extents. Free extents are *pieces*; each piece keeps its own last uses and is found through the index of its class:
//!
//! * complete: no stream may access the bytes any more;
//! * pending on one stream: that stream may reuse them immediately, other streams after its ticket;
//! * mixed: pending on several streams.
//!
//! Pieces that are pending differently merge only when they are complete. Otherwise a finished piece would wait for the
//! newest use of its neighbour, again and again, and a busy program would never see it complete.

use std::collections::BTreeMap;

use crate::allocator::extent::index::{Entry, FreeIndex};
use crate::allocator::extent::record::{COMPLETE, Hot, MIXED, NIL, Records, SpaceId, State};
use crate::allocator::extent::uses::Uses;
use crate::allocator::size::GRANULE;

/// The earlier state of a part of a claimed range, for restoring it.
#[derive(Debug, Clone)]
pub(crate) struct Shard {
    pub granules: u32,
    pub uses: Uses,
    /// The stream of the block that the part belonged to last.
    pub owner: u32,
    /// The number of frees when that block was freed.
    pub freed: u64,
    /// Whether the part had memory.
    pub mapped: bool,
}

/// A space of extents; see the module documentation.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Space {
    pub(crate) id: SpaceId,
    /// Whether pieces pending on the same stream merge, with the newer ticket. Correct where memory never changes
    /// streams before it is complete, or while only one stream exists.
    pub(crate) merge_own: bool,
    /// Number of free pieces of all classes.
    pub(super) count: usize,
    pub(super) pending: Vec<FreeIndex>,
    complete: FreeIndex,
    mixed: FreeIndex,
    /// By base address.
    regions: BTreeMap<u64, Region>,
    /// Extents without memory, by address.
    holes: BTreeMap<u64, u32>,
}

/// A reserved range, a segment or a page: a gapless list of extents.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Region {
    pub bytes: u64,
    /// The first extent. Its id is stable, because splits and merges keep the id on the left.
    pub first: u32,
}

pub(crate) fn class_of(uses: &Uses) -> u32 {
    match uses.as_slice() {
        [] => COMPLETE,
        [only] => only.stream,
        _ => MIXED,
    }
}

/// Makes the front of a free piece that is in no index busy. Returns the rest, which is a piece with the same uses.
#[inline(always)]
pub(super) fn cut(records: &mut Records, id: u32, granules: u32) -> Option<Entry> {
    let hot = &mut records[id];
    hot.state = State::Busy;
    let piece = *hot;
    let cold = records.cold_mut(id);
    let (uses, owner, freed) = (std::mem::take(&mut cold.uses), cold.owner, cold.freed);
    if piece.granules == granules {
        return None;
    }
    let rest = Entry {
        granules: piece.granules - granules,
        addr: piece.addr + u64::from(granules) * GRANULE,
        id: records.vacant_id(),
    };
    let hot = &mut records[id];
    (hot.granules, hot.next) = (granules, rest.id);
    records[rest.id].renew(Hot {
        addr: rest.addr,
        granules: rest.granules,
        prev: id,
        state: State::Free,
        ..piece
    });
    if piece.next != NIL {
        records[piece.next].prev = rest.id;
    }
    records.cold_mut(rest.id).renew(uses, owner, freed);
    Some(rest)
}

impl Space {
    pub(crate) fn new(id: SpaceId, merge_own: bool) -> Self {
        Space {
            id,
            merge_own,
            count: 0,
            pending: Vec::new(),
            complete: FreeIndex::default(),
            mixed: FreeIndex::default(),
            regions: BTreeMap::new(),
            holes: BTreeMap::new(),
        }
    }

    /// Returns the index of a class, if it ever had a piece.
    pub(crate) fn index(&self, class: u32) -> Option<&FreeIndex> {
        match class {
            COMPLETE => Some(&self.complete),
            MIXED => Some(&self.mixed),
            stream => self.pending.get(stream as usize),
        }
    }

    fn index_mut(&mut self, class: u32) -> &mut FreeIndex {
        match class {
            COMPLETE => &mut self.complete,
            MIXED => &mut self.mixed,
            stream => {
                let at = stream as usize;
                if at >= self.pending.len() {
                    self.pending.resize_with(at + 1, FreeIndex::default);
                }
                &mut self.pending[at]
            }
        }
    }

    /// Frees the memory of a stream's index, if it has no pieces.
    pub(crate) fn forget_stream(&mut self, stream: u32) {
        if let Some(index) = self.pending.get_mut(stream as usize) {
            index.shrink();
        }
    }

    /// Returns the streams with pieces that are pending on them alone.
    pub(crate) fn pending_streams(&self) -> impl Iterator<Item = u32> + '_ {
        (0u32..)
            .zip(&self.pending)
            .filter(|(_, index)| !index.is_empty())
            .map(|(stream, _)| stream)
    }

    pub(crate) fn piece_count(&self) -> usize {
        self.count
    }

    /// Iterates over the indexes of all classes.
    fn indexes(&self) -> impl Iterator<Item = &FreeIndex> {
        [&self.complete, &self.mixed]
            .into_iter()
            .chain(&self.pending)
    }

    /// Iterates over every free piece, class by class.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = Entry> + '_ {
        self.indexes().flat_map(FreeIndex::iter)
    }

    pub(crate) fn regions(&self) -> &BTreeMap<u64, Region> {
        &self.regions
    }

    pub(crate) fn holes(&self) -> &BTreeMap<u64, u32> {
        &self.holes
    }

    /// Returns the free bytes, pending ones included.
    pub(crate) fn free_bytes(&self) -> u64 {
        self.indexes().map(FreeIndex::granules).sum::<u64>() * GRANULE
    }

    /// Returns the bytes of the largest free piece.
    pub(crate) fn largest_piece(&self) -> u64 {
        let largest = self.indexes().filter_map(FreeIndex::largest);
        largest
            .map(|e| u64::from(e.granules) * GRANULE)
            .max()
            .unwrap_or(0)
    }

    /// Returns the runs of adjacent free pieces: first byte and size.
    pub(crate) fn free_runs(&self) -> Vec<(u64, u64)> {
        let pieces = self.pieces();
        let mut pieces: Vec<(u64, u64)> = pieces
            .map(|e| (e.addr, u64::from(e.granules) * GRANULE))
            .collect();
        pieces.sort_unstable();
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for (addr, bytes) in pieces {
            match runs.last_mut() {
                Some((first, run)) if *first + *run == addr => *run += bytes,
                _ => runs.push((addr, bytes)),
            }
        }
        runs
    }

    /// Returns the bytes of the longest run.
    pub(crate) fn largest_run(&self) -> u64 {
        let runs = self.free_runs().into_iter();
        runs.map(|(_, bytes)| bytes).max().unwrap_or(0)
    }

    /// Returns the class of a free piece, and its index entry.
    #[inline]
    pub(crate) fn entry(records: &Records, id: u32) -> (u32, Entry) {
        let hot = &records[id];
        let entry = Entry {
            granules: hot.granules,
            addr: hot.addr,
            id,
        };
        (hot.stream, entry)
    }

    #[inline]
    fn insert_piece(&mut self, records: &Records, id: u32) {
        let (class, entry) = Self::entry(records, id);
        self.index_mut(class).insert(entry);
        self.count += 1;
    }

    #[inline]
    fn remove_piece(&mut self, records: &Records, id: u32) {
        let (class, entry) = Self::entry(records, id);
        let found = self.index_mut(class).remove(&entry);
        debug_assert!(found, "a free piece is in the index of its class");
        self.count -= 1;
    }

    /// Adds a region as one free piece with the given uses.
    pub(crate) fn add_region(
        &mut self,
        records: &mut Records,
        base: u64,
        granules: u32,
        uses: Uses,
    ) -> u32 {
        let id = self.new_region(records, base, granules, State::Free);
        records[id].stream = class_of(&uses);
        records.cold_mut(id).uses = uses;
        self.insert_piece(records, id);
        id
    }

    /// Adds a region without memory. A region that begins where another one ends extends it.
    pub(crate) fn add_hole(&mut self, records: &mut Records, base: u64, granules: u32) {
        let id = self.new_region(records, base, granules, State::Unmapped);
        self.holes.insert(base, id);
        if self.join(records, base) {
            self.merge_hole(records, id);
        }
    }

    /// Adds a region as one complete piece; `grown` is whether it extends the region that ends at its base.
    pub(crate) fn add_range(
        &mut self,
        records: &mut Records,
        base: u64,
        granules: u32,
        grown: bool,
    ) {
        let id = self.add_region(records, base, granules, Uses::None);
        if grown && self.join(records, base) {
            self.remove_piece(records, id);
            self.coalesce(records, id);
        }
    }

    /// Joins a region with the region that ends at its base, if there is one and one record can count the granules of
    /// both, because any part of a region may become one hole.
    fn join(&mut self, records: &mut Records, base: u64) -> bool {
        let added = self.regions.get(&base).map_or(0, |region| region.bytes);
        let room = u64::from(u32::MAX) * GRANULE - added;
        let before = self.regions.range(..base).next_back();
        let Some((before, first)) = before
            .filter(|(start, region)| *start + region.bytes == base && region.bytes <= room)
            .map(|(start, region)| (*start, region.first))
        else {
            return false;
        };
        let Some(joined) = self.regions.remove(&base) else {
            return false;
        };
        // A lease of addresses usually doubles those of the space, so few leases visit the extents of an earlier one.
        let mut last = first;
        while records[last].next != NIL {
            last = records[last].next;
        }
        records[last].next = joined.first;
        records[joined.first].prev = last;
        if let Some(region) = self.regions.get_mut(&before) {
            region.bytes += joined.bytes;
        }
        true
    }

    fn new_region(&mut self, records: &mut Records, base: u64, granules: u32, state: State) -> u32 {
        let id = records.make(self.id, state, base, granules);
        self.regions.insert(
            base,
            Region {
                bytes: u64::from(granules) * GRANULE,
                first: id,
            },
        );
        id
    }

    /// Removes a region that is one extent; false if it is not.
    pub(crate) fn remove_region(&mut self, records: &mut Records, id: u32) -> bool {
        let hot = records[id];
        if hot.prev != NIL || hot.next != NIL || hot.state == State::Used {
            return false;
        }
        match hot.state {
            State::Free => self.remove_piece(records, id),
            State::Unmapped => {
                self.holes.remove(&hot.addr);
            }
            _ => {}
        }
        self.regions.remove(&hot.addr);
        records.retire(id);
        true
    }

    /// Splits an extent that is in no index, such as a claimed one; the right part gets its own record.
    pub(crate) fn split(&mut self, records: &mut Records, id: u32, left: u32) -> u32 {
        let cold = records.cold(id);
        let (uses, owner, freed) = (cold.uses.clone(), cold.owner, cold.freed);
        let hot = &mut records[id];
        let (next, stream, addr, state) = (hot.next, hot.stream, hot.addr, hot.state);
        let more = hot.granules - left;
        hot.granules = left;
        let right = records.make(self.id, state, addr + u64::from(left) * GRANULE, more);
        let hot = &mut records[right];
        (hot.prev, hot.next, hot.stream) = (id, next, stream);
        if next != NIL {
            records[next].prev = right;
        }
        records[id].next = right;
        let cold = records.cold_mut(right);
        (cold.uses, cold.owner, cold.freed) = (uses, owner, freed);
        right
    }

    /// Joins an extent with its right neighbour; both are in no index.
    fn absorb_next(&mut self, records: &mut Records, id: u32) {
        let (left, right) = (records.cold(id), records.cold(records[id].next));
        let (uses, freed) = (left.uses.union(&right.uses), left.freed.max(right.freed));
        let cold = records.cold_mut(id);
        (cold.uses, cold.freed) = (uses, freed);
        records.join_next(id);
    }

    fn mergeable(&self, records: &Records, left: u32, right: u32) -> bool {
        let (l, r) = (&records[left], &records[right]);
        if !(l.is_free() && r.is_free() && l.stream == r.stream) {
            return false;
        }
        match l.stream {
            COMPLETE => true,
            MIXED => false,
            _ => self.merge_own || records.cold(left).uses == records.cold(right).uses,
        }
    }

    /// Merges a free piece that is in no index with its neighbours, and adds the result to the index.
    fn coalesce(&mut self, records: &mut Records, mut id: u32) -> u32 {
        let prev = records[id].prev;
        if prev != NIL && self.mergeable(records, prev, id) {
            self.remove_piece(records, prev);
            self.absorb_next(records, prev);
            id = prev;
        }
        let next = records[id].next;
        if next != NIL && self.mergeable(records, id, next) {
            self.remove_piece(records, next);
            self.absorb_next(records, id);
        }
        self.insert_piece(records, id);
        id
    }

    fn merge_hole(&mut self, records: &mut Records, mut id: u32) {
        let prev = records[id].prev;
        if prev != NIL && records[prev].state == State::Unmapped {
            self.holes.remove(&records[id].addr);
            self.absorb_next(records, prev);
            id = prev;
        }
        let next = records[id].next;
        if next != NIL && records[next].state == State::Unmapped {
            self.holes.remove(&records[next].addr);
            self.absorb_next(records, id);
        }
    }

    /// Takes `granules` from consecutive free or unmapped extents, beginning `skip` granules into `first`, and makes
    /// them one extent in the given state. Their earlier state is appended to `shards`. Returns the extent; returns
    /// `None` and changes nothing if the range is not entirely free or unmapped.
    pub(crate) fn claim(
        &mut self,
        records: &mut Records,
        first: u32,
        skip: u32,
        granules: u32,
        state: State,
        shards: &mut Vec<Shard>,
    ) -> Option<u32> {
        let (mut reach, mut at) = (0u64, first);
        while reach < u64::from(skip) + u64::from(granules) {
            if at == NIL || !matches!(records[at].state, State::Free | State::Unmapped) {
                return None;
            }
            reach += u64::from(records[at].granules);
            at = records[at].next;
        }
        let (mut id, mut skip) = (first, skip);
        while skip >= records[id].granules {
            // The aligned start may lie beyond the run's first pieces.
            skip -= records[id].granules;
            id = records[id].next;
        }
        self.remove_free_or_hole(records, id);
        if skip > 0 {
            let right = self.split(records, id, skip);
            self.insert_free_or_hole(records, id);
            id = right;
        }
        let head = id;
        let mut left = granules;
        loop {
            if records[id].granules > left {
                let rest = self.split(records, id, left);
                self.insert_free_or_hole(records, rest);
            }
            left -= records[id].granules;
            let (granules, mapped) = (records[id].granules, records[id].state == State::Free);
            let cold = records.cold_mut(id);
            shards.push(Shard {
                granules,
                uses: std::mem::take(&mut cold.uses),
                owner: cold.owner,
                freed: cold.freed,
                mapped,
            });
            if left == 0 {
                break;
            }
            id = records[id].next;
            self.remove_free_or_hole(records, id);
        }
        while records[head].granules < granules {
            self.absorb_next(records, head);
        }
        records[head].state = state;
        records[head].stream = COMPLETE;
        Some(head)
    }

    /// Removes a free or unmapped extent from its index.
    fn remove_free_or_hole(&mut self, records: &Records, id: u32) {
        if records[id].is_free() {
            self.remove_piece(records, id);
        } else {
            self.holes.remove(&records[id].addr);
        }
    }

    /// Adds a free or unmapped extent to its index.
    fn insert_free_or_hole(&mut self, records: &Records, id: u32) {
        if records[id].is_free() {
            self.insert_piece(records, id);
        } else {
            self.holes.insert(records[id].addr, id);
        }
    }

    /// Takes `granules` from the front of one free piece: the common case of [`claim`](Self::claim). The extent stays
    /// busy until it becomes a block, because the lock may be released before.
    pub(crate) fn carve(&mut self, records: &mut Records, id: u32, granules: u32) {
        self.remove_piece(records, id);
        if let Some(rest) = cut(records, id, granules) {
            self.insert_piece(records, rest.id);
        }
    }

    /// Restores what [`claim`](Self::claim) took.
    pub(crate) fn restore(&mut self, records: &mut Records, id: u32, shards: Vec<Shard>) {
        let mut parts = vec![id];
        let mut at = id;
        for shard in &shards[..shards.len().saturating_sub(1)] {
            at = self.split(records, at, shard.granules);
            parts.push(at);
        }
        // All parts are set first, so that merging never absorbs a part that is still to be set.
        for (part, shard) in parts.iter().zip(&shards) {
            records[*part].state = if shard.mapped {
                State::Busy
            } else {
                State::Unmapped
            };
            let cold = records.cold_mut(*part);
            (cold.owner, cold.freed) = (shard.owner, shard.freed);
        }
        for (part, shard) in parts.into_iter().zip(shards) {
            if shard.mapped {
                self.release(records, part, shard.uses);
            } else {
                self.make_hole(records, part);
            }
        }
    }

    /// Makes a claimed extent or a block a free piece with the given uses and merges it with its neighbours; returns
    /// the resulting piece.
    pub(crate) fn release(&mut self, records: &mut Records, id: u32, uses: Uses) -> u32 {
        let hot = &mut records[id];
        hot.state = State::Free;
        hot.stream = class_of(&uses);
        let cold = records.cold_mut(id);
        cold.uses = uses;
        cold.requested = 0;
        drop(cold.take_recorded());
        self.coalesce(records, id)
    }

    /// Makes a claimed extent a hole.
    pub(crate) fn make_hole(&mut self, records: &mut Records, id: u32) {
        records[id].state = State::Unmapped;
        records[id].stream = COMPLETE;
        self.holes.insert(records[id].addr, id);
        self.merge_hole(records, id);
    }

    /// Replaces the uses of a free piece, and merges it where that is possible now.
    pub(crate) fn retag(&mut self, records: &mut Records, id: u32, uses: Uses) -> u32 {
        self.remove_piece(records, id);
        records[id].stream = class_of(&uses);
        records.cold_mut(id).uses = uses;
        self.coalesce(records, id)
    }

    /// Returns the uses of memory that no stream has used yet: with only one known stream, it belongs to that stream.
    pub(crate) fn fresh_uses(&self, stream: u32) -> Uses {
        match self.merge_own {
            true => Uses::one(stream, 0),
            false => Uses::None,
        }
    }

    /// Merges the pieces that may merge after [`merge_own`](Self::merge_own) has changed.
    pub(crate) fn recoalesce(&mut self, records: &mut Records, class: u32) {
        let Some(index) = self.index(class) else {
            return;
        };
        let mut pieces: Vec<Entry> = index.iter().collect();
        pieces.sort_unstable_by_key(|e| e.addr);
        for entry in pieces {
            // A piece that an earlier step absorbed does not match the entry any more.
            if records
                .get(entry.id)
                .is_some_and(|h| h.is_free() && h.addr == entry.addr && h.stream == class)
            {
                self.remove_piece(records, entry.id);
                self.coalesce(records, entry.id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_is_no_longer_than_a_record_can_express() {
        let (mut records, mut space) = (Records::default(), Space::new(SpaceId::Large, true));
        let half = 1 << 31;
        let bytes = u64::from(half) * GRANULE;
        space.add_hole(&mut records, bytes, half);
        space.add_hole(&mut records, 2 * bytes, half);
        assert_eq!((space.regions().len(), space.holes().len()), (2, 2));
        space.add_hole(&mut records, 3 * bytes, half - 1);
        assert_eq!((space.regions().len(), space.holes().len()), (2, 2));
        let hole = space.holes()[&(2 * bytes)];
        assert_eq!(records[hole].granules, u32::MAX);
    }
}
