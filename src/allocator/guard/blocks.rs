//! The guard of a block: where the block lies, and what happens to it when its guard ends.

#![forbid(unsafe_code)]

use crate::allocator::extent::record::State as Extent;
use crate::allocator::extent::uses::Uses;
use crate::allocator::guard::{Freed, Guarding};
use crate::allocator::heap::Heap;
use crate::allocator::report::PhysicalSegment;
use crate::allocator::size::GRANULE;
use crate::error::{Error, InvalidArgument};

/// Returns the live block around a range, and the physical segments of the range, none of which is suspended.
pub(crate) fn locate(
    heap: &mut Heap,
    ptr: u64,
    bytes: u64,
) -> Result<(Guarding, Vec<PhysicalSegment>), Error> {
    heap.ensure_serving()?;
    let small = heap.caches.small_around(ptr).map(|(_, run, _)| run);
    let (block, last, in_view) = match small {
        Some(run) => {
            let last = run.ptr + u64::from(run.granules) * GRANULE;
            (Guarding::Small(run.ptr), last, false)
        }
        None => {
            let Some(id) = heap.large_around(ptr) else {
                return Err(heap.physical.not_live(ptr));
            };
            if heap.extents.records[id].state == Extent::Pooled {
                return Err(Error::NotSupported {
                    what: "guards on memory of graph pools",
                });
            }
            let in_view = !heap.extents.records.cold(id).home().is_empty();
            (
                Guarding::Record(id),
                heap.extents.records[id].end(),
                in_view,
            )
        }
    };
    let end = ptr.checked_add(bytes).filter(|end| *end <= last);
    let Some(end) = end.filter(|_| bytes > 0) else {
        return Err(Error::Invalid(InvalidArgument::Range { ptr, bytes }));
    };
    let segments = match in_view {
        true => heap.views.segments(&heap.physical, ptr, end),
        false => heap.physical.home_segments(ptr, end),
    };
    let mut places = segments.iter();
    match places.any(|segment| heap.suspended.covers(segment.address)) {
        true => Err(Error::Suspended),
        false => Ok((block, segments)),
    }
}

/// Guards a block. False if its stream cache has freed it meanwhile.
pub(crate) fn guard(heap: &mut Heap, block: Guarding) -> bool {
    if let Guarding::Small(ptr) = block {
        // From here on its free enters the heap.
        let found = heap.caches.small_around(ptr);
        let tracked = found.is_some_and(|(cache, run, _)| {
            heap.caches.track_uses(&mut heap.streams, cache, &run, None)
        });
        if !tracked {
            return false;
        }
    }
    heap.guards.add(block, &mut heap.extents.records);
    true
}

/// Drops a guard. The last one also completes the free of a block that was freed meanwhile.
pub(crate) fn unguard(heap: &mut Heap, block: Guarding) {
    match heap.guards.remove(block, &mut heap.extents.records) {
        Some(Freed::Small(held)) => {
            heap.caches.held_back.push(held);
            heap.return_held_back();
        }
        Some(Freed::Large(id, uses)) => {
            let (space, bytes) = (
                heap.extents.records[id].space,
                heap.extents.records[id].bytes(),
            );
            let owner = heap.extents.records.cold(id).owner;
            heap.streams[owner].calls -= 1;
            if matches!(uses, Uses::Many(_)) {
                heap.count_mixed(space, bytes);
            }
            heap.release_block(space, id, uses, true);
        }
        None => {}
    }
}
