//! The next step of a reclaim: what there is, what it is worth, and what stands in its way.
//!
//! A choice is made of the heap and the reclaim alone. It calls no driver and takes no lock: it plans, and
//! claims what it planned, so that nobody else takes that before the step is executed.

use std::sync::Arc;

use crate::allocator::extent::record::SpaceId;
use crate::allocator::extent::want::Want;
use crate::allocator::heap::Heap;
use crate::allocator::heap::figures::free_among;
use crate::allocator::heap::growth::Growth;
use crate::allocator::heap::one_handle::Next;
use crate::allocator::heap::stitch::STITCH_MIN;
use crate::allocator::physical::LEVELS;
use crate::allocator::reclaim::stage::{Answer, LastResort, Reclaim, Shortened, Stage, Step};
use crate::allocator::size::{GRANULE, PAGE};
use crate::allocator::stream::finder::Run;
use crate::allocator::view::mapping::Openings;

/// A ready extent is passed over for one that needs a wait if it is longer than this many times the
/// other (plus a page), by level of the stitching budget. The longer one is what the request would take:
/// where it leaves handles whole that is not the best fit, and such a piece waits sooner.
const TOLERANCES: [u64; LEVELS] = [16, 8, 2, 1, 0, 0];

const TOLERANCE_SLACK: u64 = PAGE / GRANULE;

/// Views that stand idle go before there is more address space for views than so many times the
/// device's memory.
pub(crate) const VIEW_ADDRESSES: u64 = 8;

impl Reclaim<'_> {
    /// Chooses the next step for a request.
    pub(crate) fn next(&mut self, heap: &mut Heap, want: &Want) -> Step {
        let step = self.choose(heap, want);
        self.note(&step);
        step
    }

    fn choose(&mut self, heap: &mut Heap, want: &Want) -> Step {
        if want.in_one_handle() {
            if self.stage < Stage::CachesEmptied {
                return Step::EmptyCaches;
            }
            return match heap.next_in_one_handle(want) {
                Next::Take(place) => Step::Place(place),
                Next::Reserve(bytes) => Step::Reserve(want.space, bytes),
                Next::Grow(growth) => grow(heap, want, growth),
                Next::MakeRoom => self.make_room(heap, want),
            };
        }
        if let Some(step) = fitting(heap, want) {
            return step;
        }
        if heap.rules.caches() && self.stage < Stage::CachesEmptied {
            return Step::EmptyCaches;
        }
        let mut open = None;
        if heap.rules.maps() {
            if heap.missing(want).is_none() || (!self.cramped && !heap.extents.has_hole(want)) {
                return Step::Reserve(want.space, u64::from(want.span()) * GRANULE);
            }
            if self.stitches(want)
                && self.shortened != Shortened::Now
                && let Some(step) = ready_in_view(heap, want, &mut open)
            {
                return step;
            }
            let room = heap.soft_room().min(heap.room());
            if let Some(growth) = heap.plan_growth(want, room, false) {
                heap.stats.reclaim.grown += 1;
                return grow(heap, want, growth);
            }
        } else if let Some(growth) = heap.plan_segment(want) {
            heap.stats.reclaim.grown += 1;
            return grow(heap, want, growth);
        }
        if let Some(run) = behind_waits(heap, want) {
            heap.stats.reclaim.waited += 1;
            return Step::Wait(run);
        }
        if heap.rules.maps() {
            if self.stitches(want)
                && !self.unstitched
                && let Some(step) = self.stitch_step(heap, want, open)
            {
                return step;
            }
            let room = heap.room();
            let growth = heap
                .plan_growth(want, room, false)
                .or_else(|| heap.plan_growth(want, room, true));
            if let Some(growth) = growth {
                heap.stats.reclaim.grown_hard += 1;
                return grow(heap, want, growth);
            }
        }
        self.make_room(heap, want)
    }

    /// Whether a view could serve a request at all.
    fn views_for(&self, want: &Want) -> bool {
        want.fits_views(self.views, self.total_memory)
    }

    /// Whether a request is worth a view before the limit is reached.
    fn stitches(&self, want: &Want) -> bool {
        self.views_for(want) && u64::from(want.granules) * GRANULE >= STITCH_MIN
    }

    /// A place in a view behind waits, or a stitch. `open` is what is ready, if that is known.
    fn stitch_step(&self, heap: &mut Heap, want: &Want, open: Option<Openings>) -> Option<Step> {
        let open = match open {
            Some(open) => open,
            None => heap.openings(want, false)?,
        };
        // Views were not searched again, but others may have freed memory meanwhile: a stitch behind an end
        // that is long enough by now would map nothing.
        if self.shortened == Shortened::Now
            && let Some(run) = heap.views.open_end(want, &open)
        {
            return Some(Step::View(run));
        }
        let reachable = match open.more {
            true => Some(heap.openings(want, true)?),
            false => None,
        };
        if let Some(reachable) = &reachable
            && let Some(run) = heap.views.find(want, reachable)
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
        if self.shortened == Shortened::No
            && let Some(cut) = heap.plan_cut(want, &open)
        {
            return Some(Step::Shorten(cut));
        }
        let room = heap.room();
        let stitch = heap.plan_stitch(want, room, open, reachable)?;
        Some(Step::Stitch(Box::new(stitch), heap.growth_reason(want, 0)))
    }

    /// What a stitch lacks comes from the driver, if the limit leaves room for it, or the other arena
    /// gives as much back.
    fn supply_stitch(&self, heap: &mut Heap, want: &Want) -> Option<Step> {
        if !self.views_for(want) || self.unstitched {
            return None;
        }
        let lacking = heap.stitch_lacking(want)?;
        if lacking > heap.room() {
            let plan = heap.plan_release(&[SpaceId::Small], lacking);
            if plan.is_empty() {
                return None;
            }
            heap.stats.reclaim.released += 1;
            return Some(Step::Release(plan));
        }
        if self.supplied || lacking == 0 {
            return None;
        }
        let within = lacking <= heap.soft_room();
        let growth = heap.plan_supply(want, lacking)?;
        heap.stats.reclaim.grown += u64::from(within);
        heap.stats.reclaim.grown_hard += u64::from(!within);
        Some(Step::Supply(growth, heap.growth_reason(want, 0)))
    }

    /// The steps that make room below a limit.
    fn make_room(&mut self, heap: &mut Heap, want: &Want) -> Step {
        if self.stage < Stage::Flushed {
            return Step::Flush;
        }
        if !self.retried && heap.physical.has_leftovers() {
            return Step::Retry;
        }
        if self.views_for(want) && !self.stitches(want) && !self.unstitched {
            let mut open = None;
            // At the limit memory always wins, also for requests that are not worth a view before.
            if let Some(step) =
                ready_in_view(heap, want, &mut open).or_else(|| self.stitch_step(heap, want, open))
            {
                return step;
            }
        }
        if let Some(missing) = heap.missing(want) {
            let arenas = [SpaceId::Large, SpaceId::Small];
            let plan = heap.plan_release(&arenas, missing);
            if !plan.is_empty() {
                heap.stats.reclaim.released += 1;
                return Step::Release(plan);
            }
            if let Some(step) = self.supply_stitch(heap, want) {
                return step;
            }
            let idle = if missing > heap.room() && self.stage < Stage::Evicted {
                heap.idle_views(usize::MAX)
            } else {
                Vec::new()
            };
            if !idle.is_empty() {
                return Step::Evict(idle);
            }
        }
        if !self.marked && !heap.streams[want.stream].covered() {
            return Step::Mark(heap.streams[want.stream].key);
        }
        if matches!(self.answer, Answer::Known) && heap.physical.full_at.is_some() {
            return Step::AskAgain;
        }
        let oldest = heap
            .streams
            .iter()
            .filter_map(|(stream, slot)| slot.markers.front().map(|m| (m.order, stream, m)))
            .filter(|(_, _, marker)| !marker.doubtful)
            .min_by_key(|(order, _, _)| *order);
        if let Some((_, stream, marker)) = oldest {
            let wait = Step::HostWait(stream, marker.bound, Arc::clone(&marker.event));
            heap.stats.reclaim.host_waits += 1;
            return wait;
        }
        if let Some(hook) = self.next_hook() {
            let missing = heap.missing(want);
            let missing = missing.unwrap_or(u64::from(want.span()) * GRANULE);
            heap.stats.reclaim.hooks += 1;
            return Step::Hook(hook, missing.saturating_sub(heap.room()));
        }
        let asked = matches!(self.last_resort, LastResort::Hooks(_));
        if asked && heap.streams.iter().any(|(_, slot)| !slot.covered()) {
            heap.stats.reclaim.synchronised += 1;
            return Step::Synchronise;
        }
        Step::Fail
    }
}

/// Memory is asked of the driver.
fn grow(heap: &Heap, want: &Want, growth: Growth) -> Step {
    let reason = heap.growth_reason(want, free_among(&growth.shards));
    Step::Grow(growth, reason)
}

/// A fitting extent: ready, or much tighter behind a wait.
fn fitting(heap: &mut Heap, want: &Want) -> Option<Step> {
    let finder = heap.finder(want.space, want.stream)?;
    let mut ready = finder.ready_run(want)?;
    if heap.spares_handles(want) {
        ready = finder.handle_preserving_run(want, ready, &heap.physical.handles);
    }
    let provisional = |tight: u64| {
        ready.granules > (1 + TOLERANCES[heap.physical.level]) * tight + TOLERANCE_SLACK
    };
    // No run is tighter than the request itself.
    if heap.rules.maps()
        && heap.streams.several()
        && provisional(u64::from(want.granules))
        && let Some(tight) = finder.tightest_run(want, ready.granules)
        && provisional(tight.granules)
    {
        heap.stats.reclaim.tighter += 1;
        return Some(Step::Wait(tight));
    }
    Some(Step::Take(ready))
}

/// Memory that fits behind waits: where the newest of them is the oldest.
fn behind_waits(heap: &Heap, want: &Want) -> Option<Run> {
    if !heap.streams.several() {
        return None;
    }
    heap.finder(want.space, want.stream)?.oldest_run(want)
}

/// A place in a view that is ready; and what was open.
fn ready_in_view(heap: &Heap, want: &Want, open: &mut Option<Openings>) -> Option<Step> {
    if heap.views.map.is_empty() {
        return None;
    }
    let open = open.insert(heap.openings(want, false)?);
    heap.views.find(want, open).map(Step::View)
}
