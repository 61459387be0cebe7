//! Memory held from the driver, figures, checks.

use cualloc::Allocator;

use crate::entry::{call, call_with};
use crate::stats::{self, cualloc_stats_t};
use crate::{cualloc_t, handles};

/// Gives memory that nobody uses back to the driver until at most keep bytes of it are held. Never waits for work of
/// the device. *released are the bytes that went back, *pending those that would have, but for work that still uses
/// them; each may be null.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for a null handle, CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST, CUALLOC_DRIVER. Both
/// numbers are 0 then.
///
/// Any thread, whatever context is current.
///
/// # Safety
/// `released` and `pending` are null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_trim(
    allocator: *mut cualloc_t,
    keep: u64,
    released: *mut u64,
    pending: *mut u64,
) -> i32 {
    // SAFETY: the caller's contract.
    unsafe { given_back(allocator, released, pending, |a| a.trim(keep)) }
}

/// cualloc_trim of everything, which waits on the host for the work of streams that do not capture. What a capture
/// keeps from being waited for is pending, and no error. It waits for whole contexts, which spoils captures of which the
/// allocator cannot know, only for memory of streams that were neither made by the library nor adopted
/// (cualloc_adopt_stream), and while no scope of a graph pool is open for captures.
///
/// Errors: as cualloc_trim.
///
/// Any thread, whatever context is current.
///
/// # Safety
/// `released` and `pending` are null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_empty_cache(
    allocator: *mut cualloc_t,
    released: *mut u64,
    pending: *mut u64,
) -> i32 {
    // SAFETY: the caller's contract.
    unsafe { given_back(allocator, released, pending, Allocator::empty_cache) }
}

/// # Safety
/// `released` and `pending` are null or may be written.
unsafe fn given_back(
    allocator: *mut cualloc_t,
    released: *mut u64,
    pending: *mut u64,
    run: impl FnOnce(&Allocator) -> Result<cualloc::allocator::Trimmed, cualloc::Error>,
) -> i32 {
    call(|| {
        let say = |out: *mut u64, bytes: u64| {
            if !out.is_null() {
                // SAFETY: the caller's contract.
                unsafe { out.write(bytes) };
            }
        };
        say(released, 0);
        say(pending, 0);
        let trimmed = handles::with(allocator, run)?;
        say(released, trimmed.released);
        say(pending, trimmed.pending);
        Ok(())
    })
}

/// Bounds the bytes held from the driver; UINT64_MAX lifts the bound. Memory above a lowered bound stays until it is
/// trimmed. With 0 nothing more is taken from the driver.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for a null handle, CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST in a forked child.
///
/// Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_set_limit(allocator: *mut cualloc_t, bytes: u64) -> i32 {
    call_with(allocator, |allocator| {
        handles::of_this_process(allocator)?;
        allocator.set_limit((bytes != u64::MAX).then_some(bytes));
        Ok(())
    })
}

/// Writes the allocator's figures, all of one instant. out->struct_size must be set to the structure's size before the
/// call; it may be that of an older or a newer version.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for a null handle or out, or a struct_size that is smaller than itself;
/// CUALLOC_CLOSED. The fields are 0 then, if there is an out with a size.
///
/// Any thread. In a forked child, and after the context was lost, the figures are those of an allocator without memory
/// or the last ones.
///
/// # Safety
/// `out` is null or points to a structure that has as many bytes as its `struct_size` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_stats(
    allocator: *mut cualloc_t,
    out: *mut cualloc_stats_t,
) -> i32 {
    call(|| {
        // SAFETY: the caller's contract.
        let room = unsafe { stats::room(out) }?;
        // SAFETY: the caller's contract.
        let say = |stats: &cualloc_stats_t| unsafe { stats::write(stats, out, room) };
        say(&cualloc_stats_t::default());
        say(&handles::with(allocator, |allocator| {
            Ok(stats::of(allocator))
        })?);
        Ok(())
    })
}

/// Sets all peaks to the current values, at one instant.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for a null handle, CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST in a forked child.
///
/// Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_reset_peaks(allocator: *mut cualloc_t) -> i32 {
    call_with(allocator, |allocator| {
        handles::of_this_process(allocator)?;
        allocator.reset_peaks();
        Ok(())
    })
}

/// Walks everything the allocator knows, computes every number anew, and compares: for tests and diagnosis. What it
/// costs grows with the number of blocks.
///
/// Errors: CUALLOC_PANIC if something does not agree, which is a defect of the library: the text says what;
/// CUALLOC_INVALID_ARGUMENT for a null handle, and for a block that the program wrote behind, where debug=guard looks for
/// that; CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST in a forked child.
///
/// Any thread, also beside calls of others.
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
