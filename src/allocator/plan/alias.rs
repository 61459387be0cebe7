//! Memory in views: the search for it, and claims on the home memory behind it.

use crate::allocator::extent::record::SpaceId;
use crate::allocator::extent::space::Shard;
use crate::allocator::extent::want::Want;
use crate::allocator::heap::Heap;
use crate::allocator::size::GRANULE;
use crate::allocator::view::mapping::{Aliased, Openings, ViewRun};

/// Returns a ready place in a view, and the open memory.
pub(crate) fn ready_in_view(
    heap: &Heap,
    want: &Want,
    open: &mut Option<Openings>,
) -> Option<ViewRun> {
    if heap.views.map.is_empty() {
        return None;
    }
    heap.views
        .find(want, open.insert(openings(heap, want, false)?))
}

/// Returns the memory at home that is available for a request.
pub(crate) fn openings(heap: &Heap, want: &Want, reachable: bool) -> Option<Openings> {
    let finder = heap.finder(want.space, want.stream)?;
    Some(Openings::collect(
        &heap.physical.handles,
        &finder,
        reachable,
    ))
}

/// Claims home memory, part by part; claims nothing if one part cannot be claimed.
pub(crate) fn claim(
    heap: &mut Heap,
    space: SpaceId,
    stream: u32,
    parts: &[(u64, u32)],
) -> Option<Aliased> {
    let mut aliased = Aliased::default();
    for (addr, granules) in parts {
        let piece = heap.extents.piece_at(space, *addr);
        let claimed = piece.and_then(|(id, start)| {
            heap.claim(space, id, ((addr - start) / GRANULE) as u32, *granules)
        });
        match claimed {
            Some((id, shards)) => aliased.parts.push((id, shards)),
            None => {
                restore(heap, space, aliased);
                return None;
            }
        }
    }
    let shards: Vec<Shard> = aliased
        .parts
        .iter()
        .flat_map(|(_, shards)| shards.clone())
        .collect();
    aliased.waits = heap.streams.waits_for(stream, &shards);
    Some(aliased)
}

/// Reverts a claim.
pub(crate) fn restore(heap: &mut Heap, space: SpaceId, aliased: Aliased) {
    for (id, shards) in aliased.parts {
        heap.restore(space, id, shards);
    }
}
