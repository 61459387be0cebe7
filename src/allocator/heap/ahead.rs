//! Memory that is made before a request needs it: how much and where, planned as any growth, and what became of it.

use crate::allocator::extent::record::{NIL, SpaceId};
use crate::allocator::extent::uses::Uses;
use crate::allocator::extent::want::Want;
use crate::allocator::heap::Heap;
use crate::allocator::heap::growth::Bound;
use crate::allocator::physical::{Fresh, GrowthFailure};
use crate::allocator::report::{GrowthReason, MadeAhead};
use crate::allocator::size::{GRANULE, PHYSICAL_GRANULE};

/// Handles that are made in one step: so long a close, a trim or a suspension may have to wait for it.
const STEP: usize = 4;

/// Growths whose bytes are made ahead of the next ones: as much comes again while memory grows.
const GROWTHS: usize = 4;

/// What was made ahead of requests.
#[derive(Debug, Default)]
pub(crate) struct Ahead {
    /// Of `used` only what was seen before it left the list below.
    figures: MadeAhead,
    /// Bytes that the thread is making, or has in hand to give back.
    pub under_way: u64,
    /// Handles that nobody was seen to use yet: home and bytes.
    unused: Vec<(u64, u64)>,
    /// Somebody who only makes memory ahead had the lock: who finds it taken met no other request.
    pub had_lock: bool,
}

/// What the last growths took.
#[derive(Debug, Default)]
pub(crate) struct Growths {
    bytes: [u64; GROWTHS],
    next: usize,
}

impl Growths {
    /// Counts one more. Returns what all of them took that count.
    pub(crate) fn count(&mut self, bytes: u64) -> u64 {
        self.bytes[self.next % GROWTHS] = bytes;
        self.next = self.next.wrapping_add(1);
        self.bytes.iter().sum()
    }
}

/// A wish for memory before anybody needs it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked {
    /// The request that memory was last made for.
    pub want: Want,
    /// Where that memory ends.
    pub end: u64,
    /// How many bytes are to be free there.
    pub bytes: u64,
    /// Address space was leased for it.
    pub leased: bool,
}

/// What is to be done for it next.
#[derive(Debug)]
pub(crate) enum Plan {
    Nothing,
    /// Lease so many bytes of addresses.
    Lease(u64),
    Make(Fresh),
}

impl Heap {
    /// Plans the next few handles behind what a growth made: within the soft cap, and never where a limit is near,
    /// so that requests find all the room that they would find without.
    pub(crate) fn plan_ahead(&mut self, asked: &Asked) -> Plan {
        if self.refuse().is_err() || self.orphaned || self.suspended.working {
            return Plan::Nothing;
        }
        self.review_ahead();
        let lacking = asked.bytes.saturating_sub(self.free_before(asked.end));
        let lacking = lacking.next_multiple_of(PHYSICAL_GRANULE);
        let room = self.room_within(Bound::SoftCap);
        let bytes = lacking.min(room / PHYSICAL_GRANULE * PHYSICAL_GRANULE);
        if bytes == 0 || !self.bounds_hold(bytes) {
            return Plan::Nothing;
        }
        let Some(hole) = self.extents.large.holes().get(&asked.end).copied() else {
            return match asked.leased {
                true => Plan::Nothing,
                false => Plan::Lease(bytes),
            };
        };
        let bytes = bytes.min(self.extents.records[hole].bytes());
        let mut sizes = self.handle_sizes(&asked.want, asked.end, bytes, 0);
        sizes.truncate(STEP);
        let bytes: u64 = sizes.iter().sum();
        let claimed = self.claim(SpaceId::Large, hole, 0, (bytes / GRANULE) as u32);
        let Some((id, shards)) = claimed else {
            return Plan::Nothing;
        };
        self.physical.planned += bytes;
        self.ahead.under_way += bytes;
        Plan::Make(Fresh {
            space: SpaceId::Large,
            id,
            shards,
            addr: asked.end,
            sizes,
            stretches: self.physical.stretches(asked.end, bytes),
            reason: GrowthReason::Short,
        })
    }

    /// Free bytes right before an address of the large arena.
    fn free_before(&self, addr: u64) -> u64 {
        let Some(before) = addr.checked_sub(GRANULE) else {
            return 0;
        };
        let (mut bytes, mut at) = (0, self.extents.piece_around(SpaceId::Large, before));
        while let Some(id) = at {
            let hot = &self.extents.records[id];
            bytes += hot.bytes();
            let prev = hot.prev;
            at = (prev != NIL && self.extents.records[prev].is_free()).then_some(prev);
        }
        bytes
    }

    /// It was made: memory that nobody has used, for whichever stream comes first.
    pub(crate) fn made_ahead(&mut self, asked: &Asked, fresh: &Fresh, handles: &[u64]) {
        self.ahead.under_way -= fresh.bytes();
        let homes = self.hold_all(fresh, handles);
        self.ahead.figures.handles += homes.len() as u64;
        self.ahead.figures.bytes += fresh.bytes();
        let made = homes.into_iter().zip(fresh.sizes.iter().copied());
        self.ahead.unused.extend(made);
        let owner = asked.want.stream;
        self.extents
            .release(SpaceId::Large, fresh.id, owner, Uses::None);
    }

    /// It was not made: everything as before, but for what could not be undone.
    pub(crate) fn not_made_ahead(&mut self, fresh: Fresh, failure: GrowthFailure) {
        self.ahead.under_way -= fresh.bytes();
        let space = fresh.space;
        self.not_made(fresh);
        self.set_apart(space, failure);
    }

    /// A handle goes back to the driver, and another may get its home.
    pub(crate) fn gone_ahead(&mut self, home: u64) {
        self.ahead.unused.retain(|(made, _)| *made != home);
    }

    /// Whether a handle that was made ahead is free as it was made.
    fn is_unused(&self, (home, bytes): (u64, u64)) -> bool {
        let piece = self.extents.piece_around(SpaceId::Large, home);
        piece.is_some_and(|id| self.extents.records[id].end() >= home + bytes)
    }

    /// Counts what was made ahead and is in use by now.
    fn review_ahead(&mut self) {
        self.ahead.figures = self.made_ahead_figures();
        let unused = std::mem::take(&mut self.ahead.unused);
        let unused = unused.into_iter().filter(|made| self.is_unused(*made));
        self.ahead.unused = unused.collect();
    }

    /// What was made ahead so far, and how much of it was seen in use.
    pub(crate) fn made_ahead_figures(&self) -> MadeAhead {
        let mut figures = self.ahead.figures;
        for (home, bytes) in &self.ahead.unused {
            if !self.is_unused((*home, *bytes)) {
                figures.used += 1;
                figures.used_bytes += bytes;
            }
        }
        figures
    }
}
