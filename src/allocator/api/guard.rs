//! The physical segments of a block, and guards that keep them in place.

use crate::allocator::guard::blocks;
use std::fmt;
use std::sync::Arc;

use crate::driver::sys;

use crate::allocator::api::Allocator;
use crate::allocator::engine::{Engine, Shared};
use crate::allocator::graph::lease::Lease;
use crate::allocator::graph::run::pools;
use crate::allocator::guard::Guarding;
use crate::allocator::guard::blocks::Located;
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
/// A block of a graph pool that is freed while it is guarded can be reused by captures of the pool, whose order is the
/// program's concern ([`GraphPool`](crate::allocator::GraphPool)), but by no other request.
///
/// `Send` and `Sync`.
pub struct RangeGuard {
    engine: Shared,
    block: Guarding,
    address: sys::CUdeviceptr,
    bytes: u64,
    segments: Vec<PhysicalSegment>,
    /// Keeps a block of a graph pool.
    lease: Option<Lease>,
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
        unguard(&self.engine, self.block, self.lease.take());
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
        Ok(blocks::locate(&mut heap, ptr, Some(bytes))?.segments)
    }

    /// Like [`segments_of`](Self::segments_of), but the segments stay unchanged while the guard lives.
    ///
    /// # Errors
    /// As [`segments_of`](Self::segments_of).
    pub fn guard(&self, ptr: sys::CUdeviceptr, bytes: u64) -> Result<RangeGuard, Error> {
        let mut heap = self.engine().open()?;
        let found = blocks::locate(&mut heap, ptr, Some(bytes))?;
        let lease = blocks::guard(&mut heap, &found)?;
        Ok(range_guard(self.shared(), found, lease, (ptr, bytes)))
    }
}

/// Returns the live block around an address, with all its physical segments.
#[cfg(all(feature = "share", target_os = "linux"))]
pub(crate) fn locate_block(engine: &Engine, ptr: sys::CUdeviceptr) -> Result<Located, Error> {
    blocks::locate(&mut *engine.open()?, ptr, None)
}

/// Guards the whole live block with this number and generation that begins at an address.
#[cfg(all(feature = "share", target_os = "linux"))]
pub(crate) fn guard_block(
    engine: &Shared,
    ptr: sys::CUdeviceptr,
    life: (u32, u32),
) -> Result<RangeGuard, Error> {
    let mut heap = engine.open()?;
    let found = blocks::locate(&mut heap, ptr, None)?;
    if (found.base, found.life) != (ptr, life) {
        return Err(Error::NotLive { ptr });
    }
    let lease = blocks::guard(&mut heap, &found)?;
    let bytes = found.end - found.base;
    Ok(range_guard(engine, found, lease, (ptr, bytes)))
}

fn range_guard(
    engine: &Shared,
    found: Located,
    lease: Option<Lease>,
    (address, bytes): (sys::CUdeviceptr, u64),
) -> RangeGuard {
    RangeGuard {
        engine: Arc::clone(engine),
        block: found.block,
        address,
        bytes,
        segments: found.segments,
        lease,
    }
}

fn unguard(engine: &Engine, block: Guarding, lease: Option<Lease>) {
    let pooled = lease.is_some();
    if let Some(lease) = lease {
        lease.end();
    }
    // In a forked child the lock may be held by a thread that does not exist there.
    if engine.usable().is_err() {
        return;
    }
    let mut heap = engine.lock();
    blocks::unguard(&mut heap, block);
    let rest = engine.rest_of_free(&heap, AfterFree::default());
    drop(heap);
    if pooled {
        pools::release_unused(engine);
    }
    engine.finish_free(rest);
}
