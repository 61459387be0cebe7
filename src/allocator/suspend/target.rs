//! The heap during a suspension: which memory it selects, and what a resume restores.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;

use crate::allocator::extent::record::{Hot, SpaceId, State as Extent};
use crate::allocator::graph::{Graphs, Pool};
use crate::allocator::heap::Heap;
use crate::allocator::plan::release;
use crate::allocator::range::{Range, State};
use crate::allocator::size::GRANULE;
use crate::allocator::suspend::contents::Contents;
use crate::allocator::suspend::host::HostCopy;
use crate::allocator::suspend::{SuspendedHandle, Suspension, Target, join};
use crate::error::{Error, GraphPoolError};
use crate::event::Kind;

/// Handles, and the live byte ranges in them: home addresses and sizes.
type Choice = (Vec<SuspendedHandle>, Vec<(u64, u64)>);

/// Returns the error for bytes in use by a call in progress.
fn busy_error(count: u64, bytes: u64) -> Error {
    let what = "call";
    Error::InUse { what, count, bytes }
}

// ---- closing -----------------------------------------------------------------------------------

/// Closes a target for requests, unless something prevents its suspension.
pub(crate) fn close(heap: &mut Heap, target: Target) -> Result<(), Error> {
    match target {
        Target::Arenas => close_arenas(heap),
        Target::Pool(id) => {
            heap.guards.ensure_none_in(|pool| pool == id)?;
            close_pool(&mut heap.graphs, id)
        }
        Target::Range(id) => {
            let range = heap.ranges.live(id)?;
            if range.working {
                return Err(busy_error(1, range.layout.granule));
            }
            range.suspended = true;
            Ok(())
        }
    }
}

fn close_arenas(heap: &mut Heap) -> Result<(), Error> {
    heap.guards.ensure_none()?;
    let calls: u64 = heap
        .streams
        .iter()
        .map(|(_, slot)| u64::from(slot.calls))
        .sum();
    if calls > 0 {
        return Err(busy_error(calls, 0));
    }
    heap.is_suspended = true;
    heap.open_caches();
    heap.empty_large_caches();
    Ok(())
}

fn close_pool(graphs: &mut Graphs, id: u64) -> Result<(), Error> {
    let mut captures = graphs.captures.values();
    if let Some(capture) = captures.find(|capture| capture.may_use(id)) {
        let stream = capture.streams.first().map_or(0, |known| known.user.raw);
        return Err(Error::Capturing { stream });
    }
    let Some(pool) = graphs.pools.get(&id) else {
        return Err(Error::GraphPool(GraphPoolError::Released));
    };
    if pool.calls > 0 {
        return Err(busy_error(u64::from(pool.calls), pool.arena.held()));
    }
    refuse_source(graphs, id)?;
    if let Some(pool) = graphs.pools.get_mut(&id) {
        pool.suspended = true;
    }
    Ok(())
}

/// Fails for a pool whose segments come from another allocator.
pub(crate) fn refuse_source(graphs: &Graphs, id: u64) -> Result<(), Error> {
    match graphs.source_of(id) {
        Some(_) => Err(Error::NotSupported {
            what: "suspension of segments of another allocator",
        }),
        None => Ok(()),
    }
}

/// Opens a target for requests again.
pub(crate) fn open(heap: &mut Heap, target: Target) {
    match target {
        Target::Arenas => {
            heap.is_suspended = false;
            heap.open_caches();
        }
        Target::Pool(id) => {
            if let Some(pool) = heap.graphs.pools.get_mut(&id) {
                (pool.suspended, pool.away) = (false, false);
            }
            heap.graphs.recount();
        }
        Target::Range(id) => {
            if let Some(range) = heap.ranges.map.get_mut(&id) {
                (range.suspended, range.away) = (false, false);
            }
            heap.ranges.recount();
        }
    }
}

// ---- choosing ----------------------------------------------------------------------------------

/// Selects the memory of a closed target that is to be suspended.
pub(crate) fn select_memory(
    heap: &mut Heap,
    target: Target,
    contents: Contents,
) -> Result<Suspension, Error> {
    let (handles, mut kept) = match target {
        Target::Arenas => select_arenas(heap)?,
        Target::Pool(id) => {
            let pool = heap.graphs.pools.get(&id);
            pool.map_or_else(Default::default, select_pool_handles)
        }
        Target::Range(id) => {
            let range = heap.ranges.map.get(&id);
            range.map_or_else(Default::default, select_range)
        }
    };
    let graphs = heap.graphs.pools.values();
    let spans = graphs.flat_map(|pool| {
        pool.arena
            .homes
            .spans
            .keys()
            .chain(pool.arena.sites.spans.keys())
    });
    let ranges = heap.ranges.map.values().map(|range| &range.layout.base);
    let spans = spans.chain(heap.physical.spans.keys()).chain(ranges);
    let mut bounds: Vec<u64> = spans.copied().collect();
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

fn select_arenas(heap: &mut Heap) -> Result<Choice, Error> {
    let mut kept = Vec::new();
    for space in [SpaceId::Large, SpaceId::Small] {
        for hot in heap.extents.row(space) {
            match hot.state {
                Extent::Busy => return Err(busy_error(1, hot.bytes())),
                Extent::Used if heap.rules.caches() && space == SpaceId::Small => {
                    kept.extend(used_in_page(heap, hot));
                }
                Extent::Used | Extent::Aliased => kept.push((hot.addr, hot.bytes())),
                _ => {}
            }
        }
    }
    let working = |view: &&crate::allocator::view::mapping::View| view.busy || view.calls > 0;
    let views = heap.views.map.values().filter(working).count() + heap.views.segs_under_way;
    if views > 0 {
        return Err(busy_error(views as u64, 0));
    }
    kept.sort_unstable();
    let apart = |home: &u64| {
        let mut ids = heap.physical.quarantined.iter();
        ids.any(|id| heap.extents.records[*id].addr == *home)
    };
    let holdings = heap.physical.holdings.iter();
    let mut handles: Vec<SuspendedHandle> = holdings
        .filter(|(home, _)| !apart(home))
        .map(|(home, holding)| new_handle(*home, holding.bytes, holding.handle))
        .collect();
    for (base, view) in &heap.views.map {
        let mut at = *base;
        for mapping in &view.mappings {
            add_mapping(&mut handles, mapping.home, at);
            at += u64::from(mapping.granules) * GRANULE;
        }
    }
    count_mappings(&mut handles);
    Ok((handles, kept))
}

/// Returns the live blocks in a page of a stream cache.
fn used_in_page(heap: &Heap, page: &Hot) -> Vec<(u64, u64)> {
    use crate::allocator::cache::stream_cache::Kind;
    let Some((cache, number)) = heap.caches.table.find(page.addr) else {
        return Vec::new();
    };
    let runs = cache.lock().runs(number);
    let used = runs.into_iter().filter(|run| run.kind == Kind::Used);
    used.map(|run| (run.ptr, u64::from(run.granules) * GRANULE))
        .collect()
}

// ---- resume ------------------------------------------------------------------------------------

/// Counts the bytes that a resume will take from the driver, if there is room for them.
pub(crate) fn reserve_room(heap: &mut Heap, bytes: u64) -> bool {
    let fits = bytes <= heap.room();
    if fits {
        heap.suspended.coming = bytes;
    }
    fits
}

/// Removes the handles without a live block from a suspension of the arenas, and from the heap.
pub(crate) fn drop_unused(heap: &mut Heap, suspension: &mut Suspension) {
    heap.empty_large_caches();
    heap.flush_caches();
    for space in [SpaceId::Large, SpaceId::Small] {
        for (home, _) in release::unused(heap, space, true) {
            let away = |handle: &SuspendedHandle| handle.home == home && handle.handle.is_none();
            let Some(at) = suspension.handles.iter().position(away) else {
                continue;
            };
            let Some(release) = release::claim(heap, space, home) else {
                continue;
            };
            suspension.handles.swap_remove(at);
            release::remove(heap, &release);
        }
    }
}

/// Removes the handles of granules that were decommitted from a suspension of a range, and from the range.
pub(crate) fn drop_leaving(heap: &mut Heap, id: u64, suspension: &mut Suspension) {
    let homes = &mut suspension.handles;
    let Some(range) = heap.ranges.map.get_mut(&id) else {
        return;
    };
    // After a suspension that failed, some handles are still held: then all of them stay for the next attempt.
    let mut present = homes.iter().filter(|handle| handle.handle.is_some());
    if present.next().is_some() {
        return;
    }
    let (bytes, gone) = (range.layout.granule, range.drop_leaving());
    homes.retain(|handle| gone.binary_search(&handle.home).is_err());
    heap.ranges.recount();
    for home in gone {
        release::forget_mapping(heap, (home, bytes));
    }
}

/// Records that the memory of a suspension is restored.
pub(crate) fn restore(heap: &mut Heap, target: Target, suspension: &Suspension) {
    for suspended in &suspension.handles {
        let Some(handle) = suspended.handle else {
            continue;
        };
        match target {
            Target::Arenas => {
                if let Some(holding) = heap.physical.holdings.get_mut(&suspended.home) {
                    holding.handle = Some(handle);
                }
            }
            Target::Pool(id) => {
                let pool = heap.graphs.pools.get_mut(&id);
                if let Some(held) = pool.and_then(|p| p.arena.handles.get_mut(&suspended.home)) {
                    held.handle = handle;
                }
            }
            Target::Range(id) => {
                if let Some(range) = heap.ranges.map.get_mut(&id) {
                    range.set_handle(suspended.home, handle);
                }
            }
        }
    }
    open(heap, target);
}

/// Discards a suspension whose memory the driver has and that no one will resume: no block is live, and no work is
/// in progress.
pub(crate) fn discard(heap: &mut Heap, target: Target, mut suspension: Suspension) {
    open(heap, target);
    match target {
        Target::Pool(id) => {
            let mut gone = BTreeMap::new();
            if let Some(pool) = heap.graphs.pools.get_mut(&id) {
                gone = pool.arena.at_home();
                pool.arena.forget_memory();
                let stays = pool.arena.at_home();
                gone.retain(|home, _| !stays.contains_key(home));
            }
            heap.graphs.recount();
            for (home, bytes) in gone {
                heap.recorder
                    .record_memory(Kind::Unmap, (home, bytes), (SpaceId::Large, true));
            }
        }
        Target::Range(id) => drop_leaving(heap, id, &mut suspension),
        Target::Arenas => {
            for base in heap.views.idle_views(&heap.streams, usize::MAX) {
                if let Some(view) = heap
                    .views
                    .take(&mut heap.extents.records, &heap.streams, base)
                {
                    let bytes = u64::from(view.granules) * GRANULE;
                    heap.extents.lookup.forget(base, bytes);
                    heap.views
                        .count_unmapped(&mut heap.extents, &mut heap.physical, &view);
                }
            }
            drop_unused(heap, &mut suspension);
        }
    }
}

fn select_pool_handles(pool: &Pool) -> Choice {
    let arena = &pool.arena;
    let held = arena.handles.iter();
    let mut handles: Vec<SuspendedHandle> = held
        .map(|(home, handle)| new_handle(*home, handle.bytes, Some(handle.handle)))
        .collect();
    for (base, view) in &arena.views {
        let mut at = *base;
        for (home, bytes) in &view.handles {
            add_mapping(&mut handles, *home, at);
            at += bytes;
        }
    }
    count_mappings(&mut handles);
    let parts = arena.live.values().flat_map(|live| &live.parts);
    let mut kept: Vec<(u64, u64)> = parts
        .map(|part| (part.home, u64::from(part.granules) * GRANULE))
        .collect();
    kept.sort_unstable();
    (handles, kept)
}

fn select_range(range: &Range) -> Choice {
    let (mut handles, mut kept) = (Vec::new(), Vec::new());
    for (_, granule) in range.granules().filter(|(_, g)| g.state != State::Stuck) {
        for cell in &granule.cells {
            let place = (cell.address, range.layout.granule);
            handles.push(new_handle(place.0, place.1, Some(cell.handle)));
            kept.extend((granule.state == State::Committed).then_some(place));
        }
    }
    kept.sort_unstable();
    count_mappings(&mut handles);
    (handles, kept)
}

fn new_handle(home: u64, bytes: u64, handle: Option<u64>) -> SuspendedHandle {
    SuspendedHandle {
        home,
        bytes,
        handle,
        places: vec![home],
        mapped: 0,
    }
}

/// Records that a handle is mapped in a view, too. Handles are ordered by their homes.
fn add_mapping(handles: &mut [SuspendedHandle], home: u64, at: u64) {
    if let Ok(found) = handles.binary_search_by_key(&home, |handle| handle.home) {
        handles[found].places.push(at);
    }
}

fn count_mappings(handles: &mut [SuspendedHandle]) {
    for handle in handles {
        handle.mapped = handle.places.len();
    }
}
