//! Statistics of an allocator.

use std::fmt;

use crate::error::memory::Bytes;

use super::report::Packing;

/// A quantity over time. The documentation of each field states the unit, bytes or a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Counter {
    /// Current value.
    pub current: u64,
    /// The largest value since creation or the last reset of peaks. It is exact unless the documentation of the field
    /// calls it an upper bound.
    pub peak: u64,
    /// Sum of all additions.
    pub total_allocated: u64,
    /// Sum of all subtractions.
    pub total_freed: u64,
}

impl Counter {
    #[inline(always)]
    pub(crate) fn add(&mut self, amount: u64) {
        let current = self.current + amount;
        self.current = current;
        if current > self.peak {
            self.peak = current;
        }
        self.total_allocated += amount;
    }

    #[inline(always)]
    pub(crate) fn sub(&mut self, amount: u64) {
        debug_assert!(amount <= self.current, "a counter never wraps");
        self.current = self.current.saturating_sub(amount);
        self.total_freed += amount;
    }

    /// Changes the current value to `value`.
    pub(crate) fn set(&mut self, value: u64) {
        match value.checked_sub(self.current) {
            Some(amount) => self.add(amount),
            None => self.sub(self.current - value),
        }
    }

    /// Reverts a [`sub`](Self::sub).
    pub(crate) fn put_back(&mut self, amount: u64) {
        self.current += amount;
        self.peak = self.peak.max(self.current);
        self.total_freed -= amount;
    }

    pub(crate) fn reset_peak(&mut self) {
        self.peak = self.current;
    }
}

/// Statistics of one pool, or of all pools together.
///
/// The first four counters, which each large block changes, lie on two cache lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
#[repr(C, align(64))]
pub struct PoolStats {
    /// Number of live blocks. Under the packed policy its peak becomes an upper bound once several streams or threads
    /// have allocated blocks of up to 64 KiB, or such blocks were live beside larger ones. The bound is never below an
    /// observed value, and never above the number of blocks that fit into the peak of [`allocated`](Self::allocated).
    pub allocations: Counter,
    /// Bytes of live blocks, after rounding. Its peak is exact.
    pub allocated: Counter,
    /// Requested bytes of live blocks. Its peak is an upper bound where that of [`allocations`](Self::allocations) is,
    /// and never above that of [`allocated`](Self::allocated).
    pub requested: Counter,
    /// Bytes of live blocks, and of freed blocks that streams other than their own may still access. Under the packed
    /// policy its peak is an upper bound.
    pub active: Counter,
    /// Number of segments (classic) or physical handles (packed) obtained from the driver.
    pub segments: Counter,
    /// Bytes obtained from the driver. Its peak is exact. Memory that a failed release may have leaked does not count.
    pub reserved: Counter,
}

impl PoolStats {
    /// The counters that stream caches keep too, in the order used there.
    pub(crate) fn counted(&mut self) -> [&mut Counter; 3] {
        [
            &mut self.allocated,
            &mut self.requested,
            &mut self.allocations,
        ]
    }

    /// Counts an allocated block. Out of line, as [`freed`](Self::freed) is, because a block counts in two pools: the
    /// second call finds the code in the cache.
    #[inline(never)]
    pub(crate) fn born(&mut self, bytes: u64, requested: u64) {
        self.allocations.add(1);
        self.allocated.add(bytes);
        self.active.add(bytes);
        self.requested.add(requested);
    }

    /// Counts a freed block; `over` is whether no stream other than its own still accesses it.
    #[inline(never)]
    pub(crate) fn freed(&mut self, bytes: u64, requested: u64, over: bool) {
        self.allocations.sub(1);
        self.allocated.sub(bytes);
        self.requested.sub(requested);
        if over {
            self.active.sub(bytes);
        }
    }

    pub(crate) fn counters(&mut self) -> [&mut Counter; 6] {
        let PoolStats {
            allocations,
            segments,
            allocated,
            requested,
            active,
            reserved,
        } = self;
        [
            allocations,
            segments,
            allocated,
            requested,
            active,
            reserved,
        ]
    }

    fn reset_peaks(&mut self) {
        self.counters().into_iter().for_each(Counter::reset_peak);
    }
}

/// How often each step of reclaim succeeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
#[repr(C)]
pub struct ReclaimStats {
    /// A fitting extent was ready.
    pub ready: u64,
    /// Memory was added within the soft cap.
    pub grown: u64,
    /// A run in a view was used.
    pub views: u64,
    /// An extent was used behind a device-side wait because growth would have exceeded the soft cap.
    pub waited: u64,
    /// Handles were stitched into a view.
    pub stitched: u64,
    /// Memory was added beyond the soft cap.
    pub grown_hard: u64,
    /// The allocator's internal caches were flushed.
    pub flushed: u64,
    /// Unused memory was released to the driver to make room.
    pub released: u64,
    /// The host waited for a marker.
    pub host_waits: u64,
    /// A hook was called to free memory.
    pub hooks: u64,
    /// The context was synchronised.
    pub synchronised: u64,
}

/// A consistent snapshot of all statistics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
#[repr(C)]
pub struct Stats {
    /// Both pools together. Its peaks are peaks of the sums, not sums of the peaks.
    pub all: PoolStats,
    /// The small pool.
    pub small: PoolStats,
    /// The large pool.
    pub large: PoolStats,
    /// Allocations served from cached memory.
    pub hits: u64,
    /// Allocations that required memory from the driver, or failed.
    pub misses: u64,
    /// How often each step of reclaim succeeded.
    pub reclaim: ReclaimStats,
    /// Driver allocations that failed for lack of memory and were retried after making room.
    pub retries: u64,
    /// Allocations that failed for lack of memory.
    pub ooms: u64,
    /// Markers recorded.
    pub markers: u64,
    /// Queries of markers, and of streams for idleness.
    pub queries: u64,
    /// Device-side waits queued on streams.
    pub stream_waits: u64,
    /// Markers that could not be recorded; the next marker of the stream covers the same frees.
    pub failed_markers: u64,
    /// Streams known at present.
    pub streams: u64,
    /// Stream caches, which serve blocks of up to 64 KiB under the packed policy.
    pub caches: u64,
    /// Bytes of freed blocks, small and large, that stream caches keep unmerged for the next request of their size.
    pub cache_bytes: u64,
    /// Number of free pieces, including small ones and pending ones.
    pub free_blocks: u64,
    /// Bytes of free memory, including pending memory.
    pub free: u64,
    /// The largest of the free pieces, in bytes.
    pub largest_free: u64,
    /// Number of records: blocks, free pieces, holes and pages, including small blocks and their free neighbours.
    pub nodes: u64,
    /// The memory limit in bytes, if one is set.
    pub limit: Option<u64>,
    /// Bytes of the device that growth leaves free ([`Config::headroom`](crate::allocator::Config::headroom)).
    pub headroom: u64,
    /// Bytes that graph pools hold from the driver, including released pools that still hold memory. These bytes count
    /// towards the limit and in [`held`](Self::held), but not in [`all`](Self::all).
    pub graph_pools: u64,
    /// Blocks and memory of all graph pools together. Peaks of blocks are exact; `active` counts live blocks only, and
    /// `reserved` is [`graph_pools`](Self::graph_pools).
    pub pooled: PoolStats,
    /// Bytes that growable ranges hold from the driver, including those that are decommitted. They count towards the
    /// limit and in [`held`](Self::held), but in no other statistic here.
    pub ranges: u64,
    /// The part of [`ranges`](Self::ranges) that is decommitted, and serves other requests as soon as its uses are
    /// complete.
    pub ranges_leaving: u64,
    /// Bytes held from the driver for any purpose: reserved memory, graph pools, and ranges. Calls in progress count
    /// with what they will add.
    pub held: Counter,
    /// State of the packed policy.
    pub packing: Packing,
}

impl Stats {
    /// Returns the reserved bytes that no live block occupies: reserved minus allocated.
    pub fn cached(&self) -> u64 {
        self.all
            .reserved
            .current
            .saturating_sub(self.all.allocated.current)
    }

    pub(crate) fn reset_peaks(&mut self) {
        for pool in [
            &mut self.all,
            &mut self.small,
            &mut self.large,
            &mut self.pooled,
        ] {
            pool.reset_peaks();
        }
        self.held.reset_peak();
    }

    /// Counts the bytes and handles of graph pools, and the sum of all bytes that are held.
    pub(crate) fn count_held(&mut self, pools: u64, handles: u64, ranges: u64) {
        self.pooled.reserved.set(pools);
        self.pooled.segments.set(handles);
        self.held.set(self.all.reserved.current + pools + ranges);
    }

    /// Counts an allocated block.
    #[inline]
    pub(crate) fn born(&mut self, small: bool, bytes: u64, requested: u64) {
        self.on_pool(small, |pool| pool.born(bytes, requested));
    }

    /// Counts a freed block; `over` is whether no stream other than its own still accesses it.
    #[inline]
    pub(crate) fn freed(&mut self, small: bool, bytes: u64, requested: u64, over: bool) {
        self.on_pool(small, |pool| pool.freed(bytes, requested, over));
    }

    /// Counts memory obtained from the driver.
    pub(crate) fn count_obtained(&mut self, small: bool, bytes: u64) {
        self.on_pool(small, |pool| {
            pool.reserved.add(bytes);
            pool.segments.add(1);
        });
    }

    /// Counts memory released to the driver.
    pub(crate) fn count_released(&mut self, small: bool, bytes: u64) {
        self.on_pool(small, |pool| {
            pool.reserved.sub(bytes);
            pool.segments.sub(1);
        });
    }

    #[inline(always)]
    pub(crate) fn on_pool(&mut self, small: bool, change: impl Fn(&mut PoolStats)) {
        change(&mut self.all);
        change(if small {
            &mut self.small
        } else {
            &mut self.large
        });
    }
}

impl ReclaimStats {
    /// Counts a growth, within the soft cap or beyond it.
    pub(crate) fn count_growth(&mut self, within_cap: bool) {
        let counter = if within_cap {
            &mut self.grown
        } else {
            &mut self.grown_hard
        };
        *counter += 1;
    }
}

impl fmt::Display for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "allocated {} (peak {}), requested {}, cached {}, reserved {} (peak {})",
            Bytes(self.all.allocated.current),
            Bytes(self.all.allocated.peak),
            Bytes(self.all.requested.current),
            Bytes(self.cached()),
            Bytes(self.all.reserved.current),
            Bytes(self.all.reserved.peak),
        )?;
        write!(
            f,
            "{} blocks, {} free pieces (largest {}), {} hits, {} misses, {} out of memory",
            self.all.allocations.current,
            self.free_blocks,
            Bytes(self.largest_free),
            self.hits,
            self.misses,
            self.ooms,
        )
    }
}
