//! Graph pools over segments of another allocator.

use std::ffi::c_void;
use std::sync::Arc;

use cualloc::allocator::SegmentSource;
use cualloc::driver::sys;

use crate::entry::give;
use crate::pool_table::{self, PoolKind};
use crate::pools::cualloc_done_t;
use crate::results::{Failure, NULL};
use crate::{cualloc_pool_t, cualloc_t, stats};

/// Allocates a segment: device memory of this many bytes, a multiple of 2 MiB, for use on a stream. Returns its
/// address, a multiple of 512, or 0 if there is no memory. Receives the data of its source. Called without any lock
/// held; it must not throw, and may call the library.
pub type cualloc_segment_alloc_t =
    Option<unsafe extern "C" fn(data: *mut c_void, bytes: u64, stream: *mut c_void) -> u64>;

/// Frees a segment, which no work uses any more. Otherwise as cualloc_segment_alloc_t.
pub type cualloc_segment_free_t =
    Option<unsafe extern "C" fn(data: *mut c_void, address: u64, bytes: u64)>;

/// Where the segments of a pool come from. Set struct_size to sizeof(cualloc_source_t). Later versions of the library
/// add fields at the end.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct cualloc_source_t {
    /// Size of this structure in bytes, as the caller knows it.
    pub struct_size: usize,
    /// Allocates a segment.
    pub alloc: cualloc_segment_alloc_t,
    /// Frees a segment.
    pub free_segment: cualloc_segment_free_t,
    /// Null, or the function to call once the source is no longer used.
    pub done: cualloc_done_t,
    /// Passed to all three functions.
    pub data: *mut c_void,
}

/// The source of a caller. Calls its `done` when it is dropped.
struct Source {
    alloc: unsafe extern "C" fn(data: *mut c_void, bytes: u64, stream: *mut c_void) -> u64,
    free: unsafe extern "C" fn(data: *mut c_void, address: u64, bytes: u64),
    done: cualloc_done_t,
    data: *mut c_void,
}

// SAFETY: the caller lets any thread call the functions with the data.
unsafe impl Send for Source {}
// SAFETY: as above.
unsafe impl Sync for Source {}

// SAFETY: the caller of `kind_of` guarantees what its functions return.
unsafe impl SegmentSource for Source {
    fn allocate(&self, bytes: u64, stream: sys::CUstream) -> Option<sys::CUdeviceptr> {
        // SAFETY: the contract of `kind_of`.
        let address = unsafe { (self.alloc)(self.data, bytes, stream.cast()) };
        (address != 0).then_some(address)
    }

    fn free(&self, address: sys::CUdeviceptr, bytes: u64) {
        // SAFETY: the contract of `kind_of`.
        unsafe { (self.free)(self.data, address, bytes) };
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        if let Some(done) = self.done {
            // SAFETY: the contract of `kind_of`; nothing uses the source any more.
            unsafe { done(self.data) };
        }
    }
}

/// Returns the kind of a pool over a source.
///
/// # Safety
/// As [`cualloc_pool_create_over`].
pub(crate) unsafe fn kind_of(source: *const cualloc_source_t) -> Result<PoolKind, Failure> {
    // SAFETY: the caller's contract.
    let given: cualloc_source_t = unsafe { stats::read_struct(source) }?;
    let (Some(alloc), Some(free)) = (given.alloc, given.free_segment) else {
        return Err(NULL);
    };
    Ok(PoolKind::Over(Arc::new(Source {
        alloc,
        free,
        done: given.done,
        data: given.data,
    })))
}

/// Creates a graph pool whose segments come from another allocator. A segment is as large as the request that needs it,
/// rounded up to 2 MiB. The pool divides segments into blocks, and frees them when it returns its memory. It cannot be
/// suspended, and gives peers no access to its segments (cualloc_add_peer). Segments count as reserved bytes, so they
/// leave less of the limit to other memory, but may exceed the limit.
///
/// done is called once, on any thread: after the pool and its memory are gone, or before this call returns an error. It
/// is not called for a null out or for an invalid source.
///
/// Errors: as cualloc_pool_create, and CUALLOC_INVALID_ARGUMENT for a null source, alloc or free_segment, or a
/// struct_size smaller than that of the first version. *out is then null.
///
/// May be called from any thread.
///
/// # Safety
/// `source` is null or points to `struct_size` bytes. Its functions may be called with its data from any thread until
/// done is called. A segment is memory of the allocator's device that nothing else uses until it is freed. `out` is
/// null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_pool_create_over(
    allocator: *mut cualloc_t,
    source: *const cualloc_source_t,
    out: *mut *mut cualloc_pool_t,
) -> i32 {
    // SAFETY: the caller's contract.
    unsafe { give(out, || pool_table::add(allocator, kind_of(source)?)) }
}
