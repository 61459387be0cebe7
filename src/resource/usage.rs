//! Statistics of a resource.

use crate::allocator::{Counter, Stats};
use crate::driver::MemInfo;

/// Statistics of a resource: in bytes, unless a field states otherwise. Figures that the resource does not count are
/// zero or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Usage {
    /// Bytes in live blocks, as they were requested.
    pub requested: Counter,
    /// Bytes in live blocks, as the source rounds them.
    pub used: Counter,
    /// Bytes held from the driver.
    pub reserved: Counter,
    /// Live blocks (a number).
    pub blocks: Counter,
    /// Bytes in blocks that were deallocated while work on their stream may still use them.
    pub pending: u64,
    /// Free blocks that are kept for later requests (a number).
    pub cached_blocks: u64,
    /// Requests since the start (a number).
    pub requests: u64,
    /// Requests that were served from cached memory.
    pub hits: u64,
    /// Requests that needed memory from the driver, or failed.
    pub misses: u64,
    /// Requests that failed.
    pub failures: u64,
    /// Requests that failed at first and succeeded after relief hooks or a policy had run.
    pub recoveries: u64,
    /// The bound on live and pending bytes, if there is one.
    pub limit: Option<u64>,
    /// Memory of the device as the driver reports it; none if it was not queried.
    pub device_memory: Option<MemInfo>,
}

impl Usage {
    pub(crate) fn of(stats: &Stats) -> Usage {
        Usage {
            requested: stats.all.requested,
            used: stats.all.allocated,
            reserved: stats.all.reserved,
            blocks: stats.all.allocations,
            cached_blocks: stats.free_blocks,
            requests: stats.hits + stats.misses,
            hits: stats.hits,
            misses: stats.misses,
            failures: stats.ooms,
            ..Usage::default()
        }
    }

    /// Bytes held from the driver and not in live blocks.
    pub fn cached_bytes(&self) -> u64 {
        self.reserved.current.saturating_sub(self.used.current)
    }

    /// Live and pending bytes together.
    pub fn outstanding(&self) -> u64 {
        self.requested.current.saturating_add(self.pending)
    }

    /// Bytes that could be requested under the limit; none without one.
    pub fn remaining(&self) -> Option<u64> {
        Some(self.limit?.saturating_sub(self.outstanding()))
    }

    /// Counts a new live block.
    #[inline(always)]
    pub(crate) fn add(&mut self, bytes: u64) {
        self.requested.add(bytes);
        self.blocks.add(1);
    }

    #[inline(always)]
    pub(crate) fn sub(&mut self, bytes: u64) {
        self.requested.sub(bytes);
        self.blocks.sub(1);
    }

    fn counters(&mut self) -> [&mut Counter; 4] {
        [
            &mut self.requested,
            &mut self.used,
            &mut self.reserved,
            &mut self.blocks,
        ]
    }

    pub(crate) fn reset_peaks(&mut self) {
        self.counters().into_iter().for_each(Counter::reset_peak);
    }

    pub(crate) fn reset_sums(&mut self) {
        for counter in self.counters() {
            (counter.total_allocated, counter.total_freed) = (0, 0);
        }
        (self.requests, self.hits, self.misses, self.failures) = (0, 0, 0, 0);
    }
}
