//! New layouts of views over physical memory.

#![forbid(unsafe_code)]

use crate::allocator::extent::want::Want;
use crate::allocator::physical::Physical;
use crate::allocator::size::GRANULE;
use crate::allocator::view::mapping::{Layout, Mapping};
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
