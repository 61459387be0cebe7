//! What names a block: the label of its request, who it is, and where it is in its life.

use std::fmt;
use std::hash::{Hash, Hasher};

use crate::driver::sys;
use crate::error::Error;

/// A short static label of an allocation, for logs and statistics. "untagged" by default.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tag(&'static str);

impl Tag {
    /// The label of what has none.
    pub(crate) const NONE: Tag = Tag("untagged");

    /// A label.
    pub const fn new(label: &'static str) -> Tag {
        Tag(label)
    }

    /// The label's text.
    pub const fn as_str(self) -> &'static str {
        self.0
    }
}

impl Default for Tag {
    fn default() -> Tag {
        Tag::NONE
    }
}

impl From<&'static str> for Tag {
    fn from(label: &'static str) -> Tag {
        Tag(label)
    }
}

impl fmt::Debug for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.0, f)
    }
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

/// One life of one block: a key, not an owner. It is a copy that is checked at each use, and refused when the
/// block it was taken from is gone.
///
/// Its [`source`](Self::source) and [`generation`](Self::generation) tell it from every other block of the
/// process, also where an address or a record is used again; two are equal if these are.
#[derive(Clone, Copy)]
pub struct BlockId {
    source: u64,
    generation: u64,
    ptr: sys::CUdeviceptr,
    bytes: usize,
    stream: u64,
    ordinal: usize,
}

impl BlockId {
    /// The `generation`-th life of the blocks of a source.
    #[inline(always)]
    pub(crate) fn new(
        (source, generation): (u64, u64),
        (ptr, bytes): (sys::CUdeviceptr, usize),
        stream: u64,
        ordinal: usize,
    ) -> BlockId {
        BlockId {
            source,
            generation,
            ptr,
            bytes,
            stream,
            ordinal,
        }
    }

    /// The block's first byte.
    #[inline]
    pub fn ptr(&self) -> sys::CUdeviceptr {
        self.ptr
    }

    /// Its size in bytes, as it was asked for.
    #[inline]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The ordinal of its device.
    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// The driver's id of the stream that it was allocated on.
    #[inline]
    pub fn stream_id(&self) -> u64 {
        self.stream
    }

    /// The allocator, or the other source of memory, that made the block: counted from 1, and never used again
    /// in the process.
    #[inline]
    pub fn source(&self) -> u64 {
        self.source
    }

    /// Which life of which record of the source: never used again there.
    #[inline]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// The address of a byte range, if it lies inside the block.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    pub fn range(&self, offset: usize, bytes: usize) -> Result<sys::CUdeviceptr, Error> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes => Ok(self.ptr + offset as u64),
            _ => Err(Error::OutOfBounds {
                generation: Some(self.generation),
                start: offset,
                end: offset.saturating_add(bytes),
                len: self.bytes,
            }),
        }
    }

    /// What is said of a block that its resource does not know.
    pub(crate) fn gone(&self) -> Error {
        Error::UseAfterFree {
            ptr: self.ptr,
            generation: self.generation,
        }
    }
}

impl PartialEq for BlockId {
    fn eq(&self, other: &BlockId) -> bool {
        (self.source, self.generation) == (other.source, other.generation)
    }
}

impl Eq for BlockId {}

impl Hash for BlockId {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.source, self.generation).hash(state);
    }
}

debug_fields!(BlockId, self =>
    ptr: format_args!("{:#x}", self.ptr),
    bytes: self.bytes,
    stream: self.stream,
    source: self.source,
    generation: self.generation,
);

/// Where a block is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BlockState {
    /// Handed out.
    Live,
    /// Given back, and work on a stream may still use it: of a resource's block until a reap has seen its stream
    /// get there.
    Pending,
    /// Given back and unused, or never known.
    Free,
    /// Given back; a reap failed to find out whether its stream got there, and will try again.
    Quarantined,
    /// Mapped in a view that is live there.
    Aliased,
    /// Between two states at this instant.
    Busy,
}

impl BlockState {
    /// The state of a block by whether its source knows it as live.
    pub(crate) fn live_if(known: bool) -> BlockState {
        match known {
            true => BlockState::Live,
            false => BlockState::Free,
        }
    }
}
