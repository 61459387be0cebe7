//! Physical memory: what is held from the driver, and by which rules more is.

pub(crate) mod address;
pub(crate) mod budget;
pub(crate) mod bursts;
pub(crate) mod plan;
pub(crate) mod policy;

use std::collections::BTreeMap;

use crate::allocator::config::Tuning;
use crate::allocator::extent::handle::{Handles, Holding, OrphanedHandle};
use crate::allocator::extent::record::SpaceId;
use crate::allocator::extent::want::Want;
use crate::allocator::physical::bursts::Account;
use crate::allocator::physical::plan::tile;
use crate::allocator::report::{GrowthInfo, PhysicalSegment};
use crate::driver::DriverError;
use crate::error::Error;

/// The physical memory of an allocator.
#[derive(Debug)]
pub(crate) struct Physical {
    /// What is held from the driver, by its home address.
    pub holdings: BTreeMap<u64, Holding>,
    /// The handles of the large arena by number.
    pub handles: Handles,
    /// Handles that are mapped nowhere and could not be released yet.
    pub orphaned_handles: Vec<OrphanedHandle>,
    /// Records of handles that could not be unmapped yet: nobody can use them.
    pub quarantined: Vec<u32>,
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
            orphaned_handles: Vec::new(),
            quarantined: Vec::new(),
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

    /// Whether an earlier failure left memory behind that nobody can use.
    pub(crate) fn has_leftovers(&self) -> bool {
        !self.orphaned_handles.is_empty() || !self.quarantined.is_empty()
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

    /// Why a pointer is no live block.
    pub(crate) fn not_live(&self, ptr: u64) -> Error {
        match self.ours(ptr) {
            true => Error::NotLive { ptr },
            false => Error::NotOurs { ptr },
        }
    }

    /// Whether an address lies in memory that the allocator holds.
    pub(crate) fn ours(&self, ptr: u64) -> bool {
        self.holdings
            .range(..=ptr)
            .next_back()
            .is_some_and(|(base, h)| ptr < base + h.bytes)
    }
}

/// Levels of the budget for stitching. Work that keeps stitching moves up a level: more slack,
/// larger handles, more willingness to wait.
pub(crate) const LEVELS: usize = 6;

/// A growth that failed, with what could not be undone.
#[derive(Debug)]
pub(crate) struct GrowthFailure {
    pub error: DriverError,
    /// Handles that are still mapped: (address, bytes, handle).
    pub(crate) mapped: Vec<(u64, u64, u64)>,
    /// Handles that are mapped nowhere and could not be released.
    pub(crate) orphaned_handles: Vec<(u64, u64)>,
}
