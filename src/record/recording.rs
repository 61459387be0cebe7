//! A recording, read back.

use std::collections::BTreeMap;

use crate::allocator::Regime;
use crate::error::Cause;
use crate::trace::{RowMaker, Trace, TraceError};

/// The kind of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Action {
    /// A block that was already live when the recording began.
    Held,
    /// A block was allocated.
    Allocate,
    /// A block was freed.
    Free,
    /// Another stream was recorded on the block that contains the address.
    Use,
    /// Memory was obtained from the driver: a handle mapped into an arena, or a segment of `cuMemAlloc`.
    Map {
        /// Whether it belongs to the small pool.
        small: bool,
        /// Whether it is a handle mapped into an arena.
        mapped: bool,
    },
    /// Memory was returned to the driver.
    Unmap {
        /// Whether it belonged to the small pool.
        small: bool,
        /// Whether it was a handle mapped into an arena.
        mapped: bool,
    },
    /// A request failed for lack of memory.
    OutOfMemory {
        /// The cause, if the recording contains it.
        cause: Option<Cause>,
        /// Missing bytes, rounded up to a multiple of 512, if recorded.
        missing: Option<u64>,
        /// Free bytes of the device, rounded down to a multiple of 512, if recorded.
        device_free: Option<u64>,
    },
    /// The new limit of the allocator; none if it has no limit.
    Limit(Option<u64>),
    /// The new memory regime of the allocator.
    Regime(Regime),
    /// The stack of the block just allocated at the address: the context is the stack.
    Sample,
}

/// One event of a recording.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Event {
    /// The kind of the event.
    pub action: Action,
    /// Nanoseconds since the recording began.
    pub time: u64,
    /// The first byte of the block or memory; 0 for [`Action::OutOfMemory`], [`Action::Limit`] and [`Action::Regime`].
    pub address: u64,
    /// Size in bytes, for blocks the requested size; 0 for [`Action::Use`], [`Action::Limit`] and [`Action::Regime`].
    pub bytes: u64,
    /// The stream, as an index of [`Recording::streams`]; meaningless if 0 and the event is about driver memory.
    pub stream: u32,
    /// The context of the thread, for [`Recording::context`]; 0 for none.
    pub context: u32,
    /// The number of the allocator in its process, modulo 65536.
    pub allocator: u16,
}

/// A stream of a recording.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct RecordedStream {
    /// The number of its allocator.
    pub allocator: u16,
    /// The driver's handle; 0, 1 and 2 are default streams. Several streams may have had it, one after the other.
    pub handle: u64,
}

/// A recording: its events by time.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Recording {
    pub(super) events: Vec<Event>,
    pub(super) streams: Vec<RecordedStream>,
    pub(super) contexts: BTreeMap<u32, String>,
    pub(super) devices: BTreeMap<u16, usize>,
    pub(super) memory: BTreeMap<u16, u64>,
    pub(super) start: u64,
    pub(super) lost: u64,
    pub(super) complete: bool,
    pub(super) sampling: u64,
}

impl Recording {
    /// The first bytes of every recording's file.
    pub const MAGIC: [u8; 8] = crate::event::file::MAGIC;

    /// Returns all events, by time.
    pub fn events(&self) -> &[Event] {
        &self.events
    }

    /// Returns the streams that events refer to.
    pub fn streams(&self) -> &[RecordedStream] {
        &self.streams
    }

    /// Returns the name of a context; `None` for none.
    pub fn context(&self, context: u32) -> Option<&str> {
        self.contexts.get(&context).map(String::as_str)
    }

    /// Returns the ordinal of an allocator's device; 0 if it is not recorded.
    pub fn device_of(&self, allocator: u16) -> usize {
        self.devices.get(&allocator).copied().unwrap_or(0)
    }

    /// Returns the recorded allocators and their devices.
    pub fn allocators(&self) -> impl Iterator<Item = (u16, usize)> + '_ {
        self.devices.iter().map(|(id, device)| (*id, *device))
    }

    /// Returns the part of the recording about one device.
    pub fn of_device(&self, device: usize) -> Recording {
        let mut part = self.clone();
        part.devices.retain(|_, of| *of == device);
        part.events
            .retain(|event| part.devices.contains_key(&event.allocator));
        part
    }

    /// Returns the memory size of an allocator's device in bytes; none if it is not recorded.
    pub fn device_memory_of(&self, allocator: u16) -> Option<u64> {
        self.memory.get(&allocator).copied()
    }

    /// Returns the limit of an allocator at the end; none if it had no limit, or if it is not recorded.
    pub fn limit_of(&self, allocator: u16) -> Option<u64> {
        let own = self
            .events
            .iter()
            .rev()
            .filter(|event| event.allocator == allocator);
        own.into_iter().find_map(|event| match event.action {
            Action::Limit(limit) => Some(limit),
            _ => None,
        })?
    }

    /// Returns the start of the recording in nanoseconds since 1970.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// Returns the number of lost events.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// Whether the recording was stopped properly, rather than truncated.
    pub fn is_complete(&self) -> bool {
        self.complete
    }

    /// Returns the average number of bytes allocated between two stack samples; 0 if none were taken.
    pub fn sampling(&self) -> u64 {
        self.sampling
    }

    /// Converts allocations and frees to a trace that can be replayed: of one allocator, or of all of them. Blocks that
    /// were live when the recording began come first. Frees of unknown blocks and allocations of 0 bytes are omitted.
    /// Failed requests are rows of [`Op::Oom`](crate::trace::Op::Oom).
    ///
    /// # Errors
    /// [`TraceFault::LiveBytesOverflow`](crate::trace::TraceFault::LiveBytesOverflow): in an untrusted recording the
    /// bytes may add up to any number.
    pub fn to_trace(&self, name: &str, allocator: Option<u16>) -> Result<Trace, TraceError> {
        let (rows, _) = self.rows(allocator);
        rows.trace(name, |number| self.context(number).map(str::to_owned))
    }

    /// Returns the time of each row of [`to_trace`](Self::to_trace), in nanoseconds since the recording began.
    pub fn row_times(&self, allocator: Option<u16>) -> Vec<u64> {
        self.rows(allocator).1
    }

    fn rows(&self, allocator: Option<u16>) -> (RowMaker, Vec<u64>) {
        let mut live = BTreeMap::new();
        let (mut rows, mut times) = (RowMaker::default(), Vec::new());
        for event in &self.events {
            if allocator.is_some_and(|only| only != event.allocator) {
                continue;
            }
            let place = (event.allocator, event.address);
            match event.action {
                Action::Held if live.contains_key(&place) => {}
                Action::Held | Action::Allocate if event.bytes > 0 => {
                    // A block whose free was lost, or that was held when the recording began.
                    rows.free(live.remove(&place));
                    let block = rows.allocate(event.stream, event.bytes, event.context);
                    live.insert(place, block);
                }
                Action::Free => rows.free(live.remove(&place)),
                Action::OutOfMemory { .. } if event.bytes > 0 => {
                    rows.fail(event.stream, event.bytes);
                }
                _ => {}
            }
            times.resize(rows.count(), event.time);
        }
        (rows, times)
    }
}
