//! Segment hooks: functions of the caller that follow which memory is mapped where.

use std::ffi::{c_char, c_void};

use cualloc::allocator::{Segment, SegmentChange, SegmentHook};

use crate::entry::{call, text, value};
use crate::pools::cualloc_done_t;
use crate::results::{CUALLOC_INVALID_ARGUMENT, Failure, NULL};
use crate::{cualloc_pool_t, cualloc_t, handles, pool_table};

const NO_HOOK: Failure = Failure::Reason(
    CUALLOC_INVALID_ARGUMENT,
    "no segment hook of the allocator has this name",
);

/// The segments are about to be unmapped, and no request can obtain their memory.
pub const CUALLOC_SEGMENT_DEATH: i32 = 0;
/// The segments have been mapped, and no block has been allocated there yet, unless they are restored after a
/// suspension.
pub const CUALLOC_SEGMENT_BIRTH: i32 = 1;

/// Physical memory at its address, as a segment hook receives it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct cualloc_mapped_segment_t {
    /// A number that no other segment of the allocator ever has, not even a later one at the same address.
    pub id: u64,
    /// Address of the first byte.
    pub address: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// The number of the graph pool that it belongs to (cualloc_pool_number); 0 if it belongs to none.
    pub pool: u64,
}

/// A segment hook: receives its data, CUALLOC_SEGMENT_BIRTH or CUALLOC_SEGMENT_DEATH, and the segments, valid during the
/// call. Called without any lock held, by the threads whose calls change segments, possibly by several at the same time.
/// It must not throw. It may call the library, except for cualloc_add_peer; calls that suspend or resume memory fail
/// there with CUALLOC_BUSY.
pub type cualloc_segment_hook_t = Option<
    unsafe extern "C" fn(
        data: *mut c_void,
        change: i32,
        segments: *const cualloc_mapped_segment_t,
        count: usize,
    ),
>;

impl From<&Segment> for cualloc_mapped_segment_t {
    fn from(from: &Segment) -> Self {
        cualloc_mapped_segment_t {
            id: from.id,
            address: from.address,
            bytes: from.bytes,
            pool: from.pool.unwrap_or(0),
        }
    }
}

/// A caller's hook. Calls its `done` when it is dropped.
struct Hook {
    run: unsafe extern "C" fn(*mut c_void, i32, *const cualloc_mapped_segment_t, usize),
    done: cualloc_done_t,
    data: *mut c_void,
}

// SAFETY: the caller lets any thread call the functions with the data.
unsafe impl Send for Hook {}
// SAFETY: as above.
unsafe impl Sync for Hook {}

impl Hook {
    fn call(&self, change: SegmentChange, segments: &[Segment]) {
        let change = match change {
            SegmentChange::Death => CUALLOC_SEGMENT_DEATH,
            _ => CUALLOC_SEGMENT_BIRTH,
        };
        let segments: Vec<cualloc_mapped_segment_t> = segments.iter().map(Into::into).collect();
        // SAFETY: the contract of `cualloc_add_segment_hook`.
        unsafe { (self.run)(self.data, change, segments.as_ptr(), segments.len()) };
    }
}

impl Drop for Hook {
    fn drop(&mut self) {
        if let Some(done) = self.done {
            // SAFETY: the contract of `cualloc_add_segment_hook`; nothing uses the hook any more.
            unsafe { done(self.data) };
        }
    }
}

/// Calls a hook whenever an allocator has mapped memory or is about to unmap it, for registrations and exports that
/// follow the memory. Second mappings of the same memory (views) are not reported, nor is memory that is mapped
/// already. Replaces the hook with the same name.
///
/// done is called once, on any thread, when the hook is no longer used: after it was removed or replaced and its last
/// call has returned, or after the allocator has ended. It is not called if this call returns an error.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for a null handle, name or hook, or a name that is not UTF-8; CUALLOC_CLOSED;
/// CUALLOC_CONTEXT_LOST in a forked child.
///
/// May be called from any thread.
///
/// # Safety
/// `name` is null or zero-terminated. The functions may be called with the data from any thread until `done` is called.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_add_segment_hook(
    allocator: *mut cualloc_t,
    name: *const c_char,
    hook: cualloc_segment_hook_t,
    done: cualloc_done_t,
    data: *mut c_void,
) -> i32 {
    call(|| {
        let run = hook.ok_or(NULL)?;
        // SAFETY: the caller's contract.
        let name = unsafe { text(name, "a name is not UTF-8") }?;
        handles::with(allocator, |allocator| {
            handles::refuse_child(allocator)?;
            let hook = Hook { run, done, data };
            let run = move |change, segments: &[Segment]| hook.call(change, segments);
            allocator.add_segment_hook(SegmentHook::new(name, run));
            Ok(())
        })
    })
}

/// Removes the hook with this name. Calls of it that are in progress may still run when this call returns.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for a null handle or name, a name that is not UTF-8, or if there is no such hook;
/// CUALLOC_CLOSED; CUALLOC_CONTEXT_LOST in a forked child.
///
/// May be called from any thread.
///
/// # Safety
/// `name` is null or zero-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_remove_segment_hook(
    allocator: *mut cualloc_t,
    name: *const c_char,
) -> i32 {
    call(|| {
        // SAFETY: the caller's contract.
        let name = unsafe { text(name, "a name is not UTF-8") }?;
        let removed = handles::with(allocator, |allocator| {
            handles::refuse_child(allocator)?;
            Ok(allocator.remove_segment_hook(name))
        })?;
        match removed {
            true => Ok(()),
            false => Err(NO_HOOK),
        }
    })
}

/// Returns the number of a graph pool, unique in its allocator, by which cualloc_block_t and cualloc_mapped_segment_t
/// name it; 0 if the handle belongs to no pool.
///
/// May be called from any thread at any time.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_pool_number(pool: *mut cualloc_pool_t) -> u64 {
    value(|| pool_table::with(pool, |pool, _| Ok(pool.id())))
}
