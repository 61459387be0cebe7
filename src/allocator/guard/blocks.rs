//! The guard of a block: where the block lies, and what happens to it when its guard ends.

#![forbid(unsafe_code)]

use crate::allocator::extent::record::State as Extent;
use crate::allocator::extent::uses::Uses;
use crate::allocator::graph::lease::Lease;
use crate::allocator::guard::{Freed, Guarding};
use crate::allocator::heap::Heap;
use crate::allocator::report::PhysicalSegment;
use crate::allocator::size::GRANULE;
use crate::error::{Error, InvalidArgument};

/// A live block, and a range in it.
pub(crate) struct Located {
    pub block: Guarding,
    /// The block's number and generation.
    pub life: (u32, u32),
    /// First byte of the block.
    pub base: u64,
    /// The byte behind the block.
    #[cfg(all(feature = "share", target_os = "linux"))]
    pub end: u64,
    /// Physical segments of the range, by address, none of which is suspended.
    pub segments: Vec<PhysicalSegment>,
}

/// Returns the live block around a range, or around an address if the range is not given.
pub(crate) fn locate(heap: &mut Heap, ptr: u64, bytes: Option<u64>) -> Result<Located, Error> {
    heap.ensure_serving()?;
    let small = heap.caches.small_around(ptr).map(|(_, run, _)| run);
    let small = small.and_then(|run| Some((run, run.live?)));
    let (block, life, base, last) = match small {
        Some((run, live)) => {
            let last = run.ptr + u64::from(run.granules) * GRANULE;
            let number = heap.caches.table.id(run.ptr).unwrap_or_default();
            let life = (number, live.generation);
            (Guarding::Small(run.ptr), life, run.ptr, last)
        }
        None => {
            let Some(id) = heap.large_around(ptr) else {
                return Err(heap.physical.not_live(ptr));
            };
            let hot = heap.extents.records[id];
            let block = match hot.state {
                Extent::Pooled => heap.graphs.pool_of(hot.addr).map(Guarding::Pooled),
                _ => Some(Guarding::Record(id)),
            };
            let block = block.ok_or(Error::NotLive { ptr })?;
            (block, (id, hot.generation), hot.addr, hot.end())
        }
    };
    let (from, end) = match bytes {
        Some(bytes) => (ptr, ptr.checked_add(bytes).filter(|end| *end <= last)),
        None => (base, Some(last)),
    };
    let Some(end) = end.filter(|end| from < *end) else {
        let bytes = bytes.unwrap_or_default();
        return Err(Error::Invalid(InvalidArgument::Range { ptr, bytes }));
    };
    let segments = match block {
        Guarding::Pooled(pool) => {
            heap.graphs.ensure_present(pool)?;
            heap.graphs.segments(pool, base, (from, end))
        }
        Guarding::Record(id) if !heap.extents.records.cold(id).home().is_empty() => {
            heap.views.segments(&heap.physical, from, end)
        }
        _ => heap.physical.home_segments(from, end),
    };
    let mut places = segments.iter();
    if places.any(|segment| heap.suspended.covers(segment.address)) {
        return Err(Error::Suspended);
    }
    Ok(Located {
        block,
        life,
        base,
        #[cfg(all(feature = "share", target_os = "linux"))]
        end: last,
        segments,
    })
}

/// Guards a located block. For a block of a graph pool the result has the lease that keeps it. Fails if the block's
/// stream cache has freed it meanwhile.
pub(crate) fn guard(heap: &mut Heap, found: &Located) -> Result<Option<Lease>, Error> {
    let (block, ptr) = (found.block, found.base);
    let mut kept = None;
    match block {
        Guarding::Small(ptr) => {
            // From here on its free enters the heap.
            let small = heap.caches.small_around(ptr);
            let tracked = small.is_some_and(|(cache, run, _)| {
                let same = run.live.is_some_and(|live| live.generation == found.life.1);
                same && (heap.caches).track_uses(&mut heap.streams, cache, &run, None)
            });
            if !tracked {
                return Err(Error::NotLive { ptr });
            }
        }
        Guarding::Pooled(pool) => {
            let lease = Lease::new(&heap.graphs.leases_of(pool)?);
            lease.hold();
            match heap.graphs.live_mut(ptr) {
                Some(live) => live.touched.push(lease.clone()),
                None => return Err(Error::NotLive { ptr }),
            }
            kept = Some(lease);
        }
        Guarding::Record(_) => {}
    }
    heap.guards.add(block, &mut heap.extents.records);
    Ok(kept)
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
