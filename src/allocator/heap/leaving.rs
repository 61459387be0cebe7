//! What goes with the context of streams that is gone.

use crate::driver::Context;

use crate::allocator::heap::Heap;
use crate::allocator::stream::slot::AfterFree;
use crate::allocator::stream::slot::Holder;

impl Heap {
    /// The streams of a context get no more work, and what they were given cannot be asked for: it is
    /// complete when everything was waited for.
    pub(crate) fn context_gone(&mut self, key: u64, own: &Context) {
        let gone = self.streams.iter();
        let gone: Vec<u32> = gone
            .filter(|(_, slot)| slot.context.id() == key)
            .map(|(stream, _)| stream)
            .collect();
        let mut events = self.streams.events.remove(&key).unwrap_or_default();
        for stream in gone {
            self.streams.forget_key(stream);
            self.caches.set_fast(stream, false);
            for cache in self.caches.all().to_vec() {
                self.close_batches(cache, Some(stream), &mut AfterFree::default());
            }
            self.flush_caches_of(stream);
            // Everything up to here is under tickets below the one that is open.
            drop(self.close_batch(stream));
            let slot = &mut self.streams[stream];
            slot.context = own.clone();
            slot.holder = Holder::Retired;
            slot.former = None;
            let markers = self.streams.take_markers_of(stream, key);
            events.extend(markers);
        }
        // The handles are nobody's, or somebody else's by now.
        events.into_iter().for_each(std::mem::forget);
    }
}
