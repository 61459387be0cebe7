//! Block records: 32 bytes that every operation touches, and what only some need beside them.
//!
//! A record describes one extent of address space: a block in use, a free piece, a range that a
//! driver call is working on, or a range without memory. Ids are 32 bits; records never move.

use super::boxed::boxed_array;
use super::fronts::EngineFront;
use super::uses::Uses;

/// No record.
pub(crate) const NIL: u32 = u32::MAX;

/// In [`Hot::stream`] of a free piece: nobody uses it any more.
pub(crate) const COMPLETE: u32 = u32::MAX;
/// In [`Hot::stream`] of a free piece: pending on several streams.
pub(crate) const MIXED: u32 = u32::MAX - 1;

/// What an extent is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum State {
    /// The record describes nothing and waits to be used again.
    #[default]
    Vacant,
    /// A block that somebody holds.
    Used,
    /// Free memory.
    Free,
    /// Taken out of circulation while a driver call maps or releases it.
    Busy,
    /// Address space without memory.
    Unmapped,
    /// Part of a block that lies in a view: nobody can have it at its home address.
    Lent,
    /// Memory that a failed roll-back left in an unknown state: never handed out, retried by trim.
    Quarantined,
}

/// Which collection of extents a record belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub(crate) enum SpaceId {
    /// Requests above the small limit.
    #[default]
    Large,
    /// Classic: the small pool. Packed: the arena that hands out pages.
    Small,
    /// Packed: address space for views. Its free extents are addresses without memory.
    Views,
}

/// The part of a record that every operation reads.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Hot {
    /// First byte.
    pub addr: u64,
    /// Size in granules.
    pub granules: u32,
    /// Odd while a block is live; one more at each allocation and at each free.
    pub generation: u32,
    /// The extent that ends where this one begins, or [`NIL`].
    pub prev: u32,
    /// The extent that begins where this one ends, or [`NIL`].
    pub next: u32,
    /// Used: the stream it was allocated on. Free: the one stream it is pending on, [`COMPLETE`] or
    /// [`MIXED`].
    pub stream: u32,
    pub state: State,
    /// Used: its front says whether somebody holds it, and in which life.
    pub shelved: bool,
}

const _: () = assert!(size_of::<Hot>() == 32);

impl Hot {
    pub(crate) fn end(&self) -> u64 {
        self.addr + self.bytes()
    }

    pub(crate) fn bytes(&self) -> u64 {
        u64::from(self.granules) * super::size::GRANULE
    }

    pub(crate) fn is_free(&self) -> bool {
        self.state == State::Free
    }

    /// Makes it another extent. Its generation goes on.
    #[inline(always)]
    pub(crate) fn renew(&mut self, new: Hot) {
        let generation = self.generation;
        *self = Hot { generation, ..new };
    }
}

/// The part of a record that only frees across streams, statistics and diagnostics need.
#[derive(Debug, Clone, Default)]
pub(crate) struct Cold {
    pub space: SpaceId,
    /// Bytes as asked for, before any rounding; 0 unless used.
    pub requested: u64,
    /// Free: until when which streams may still touch it.
    pub uses: Uses,
    /// Free: the stream of the block that the memory last was.
    pub owner: u32,
    /// Free: how many frees there had been when the last byte of it was freed.
    pub freed: u64,
    /// Used: other streams that were recorded on the block.
    pub recorded: Vec<Recorded>,
    /// Used, in a view: the home extents that it was lent, in the order of the view.
    pub home: Vec<u32>,
    /// Lent: the block.
    pub lent_to: u32,
    /// Used: the front on whose shelf it lies.
    pub front: Option<&'static EngineFront>,
}

impl Cold {
    /// Makes it what a new one is. Word by word: little of it is ever set.
    fn clear(&mut self) {
        // All of them: what is left out would live on in the record's next life.
        let Cold {
            space,
            requested,
            uses,
            owner,
            freed,
            recorded,
            home,
            lent_to,
            front,
        } = self;
        *space = SpaceId::default();
        *requested = 0;
        *uses = Uses::None;
        (*owner, *freed, *lent_to) = (0, 0, 0);
        *front = None;
        if recorded.capacity() > 0 {
            *recorded = Vec::new();
        }
        if home.capacity() > 0 {
            *home = Vec::new();
        }
    }
}

/// A use of a live block on a stream other than its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Recorded {
    pub stream: u32,
    /// The ticket that covers the use, or `None`: whatever the stream was given until the free.
    pub ticket: Option<u64>,
}

const CHUNK_BITS: u32 = 12;
const CHUNK: usize = 1 << CHUNK_BITS;

/// All records of an allocator, in chunks that never move.
#[derive(Debug, Default)]
pub(crate) struct Records {
    hot: Vec<Box<[Hot; CHUNK]>>,
    cold: Vec<Box<[Cold; CHUNK]>>,
    vacant: Vec<u32>,
    made: u32,
}

impl Records {
    /// Takes a vacant record. Its generation goes on from its former life.
    pub(crate) fn make(&mut self, space: SpaceId, state: State, addr: u64, granules: u32) -> u32 {
        let id = self.vacant_id();
        self[id].renew(Hot {
            addr,
            granules,
            generation: 0,
            prev: NIL,
            next: NIL,
            stream: COMPLETE,
            state,
            shelved: false,
        });
        // The rest is as it was when the record was given back.
        self.cold_mut(id).space = space;
        id
    }

    /// A vacant record, whose [`Cold`] is a new one's; the caller says its space.
    #[inline(always)]
    pub(crate) fn vacant_id(&mut self) -> u32 {
        match self.vacant.pop() {
            Some(id) => id,
            None => self.new_id(),
        }
    }

    #[cold]
    #[inline(never)]
    fn new_id(&mut self) -> u32 {
        if self.made as usize == self.hot.len() * CHUNK {
            self.hot.push(boxed_array(Default::default));
            self.cold.push(boxed_array(Default::default));
        }
        self.made += 1;
        self.made - 1
    }

    /// Gives a record back.
    #[inline]
    pub(crate) fn retire(&mut self, id: u32) {
        let hot = &mut self[id];
        hot.state = State::Vacant;
        // A handle to the dead record must never look live.
        hot.generation = (hot.generation + 1) & !1;
        self.cold_mut(id).clear();
        self.vacant.push(id);
    }

    /// The record, if the id was ever handed out.
    pub(crate) fn get(&self, id: u32) -> Option<&Hot> {
        let chunk = self.hot.get((id >> CHUNK_BITS) as usize)?;
        Some(&chunk[id as usize % CHUNK])
    }

    #[inline]
    pub(crate) fn cold(&self, id: u32) -> &Cold {
        &self.cold[(id >> CHUNK_BITS) as usize][id as usize % CHUNK]
    }

    #[inline]
    pub(crate) fn cold_mut(&mut self, id: u32) -> &mut Cold {
        &mut self.cold[(id >> CHUNK_BITS) as usize][id as usize % CHUNK]
    }

    /// Records that describe something.
    pub(crate) fn len(&self) -> usize {
        self.made as usize - self.vacant.len()
    }

    /// Every record that describes something.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &Hot)> {
        (0..self.made)
            .map(|id| (id, &self[id]))
            .filter(|(_, hot)| hot.state != State::Vacant)
    }
}

impl std::ops::Index<u32> for Records {
    type Output = Hot;
    #[inline]
    fn index(&self, id: u32) -> &Hot {
        &self.hot[(id >> CHUNK_BITS) as usize][id as usize % CHUNK]
    }
}

impl std::ops::IndexMut<u32> for Records {
    #[inline]
    fn index_mut(&mut self, id: u32) -> &mut Hot {
        &mut self.hot[(id >> CHUNK_BITS) as usize][id as usize % CHUNK]
    }
}
