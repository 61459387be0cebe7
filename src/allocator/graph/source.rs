//! Segments of a pool that another allocator provides.

use std::fmt;
use std::sync::Arc;

use crate::allocator::graph::arena::Arena;
use crate::driver::sys;

/// An allocator of segments, which a [`GraphPool`](crate::allocator::GraphPool) divides into blocks. Both functions are
/// called without any lock held, and may call the library.
///
/// # Safety
/// A segment is device memory of the pool's device. Nothing else uses it, and its address stays valid, until it is
/// freed.
pub unsafe trait SegmentSource: Send + Sync {
    /// Allocates `bytes`, a multiple of 2 MiB, for use on a stream, and returns the address, a multiple of 512 bytes.
    /// `None` if there is no memory.
    fn allocate(&self, bytes: u64, stream: sys::CUstream) -> Option<sys::CUdeviceptr>;

    /// Frees a segment. No work uses it any more.
    fn free(&self, address: sys::CUdeviceptr, bytes: u64);
}

/// The source of a pool.
#[derive(Clone)]
pub(crate) struct Source(pub Arc<dyn SegmentSource>);

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Source")
    }
}

impl Source {
    /// Frees all segments of an unused arena.
    pub(crate) fn free_all(&self, arena: &mut Arena) {
        for (address, handle, _) in arena.take_handles() {
            self.0.free(address, handle.bytes);
        }
        // The addresses belong to the source, so the arena must not give them back to the address space of this crate.
        arena.homes.spans.clear();
    }
}
