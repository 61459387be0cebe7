//! Visits to segments and blocks.

use std::ffi::c_void;

use cualloc::allocator::{BlockInfo, BlockState, SegmentInfo};

use crate::entry::call;
use crate::results::{Failure, NULL};
use crate::{cualloc_pool_t, cualloc_t, handles, pool_table};

/// State of a block: a caller owns it.
pub const CUALLOC_BLOCK_LIVE: i32 = 0;
/// State of a block: free, and work in flight may still use it.
pub const CUALLOC_BLOCK_PENDING: i32 = 1;
/// State of a block: free.
pub const CUALLOC_BLOCK_FREE: i32 = 2;
/// State of a block: its bytes are part of a live block at another address.
pub const CUALLOC_BLOCK_ALIASED: i32 = 3;
/// State of a block: a call of another thread works on it.
pub const CUALLOC_BLOCK_BUSY: i32 = 4;

/// A segment of the driver, or a contiguous run of mapped handles. Later versions of the library add fields at the end.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct cualloc_segment_t {
    /// Address of the first byte.
    pub address: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// Number of blocks, whose visits follow.
    pub blocks: u64,
    /// Whether it belongs to the small pool.
    pub small: bool,
    /// Whether it is a second mapping of bytes of other segments, so that its size does not count as reserved. Only its
    /// live blocks are visited.
    pub view: bool,
}

/// A block of a segment. Later versions of the library add fields at the end.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct cualloc_block_t {
    /// Address of the first byte.
    pub address: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// Requested bytes; 0 unless it is live.
    pub requested: u64,
    /// The driver's id of the stream that owns it or owned it last; 0 if none is known.
    pub stream: u64,
    /// CUALLOC_BLOCK_LIVE, ...
    pub state: i32,
    /// The number of the graph pool that it belongs to (cualloc_pool_number); 0 if it belongs to none.
    pub pool: u64,
}

/// Called for each segment, before its blocks. It must not throw. It may call the library.
pub type cualloc_visit_segment_t =
    Option<unsafe extern "C" fn(data: *mut c_void, segment: *const cualloc_segment_t)>;
/// Called for each block of the last visited segment, by ascending address. It must not throw. It may call the library.
pub type cualloc_visit_block_t =
    Option<unsafe extern "C" fn(data: *mut c_void, block: *const cualloc_block_t)>;

impl From<&SegmentInfo> for cualloc_segment_t {
    fn from(from: &SegmentInfo) -> Self {
        cualloc_segment_t {
            address: from.address,
            bytes: from.size,
            blocks: from.blocks.len() as u64,
            small: from.small,
            view: from.view,
        }
    }
}

impl From<&BlockInfo> for cualloc_block_t {
    fn from(from: &BlockInfo) -> Self {
        cualloc_block_t {
            address: from.address,
            bytes: from.size,
            requested: from.requested,
            stream: from.stream.unwrap_or(0),
            state: match from.state {
                BlockState::Live => CUALLOC_BLOCK_LIVE,
                BlockState::Pending => CUALLOC_BLOCK_PENDING,
                BlockState::Free => CUALLOC_BLOCK_FREE,
                BlockState::Aliased => CUALLOC_BLOCK_ALIASED,
                _ => CUALLOC_BLOCK_BUSY,
            },
            pool: from.pool.unwrap_or(0),
        }
    }
}

/// Calls a function for each segment of an allocator and another for each block of it, by ascending address, as they
/// are at the time of the call. Memory of graph pools is not among them (cualloc_pool_visit).
///
/// Errors: CUALLOC_INVALID_ARGUMENT for a null handle or function; CUALLOC_CLOSED; CUALLOC_CONTEXT_LOST in a forked
/// child.
///
/// May be called from any thread. No lock is held while the functions run.
///
/// # Safety
/// It is safe to call the functions with `data`. What they receive is valid during that call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_visit(
    allocator: *mut cualloc_t,
    segment: cualloc_visit_segment_t,
    block: cualloc_visit_block_t,
    data: *mut c_void,
) -> i32 {
    let snapshot = || {
        handles::with(allocator, |allocator| {
            handles::refuse_child(allocator)?;
            Ok(allocator.snapshot())
        })
    };
    // SAFETY: the caller's contract.
    unsafe { visit(snapshot, segment, block, data) }
}

/// Like cualloc_visit, for the memory of one graph pool.
///
/// Errors: as cualloc_visit; CUALLOC_CLOSED also for a pool that was released; CUALLOC_DRIVER.
///
/// May be called from any thread. No lock is held while the functions run.
///
/// # Safety
/// As cualloc_visit.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_pool_visit(
    pool: *mut cualloc_pool_t,
    segment: cualloc_visit_segment_t,
    block: cualloc_visit_block_t,
    data: *mut c_void,
) -> i32 {
    let snapshot = || pool_table::with(pool, |pool, _| pool.snapshot());
    // SAFETY: the caller's contract.
    unsafe { visit(snapshot, segment, block, data) }
}

/// # Safety
/// As [`cualloc_visit`].
unsafe fn visit(
    snapshot: impl FnOnce() -> Result<Vec<SegmentInfo>, Failure>,
    segment: cualloc_visit_segment_t,
    block: cualloc_visit_block_t,
    data: *mut c_void,
) -> i32 {
    call(|| {
        let (Some(segment), Some(block)) = (segment, block) else {
            return Err(NULL);
        };
        for found in snapshot()? {
            // SAFETY: the caller's contract.
            unsafe { segment(data, &(&found).into()) };
            for found in &found.blocks {
                // SAFETY: the caller's contract.
                unsafe { block(data, &found.into()) };
            }
        }
        Ok(())
    })
}
