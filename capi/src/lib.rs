//! The cualloc allocator as a C library.
//!
//! C programs include `cualloc.h`, which says what each function does: it is written from this crate. The crate's
//! other files hold what stands behind the functions; nothing of it is for use from Rust.
#![allow(non_camel_case_types)]
#![deny(missing_docs)]

mod barrier;
mod calls;
mod device;
mod handles;
mod message;
mod options;
mod results;
mod stats;

use std::ffi::{CStr, c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use cualloc::Allocator;
use cualloc::allocator::Request;
use cualloc::error::StreamMisuse;

#[cfg(all(test, feature = "sim"))]
mod tests;

pub use results::*;
pub use stats::{cualloc_counter_t, cualloc_pool_stats_t, cualloc_stats_t};

use results::{Failure, NULL};

/// Which interface this is: a number that grows with every addition. Nothing is taken away and no type changes
/// without a new run-time name of the library.
pub const CUALLOC_ABI_VERSION: u32 = 1;

/// An allocator. A handle: a number that is never dereferenced and never used again, so that a wrong one is found
/// out.
pub struct cualloc_t(());

/// Options for a new allocator. A handle, as cualloc_t is.
pub struct cualloc_options_t(());

/// Runs a call, and makes a code of how it ends. Nothing unwinds into C.
#[inline(always)]
fn call(run: impl FnOnce() -> Result<(), Failure>) -> i32 {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(())) => CUALLOC_OK,
        Ok(Err(failure)) => told(&failure),
        Err(payload) => panicked(payload),
    }
}

/// [`call`] with an allocator, for calls that are made often. What is rare about it is apart, with a function of its own
/// to `run`, so that the common case has no copy of its result and saves few registers.
#[inline(always)]
fn quickly<T>(
    handle: *mut cualloc_t,
    run: impl FnOnce(&Allocator) -> Result<T, cualloc::Error>,
    run_slowly: impl FnOnce(&Allocator) -> Result<T, cualloc::Error>,
    done: impl Fn(T),
) -> i32 {
    let Some(entered) = handles::enter_quickly(handle) else {
        return slowly(handle, run_slowly, done);
    };
    let ended = catch_unwind(AssertUnwindSafe(|| match run(entered.allocator()) {
        Ok(value) => {
            done(value);
            CUALLOC_OK
        }
        Err(error) => failed(entered.allocator(), error),
    }));
    match ended {
        Ok(code) => code,
        Err(payload) => panicked(payload),
    }
}

#[cold]
#[inline(never)]
fn slowly<T>(
    handle: *mut cualloc_t,
    run: impl FnOnce(&Allocator) -> Result<T, cualloc::Error>,
    done: impl Fn(T),
) -> i32 {
    call(|| {
        done(handles::with(handle, run)?);
        Ok(())
    })
}

#[cold]
#[inline(never)]
fn failed(allocator: &Allocator, error: cualloc::Error) -> i32 {
    call(|| Err(handles::judged(allocator, error)))
}

/// An argument is null.
#[cold]
#[inline(never)]
fn null() -> i32 {
    told(&NULL)
}

#[cold]
#[inline(never)]
fn told(failure: &Failure) -> i32 {
    let code = failure.code();
    // The text of a foreign error could panic; then the code is all there is.
    let text = || message::set(format_args!("{failure}"));
    match catch_unwind(AssertUnwindSafe(text)) {
        Ok(()) => code,
        Err(payload) => panicked(payload),
    }
}

#[cold]
#[inline(never)]
fn panicked(payload: Box<dyn std::any::Any + Send>) -> i32 {
    let why = match payload.downcast_ref::<&str>() {
        Some(why) => why,
        None => payload.downcast_ref::<String>().map_or("", String::as_str),
    };
    message::set(format_args!("a defect of the library: it panicked: {why}"));
    // What was thrown may panic when it is dropped.
    std::mem::forget(payload);
    CUALLOC_PANIC
}

/// Where a result goes: 0 until the call has succeeded.
///
/// # Safety
/// `out` is null or may be written.
#[inline(always)]
unsafe fn cleared<T: Default>(out: *mut T) -> Result<(), Failure> {
    if out.is_null() {
        return Err(NULL);
    }
    // SAFETY: the caller's contract.
    unsafe { out.write(T::default()) };
    Ok(())
}

/// The interface that this library has: CUALLOC_ABI_VERSION of the header it was built with. A program that was
/// compiled with a larger number may miss functions here.
///
/// Any thread, any time.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_abi_version() -> u32 {
    CUALLOC_ABI_VERSION
}

/// Why the calling thread's last failed call failed: UTF-8, ended by a zero, at most 1023 bytes. Empty if none
/// failed yet; a call that succeeds does not change it. Never null. The text is overwritten by the thread's next
/// call that fails, and is gone when the thread ends. For people: programs go by the code.
///
/// Any thread, any time; each has its own text.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_last_error() -> *const c_char {
    message::last()
}

/// New options, with nothing set; null if that is not possible. To be freed with cualloc_options_free.
///
/// Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_options_new() -> *mut cualloc_options_t {
    let mut made = std::ptr::null_mut();
    call(|| {
        made = options::add()?;
        Ok(())
    });
    made
}

/// Frees options. Allocators that were made with them stay as they are. Null, and what was freed before, change
/// nothing.
///
/// Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_options_free(options: *mut cualloc_options_t) {
    call(|| match options.is_null() {
        true => Ok(()),
        false => options::remove(options),
    });
}

/// Sets one option; the last value of a key counts.
///
/// Keys are those of CUALLOC_CONFIG: policy (auto, packed, classic), limit (bytes, with K, M, G or T, or a share of
/// the device as 80%), views, capture_checks, self_test (on, off), checks (context, none), peers (1+3), slack (5%),
/// budget, handle. And device: cuda (the default), or sim, a simulated device of 80 GiB in host memory, in a library
/// that was built with the feature sim. Settings that contradict each other are refused by cualloc_create.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for null, an unknown key, a value that the key does not take, or text that is not
/// UTF-8; CUALLOC_CLOSED for options that were freed; CUALLOC_UNSUPPORTED for device=sim without the simulator.
///
/// Any thread.
///
/// # Safety
/// `key` and `value` are null or end with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_options_set(
    options: *mut cualloc_options_t,
    key: *const c_char,
    value: *const c_char,
) -> i32 {
    call(|| {
        // SAFETY: the caller's contract.
        let (key, value) = unsafe { (text(key)?, text(value)?) };
        options::set(options, key, value)
    })
}

/// # Safety
/// `from` is null, or ends with a zero and stays as it is for as long as the result is used.
unsafe fn text<'a>(from: *const c_char) -> Result<&'a str, Failure> {
    if from.is_null() {
        return Err(NULL);
    }
    // SAFETY: the caller's contract.
    let text = unsafe { CStr::from_ptr(from) };
    let why = "a key or a value is not UTF-8";
    let refused = Failure::Said(CUALLOC_INVALID_ARGUMENT, why);
    text.to_str().map_err(|_| refused)
}

/// Makes an allocator for a device, by its number from 0 (CUDA_VISIBLE_DEVICES counts), on the device's primary
/// context, which the CUDA runtime uses too. Loads the driver when it is first needed. options may be null: then the
/// environment variable CUALLOC_CONFIG has the settings, as it has those that options do not set.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for a null out, a device that is not there, or settings that contradict each
/// other; CUALLOC_CLOSED for options that were freed; CUALLOC_NO_DRIVER; CUALLOC_UNSUPPORTED if the device cannot do
/// what the settings ask for, or 4096 allocators are open; CUALLOC_CONTEXT_LOST in a forked child; CUALLOC_DRIVER.
/// *out is null then.
///
/// Any thread, whatever context is current. That stays current.
///
/// # Safety
/// `out` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_create(
    device: i32,
    options: *const cualloc_options_t,
    out: *mut *mut cualloc_t,
) -> i32 {
    call(|| {
        // SAFETY: the caller's contract.
        unsafe { cleared_handle(out) }?;
        let options = options::find(options)?;
        let config = options.config()?;
        let context = device::primary(&options.source.driver()?, device)?;
        let made = handles::add(Allocator::with_config(&context, config)?)?;
        // SAFETY: the caller's contract.
        unsafe { out.write(made) };
        Ok(())
    })
}

/// Makes an allocator in a context of the caller's (a CUcontext); null means the one that is current on the calling
/// thread. The context stays the caller's, who destroys it after cualloc_destroy. If it is destroyed before, calls
/// that need it fail with CUALLOC_CONTEXT_LOST from the first one on that finds out, and nothing more is called on it.
///
/// Errors: as cualloc_create, and CUALLOC_INVALID_ARGUMENT if there is no such context, or none is current.
///
/// Any thread.
///
/// # Safety
/// `cu_context` is null or a live context of the driver; `out` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_create_in(
    cu_context: *mut c_void,
    options: *const cualloc_options_t,
    out: *mut *mut cualloc_t,
) -> i32 {
    call(|| {
        // SAFETY: the caller's contract.
        unsafe { cleared_handle(out) }?;
        let options = options::find(options)?;
        let config = options.config()?;
        // SAFETY: the caller's contract; one that dies is found out when it is entered.
        let context = unsafe { device::given(&options.source.driver()?, cu_context) }?;
        let made = handles::add(Allocator::with_config(&context, config)?)?;
        // SAFETY: the caller's contract.
        unsafe { out.write(made) };
        Ok(())
    })
}

/// # Safety
/// As [`cleared`].
unsafe fn cleared_handle(out: *mut *mut cualloc_t) -> Result<(), Failure> {
    if out.is_null() {
        return Err(NULL);
    }
    // SAFETY: the caller's contract.
    unsafe { out.write(std::ptr::null_mut()) };
    Ok(())
}

/// Gives all memory back to the driver and ends the handle. May wait for work of the device: for that which used
/// freed blocks. Calls that other threads are in with this allocator come to their end first, or fail with
/// CUALLOC_CLOSED, as all later ones do. When this has returned CUALLOC_OK, nothing of the context is used any more.
///
/// Errors: CUALLOC_BUSY while blocks are live, a guard keeps memory or a call on another thread holds some;
/// CUALLOC_CAPTURING if a stream would have to be waited for that is being captured; CUALLOC_DRIVER. In each of them
/// nothing was done, and the allocator goes on. CUALLOC_CONTEXT_LOST: the context is gone, memory is left alone, and
/// the handle is ended all the same (not so in a forked child, and not while the process ends).
/// CUALLOC_INVALID_ARGUMENT for null, CUALLOC_CLOSED for a handle that was ended before.
///
/// Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_destroy(allocator: *mut cualloc_t) -> i32 {
    call(|| handles::destroy(allocator))
}

/// Allocates bytes (at least 1) of device memory for use on a stream (a CUstream or cudaStream_t). *out is the first
/// byte's address, a multiple of 512.
///
/// The memory may be used by work of that stream at once. Another stream that uses it must wait for this one by
/// itself, and cualloc_record_stream must say so. Null and 1 are the legacy default stream of the allocator's context,
/// 2 is the calling thread's own default stream there, whatever context is current. Before any other stream is
/// destroyed cualloc_retire_stream must be called.
///
/// Errors: CUALLOC_OUT_OF_MEMORY, after everything was tried: the text has the whole picture;
/// CUALLOC_INVALID_ARGUMENT for a null handle or out, 0 bytes or more than any device has, or a stream of another
/// device; CUALLOC_CAPTURING; CUALLOC_CLOSED; CUALLOC_CONTEXT_LOST; CUALLOC_DRIVER. *out is 0 then, and nothing is
/// lost.
///
/// Any thread, whatever context is current.
///
/// # Safety
/// `stream` is a live stream, or null, 1 or 2; `out` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_alloc(
    allocator: *mut cualloc_t,
    bytes: usize,
    stream: *mut c_void,
    out: *mut u64,
) -> i32 {
    if out.is_null() {
        return null();
    }
    // SAFETY: the caller's contract, here and below.
    unsafe { out.write(0) };
    quickly(
        allocator,
        |allocator| unsafe { allocator.allocate_raw(bytes, stream.cast()) },
        |allocator| unsafe { allocator.allocate_raw_with(Request::new(bytes), stream.cast()) },
        |ptr| unsafe { out.write(ptr) },
    )
}

/// cualloc_alloc at an address that is a multiple of alignment: a power of two, at most 2 MiB (2097152).
///
/// Errors: as cualloc_alloc, and CUALLOC_INVALID_ARGUMENT for another alignment.
///
/// Any thread, whatever context is current.
///
/// # Safety
/// As cualloc_alloc.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_alloc_aligned(
    allocator: *mut cualloc_t,
    bytes: usize,
    alignment: usize,
    stream: *mut c_void,
    out: *mut u64,
) -> i32 {
    if out.is_null() {
        return null();
    }
    // SAFETY: the caller's contract, here and below.
    unsafe { out.write(0) };
    let request = Request::new(bytes).align(alignment);
    quickly(
        allocator,
        |allocator| unsafe { allocator.allocate_raw_with(request, stream.cast()) },
        |allocator| unsafe { allocator.allocate_raw_with(request, stream.cast()) },
        |ptr| unsafe { out.write(ptr) },
    )
}

/// Frees the block that begins at ptr; 0 is CUALLOC_OK. Never waits: work that was given to the block's stream before
/// this call may still use it, and so may work of recorded streams. The stream of the block, and every stream recorded
/// on it, must be alive or retired.
///
/// Errors: CUALLOC_NOT_OURS, CUALLOC_NOT_LIVE (also a second free), CUALLOC_CAPTURING, CUALLOC_INVALID_ARGUMENT for a
/// null handle, CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST, CUALLOC_DRIVER. In each of them nothing has changed.
///
/// Any thread, whatever context is current.
///
/// # Safety
/// Nobody gives the device work after this call that uses the block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_free(allocator: *mut cualloc_t, ptr: u64) -> i32 {
    let free = |allocator: &Allocator| match ptr {
        0 => Ok(()),
        // SAFETY: the caller's contract.
        _ => unsafe { allocator.free_raw(ptr) },
    };
    quickly(allocator, free, free, |()| {})
}

/// cualloc_free of a block that a stream used last: that stream used it until now, and nobody will again. The memory
/// is used anew when the work is done that the stream was given so far.
///
/// Errors: as cualloc_free and cualloc_record_stream. If the free fails after the use was recorded, the block is live
/// and that use stays recorded.
///
/// Any thread, whatever context is current.
///
/// # Safety
/// As cualloc_free; `stream` is a live stream, or null, 1 or 2.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_free_on(
    allocator: *mut cualloc_t,
    ptr: u64,
    stream: *mut c_void,
) -> i32 {
    let free = |allocator: &Allocator| match ptr {
        0 => Ok(()),
        // SAFETY: the caller's contract.
        _ => unsafe {
            allocator.record_use_raw(ptr, stream.cast())?;
            allocator.free_raw(ptr)
        },
    };
    quickly(allocator, free, free, |()| {})
}

/// Says that another stream uses the block around ptr (any address inside it). After its free the block is used anew
/// only when the work is done that the stream was given until the free.
///
/// Errors: CUALLOC_NOT_OURS, CUALLOC_NOT_LIVE, CUALLOC_CAPTURING, CUALLOC_INVALID_ARGUMENT for a null handle,
/// CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST, CUALLOC_DRIVER.
///
/// Any thread, whatever context is current.
///
/// # Safety
/// `stream` is a live stream of any device, or null, 1 or 2.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_record_stream(
    allocator: *mut cualloc_t,
    ptr: u64,
    stream: *mut c_void,
) -> i32 {
    call(|| {
        handles::with(allocator, |allocator| {
            // SAFETY: the caller's contract.
            unsafe { allocator.record_stream_raw(ptr, stream.cast()) }
        })
    })
}

/// Makes a stream known ahead of its first allocation.
///
/// Errors: CUALLOC_CAPTURING, CUALLOC_INVALID_ARGUMENT for a null handle, CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST,
/// CUALLOC_DRIVER.
///
/// Any thread, whatever context is current.
///
/// # Safety
/// `stream` is a live stream, or null, 1 or 2.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_adopt_stream(
    allocator: *mut cualloc_t,
    stream: *mut c_void,
) -> i32 {
    call(|| {
        handles::with(allocator, |allocator| {
            // SAFETY: the caller's contract.
            match unsafe { allocator.mark_raw(stream.cast()) } {
                Err(cualloc::Error::Stream(StreamMisuse::Unknown { .. })) => Ok(()),
                adopted => adopted,
            }
        })
    })
}

/// Says that a stream gets no more work that uses memory of this allocator, so that it can be destroyed. To be called
/// while the stream is still alive, for every allocator that it was passed to. Blocks that are live on it stay valid
/// and can be freed later. A stream that this allocator does not know is CUALLOC_OK.
///
/// Errors: CUALLOC_CAPTURING; CUALLOC_INVALID_ARGUMENT for a null handle, and for 2 where only another thread's own
/// default stream is known; CUALLOC_CLOSED; CUALLOC_CONTEXT_LOST; CUALLOC_DRIVER. In each of them nothing has changed,
/// and the stream must live on.
///
/// Any thread, whatever context is current.
///
/// # Safety
/// `stream` is a live stream, or null, 1 or 2.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_retire_stream(
    allocator: *mut cualloc_t,
    stream: *mut c_void,
) -> i32 {
    call(|| {
        handles::with(allocator, |allocator| {
            // SAFETY: the caller's contract.
            match unsafe { allocator.retire_raw(stream.cast()) } {
                Err(cualloc::Error::Stream(StreamMisuse::Unknown { .. })) => Ok(()),
                retired => retired,
            }
        })
    })
}

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
/// keeps from being waited for is pending, and no error.
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
/// Errors: CUALLOC_INVALID_ARGUMENT for a null handle, CUALLOC_CLOSED.
///
/// Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_set_limit(allocator: *mut cualloc_t, bytes: u64) -> i32 {
    call(|| {
        handles::with(allocator, |allocator| {
            allocator.set_limit((bytes != u64::MAX).then_some(bytes));
            Ok(())
        })
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
        // SAFETY: the caller's contract, here and below.
        let room = unsafe { stats::room(out) }?;
        unsafe { stats::write(&cualloc_stats_t::default(), out, room) };
        let figures = handles::with(allocator, |allocator| Ok(stats::of(allocator)))?;
        unsafe { stats::write(&figures, out, room) };
        Ok(())
    })
}

/// Sets all peaks to the current values, at one instant.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for a null handle, CUALLOC_CLOSED.
///
/// Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn cualloc_reset_peaks(allocator: *mut cualloc_t) -> i32 {
    call(|| {
        handles::with(allocator, |allocator| {
            allocator.reset_peaks();
            Ok(())
        })
    })
}

/// The bytes that may be used of the live block that begins at ptr: those that were asked for, rounded up.
///
/// Errors: CUALLOC_NOT_OURS, CUALLOC_NOT_LIVE (also for an address inside a block), CUALLOC_INVALID_ARGUMENT for a
/// null handle or out, CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST. *out is 0 then.
///
/// Any thread.
///
/// # Safety
/// `out` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_usable_size(
    allocator: *mut cualloc_t,
    ptr: u64,
    out: *mut u64,
) -> i32 {
    call(|| {
        // SAFETY: the caller's contract.
        unsafe { cleared(out) }?;
        let block = handles::with(allocator, |allocator| allocator.block_around(ptr))?;
        if block.address != ptr {
            let base = block.address;
            return Err(cualloc::Error::InteriorPointer { ptr, base }.into());
        }
        // SAFETY: the caller's contract.
        unsafe { out.write(block.size) };
        Ok(())
    })
}

/// The live block around ptr, which may be any address inside it: its first byte's address and its usable bytes.
///
/// Errors: CUALLOC_NOT_OURS, CUALLOC_NOT_LIVE, CUALLOC_INVALID_ARGUMENT for a null handle, base or bytes,
/// CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST. *base and *bytes are 0 then.
///
/// Any thread.
///
/// # Safety
/// `base` and `bytes` are null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_base(
    allocator: *mut cualloc_t,
    ptr: u64,
    base: *mut u64,
    bytes: *mut u64,
) -> i32 {
    call(|| {
        // SAFETY: the caller's contract.
        let (first, second) = unsafe { (cleared(base), cleared(bytes)) };
        first.and(second)?;
        let block = handles::with(allocator, |allocator| allocator.block_around(ptr))?;
        // SAFETY: the caller's contract.
        unsafe {
            base.write(block.address);
            bytes.write(block.size);
        }
        Ok(())
    })
}

/// Walks everything the allocator knows, computes every number anew, and compares: for tests and diagnosis. What it
/// costs grows with the number of blocks.
///
/// Errors: CUALLOC_PANIC if something does not agree, which is a defect of the library: the text says what;
/// CUALLOC_INVALID_ARGUMENT for a null handle, CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST in a forked child.
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
