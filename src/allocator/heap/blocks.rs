//! Large blocks by pointer and identity: whose they are, and whether they live.

use crate::allocator::cache::grant::Grant;
use crate::allocator::cache::stream_cache::StreamCache;
use crate::allocator::extent::record::State as Extent;
use crate::allocator::extent::want::Want;
use crate::allocator::heap::Heap;
use crate::allocator::heap::request::Checked;

impl Heap {
    /// Makes a taken extent a live block, and says what it is.
    pub(crate) fn granted(
        &mut self,
        id: u32,
        stream: u32,
        requested: u64,
        home: &'static StreamCache,
    ) -> Grant {
        let id = self.born(id, stream, requested);
        let hot = &self.extents.records[id];
        let life = (id, hot.generation);
        Grant::large(home, hot.addr, life, (hot.granules, requested))
    }

    /// What a request that no stream cache serves asks of its arena.
    pub(crate) fn want(&self, request: &Checked, stream: u32) -> Want {
        let space = self.rules.space_of(request.span_bytes());
        let mut want = request.want(space, stream);
        // A segment is one allocation of the driver's anyway.
        want.single &= self.rules.maps();
        want
    }

    /// Whether a block with this identity is live.
    pub(crate) fn is_live(&self, (id, generation): (u32, u32)) -> bool {
        let hot = self.extents.records.get(id);
        if hot.is_some_and(|hot| hot.cached) {
            return self.is_live_in_cache(id, generation);
        }
        hot.is_some_and(|hot| hot.generation == generation && hot.state == Extent::Used)
    }
}
