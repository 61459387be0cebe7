//! Everything that one lock guards: extents, streams, statistics. No driver calls here.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Weak};

use crate::driver::{Context, Event};

use super::engine::Engine;
use super::fit::{Finder, Run};
use super::front::PageTable;
use super::fronts::Fronts;
use super::lookup::Lookup;
use super::raw::Lifetime;
use super::records::{COMPLETE, MIXED, Recorded, Records, SpaceId, State as Extent};
use super::size::{CLASSIC_SMALL_LIMIT, GRANULE, PACKED_SMALL_LIMIT, PAGE, classic_granules};
use super::space::{Shard, Space};
use super::stats::Stats;
use super::streams::{Holder, StreamKey, Streams};
use super::uses::{Use, Uses};
use super::view::View;

/// Granules of a page.
pub(crate) const PAGE_GRANULES: u32 = (PAGE / GRANULE) as u32;

/// Frees after which a batch is closed while several streams are active, and
const BATCH_FREES: u32 = 32;
/// bytes after which it is.
const BATCH_BYTES: u64 = 1 << 20;
/// Large allocations to let pass before a marker that was not ready is asked again.
const BACKOFF: u32 = 8;
/// Idle streams of the caller are forgotten above this number of known streams.
const MANY_STREAMS: usize = 64;

/// Memory held from the driver: a segment, or a physical handle at its home address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Holding {
    pub bytes: u64,
    /// The physical handle; `None` for a plain segment.
    pub handle: Option<u64>,
    pub space: SpaceId,
    /// Views that map the handle.
    pub views: u32,
}

/// A physical handle that is mapped nowhere but could not be released yet.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stray {
    pub handle: u64,
    pub bytes: u64,
    pub space: SpaceId,
}

/// What a caller asks of an arena.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Want {
    pub space: SpaceId,
    pub stream: u32,
    pub granules: u32,
    /// Alignment in granules.
    pub align: u32,
    /// Bytes as the user asked for.
    pub requested: u64,
}

impl Want {
    /// Granules of a run in which the request surely fits, whatever the run's address.
    pub(crate) fn span(&self) -> u32 {
        self.granules + self.align - 1
    }

    /// Granules between the start of a run and the first aligned address in it.
    pub(crate) fn skip(&self, addr: u64) -> u32 {
        let align = u64::from(self.align) * GRANULE;
        ((addr.next_multiple_of(align) - addr) / GRANULE) as u32
    }
}

/// A wait that has to be queued before a taken block may be used.
#[derive(Debug)]
pub(crate) struct PendingWait {
    pub stream: u32,
    pub bound: u64,
    pub event: Arc<Event>,
    pub row: Box<[u64]>,
}

/// Adds a use to those of a live block; true if its stream is new among them.
pub(crate) fn add_recorded(recorded: &mut Vec<Recorded>, new: Recorded) -> bool {
    match recorded.iter_mut().find(|r| r.stream == new.stream) {
        Some(known) => {
            // "Until the free" covers every earlier ticket.
            known.ticket = match (known.ticket, new.ticket) {
                (Some(a), Some(b)) => Some(a.max(b)),
                _ => None,
            };
            false
        }
        None => {
            recorded.push(new);
            true
        }
    }
}

/// What a free left to do outside the lock.
#[derive(Debug, Default)]
pub(crate) struct AfterFree {
    /// Streams whose batch is full.
    pub mark: Vec<u32>,
}

/// Bytes of pieces that streams other than their own may still use.
fn mixed_bytes(shards: &[Shard]) -> u64 {
    let mixed = shards.iter().filter(|s| matches!(s.uses, Uses::Many(_)));
    mixed.map(|s| u64::from(s.granules) * GRANULE).sum()
}

/// See the module's text.
#[derive(Debug)]
pub(crate) struct State {
    /// Ordinal of the device.
    pub device: usize,
    pub packed: bool,
    pub records: Records,
    pub lookup: Lookup,
    pub large: Space,
    pub small: Space,
    /// The allocator that the books are of, for the fronts that keep it alive.
    pub engine: Weak<Engine>,
    pub id: u64,
    /// Threads that can run at once.
    pub threads: usize,
    /// Which front has which page.
    pub table: Arc<PageTable<Engine>>,
    pub fronts: Fronts,
    /// Packed: page address to its record in the small arena.
    pub page_ids: HashMap<u64, u32>,
    pub streams: Streams,
    /// Events that may be recorded again, by context.
    pub events: HashMap<u64, Vec<Event>>,
    pub holdings: BTreeMap<u64, Holding>,
    pub strays: Vec<Stray>,
    /// Packed: views by their base address, and the address space for them.
    pub views: BTreeMap<u64, View>,
    pub view_space: Space,
    /// Large requests so far: the order in which views were used.
    pub clock: u64,
    /// Level of the stitching budget, and what was spent on it.
    pub level: usize,
    pub work: u64,
    /// Reserved address ranges: base to bytes.
    pub spans: BTreeMap<u64, u64>,
    pub stats: Stats,
    /// Most bytes of large freed blocks that other streams could still use, at once.
    pub mixed_peak: u64,
    pub limit: Option<u64>,
    /// The driver refused to hold more than this; lifted when something is released, and before a
    /// request fails or waits for it.
    pub full_at: Option<u64>,
    /// Bytes that growth under way will add.
    pub planned: u64,
    /// Peak of live requested bytes since the last trim.
    pub peak_live: u64,
    /// Blocks dropped while their stream was capturing: freed by the next call that may.
    pub deferred: Vec<Lifetime>,
    /// Frees so far: the time by which idle memory is told apart.
    pub frees: u64,
    pub closed: bool,
    /// No allocator stands for the books any more: the last block that goes closes them.
    pub orphaned: bool,
}

impl State {
    pub(crate) fn new(
        (engine, id): (Weak<Engine>, u64),
        table: Arc<PageTable<Engine>>,
        device: usize,
        packed: bool,
        limit: Option<u64>,
    ) -> Self {
        State {
            device,
            packed,
            records: Records::default(),
            lookup: Lookup::default(),
            large: Space::new(SpaceId::Large, true),
            small: Space::new(SpaceId::Small, true),
            engine,
            id,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            table,
            fronts: Fronts::default(),
            page_ids: HashMap::new(),
            streams: Streams::default(),
            events: HashMap::new(),
            holdings: BTreeMap::new(),
            strays: Vec::new(),
            views: BTreeMap::new(),
            view_space: Space::new(SpaceId::Views, true),
            clock: 0,
            level: 0,
            work: 0,
            spans: BTreeMap::new(),
            stats: Stats::default(),
            mixed_peak: 0,
            limit,
            full_at: None,
            planned: 0,
            peak_live: 0,
            deferred: Vec::new(),
            frees: 0,
            closed: false,
            orphaned: false,
        }
    }

    /// The pool of a rounded request.
    pub(crate) fn is_small(&self, rounded: u64) -> bool {
        rounded
            <= if self.packed {
                PACKED_SMALL_LIMIT
            } else {
                CLASSIC_SMALL_LIMIT
            }
    }

    /// A space with what its operations need beside it.
    pub(crate) fn parts(&mut self, space: SpaceId) -> (&mut Space, &mut Records) {
        let space = match space {
            SpaceId::Large => &mut self.large,
            SpaceId::Small => &mut self.small,
            SpaceId::Views => &mut self.view_space,
        };
        (space, &mut self.records)
    }

    pub(crate) fn space(&self, space: SpaceId) -> Option<&Space> {
        match space {
            SpaceId::Large => Some(&self.large),
            SpaceId::Small => Some(&self.small),
            SpaceId::Views => Some(&self.view_space),
        }
    }

    pub(crate) fn spaces(&self) -> impl Iterator<Item = &Space> {
        [&self.large, &self.small].into_iter()
    }

    /// The eye of one stream on one space.
    pub(crate) fn finder(&self, space: SpaceId, stream: u32) -> Option<Finder<'_>> {
        let space = self.space(space)?;
        Some(Finder {
            records: &self.records,
            streams: &self.streams,
            space,
            stream,
        })
    }

    /// Bytes that may still be taken from the driver.
    pub(crate) fn room(&self) -> u64 {
        let held = self.stats.all.reserved.current + self.planned;
        let bound = self
            .limit
            .unwrap_or(u64::MAX)
            .min(self.full_at.unwrap_or(u64::MAX));
        bound.saturating_sub(held)
    }

    // ---- streams ---------------------------------------------------------------------------

    pub(crate) fn adopt(
        &mut self,
        key: StreamKey,
        raw: usize,
        context: Context,
        holder: Holder,
    ) -> u32 {
        if let Some(stream) = self.streams.find(key) {
            return stream;
        }
        let stream = self.streams.add(key, raw, context, holder);
        self.streams_changed();
        stream
    }

    /// With one stream, memory needs no tags to be told apart and merges freely; with several it
    /// must not.
    pub(crate) fn streams_changed(&mut self) {
        self.stats.streams = self.streams.len() as u64;
        if !self.packed {
            return;
        }
        let single = !self.streams.several();
        for space in [SpaceId::Large, SpaceId::Small] {
            let (space, records) = self.parts(space);
            if space.merge_own != single {
                space.merge_own = single;
                if single {
                    let classes: Vec<u32> = space.pending_streams().collect();
                    for class in classes {
                        space.recoalesce(records, class);
                    }
                }
            }
        }
        if !single {
            // Memory that was never used, or not for long, is everybody's from now on.
            for space in [SpaceId::Large, SpaceId::Small] {
                let classes: Vec<u32> = self
                    .space(space)
                    .into_iter()
                    .flat_map(Space::pending_streams)
                    .collect();
                for class in classes {
                    self.settle_class(space, class);
                }
            }
        }
    }

    /// While one stream exists, complete memory is as good as its own, and merges with it.
    pub(crate) fn adopt_complete(&mut self, space: SpaceId, stream: u32) {
        let (space, records) = self.parts(space);
        if !space.merge_own {
            return;
        }
        while let Some(entry) = space.index(COMPLETE).and_then(|i| i.largest()) {
            space.retag(records, entry.id, Uses::one(stream, 0));
        }
    }

    /// Makes the next marker of a stream cover everything that it may still touch: live blocks, and
    /// what was freed inside its pages, which no batch counts.
    pub(crate) fn prepare_last_marker(&mut self, stream: u32) {
        for front in self.fronts.all().to_vec() {
            self.close_batches(front, Some(stream));
        }
        self.flush_fronts_of(stream);
        let busy = self.front_uses(stream) > 0;
        let slot = &mut self.streams[stream];
        if slot.live > 0 || busy {
            slot.open_uses += 1;
        }
    }

    /// Gives back the slot of a stream that nothing refers to.
    pub(crate) fn recycle(&mut self, stream: u32) {
        let many = self.streams.len() > MANY_STREAMS;
        let forgettable = matches!(self.streams[stream].holder, Holder::Foreign) && many;
        if forgettable && self.streams[stream].pages > 0 {
            // What was freed in its pages is counted from here on: later, when it is complete.
            self.flush_fronts_of(stream);
            return;
        }
        let slot = &self.streams[stream];
        let quiet = slot.live == 0 && slot.calls == 0 && slot.open_uses == 0;
        let idle = slot.in_use && quiet && slot.completed + 1 >= slot.open;
        if !idle {
            return;
        }
        let forget = match slot.holder {
            Holder::Retired => true,
            // A caller's stream that comes again is simply registered again.
            Holder::Foreign => many,
            Holder::Kept(_) => false,
        };
        if !forget {
            return;
        }
        // From here on nobody allocates on it without a look at the books.
        self.set_fast(stream, false);
        self.flush_fronts_of(stream);
        let slot = &self.streams[stream];
        let drained = slot.open_uses == 0 && slot.completed + 1 >= slot.open;
        if !drained || self.front_uses(stream) > 0 {
            let slot = &self.streams[stream];
            let fast = !self.closed && !matches!(slot.holder, Holder::Retired);
            self.set_fast(stream, fast && matches!(slot.key, StreamKey::Id(_)));
            return;
        }
        self.streams[stream].holder = Holder::Retired;
        self.drop_fronts(stream);
        self.release_class(stream);
        if self.streams.recycle(stream) {
            self.streams_changed();
        }
    }

    /// Everything that was tagged with a drained stream is complete.
    fn release_class(&mut self, stream: u32) {
        for space in [SpaceId::Large, SpaceId::Small] {
            let (space, records) = self.parts(space);
            while let Some(entry) = space.index(stream).and_then(|i| i.largest()) {
                space.retag(records, entry.id, Uses::None);
            }
        }
    }

    // ---- blocks ----------------------------------------------------------------------------

    /// Counts a request in the peak that the soft cap follows. Returns the peak before and with it.
    pub(crate) fn announce(&mut self, requested: u64) -> (u64, u64) {
        let before = self.peak_live;
        self.peak_live = before.max(self.requested_now() + requested);
        (before, self.peak_live)
    }

    /// Requested bytes of live blocks; of small ones as of the last look.
    pub(crate) fn requested_now(&self) -> u64 {
        self.stats.all.requested.current + self.fronts.requested
    }

    /// A request failed: it does not raise the peak, unless others have raised it since.
    pub(crate) fn withdraw(&mut self, (before, with): (u64, u64)) {
        if self.peak_live == with {
            self.peak_live = before.max(self.requested_now());
        }
    }

    /// Takes a request from a ready run.
    pub(crate) fn take(&mut self, want: &Want, run: Run) -> Option<u32> {
        let skip = want.skip(run.addr);
        let granules = self.granules_of(want, run.granules - u64::from(skip));
        let (space, records) = self.parts(want.space);
        let first = records[run.first];
        if skip == 0 && first.granules >= granules && first.stream != MIXED {
            space.carve(records, run.first, granules);
            return Some(run.first);
        }
        self.claim(want.space, run.first, skip, granules)
            .map(|(id, _)| id)
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
        let (at, records) = self.parts(space);
        let id = at.claim(records, first, skip, granules, Extent::Busy, &mut shards)?;
        let bytes = mixed_bytes(&shards);
        self.stats
            .on_pool(space != SpaceId::Large, |pool| pool.active.sub(bytes));
        Some((id, shards))
    }

    /// Puts back what [`claim`](Self::claim) took.
    pub(crate) fn restore(&mut self, space: SpaceId, id: u32, shards: Vec<Shard>) {
        self.mixed_added(space, mixed_bytes(&shards));
        let (at, records) = self.parts(space);
        at.restore(records, id, shards);
    }

    /// Counts freed bytes that several streams may still use.
    pub(crate) fn mixed_added(&mut self, space: SpaceId, bytes: u64) {
        self.stats
            .on_pool(space != SpaceId::Large, |pool| pool.active.add(bytes));
        let all = &self.stats.all;
        let mixed = all.active.current.saturating_sub(all.allocated.current);
        self.mixed_peak = self.mixed_peak.max(mixed);
    }

    /// Granules that a request gets out of an extent: classic does not split everything.
    pub(crate) fn granules_of(&self, want: &Want, available: u64) -> u32 {
        if self.packed {
            want.granules
        } else {
            classic_granules(want.space == SpaceId::Small, available, want.granules)
        }
    }

    /// Takes a request from a run of which some pieces need a wait. Returns the block, what stood
    /// there, and the waits.
    pub(crate) fn take_waiting(
        &mut self,
        want: &Want,
        run: Run,
    ) -> Option<(u32, Vec<Shard>, Vec<PendingWait>)> {
        let skip = want.skip(run.addr);
        let granules = self.granules_of(want, run.granules - u64::from(skip));
        let (id, shards) = self.claim(want.space, run.first, skip, granules)?;
        let waits = self.waits_for(want.stream, &shards);
        Some((id, shards, waits))
    }

    /// The waits after which a stream may use what the shards were. One wait brings everything that
    /// its marker's stream followed, so the newest markers come first.
    pub(crate) fn waits_for(&self, stream: u32, shards: &[Shard]) -> Vec<PendingWait> {
        let mut needed: Vec<Use> = shards
            .iter()
            .flat_map(|s| s.uses.as_slice())
            .filter(|u| !self.streams.ready(stream, u))
            .copied()
            .collect();
        needed.sort_unstable_by_key(|u| {
            std::cmp::Reverse(self.streams.marker(u).map_or(0, |m| m.order))
        });
        let mut waits: Vec<PendingWait> = Vec::new();
        for u in needed {
            let opened = |w: &PendingWait| {
                (w.stream == u.stream && u.ticket <= w.bound)
                    || w.row
                        .get(u.stream as usize)
                        .is_some_and(|known| u.ticket <= *known)
            };
            if waits.iter().any(opened) {
                continue;
            }
            if let Some(marker) = self.streams.marker(&u) {
                waits.push(PendingWait {
                    stream: u.stream,
                    bound: marker.bound,
                    event: Arc::clone(&marker.event),
                    row: marker.row.clone(),
                });
            }
        }
        waits
    }

    /// Turns a taken extent into a live block of the user.
    pub(crate) fn born(&mut self, id: u32, stream: u32, requested: u64) {
        let hot = &mut self.records[id];
        hot.state = Extent::Used;
        hot.stream = stream;
        hot.generation = hot.generation.wrapping_add(1) | 1;
        let (addr, bytes) = (hot.addr, hot.bytes());
        let cold = self.records.cold_mut(id);
        cold.requested = requested;
        cold.owner = stream;
        let small = cold.space != SpaceId::Large;
        self.lookup.insert(addr, id);
        self.streams[stream].live += 1;
        self.stats.on_pool(small, |pool| {
            pool.allocations.add(1);
            pool.allocated.add(bytes);
            pool.active.add(bytes);
            pool.requested.add(requested);
        });
        self.large_counted();
    }

    /// Adds a use by another stream to a live block. `None` as the ticket: whatever that stream is
    /// given until the free.
    pub(crate) fn record(&mut self, id: u32, stream: u32, ticket: Option<u64>) {
        if self.records[id].stream == stream {
            return;
        }
        let recorded = &mut self.records.cold_mut(id).recorded;
        if add_recorded(recorded, Recorded { stream, ticket }) {
            self.streams[stream].live += 1;
        }
    }

    /// Frees a live block.
    pub(crate) fn free(&mut self, id: u32) -> AfterFree {
        let hot = self.records[id];
        let (space, owner, bytes) = (self.records.cold(id).space, hot.stream, hot.bytes());
        let requested = self.records.cold(id).requested;
        let recorded = std::mem::take(&mut self.records.cold_mut(id).recorded);
        self.lookup.remove(hot.addr);
        self.records[id].generation = hot.generation.wrapping_add(1);

        let shared = !recorded.is_empty();
        let small = space != SpaceId::Large;
        self.stats.on_pool(small, |pool| {
            pool.allocations.sub(1);
            pool.allocated.sub(bytes);
            pool.requested.sub(requested);
            if !shared {
                pool.active.sub(bytes);
            }
        });
        let mut uses = vec![self.ticket(owner, None)];
        uses.extend(recorded.iter().map(|r| self.ticket(r.stream, r.ticket)));
        for u in &uses {
            self.streams[u.stream].live -= 1;
        }
        let mut after = AfterFree::default();
        for u in &uses {
            self.count_free(u, bytes, &mut after);
        }
        if shared {
            let all = &self.stats.all;
            let mixed = all.active.current.saturating_sub(all.allocated.current);
            self.mixed_peak = self.mixed_peak.max(mixed);
        }
        self.frees += 1;
        self.records.cold_mut(id).freed = self.frees;
        let uses = Uses::collect(uses);
        if !self.records.cold(id).home.is_empty() {
            for piece in self.view_block_freed(id, &uses) {
                if shared {
                    self.settle_piece(SpaceId::Large, piece);
                }
            }
            return after;
        }
        let (at, records) = self.parts(space);
        let piece = at.release(records, id, uses);
        if shared {
            // A recorded use may be over already.
            self.settle_piece(space, piece);
        }
        after
    }

    /// The use that a free now leaves on a stream.
    pub(crate) fn ticket(&self, stream: u32, precise: Option<u64>) -> Use {
        let slot = &self.streams[stream];
        // A retired stream gets no more work, so its last marker covers everything.
        let now = if matches!(slot.holder, Holder::Retired) {
            slot.open - 1
        } else {
            slot.open
        };
        Use {
            stream,
            ticket: precise.unwrap_or(now).min(now),
        }
    }

    pub(crate) fn count_free(&mut self, u: &Use, bytes: u64, after: &mut AfterFree) {
        let several = self.streams.several();
        let slot = &mut self.streams[u.stream];
        if u.ticket < slot.open {
            return;
        }
        slot.open_uses += 1;
        slot.open_bytes += bytes;
        if several && (slot.open_uses >= BATCH_FREES || slot.open_bytes >= BATCH_BYTES) {
            after.mark.push(u.stream);
        }
    }

    // ---- completion ---------------------------------------------------------------------------

    /// Drops from all pieces what is complete now.
    pub(crate) fn settle(&mut self) {
        let ids: Vec<SpaceId> = self.spaces().map(|s| s.id).collect();
        for id in ids {
            let Some(space) = self.space(id) else {
                continue;
            };
            let mut classes: Vec<u32> = vec![MIXED];
            if !space.merge_own {
                classes.extend(space.pending_streams());
            }
            for class in classes {
                self.settle_class(id, class);
            }
        }
        self.settle_held_back();
        let streams: Vec<u32> = self.streams.iter().map(|(stream, _)| stream).collect();
        for stream in streams {
            self.recycle(stream);
        }
    }

    pub(crate) fn settle_class(&mut self, space: SpaceId, class: u32) {
        let Some(index) = self.space(space).and_then(|s| s.index(class)) else {
            return;
        };
        // By address, so that equal states settle equally.
        let mut pieces: Vec<_> = index.iter().collect();
        pieces.sort_unstable_by_key(|e| e.addr);
        for entry in pieces {
            let hot = &self.records[entry.id];
            if hot.is_free() && hot.addr == entry.addr && hot.stream == class {
                self.settle_piece(space, entry.id);
            }
        }
    }

    fn settle_piece(&mut self, space: SpaceId, id: u32) {
        let cold = self.records.cold(id);
        let (owner, was_mixed) = (cold.owner, self.records[id].stream == MIXED);
        // Where memory never changes streams the owner's tag stays, so that pieces merge by it.
        let keep_owner = self.space(space).is_some_and(|s| s.merge_own);
        let streams = &self.streams;
        let Some(uses) = cold
            .uses
            .without(|u| streams.complete(u) && !(keep_owner && u.stream == owner))
        else {
            return;
        };
        if was_mixed && uses.as_slice().len() <= 1 {
            let bytes = self.records[id].bytes();
            self.stats
                .on_pool(space != SpaceId::Large, |pool| pool.active.sub(bytes));
        }
        let (at, records) = self.parts(space);
        at.retag(records, id, uses);
    }

    // ---- polling ------------------------------------------------------------------------------

    /// The oldest marker of each stream that is due to be asked.
    pub(crate) fn due_markers(&mut self) -> Vec<(u32, u64, Arc<Event>)> {
        let streams: Vec<u32> = self.streams.iter().map(|(stream, _)| stream).collect();
        let mut due = Vec::new();
        for stream in streams {
            let slot = &mut self.streams[stream];
            let Some(marker) = slot.markers.front() else {
                continue;
            };
            if slot.backoff > 0 {
                slot.backoff -= 1;
                continue;
            }
            due.push((stream, marker.bound, Arc::clone(&marker.event)));
        }
        due
    }

    /// Lets the next poll ask every stream, also one that was not ready a moment ago.
    pub(crate) fn ask_again(&mut self) {
        let streams: Vec<u32> = self.streams.iter().map(|(stream, _)| stream).collect();
        for stream in streams {
            self.streams[stream].backoff = 0;
        }
    }

    pub(crate) fn not_ready(&mut self, stream: u32) {
        self.streams[stream].backoff = BACKOFF;
    }

    /// A marker was seen complete.
    pub(crate) fn observed(&mut self, stream: u32, bound: u64) {
        let row = self
            .streams
            .marker(&Use {
                stream,
                ticket: bound,
            })
            // Gone already if another marker's completion implied this one; what comes next in
            // line says nothing yet.
            .filter(|m| m.bound == bound)
            .map(|m| m.row.clone());
        let events = self
            .streams
            .completed(stream, bound, row.as_deref().unwrap_or(&[]));
        self.pool_events(events);
    }

    /// Keeps events for the next markers of the same context.
    pub(crate) fn pool_events(&mut self, events: Vec<(u32, Arc<Event>)>) {
        for (stream, event) in events {
            // One that a wait under way still holds is destroyed by its last holder instead.
            if let Some(event) = Arc::into_inner(event) {
                let key = self.streams[stream].context.key();
                self.events.entry(key).or_default().push(event);
            }
        }
    }
}
