//! What the runs of a stream cache are made of: granules and pages.

use crate::allocator::extent::origin::Origin;
use crate::allocator::size::{GRANULE, PAGE};

/// Granules of a page, and the longest run.
pub(crate) const PAGE_GRANULES: u32 = (PAGE / GRANULE) as u32;
pub(super) const GRANULES: usize = PAGE_GRANULES as usize;
/// Bits of a place in a page.
pub(super) const PLACE_BITS: u32 = PAGE_GRANULES.ilog2();
pub(super) const PLACE_MASK: u32 = PAGE_GRANULES - 1;

// A place is some of the bits of a node, `Bits` has two words, and a length one byte.
const _: () = assert!(PAGE_GRANULES.is_power_of_two() && PAGE_GRANULES <= 128);

/// No run. Like all nodes it has its top bit clear; no stream cache has so many pages that one would be it.
pub(super) const NIL: u32 = u32::MAX >> 1;
/// Set in every generation, and in no node: tells a live block's word from a link.
pub(super) const LIVE: u32 = 1 << 31;
/// Blocks that a stream cache hands out before it looks for worn pages.
pub(super) const LIVES: u64 = 1 << 24;

/// The generation from which on a page is worn: it may go on so far unseen, and once more so far in the
/// stream cache that it goes to.
pub(super) const WORN: u32 = u32::MAX - 2 * LIVES as u32;

const _: () = assert!(WORN & LIVE != 0);

/// What a granule that begins a run says about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Free,
    /// Freed, and kept as it is.
    Quick,
    /// A live block.
    Used,
    /// Freed, while other streams may still use it.
    Pending,
    /// Freed, in a page that has no generation left: of no use before the page comes back.
    Spent,
}

/// Twelve bytes per granule; all but `back` mean something only where a run begins.
#[derive(Debug, Clone, Copy)]
pub(super) struct Granule {
    /// Free, quick: the next run of the list. Live: the generation.
    pub a: u32,
    /// Free: the run before in the list. Live: bytes that were asked for.
    pub b: u32,
    /// How the run stands, and while it is live the one other stream, see [`Using`]. Live blocks and quick
    /// runs change into each other without a word about it here: of both it says `OUT`.
    pub c: u16,
    pub len: u8,
    /// Where a run ends: its length.
    pub back: u8,
}

pub(super) const FREE: u16 = 0;
const OUT: u16 = 1 << 14;
const PENDING: u16 = 2 << 14;
const SPENT: u16 = 3 << 14;
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
            PENDING => Kind::Pending,
            _ => Kind::Spent,
        }
    }

    pub(super) fn is_free(&self) -> bool {
        self.c == FREE
    }

    /// Makes it free, and no run's beginning.
    pub(super) fn set_free(&mut self) {
        (self.a, self.c) = (NIL, FREE);
    }

    pub(super) fn set_out(&mut self) {
        (self.a, self.c) = (NIL, OUT);
    }

    pub(super) fn set_pending(&mut self) {
        (self.a, self.c) = (NIL, PENDING);
    }

    pub(super) fn set_spent(&mut self) {
        (self.a, self.c) = (NIL, SPENT);
    }

    /// Of a live block.
    pub(super) fn set_using(&mut self, using: Using) {
        self.c = using.0;
    }

    /// What is there, if a live block begins here.
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

/// Which other streams were recorded on a live block: the number of the stream's slot, none, or
/// that the heap outside know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Using(u16);

impl Using {
    pub(crate) const NONE: Using = Using(OUT);
    pub(crate) const MANY: Using = Using(OUT | USING);

    /// One stream, if its number fits.
    pub(crate) fn one(slot: u32) -> Option<Using> {
        let bits = u16::try_from(slot + 1).ok().filter(|bits| *bits < USING);
        bits.map(|bits| Using(OUT | bits))
    }

    /// The one stream.
    pub(crate) fn slot(self) -> Option<u32> {
        (self != Using::NONE && self != Using::MANY).then(|| u32::from(self.0 & USING) - 1)
    }
}

/// A run by its page's place in its stream cache and its first granule.
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

/// A page as it comes and goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PageInfo {
    /// First byte.
    pub base: u64,
    /// The last generation that was given to a block in it.
    pub generation: u32,
    /// Its number among all pages that there ever were.
    pub number: u32,
}

/// A page on cache lines of its own.
#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct Page {
    pub info: PageInfo,
    /// Of the newest free in it; of quick runs, when they were merged.
    pub ticket: u64,
    pub present: bool,
    pub granules: [Granule; GRANULES],
    /// Who asked for the blocks, by their first granules. Made when there is anything to note.
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

    /// Makes a range a run that is out, with its length where it begins and where it ends.
    #[inline(always)]
    pub(super) fn shape(&mut self, node: Node, granules: u32) {
        self.granules[(node.place() + granules as usize - 1) % GRANULES].back = granules as u8;
        let granule = &mut self.granules[node.place()];
        granule.len = granules as u8;
        granule.set_out();
    }

    /// Makes a run that is out a live block. A page is worn out long before its last generation.
    #[inline(always)]
    pub(super) fn hand_out(&mut self, node: Node, requested: u32) -> Taken {
        let generation = self.info.generation.wrapping_add(1);
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

/// One bit per length: which lists hold something.
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

    /// The first one from `at` on.
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

/// A run that was handed out.
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
    /// Bytes that were asked for.
    pub requested: u32,
    pub using: Using,
}

/// A run, for walks over everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    pub node: Node,
    pub ptr: u64,
    pub granules: u32,
    pub kind: Kind,
    /// If it is live.
    pub live: Option<Live>,
}
