//! The search for a fit in held memory: free at home, in a view, or behind waits.

use crate::allocator::extent::record::SpaceId;
use crate::allocator::extent::want::Want;
use crate::allocator::heap::{Heap, Part};
use crate::allocator::size::GRANULE;
use crate::allocator::stream::finder::Run;
use crate::allocator::view::mapping::{Openings, ViewRun};

/// Requests below this many bytes preserve whole handles near the limit where possible. Larger requests would instead
/// break up long runs that large requests can use in one piece. Chosen by simulation over recorded programs.
const SPARING_BELOW: u64 = 8 << 20;

/// Whether a request should preserve whole handles where possible: a small request near the limit, where other requests
/// need whole handles to stitch. Requests of a single stream are served without any check of handles.
fn spares_handles(heap: &Heap, want: &Want) -> bool {
    heap.rules.maps()
        && want.space == SpaceId::Large
        && u64::from(want.granules) * GRANULE < SPARING_BELOW
        && heap.streams.several()
        && heap.is_near()
}

impl Heap {
    /// Takes the best-fitting ready extent: the first step of a reclaim, if that suffices.
    pub(crate) fn take_ready_run(&mut self, want: &Want) -> Option<u32> {
        let run = best_run(self, want)?;
        let id = self.take(want, run)?;
        self.stats.reclaim.ready += 1;
        Some(id)
    }
}

/// Returns the ready run that fits a request best.
#[inline]
pub(super) fn best_run(heap: &Heap, want: &Want) -> Option<Run> {
    let finder = heap.finder(want.space, want.stream)?;
    let best = finder.ready_run(want)?;
    Some(match spares_handles(heap, want) {
        true => finder.handle_preserving_run(want, best, &heap.physical.handles),
        false => best,
    })
}

/// Returns a stretch of one handle behind waits.
pub(super) fn part_behind_waits(heap: &Heap, want: &Want) -> Option<Part> {
    heap.part_of_handle(want, |finder, id| finder.reachable(id))
}

/// Returns memory that fits behind waits: the run whose newest wait is the oldest.
pub(super) fn run_behind_waits(heap: &Heap, want: &Want) -> Option<Part> {
    let run = heap.finder(want.space, want.stream)?.oldest_run(want)?;
    Some(heap.part(want, run))
}

/// Returns a ready place in a view, and the open memory.
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
