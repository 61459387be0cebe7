//! Small blocks that other streams use.

use crate::allocator::cache::stream_cache::{Run, StreamCache, Using};
use crate::allocator::cache::{HeldBack, StreamCaches};
use crate::allocator::extent::record::{Recorded, Records, add_recorded};
use crate::allocator::extent::uses::Uses;
use crate::allocator::stream::Streams;
use crate::allocator::stream::slot::{AfterFree, Batch, StreamKey};

impl StreamCaches {
    /// Returns the stream cache whose large-block cache holds a block.
    pub(crate) fn large_cache_of(
        &self,
        records: &Records,
        id: u32,
    ) -> Option<&'static StreamCache> {
        if !records[id].cached {
            return None;
        }
        self.cached.get(&id).copied()
    }

    /// Frees a block in a large-block cache and keeps it there; with a generation, only if the block still has it.
    /// Returns whether the block was live; `None` if the heap has to free it.
    pub(crate) fn free_large(
        &self,
        records: &Records,
        id: u32,
        generation: Option<u32>,
    ) -> Option<bool> {
        let mut inner = self.large_cache_of(records, id)?.lock();
        if !inner.is_fast() {
            return None;
        }
        inner.put_large(id, generation)
    }

    /// Whether a block in a large-block cache is live and has this generation.
    pub(crate) fn is_live_large(&self, records: &Records, (id, generation): (u32, u32)) -> bool {
        let cache = self.large_cache_of(records, id);
        cache.is_some_and(|cache| {
            let inner = cache.lock();
            let block = inner.large_cache.find(id);
            block.is_some_and(|block| block.is_live() && block.generation == generation)
        })
    }

    /// Takes the due markers for blocks that left the large-block caches, in a call that names a stream. For other
    /// streams it takes only markers of those that the allocator keeps alive: a stream may have been destroyed since
    /// the free into the large-block cache, and its handle reused. The next marker of such a stream covers that free
    /// too.
    pub(crate) fn take_due(&mut self, streams: &Streams, named: u32) -> Vec<(u32, StreamKey)> {
        let mut due = std::mem::take(&mut self.due);
        due.retain(|(stream, _)| *stream == named || streams[*stream].holder.is_lasting());
        due
    }

    /// Records a use by another stream on the live small block around an address. False if there is none.
    pub(crate) fn record_use(&mut self, streams: &mut Streams, ptr: u64, new: Recorded) -> bool {
        match self.small_around(ptr) {
            Some((_, _, owner)) if owner == new.stream => true,
            Some((cache, run, _)) => self.track_uses(streams, cache, &run, Some(new)),
            None => false,
        }
    }

    /// Moves the uses recorded on a live small block into the heap, so that its free enters the heap, and adds a use.
    /// False if the block is no longer live.
    pub(crate) fn track_uses(
        &mut self,
        streams: &mut Streams,
        cache: &'static StreamCache,
        run: &Run,
        new: Option<Recorded>,
    ) -> bool {
        let Some(using) = cache.lock().leave_to_heap(run.node, run.ptr) else {
            return false;
        };
        let mut known = self.take_uses(streams, run.ptr, using);
        if let Some(new) = new {
            add_recorded(&mut known, new);
        }
        for one in &known {
            streams[one.stream].live += 1;
        }
        self.recorded.insert(run.ptr, known);
        true
    }

    /// Takes the recorded uses of a live small block from wherever they are stored.
    pub(crate) fn take_uses(
        &mut self,
        streams: &mut Streams,
        ptr: u64,
        using: Using,
    ) -> Vec<Recorded> {
        if let Some(stream) = using.slot() {
            self.uncount_recorded(stream, 1);
            return vec![Recorded {
                stream,
                ticket: None,
            }];
        }
        let known = self.recorded.remove(&ptr).unwrap_or_default();
        for one in &known {
            streams[one.stream].live -= 1;
        }
        known
    }

    /// Closes the open batch of a stream, in its stream caches too: their later frees get the next ticket, before any
    /// event is recorded for the batch.
    pub(crate) fn close_batch(&self, streams: &mut Streams, stream: u32) -> Batch {
        let batch = streams.close_batch(stream);
        self.set_ticket(stream, streams[stream].open);
        batch
    }

    /// Closes the open batches of a stream cache, or only that of one other stream in it.
    pub(crate) fn close_batches(
        &mut self,
        streams: &mut Streams,
        cache: &'static StreamCache,
        stream: Option<u32>,
        after: &mut AfterFree,
    ) -> bool {
        let (owner, batches) = {
            let mut inner = cache.lock();
            (inner.slot, inner.close_batches(stream))
        };
        let any = !batches.is_empty();
        for batch in batches {
            let u = streams.use_of_free(batch.stream, None);
            self.uncount_recorded(batch.stream, batch.nodes.len() as i64);
            streams.count_free(&u, batch.bytes, after);
            self.held_back.push(HeldBack {
                cache,
                owner,
                uses: Uses::One(u),
                nodes: batch.nodes,
                bytes: batch.bytes,
            });
        }
        any
    }

    /// Closes the open batches of blocks that a stream used, in all stream caches.
    pub(crate) fn close_batches_of(&mut self, streams: &mut Streams, stream: u32) {
        for cache in self.all.clone() {
            self.close_batches(streams, cache, Some(stream), &mut AfterFree::default());
        }
    }
}
