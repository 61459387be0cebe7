//! The state of a heap at the start of a recording.

use std::collections::HashMap;

use crate::allocator::heap::Heap;
use crate::allocator::inspect::snapshot::snapshot;
use crate::allocator::recording::{pool, unnumbered_handle};
use crate::allocator::report::BlockState;
use crate::event::record::{MAPPED, OTHERS, has_number};
use crate::event::{Kind, session};

/// Records the present state for a recording that began at a given time: the allocator with its limit, its device
/// and the device's memory, its streams, the memory it holds, and its live blocks.
pub(crate) fn record_state(heap: &mut Heap, ticks: u64, device_memory: u64) {
    if heap.closed {
        return;
    }
    heap.clear_large_caches();
    let recorder = &heap.recorder;
    let event = |kind, at, bytes, stream| recorder.event(kind, at, bytes, stream);
    let device = heap.device as u64;
    let mut rare = vec![
        event(Kind::Source, 0, device, 0),
        event(Kind::DeviceMemory, 0, device_memory, 0),
        recorder.limit(heap.physical.limit),
        recorder.regime(heap.physical.regime),
    ];
    let numbered = heap.streams.iter().filter(|(slot, _)| has_number(*slot));
    for (slot, stream) in numbered {
        rare.push(event(Kind::Stream, 0, stream.raw as u64, slot));
    }
    for (at, holding) in &heap.physical.holdings {
        let pool = pool(holding.space, holding.handle.is_some());
        rare.push(event(Kind::Map, *at, holding.bytes, pool));
    }
    for pool in heap.graphs.pools.values() {
        for (at, bytes) in pool.arena.at_home() {
            rare.push(event(Kind::Map, at, bytes, MAPPED));
        }
    }
    let slots: HashMap<u64, u32> = heap
        .streams
        .iter()
        .map(|(slot, s)| (s.key.number(), slot))
        .collect();
    let live = snapshot(heap)
        .into_iter()
        .flat_map(|segment| segment.blocks);
    let mut held = Vec::new();
    for pool in heap.graphs.pools.values() {
        for (at, live) in pool.arena.live.iter() {
            let user = live.users.first();
            let stream = user.and_then(|user| heap.streams.find(user.key));
            if stream.is_none_or(|stream| !has_number(stream)) {
                let raw = user.map_or(0, |user| user.raw as u64);
                held.push(event(Kind::Stream, 0, raw, OTHERS));
            }
            let stream = stream.unwrap_or(OTHERS);
            held.push(event(Kind::Held, *at, live.requested, stream));
        }
    }
    for block in live.filter(|block| block.state == BlockState::Live) {
        let slot = block.stream.and_then(|number| slots.get(&number));
        let slot = slot.copied().unwrap_or(0);
        if let Some(handle) = unnumbered_handle(&heap.streams, slot) {
            held.push(event(Kind::Stream, 0, handle, OTHERS));
        }
        held.push(event(Kind::Held, block.address, block.requested, slot));
    }
    session::push_held(ticks, &rare, &held);
}
