//! In what the segment policies differ: the rules answer, so that nobody else asks which policy it is.

use crate::allocator::config::Policy;
use crate::allocator::extent::record::SpaceId;
use crate::allocator::extent::want::Want;
use crate::allocator::size::{CLASSIC_SMALL_LIMIT, GRANULE, classic_granules, classic_segment_for};

/// The rules by which memory comes from the driver and is carved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rules {
    /// Handles are mapped into reserved address space, and blocks lie at any of its granules.
    Packed,
    /// Whole segments come from the driver, with the constants of PyTorch's caching allocator.
    Classic,
}

impl Rules {
    pub(crate) fn policy(self) -> Policy {
        match self {
            Rules::Packed => Policy::Packed,
            Rules::Classic => Policy::Classic,
        }
    }

    /// Whether memory is mapped handle by handle, so that it can grow in place and be seen in views. Else it
    /// is whole segments.
    #[inline]
    pub(crate) fn maps(self) -> bool {
        self == Rules::Packed
    }

    /// Whether streams have caches before the heap: of small blocks in pages, and of large ones that come
    /// again.
    #[inline]
    pub(crate) fn caches(self) -> bool {
        self == Rules::Packed
    }

    /// The arena of a request, as long as no cache serves it, that needs a run of so many bytes.
    pub(crate) fn space_of(self, span_bytes: u64) -> SpaceId {
        match self {
            Rules::Classic if span_bytes <= CLASSIC_SMALL_LIMIT => SpaceId::Small,
            _ => SpaceId::Large,
        }
    }

    /// Granules that a request of so many gets out of an extent: classic does not split everything.
    pub(crate) fn granules_of(self, space: SpaceId, granules: u32, available: u64) -> u32 {
        match self {
            Rules::Packed => granules,
            Rules::Classic => classic_granules(space == SpaceId::Small, available, granules),
        }
    }

    /// Bytes of the segment that a request takes from the driver, where memory is whole segments.
    pub(crate) fn segment_for(self, want: &Want) -> Option<u64> {
        match self {
            Rules::Packed => None,
            Rules::Classic => Some(classic_segment_for(u64::from(want.span()) * GRANULE)),
        }
    }
}
