//! The report of a failed request: what it lacked, who holds the memory, and how the free memory is fragmented.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashSet};

use crate::allocator::extent::handle::Holding;
use crate::allocator::extent::record::{SpaceId, State as Extent};
use crate::allocator::extent::want::Want;
use crate::allocator::graph::arena::Arena;
use crate::allocator::graph::pooled::PoolRequest;
use crate::allocator::heap::Heap;
use crate::allocator::inspect::figures::pending_bytes;
use crate::allocator::inspect::holders::holders;
use crate::allocator::plan::release::{ARENAS, join_pieces};
use crate::allocator::plan::{growth, release};
use crate::allocator::size::{GRANULE, PHYSICAL_GRANULE};
use crate::allocator::suspend::{Suspension, Target};
use crate::error::{Hole, OutOfMemory, PinnedSegment, Shortage};

/// Counts a miss, and returns the heap's part of the error for a request that lacks memory. The caller counts the
/// error, unless it finds other memory.
pub(crate) fn out_of_memory(heap: &mut Heap, want: &Want) -> OutOfMemory {
    heap.stats.misses += 1;
    let shortage = shortage(heap, want);
    picture(heap, want.requested, shortage)
}

/// [`out_of_memory`] for a request to a graph pool that needs these bytes from the driver.
pub(crate) fn out_of_memory_in_pool(
    heap: &mut Heap,
    request: &PoolRequest,
    needed: u64,
) -> OutOfMemory {
    heap.stats.misses += 1;
    heap.stats.ooms += 1;
    let (ready, waiting) = heap.graphs.free_for(request.pool, request.requester);
    let shortage = Shortage {
        growth: request.fit.bytes().next_multiple_of(PHYSICAL_GRANULE),
        needed,
        ready,
        waiting,
        kept: kept(heap, Some(request.pool)).saturating_sub(ready + waiting),
        counted: heap.counted(),
        coming: heap.suspended.coming,
        ..Shortage::default()
    };
    picture(heap, request.requested, shortage)
}

/// Returns the report for a resume that lacks these bytes from the driver. It counts no request.
pub(crate) fn out_of_memory_in_resume(heap: &mut Heap, bytes: u64) -> OutOfMemory {
    let absent = absent(heap);
    let shortage = Shortage {
        growth: bytes,
        needed: bytes,
        kept: kept(heap, None) - absent,
        counted: heap.counted() - absent,
        coming: heap.suspended.coming,
        ..Shortage::default()
    };
    // A resume may use the headroom.
    OutOfMemory {
        headroom: 0,
        ..picture(heap, bytes, shortage)
    }
}

/// [`out_of_memory`] for a range that lacks these bytes.
pub(crate) fn out_of_memory_in_range(heap: &mut Heap, bytes: u64) -> OutOfMemory {
    heap.stats.misses += 1;
    heap.stats.ooms += 1;
    let shortage = Shortage {
        growth: bytes,
        needed: bytes,
        waiting: whole_bytes(heap, false, |_| true) + heap.ranges.leaving,
        kept: kept(heap, None),
        counted: heap.counted(),
        coming: heap.suspended.coming,
        ..Shortage::default()
    };
    picture(heap, bytes, shortage)
}

/// Returns the graph pools whose memory is not suspended, by id.
fn present_arenas(heap: &Heap) -> impl Iterator<Item = (u64, &Arena)> {
    let pools = heap.graphs.pools.iter().filter(|(_, pool)| !pool.away);
    pools.map(|(id, pool)| (*id, &pool.arena))
}

/// Returns the suspended bytes, which count as reserved.
fn absent(heap: &Heap) -> u64 {
    let arenas = heap.suspended.map.get(&Target::Arenas);
    arenas.map_or(0, Suspension::missing)
}

/// Returns runs of free memory in these arenas that is unused according to `over`, and, if `guarded`, also of freed
/// blocks that guards keep.
fn runs(
    heap: &Heap,
    spaces: &[SpaceId],
    guarded: bool,
    over: impl Fn(u32) -> bool,
) -> Vec<(u64, u64)> {
    let free = spaces.iter().filter_map(|id| heap.extents.space(*id));
    let free = free.flat_map(|space| space.pieces());
    let free = free.filter(|piece| over(piece.id));
    let kept = heap.guards.freed_records().filter(|_| guarded);
    let kept = kept.map(|id| &heap.extents.records[id]);
    let free = free.map(|piece| (piece.addr, piece.granules));
    join_pieces(free.chain(kept.map(|hot| (hot.addr, hot.granules))))
}

/// Returns the bytes of handles and segments that lie wholly in such runs. Views without blocks are ignored,
/// because they can be removed.
fn whole_bytes(heap: &Heap, guarded: bool, over: impl Fn(u32) -> bool) -> u64 {
    if heap.is_suspended {
        return 0;
    }
    let in_use = heap.views.map.values();
    let in_use = in_use.filter(|view| !view.blocks.is_empty());
    let mapped: HashSet<u64> = in_use
        .flat_map(|view| view.mappings.iter().map(|mapping| mapping.home))
        .collect();
    let runs = runs(heap, &ARENAS, guarded, over);
    let whole = release::whole_handles(heap, runs);
    let whole = whole.filter(|(home, _)| !mapped.contains(home));
    whole.map(|(_, holding)| holding.bytes).sum()
}

/// Whether a run of free memory, pending or not, fits a request.
fn has_run(heap: &Heap, want: &Want, guarded: bool) -> bool {
    let span = u64::from(want.span()) * GRANULE;
    // Adjacent segments of the driver do not form a run.
    let joins = heap.rules.segment_for(want).is_none();
    let runs = runs(heap, &[want.space], guarded, |_| true);
    runs.into_iter().any(|(start, end)| {
        let segments = heap.physical.holdings.range(..end).rev();
        let mut segments = segments.take_while(|(base, of)| *base + of.bytes > start);
        let fits =
            |(base, of): (&u64, &Holding)| (base + of.bytes).min(end) - start.max(*base) >= span;
        end - start >= span && (joins || segments.any(fits))
    })
}

/// Returns the freed bytes that guards and graph pools keep, the suspended bytes that count towards the limit, and
/// the bytes that a resume in progress will take. A graph pool returns its memory to the driver only as a whole, so
/// the free bytes of a pool with live blocks count only for requests to that pool.
fn kept(heap: &Heap, own: Option<u64>) -> u64 {
    let pools = present_arenas(heap);
    let pools = pools.filter(|(id, arena)| arena.live.is_empty() || own == Some(*id));
    let free = pools.map(|(_, arena)| arena.held().saturating_sub(arena.live.bytes()));
    free.sum::<u64>()
        + (whole_bytes(heap, true, |_| true) - whole_bytes(heap, false, |_| true))
        + absent(heap)
        + heap.suspended.coming
}

fn shortage(heap: &Heap, want: &Want) -> Shortage {
    let span = u64::from(want.span()) * GRANULE;
    let growth = match heap.rules.segment_for(want) {
        Some(segment) => segment,
        None if want.in_one_handle() => want.handle_bytes(),
        None => span.next_multiple_of(PHYSICAL_GRANULE),
    };
    let idle = release::releasable(heap, &ARENAS, false).into_iter();
    let idle: u64 = idle.map(|(_, _, bytes)| bytes).sum();
    let at_home = growth::missing(heap, want).unwrap_or(growth);
    let space = heap.extents.space(want.space);
    let pieces = space.into_iter().flat_map(|space| space.pieces());
    let finder = heap.finder(want.space, want.stream);
    let is_ready = |id| finder.as_ref().is_some_and(|of| of.ready(id));
    let ready = pieces.filter(|piece| is_ready(piece.id));
    let needed = growth.saturating_sub(idle).min(at_home);
    // Once its work is complete, pending memory could be released to make room for the whole request, or only for the
    // bytes that the ready memory at home lacks.
    let waiting = whole_bytes(heap, false, |_| true).saturating_sub(idle) + heap.ranges.leaving;
    let for_all = waiting.saturating_sub(growth.saturating_sub(idle) - needed);
    let for_rest = whole_bytes(heap, false, |id| {
        release::is_complete(heap, id) || !is_ready(id)
    });
    let fits = has_run(heap, want, false);
    Shortage {
        growth,
        needed,
        ready: ready.map(|piece| u64::from(piece.granules) * GRANULE).sum(),
        waiting: for_all.max(for_rest.saturating_sub(idle)),
        fits_pending: !want.in_one_handle() && fits && !pending_bytes(heap).is_empty(),
        kept: kept(heap, None),
        fits_guarded: !fits && has_run(heap, want, true),
        counted: heap.counted(),
        coming: heap.suspended.coming,
    }
}

fn picture(heap: &mut Heap, requested: u64, shortage: Shortage) -> OutOfMemory {
    let (_, allocated) = heap.live_totals();
    let reserved = heap.stats.all.reserved.current;
    let largest = heap.extents.spaces().map(|space| space.largest_piece());
    OutOfMemory {
        requested,
        limit: heap.physical.limit,
        reserved,
        allocated,
        cached: reserved.saturating_sub(allocated),
        largest_free: largest.max().unwrap_or(0),
        largest_run: heap.extents.largest_run(),
        in_views: heap.views.aliased_bytes,
        guarded: heap.guards.bytes,
        suspended: absent(heap),
        graph_pools: heap.graphs.held,
        ranges: heap.ranges.held,
        ranges_leaving: heap.ranges.leaving,
        in_graph_pools: present_arenas(heap)
            .map(|(_, arena)| arena.live.bytes())
            .sum(),
        holders: holders(heap),
        pending: pending_bytes(heap),
        pinned: pinned(heap),
        holes: holes(heap),
        mapped: heap.rules.maps(),
        headroom: heap.physical.headroom,
        regime: heap.rules.maps().then(|| heap.physical.regime.name()),
        shortage,
        ..OutOfMemory::default()
    }
}

/// Returns the longest runs of adjacent free memory, longest first.
fn holes(heap: &Heap) -> Vec<Hole> {
    let mut holes = heap.extents.free_runs();
    holes.sort_by_key(|(_, bytes)| Reverse(*bytes));
    holes.truncate(HOLES_NAMED);
    let bounded = |(address, bytes): (u64, u64)| {
        let below = address.checked_sub(1);
        let before = below.and_then(|at| heap.extents.lookup.at_or_below(at));
        let before = before.map(|id| &heap.extents.records[id]);
        let before = before.filter(|block| block.end() == address);
        let after = heap.extents.lookup.exact(address + bytes);
        let after = after.map(|id| heap.extents.records[id].addr);
        Hole::new((address, bytes), before.map(|block| block.addr), after)
    };
    holes.into_iter().map(bounded).collect()
}

/// Returns the segments in which few live bytes hold the most memory.
pub(crate) fn pinned(heap: &Heap) -> Vec<PinnedSegment> {
    let mut live: BTreeMap<u64, PinnedSegment> = BTreeMap::new();
    for (_, hot) in heap.extents.records.iter() {
        if hot.state != Extent::Used {
            continue;
        }
        let (mut addr, end) = (hot.addr, hot.end());
        while addr < end {
            let Some((base, holding)) = heap.physical.holdings.range(..=addr).next_back() else {
                break;
            };
            let top = base + holding.bytes;
            if top <= addr {
                break;
            }
            let entry = live.entry(*base).or_insert(PinnedSegment {
                address: *base,
                bytes: holding.bytes,
                live: 0,
                block: hot.addr,
            });
            entry.live += end.min(top) - addr;
            entry.block = entry.block.min(hot.addr);
            addr = top;
        }
    }
    let mut pinned: Vec<PinnedSegment> = live.into_values().filter(|p| p.live < p.bytes).collect();
    pinned.sort_by_key(|p| Reverse(p.bytes - p.live));
    pinned.truncate(PINNED_NAMED);
    pinned
}

/// Number of pinned segments that an out-of-memory error names.
pub(crate) const PINNED_NAMED: usize = 3;
/// Number of holes that an out-of-memory error names.
const HOLES_NAMED: usize = 4;
