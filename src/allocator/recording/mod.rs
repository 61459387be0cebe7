//! What a heap writes to a recording and to the NVTX tool.

#![forbid(unsafe_code)]

use crate::allocator::extent::record::{Records, SpaceId};
use crate::allocator::report::Regime;
use crate::allocator::size::GRANULE;
use crate::allocator::stream::Streams;
use crate::allocator::stream::slot::StreamKey;
use crate::driver::process;
use crate::error::OutOfMemory;
use crate::event::record::{MAPPED, NO_LIMIT, OTHERS, SMALL, has_number};
use crate::event::{Event, Kind, names, session};
use crate::nvtx::{Category, Tool};

/// Writes the events of a heap. Its functions run under the heap's lock: the next block at an address must not be
/// reported before the end of this one.
#[derive(Debug)]
pub(crate) struct Recorder {
    /// Number of the allocator.
    allocator: u64,
    /// The NVTX tool that receives blocks, and the heaps that contain them.
    pub tool: Option<&'static Tool>,
}

impl Recorder {
    pub(crate) fn new(allocator: u64) -> Self {
        Recorder {
            allocator,
            tool: None,
        }
    }

    pub(crate) fn event(&self, kind: Kind, at: u64, bytes: u64, stream: u32) -> Event {
        Event {
            kind,
            at,
            bytes,
            stream,
            allocator: self.allocator,
        }
    }

    /// Writes an event of a stream. A stream without a number in records is named with each event.
    #[cold]
    #[inline(never)]
    fn write(&self, streams: &Streams, kind: Kind, (at, bytes): (u64, u64), stream: u32) {
        let event = self.event(kind, at, bytes, stream);
        match unnumbered_handle(streams, stream) {
            Some(handle) => session::push_of(handle, event, names::context()),
            None => session::push(event),
        }
        self.report(kind, at, bytes);
    }

    /// Reports to the NVTX tool.
    fn report(&self, kind: Kind, at: u64, bytes: u64) {
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
            Kind::Unmap => tool.remove_heap(at),
            _ => {}
        }
    }

    #[inline(always)]
    pub(crate) fn record_allocation(&self, streams: &Streams, records: &mut Records, id: u32) {
        if process::is_recording() {
            let hot = records[id];
            let cold = records.cold_mut(id);
            cold.origin.names_mut(hot.generation).context = names::context() as u16;
            let block = (hot.addr, cold.requested);
            self.write(streams, Kind::Allocate, block, hot.stream);
        }
    }

    /// Records a live block that is about to be freed.
    #[inline(always)]
    pub(crate) fn record_free(&self, streams: &Streams, records: &Records, id: u32) {
        if process::is_recording() {
            let hot = &records[id];
            let block = (hot.addr, records.cold(id).requested);
            self.write(streams, Kind::Free, block, hot.stream);
        }
    }

    /// Records a use of the block around an address by a stream.
    #[cold]
    pub(crate) fn record_use(&self, streams: &Streams, at: u64, key: StreamKey) {
        if let Some(stream) = streams.find(key) {
            self.write(streams, Kind::Use, (at, 0), stream);
        }
    }

    /// Records the allocation or free of a graph pool's block, with the key and handle of its first user unless that
    /// was retired.
    pub(crate) fn record_pooled(
        &self,
        streams: &Streams,
        kind: Kind,
        block: (u64, u64),
        user: Option<(StreamKey, usize)>,
    ) {
        if process::is_recording() {
            let stream = user.and_then(|(key, _)| streams.find(key));
            if stream.is_none() && kind == Kind::Allocate {
                let raw = user.map_or(0, |(_, raw)| raw as u64);
                self.write(streams, Kind::Stream, (0, raw), OTHERS);
            }
            self.write(streams, kind, block, stream.unwrap_or(OTHERS));
        }
    }

    /// Records a request that failed for lack of memory, with its stream's key and handle.
    #[cold]
    pub(crate) fn record_refusal(
        &self,
        streams: &Streams,
        refused: &OutOfMemory,
        (key, raw): (StreamKey, usize),
    ) {
        let stream = streams.find(key);
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

    pub(crate) fn record_limit(&self, limit: Option<u64>) {
        if process::is_recording() {
            session::push(self.limit(limit));
        }
    }

    pub(crate) fn limit(&self, limit: Option<u64>) -> Event {
        self.event(Kind::Limit, 0, limit.unwrap_or(NO_LIMIT), 0)
    }

    /// Records a change of the memory regime.
    pub(crate) fn record_regime(&self, regime: Regime) {
        if process::is_recording() {
            session::push(self.regime(regime));
        }
    }

    pub(crate) fn regime(&self, regime: Regime) -> Event {
        self.event(Kind::Regime, 0, regime.number(), 0)
    }

    /// Records memory obtained from or released to the driver: its pool, and whether it is a mapped handle.
    pub(crate) fn record_memory(
        &self,
        kind: Kind,
        (at, bytes): (u64, u64),
        (space, mapped): (SpaceId, bool),
    ) {
        if process::is_recording() {
            session::push(self.event(kind, at, bytes, pool(space, mapped)));
            self.report(kind, at, bytes);
        }
    }

    /// Records which stream a slot stands for from here on.
    pub(crate) fn record_stream(&self, stream: u32, raw: usize) {
        if process::is_recording() && has_number(stream) {
            session::push(self.event(Kind::Stream, 0, raw as u64, stream));
        }
    }
}

/// Returns the handle of a stream whose slot has no number in records.
pub(crate) fn unnumbered_handle(streams: &Streams, stream: u32) -> Option<u64> {
    let slot = streams.slots.get(stream as usize);
    let slot = slot.filter(|_| !has_number(stream));
    slot.map(|slot| slot.raw as u64)
}

/// Returns the number by which records name a pool of memory.
pub(crate) fn pool(space: SpaceId, mapped: bool) -> u32 {
    let small = if space == SpaceId::Small { SMALL } else { 0 };
    small | if mapped { MAPPED } else { 0 }
}
