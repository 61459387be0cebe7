//! Memory for the test of second layouts.

use crate::allocator::extent::record::SpaceId;
use crate::allocator::extent::uses::Uses;
use crate::allocator::extent::want::Want;
use crate::allocator::heap::Heap;
use crate::allocator::physical::plan::Release;
use crate::allocator::size::PHYSICAL_GRANULE;
use crate::allocator::view::mapping::{Aliased, Site, Stitch};

impl Heap {
    /// Claims a home and a view for one new handle, if the limit and the address space allow it.
    pub(crate) fn plan_test(&mut self, want: &Want) -> Option<Stitch> {
        if self.room() < PHYSICAL_GRANULE {
            return None;
        }
        let range = self.extents.take_range(want.granules)?;
        let base = self.extents.records[range].addr;
        let Some(fresh) = self.claim_fresh(want, PHYSICAL_GRANULE, 0) else {
            self.extents.range_freed(range);
            return None;
        };
        Some(Stitch {
            site: Site {
                base,
                range: Some(range),
                room: want.granules,
                offset: 0,
                at: base,
            },
            adds: Vec::new(),
            aliased: Aliased::default(),
            fresh: Some(fresh),
        })
    }

    /// The test's block is free, and its handle claimed for release.
    pub(crate) fn test_over(&mut self, block: u32, home: u64) -> Option<Release> {
        self.view_block_freed(block, &Uses::None);
        self.claim_holding(SpaceId::Large, home)
    }
}
