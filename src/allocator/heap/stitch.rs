//! Stitching: which handles to map behind each other for a request that fits nowhere.
//!
//! A stitch extends a view, or makes a new one. It prefers the layout that needs the least new
//! memory, then the one that maps the fewest handles, because the driver's price is per handle. What it works on is
//! claimed before the calls of the driver; afterwards it is entered, or put back.

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

/// Requests below this many bytes are not stitched while growing is allowed.
pub(crate) const STITCH_MIN: u64 = 2 << 20;
/// Address space of a view, as a multiple of its first request.
const VIEW_ROOM: u64 = 4;
/// Most bytes of address space that a view begins with.
const VIEW_ROOM_MAX: u64 = MAX_REQUEST / 2;
/// Mappings in views, at least and per handle held.
const VIEW_MAPS_MIN: usize = 32_768;
const VIEW_MAPS_PER_HANDLE: usize = 32;

impl Heap {
    /// The handles that a layout may be made of, given what is open at home.
    fn sources(&self, open: &Openings) -> Sources {
        Sources::new(self.physical.sources(&open.ranges))
    }

    /// Layouts for a request: extensions of views, and a new one.
    fn layouts(&self, want: &Want, open: &Openings, sources: &Sources) -> Vec<Layout> {
        let mut layouts = self.extended_layouts(want, open, sources);
        let head = sources.best_head(want.align > 1);
        layouts.extend(self.physical.new_layout(want, sources, head));
        layouts
    }

    /// The layout for a request that needs the least new memory, then the fewest handles.
    fn best_layout(&self, want: &Want, open: &Openings) -> Option<Layout> {
        let layouts = self.layouts(want, open, &self.sources(open));
        layouts.into_iter().min_by_key(Layout::cost)
    }

    /// Plans and claims a stitch that creates at most `room` bytes, of what is open, or, where that
    /// saves new memory, of what is `reachable` behind waits.
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

    /// The layout that needs the least new memory if that is made before: between an open tail, as long
    /// as there is one, and an open beginning.
    fn leanest_layout(&self, want: &Want, open: &Openings) -> Option<Layout> {
        let sources = self.sources(open);
        let mut layouts = self.layouts(want, open, &sources);
        let tail = sources.longest_tail().filter(|_| want.align == 1);
        layouts.extend(tail.and_then(|tail| self.physical.new_layout(want, &sources, Some(tail))));
        let cost = |layout: &Layout| (layout.lacking, layout.adds.len());
        layouts.into_iter().min_by_key(cost)
    }

    /// Bytes that have to be created at least before a stitch for this request.
    pub(crate) fn stitch_lacking(&self, want: &Want) -> Option<u64> {
        let reachable = self.openings(want, true)?;
        Some(self.leanest_layout(want, &reachable)?.lacking)
    }

    /// Extensions of the views with the longest open suffix.
    fn extended_layouts(&self, want: &Want, open: &Openings, sources: &Sources) -> Vec<Layout> {
        let need = u64::from(want.granules) * GRANULE;
        let mut layouts: Vec<Layout> = Vec::new();
        for (suffix, base) in self.views.best_suffixes(need, open) {
            let Some(view) = self.views.map.get(&base) else {
                continue;
            };
            let end = base + u64::from(view.granules) * GRANULE;
            // The block begins in the suffix, or behind it if it has to be aligned.
            let align = u64::from(want.align) * GRANULE;
            let start = (end - suffix).next_multiple_of(align);
            let (back, skip) = (end.saturating_sub(start), start.saturating_sub(end));
            if skip > 0 {
                continue;
            }
            // Of equal ones the first is taken.
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

    /// How many mappings in views are above the bound.
    pub(crate) fn excess_view_maps(&self) -> usize {
        let bound = VIEW_MAPS_MIN.max(VIEW_MAPS_PER_HANDLE * self.physical.holdings.len());
        self.views.view_maps().saturating_sub(bound)
    }

    /// Granules of address space for a new view that begins with a request and must take `at_least`
    /// bytes.
    pub(crate) fn view_room(&self, want: &Want, at_least: u64) -> u32 {
        let need = u64::from(want.granules) * GRANULE;
        (view_bytes(need, at_least) / GRANULE) as u32
    }

    /// Address space that must be at hand before a new view for a request can be planned, if it is
    /// not.
    pub(crate) fn view_room_missing(&self, want: &Want) -> Option<u64> {
        let handle = u64::from(self.physical.handles.largest()) * GRANULE;
        let handle = handle.max(PHYSICAL_GRANULE);
        let need = u64::from(want.granules) * GRANULE;
        let bytes = u64::from(self.view_room(want, need + 2 * handle)) * GRANULE;
        let fits = self.extents.views.largest_piece() >= bytes;
        (!fits).then_some(bytes)
    }

    // ---- a stitch under way ----------------------------------------------------------------------

    /// Claims what a layout takes.
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
        // Nobody may take the handles away, or extend the same view, meanwhile.
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

    /// Where a layout goes: a view that there is, or claimed addresses for a new one.
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

    /// Claims the home memory of a layout's block, and a home for what is created.
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

    /// The driver did what a stitch needs: enters the view into the heap, and returns the block.
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

    /// A stitch failed and was undone: everything as before. What is still mapped, if anything,
    /// stays in the view, which is not used any more. `fresh` are the handles of new memory that
    /// could not be taken out of the view again, and so are held.
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

    /// Enters the handles of new memory, each with the view that it is mapped in. Returns them as a
    /// stitch adds them.
    fn hold_fresh(&mut self, fresh: &Fresh, handles: &[u64]) -> Vec<(u64, u64, u64)> {
        let homes = self.hold_all(fresh, handles);
        self.physical.viewed(homes.iter().copied(), true);
        let made = homes.iter().zip(&fresh.sizes).zip(handles);
        made.map(|((home, bytes), handle)| (*home, *bytes, *handle))
            .collect()
    }

    /// The view of a stitch has what is mapped now, and others may use it; a dead one is only unmapped.
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

    /// Enters what is left of a stitch that failed.
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

    // ---- memory for the test of second layouts ------------------------------------------------------

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

    /// The test's block is free, and its handle claimed for release.
    pub(crate) fn test_over(&mut self, block: u32, home: u64) -> Option<Release> {
        self.view_block_freed(block, &Uses::None);
        self.claim_holding(SpaceId::Large, home)
    }
}

/// Bytes of address space for a view that begins with a request of `need` and must take `at_least`.
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
