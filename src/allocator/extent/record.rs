//! Block records: 32 bytes that every operation accesses, and a separate part that only some operations need.
//!
//! A record describes one extent of address space: a block in use, a free piece, a range that a
//! driver call is working on, or a range without memory. Ids are 32 bits.

use crate::allocator::extent::origin::Origin;
use crate::allocator::extent::uses::Uses;

/// No record.
pub(crate) const NIL: u32 = u32::MAX;

/// [`Hot::stream`] of a free piece: complete.
pub(crate) const COMPLETE: u32 = u32::MAX;
/// [`Hot::stream`] of a free piece: pending on several streams.
pub(crate) const MIXED: u32 = u32::MAX - 1;

/// State of an extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum State {
    /// The record describes no extent and can be reused.
    #[default]
    Vacant,
    /// A live block.
    Used,
    /// Free memory.
    Free,
    /// Claimed while a driver call maps or releases it.
    Busy,
    /// Address space without memory.
    Unmapped,
    /// A live block of a graph pool; its memory belongs to the pool.
    Pooled,
    /// Part of a block that lies in a view: it cannot be allocated at its home address.
    Aliased,
    /// Memory that a failed rollback left in an unknown state: never allocated, retried by trim.
    Quarantined,
}

/// The collection of extents that a record belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub(crate) enum SpaceId {
    /// Requests above the small limit.
    #[default]
    Large,
    /// Classic: the small pool. Packed: the arena of pages.
    Small,
    /// Packed: address space for views. Its free extents are addresses without memory.
    Views,
}

/// The part of a record that every operation reads.
#[derive(Debug, Clone, Copy, Default)]
#[repr(align(32))]
pub(crate) struct Hot {
    /// First byte.
    pub addr: u64,
    /// Size in granules.
    pub granules: u32,
    /// Odd while a block is live; incremented at each allocation and each free. It
    /// repeats after 2^31 allocations.
    pub generation: u32,
    /// The extent that ends where this one begins, or [`NIL`].
    pub prev: u32,
    /// The extent that begins where this one ends, or [`NIL`].
    pub next: u32,
    /// Used: the stream it was allocated on. Free: the one stream it is pending on, [`COMPLETE`] or
    /// [`MIXED`].
    pub stream: u32,
    pub state: State,
    pub space: SpaceId,
    /// Used: the block is in the large-block cache of a stream cache, which knows whether it is live, and its
    /// generation.
    pub cached: bool,
    /// Used: the block is guarded.
    pub guarded: bool,
}

const _: () = assert!(size_of::<Hot>() == 32);

impl Hot {
    pub(crate) fn end(&self) -> u64 {
        self.addr + self.bytes()
    }

    pub(crate) fn bytes(&self) -> u64 {
        u64::from(self.granules) * crate::allocator::size::GRANULE
    }

    pub(crate) fn is_free(&self) -> bool {
        self.state == State::Free
    }

    /// Makes the record describe another extent. Its generation continues.
    #[inline(always)]
    pub(crate) fn renew(&mut self, new: Hot) {
        let generation = self.generation;
        *self = Hot { generation, ..new };
    }
}

/// The part of a record that only allocation and free, statistics and diagnostics need: one cache line.
#[derive(Debug, Clone, Default)]
#[repr(align(64))]
pub(crate) struct Cold {
    /// Requested bytes, before any rounding; 0 unless used.
    pub requested: u64,
    /// Free: the streams that may still access it, and until which ticket.
    pub uses: Uses,
    /// Free: the stream of the block that the memory belonged to last.
    pub owner: u32,
    /// Free: the number of frees when the last byte of it was freed.
    pub freed: u64,
    /// Aliased: the block.
    pub aliased_by: u32,
    /// Used: the origin of the block.
    pub origin: Origin,
    /// Allocated when there is anything to store in it, and kept for later uses of the record.
    rare: Option<Box<Rare>>,
}

const _: () = assert!(size_of::<Cold>() == 64);

/// Data that few blocks ever have.
#[derive(Debug, Clone, Default)]
struct Rare {
    /// Used: other streams that were recorded on the block.
    recorded: Vec<Recorded>,
    /// Used, in a view: the home extents that are aliased to it, in the order of the view.
    home: Vec<u32>,
}

impl Rare {
    #[cold]
    fn clear(&mut self) {
        self.recorded.clear();
        self.home.clear();
    }
}

impl Cold {
    /// Prepares it for the next extent of the record, field by field, because few of the fields are ever set.
    #[inline(always)]
    pub(crate) fn renew(&mut self, new_uses: Uses, new_owner: u32, new_freed: u64) {
        // Names every field, so that no new field survives into the record's next use unnoticed.
        let Cold {
            requested,
            uses,
            owner,
            freed,
            aliased_by,
            origin: _,
            rare,
        } = self;
        if let Some(rare) = rare {
            rare.clear();
        }
        (*uses, *owner, *freed) = (new_uses, new_owner, new_freed);
        (*requested, *aliased_by) = (0, 0);
    }

    /// Used: other streams that were recorded on the block.
    pub(crate) fn recorded(&self) -> &[Recorded] {
        self.rare.as_ref().map_or(&[], |rare| &rare.recorded)
    }

    /// Removes and returns the recorded uses.
    pub(crate) fn take_recorded(&mut self) -> Vec<Recorded> {
        let rare = self.rare.as_mut();
        rare.map_or_else(Vec::new, |rare| std::mem::take(&mut rare.recorded))
    }

    /// Used, in a view: the home extents that are aliased to it, in the order of the view.
    pub(crate) fn home(&self) -> &[u32] {
        self.rare.as_ref().map_or(&[], |rare| &rare.home)
    }

    pub(crate) fn take_home(&mut self) -> Vec<u32> {
        let rare = self.rare.as_mut();
        rare.map_or_else(Vec::new, |rare| std::mem::take(&mut rare.home))
    }

    /// Whether the block lies at its home and only its own stream used it.
    #[inline(always)]
    pub(crate) fn is_plain(&self) -> bool {
        match &self.rare {
            None => true,
            Some(rare) => rare.recorded.is_empty() && rare.home.is_empty(),
        }
    }
}

/// A use of a live block on a stream other than its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Recorded {
    pub stream: u32,
    /// The ticket that covers the use, or `None` for all work submitted to the stream until the free.
    pub ticket: Option<u64>,
}

/// Adds a use to those of a live block; true if its stream is new among them.
pub(crate) fn add_recorded(recorded: &mut Vec<Recorded>, new: Recorded) -> bool {
    match recorded.iter_mut().find(|r| r.stream == new.stream) {
        Some(known) => {
            // "Until the free" covers every earlier ticket.
            known.ticket = match (known.ticket, new.ticket) {
                (Some(a), Some(b)) => Some(a.max(b)),
                _ => None,
            };
            false
        }
        None => {
            recorded.push(new);
            true
        }
    }
}

/// Initial capacity in records.
const FIRST: usize = 1 << 12;

/// All records of an allocator. The arrays move when they grow; records are only accessed by id, so one index leads to
/// each, without a table of chunks.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Records {
    hot: Vec<Hot>,
    /// Has the same length as `hot`.
    cold: Vec<Cold>,
    /// The vacant record that is taken next, or [`NIL`]; the others follow in [`Hot::next`].
    vacant: u32,
    vacant_count: u32,
}

impl Default for Records {
    fn default() -> Self {
        Records {
            hot: Vec::new(),
            cold: Vec::new(),
            vacant: NIL,
            vacant_count: 0,
        }
    }
}

impl Records {
    /// Takes a vacant record. Its generation continues from its earlier use.
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
            space,
            cached: false,
            guarded: false,
        });
        self.cold_mut(id).renew(Uses::None, 0, 0);
        id
    }

    /// Returns a vacant record. The caller renews both parts of it.
    #[inline(always)]
    pub(crate) fn vacant_id(&mut self) -> u32 {
        let id = self.vacant;
        if id == NIL {
            return self.new_id();
        }
        self.vacant = self[id].next;
        self.vacant_count -= 1;
        id
    }

    #[cold]
    #[inline(never)]
    fn new_id(&mut self) -> u32 {
        if self.hot.is_empty() {
            self.hot.reserve(FIRST);
            self.cold.reserve(FIRST);
        }
        self.hot.push(Hot::default());
        self.cold.push(Cold::default());
        self.hot.len() as u32 - 1
    }

    /// Makes a record vacant, without uses: a list of pieces may still name it.
    #[inline(always)]
    pub(crate) fn retire(&mut self, id: u32) {
        let next = std::mem::replace(&mut self.vacant, id);
        self.vacant_count += 1;
        let hot = &mut self[id];
        hot.state = State::Vacant;
        hot.next = next;
        // A handle to the dead record must never look live.
        hot.generation = hot.generation.wrapping_add(1) & !1;
        self.cold_mut(id).renew(Uses::None, 0, 0);
    }

    /// Adds the right neighbour of an extent to it.
    #[inline(never)]
    pub(crate) fn join_next(&mut self, id: u32) {
        let joined = self[id].next;
        let Hot { granules, next, .. } = self[joined];
        let hot = &mut self[id];
        hot.granules += granules;
        hot.next = next;
        if next != NIL {
            self[next].prev = id;
        }
        self.retire(joined);
    }

    fn rare(&mut self, id: u32) -> &mut Rare {
        self.cold_mut(id).rare.get_or_insert_default()
    }

    /// Adds a use to those of a live block. Without a ticket it covers all work submitted to that stream until the
    /// free. True if the stream is new among them.
    pub(crate) fn record(&mut self, id: u32, new: Recorded) -> bool {
        add_recorded(&mut self.rare(id).recorded, new)
    }

    /// Stores the home extents that are aliased to a block in a view, in the order of the view.
    pub(crate) fn set_home(&mut self, id: u32, parts: Vec<u32>) {
        self.rare(id).home = parts;
    }

    /// Returns the record, if the id was ever assigned.
    pub(crate) fn get(&self, id: u32) -> Option<&Hot> {
        self.hot.get(id as usize)
    }

    /// Whether a record has this generation and this state.
    pub(crate) fn is_in(&self, (id, generation): (u32, u32), state: State) -> bool {
        let hot = self.get(id);
        hot.is_some_and(|hot| hot.generation == generation && hot.state == state)
    }

    #[inline]
    pub(crate) fn cold(&self, id: u32) -> &Cold {
        &self.cold[id as usize]
    }

    #[inline]
    pub(crate) fn cold_mut(&mut self, id: u32) -> &mut Cold {
        &mut self.cold[id as usize]
    }

    /// Returns the number of records that describe an extent.
    pub(crate) fn len(&self) -> usize {
        self.hot.len() - self.vacant_count as usize
    }

    /// Iterates over the records that describe an extent.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &Hot)> {
        (0..)
            .zip(&self.hot)
            .filter(|(_, hot)| hot.state != State::Vacant)
    }
}

impl std::ops::Index<u32> for Records {
    type Output = Hot;
    #[inline]
    fn index(&self, id: u32) -> &Hot {
        &self.hot[id as usize]
    }
}

impl std::ops::IndexMut<u32> for Records {
    #[inline]
    fn index_mut(&mut self, id: u32) -> &mut Hot {
        &mut self.hot[id as usize]
    }
}
