//! Physical memory: what is held from the driver, and by which rules more is.

use std::collections::BTreeMap;

use super::bursts::Account;
use super::config::Tuning;
use super::growth::tile;
use super::handles::{Handles, Holding, Stray};
use super::mapping::{Layout, Seg};
use super::records::SpaceId;
use super::report::{GrowthInfo, PhysicalSegment};
use super::size::GRANULE;
use super::sources::{Source, Sources};
use super::want::Want;

/// The physical memory of an allocator.
#[derive(Debug)]
pub(crate) struct Physical {
    /// What is held from the driver, by its home address.
    pub holdings: BTreeMap<u64, Holding>,
    /// The handles of the large arena by number.
    pub handles: Handles,
    /// Handles that are mapped nowhere and could not be released yet.
    pub strays: Vec<Stray>,
    /// Reserved address ranges: base to bytes.
    pub spans: BTreeMap<u64, u64>,
    /// Bytes that growth under way will add.
    pub planned: u64,
    /// Bytes that may be held from the driver at most.
    pub limit: Option<u64>,
    /// The driver refused to hold more than this; lifted when something is released, and before a
    /// request fails or waits for it.
    pub full_at: Option<u64>,
    /// Why memory was last added.
    pub last_growth: Option<GrowthInfo>,
    /// Level of the stitching budget.
    pub level: usize,
    /// What was spent on the level of the stitching budget.
    pub work: u64,
    /// What the configuration says of cap, budget and handles.
    pub tuning: Tuning,
    /// Allocations that map very many handles, and what they owe.
    pub bursts: Account,
}

impl Physical {
    pub(crate) fn new(limit: Option<u64>, tuning: Tuning) -> Self {
        Physical {
            holdings: BTreeMap::new(),
            handles: Handles::default(),
            strays: Vec::new(),
            spans: BTreeMap::new(),
            planned: 0,
            limit,
            full_at: None,
            last_growth: None,
            level: 0,
            work: 0,
            tuning,
            bursts: Account::default(),
        }
    }

    /// Counts a large request, which makes up for a part of a map.
    pub(crate) fn large_request(&mut self, want: &Want) {
        if want.space == SpaceId::Large {
            self.work = self.work.saturating_sub(1);
            self.bursts.request();
        }
    }

    pub(crate) fn home_segments(&self, ptr: u64, end: u64) -> Vec<PhysicalSegment> {
        let first = self.holdings.range(..=ptr).next_back();
        let first = first.map_or(ptr, |(base, _)| *base);
        let held = self.holdings.range(first..end);
        held.filter_map(|(base, holding)| {
            let (from, to) = (ptr.max(*base), end.min(base + holding.bytes));
            (from < to).then(|| PhysicalSegment {
                address: from,
                bytes: to - from,
                handle: holding.handle,
                offset: from - base,
                handle_bytes: holding.bytes,
            })
        })
        .collect()
    }

    /// Cuts a range of address space where one reservation ends and the next begins: no handle may
    /// lie in two.
    pub(crate) fn stretches(&self, addr: u64, bytes: u64) -> Vec<(u64, u64)> {
        let (mut stretches, mut at) = (Vec::new(), addr);
        for (base, _) in self.spans.range(addr + 1..addr + bytes) {
            stretches.push((at, base - at));
            at = *base;
        }
        stretches.push((at, addr + bytes - at));
        stretches
    }

    /// Sizes of the handles for a range.
    pub(crate) fn tiles(&self, addr: u64, bytes: u64, size: u64) -> Vec<u64> {
        let stretches = self.stretches(addr, bytes).into_iter();
        stretches.flat_map(|(_, part)| tile(part, size)).collect()
    }

    /// Whether an address lies in memory that the allocator holds.
    pub(crate) fn ours(&self, ptr: u64) -> bool {
        self.holdings
            .range(..=ptr)
            .next_back()
            .is_some_and(|(base, h)| ptr < base + h.bytes)
    }

    /// Held handles as parts of a view.
    pub(crate) fn segs(&self, adds: &[(u64, u64, u64)]) -> Vec<Seg> {
        let seg = |(home, bytes, _): &(u64, u64, u64)| Seg {
            home: *home,
            granules: (bytes / GRANULE) as u32,
            handle: self.holdings.get(home).map_or(0, |h| h.number),
        };
        adds.iter().map(seg).collect()
    }

    /// The handles of the large arena that are open, as far as they are, by address.
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
            // All of it would be new: that is a growth.
            return None;
        }
        Some(Layout {
            base: None,
            back: 0,
            skip,
            adds,
            fresh: choice.missing,
            lacking: choice.lacking,
            fresh_handle: 0,
        })
    }
}
