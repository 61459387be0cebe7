//! Segments of the classic policy: which to ask the driver for.

use crate::allocator::extent::want::Want;
use crate::allocator::heap::Heap;
use crate::allocator::heap::growth::Growth;
use crate::allocator::stream::finder::Run;

impl Heap {
    /// Plans a segment of the classic policy.
    pub(crate) fn plan_segment(&mut self, want: &Want) -> Option<Growth> {
        let bytes = self.missing(want)?;
        if bytes > self.room() {
            return None;
        }
        self.physical.planned += bytes;
        Some(Growth {
            space: want.space,
            id: crate::allocator::extent::record::NIL,
            shards: Vec::new(),
            waits: Vec::new(),
            skip: 0,
            addr: 0,
            sizes: vec![bytes],
        })
    }

    /// A segment arrived: the request is taken from its stream cache.
    pub(crate) fn segment(&mut self, want: &Want, addr: u64, bytes: u64) -> Option<u32> {
        let granules = u32::try_from(bytes / crate::allocator::size::GRANULE).ok()?;
        self.hold(addr, bytes, None, want.space);
        let (space, records) = self.extents.parts(want.space);
        let uses = crate::allocator::extent::uses::Uses::one(want.stream, 0);
        let first = space.add_region(records, addr, granules, uses);
        records.cold_mut(first).owner = want.stream;
        self.take(
            want,
            Run {
                first,
                addr,
                granules: u64::from(granules),
            },
        )
    }
}
