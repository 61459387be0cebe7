//! Blocks, and the streams that use them.

use std::ffi::c_void;

use cualloc::allocator::Request;
use cualloc::driver::sys::CUresult;
use cualloc::driver::{Event, Stream};
use cualloc::error::StreamMisuse;
use cualloc::{Allocator, Error};

use crate::entry::{call, call_with, clear_result, code_of, give, try_fast};
use crate::results::CUALLOC_OK;
use crate::{cualloc_t, handles};

/// Allocates bytes (at least 1) of device memory for use on a stream (a CUstream or cudaStream_t). Writes the address
/// of the first byte, a multiple of 512, to *out.
///
/// Work of that stream may use the memory immediately. Another stream that uses it must itself wait for this one, and
/// the use must be reported by cualloc_record_stream. Null and 1 are the legacy default stream of the allocator's
/// context; 2 is the calling thread's own default stream there, whatever context is current. Any other stream must be
/// retired with cualloc_retire_stream before it is destroyed.
///
/// Errors: CUALLOC_OUT_OF_MEMORY once every way to obtain memory was tried (the text is a full report);
/// CUALLOC_INVALID_ARGUMENT for a null handle or out, for 0 bytes or more than any device has, or for a stream of
/// another device; CUALLOC_CAPTURING; CUALLOC_BUSY in a predicate of a scope, if the allocator has open scopes;
/// CUALLOC_CLOSED; CUALLOC_CONTEXT_LOST; CUALLOC_DRIVER. *out is then 0, and no memory is leaked.
///
/// May be called from any thread, with any current context.
///
/// # Safety
/// `stream` is a live stream, or null, 1 or 2; `out` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_alloc(
    allocator: *mut cualloc_t,
    bytes: usize,
    stream: *mut c_void,
    out: *mut u64,
) -> i32 {
    if !out.is_null() {
        // SAFETY: the caller's contract.
        let fast = |allocator: &Allocator| unsafe { try_alloc(allocator, bytes, stream, out) };
        // SAFETY: the caller's contract.
        let slow = |allocator: &Allocator| unsafe { alloc_slow(allocator, bytes, stream, out) };
        if let Some(code) = try_fast(allocator, fast, slow) {
            return code;
        }
    }
    // SAFETY: the caller's contract.
    unsafe { alloc_checked(allocator, bytes, stream, out) }
}

/// Tries [`cualloc_alloc`] from the stream's cache alone; returns whether that succeeded.
///
/// # Safety
/// As [`cualloc_alloc`]; `out` is not null.
#[inline(always)]
pub(crate) unsafe fn try_alloc(
    allocator: &Allocator,
    bytes: usize,
    stream: *mut c_void,
    out: *mut u64,
) -> bool {
    // SAFETY: the caller's contract.
    let taken = unsafe { allocator.try_allocate_raw(bytes, stream.cast()) };
    // SAFETY: the caller's contract.
    taken.map(|ptr| unsafe { out.write(ptr) }).is_some()
}

/// The slow path of [`cualloc_alloc`].
///
/// # Safety
/// As [`cualloc_alloc`]; `out` is not null.
#[inline(never)]
unsafe fn alloc_slow(
    allocator: &Allocator,
    bytes: usize,
    stream: *mut c_void,
    out: *mut u64,
) -> i32 {
    // SAFETY: the caller's contract.
    let made = unsafe { allocator.allocate_raw(bytes, stream.cast()) };
    // SAFETY: the caller's contract.
    let write = |ptr| unsafe { out.write(ptr) };
    write(0);
    code_of(allocator, made.map(write))
}

/// [`cualloc_alloc`] with a handle that may be invalid.
///
/// # Safety
/// As [`cualloc_alloc`].
#[cold]
#[inline(never)]
unsafe fn alloc_checked(
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

/// Like cualloc_alloc, at an address that is a multiple of alignment: a power of two, at most 2 MiB (2097152).
///
/// Errors: as cualloc_alloc, and CUALLOC_INVALID_ARGUMENT for an unsupported alignment.
///
/// May be called from any thread, with any current context.
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
    let (stream, request) = (stream.cast(), Request::new(bytes).align(alignment));
    // SAFETY: the caller's contract.
    let run = |allocator: &Allocator| unsafe { allocator.allocate_raw_with(request, stream) };
    // SAFETY: the caller's contract.
    unsafe { give(out, || handles::with(allocator, run)) }
}

/// Frees the block that begins at ptr; an address of 0 is ignored. Never waits: work submitted to the block's stream,
/// or to a recorded stream, before this call may still use the block. The stream of the block, and every stream
/// recorded on it, must be alive or retired.
///
/// Errors: CUALLOC_NOT_OURS, CUALLOC_NOT_LIVE (also a second free), CUALLOC_CAPTURING, CUALLOC_INVALID_ARGUMENT for a
/// null handle, CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST, CUALLOC_DRIVER. After an error nothing has changed.
///
/// May be called from any thread, with any current context.
///
/// # Safety
/// No work that uses the block is submitted to the device after this call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_free(allocator: *mut cualloc_t, ptr: u64) -> i32 {
    // SAFETY: the caller's contract.
    let fast = |allocator: &Allocator| unsafe { allocator.try_free_raw(ptr) };
    // SAFETY: the caller's contract.
    let slow = |allocator: &Allocator| unsafe { free_slow(allocator, ptr) };
    if let Some(code) = try_fast(allocator, fast, slow) {
        return code;
    }
    // SAFETY: the caller's contract.
    unsafe { free_checked(allocator, ptr) }
}

/// The slow path of [`cualloc_free`].
///
/// # Safety
/// As [`cualloc_free`].
#[inline(never)]
unsafe fn free_slow(allocator: &Allocator, ptr: u64) -> i32 {
    match ptr {
        0 => CUALLOC_OK,
        // SAFETY: the caller's contract.
        _ => code_of(allocator, unsafe { allocator.free_raw(ptr) }),
    }
}

/// [`cualloc_free`] with a handle that may be invalid.
///
/// # Safety
/// As [`cualloc_free`].
#[cold]
#[inline(never)]
unsafe fn free_checked(allocator: *mut cualloc_t, ptr: u64) -> i32 {
    call_with(allocator, |allocator| match ptr {
        0 => Ok(()),
        // SAFETY: the caller's contract.
        _ => unsafe { allocator.free_raw(ptr) },
    })
}

/// Frees a block whose last use was on the given stream: records that stream's use, then frees the block as
/// cualloc_free does. The memory is reused only after the work submitted to the stream so far has completed.
///
/// Errors: as cualloc_free and cualloc_record_stream. If the free fails after the use was recorded, the block stays
/// live and the use stays recorded.
///
/// May be called from any thread, with any current context.
///
/// # Safety
/// As cualloc_free; `stream` is a live stream, or null, 1 or 2.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_free_on(
    allocator: *mut cualloc_t,
    ptr: u64,
    stream: *mut c_void,
) -> i32 {
    call_with(allocator, |allocator| match ptr {
        0 => Ok(()),
        // SAFETY: the caller's contract.
        _ => unsafe {
            allocator.record_use_raw(ptr, stream.cast())?;
            allocator.free_raw(ptr)
        },
    })
}

/// Records that another stream uses the block that contains ptr (any address inside it). Once freed, the block is
/// reused only after the work submitted to that stream before the free has completed. In a capture that a graph pool
/// serves, the use takes effect at the end of the capture.
///
/// Errors: CUALLOC_NOT_OURS, CUALLOC_NOT_LIVE, CUALLOC_CAPTURING in any other capture, CUALLOC_BUSY for a capturing
/// stream in a predicate of a scope, CUALLOC_INVALID_ARGUMENT for a null handle, CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST,
/// CUALLOC_DRIVER.
///
/// May be called from any thread, with any current context.
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

/// Adopts a stream: the caller promises that it lives until it is retired, so the allocator may use its handle in calls
/// that do not pass it. Other streams can then reuse memory freed on it sooner. Adoption is an optimisation, never
/// needed for correctness. Null and 1 are always adopted.
///
/// Errors: CUALLOC_CAPTURING; CUALLOC_INVALID_ARGUMENT for a null handle or a stream of another context than the
/// allocator's; CUALLOC_UNSUPPORTED if stream is 2 (the per-thread default stream); CUALLOC_CLOSED;
/// CUALLOC_CONTEXT_LOST; CUALLOC_DRIVER.
///
/// May be called from any thread, with any current context.
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

/// Retires a stream, so that it can be destroyed: it gets no more work that uses memory of this allocator. Must be
/// called while the stream is still alive, for every allocator that it was passed to. Live blocks of the stream stay
/// valid and can be freed later. For a stream that this allocator does not know, returns CUALLOC_OK.
///
/// Errors: CUALLOC_CAPTURING; CUALLOC_INVALID_ARGUMENT for a null handle, and for 2 if only another thread's default
/// stream is known; CUALLOC_CLOSED; CUALLOC_CONTEXT_LOST; CUALLOC_DRIVER. After an error nothing has changed, and the
/// stream must not be destroyed yet.
///
/// May be called from any thread, with any current context.
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

/// Waits until all work submitted to a stream so far is complete. Like cuStreamSynchronize, except that the stream's
/// context need not be current.
///
/// Errors: CUALLOC_CAPTURING while the stream is being captured, or, for null and 1, while a stream that synchronises
/// with the legacy stream is being captured (the capture stays valid unless it begins during the call);
/// CUALLOC_INVALID_ARGUMENT for a null handle; CUALLOC_CLOSED; CUALLOC_CONTEXT_LOST and CUALLOC_DRIVER, also for errors
/// of the work itself.
///
/// May be called from any thread.
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
        // SAFETY: the caller's contract; for a special stream its context is current.
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

/// Makes all work submitted to a stream from now on wait, on the device, for all work submitted to another stream so
/// far.
///
/// Errors: CUALLOC_CAPTURING if only one of the two is being captured; CUALLOC_INVALID_ARGUMENT for a null handle;
/// CUALLOC_CLOSED; CUALLOC_CONTEXT_LOST; CUALLOC_DRIVER.
///
/// May be called from any thread, with any current context.
///
/// # Safety
/// Both are live streams, or null, 1 or 2.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_stream_wait(
    allocator: *mut cualloc_t,
    stream: *mut c_void,
    other: *mut c_void,
) -> i32 {
    call_with(allocator, |allocator| {
        let context = allocator.context();
        let entered = context.enter()?;
        // Before anything else, which a driver may refuse for a captured stream.
        let captured = [stream, other].map(|raw| {
            // SAFETY: the caller's contract; for a special stream its context is current.
            let is = unsafe { entered.driver().is_capturing(raw.cast()) };
            is.map(|is| is.then_some(raw))
        });
        match captured {
            [Ok(Some(raw)), Ok(None)] | [Ok(None), Ok(Some(raw))] => {
                let stream = raw as usize;
                return Err(Error::Capturing { stream });
            }
            [Err(error), _] | [_, Err(error)] => return Err(error.into()),
            [Ok(_), Ok(_)] => {}
        }
        let event = Event::new(context)?;
        // SAFETY: the caller's contract; for a special stream its context is current.
        unsafe {
            entered.record(&event, other.cast())?;
            entered.stream_wait(stream.cast(), &event)?;
        }
        Ok(())
    })
}

/// Copies bytes between two addresses, of device or host memory, in the order of a stream; returns before the copy is
/// complete.
///
/// Errors: CUALLOC_INVALID_ARGUMENT for a null handle; CUALLOC_CLOSED; CUALLOC_CONTEXT_LOST; CUALLOC_DRIVER.
///
/// May be called from any thread, with any current context.
///
/// # Safety
/// `stream` is a live stream, or null, 1 or 2. Both ranges are accessible on the allocator's device or the host until
/// the copy is complete, and do not overlap. Until then no other code writes to them, or reads the one that is written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_copy(
    allocator: *mut cualloc_t,
    to: u64,
    from: u64,
    bytes: usize,
    stream: *mut c_void,
) -> i32 {
    call_with(allocator, |allocator| {
        // SAFETY: the caller's contract.
        let stream = unsafe { Stream::from_raw(allocator.context(), stream.cast()) }?;
        // SAFETY: as above.
        Ok(unsafe { stream.memcpy(to, from, bytes) }?)
    })
}

/// Writes the usable size of the live block that begins at ptr, in bytes: the requested size, rounded up.
///
/// Errors: CUALLOC_NOT_OURS, CUALLOC_NOT_LIVE (also for an address inside a block), CUALLOC_INVALID_ARGUMENT for a null
/// handle or out, CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST. *out is then 0.
///
/// May be called from any thread.
///
/// # Safety
/// `out` is null or writable.
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

/// Writes the address of the first byte and the usable size of the live block that contains ptr (any address inside
/// it).
///
/// Errors: CUALLOC_NOT_OURS, CUALLOC_NOT_LIVE, CUALLOC_INVALID_ARGUMENT for a null handle, base or bytes,
/// CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST. *base and *bytes are then 0.
///
/// May be called from any thread.
///
/// # Safety
/// `base` and `bytes` are null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cualloc_base(
    allocator: *mut cualloc_t,
    ptr: u64,
    base: *mut u64,
    bytes: *mut u64,
) -> i32 {
    call(|| {
        // SAFETY: the caller's contract.
        let (first, second) = unsafe { (clear_result(base), clear_result(bytes)) };
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
