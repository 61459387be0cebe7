//! What the allocator counts.

use std::fmt;

use crate::error::memory::Bytes;

use super::report::Packing;

/// A quantity over time. Bytes or numbers, as the field that holds it says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Counter {
    /// Now.
    pub current: u64,
    /// The largest value since the start or the last reset of peaks; exact, where the field does not say
    /// that it is a bound.
    pub peak: u64,
    /// Everything that was ever added.
    pub total_allocated: u64,
    /// Everything that was ever taken away.
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

    /// [`add`](Self::add) of what is known to make no peak.
    #[inline(always)]
    fn add_below(&mut self, amount: u64) {
        self.current += amount;
        self.total_allocated += amount;
        debug_assert!(self.current <= self.peak, "no peak");
    }

    #[inline(always)]
    pub(crate) fn sub(&mut self, amount: u64) {
        debug_assert!(amount <= self.current, "a counter never wraps");
        self.current = self.current.saturating_sub(amount);
        self.total_freed += amount;
    }

    /// Undoes a [`sub`](Self::sub).
    pub(crate) fn put_back(&mut self, amount: u64) {
        self.current += amount;
        self.peak = self.peak.max(self.current);
        self.total_freed -= amount;
    }

    pub(crate) fn reset_peak(&mut self) {
        self.peak = self.current;
    }
}

/// Figures of one pool, or of all together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct PoolStats {
    /// Live blocks (a number). Under the packed policy its peak is an upper bound once several streams
    /// or threads have had blocks of up to 64 KiB, or such blocks lived beside larger ones: never below
    /// a value that was seen, and no more than fit into the peak of [`allocated`](Self::allocated).
    pub allocations: Counter,
    /// Segments (classic) or physical handles (packed) held from the driver (a number).
    pub segments: Counter,
    /// Bytes of live blocks, after rounding. Its peak is exact.
    pub allocated: Counter,
    /// Bytes of live blocks as they were asked for. Its peak is a bound where that of
    /// [`allocations`](Self::allocations) is, and no more than that of [`allocated`](Self::allocated).
    pub requested: Counter,
    /// Bytes of live blocks and of freed blocks that streams other than their own still use. Under
    /// the packed policy its peak is an upper bound.
    pub active: Counter,
    /// Bytes held from the driver. Its peak is exact. Memory that a failed release may have lost does not count.
    pub reserved: Counter,
}

impl PoolStats {
    /// The counters of what stream caches count as well, in their order.
    pub(crate) fn counted(&mut self) -> [&mut Counter; 3] {
        [
            &mut self.allocated,
            &mut self.requested,
            &mut self.allocations,
        ]
    }

    #[inline(always)]
    fn freed(&mut self, bytes: u64, requested: u64, over: bool) {
        self.allocations.sub(1);
        self.allocated.sub(bytes);
        self.requested.sub(requested);
        if over {
            self.active.sub(bytes);
        }
    }

    /// All counters.
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

/// How often each step of the reclaim was taken (numbers).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ReclaimStats {
    /// A fitting extent was ready.
    pub ready: u64,
    /// Memory was added within the soft cap.
    pub grown: u64,
    /// A run in a view was taken.
    pub views: u64,
    /// An extent was taken behind a stream wait because growing would have passed the soft cap.
    pub waited: u64,
    /// Handles were stitched into a view.
    pub stitched: u64,
    /// Memory was added beyond the soft cap.
    pub grown_hard: u64,
    /// Caches inside the allocator were flushed.
    pub flushed: u64,
    /// Unused memory was given back to the driver to make room.
    pub released: u64,
    /// The host waited for a marker.
    pub host_waits: u64,
    /// A hook was asked to free memory.
    pub hooks: u64,
    /// The context was synchronised.
    pub synchronised: u64,
}

/// A snapshot of all figures, consistent in itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Stats {
    /// Both pools together; its peaks are those of the sums, not sums of peaks.
    pub all: PoolStats,
    /// The small pool.
    pub small: PoolStats,
    /// The large pool.
    pub large: PoolStats,
    /// Allocations served from cached memory.
    pub hits: u64,
    /// Allocations that needed memory from the driver, or failed.
    pub misses: u64,
    /// Steps of the reclaim.
    pub reclaim: ReclaimStats,
    /// Driver allocations that failed for lack of memory and were retried after making room.
    pub retries: u64,
    /// Allocations that failed for lack of memory.
    pub ooms: u64,
    /// Markers recorded.
    pub markers: u64,
    /// Queries: of markers, and of streams whether they are idle.
    pub queries: u64,
    /// Waits queued on streams.
    pub stream_waits: u64,
    /// Markers that could not be recorded; the next one of their stream covers the same frees.
    pub failed_markers: u64,
    /// Streams known now.
    pub streams: u64,
    /// Stream caches, from which blocks of up to 64 KiB come under the packed policy.
    pub caches: u64,
    /// Bytes of freed blocks that stream caches keep as they are, for the next request of their size; large ones
    /// are among them.
    pub cache_bytes: u64,
    /// Free pieces, small ones and those that other streams may still use among them.
    pub free_blocks: u64,
    /// Bytes of free memory, whatever it is pending on.
    pub free: u64,
    /// The largest of the free pieces, in bytes.
    pub largest_free: u64,
    /// Blocks, free pieces, holes and pages that have a record, small blocks and their free neighbours
    /// among them.
    pub nodes: u64,
    /// The memory limit in bytes, if one is set.
    pub limit: Option<u64>,
    /// Bytes of the device that growth leaves free ([`Config::headroom`](crate::allocator::Config::headroom)).
    pub headroom: u64,
    /// Bytes that graph pools hold from the driver, those that were released and still have them among them. No
    /// other figure here counts them; the limit does.
    pub graph_pools: u64,
    /// How the packed policy stands.
    pub packing: Packing,
}

impl Stats {
    /// Bytes held from the driver that no live block occupies: reserved less allocated.
    pub fn cached(&self) -> u64 {
        self.all
            .reserved
            .current
            .saturating_sub(self.all.allocated.current)
    }

    pub(crate) fn reset_peaks(&mut self) {
        for pool in [&mut self.all, &mut self.small, &mut self.large] {
            pool.reset_peaks();
        }
    }

    /// A block was handed out.
    #[inline]
    pub(crate) fn born(&mut self, small: bool, bytes: u64, requested: u64) {
        self.on_pool(small, |pool| {
            pool.allocations.add(1);
            pool.allocated.add(bytes);
            pool.active.add(bytes);
            pool.requested.add(requested);
        });
    }

    /// [`born`](Self::born) of a block of the large pool which is known to be a peak of bytes nowhere, and
    /// of nothing else in that pool.
    #[inline]
    pub(crate) fn born_below(&mut self, bytes: u64, requested: u64) {
        let Stats { all, large, .. } = self;
        all.allocations.add(1);
        all.requested.add(requested);
        large.allocations.add_below(1);
        large.requested.add_below(requested);
        for pool in [all, large] {
            pool.allocated.add_below(bytes);
            pool.active.add(bytes);
        }
    }

    /// A block was freed; `over`: nobody but its own stream uses it any more.
    #[inline]
    pub(crate) fn freed(&mut self, small: bool, bytes: u64, requested: u64, over: bool) {
        self.all.freed(bytes, requested, over);
        let pool = if small {
            &mut self.small
        } else {
            &mut self.large
        };
        pool.freed(bytes, requested, over);
    }

    /// Counts what was taken from the driver.
    pub(crate) fn segment_added(&mut self, small: bool, bytes: u64) {
        self.on_pool(small, |pool| {
            pool.reserved.add(bytes);
            pool.segments.add(1);
        });
    }

    /// Counts what the driver has again.
    pub(crate) fn segment_gone(&mut self, small: bool, bytes: u64) {
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
