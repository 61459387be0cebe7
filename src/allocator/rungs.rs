//! Which rung of the ladder is next: what there is, what it is worth, and what stands in its way.
//!
//! Everything here runs under the lock of the books and changes nothing outside them; what a step
//! takes is [`ladder`](super::ladder)'s to do.

use std::sync::Arc;

use super::climb::{Climb, Step, TOLERANCE_SLACK, TOLERANCES};
use super::engine::Engine;
use super::fit::Run;
use super::mapping::{Openings, ViewRun};
use super::records::SpaceId;
use super::single::Next;
use super::state::State;
use super::stitch::STITCH_MIN;
use super::want::Want;

/// Requests below this many bytes leave handles whole near the limit, if they can. Larger ones would take
/// from long runs what large requests find in one piece now. From simulation over recorded work.
const SPARING_BELOW: u64 = 8 << 20;

/// Views that stand idle go before there is more address space for views than so many times the
/// device's memory.
pub(crate) const VIEW_ADDRESSES: u64 = 8;

impl State {
    /// Whether a request should leave handles whole where it can: near the limit, where others must find
    /// whole ones to stitch, if it is small. Not of a lone stream, whose requests are served without any
    /// look at handles.
    fn spares_handles(&self, want: &Want) -> bool {
        want.space == SpaceId::Large
            && u64::from(want.granules) * super::size::GRANULE < SPARING_BELOW
            && self.streams.several()
            && !self.bounds_hold(0)
    }
}

impl Engine {
    pub(crate) fn next_step(&self, state: &mut State, want: &Want, climb: &mut Climb) -> Step {
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
            if state.missing(want).is_none() || (!climb.cramped && !state.extents.has_hole(want)) {
                return Step::Reserve(want.space, u64::from(want.span()) * super::size::GRANULE);
            }
            if self.stitches(want)
                && !climb.just_cut
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
                && let Some(step) = self.stitch_step(state, want, open, climb)
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
        let mut ready = finder.ready_run(want)?;
        if self.packed && state.spares_handles(want) {
            ready = finder.sparing_run(want, ready, &state.physical.handles);
        }
        let loose = |tight: u64| {
            ready.granules > (1 + TOLERANCES[state.physical.level]) * tight + TOLERANCE_SLACK
        };
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
        if state.views.map.is_empty() {
            return None;
        }
        let open = open.insert(state.openings(want, false)?);
        state.find_in_views(want, open).map(Step::View)
    }

    /// A place in a view that the stream may use without a wait.
    pub(crate) fn view_at_hand(&self, state: &State, want: &Want) -> Option<ViewRun> {
        if !self.views_for(want) || state.views.map.is_empty() {
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
        climb: &Climb,
    ) -> Option<Step> {
        let open = match open {
            Some(open) => open,
            None => state.openings(want, false)?,
        };
        // Views were not searched again, but others may have freed memory meanwhile: a stitch behind an end
        // that is long enough by now would map nothing.
        if climb.just_cut
            && let Some(run) = state.views.open_end(want, &open)
        {
            return Some(Step::View(run));
        }
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
            if state.extents.view_addresses().saturating_add(bytes) > most {
                let idle = state.idle_addresses(bytes);
                if !idle.is_empty() {
                    return Some(Step::MakeWay(idle));
                }
            }
            return Some(Step::Reserve(SpaceId::Views, bytes));
        }
        if !climb.shortened
            && let Some(cut) = state.plan_cut(want, &open)
        {
            return Some(Step::Shorten(cut));
        }
        let room = state.room();
        state
            .plan_stitch(want, room, open, reachable)
            .map(|stitch| Step::Stitch(Box::new(stitch)))
    }

    /// What a stitch lacks comes from the driver, if the limit leaves room for it, or the other arena
    /// gives as much back.
    fn supply_stitch(&self, state: &mut State, want: &Want, climb: &Climb) -> Option<Step> {
        if !self.views_for(want) || climb.unstitched {
            return None;
        }
        let lacking = state.stitch_lacking(want)?;
        if lacking > state.room() {
            let plan = state.plan_release(&[SpaceId::Small], lacking);
            return (!plan.is_empty()).then_some(Step::Release(plan));
        }
        if climb.supplied || lacking == 0 {
            return None;
        }
        let within = lacking <= state.soft_room();
        let growth = state.plan_supply(want, lacking)?;
        state.stats.rungs.grown += u64::from(within);
        state.stats.rungs.grown_hard += u64::from(!within);
        Some(Step::Supply(growth))
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
                .or_else(|| self.stitch_step(state, want, open, climb))
            {
                return step;
            }
        }
        if let Some(missing) = state.missing(want) {
            let arenas = [SpaceId::Large, SpaceId::Small];
            let plan = state.plan_release(&arenas, missing);
            if !plan.is_empty() {
                return Step::Release(plan);
            }
            if let Some(step) = self.supply_stitch(state, want, climb) {
                return step;
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
        if !climb.asked_again && climb.refusal.is_none() && state.physical.full_at.is_some() {
            return Step::AskAgain;
        }
        let oldest = state
            .streams
            .iter()
            .filter_map(|(stream, slot)| slot.markers.front().map(|m| (m.order, stream, m)))
            .filter(|(_, _, marker)| !marker.doubtful)
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
}
