//! The extents of address space: their records, and where each is found.

use super::lookup::Lookup;
use super::records::{Records, SpaceId};
use super::space::Space;

/// All extents of an allocator.
#[derive(Debug)]
pub(crate) struct Extents {
    pub records: Records,
    /// Live large blocks by their addresses.
    pub lookup: Lookup,
    pub large: Space,
    pub small: Space,
    /// Packed: the address space of views.
    pub views: Space,
}

impl Default for Extents {
    fn default() -> Self {
        Extents {
            records: Records::default(),
            lookup: Lookup::default(),
            large: Space::new(SpaceId::Large, true),
            small: Space::new(SpaceId::Small, true),
            views: Space::new(SpaceId::Views, true),
        }
    }
}
