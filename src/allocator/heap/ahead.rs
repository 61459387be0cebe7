//! Memory that is made before a request needs it: how much and where, planned as any growth, and what became of it.

use crate::allocator::extent::invariant::holds;
use crate::allocator::extent::record::{NIL, SpaceId};
use crate::allocator::extent::uses::Uses;
use crate::allocator::heap::Heap;
use crate::allocator::heap::growth::Bound;
use crate::allocator::physical::ahead::{Asked, Plan, Unused};
use crate::allocator::physical::{Fresh, GrowthFailure};
use crate::allocator::report::{GrowthReason, MadeAhead};
use crate::allocator::size::{GRANULE, PHYSICAL_GRANULE};
use crate::error::Error;

/// Handles that are made in one step: so long a close, a trim or a suspension may have to wait for it.
const STEP: usize = 4;

impl Heap {
    /// Plans the next few handles behind what a growth made: within the soft cap, and never where a limit is near,
    /// so that requests find all the room that they would find without.
    pub(crate) fn plan_ahead(&mut self, asked: &Asked) -> Plan {
        if self.refuse().is_err() || self.orphaned || self.suspended.working {
            return Plan::Nothing;
        }
        self.review_ahead();
        let free = self.free_before(asked.end, asked.bytes);
        let lacking = asked.bytes.saturating_sub(free);
        let lacking = lacking.next_multiple_of(PHYSICAL_GRANULE);
        let room = self.room_ahead() / PHYSICAL_GRANULE * PHYSICAL_GRANULE;
        let bytes = lacking.min(room);
        // Graph pools need room below a limit, too.
        if bytes == 0 || !self.physical.bounds_hold(self.present() + bytes) {
            return Plan::Nothing;
        }
        let Some(hole) = self.extents.large.holes().get(&asked.end).copied() else {
            // More addresses come behind the last ones, and are of no use anywhere else.
            let regions = self.extents.large.regions();
            let last = regions
                .last_key_value()
                .map(|(base, region)| base + region.bytes);
            return match last == Some(asked.end) && !asked.leased {
                true => Plan::Lease(bytes),
                false => Plan::Nothing,
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

    /// Bytes that may be made: none that requests under way may need, and none beyond the soft cap as it is if they fail.
    fn room_ahead(&self) -> u64 {
        if self.streams.iter().all(|(_, slot)| slot.calls == 0) {
            return self.room_within(Bound::SoftCap);
        }
        // So much they have raised the peak by at most, and what is being made for them comes out of that.
        let now = self.peak_live.min(self.requested_now());
        let announced = self.peak_live - now;
        let making = self.ahead.under_way - self.ahead.going;
        let theirs = announced.min(self.physical.planned - making);
        let cap = self.physical.soft_cap(now, self.streams.in_flight());
        let below_cap = cap.saturating_sub(self.held() - theirs);
        let below_limit = self.room().saturating_sub(announced - theirs);
        below_cap.min(below_limit)
    }

    /// Free bytes right before an address of the large arena, as far as they count.
    fn free_before(&self, addr: u64, most: u64) -> u64 {
        let Some(before) = addr.checked_sub(GRANULE) else {
            return 0;
        };
        let (mut bytes, mut at) = (0, self.extents.piece_around(SpaceId::Large, before));
        while let Some(id) = at.filter(|_| bytes < most) {
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
        self.ahead.unused.extend(made.map(|(home, bytes)| Unused {
            home,
            bytes,
            leaves: false,
        }));
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
        self.ahead.unused.retain(|made| made.home != home);
    }

    /// A free handle is claimed to be given back, or is free memory again.
    pub(crate) fn leaves_ahead(&mut self, home: u64, leaves: bool) {
        let mut made = self.ahead.unused.iter_mut();
        if let Some(made) = made.find(|made| made.home == home) {
            made.leaves = leaves;
        }
    }

    /// Whether a handle that was made ahead is free as it was made.
    fn is_unused(&self, made: &Unused) -> bool {
        let piece = self.extents.piece_around(SpaceId::Large, made.home);
        let end = made.home + made.bytes;
        made.leaves || piece.is_some_and(|id| self.extents.records[id].end() >= end)
    }

    /// Counts what was made ahead and is in use by now.
    fn review_ahead(&mut self) {
        self.ahead.figures = self.made_ahead_figures();
        let mut unused = std::mem::take(&mut self.ahead.unused);
        unused.retain(|made| self.is_unused(made));
        self.ahead.unused = unused;
    }

    /// The last rule of [`check`](Self::check).
    pub(crate) fn check_ahead(&self) -> Result<(), Error> {
        let making = self.ahead.under_way.checked_sub(self.ahead.going);
        holds(
            "what is being made ahead is planned",
            making.is_some_and(|making| making <= self.physical.planned),
        )?;
        let is_held = |made: &Unused| {
            let held = self.physical.holdings.get(&made.home);
            held.is_some_and(|held| held.bytes == made.bytes)
        };
        holds(
            "what was made ahead is held",
            self.ahead.unused.iter().all(is_held),
        )
    }

    /// What was made ahead so far, and how much of it was seen in use.
    pub(crate) fn made_ahead_figures(&self) -> MadeAhead {
        let mut figures = self.ahead.figures;
        for made in &self.ahead.unused {
            if !self.is_unused(made) {
                figures.used += 1;
                figures.used_bytes += made.bytes;
            }
        }
        figures
    }
}
