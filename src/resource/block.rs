//! Blocks of a resource: plain values with an identity.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use crate::allocator::Request;
use crate::block::{BlockId, Tag};
use crate::driver::{Stream, sys};
use crate::error::{Error, StreamMisuse};

use super::meter::{Charge, Meter};
use super::table::next_source;

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

/// Memory as a [`MemoryResource`](super::MemoryResource) hands it out: a value that names it. It
/// does not free itself, so that the one who holds it decides through which stack it goes back;
/// a [`DeviceBuffer`](crate::DeviceBuffer) of the resource does. It cannot be copied: its [`id`](Self::id) can.
///
/// `Send` and `Sync`. Losing it leaks the memory and what budgets charged for it.
#[must_use = "a lost block is leaked memory"]
pub struct RawBlock {
    id: BlockId,
    size: usize,
    tag: Tag,
    /// The alignment is two to the power of this.
    alignment: u32,
    /// How many resources of the stack keep an order of its uses that those below them do not know.
    keepers: u32,
    /// Nobody else can name it any more: who cannot take it back now does so later.
    abandoned: bool,
    /// The place where the block's source has entered it.
    note: u64,
    /// How many streams of its allocator had been retired before the block was handed out: as long as there are no
    /// more, its own is not among them.
    retirements: u64,
    first: Option<Charge>,
    /// Further ones, which few blocks have.
    #[expect(
        clippy::box_collection,
        reason = "one word instead of three in every block"
    )]
    more: Option<Box<Vec<Charge>>>,
}

impl RawBlock {
    /// Names memory that answers a request, under an identity that never was. For those who write a source of
    /// memory.
    ///
    /// # Errors
    /// Those of [`Stream::id`]: the memory is still the caller's alone.
    ///
    /// # Safety
    /// Whoever holds the result owns the memory, and safe code may give it back. So the memory is handed out by
    /// this and by nothing else: it is in the order of the stream, at a multiple of the alignment that was asked
    /// for, `size` bytes may be used of it, at least those that were asked for, and nobody else uses the memory
    /// or gives it back before the result was taken by
    /// [`deallocate_block`](super::MemoryResource::deallocate_block).
    ///
    /// ```compile_fail,E0133
    /// # use cualloc::{Error, Request, driver::Stream, resource::RawBlock};
    /// fn forge(ptr: u64, on: &Stream) -> Result<RawBlock, Error> {
    ///     RawBlock::from_raw_parts(ptr, 512, &Request::new(512), on)
    /// }
    /// ```
    pub unsafe fn from_raw_parts(
        ptr: sys::CUdeviceptr,
        size: usize,
        request: &Request,
        on: &Stream,
    ) -> Result<RawBlock, Error> {
        static SOURCE: OnceLock<u64> = OnceLock::new();
        static LAST: AtomicU64 = AtomicU64::new(0);
        let life = (
            *SOURCE.get_or_init(next_source),
            LAST.fetch_add(1, Ordering::Relaxed) + 1,
        );
        let ordinal = on.context().device().ordinal();
        let id = BlockId::new(life, (ptr, request.bytes()), on.id()?, ordinal);
        // SAFETY: the caller's contract; the identity is new.
        Ok(unsafe { RawBlock::new(id, size, request) })
    }

    /// Memory under an identity that its source keeps.
    ///
    /// # Safety
    /// As [`from_raw_parts`](Self::from_raw_parts); the identity is of no other block that lives.
    #[inline(always)]
    pub(crate) unsafe fn new(id: BlockId, size: usize, request: &Request) -> RawBlock {
        RawBlock {
            id,
            size,
            alignment: request.alignment().trailing_zeros(),
            tag: request.tag,
            keepers: 0,
            abandoned: false,
            note: 0,
            retirements: 0,
            first: None,
            more: None,
        }
    }

    /// Who it is.
    #[inline]
    pub fn id(&self) -> BlockId {
        self.id
    }

    /// Its first byte.
    pub fn ptr(&self) -> sys::CUdeviceptr {
        self.id.ptr()
    }

    /// Usable bytes: those that were asked for, rounded up.
    pub fn size(&self) -> usize {
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

    /// What its maker noted.
    #[inline]
    pub(crate) fn note(&self) -> u64 {
        self.note
    }

    #[inline]
    pub(crate) fn set_note(&mut self, note: u64) {
        self.note = note;
    }

    #[inline]
    pub(crate) fn retirements(&self) -> u64 {
        self.retirements
    }

    #[inline]
    pub(crate) fn set_retirements(&mut self, retirements: u64) {
        self.retirements = retirements;
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
        if self.is_bare() {
            self.first = Some(charge);
        } else {
            self.more.get_or_insert_default().push(charge);
        }
    }

    /// Whether no charges are tied to it.
    #[inline]
    pub(crate) fn is_bare(&self) -> bool {
        self.first.is_none() && self.more.is_none()
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

impl fmt::Debug for RawBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RawBlock")
            .field("id", &self.id)
            .field("tag", &self.tag)
            .finish_non_exhaustive()
    }
}
