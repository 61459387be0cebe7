//! From a request to memory: the ladder that a miss climbs.
//!
//! Each rung is tried only when those below have nothing, and after a rung that changed something
//! the climb begins again at the first. Driver calls happen without the lock; what they work on is
//! claimed before, so that nobody else can touch it, and put back if they fail.

use super::engine::{Engine, Guard};
use super::error::Error;
use super::figures::{GrowthReason, free_among};
use super::fit::Run;
use super::memory::GrowthFailure;
use super::plan::Growth;
use super::records::{SpaceId, State as Extent};
use super::rungs::{Climb, Step};
use super::state::{State, Want};

impl Engine {
    /// Finds or makes room for a request. The extent comes back claimed, ready for its
    /// stream, with whether the ladder had to be climbed for it.
    pub(crate) fn obtain<'a>(
        &'a self,
        mut state: Guard<'a>,
        want: &Want,
    ) -> Result<(Guard<'a>, u32, bool), Error> {
        if state.streams.several() {
            state = self.poll(state)?;
        } else {
            state.adopt_complete(want.space, want.stream);
        }
        state.large_request(want);
        let mut climb = Climb::default();
        loop {
            match self.next_step(&mut state, want, &mut climb) {
                Step::Take(run) => {
                    let Some(id) = state.take(want, run) else {
                        continue;
                    };
                    state.stats.rungs.ready += 1;
                    return Ok((state, id, climb.missed));
                }
                Step::Wait(run) => {
                    let Some((id, shards, waits)) = state.take_waiting(want, run) else {
                        continue;
                    };
                    drop(state);
                    let waited = self.queue_waits(want.stream, &waits);
                    drop(waits);
                    state = self.lock();
                    if let Err(error) = waited {
                        state.restore(want.space, id, shards);
                        return Err(error);
                    }
                    return Ok((state, id, climb.missed));
                }
                Step::Place(place) => {
                    let taken;
                    (state, taken) = self.take_place(state, want, place)?;
                    if let Some(id) = taken {
                        return Ok((state, id, climb.missed));
                    }
                }
                Step::Reserve(space, bytes) => {
                    drop(state);
                    let reserved = self.reserve_span(space, bytes);
                    state = self.lock();
                    match reserved {
                        Ok(()) => {}
                        // Without addresses for a view there is always growth.
                        Err(Error::Driver(error)) if space == SpaceId::Views => {
                            climb.unstitched = true;
                            climb.failure = Some(error);
                        }
                        Err(Error::Driver(error)) if state.missing(want).is_some() => {
                            climb.cramped = true;
                            climb.failure = Some(error);
                        }
                        Err(error) => match error.driver_error() {
                            // No address space: as good as no memory.
                            Some(refusal) if refusal.is_out_of_memory() => {
                                state.stats.misses += 1;
                                state.stats.ooms += 1;
                                return Err(self.out_of_memory(state, want, Some(refusal)));
                            }
                            _ => return Err(error),
                        },
                    }
                }
                Step::View(run) => {
                    let taken;
                    (state, taken) = self.take_in_view(state, want, run)?;
                    if let Some(id) = taken {
                        return Ok((state, id, climb.missed));
                    }
                }
                Step::Stitch(stitch) => {
                    climb.missed = true;
                    climb.just_cut = false;
                    let stitched;
                    (state, stitched) = self.stitch(state, want, *stitch, &mut climb)?;
                    climb.unstitched = stitched.is_none();
                    if let Some(id) = stitched {
                        return Ok((state, id, true));
                    }
                }
                Step::Evict(idle) => {
                    climb.evicted = true;
                    drop(state);
                    self.evict(&idle)?;
                    state = self.lock();
                }
                Step::Shorten(cut) => {
                    climb.shortened = true;
                    climb.just_cut = true;
                    drop(state);
                    match self.shorten(cut) {
                        Ok(()) => {}
                        // A view that keeps its end stands in nobody's way.
                        Err(Error::Driver(error)) => log::debug!("a view was kept: {error}"),
                        Err(error) => return Err(error),
                    }
                    state = self.lock();
                }
                Step::MakeWay(idle) => {
                    drop(state);
                    match self.evict(&idle) {
                        Ok(()) => {}
                        // Without addresses for a view there is always growth.
                        Err(Error::Driver(error)) => {
                            climb.unstitched = true;
                            climb.failure = Some(error);
                        }
                        Err(error) => return Err(error),
                    }
                    state = self.lock();
                }
                Step::Grow(growth) => {
                    climb.missed = true;
                    let grown;
                    (state, grown) = self.grow(state, want, growth, &mut climb)?;
                    if let Some(id) = grown {
                        return Ok((state, id, true));
                    }
                }
                Step::Supply(growth) => {
                    climb.missed = true;
                    climb.supplied = true;
                    state = self.supply(state, want, growth, &mut climb)?;
                }
                Step::Settle => {
                    climb.settled = true;
                    if state.settle_shelves() {
                        state = self.mark_due(state);
                        state = self.poll(state)?;
                    }
                }
                Step::Flush => {
                    climb.flushed = true;
                    if state.flush_fronts() {
                        state.stats.rungs.flushed += 1;
                    }
                }
                Step::Retry => {
                    climb.retried = true;
                    drop(state);
                    match self.retry_strays() {
                        // What still cannot be released stays behind.
                        Ok(_) | Err(Error::Driver(_)) => {}
                        Err(error) => return Err(error),
                    }
                    state = self.lock();
                }
                Step::Release(plan) => {
                    climb.missed = true;
                    state.stats.rungs.released += 1;
                    drop(state);
                    let done = self.release(plan);
                    state = self.lock();
                    done?;
                }
                Step::Mark => {
                    climb.marked = true;
                    let key = state.streams[want.stream].key;
                    drop(state);
                    self.mark(want.stream, key)?;
                    state = self.lock();
                }
                Step::AskAgain => {
                    climb.asked_again = true;
                    state.full_at = None;
                }
                Step::HostWait(stream, bound, event) => {
                    climb.missed = true;
                    state.stats.rungs.host_waits += 1;
                    drop(state);
                    self.host_wait(stream, bound, event)?;
                    state = self.lock();
                    climb.look_again();
                }
                Step::Hook(hook, bytes) => {
                    climb.missed = true;
                    state.stats.rungs.hooks += 1;
                    drop(state);
                    hook(bytes);
                    state = self.lock();
                    // What it freed may be the driver's again, without having been ours.
                    state.full_at = None;
                    // What the hook freed may itself be flushed and marked.
                    climb.look_again();
                    climb.marked = false;
                }
                Step::Synchronise => {
                    climb.missed = true;
                    climb.synchronised = true;
                    state.stats.rungs.synchronised += 1;
                    drop(state);
                    match self.synchronise() {
                        // The rung is not there while something captures.
                        Err(Error::Capturing { .. }) => {}
                        done => done?,
                    }
                    state = self.lock();
                    climb.look_again();
                }
                Step::Fail => {
                    climb.missed = true;
                    state.stats.misses += 1;
                    state.stats.ooms += 1;
                    // The next request asks the driver anew: others may have freed meanwhile.
                    state.full_at = None;
                    return Err(self.out_of_memory(state, want, climb.refusal.or(climb.failure)));
                }
            }
        }
    }

    /// Asks the driver for memory.
    fn grow<'a>(
        &'a self,
        state: Guard<'a>,
        want: &Want,
        mut growth: Growth,
        climb: &mut Climb,
    ) -> Result<(Guard<'a>, Option<u32>), Error> {
        let reason = state.growth_reason(want, free_among(&growth.shards));
        drop(state);
        if !self.packed {
            return self.grow_segment(want, growth, reason, climb);
        }
        // Their events may have no other holder by the end, and are not destroyed under the lock.
        let waits = std::mem::take(&mut growth.waits);
        match self.map(growth.addr, &growth.sizes) {
            Ok(handles) => {
                let waited = self.queue_waits(want.stream, &waits);
                drop(waits);
                let mut state = self.lock();
                let id = state.grown(want, &growth, &handles);
                state.note_growth(reason, want, growth.bytes());
                if let Err(error) = waited {
                    // The new memory stays, as free memory; so do the tags of what was free before.
                    state.ungrow(want, &growth, id);
                    return Err(error);
                }
                Ok((state, Some(id)))
            }
            Err(failure) => {
                drop(waits);
                Ok((self.not_grown(growth, failure, climb)?, None))
            }
        }
    }

    /// Asks the driver for free memory.
    fn supply<'a>(
        &'a self,
        state: Guard<'a>,
        want: &Want,
        growth: Growth,
        climb: &mut Climb,
    ) -> Result<Guard<'a>, Error> {
        let reason = state.growth_reason(want, 0);
        drop(state);
        match self.map(growth.addr, &growth.sizes) {
            Ok(handles) => {
                let mut state = self.lock();
                state.supplied(want, &growth, &handles);
                state.note_growth(reason, want, growth.bytes());
                Ok(state)
            }
            Err(failure) => self.not_grown(growth, failure, climb),
        }
    }

    /// The driver had no memory for a growth.
    fn not_grown<'a>(
        &'a self,
        growth: Growth,
        failure: GrowthFailure,
        climb: &mut Climb,
    ) -> Result<Guard<'a>, Error> {
        let (error, asked) = (failure.error, growth.bytes());
        let free = self.driver_free(error);
        let mut state = self.lock();
        state.growth_failed(growth, failure);
        self.refused(&mut state, error, free.min(asked - 1), climb)?;
        Ok(state)
    }

    fn grow_segment<'a>(
        &'a self,
        want: &Want,
        growth: Growth,
        reason: GrowthReason,
        climb: &mut Climb,
    ) -> Result<(Guard<'a>, Option<u32>), Error> {
        let bytes = growth.bytes();
        let made = self
            .context
            .enter()
            .and_then(|entered| entered.mem_alloc(bytes as usize));
        let free = made
            .as_ref()
            .err()
            .map_or(0, |error| self.driver_free(*error));
        let mut state = self.lock();
        state.planned -= bytes;
        match made {
            Ok(addr) => {
                let id = state.segment(want, addr, bytes);
                state.note_growth(reason, want, bytes);
                Ok((state, id))
            }
            Err(error) => {
                self.refused(&mut state, error, free.min(bytes - 1), climb)?;
                Ok((state, None))
            }
        }
    }

    /// What the driver has left after a refusal; 0 if it does not say, or refused for another
    /// reason.
    pub(crate) fn driver_free(&self, error: crate::driver::DriverError) -> u64 {
        if !error.is_out_of_memory() {
            return 0;
        }
        let info = self.context.enter().and_then(|entered| entered.mem_info());
        info.map_or(0, |info| info.free)
    }

    /// The driver refused. Want of memory below our own limit counts as a limit reached, until
    /// something is given back; anything else is an error.
    pub(crate) fn refused(
        &self,
        state: &mut State,
        error: crate::driver::DriverError,
        free: u64,
        climb: &mut Climb,
    ) -> Result<(), Error> {
        if !error.is_out_of_memory() {
            return Err(self.error(error));
        }
        state.stats.retries += 1;
        state.full_at = Some(state.stats.all.reserved.current + state.planned + free);
        climb.refusal = Some(error);
        Ok(())
    }
}

impl State {
    /// Plans a segment of the classic policy.
    pub(crate) fn plan_segment(&mut self, want: &Want) -> Option<Growth> {
        let bytes = self.missing(want)?;
        if bytes > self.room() {
            return None;
        }
        self.planned += bytes;
        Some(Growth {
            space: want.space,
            id: super::records::NIL,
            shards: Vec::new(),
            waits: Vec::new(),
            skip: 0,
            addr: 0,
            sizes: vec![bytes],
        })
    }

    /// A segment arrived: the request is taken from its front.
    fn segment(&mut self, want: &Want, addr: u64, bytes: u64) -> Option<u32> {
        let granules = u32::try_from(bytes / super::size::GRANULE).ok()?;
        self.hold(addr, bytes, None, want.space);
        let (space, records) = self.parts(want.space);
        let uses = super::uses::Uses::one(want.stream, 0);
        let first = space.add_region(records, addr, granules, uses);
        records.cold_mut(first).owner = want.stream;
        self.take(
            want,
            Run {
                first,
                addr,
                granules: u64::from(granules),
            },
        )
    }

    /// Makes what a growth brought free memory: a wait for what lay beside it failed.
    fn ungrow(&mut self, want: &Want, growth: &Growth, id: u32) {
        let slot = &mut self.streams[want.stream];
        slot.open_uses += 1;
        let mut uses = super::uses::Uses::one(want.stream, slot.open);
        for shard in &growth.shards {
            uses = uses.union(&shard.uses);
        }
        if matches!(uses, super::uses::Uses::Many(_)) {
            let bytes = self.records[id].bytes();
            self.mixed_added(want.space, bytes);
        }
        let (space, records) = self.parts(want.space);
        records.cold_mut(id).owner = want.stream;
        records[id].state = Extent::Busy;
        space.release(records, id, uses);
    }
}
