//! Suspended memory in the heap: selection, refusals, and resume.

use std::collections::BTreeMap;

use crate::allocator::extent::record::{Hot, NIL, SpaceId, State as Extent};
use crate::allocator::graph::Pool;
use crate::allocator::heap::Heap;
use crate::allocator::heap::guarded::Guarding;
use crate::allocator::report::PhysicalSegment;
use crate::allocator::size::GRANULE;
use crate::allocator::suspend::contents::Contents;
use crate::allocator::suspend::host::HostCopy;
use crate::allocator::suspend::{Parked, Suspension, Target, join};
use crate::error::{Error, GraphPoolError};
use crate::event::Kind;

/// Handles, and the live byte ranges in them: home addresses and sizes.
type Choice = (Vec<Parked>, Vec<(u64, u64)>);

/// Returns the error for bytes in use by a call in progress.
fn busy(count: u64, bytes: u64) -> Error {
    let what = "call";
    Error::InUse { what, count, bytes }
}

impl Heap {
    /// Refuses requests while memory outside graph pools is suspended.
    #[inline]
    pub(crate) fn refuse(&self) -> Result<(), Error> {
        if self.closed {
            return Err(Error::Closed);
        }
        match self.suspended.closed {
            true => Err(Error::Suspended),
            false => Ok(()),
        }
    }

    /// Refuses requests of a pool while it is suspended.
    pub(crate) fn refuse_pool(&self, pool: u64) -> Result<(), Error> {
        match self.graphs.pools.get(&pool) {
            Some(pool) if pool.suspended => Err(Error::Suspended),
            _ => Ok(()),
        }
    }

    /// [`segments`](Self::segments) of memory that is not suspended.
    pub(crate) fn present_segments(
        &mut self,
        ptr: u64,
        bytes: u64,
    ) -> Result<(Guarding, Vec<PhysicalSegment>), Error> {
        self.refuse()?;
        let (block, segments) = self.segments(ptr, bytes)?;
        let mut places = segments.iter();
        match places.any(|segment| self.suspended.covers(segment.address)) {
            true => Err(Error::Suspended),
            false => Ok((block, segments)),
        }
    }

    // ---- closing -----------------------------------------------------------------------------------

    /// Closes a target for requests, unless something prevents its suspension.
    pub(crate) fn close_target(&mut self, target: Target) -> Result<(), Error> {
        match target {
            Target::Arenas => self.close_arenas(),
            Target::Pool(id) => self.close_pool(id),
        }
    }

    /// Fails while guards keep memory in place.
    pub(crate) fn refuse_guarded(&self) -> Result<(), Error> {
        match self.guards.count() {
            0 => Ok(()),
            guards => Err(Error::Guarded {
                guards,
                bytes: self.guards.bytes(),
            }),
        }
    }

    fn close_arenas(&mut self) -> Result<(), Error> {
        self.refuse_guarded()?;
        let calls: u64 = self
            .streams
            .iter()
            .map(|(_, slot)| u64::from(slot.calls))
            .sum();
        if calls > 0 {
            return Err(busy(calls, 0));
        }
        self.suspended.closed = true;
        self.open_caches();
        self.empty_large_caches();
        Ok(())
    }

    fn close_pool(&mut self, id: u64) -> Result<(), Error> {
        let mut captures = self.graphs.captures.values();
        if let Some(capture) = captures.find(|capture| capture.may_use(id)) {
            let stream = capture.streams.first().map_or(0, |known| known.user.raw);
            return Err(Error::Capturing { stream });
        }
        let Some(pool) = self.graphs.pools.get_mut(&id) else {
            return Err(Error::GraphPool(GraphPoolError::Released));
        };
        if pool.calls > 0 {
            return Err(busy(u64::from(pool.calls), pool.arena.held()));
        }
        pool.suspended = true;
        Ok(())
    }

    /// Opens a target for requests again.
    pub(crate) fn open_target(&mut self, target: Target) {
        match target {
            Target::Arenas => {
                self.suspended.closed = false;
                self.open_caches();
            }
            Target::Pool(id) => {
                if let Some(pool) = self.graphs.pools.get_mut(&id) {
                    (pool.suspended, pool.away) = (false, false);
                }
                self.graphs.recount();
            }
        }
    }

    // ---- choosing ----------------------------------------------------------------------------------

    /// Selects the memory of a closed target that is to be suspended.
    pub(crate) fn park(&mut self, target: Target, contents: Contents) -> Result<Suspension, Error> {
        let (handles, mut kept) = match target {
            Target::Arenas => self.park_arenas()?,
            Target::Pool(id) => {
                let pool = self.graphs.pools.get(&id);
                pool.map_or_else(Default::default, park_pool)
            }
        };
        let graphs = self.graphs.pools.values();
        let spans = graphs.flat_map(|pool| {
            pool.arena
                .homes
                .spans
                .keys()
                .chain(pool.arena.sites.spans.keys())
        });
        let mut bounds: Vec<u64> = spans.chain(self.physical.spans.keys()).copied().collect();
        bounds.sort_unstable();
        join(&mut kept, |at| bounds.binary_search(&at).is_ok());
        Ok(Suspension {
            handles,
            bounds,
            kept: match contents {
                Contents::Drop => Vec::new(),
                Contents::Pinned | Contents::Host => kept,
            },
            contents,
            copy: HostCopy::None,
            lost: false,
            unseen: false,
            away: false,
        })
    }

    fn park_arenas(&mut self) -> Result<Choice, Error> {
        let mut kept = Vec::new();
        for space in [SpaceId::Large, SpaceId::Small] {
            for (_, hot) in self.row(space) {
                match hot.state {
                    Extent::Busy => return Err(busy(1, hot.bytes())),
                    Extent::Used if self.rules.caches() && space == SpaceId::Small => {
                        kept.extend(self.used_in_page(&hot));
                    }
                    Extent::Used | Extent::Aliased => kept.push((hot.addr, hot.bytes())),
                    _ => {}
                }
            }
        }
        let working = |view: &&crate::allocator::view::mapping::View| view.busy || view.calls > 0;
        let views = self.views.map.values().filter(working).count() + self.views.segs_under_way;
        if views > 0 {
            return Err(busy(views as u64, 0));
        }
        kept.sort_unstable();
        let apart = |home: &u64| {
            let mut ids = self.physical.quarantined.iter();
            ids.any(|id| self.extents.records[*id].addr == *home)
        };
        let holdings = self.physical.holdings.iter();
        let mut handles: Vec<Parked> = holdings
            .filter(|(home, _)| !apart(home))
            .map(|(home, holding)| parked(*home, holding.bytes, holding.handle))
            .collect();
        for (base, view) in &self.views.map {
            let mut at = *base;
            for mapping in &view.mappings {
                show(&mut handles, mapping.home, at);
                at += u64::from(mapping.granules) * GRANULE;
            }
        }
        mapped(&mut handles);
        Ok((handles, kept))
    }

    /// Returns the extents of an arena, by address.
    fn row(&self, space: SpaceId) -> Vec<(u32, Hot)> {
        let mut row = Vec::new();
        let regions = self.extents.space(space).into_iter();
        for region in regions.flat_map(|space| space.regions().values()) {
            let mut at = region.first;
            while at != NIL {
                let hot = self.extents.records[at];
                row.push((at, hot));
                at = hot.next;
            }
        }
        row
    }

    /// Returns the live blocks in a page of a stream cache.
    fn used_in_page(&self, page: &Hot) -> Vec<(u64, u64)> {
        use crate::allocator::cache::stream_cache::Kind;
        let Some((cache, number)) = self.caches.table.find(page.addr) else {
            return Vec::new();
        };
        let runs = cache.lock().runs(number);
        let used = runs.into_iter().filter(|run| run.kind == Kind::Used);
        used.map(|run| (run.ptr, u64::from(run.granules) * GRANULE))
            .collect()
    }

    /// Removes the suspensions of released pools that have no blocks and that no graph can use.
    pub(crate) fn take_unused_pools(&mut self) -> Vec<(Target, Suspension)> {
        let away: Vec<Target> = self.suspended.map.keys().copied().collect();
        let over = away.into_iter().filter(|target| match target {
            Target::Pool(id) => self.graphs.is_unused(*id),
            Target::Arenas => false,
        });
        let over: Vec<Target> = over.collect();
        let over = over.into_iter();
        over.filter_map(|target| Some((target, self.suspended.map.remove(&target)?)))
            .collect()
    }

    // ---- resume ------------------------------------------------------------------------------------

    /// Counts the bytes that a resume will take from the driver, if there is room for them.
    pub(crate) fn announce_back(&mut self, bytes: u64) -> bool {
        let fits = bytes <= self.room();
        if fits {
            self.suspended.coming = bytes;
        }
        fits
    }

    /// Removes the handles without a live block from a suspension of the arenas, and from the heap.
    pub(crate) fn drop_unused(&mut self, suspension: &mut Suspension) {
        self.empty_large_caches();
        self.flush_caches();
        for space in [SpaceId::Large, SpaceId::Small] {
            for (home, bytes) in self.unused(space, |_| true) {
                let away = |handle: &Parked| handle.home == home && handle.handle.is_none();
                let Some(at) = suspension.handles.iter().position(away) else {
                    continue;
                };
                let Some(release) = self.claim_holding(space, home) else {
                    continue;
                };
                suspension.handles.swap_remove(at);
                self.gone(&release);
                self.unhold(bytes, space);
            }
        }
    }

    /// Records that the memory of a suspension is restored.
    pub(crate) fn woken(&mut self, target: Target, suspension: &Suspension) {
        for parked in &suspension.handles {
            let Some(handle) = parked.handle else {
                continue;
            };
            match target {
                Target::Arenas => {
                    if let Some(holding) = self.physical.holdings.get_mut(&parked.home) {
                        holding.handle = Some(handle);
                    }
                }
                Target::Pool(id) => {
                    let pool = self.graphs.pools.get_mut(&id);
                    if let Some(held) = pool.and_then(|p| p.arena.handles.get_mut(&parked.home)) {
                        held.handle = handle;
                    }
                }
            }
        }
        self.open_target(target);
    }

    /// Discards a suspension whose memory the driver has and that no one will resume: no block is live, and no work is
    /// in progress.
    pub(crate) fn forgotten(&mut self, target: Target, mut suspension: Suspension) {
        self.open_target(target);
        match target {
            Target::Pool(id) => {
                let mut gone = BTreeMap::new();
                if let Some(pool) = self.graphs.pools.get_mut(&id) {
                    gone = pool.arena.at_home();
                    pool.arena.forget_memory();
                    let stays = pool.arena.at_home();
                    gone.retain(|home, _| !stays.contains_key(home));
                }
                self.graphs.recount();
                for (home, bytes) in gone {
                    self.tell_pool_memory(Kind::Unmap, home, bytes);
                }
            }
            Target::Arenas => {
                for base in self.idle_views(usize::MAX) {
                    if let Some(view) = self.take_view(base) {
                        let bytes = u64::from(view.granules) * GRANULE;
                        self.extents.lookup.forget(base, bytes);
                        self.view_gone(&view);
                    }
                }
                self.drop_unused(&mut suspension);
            }
        }
    }
}

fn park_pool(pool: &Pool) -> Choice {
    let arena = &pool.arena;
    let held = arena.handles.iter();
    let mut handles: Vec<Parked> = held
        .map(|(home, handle)| parked(*home, handle.bytes, Some(handle.handle)))
        .collect();
    for (base, view) in &arena.views {
        let mut at = *base;
        for (home, bytes) in &view.handles {
            show(&mut handles, *home, at);
            at += bytes;
        }
    }
    mapped(&mut handles);
    let parts = arena.live.values().flat_map(|live| &live.parts);
    let mut kept: Vec<(u64, u64)> = parts
        .map(|part| (part.home, u64::from(part.granules) * GRANULE))
        .collect();
    kept.sort_unstable();
    (handles, kept)
}

fn parked(home: u64, bytes: u64, handle: Option<u64>) -> Parked {
    Parked {
        home,
        bytes,
        handle,
        places: vec![home],
        mapped: 0,
    }
}

/// Records that a handle is mapped in a view, too. Handles are ordered by their homes.
fn show(handles: &mut [Parked], home: u64, at: u64) {
    if let Ok(found) = handles.binary_search_by_key(&home, |handle| handle.home) {
        handles[found].places.push(at);
    }
}

fn mapped(handles: &mut [Parked]) {
    for handle in handles {
        handle.mapped = handle.places.len();
    }
}
