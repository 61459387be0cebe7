//! Physical memory: what is held from the driver, and by which rules more is.

use std::collections::BTreeMap;

use super::bursts::Account;
use super::config::Tuning;
use super::handles::{Handles, Holding, Stray};
use super::report::GrowthInfo;

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
}
