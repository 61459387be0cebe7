//! Blocks of a resource: plain values with an identity.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use smallvec::SmallVec;

use crate::allocator::Request;
use crate::block::{BlockId, Tag};
use crate::driver::{Stream, sys};
use crate::error::{Error, StreamMisuse};

use super::checks::next_source;
use super::meter::{Charge, Meter};

/// Memory allocated from a [`MemoryResource`](super::MemoryResource), as a value. Dropping it leaks the memory and what
/// budgets charged for it: its holder deallocates it through the stack that it came from, while a
/// [`DeviceBuffer`](crate::DeviceBuffer) of the resource frees itself. It cannot be copied; its [`id`](Self::id) can.
///
/// `Send` and `Sync`.
#[must_use = "a lost block is leaked memory"]
pub struct RawBlock {
    id: BlockId,
    size: usize,
    tag: Tag,
    /// The alignment is two to the power of this. A byte, so that the block is moved without a call of `memcpy`.
    alignment: u8,
    /// The number of resources of the stack that order its uses in a way that those below them do not know.
    keepers: u32,
    /// Its owner was dropped: a resource that cannot deallocate it now does so later.
    abandoned: bool,
    /// The position of the block in a table of its source.
    note: u64,
    /// How many streams of its allocator had been retired before the allocation: while that number is the same, its
    /// own stream is not among them.
    retirements: u64,
    /// The charges of budgets for it, the lowest budget first. Most blocks have at most one.
    charges: SmallVec<[Charge; 1]>,
}

impl RawBlock {
    /// Creates a block for a request, under a new identity. For implementations of a source of memory.
    ///
    /// # Errors
    /// Those of [`Stream::id`]; the memory still belongs to the caller.
    ///
    /// # Safety
    /// The holder of the result owns the memory: no other code hands it out, uses it or frees it before
    /// [`deallocate_block`](super::MemoryResource::deallocate_block) has taken the result. The memory is in the order
    /// of the stream, aligned as requested, and has `size` usable bytes, at least those that were requested.
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
        let id = BlockId::new(life, (ptr, request.bytes()), on.own_id(), ordinal);
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
            alignment: request.alignment().trailing_zeros() as u8,
            tag: request.tag,
            keepers: 0,
            abandoned: false,
            note: 0,
            retirements: 0,
            charges: SmallVec::new(),
        }
    }

    /// The block's id.
    #[inline]
    pub fn id(&self) -> BlockId {
        self.id
    }

    /// The address of the first byte.
    pub fn ptr(&self) -> sys::CUdeviceptr {
        self.id.ptr()
    }

    /// Usable bytes: the requested bytes, rounded up.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The requested alignment in bytes.
    pub fn alignment(&self) -> usize {
        1usize.checked_shl(self.alignment.into()).unwrap_or(1)
    }

    /// The block's label.
    pub fn tag(&self) -> Tag {
        self.tag
    }

    #[inline]
    pub(crate) fn keepers(&self) -> u32 {
        self.keepers
    }

    /// Set by a resource that begins or ends to order its uses: resources below take the block back only from there.
    pub(crate) fn set_keepers(&mut self, keepers: u32) {
        self.keepers = keepers;
    }

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

    /// Marks the block as dropped by its owner, who will not try again to deallocate it.
    pub(crate) fn abandon(&mut self) {
        self.abandoned = true;
    }

    #[inline]
    pub(crate) fn is_abandoned(&self) -> bool {
        self.abandoned
    }

    /// Refuses a block whose uses a resource above still orders: its source may not take it back.
    pub(crate) fn returned(&self) -> Result<(), Error> {
        match self.keepers {
            0 => Ok(()),
            _ => Err(StreamMisuse::KeptAbove.into()),
        }
    }

    /// Ties a charge to the memory: it ends when the memory has left.
    #[inline]
    pub(crate) fn attach(&mut self, charge: Charge) {
        self.charges.push(charge);
    }

    pub(crate) fn extend(&mut self, charges: impl IntoIterator<Item = Charge>) {
        self.charges.extend(charges);
    }

    /// Whether the block owns nothing that must be dropped.
    #[inline]
    pub(crate) fn is_bare(&self) -> bool {
        self.charges.is_empty() && !self.charges.spilled()
    }

    #[inline]
    pub(crate) fn charges(&self) -> impl ExactSizeIterator<Item = &Charge> {
        self.charges.iter()
    }

    pub(crate) fn detach(&mut self, meter: &Arc<Meter>) -> Option<Charge> {
        let at = self.charges().position(|charge| charge.is_of(meter))?;
        Some(self.charges.remove(at))
    }

    /// Takes the charges above the first `keep`, in their order.
    pub(crate) fn split_charges(&mut self, keep: usize) -> Vec<Charge> {
        let keep = keep.min(self.charges.len());
        self.charges.drain(keep..).collect()
    }
}

debug_fields!(RawBlock, self => id: self.id, tag: self.tag);
