//! Releases: planned before any driver call, and committed or reverted after it.

use std::cmp::Reverse;

use crate::allocator::extent::handle::Holding;
use crate::allocator::extent::record::{SpaceId, State as Extent};
use crate::allocator::extent::space::Space;
use crate::allocator::extent::uses::Uses;
use crate::allocator::heap::Heap;
use crate::allocator::physical::{GivenBack, GrowthFailure, Release};
use crate::allocator::plan::growth;
use crate::allocator::size::GRANULE;
use crate::driver::DriverError;
use crate::event::Kind;

/// The arenas whose memory is released.
pub(crate) const ARENAS: [SpaceId; 2] = [SpaceId::Large, SpaceId::Small];

/// Joins adjacent pieces to runs, and returns their starts and ends by address.
pub(crate) fn join_pieces(pieces: impl Iterator<Item = (u64, u32)>) -> Vec<(u64, u64)> {
    let mut pieces: Vec<_> = pieces.collect();
    pieces.sort_unstable();
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for (start, granules) in pieces {
        let end = start + u64::from(granules) * GRANULE;
        match runs.last_mut() {
            Some(last) if last.1 == start => last.1 = end,
            _ => runs.push((start, end)),
        }
    }
    runs
}

/// Returns whole handles or segments in free memory that no view maps, by address; without `pending`, only those whose
/// work is complete.
pub(crate) fn unused(heap: &Heap, space: SpaceId, pending: bool) -> Vec<(u64, u64)> {
    let pieces = heap
        .extents
        .space(space)
        .into_iter()
        .flat_map(Space::pieces);
    let pieces = pieces.filter(|piece| pending || is_complete(heap, piece.id));
    let runs = join_pieces(pieces.map(|piece| (piece.addr, piece.granules)));
    let unmapped = whole_handles(heap, runs).filter(|(_, holding)| holding.views == 0);
    unmapped
        .map(|(addr, holding)| (addr, holding.bytes))
        .collect()
}

/// Returns the memory of some arenas that can be released: [`unused`] memory, unless it is suspended.
pub(crate) fn releasable(
    heap: &Heap,
    arenas: &[SpaceId],
    pending: bool,
) -> Vec<(SpaceId, u64, u64)> {
    let arenas = arenas.iter().filter(|_| !heap.is_suspended);
    let found = arenas.flat_map(|space| {
        let unused = unused(heap, *space, pending).into_iter();
        unused.map(|(addr, bytes)| (*space, addr, bytes))
    });
    found.collect()
}

/// Returns the handles or segments that lie wholly in one of these runs, by address.
pub(crate) fn whole_handles(
    heap: &Heap,
    runs: Vec<(u64, u64)>,
) -> impl Iterator<Item = (u64, &Holding)> {
    runs.into_iter().flat_map(|(start, end)| {
        let inside = heap.physical.holdings.range(start..end);
        let inside = inside.filter(move |(addr, holding)| *addr + holding.bytes <= end);
        inside.map(|(addr, holding)| (*addr, holding))
    })
}

/// Whether all work on a free piece is complete, as observed by the host. The classic policy requires this too,
/// because `cuMemFree` is not documented to wait for the work of its context.
pub(crate) fn is_complete(heap: &Heap, id: u32) -> bool {
    let uses = heap.extents.records.cold(id).uses.as_slice();
    uses.iter().all(|u| heap.streams.is_complete(u))
}

/// Claims memory of some arenas to release, so that there is room for `missing` bytes where there is `room` now:
/// the smallest piece that suffices, otherwise the largest first. Returns nothing and changes nothing if that
/// cannot suffice to get below the limit. A room that is only a guess after a driver refusal is not part of this
/// check: then everything may be claimed.
pub(crate) fn plan(heap: &mut Heap, arenas: &[SpaceId], missing: u64, room: u64) -> Vec<Release> {
    let excess = missing.saturating_sub(room);
    let held = heap.held();
    let certain = match heap.physical.limit {
        Some(limit) => missing.saturating_sub(limit.saturating_sub(held)),
        None => 0,
    };
    let mut found = releasable(heap, arenas, false);
    if found.iter().map(|f| f.2).sum::<u64>() < certain {
        return Vec::new();
    }
    let mut chosen = Vec::new();
    let mut left = excess;
    // The highest addresses first among equals, so that the low end of an arena stays dense.
    found.sort_unstable_by_key(|(_, addr, bytes)| (*bytes, *addr));
    while left > 0 && !found.is_empty() {
        let enough = found.partition_point(|(_, _, bytes)| *bytes < left);
        let at = enough.min(found.len() - 1);
        let pick = found.remove(at);
        left = left.saturating_sub(pick.2);
        chosen.push(pick);
    }
    chosen
        .into_iter()
        .filter_map(|(space, addr, _)| claim(heap, space, addr))
        .collect()
}

/// Claims releasable memory until at most `keep` bytes are cached, the longest idle first, and returns how much
/// more can be released once pending work is complete.
pub(crate) fn plan_trim(heap: &mut Heap, keep: u64) -> (Vec<Release>, u64) {
    let mut plan = releasable(heap, &ARENAS, false);
    let sum = |found: &[(SpaceId, u64, u64)]| found.iter().map(|found| found.2).sum::<u64>();
    let pending = sum(&releasable(heap, &ARENAS, true)) - sum(&plan);
    let held = heap.stats.all.reserved.current;
    let mut excess = held.saturating_sub(keep.saturating_add(heap.live_totals().1));
    let mut releases = Vec::new();
    // From the top of the address space, so that arenas shrink from their end.
    plan.sort_unstable_by_key(|(_, addr, _)| Reverse(*addr));
    if keep > 0 {
        // Longest idle first; within one run of free memory the order from the top stays.
        plan.sort_by_cached_key(|(space, addr, bytes)| {
            heap.extents.freed_at(*space, *addr, *bytes)
        });
    }
    for (space, addr, bytes) in plan {
        if excess == 0 {
            break;
        }
        if let Some(release) = claim(heap, space, addr) {
            excess = excess.saturating_sub(bytes);
            releases.push(release);
        }
    }
    (releases, pending.min(excess))
}

/// Claims at most `bytes` of releasable memory, the longest idle first.
pub(crate) fn plan_decay(heap: &mut Heap, bytes: u64) -> Vec<Release> {
    let mut found = releasable(heap, &[SpaceId::Large], false);
    // From the top of the address space within one run of free memory.
    found.sort_unstable_by_key(|(_, addr, _)| Reverse(*addr));
    found.sort_by_cached_key(|(space, addr, bytes)| heap.extents.freed_at(*space, *addr, *bytes));
    let mut left = bytes;
    let mut plan = Vec::new();
    for (space, addr, bytes) in found {
        // A handle that would have to stay in part is not released.
        if bytes <= left
            && let Some(release) = claim(heap, space, addr)
        {
            left -= bytes;
            plan.push(release);
        }
    }
    plan
}

pub(crate) fn claim(heap: &mut Heap, space: SpaceId, addr: u64) -> Option<Release> {
    let holding = *heap.physical.holdings.get(&addr)?;
    // The piece in which the handle or segment begins.
    let first = heap.extents.piece_around(space, addr)?;
    let skip = ((addr - heap.extents.records[first].addr) / GRANULE) as u32;
    let (id, shards) = heap.claim(space, first, skip, (holding.bytes / GRANULE) as u32)?;
    Some(Release {
        space,
        id,
        shards,
        addr,
        bytes: holding.bytes,
        handle: holding.handle,
    })
}

// ---- outcomes -----------------------------------------------------------------------------

/// Records that memory was unmapped, or a segment freed, and removes it from the heap.
pub(crate) fn remove(heap: &mut Heap, release: &Release) {
    heap.physical.full_at = None;
    heap.stats
        .count_released(release.space == SpaceId::Small, release.bytes);
    heap.physical.holdings.remove(&release.addr);
    heap.suspended.forget_segment(release.addr);
    let memory = (release.space, release.handle.is_some());
    heap.recorder
        .record_memory(Kind::Unmap, (release.addr, release.bytes), memory);
    if release.space == SpaceId::Large {
        heap.physical.handles.remove(release.addr);
    }
    heap.extents.lookup.forget(release.addr, release.bytes);
    let (space, records) = heap.extents.parts(release.space);
    if release.handle.is_some() {
        space.make_hole(records, release.id);
    } else {
        records[release.id].state = Extent::Busy;
        space.remove_region(records, release.id);
    }
}

/// Records that a handle was unmapped that lay outside the arenas.
pub(crate) fn forget_mapping(heap: &mut Heap, place: (u64, u64)) {
    heap.suspended.forget_segment(place.0);
    let memory = (SpaceId::Large, true);
    heap.recorder.record_memory(Kind::Unmap, place, memory);
}

/// Adds memory that could not be unmapped after a failed growth to the heap. Its homes are holes.
pub(crate) fn set_apart(heap: &mut Heap, space: SpaceId, failure: GrowthFailure) {
    for (addr, bytes, handle) in failure.mapped {
        // The range is a hole again; it is taken out of circulation with its handle.
        let hole = heap.extents.space(space).and_then(|s| {
            s.holes()
                .range(..=addr)
                .next_back()
                .map(|(base, id)| (*base, *id))
        });
        let Some((base, hole)) = hole else { continue };
        let skip = ((addr - base) / GRANULE) as u32;
        if let Some((id, _)) = heap.claim(space, hole, skip, (bytes / GRANULE) as u32) {
            quarantine(heap, id);
            growth::hold(heap, addr, bytes, Some(handle), space);
        }
    }
}

/// Records the outcome of releasing a mapped handle. If unmapping failed, the handle stays set apart. If the
/// release failed, its bytes are no longer held, because it is unknown whether the driver has them. Returns the
/// bytes released, and the failure.
pub(crate) fn commit(
    heap: &mut Heap,
    release: &Release,
    (unmapped, released): GivenBack,
) -> (u64, Option<DriverError>) {
    if let Err(error) = unmapped {
        quarantine(heap, release.id);
        return (0, Some(error));
    }
    remove(heap, release);
    match released {
        Ok(()) => (release.bytes, None),
        Err(error) => (0, Some(error)),
    }
}

/// Reverts a planned release: the memory is free again.
pub(crate) fn revert(heap: &mut Heap, release: Release) {
    heap.restore(release.space, release.id, release.shards);
}

/// Adds a segment that the driver did not free back to the heap.
pub(crate) fn restore_segment(heap: &mut Heap, release: Release) {
    let Ok(granules) = u32::try_from(release.bytes / GRANULE) else {
        return;
    };
    growth::hold(heap, release.addr, release.bytes, None, release.space);
    let (space, records) = heap.extents.parts(release.space);
    let id = space.add_region(records, release.addr, granules, Uses::None);
    let busy = space.claim(records, id, 0, granules, Extent::Busy, &mut Vec::new());
    if let Some(id) = busy {
        heap.restore(release.space, id, release.shards);
    }
}

/// Sets a handle apart that could not be unmapped.
pub(crate) fn quarantine(heap: &mut Heap, id: u32) {
    heap.extents.records[id].state = Extent::Quarantined;
    heap.physical.quarantined.push(id);
}

/// Claims the handles that could not be unmapped, so that no other call retries them concurrently.
pub(crate) fn claim_quarantined(heap: &mut Heap) -> Vec<Release> {
    let mut quarantined = std::mem::take(&mut heap.physical.quarantined);
    quarantined.sort_unstable();
    let releases = quarantined.into_iter().filter_map(|id| {
        let hot = &mut heap.extents.records[id];
        let holding = heap.physical.holdings.get(&hot.addr)?;
        hot.state = Extent::Busy;
        Some(Release {
            space: holding.space,
            id,
            shards: Vec::new(),
            addr: hot.addr,
            bytes: holding.bytes,
            handle: holding.handle,
        })
    });
    releases.collect()
}
