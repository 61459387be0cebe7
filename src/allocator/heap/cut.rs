//! Shortening a view: which one is worth it, and its parts before and after.

use crate::allocator::extent::want::Want;
use crate::allocator::heap::Heap;
use crate::allocator::physical::LEVELS;
use crate::allocator::size::GRANULE;
use crate::allocator::view::mapping::{Mapping, Openings, View};

impl Heap {
    /// The view to cut before a stitch, if the request would lack fewer bytes then.
    pub(crate) fn plan_cut(&self, want: &Want, open: &Openings) -> Option<Cut> {
        if self.physical.level + 1 < LEVELS || want.align > 1 {
            return None;
        }
        let need = u64::from(want.granules) * GRANULE;
        let suffixes = self.views.best_suffixes(need, open);
        let lacks = need - suffixes.first().map_or(0, |(suffix, _)| *suffix);
        let worth = ((need - lacks * WORTH_PERCENT / 100).div_ceil(GRANULE) as u32).max(1);
        let mut best: Option<(u32, Cut)> = None;
        for (base, view) in self.views.map.iter().filter(|(_, view)| self.may_cut(view)) {
            let least = best.map_or(worth, |(most, _)| most + 1);
            if let Some((run, keep)) = view.best_cut(open, want.granules, least) {
                best = Some((run, Cut { base: *base, keep }));
            }
        }
        best.map(|(_, cut)| cut)
    }

    /// Whether mappings of a view may go in which no block lies.
    pub(crate) fn may_cut(&self, view: &View) -> bool {
        let over = |u| self.streams.complete(u);
        // Whoever else holds it may be about to have a block in it.
        !view.dead && !view.busy && view.calls == 0 && view.uses.as_slice().iter().all(over)
    }

    /// Takes the handles behind a cut out of a view; it keeps the address space. Returns them with
    /// the address at which they are mapped.
    pub(crate) fn cut_view(&mut self, cut: Cut) -> Option<(u64, Vec<Mapping>)> {
        let view = self.views.map.get(&cut.base)?;
        let left: u32 = view
            .mappings
            .iter()
            .take(cut.keep)
            .map(|mapping| mapping.granules)
            .sum();
        // Another thread may have cut it there, or before, since this was planned.
        if !self.may_cut(view) || view.held() > left || view.mappings.len() <= cut.keep {
            return None;
        }
        let view = self.views.map.get_mut(&cut.base)?;
        let gone = view.mappings.split_off(cut.keep);
        view.granules = left;
        // Nobody may extend it, or let it go, before its end is unmapped.
        view.busy = true;
        view.calls += 1;
        self.views.segs_under_way += gone.len();
        Some((cut.base + u64::from(left) * GRANULE, gone))
    }

    /// The end of a view is unmapped, or stays.
    pub(crate) fn cut_done(&mut self, cut: Cut, gone: Vec<Mapping>, unmapped: bool) {
        if let Some(view) = self.views.map.get_mut(&cut.base) {
            view.busy = false;
            view.calls -= 1;
            view.dead = !unmapped;
        }
        self.views.segs_under_way -= gone.len();
        self.stats.reclaim.shortened += u64::from(unmapped);
        if !unmapped {
            self.views.extend_view(cut.base, gone);
            return;
        }
        let homes = gone.iter().map(|gone| gone.home);
        self.physical.viewed(homes, false);
    }
}

impl View {
    /// Granules from the base on which have to stay for the blocks in it.
    pub(crate) fn held(&self) -> u32 {
        self.blocks.iter().map(|(_, end)| *end).max().unwrap_or(0)
    }

    /// The longest open run of at least some granules behind which the view may be cut and can be
    /// continued for a request of so many: its length, at most the request's, and how many handles
    /// stay.
    pub(crate) fn best_cut(&self, open: &Openings, need: u32, least: u32) -> Option<(u32, usize)> {
        let held = self.held();
        let (mut offset, mut run) = (0, 0u32);
        let mut best: Option<(u32, usize)> = None;
        for (at, mapping) in self.mappings.iter().enumerate() {
            let (cache, back) = open.borders.of(mapping.handle);
            run = if cache == mapping.granules {
                run + cache
            } else {
                back
            };
            offset += mapping.granules;
            let length = run.min(need);
            if length > best.map_or(least - 1, |(most, _)| most)
                && offset >= held
                && at + 1 < self.mappings.len()
                && self.room - offset >= need - length
            {
                best = Some((length, at + 1));
            }
        }
        best
    }
}

/// A cut is worth it if the request lacks so much less then.
pub(crate) const WORTH_PERCENT: u64 = 95;

/// A view, and how many of its handles stay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cut {
    pub base: u64,
    pub keep: usize,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::allocator::Config;
    use crate::allocator::cache::stream_cache::PageTable;
    use crate::allocator::extent::handle::Borders;
    use crate::allocator::extent::record::{SpaceId, State as Extent};
    use crate::allocator::physical::policy::Rules;
    use std::sync::Arc;

    const HANDLE: u64 = 16 << 20;
    const GRANULES: u32 = (HANDLE / GRANULE) as u32;

    /// Heap on the last level with views of handles that are open (`true`) or not, each with room for
    /// many more.
    fn heap_of(views: &[(u64, &[bool])]) -> (Heap, Openings) {
        let tuning = Config::new().tuning();
        let table = Arc::new(PageTable::new(0));
        let mut heap = Heap::new(
            (crate::allocator::cache::stream_cache::nobody(), 0),
            table,
            0,
            Rules::Packed,
            None,
            tuning,
        );
        heap.physical.level = LEVELS - 1;
        let (mut ranges, mut home) = (Vec::new(), HANDLE);
        for (base, open) in views {
            let mut mappings = Vec::new();
            for open in *open {
                let handle = heap.physical.handles.add(home, GRANULES);
                mappings.push(Mapping {
                    home,
                    granules: GRANULES,
                    handle,
                });
                if *open {
                    ranges.push((home, home + HANDLE));
                }
                home += 2 * HANDLE;
            }
            let room = 256 * GRANULES;
            let range = heap
                .extents
                .records
                .make(SpaceId::Views, Extent::Busy, *base, room);
            let view = View::new(range, room, mappings);
            heap.put_view(*base, view);
        }
        let open = Openings {
            borders: Borders::new(&heap.physical.handles, &ranges),
            ranges,
            more: false,
        };
        (heap, open)
    }

    fn want(handles: u32) -> Want {
        Want {
            space: SpaceId::Large,
            stream: 0,
            granules: handles * GRANULES,
            align: 1,
            requested: u64::from(handles) * HANDLE,
            single: false,
            views: true,
        }
    }

    const SHORT: &[bool] = &[true, true, true, true, true, false, false];
    const LONG: &[bool] = &[false, true, true, true, true, true, true, false];
    const BUSY: &[bool] = &[true, true, true, true, true, true, true, true, false];

    /// In either order of the views' addresses.
    #[test]
    fn the_longest_run_is_continued() {
        for (base, keep) in [(1 << 40, 7), (3 << 40, 7)] {
            let other = 2 << 40;
            let (heap, open) = heap_of(&[(other, SHORT), (base, LONG)]);
            let cut = heap.plan_cut(&want(20), &open);
            assert_eq!(cut, Some(Cut { base, keep }));
        }
        // Of equal ones, the one with the lowest address.
        let (heap, open) = heap_of(&[(4 << 40, LONG), (2 << 40, SHORT), (3 << 40, LONG)]);
        let base = 3 << 40;
        assert_eq!(heap.plan_cut(&want(20), &open), Some(Cut { base, keep: 7 }));
        let (mut heap, open) = heap_of(&[(1 << 40, LONG), (2 << 40, BUSY)]);
        let busy = |heap: &mut Heap, busy| {
            let view = heap.views.map.get_mut(&(2 << 40));
            view.into_iter().for_each(|view| view.busy = busy);
            heap.plan_cut(&want(20), &open).map(|cut| cut.base)
        };
        assert_eq!(busy(&mut heap, true), Some(1 << 40));
        assert_eq!(busy(&mut heap, false), Some(2 << 40));
    }

    /// Two threads may plan the same cut one after the other.
    #[test]
    fn a_view_that_was_cut_meanwhile_is_left_alone() {
        let (mut heap, open) = heap_of(&[(1 << 40, LONG)]);
        let cut = heap.plan_cut(&want(20), &open).unwrap();
        let (_, gone) = heap.cut_view(cut).unwrap();
        assert!(heap.cut_view(cut).is_none(), "its end is being unmapped");
        heap.cut_done(cut, gone, true);
        assert!(heap.cut_view(cut).is_none(), "it has no such end");
        assert!(
            heap.views
                .map
                .values()
                .all(|view| !view.busy && view.calls == 0)
        );
        assert_eq!(heap.views.segs_under_way, 0);
    }

    /// An open end serves as well as a run that is hardly longer.
    #[test]
    fn a_cut_saves_a_twentieth_or_is_not_made() {
        let mut end = [true; 8];
        end[0] = false;
        for (open_end, cut) in [(5, true), (6, false), (7, false)] {
            let (heap, open) = heap_of(&[(1 << 40, LONG), (2 << 40, &end[..=open_end])]);
            assert_eq!(heap.plan_cut(&want(20), &open).is_some(), cut, "{open_end}");
        }
        // Six handles are a twentieth of 120.
        let (heap, open) = heap_of(&[(1 << 40, LONG)]);
        assert!(heap.plan_cut(&want(120), &open).is_some());
        assert_eq!(heap.plan_cut(&want(121), &open), None);
    }
}
