//! The constraints of a request on its arena.

use crate::allocator::extent::record::SpaceId;
use crate::allocator::size::{GRANULE, PHYSICAL_GRANULE};

/// A request to an arena.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Want {
    pub space: SpaceId,
    pub stream: u32,
    pub granules: u32,
    /// Alignment in granules.
    pub align: u32,
    /// Bytes that the user requested.
    pub requested: u64,
    /// Whether the block must lie inside one physical handle.
    pub single: bool,
    /// Whether it must take that handle as a whole.
    pub whole: bool,
    /// Whether the block may lie in a view.
    pub views: bool,
}

impl Want {
    /// Granules of a run that fits the request, whatever the run's address.
    pub(crate) fn span(&self) -> u32 {
        self.granules + self.align - 1
    }

    /// Returns the granules between the start of a run and the first aligned address in it.
    pub(crate) fn skip(&self, addr: u64) -> u32 {
        let align = u64::from(self.align) * GRANULE;
        ((addr.next_multiple_of(align) - addr) / GRANULE) as u32
    }

    /// Whether the block belongs to the large arena, and may lie in several handles.
    pub(crate) fn may_span_handles(&self) -> bool {
        !self.single && self.space == SpaceId::Large
    }

    /// Whether the block may lie in a view.
    pub(crate) fn may_view(&self) -> bool {
        self.views && self.may_span_handles()
    }

    /// Whether the block must be searched handle by handle.
    pub(crate) fn in_one_handle(&self) -> bool {
        // A page always lies inside a handle, because both sizes are powers of two.
        self.single && self.space == SpaceId::Large
    }

    /// Bytes of a handle that is created for the request alone.
    pub(crate) fn handle_bytes(&self) -> u64 {
        (u64::from(self.granules) * GRANULE).next_multiple_of(PHYSICAL_GRANULE)
    }

    /// Whether a view could hold the block, where `views` is whether views are allowed, on a device with `total_memory`
    /// bytes.
    pub(crate) fn fits_views(&self, views: bool, total_memory: u64) -> bool {
        views && self.may_view() && u64::from(self.granules) * GRANULE <= total_memory
    }
}
