//! Functions of the driver that this crate does not call and other programs do, made of those that it has.

use crate::{Library, library};
use cualloc::driver::sys::*;
use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_float, c_int, c_uchar, c_uint, c_void};
use std::ptr::null_mut;

const OK: CUresult = CUresult::CUDA_SUCCESS;
const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;
/// The legacy default stream.
const LEGACY: CUstream = null_mut();

thread_local! {
    /// The contexts that were current before those that were pushed, the last one last.
    static BELOW: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

type StreamCallback = Option<unsafe extern "C" fn(CUstream, CUresult, *mut c_void)>;

/// Runs the body of a C function.
fn code(body: impl FnOnce() -> Result<(), CUresult>) -> CUresult {
    body().err().unwrap_or(OK)
}

fn started() -> Result<&'static Library, CUresult> {
    library().ok_or(INVALID)
}

/// Calls a function of the table.
macro_rules! table {
    ($name:ident($($argument:expr),*)) => {
        match started()?.table.$name {
            // SAFETY: the caller of the exported function vouches for its arguments; others are locals.
            Some(function) => match unsafe { function($($argument),*) } {
                OK => Ok(()),
                code => Err(code),
            },
            None => Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
        }
    };
}

/// Writes a result of a call.
///
/// # Safety
/// `out` is null or a place for it.
unsafe fn put<T>(out: *mut T, value: T) -> Result<(), CUresult> {
    if out.is_null() {
        return Err(INVALID);
    }
    // SAFETY: not null, and by the caller's contract a place for the value.
    unsafe { out.write_unaligned(value) };
    Ok(())
}

fn current() -> Result<CUcontext, CUresult> {
    let mut context = null_mut();
    table!(cuCtxGetCurrent(&mut context))?;
    Ok(context)
}

fn push(context: CUcontext) -> Result<(), CUresult> {
    let before = current()?;
    table!(cuCtxSetCurrent(context))?;
    BELOW.with_borrow_mut(|below| below.push(before as usize));
    Ok(())
}

fn pop() -> Result<CUcontext, CUresult> {
    let context = current()?;
    if context.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_CONTEXT);
    }
    let before = BELOW.with_borrow_mut(Vec::pop).unwrap_or(0);
    table!(cuCtxSetCurrent(before as CUcontext))?;
    Ok(context)
}

fn create(device: CUdevice) -> Result<CUcontext, CUresult> {
    let device = usize::try_from(device).map_err(|_| CUresult::CUDA_ERROR_INVALID_DEVICE)?;
    let context = started()?.simulator.create_context(device);
    let context = context.ok_or(CUresult::CUDA_ERROR_INVALID_DEVICE)?;
    push(context)?;
    Ok(context)
}

/// Waits for what was submitted to the legacy default stream, as calls that are not asynchronous do.
fn finished(submitted: Result<(), CUresult>) -> Result<(), CUresult> {
    submitted?;
    table!(cuStreamSynchronize(LEGACY))
}

/// A callback passed to `cuStreamAddCallback`.
struct Callback {
    function: StreamCallback,
    stream: CUstream,
    data: *mut c_void,
}

/// # Safety
/// `data` is a boxed [`Callback`] turned raw, and this is its only call.
unsafe extern "C" fn run(data: *mut c_void) {
    // SAFETY: the caller's contract.
    let callback = unsafe { Box::from_raw(data.cast::<Callback>()) };
    if let Some(function) = callback.function {
        // SAFETY: the caller that added the callback is responsible for it.
        unsafe { function(callback.stream, OK, callback.data) };
    }
}

/// The first versions of functions with an older form of the same name.
const SINCE: &[(&str, c_int)] = &[
    ("cuStreamGetCaptureInfo_v2", 11030),
    ("cuDeviceGetUuid_v2", 11040),
    ("cuGetProcAddress_v2", 12000),
    ("cuGraphExecUpdate_v2", 12000),
    ("cuGraphAddKernelNode_v2", 12000),
    ("cuStreamGetCaptureInfo_v3", 12030),
    ("cuStreamUpdateCaptureDependencies_v2", 12030),
    ("cuGraphNodeGetDependencies_v2", 12030),
    ("cuGraphGetEdges_v2", 12030),
    ("cuEventElapsedTime_v2", 12080),
    ("cuCtxCreate_v4", 13000),
];

/// The newest form of a function that a version has: functions are asked for without the suffix.
fn find(base: &str, version: c_int) -> *const c_void {
    let form = |name: &str| -> Option<u32> {
        let rest = name.strip_prefix(base)?;
        let number = match rest {
            "" => 1,
            _ => rest.strip_prefix("_v")?.parse().ok()?,
        };
        let since = SINCE.iter().find(|(known, _)| *known == name);
        (since.map_or(0, |(_, since)| *since) <= version).then_some(number)
    };
    let all = crate::addresses().into_iter().chain(addresses());
    let forms = all.filter_map(|(name, address)| Some((form(name)?, address)));
    let newest = forms.max_by_key(|(number, _)| *number);
    newest.map_or(std::ptr::null(), |(_, address)| address)
}

/// `CUdriverProcAddressQueryResult`.
const FOUND: c_int = 0;
const NOT_FOUND: c_int = 1;

/// # Safety
/// `symbol` ends in zero, and the places are null or there.
unsafe fn address(
    symbol: *const c_char,
    out: *mut *mut c_void,
    version: c_int,
    status: *mut c_int,
) -> Result<(), CUresult> {
    if symbol.is_null() || version > started()?.version {
        return Err(INVALID);
    }
    // SAFETY: not null, so text that ends in zero by the caller's contract.
    let name = unsafe { CStr::from_ptr(symbol) }.to_string_lossy();
    let address = find(&name, version);
    // SAFETY: the caller's contract.
    unsafe { put(out, address.cast_mut()) }?;
    if !status.is_null() {
        let found = if address.is_null() { NOT_FOUND } else { FOUND };
        // SAFETY: the caller's contract.
        unsafe { put(status, found) }?;
    }
    Ok(())
}

macro_rules! more {
    ($(fn $name:ident($($arg:ident: $ty:ty),*) => $body:expr;)*) => {
        $(
            /// As the driver's function of that name.
            ///
            /// # Safety
            /// As the driver's documentation asks for.
            #[allow(non_snake_case)]
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($arg: $ty),*) -> CUresult {
                code(|| $body)
            }
        )*

        /// Every function of this file with its address.
        fn addresses() -> Vec<(&'static str, *const c_void)> {
            vec![$((
                stringify!($name),
                $name as unsafe extern "C" fn($($ty),*) -> CUresult as *const c_void,
            )),*]
        }
    };
}

more! {
    fn cuCtxCreate_v2(out: *mut CUcontext, _flags: c_uint, device: CUdevice) => {
        // SAFETY: the caller's contract.
        unsafe { put(out, create(device)?) }
    };
    fn cuCtxCreate_v4(out: *mut CUcontext, _params: *mut c_void, _flags: c_uint, device: CUdevice) => {
        // SAFETY: the caller's contract.
        unsafe { put(out, create(device)?) }
    };
    fn cuCtxDestroy_v2(context: CUcontext) => {
        if current()? == context {
            pop()?;
        }
        match started()?.simulator.destroy_context(context) {
            true => Ok(()),
            false => Err(CUresult::CUDA_ERROR_INVALID_CONTEXT),
        }
    };
    fn cuCtxPushCurrent_v2(context: CUcontext) => push(context);
    fn cuCtxPopCurrent_v2(out: *mut CUcontext) => {
        let context = pop()?;
        if out.is_null() {
            return Ok(());
        }
        // SAFETY: the caller's contract.
        unsafe { put(out, context) }
    };
    fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) => {
        for out in [least, greatest].into_iter().filter(|out| !out.is_null()) {
            // SAFETY: the caller's contract.
            unsafe { put(out, 0) }?;
        }
        Ok(())
    };
    fn cuDevicePrimaryCtxGetState(device: CUdevice, flags: *mut c_uint, active: *mut c_int) => {
        let index = usize::try_from(device).map_err(|_| CUresult::CUDA_ERROR_INVALID_DEVICE)?;
        let alive = started()?.simulator.primary_is_active(index);
        let alive = alive.ok_or(CUresult::CUDA_ERROR_INVALID_DEVICE)?;
        // SAFETY: the caller's contract.
        unsafe { put(flags, 0).and_then(|()| put(active, alive.into())) }
    };
    fn cuDevicePrimaryCtxReset_v2(device: CUdevice) => {
        let index = usize::try_from(device).map_err(|_| CUresult::CUDA_ERROR_INVALID_DEVICE)?;
        started()?.simulator.reset_primary(index);
        Ok(())
    };
    fn cuDevicePrimaryCtxRelease(device: CUdevice) => table!(cuDevicePrimaryCtxRelease_v2(device));
    fn cuDeviceComputeCapability(major: *mut c_int, minor: *mut c_int, device: CUdevice) => {
        type A = CUdevice_attribute;
        let attribute = A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR;
        table!(cuDeviceGetAttribute(major, attribute, device))?;
        let attribute = A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR;
        table!(cuDeviceGetAttribute(minor, attribute, device))
    };
    fn cuDeviceGetUuid(uuid: *mut CUuuid, device: CUdevice) => table!(cuDeviceGetUuid_v2(uuid, device));

    fn cuMemcpy(to: CUdeviceptr, from: CUdeviceptr, bytes: usize)
        => finished(table!(cuMemcpyAsync(to, from, bytes, LEGACY)));
    fn cuMemcpyHtoD_v2(to: CUdeviceptr, from: *const c_void, bytes: usize)
        => finished(table!(cuMemcpyHtoDAsync_v2(to, from, bytes, LEGACY)));
    fn cuMemcpyDtoH_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize)
        => finished(table!(cuMemcpyDtoHAsync_v2(to, from, bytes, LEGACY)));
    fn cuMemcpyDtoD_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize)
        => finished(table!(cuMemcpyDtoDAsync_v2(to, from, bytes, LEGACY)));
    fn cuMemsetD8_v2(to: CUdeviceptr, value: c_uchar, count: usize)
        => finished(table!(cuMemsetD8Async(to, value, count, LEGACY)));
    fn cuMemsetD32_v2(to: CUdeviceptr, value: c_uint, count: usize)
        => finished(table!(cuMemsetD32Async(to, value, count, LEGACY)));

    fn cuEventRecordWithFlags(event: CUevent, stream: CUstream, _flags: c_uint)
        => table!(cuEventRecord(event, stream));
    fn cuEventElapsedTime(out: *mut c_float, start: CUevent, end: CUevent) => {
        table!(cuEventQuery(start))?;
        table!(cuEventQuery(end))?;
        // SAFETY: the caller's contract.
        unsafe { put(out, 0.0) }
    };
    fn cuEventElapsedTime_v2(out: *mut c_float, start: CUevent, end: CUevent) => {
        table!(cuEventQuery(start))?;
        table!(cuEventQuery(end))?;
        // SAFETY: the caller's contract.
        unsafe { put(out, 0.0) }
    };
    fn cuStreamAddCallback(stream: CUstream, function: StreamCallback, data: *mut c_void, _flags: c_uint) => {
        let callback = Callback { function, stream, data };
        let boxed = Box::into_raw(Box::new(callback));
        let added = table!(cuLaunchHostFunc(stream, Some(run), boxed.cast()));
        if added.is_err() {
            // SAFETY: the driver did not take it.
            drop(unsafe { Box::from_raw(boxed) });
        }
        added
    };
    fn cuStreamGetCaptureInfo(stream: CUstream, status: *mut CUstreamCaptureStatus, id: *mut cuuint64_t)
        => table!(cuStreamGetCaptureInfo_v2(stream, status, id, null_mut(), null_mut(), null_mut()));

    fn cuModuleLoadDataEx(
        module: *mut CUmodule, image: *const c_void, _count: c_uint, _options: *mut c_int, _values: *mut *mut c_void
    ) => table!(cuModuleLoadData(module, image));
    fn cuGetProcAddress(symbol: *const c_char, out: *mut *mut c_void, version: c_int, _flags: cuuint64_t) => {
        // SAFETY: the caller's contract.
        unsafe { address(symbol, out, version, null_mut()) }
    };
    fn cuGetProcAddress_v2(
        symbol: *const c_char, out: *mut *mut c_void, version: c_int, _flags: cuuint64_t, status: *mut c_int
    ) => {
        // SAFETY: the caller's contract.
        unsafe { address(symbol, out, version, status) }
    };
}
