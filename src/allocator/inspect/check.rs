//! The invariants, verified by one walk over all metadata.
//!
//! 1. Each region is a gapless, doubly linked list of extents; no two free neighbours could be merged; holes are never
//!    adjacent.
//! 2. Each free piece is in the index of its class and nowhere else; each hole is in the hole list.
//! 3. Each byte held from the driver lies in exactly one extent that is not a hole, and every such extent is held.
//! 4. Each page belongs to one stream and is one region of that stream's blocks.
//! 5. Each live block can be found by its address, has an odd generation, and is counted once on each stream that it
//!    was allocated or recorded on.
//! 6. Tickets are not above the open one; markers are in order.
//! 7. The bytes of each block in a view are aliased at home; each handle knows how many views map it, and can be found
//!    by its addresses.
//! 8. Every counter equals what the walk finds.

use std::collections::{BTreeMap, HashMap};

use crate::allocator::extent::index::Entry;
use crate::allocator::extent::invariant::{holds, same};
use crate::allocator::extent::record::{COMPLETE, Hot, MIXED, NIL, SpaceId, State as Extent};
use crate::allocator::extent::space::{Space, class_of};
use crate::allocator::heap::Heap;
use crate::allocator::inspect::check_caches::{
    check_large_caches, check_limits, check_stream_caches,
};
use crate::allocator::size::{GRANULE, PAGE, PHYSICAL_GRANULE};
use crate::allocator::view::mapping::push_part;
use crate::error::Error;

/// Totals of the walk.
#[derive(Default)]
struct Sums {
    records: u64,
    /// Bytes per pool, small first.
    live: [u64; 2],
    allocated: [u64; 2],
    requested: [u64; 2],
    mixed: [u64; 2],
    /// Blocks per stream.
    on_stream: HashMap<u32, u64>,
    /// Mapped ranges, merged.
    mapped: BTreeMap<u64, u64>,
    pages: u64,
    /// Home bytes aliased to blocks in views.
    aliased: u64,
    quarantined: u64,
}

pub(crate) fn check(heap: &Heap) -> Result<(), Error> {
    let mut sums = Sums::default();
    for space in heap.extents.spaces() {
        check_space(heap, space, &mut sums)?;
    }
    check_space(heap, &heap.extents.views, &mut sums)?;
    check_views(heap, &mut sums)?;
    heap.graphs.check()?;
    heap.ranges.check()?;
    let pooled = check_pooled(heap, &mut sums)?;
    let counted = &heap.stats.pooled;
    let (blocks, bytes) = heap.graphs.live_totals();
    same("blocks of graph pools", blocks, counted.allocations.current)?;
    same("bytes of graph pools", bytes, counted.allocated.current)?;
    same("records in use", sums.records, heap.extents.records.len())?;
    same(
        "block starts known",
        sums.live[0] + sums.live[1] + pooled,
        heap.extents.lookup.len(),
    )?;
    same(
        "quarantined extents listed",
        sums.quarantined,
        heap.physical.quarantined.len(),
    )?;
    same("pages known", sums.pages, heap.caches.page_ids.len())?;
    check_stream_caches(heap, sums.pages)?;
    check_held(heap, &sums)?;
    check_streams(heap, &sums)?;
    check_counters(heap, &sums)
}

fn check_space(heap: &Heap, space: &Space, sums: &mut Sums) -> Result<(), Error> {
    let (mut pieces, mut holes) = (0u64, 0u64);
    for (base, region) in space.regions() {
        let (mut at, mut prev, mut end) = (region.first, NIL, *base);
        while at != NIL {
            let hot = &heap.extents.records[at];
            let cold = heap.extents.records.cold(at);
            sums.records += 1;
            same("an extent begins where the one before ends", end, hot.addr)?;
            same("links agree in both directions", prev, hot.prev)?;
            holds("an extent has a size", hot.granules > 0)?;
            holds("an extent knows its space", hot.space == space.id)?;
            let neighbour = (prev != NIL).then(|| &heap.extents.records[prev]);
            match hot.state {
                Extent::Free => {
                    pieces += 1;
                    same(
                        "the class follows from the uses",
                        class_of(&cold.uses),
                        hot.stream,
                    )?;
                    let entry = Entry {
                        granules: hot.granules,
                        addr: hot.addr,
                        id: at,
                    };
                    let index = space.index(hot.stream);
                    let found = index
                        .and_then(|i| i.iter_from(hot.granules).take_while(|e| *e <= entry).last());
                    holds(
                        "a free piece is in the index of its class",
                        found == Some(entry),
                    )?;
                    if let Some(n) = neighbour.filter(|n| n.is_free() && n.stream == hot.stream) {
                        let equal = heap.extents.records.cold(prev).uses == cold.uses;
                        let one = match n.stream {
                            COMPLETE => true,
                            MIXED => false,
                            _ => space.merge_own || equal,
                        };
                        holds("neighbours that could be one piece are", !one)?;
                    }
                    if hot.stream == MIXED {
                        sums.mixed[usize::from(space.id == SpaceId::Large)] += hot.bytes();
                    }
                    if let [only] = cold.uses.as_slice() {
                        let looked_at = !heap.streams.advanced.contains(&only.stream);
                        holds(
                            "complete memory that was looked at is in no stream's class",
                            space.merge_own || !looked_at || !heap.streams.is_complete(only),
                        )?;
                    }
                    for u in cold.uses.as_slice() {
                        holds(
                            "no ticket is above the open one",
                            u.ticket <= heap.streams[u.stream].open,
                        )?;
                    }
                }
                Extent::Unmapped => {
                    holes += 1;
                    same(
                        "a hole is listed",
                        at,
                        space.holes().get(&hot.addr).copied().unwrap_or(NIL),
                    )?;
                    holds(
                        "holes that touch are one",
                        neighbour.is_none_or(|n| n.state != Extent::Unmapped),
                    )?;
                }
                Extent::Used => check_used(heap, space, at, sums)?,
                Extent::Aliased => sums.aliased += hot.bytes(),
                Extent::Quarantined => {
                    sums.quarantined += 1;
                    holds(
                        "a quarantined extent is listed",
                        heap.physical.quarantined.contains(&at),
                    )?;
                }
                Extent::Busy => {}
                Extent::Pooled => holds("a block of a graph pool lies in no arena", false)?,
                Extent::Vacant => holds("a linked record is in use", false)?,
            }
            if hot.state != Extent::Unmapped && space.id != SpaceId::Views {
                sums.mapped.insert(hot.addr, hot.bytes());
            }
            end = hot.end();
            prev = at;
            at = hot.next;
        }
        same("a region is covered to its end", base + region.bytes, end)?;
    }
    same("free pieces counted", pieces, space.piece_count())?;
    same("free pieces indexed", pieces, space.pieces().count())?;
    same("holes listed", holes, space.holes().len())
}

/// Checks the blocks of graph pools and returns their number.
fn check_pooled(heap: &Heap, sums: &mut Sums) -> Result<u64, Error> {
    let pools = heap.graphs.pools.values();
    let mut count = 0;
    for (addr, live) in pools.flat_map(|pool| pool.arena.live.iter()) {
        let hot = heap.extents.records.get(live.id);
        let known = |hot: &Hot| {
            let life = (live.generation, Extent::Pooled);
            (hot.addr, hot.granules) == (*addr, live.granules)
                && (hot.generation, hot.state) == life
        };
        holds(
            "a block of a graph pool has its record",
            hot.is_some_and(known),
        )?;
        same(
            "a block of a graph pool is found by its address",
            live.id,
            heap.extents.lookup.exact(*addr).unwrap_or(NIL),
        )?;
        count += 1;
    }
    sums.records += count;
    Ok(count)
}

fn check_used(heap: &Heap, space: &Space, id: u32, sums: &mut Sums) -> Result<(), Error> {
    let hot = &heap.extents.records[id];
    if heap.rules.caches() && space.id == SpaceId::Small {
        sums.pages += 1;
        same("a page has its size", PAGE, hot.bytes())?;
        same(
            "a page is known by its address",
            id,
            heap.caches.page_ids.get(&hot.addr).copied().unwrap_or(NIL),
        )?;
        let owner = heap.caches.table.find(hot.addr);
        return same(
            "a page is in a cache of its stream",
            hot.stream,
            owner.map_or(u64::MAX, |(cache, _)| u64::from(cache.lock().slot)),
        );
    }
    if space.id == SpaceId::Views {
        let known = heap.views.map.get(&hot.addr).map_or(NIL, |view| view.range);
        return same("a range in use is a view's", id, known);
    }
    check_block(heap, id, sums)
}

/// Checks views and the blocks in them.
fn check_views(heap: &Heap, sums: &mut Sums) -> Result<(), Error> {
    let mut maps: HashMap<u64, u32> = HashMap::new();
    let mut live: HashMap<u64, Vec<(u32, u32)>> = HashMap::new();
    let (mut aliased, mut viewed) = (0, 0);
    for (id, hot) in heap.extents.records.iter() {
        let parts = heap.extents.records.cold(id).home();
        if parts.is_empty() {
            continue;
        }
        sums.records += 1;
        viewed += hot.bytes();
        // A block that is not yet allocated, or that was freed and is kept by a guard, belongs to no user.
        if hot.state != Extent::Busy {
            check_block(heap, id, sums)?;
        }
        let Some((base, view)) = heap.views.view_around(hot.addr) else {
            return holds("a block away from home lies in a view", false);
        };
        let offset = ((hot.addr - base) / GRANULE) as u32;
        let place = (offset, offset + hot.granules);
        live.entry(base).or_default().push(place);
        let homes = view.home_parts(offset, hot.granules);
        let mut found: Vec<(u64, u32)> = Vec::new();
        for part in parts {
            let home = &heap.extents.records[*part];
            holds("a part is aliased", home.state == Extent::Aliased)?;
            same(
                "a part is aliased to its block",
                id,
                heap.extents.records.cold(*part).aliased_by,
            )?;
            aliased += home.bytes();
            push_part(&mut found, (home.addr, home.granules));
        }
        holds("the parts are where the view says", found == homes)?;
    }
    same("aliased bytes are in blocks", sums.aliased, aliased)?;
    same("bytes in views", viewed, heap.views.aliased_bytes)?;
    for (base, view) in &heap.views.map {
        let held = view
            .mappings
            .iter()
            .map(|mapping| u64::from(mapping.granules))
            .sum::<u64>();
        same("a view is as long as its handles", held, view.granules)?;
        holds("a view stays in its range", view.granules <= view.room)?;
        let mut found = live.remove(base).unwrap_or_default();
        let mut known = view.blocks.clone();
        found.sort_unstable();
        known.sort_unstable();
        holds("a view knows where its blocks lie", found == known)?;
        for mapping in &view.mappings {
            let bytes = heap
                .physical
                .holdings
                .get(&mapping.home)
                .map_or(0, |h| h.bytes);
            same(
                "a view knows its handles by number",
                heap.physical
                    .holdings
                    .get(&mapping.home)
                    .map_or(0, |h| h.number),
                mapping.handle,
            )?;
            same(
                "a view maps held handles",
                u64::from(mapping.granules) * GRANULE,
                bytes,
            )?;
            *maps.entry(mapping.home).or_default() += 1;
        }
    }
    let (mut numbered, mut under_way) = (0u64, 0usize);
    for (home, holding) in &heap.physical.holdings {
        if holding.number != 0 {
            numbered += 1;
            for page in (0..holding.bytes).step_by(PHYSICAL_GRANULE as usize) {
                same(
                    "a handle is found by its addresses",
                    holding.number,
                    heap.physical.handles.at(home + page),
                )?;
            }
            let handle = heap.physical.handles.get(holding.number);
            same("a handle has its home", *home, handle.home)?;
            same("a handle has its size", home + holding.bytes, handle.end())?;
        }
        let counted = maps.get(home).copied().unwrap_or(0);
        holds("a handle knows of all its views", counted <= holding.views)?;
        under_way += (holding.views - counted) as usize;
    }
    same(
        "mappings that calls make or take away",
        heap.views.segs_under_way,
        under_way,
    )?;
    same("handles by number", numbered, heap.physical.handles.len())
}

/// Checks that driver-held memory and mapped extents are the same bytes.
fn check_held(heap: &Heap, sums: &Sums) -> Result<(), Error> {
    let mapped: u64 = sums.mapped.values().sum();
    let held: u64 = heap.physical.holdings.values().map(|h| h.bytes).sum();
    // Memory that a growth is mapping now is in a claimed extent, but is not held yet.
    same(
        "mapped extents are held from the driver",
        held + heap.physical.planned * u64::from(heap.rules.maps()),
        mapped,
    )?;
    same("reserved bytes", held, heap.stats.all.reserved.current)?;
    same(
        "segments",
        heap.physical.holdings.len(),
        heap.stats.all.segments.current,
    )?;
    for (addr, holding) in &heap.physical.holdings {
        let (mut at, end) = (*addr, addr + holding.bytes);
        while at < end {
            let around = sums
                .mapped
                .range(..=at)
                .next_back()
                .filter(|(base, bytes)| at < *base + *bytes);
            let Some((base, bytes)) = around else {
                return holds("held memory lies in an extent", false);
            };
            at = base + bytes;
        }
    }
    Ok(())
}

fn check_streams(heap: &Heap, sums: &Sums) -> Result<(), Error> {
    for (stream, slot) in heap.streams.iter() {
        same(
            "live blocks of a stream",
            sums.on_stream.get(&stream).copied().unwrap_or(0)
                + heap.caches.small_uses(stream)
                + heap.ranges.uses_of(stream),
            slot.live,
        )?;
        holds(
            "nothing is complete that is still open",
            slot.completed < slot.open,
        )?;
        let mut last = slot.completed;
        for marker in &slot.markers {
            holds(
                "markers are in order and ahead of what is complete",
                marker.bound > last && marker.bound < slot.open,
            )?;
            last = marker.bound;
        }
    }
    same("streams", heap.streams.iter().count(), heap.streams.len())
}

fn check_counters(heap: &Heap, sums: &Sums) -> Result<(), Error> {
    let stats = &heap.stats;
    for (pool, at) in [(&stats.small, 0), (&stats.large, 1)] {
        same("allocations", sums.live[at], pool.allocations.current)?;
        same(
            "allocated bytes",
            sums.allocated[at],
            pool.allocated.current,
        )?;
        same(
            "requested bytes",
            sums.requested[at],
            pool.requested.current,
        )?;
        same(
            "active bytes",
            sums.allocated[at] + sums.mixed[at],
            pool.active.current,
        )?;
    }
    check_limits(heap)?;
    check_large_caches(heap)?;
    let (mut all, mut small, mut large) = (stats.all, stats.small, stats.large);
    let pools = small.counters().into_iter().zip(large.counters());
    for (all, (small, large)) in all.counters().into_iter().zip(pools) {
        same(
            "both pools together",
            small.current + large.current,
            all.current,
        )?;
        same(
            "added less taken is what is there",
            all.total_allocated - all.total_freed,
            all.current,
        )?;
        holds("a peak is not below the present", all.peak >= all.current)?;
    }
    Ok(())
}

/// Checks a live block of the user.
fn check_block(heap: &Heap, id: u32, sums: &mut Sums) -> Result<(), Error> {
    let (hot, cold) = (&heap.extents.records[id], heap.extents.records.cold(id));
    let large = usize::from(hot.space == SpaceId::Large);
    sums.live[large] += 1;
    sums.allocated[large] += hot.bytes();
    sums.requested[large] += cold.requested;
    *sums.on_stream.entry(hot.stream).or_default() += 1;
    for recorded in cold.recorded() {
        *sums.on_stream.entry(recorded.stream).or_default() += 1;
    }
    same(
        "a live block is found by its address",
        id,
        heap.extents.lookup.exact(hot.addr).unwrap_or(NIL),
    )?;
    holds(
        "a live block has an odd generation",
        hot.generation % 2 == 1,
    )?;
    holds(
        "a request fits its block",
        cold.requested > 0 && cold.requested <= hot.bytes(),
    )
}
