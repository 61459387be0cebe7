//! Identification of blocks: the label of a request, the id of a block, and its state.

use std::fmt;
use std::hash::{Hash, Hasher};

use crate::driver::sys;
use crate::error::Error;

/// A short static label of an allocation, for logs and statistics; by default "untagged".
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tag(&'static str);

impl Tag {
    /// The label of requests without one.
    pub(crate) const NONE: Tag = Tag("untagged");

    /// Creates a label.
    pub const fn new(label: &'static str) -> Tag {
        Tag(label)
    }

    /// Returns the label's text.
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

/// The id of one allocation of a block: a key, not an owner. It is checked at each use, and rejected once the block no
/// longer exists.
///
/// Its [`source`](Self::source) and [`generation`](Self::generation) distinguish it from every other block of the
/// process, even where an address or a record is reused; ids are equal if these are.
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
    /// Creates the id of generation `generation` of a source.
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

    /// Returns the address of the block's first byte.
    #[inline]
    pub fn ptr(&self) -> sys::CUdeviceptr {
        self.ptr
    }

    /// Returns the requested size in bytes.
    #[inline]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the ordinal of its device.
    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// Returns the driver's id of the stream that it was allocated on.
    #[inline]
    pub fn stream_id(&self) -> u64 {
        self.stream
    }

    /// Returns the number of the allocator, or other source of memory, that created the block: counted from 1 and never
    /// reused in the process.
    #[inline]
    pub fn source(&self) -> u64 {
        self.source
    }

    /// Returns the generation: unique among all blocks of the source.
    #[inline]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns the address of a byte range, if it lies inside the block. Fails with [`Error::OutOfBounds`].
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

    /// The state of a block unknown to its resource.
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

/// The state of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize),
    serde(rename_all = "lowercase")
)]
#[non_exhaustive]
pub enum BlockState {
    /// Allocated.
    Live,
    /// Freed, but work on a stream may still use it: for a block of a resource, until a reap has found that work
    /// complete.
    Pending,
    /// Freed and unused, or never known.
    Free,
    /// Freed; a reap could not determine whether the work is complete, and will try again.
    Quarantined,
    /// Mapped in a view that is live there.
    Aliased,
    /// Changing its state at this moment.
    Busy,
}

impl BlockState {
    /// Returns the state of a block, given whether its source knows it as live.
    pub(crate) fn live_if(known: bool) -> BlockState {
        match known {
            true => BlockState::Live,
            false => BlockState::Free,
        }
    }
}

/// How work accesses a block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Access {
    /// Reads only.
    Read,
    /// Writes, and does not depend on what was there.
    Write,
    /// Reads and writes.
    ReadWrite,
}

impl Access {
    /// Whether the block's contents may change.
    pub fn writes(self) -> bool {
        self != Access::Read
    }

    /// The access that covers both.
    pub fn merge(self, other: Access) -> Access {
        match self == other {
            true => self,
            false => Access::ReadWrite,
        }
    }
}
