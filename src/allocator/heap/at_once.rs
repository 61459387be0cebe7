//! Large requests of one of several streams that find ready memory: in one go, what comes before the first step of a
//! reclaim and after it.
//!
//! Most requests end with that step, and need nothing of what a reclaim is prepared for, neither the driver nor another
//! step.

use crate::allocator::cache::grant::Grant;
use crate::allocator::cache::stream_cache::thread;
use crate::allocator::extent::record::SpaceId;
use crate::allocator::extent::want::Want;
use crate::allocator::heap::Heap;
use crate::allocator::heap::request::Checked;
use crate::allocator::stream::slot::StreamKey;
use crate::driver::Device;

impl Heap {
    /// What a large request wants, if nothing is to be done or asked before its stream takes memory that is ready. The
    /// stream is named by its key, and maybe by an object that can keep it. `None`, with nothing changed that the reclaim would not change, if something is.
    pub(crate) fn want_at_once(
        &mut self,
        device: &Device,
        (key, object): (StreamKey, bool),
        request: &Checked,
    ) -> Option<Want> {
        let plain = self.rules.caches() && request.is_plain() && request.small().is_none();
        let quiet = self.caches.contention == 0 && !self.physical.bursts.debt;
        if !(plain && quiet && self.streams.several()) {
            return None;
        }
        let stream = self.streams.find_again(key)?;
        let slot = &self.streams[stream];
        let renamed = slot.holder.is_callers() && object;
        if slot.resting || renamed || slot.context.device().ordinal() != device.ordinal() {
            return None;
        }
        let near = !self.bounds_hold(0);
        self.uncache_provisional();
        (self.caches.due.is_empty() && self.streams.nothing_to_ask(stream, near))
            .then(|| request.want(SpaceId::Large, stream))
    }

    /// Hands out what such a request [took](Heap::take_ready_run).
    pub(crate) fn hand_out_at_once(&mut self, id: u32, want: &Want, key: StreamKey) -> Grant {
        self.streams.tell(want.stream);
        self.streams.pass();
        self.announce(want.requested);
        self.physical.large_request(want);
        self.stats.hits += 1;
        let cache = self.cache_of(want.stream);
        if let StreamKey::Id(key) = key {
            thread::remember(key, cache);
        }
        self.hand_out(id, want, cache, true)
    }
}
