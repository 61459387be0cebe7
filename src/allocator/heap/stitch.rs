//! Stitching: which handles to map behind each other for a request that fits nowhere.
//!
//! A stitch extends a view, or makes a new one. It prefers the layout that needs the least new
//! memory, then the one that maps the fewest handles, because the driver's price is per handle.

use crate::allocator::extent::record::SpaceId;
use crate::allocator::extent::want::Want;
use crate::allocator::heap::Heap;
use crate::allocator::heap::growth::Growth;
use crate::allocator::size::{GRANULE, MAX_REQUEST, PHYSICAL_GRANULE};
use crate::allocator::view::mapping::{Layout, Openings, Stitch};
use crate::allocator::view::sources::Sources;

/// Requests below this many bytes are not stitched while growing is allowed.
pub(crate) const STITCH_MIN: u64 = 2 << 20;
/// Address space of a view, as a multiple of its first request,
const VIEW_ROOM: u64 = 4;
/// less where layouts hardly come back, so that more views begin anew with what is free then,
const VIEW_ROOM_RESTLESS: u64 = 2;
/// but not more than this.
const VIEW_ROOM_MAX: u64 = MAX_REQUEST / 2;
/// Mappings in views, at least and per handle held.
const VIEW_MAPS_MIN: usize = 32_768;
const VIEW_MAPS_PER_HANDLE: usize = 32;

impl Heap {
    /// The layout for a request that needs the least new memory, then the fewest handles, given what
    /// is open at home.
    fn best_layout(&self, want: &Want, open: &Openings) -> Option<Layout> {
        let sources = Sources::new(
            self.physical.sources(&open.ranges),
            self.physical.churning(self.streams.in_flight()),
        );
        let extended = self.extended_layouts(want, open, &sources).into_iter();
        extended
            .chain(
                self.physical
                    .new_layout(want, &sources, sources.best_head(want.align > 1)),
            )
            .min_by_key(Layout::cost)
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
        let mut best: Option<(Layout, &Openings)> = None;
        for open in &sets {
            let least = best.as_ref().map_or(u64::MAX, |(layout, _)| layout.fresh);
            if least > 0
                && let Some(layout) = self.best_layout(want, open)
                && layout.fresh < least
            {
                best = Some((layout, open));
            }
        }
        if best.as_ref()?.0.fresh > room {
            best = sets.iter().find_map(|open| {
                let leanest = self.leanest_layout(want, open);
                Some((leanest.filter(|layout| layout.fresh <= room)?, open))
            });
        }
        let (layout, open) = best?;
        let layout = self.bounded(want, layout, open);
        self.claim_layout(want, layout)
    }

    /// The layout that needs the least new memory if that is made before: between an open tail, as long
    /// as there is one, and an open front.
    fn leanest_layout(&self, want: &Want, open: &Openings) -> Option<Layout> {
        let sources = Sources::new(
            self.physical.sources(&open.ranges),
            self.physical.churning(self.streams.in_flight()),
        );
        let tail = sources.longest_tail().filter(|_| want.align == 1);
        let with_tail = tail.and_then(|tail| self.physical.new_layout(want, &sources, Some(tail)));
        let extended = self.extended_layouts(want, open, &sources).into_iter();
        let others = extended.chain(self.physical.new_layout(
            want,
            &sources,
            sources.best_head(want.align > 1),
        ));
        others
            .chain(with_tail)
            .min_by_key(|layout| (layout.lacking, layout.adds.len()))
    }

    /// Bytes that have to be created at least before a stitch for this request.
    pub(crate) fn stitch_lacking(&self, want: &Want) -> Option<u64> {
        let reachable = self.openings(want, true)?;
        Some(self.leanest_layout(want, &reachable)?.lacking)
    }

    /// Plans memory that a stitch lacks, as free memory.
    pub(crate) fn plan_supply(&mut self, want: &Want, bytes: u64) -> Option<Growth> {
        let fresh = self.claim_fresh(want, bytes, 0)?;
        Some(Growth {
            space: SpaceId::Large,
            id: fresh.id,
            shards: fresh.shards,
            waits: Vec::new(),
            skip: 0,
            addr: fresh.addr,
            sizes: fresh.sizes,
        })
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
                    fresh_handle: 0,
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
        (view_bytes(
            need,
            at_least,
            self.physical.churning(self.streams.in_flight()),
        ) / GRANULE) as u32
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
}

/// Bytes of address space for a view that begins with a request of `need` and must take `at_least`.
fn view_bytes(need: u64, at_least: u64, churning: bool) -> u64 {
    let times = if churning {
        VIEW_ROOM_RESTLESS
    } else {
        VIEW_ROOM
    };
    let usual = (need * times).min(VIEW_ROOM_MAX);
    usual.max(at_least).next_multiple_of(PHYSICAL_GRANULE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_view_has_room_for_more_than_its_first_request() {
        let mib = |need: u64, at_least: u64, churning| {
            view_bytes(need << 20, at_least << 20, churning) >> 20
        };
        assert_eq!((mib(10, 12, false), mib(10, 12, true)), (40, 20));
        assert_eq!(mib(10, 25, true), 26);
    }
}
