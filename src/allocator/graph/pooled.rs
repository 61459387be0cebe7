//! Blocks of graph pools in the heap: their records, by which they are found, and their users.

use std::collections::HashMap;

use crate::allocator::cache::grant::Grant;
use crate::allocator::extent::hash::Mixed;
use crate::allocator::extent::origin::Names;
use crate::allocator::extent::record::{COMPLETE, SpaceId, State as Extent};
use crate::allocator::extent::want::Want;
use crate::allocator::graph::Requester;
use crate::allocator::graph::arena::{Fit, Live, Pending, Place, Tag};
use crate::allocator::graph::checkpoint::Changes;
use crate::allocator::graph::commit::FailedPlan;
use crate::allocator::graph::few::Few;
use crate::allocator::graph::plan::{Plan, PlanFailure, PlanResources};
use crate::allocator::graph::user::User;
use crate::allocator::heap::Heap;
use crate::allocator::physical::MemoryUsers;
use crate::driver::process;
use crate::event::{self, Kind};

/// A request to a pool.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PoolRequest {
    pub pool: u64,
    pub requester: Requester,
    pub fit: Fit,
    /// Requested bytes.
    pub requested: u64,
}

/// Changes made by restoring a checkpoint.
#[derive(Debug)]
pub(crate) struct Restoration {
    /// Addresses of the blocks that are no longer live.
    pub ceased: Vec<u64>,
    /// Users of those blocks, to be dropped without the lock.
    pub gone: Vec<Few<User>>,
    /// Blocks that are live again, each with its requested bytes.
    pub revived: Vec<(Grant, u64)>,
}

impl PoolRequest {
    /// The block's granules, and its requested bytes.
    pub(crate) fn sizes(&self) -> (u32, u64) {
        (self.fit.granules, self.requested)
    }
}

/// Whether a block of a graph pool with this id and generation is live.
pub(crate) fn is_live(heap: &Heap, life: (u32, u32)) -> bool {
    heap.extents.records.is_in(life, Extent::Pooled)
}

/// Returns the start of the live block of a graph pool around an address, with its id and generation.
pub(crate) fn around(heap: &mut Heap, ptr: u64) -> Option<(u64, (u32, u32))> {
    let id = heap.large_around(ptr)?;
    let hot = heap.extents.records[id];
    (hot.state == Extent::Pooled).then_some((hot.addr, (id, hot.generation)))
}

pub(crate) fn plan(heap: &mut Heap, request: &PoolRequest) -> Result<Plan, PlanFailure> {
    let want = Want {
        space: SpaceId::Large,
        stream: COMPLETE,
        granules: request.fit.granules,
        align: request.fit.align,
        requested: request.requested,
        single: false,
        whole: false,
        views: request.fit.views,
    };
    let (held, physical) = (heap.graphs.held, &heap.physical);
    let means = PlanResources {
        room: heap.room(),
        views: request.fit.views,
        size: &|missing| physical.handle_size(&want, missing, held, MemoryUsers::Pool),
    };
    heap.graphs
        .plan(request.pool, request.requester, request.fit, &means)
}

/// Records the outcome of a planned growth of a pool. On success returns the place of the block that it was planned
/// for.
pub(crate) fn commit_plan(
    heap: &mut Heap,
    pool: u64,
    plan: Plan,
    made: Result<&[u64], &FailedPlan>,
) -> Option<Place> {
    if let (Ok(_), Some((home, sizes))) = (&made, &plan.fresh) {
        let mut at = *home;
        for bytes in sizes {
            heap.recorder
                .record_memory(Kind::Map, (at, *bytes), (SpaceId::Large, true));
            at += bytes;
        }
    }
    let place = heap.graphs.planned(pool, plan, made);
    heap.count_held();
    place
}

/// Creates the record of a pool's block.
pub(crate) fn add(
    heap: &mut Heap,
    pool: u64,
    (granules, requested): (u32, u64),
    place: Place,
    users: Few<User>,
) -> Grant {
    let records = &mut heap.extents.records;
    let id = records.make(SpaceId::Large, Extent::Pooled, place.addr, granules);
    let hot = &mut records[id];
    hot.generation |= 1;
    let generation = hot.generation;
    records.cold_mut(id).requested = requested;
    heap.extents.lookup.insert(place.addr, id);
    let captured = users.iter().any(|user| user.since.is_some());
    let mut names = Names::default();
    if process::is_recording() {
        names.context = event::names::context() as u16;
    }
    let first = users.first().map(|user| (user.key, user.raw));
    heap.recorder.record_pooled(
        &heap.streams,
        Kind::Allocate,
        (place.addr, requested),
        first,
    );
    let live = Live {
        id,
        generation,
        owner: pool,
        granules,
        requested,
        parts: place.parts,
        // A stream's own work outside captures needs no event.
        pending: if captured { place.open } else { Vec::new() },
        captured,
        touched: Vec::new(),
        born: heap.graphs.number(),
        names,
        users,
    };
    heap.stats.pooled.born(live.bytes(), requested);
    heap.graphs.enter(place.addr, live);
    let home = heap.caches.graph_home();
    Grant::large(home, place.addr, (id, generation), (granules, requested))
}

/// Frees a block of a pool. The caller drops the returned users without the lock, because they may hold the last
/// reference to a stream.
#[must_use = "streams are not destroyed under the lock"]
pub(crate) fn remove(heap: &mut Heap, pool: u64, addr: u64, tag: Tag) -> Option<Few<User>> {
    let pool = heap.graphs.pools.get_mut(&pool)?;
    let gone = pool.arena.release(addr, tag)?;
    heap.extents.lookup.remove(addr);
    heap.extents.records.retire(gone.id);
    heap.stats.pooled.freed(gone.bytes, gone.requested, true);
    let first = gone.users.first().map(|user| (user.key, user.raw));
    heap.recorder
        .record_pooled(&heap.streams, Kind::Free, (addr, gone.requested), first);
    Some(gone.users)
}

/// Ends and revives blocks. `last` has the last use by each user, by the user's identity.
pub(crate) fn restore(
    heap: &mut Heap,
    pool: u64,
    changes: Changes,
    last: &HashMap<usize, (User, Pending), Mixed>,
) -> Restoration {
    let mut gone = Vec::with_capacity(changes.cease.len());
    for addr in &changes.cease {
        let mut tag = Tag::default();
        if let Some(live) = heap.graphs.live(*addr) {
            let users = live.users.iter();
            let uses = users.filter_map(|user| last.get(&user.identity()));
            let uses = uses.map(|(_, pending)| pending);
            tag.pending = live.pending.iter().chain(uses).copied().collect();
        }
        gone.extend(remove(heap, pool, *addr, tag));
    }
    let mut revived = Vec::with_capacity(changes.revive.len());
    for (addr, live) in changes.revive {
        let mut captured = live.captured || !live.touched.is_empty();
        let mut pending = Vec::new();
        if let Some(pool) = heap.graphs.pools.get_mut(&pool) {
            for part in &live.parts {
                pool.arena.take_each(*part, |_, tag| {
                    captured |= tag.captured || !tag.touched.is_empty();
                    pending.extend(&tag.pending);
                });
            }
        }
        let place = Place {
            addr,
            parts: live.parts,
            open: Vec::new(),
        };
        let (sizes, names) = ((live.granules, live.requested), live.names);
        let grant = add(heap, pool, sizes, place, live.users);
        if let Some(live) = heap.graphs.live_mut(addr) {
            live.names = names;
            live.captured |= captured;
            live.pending = pending;
            // Its memory may be in use, unlike that of a new block.
            live.born = 0;
        }
        revived.push((grant, live.requested));
    }
    Restoration {
        ceased: changes.cease,
        gone,
        revived,
    }
}
