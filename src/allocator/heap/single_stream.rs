//! Large requests of a stream that is alone, out of its own free memory: in one go.

use crate::allocator::cache::grant::Grant;
use crate::allocator::cache::stream_cache::thread;
use crate::allocator::extent::record::{Hot, SpaceId, State as Extent};
use crate::allocator::extent::uses::Use;
use crate::allocator::heap::Heap;
use crate::allocator::heap::request::Checked;
use crate::allocator::stream::slot::{Holder, StreamKey};
use crate::driver::Device;

impl Heap {
    /// Takes a large request out of the stream's own free memory. `None`, with nothing changed that
    /// the reclaim would not change, if something else is to be done for it.
    pub(crate) fn take_ready(
        &mut self,
        device: &Device,
        key: StreamKey,
        request: &Checked,
    ) -> Option<Grant> {
        let StreamKey::Id(id) = key else {
            return None;
        };
        let plain = self.rules.caches() && request.is_plain() && request.small().is_none();
        let alone = !self.streams.several() && self.caches.due.is_empty();
        let quiet = self.caches.contention == 0 && !self.physical.bursts.debt;
        if !(plain && alone && quiet) {
            return None;
        }
        let stream = self.streams.find_again(key)?;
        let &[cache] = self.caches.of(stream) else {
            return None;
        };
        let slot = &self.streams[stream];
        if slot.context.device().ordinal() != device.ordinal() || slot.resting {
            return None;
        }
        self.uncache_provisional();
        if !self.extents.large.merge_own {
            return None;
        }
        self.extents.adopt_complete(SpaceId::Large, stream);
        let want = request.want(SpaceId::Large, stream);
        let block = self
            .extents
            .large
            .carve_own(&mut self.extents.records, stream, want.granules)?
            .id;
        self.announce(want.requested);
        self.physical.large_request(&want);
        self.stats.reclaim.ready += 1;
        self.stats.hits += 1;
        let grant = self.hand_out(block, &want, cache, true);
        thread::remember(id, cache);
        Some(grant)
    }

    /// [`free`](Self::free) of a block that only its own stream used, while that is alone. False, with
    /// nothing changed, if more is to be thought of.
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
        // From here on it is freed. What leaves a large-block cache for that may lie beside it.
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
