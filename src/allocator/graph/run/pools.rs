//! Graph pools as a whole: footprint, checkpoints, and the release of their memory to the driver.

use crate::allocator::graph::pooled;
use crate::allocator::graph::pooled::Restoration;
use crate::allocator::plan;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::Duration;

use crate::allocator::engine::Engine;
use crate::allocator::engine::contexts;
use crate::allocator::engine::device;
use crate::allocator::engine::idle;
use crate::allocator::engine::release;
use crate::allocator::engine::segment_hooks::SegmentChange;
use crate::allocator::engine::segments;
use crate::allocator::extent::hash::Mixed;
use crate::allocator::extent::record::SpaceId;
use crate::allocator::graph::arena::Arena;
use crate::allocator::graph::checkpoint::Layout;
use crate::allocator::graph::commit;
use crate::allocator::graph::plan::Plan;
use crate::allocator::graph::run::refuse_released;
use crate::allocator::graph::run::streams;
use crate::allocator::graph::user::User;
use crate::allocator::graph::{Footprint, Pool};
use crate::allocator::inspect::snapshot::snapshot_pool;
use crate::allocator::physical::Release;
use crate::allocator::report::SegmentInfo;
use crate::allocator::suspend::discard;
use crate::clock::Clock;
use crate::driver::DriverError;
use crate::error::{Error, GraphPoolError};
use crate::event::Kind;
use crate::sync::event::Pooled;

/// How long to wait for the driver's report that graphs are destroyed, where the report is useful but may not come.
pub(crate) const SOON: Duration = Duration::from_millis(5);

pub(crate) fn checkpoint(engine: &Engine, pool: u64) -> Result<Layout, Error> {
    engine.free_deferred();
    let mut heap = engine.open()?;
    refuse_released(&heap.graphs, pool)?;
    Ok(heap.graphs.checkpoint(pool))
}

/// Permits requests outside captures to get memory that graphs of a pool write.
pub(crate) fn reuse_graph_memory(engine: &Engine, pool: u64) -> Result<(), Error> {
    let mut heap = engine.open()?;
    refuse_released(&heap.graphs, pool)?;
    if let Some(pool) = heap.graphs.pools.get_mut(&pool) {
        pool.reuses_graph_memory = true;
    }
    Ok(())
}

/// Makes exactly the blocks of a checkpoint live. Memory of blocks that cease stays pending on the work that uses it.
pub(crate) fn restore(engine: &Engine, pool: u64, to: &Layout) -> Result<Restoration, Error> {
    refuse_released(&engine.open()?.graphs, pool)?;
    engine.free_deferred();
    poll_events(engine, pool, false)?;
    contexts::review_captures(engine);
    // An event behind the work of each user, by the user's identity; `None` for a stream that may be gone.
    let mut ends: HashMap<usize, (User, Option<Pooled>), Mixed> = HashMap::default();
    loop {
        let unknown = {
            let mut heap = engine.open()?;
            refuse_released(&heap.graphs, pool)?;
            heap.graphs.ensure_present(pool)?;
            let changes = heap.graphs.changes(pool, to).map_err(Error::GraphPool)?;
            let mut uses = heap.graphs.uses_of(pool, &changes);
            uses.retain(|(user, _)| !ends.contains_key(&user.identity()));
            if uses.is_empty() {
                let mut last = HashMap::default();
                for (number, (user, end)) in ends {
                    let pending = match end {
                        Some(event) => heap.graphs.add_event(user.key.number(), event),
                        None => heap.graphs.add_unqueried(),
                    };
                    last.insert(number, (user, pending));
                }
                let mut restored = pooled::restore(&mut heap, pool, changes, &last);
                drop(heap);
                restored.gone.clear();
                return Ok(restored);
            }
            uses
        };
        for (user, bytes) in unknown {
            if let Entry::Vacant(unknown) = ends.entry(user.identity()) {
                let end = end_of_use(engine, &user, bytes)?;
                unknown.insert((user, end));
            }
        }
    }
}

/// Returns an event behind all work that a user's stream has been given; `None` if the stream may be gone. Fails with
/// [`GraphPoolError::NotComplete`] if the stream is capturing; `bytes` is for that error.
fn end_of_use(engine: &Engine, user: &User, bytes: u64) -> Result<Option<Pooled>, Error> {
    if streams::must_not_be_used(engine, user) {
        return Ok(None);
    }
    match streams::capture_of(engine, user) {
        Ok(None) => streams::end_of(engine, user).map(Some),
        Ok(Some(_)) | Err(Error::Capturing { .. }) => {
            Err(Error::GraphPool(GraphPoolError::NotComplete { bytes }))
        }
        Err(error) => Err(error),
    }
}

pub(crate) fn snapshot(engine: &Engine, pool: u64) -> Result<Vec<SegmentInfo>, Error> {
    poll_events(engine, pool, false)?;
    let heap = engine.open()?;
    refuse_released(&heap.graphs, pool)?;
    Ok(snapshot_pool(&heap, pool))
}

pub(crate) fn footprint(engine: &Engine, pool: u64) -> Result<Footprint, Error> {
    let heap = engine.open()?;
    refuse_released(&heap.graphs, pool)?;
    Ok(heap.graphs.footprint(pool))
}

/// Polls, or waits for, the events that free memory of a pool is pending on.
pub(crate) fn poll_events(engine: &Engine, pool: u64, wait: bool) -> Result<(), Error> {
    let awaited = {
        let heap = engine.lock();
        let mut awaited = heap.graphs.awaited(pool);
        awaited.retain(|(_, event)| {
            let elsewhere = event.context().filter(|c| c.id() != engine.context.id());
            let distrusted = elsewhere.and_then(|c| heap.streams.distrust_of(c.id()));
            heap.closed || distrusted.is_none()
        });
        awaited
    };
    if awaited.is_empty() {
        return Ok(());
    }
    let (mut over, mut first) = (Vec::new(), Ok(()));
    for (number, event) in &awaited {
        let asked = match wait {
            true => event.wait().map(|()| true),
            false => event.is_complete(),
        };
        match asked {
            Ok(true) => over.push(*number),
            Ok(false) => {}
            Err(error) => {
                let error = match event.context() {
                    Some(context) => engine.error_in(context, error),
                    None => engine.error(error),
                };
                first = first.and(Err(error));
            }
        }
    }
    let done = engine.lock().graphs.completed(&over);
    drop(awaited);
    drop(done);
    first
}

/// Polls the events that free memory of all pools is pending on.
pub(crate) fn poll_all(engine: &Engine) -> Result<(), Error> {
    contexts::review_captures(engine);
    let pools: Vec<u64> = engine.lock().graphs.pools.keys().copied().collect();
    let mut pools = pools.into_iter();
    pools.try_for_each(|pool| poll_events(engine, pool, false))
}

/// Waits until no graph holds a lease of these pools, or until the time is up: the driver reports the end of a
/// graph on its own thread, some time after the call that destroyed it has returned.
pub(crate) fn await_leases(engine: &Engine, limit: Duration, of: impl Fn(&Pool) -> bool) {
    let (clock, ended) = (Clock::default(), Arc::clone(&engine.lock().graphs.ended));
    loop {
        let seen = ended.count();
        let leased = {
            let heap = engine.lock();
            let mut pools = heap.graphs.pools.values();
            pools.any(|pool| pool.has_leases() && of(pool))
        };
        if !leased || clock.now() >= limit {
            return;
        }
        clock.wait(limit, &ended, seen);
    }
}

/// Makes room for a growth of a pool by this number of bytes, without a wait: releases memory that other pools can
/// spare, and moves idle memory of the allocator into the pool, as much as the limit or the driver's `refusal`
/// requires.
pub(crate) fn make_room(
    engine: &Engine,
    pool: u64,
    missing: u64,
    refusal: Option<DriverError>,
) -> Result<(), Error> {
    match move_idle(engine, pool, missing, refusal) {
        Err(Error::ContextLost(error)) => Err(Error::ContextLost(error)),
        // The growth is attempted regardless. Memory that could not be moved stays where it was.
        _ => Ok(()),
    }
}

fn move_idle(
    engine: &Engine,
    pool: u64,
    missing: u64,
    refusal: Option<DriverError>,
) -> Result<(), Error> {
    let _retried = idle::find(engine)?;
    let released_pools = poll_all(engine).and_then(|()| release_pool_memory(engine, true));
    let idle = {
        let heap = engine.lock();
        heap.views.idle_views(&heap.streams, usize::MAX)
    };
    let evicted = release::evict(engine, &idle);
    let room = engine.lock().room();
    let settled =
        release::release_settled(engine, None, missing.saturating_sub(room), |_, _, _, _| {
            true
        });
    let free = match refusal.map(|error| device::driver_free(engine, error)) {
        None => u64::MAX,
        Some(free) if free < missing => free,
        // The driver refused memory that it reports as free.
        Some(_) => 0,
    };
    let mut claimed = {
        let mut heap = engine.lock();
        let room = heap.room().min(free);
        let arenas = [SpaceId::Large, SpaceId::Small];
        let claimed = plan::release::plan(&mut heap, &arenas, missing, room);
        let bytes: u64 = claimed.iter().map(|release| release.bytes).sum();
        if bytes < missing.saturating_sub(room) {
            // The claimed memory would not suffice for the pool, so it stays with the allocator.
            claimed
                .into_iter()
                .for_each(|release| plan::release::revert(&mut heap, release));
            return Ok(());
        }
        claimed.into_iter()
    };
    let moved = claimed
        .by_ref()
        .try_for_each(|release| move_handle(engine, pool, release));
    let mut heap = engine.lock();
    claimed.for_each(|release| plan::release::revert(&mut heap, release));
    drop(heap);
    released_pools
        .map(drop)
        .and(evicted)
        .and(settled.map(drop))
        .and(moved)
}

/// Moves a claimed handle into the free memory of a pool.
fn move_handle(engine: &Engine, pool: u64, release: Release) -> Result<(), Error> {
    let home = match release.handle {
        Some(handle) => plan_home(engine, pool, release.bytes).map(|at| (at, handle)),
        None => Err(Error::NotSupported {
            what: "graph pools without virtual memory management",
        }),
    };
    let (home, handle) = match home {
        Ok(home) => home,
        Err(error) => {
            plan::release::revert(&mut engine.lock(), release);
            return Err(error);
        }
    };
    let planned = (home, vec![release.bytes]);
    let maker = engine.maker();
    segments::report_claimed(engine, SegmentChange::Death, [&release]);
    let (left, made) = commit::move_handle_in(&maker, &planned, (&release, handle));
    if made.is_ok() {
        let moved = [(home, release.bytes)];
        segments::report(engine, SegmentChange::Birth, Some(pool), moved);
    } else if !left {
        segments::report_claimed(engine, SegmentChange::Birth, [&release]);
    }
    let mut heap = engine.lock();
    pooled::commit_plan(&mut heap, pool, Plan::free(planned), made.as_deref());
    drop(maker);
    if left {
        plan::release::remove(&mut heap, &release);
    } else {
        plan::release::revert(&mut heap, release);
    }
    drop(heap);
    made.map(drop)
        .map_err(|not_made| engine.error(not_made.failure.error))
}

/// Finds a home address in a pool for a handle, and leases addresses if the pool has none.
fn plan_home(engine: &Engine, pool: u64, bytes: u64) -> Result<u64, Error> {
    loop {
        let mut heap = engine.open()?;
        heap.graphs.ensure_present(pool)?;
        if let Some(home) = heap.graphs.plan_free(pool, bytes) {
            return Ok(home);
        }
        drop(heap);
        streams::lease_addresses(engine, pool, bytes, |arena| &mut arena.homes)?;
    }
}

/// Waits for the pending memory of pools, and releases all their memory. No graph holds a lease any more.
pub(crate) fn close(engine: &Engine) -> Result<(), Error> {
    let (pools, unreported) = engine.lock().graphs.end();
    let unqueried = !engine.lock().graphs.unqueried.is_empty();
    if unreported || unqueried {
        contexts::synchronise(engine, true)?;
        engine.lock().graphs.set_all_reported();
    }
    for pool in pools {
        poll_events(engine, pool, true)?;
    }
    let spent = engine.lock().graphs.completed(&[]);
    drop(spent);
    release_pool_memory(engine, true).map(drop)
}

/// Releases the memory of released pools as soon as nothing can use it any more.
pub(crate) fn release_unused(engine: &Engine) {
    if !engine.lock().graphs.has_leaving() {
        return;
    }
    if let Err(error) = release_pool_memory(engine, false)
        && let Some(count) = engine.log.due()
    {
        log::warn!(
            "cannot release memory of a graph pool, retrying later (occurrence {count}): {error}"
        );
    }
}

/// Releases the memory of unused pools to the driver, with `all` of every pool, otherwise of released pools only.
/// Returns the bytes.
pub(crate) fn release_pool_memory(engine: &Engine, all: bool) -> Result<u64, Error> {
    discard::discard_unused(engine)?;
    let (mut released, mut first) = (0, Ok(()));
    let taken = {
        let mut heap = engine.lock();
        match heap.graphs.pools.is_empty() {
            true => return Ok(0),
            false => heap.graphs.take_idle(all),
        }
    };
    for (pool, arena) in taken {
        let (bytes, result) = release_arena(engine, pool, arena, false);
        released += bytes;
        first = first.and(result);
    }
    let ended = engine.lock().graphs.take_ended_sources();
    drop(ended);
    first.map(|()| released).map_err(|e| engine.error(e))
}

/// Releases free memory of a pool to the driver, handle by handle, unless a graph can use the pool. Waits for the work
/// that free memory is pending on. Returns the bytes.
pub(crate) fn empty_cache(engine: &Engine, pool: u64) -> Result<u64, Error> {
    engine.free_deferred();
    contexts::review_captures(engine);
    poll_events(engine, pool, true)?;
    let taken = {
        let mut heap = engine.open()?;
        refuse_released(&heap.graphs, pool)?;
        heap.graphs.ensure_present(pool)?;
        heap.graphs.take_free(pool)
    };
    let Some(arena) = taken else {
        return Ok(0);
    };
    let (released, result) = release_arena(engine, pool, arena, true);
    result.map(|()| released).map_err(|e| engine.error(e))
}

/// Releases the memory of an arena that was taken out of a pool, and returns to the pool what could not be released;
/// with `stays` also the addresses, otherwise they are given back. Returns the released bytes.
fn release_arena(
    engine: &Engine,
    pool: u64,
    mut arena: Arena,
    stays: bool,
) -> (u64, Result<(), DriverError>) {
    let held = arena.held();
    let mut homes: Vec<(u64, u64)> = arena.at_home().into_iter().collect();
    let views = arena.views.iter();
    let mut sites: Vec<(u64, u64)> = views.map(|(base, view)| (*base, view.bytes())).collect();
    let source = engine.lock().graphs.source_of(pool);
    segments::report(
        engine,
        SegmentChange::Death,
        Some(pool),
        homes.iter().copied(),
    );
    let result = match &source {
        Some(source) => {
            source.free_all(&mut arena);
            Ok(())
        }
        None => commit::release_arena(&engine.context, &mut arena),
    };
    let addresses = arena.take_addresses();
    let released = held - arena.held();
    let left = arena.at_home();
    homes.retain(|(home, _)| !left.contains_key(home));
    sites.retain(|(base, bytes)| arena.lost.range(*base..base + bytes).next().is_none());
    {
        let mut heap = engine.lock();
        for (home, bytes) in &homes {
            heap.suspended.forget_segment(*home);
            let place = (SpaceId::Large, true);
            heap.recorder
                .record_memory(Kind::Unmap, (*home, *bytes), place);
        }
        for (base, bytes) in &addresses {
            heap.extents.lookup.forget(*base, *bytes);
        }
        if stays && source.is_none() {
            heap.graphs.reuse(pool, &homes, &sites);
        }
        heap.graphs.put_back(pool, held, arena);
    }
    for (base, bytes) in addresses {
        engine.addresses.give_back(base, bytes);
    }
    (released, result)
}
