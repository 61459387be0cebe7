//! Where a request fits in memory that is held: free at home, in a view, or behind waits.

use crate::allocator::extent::record::SpaceId;
use crate::allocator::extent::want::Want;
use crate::allocator::heap::{Heap, Part};
use crate::allocator::size::GRANULE;
use crate::allocator::stream::finder::Run;
use crate::allocator::view::mapping::{Openings, ViewRun};

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
        && heap.is_near()
}

impl Heap {
    /// Takes the extent that fits best, if one is ready: the first step of a reclaim, where that is all.
    pub(crate) fn take_ready_run(&mut self, want: &Want) -> Option<u32> {
        let run = best_run(self, want)?;
        let id = self.take(want, run)?;
        self.stats.reclaim.ready += 1;
        Some(id)
    }
}

/// The ready run that fits a request best.
#[inline]
pub(super) fn best_run(heap: &Heap, want: &Want) -> Option<Run> {
    let finder = heap.finder(want.space, want.stream)?;
    let best = finder.ready_run(want)?;
    Some(match spares_handles(heap, want) {
        true => finder.handle_preserving_run(want, best, &heap.physical.handles),
        false => best,
    })
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
