//! Retirement: the last marker of a stream, and the end of its slot.
//!
//! As soon as the last marker is about to be recorded, the slot can no longer be found by the stream's name. An owner
//! of memory of the stream that submitted work looks up the name before the free
//! ([`Block::stream_retired`](crate::allocator::Block::stream_retired)). If the name is known, the last marker will
//! follow that work. If it is not, the work belongs to another slot, and is recorded there.

use std::sync::Arc;

use crate::allocator::engine::contexts;
use crate::driver::{Event, Stream, StreamKind};

use crate::allocator::cache::stream_cache::StreamCache;
use crate::allocator::engine::Engine;
use crate::allocator::heap::Heap;
use crate::allocator::stream::Streams;
use crate::allocator::stream::slot::{BACKOFF, Batch, Holder, Marker, StreamKey};
use crate::error::Error;

impl Streams {
    /// Makes the slot known by its stream's name again, unless another slot has the name by now. Returns whether it
    /// did.
    pub(crate) fn restore_name(&mut self, stream: u32) -> bool {
        let key = self[stream].key;
        let known = *self.by_key.entry(key).or_insert(stream);
        self[stream].named = known == stream;
        known == stream
    }

    /// Returns the slots of a stream whose last marker is not recorded: the slot that has its name, and those with a
    /// retirement in progress or failed.
    pub(crate) fn all_of(&self, key: StreamKey) -> Vec<u32> {
        let slots = self.iter();
        let own = slots
            .filter(|(_, slot)| slot.key == key && !matches!(slot.holder, Holder::Retired))
            .map(|(stream, _)| stream);
        own.collect()
    }

    /// Returns the slots of streams of this crate that only the heap still references.
    pub(crate) fn list_unreferenced(&self) -> Vec<(u32, StreamKey)> {
        let kept = || {
            self.iter().filter_map(|(at, slot)| match &slot.holder {
                Holder::Kept(stream) if slot.distrusted.is_none() => Some((at, slot, stream)),
                _ => None,
            })
        };
        // Two slots share a stream only after a failed retirement. Such slots are few, and streams are many.
        let left = kept().filter(|(_, slot, _)| !slot.named);
        let left: Vec<&Stream> = left.map(|(.., stream)| stream).collect();
        let is_alone = |stream: &Stream| {
            let same = |other: &Stream| other.is_clone_of(stream);
            let ours = || kept().filter(|(.., other)| same(other)).count();
            stream.holders() == 1
                || (left.iter().any(|other| same(other)) && stream.holders() <= ours())
        };
        let alone =
            kept().filter(|(.., stream)| stream.kind() == StreamKind::Owned && is_alone(stream));
        alone.map(|(at, slot, _)| (at, slot.key)).collect()
    }

    /// Returns the last marker of a stream if its event belongs to another context, which may be destroyed with its
    /// events once the stream is retired.
    fn foreign_marker(&self, stream: u32, own: u64) -> Option<Marker> {
        let last = self[stream].markers.back()?;
        (last.event.context().id() != own).then(|| last.clone())
    }

    /// Replaces the last marker of a stream, up to a bound, by an event of the allocator's own context. Returns whether
    /// that still covers everything.
    fn replace_foreign_marker(
        &mut self,
        (stream, key): (u32, StreamKey),
        bound: u64,
        event: Arc<Event>,
    ) -> bool {
        let slot = &self[stream];
        let newest = slot.in_use && slot.key == key && slot.covered();
        let same = slot.markers.back().is_some_and(|m| m.bound == bound);
        let gone = if newest && same {
            self.replace_markers(stream, event)
        } else {
            vec![event]
        };
        let done = newest && (same || self[stream].markers.is_empty());
        self.pool_events(gone);
        done
    }

    /// Replaces the event of the newest marker of a stream, and drops all older markers, which it covers. Returns the
    /// events that are no longer needed.
    #[must_use = "an event must not be destroyed under the lock"]
    pub(crate) fn replace_markers(&mut self, stream: u32, event: Arc<Event>) -> Vec<Arc<Event>> {
        let slot = &mut self.slots[stream as usize];
        let Some(last) = slot.markers.pop_back() else {
            return vec![event];
        };
        let older = slot.markers.drain(..).map(|marker| marker.event);
        let mut gone: Vec<_> = older.collect();
        self.incomplete -= gone.len();
        gone.push(last.event);
        slot.markers.push_back(Marker { event, ..last });
        gone
    }

    /// Removes an invalid marker; the frees that it covered wait for another one. The caller destroys it outside the
    /// lock. The last marker of a retired stream stays, because no other can be recorded: if only the query failed, a
    /// later query succeeds.
    #[must_use = "an event must not be destroyed under the lock"]
    pub(crate) fn void(&mut self, stream: u32, bound: u64) -> Option<Marker> {
        let slot = &mut self.slots[stream as usize];
        let at = slot.markers.partition_point(|m| m.bound < bound);
        let last = at + 1 == slot.markers.len();
        let marker = slot.markers.get_mut(at).filter(|m| m.bound == bound)?;
        if last && matches!(slot.holder, Holder::Retired) {
            marker.doubtful = true;
            slot.backoff = BACKOFF;
            return None;
        }
        let marker = slot.markers.remove(at);
        self.incomplete -= 1;
        if !slot.covered() && !matches!(slot.holder, Holder::Retired) {
            self.relist_batch(stream);
        }
        marker
    }

    /// Reverts the closing of a batch that received no marker: the next marker is due as early as if the batch had
    /// stayed open. Its ticket stays used up, because frees may already have the one after it.
    pub(crate) fn reopen_batch(&mut self, batch: &Batch) {
        let slot = &mut self.slots[batch.stream as usize];
        let retired = !slot.in_use || matches!(slot.holder, Holder::Retired);
        let covered = slot.markers.back().is_some_and(|m| m.bound >= batch.bound);
        if retired || covered || batch.bound <= slot.completed {
            return;
        }
        slot.open_uses = slot.open_uses.saturating_add(batch.uses);
        slot.open_bytes += batch.bytes;
        self.list_full(batch.stream);
    }
}

/// A retirement in progress. Meanwhile its slot is not reused, not even by the same stream if it appears again, because
/// several threads may retire one stream. If the retirement fails, the stream gets its name back.
pub(crate) struct Leaving<'a> {
    engine: &'a Engine,
    stream: u32,
}

impl<'a> Leaving<'a> {
    /// Begins a retirement, before the last marker of the stream is recorded.
    pub(crate) fn begin(engine: &'a Engine, heap: &mut Heap, stream: u32) -> Leaving<'a> {
        // Requests poll the frees that the last marker covers.
        heap.streams.note_call(stream);
        heap.streams[stream].leaving += 1;
        heap.streams.forget_key(stream);
        engine.count_retirement();
        heap.caches.set_fast(stream, false);
        heap.prepare_last_marker(stream);
        Leaving { engine, stream }
    }
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        let mut heap = self.engine.lock();
        let slot = &mut heap.streams[self.stream];
        slot.leaving -= 1;
        if matches!(slot.holder, Holder::Retired) {
            heap.recycle(self.stream);
            return;
        }
        if slot.is_unusable() {
            // No other call may use an event that the failed retirement recorded in a distrusted context.
            let context = slot.context.id();
            let events = heap.streams.take_markers_of(self.stream, context);
            heap.streams.pool_events(events);
        }
        if heap.streams[self.stream].leaving == 0 && heap.streams.restore_name(self.stream) {
            let known = matches!(heap.streams[self.stream].key, StreamKey::Id(_));
            let open = heap.ensure_serving().is_ok() && !heap.orphaned;
            heap.caches.set_fast(self.stream, known && open);
        }
    }
}

/// Returns an event of the allocator's own context that completes after an event of another context.
fn follow(engine: &Engine, event: &Event) -> Result<Arc<Event>, Error> {
    let follower = Stream::new(&engine.context).map_err(|e| engine.error(e))?;
    let own = engine.event_of(&engine.context)?;
    let queued = follower.wait(event).and_then(|()| own.record(&follower));
    // Destroying the helper stream does not cancel the work queued on it.
    match queued {
        Ok(()) => Ok(own),
        Err(error) => {
            engine.lock().streams.pool_events([own]);
            Err(engine.error_in(event.context(), error))
        }
    }
}

/// Records the last marker of a stream and forgets its handle.
///
/// The key shows whether the slot still belongs to the stream: while the lock was released, another thread may have
/// retired it, and a new stream may have taken the slot.
pub(crate) fn retire_slot(engine: &Engine, stream: u32, key: StreamKey) -> Result<(), Error> {
    let gone = |heap: &Heap| {
        let slot = &heap.streams[stream];
        !slot.in_use || slot.key != key || matches!(slot.holder, Holder::Retired)
    };
    let leaving = {
        let mut heap = engine.lock();
        if gone(&heap) {
            return Ok(());
        }
        let distrusted = heap.streams[stream].distrusted.is_some();
        let context = heap.streams[stream].context.id();
        let events = distrusted.then(|| heap.streams.events.remove(&context));
        let leaving = Leaving::begin(engine, &mut heap, stream);
        drop(heap);
        // One of these events may be the one that the driver refused.
        drop(events);
        leaving
    };
    let mut heap;
    let mut rounds = 0;
    loop {
        engine.mark(stream, key)?;
        heap = engine.lock();
        if gone(&heap) {
            break;
        }
        if heap.streams[stream].covered() {
            let Some(last) = heap.streams.foreign_marker(stream, engine.context.id()) else {
                break;
            };
            drop(heap);
            let event = follow(engine, &last.event)?;
            let bound = last.bound;
            // The event may have been found invalid meanwhile: then this drop destroys it, so it must not happen
            // under the lock.
            drop(last);
            heap = engine.lock();
            if heap
                .streams
                .replace_foreign_marker((stream, key), bound, event)
                || gone(&heap)
            {
                break;
            }
        }
        let slot = &heap.streams[stream];
        // Another thread freed memory on the stream meanwhile, or the stream is capturing.
        rounds += 1;
        if rounds == RETIREMENTS {
            return Err(Error::Capturing { stream: slot.raw });
        }
        drop(heap);
    }
    if gone(&heap) {
        return Ok(());
    }
    let slot = &mut heap.streams[stream];
    let former = std::mem::replace(&mut slot.holder, Holder::Retired);
    let before = slot.former.take();
    slot.distrusted = None;
    // Nothing refers to the stream's context any more: the last marker is an event of the allocator's own context.
    let context = std::mem::replace(&mut slot.context, engine.context.clone());
    let asked = heap.caches.stop_queries(stream);
    heap.flush_caches_of(stream);
    drop(heap);
    drop(leaving);
    asked.into_iter().for_each(StreamCache::await_queries);
    // Another thread that frees a block of the stream may be about to query or mark it. If the heap held the last
    // reference, the stream is destroyed here: a driver call, and so outside the lock.
    former.await_calls();
    before.into_iter().for_each(Holder::await_calls);
    contexts::destroy_events(engine, &context);
    Ok(())
}

/// How often the last marker of a stream is recorded again because other threads keep freeing memory of the stream.
/// After that the stream is treated as capturing, because no marker can be recorded there.
pub(crate) const RETIREMENTS: u32 = 64;
