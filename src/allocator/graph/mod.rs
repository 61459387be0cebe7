//! Graph pools: memory for stream captures.
//!
//! A graph stores addresses only. So a pool has its own arena, whose addresses stay mapped as long as a graph that was
//! captured with them, an executable graph instantiated from it, or a launch of that may use them: a *lease*. Inside a
//! capture, memory is reused behind the nodes that used it last ([`order`]). Across the captures of a pool, memory is
//! reused freely, because the users of a pool promise that launches of its graphs are ordered one after another.
//!
//! This module holds the metadata of all pools of an allocator, under the heap's lock; driver calls are in [`commit`].

pub(crate) mod addresses;
pub(crate) mod arena;
pub(crate) mod capture;
pub(crate) mod capturing;
pub(crate) mod check;
pub(crate) mod checkpoint;
pub(crate) mod commit;
pub(crate) mod few;
pub(crate) mod lease;
pub(crate) mod order;
pub(crate) mod plan;
pub(crate) mod pooled;
pub(crate) mod run;
pub(crate) mod scope;
pub(crate) mod segments;
pub(crate) mod source;
pub(crate) mod user;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use crate::allocator::extent::hash::Mixed;
use crate::allocator::graph::arena::{Arena, Fit, Live, Mark, NO_STREAM, Pending, Place, Tag};
use crate::allocator::graph::capture::{Capture, UsePoint};
use crate::allocator::graph::commit::FailedPlan;
use crate::allocator::graph::few::Few;
use crate::allocator::graph::lease::{Lease, Leases};
use crate::allocator::graph::plan::{Plan, PlanFailure, PlanResources};
use crate::allocator::graph::scope::Scopes;
use crate::allocator::graph::source::Source;
use crate::allocator::graph::user::User;
use crate::allocator::size::GRANULE;
use crate::clock::Wakeup;
use crate::error::{Error, GraphPoolError};
use crate::sync::event::Pooled;

/// The graph pools of an allocator, the captures that use them, and the scopes that route requests to them.
#[derive(Debug, Default)]
pub(crate) struct Graphs {
    pub pools: BTreeMap<u64, Pool>,
    pub captures: HashMap<u64, Capture, Mixed>,
    pub scopes: Scopes,
    /// Events at the end of uses outside captures, by number.
    pub events: BTreeMap<u64, Arc<Pooled>>,
    /// Uses by streams that must not be queried any more: complete after a wait for everything.
    pub unqueried: BTreeSet<u64>,
    /// Bytes that all pools hold from the driver, including those that growth in progress will add.
    pub held: u64,
    /// Number of handles of all pools.
    pub handles: u64,
    /// Woken when a lease ends.
    pub ended: Arc<Wakeup>,
    /// Handles of retired streams, each with the counter at that time. Kept only once there are checkpoints, which may
    /// name them.
    departed: Vec<(u64, User)>,
    has_checkpoints: bool,
    /// Sources of pools that were removed.
    ended_sources: Vec<Source>,
    /// The pool in which a block was placed last.
    latest: u64,
    /// Counter of pools, events and blocks.
    count: u64,
}

/// One pool.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    pub arena: Arena,
    /// Where its segments come from; `None` for the driver.
    pub source: Option<Source>,
    /// Whether the pool was released: no further capture uses it.
    pub released: bool,
    pub leases: Leases,
    /// Whether its memory is suspended or about to be: it serves no request.
    pub suspended: bool,
    /// Whether its memory is suspended, and so not counted.
    pub away: bool,
    /// Whether a graph may use it whose end the driver does not report.
    pub unreported: bool,
    /// Whether requests outside captures get memory that its graphs write.
    pub reuses_graph_memory: bool,
    /// Number of calls that work on it without the lock.
    pub calls: u32,
    /// Bytes that these calls will add.
    planned: u64,
    /// Peak of the bytes of live blocks.
    pub peak: u64,
}

/// Memory of a graph pool, in bytes unless a field says otherwise.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Footprint {
    /// Bytes of live blocks, after rounding.
    pub live: u64,
    /// Number of live blocks.
    pub blocks: u64,
    /// Bytes of free memory.
    pub free: u64,
    /// Peak of the bytes of live blocks.
    pub peak: u64,
    /// Bytes held from the driver.
    pub physical: u64,
    /// Number of graphs that may use the pool's addresses, including their executable graphs.
    pub leases: u64,
}

/// The requester of memory of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Requester {
    /// A stream of a capture, by its place there, which is valid as long as the capture has this number.
    Captured {
        capture: u64,
        number: u64,
        stream: usize,
    },
    /// A stream outside captures, by its number.
    Eager { stream: u64 },
}

impl Pool {
    /// Whether a graph may use it.
    pub(crate) fn is_leased(&self) -> bool {
        self.unreported || self.has_leases()
    }

    /// Whether no call is working on its memory, which is present, and no graph can use it.
    fn is_unleased(&self) -> bool {
        self.calls == 0 && !self.suspended && !self.is_leased()
    }

    /// Whether it has memory, and no live block.
    pub(crate) fn has_only_free(&self) -> bool {
        self.arena.live.is_empty() && self.arena.has_memory()
    }

    pub(crate) fn has_leases(&self) -> bool {
        self.leases.count() > 0
    }

    /// Whether a request outside captures must not get memory that a launch may write.
    fn avoids_graph_memory(&self) -> bool {
        self.is_leased() && !self.reuses_graph_memory
    }
}

impl Graphs {
    pub(crate) fn number(&mut self) -> u64 {
        self.count += 1;
        self.count
    }

    pub(crate) fn add_pool(&mut self, source: Option<Source>) -> u64 {
        let pool = self.number();
        let new = Pool {
            source,
            leases: Leases::new(&self.ended),
            ..Pool::default()
        };
        self.pools.insert(pool, new);
        pool
    }

    /// Stores the event at the end of a use by a stream.
    pub(crate) fn add_event(&mut self, stream: u64, event: Pooled) -> Pending {
        let number = self.number();
        self.events.insert(number, Arc::new(event));
        Pending {
            stream,
            event: number,
        }
    }

    /// Stores a use by a stream that may have been destroyed.
    pub(crate) fn add_unqueried(&mut self) -> Pending {
        let number = self.number();
        self.unqueried.insert(number);
        Pending {
            stream: NO_STREAM,
            event: number,
        }
    }

    /// Whether the capture in which a stream became a user still gets memory of a pool: then the stream is alive.
    pub(crate) fn serves_capture_of(&self, user: &User, pool: u64) -> bool {
        let capture = user.since.and_then(|capture| self.captures.get(&capture));
        capture.is_some_and(|capture| !capture.left.contains(&pool))
    }

    /// Returns the number and bytes of live blocks of all pools.
    pub(crate) fn live_totals(&self) -> (u64, u64) {
        let arenas = self.pools.values().map(|pool| &pool.arena);
        arenas.fold((0, 0), |(blocks, bytes), arena| {
            (blocks + arena.live.len() as u64, bytes + arena.live.bytes())
        })
    }

    /// Recomputes the bytes and the number of handles that pools hold.
    pub(crate) fn recount(&mut self) {
        let pools = || self.pools.values().filter(|pool| !pool.away);
        self.held = pools().map(|pool| pool.arena.held() + pool.planned).sum();
        self.handles = pools().map(|pool| pool.arena.handles.len() as u64).sum();
    }

    /// Returns the pool of the live block that starts at an address. Usually it is the pool of the last block.
    pub(crate) fn pool_of(&self, addr: u64) -> Option<u64> {
        let has = |pool: &Pool| pool.arena.live.contains_key(&addr);
        if self.pools.get(&self.latest).is_some_and(has) {
            return Some(self.latest);
        }
        let mut pools = self.pools.iter();
        pools.find(|(_, pool)| has(pool)).map(|(id, _)| *id)
    }

    pub(crate) fn live(&self, addr: u64) -> Option<&Live> {
        self.pools.get(&self.pool_of(addr)?)?.arena.live.get(&addr)
    }

    pub(crate) fn live_mut(&mut self, addr: u64) -> Option<&mut Live> {
        let pool = self.pool_of(addr)?;
        self.pools.get_mut(&pool)?.arena.live.get_mut(addr)
    }

    // ---- memory -----------------------------------------------------------------------------------

    /// Takes a request from the available memory of a pool.
    pub(crate) fn take(&mut self, pool: u64, requester: Requester, fit: Fit) -> Option<Place> {
        let pool = self.pools.get_mut(&pool)?;
        let usable = usable(&self.captures, requester, pool.avoids_graph_memory());
        let arena = &mut pool.arena;
        if arena.recent_fits(fit, &usable) {
            return arena.take_recent();
        }
        arena.merge_recent();
        let mut place = arena.find(fit, &usable)?;
        for part in &place.parts {
            let open = &mut place.open;
            arena.take_each(*part, |_, tag| open.extend(&tag.pending));
        }
        Some(place)
    }

    /// Returns the free bytes of a pool that a requester may use now, and those that it could use if no work outside
    /// captures were pending.
    pub(crate) fn free_for(&self, pool: u64, requester: Requester) -> (u64, u64) {
        let Some(pool) = self.pools.get(&pool) else {
            return (0, 0);
        };
        let usable = usable(&self.captures, requester, pool.avoids_graph_memory());
        let (mut ready, mut waiting) = (0, 0);
        for (part, tag) in pool.arena.tags() {
            let bytes = u64::from(part.granules) * GRANULE;
            let done = Tag {
                pending: Vec::new(),
                ..tag.clone()
            };
            if usable(tag) {
                ready += bytes;
            } else if usable(&done) {
                waiting += bytes;
            }
        }
        (ready, waiting)
    }

    /// Plans a growth. A plan counts as a call in progress.
    pub(crate) fn plan(
        &mut self,
        pool: u64,
        requester: Requester,
        fit: Fit,
        means: &PlanResources<'_>,
    ) -> Result<Plan, PlanFailure> {
        let Some(pool) = self.pools.get_mut(&pool) else {
            return Err(PlanFailure::Memory(fit.bytes()));
        };
        let usable = usable(&self.captures, requester, pool.avoids_graph_memory());
        pool.arena.merge_recent();
        let runs = pool.arena.runs(usable);
        let plan = pool.arena.plan(fit, &runs, means)?;
        pool.calls += 1;
        pool.planned += plan.fresh_bytes();
        self.recount();
        Ok(plan)
    }

    /// Finds a home for a handle that moves into a pool, where it is free memory. `None` if the pool lacks addresses.
    pub(crate) fn plan_free(&mut self, id: u64, bytes: u64) -> Option<u64> {
        let pool = self.pools.get_mut(&id)?;
        let home = pool.arena.homes.lowest(bytes)?;
        pool.arena.homes.cut(home, bytes);
        pool.calls += 1;
        pool.planned += bytes;
        self.recount();
        Some(home)
    }

    /// Commits a plan with its new handles, or reverts it. Returns the block's place.
    pub(crate) fn planned(
        &mut self,
        id: u64,
        plan: Plan,
        made: Result<&[u64], &FailedPlan>,
    ) -> Option<Place> {
        let pool = self.pools.get_mut(&id)?;
        pool.calls -= 1;
        pool.planned -= plan.fresh_bytes();
        let place = match made {
            Ok(handles) => Some(pool.arena.planned(plan, handles)),
            Err(FailedPlan { failure, lost }) => {
                pool.arena.revert(plan, failure, lost);
                None
            }
        };
        self.recount();
        place
    }

    /// Records a block at its place.
    #[inline]
    pub(crate) fn enter(&mut self, addr: u64, live: Live) {
        let Some(pool) = self.pools.get_mut(&live.owner) else {
            return;
        };
        self.latest = live.owner;
        pool.arena.live.insert(addr, live);
        pool.peak = pool.peak.max(pool.arena.live.bytes());
    }

    /// Returns the tag for memory that was used by these streams: those that capture, and those outside captures with
    /// the event at the end of each use. `None` if the state of a capture was discarded since the order of its nodes
    /// was queried.
    pub(crate) fn tag(
        &mut self,
        pool: u64,
        captured: Few<UsePoint>,
        pending: Vec<Pending>,
    ) -> Option<Tag> {
        let mut tag = Tag {
            pending,
            marks: Few::new(),
            captured: !captured.is_empty(),
            touched: Vec::new(),
        };
        for UsePoint {
            capture,
            number,
            seen,
        } in captured
        {
            // A capture that gets no more memory of the pool needs no order among its own uses.
            if !self.same_capture(capture, number)?.left.contains(&pool) {
                tag.marks.push(Mark { capture, seen });
            }
        }
        Some(tag)
    }

    /// Whether anything may be pending on an event.
    pub(crate) fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// Returns the events that free memory of a pool is pending on.
    pub(crate) fn awaited(&self, pool: u64) -> Vec<(u64, Arc<Pooled>)> {
        if self.events.is_empty() {
            return Vec::new();
        }
        let arena = self.pools.get(&pool).map(|pool| &pool.arena);
        let tags = arena.into_iter().flat_map(|arena| arena.tags());
        let pending = tags.flat_map(|(_, tag)| &tag.pending);
        let mut events: Vec<u64> = pending.map(|used| used.event).collect();
        events.sort_unstable();
        events.dedup();
        events
            .into_iter()
            .filter_map(|number| Some((number, Arc::clone(self.events.get(&number)?))))
            .collect()
    }

    /// Removes events that were observed complete from all tags, and returns them, to be dropped without the lock.
    pub(crate) fn completed(&mut self, events: &[u64]) -> Vec<Arc<Pooled>> {
        let events: HashSet<u64, Mixed> = events.iter().copied().collect();
        let over = |used: &Pending| events.contains(&used.event);
        let mut awaited: HashSet<u64> = HashSet::new();
        for pool in self.pools.values_mut() {
            let arena = &mut pool.arena;
            arena.retag(|tag| tag.pending.retain(|used| !over(used)));
            for live in arena.live.values_mut() {
                live.pending.retain(|used| !over(used));
            }
            awaited.extend(arena.pending().map(|used| used.event));
        }
        self.unqueried.retain(|number| awaited.contains(number));
        let known = self.events.keys().copied();
        let done: Vec<u64> = known.filter(|number| !awaited.contains(number)).collect();
        let done = done.iter();
        done.filter_map(|number| self.events.remove(number))
            .collect()
    }

    /// Removes the events of uses that nothing waits for any more; the caller drops them without the lock.
    pub(crate) fn take_unneeded(&mut self, uses: &[Pending]) -> Vec<Arc<Pooled>> {
        let uses = uses.iter();
        uses.filter_map(|used| self.events.remove(&used.event))
            .collect()
    }

    // ---- the end of a pool --------------------------------------------------------------------------

    /// Whether a released pool still exists.
    pub(crate) fn has_leaving(&self) -> bool {
        self.pools.values().any(|pool| pool.released)
    }

    /// Returns the leases of a pool.
    ///
    /// # Errors
    /// The pool does not exist any more.
    pub(crate) fn leases_of(&self, pool: u64) -> Result<Leases, Error> {
        let known = self.pools.get(&pool);
        let leases = known.map(|known| known.leases.clone());
        leases.ok_or(Error::GraphPool(GraphPoolError::Released))
    }

    /// Returns the number of held leases of all pools.
    pub(crate) fn count_leases(&self) -> u64 {
        self.pools.values().map(|pool| pool.leases.count()).sum()
    }

    pub(crate) fn are_leased(&self) -> bool {
        self.pools.values().any(Pool::has_leases)
    }

    /// Records that a graph has a lease of a pool, or that the driver does not report its end.
    pub(crate) fn add_lease(&mut self, pool: u64, lease: Option<Lease>) {
        if let Some(pool) = self.pools.get_mut(&pool) {
            match lease {
                Some(lease) => lease.hold(),
                None => pool.unreported = true,
            }
        }
    }

    /// Sets whether all memory of a pool may be used by a graph.
    pub(crate) fn set_captured(&mut self, pool: u64, captured: bool) {
        if let Some(pool) = self.pools.get_mut(&pool) {
            let arena = &mut pool.arena;
            arena.retag(|tag| {
                tag.captured = captured;
                tag.touched.retain(|lease| !lease.is_over());
            });
            let live = arena.live.values_mut();
            live.for_each(|live| live.captured = captured);
        }
    }

    /// Ends all captures. Returns all pools, and whether one was used by a graph whose end is not reported.
    pub(crate) fn end(&mut self) -> (Vec<u64>, bool) {
        let captures: Vec<u64> = self.captures.keys().copied().collect();
        captures.into_iter().for_each(|capture| self.ended(capture));
        let unreported = self.pools.values().any(|pool| pool.unreported);
        (self.pools.keys().copied().collect(), unreported)
    }

    /// Records that all work is complete, including that of graphs whose end is not reported.
    pub(crate) fn set_all_reported(&mut self) {
        let pools = self.pools.values_mut();
        pools.for_each(|pool| pool.unreported = false);
    }

    /// Fails while a pool is suspended.
    pub(crate) fn ensure_present(&self, pool: u64) -> Result<(), Error> {
        match self.pools.get(&pool) {
            Some(pool) if pool.suspended => Err(Error::Suspended),
            _ => Ok(()),
        }
    }

    /// Returns the footprint of a pool.
    pub(crate) fn footprint(&self, id: u64) -> Footprint {
        let Some(pool) = self.pools.get(&id) else {
            return Footprint::default();
        };
        let arena = &pool.arena;
        Footprint {
            live: arena.live.bytes(),
            blocks: arena.live.len() as u64,
            free: arena.free_bytes(),
            peak: pool.peak,
            physical: if pool.away { 0 } else { arena.held() },
            leases: pool.leases.count(),
        }
    }

    /// Whether nothing uses a pool's memory, and no graph can: no lease, no block, no work, no capture.
    pub(crate) fn is_idle(&self, id: u64) -> bool {
        let pool = self.pools.get(&id).filter(|_| !self.is_captured(id));
        pool.is_some_and(|pool| {
            let arena = &pool.arena;
            pool.is_unleased()
                && arena.live.is_empty()
                && arena.tags().all(|(_, tag)| tag.is_unused())
        })
    }

    /// Whether a capture in progress got memory of a pool.
    pub(crate) fn is_captured(&self, id: u64) -> bool {
        let mut served = self.captures.values().flat_map(|known| &known.served);
        served.any(|(_, pool)| *pool == id)
    }

    /// Whether a released pool is suspended and has no lease, no block and no call in progress.
    pub(crate) fn is_unused(&self, id: u64) -> bool {
        self.pools.get(&id).is_some_and(|pool| {
            pool.released
                && !pool.is_leased()
                && pool.away
                && pool.calls == 0
                && pool.arena.live.is_empty()
        })
    }
}

/// Returns the test whether a requester may use free memory; `avoids_graph_memory` is that of its pool.
fn usable(
    captures: &HashMap<u64, Capture, Mixed>,
    requester: Requester,
    avoids_graph_memory: bool,
) -> impl Fn(&Tag) -> bool {
    let order = match requester {
        Requester::Captured {
            capture, number, ..
        } => {
            let known = captures.get(&capture);
            let known = known.filter(|known| known.number == number);
            known.map(|known| &known.order)
        }
        Requester::Eager { .. } => None,
    };
    move |tag| match requester {
        Requester::Eager { stream } => {
            // Captures used the memory, or a graph that is not destroyed was recorded to use it.
            let in_graphs = tag.captured || !tag.touched.iter().all(Lease::is_over);
            !(in_graphs && avoids_graph_memory)
                && tag.marks.is_empty()
                && tag.pending.iter().all(|used| used.stream == stream)
        }
        Requester::Captured {
            capture, stream, ..
        } => {
            let behind = |mark: &Mark| {
                mark.capture == capture
                    && order.is_some_and(|order| order.is_behind(&mark.seen, stream))
            };
            // A wait for work outside captures would become part of the graph.
            tag.pending.is_empty() && tag.marks.iter().all(behind)
        }
    }
}
