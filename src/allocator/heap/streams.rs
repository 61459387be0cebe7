//! Streams in the heap: registration and retirement, their caches, and the memory that they share.

use crate::driver::{Context, Device};

use crate::allocator::cache::stream_cache::{MOST_CACHES, StreamCache, StreamCachePool};
use crate::allocator::extent::record::{COMPLETE, SpaceId};
use crate::allocator::extent::space::Space;
use crate::allocator::heap::Heap;
use crate::allocator::stream::MANY_STREAMS;
use crate::allocator::stream::slot::{AfterFree, Holder, LEGACY, StreamKey};
use crate::error::Error;
use crate::locks::thread_id::ThreadId;

static POOL: StreamCachePool = StreamCachePool::new();

/// Drops the rings that stream caches without a stream have kept from a recording.
pub(crate) fn clear_waiting_taps() {
    POOL.clear_taps();
}

impl Heap {
    /// Registers a stream that a call names, unless it is known.
    pub(crate) fn adopt(
        &mut self,
        key: StreamKey,
        raw: usize,
        context: Context,
        holder: Holder,
    ) -> u32 {
        if let Some(stream) = self.streams.find(key) {
            return stream;
        }
        let stream = self.streams.add(key, raw, context, holder);
        self.recorder.record_stream(stream, raw);
        self.streams_changed();
        stream
    }

    /// Whether the stream of a block was retired, or is about to be. Blocks of graph pools have no stream here.
    pub(crate) fn lost_its_name(&self, stream: u32) -> bool {
        stream != COMPLETE && !self.streams[stream].named
    }

    /// Checks that a stream belongs to the allocator's device.
    pub(crate) fn same_device(&self, device: &Device, stream: u32) -> Result<(), Error> {
        let other = self.streams[stream].context.device();
        if other.ordinal() == device.ordinal() {
            return Ok(());
        }
        Err(Error::WrongDevice {
            expected: device.ordinal(),
            found: other.ordinal(),
        })
    }

    /// Returns the cache of a stream that the calling thread should use, and creates the first one.
    pub(crate) fn cache_of(&mut self, stream: u32) -> &'static StreamCache {
        let known = self.caches.of(stream);
        match known.len() {
            0 => self.add_cache(stream),
            count => known[ThreadId::current().number() as usize % count],
        }
    }

    /// Returns a cache that keeps the allocator alive and serves no stream.
    pub(crate) fn idle_cache(&self) -> &'static StreamCache {
        let cache = POOL.take();
        let mut inner = cache.lock();
        inner.owner = self.caches.owner.upgrade();
        if let Some(owner) = &inner.owner {
            cache.set_owner(owner);
        }
        inner.set_fast(false);
        drop(inner);
        cache
    }

    /// Returns the handle of a stream if it identifies that stream until it is retired; otherwise 0.
    pub(crate) fn lasting_handle(&self, stream: u32) -> usize {
        let slot = &self.streams[stream];
        match (slot.key, self.caches.legacy) {
            (StreamKey::Id(key), Some(legacy)) if key == legacy && slot.holder.is_lasting() => {
                LEGACY
            }
            _ => slot.lasting_handle(),
        }
    }

    fn add_cache(&mut self, stream: u32) -> &'static StreamCache {
        let cache = POOL.take();
        cache.set_handle(self.lasting_handle(stream));
        {
            let slot = &self.streams[stream];
            let mut inner = cache.lock();
            inner.owner = self.caches.owner.upgrade();
            if let Some(owner) = &inner.owner {
                cache.set_owner(owner);
            }
            inner.allocator = self.caches.id;
            inner.key = slot.key.number();
            inner.slot = stream;
            inner
                .tap
                .set_whose((stream, slot.raw as u64), self.caches.id);
            inner.raw = slot.handle_to_ask();
            inner.runs.set_ticket(slot.open);
            inner.set_fast(
                self.ensure_serving().is_ok() && slot.named && matches!(slot.key, StreamKey::Id(_)),
            );
        }
        self.caches.add(stream, cache);
        cache
    }

    /// Doubles the number of a stream's caches after repeated contention.
    pub(crate) fn split_cache(&mut self, stream: u32, key: StreamKey) {
        let slot = &self.streams[stream];
        if !slot.in_use || slot.key != key || !self.rules.caches() {
            return;
        }
        let most = self.caches.threads.min(MOST_CACHES);
        let count = self.caches.of(stream).len();
        for _ in count..(2 * count).min(most) {
            self.add_cache(stream);
        }
    }

    /// Lets the stream caches of all streams that may get work serve requests without the heap.
    pub(crate) fn open_caches(&mut self) {
        let open = self.ensure_serving().is_ok() && !self.orphaned;
        for (stream, slot) in self.streams.iter() {
            let known = matches!(slot.key, StreamKey::Id(_));
            self.caches.set_fast(stream, open && known && slot.named);
        }
    }

    /// Sets whether the allocator has no handle left.
    pub(crate) fn set_orphaned(&mut self, orphaned: bool) {
        self.orphaned = orphaned;
        self.open_caches();
        if orphaned {
            // From here on every free enters the heap: the last one closes it.
            self.empty_large_caches();
        }
    }

    /// Returns the cache of graph pools; none of their blocks is live.
    pub(crate) fn drop_graph_home(&mut self) {
        if let Some(cache) = self.caches.graph_home.take() {
            POOL.give_back(cache);
        }
    }

    /// Returns the stream caches of a stream; no block in them is live or held back.
    pub(crate) fn drop_caches(&mut self, stream: u32) {
        self.fold_peaks();
        for cache in self.caches.remove(stream) {
            POOL.give_back(cache);
        }
    }

    // ---- memory shared between streams -----------------------------------------------------------

    /// Switches how free memory merges. With one stream it needs no tags and merges freely; with several streams it
    /// must not.
    pub(crate) fn streams_changed(&mut self) {
        self.streams.woken = false;
        self.stats.streams = self.streams.len() as u64;
        if !self.rules.maps() {
            return;
        }
        let single = !self.streams.several();
        for space in [SpaceId::Large, SpaceId::Small] {
            let (space, records) = self.extents.parts(space);
            if space.merge_own != single {
                space.merge_own = single;
                if single {
                    let classes: Vec<u32> = space.pending_streams().collect();
                    for class in classes {
                        space.recoalesce(records, class);
                    }
                }
            }
        }
        if !single {
            // Memory that was never used, or not for long, becomes available to all streams.
            for space in [SpaceId::Large, SpaceId::Small] {
                let classes: Vec<u32> = self
                    .extents
                    .space(space)
                    .into_iter()
                    .flat_map(Space::pending_streams)
                    .collect();
                for class in classes {
                    self.complete_class(space, class);
                }
            }
        }
    }

    /// Makes the next marker of a stream cover everything that the stream may still access: live blocks, and memory
    /// freed inside its pages, which no batch counts.
    pub(crate) fn prepare_last_marker(&mut self, stream: u32) {
        for cache in self.caches.all().to_vec() {
            self.caches.close_batches(
                &mut self.streams,
                cache,
                Some(stream),
                &mut AfterFree::default(),
            );
        }
        self.flush_caches_of(stream);
        let busy = self.caches.uses_of(stream) > 0;
        let slot = &mut self.streams[stream];
        if slot.live > 0 || busy {
            slot.open_uses = slot.open_uses.saturating_add(1);
        }
    }

    /// Frees the slot of a stream that nothing refers to.
    pub(crate) fn recycle(&mut self, stream: u32) {
        let many = self.streams.len() > MANY_STREAMS;
        let forgettable = matches!(self.streams[stream].holder, Holder::Foreign(_)) && many;
        if forgettable && self.caches.pages_of(stream) > 0 {
            // Memory freed in its pages counts as freed from here on, which is later than its completion.
            self.flush_caches_of(stream);
            return;
        }
        let slot = &self.streams[stream];
        let quiet = slot.live == 0 && slot.calls == 0 && slot.open_uses == 0;
        let idle = slot.in_use && quiet && slot.leaving == 0 && slot.completed + 1 >= slot.open;
        let forget = match slot.holder {
            Holder::Retired => true,
            // A stream of the caller that appears again is registered again.
            Holder::Foreign(_) => {
                let goes_on = slot.distrusted.is_some() || slot.holder.is_touched();
                (many || !slot.named) && !goes_on
            }
            Holder::Kept(_) | Holder::Adopted(_) => false,
        };
        if !idle || !forget {
            return;
        }
        // From here on allocations on it enter the heap.
        self.caches.set_fast(stream, false);
        self.flush_caches_of(stream);
        let slot = &self.streams[stream];
        let drained = slot.open_uses == 0 && slot.completed + 1 >= slot.open;
        if !drained || self.caches.uses_of(stream) > 0 {
            let slot = &self.streams[stream];
            let fast = self.ensure_serving().is_ok() && slot.named;
            self.caches
                .set_fast(stream, fast && matches!(slot.key, StreamKey::Id(_)));
            return;
        }
        self.streams[stream].holder = Holder::Retired;
        self.drop_caches(stream);
        self.extents.release_class(stream);
        if self.streams.recycle(stream) {
            self.streams_changed();
        }
    }
}
