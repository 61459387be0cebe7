//! A block of device memory that frees itself.

use std::fmt;

use crate::driver::{Stream, sys};

use super::engine::Shared;
use super::error::Error;
use super::raw::Grant;
use super::streams::Holder;

/// Device memory with one owner. Dropping it gives the memory back in the order of its stream:
/// work queued before the drop may still use it.
///
/// `Send` and `Sync`: a block is an address with a lifetime, nothing in it is read or written on the
/// host. It may outlive the [`Allocator`](super::Allocator) handle it came from.
pub struct Block {
    engine: Shared,
    grant: Grant,
    requested: usize,
}

impl Block {
    pub(crate) fn new(engine: Shared, grant: Grant, requested: usize) -> Self {
        Block {
            engine,
            grant,
            requested,
        }
    }

    /// The first byte's address, a multiple of 512.
    pub fn ptr(&self) -> sys::CUdeviceptr {
        self.grant.ptr
    }

    /// Usable bytes: the request, rounded up.
    pub fn size(&self) -> u64 {
        self.grant.bytes
    }

    /// Bytes as they were asked for.
    pub fn requested(&self) -> usize {
        self.requested
    }

    /// The number of the block's life: no two lives of the same memory have the same pair of id and
    /// generation.
    pub fn generation(&self) -> (u32, u32) {
        (self.grant.id, self.grant.generation)
    }

    pub(crate) fn engine(&self) -> &Shared {
        &self.engine
    }

    /// Whether the block's own stream was retired, so that a free takes its last marker for the end
    /// of all its work.
    pub(crate) fn stream_retired(&self) -> bool {
        let state = self.engine.lock();
        let stream = state.records[self.grant.id].stream;
        matches!(state.streams[stream].holder, Holder::Retired)
    }

    /// Says that another stream uses the block: after the drop it is reused only when everything
    /// which that stream was given until the drop has completed.
    ///
    /// # Errors
    /// [`Error::Capturing`]; a lost context; driver errors.
    pub fn record_stream(&self, stream: &Stream) -> Result<(), Error> {
        self.engine
            .record(self.grant.ptr, &self.engine.named(stream)?, false)
    }

    /// Says that another stream used the block and will not again: reuse waits only for what that
    /// stream was given so far.
    ///
    /// # Errors
    /// As [`record_stream`](Self::record_stream).
    pub fn record_use(&self, stream: &Stream) -> Result<(), Error> {
        self.engine
            .record(self.grant.ptr, &self.engine.named(stream)?, true)
    }

    /// Frees the block; unlike a drop it reports failures, and gives the block back with them.
    ///
    /// # Errors
    /// [`Error::Capturing`]; a lost context; driver errors.
    pub fn free(self) -> Result<(), FreeError> {
        match self
            .engine
            .free_block(self.grant.id, self.grant.generation, self.grant.ptr)
        {
            Ok(()) => {
                self.forget();
                Ok(())
            }
            Err(error) => Err(FreeError { block: self, error }),
        }
    }

    /// Gives up ownership: the memory stays allocated until
    /// [`Allocator::free_raw`](super::Allocator::free_raw) gets its address.
    pub fn into_raw(self) -> sys::CUdeviceptr {
        let ptr = self.grant.ptr;
        self.forget();
        ptr
    }

    /// Drops everything but the memory.
    fn forget(self) {
        let mut this = std::mem::ManuallyDrop::new(self);
        // SAFETY: `this` is not dropped and not used again, so the engine is dropped once.
        unsafe { std::ptr::drop_in_place(&mut this.engine) }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.engine.drop_block(self.grant.id, self.grant.generation);
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Block")
            .field("ptr", &format_args!("{:#x}", self.grant.ptr))
            .field("size", &self.grant.bytes)
            .field("requested", &self.requested)
            .finish()
    }
}

/// A block that could not be freed, and why.
#[derive(Debug, thiserror::Error)]
#[error("the block at {:#x} could not be freed", block.ptr())]
pub struct FreeError {
    /// The block, still allocated.
    pub block: Block,
    /// The reason.
    #[source]
    pub error: Error,
}
