//! Plans: what is to be taken from the driver, or given back to it.

use crate::allocator::extent::record::SpaceId;
use crate::allocator::extent::space::{Shard, Space};
use crate::allocator::extent::uses::Uses;
use crate::allocator::size::PHYSICAL_GRANULE;
use crate::allocator::stream::slot::PendingWait;

/// How a request that found no memory gets some.
#[derive(Debug)]
pub(crate) struct Growth {
    pub space: SpaceId,
    /// The claimed extent: free memory before and behind a hole, and the part of the hole between.
    pub id: u32,
    pub shards: Vec<Shard>,
    /// Waits that the free memory in it needs.
    pub waits: Vec<PendingWait>,
    /// Granules of the extent before the block itself.
    pub skip: u32,
    /// First byte to map.
    pub addr: u64,
    /// Sizes of the handles to make, in address order.
    pub sizes: Vec<u64>,
}

impl Growth {
    pub(crate) fn bytes(&self) -> u64 {
        self.sizes.iter().sum()
    }
}

/// Memory to give back.
#[derive(Debug)]
pub(crate) struct Release {
    pub space: SpaceId,
    pub id: u32,
    pub shards: Vec<Shard>,
    pub addr: u64,
    pub bytes: u64,
    pub handle: Option<u64>,
}

/// What a request could grow into.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Opening {
    /// The first extent of the claimed range.
    pub(crate) first: u32,
    /// Granules from the range's start to the block, for its alignment.
    pub(crate) skip: u32,
    /// Granules of usable memory before the hole.
    pub(crate) before: u64,
    pub(crate) hole: u32,
    /// Granules of the hole that are mapped.
    pub(crate) mapped: u64,
    /// Granules of usable memory behind the hole that the block needs.
    pub(crate) behind: u64,
}

/// The uses of memory that nobody has used yet.
pub(crate) fn fresh_uses(space: &Space, stream: u32) -> Uses {
    if space.merge_own {
        Uses::one(stream, 0)
    } else {
        Uses::None
    }
}

/// Sizes of the handles for `bytes`: whole ones, then halves down to the granule.
pub(crate) fn tile(bytes: u64, size: u64) -> Vec<u64> {
    let (mut sizes, mut left, mut size) = (Vec::new(), bytes, size.max(PHYSICAL_GRANULE));
    while left > 0 {
        if size <= left {
            sizes.push(size);
            left -= size;
        } else {
            size = (size / 2 / PHYSICAL_GRANULE * PHYSICAL_GRANULE).max(PHYSICAL_GRANULE);
        }
    }
    sizes
}
