//! From a request to memory: the ladder that a miss climbs.
//!
//! Each rung is tried only when those below have nothing, and after a rung that changed something
//! the climb begins again at the first. Driver calls happen without the lock; what they work on is
//! claimed before, so that nobody else can touch it, and put back if they fail.

use std::sync::Arc;

use super::engine::{Engine, Guard};
use super::error::Error;
use super::figures::{GrowthReason, free_among};
use super::fit::Run;
use super::plan::{Growth, LEVELS, Release};
use super::records::{SpaceId, State as Extent};
use super::shorten::Cut;
use super::single::{Next, Place};
use super::state::{State, Want};
use super::stitch::{STITCH_MIN, Stitch};
use super::view::{Openings, ViewRun};

/// A ready extent is passed over for one that needs a wait if it is longer than this many times the
/// other (plus a page), by level of the stitching budget.
const TOLERANCES: [u64; LEVELS] = [16, 8, 2, 1, 0, 0];
const TOLERANCE_SLACK: u64 = super::size::PAGE / super::size::GRANULE;

/// Views that stand idle go before there is more address space for views than so many times the
/// device's memory.
pub(crate) const VIEW_ADDRESSES: u64 = 8;

/// What a climb has done already.
#[derive(Default)]
pub(crate) struct Climb {
    /// Shelves hold nothing back.
    settled: bool,
    flushed: bool,
    retried: bool,
    evicted: bool,
    /// A stitch was refused; no other is tried for this request.
    unstitched: bool,
    /// A view was cut short for the request.
    shortened: bool,
    marked: bool,
    asked_again: bool,
    /// No more address space can be had; what there is may do.
    cramped: bool,
    hooks: Option<std::vec::IntoIter<Arc<super::hooks::ReliefHook>>>,
    synchronised: bool,
    missed: bool,
    /// The driver's last refusal.
    refusal: Option<crate::driver::DriverError>,
}

impl Climb {
    /// Memory became complete: pages may be whole now, views idle, and handles free to stitch.
    fn look_again(&mut self) {
        self.settled = false;
        self.flushed = false;
        self.evicted = false;
        self.unstitched = false;
    }
}

/// The next rung.
enum Step {
    Take(Run),
    Wait(Run),
    Place(Place),
    View(ViewRun),
    Stitch(Box<Stitch>),
    Evict(Vec<u64>),
    /// Cuts a view short for a stitch.
    Shorten(Cut),
    /// Lets idle views go for their addresses.
    MakeWay(Vec<u64>),
    Reserve(SpaceId, u64),
    Grow(Growth),
    Flush,
    /// Takes off the shelves what nobody holds.
    Settle,
    /// Tries again to release what an earlier failure left behind.
    Retry,
    Release(Vec<Release>),
    Mark,
    /// Memory that the driver refused earlier may be there now.
    AskAgain,
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
                        Err(Error::Driver(_)) if space == SpaceId::Views => climb.unstitched = true,
                        Err(Error::Driver(_)) if state.missing(want).is_some() => {
                            climb.cramped = true;
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
                        Err(Error::Driver(_)) => climb.unstitched = true,
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
                    return Err(self.out_of_memory(state, want, climb.refusal));
                }
            }
        }
    }

    fn next_step(&self, state: &mut State, want: &Want, climb: &mut Climb) -> Step {
        if self.packed && want.in_one_handle() {
            if !climb.settled {
                return Step::Settle;
            }
            return match state.next_in_one_handle(want) {
                Next::Take(place) => Step::Place(place),
                Next::Reserve(bytes) => Step::Reserve(want.space, bytes),
                Next::Grow(growth) => Step::Grow(growth),
                Next::MakeRoom => self.make_room(state, want, climb),
            };
        }
        if let Some(step) = self.fitting(state, want) {
            return step;
        }
        if self.packed && !climb.settled {
            return Step::Settle;
        }
        let mut open = None;
        if self.packed {
            if state.missing(want).is_none() || (!climb.cramped && !state.has_hole(want)) {
                return Step::Reserve(want.space, u64::from(want.span()) * super::size::GRANULE);
            }
            // What was cut for this request served it no better before.
            if self.stitches(want)
                && !climb.shortened
                && let Some(step) = self.ready_in_view(state, want, &mut open)
            {
                return step;
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
            if self.stitches(want)
                && !climb.unstitched
                && let Some(step) = self.stitch_step(state, want, open, climb.shortened)
            {
                return step;
            }
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
        let loose =
            |tight: u64| ready.granules > (1 + TOLERANCES[state.level]) * tight + TOLERANCE_SLACK;
        // No run is tighter than the request itself.
        if self.packed
            && state.streams.several()
            && loose(u64::from(want.granules))
            && let Some(tight) = finder.tightest_run(want, ready.granules)
            && loose(tight.granules)
        {
            state.stats.rungs.tighter += 1;
            return Some(Step::Wait(tight));
        }
        Some(Step::Take(ready))
    }

    /// Memory that fits behind waits: where the newest of them is the oldest.
    fn behind_waits(&self, state: &State, want: &Want) -> Option<Run> {
        if !state.streams.several() {
            return None;
        }
        state.finder(want.space, want.stream)?.oldest_run(want)
    }

    /// Whether a view could serve a request at all.
    fn views_for(&self, want: &Want) -> bool {
        let bytes = u64::from(want.granules) * super::size::GRANULE;
        self.views_allowed() && want.may_view() && bytes <= self.total_memory
    }

    /// Whether a request is worth a view before the limit is reached.
    fn stitches(&self, want: &Want) -> bool {
        let bytes = u64::from(want.granules) * super::size::GRANULE;
        self.views_for(want) && bytes >= STITCH_MIN
    }

    /// A place in a view that is ready; and what was open.
    fn ready_in_view(
        &self,
        state: &State,
        want: &Want,
        open: &mut Option<Openings>,
    ) -> Option<Step> {
        if state.views.is_empty() {
            return None;
        }
        let open = open.insert(state.openings(want, false)?);
        state.find_in_views(want, open).map(Step::View)
    }

    /// A place in a view that the stream may use without a wait.
    pub(crate) fn view_at_hand(&self, state: &State, want: &Want) -> Option<ViewRun> {
        if !self.views_for(want) || state.views.is_empty() {
            return None;
        }
        state.find_in_views(want, &state.openings(want, false)?)
    }

    /// A place in a view behind waits, or a stitch. `open` is what is ready, if that is known.
    fn stitch_step(
        &self,
        state: &mut State,
        want: &Want,
        open: Option<Openings>,
        shortened: bool,
    ) -> Option<Step> {
        let open = match open {
            Some(open) => open,
            None => state.openings(want, false)?,
        };
        let reachable = match open.more {
            true => Some(state.openings(want, true)?),
            false => None,
        };
        if let Some(reachable) = &reachable
            && let Some(run) = state.find_in_views(want, reachable)
        {
            return Some(Step::View(run));
        }
        if let Some(bytes) = state.view_room_missing(want) {
            let most = self.total_memory.saturating_mul(VIEW_ADDRESSES);
            if state.view_addresses().saturating_add(bytes) > most {
                let idle = state.idle_addresses(bytes);
                if !idle.is_empty() {
                    return Some(Step::MakeWay(idle));
                }
            }
            return Some(Step::Reserve(SpaceId::Views, bytes));
        }
        if !shortened && let Some(cut) = state.plan_cut(want, &open) {
            return Some(Step::Shorten(cut));
        }
        let room = state.room();
        state
            .plan_stitch(want, room, open, reachable)
            .map(|stitch| Step::Stitch(Box::new(stitch)))
    }

    /// What the other arena has to give back so that a stitch can take the rest that it lacks from
    /// the driver.
    fn plan_for_stitch(&self, state: &mut State, want: &Want, climb: &Climb) -> Vec<Release> {
        if !self.views_for(want) || climb.unstitched {
            return Vec::new();
        }
        match state.stitch_missing(want) {
            Some(missing) if missing > state.room() => {
                state.plan_release(&[SpaceId::Small], missing, self.context.key())
            }
            _ => Vec::new(),
        }
    }

    /// The rungs that make room below a limit.
    fn make_room(&self, state: &mut State, want: &Want, climb: &mut Climb) -> Step {
        if !climb.flushed {
            return Step::Flush;
        }
        if !climb.retried && state.has_leftovers() {
            return Step::Retry;
        }
        if self.views_for(want) && !self.stitches(want) && !climb.unstitched {
            let mut open = None;
            // At the limit memory always wins, also for requests that are not worth a view before.
            if let Some(step) = self
                .ready_in_view(state, want, &mut open)
                .or_else(|| self.stitch_step(state, want, open, climb.shortened))
            {
                return step;
            }
        }
        if let Some(missing) = state.missing(want) {
            let arenas = [SpaceId::Large, SpaceId::Small];
            let plan = state.plan_release(&arenas, missing, self.context.key());
            if !plan.is_empty() {
                return Step::Release(plan);
            }
            let plan = self.plan_for_stitch(state, want, climb);
            if !plan.is_empty() {
                return Step::Release(plan);
            }
            let idle = if missing > state.room() && !climb.evicted {
                state.idle_views(usize::MAX)
            } else {
                Vec::new()
            };
            if !idle.is_empty() {
                return Step::Evict(idle);
            }
        }
        if !climb.marked && !state.streams[want.stream].covered() {
            return Step::Mark;
        }
        if !climb.asked_again && climb.refusal.is_none() && state.full_at.is_some() {
            return Step::AskAgain;
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
                let (error, asked) = (failure.error, growth.bytes());
                let free = self.driver_free(error);
                drop(waits);
                let mut state = self.lock();
                state.growth_failed(growth, failure);
                self.refused(&mut state, error, free.min(asked - 1), climb)?;
                Ok((state, None))
            }
        }
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
