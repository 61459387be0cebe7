//! The physical segments of a block, and guards that keep them in place.

use crate::allocator::guard::blocks;
use std::fmt;
use std::sync::Arc;

use crate::driver::sys;

use crate::allocator::api::Allocator;
use crate::allocator::engine::{Engine, Shared};
use crate::allocator::guard::Guarding;
use crate::allocator::report::PhysicalSegment;
use crate::allocator::stream::slot::AfterFree;
use crate::error::Error;

/// Keeps a range of a block in place while its physical memory is used without the allocator's knowledge: by another
/// process after an export, or by a network card after a registration.
///
/// While a guard lives, the memory of its block is not reused, unmapped or released, and its address refers to no other
/// memory. The block itself may be freed: the free takes effect when the last guard is dropped. A guard keeps its
/// allocator open. Dropping it touches no memory and does not wait.
///
/// `Send` and `Sync`.
pub struct RangeGuard {
    engine: Shared,
    block: Guarding,
    address: sys::CUdeviceptr,
    bytes: u64,
    segments: Vec<PhysicalSegment>,
}

impl RangeGuard {
    /// First byte of the guarded range.
    pub fn ptr(&self) -> sys::CUdeviceptr {
        self.address
    }

    /// Bytes of the guarded range.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Physical segments of the range, by address.
    pub fn segments(&self) -> &[PhysicalSegment] {
        &self.segments
    }
}

impl fmt::Debug for RangeGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RangeGuard")
            .field("ptr", &format_args!("{:#x}", self.address))
            .field("bytes", &self.bytes)
            .field("segments", &self.segments)
            .finish()
    }
}

impl Drop for RangeGuard {
    fn drop(&mut self) {
        unguard(&self.engine, self.block);
    }
}

impl Allocator {
    /// Returns the physical segments of the `bytes` bytes from `ptr`, which must lie in one live block: by address, one
    /// entry per handle. The result may become outdated when the block is freed; [`guard`](Self::guard) prevents that.
    ///
    /// # Errors
    /// [`Error::NotOurs`], [`Error::NotLive`]; [`Error::Invalid`] if the range is empty or
    /// reaches beyond its block; [`Error::Closed`], a lost context.
    pub fn segments_of(
        &self,
        ptr: sys::CUdeviceptr,
        bytes: u64,
    ) -> Result<Vec<PhysicalSegment>, Error> {
        let mut heap = self.engine().open()?;
        Ok(blocks::locate(&mut heap, ptr, bytes)?.1)
    }

    /// Like [`segments_of`](Self::segments_of), but the segments stay unchanged while the guard lives.
    ///
    /// # Errors
    /// As [`segments_of`](Self::segments_of).
    pub fn guard(&self, ptr: sys::CUdeviceptr, bytes: u64) -> Result<RangeGuard, Error> {
        let mut heap = self.engine().open()?;
        let (block, segments) = blocks::locate(&mut heap, ptr, bytes)?;
        if !blocks::guard(&mut heap, block) {
            return Err(Error::NotLive { ptr });
        }
        Ok(RangeGuard {
            engine: Arc::clone(self.shared()),
            block,
            address: ptr,
            bytes,
            segments,
        })
    }
}

fn unguard(engine: &Engine, block: Guarding) {
    // In a forked child the lock may be held by a thread that does not exist there.
    if engine.usable().is_err() {
        return;
    }
    let mut heap = engine.lock();
    blocks::unguard(&mut heap, block);
    let rest = engine.rest_of_free(&heap, AfterFree::default());
    drop(heap);
    engine.finish_free(rest);
}
