//! The search for free memory, and claims on it.

use std::ptr;

use crate::allocator::cache::grant::Grant;
use crate::allocator::cache::stream_cache::StreamCache;
use crate::allocator::extent::record::{MIXED, SpaceId, State as Extent};
use crate::allocator::extent::space::Shard;
use crate::allocator::extent::uses::Uses;
use crate::allocator::extent::want::Want;
use crate::allocator::heap::Heap;
use crate::allocator::heap::request::Checked;
use crate::allocator::size::GRANULE;
use crate::allocator::stream::finder::{Finder, Run};
use crate::allocator::stream::slot::StreamKey;

/// Requests below this many bytes preserve whole handles near the limit where possible. Larger requests would instead
/// break up long runs that large requests can use in one piece. Chosen by simulation over recorded programs.
const SPARING_BELOW: u64 = 8 << 20;

/// A part of free memory: the piece that it begins in, its offset in granules, and its length.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part {
    pub first: u32,
    pub skip: u32,
    pub granules: u32,
}

/// Bytes of pieces that streams other than their own may still access.
fn mixed_bytes(shards: &[Shard]) -> u64 {
    let mixed = shards.iter().filter(|s| matches!(s.uses, Uses::Many(_)));
    mixed.map(|s| u64::from(s.granules) * GRANULE).sum()
}

impl Heap {
    /// Returns the finder of free memory in a space for one stream.
    pub(crate) fn finder(&self, space: SpaceId, stream: u32) -> Option<Finder<'_>> {
        let space = self.extents.space(space)?;
        Some(Finder {
            records: &self.extents.records,
            streams: &self.streams,
            space,
            stream,
        })
    }

    /// Returns the constraints on its arena of a request that no stream cache serves.
    pub(crate) fn want(&self, request: &Checked, stream: u32) -> Want {
        let space = self.rules.space_of(request.span_bytes());
        let mut want = request.want(space, stream);
        // A segment is one driver allocation anyway.
        want.single &= self.rules.maps();
        want
    }

    /// Returns the part of a run that a request takes.
    pub(crate) fn part(&self, want: &Want, run: Run) -> Part {
        let skip = want.skip(run.addr);
        Part {
            first: run.first,
            skip,
            granules: self.rules.granules_of(
                want.space,
                want.granules,
                run.granules - u64::from(skip),
            ),
        }
    }

    /// Takes a range of free pieces and holes out of circulation.
    pub(crate) fn claim(
        &mut self,
        space: SpaceId,
        first: u32,
        skip: u32,
        granules: u32,
    ) -> Option<(u32, Vec<Shard>)> {
        let mut shards = Vec::new();
        let (at, records) = self.extents.parts(space);
        let id = at.claim(records, first, skip, granules, Extent::Busy, &mut shards)?;
        let bytes = mixed_bytes(&shards);
        self.stats
            .on_pool(space != SpaceId::Large, |pool| pool.active.sub(bytes));
        Some((id, shards))
    }

    /// Restores what [`claim`](Self::claim) took.
    pub(crate) fn restore(&mut self, space: SpaceId, id: u32, shards: Vec<Shard>) {
        let bytes = mixed_bytes(&shards);
        self.stats
            .on_pool(space != SpaceId::Large, |pool| pool.active.put_back(bytes));
        self.note_mixed();
        let uses = shards.iter().flat_map(|shard| shard.uses.as_slice());
        let over = uses.filter(|u| self.streams.is_complete(u));
        let over: Vec<u32> = over.map(|u| u.stream).collect();
        let (at, records) = self.extents.parts(space);
        at.restore(records, id, shards);
        // Pieces that became complete meanwhile are available to all streams.
        for class in over {
            self.complete_class(space, class, usize::MAX);
        }
    }

    /// Removes completed uses from at most `most` pieces of a space that are pending on one stream, or on several.
    /// Returns the number of pieces with a completed use.
    pub(crate) fn complete_class(&mut self, space: SpaceId, class: u32, most: usize) -> usize {
        let (extents, stats) = (&mut self.extents, &mut self.stats);
        self.streams
            .complete_pieces(extents, stats, space, class, most)
    }

    /// Counts freed bytes that several streams may still access.
    pub(crate) fn count_mixed(&mut self, space: SpaceId, bytes: u64) {
        self.stats
            .on_pool(space != SpaceId::Large, |pool| pool.active.add(bytes));
        self.note_mixed();
    }

    pub(crate) fn note_mixed(&mut self) {
        let all = &self.stats.all;
        let mixed = all.active.current.saturating_sub(all.allocated.current);
        self.mixed_peak = self.mixed_peak.max(mixed);
    }

    /// Takes a request from a ready run.
    pub(crate) fn take(&mut self, want: &Want, run: Run) -> Option<u32> {
        let part = self.part(want, run);
        let (space, records) = self.extents.parts(want.space);
        let first = records[run.first];
        if part.skip == 0 && first.granules >= part.granules && first.stream != MIXED {
            space.carve(records, run.first, part.granules);
            return Some(run.first);
        }
        let claimed = self.claim(want.space, part.first, part.skip, part.granules);
        claimed.map(|(id, _)| id)
    }

    /// Takes a request at an address, if that lies in a ready free piece.
    pub(crate) fn take_at(&mut self, want: &Want, addr: u64) -> Option<u32> {
        if !addr.is_multiple_of(u64::from(want.align) * GRANULE) {
            return None;
        }
        let first = self.extents.piece_around(want.space, addr)?;
        if !self.finder(want.space, want.stream)?.ready(first) {
            return None;
        }
        let hot = self.extents.records[first];
        let skip = ((addr - hot.addr) / GRANULE) as u32;
        let left = hot.granules - skip;
        if left < want.granules {
            return None;
        }
        if skip == 0 {
            let run = Run {
                first,
                addr,
                granules: u64::from(left),
            };
            return self.take(want, run);
        }
        let granules = self
            .rules
            .granules_of(want.space, want.granules, u64::from(left));
        let (id, _) = self.claim(want.space, first, skip, granules)?;
        Some(id)
    }

    /// Takes a request at the first free one of some addresses.
    pub(crate) fn take_near(&mut self, want: &Want, near: &[u64]) -> Option<u32> {
        let id = near.iter().find_map(|addr| self.take_at(want, *addr))?;
        self.stats.reclaim.ready += 1;
        Some(id)
    }

    /// Returns the best fit among ready memory.
    pub(crate) fn best(&mut self, want: &Want) -> Option<Run> {
        if !self.streams.several() {
            self.extents.adopt_complete(want.space, want.stream);
        }
        self.finder(want.space, want.stream)?.ready_run(want)
    }

    pub(crate) fn take_best(&mut self, want: &Want) -> Option<u32> {
        let run = self.best(want)?;
        let id = self.take(want, run)?;
        self.stats.reclaim.ready += 1;
        Some(id)
    }

    /// Returns the ready run that fits a request best. A small request near the limit preserves whole handles where
    /// possible, because other requests need them to stitch.
    #[inline]
    pub(crate) fn best_run(&self, want: &Want) -> Option<Run> {
        let finder = self.finder(want.space, want.stream)?;
        let best = finder.ready_run(want)?;
        let spares = self.rules.maps()
            && want.space == SpaceId::Large
            && u64::from(want.granules) * GRANULE < SPARING_BELOW
            && self.streams.several()
            && self.is_near_limit();
        Some(match spares {
            true => finder.handle_preserving_run(want, best, &self.physical.handles),
            false => best,
        })
    }

    /// Takes ready memory for a large request, whose stream is given by its key and, with `has_object`, by an object
    /// that can keep it alive; `known` is the stream cache that the thread uses for it. Returns `None` if any other
    /// step has to come first; then nothing has changed that reclaim would not change.
    #[inline]
    pub(crate) fn take_ready(
        &mut self,
        key: StreamKey,
        has_object: bool,
        known: Option<&'static StreamCache>,
        request: &Checked,
    ) -> Option<Grant> {
        let plain = self.rules.caches() && request.is_plain() && request.small().is_none();
        if !plain || self.closed || self.is_suspended || self.caches.contention > 0 {
            return None;
        }
        let stream = self.streams.find_recent(key)?;
        let slot = &self.streams[stream];
        let renamed = has_object && slot.holder.is_callers();
        if slot.inactive || renamed || slot.other_device {
            return None;
        }
        let want = request.want(SpaceId::Large, stream);
        let id = match self.streams.several() {
            true => self.take_among_several(&want)?,
            false => self.take_as_only_stream(&want)?,
        };
        self.stats.reclaim.ready += 1;
        self.stats.hits += 1;
        self.raise_peak_live(want.requested);
        self.physical.count_request(&want);
        let cache = match known {
            Some(cache) => cache,
            None => self.find_cache(key, stream),
        };
        debug_assert!(
            self.caches
                .of(stream)
                .iter()
                .any(|own| ptr::eq(*own, cache))
        );
        Some(self.hand_out(id, &want, cache, true))
    }

    /// Takes ready memory for the only stream.
    #[inline(always)]
    fn take_as_only_stream(&mut self, want: &Want) -> Option<u32> {
        self.uncache_provisional();
        if !self.extents.large.merge_own || !self.caches.due.is_empty() {
            return None;
        }
        if !self.extents.large.has_only(want.stream) {
            self.extents.adopt_complete(SpaceId::Large, want.stream);
        }
        let (large, records) = self.extents.parts(SpaceId::Large);
        let entry = large.carve_own(records, want.stream, want.granules)?;
        Some(entry.id)
    }

    /// Takes ready memory for one of several streams, if no stream needs a query or a marker.
    #[inline(never)]
    fn take_among_several(&mut self, want: &Want) -> Option<u32> {
        let near = self.is_near_limit();
        self.uncache_provisional();
        let quiet = !self.streams.unretired && self.streams.needs_no_query(want.stream, near);
        if !quiet || !self.caches.due.is_empty() {
            return None;
        }
        let run = self.best_run(want)?;
        let id = self.take(want, run)?;
        self.streams.note_call(want.stream);
        self.streams.count_request();
        Some(id)
    }
}
