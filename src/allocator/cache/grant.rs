//! Live blocks as values: what is handed out, and what finds it again.

use crate::driver::sys;

use crate::allocator::cache::stream_cache::StreamCache;
use crate::allocator::cache::stream_cache::{Node, Taken};
use crate::allocator::size::GRANULE;

/// A live block as it was handed out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Grant {
    pub place: Place,
    granules: u32,
}

/// What it takes to find a live block again and to free it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    /// The cache of its stream that keeps the allocator alive for it.
    home: &'static StreamCache,
    pub ptr: sys::CUdeviceptr,
    /// Where a small block lies in its home, or `RECORD` and the number of a record, with `WIDE` if it has
    /// more bytes than its request rounded up, and `CACHED` if it was put in a large-block cache.
    node: u32,
    pub generation: u32,
}

/// Set where no node has a bit.
const RECORD: u32 = 1 << 31;
const WIDE: u32 = 1 << 30;
const CACHED: u32 = 1 << 29;
const FLAGS: u32 = RECORD | WIDE | CACHED;

impl Grant {
    #[inline(always)]
    pub(crate) fn small(home: &'static StreamCache, taken: Taken, granules: u32) -> Self {
        let place = Place {
            home,
            ptr: taken.ptr,
            node: taken.node.0,
            generation: taken.generation,
        };
        Grant { place, granules }
    }

    /// A block with a record: its number and generation, the granules that it has and the bytes that were
    /// asked for.
    pub(crate) fn large(
        home: &'static StreamCache,
        ptr: u64,
        (id, generation): (u32, u32),
        (granules, requested): (u32, u64),
    ) -> Self {
        let wide = requested.div_ceil(GRANULE) < u64::from(granules);
        let place = Place {
            home,
            ptr,
            node: RECORD | if wide { WIDE } else { 0 } | id,
            generation,
        };
        Grant { place, granules }
    }

    /// The block lies in the large-block cache of its stream cache.
    #[inline]
    pub(crate) fn set_cached(&mut self, cached: bool) {
        self.place.node |= if cached { CACHED } else { 0 };
    }

    #[inline(always)]
    pub(crate) fn ptr(&self) -> u64 {
        self.place.ptr
    }

    pub(crate) fn bytes(&self) -> u64 {
        u64::from(self.granules) * GRANULE
    }
}

impl Place {
    /// The stream cache that keeps the allocator alive.
    #[inline(always)]
    pub(crate) fn home(&self) -> &'static StreamCache {
        self.home
    }

    /// Where a small block lies in its stream cache.
    #[inline(always)]
    pub(crate) fn node(&self) -> Option<Node> {
        (self.node & RECORD == 0).then_some(Node(self.node))
    }

    /// The record of any other block.
    #[inline]
    pub(crate) fn record(&self) -> Option<u32> {
        (self.node & RECORD != 0).then_some(self.node & !FLAGS)
    }

    /// The record of a block that was put in a large-block cache, where it may be no more.
    #[inline]
    pub(crate) fn cached(&self) -> Option<u32> {
        let cached = self.node & (RECORD | CACHED) == RECORD | CACHED;
        cached.then_some(self.node & !FLAGS)
    }

    /// Whether the block has more bytes than its request rounded up.
    pub(crate) fn wide(&self) -> bool {
        self.node & (RECORD | WIDE) == RECORD | WIDE
    }
}

/// One life of a block: its number, its generation, and where it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Lifetime {
    pub id: u32,
    pub generation: u32,
    pub ptr: sys::CUdeviceptr,
}
