//! The heap's part of the large-block caches: which large blocks are in them, and how they return.
//!
//! The heap does not see what a stream cache does with the blocks in its large-block cache. A caller that needs more
//! about a large block than its address takes the block out first, and a request that no ready memory can serve takes
//! out every block that is free.

#[cfg(all(test, feature = "sim", not(loom)))]
pub(crate) mod tests;

use std::sync::atomic::Ordering;

use crate::allocator::cache::stream_cache::{CachedBlock, LargeCache, StreamCache};
use crate::allocator::extent::record::SpaceId;
use crate::allocator::heap::Heap;

impl Heap {
    /// Puts a block into the large-block cache of its stream cache, if that serves requests without the heap. Returns
    /// whether it did.
    #[inline(never)]
    pub(crate) fn put_in_cache(&mut self, id: u32, cache: &'static StreamCache) -> bool {
        let (hot, cold) = (self.extents.records[id], self.extents.records.cold(id));
        if !cold.home().is_empty() {
            return false;
        }
        let (requested, origin) = (cold.requested, cold.origin);
        if self.caches.contention == 0 {
            // Another request may have cached a block since this request removed the last one, because the heap was
            // unlocked for a driver call or a hook.
            self.uncache_provisional();
        }
        let block = CachedBlock {
            id,
            generation: hot.generation,
            ptr: hot.addr,
            granules: hot.granules,
            counted: requested,
            requested,
            reuses: 0,
            origin,
        };
        let gone = {
            let mut inner = cache.lock();
            if !inner.is_fast() || inner.slot != hot.stream {
                return false;
            }
            inner.large_cache.add(block)
        };
        if self.caches.contention == 0 {
            self.caches.provisional = Some(id);
        }
        self.extents.records[id].cached = true;
        self.caches.cached.insert(id, cache);
        self.caches.in_large_caches.fetch_add(1, Ordering::Relaxed);
        if let Some(gone) = gone {
            self.apply_removal(gone);
        }
        true
    }

    /// Updates the heap for a block that was removed from its large-block cache.
    pub(crate) fn apply_removal(&mut self, block: CachedBlock) {
        self.caches.cached.remove(&block.id);
        self.caches.in_large_caches.fetch_sub(1, Ordering::Relaxed);
        self.caches
            .predictor
            .was_cached(block.granules, block.reuses);
        let hot = &mut self.extents.records[block.id];
        hot.cached = false;
        hot.generation = block.generation;
        if !block.is_live() {
            let after = self.free(block.id);
            self.caches.due.extend(after.streams());
            return;
        }
        let less = block.counted - block.requested;
        let cold = self.extents.records.cold_mut(block.id);
        (cold.requested, cold.origin) = (block.requested, block.origin);
        let small = self.extents.records[block.id].space != SpaceId::Large;
        self.stats.on_pool(small, |pool| pool.requested.sub(less));
    }

    /// Removes a block from its large-block cache, if it is in one, and frees it if it is not live.
    #[inline(never)]
    pub(crate) fn uncache(&mut self, id: u32) {
        let Some(cache) = self.caches.large_cache_of(&self.extents.records, id) else {
            return;
        };
        let block = cache.lock().large_cache.remove(id);
        if let Some(block) = block {
            self.apply_removal(block);
        }
    }

    /// Returns the live large block around an address, and removes it from its large-block cache.
    pub(crate) fn large_around(&mut self, ptr: u64) -> Option<u32> {
        let id = self.extents.lookup.at_or_below(ptr)?;
        if ptr >= self.extents.records[id].end() {
            return None;
        }
        self.uncache(id);
        (self.extents.lookup.exact(self.extents.records[id].addr) == Some(id)).then_some(id)
    }

    /// Prepares for a large request that its large-block cache could not serve: the free blocks there return to the
    /// heap, so that the request finds the memory it would find without large-block caches.
    pub(crate) fn prepare_large_request(&mut self, cache: &'static StreamCache, contended: bool) {
        if !self.rules.caches() {
            return;
        }
        self.uncache_provisional();
        if self.caches.contention > 0 {
            self.empty_large_cache(cache);
        }
        if contended {
            self.caches.contention = CONTENTION;
        } else if self.caches.contention > 0 {
            self.caches.contention -= 1;
            if self.caches.contention == 0 {
                self.clear_large_caches();
            }
        }
    }

    /// Removes the provisional block, which may stay in its large-block cache only until the next operation on the
    /// heap.
    #[inline(always)]
    pub(crate) fn uncache_provisional(&mut self) {
        if let Some(id) = self.caches.provisional {
            self.caches.provisional = None;
            self.uncache(id);
        }
    }

    /// Frees the free blocks in all large-block caches; true if there were any.
    pub(crate) fn empty_large_caches(&mut self) -> bool {
        let caches = if self.caches.have_large() {
            self.caches.all.len()
        } else {
            0
        };
        (0..caches).fold(false, |any, at| {
            self.empty_large_cache(self.caches.all[at]) | any
        })
    }

    /// Frees the free blocks in one large-block cache; true if there were any.
    pub(crate) fn empty_large_cache(&mut self, cache: &'static StreamCache) -> bool {
        self.drain_large_cache(cache, LargeCache::remove_idle)
    }

    /// Removes all blocks from all large-block caches, so that the heap's records of them are exact.
    pub(crate) fn clear_large_caches(&mut self) {
        for at in 0..self.caches.all.len() {
            self.drain_large_cache(self.caches.all[at], LargeCache::remove_any);
        }
    }

    /// Removes blocks from one large-block cache until `remove` finds none; true if there were any.
    fn drain_large_cache(
        &mut self,
        cache: &'static StreamCache,
        remove: impl Fn(&mut LargeCache) -> Option<CachedBlock>,
    ) -> bool {
        let mut any = false;
        loop {
            let block = remove(&mut cache.lock().large_cache);
            let Some(block) = block else {
                return any;
            };
            any = true;
            self.apply_removal(block);
        }
    }
}

/// Number of large requests in the heap without contention after which it counts as uncontended.
pub(crate) const CONTENTION: u32 = 256;
