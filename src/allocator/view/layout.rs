//! Layouts: which handles a view maps for a request.

#![forbid(unsafe_code)]

use crate::allocator::extent::want::Want;
use crate::allocator::physical::Physical;
use crate::allocator::size::GRANULE;
use crate::allocator::view::Views;
use crate::allocator::view::mapping::{Layout, Mapping, Openings};
use crate::allocator::view::sources::{Source, Sources};

impl Physical {
    /// Returns the handles of the large arena with their open parts, by address.
    pub(crate) fn sources(&self, open: &[(u64, u64)]) -> Vec<Source> {
        let mut sources = Vec::new();
        for (start, end) in open.iter().copied() {
            let mut from = start;
            while from < end {
                let number = self.handles.at(from);
                if number == 0 {
                    break;
                }
                let handle = self.handles.get(number);
                let to = end.min(handle.end());
                sources.push(Source {
                    home: handle.home,
                    bytes: handle.end() - handle.home,
                    open: (from, to),
                    number,
                });
                from = to;
            }
        }
        sources
    }

    pub(crate) fn new_layout(
        &self,
        want: &Want,
        sources: &Sources,
        head: Option<&[Source]>,
    ) -> Option<Layout> {
        let need = u64::from(want.granules) * GRANULE;
        let head = head.filter(|run| run[0].open.1 - run[0].open.0 < need);
        let run = head.unwrap_or_default();
        let mut used = self.handles.marks();
        let (skip, first, left) = match run.first() {
            Some(tail) if !tail.whole() => {
                used.set(tail.number);
                let skip = tail.open.0 - tail.home;
                (
                    skip,
                    vec![(tail.home, tail.bytes)],
                    need - (tail.bytes - skip),
                )
            }
            _ => (0, Vec::new(), need),
        };
        let lead = &run[first.len()..];
        let choice = sources.gather(lead, left, &used);
        let mut adds = first;
        adds.extend(choice.adds);
        if adds.is_empty() {
            // All memory would be new, which is a growth.
            return None;
        }
        Some(Layout {
            base: None,
            back: 0,
            skip,
            adds,
            fresh: choice.missing,
            lacking: choice.lacking,
        })
    }

    /// Returns held handles as mappings of a view.
    pub(crate) fn mappings(&self, adds: &[(u64, u64, u64)]) -> Vec<Mapping> {
        let mapping = |(home, bytes, _): &(u64, u64, u64)| Mapping {
            home: *home,
            granules: (bytes / GRANULE) as u32,
            handle: self.holdings.get(home).map_or(0, |h| h.number),
        };
        adds.iter().map(mapping).collect()
    }
}

impl Views {
    /// Returns the layout for a request that needs the least new memory, then the fewest handles.
    pub(crate) fn best_layout(
        &self,
        physical: &Physical,
        want: &Want,
        open: &Openings,
    ) -> Option<Layout> {
        let sources = Sources::new(physical.sources(&open.ranges));
        let layouts = self.layouts(physical, want, open, &sources);
        layouts.into_iter().min_by_key(Layout::cost)
    }

    /// Returns the layout that needs the least memory, if the new memory is created first: it lies between an open
    /// tail, as long as there is one, and an open start.
    pub(crate) fn leanest_layout(
        &self,
        physical: &Physical,
        want: &Want,
        open: &Openings,
    ) -> Option<Layout> {
        let sources = Sources::new(physical.sources(&open.ranges));
        let mut layouts = self.layouts(physical, want, open, &sources);
        let tail = sources.longest_tail().filter(|_| want.align == 1);
        layouts.extend(tail.and_then(|tail| physical.new_layout(want, &sources, Some(tail))));
        let cost = |layout: &Layout| (layout.lacking, layout.adds.len());
        layouts.into_iter().min_by_key(cost)
    }

    /// Returns layouts for a request: extensions of views, and a new one.
    fn layouts(
        &self,
        physical: &Physical,
        want: &Want,
        open: &Openings,
        sources: &Sources,
    ) -> Vec<Layout> {
        let mut layouts = self.extended_layouts(physical, want, open, sources);
        let head = sources.best_head(want.align > 1);
        layouts.extend(physical.new_layout(want, sources, head));
        layouts
    }

    /// Returns extensions of the views with the longest open suffix.
    fn extended_layouts(
        &self,
        physical: &Physical,
        want: &Want,
        open: &Openings,
        sources: &Sources,
    ) -> Vec<Layout> {
        let need = u64::from(want.granules) * GRANULE;
        let mut layouts: Vec<Layout> = Vec::new();
        for (suffix, base) in self.best_suffixes(need, open) {
            let Some(view) = self.map.get(&base) else {
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
            let mut used = physical.handles.marks();
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
}
