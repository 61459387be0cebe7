//! Second layouts of physical memory: all views of an allocator.

use std::collections::BTreeMap;

use super::grid::Grid;
use super::mapping::View;
use super::report::SelfTest;

/// The views of an allocator.
#[derive(Debug, Default)]
pub(crate) struct Views {
    /// Views by their base address.
    pub map: BTreeMap<u64, View>,
    /// Where to look in views.
    pub grid: Grid,
    /// Blocks in views so far: the order in which views were used.
    pub clock: u64,
    /// Mappings in views that calls under way make or take away: counted at their handles.
    pub segs_under_way: usize,
    /// Bytes of blocks in views.
    pub lent_bytes: u64,
    /// What the test of the device found.
    pub self_test: SelfTest,
}
