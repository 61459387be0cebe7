//! The heap: all state that the one lock guards. It makes no driver calls.

#![forbid(unsafe_code)]

pub(crate) mod caches;
pub(crate) mod large_cache;
pub(crate) mod request;
pub(crate) mod streams;
pub(crate) mod take;

use std::sync::{Arc, Weak};

use crate::allocator::cache::StreamCaches;
use crate::allocator::cache::deferred::Deferred;
use crate::allocator::cache::grant::Grant;
use crate::allocator::cache::stream_cache::{KeepAlive, PageTable, StreamCache};
use crate::allocator::config::Tuning;
use crate::allocator::extent::Extents;
use crate::allocator::extent::record::{Hot, Recorded, SpaceId, State as Extent};
use crate::allocator::extent::uses::{Use, Uses};
use crate::allocator::extent::want::Want;
use crate::allocator::graph::Graphs;
use crate::allocator::guard::Guards;
use crate::allocator::physical::policy::Rules;
use crate::allocator::physical::{Bounds, MemoryUsers, Physical};
use crate::allocator::range::Ranges;
use crate::allocator::recording::Recorder;
use crate::allocator::report::Regime;
use crate::allocator::size::GRANULE;
use crate::allocator::stats::Stats;
use crate::allocator::stream::Streams;
use crate::allocator::stream::slot::AfterFree;
use crate::allocator::suspend::Suspensions;
use crate::allocator::view::Views;
use crate::error::Error;

/// All state that the one lock guards.
///
/// The order of the fields, here and in the structures that say so, places what a large request and its free access on
/// few cache lines.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Heap {
    pub closed: bool,
    /// Whether no allocator handle is left: then the drop of the last block closes the heap.
    pub orphaned: bool,
    /// Whether memory outside graph pools is suspended: it serves no request, and none of it is released.
    pub is_suspended: bool,
    pub rules: Rules,
    /// Number of frees so far: the clock that dates idle memory.
    pub frees: u64,
    /// Peak of live requested bytes since the last trim.
    pub peak_live: u64,
    /// Recent peak of the bytes of large blocks. It is updated at frees, because a peak is always followed by one.
    pub recent_peak: u64,
    pub physical: Physical,
    pub streams: Streams,
    pub caches: StreamCaches,
    pub extents: Extents,
    pub stats: Stats,
    /// Guarded blocks.
    pub guards: Guards,
    pub recorder: Recorder,
    /// Ordinal of the device.
    pub device: usize,
    pub views: Views,
    /// Memory for captures. It counts only towards the limit, so that nothing else depends on it.
    pub graphs: Graphs,
    /// Suspended memory, whose addresses stay reserved.
    pub suspended: Suspensions,
    /// Peak of the bytes of large freed blocks that other streams could still access.
    pub mixed_peak: u64,
    /// Peak of the bytes that were live, or free and pending for the requesting stream, when a request found no ready
    /// memory.
    pub peak_active: u64,
    /// Blocks that could not be freed when they were dropped; the next call that may frees them.
    pub deferred: Vec<Deferred>,
    /// Growable ranges. Their memory counts only towards the limit, as that of graph pools.
    pub ranges: Ranges,
}

/// The peak of live bytes before and after a request was counted in it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PeakUpdate {
    before: u64,
    after: u64,
}

/// Outcome of [`Heap::free_plain`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PlainFree {
    /// The block needs [`Heap::free`], or is not live.
    Refused,
    Done,
    /// The block is freed, and the batch of this stream needs its marker.
    Full(u32),
}

impl Heap {
    pub(crate) fn new(
        owner: (Weak<dyn KeepAlive>, u64),
        table: Arc<PageTable>,
        device: usize,
        rules: Rules,
        bounds: Bounds,
        tuning: Tuning,
    ) -> Self {
        let recorder = Recorder::new(owner.1);
        Heap {
            device,
            rules,
            extents: Extents::default(),
            physical: Physical::new(bounds, tuning),
            views: Views::default(),
            streams: Streams::default(),
            caches: StreamCaches::new(owner, table),
            graphs: Graphs::default(),
            ranges: Ranges::default(),
            guards: Guards::default(),
            suspended: Suspensions::default(),
            stats: Stats::default(),
            mixed_peak: 0,
            peak_live: 0,
            peak_active: 0,
            deferred: Vec::new(),
            recent_peak: 0,
            frees: 0,
            closed: false,
            orphaned: false,
            is_suspended: false,
            recorder,
        }
    }

    // ---- what is held from the driver ------------------------------------------------------

    /// Returns the bytes held from the driver, including those that growth in progress will add.
    pub(crate) fn held(&self) -> u64 {
        self.stats.all.reserved.current + self.physical.planned
    }

    /// Returns the bytes that are present, including those of graph pools and ranges.
    pub(crate) fn present(&self) -> u64 {
        self.held() + self.graphs.held + self.ranges.held
    }

    /// Updates the statistics of what is held, after an addition to reserved memory, a graph pool or a range.
    pub(crate) fn count_held(&mut self) {
        self.stats
            .count_held(self.graphs.held, self.graphs.handles, self.ranges.held);
    }

    /// Returns the bytes that count towards the limit: those present, and those that a resume in progress will take.
    pub(crate) fn counted(&self) -> u64 {
        self.present() + self.suspended.coming
    }

    /// Returns the bytes that may still be obtained from the driver.
    pub(crate) fn room(&self) -> u64 {
        self.physical.room(self.counted())
    }

    /// Returns the bytes that growth should not exceed while another step can serve the request.
    pub(crate) fn soft_cap(&self) -> u64 {
        let peak = match self.physical.regime {
            Regime::Plentiful => self.peak_live.max(self.peak_active),
            Regime::Scarce(_) => self.peak_live,
        };
        self.physical.soft_cap(peak, self.memory_users())
    }

    /// Returns the users of new memory outside graph pools.
    pub(crate) fn memory_users(&self) -> MemoryUsers {
        match self.streams.several() {
            true => MemoryUsers::Several,
            false => MemoryUsers::One,
        }
    }

    /// Returns the bytes left below the soft cap.
    pub(crate) fn soft_room(&self) -> u64 {
        self.soft_cap().saturating_sub(self.held())
    }

    /// Whether more than half of the bound on held bytes is used.
    pub(crate) fn is_near_limit(&self) -> bool {
        self.physical.is_near(self.held())
    }

    /// Fails if the allocator is closed, or memory outside graph pools is suspended.
    #[inline]
    pub(crate) fn ensure_serving(&self) -> Result<(), Error> {
        if self.closed {
            return Err(Error::Closed);
        }
        match self.is_suspended {
            true => Err(Error::Suspended),
            false => Ok(()),
        }
    }

    // ---- blocks ----------------------------------------------------------------------------

    /// Counts a request in the peak that the soft cap follows.
    #[inline]
    pub(crate) fn raise_peak_live(&mut self, requested: u64) -> PeakUpdate {
        let before = self.peak_live;
        if self.requested_now() + requested > before {
            // Free blocks in large-block caches count as used, but are not part of the peak.
            self.empty_large_caches();
            self.peak_live = before.max(self.requested_now() + requested);
        }
        PeakUpdate {
            before,
            after: self.peak_live,
        }
    }

    /// Records the active bytes for a request that found no ready memory: live bytes, and free bytes that its stream
    /// cannot use.
    pub(crate) fn note_active(&mut self, want: &Want) {
        let live = self.requested_now() + want.requested;
        if live + self.extents.free_bytes() <= self.peak_active {
            return;
        }
        let mut granules = 0;
        for space in [SpaceId::Large, SpaceId::Small] {
            let Some(finder) = self.finder(space, want.stream) else {
                continue;
            };
            let pieces = finder.space.pieces();
            let pending = pieces.filter(|piece| !finder.ready(piece.id));
            granules += pending.map(|piece| u64::from(piece.granules)).sum::<u64>();
        }
        self.peak_active = self.peak_active.max(live + granules * GRANULE);
    }

    /// Returns the requested bytes of live blocks; small ones as of the last update.
    pub(crate) fn requested_now(&self) -> u64 {
        self.stats.all.requested.current + self.caches.requested
    }

    /// Reverts the peak after a failed request, unless other requests have raised it since.
    pub(crate) fn revert_peak_live(&mut self, update: PeakUpdate) {
        if self.peak_live == update.after {
            self.peak_live = update.before.max(self.requested_now());
        }
    }

    /// Turns a taken extent into a live block, and returns its grant.
    pub(crate) fn grant(
        &mut self,
        id: u32,
        stream: u32,
        requested: u64,
        home: &'static StreamCache,
    ) -> Grant {
        let hot = &mut self.extents.records[id];
        hot.state = Extent::Used;
        hot.stream = stream;
        hot.generation = hot.generation.wrapping_add(1) | 1;
        let hot = *hot;
        let (bytes, small) = (hot.bytes(), hot.space != SpaceId::Large);
        let cold = self.extents.records.cold_mut(id);
        cold.requested = requested;
        cold.owner = stream;
        self.streams[stream].live += 1;
        self.extents.lookup.insert(hot.addr, id);
        self.prepare_peaks(bytes, requested);
        self.stats.born(small, bytes, requested);
        self.update_peaks();
        self.recorder
            .record_allocation(&self.streams, &mut self.extents.records, id);
        let life = (id, hot.generation);
        Grant::large(home, hot.addr, life, (hot.granules, requested))
    }

    /// Like [`grant`](Self::grant), and caches the block if it is likely to be reused; `plain` is whether its
    /// request had no constraints.
    pub(crate) fn hand_out(
        &mut self,
        id: u32,
        want: &Want,
        cache: &'static StreamCache,
        plain: bool,
    ) -> Grant {
        let mut grant = self.grant(id, want.stream, want.requested, cache);
        if self.rules.caches() {
            // A block of a request with constraints is not cached, because another request would get a different place.
            let again = self.caches.predictor.allocated(id, grant.granules());
            let cached = plain && (again || self.caches.contention > 0);
            grant.set_cached(cached && self.put_in_cache(id, cache));
        }
        grant
    }

    /// Called before a large block is counted: if the block may raise a peak, free blocks leave the large-block caches
    /// so that they are not counted along.
    #[inline]
    fn prepare_peaks(&mut self, bytes: u64, requested: u64) {
        if self.caches.may_have_large() && !self.is_below_peaks(bytes, requested) {
            self.empty_large_caches();
        }
    }

    /// Whether a large block certainly raises no peak.
    #[inline(never)]
    fn is_below_peaks(&mut self, bytes: u64, requested: u64) -> bool {
        let all = &self.stats.all.allocated;
        let large = self.stats.large.counted().into_iter();
        let mut raised = large.zip([bytes, requested, 1]);
        all.current + self.caches.limit + bytes <= all.peak
            && raised.all(|(counter, more)| counter.current + more <= counter.peak)
    }

    /// Called after a large block was counted: raises the overall peaks if it is a new peak.
    #[inline]
    fn update_peaks(&mut self) {
        let all = &self.stats.all;
        let now = [all.requested.current, all.allocations.current];
        for (high, now) in self.caches.high.iter_mut().zip(now) {
            *high = now.max(*high);
        }
        if all.allocated.current + self.caches.limit > all.allocated.peak {
            self.raise_peaks(self.caches.lock_caches());
        }
    }

    /// Whether a block with this id and generation is live.
    pub(crate) fn is_live(&self, life: (u32, u32)) -> bool {
        let records = &self.extents.records;
        match records.get(life.0) {
            Some(hot) if hot.cached => self.caches.is_live_large(records, life),
            _ => records.is_in(life, Extent::Used),
        }
    }

    /// Records a use by another stream on a live block. Without a ticket the use covers all work submitted to that
    /// stream until the free.
    pub(crate) fn record(&mut self, id: u32, stream: u32, ticket: Option<u64>) {
        if self.extents.records[id].stream == stream {
            return;
        }
        if self.extents.records.record(id, Recorded { stream, ticket }) {
            self.streams[stream].live += 1;
        }
    }

    /// Frees a live block.
    pub(crate) fn free(&mut self, id: u32) -> AfterFree {
        self.uncache_provisional();
        let hot = &mut self.extents.records[id];
        let (addr, granules, bytes, owner) = (hot.addr, hot.granules, hot.bytes(), hot.stream);
        let space = hot.space;
        hot.generation = hot.generation.wrapping_add(1);
        self.frees += 1;
        // A peak is always followed by a free.
        self.recent_peak = self.recent_peak.max(self.stats.large.allocated.current);
        let cold = self.extents.records.cold_mut(id);
        cold.freed = self.frees;
        let requested = cold.requested;
        let shared = !cold.recorded().is_empty();
        self.extents.lookup.remove(addr);
        if self.rules.caches() {
            self.caches.predictor.freed(id, granules);
        }
        self.stats
            .freed(space != SpaceId::Large, bytes, requested, !shared);
        let mut after = AfterFree::default();
        let own = self.streams.use_of_free(owner, None);
        let uses = if shared {
            self.shared_uses(id, own)
        } else {
            Uses::One(own)
        };
        for u in uses.as_slice() {
            self.streams[u.stream].live -= 1;
            self.streams.count_free(u, bytes, &mut after);
        }
        let Some(uses) = self.guards.keep_large(
            (id, uses),
            &mut self.extents.records,
            &mut self.streams,
            &mut self.stats,
        ) else {
            return after;
        };
        let over = uses.as_slice().iter().all(|u| self.streams.is_complete(u));
        // A recorded use may be complete already, and so is all work of a retired stream.
        let complete = shared || (over && space == SpaceId::Large);
        self.release_block(space, id, uses, complete);
        after
    }

    /// Makes a block free memory, at home if it lies in a view; with `complete`, removes its completed uses.
    pub(crate) fn release_block(&mut self, space: SpaceId, id: u32, uses: Uses, complete: bool) {
        if !self.extents.records.cold(id).home().is_empty() {
            for piece in self
                .views
                .remove_block(&mut self.extents, self.frees, id, &uses)
            {
                if complete {
                    self.streams.complete_piece(
                        &mut self.extents,
                        &mut self.stats,
                        SpaceId::Large,
                        piece,
                    );
                }
            }
            return;
        }
        let (at, records) = self.extents.parts(space);
        let piece = at.release(records, id, uses);
        if complete {
            self.streams
                .complete_piece(&mut self.extents, &mut self.stats, space, piece);
        }
    }

    /// [`free`](Self::free) for a block that lies at its home and that only its own stream used. Changes nothing if the
    /// block is another one. It is separate from `free`, with which a large pair takes 10 % more instructions.
    pub(crate) fn free_plain(&mut self, id: u32, generation: u32) -> PlainFree {
        let Some(hot) = self.extents.records.get(id) else {
            return PlainFree::Refused;
        };
        let Hot {
            addr,
            granules,
            stream,
            ..
        } = *hot;
        let live = hot.generation == generation && hot.state == Extent::Used;
        let (cold, bytes) = (self.extents.records.cold(id), hot.bytes());
        let plain = hot.space == SpaceId::Large && cold.is_plain() && self.rules.caches();
        if !live || !plain || hot.cached || hot.guarded {
            return PlainFree::Refused;
        }
        let requested = cold.requested;
        let slot = &self.streams[stream];
        if !slot.named || slot.inactive {
            return PlainFree::Refused;
        }
        let ticket = slot.open;
        // The block is freed from here on. A cached block that this frees may be adjacent to it.
        self.uncache_provisional();
        self.frees += 1;
        // A peak is always followed by a free.
        self.recent_peak = self.recent_peak.max(self.stats.large.allocated.current);
        self.extents.records[id].generation = generation.wrapping_add(1);
        self.extents.lookup.remove(addr);
        self.caches.predictor.freed(id, granules);
        self.stats.freed(false, bytes, requested, true);
        let last = Use { stream, ticket };
        let freed = self.frees;
        self.extents
            .large
            .release_own(&mut self.extents.records, id, last, freed);
        let slot = &mut self.streams[stream];
        slot.live -= 1;
        if self.streams.several() || !self.extents.large.merge_own {
            return match self.streams.count_use(stream, bytes) {
                true => PlainFree::Full(stream),
                false => PlainFree::Done,
            };
        }
        let slot = &mut self.streams[stream];
        slot.open_uses = slot.open_uses.saturating_add(1);
        slot.open_bytes += bytes;
        PlainFree::Done
    }

    /// Returns the last uses of a block that other streams used, and that already counts as free.
    fn shared_uses(&mut self, id: u32, own: Use) -> Uses {
        let recorded = self.extents.records.cold_mut(id).take_recorded();
        let others = recorded
            .iter()
            .map(|r| self.streams.use_of_free(r.stream, r.ticket));
        let uses = Uses::collect(std::iter::once(own).chain(others).collect());
        self.note_mixed();
        uses
    }
}
