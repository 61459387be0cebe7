//! Where a request fits in memory that is held: free at home, in a view, or behind waits.

use crate::allocator::config::Waits;
use crate::allocator::extent::record::SpaceId;
use crate::allocator::extent::want::Want;
use crate::allocator::heap::{Heap, Part};
use crate::allocator::physical::LEVELS;
use crate::allocator::size::{GRANULE, PAGE};
use crate::allocator::stream::finder::{Reach, Run};
use crate::allocator::view::mapping::{Openings, ViewRun};

/// A ready extent is passed over for one that needs a wait if it is longer than this many times the
/// other (plus a page), by level of the stitching budget. The longer one is what the request would take:
/// where it leaves handles whole that is not the best fit, and such a piece waits sooner.
const TOLERANCES: [u64; LEVELS] = [16, 8, 2, 1, 0, 0];

const TOLERANCE_SLACK: u64 = PAGE / GRANULE;

/// Requests below this many bytes leave handles whole near the limit, if they can. Larger ones would take
/// from long runs what large requests find in one piece now. From simulation over recorded work.
const SPARING_BELOW: u64 = 8 << 20;

/// Whether a request should leave handles whole where it can: near the limit, where others must find whole ones to
/// stitch, if it is small. Not of a lone stream, whose requests are served without any look at handles.
fn spares_handles(heap: &Heap, want: &Want) -> bool {
    heap.rules.maps()
        && want.space == SpaceId::Large
        && u64::from(want.granules) * GRANULE < SPARING_BELOW
        && heap.streams.several()
        && !heap.bounds_hold(0)
}

impl Heap {
    /// Whether a tighter piece behind a wait is better than a longer one that is ready.
    fn prefers_waits(&self, want: &Want) -> bool {
        match self.physical.tuning.waits {
            Waits::Always => true,
            Waits::Never => false,
            Waits::Scarce => {
                let room = |limit: u64| limit.saturating_sub(self.present());
                let bytes = u64::from(want.granules) * GRANULE;
                self.physical.limit.is_some_and(|limit| bytes > room(limit))
            }
        }
    }

    /// Takes the fitting extent, if it is ready and nothing behind a wait is much tighter: the first step of a reclaim,
    /// where that is all.
    pub(crate) fn take_ready_run(&mut self, want: &Want) -> Option<u32> {
        let Best::Ready(run) = best_run(self, want)? else {
            return None;
        };
        let id = self.take(want, run)?;
        self.stats.reclaim.ready += 1;
        Some(id)
    }
}

/// What fits a request best.
pub(super) enum Best {
    Ready(Run),
    /// Behind a wait.
    Tighter(Run),
}

#[inline]
pub(super) fn best_run(heap: &Heap, want: &Want) -> Option<Best> {
    let finder = heap.finder(want.space, want.stream)?;
    let best = finder.ready_run(want)?;
    let ready = match spares_handles(heap, want) {
        true => finder.handle_preserving_run(want, best, &heap.physical.handles),
        false => best,
    };
    // Where handles are left whole, a tighter run counts whether it needs a wait or not.
    let reach = match ready == best {
        true => Reach::Waits,
        false => Reach::Any,
    };
    let provisional = |tight: u64| {
        ready.granules > (1 + TOLERANCES[heap.physical.level]) * tight + TOLERANCE_SLACK
    };
    // No run is tighter than the request itself.
    if heap.rules.maps()
        && heap.streams.several()
        && heap.prefers_waits(want)
        && provisional(u64::from(want.granules))
        && let Some(tight) = finder.tightest_run(want, ready.granules, reach)
        && provisional(tight.granules)
    {
        return Some(Best::Tighter(tight));
    }
    Some(Best::Ready(ready))
}

/// A stretch of one handle behind waits.
pub(super) fn part_behind_waits(heap: &Heap, want: &Want) -> Option<Part> {
    heap.part_of_handle(want, |finder, id| finder.reachable(id))
}

/// Memory that fits behind waits: where the newest of them is the oldest.
pub(super) fn run_behind_waits(heap: &Heap, want: &Want) -> Option<Part> {
    let run = heap.finder(want.space, want.stream)?.oldest_run(want)?;
    Some(heap.part(want, run))
}

/// A place in a view that is ready; and what was open.
pub(super) fn ready_in_view(
    heap: &Heap,
    want: &Want,
    open: &mut Option<Openings>,
) -> Option<ViewRun> {
    if heap.views.map.is_empty() {
        return None;
    }
    let open = open.insert(heap.openings(want, false)?);
    heap.views.find(want, open)
}
