//! Which streams there are, as far as memory depends on it: coming, going, and what is shared between
//! them.

use crate::driver::Context;

use crate::allocator::extent::record::SpaceId;
use crate::allocator::extent::space::Space;
use crate::allocator::heap::Heap;
use crate::allocator::stream::slot::AfterFree;
use crate::allocator::stream::slot::{Holder, StreamKey};

/// Idle streams of the caller are forgotten above this number of known streams.
const MANY_STREAMS: usize = 64;

impl Heap {
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
        self.streams_changed();
        stream
    }

    /// With one stream, memory needs no tags to be told apart and merges freely; with several it
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
            // Memory that was never used, or not for long, is everybody's from now on.
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

    /// Makes the next marker of a stream cover everything that it may still touch: live blocks, and
    /// what was freed inside its pages, which no batch counts.
    pub(crate) fn prepare_last_marker(&mut self, stream: u32) {
        for cache in self.caches.all().to_vec() {
            self.close_batches(cache, Some(stream), &mut AfterFree::default());
        }
        self.flush_caches_of(stream);
        let busy = self.caches.uses_of(stream) > 0;
        let slot = &mut self.streams[stream];
        if slot.live > 0 || busy {
            slot.open_uses = slot.open_uses.saturating_add(1);
        }
    }

    /// Gives back the slot of a stream that nothing refers to.
    pub(crate) fn recycle(&mut self, stream: u32) {
        let many = self.streams.len() > MANY_STREAMS;
        let forgettable = matches!(self.streams[stream].holder, Holder::Foreign(_)) && many;
        if forgettable && self.caches.pages_of(stream) > 0 {
            // What was freed in its pages is counted from here on: later, when it is complete.
            self.flush_caches_of(stream);
            return;
        }
        let slot = &self.streams[stream];
        let quiet = slot.live == 0 && slot.calls == 0 && slot.open_uses == 0;
        let idle = slot.in_use && quiet && slot.completed + 1 >= slot.open;
        let forget = match slot.holder {
            Holder::Retired => true,
            // A caller's stream that comes again is simply registered again.
            Holder::Foreign(_) => {
                (many || !slot.named) && slot.leaving == 0 && !slot.holder.is_touched()
            }
            Holder::Kept(_) | Holder::Adopted(_) => false,
        };
        if !idle || !forget {
            return;
        }
        // From here on nobody allocates on it without a look at the heap.
        self.caches.set_fast(stream, false);
        self.flush_caches_of(stream);
        let slot = &self.streams[stream];
        let drained = slot.open_uses == 0 && slot.completed + 1 >= slot.open;
        if !drained || self.caches.uses_of(stream) > 0 {
            let slot = &self.streams[stream];
            let fast = !self.closed && slot.named;
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
