//! Totals and peaks over all stream caches and the heap.

use std::sync::Arc;

use crate::allocator::cache::stream_cache::{
    Allocated, Amounts, CachedBlock, Owner, Small, StreamCache,
};
use crate::allocator::cache::{Locked, SmallTotals, totals};
use crate::allocator::heap::Heap;
use crate::allocator::size::{GRANULE, PAGE};
use crate::allocator::stats::{PoolStats, Stats};

impl Heap {
    /// Takes a small request that may raise a peak. With `owner`, succeeds only if the stream cache still serves that
    /// owner without the heap.
    pub(crate) fn take_at_peak(
        &mut self,
        cache: &'static StreamCache,
        request: Small,
        owner: Option<Owner>,
    ) -> Allocated {
        let mut locked = self.caches.lock_caches();
        let at = self.caches.all.iter().position(|f| std::ptr::eq(*f, cache));
        let outcome = match at.and_then(|at| locked.get_mut(at)) {
            Some(inner) if owner.is_none_or(|owner| inner.serves(owner)) => {
                inner.take_beyond(request)
            }
            _ => return Allocated::Stranger,
        };
        self.raise_peaks(locked);
        outcome
    }

    /// Raises the peaks to the current values, with all stream caches locked, and divides the room below the peaks
    /// among the busy stream caches.
    ///
    /// Free blocks leave the large-block caches: they are not part of the peak, and none of them may be allocated again
    /// without a check of the peak.
    pub(crate) fn raise_peaks(&mut self, mut locked: Vec<Locked<'_>>) {
        let small = small_bytes(&locked);
        let (mut held_bytes, mut idle) = (0, Vec::<CachedBlock>::new());
        if self.caches.have_large() {
            held_bytes = held(&locked)[0];
            for inner in &mut locked {
                idle.extend(std::iter::from_fn(|| inner.large_cache.remove_idle()));
            }
        }
        self.fold(&mut locked);
        self.caches.sharings += 1;
        let now = self.caches.sharings;
        let busy: Vec<bool> = locked.iter_mut().map(|inner| inner.busy(now)).collect();
        let sharers = busy.iter().filter(|busy| **busy).count().max(1) as u64;
        let (pool, all) = (
            &mut self.stats.small.allocated,
            &mut self.stats.all.allocated,
        );
        let large = all.current - held_bytes;
        let sum = large + small;
        pool.peak = pool.peak.max(small);
        all.peak = all.peak.max(sum);
        let mut room = (pool.peak - small).min(all.peak - sum);
        if large > 0 {
            // The other half is for the next large block.
            room /= 2;
        }
        let row: Arc<[&'static StreamCache]> = (self.caches.all.iter().zip(&busy))
            .filter(|(_, busy)| **busy)
            .map(|(cache, _)| *cache)
            .collect();
        self.caches.limit = 0;
        for (inner, busy) in locked.iter_mut().zip(&busy) {
            let room = if *busy { room / sharers } else { 0 };
            inner.runs.accounts.allocated.set_room(room);
            self.caches.limit += inner.runs.accounts.allocated.limit();
            inner.set_others(busy.then_some(&row));
        }
        drop(locked);
        for block in idle {
            self.out_of_cache(block);
        }
    }

    /// Merges the stream caches' own peaks into the overall peaks, and resets them.
    fn fold(&mut self, locked: &mut [Locked<'_>]) {
        let (small, all) = self.bounds(locked);
        for (pool, bounds) in [(&mut self.stats.small, small), (&mut self.stats.all, all)] {
            [pool.requested.peak, pool.allocations.peak] = bounds;
        }
        let all = &self.stats.all;
        self.caches.high = [all.requested.current, all.allocations.current];
        self.caches.requested = 0;
        for inner in locked {
            let accounts = &mut inner.runs.accounts;
            accounts.requested.reset_peak();
            accounts.blocks.reset_peak();
            self.caches.requested += accounts.requested.current();
        }
    }

    /// [`fold`](Self::fold) before stream caches are removed.
    pub(crate) fn fold_peaks(&mut self) {
        let mut locked = self.caches.lock_caches();
        self.fold(&mut locked);
    }

    /// Returns upper bounds of the requested bytes and block counts, of small blocks and of all: the largest sum of
    /// peaks between two resets of all stream caches.
    fn bounds(&self, locked: &[Locked<'_>]) -> ([u64; 2], [u64; 2]) {
        let mut own = [0; 2];
        for inner in locked {
            own[0] += inner.runs.accounts.requested.peak();
            own[1] += inner.runs.accounts.blocks.peak();
        }
        let past = |pool: &PoolStats| [pool.requested.peak, pool.allocations.peak];
        let (mut small, mut all) = (past(&self.stats.small), past(&self.stats.all));
        for at in 0..2 {
            small[at] = small[at].max(own[at]);
            all[at] = all[at].max(own[at] + self.caches.high[at]);
        }
        (small, all)
    }

    /// Adds the counts of the stream caches to a copy of the heap's own statistics, at one instant.
    pub(crate) fn add_caches(&self, stats: &mut Stats) {
        let locked = self.caches.lock_caches();
        let mut totals = self.caches.gone;
        let (mut pending, mut quick, mut free) = (0, 0, 0);
        let mut pending_peak = self.caches.pending_peak;
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
        let (small, all) = self.bounds(&locked);
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
            let bound = pool.allocated.peak + pending_peak + self.mixed_peak;
            active.peak = if locked.is_empty() {
                active.peak
            } else {
                bound.max(active.current)
            };
        }
        let held = held(&locked);
        let mut reused = self.caches.reused;
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
        stats.hits += totals[2] - self.caches.misses.min(totals[2]);
        stats.cache_bytes = quick + held[0];
        stats.free += free + pending;
        stats.caches = locked.len() as u64;
    }

    /// Sets the peaks to the current values.
    pub(crate) fn reset_peaks(&mut self) {
        self.empty_large_caches();
        let mut locked = self.caches.lock_caches();
        self.stats.reset_peaks();
        self.mixed_peak = self.stats.all.active.current - self.stats.all.allocated.current;
        self.caches.pending_peak = 0;
        for inner in &mut locked {
            inner.pending_peak = inner.pending_bytes();
            inner.runs.accounts.requested.reset_peak();
            inner.runs.accounts.blocks.reset_peak();
        }
        let all = &self.stats.all;
        self.caches.high = [all.requested.current, all.allocations.current];
        self.raise_peaks(locked);
    }

    /// Stops the stream caches if no block is live and no call is in progress. Otherwise returns the number and bytes
    /// of live blocks.
    pub(crate) fn shut(&mut self, calls: u64) -> (u64, u64) {
        let mut locked = self.caches.lock_caches();
        let small = totals(&locked);
        let all = &self.stats.all;
        let (pooled, pooled_bytes) = self.graphs.live_totals();
        let blocks = all.allocations.current + small[2] + pooled + calls;
        if blocks == 0 {
            for inner in &mut locked {
                inner.set_fast(false);
            }
        }
        (blocks, all.allocated.current + small[0] + pooled_bytes)
    }

    /// Returns the number and bytes of live blocks, small ones included.
    pub(crate) fn live_totals(&mut self) -> (u64, u64) {
        let small = self.caches.small_totals();
        let held = self.caches.idle_in_large_caches();
        let all = &self.stats.all;
        (
            all.allocations.current + small[2] - held.blocks,
            all.allocated.current + small[0] - held.bytes,
        )
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

#[cfg(all(test, feature = "sim", not(loom)))]
mod tests {
    use crate::allocator::engine::large_cache::tests::contended;

    /// Some threads free blocks into large-block caches and allocate them again while another thread raises the peaks.
    #[test]
    fn s1_19_a_cached_block_is_not_above_the_peak() {
        contended(|allocator, [a, _]| {
            const BYTES: usize = 3 << 20;
            drop(allocator.allocate(BYTES, a).unwrap());
            {
                let mut heap = allocator.engine().lock();
                assert_eq!(heap.caches.idle_in_large_caches().blocks, 1);
                heap.stats.all.allocated.peak = 0;
                let locked = heap.caches.lock_caches();
                heap.raise_peaks(locked);
                assert_eq!(heap.stats.all.allocated.peak, 0);
            }
            allocator.check().unwrap();
            let block = allocator.allocate(BYTES, a).unwrap();
            let all = allocator.stats().all.allocated;
            assert_eq!((all.current, all.peak), (BYTES as u64, BYTES as u64));
            drop(block);
        });
    }
}
