//! Contexts other than the allocator's that were destroyed, or are distrusted.

use crate::driver::{Context, DriverError};

use crate::allocator::heap::Heap;
use crate::allocator::stream::slot::{AfterFree, Holder};

impl Heap {
    /// Distrusts a context until its streams are retired: its streams are not used, and their work counts as
    /// unfinished. Returns whether this changed the state of any stream.
    pub(crate) fn distrust(&mut self, context: u64, error: DriverError) -> bool {
        let known = self.streams.distrust_of(context).is_some();
        let streams = self.streams.distrust(context, error);
        for &stream in &streams {
            self.caches.stop_asking(stream);
        }
        !known && !streams.is_empty()
    }

    /// Ends the streams of a destroyed context. They get no more work and cannot be queried; their work is complete
    /// once the allocator's own context has been waited for. The caller drops the result without the lock, because it
    /// may hold the last reference to a stream, whose destruction is a driver call.
    #[must_use]
    pub(crate) fn context_gone(&mut self, key: u64, own: &Context) -> Vec<(Context, Holder)> {
        let mut held = Vec::new();
        let gone = self.streams.iter();
        let gone: Vec<u32> = gone
            .filter(|(_, slot)| slot.context.id() == key)
            .map(|(stream, _)| stream)
            .collect();
        let mut events = self.streams.events.remove(&key).unwrap_or_default();
        for stream in gone {
            self.streams.tell(stream);
            self.streams.forget_key(stream);
            self.caches.set_fast(stream, false);
            self.caches.stop_asking(stream);
            for cache in self.caches.all().to_vec() {
                self.caches.close_batches(
                    &mut self.streams,
                    cache,
                    Some(stream),
                    &mut AfterFree::default(),
                );
            }
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
