//! Large blocks that stay in hand in the large-block cache of a stream cache: how they go there and come back.

use std::sync::atomic::Ordering;

use crate::allocator::cache::stream_cache::{CachedBlock, StreamCache};
use crate::allocator::extent::invariant::{holds, same};
use crate::allocator::extent::record::State as Extent;
use crate::allocator::heap::Heap;
use crate::error::Error;

impl Heap {
    /// A block was handed out by the heap: puts it in the large-block cache of its stream cache if that may be
    /// of use. Not one for which a request had wishes: another one would get a place elsewhere. Whether it is
    /// there.
    #[inline]
    pub(crate) fn cache_handed_out(
        &mut self,
        id: u32,
        cache: &'static StreamCache,
        plain: bool,
    ) -> bool {
        let granules = self.extents.records[id].granules;
        let again = self.caches.predictor.allocated(id, granules);
        plain && (again || self.caches.contention > 0) && self.put_in_cache(id, cache)
    }

    #[inline(never)]
    pub(crate) fn put_in_cache(&mut self, id: u32, cache: &'static StreamCache) -> bool {
        let (hot, cold) = (self.extents.records[id], self.extents.records.cold(id));
        if !cold.home().is_empty() {
            return false;
        }
        let (requested, origin) = (cold.requested, cold.origin);
        if self.caches.contention == 0 {
            // Somebody else's may have come since this request took the last one off: the heap was
            // let go for a call of the driver, or of a hook.
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
            self.out_of_cache(gone);
        }
        true
    }

    /// Makes the heap right about a block that was taken out of its large-block cache.
    pub(crate) fn out_of_cache(&mut self, block: CachedBlock) {
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
        let small = self.extents.records[block.id].space
            != crate::allocator::extent::record::SpaceId::Large;
        self.stats.on_pool(small, |pool| pool.requested.sub(less));
    }

    /// Takes a block out of its large-block cache, if it lies on one: it is freed if nobody holds it.
    pub(crate) fn uncache(&mut self, id: u32) {
        let Some(cache) = self.large_cache_of(id) else {
            return;
        };
        let block = cache.lock().large_cache.remove(id);
        if let Some(block) = block {
            self.out_of_cache(block);
        }
    }

    /// The stream cache in whose large-block cache a block lies.
    pub(crate) fn large_cache_of(&self, id: u32) -> Option<&'static StreamCache> {
        if !self.extents.records[id].cached {
            return None;
        }
        self.caches.cached.get(&id).copied()
    }

    /// Frees a block that lies in a large-block cache, with a generation only that life of it, and leaves it
    /// there. Whether it was live; `None` if the heap has to free it.
    pub(crate) fn free_into_cache(&self, id: u32, generation: Option<u32>) -> Option<bool> {
        let mut inner = self.large_cache_of(id)?.lock();
        if !inner.is_fast() {
            return None;
        }
        inner.put_large(id, generation)
    }

    /// Whether a block in a large-block cache is in this life.
    pub(crate) fn is_live_in_cache(&self, id: u32, generation: u32) -> bool {
        let cache = self.large_cache_of(id);
        cache.is_some_and(|cache| {
            let inner = cache.lock();
            let block = inner.large_cache.find(id);
            block.is_some_and(|block| block.is_live() && block.generation == generation)
        })
    }

    /// The live large block around an address, out of its large-block cache.
    pub(crate) fn large_around(&mut self, ptr: u64) -> Option<u32> {
        let id = self.extents.lookup.at_or_below(ptr)?;
        if ptr >= self.extents.records[id].end() {
            return None;
        }
        self.uncache(id);
        (self.extents.lookup.exact(self.extents.records[id].addr) == Some(id)).then_some(id)
    }

    /// Frees what nobody holds in the large-block caches of one stream.
    pub(crate) fn empty_large_caches_of(&mut self, stream: u32) {
        for at in 0..self.caches.of(stream).len() {
            self.empty_large_cache(self.caches.of(stream)[at]);
        }
    }

    /// A large request that the large-block cache of its stream cache could not serve: what nobody holds there
    /// goes back, so that the request finds what it would find without large-block caches.
    pub(crate) fn pass_by_cache(&mut self, cache: &'static StreamCache, contended: bool) {
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

    /// Takes the block out of its large-block cache that was there on the condition that nothing else happens.
    #[inline]
    pub(crate) fn uncache_provisional(&mut self) {
        if let Some(id) = self.caches.provisional.take() {
            self.uncache(id);
        }
    }

    /// Frees what nobody holds in any large-block cache; true if there was anything.
    pub(crate) fn empty_large_caches(&mut self) -> bool {
        let mut any = false;
        if !self.caches.have_large() {
            return any;
        }
        for at in 0..self.caches.all().len() {
            any |= self.empty_large_cache(self.caches.all()[at]);
        }
        any
    }

    /// Frees what nobody holds in one large-block cache; true if there was anything.
    pub(crate) fn empty_large_cache(&mut self, cache: &'static StreamCache) -> bool {
        let mut any = false;
        loop {
            let block = cache.lock().large_cache.remove_idle();
            let Some(block) = block else {
                return any;
            };
            any = true;
            self.out_of_cache(block);
        }
    }

    /// Takes everything off all large-block caches: from here on the heap is right about every block.
    pub(crate) fn clear_large_caches(&mut self) {
        for at in 0..self.caches.all().len() {
            let cache = self.caches.all()[at];
            loop {
                let block = cache.lock().large_cache.remove_any();
                let Some(block) = block else {
                    break;
                };
                self.out_of_cache(block);
            }
        }
    }

    /// Every block in a large-block cache is known to the heap, and none else.
    pub(crate) fn check_large_caches(&self) -> Result<(), Error> {
        let mut known = 0u64;
        for cache in self.caches.all() {
            let inner = cache.lock();
            inner.large_cache.check()?;
            for block in inner.large_cache.blocks() {
                known += 1;
                let provisional = self.caches.provisional == Some(block.id);
                holds(
                    "without a contention there is one block in a large-block cache at most",
                    provisional || self.caches.contention > 0,
                )?;
                let (hot, cold) = (
                    &self.extents.records[block.id],
                    self.extents.records.cold(block.id),
                );
                let here = self.caches.cached.get(&block.id);
                let here = here.is_some_and(|known| std::ptr::eq(*known, *cache));
                holds(
                    "a block in a large-block cache is known there",
                    hot.cached && here,
                )?;
                holds(
                    "a block in a large-block cache is in use for the heap",
                    hot.state == Extent::Used && hot.stream == inner.slot,
                )?;
                holds(
                    "nobody else uses a block in a large-block cache",
                    cold.recorded().is_empty(),
                )?;
                same(
                    "address of a block in a large-block cache",
                    block.ptr,
                    hot.addr,
                )?;
                same(
                    "length of a block in a large-block cache",
                    block.granules,
                    hot.granules,
                )?;
                same(
                    "bytes asked for in a large-block cache",
                    block.counted,
                    cold.requested,
                )?;
                holds(
                    "a block in a large-block cache asks for no more than is counted",
                    block.requested <= block.counted,
                )?;
            }
        }
        let marked = self
            .extents
            .records
            .iter()
            .filter(|(_, hot)| hot.cached)
            .count() as u64;
        let in_large_caches = self.caches.in_large_caches.load(Ordering::Relaxed);
        same(
            "blocks in large-block caches, as told to all",
            known,
            in_large_caches,
        )?;
        same("blocks in large-block caches", known, marked)
    }
}

/// Large requests in the heap after which nobody waits for them any more, if nobody did meanwhile.
pub(crate) const CONTENTION: u32 = 256;
