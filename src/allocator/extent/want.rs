//! What a request asks of an arena, and what is left to do of it.

use crate::allocator::extent::record::SpaceId;
use crate::allocator::size::{GRANULE, PAGE};

/// Granules of a page.
pub(crate) const PAGE_GRANULES: u32 = (PAGE / GRANULE) as u32;

/// What a caller asks of an arena.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Want {
    pub space: SpaceId,
    pub stream: u32,
    pub granules: u32,
    /// Alignment in granules.
    pub align: u32,
    /// Bytes as the user asked for.
    pub requested: u64,
    /// The block lies inside one physical handle.
    pub single: bool,
    /// The block may lie in a view.
    pub views: bool,
}

impl Want {
    /// Granules of a run in which the request surely fits, whatever the run's address.
    pub(crate) fn span(&self) -> u32 {
        self.granules + self.align - 1
    }

    /// Granules between the start of a run and the first aligned address in it.
    pub(crate) fn skip(&self, addr: u64) -> u32 {
        let align = u64::from(self.align) * GRANULE;
        ((addr.next_multiple_of(align) - addr) / GRANULE) as u32
    }
}
