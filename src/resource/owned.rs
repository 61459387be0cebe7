//! A block with an owner.

use std::fmt;

use std::sync::atomic::{AtomicU64, Ordering};

use crate::driver::{Stream, process, sys};

use super::block::RawBlock;
use super::traits::MemoryResource;
use crate::allocator::Request;
use crate::block::BlockId;
use crate::error::{Error, Refused};

/// A block that goes back to its resource when it is dropped.
///
/// `R` is a handle to the resource: a reference, an [`Arc`](std::sync::Arc), or a resource that is cheap to clone.
pub struct OwnedBlock<R: MemoryResource> {
    resource: R,
    block: Option<RawBlock>,
}

impl<R: MemoryResource> OwnedBlock<R> {
    /// Allocates.
    ///
    /// # Errors
    /// As [`MemoryResource::allocate_block`].
    pub fn allocate(resource: R, request: &Request, stream: &Stream) -> Result<Self, Error> {
        let block = resource.allocate_block(request, stream)?;
        Ok(Self::from_parts(resource, block))
    }

    /// Owns a block of the resource.
    pub fn from_parts(resource: R, block: RawBlock) -> Self {
        OwnedBlock {
            resource,
            block: Some(block),
        }
    }

    /// Gives up ownership.
    pub fn into_block(mut self) -> Option<RawBlock> {
        self.block.take()
    }

    /// The first byte's address.
    pub fn ptr(&self) -> sys::CUdeviceptr {
        self.block.as_ref().map_or(0, RawBlock::ptr)
    }

    /// Usable bytes: [`bytes`](Self::bytes), rounded up.
    pub fn size(&self) -> usize {
        self.block.as_ref().map_or(0, RawBlock::size)
    }

    /// Its size in bytes, as it was asked for.
    pub fn bytes(&self) -> usize {
        self.id().map_or(0, |id| id.bytes())
    }

    /// Who it is. `None` never occurs while the block is owned.
    pub fn id(&self) -> Option<BlockId> {
        self.block.as_ref().map(RawBlock::id)
    }

    /// Says that another stream uses the memory until it is freed.
    ///
    /// # Errors
    /// As [`MemoryResource::record_stream`].
    pub fn record_stream(&self, stream: &Stream) -> Result<(), Error> {
        match self.id() {
            Some(block) => self.resource.record_stream(&block, stream),
            None => Ok(()),
        }
    }

    /// Says that another stream used the memory and will not again.
    ///
    /// # Errors
    /// As [`MemoryResource::record_use`].
    pub fn record_use(&self, stream: &Stream) -> Result<(), Error> {
        match self.id() {
            Some(block) => self.resource.record_use(&block, stream),
            None => Ok(()),
        }
    }

    /// The block.
    pub fn block(&self) -> Option<&RawBlock> {
        self.block.as_ref()
    }

    /// The resource that it goes back to.
    pub fn resource(&self) -> &R {
        &self.resource
    }

    /// Deallocates; unlike a drop it reports failures, and gives the block back with them.
    ///
    /// # Errors
    /// As [`MemoryResource::deallocate_block`].
    pub fn free(mut self) -> Result<(), Refused<RawBlock>> {
        match self.block.take() {
            Some(block) => self.resource.deallocate_block(block),
            None => Ok(()),
        }
    }
}

impl<R: MemoryResource> Drop for OwnedBlock<R> {
    fn drop(&mut self) {
        if let Some(block) = self.block.take() {
            give_back(&self.resource, block, "a dropped block leaks");
        }
    }
}

impl<R: MemoryResource> fmt::Debug for OwnedBlock<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.id().map(|block| self.resource.state(&block));
        f.debug_struct("OwnedBlock")
            .field("block", &self.block)
            .field("state", &state)
            .finish_non_exhaustive()
    }
}

/// Logs the first and every power-of-two-th failure of a drop or a callback.
pub(super) fn log_rarely(error: &dyn std::error::Error, what: &str) {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    // A logger has locks, and a thread of the parent may have held them.
    if process::is_forked_child() {
        return;
    }
    let count = COUNT.fetch_add(1, Ordering::Relaxed) + 1;
    if count.is_power_of_two() {
        log::warn!("{what} ({count} such events): {error}");
    }
}

/// Deallocates a block that nobody can name from here on. Allocators, the driver's pools, and what keeps an order
/// over them, take it and give it back later where they cannot now; of others a refusal may be over at once, so it
/// is tried once more.
pub(crate) fn give_back(
    resource: &(impl MemoryResource + ?Sized),
    mut block: RawBlock,
    what: &str,
) {
    block.abandon();
    let done = resource.deallocate_block(block);
    if let Err(failure) = done.or_else(|failure| resource.deallocate_block(*failure.value)) {
        log_rarely(&failure.error, what);
    }
}
