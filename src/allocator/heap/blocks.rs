//! Large blocks by pointer and identity: whose they are, whether they live, and who may capture.

use crate::driver::Context;

use crate::allocator::cache::front::Front;
use crate::allocator::cache::grant::Grant;
use crate::allocator::extent::record::State as Extent;
use crate::allocator::extent::want::Want;
use crate::allocator::heap::Heap;
use crate::allocator::heap::request::Checked;
use crate::allocator::stream::slot::is_per_thread;
use crate::allocator::stream::slot::{Holder, StreamKey};

impl Heap {
    /// Makes a taken extent a live block, and says what it is.
    pub(crate) fn granted(
        &mut self,
        id: u32,
        stream: u32,
        requested: u64,
        home: &'static Front,
    ) -> Grant {
        let id = self.born(id, stream, requested);
        let hot = &self.extents.records[id];
        let life = (id, hot.generation);
        Grant::large(home, hot.addr, life, (hot.granules, requested))
    }

    /// What a request that no front serves asks of its arena.
    pub(crate) fn want(&self, request: &Checked, stream: u32) -> Want {
        let space = self.rules.space_of(request.span_bytes());
        let mut want = request.want(space, stream);
        // A segment is one allocation of the driver's anyway.
        want.single &= self.rules.maps();
        want
    }

    /// The stream of a block, if it may be asked whether it is capturing.
    pub(crate) fn capture_suspect(&self, stream: u32) -> Option<Suspect> {
        let slot = &self.streams[stream];
        // The per-thread handle would ask about the calling thread's stream.
        let ask = !matches!(slot.holder, Holder::Retired) && !is_per_thread(slot.raw);
        ask.then(|| Suspect {
            key: slot.key,
            raw: slot.raw,
            context: slot.context.clone(),
            _holder: slot.holder.clone(),
        })
    }

    /// Whether a block with this identity is live.
    pub(crate) fn is_live(&self, (id, generation): (u32, u32)) -> bool {
        let hot = self.extents.records.get(id);
        if hot.is_some_and(|hot| hot.shelved) {
            return self.is_live_on_shelf(id, generation);
        }
        hot.is_some_and(|hot| hot.generation == generation && hot.state == Extent::Used)
    }
}

/// A stream that may be capturing. One that we hold stays alive with this.
pub(crate) struct Suspect {
    pub(crate) key: StreamKey,
    pub(crate) raw: usize,
    /// A default stream is asked in its own context.
    pub(crate) context: Context,
    pub(crate) _holder: Holder,
}
