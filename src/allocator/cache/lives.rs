//! How stream caches come and go, and the handles by which calls find them.

use std::sync::Arc;

use crate::allocator::cache::StreamCaches;
use crate::allocator::cache::stream_cache::{StreamCache, StreamCachePool};
use crate::allocator::stats::Stats;
use crate::allocator::stream::Streams;
use crate::allocator::stream::slot::{Holder, LEGACY, Slot, StreamKey};

static POOL: StreamCachePool = StreamCachePool::new();

/// Drops the rings that stream caches without a stream have kept from a recording.
pub(crate) fn clear_waiting_taps() {
    POOL.clear_taps();
}

impl StreamCaches {
    /// Adds a cache to a stream; with `open`, it may serve requests without the heap.
    pub(crate) fn add_cache(
        &mut self,
        streams: &Streams,
        stream: u32,
        open: bool,
    ) -> &'static StreamCache {
        let cache = POOL.take();
        cache.set_handle(self.lasting_handle(&streams[stream]));
        {
            let slot = &streams[stream];
            let mut inner = cache.lock();
            inner.owner = self.owner.upgrade();
            if let Some(owner) = &inner.owner {
                cache.set_owner(owner);
            }
            inner.allocator = self.id;
            inner.key = slot.key.number();
            inner.slot = stream;
            inner
                .event_writer
                .set_whose((stream, slot.raw as u64), self.id);
            inner.raw = slot.handle_to_query();
            inner.runs.set_ticket(slot.open);
            inner.set_fast(open && slot.named && matches!(slot.key, StreamKey::Id(_)));
        }
        self.add(stream, cache);
        cache
    }

    /// Returns the cache that keeps the allocator alive for blocks of graph pools. It serves no stream.
    pub(crate) fn graph_home(&mut self) -> &'static StreamCache {
        let home = self.graph_home.unwrap_or_else(|| self.idle_cache());
        self.graph_home = Some(home);
        home
    }

    fn idle_cache(&self) -> &'static StreamCache {
        let cache = POOL.take();
        let mut inner = cache.lock();
        inner.owner = self.owner.upgrade();
        if let Some(owner) = &inner.owner {
            cache.set_owner(owner);
        }
        inner.set_fast(false);
        drop(inner);
        cache
    }

    /// Returns the handle of a stream if it identifies that stream until it is retired; otherwise 0.
    pub(crate) fn lasting_handle(&self, slot: &Slot) -> usize {
        match (slot.key, self.legacy) {
            (StreamKey::Id(key), Some(legacy)) if key == legacy && slot.holder.is_lasting() => {
                LEGACY
            }
            _ => slot.lasting_handle(),
        }
    }

    /// Returns the cache of graph pools; none of their blocks is live.
    pub(crate) fn drop_graph_home(&mut self) {
        if let Some(cache) = self.graph_home.take() {
            POOL.give_back(cache);
        }
    }

    /// Returns the stream caches of a stream; no block in them is live or held back.
    pub(crate) fn drop_caches(&mut self, stats: &mut Stats, stream: u32) {
        self.fold_peaks(stats);
        for cache in self.remove(stream) {
            POOL.give_back(cache);
        }
    }

    /// Returns the slot that a call finds by a stream's name, also if the stream was registered by its handle alone
    /// during a capture. Where streams may be destroyed without being retired, such a handle may belong to another
    /// stream by now.
    pub(crate) fn find_slot(
        &self,
        streams: &mut Streams,
        key: StreamKey,
        raw: usize,
    ) -> Option<u32> {
        let by_handle = StreamKey::Handle(raw);
        let known = streams.find(key);
        if known.is_some() || key == by_handle || streams.unretired {
            return known;
        }
        let stream = streams.find(by_handle)?;
        if !self.of(stream).is_empty() {
            return None;
        }
        streams.rename(stream, key);
        Some(stream)
    }

    /// Records the caller's promise that the handle of a stream stays valid until it is retired.
    pub(crate) fn keep_handle(&self, streams: &mut Streams, stream: u32) {
        let slot = &mut streams[stream];
        if let Holder::Foreign(token) = &slot.holder {
            slot.holder = Holder::Adopted(Arc::clone(token));
            streams.list_full(stream);
            self.set_handle(stream, self.lasting_handle(&streams[stream]));
        }
    }
}
