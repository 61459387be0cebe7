//! Growth: planned before any driver call, and committed or reverted after it.

use crate::allocator::extent::handle::Holding;
use crate::allocator::extent::record::{NIL, SpaceId};
use crate::allocator::extent::space::Shard;
use crate::allocator::extent::uses::Uses;
use crate::allocator::extent::want::Want;
use crate::allocator::heap::Heap;
use crate::allocator::heap::take::Part;
use crate::allocator::physical::Fresh;
use crate::allocator::physical::address::Lease;
use crate::allocator::report::{GrowthInfo, GrowthReason};
use crate::allocator::size::{GRANULE, PHYSICAL_GRANULE};
use crate::allocator::stream::finder::Run;
use crate::allocator::stream::slot::PendingWait;
use crate::allocator::view::mapping::Openings;
use crate::event::Kind;

const PHYSICAL_GRANULES: u64 = PHYSICAL_GRANULE / GRANULE;

/// A planned growth for a request: claimed free memory before and after a hole, and new memory in the hole between.
#[derive(Debug)]
pub(crate) struct Growth {
    pub fresh: Fresh,
    /// Waits required by the free memory in it.
    pub waits: Vec<PendingWait>,
    /// Granules of the extent before the block itself.
    pub skip: u32,
}

/// The bound of a growth.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Bound {
    SoftCap,
    Limit,
}

/// A place that a request could grow into.
#[derive(Debug, Clone, Copy)]
struct Opening {
    /// The first extent of the claimed range.
    first: u32,
    /// Granules from the range's start to the block, for its alignment.
    skip: u32,
    /// Granules of usable memory before the hole.
    before: u64,
    hole: u32,
    /// Granules of the hole to be mapped.
    mapped: u64,
    /// Granules of usable memory after the hole that the block needs.
    behind: u64,
}

/// Returns the opening that needs the least new memory, the lowest on ties.
fn opening(heap: &Heap, want: &Want, pending: bool) -> Option<Opening> {
    let finder = heap.finder(want.space, want.stream)?;
    let usable = |id: u32| finder.is_usable(id, pending);
    let mut best: Option<Opening> = None;
    for hole in finder.space.holes().values().copied() {
        let room = u64::from(heap.extents.records[hole].granules);
        let (first, before) = finder.usable_before(hole, usable);
        let skip = want.skip(heap.extents.records[first].addr);
        let needed = u64::from(skip + want.granules).saturating_sub(before);
        let mapped = needed.next_multiple_of(PHYSICAL_GRANULES);
        let (mapped, behind) = match mapped <= room {
            true => (mapped, 0),
            false => (room, needed - room.min(needed)),
        };
        if behind > 0 && finder.usable_behind(hole, usable) < behind {
            continue;
        }
        let opening = Opening {
            first,
            skip,
            before,
            hole,
            mapped,
            behind,
        };
        if opening.mapped > 0 && best.is_none_or(|b| opening.mapped < b.mapped) {
            best = Some(opening);
        }
    }
    best
}

/// Returns the bytes that a growth for this request would add at least, if there is address space for it.
pub(crate) fn missing(heap: &Heap, want: &Want) -> Option<u64> {
    let segment = heap.rules.segment_for(want);
    if segment.is_some() {
        return segment;
    }
    if want.in_one_handle() {
        return hole_for_handle(heap, want).map(|_| want.handle_bytes());
    }
    let opening = opening(heap, want, false)?;
    Some(opening.mapped * GRANULE)
}

/// Whether addresses are lacking: there is no opening, or no hole large enough for all of a request.
pub(crate) fn lacks_addresses(heap: &Heap, want: &Want) -> bool {
    let holes = heap.extents.space(want.space).into_iter();
    let mut holes = holes.flat_map(|space| space.holes().values());
    missing(heap, want).is_none()
        || !holes.any(|id| heap.extents.records[*id].granules >= want.span())
}

/// Plans a growth of the packed policy within a bound. With `pending`, memory that needs a wait is usable as well.
pub(crate) fn plan(heap: &mut Heap, want: &Want, within: Bound, pending: bool) -> Option<Growth> {
    let mut opening = opening(heap, want, pending)?;
    let missing = opening.mapped * GRANULE;
    if missing > room_within(heap, within) {
        return None;
    }
    if want.space == SpaceId::Large && opening.behind == 0 {
        // Within the bound memory grows in whole steps; the remainder of the last step becomes free memory.
        let step = heap.physical.growth_step(heap.held() + missing);
        let hole = heap.extents.records[opening.hole].bytes();
        let most = room_within(heap, Bound::SoftCap).min(hole);
        let whole = missing.next_multiple_of(step).min(most) / PHYSICAL_GRANULE;
        opening.mapped = opening.mapped.max(whole * PHYSICAL_GRANULES);
    }
    let addr = heap.extents.records[opening.hole].addr;
    let sizes = handle_sizes(heap, want, addr, opening.mapped * GRANULE);
    let granules = u32::try_from(opening.before + opening.mapped + opening.behind).ok()?;
    let (id, shards) = heap.claim(want.space, opening.first, 0, granules)?;
    let waits = if pending {
        heap.streams.waits_for(want.stream, &shards)
    } else {
        Vec::new()
    };
    Some(Growth {
        fresh: new_memory(heap, want, (id, shards), addr, sizes),
        waits,
        skip: opening.skip,
    })
}

/// Returns the bytes that growth may add within a bound.
pub(crate) fn room_within(heap: &Heap, within: Bound) -> u64 {
    match within {
        Bound::SoftCap => heap.soft_room().min(heap.room()),
        Bound::Limit => heap.room(),
    }
}

/// Returns the sizes of the handles for new memory at an address.
fn handle_sizes(heap: &Heap, want: &Want, addr: u64, bytes: u64) -> Vec<u64> {
    let reserved = heap.stats.all.reserved.current;
    let size = heap
        .physical
        .handle_size(want, bytes, reserved, heap.memory_users());
    heap.physical.tiles(addr, bytes, size)
}

/// Counts the memory that is about to be created at a claimed extent as planned.
fn new_memory(
    heap: &mut Heap,
    want: &Want,
    (id, shards): (u32, Vec<Shard>),
    addr: u64,
    sizes: Vec<u64>,
) -> Fresh {
    let reason = reason(heap, want, &shards);
    let bytes = sizes.iter().sum();
    heap.physical.planned += bytes;
    Fresh {
        space: want.space,
        id,
        shards,
        addr,
        sizes,
        stretches: heap.physical.stretches(addr, bytes),
        reason,
    }
}

/// Claims a home for new memory: the lowest hole that it fits.
pub(crate) fn claim_home(heap: &mut Heap, want: &Want, bytes: u64) -> Option<Fresh> {
    let granules = (bytes / GRANULE) as u32;
    let mut holes = heap.extents.large.holes().values().copied();
    let hole = holes.find(|id| heap.extents.records[*id].granules >= granules)?;
    let addr = heap.extents.records[hole].addr;
    let claimed = heap.claim(SpaceId::Large, hole, 0, granules)?;
    let sizes = handle_sizes(heap, want, addr, bytes);
    Some(new_memory(heap, want, claimed, addr, sizes))
}

/// Plans a segment of the classic policy.
pub(crate) fn plan_segment(heap: &mut Heap, want: &Want) -> Option<Fresh> {
    let bytes = heap.rules.segment_for(want)?;
    (bytes <= heap.room()).then(|| new_memory(heap, want, (NIL, Vec::new()), 0, vec![bytes]))
}

/// Returns the reason why a request needs more memory, given what its plan has claimed.
fn reason(heap: &Heap, want: &Want, claimed: &[Shard]) -> GrowthReason {
    let pending = heap.streams.several()
        && heap
            .finder(want.space, want.stream)
            .is_some_and(|finder| finder.oldest_run(want).is_some());
    if pending {
        return GrowthReason::Pending;
    }
    let free = heap.extents.space(want.space).map_or(0, |s| s.free_bytes());
    let claimed = claimed.iter().filter(|s| s.mapped);
    let claimed: u64 = claimed.map(|s| u64::from(s.granules) * GRANULE).sum();
    if free + claimed >= u64::from(want.granules) * GRANULE {
        GrowthReason::Fragmented
    } else {
        GrowthReason::Short
    }
}

pub(crate) fn add_addresses(heap: &mut Heap, space: SpaceId, lease: Lease) {
    let Lease { base, bytes, grown } = lease;
    match heap.physical.spans.range_mut(..base).next_back() {
        Some((_, span)) if grown => *span += bytes,
        _ => {
            heap.physical.spans.insert(base, bytes);
        }
    }
    let (at, records) = heap.extents.parts(space);
    let granules = (bytes / GRANULE) as u32;
    if space == SpaceId::Views {
        // A view must not span two reservations.
        at.add_range(records, base, granules, grown);
    } else {
        at.add_hole(records, base, granules);
    }
}

// ---- blocks in one handle --------------------------------------------------------------------

/// Takes a request that must lie inside one handle from ready memory.
pub(crate) fn take_in_handle(heap: &mut Heap, want: &Want) -> Option<u32> {
    let part = find_in_handle(heap, want, false)?;
    let (id, _) = heap.claim(want.space, part.first, part.skip, part.granules)?;
    heap.stats.reclaim.ready += 1;
    Some(id)
}

/// Returns the smallest ready stretch of a handle that fits a request, or with `pending` one that may need a wait.
pub(crate) fn find_in_handle(heap: &Heap, want: &Want, pending: bool) -> Option<Part> {
    let finder = heap.finder(want.space, want.stream)?;
    let open = Openings::ranges(&finder, |id| finder.is_usable(id, pending));
    let mut best: Option<(u64, u64)> = None;
    for source in heap.physical.sources(&open) {
        let (from, to) = source.open;
        let skip = want.skip(from);
        let needed = u64::from(skip + want.granules) * GRANULE;
        if want.whole && !(source.whole() && source.bytes == want.handle_bytes()) {
            continue;
        }
        if to - from >= needed && best.is_none_or(|b| (to - from, from) < b) {
            best = Some((to - from, from));
        }
    }
    let (_, from) = best?;
    let addr = from + u64::from(want.skip(from)) * GRANULE;
    let (first, start) = heap.extents.piece_at(want.space, addr)?;
    Some(Part {
        first,
        skip: ((addr - start) / GRANULE) as u32,
        granules: want.granules,
    })
}

/// Returns the lowest hole that fits a handle for the request inside one reservation, and the offset of the handle
/// in granules.
pub(crate) fn hole_for_handle(heap: &Heap, want: &Want) -> Option<(u32, u32)> {
    hole_for(heap, want.space, want.handle_bytes())
}

fn hole_for(heap: &Heap, space: SpaceId, bytes: u64) -> Option<(u32, u32)> {
    let holes = heap.extents.space(space)?.holes();
    holes.iter().find_map(|(addr, id)| {
        let stretches = heap
            .physical
            .stretches(*addr, heap.extents.records[*id].bytes());
        let stretch = stretches.into_iter().find(|(_, len)| *len >= bytes);
        stretch.map(|(start, _)| (*id, ((start - addr) / GRANULE) as u32))
    })
}

/// Plans a separate handle for a request, `skip` granules into a hole.
pub(crate) fn plan_handle(
    heap: &mut Heap,
    want: &Want,
    (hole, skip): (u32, u32),
) -> Option<Growth> {
    Some(Growth {
        fresh: claim_hole(heap, want, (hole, skip), want.handle_bytes())?,
        waits: Vec::new(),
        skip: 0,
    })
}

/// Claims a home for an existing handle: the lowest hole that it fits.
pub(crate) fn claim_handle(heap: &mut Heap, want: &Want, bytes: u64) -> Option<Fresh> {
    let hole = hole_for(heap, want.space, bytes)?;
    claim_hole(heap, want, hole, bytes)
}

fn claim_hole(heap: &mut Heap, want: &Want, (hole, skip): (u32, u32), bytes: u64) -> Option<Fresh> {
    let addr = heap.extents.records[hole].addr + u64::from(skip) * GRANULE;
    let claimed = heap.claim(want.space, hole, skip, (bytes / GRANULE) as u32)?;
    Some(new_memory(heap, want, claimed, addr, vec![bytes]))
}

// ---- outcomes -----------------------------------------------------------------------------

/// Commits a growth: the handles become the allocator's, and the front of the extent becomes the block.
pub(crate) fn commit(heap: &mut Heap, want: &Want, growth: &Growth, handles: &[u64]) -> u32 {
    let fresh = &growth.fresh;
    hold_all(heap, fresh, handles);
    note_reason(heap, want, fresh);
    let mut id = fresh.id;
    if growth.skip > 0 {
        let (space, records) = heap.extents.parts(fresh.space);
        let right = space.split(records, id, growth.skip);
        // The extent may include free memory that the stream used shortly before.
        let slot = &mut heap.streams[want.stream];
        let uses = Uses::one(want.stream, slot.open);
        slot.open_uses = slot.open_uses.saturating_add(1);
        heap.extents.release(fresh.space, id, want.stream, uses);
        id = right;
    }
    free_rest(heap, want, (fresh.space, id), want.granules);
    id
}

/// Frees the rest of claimed new memory after its first `granules`.
pub(crate) fn free_rest(heap: &mut Heap, want: &Want, (space, id): (SpaceId, u32), granules: u32) {
    if heap.extents.records[id].granules > granules {
        let (at, records) = heap.extents.parts(space);
        let rest = at.split(records, id, granules);
        heap.extents.free_fresh(space, rest, want.stream);
    }
}

/// Commits planned memory that was created, and returns the homes of its handles.
pub(crate) fn hold_all(heap: &mut Heap, fresh: &Fresh, handles: &[u64]) -> Vec<u64> {
    let (mut addr, mut homes) = (fresh.addr, Vec::with_capacity(handles.len()));
    for (bytes, handle) in fresh.sizes.iter().zip(handles) {
        hold(heap, addr, *bytes, Some(*handle), fresh.space);
        homes.push(addr);
        addr += bytes;
    }
    heap.physical.planned -= fresh.bytes();
    homes
}

/// Records why memory was created for a request.
pub(crate) fn note_reason(heap: &mut Heap, want: &Want, fresh: &Fresh) {
    heap.physical.last_growth = Some(GrowthInfo {
        reason: fresh.reason,
        requested: want.requested,
        added: fresh.bytes(),
        beyond_cap: heap.rules.maps() && heap.held() > heap.soft_cap(),
    });
}

/// Commits new memory as free memory.
pub(crate) fn commit_free(heap: &mut Heap, want: &Want, fresh: &Fresh, handles: &[u64]) {
    hold_all(heap, fresh, handles);
    note_reason(heap, want, fresh);
    heap.extents.free_fresh(fresh.space, fresh.id, want.stream);
}

/// Commits a growth whose block could not be used because a wait failed: the new memory becomes free, and the
/// claimed free memory, including the gap before the block, is restored.
pub(crate) fn commit_unused(heap: &mut Heap, want: &Want, growth: Growth, handles: &[u64]) {
    let mut fresh = growth.fresh;
    hold_all(heap, &fresh, handles);
    note_reason(heap, want, &fresh);
    let (at, _) = heap.extents.parts(fresh.space);
    let uses = at.fresh_uses(want.stream);
    for shard in fresh.shards.iter_mut().filter(|shard| !shard.mapped) {
        (shard.mapped, shard.owner) = (true, want.stream);
        shard.uses = uses.clone();
    }
    heap.restore(fresh.space, fresh.id, fresh.shards);
}

/// Reverts a plan whose memory was not created.
pub(crate) fn revert(heap: &mut Heap, fresh: Fresh) {
    heap.physical.planned -= fresh.bytes();
    heap.restore(fresh.space, fresh.id, fresh.shards);
}

/// Commits a segment of the classic policy, and takes the request from its front.
pub(crate) fn commit_segment(
    heap: &mut Heap,
    want: &Want,
    fresh: &Fresh,
    addr: u64,
) -> Option<u32> {
    let granules = (fresh.bytes() / GRANULE) as u32;
    hold(heap, addr, fresh.bytes(), None, want.space);
    heap.physical.planned -= fresh.bytes();
    note_reason(heap, want, fresh);
    let (space, records) = heap.extents.parts(want.space);
    let uses = Uses::one(want.stream, 0);
    let first = space.add_region(records, addr, granules, uses);
    records.cold_mut(first).owner = want.stream;
    let granules = u64::from(granules);
    heap.take(
        want,
        Run {
            first,
            addr,
            granules,
        },
    )
}

pub(crate) fn hold(heap: &mut Heap, addr: u64, bytes: u64, handle: Option<u64>, space: SpaceId) {
    let number = match handle {
        Some(_) if space == SpaceId::Large => {
            heap.physical.handles.add(addr, (bytes / GRANULE) as u32)
        }
        _ => 0,
    };
    heap.physical.holdings.insert(
        addr,
        Holding {
            bytes,
            handle,
            space,
            views: 0,
            number,
        },
    );
    heap.stats.count_obtained(space == SpaceId::Small, bytes);
    heap.count_held();
    heap.recorder
        .record_memory(Kind::Map, (addr, bytes), (space, handle.is_some()));
}
