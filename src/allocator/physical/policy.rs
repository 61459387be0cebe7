//! The differences between the segment policies. Other modules call these rules instead of testing the policy.

use crate::allocator::config::Policy;
use crate::allocator::extent::record::SpaceId;
use crate::allocator::extent::want::Want;
use crate::allocator::size::{CLASSIC_SMALL_LIMIT, GRANULE, classic_granules, classic_segment_for};

/// The rules by which memory is obtained from the driver and carved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rules {
    /// Handles are mapped into reserved address space, and blocks lie at any of its granules.
    Packed,
    /// Whole segments of the driver, with the constants of PyTorch's caching allocator.
    Classic,
}

impl Rules {
    pub(crate) fn policy(self) -> Policy {
        match self {
            Rules::Packed => Policy::Packed,
            Rules::Classic => Policy::Classic,
        }
    }

    /// Whether memory is mapped handle by handle, so that it can grow in place and be mapped in views. Otherwise it
    /// consists of whole segments.
    #[inline]
    pub(crate) fn maps(self) -> bool {
        self == Rules::Packed
    }

    /// Whether streams have caches in front of the heap: of small blocks in pages, and of large blocks that recur.
    #[inline]
    pub(crate) fn caches(self) -> bool {
        self == Rules::Packed
    }

    /// Returns the arena of a request that needs a run of this many bytes and that no cache serves.
    pub(crate) fn space_of(self, span_bytes: u64) -> SpaceId {
        match self {
            Rules::Classic if span_bytes <= CLASSIC_SMALL_LIMIT => SpaceId::Small,
            _ => SpaceId::Large,
        }
    }

    /// Returns the granules that a request takes from an extent: the classic policy does not split every extent.
    pub(crate) fn granules_of(self, space: SpaceId, granules: u32, available: u64) -> u32 {
        match self {
            Rules::Packed => granules,
            Rules::Classic => classic_granules(space == SpaceId::Small, available, granules),
        }
    }

    /// Returns the bytes of the segment that a request obtains from the driver, under a policy with whole segments.
    pub(crate) fn segment_for(self, want: &Want) -> Option<u64> {
        match self {
            Rules::Packed => None,
            Rules::Classic => Some(classic_segment_for(u64::from(want.span()) * GRANULE)),
        }
    }
}
