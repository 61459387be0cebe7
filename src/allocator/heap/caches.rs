//! The heap's part of the stream caches: their pages, and the blocks that they hold back.
//!
//! All code here runs under the lock of the heap and takes the locks of stream caches inside it.

use crate::allocator::cache::stream_cache::{
    Allocated, Node, Owner, Returned, Small, StreamCache, Using,
};
use crate::allocator::cache::{HeldBack, Locked};
use crate::allocator::extent::record::{SpaceId, State as Extent};
use crate::allocator::extent::uses::{Use, Uses};
use crate::allocator::heap::Heap;
use crate::allocator::size::{GRANULE, PAGE};
use crate::allocator::stream::slot::{AfterFree, Holder};
use crate::error::Error;

impl Heap {
    // ---- pages ---------------------------------------------------------------------------------

    /// Gives a claimed page of the small arena to a stream cache.
    pub(crate) fn add_page(&mut self, id: u32, cache: &'static StreamCache) -> Result<(), Error> {
        let base = self.extents.records[id].addr;
        let Some(info) = self.caches.table.info(base) else {
            // The page follows its own stream, which has waited for the other users of the memory.
            let stream = cache.lock().slot;
            let last = self.streams.use_of_free(stream, None);
            let slot = &mut self.streams[stream];
            slot.open_uses = slot.open_uses.saturating_add(1);
            self.extents
                .release(SpaceId::Small, id, stream, Uses::One(last));
            return Err(Error::NotSupported {
                what: "device addresses of more than 49 bits",
            });
        };
        let mut inner = cache.lock();
        let stream = inner.slot;
        let hot = &mut self.extents.records[id];
        hot.state = Extent::Used;
        hot.stream = stream;
        self.caches.page_ids.insert(base, id);
        let page = inner.runs.add_page(info);
        self.caches.table.set(base, cache, page);
        Ok(())
    }

    /// Returns the wholly free pages of a stream cache to the heap, except for a given number.
    pub(crate) fn return_pages(
        &mut self,
        cache: &'static StreamCache,
        keep: u32,
        after: &mut AfterFree,
    ) -> bool {
        let (mut inner, mut any) = (cache.lock(), false);
        let stream = inner.slot;
        while let Some((info, ticket)) = inner.runs.remove_page(keep) {
            self.caches.table.clear(info);
            any = true;
            let u = self.streams.use_of_free(stream, Some(ticket));
            if let Some(id) = self.caches.page_ids.remove(&info.base) {
                self.extents.records.cold_mut(id).freed = self.frees;
                self.extents
                    .release(SpaceId::Small, id, stream, Uses::One(u));
                let strange = !self.extents.small.merge_own || self.streams.is_inactive(stream);
                if strange && self.streams.is_complete(&u) {
                    self.complete_class(SpaceId::Small, stream, usize::MAX);
                }
            }
            self.streams.count_free(&u, PAGE, after);
        }
        any
    }

    /// Returns wholly free pages of a stream cache if there are many; of a retired stream, all.
    pub(crate) fn return_surplus(&mut self, cache: &'static StreamCache, after: &mut AfterFree) {
        let keep = {
            let mut inner = cache.lock();
            match self.streams[inner.slot].holder {
                Holder::Retired => {
                    inner.take_back(false);
                    inner.runs.flush_quick();
                    Some(0)
                }
                _ => inner.pages_to_keep(),
            }
        };
        if let Some(keep) = keep {
            self.return_pages(cache, keep, after);
        }
    }

    /// Returns to the heap what the stream caches of one stream hold and do not need; true if there was anything.
    pub(crate) fn flush_caches_of(&mut self, stream: u32) -> bool {
        let caches = self.caches.of(stream).to_vec();
        let flush = |any, cache| self.flush_cache(cache) | any;
        caches.into_iter().fold(false, flush)
    }

    fn flush_cache(&mut self, cache: &'static StreamCache) -> bool {
        self.caches
            .close_batches(&mut self.streams, cache, None, &mut AfterFree::default());
        let emptied = self.empty_large_cache(cache);
        {
            let mut inner = cache.lock();
            inner.take_back(false);
            inner.runs.flush_quick();
        }
        emptied | self.return_pages(cache, 0, &mut AfterFree::default())
    }

    /// Returns to the heap what stream caches have not needed since the last call: spare pages, and everything that an
    /// unused stream cache has. A busy stream cache merges returned blocks itself when it next lacks a run. Returns the
    /// streams that contributed.
    pub(crate) fn flush_idle(&mut self) -> Vec<u32> {
        let mut givers = Vec::new();
        for cache in self.caches.all.clone() {
            let (stream, quiet, needed) = {
                let mut inner = cache.lock();
                (inner.slot, inner.was_idle(), inner.runs.take_needed_pages())
            };
            let gave = match quiet {
                true => self.flush_cache(cache),
                false => self.return_pages(cache, needed, &mut AfterFree::default()),
            };
            if gave {
                givers.push(stream);
            }
        }
        givers
    }

    /// Returns to the heap what all stream caches hold and do not need; true if there was anything.
    pub(crate) fn flush_caches(&mut self) -> bool {
        let streams: Vec<u32> = self.streams.iter().map(|(stream, _)| stream).collect();
        streams
            .into_iter()
            .fold(false, |any, stream| self.flush_caches_of(stream) | any)
    }

    /// Frees a live small block that its stream cache cannot free by itself.
    pub(crate) fn free_small(
        &mut self,
        cache: &'static StreamCache,
        block: (Node, u64),
        generation: Option<u32>,
        after: &mut AfterFree,
    ) -> bool {
        let (node, ptr) = block;
        let (live, owner) = {
            let mut inner = cache.lock();
            let Some(live) = inner.live(node, ptr, generation) else {
                return false;
            };
            inner.account_free(live);
            inner.record_free(ptr, live.requested);
            if live.using == Using::NONE {
                inner.runs.put(node, live.granules);
            } else {
                inner.hold_back(node);
                inner.waiting += 1;
            }
            (live, inner.slot)
        };
        if live.using != Using::NONE {
            let bytes = u64::from(live.granules) * GRANULE;
            let recorded = self.caches.take_uses(&mut self.streams, ptr, live.using);
            let uses: Vec<Use> = recorded
                .iter()
                .map(|r| self.streams.use_of_free(r.stream, r.ticket))
                .collect();
            for u in &uses {
                self.streams.count_free(u, bytes, after);
            }
            let held = HeldBack {
                cache,
                owner,
                uses: Uses::collect(uses),
                nodes: vec![node],
                bytes,
            };
            let held = self.guards.keep_small(ptr, held);
            self.caches.held_back.extend(held);
            self.return_held_back();
        }
        self.return_surplus(cache, after);
        true
    }

    /// Returns blocks to their stream caches once the uses by other streams are complete, or ordered before the blocks'
    /// own stream; true if there were any. The stream caches merge the blocks of batches when they next lack a run,
    /// because merging takes longer than everything else here.
    pub(crate) fn return_held_back(&mut self) -> bool {
        let streams = &self.streams;
        let over = |held: &mut HeldBack| {
            let mut uses = held.uses.as_slice().iter();
            uses.all(|u| streams.ready(held.owner, u))
        };
        let done: Vec<HeldBack> = self.caches.held_back.extract_if(.., over).collect();
        let any = !done.is_empty();
        for held in done {
            let mut uses = held.uses.as_slice().iter();
            let over = uses.all(|u| self.streams.is_complete(u));
            let batch = held.nodes.len() > 1;
            {
                let mut inner = held.cache.lock();
                inner.returned.push(Returned {
                    nodes: held.nodes,
                    bytes: held.bytes,
                    over,
                });
                inner.waiting -= 1;
                if !batch {
                    inner.take_back(false);
                }
            }
            if !batch || matches!(self.streams[held.owner].holder, Holder::Retired) {
                self.return_surplus(held.cache, &mut AfterFree::default());
            }
        }
        any
    }

    // ---- peaks --------------------------------------------------------------------------------

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
                inner.take_ignoring_peak(request)
            }
            _ => return Allocated::Stranger,
        };
        self.raise_peaks(locked);
        outcome
    }

    /// Raises the peaks to the current values, with all stream caches locked.
    pub(crate) fn raise_peaks(&mut self, locked: Vec<Locked<'_>>) {
        for block in self.caches.raise_peaks(&mut self.stats, locked) {
            self.apply_removal(block);
        }
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
}

#[cfg(all(test, feature = "sim", not(loom)))]
mod tests {
    use crate::allocator::heap::large_cache::tests::contended;

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
