//! Live blocks as values: what is handed out, and what finds it again.

use crate::driver::sys;

use super::front::Front;
use super::front::{Node, Taken};
use super::size::GRANULE;

/// A live block as it was handed out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Grant {
    pub place: Place,
    granules: u32,
}

/// What it takes to find a live block again and to free it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    /// The front of its stream that keeps the allocator alive for it, and
    home: &'static Front,
    pub ptr: sys::CUdeviceptr,
    /// where a small block lies in there, or `RECORD` and the number of a record, with `WIDE` if it has
    /// more bytes than its request rounded up, and `SHELF` if it was put on a shelf.
    node: u32,
    pub generation: u32,
}

/// Set where no node has a bit.
const RECORD: u32 = 1 << 31;
const WIDE: u32 = 1 << 30;
const SHELF: u32 = 1 << 29;
const FLAGS: u32 = RECORD | WIDE | SHELF;

impl Grant {
    #[inline(always)]
    pub(crate) fn small(home: &'static Front, taken: Taken, granules: u32) -> Self {
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
        home: &'static Front,
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

    /// The block lies on the shelf of its front.
    #[inline]
    pub(crate) fn set_shelved(&mut self, shelved: bool) {
        self.place.node |= if shelved { SHELF } else { 0 };
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
    /// The front that keeps the allocator alive.
    #[inline(always)]
    pub(crate) fn home(&self) -> &'static Front {
        self.home
    }

    /// Where a small block lies in its front.
    #[inline(always)]
    pub(crate) fn node(&self) -> Option<Node> {
        (self.node & RECORD == 0).then_some(Node(self.node))
    }

    /// The record of any other block.
    #[inline]
    pub(crate) fn record(&self) -> Option<u32> {
        (self.node & RECORD != 0).then_some(self.node & !FLAGS)
    }

    /// The record of a block that was put on a shelf, where it may be no more.
    #[inline]
    pub(crate) fn shelved(&self) -> Option<u32> {
        let shelved = self.node & (RECORD | SHELF) == RECORD | SHELF;
        shelved.then_some(self.node & !FLAGS)
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
