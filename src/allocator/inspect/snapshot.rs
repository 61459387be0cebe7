//! Snapshots of segments and blocks, for diagnosis.

use crate::allocator::cache::stream_cache::{Kind, Node, Run};
use crate::allocator::extent::record::{Hot, NIL, SpaceId, State as Extent};
use crate::allocator::graph::arena::Part;
use crate::allocator::heap::Heap;
use crate::allocator::report::{BlockInfo, BlockState, SegmentInfo};
use crate::allocator::size::{GRANULE, PAGE_GRANULES};

fn block_info(heap: &Heap, id: u32) -> BlockInfo {
    let (hot, cold) = (&heap.extents.records[id], heap.extents.records.cold(id));
    if hot.state == Extent::Pooled {
        return pooled_info(heap, hot, cold.requested);
    }
    let number = |stream: u32| heap.streams[stream].key.number();
    let live = hot.state == Extent::Used;
    let pending: Vec<u64> = if live {
        cold.recorded().iter().map(|r| number(r.stream)).collect()
    } else {
        let open = cold
            .uses
            .as_slice()
            .iter()
            .filter(|u| !heap.streams.is_complete(u));
        open.map(|u| number(u.stream)).collect()
    };
    let shared = cold
        .uses
        .as_slice()
        .iter()
        .any(|u| u.stream != cold.owner && !heap.streams.is_complete(u));
    BlockInfo {
        device: Some(heap.device),
        address: hot.addr,
        size: hot.bytes(),
        requested: cold.requested,
        state: match hot.state {
            Extent::Used => BlockState::Live,
            Extent::Free if shared => BlockState::Pending,
            Extent::Free => BlockState::Free,
            Extent::Aliased => BlockState::Aliased,
            _ => BlockState::Busy,
        },
        stream: match hot.state {
            Extent::Used => Some(number(hot.stream)),
            _ => cold
                .uses
                .as_slice()
                .iter()
                .find(|u| u.stream == cold.owner)
                .map(|u| number(u.stream)),
        },
        pending,
        small: hot.space != SpaceId::Large,
        is_split: hot.prev != NIL || hot.next != NIL,
        pool: None,
    }
}

/// A live block of a graph pool.
fn pooled_info(heap: &Heap, hot: &Hot, requested: u64) -> BlockInfo {
    let live = heap.graphs.live(hot.addr);
    let users = live.into_iter().flat_map(|live| &live.users);
    let numbers: Vec<u64> = users.map(|user| user.key.number()).collect();
    BlockInfo {
        device: Some(heap.device),
        address: hot.addr,
        size: hot.bytes(),
        requested,
        state: BlockState::Live,
        stream: numbers.first().copied(),
        pending: numbers.into_iter().skip(1).collect(),
        small: false,
        is_split: true,
        pool: heap.graphs.pool_of(hot.addr),
    }
}

pub(crate) fn snapshot(heap: &Heap) -> Vec<SegmentInfo> {
    let mut segments: Vec<SegmentInfo> = Vec::new();
    for space in [&heap.extents.large, &heap.extents.small] {
        for region in space.regions().values() {
            let mut open = false;
            let mut at = region.first;
            while at != NIL {
                let hot = &heap.extents.records[at];
                if hot.state == Extent::Unmapped {
                    open = false;
                } else {
                    let mut blocks = Vec::new();
                    blocks_of(heap, space.id, at, &mut blocks);
                    match segments.last_mut() {
                        Some(segment) if open => {
                            segment.size += hot.bytes();
                            segment.blocks.extend(blocks);
                        }
                        _ => segments.push(SegmentInfo {
                            address: hot.addr,
                            size: hot.bytes(),
                            small: space.id != SpaceId::Large,
                            mapped: heap.rules.maps(),
                            view: false,
                            blocks,
                        }),
                    }
                    open = true;
                }
                at = hot.next;
            }
        }
    }
    segments.extend(
        heap.views
            .map
            .iter()
            .filter(|(_, v)| !v.blocks.is_empty())
            .map(|(base, view)| SegmentInfo {
                address: *base,
                size: u64::from(view.granules) * crate::allocator::size::GRANULE,
                small: false,
                mapped: true,
                view: true,
                blocks: Vec::new(),
            }),
    );
    segments.sort_by_key(|s| s.address);
    for (id, _) in heap
        .extents
        .records
        .iter()
        .filter(|(id, _)| !heap.extents.records.cold(*id).home().is_empty())
    {
        let info = block_info(heap, id);
        let after = segments.partition_point(|s| s.address <= info.address);
        if let Some(segment) = after.checked_sub(1).and_then(|at| segments.get_mut(at)) {
            segment.blocks.push(info);
        }
    }
    for segment in segments.iter_mut().filter(|s| s.view) {
        segment.blocks.sort_by_key(|b| b.address);
    }
    segments
}

/// A page is replaced by the blocks that were carved from it.
fn blocks_of(heap: &Heap, space: SpaceId, id: u32, blocks: &mut Vec<BlockInfo>) {
    let hot = &heap.extents.records[id];
    let page = (heap.rules.caches() && space == SpaceId::Small && hot.state == Extent::Used)
        .then(|| heap.caches.table.find(hot.addr))
        .flatten();
    let Some((cache, page)) = page else {
        return blocks.push(block_info(heap, id));
    };
    let here = |node: &&Node| node.page() == page as usize;
    let mut pending: Vec<(Node, u32)> = Vec::new();
    let runs = {
        let inner = cache.lock();
        for batch in &inner.batches {
            let nodes = batch.nodes.iter().filter(here);
            pending.extend(nodes.map(|node| (*node, batch.stream)));
        }
        inner.runs(page)
    };
    let held = heap.caches.held_back.iter();
    for held in held.filter(|held| std::ptr::eq(held.cache, cache)) {
        let open = held.uses.as_slice().iter();
        let open = open.filter(|u| !heap.streams.is_complete(u));
        let nodes = held.nodes.iter().filter(here);
        pending.extend(open.flat_map(|u| nodes.clone().map(|node| (*node, u.stream))));
    }
    for run in runs {
        let streams = pending.iter().filter(|(node, _)| *node == run.node);
        let streams: Vec<u32> = streams.map(|(_, stream)| *stream).collect();
        blocks.push(run_info(heap, hot.stream, &run, &streams));
    }
}

/// Describes a run in a page of a stream; `pending` are the streams that a freed one is pending on.
fn run_info(heap: &Heap, stream: u32, run: &Run, pending: &[u32]) -> BlockInfo {
    let number = |stream: u32| heap.streams[stream].key.number();
    let recorded: Vec<u32> = match run.live.map(|live| live.using) {
        Some(using) => match using.slot() {
            Some(slot) => vec![slot],
            None => {
                let known = heap.caches.recorded.get(&run.ptr);
                known.into_iter().flatten().map(|r| r.stream).collect()
            }
        },
        None => pending.to_vec(),
    };
    let size = u64::from(run.granules) * GRANULE;
    BlockInfo {
        device: Some(heap.device),
        address: run.ptr,
        size,
        requested: run.live.map_or(0, |live| live.requested.into()),
        state: match run.kind {
            Kind::Used => BlockState::Live,
            Kind::Pending => BlockState::Pending,
            Kind::Free | Kind::Quick => BlockState::Free,
        },
        stream: Some(number(stream)),
        pending: recorded.into_iter().map(number).collect(),
        small: true,
        is_split: run.granules < PAGE_GRANULES,
        pool: None,
    }
}

/// Describes the live block around an address.
pub(crate) fn block_info_around(heap: &mut Heap, ptr: u64) -> Option<BlockInfo> {
    if let Some((_, run, stream)) = heap.caches.small_around(ptr) {
        return Some(run_info(heap, stream, &run, &[]));
    }
    let id = heap.large_around(ptr)?;
    Some(block_info(heap, id))
}

/// Returns the segments of a graph pool: its memory at home with all blocks, and its views with their live blocks.
pub(crate) fn snapshot_pool(heap: &Heap, id: u64) -> Vec<SegmentInfo> {
    let Some(pool) = heap.graphs.pools.get(&id) else {
        return Vec::new();
    };
    let arena = &pool.arena;
    let segment = |address, size, view| SegmentInfo {
        address,
        size,
        small: false,
        mapped: true,
        view,
        blocks: Vec::new(),
    };
    let mut segments: Vec<SegmentInfo> = Vec::new();
    for (home, handle) in &arena.handles {
        match segments.last_mut() {
            Some(last)
                if last.address + last.size == *home && !arena.homes.spans.contains_key(home) =>
            {
                last.size += handle.bytes;
            }
            _ => segments.push(segment(*home, handle.bytes, false)),
        }
    }
    let views = arena.views.iter();
    segments.extend(views.map(|(base, view)| segment(*base, view.bytes(), true)));
    segments.sort_by_key(|segment| segment.address);
    let block = |address, size, state| BlockInfo {
        device: Some(heap.device),
        address,
        size,
        requested: 0,
        state,
        stream: None,
        pending: Vec::new(),
        small: false,
        is_split: true,
        pool: Some(id),
    };
    let bytes = |part: &Part| part.end() - part.home;
    let mut blocks: Vec<BlockInfo> = Vec::new();
    for (addr, live) in arena.live.iter() {
        blocks.push(pooled_info(
            heap,
            &heap.extents.records[live.id],
            live.requested,
        ));
        let elsewhere = live.parts.iter().filter(|part| part.home != *addr);
        blocks.extend(elsewhere.map(|part| block(part.home, bytes(part), BlockState::Aliased)));
    }
    for (part, tag) in arena.tags() {
        let state = match tag.pending.is_empty() && tag.marks.is_empty() {
            true => BlockState::Free,
            false => BlockState::Pending,
        };
        blocks.push(block(part.home, bytes(&part), state));
    }
    blocks.sort_by_key(|block| block.address);
    for info in blocks {
        let after = segments.partition_point(|segment| segment.address <= info.address);
        let Some(segment) = after.checked_sub(1).and_then(|at| segments.get_mut(at)) else {
            continue;
        };
        match segment.blocks.last_mut() {
            // Adjacent free pieces differ only in the graphs that used them.
            Some(last) if is_free_run(last, &info) => last.size += info.size,
            _ => segment.blocks.push(info),
        }
    }
    segments.retain(|segment| !(segment.view && segment.blocks.is_empty()));
    segments
}

fn is_free_run(before: &BlockInfo, next: &BlockInfo) -> bool {
    let free = |block: &BlockInfo| block.state == BlockState::Free;
    free(before) && free(next) && before.address + before.size == next.address
}
