//! Free memory near an address that the caller names, and the best fit of what is ready.

use crate::allocator::extent::want::Want;
use crate::allocator::heap::Heap;
use crate::allocator::size::GRANULE;
use crate::allocator::stream::finder::Run;

impl Heap {
    pub(crate) fn take_near(&mut self, want: &Want, near: &[u64]) -> Option<u32> {
        let id = near.iter().find_map(|addr| self.take_at(want, *addr))?;
        self.stats.reclaim.ready += 1;
        Some(id)
    }

    pub(crate) fn best(&mut self, want: &Want) -> Option<Run> {
        if !self.streams.several() {
            self.extents.adopt_complete(want.space, want.stream);
        }
        self.finder(want.space, want.stream)?.ready_run(want)
    }

    pub(crate) fn take_best(&mut self, want: &Want) -> Option<u32> {
        let run = self.best(want)?;
        let id = self.take(want, run)?;
        self.stats.reclaim.ready += 1;
        Some(id)
    }

    /// Takes a request at an address, if that lies in a free piece which is ready.
    pub(crate) fn take_at(&mut self, want: &Want, addr: u64) -> Option<u32> {
        if !addr.is_multiple_of(u64::from(want.align) * GRANULE) {
            return None;
        }
        let first = self.extents.piece_around(want.space, addr)?;
        if !self.finder(want.space, want.stream)?.ready(first) {
            return None;
        }
        let hot = self.extents.records[first];
        let skip = ((addr - hot.addr) / GRANULE) as u32;
        let left = hot.granules - skip;
        if left < want.granules {
            return None;
        }
        if skip == 0 {
            let run = Run {
                first,
                addr,
                granules: u64::from(left),
            };
            return self.take(want, run);
        }
        let granules = self.granules_of(want, u64::from(left));
        let (id, _) = self.claim(want.space, first, skip, granules)?;
        Some(id)
    }
}
