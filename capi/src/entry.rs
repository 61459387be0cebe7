//! The frame of each exported function: converts errors to codes and stops panics at the boundary.

use std::ffi::{CStr, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use cualloc::Allocator;

use crate::results::{CUALLOC_INVALID_ARGUMENT, CUALLOC_OK, CUALLOC_PANIC, Failure, NULL};
use crate::{cualloc_t, handles, message};

/// Runs a call and converts its outcome to a code. Nothing unwinds into C.
#[inline(always)]
pub(crate) fn call(run: impl FnOnce() -> Result<(), Failure>) -> i32 {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(())) => CUALLOC_OK,
        Ok(Err(failure)) => report(&failure),
        Err(payload) => report_panic(payload),
    }
}

/// [`call`] for functions that return a value: the default value after a failure.
pub(crate) fn value<T: Default>(run: impl FnOnce() -> Result<T, Failure>) -> T {
    let mut value = T::default();
    call(|| {
        value = run()?;
        Ok(())
    });
    value
}

/// [`call`] with an allocator.
pub(crate) fn call_with(
    handle: *mut cualloc_t,
    run: impl FnOnce(&Allocator) -> Result<(), cualloc::Error>,
) -> i32 {
    call(|| handles::with(handle, run))
}

/// [`call`] for functions that write a value through a pointer: 0 until the call has succeeded.
///
/// # Safety
/// `out` is null or writable.
pub(crate) unsafe fn give<T>(out: *mut T, run: impl FnOnce() -> Result<T, Failure>) -> i32 {
    call(|| {
        // SAFETY: the caller's contract.
        unsafe { clear_result(out) }?;
        let value = run()?;
        // SAFETY: not null, and the caller's contract.
        unsafe { out.write(value) };
        Ok(())
    })
}

/// Runs a call that usually completes on the fast path: `fast` returns whether it did, and otherwise has changed
/// nothing. Then `slow` runs the whole call and returns its code; it is out of line, so that the common call touches
/// few cache lines. None if the allocator cannot be entered on the fast path.
#[inline(always)]
pub(crate) fn try_fast(
    handle: *mut cualloc_t,
    fast: impl FnOnce(&Allocator) -> bool,
    slow: impl FnOnce(&Allocator) -> i32,
) -> Option<i32> {
    let entered = handles::try_enter(handle)?;
    let allocator = entered.allocator();
    let run = || match fast(allocator) {
        true => CUALLOC_OK,
        false => slow(allocator),
    };
    Some(match catch_unwind(AssertUnwindSafe(run)) {
        Ok(code) => code,
        Err(payload) => report_panic(payload),
    })
}

/// Converts the outcome of an allocator call to a code.
#[inline(always)]
pub(crate) fn code_of(allocator: &Allocator, ended: Result<(), cualloc::Error>) -> i32 {
    match ended {
        Ok(()) => CUALLOC_OK,
        Err(error) => failed(allocator, error),
    }
}

#[cold]
#[inline(never)]
pub(crate) fn failed(allocator: &Allocator, error: cualloc::Error) -> i32 {
    call(|| Err(handles::convert_error(allocator, error)))
}

#[cold]
#[inline(never)]
pub(crate) fn report(failure: &Failure) -> i32 {
    let code = failure.code();
    // Formatting a foreign error could panic; then only the code is kept.
    let text = || message::set(code, format_args!("{failure}"));
    match catch_unwind(AssertUnwindSafe(text)) {
        Ok(()) => code,
        Err(payload) => report_panic(payload),
    }
}

#[cold]
#[inline(never)]
pub(crate) fn report_panic(payload: Box<dyn std::any::Any + Send>) -> i32 {
    let why = match payload.downcast_ref::<&str>() {
        Some(why) => why,
        None => payload.downcast_ref::<String>().map_or("", String::as_str),
    };
    message::set(
        CUALLOC_PANIC,
        format_args!("bug in the library: it panicked: {why}"),
    );
    // Dropping the payload of a panic may panic again.
    std::mem::forget(payload);
    CUALLOC_PANIC
}

/// Borrows a text of the caller; `why` is the failure for a text that is not UTF-8.
///
/// # Safety
/// `from` is null, or ends with a zero and stays unchanged while the result is used.
pub(crate) unsafe fn text<'a>(from: *const c_char, why: &'static str) -> Result<&'a str, Failure> {
    if from.is_null() {
        return Err(NULL);
    }
    // SAFETY: the caller's contract.
    let text = unsafe { CStr::from_ptr(from) }.to_str();
    text.map_err(|_| Failure::Reason(CUALLOC_INVALID_ARGUMENT, why))
}

/// Sets the target of a result to 0, which is also the null handle.
///
/// # Safety
/// `out` is null or writable.
#[inline(always)]
pub(crate) unsafe fn clear_result<T>(out: *mut T) -> Result<(), Failure> {
    if out.is_null() {
        return Err(NULL);
    }
    // SAFETY: the caller's contract.
    unsafe { out.write_bytes(0, 1) };
    Ok(())
}
