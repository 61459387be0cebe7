//! Reserved memory, statistics and checks.

use cualloc::Allocator;

use crate::entry::{call, call_with};
use crate::results::{CUALLOC_INVALID_ARGUMENT, Failure};
use crate::stats::{self, cualloc_stats_t};
use crate::{cualloc_t, handles};

/// Returns unused memory to the driver until at most keep bytes are reserved. Never waits for device work. Writes to
/// *released how many bytes were returned, and to *pending how many more can be returned once pending work has ended;
/// each pointer may be null. Page-locked host memory of earlier suspensions is freed as well.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for a null handle, CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST, CUALLOC_DRIVER. Both
/// numbers are then 0.
///
/// May be called from any thread, with any current context.
///
/// # Safety
/// `released` and `pending` are null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_trim(
    allocator: *mut cualloc_t,
    keep: u64,
    released: *mut u64,
    pending: *mut u64,
) -> i32 {
    // SAFETY: the caller's contract.
    unsafe { release_memory(allocator, released, pending, |a| a.trim(keep)) }
}

/// Like cualloc_trim, except that page-locked host memory stays, which the next suspension uses.
///
/// Errors: as cualloc_trim.
///
/// May be called from any thread, with any current context.
///
/// # Safety
/// `released` and `pending` are null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_trim_device(
    allocator: *mut cualloc_t,
    keep: u64,
    released: *mut u64,
    pending: *mut u64,
) -> i32 {
    // SAFETY: the caller's contract.
    unsafe { release_memory(allocator, released, pending, |a| a.trim_device(keep)) }
}

/// Like cualloc_trim with keep 0, but waits on the host for the work of streams that are not capturing. Memory that
/// cannot be waited for because of a capture is counted as pending, not reported as an error. Waiting for a whole
/// context would invalidate captures unknown to the allocator, so it does that only for memory of streams that were
/// neither created by the library nor adopted (cualloc_adopt_stream), and only while no scope of a graph pool is open
/// for captures.
///
/// Errors: as cualloc_trim.
///
/// May be called from any thread, with any current context.
///
/// # Safety
/// `released` and `pending` are null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_empty_cache(
    allocator: *mut cualloc_t,
    released: *mut u64,
    pending: *mut u64,
) -> i32 {
    // SAFETY: the caller's contract.
    unsafe { release_memory(allocator, released, pending, Allocator::empty_cache) }
}

/// # Safety
/// `released` and `pending` are null or writable.
unsafe fn release_memory(
    allocator: *mut cualloc_t,
    released: *mut u64,
    pending: *mut u64,
    run: impl FnOnce(&Allocator) -> Result<cualloc::allocator::Trimmed, cualloc::Error>,
) -> i32 {
    call(|| {
        let write = |out: *mut u64, bytes: u64| {
            if !out.is_null() {
                // SAFETY: the caller's contract.
                unsafe { out.write(bytes) };
            }
        };
        write(released, 0);
        write(pending, 0);
        let trimmed = handles::with(allocator, run)?;
        write(released, trimmed.released);
        write(pending, trimmed.pending);
        Ok(())
    })
}

/// Limits the bytes reserved from the driver; UINT64_MAX removes the limit. After the limit is lowered, memory above it
/// stays reserved until it is trimmed. With 0 no more memory is reserved.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for a null handle, CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST in a forked child.
///
/// May be called from any thread.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_set_limit(allocator: *mut cualloc_t, bytes: u64) -> i32 {
    call_with(allocator, |allocator| {
        handles::refuse_child(allocator)?;
        allocator.set_limit((bytes != u64::MAX).then_some(bytes));
        Ok(())
    })
}

/// Lets another device access the allocator's memory: all that is reserved now, and all that is reserved later. Returns
/// once the device has access. Access cannot be revoked. Does nothing for a device that has access.
///
/// Errors: CUALLOC_UNSUPPORTED if the device cannot access the memory of the allocator's device, and under the classic
/// policy; CUALLOC_INVALID_ARGUMENT for a null handle or a negative device, CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST,
/// CUALLOC_DRIVER, also if no device has this number. If a driver call failed, the device may have access to part of
/// the memory, and the call can be repeated.
///
/// May be called from any thread, with any current context. Threads that allocate meanwhile are not blocked.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_add_peer(allocator: *mut cualloc_t, device: i32) -> i32 {
    call(|| {
        let Ok(ordinal) = usize::try_from(device) else {
            let why = "expected the number of a device, found a negative one";
            return Err(Failure::Reason(CUALLOC_INVALID_ARGUMENT, why));
        };
        handles::with(allocator, |allocator| allocator.add_peer(ordinal))
    })
}

/// Writes the allocator's statistics, a consistent snapshot. Set out->struct_size to the structure's size before the
/// call; the structure may be that of an older or a newer version.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for a null handle or out, or a struct_size smaller than the field itself;
/// CUALLOC_CLOSED. The fields are then 0, if out is not null and has a valid size.
///
/// May be called from any thread. In a forked child, and after the context was lost, the statistics are those of an
/// allocator without memory, or the last known ones.
///
/// # Safety
/// `out` is null or points to a structure of `struct_size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_stats(
    allocator: *mut cualloc_t,
    out: *mut cualloc_stats_t,
) -> i32 {
    // SAFETY: the caller's contract.
    call(|| unsafe { stats::report(allocator, out, |stats| stats) })
}

/// Sets all peaks to the current values, atomically.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for a null handle, CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST in a forked child.
///
/// May be called from any thread.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_reset_peaks(allocator: *mut cualloc_t) -> i32 {
    call_with(allocator, |allocator| {
        handles::refuse_child(allocator)?;
        allocator.reset_peaks();
        Ok(())
    })
}

/// Walks all of the allocator's state, recomputes every count and compares: for tests and diagnosis. Takes time
/// proportional to the number of blocks.
///
/// Errors: CUALLOC_PANIC if anything disagrees (a bug in the library; the text says what); CUALLOC_INVALID_ARGUMENT for
/// a null handle or, with debug=guard, if the program wrote past the end of a block; CUALLOC_CLOSED;
/// CUALLOC_CONTEXT_LOST in a forked child.
///
/// May be called from any thread, concurrently with other calls.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_check(allocator: *mut cualloc_t) -> i32 {
    call(|| {
        let entered = handles::enter(allocator)?;
        let allocator = entered.allocator();
        if allocator.context().driver().is_forked_child() {
            return Err(cualloc::Error::ForkedChild.into());
        }
        Ok(allocator.check()?)
    })
}
