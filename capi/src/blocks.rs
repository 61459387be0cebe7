//! Blocks, and the streams that they are used on.

use std::ffi::c_void;

use cualloc::allocator::Request;
use cualloc::driver::sys::CUresult;
use cualloc::error::StreamMisuse;
use cualloc::{Allocator, Error};

use crate::entry::{at_once, call, call_with, cleared, code_of, give, null, quickly};
use crate::results::CUALLOC_OK;
use crate::{cualloc_t, handles};

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
/// device; CUALLOC_CAPTURING; CUALLOC_BUSY in a predicate of a scope, if the allocator has open scopes; CUALLOC_CLOSED;
/// CUALLOC_CONTEXT_LOST; CUALLOC_DRIVER. *out is 0 then, and nothing is lost.
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
    if !out.is_null() {
        // SAFETY: the caller's contract.
        let fast = |allocator: &Allocator| unsafe { alloc_at_once(allocator, bytes, stream, out) };
        // SAFETY: the caller's contract.
        let slow = |allocator: &Allocator| unsafe { alloc_slowly(allocator, bytes, stream, out) };
        if let Some(code) = at_once(allocator, fast, slow) {
            return code;
        }
    }
    // SAFETY: the caller's contract.
    unsafe { alloc_with_any(allocator, bytes, stream, out) }
}

/// [`cualloc_alloc`] of what takes no more than a look at the stream's cache; whether it did.
///
/// # Safety
/// As [`cualloc_alloc`]; `out` is not null.
#[inline(always)]
pub(crate) unsafe fn alloc_at_once(
    allocator: &Allocator,
    bytes: usize,
    stream: *mut c_void,
    out: *mut u64,
) -> bool {
    // SAFETY: the caller's contract.
    let taken = unsafe { allocator.allocate_raw_at_once(bytes, stream.cast()) };
    // SAFETY: the caller's contract.
    taken.map(|ptr| unsafe { out.write(ptr) }).is_some()
}

/// [`cualloc_alloc`] of what takes more than that.
///
/// # Safety
/// As [`cualloc_alloc`]; `out` is not null.
#[inline(never)]
unsafe fn alloc_slowly(
    allocator: &Allocator,
    bytes: usize,
    stream: *mut c_void,
    out: *mut u64,
) -> i32 {
    // SAFETY: the caller's contract.
    let made = unsafe { allocator.allocate_raw(bytes, stream.cast()) };
    // SAFETY: the caller's contract.
    let say = |ptr| unsafe { out.write(ptr) };
    say(0);
    code_of(allocator, made.map(say))
}

/// [`cualloc_alloc`] with what may be no allocator.
///
/// # Safety
/// As [`cualloc_alloc`].
#[cold]
#[inline(never)]
unsafe fn alloc_with_any(
    allocator: *mut cualloc_t,
    bytes: usize,
    stream: *mut c_void,
    out: *mut u64,
) -> i32 {
    // SAFETY: the caller's contract.
    unsafe {
        give(out, || {
            handles::with(allocator, |allocator| {
                allocator.allocate_raw(bytes, stream.cast())
            })
        })
    }
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
    // SAFETY: the caller's contract.
    let say = |ptr| unsafe { out.write(ptr) };
    say(0);
    let (stream, request) = (stream.cast(), Request::new(bytes).align(alignment));
    // SAFETY: the caller's contract.
    let run = |allocator: &Allocator| unsafe { allocator.allocate_raw_with(request, stream) };
    quickly(allocator, run, run, say)
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
    // SAFETY: the caller's contract.
    let fast = |allocator: &Allocator| unsafe { allocator.free_raw_at_once(ptr) };
    // SAFETY: the caller's contract.
    let slow = |allocator: &Allocator| unsafe { free_slowly(allocator, ptr) };
    if let Some(code) = at_once(allocator, fast, slow) {
        return code;
    }
    // SAFETY: the caller's contract.
    unsafe { free_with_any(allocator, ptr) }
}

/// [`cualloc_free`] of what takes more than a look at the stream's cache.
///
/// # Safety
/// As [`cualloc_free`].
#[inline(never)]
unsafe fn free_slowly(allocator: &Allocator, ptr: u64) -> i32 {
    match ptr {
        0 => CUALLOC_OK,
        // SAFETY: the caller's contract.
        _ => code_of(allocator, unsafe { allocator.free_raw_slowly(ptr) }),
    }
}

/// [`cualloc_free`] with what may be no allocator.
///
/// # Safety
/// As [`cualloc_free`].
#[cold]
#[inline(never)]
unsafe fn free_with_any(allocator: *mut cualloc_t, ptr: u64) -> i32 {
    call_with(allocator, |allocator| match ptr {
        0 => Ok(()),
        // SAFETY: the caller's contract.
        _ => unsafe { allocator.free_raw(ptr) },
    })
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
/// only when the work is done that the stream was given until the free. In a capture that a graph pool serves, the use
/// counts from the end of the capture on.
///
/// Errors: CUALLOC_NOT_OURS, CUALLOC_NOT_LIVE, CUALLOC_CAPTURING in any other capture, CUALLOC_BUSY for a stream that
/// captures in a predicate of a scope, CUALLOC_INVALID_ARGUMENT for a null handle, CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST,
/// CUALLOC_DRIVER.
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
    // SAFETY: the caller's contract.
    call_with(allocator, |allocator| unsafe {
        allocator.record_stream_raw(ptr, stream.cast())
    })
}

/// Takes the caller's word that a stream lives until it is retired, so that the allocator may use its handle in calls
/// that do not name it: memory freed on it can then be had by other streams sooner. Not needed for correctness. Null
/// and 1 are kept anyway.
///
/// Errors: CUALLOC_CAPTURING, CUALLOC_INVALID_ARGUMENT for a null handle or a stream of another context than the
/// allocator's, CUALLOC_UNSUPPORTED for 2, CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST, CUALLOC_DRIVER.
///
/// Any thread, whatever context is current.
///
/// # Safety
/// `stream` is a live stream, or null or 1, and lives until cualloc_retire_stream has succeeded for it or the allocator
/// is destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_adopt_stream(
    allocator: *mut cualloc_t,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: the caller's contract.
    call_with(allocator, |allocator| unsafe {
        allocator.adopt_raw(stream.cast())
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
    call_with(allocator, |allocator| {
        // SAFETY: the caller's contract.
        match unsafe { allocator.retire_raw(stream.cast()) } {
            Err(Error::Stream(StreamMisuse::Unknown { .. })) => Ok(()),
            retired => retired,
        }
    })
}

/// Waits until everything that a stream was given so far is complete, whatever context is current: as
/// cuStreamSynchronize, which wants the stream's own.
///
/// Errors: CUALLOC_CAPTURING while the stream, or for null and 1 another stream of its context that waits for it, is
/// captured: nothing is spoilt, unless that begins meanwhile; CUALLOC_INVALID_ARGUMENT for a null handle; CUALLOC_CLOSED; CUALLOC_CONTEXT_LOST and
/// CUALLOC_DRIVER, also for errors of the work itself.
///
/// Any thread.
///
/// # Safety
/// `stream` is a live stream of the allocator's context, or null, 1 or 2.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_stream_synchronize(
    allocator: *mut cualloc_t,
    stream: *mut c_void,
) -> i32 {
    call_with(allocator, |allocator| {
        let capturing = Error::Capturing {
            stream: stream as usize,
        };
        let entered = allocator.context().enter()?;
        // SAFETY: the caller's contract; where it is special its context is current.
        let asked = match unsafe { entered.driver().is_capturing(stream.cast()) } {
            Ok(true) => return Err(capturing),
            // SAFETY: as above.
            Ok(false) => unsafe { entered.stream_synchronize(stream.cast()) },
            Err(error) => Err(error),
        };
        asked.map_err(|error| match error.code() {
            CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
            | CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
            | CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED => capturing,
            _ => error.into(),
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
    let run = || {
        let block = handles::with(allocator, |allocator| allocator.block_around(ptr))?;
        match block.address {
            base if base == ptr => Ok(block.size),
            base => Err(Error::InteriorPointer { ptr, base }.into()),
        }
    };
    // SAFETY: the caller's contract.
    unsafe { give(out, run) }
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
