//! Blocks of a resource: plain values with an identity.

use std::fmt;
use std::sync::Arc;

use crate::driver::sys;

use super::key::BlockKey;
use super::meter::{Charge, Meter};
use crate::error::{Error, StreamMisuse};

/// A short static label of an allocation, for logs and statistics. "untagged" by default.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tag(&'static str);

impl Tag {
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
        Tag("untagged")
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

/// What work does with a block.
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
        if self == other {
            self
        } else {
            Access::ReadWrite
        }
    }
}

/// The identity of a block: a copy that is checked at each use, and refused when the block it was
/// taken from is gone.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct BlockIdentity {
    /// Who it is.
    pub key: BlockKey,
    /// Its first byte.
    pub ptr: sys::CUdeviceptr,
    /// Its size in bytes, as it was asked for.
    pub bytes: usize,
    /// The driver's id of the stream that it was allocated on.
    pub stream: u64,
    /// The ordinal of its device.
    pub device: usize,
}

impl BlockIdentity {
    /// What is said of a block that its resource does not know.
    pub(crate) fn gone(&self) -> Error {
        Error::UseAfterFree {
            ptr: self.ptr,
            generation: self.key.generation,
        }
    }

    /// The address of a byte range, if it lies inside the block.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    pub fn range(&self, offset: usize, bytes: usize) -> Result<sys::CUdeviceptr, Error> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes => Ok(self.ptr + offset as u64),
            _ => Err(Error::OutOfBounds {
                generation: Some(self.key.generation),
                start: offset,
                end: offset.saturating_add(bytes),
                len: self.bytes,
            }),
        }
    }
}

/// Where a block is in its life, as [`MemoryResource::state`](super::MemoryResource::state) sees it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum BlockState {
    /// Allocated.
    Live,
    /// Deallocated; its bytes count as pending until a reap has seen its stream get there.
    Retired,
    /// Deallocated; a reap failed to find out whether its stream got there, and will try again.
    Quarantined,
    /// Gone, or never known.
    Freed,
}

/// Memory as a [`MemoryResource`](super::MemoryResource) hands it out: a value that names it. It
/// does not free itself, so that the one who holds it decides through which stack it goes back;
/// [`OwnedBlock`](super::OwnedBlock) does. It cannot be copied: its [`identity`](Self::identity)
/// can.
///
/// `Send` and `Sync`. Losing it leaks the memory and what budgets charged for it.
#[must_use = "a lost block is leaked memory"]
pub struct ResourceBlock {
    identity: BlockIdentity,
    size: u64,
    tag: Tag,
    /// The alignment is two to the power of this.
    alignment: u32,
    /// How many resources of the stack keep an order of its uses that those below them do not know.
    keepers: u32,
    /// Nobody else can name it any more: who cannot take it back now does so later.
    abandoned: bool,
    first: Option<Charge>,
    /// Further ones, which few blocks have.
    #[expect(
        clippy::box_collection,
        reason = "one word instead of three in every block"
    )]
    more: Option<Box<Vec<Charge>>>,
}

impl ResourceBlock {
    /// Names memory. For those who write a source of memory.
    ///
    /// # Safety
    /// Whoever holds the result owns the memory, and safe code may give it back. So the memory is handed out by
    /// this and by nothing else: what is told of it is true, its alignment is a power of two, `size` bytes may
    /// be used of it, the key is new, nobody else uses the memory or gives it back before the result was taken
    /// by [`deallocate_block`](super::MemoryResource::deallocate_block). No identity of a block that lives may
    /// be used for it, which anybody can have.
    ///
    /// ```compile_fail,E0133
    /// # use cualloc::resource::{BlockIdentity, ResourceBlock, Tag};
    /// fn forge(identity: BlockIdentity) -> ResourceBlock {
    ///     ResourceBlock::new(identity, 512, 1, Tag::default())
    /// }
    /// ```
    #[inline]
    pub unsafe fn new(
        identity: BlockIdentity,
        size: u64,
        alignment: usize,
        tag: Tag,
    ) -> ResourceBlock {
        ResourceBlock {
            identity,
            size,
            alignment: alignment.trailing_zeros(),
            tag,
            keepers: 0,
            abandoned: false,
            first: None,
            more: None,
        }
    }

    /// Who it is.
    pub fn identity(&self) -> BlockIdentity {
        self.identity
    }

    /// Its first byte.
    pub fn ptr(&self) -> sys::CUdeviceptr {
        self.identity.ptr
    }

    /// Its size in bytes, as it was asked for.
    pub fn bytes(&self) -> usize {
        self.identity.bytes
    }

    /// Usable bytes: [`bytes`](Self::bytes), rounded up.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The alignment in bytes that was asked for.
    pub fn alignment(&self) -> usize {
        1usize.checked_shl(self.alignment).unwrap_or(1)
    }

    /// Its label.
    pub fn tag(&self) -> Tag {
        self.tag
    }

    /// The ordinal of its device.
    pub fn device(&self) -> usize {
        self.identity.device
    }

    /// The driver's id of the stream that it was allocated on.
    pub fn stream_id(&self) -> u64 {
        self.identity.stream
    }

    /// The generation of its record.
    pub fn generation(&self) -> u64 {
        self.identity.key.generation
    }

    /// How many resources keep the order of its uses.
    #[inline]
    pub(crate) fn keepers(&self) -> u32 {
        self.keepers
    }

    /// A resource keeps the order of its uses, or does so no more: what is below it takes the block back
    /// only from there.
    pub(crate) fn set_keepers(&mut self, keepers: u32) {
        self.keepers = keepers;
    }

    /// Nobody will try again to give it back.
    pub(crate) fn abandon(&mut self) {
        self.abandoned = true;
    }

    #[inline]
    pub(crate) fn is_abandoned(&self) -> bool {
        self.abandoned
    }

    /// Whether whoever made the block may take it back: nobody above keeps the order of its uses.
    pub(crate) fn returned(&self) -> Result<(), Error> {
        if self.keepers == 0 {
            return Ok(());
        }
        Err(StreamMisuse::KeptAbove.into())
    }

    /// Ties a charge to the memory: it ends when the memory has really left.
    #[inline]
    pub(crate) fn attach(&mut self, charge: Charge) {
        // Mostly there is one, which needs no allocation.
        if self.first.is_none() && self.more.is_none() {
            self.first = Some(charge);
        } else {
            self.more.get_or_insert_default().push(charge);
        }
    }

    #[inline]
    pub(crate) fn charges(&self) -> impl Iterator<Item = &Charge> {
        self.first
            .iter()
            .chain(self.more.iter().flat_map(|more| &**more))
    }

    /// Takes the charge of a meter.
    pub(crate) fn detach(&mut self, meter: &Arc<Meter>) -> Option<Charge> {
        if self.first.as_ref().is_some_and(|first| first.is_of(meter)) {
            return self.first.take();
        }
        let more = self.more.as_mut()?;
        let at = more.iter().position(|charge| charge.is_of(meter))?;
        Some(more.remove(at))
    }

    /// Takes the charges above the first `keep`, in their order.
    pub(crate) fn split_charges(&mut self, keep: usize) -> Vec<Charge> {
        if keep == 0 {
            let first = self.first.take();
            let rest = self.more.take();
            return first
                .into_iter()
                .chain(rest.into_iter().flat_map(|rest| *rest))
                .collect();
        }
        let Some(more) = &mut self.more else {
            return Vec::new();
        };
        let at = (keep - usize::from(self.first.is_some())).min(more.len());
        more.split_off(at)
    }
}

impl fmt::Debug for ResourceBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResourceBlock")
            .field("ptr", &format_args!("{:#x}", self.ptr()))
            .field("bytes", &self.bytes())
            .field("tag", &self.tag)
            .field("stream", &self.stream_id())
            .field("generation", &self.generation())
            .finish_non_exhaustive()
    }
}
