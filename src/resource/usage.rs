//! What a resource holds and hands out.

use crate::allocator::{Counter, Stats};
use crate::driver::MemInfo;

/// What a resource holds and hands out, as every source, pool and adaptor answers it. Bytes, unless a field
/// says otherwise; zero or none is what the resource does not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Usage {
    /// Bytes in live blocks, as they were asked for.
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
    /// Requests that failed at first, and went through after hooks or a policy had done their work.
    pub recoveries: u64,
    /// The bound on live and pending bytes, if there is one.
    pub limit: Option<u64>,
    /// Memory of the device, by the driver's account; none if it was not asked.
    pub device_memory: Option<MemInfo>,
}

impl Usage {
    /// Bytes held from the driver and not in live blocks.
    pub fn cached_bytes(&self) -> u64 {
        self.reserved.current.saturating_sub(self.used.current)
    }

    /// That of an allocator.
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

    /// Bytes that have not left: live and pending ones together.
    pub fn outstanding(&self) -> u64 {
        self.requested.current.saturating_add(self.pending)
    }

    /// Bytes that could be asked for under the limit; none without one.
    pub fn remaining(&self) -> Option<u64> {
        Some(self.limit?.saturating_sub(self.outstanding()))
    }
}
