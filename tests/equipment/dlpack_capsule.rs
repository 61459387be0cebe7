//! Tensors behind a C interface, as a small library for code in other languages: what a Python package
//! needs to hand device memory to array libraries and take theirs, see `tests/interop/dlpack_gpu.py`.
//!
//! Functions that give a pointer give null on failure, those that give a number -1;
//! `capsule_error` then says why. Everything may be called from any thread.

use std::cell::RefCell;
use std::error::Error;
use std::ffi::{CString, c_char, c_int, c_void};

use cualloc::Allocator;
use cualloc::driver::Stream;
use cualloc::exchange::dlpack::{DLManagedTensor, DLManagedTensorVersioned};
use cualloc::exchange::{DType, Dlpack, Peer, Tensor};
use cualloc::{DeviceBuffer, Error as Failure};

/// What `capsule_open` gives.
pub struct Session {
    alloc: Allocator,
    stream: Stream,
    // Lives as long as the session.
    #[cfg(feature = "sim")]
    _simulator: Option<cualloc::sim::Simulator>,
}

type Outcome<T> = Result<T, Box<dyn Error>>;

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

fn keep(error: &dyn Error) {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(": ");
        text.push_str(&error.to_string());
        source = error.source();
    }
    LAST.set(CString::new(text.replace('\0', " ")).unwrap_or_default());
}

fn pointer<T>(made: Outcome<T>) -> *mut T {
    match made {
        Ok(made) => Box::into_raw(Box::new(made)),
        Err(error) => {
            keep(&*error);
            std::ptr::null_mut()
        }
    }
}

fn number(done: Outcome<c_int>) -> c_int {
    done.unwrap_or_else(|error| {
        keep(&*error);
        -1
    })
}

/// Why the calling thread's last failed call failed. Valid until its next one.
#[unsafe(no_mangle)]
pub extern "C" fn capsule_error() -> *const c_char {
    LAST.with_borrow(|last| last.as_ptr())
}

/// An allocator on device 0 of the driver, or with `simulated` of a simulated one.
#[unsafe(no_mangle)]
pub extern "C" fn capsule_open(simulated: c_int) -> *mut Session {
    pointer(open(simulated != 0))
}

#[cfg(feature = "sim")]
fn open(simulated: bool) -> Outcome<Session> {
    use cualloc::Config;

    use cualloc::sim::{SimConfig, Simulator};
    let (alloc, simulator) = if simulated {
        let simulator = Simulator::new(SimConfig::default())?;
        let driver = simulator.driver()?;
        let context = driver.context(0)?;
        let alloc = Allocator::with_config(&context, Config::new())?;
        (alloc, Some(simulator))
    } else {
        (Allocator::new(0)?, None)
    };
    let stream = alloc.create_stream()?;
    Ok(Session {
        alloc,
        stream,
        _simulator: simulator,
    })
}

#[cfg(not(feature = "sim"))]
fn open(simulated: bool) -> Outcome<Session> {
    if simulated {
        return Err("built without the simulator".into());
    }
    let alloc = Allocator::new(0)?;
    let stream = alloc.create_stream()?;
    Ok(Session { alloc, stream })
}

/// Gives everything back; 0, or -1 if memory is still in use (the session stays open then).
///
/// # Safety
/// `session` is open, and not used again after 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn capsule_close(session: *mut Session) -> c_int {
    // SAFETY: the caller's contract.
    let open = unsafe { &*session };
    let closed = open.alloc.check().map_err(Into::into).and_then(|()| {
        open.alloc.close()?;
        Ok(0)
    });
    let closed = number(closed);
    if closed == 0 {
        // SAFETY: as above.
        drop(unsafe { Box::from_raw(session) });
    }
    closed
}

/// Bytes of live columns.
///
/// # Safety
/// `session` is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn capsule_live_bytes(session: *const Session) -> u64 {
    // SAFETY: the caller's contract.
    unsafe { &*session }.alloc.stats().all.allocated.current
}

/// Live columns freed so far, in bytes.
///
/// # Safety
/// `session` is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn capsule_freed_bytes(session: *const Session) -> u64 {
    // SAFETY: the caller's contract.
    unsafe { &*session }.alloc.stats().all.allocated.total_freed
}

/// The stream that columns of the session are used on, as a number for `__dlpack__(stream=...)`.
///
/// # Safety
/// `session` is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn capsule_stream(session: *const Session) -> u64 {
    // SAFETY: the caller's contract.
    unsafe { &*session }.stream.raw() as u64
}

/// A column of `rows` numbers.
///
/// # Safety
/// `session` is open, and `values` points to `rows` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn capsule_column(
    session: *const Session,
    values: *const f32,
    rows: usize,
) -> *mut Tensor {
    // SAFETY: the caller's contract.
    let (session, values) = unsafe {
        (
            &*session,
            match rows {
                0 => &[],
                _ => std::slice::from_raw_parts(values, rows),
            },
        )
    };
    pointer(column(session, values).map_err(Into::into))
}

fn column(session: &Session, values: &[f32]) -> Result<Tensor, Failure> {
    let Session { alloc, stream, .. } = session;
    if values.is_empty() {
        return Tensor::uninit(alloc, DType::F32, &[0], stream);
    }
    let buffer = DeviceBuffer::from_slice(alloc, values, stream)?;
    Ok(Tensor::from_buffer(buffer, &[values.len()])?)
}

/// Drops a column. Its memory lives on in exports.
///
/// # Safety
/// `column` is null or a column, not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn capsule_column_free(column: *mut Tensor) {
    if !column.is_null() {
        // SAFETY: the caller's contract.
        drop(unsafe { Box::from_raw(column) });
    }
}

/// A column's address.
///
/// # Safety
/// `column` is a column.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn capsule_column_ptr(column: *const Tensor) -> u64 {
    // SAFETY: the caller's contract.
    unsafe { &*column }.ptr()
}

/// A column's rows.
///
/// # Safety
/// `column` is a column.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn capsule_column_rows(column: *const Tensor) -> u64 {
    // SAFETY: the caller's contract.
    unsafe { &*column }.shape()[0] as u64
}

/// 1 if the memory belongs to another allocator, 0 if it is a block of the session's.
///
/// # Safety
/// `column` is a column.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn capsule_column_external(column: *const Tensor) -> c_int {
    // SAFETY: the caller's contract.
    let column = unsafe { &*column };
    c_int::from(column.is_external() || column.id().is_none())
}

/// Reads a column, after everything that the session's stream was given; 0 on success.
///
/// # Safety
/// `column` is a column, `values` has room for `rows` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn capsule_column_read(
    column: *const Tensor,
    values: *mut f32,
    rows: usize,
) -> c_int {
    // SAFETY: the caller's contract.
    let read = unsafe { &*column }
        .as_slice::<f32>()
        .and_then(|all| all.to_vec());
    number(read.map_err(Into::into).and_then(|read| {
        if read.len() != rows {
            return Err(format!("{} rows, not {rows}", read.len()).into());
        }
        // SAFETY: the caller's contract.
        unsafe { values.copy_from_nonoverlapping(read.as_ptr(), rows) };
        Ok(0)
    }))
}

/// Exports a column: a `DLManagedTensor`, or with `versioned` a `DLManagedTensorVersioned`. `stream` is
/// what a consumer gave to `__dlpack__`, if `has_stream`.
///
/// # Safety
/// `column` is a column, `stream` what the protocol allows and alive.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn capsule_export(
    column: *const Tensor,
    versioned: c_int,
    has_stream: c_int,
    stream: i64,
) -> *mut c_void {
    // SAFETY: the caller's contract.
    let column = unsafe { &*column };
    let stream = (has_stream != 0).then_some(stream);
    // SAFETY: the caller's contract.
    let consumer = unsafe { Peer::from_protocol(column.stream().context(), stream) };
    let exported = consumer.and_then(|consumer| match versioned {
        0 => Ok(column
            .to_dlpack::<DLManagedTensor>(&consumer)?
            .into_raw()
            .cast()),
        _ => Ok(column
            .to_dlpack::<DLManagedTensorVersioned>(&consumer)?
            .into_raw()
            .cast()),
    });
    exported.unwrap_or_else(|error| {
        keep(&error);
        std::ptr::null_mut()
    })
}

/// Takes over a tensor whose producer let the session's stream wait.
///
/// # Errors
/// The tensor is released.
///
/// # Safety
/// `session` is open; the tensor is of the form that `versioned` says, and not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn capsule_import(
    session: *const Session,
    tensor: *mut c_void,
    versioned: c_int,
) -> *mut Tensor {
    // SAFETY: the caller's contract.
    let stream = unsafe { &(*session).stream };
    // SAFETY: as above, and the producer let the stream wait.
    let (tensor, peer) = unsafe { (take(tensor, versioned), Peer::ordered()) };
    pointer(tensor.and_then(|tensor| {
        Ok(match tensor {
            Taken::Legacy(tensor) => Tensor::from_dlpack(tensor, stream, peer)?,
            Taken::Versioned(tensor) => Tensor::from_dlpack(tensor, stream, peer)?,
        })
    }))
}

/// Deletes a tensor without a consumer.
///
/// # Safety
/// As [`capsule_import`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn capsule_delete(tensor: *mut c_void, versioned: c_int) {
    // SAFETY: the caller's contract.
    drop(unsafe { take(tensor, versioned) });
}

enum Taken {
    Legacy(Dlpack<DLManagedTensor>),
    Versioned(Dlpack<DLManagedTensorVersioned>),
}

/// # Safety
/// As [`capsule_import`].
unsafe fn take(tensor: *mut c_void, versioned: c_int) -> Outcome<Taken> {
    // SAFETY: the caller's contract.
    Ok(unsafe {
        match versioned {
            0 => Taken::Legacy(Dlpack::from_raw(tensor.cast())?),
            _ => Taken::Versioned(Dlpack::from_raw(tensor.cast())?),
        }
    })
}
