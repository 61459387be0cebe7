//! From a request to memory: the ladder that a miss climbs.
//!
//! Each rung is tried only when those below have nothing, and after a rung that changed something
//! the climb begins again at the first. Driver calls happen without the lock; what they work on is
//! claimed before, so that nobody else can touch it, and put back if they fail.

use std::sync::Arc;

use super::engine::{Engine, Guard};
use super::error::Error;
use super::fit::Run;
use super::plan::{Growth, Release};
use super::records::{SpaceId, State as Extent};
use super::state::{State, Want};

/// A ready extent is passed over for one that needs a wait if it is longer than this many times the
/// other (plus a page).
const TOLERANCE: u64 = 16;
const TOLERANCE_SLACK: u64 = super::size::PAGE / super::size::GRANULE;

/// What a climb has done already.
#[derive(Default)]
struct Climb {
    flushed: bool,
    marked: bool,
    hooks: Option<std::vec::IntoIter<Arc<super::hooks::ReliefHook>>>,
    synchronised: bool,
    missed: bool,
    /// The driver's last refusal.
    refusal: Option<crate::driver::DriverError>,
}

/// The next rung.
enum Step {
    Take(Run),
    Wait(Run),
    Reserve(u64),
    Grow(Growth),
    Flush,
    Release(Vec<Release>),
    Mark,
    HostWait(u32, u64, Arc<crate::driver::Event>),
    Hook(Arc<super::hooks::ReliefHook>, u64),
    Synchronise,
    Fail,
}

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
                    state = self.lock();
                    if let Err(error) = waited {
                        state.restore(want.space, id, shards);
                        return Err(error);
                    }
                    return Ok((state, id, climb.missed));
                }
                Step::Reserve(bytes) => {
                    drop(state);
                    self.reserve_span(want.space, bytes)?;
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
                Step::Flush => {
                    climb.flushed = true;
                    if state.flush_pages() {
                        state.stats.rungs.flushed += 1;
                    }
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
                    drop(state);
                    self.mark(want.stream)?;
                    state = self.lock();
                }
                Step::HostWait(stream, bound, event) => {
                    climb.missed = true;
                    state.stats.rungs.host_waits += 1;
                    drop(state);
                    self.host_wait(stream, bound, event)?;
                    state = self.lock();
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
                    climb.flushed = false;
                    climb.marked = false;
                }
                Step::Synchronise => {
                    climb.missed = true;
                    climb.synchronised = true;
                    state.stats.rungs.synchronised += 1;
                    drop(state);
                    self.synchronise()?;
                    state = self.lock();
                }
                Step::Fail => {
                    climb.missed = true;
                    state.stats.misses += 1;
                    state.stats.ooms += 1;
                    // The next request asks the driver anew: others may have freed meanwhile.
                    state.full_at = None;
                    return Err(self.out_of_memory(state, want, climb.refusal));
                }
            }
        }
    }

    fn next_step(&self, state: &mut State, want: &Want, climb: &mut Climb) -> Step {
        if let Some(step) = self.fitting(state, want) {
            return step;
        }
        if self.packed {
            if state.missing(want).is_none() {
                return Step::Reserve(u64::from(want.span()) * super::size::GRANULE);
            }
            let room = state.soft_room().min(state.room());
            if let Some(growth) = state.plan_growth(want, room, false) {
                state.stats.rungs.grown += 1;
                return Step::Grow(growth);
            }
        } else if let Some(growth) = state.plan_segment(want) {
            state.stats.rungs.grown += 1;
            return Step::Grow(growth);
        }
        if let Some(run) = self.behind_waits(state, want) {
            state.stats.rungs.waited += 1;
            return Step::Wait(run);
        }
        if self.packed {
            let room = state.room();
            let growth = state
                .plan_growth(want, room, false)
                .or_else(|| state.plan_growth(want, room, true));
            if let Some(growth) = growth {
                state.stats.rungs.grown_hard += 1;
                return Step::Grow(growth);
            }
        }
        self.make_room(state, want, climb)
    }

    /// A fitting extent: ready, or much tighter behind a wait.
    fn fitting(&self, state: &mut State, want: &Want) -> Option<Step> {
        let finder = state.finder(want.space, want.stream)?;
        let ready = finder.ready_run(want)?;
        if self.packed && state.streams.several() {
            let (tightest, _) = finder.reachable_runs(want);
            if let Some(tight) = tightest
                && ready.granules > (1 + TOLERANCE) * tight.granules + TOLERANCE_SLACK
            {
                state.stats.rungs.tighter += 1;
                return Some(Step::Wait(tight));
            }
        }
        Some(Step::Take(ready))
    }

    /// Memory that fits behind waits: where the newest of them is the oldest.
    fn behind_waits(&self, state: &State, want: &Want) -> Option<Run> {
        if !state.streams.several() {
            return None;
        }
        state
            .finder(want.space, want.stream)?
            .reachable_runs(want)
            .1
    }

    /// The rungs that make room below a limit.
    fn make_room(&self, state: &mut State, want: &Want, climb: &mut Climb) -> Step {
        if !climb.flushed {
            return Step::Flush;
        }
        if let Some(missing) = state.missing(want) {
            let excess = missing.saturating_sub(state.room());
            let plan = if excess > 0 {
                state.plan_release(excess, self.context.key())
            } else {
                Vec::new()
            };
            if !plan.is_empty() {
                return Step::Release(plan);
            }
        }
        if !climb.marked && !state.streams[want.stream].covered() {
            return Step::Mark;
        }
        let oldest = state
            .streams
            .iter()
            .filter_map(|(stream, slot)| slot.markers.front().map(|m| (m.order, stream, m)))
            .min_by_key(|(order, _, _)| *order);
        if let Some((_, stream, marker)) = oldest {
            return Step::HostWait(stream, marker.bound, Arc::clone(&marker.event));
        }
        let hooks = climb
            .hooks
            .get_or_insert_with(|| self.hooks.all().into_iter());
        if let Some(hook) = hooks.next() {
            let missing = state
                .missing(want)
                .unwrap_or(u64::from(want.span()) * super::size::GRANULE);
            return Step::Hook(hook, missing.saturating_sub(state.room()));
        }
        if !climb.synchronised && state.streams.iter().any(|(_, slot)| !slot.covered()) {
            return Step::Synchronise;
        }
        Step::Fail
    }

    /// Asks the driver for memory.
    fn grow<'a>(
        &'a self,
        state: Guard<'a>,
        want: &Want,
        growth: Growth,
        climb: &mut Climb,
    ) -> Result<(Guard<'a>, Option<u32>), Error> {
        drop(state);
        if !self.packed {
            return self.grow_segment(want, growth, climb);
        }
        match self.map(&growth) {
            Ok(handles) => {
                let waited = self.queue_waits(want.stream, &growth.waits);
                let mut state = self.lock();
                let id = state.grown(want, &growth, &handles);
                if let Err(error) = waited {
                    // The new memory stays, as free memory; so do the tags of what was free before.
                    state.ungrow(want, &growth, id);
                    return Err(error);
                }
                Ok((state, Some(id)))
            }
            Err(failure) => {
                let mut state = self.lock();
                let error = failure.error;
                state.growth_failed(growth, failure);
                self.refused(&mut state, error, climb)?;
                Ok((state, None))
            }
        }
    }

    fn grow_segment<'a>(
        &'a self,
        want: &Want,
        growth: Growth,
        climb: &mut Climb,
    ) -> Result<(Guard<'a>, Option<u32>), Error> {
        let bytes = growth.bytes();
        let made = self
            .context
            .enter()
            .and_then(|entered| entered.mem_alloc(bytes as usize));
        let mut state = self.lock();
        state.planned -= bytes;
        match made {
            Ok(addr) => {
                let id = state.segment(want, addr, bytes);
                Ok((state, id))
            }
            Err(error) => {
                self.refused(&mut state, error, climb)?;
                Ok((state, None))
            }
        }
    }

    /// The driver refused. Want of memory below our own limit counts as a limit reached, until
    /// something is given back; anything else is an error.
    fn refused(
        &self,
        state: &mut State,
        error: crate::driver::DriverError,
        climb: &mut Climb,
    ) -> Result<(), Error> {
        if !error.is_out_of_memory() {
            return Err(self.error(error));
        }
        state.stats.retries += 1;
        state.full_at = Some(state.stats.all.reserved.current + state.planned);
        climb.refusal = Some(error);
        Ok(())
    }
}

impl State {
    /// Plans a segment of the classic policy.
    fn plan_segment(&mut self, want: &Want) -> Option<Growth> {
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
        let mut uses = super::uses::Uses::one(want.stream, self.streams[want.stream].open);
        for shard in &growth.shards {
            uses = uses.union(&shard.uses);
        }
        if matches!(uses, super::uses::Uses::Many(_)) {
            let bytes = self.records[id].bytes();
            self.stats
                .on_pool(want.space == SpaceId::Small, |pool| pool.active.add(bytes));
        }
        let (space, records) = self.parts(want.space);
        records.cold_mut(id).owner = want.stream;
        records[id].state = Extent::Busy;
        space.release(records, id, uses);
    }
}
