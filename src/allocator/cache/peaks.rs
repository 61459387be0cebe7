//! Totals and peaks over all stream caches and the heap.

use std::sync::Arc;

use crate::allocator::cache::stream_cache::{Amounts, CachedBlock, StreamCache};
use crate::allocator::cache::{Locked, SmallTotals, StreamCaches, totals};
use crate::allocator::size::{GRANULE, PAGE};
use crate::allocator::stats::{PoolStats, Stats};

impl StreamCaches {
    /// Raises the peaks to the current values, with all stream caches locked, and divides the room below the peaks
    /// among the busy stream caches.
    ///
    /// Returns the free blocks of the large-block caches, which the heap frees: they are not part of the peak, and none
    /// of them may be allocated again without a check of the peak.
    #[must_use]
    pub(crate) fn raise_peaks(
        &mut self,
        stats: &mut Stats,
        mut locked: Vec<Locked<'_>>,
    ) -> Vec<CachedBlock> {
        let small = small_bytes(&locked);
        let (mut held_bytes, mut idle) = (0, Vec::<CachedBlock>::new());
        if self.have_large() {
            held_bytes = held(&locked)[0];
            for inner in &mut locked {
                idle.extend(std::iter::from_fn(|| inner.large_cache.remove_idle()));
            }
        }
        self.fold(stats, &mut locked);
        self.sharings += 1;
        let now = self.sharings;
        let busy: Vec<bool> = locked.iter_mut().map(|inner| inner.busy(now)).collect();
        let sharers = busy.iter().filter(|busy| **busy).count().max(1) as u64;
        let (pool, all) = (&mut stats.small.allocated, &mut stats.all.allocated);
        let large = all.current - held_bytes;
        let sum = large + small;
        pool.peak = pool.peak.max(small);
        all.peak = all.peak.max(sum);
        let mut room = (pool.peak - small).min(all.peak - sum);
        if large > 0 {
            // Half of the room is left for the next large block.
            room /= 2;
        }
        let row: Arc<[&'static StreamCache]> = (self.all.iter().zip(&busy))
            .filter(|(_, busy)| **busy)
            .map(|(cache, _)| *cache)
            .collect();
        self.limit = 0;
        for (inner, busy) in locked.iter_mut().zip(&busy) {
            let room = if *busy { room / sharers } else { 0 };
            inner.runs.accounts.allocated.set_room(room);
            self.limit += inner.runs.accounts.allocated.limit();
            inner.set_others(busy.then_some(&row));
        }
        idle
    }

    /// Merges the stream caches' own peaks into the overall peaks, and resets them.
    fn fold(&mut self, stats: &mut Stats, locked: &mut [Locked<'_>]) {
        let (small, all) = self.bounds(stats, locked);
        for (pool, bounds) in [(&mut stats.small, small), (&mut stats.all, all)] {
            [pool.requested.peak, pool.allocations.peak] = bounds;
        }
        let all = &stats.all;
        self.high = [all.requested.current, all.allocations.current];
        self.requested = 0;
        for inner in locked {
            let accounts = &mut inner.runs.accounts;
            accounts.requested.reset_peak();
            accounts.blocks.reset_peak();
            self.requested += accounts.requested.current();
        }
    }

    /// [`fold`](Self::fold) before stream caches are removed.
    pub(crate) fn fold_peaks(&mut self, stats: &mut Stats) {
        let mut locked = self.lock_caches();
        self.fold(stats, &mut locked);
    }

    /// Returns upper bounds of the requested bytes and block counts, of small blocks and of all: the largest sum of
    /// peaks between two resets of all stream caches.
    fn bounds(&self, stats: &Stats, locked: &[Locked<'_>]) -> ([u64; 2], [u64; 2]) {
        let mut own = [0; 2];
        for inner in locked {
            own[0] += inner.runs.accounts.requested.peak();
            own[1] += inner.runs.accounts.blocks.peak();
        }
        let past = |pool: &PoolStats| [pool.requested.peak, pool.allocations.peak];
        let (mut small, mut all) = (past(&stats.small), past(&stats.all));
        for at in 0..2 {
            small[at] = small[at].max(own[at]);
            all[at] = all[at].max(own[at] + self.high[at]);
        }
        (small, all)
    }

    /// Adds the counts of the stream caches to a copy of the statistics of the heap, at one instant.
    pub(crate) fn add_to(&self, stats: &mut Stats, mixed_peak: u64) {
        let locked = self.lock_caches();
        let mut totals = self.gone;
        let (mut pending, mut quick, mut free) = (0, 0, 0);
        let mut pending_peak = self.pending_peak;
        for inner in &locked {
            for (total, own) in totals.iter_mut().zip(inner.runs.accounts.totals()) {
                *total += own;
            }
            pending += inner.pending_bytes();
            pending_peak += inner.pending_peak;
            quick += u64::from(inner.runs.quick_granules()) * GRANULE;
            free += inner.free_bytes();
            let runs = inner.runs.count();
            let idle = inner.large_cache.held().blocks;
            stats.free_blocks += runs + idle;
            stats.nodes += runs;
            // All caches are locked meanwhile, so a caller that polls statistics would block them.
            if idle > 0 {
                stats.largest_free = stats.largest_free.max(inner.large_cache.largest_free());
            }
            // No run is longer than a page.
            if stats.largest_free < PAGE {
                stats.largest_free = stats.largest_free.max(inner.runs.largest_free());
            }
        }
        let current = self::totals(&locked);
        stats.free_blocks -= current[2];
        let (small, all) = self.bounds(stats, &locked);
        for (pool, [requested, blocks]) in [(&mut stats.all, all), (&mut stats.small, small)] {
            // Requested bytes of a block never exceed its size, and no block is smaller than a granule.
            pool.requested.peak = requested.min(pool.allocated.peak);
            pool.allocations.peak = blocks.min(pool.allocated.peak / GRANULE);
            for (at, counter) in pool.counted().into_iter().enumerate() {
                counter.current += current[at];
                counter.total_allocated += totals[at];
                counter.total_freed += totals[at] - current[at];
            }
            let active = &mut pool.active;
            active.current += current[0] + pending;
            active.total_allocated += totals[0];
            active.total_freed += totals[0] - current[0] - pending;
            let bound = pool.allocated.peak + pending_peak + mixed_peak;
            active.peak = if locked.is_empty() {
                active.peak
            } else {
                bound.max(active.current)
            };
        }
        let held = held(&locked);
        let mut reused = self.reused;
        for inner in &locked {
            reused += inner.large_cache.reused();
        }
        let reused = [reused.bytes, reused.requested, reused.blocks];
        for pool in [&mut stats.all, &mut stats.large] {
            for ((counter, held), reused) in pool.counted().into_iter().zip(held).zip(reused) {
                counter.current -= held;
                counter.total_allocated += reused;
                counter.total_freed += reused + held;
            }
            let active = &mut pool.active;
            active.current -= held[0];
            active.total_allocated += reused[0];
            active.total_freed += reused[0] + held[0];
        }
        free += held[0];
        stats.hits += reused[2];
        stats.hits += totals[2] - self.misses.min(totals[2]);
        stats.cache_bytes = quick + held[0];
        stats.free += free + pending;
        stats.caches = locked.len() as u64;
    }

    /// Stops the stream caches if no block is live, in graph pools either, and no call is in progress. Otherwise
    /// returns the number and bytes of live blocks.
    pub(crate) fn shut(
        &self,
        stats: &Stats,
        (pooled, pooled_bytes): (u64, u64),
        calls: u64,
    ) -> (u64, u64) {
        let mut locked = self.lock_caches();
        let small = totals(&locked);
        let all = &stats.all;
        let blocks = all.allocations.current + small[2] + pooled + calls;
        if blocks == 0 {
            for inner in &mut locked {
                inner.set_fast(false);
            }
        }
        (blocks, all.allocated.current + small[0] + pooled_bytes)
    }
}

/// Returns what the heap counts for free blocks in large-block caches.
fn held(locked: &[Locked<'_>]) -> SmallTotals {
    let mut held = Amounts::default();
    for inner in locked {
        held += inner.large_cache.held();
    }
    [held.bytes, held.requested, held.blocks]
}

fn small_bytes(locked: &[Locked<'_>]) -> u64 {
    let bytes = locked
        .iter()
        .map(|inner| inner.runs.accounts.allocated.current());
    bytes.sum()
}
