//! Which rung of the ladder is next: what there is, what it is worth, and what stands in its way.
//!
//! Everything here runs under the lock of the books and changes nothing outside them; what a step
//! takes is [`ladder`](crate::allocator::reclaim::steps)'s to do.

use std::sync::Arc;

use crate::allocator::engine::Engine;
use crate::allocator::extent::record::SpaceId;
use crate::allocator::extent::want::Want;
use crate::allocator::heap::Heap;
use crate::allocator::heap::one_handle::Next;
use crate::allocator::heap::stitch::STITCH_MIN;
use crate::allocator::reclaim::climb::{Climb, Step, TOLERANCE_SLACK, TOLERANCES, VIEW_ADDRESSES};
use crate::allocator::stream::finder::Run;
use crate::allocator::view::mapping::{Openings, ViewRun};

impl Engine {
    pub(crate) fn next_step(&self, heap: &mut Heap, want: &Want, climb: &mut Climb) -> Step {
        if self.packed && want.in_one_handle() {
            if !climb.settled {
                return Step::Settle;
            }
            return match heap.next_in_one_handle(want) {
                Next::Take(place) => Step::Place(place),
                Next::Reserve(bytes) => Step::Reserve(want.space, bytes),
                Next::Grow(growth) => Step::Grow(growth),
                Next::MakeRoom => self.make_room(heap, want, climb),
            };
        }
        if let Some(step) = self.fitting(heap, want) {
            return step;
        }
        if self.packed && !climb.settled {
            return Step::Settle;
        }
        let mut open = None;
        if self.packed {
            if heap.missing(want).is_none() || (!climb.cramped && !heap.extents.has_hole(want)) {
                return Step::Reserve(
                    want.space,
                    u64::from(want.span()) * crate::allocator::size::GRANULE,
                );
            }
            if self.stitches(want)
                && !climb.just_cut
                && let Some(step) = self.ready_in_view(heap, want, &mut open)
            {
                return step;
            }
            let room = heap.soft_room().min(heap.room());
            if let Some(growth) = heap.plan_growth(want, room, false) {
                heap.stats.rungs.grown += 1;
                return Step::Grow(growth);
            }
        } else if let Some(growth) = heap.plan_segment(want) {
            heap.stats.rungs.grown += 1;
            return Step::Grow(growth);
        }
        if let Some(run) = self.behind_waits(heap, want) {
            heap.stats.rungs.waited += 1;
            return Step::Wait(run);
        }
        if self.packed {
            if self.stitches(want)
                && !climb.unstitched
                && let Some(step) = self.stitch_step(heap, want, open, climb)
            {
                return step;
            }
            let room = heap.room();
            let growth = heap
                .plan_growth(want, room, false)
                .or_else(|| heap.plan_growth(want, room, true));
            if let Some(growth) = growth {
                heap.stats.rungs.grown_hard += 1;
                return Step::Grow(growth);
            }
        }
        self.make_room(heap, want, climb)
    }

    /// A fitting extent: ready, or much tighter behind a wait.
    fn fitting(&self, heap: &mut Heap, want: &Want) -> Option<Step> {
        let finder = heap.finder(want.space, want.stream)?;
        let mut ready = finder.ready_run(want)?;
        if self.packed && heap.spares_handles(want) {
            ready = finder.sparing_run(want, ready, &heap.physical.handles);
        }
        let loose = |tight: u64| {
            ready.granules > (1 + TOLERANCES[heap.physical.level]) * tight + TOLERANCE_SLACK
        };
        // No run is tighter than the request itself.
        if self.packed
            && heap.streams.several()
            && loose(u64::from(want.granules))
            && let Some(tight) = finder.tightest_run(want, ready.granules)
            && loose(tight.granules)
        {
            heap.stats.rungs.tighter += 1;
            return Some(Step::Wait(tight));
        }
        Some(Step::Take(ready))
    }

    /// Memory that fits behind waits: where the newest of them is the oldest.
    fn behind_waits(&self, heap: &Heap, want: &Want) -> Option<Run> {
        if !heap.streams.several() {
            return None;
        }
        heap.finder(want.space, want.stream)?.oldest_run(want)
    }

    /// Whether a view could serve a request at all.
    fn views_for(&self, want: &Want) -> bool {
        let bytes = u64::from(want.granules) * crate::allocator::size::GRANULE;
        self.views_allowed() && want.may_view() && bytes <= self.total_memory
    }

    /// Whether a request is worth a view before the limit is reached.
    fn stitches(&self, want: &Want) -> bool {
        let bytes = u64::from(want.granules) * crate::allocator::size::GRANULE;
        self.views_for(want) && bytes >= STITCH_MIN
    }

    /// A place in a view that is ready; and what was open.
    fn ready_in_view(&self, heap: &Heap, want: &Want, open: &mut Option<Openings>) -> Option<Step> {
        if heap.views.map.is_empty() {
            return None;
        }
        let open = open.insert(heap.openings(want, false)?);
        heap.find_in_views(want, open).map(Step::View)
    }

    /// A place in a view that the stream may use without a wait.
    pub(crate) fn view_at_hand(&self, heap: &Heap, want: &Want) -> Option<ViewRun> {
        if !self.views_for(want) || heap.views.map.is_empty() {
            return None;
        }
        heap.find_in_views(want, &heap.openings(want, false)?)
    }

    /// A place in a view behind waits, or a stitch. `open` is what is ready, if that is known.
    fn stitch_step(
        &self,
        heap: &mut Heap,
        want: &Want,
        open: Option<Openings>,
        climb: &Climb,
    ) -> Option<Step> {
        let open = match open {
            Some(open) => open,
            None => heap.openings(want, false)?,
        };
        // Views were not searched again, but others may have freed memory meanwhile: a stitch behind an end
        // that is long enough by now would map nothing.
        if climb.just_cut
            && let Some(run) = heap.views.open_end(want, &open)
        {
            return Some(Step::View(run));
        }
        let reachable = match open.more {
            true => Some(heap.openings(want, true)?),
            false => None,
        };
        if let Some(reachable) = &reachable
            && let Some(run) = heap.find_in_views(want, reachable)
        {
            return Some(Step::View(run));
        }
        if let Some(bytes) = heap.view_room_missing(want) {
            let most = self.total_memory.saturating_mul(VIEW_ADDRESSES);
            if heap.extents.view_addresses().saturating_add(bytes) > most {
                let idle = heap.idle_addresses(bytes);
                if !idle.is_empty() {
                    return Some(Step::MakeWay(idle));
                }
            }
            return Some(Step::Reserve(SpaceId::Views, bytes));
        }
        if !climb.shortened
            && let Some(cut) = heap.plan_cut(want, &open)
        {
            return Some(Step::Shorten(cut));
        }
        let room = heap.room();
        heap.plan_stitch(want, room, open, reachable)
            .map(|stitch| Step::Stitch(Box::new(stitch)))
    }

    /// What a stitch lacks comes from the driver, if the limit leaves room for it, or the other arena
    /// gives as much back.
    fn supply_stitch(&self, heap: &mut Heap, want: &Want, climb: &Climb) -> Option<Step> {
        if !self.views_for(want) || climb.unstitched {
            return None;
        }
        let lacking = heap.stitch_lacking(want)?;
        if lacking > heap.room() {
            let plan = heap.plan_release(&[SpaceId::Small], lacking);
            return (!plan.is_empty()).then_some(Step::Release(plan));
        }
        if climb.supplied || lacking == 0 {
            return None;
        }
        let within = lacking <= heap.soft_room();
        let growth = heap.plan_supply(want, lacking)?;
        heap.stats.rungs.grown += u64::from(within);
        heap.stats.rungs.grown_hard += u64::from(!within);
        Some(Step::Supply(growth))
    }

    /// The rungs that make room below a limit.
    fn make_room(&self, heap: &mut Heap, want: &Want, climb: &mut Climb) -> Step {
        if !climb.flushed {
            return Step::Flush;
        }
        if !climb.retried && heap.physical.has_leftovers() {
            return Step::Retry;
        }
        if self.views_for(want) && !self.stitches(want) && !climb.unstitched {
            let mut open = None;
            // At the limit memory always wins, also for requests that are not worth a view before.
            if let Some(step) = self
                .ready_in_view(heap, want, &mut open)
                .or_else(|| self.stitch_step(heap, want, open, climb))
            {
                return step;
            }
        }
        if let Some(missing) = heap.missing(want) {
            let arenas = [SpaceId::Large, SpaceId::Small];
            let plan = heap.plan_release(&arenas, missing);
            if !plan.is_empty() {
                return Step::Release(plan);
            }
            if let Some(step) = self.supply_stitch(heap, want, climb) {
                return step;
            }
            let idle = if missing > heap.room() && !climb.evicted {
                heap.idle_views(usize::MAX)
            } else {
                Vec::new()
            };
            if !idle.is_empty() {
                return Step::Evict(idle);
            }
        }
        if !climb.marked && !heap.streams[want.stream].covered() {
            return Step::Mark;
        }
        if !climb.asked_again && climb.refusal.is_none() && heap.physical.full_at.is_some() {
            return Step::AskAgain;
        }
        let oldest = heap
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
            let missing = heap
                .missing(want)
                .unwrap_or(u64::from(want.span()) * crate::allocator::size::GRANULE);
            return Step::Hook(hook, missing.saturating_sub(heap.room()));
        }
        if !climb.synchronised && heap.streams.iter().any(|(_, slot)| !slot.covered()) {
            return Step::Synchronise;
        }
        Step::Fail
    }
}
