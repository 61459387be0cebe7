//! Steps that ask the allocator for something.

use cualloc::Error;
use cualloc::allocator::{Policy, Request};
use cualloc::driver::sys::*;
use cualloc::error::StreamMisuse;

use super::program::{Act, Step, size, tight_size};
use super::rng::Rng;
use super::table::requesting;
use super::tracker;
use super::world::{Done, Held, Kind, MEMORY, Slot, World};

const ALIGNMENTS: &[usize] = &[
    1 << 16,
    1 << 17,
    1 << 18,
    1 << 19,
    1 << 20,
    1 << 21,
    1 << 21,
];

impl World {
    pub fn request(&mut self, step: Step, rng: &mut Rng) -> Done {
        let Step { act, a, b, c } = step;
        let slot = c as usize % self.slots.len();
        match act {
            Act::Free => self.free_some(a, rng),
            Act::Trim => self.trim(slot, rng),
            Act::Synchronise => self.synchronise(slot),
            Act::Limit => {
                let limit = rng
                    .chance(60)
                    .then(|| self.setup.limit.unwrap_or(64 << 20) * (50 + rng.below(100)) / 100);
                self.slots[slot].allocator.set_limit(limit);
                Ok(())
            }
            Act::Mark => self.mark(slot, a),
            Act::Guard => self.guard(a, rng),
            Act::Unguard => {
                if !self.guards.is_empty() {
                    let at = a as usize % self.guards.len();
                    self.unguard(at);
                }
                Ok(())
            }
            Act::Look => self.look(slot),
            Act::Garbage => self.garbage(slot, a, rng),
            Act::Hook => self.hook(slot, a),
            Act::Stash => {
                let fits =
                    |h: &Held| matches!(h.kind, Kind::Block(_)) && !h.orphan && h.due.is_none();
                if let Some(at) = self.held.iter().position(fits) {
                    let held = self.held.swap_remove(at);
                    self.stash.lock().unwrap().push(held);
                }
                Ok(())
            }
            Act::Reopen => self.reopen(slot),
            Act::Abandon => self.abandon(slot),
            Act::Surge => self.surge(slot, (a, b), rng),
            Act::AllocateAligned if self.setup.tight => {
                self.allocate(act, slot, (a, b), rng)?;
                // Who was refused asks for less, and others ask for what lies beside.
                for n in 0..1 + rng.below(3) {
                    let again = if rng.chance(60) { b } else { rng.next() as u32 };
                    let less = (8, (rng.next() >> n) as u32);
                    self.allocate_for(Act::AllocateAtHand, slot, less, again, rng)?;
                }
                Ok(())
            }
            _ => self.allocate(act, slot, (a, b), rng),
        }
    }

    pub(super) fn refused(&self, what: &str, error: &Error) -> Done {
        if !self.calm() || error.is_out_of_memory() {
            return Ok(());
        }
        Err(format!("{what}: {error:?}"))
    }

    fn allocate(&mut self, act: Act, slot: usize, sizes: (u32, u32), rng: &mut Rng) -> Done {
        let lane = match self.setup.tight {
            true => sizes.1,
            false => rng.next() as u32,
        };
        self.allocate_for(act, slot, sizes, lane, rng)
    }

    /// An epoch ends and another begins: most is freed while its work goes on, and another stream asks for an
    /// aligned block that is larger than what is held.
    fn surge(&mut self, slot: usize, (a, b): (u32, u32), rng: &mut Rng) -> Done {
        let limit = self.setup.largest * 4 / 3;
        if rng.chance(60) {
            while let Some(last) = self.held.len().checked_sub(1) {
                let before = self.held.len();
                self.free(last, rng)?;
                if self.held.len() == before {
                    break;
                }
            }
            self.sim.complete_all();
            self.become_current(self.slots[slot].place);
            let _ = self.slots[slot].allocator.trim(0);
        }
        let walls = self.held.len();
        for n in 0..1 + rng.below(3) {
            let bytes = match n {
                0 => (64 << 10) + rng.below(256 << 10),
                _ => limit / 8 + rng.below(limit / 3),
            };
            self.allocate_bytes(Act::Allocate, slot, (bytes as usize, 1), a, rng)?;
        }
        // The other stream is known before.
        self.allocate_bytes(Act::Allocate, slot, (66 << 10, 1), b, rng)?;
        let mut at = self.held.len();
        while at > walls + 1 {
            at -= 1;
            if rng.chance(85) {
                self.free(at, rng)?;
            }
        }
        let bytes = (limit * (40 + rng.below(55)) / 100) as usize;
        let alignment = rng.pick(ALIGNMENTS);
        self.allocate_bytes(Act::AllocateAligned, slot, (bytes, alignment), b, rng)?;
        for n in 0..1 + rng.below(3) {
            let bytes = (64 << 10) + rng.below(1 << (20 - n));
            self.allocate_bytes(Act::AllocateAtHand, slot, (bytes as usize, 1), b, rng)?;
        }
        Ok(())
    }

    /// An allocation on a stream by its number.
    fn allocate_for(
        &mut self,
        act: Act,
        slot: usize,
        (a, b): (u32, u32),
        lane: u32,
        rng: &mut Rng,
    ) -> Done {
        let many = if self.setup.streams > 20 { 8 } else { 1 };
        let bytes = match self.setup.tight {
            true => tight_size(a, b, self.setup.largest),
            false => size(a, b, self.setup.largest / many),
        };
        let alignment = match rng.chance(80) {
            true => rng.pick(ALIGNMENTS),
            false => 1 << rng.below(22),
        };
        self.allocate_bytes(act, slot, (bytes, alignment), lane, rng)
    }

    fn allocate_bytes(
        &mut self,
        act: Act,
        slot: usize,
        (bytes, alignment): (usize, usize),
        lane: u32,
        rng: &mut Rng,
    ) -> Done {
        let Some(lane) = self.any_lane(slot, lane) else {
            return Ok(());
        };
        self.before_call(slot, lane);
        let allocator = &self.slots[slot].allocator;
        let it = &self.lanes[lane];
        let raw = it.raw as CUstream;
        let mut placed = Request::new(bytes).align(if rng.chance(50) { alignment } else { 1 });
        if rng.chance(60) {
            placed = placed.single_handle();
        }
        let placed = placed.views(rng.chance(50));
        let aligned = Request::new(bytes).align(alignment);
        let act = match act {
            Act::AllocateRaw if it.stream.is_some() && !self.setup.mixed => Act::Allocate,
            act => act,
        };
        let request = self.judged(slot, bytes, alignment);
        let owned = it.stream.is_some()
            && matches!(
                act,
                Act::Allocate | Act::AllocateAligned | Act::AllocateAtHand | Act::AllocatePlaced
            );
        let result = requesting(request, || match &it.stream {
            Some(stream) if owned => {
                let block = match act {
                    Act::Allocate => allocator.allocate(bytes, stream),
                    Act::AllocateAligned => allocator.allocate_with(aligned, stream),
                    Act::AllocatePlaced => allocator.allocate_with(placed, stream),
                    _ => {
                        let alignment = if rng.chance(40) { alignment } else { 1 };
                        let cached = Request::new(bytes).align(alignment).cached_only();
                        allocator.allocate_with(cached, stream)
                    }
                };
                block.map(|block| (block.ptr(), Kind::Block(block)))
            }
            _ => {
                let plain = act != Act::AllocatePlaced;
                // SAFETY: the stream is live until it was retired.
                let ptr = unsafe {
                    match act {
                        Act::AllocateAligned => allocator.allocate_raw_with(aligned, raw),
                        _ if plain => allocator.allocate_raw(bytes, raw),
                        _ => allocator.allocate_raw_with(placed, raw),
                    }
                };
                ptr.map(|ptr| (ptr, Kind::Raw))
            }
        });
        self.told(slot, lane, owned);
        match result {
            Ok((ptr, kind)) => {
                if matches!(kind, Kind::Block(_)) {
                    self.lanes[lane].kept_in.insert(slot);
                }
                let aligned = ptr.is_multiple_of(alignment as u64);
                if owned && act == Act::AllocateAligned && !aligned {
                    return Err(format!("{ptr:#x} is not aligned to {alignment}"));
                }
                self.handed_out(slot, lane, (ptr, bytes as u64), kind)
            }
            Err(Error::NotCached) => Ok(()),
            Err(_) if act == Act::AllocatePlaced => Ok(()),
            Err(error) => self.refused("an allocation was refused", &error),
        }
    }

    /// The description of a request for the judge of waits.
    fn judged(&self, slot: usize, bytes: usize, alignment: usize) -> tracker::Request {
        const GRANULE: u64 = 2 << 20;
        let Slot {
            allocator, place, ..
        } = &self.slots[slot];
        let used = self.sim.memory_in_use(self.places[*place].device);
        let device = (MEMORY - used).saturating_sub(allocator.stats().headroom);
        let held = allocator.stats().all.reserved.current;
        let limit = allocator.limit().unwrap_or(u64::MAX);
        let span = (bytes + alignment) as u64;
        let least = match self.setup.policy {
            Policy::Packed => 0,
            // A segment of the classic policy serves several requests.
            _ => 20 << 20,
        };
        tracker::Request {
            waits: self.setup.waits,
            bytes: bytes as u64,
            needed: (span.next_multiple_of(GRANULE) + GRANULE).max(least),
            room: limit.saturating_sub(held).min(device),
        }
    }

    pub fn told(&mut self, slot: usize, lane: usize, owned: bool) {
        let lane = &mut self.lanes[lane];
        match owned {
            true => lane.owned_in.insert(slot),
            false => lane.raw_in.insert(slot),
        };
    }

    /// Reports a block to the judge.
    pub fn handed_out(&mut self, slot: usize, lane: usize, at: (u64, u64), kind: Kind) -> Done {
        let number = self.number(slot, lane);
        let (ptr, bytes) = at;
        let mut tracker = self.checker.tracker();
        tracker.handed_out(ptr, bytes, number);
        let violation = tracker.take_violation();
        drop(tracker);
        if self.setup.tight && self.usable(lane) {
            // What is freed is in use, as a rule.
            self.work_on(lane, ptr, bytes, bytes);
        }
        self.hold(slot, lane, at, kind);
        violation.map_or(Ok(()), Err)
    }

    /// The program has memory.
    pub fn hold(&mut self, slot: usize, lane: usize, (ptr, bytes): (u64, u64), kind: Kind) {
        self.held.push(Held {
            slot,
            orphan: false,
            ptr,
            bytes,
            home: lane,
            epoch: self.lanes[lane].epoch,
            last: lane,
            recorded: Vec::new(),
            due: None,
            kind,
        });
    }

    fn free_some(&mut self, a: u32, rng: &mut Rng) -> Done {
        if self.held.is_empty() {
            return Ok(());
        }
        let index = a as usize % self.held.len();
        if matches!(self.held[index].kind, Kind::Layered(_)) {
            return Ok(());
        }
        self.free(index, rng)
    }

    /// Frees a block, in one of the ways there are.
    pub fn free(&mut self, index: usize, rng: &mut Rng) -> Done {
        if !self.is_over(index) {
            return Ok(());
        }
        let held = self.held.swap_remove(index);
        let (slot, ptr) = (held.slot, held.ptr);
        if !held.orphan {
            self.before_call(slot, held.home);
        }
        let block = self.checker.tracker().freed(ptr);
        let Held { kind, .. } = held;
        let (kind, result) = match kind {
            Kind::Block(block) if held.orphan || rng.chance(60) => {
                drop(block);
                return Ok(());
            }
            Kind::Block(block) if rng.chance(70) => match block.free() {
                Ok(()) => return Ok(()),
                Err(refused) => (Kind::Block(*refused.value), Err(refused.error)),
            },
            Kind::Block(block) => {
                let ptr = block.into_raw();
                // SAFETY: a live block; its work was recorded.
                (Kind::Raw, unsafe {
                    self.slots[slot].allocator.free_raw(ptr)
                })
            }
            Kind::Raw => {
                // SAFETY: as above.
                (Kind::Raw, unsafe {
                    self.slots[slot].allocator.free_raw(ptr)
                })
            }
            Kind::Layered(layered) => (Kind::Layered(layered), Ok(())),
        };
        let Err(error) = result else { return Ok(()) };
        self.checker.tracker().live_again(ptr, block);
        self.held.push(Held { kind, ..held });
        match self.calm() {
            true => Err(format!("a free was refused: {error:?}")),
            false => Ok(()),
        }
    }

    fn trim(&mut self, slot: usize, rng: &mut Rng) -> Done {
        let held = self.slots[slot].allocator.cached();
        let keep = if rng.chance(50) {
            0
        } else {
            rng.below(held + 1)
        };
        let place = self.slots[slot].place;
        self.become_current(place);
        let allocator = &self.slots[slot].allocator;
        let result = match rng.below(3) {
            0 | 1 => allocator.trim(keep),
            _ => allocator.empty_cache(),
        };
        match result {
            Ok(_) => Ok(()),
            Err(error) => self.refused("a trim was refused", &error),
        }
    }

    fn synchronise(&mut self, slot: usize) -> Done {
        self.become_current(self.slots[slot].place);
        match self.slots[slot].allocator.synchronize() {
            Ok(()) => Ok(()),
            Err(error) => self.refused("synchronize was refused", &error),
        }
    }

    fn mark(&mut self, slot: usize, a: u32) -> Done {
        let Some(lane) = self.any_lane(slot, a) else {
            return Ok(());
        };
        self.before_call(slot, lane);
        let raw = self.lanes[lane].raw as CUstream;
        // SAFETY: the stream is live.
        match unsafe { self.slots[slot].allocator.mark_raw(raw) } {
            Ok(()) | Err(Error::Stream(StreamMisuse::Unknown { .. })) => Ok(()),
            Err(error) => self.refused("a mark was refused", &error),
        }
    }

    fn guard(&mut self, a: u32, rng: &mut Rng) -> Done {
        if self.held.is_empty() || self.guards.len() > 6 {
            return Ok(());
        }
        let held = &self.held[a as usize % self.held.len()];
        if held.orphan || matches!(held.kind, Kind::Layered(_)) {
            return Ok(());
        }
        let (ptr, bytes) = super::world::part(held, rng);
        let allocator = &self.slots[held.slot].allocator;
        match allocator.guard(ptr, bytes) {
            Ok(guard) => {
                self.checker.tracker().guarded(ptr, bytes);
                self.guards.push((held.slot, bytes, guard));
                Ok(())
            }
            Err(error) => self.refused("a guard was refused", &error),
        }
    }

    pub fn unguard(&mut self, at: usize) {
        let (_, bytes, guard) = self.guards.swap_remove(at);
        self.checker.tracker().unguarded(guard.ptr(), bytes);
        drop(guard);
    }

    fn look(&mut self, slot: usize) -> Done {
        let allocator = &self.slots[slot].allocator;
        allocator
            .check()
            .map_err(|e| format!("the heap is wrong: {e}"))?;
        let (stats, snapshot) = allocator.stats_and_snapshot();
        let all = &stats.all;
        if all.allocated.current > all.reserved.current
            || all.requested.current > all.allocated.current
        {
            return Err(format!("more is in use than is held: {all:?}"));
        }
        let held = |h: &&Held| h.slot == slot && !h.orphan && !matches!(h.kind, Kind::Layered(_));
        let live = self.held.iter().filter(held).count() as u64;
        let stashed = self.stash.lock().unwrap();
        let live = live
            + stashed
                .iter()
                .filter(|h| h.slot == slot && !h.orphan)
                .count() as u64;
        let layered = !self.slots[slot].layers.is_empty();
        // A block dropped on a stream that captures is freed later.
        if !layered && self.calm() && self.setup.fault.is_none() && all.allocations.current != live
        {
            return Err(format!(
                "{} blocks are said to be live, {live} are",
                all.allocations.current
            ));
        }
        drop(snapshot);
        Ok(())
    }

    /// Frees of what is no block, which must be refused and change nothing.
    fn garbage(&mut self, slot: usize, a: u32, rng: &mut Rng) -> Done {
        let allocator = &self.slots[slot].allocator;
        let some = self.held.iter().find(|h| !h.orphan && h.bytes > 1);
        let ptr = match (a % 4, some) {
            (0, Some(held)) => held.ptr + 1 + rng.below(held.bytes - 1),
            (1, Some(held)) if held.slot != slot => held.ptr,
            (2, _) => 0,
            _ => rng.next() >> rng.below(40) | 1,
        };
        if self.held.iter().any(|h| h.ptr == ptr && h.slot == slot) {
            return Ok(());
        }
        // SAFETY: no block begins there, so nothing is freed.
        match unsafe { allocator.free_raw(ptr) } {
            Ok(()) if ptr == 0 => Ok(()),
            Ok(()) => Err(format!("{ptr:#x} is no block, and was freed")),
            Err(_) => Ok(()),
        }
    }
}
