//! Stitching: plans which handles to map contiguously for a request that fits nowhere.
//!
//! A stitch extends a view, or creates a new one. It prefers the layout that needs the least new memory, then the one
//! that maps the fewest handles, because the driver's cost is per handle. Its memory is claimed before the driver
//! calls, and committed or restored afterwards.

use crate::allocator::extent::record::SpaceId;
use crate::allocator::extent::uses::Uses;
use crate::allocator::extent::want::Want;
use crate::allocator::heap::Heap;
use crate::allocator::physical::{Fresh, Release};
use crate::allocator::plan::{alias, growth, release};
use crate::allocator::size::{GRANULE, MAX_REQUEST, PHYSICAL_GRANULE};
use crate::allocator::view::mapping::{
    Aliased, Layout, Mapping, Openings, Site, Stitch, Unmapped, View,
};
use crate::driver::DriverError;

/// Requests below this many bytes are not stitched while growth is allowed.
pub(crate) const STITCH_MIN: u64 = 2 << 20;
/// Address space of a view, as a multiple of its first request.
const VIEW_ROOM: u64 = 4;
/// Maximum initial address space of a view, in bytes.
const VIEW_ROOM_MAX: u64 = MAX_REQUEST / 2;

/// Plans and claims a stitch that creates at most `room` bytes. It uses ready memory, or, where that saves new
/// memory, memory that is `reachable` behind waits.
pub(crate) fn plan(
    heap: &mut Heap,
    want: &Want,
    room: u64,
    open: Openings,
    reachable: Option<Openings>,
) -> Option<Stitch> {
    let sets: Vec<Openings> = [Some(open), reachable].into_iter().flatten().collect();
    let mut best: Option<Layout> = None;
    for open in &sets {
        let least = best.as_ref().map_or(u64::MAX, |layout| layout.fresh);
        if least > 0
            && let Some(layout) = heap.views.best_layout(&heap.physical, want, open)
            && layout.fresh < least
        {
            best = Some(layout);
        }
    }
    if best.as_ref()?.fresh > room {
        best = sets.iter().find_map(|open| {
            let leanest = heap.views.leanest_layout(&heap.physical, want, open);
            leanest.filter(|layout| layout.fresh <= room)
        });
    }
    claim_layout(heap, want, best?)
}

/// Returns the bytes that must be created at least before a stitch for this request.
pub(crate) fn lacking_bytes(heap: &Heap, want: &Want) -> Option<u64> {
    let reachable = alias::openings(heap, want, true)?;
    let leanest = heap
        .views
        .leanest_layout(&heap.physical, want, &reachable)?;
    Some(leanest.lacking)
}

/// Returns the address space that must be leased before a new view for a request can be planned, if any is missing.
pub(crate) fn view_room_missing(heap: &Heap, want: &Want) -> Option<u64> {
    let handle = u64::from(heap.physical.handles.largest()) * GRANULE;
    let handle = handle.max(PHYSICAL_GRANULE);
    let need = u64::from(want.granules) * GRANULE;
    let bytes = view_bytes(need, need + 2 * handle);
    let fits = heap.extents.views.largest_piece() >= bytes;
    (!fits).then_some(bytes)
}

// ---- a stitch in progress --------------------------------------------------------------------

/// Claims the memory and addresses of a layout.
fn claim_layout(heap: &mut Heap, want: &Want, layout: Layout) -> Option<Stitch> {
    let site = site(heap, want, &layout)?;
    let claimed = claim_memory(heap, want, &layout, &site);
    let Some((aliased, fresh)) = claimed else {
        if let Some(range) = site.range {
            heap.extents.range_freed(range);
        }
        return None;
    };
    let adds: Vec<_> = layout
        .adds
        .iter()
        .filter_map(|(home, bytes)| Some((*home, *bytes, heap.physical.handle_at(*home)?)))
        .collect();
    // No other call may release the handles, or extend the same view, meanwhile.
    heap.views.segs_under_way += adds.len();
    heap.physical
        .count_views(adds.iter().map(|(home, _, _)| *home), true);
    if let Some(view) = heap.views.map.get_mut(&site.base) {
        view.calls += 1;
        view.busy = true;
    }
    Some(Stitch {
        site,
        adds,
        aliased,
        fresh,
    })
}

/// Returns the site of a layout: an existing view, or claimed addresses for a new one.
fn site(heap: &mut Heap, want: &Want, layout: &Layout) -> Option<Site> {
    let (base, range, room, filled) = match layout.base {
        Some(base) => {
            let view = heap.views.map.get(&base)?;
            (base, None, view.room, view.granules)
        }
        None => {
            let need = u64::from(want.granules) * GRANULE;
            let added = layout.adds.iter().map(|(_, bytes)| bytes).sum::<u64>();
            let room = (view_bytes(need, added + layout.fresh) / GRANULE) as u32;
            let range = heap.extents.take_range(room)?;
            (heap.extents.records[range].addr, Some(range), room, 0)
        }
    };
    let at = base + u64::from(filled) * GRANULE;
    let start = at - layout.back + layout.skip;
    Some(Site {
        base,
        range,
        room,
        offset: ((start - base) / GRANULE) as u32,
        at,
    })
}

/// Claims the home memory of a layout's block, and a home for new memory.
fn claim_memory(
    heap: &mut Heap,
    want: &Want,
    layout: &Layout,
    site: &Site,
) -> Option<(Aliased, Option<Fresh>)> {
    let parts = heap.views.homes(want, layout, site)?;
    let aliased = alias::claim(heap, SpaceId::Large, want.stream, &parts)?;
    if layout.fresh == 0 {
        return Some((aliased, None));
    }
    match growth::claim_home(heap, want, layout.fresh) {
        Some(fresh) => Some((aliased, Some(fresh))),
        None => {
            alias::restore(heap, SpaceId::Large, aliased);
            None
        }
    }
}

/// Adds the handles of new memory to the heap, each with its mapping in the view, and returns them in the form of a
/// stitch's additions.
fn add_fresh_handles(heap: &mut Heap, fresh: &Fresh, handles: &[u64]) -> Vec<(u64, u64, u64)> {
    let homes = growth::hold_all(heap, fresh, handles);
    heap.physical.count_views(homes.iter().copied(), true);
    let made = homes.iter().zip(&fresh.sizes).zip(handles);
    made.map(|((home, bytes), handle)| (*home, *bytes, *handle))
        .collect()
}

/// Ends the use of a view by a stitch: stores its present mappings and makes it available to other calls; a dead
/// view is only unmapped.
fn end_site(heap: &mut Heap, site: &Site, mappings: Vec<Mapping>, dead: bool) {
    if let Some(range) = site.range {
        let mut view = View::new(range, site.room, mappings);
        view.dead = dead;
        return heap.views.put(&mut heap.extents.records, site.base, view);
    }
    if let Some(view) = heap.views.map.get_mut(&site.base) {
        view.calls -= 1;
        view.busy = false;
        view.dead |= dead;
    }
    heap.views.extend_view(site.base, mappings);
}

/// Commits a stitch after the driver calls: adds the view to the heap, and returns the block.
pub(crate) fn commit(heap: &mut Heap, want: &Want, mut stitch: Stitch, handles: &[u64]) -> u32 {
    heap.views.segs_under_way -= stitch.adds.len();
    let mut parts: Vec<u32> = stitch.aliased.parts.iter().map(|(id, _)| *id).collect();
    if let Some(fresh) = stitch.fresh {
        stitch.adds.extend(add_fresh_handles(heap, &fresh, handles));
        let taken = parts.iter().map(|id| heap.extents.records[*id].granules);
        let needed = want.granules - taken.sum::<u32>();
        growth::free_rest(heap, want, (SpaceId::Large, fresh.id), needed);
        parts.push(fresh.id);
    }
    let mappings = heap.physical.mappings(&stitch.adds);
    let site = stitch.site;
    end_site(heap, &site, mappings, false);
    heap.views.add_block(
        &mut heap.extents.records,
        site.base,
        site.offset,
        want.granules,
        parts,
    )
}

/// Reverts a failed stitch. Handles that are still mapped stay in the view, which is not used any more. `fresh` are
/// the handles of new memory that could not be unmapped from the view, and so are held.
pub(crate) fn revert(
    heap: &mut Heap,
    want: &Want,
    mut stitch: Stitch,
    still_mapped: usize,
    fresh: &[u64],
) {
    heap.views.segs_under_way -= stitch.adds.len();
    if !fresh.is_empty()
        && let Some(new) = stitch.fresh.take()
    {
        stitch.adds.extend(add_fresh_handles(heap, &new, fresh));
        heap.extents.free_fresh(SpaceId::Large, new.id, want.stream);
    }
    let (kept, undone) = stitch.adds.split_at(still_mapped.min(stitch.adds.len()));
    heap.physical
        .count_views(undone.iter().map(|(home, _, _)| *home), false);
    let kept = heap.physical.mappings(kept);
    if let Some(fresh) = stitch.fresh {
        growth::revert(heap, fresh);
    }
    alias::restore(heap, SpaceId::Large, stitch.aliased);
    match stitch.site.range {
        Some(range) if kept.is_empty() => heap.extents.range_freed(range),
        _ => {
            let dead = !kept.is_empty();
            end_site(heap, &stitch.site, kept, dead);
        }
    }
}

/// Returns the memory that a failed stitch did not lose to the heap.
pub(crate) fn revert_failed(
    heap: &mut Heap,
    want: &Want,
    stitch: Stitch,
    failed: Unmapped,
) -> DriverError {
    let error = failed.error();
    match failed {
        Unmapped::Undone(_) => revert(heap, want, stitch, 0, &[]),
        Unmapped::FailedPlan(failure) => {
            revert(heap, want, stitch, 0, &[]);
            release::set_apart(heap, SpaceId::Large, failure);
        }
        Unmapped::Stuck(_, mapped, handles) => {
            revert(heap, want, stitch, mapped, &handles);
        }
    }
    error
}

// ---- memory for the self-test of views ----------------------------------------------------------

/// Claims a home and a view for one new handle, if the limit and the address space allow it.
pub(crate) fn plan_test(heap: &mut Heap, want: &Want) -> Option<Stitch> {
    if heap.room() < PHYSICAL_GRANULE {
        return None;
    }
    let range = heap.extents.take_range(want.granules)?;
    let base = heap.extents.records[range].addr;
    let Some(fresh) = growth::claim_home(heap, want, PHYSICAL_GRANULE) else {
        heap.extents.range_freed(range);
        return None;
    };
    Some(Stitch {
        site: Site {
            base,
            range: Some(range),
            room: want.granules,
            offset: 0,
            at: base,
        },
        adds: Vec::new(),
        aliased: Aliased::default(),
        fresh: Some(fresh),
    })
}

/// Frees the test's block, and claims its handle for release.
pub(crate) fn end_test(heap: &mut Heap, block: u32, home: u64) -> Option<Release> {
    heap.release_block(SpaceId::Large, block, Uses::None, false);
    release::claim(heap, SpaceId::Large, home)
}

/// Bytes of address space for a view that begins with a request of `need` bytes and must fit `at_least`.
fn view_bytes(need: u64, at_least: u64) -> u64 {
    let usual = (need * VIEW_ROOM).min(VIEW_ROOM_MAX);
    usual.max(at_least).next_multiple_of(PHYSICAL_GRANULE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_view_has_room_for_more_than_its_first_request() {
        let mib = |need: u64, at_least: u64| view_bytes(need << 20, at_least << 20) >> 20;
        assert_eq!((mib(10, 12), mib(10, 50)), (40, 50));
    }
}
