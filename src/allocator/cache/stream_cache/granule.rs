//! The elements of the runs of a stream cache: granules and pages.

use crate::allocator::extent::origin::Origin;
use crate::allocator::size::{GRANULE, PAGE_GRANULES};

/// Granules of a page, and length of the longest run.
pub(super) const GRANULES: usize = PAGE_GRANULES as usize;
/// Number of bits of a position in a page.
pub(super) const PLACE_BITS: u32 = PAGE_GRANULES.ilog2();
pub(super) const PLACE_MASK: u32 = PAGE_GRANULES - 1;

// A position takes some of the bits of a node, `Bits` has two words, and a length one byte.
const _: () = assert!(PAGE_GRANULES.is_power_of_two() && PAGE_GRANULES <= 128);

/// No run. Like all nodes it has its top bit clear; no stream cache has enough pages for such a node.
pub(super) const NIL: u32 = u32::MAX >> 1;
/// Set in every generation, and in no node: distinguishes the word of a live block from a link.
pub(super) const LIVE: u32 = 1 << 31;
/// The state of a run, stored in its first granule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Free,
    /// Freed, and kept unmerged.
    Quick,
    /// A live block.
    Used,
    /// Freed, but other streams may still access it.
    Pending,
}

/// Twelve bytes per granule; all except `back` are valid only where a run begins.
#[derive(Debug, Clone, Copy)]
pub(super) struct Granule {
    /// Free, quick: the next run of the list. Live: the generation.
    pub a: u32,
    /// Free: the previous run of the list. Live: the requested bytes.
    pub b: u32,
    /// State of the run, and for a live block the one other stream, see [`Using`]. Live blocks and quick runs have the
    /// same state `OUT`, so that changing between them does not write it.
    pub c: u16,
    pub len: u8,
    /// In the last granule of a run: the run's length.
    pub back: u8,
}

pub(super) const FREE: u16 = 0;
const OUT: u16 = 1 << 14;
const PENDING: u16 = 2 << 14;
/// Bits for the other stream.
const USING: u16 = OUT - 1;

impl Default for Granule {
    fn default() -> Self {
        Granule {
            a: NIL,
            b: NIL,
            c: FREE,
            len: 0,
            back: 0,
        }
    }
}

const _: () = assert!(size_of::<Granule>() == 12);

impl Granule {
    pub(super) fn kind(&self) -> Kind {
        match self.c & !USING {
            _ if self.a & LIVE != 0 => Kind::Used,
            FREE => Kind::Free,
            OUT => Kind::Quick,
            _ => Kind::Pending,
        }
    }

    pub(super) fn is_free(&self) -> bool {
        self.c == FREE
    }

    /// Makes the granule free, and not the start of a run.
    pub(super) fn set_free(&mut self) {
        (self.a, self.c) = (NIL, FREE);
    }

    pub(super) fn set_out(&mut self) {
        (self.a, self.c) = (NIL, OUT);
    }

    pub(super) fn set_pending(&mut self) {
        (self.a, self.c) = (NIL, PENDING);
    }

    /// For a live block.
    pub(super) fn set_using(&mut self, using: Using) {
        self.c = using.0;
    }

    /// Returns the live block that begins here, if there is one.
    #[inline(always)]
    pub(super) fn live(&self) -> Option<Live> {
        (self.a & LIVE != 0).then(|| self.as_live())
    }

    #[inline(always)]
    pub(super) fn as_live(&self) -> Live {
        Live {
            granules: u32::from(self.len),
            generation: self.a,
            requested: self.b,
            using: Using(self.c),
        }
    }
}

/// The other streams recorded on a live block: the slot of one stream, none, or a marker that the heap stores them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Using(u16);

impl Using {
    pub(crate) const NONE: Using = Using(OUT);
    pub(crate) const MANY: Using = Using(OUT | USING);

    /// Returns the value for one stream, if its slot fits.
    pub(crate) fn one(slot: u32) -> Option<Using> {
        let bits = u16::try_from(slot + 1).ok().filter(|bits| *bits < USING);
        bits.map(|bits| Using(OUT | bits))
    }

    /// Returns the slot of the one stream.
    pub(crate) fn slot(self) -> Option<u32> {
        (self != Using::NONE && self != Using::MANY).then(|| u32::from(self.0 & USING) - 1)
    }
}

/// A run, identified by its page's index in its stream cache and its first granule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Node(pub u32);

impl Node {
    #[inline]
    pub(crate) fn new(page: u32, place: u32) -> Self {
        Node(page << PLACE_BITS | place)
    }

    #[inline]
    pub(crate) fn page(self) -> usize {
        (self.0 >> PLACE_BITS) as usize
    }

    #[inline]
    pub(super) fn place(self) -> usize {
        (self.0 & PLACE_MASK) as usize
    }
}

/// A page as it enters or leaves a stream cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PageInfo {
    /// Address of the first byte.
    pub base: u64,
    /// The generation of the last block allocated in it.
    pub generation: u32,
}

/// A page, on its own cache lines.
#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct Page {
    pub info: PageInfo,
    /// Ticket of the newest free in it; for quick runs, that of their merge.
    pub ticket: u64,
    pub present: bool,
    pub granules: [Granule; GRANULES],
    /// Origins of the blocks, by their first granules. Allocated when there is anything to store.
    pub origins: Option<Box<[Origin; GRANULES]>>,
}

impl Page {
    pub(super) fn new(info: PageInfo, ticket: u64) -> Self {
        Page {
            info: PageInfo {
                generation: info.generation | LIVE,
                ..info
            },
            ticket,
            present: true,
            granules: [Granule::default(); GRANULES],
            origins: None,
        }
    }

    /// Marks a range as a run that is out, with its length at both ends.
    #[inline(always)]
    pub(super) fn shape(&mut self, node: Node, granules: u32) {
        self.granules[(node.place() + granules as usize - 1) % GRANULES].back = granules as u8;
        let granule = &mut self.granules[node.place()];
        granule.len = granules as u8;
        granule.set_out();
    }

    /// Makes a run that is out a live block. Its generation repeats after 2^31 blocks of the page.
    #[inline(always)]
    pub(super) fn hand_out(&mut self, node: Node, requested: u32) -> Taken {
        let generation = self.info.generation.wrapping_add(1) | LIVE;
        self.info.generation = generation;
        let granule = &mut self.granules[node.place()];
        granule.a = generation;
        granule.b = requested;
        Taken {
            node,
            ptr: self.info.base + node.place() as u64 * GRANULE,
            generation,
        }
    }
}

/// One bit per length, for the lists that are not empty.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Bits([u64; 2]);

impl Bits {
    #[inline]
    pub(super) fn set(&mut self, at: usize) {
        self.0[at >> 6 & 1] |= 1 << (at & 63);
    }

    #[inline]
    pub(super) fn clear(&mut self, at: usize) {
        self.0[at >> 6 & 1] &= !(1 << (at & 63));
    }

    pub(super) fn has(&self, at: usize) -> bool {
        self.0[at >> 6 & 1] >> (at & 63) & 1 == 1
    }

    /// Returns the first set bit from `at` on.
    #[inline(always)]
    pub(super) fn first_from(&self, at: usize) -> Option<usize> {
        let word = self.0[at >> 6 & 1] & u64::MAX << (at & 63);
        if word != 0 {
            return Some((at & 64) + word.trailing_zeros() as usize);
        }
        if at < 64 && self.0[1] != 0 {
            return Some(64 + self.0[1].trailing_zeros() as usize);
        }
        None
    }
}

/// An allocated run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Taken {
    pub node: Node,
    pub ptr: u64,
    pub generation: u32,
}

/// A live block as its stream cache knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Live {
    pub granules: u32,
    pub generation: u32,
    /// Requested bytes.
    pub requested: u32,
    pub using: Using,
}

/// A run, for walks over all runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    pub node: Node,
    pub ptr: u64,
    pub granules: u32,
    pub kind: Kind,
    /// The live block, if it is one.
    pub live: Option<Live>,
}
