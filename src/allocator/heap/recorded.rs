//! The heap's records for a recording.

use std::collections::HashMap;

use crate::allocator::extent::record::SpaceId;
use crate::allocator::graph::user::User;
use crate::allocator::heap::Heap;
use crate::allocator::report::BlockState;
use crate::allocator::size::GRANULE;
use crate::allocator::stream::slot::StreamKey;
use crate::driver::process;
use crate::error::OutOfMemory;
use crate::event::record::{MAPPED, NO_LIMIT, OTHERS, SMALL, has_number};
use crate::event::{Event, Kind, names, session};
use crate::nvtx::Category;

impl Heap {
    fn event(&self, kind: Kind, at: u64, bytes: u64, stream: u32) -> Event {
        let allocator = self.caches.id;
        Event {
            kind,
            at,
            bytes,
            stream,
            allocator,
        }
    }

    #[cold]
    #[inline(never)]
    fn tell(&self, kind: Kind, at: u64, bytes: u64, stream: u32) {
        let event = self.event(kind, at, bytes, stream);
        match self.unnumbered(stream) {
            Some(handle) => session::push_of(handle, event, names::context()),
            None => session::push(event),
        }
        self.tell_tool(kind, at, bytes);
    }

    /// Returns the handle of a stream whose slot has no number in records.
    pub(crate) fn unnumbered(&self, stream: u32) -> Option<u64> {
        let slot = self.streams.slots.get(stream as usize);
        let slot = slot.filter(|_| !has_number(stream));
        slot.map(|slot| slot.raw as u64)
    }

    /// Reports to the NVTX tool, under the lock: the next block at this address must not be reported before the end of
    /// this one.
    fn tell_tool(&self, kind: Kind, at: u64, bytes: u64) {
        let Some(tool) = self.tool else {
            return;
        };
        match kind {
            Kind::Allocate => {
                let name = names::name_of(names::context());
                tool.born(at, bytes, name.as_deref());
            }
            Kind::Free => tool.gone(at),
            Kind::Map => tool.heap(at, bytes),
            Kind::Unmap => tool.heap_gone(at),
            _ => {}
        }
    }

    /// Records an allocated block.
    #[inline(always)]
    pub(crate) fn tell_granted(&mut self, id: u32, requested: u64) {
        if process::is_recording() {
            let hot = self.extents.records[id];
            let origin = &mut self.extents.records.cold_mut(id).origin;
            origin.names_mut(hot.generation).context = names::context() as u16;
            self.tell(Kind::Allocate, hot.addr, requested, hot.stream);
        }
    }

    /// Records a live block that is about to be freed.
    #[inline(always)]
    pub(crate) fn tell_free(&self, id: u32) {
        if process::is_recording() {
            let hot = &self.extents.records[id];
            let requested = self.extents.records.cold(id).requested;
            self.tell(Kind::Free, hot.addr, requested, hot.stream);
        }
    }

    /// Records a use of the block around an address by a stream.
    #[cold]
    pub(crate) fn tell_use(&self, at: u64, key: StreamKey) {
        if let Some(stream) = self.streams.find(key) {
            self.tell(Kind::Use, at, 0, stream);
        }
    }

    /// Records a request that failed for lack of memory, with its stream's key and handle.
    #[cold]
    pub(crate) fn tell_refused(&self, refused: &OutOfMemory, (key, raw): (StreamKey, usize)) {
        let stream = self.streams.find(key);
        let numbered = stream.filter(|stream| has_number(*stream));
        let slot = numbered.unwrap_or(OTHERS);
        // Amounts use the field of addresses, which are multiples of a granule.
        let free = refused.driver_free.unwrap_or(0) / GRANULE * GRANULE;
        let missing = refused.missing().next_multiple_of(GRANULE);
        let cause = refused.cause().number();
        let events = [
            self.event(Kind::Cause, missing, cause, slot),
            self.event(Kind::OutOfMemory, free, refused.requested, slot),
        ];
        let handle = numbered.is_none().then_some(raw as u64);
        session::push_together(handle, &events, names::context());
        if let Some(tool) = self.tool {
            tool.mark(Category::OutOfMemory, &refused.to_string());
        }
    }

    /// Records the limit.
    pub(crate) fn tell_limit(&self) {
        if process::is_recording() {
            session::push(self.limit_event());
        }
    }

    /// Records a change of the memory regime.
    pub(crate) fn tell_regime(&self) {
        if process::is_recording() {
            session::push(self.regime_event());
        }
    }

    fn regime_event(&self) -> Event {
        self.event(Kind::Regime, 0, self.physical.regime.number(), 0)
    }

    fn limit_event(&self) -> Event {
        let limit = self.physical.limit.unwrap_or(NO_LIMIT);
        self.event(Kind::Limit, 0, limit, 0)
    }

    /// Records memory obtained from or released to the driver: its pool, and whether it is a mapped handle.
    pub(crate) fn tell_held(
        &self,
        kind: Kind,
        at: u64,
        bytes: u64,
        (space, mapped): (SpaceId, bool),
    ) {
        if process::is_recording() {
            self.tell(kind, at, bytes, pool(space, mapped));
        }
    }

    /// Records the allocation or free of a graph pool's block, with its requested bytes, and its first user unless that
    /// was retired.
    pub(crate) fn tell_pooled(&self, kind: Kind, (at, bytes): (u64, u64), user: Option<&User>) {
        if process::is_recording() {
            let stream = user.and_then(|user| self.streams.find(user.key));
            if stream.is_none() && kind == Kind::Allocate {
                let raw = user.map_or(0, |user| user.raw as u64);
                self.tell(Kind::Stream, 0, raw, OTHERS);
            }
            self.tell(kind, at, bytes, stream.unwrap_or(OTHERS));
        }
    }

    /// Records that a handle was mapped for a graph pool, or unmapped.
    pub(crate) fn tell_pool_memory(&self, kind: Kind, at: u64, bytes: u64) {
        self.tell_held(kind, at, bytes, (SpaceId::Large, true));
    }

    /// Records which stream a slot stands for from here on. A stream without a number in records is named with each
    /// event.
    pub(crate) fn tell_stream(&self, stream: u32, raw: usize) {
        if process::is_recording() && has_number(stream) {
            self.tell(Kind::Stream, 0, raw as u64, stream);
        }
    }

    /// Records the present state for a recording that began at a given time: the allocator with its limit, its device
    /// and the device's memory, its streams, the memory it holds, and its live blocks.
    pub(crate) fn tell_all(&mut self, ticks: u64, device_memory: u64) {
        if self.closed {
            return;
        }
        self.clear_large_caches();
        let device = self.device as u64;
        let mut rare = vec![
            self.event(Kind::Source, 0, device, 0),
            self.event(Kind::DeviceMemory, 0, device_memory, 0),
            self.limit_event(),
            self.regime_event(),
        ];
        let numbered = self.streams.iter().filter(|(slot, _)| has_number(*slot));
        for (slot, stream) in numbered {
            rare.push(self.event(Kind::Stream, 0, stream.raw as u64, slot));
        }
        for (at, holding) in &self.physical.holdings {
            let pool = pool(holding.space, holding.handle.is_some());
            rare.push(self.event(Kind::Map, *at, holding.bytes, pool));
        }
        for pool in self.graphs.pools.values() {
            for (at, bytes) in pool.arena.at_home() {
                rare.push(self.event(Kind::Map, at, bytes, MAPPED));
            }
        }
        let slots: HashMap<u64, u32> = self
            .streams
            .iter()
            .map(|(slot, s)| (s.key.number(), slot))
            .collect();
        let live = self
            .snapshot()
            .into_iter()
            .flat_map(|segment| segment.blocks);
        let mut held = Vec::new();
        for pool in self.graphs.pools.values() {
            for (at, live) in pool.arena.live.iter() {
                let user = live.users.first();
                let stream = user.and_then(|user| self.streams.find(user.key));
                if stream.is_none_or(|stream| !has_number(stream)) {
                    let raw = user.map_or(0, |user| user.raw as u64);
                    held.push(self.event(Kind::Stream, 0, raw, OTHERS));
                }
                let stream = stream.unwrap_or(OTHERS);
                held.push(self.event(Kind::Held, *at, live.requested, stream));
            }
        }
        for block in live.filter(|block| block.state == BlockState::Live) {
            let slot = block.stream.and_then(|number| slots.get(&number));
            let slot = slot.copied().unwrap_or(0);
            if let Some(handle) = self.unnumbered(slot) {
                held.push(self.event(Kind::Stream, 0, handle, OTHERS));
            }
            held.push(self.event(Kind::Held, block.address, block.requested, slot));
        }
        session::push_held(ticks, &rare, &held);
    }
}

fn pool(space: SpaceId, mapped: bool) -> u32 {
    let small = if space == SpaceId::Small { SMALL } else { 0 };
    small | if mapped { MAPPED } else { 0 }
}
