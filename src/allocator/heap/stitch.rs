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
use crate::allocator::size::{GRANULE, MAX_REQUEST, PHYSICAL_GRANULE};
use crate::allocator::view::mapping::{
    Aliased, Layout, Mapping, Openings, Site, Stitch, Unmapped, View,
};
use crate::allocator::view::sources::Sources;
use crate::driver::DriverError;

/// Requests below this many bytes are not stitched while growth is allowed.
pub(crate) const STITCH_MIN: u64 = 2 << 20;
/// Address space of a view, as a multiple of its first request.
const VIEW_ROOM: u64 = 4;
/// Maximum initial address space of a view, in bytes.
const VIEW_ROOM_MAX: u64 = MAX_REQUEST / 2;
/// Bounds of the number of mappings in views: a minimum, and a number per handle held.
const VIEW_MAPS_MIN: usize = 32_768;
const VIEW_MAPS_PER_HANDLE: usize = 32;

impl Heap {
    /// Returns the handles that a layout may consist of, given the memory that is available at home.
    fn sources(&self, open: &Openings) -> Sources {
        Sources::new(self.physical.sources(&open.ranges))
    }

    /// Returns layouts for a request: extensions of views, and a new one.
    fn layouts(&self, want: &Want, open: &Openings, sources: &Sources) -> Vec<Layout> {
        let mut layouts = self.extended_layouts(want, open, sources);
        let head = sources.best_head(want.align > 1);
        layouts.extend(self.physical.new_layout(want, sources, head));
        layouts
    }

    /// Returns the layout for a request that needs the least new memory, then the fewest handles.
    fn best_layout(&self, want: &Want, open: &Openings) -> Option<Layout> {
        let layouts = self.layouts(want, open, &self.sources(open));
        layouts.into_iter().min_by_key(Layout::cost)
    }

    /// Plans and claims a stitch that creates at most `room` bytes. It uses ready memory, or, where that saves new
    /// memory, memory that is `reachable` behind waits.
    pub(crate) fn plan_stitch(
        &mut self,
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
                && let Some(layout) = self.best_layout(want, open)
                && layout.fresh < least
            {
                best = Some(layout);
            }
        }
        if best.as_ref()?.fresh > room {
            best = sets.iter().find_map(|open| {
                let leanest = self.leanest_layout(want, open);
                leanest.filter(|layout| layout.fresh <= room)
            });
        }
        self.claim_layout(want, best?)
    }

    /// Returns the layout that needs the least memory, if the new memory is created first: it lies between an open
    /// tail, as long as there is one, and an open start.
    fn leanest_layout(&self, want: &Want, open: &Openings) -> Option<Layout> {
        let sources = self.sources(open);
        let mut layouts = self.layouts(want, open, &sources);
        let tail = sources.longest_tail().filter(|_| want.align == 1);
        layouts.extend(tail.and_then(|tail| self.physical.new_layout(want, &sources, Some(tail))));
        let cost = |layout: &Layout| (layout.lacking, layout.adds.len());
        layouts.into_iter().min_by_key(cost)
    }

    /// Returns the bytes that must be created at least before a stitch for this request.
    pub(crate) fn stitch_lacking(&self, want: &Want) -> Option<u64> {
        let reachable = self.openings(want, true)?;
        Some(self.leanest_layout(want, &reachable)?.lacking)
    }

    /// Returns extensions of the views with the longest open suffix.
    fn extended_layouts(&self, want: &Want, open: &Openings, sources: &Sources) -> Vec<Layout> {
        let need = u64::from(want.granules) * GRANULE;
        let mut layouts: Vec<Layout> = Vec::new();
        for (suffix, base) in self.views.best_suffixes(need, open) {
            let Some(view) = self.views.map.get(&base) else {
                continue;
            };
            let end = base + u64::from(view.granules) * GRANULE;
            // The block begins in the suffix, or after it if it has to be aligned.
            let align = u64::from(want.align) * GRANULE;
            let start = (end - suffix).next_multiple_of(align);
            let (back, skip) = (end.saturating_sub(start), start.saturating_sub(end));
            if skip > 0 {
                continue;
            }
            // The first of equal layouts is taken.
            let least = (0, sources.fewest(need - back));
            if layouts.iter().any(|layout| layout.cost() <= least) {
                continue;
            }
            let mut used = self.physical.handles.marks();
            view.mappings
                .iter()
                .for_each(|mapping| used.set(mapping.handle));
            let choice = sources.gather(&[], need - back, &used);
            let (adds, fresh) = (choice.adds, choice.missing);
            let added = adds.iter().map(|(_, bytes)| bytes).sum::<u64>() + fresh;
            if u64::from(view.granules) * GRANULE + added <= u64::from(view.room) * GRANULE {
                layouts.push(Layout {
                    base: Some(base),
                    back,
                    skip,
                    adds,
                    fresh,
                    lacking: choice.lacking,
                });
            }
        }
        layouts
    }

    /// Returns the number of mappings in views above the bound.
    pub(crate) fn excess_view_maps(&self) -> usize {
        let bound = VIEW_MAPS_MIN.max(VIEW_MAPS_PER_HANDLE * self.physical.holdings.len());
        self.views.view_maps().saturating_sub(bound)
    }

    /// Returns the granules of address space for a new view that begins with a request and must fit `at_least` bytes.
    pub(crate) fn view_room(&self, want: &Want, at_least: u64) -> u32 {
        let need = u64::from(want.granules) * GRANULE;
        (view_bytes(need, at_least) / GRANULE) as u32
    }

    /// Returns the address space that must be leased before a new view for a request can be planned, if any is missing.
    pub(crate) fn view_room_missing(&self, want: &Want) -> Option<u64> {
        let handle = u64::from(self.physical.handles.largest()) * GRANULE;
        let handle = handle.max(PHYSICAL_GRANULE);
        let need = u64::from(want.granules) * GRANULE;
        let bytes = u64::from(self.view_room(want, need + 2 * handle)) * GRANULE;
        let fits = self.extents.views.largest_piece() >= bytes;
        (!fits).then_some(bytes)
    }

    // ---- a stitch in progress --------------------------------------------------------------------

    /// Claims the memory and addresses of a layout.
    pub(crate) fn claim_layout(&mut self, want: &Want, layout: Layout) -> Option<Stitch> {
        let site = self.site(want, &layout)?;
        let claimed = self.claim_memory(want, &layout, &site);
        let Some((aliased, fresh)) = claimed else {
            if let Some(range) = site.range {
                self.extents.range_freed(range);
            }
            return None;
        };
        let adds: Vec<_> = layout
            .adds
            .iter()
            .filter_map(|(home, bytes)| Some((*home, *bytes, self.physical.handle_at(*home)?)))
            .collect();
        // No other call may release the handles, or extend the same view, meanwhile.
        self.views.segs_under_way += adds.len();
        self.physical
            .viewed(adds.iter().map(|(home, _, _)| *home), true);
        if let Some(view) = self.views.map.get_mut(&site.base) {
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
    fn site(&mut self, want: &Want, layout: &Layout) -> Option<Site> {
        let (base, range, room, filled) = match layout.base {
            Some(base) => {
                let view = self.views.map.get(&base)?;
                (base, None, view.room, view.granules)
            }
            None => {
                let added = layout.adds.iter().map(|(_, bytes)| bytes).sum::<u64>();
                let room = self.view_room(want, added + layout.fresh);
                let range = self.extents.take_range(room)?;
                (self.extents.records[range].addr, Some(range), room, 0)
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
        &mut self,
        want: &Want,
        layout: &Layout,
        site: &Site,
    ) -> Option<(Aliased, Option<Fresh>)> {
        let parts = self.views.homes(want, layout, site)?;
        let aliased = self.alias(SpaceId::Large, want.stream, &parts)?;
        if layout.fresh == 0 {
            return Some((aliased, None));
        }
        match self.claim_fresh(want, layout.fresh) {
            Some(fresh) => Some((aliased, Some(fresh))),
            None => {
                self.give_home(SpaceId::Large, aliased);
                None
            }
        }
    }

    /// Commits a stitch after the driver calls: adds the view to the heap, and returns the block.
    pub(crate) fn stitched(&mut self, want: &Want, mut stitch: Stitch, handles: &[u64]) -> u32 {
        self.views.segs_under_way -= stitch.adds.len();
        let mut parts: Vec<u32> = stitch.aliased.parts.iter().map(|(id, _)| *id).collect();
        if let Some(fresh) = stitch.fresh {
            stitch.adds.extend(self.hold_fresh(&fresh, handles));
            let taken = parts.iter().map(|id| self.extents.records[*id].granules);
            let needed = want.granules - taken.sum::<u32>();
            self.cut_fresh(want, (SpaceId::Large, fresh.id), needed);
            parts.push(fresh.id);
        }
        let mappings = self.physical.mappings(&stitch.adds);
        let site = stitch.site;
        self.end_site(&site, mappings, false);
        self.view_block(site.base, site.offset, want.granules, parts)
    }

    /// Reverts a failed stitch. Handles that are still mapped stay in the view, which is not used any more. `fresh` are
    /// the handles of new memory that could not be unmapped from the view, and so are held.
    pub(crate) fn not_stitched(
        &mut self,
        want: &Want,
        mut stitch: Stitch,
        still_mapped: usize,
        fresh: &[u64],
    ) {
        self.views.segs_under_way -= stitch.adds.len();
        if !fresh.is_empty()
            && let Some(new) = stitch.fresh.take()
        {
            stitch.adds.extend(self.hold_fresh(&new, fresh));
            self.extents.put_fresh(SpaceId::Large, new.id, want.stream);
        }
        let (kept, undone) = stitch.adds.split_at(still_mapped.min(stitch.adds.len()));
        self.physical
            .viewed(undone.iter().map(|(home, _, _)| *home), false);
        let kept = self.physical.mappings(kept);
        if let Some(fresh) = stitch.fresh {
            self.not_made(fresh);
        }
        self.give_home(SpaceId::Large, stitch.aliased);
        match stitch.site.range {
            Some(range) if kept.is_empty() => self.extents.range_freed(range),
            _ => {
                let dead = !kept.is_empty();
                self.end_site(&stitch.site, kept, dead);
            }
        }
    }

    /// Adds the handles of new memory to the heap, each with its mapping in the view, and returns them in the form of a
    /// stitch's additions.
    fn hold_fresh(&mut self, fresh: &Fresh, handles: &[u64]) -> Vec<(u64, u64, u64)> {
        let homes = self.hold_all(fresh, handles);
        self.physical.viewed(homes.iter().copied(), true);
        let made = homes.iter().zip(&fresh.sizes).zip(handles);
        made.map(|((home, bytes), handle)| (*home, *bytes, *handle))
            .collect()
    }

    /// Ends the use of a view by a stitch: stores its present mappings and makes it available to other calls; a dead
    /// view is only unmapped.
    fn end_site(&mut self, site: &Site, mappings: Vec<Mapping>, dead: bool) {
        if let Some(range) = site.range {
            let mut view = View::new(range, site.room, mappings);
            view.dead = dead;
            return self.put_view(site.base, view);
        }
        if let Some(view) = self.views.map.get_mut(&site.base) {
            view.calls -= 1;
            view.busy = false;
            view.dead |= dead;
        }
        self.views.extend_view(site.base, mappings);
    }

    /// Adds what is left of a failed stitch to the heap.
    pub(crate) fn not_mapped(
        &mut self,
        want: &Want,
        stitch: Stitch,
        failed: Unmapped,
    ) -> DriverError {
        let error = failed.error();
        match failed {
            Unmapped::Undone(_) => self.not_stitched(want, stitch, 0, &[]),
            Unmapped::NotMade(failure) => {
                self.not_stitched(want, stitch, 0, &[]);
                self.set_apart(SpaceId::Large, failure);
            }
            Unmapped::Stuck(_, mapped, handles) => {
                self.not_stitched(want, stitch, mapped, &handles);
            }
        }
        error
    }

    // ---- memory for the self-test of views ----------------------------------------------------------

    /// Claims a home and a view for one new handle, if the limit and the address space allow it.
    pub(crate) fn plan_test(&mut self, want: &Want) -> Option<Stitch> {
        if self.room() < PHYSICAL_GRANULE {
            return None;
        }
        let range = self.extents.take_range(want.granules)?;
        let base = self.extents.records[range].addr;
        let Some(fresh) = self.claim_fresh(want, PHYSICAL_GRANULE) else {
            self.extents.range_freed(range);
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
    pub(crate) fn test_over(&mut self, block: u32, home: u64) -> Option<Release> {
        self.view_block_freed(block, &Uses::None);
        self.claim_holding(SpaceId::Large, home)
    }
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
