//! A recording, read back.

use std::collections::BTreeMap;

use crate::allocator::Regime;
use crate::error::Cause;
use crate::trace::{RowMaker, Trace, TraceError};

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Action {
    /// A block was live already when the recording began.
    Held,
    /// A block was handed out.
    Allocate,
    /// A block was given up.
    Free,
    /// Another stream was recorded on the block around the address.
    Use,
    /// Memory came from the driver: a handle mapped into an arena, or a segment of `cuMemAlloc`.
    Map {
        /// Whether it is of the small pool.
        small: bool,
        /// Whether it is a handle mapped into an arena.
        mapped: bool,
    },
    /// Memory went back to the driver.
    Unmap {
        /// Whether it was of the small pool.
        small: bool,
        /// Whether it was a handle mapped into an arena.
        mapped: bool,
    },
    /// A request found no memory.
    OutOfMemory {
        /// Why, if the recording says so.
        cause: Option<Cause>,
        /// Bytes that were missing, rounded up to a multiple of 512, if the recording says so.
        missing: Option<u64>,
        /// Bytes that the device had free, rounded down to a multiple of 512, if the recording says so.
        device_free: Option<u64>,
    },
    /// The limit of the allocator is this from here on; none if it has no limit.
    Limit(Option<u64>),
    /// The memory regime of the allocator is this from here on.
    Regime(Regime),
    /// The stack of the block at the address was taken, which was just handed out: the context is the stack.
    Sample,
}

/// One event of a recording.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Event {
    /// What happened.
    pub action: Action,
    /// When: nanoseconds since the recording began.
    pub time: u64,
    /// The first byte of what it is about; 0 for [`Action::OutOfMemory`], [`Action::Limit`] and
    /// [`Action::Regime`].
    pub address: u64,
    /// Bytes, of a block as they were asked for; 0 for [`Action::Use`], [`Action::Limit`] and
    /// [`Action::Regime`].
    pub bytes: u64,
    /// The stream, as an index of [`Recording::streams`]; of memory from the driver 0 means nothing.
    pub stream: u32,
    /// The context that the thread was in, as [`Recording::context`] takes it; 0 for none.
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
    /// The driver's handle; 0, 1 and 2 are default streams. It may be that of several streams, one after the other.
    pub handle: u64,
}

/// A recording: its events by time.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Recording {
    pub(super) events: Vec<Event>,
    pub(super) streams: Vec<RecordedStream>,
    pub(super) contexts: BTreeMap<u32, String>,
    pub(super) devices: BTreeMap<u16, usize>,
    /// Bytes of the devices of allocators.
    pub(super) memory: BTreeMap<u16, u64>,
    pub(super) start: u64,
    pub(super) lost: u64,
    pub(super) complete: bool,
    pub(super) sampling: u64,
}

impl Recording {
    /// What the file of every recording begins with.
    pub const MAGIC: [u8; 8] = crate::event::file::MAGIC;

    /// All events, by time.
    pub fn events(&self) -> &[Event] {
        &self.events
    }

    /// The streams that events name.
    pub fn streams(&self) -> &[RecordedStream] {
        &self.streams
    }

    /// The name of a context; `None` for none.
    pub fn context(&self, context: u32) -> Option<&str> {
        self.contexts.get(&context).map(String::as_str)
    }

    /// The ordinal of an allocator's device; 0 if the recording does not say.
    pub fn device_of(&self, allocator: u16) -> usize {
        self.devices.get(&allocator).copied().unwrap_or(0)
    }

    /// The allocators that the recording knows, and the devices of them.
    pub fn allocators(&self) -> impl Iterator<Item = (u16, usize)> + '_ {
        self.devices.iter().map(|(id, device)| (*id, *device))
    }

    /// The part of the recording that is about one device.
    pub fn of_device(&self, device: usize) -> Recording {
        let mut part = self.clone();
        part.devices.retain(|_, of| *of == device);
        part.events
            .retain(|event| part.devices.contains_key(&event.allocator));
        part
    }

    /// Bytes of memory of an allocator's device; none if the recording does not say.
    pub fn device_memory_of(&self, allocator: u16) -> Option<u64> {
        self.memory.get(&allocator).copied()
    }

    /// The limit of an allocator at the end; none if it had none, or the recording does not say.
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

    /// Nanoseconds since 1970 when it began.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// Events that there was no room for.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// Whether the recording was ended, and not broken off.
    pub fn is_complete(&self) -> bool {
        self.complete
    }

    /// Bytes that were asked for between two stacks, on the average; 0 if none were taken.
    pub fn sampling(&self) -> u64 {
        self.sampling
    }

    /// The allocations and frees as a trace that can be replayed: of one allocator, or of all of them. What was live
    /// when the recording began comes first. Frees of blocks that the recording does not know are left out, and so
    /// is an allocation of no bytes. Requests that failed are rows of [`Op::Oom`](crate::trace::Op::Oom).
    ///
    /// # Errors
    /// [`TraceFault::LiveBytesOverflow`](crate::trace::TraceFault::LiveBytesOverflow): the bytes of a recording from a stranger may add up to anything.
    pub fn to_trace(&self, name: &str, allocator: Option<u16>) -> Result<Trace, TraceError> {
        let mut live = BTreeMap::new();
        let mut rows = RowMaker::default();
        for event in &self.events {
            if allocator.is_some_and(|only| only != event.allocator) {
                continue;
            }
            let place = (event.allocator, event.address);
            match event.action {
                Action::Held if live.contains_key(&place) => {}
                Action::Held | Action::Allocate if event.bytes > 0 => {
                    // One whose free was lost, or that was seen when the recording began.
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
        }
        rows.trace(name, |number| self.context(number).map(str::to_owned))
    }
}
