//! Streams in the heap: registration and retirement, their caches, and the memory that they share.

use crate::driver::{Context, Stream};

use crate::allocator::cache::stream_cache::{MOST_CACHES, StreamCache, thread};
use crate::allocator::extent::record::{MIXED, SpaceId};
use crate::allocator::extent::space::Space;
use crate::allocator::heap::Heap;
use crate::allocator::stream::MANY_STREAMS;
use crate::allocator::stream::slot::{Holder, StreamKey};
use crate::locks::thread_id::ThreadId;

/// Maximum number of pieces that a call completes while it has memory for its request.
const PIECES_PER_CALL: usize = 64;

impl Heap {
    /// Registers a stream that a call names, unless it is known.
    pub(crate) fn register(
        &mut self,
        key: StreamKey,
        raw: usize,
        context: Context,
        holder: Holder,
    ) -> u32 {
        if let Some(stream) = self.streams.find(key) {
            return stream;
        }
        let other_device = context.device().ordinal() != self.device;
        let stream = self.streams.add(key, raw, context, holder);
        self.streams[stream].other_device = other_device;
        self.recorder.record_stream(stream, raw);
        self.streams_changed();
        stream
    }

    /// Returns the slot of a stream, if it is known.
    pub(crate) fn known_slot(
        &mut self,
        key: StreamKey,
        raw: usize,
        kept: Option<&Stream>,
    ) -> Option<u32> {
        let stream = self.caches.find_slot(&mut self.streams, key, raw)?;
        self.streams.note_call(stream);
        if self.streams.reactivated {
            self.streams_changed();
        }
        let slot = &mut self.streams[stream];
        if slot.holder.is_callers()
            && let Some(kept) = kept
        {
            // Until now the slot was named by the stream's handle.
            let former = std::mem::replace(&mut slot.holder, Holder::Kept(kept.clone()));
            slot.former = Some(former);
            let handle = self.caches.lasting_handle(&self.streams[stream]);
            self.caches.set_handle(stream, handle);
        }
        Some(stream)
    }

    /// Returns the cache of a stream that the calling thread should use, and creates the first one.
    pub(crate) fn cache_of(&mut self, stream: u32) -> &'static StreamCache {
        match self.caches.of(stream) {
            [only] => only,
            [] => {
                let open = self.ensure_serving().is_ok();
                self.caches.add_cache(&self.streams, stream, open)
            }
            known => known[ThreadId::current().number() as usize % known.len()],
        }
    }

    /// [`cache_of`](Self::cache_of), which the thread's next call for the stream finds without the heap.
    #[inline(never)]
    pub(crate) fn find_cache(&mut self, key: StreamKey, stream: u32) -> &'static StreamCache {
        let cache = self.cache_of(stream);
        if let StreamKey::Id(key) = key {
            thread::remember(key, cache);
        }
        cache
    }

    /// Doubles the number of a stream's caches after repeated contention.
    pub(crate) fn split_cache(&mut self, stream: u32, key: StreamKey) {
        let slot = &self.streams[stream];
        if !slot.in_use || slot.key != key || !self.rules.caches() {
            return;
        }
        let open = self.ensure_serving().is_ok();
        let most = self.caches.threads.min(MOST_CACHES);
        let count = self.caches.of(stream).len();
        for _ in count..(2 * count).min(most) {
            self.caches.add_cache(&self.streams, stream, open);
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

    // ---- completion ------------------------------------------------------------------------------

    /// Removes all completed uses from all pieces.
    pub(crate) fn complete_uses(&mut self) {
        self.streams.take_advanced();
        let all: Vec<u32> = self.streams.slots().collect();
        self.complete_streams(&all, usize::MAX);
        for stream in all {
            self.recycle(stream);
        }
    }

    /// Removes completed uses from some pieces of the streams that have advanced since all of their pieces were last
    /// processed. A larger number would delay the call that observes the completion; a request that finds no memory
    /// processes the rest, see [`advanced`](crate::allocator::stream::Streams::advanced).
    pub(crate) fn complete_advanced(&mut self) {
        let advanced = self.streams.take_advanced();
        let all = self.complete_streams(&advanced, PIECES_PER_CALL);
        self.streams.put_advanced(advanced, !all);
        for stream in self.streams.next_slots() {
            self.recycle(stream);
        }
    }

    /// Completes at most `most` pieces that are pending on several streams or on one of `classes`. Returns whether all
    /// of them were processed.
    fn complete_streams(&mut self, classes: &[u32], most: usize) -> bool {
        let mut left = most;
        for id in [SpaceId::Large, SpaceId::Small] {
            left -= self.complete_class(id, MIXED, left);
            if self.extents.space(id).is_none_or(|space| space.merge_own) {
                continue;
            }
            for class in classes {
                left -= self.complete_class(id, *class, left);
            }
        }
        self.return_held_back();
        left > 0
    }

    // ---- memory shared between streams -----------------------------------------------------------

    /// Switches how free memory merges. With one stream it needs no tags and merges freely; with several streams it
    /// must not.
    pub(crate) fn streams_changed(&mut self) {
        self.streams.reactivated = false;
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
                    self.complete_class(space, class, usize::MAX);
                }
            }
        }
    }

    /// Makes the next marker of a stream cover everything that the stream may still access: live blocks, and memory
    /// freed inside its pages, which no batch counts.
    pub(crate) fn prepare_last_marker(&mut self, stream: u32) {
        self.caches.close_batches_of(&mut self.streams, stream);
        self.flush_caches_of(stream);
        let busy = self.caches.uses_of(stream) > 0;
        let slot = &mut self.streams[stream];
        if slot.live > 0 || busy {
            slot.open_uses = slot.open_uses.saturating_add(1);
        }
    }

    /// Frees the slot of a stream that nothing refers to.
    pub(crate) fn recycle(&mut self, stream: u32) {
        if !self.streams[stream].in_use {
            return;
        }
        let many = self.streams.len() > MANY_STREAMS;
        let forgettable = matches!(self.streams[stream].holder, Holder::Foreign(_)) && many;
        if forgettable && self.caches.pages_of(stream) > 0 {
            // Memory freed in its pages counts as freed from here on, which is later than its completion.
            self.flush_caches_of(stream);
            return;
        }
        let slot = &self.streams[stream];
        let quiet = slot.live == 0 && slot.calls == 0 && slot.open_uses == 0;
        let idle = quiet && slot.leaving == 0 && slot.completed + 1 >= slot.open;
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
        self.caches.drop_caches(&mut self.stats, stream);
        self.extents.release_class(stream);
        if self.streams.recycle(stream) {
            self.streams_changed();
        }
    }

    /// Ends the streams of a destroyed context. They get no more work and cannot be queried; their work is complete
    /// once the allocator's own context has been waited for. The caller drops the result without the lock, because it
    /// may hold the last reference to a stream, whose destruction is a driver call.
    #[must_use]
    pub(crate) fn end_context(&mut self, key: u64, own: &Context) -> Vec<(Context, Holder)> {
        let mut held = Vec::new();
        let gone = self.streams.iter();
        let gone: Vec<u32> = gone
            .filter(|(_, slot)| slot.context.id() == key)
            .map(|(stream, _)| stream)
            .collect();
        let mut events = self.streams.events.remove(&key).unwrap_or_default();
        for stream in gone {
            self.streams.note_call(stream);
            self.streams.forget_key(stream);
            self.caches.set_fast(stream, false);
            self.caches.stop_queries(stream);
            self.caches.close_batches_of(&mut self.streams, stream);
            self.flush_caches_of(stream);
            // All work so far is under tickets below the open one.
            drop(self.caches.close_batch(&mut self.streams, stream));
            let slot = &mut self.streams[stream];
            let context = std::mem::replace(&mut slot.context, own.clone());
            held.push((
                context,
                std::mem::replace(&mut slot.holder, Holder::Retired),
            ));
            slot.former = None;
            slot.distrusted = None;
            let markers = self.streams.take_markers_of(stream, key);
            events.extend(markers);
        }
        // Their handles were destroyed with the context, and may belong to other events by now.
        events.into_iter().for_each(std::mem::forget);
        held
    }
}

#[cfg(all(test, feature = "sim", not(loom)))]
mod tests {
    use std::sync::Arc;

    use super::PIECES_PER_CALL;
    use crate::allocator::Config;
    use crate::allocator::extent::record::COMPLETE;
    use crate::allocator::tests::{Outcome, Rig};

    /// R23: a wait or query in progress relies on the event as it was recorded then.
    #[test]
    fn an_event_in_use_is_not_recorded_again() -> Outcome {
        let rig = Rig::new(Config::new())?;
        let [a, b] = rig.streams()?;
        let engine = rig.allocator.engine();
        drop(rig.allocator.allocate(512, &b)?);
        drop(rig.allocator.allocate(12 << 20, &a)?);
        let _block = rig.allocator.allocate(12 << 20, &b)?;
        let key = rig.context.id();
        let held: Arc<_> = {
            let heap = engine.lock();
            let pool = heap.streams.events.get(&key).ok_or("no pool")?;
            Arc::clone(pool.first().ok_or("no event")?)
        };
        let mut others = Vec::new();
        while let Some(event) = engine.lock().streams.pooled_event(key) {
            assert!(!Arc::ptr_eq(&held, &event));
            others.push(event);
        }
        drop(held);
        assert!(engine.lock().streams.pooled_event(key).is_some());
        Ok(())
    }

    /// A request that finds memory completes few pieces; one that does not completes all before growth.
    #[test]
    fn completion_is_divided_among_calls() -> Outcome {
        const BLOCKS: usize = 1000;
        const BYTES: usize = 128 << 10;
        let rig = Rig::new(Config::new().limit(Some((2 * BLOCKS * BYTES) as u64)))?;
        let [a, b] = rig.streams()?;
        drop(rig.allocator.allocate(BYTES, &b)?);
        let mut blocks: Vec<_> = (0..2 * BLOCKS - 100)
            .map(|_| rig.allocator.allocate(BYTES, &a))
            .collect::<Result<_, _>>()?;
        // Every second block, so that no two pieces are adjacent.
        let mut at = 0;
        blocks.retain(|_| {
            at += 1;
            at % 2 == 0
        });
        rig.sim.complete_all();
        let pending = || {
            let heap = rig.allocator.engine().lock();
            let large = heap.extents.large.pieces();
            large
                .filter(|piece| heap.extents.records[piece.id].stream != COMPLETE)
                .count()
        };
        let before = pending();
        let block = rig.allocator.allocate(BYTES, &b)?;
        // The piece that the request takes is no longer pending either.
        let completed = before - pending();
        assert!(
            (1..=PIECES_PER_CALL + 1).contains(&completed),
            "{completed}"
        );
        let held = rig.allocator.stats().all.reserved.current;
        drop(blocks);
        rig.sim.complete_all();
        let all = (held - 2 * BYTES as u64) / (2 << 20) * (2 << 20);
        drop(block);
        rig.sim.complete_all();
        drop(rig.allocator.allocate(all as usize, &b)?);
        assert_eq!(rig.allocator.stats().all.reserved.current, held);
        rig.end()
    }
}
