//! Large requests served from ready memory before reclaim begins, and frees while only one stream is active.
//!
//! Most requests end here: they need neither the driver nor a step of reclaim.

use crate::allocator::cache::grant::Grant;
use crate::allocator::cache::stream_cache::thread;
use crate::allocator::extent::record::{Hot, SpaceId, State as Extent};
use crate::allocator::extent::uses::Use;
use crate::allocator::heap::Heap;
use crate::allocator::heap::request::Checked;
use crate::allocator::stream::slot::{Holder, StreamKey};
use crate::driver::Device;

impl Heap {
    /// Takes ready memory for a large request, whose stream is given by its key and, if the caller has one, an object
    /// that can keep it alive. Returns `None` if any other step has to come first; then nothing has changed that
    /// reclaim would not change.
    pub(crate) fn take_ready(
        &mut self,
        device: &Device,
        (key, has_object): (StreamKey, bool),
        request: &Checked,
    ) -> Option<Grant> {
        let plain = self.rules.caches() && request.is_plain() && request.small().is_none();
        if !plain || self.caches.contention > 0 {
            return None;
        }
        let stream = self.streams.find_again(key)?;
        let slot = &self.streams[stream];
        let renamed = slot.holder.is_callers() && has_object;
        if slot.resting || renamed || slot.context.device().ordinal() != device.ordinal() {
            return None;
        }
        let several = self.streams.several();
        let near = several && self.is_near();
        self.uncache_provisional();
        let nothing_to_ask = match several {
            true => !self.streams.unretired && self.streams.nothing_to_ask(stream, near),
            false => self.extents.large.merge_own,
        };
        if !nothing_to_ask || !self.caches.due.is_empty() {
            return None;
        }
        let want = request.want(SpaceId::Large, stream);
        let id = match several {
            true => self.take_ready_run(&want)?,
            false => {
                self.extents.adopt_complete(SpaceId::Large, stream);
                let (large, records) = self.extents.parts(SpaceId::Large);
                let id = large.carve_own(records, stream, want.granules)?.id;
                self.stats.reclaim.ready += 1;
                id
            }
        };
        if several {
            self.streams.tell(stream);
            self.streams.pass();
        }
        self.announce(want.requested);
        self.physical.large_request(&want);
        self.stats.hits += 1;
        let cache = self.cache_of(stream);
        if let StreamKey::Id(key) = key {
            thread::remember(key, cache);
        }
        Some(self.hand_out(id, &want, cache, true))
    }

    /// [`free`](Self::free) for a block that only its own stream used, while that stream is the only one. Returns false
    /// and changes nothing if the block needs more. It is separate from `free`, with which a large pair takes 10 % more
    /// instructions.
    pub(crate) fn free_alone(&mut self, id: u32, generation: u32) -> bool {
        if self.streams.several()
            || !self.extents.large.merge_own
            || self.guards.any()
            || !self.rules.caches()
        {
            return false;
        }
        let Some(hot) = self.extents.records.get(id) else {
            return false;
        };
        let Hot {
            addr,
            granules,
            stream,
            ..
        } = *hot;
        let live = hot.generation == generation && hot.state == Extent::Used && !hot.cached;
        let (cold, bytes) = (self.extents.records.cold(id), hot.bytes());
        let plain = hot.space == SpaceId::Large && cold.is_plain();
        if !live || !plain {
            return false;
        }
        let requested = cold.requested;
        let slot = &self.streams[stream];
        if matches!(slot.holder, Holder::Retired) || slot.resting {
            return false;
        }
        let ticket = slot.open;
        // The block is freed from here on. A cached block that this frees may be adjacent to it.
        self.uncache_provisional();
        let slot = &mut self.streams[stream];
        slot.live -= 1;
        slot.open_uses = slot.open_uses.saturating_add(1);
        slot.open_bytes += bytes;
        self.frees += 1;
        self.note_peak();
        self.extents.records[id].generation = generation.wrapping_add(1);
        self.extents.lookup.remove(addr);
        self.caches.predictor.freed(id, granules);
        self.stats.freed(false, bytes, requested, true);
        let last = Use { stream, ticket };
        let freed = self.frees;
        self.extents
            .large
            .release_own(&mut self.extents.records, id, last, freed);
        true
    }
}
