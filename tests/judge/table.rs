//! The judge's place: the function table between the allocator and the driver.
//!
//! Every function that the allocator calls passes here. A call may be made to fail, something may be
//! done by somebody else just before or after it, and the judge hears of it when it went well. Calls
//! are let through one at a time, so that the judge hears of them in the order in which they happened.

use std::cell::{Cell, RefCell};
use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cualloc::driver::sys::*;

use super::law::Law;

/// One call name that fails now and then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    pub name: &'static str,
    pub permille: u64,
    pub code: CUresult,
}

/// The judge of one program.
pub struct Court {
    law: Mutex<Law>,
    real: CuFunctions,
    order: Mutex<()>,
    fault: Mutex<Option<Fault>>,
    failing: AtomicBool,
    dice: AtomicU64,
    pub failed: AtomicU64,
    pub calls: AtomicU64,
}

type Act = Box<dyn FnOnce()>;

/// What is done inside a call of this thread.
struct Interlude {
    name: &'static str,
    after: bool,
    skip: u32,
    act: Act,
}

thread_local! {
    static COURT: RefCell<Option<Arc<Court>>> = const { RefCell::new(None) };
    /// The program's own calls, not those of the allocator.
    static OWN: Cell<bool> = const { Cell::new(false) };
    static INSIDE: Cell<bool> = const { Cell::new(false) };
    static NEXT: RefCell<Option<Interlude>> = const { RefCell::new(None) };
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Court {
    pub fn new(real: CuFunctions, seed: u64) -> Arc<Court> {
        Arc::new(Court {
            law: Mutex::new(Law::new(real)),
            real,
            order: Mutex::new(()),
            fault: Mutex::new(None),
            failing: AtomicBool::new(false),
            dice: AtomicU64::new(seed),
            failed: AtomicU64::new(0),
            calls: AtomicU64::new(0),
        })
    }

    /// Makes it the judge of this thread's calls.
    pub fn enter(self: &Arc<Court>) {
        COURT.set(Some(Arc::clone(self)));
    }

    pub fn leave() {
        COURT.set(None);
        NEXT.set(None);
    }

    pub fn law(&self) -> MutexGuard<'_, Law> {
        locked(&self.law)
    }

    /// Has calls fail from now on, or none.
    pub fn fail(&self, fault: Option<Fault>) {
        *locked(&self.fault) = fault;
        self.failing.store(fault.is_some(), Ordering::Relaxed);
    }

    pub fn is_failing(&self) -> bool {
        self.failing.load(Ordering::Relaxed)
    }

    fn refusal(&self, name: &str) -> Option<CUresult> {
        let fault = (*locked(&self.fault))?;
        let chance = || {
            let seed = self.dice.fetch_add(1, Ordering::Relaxed);
            super::rng::Rng::new(seed.wrapping_mul(0x5851_f42d_4c95_7f2d)).below(1000)
        };
        if fault.name != name || chance() >= fault.permille {
            return None;
        }
        self.failed.fetch_add(1, Ordering::Relaxed);
        Some(fault.code)
    }
}

/// The judge of this thread.
pub fn court() -> Arc<Court> {
    COURT.with_borrow(Clone::clone).expect("a judged thread")
}

/// Makes calls that are the program's own: they do not fail, and nothing happens inside them.
pub fn own<T>(act: impl FnOnce(&CuFunctions) -> T) -> T {
    let table = install(court().real);
    let before = OWN.replace(true);
    let result = act(&table);
    OWN.set(before);
    result
}

/// Has something done inside a later call of this thread.
pub fn inside(name: &'static str, after: bool, skip: u32, act: impl FnOnce() + 'static) {
    let act = Box::new(act);
    NEXT.set(Some(Interlude {
        name,
        after,
        skip,
        act,
    }));
}

/// Whatever was to be done inside a call is not.
pub fn nothing_inside() {
    NEXT.set(None);
}

fn interlude(name: &str, after: bool) {
    if OWN.get() || INSIDE.get() {
        return;
    }
    let next = NEXT.take();
    match next {
        Some(mut next) if next.name == name && next.after == after => {
            if next.skip == 0 {
                (next.act)();
            } else {
                next.skip -= 1;
                NEXT.set(Some(next));
            }
        }
        other => NEXT.set(other),
    }
}

fn pass(
    name: &'static str,
    call: impl FnOnce(&CuFunctions) -> CUresult,
    note: impl FnOnce(&mut Law),
) -> CUresult {
    let Ok(Some(court)) = COURT.try_with(|court| court.borrow().clone()) else {
        return CUresult::CUDA_ERROR_DEINITIALIZED;
    };
    court.calls.fetch_add(1, Ordering::Relaxed);
    interlude(name, false);
    if !OWN.get()
        && court.is_failing()
        && let Some(code) = court.refusal(name)
    {
        return code;
    }
    let nested = INSIDE.replace(true);
    // A callback inside a call may call again.
    let order = (!nested).then(|| locked(&court.order));
    let code = call(&court.real);
    // The end of a spoilt capture is an end.
    if code == CUresult::CUDA_SUCCESS || name == "cuStreamEndCapture" {
        note(&mut court.law());
    }
    drop(order);
    INSIDE.set(nested);
    interlude(name, true);
    code
}

macro_rules! table {
    ($($name:ident($($argument:ident: $type:ty),*) $(=> $note:expr)?;)*) => {
        $(#[allow(non_snake_case, clippy::too_many_arguments)]
        unsafe extern "C" fn $name($($argument: $type),*) -> CUresult {
            // SAFETY: the caller's arguments, to the function whose name this is.
            pass(stringify!($name), |real| unsafe { real.$name.unwrap()($($argument),*) }, |_law| {
                $(
                    let note: &dyn Fn(&mut Law) = &$note;
                    note(_law);
                )?
            })
        })*

        /// The table with the judge before it.
        pub fn install(functions: CuFunctions) -> CuFunctions {
            CuFunctions {
                $($name: functions.$name.and(Some($name)),)*
                ..functions
            }
        }

    };
}

/// What a call has written for its caller.
fn read<T: Copy>(out: *const T) -> T {
    // SAFETY: the call went well, so the pointer is that of a value.
    unsafe { *out }
}

table! {
    cuCtxGetCurrent(a: *mut CUcontext);
    cuCtxSetCurrent(a: CUcontext);
    cuCtxGetDevice(a: *mut CUdevice);
    cuCtxSynchronize() => |law| law.context_done();
    cuCtxGetId(a: CUcontext, b: *mut c_ulonglong);
    cuMemAlloc_v2(a: *mut CUdeviceptr, b: usize) => |law| law.segment(read(a), b as u64);
    cuMemFree_v2(a: CUdeviceptr) => |law| law.segment_freed(a);
    cuMemGetInfo_v2(a: *mut usize, b: *mut usize);
    cuMemHostAlloc(a: *mut *mut c_void, b: usize, c: c_uint);
    cuMemFreeHost(a: *mut c_void);
    cuMemsetD8Async(a: CUdeviceptr, b: c_uchar, c: usize, d: CUstream)
        => |law| law.works(d, &[(a, c as u64)]);
    cuMemsetD32Async(a: CUdeviceptr, b: c_uint, c: usize, d: CUstream)
        => |law| law.works(d, &[(a, 4 * c as u64)]);
    cuMemcpyAsync(a: CUdeviceptr, b: CUdeviceptr, c: usize, d: CUstream)
        => |law| law.works(d, &[(a, c as u64), (b, c as u64)]);
    cuMemcpyHtoDAsync_v2(a: CUdeviceptr, b: *const c_void, c: usize, d: CUstream)
        => |law| law.works(d, &[(a, c as u64)]);
    cuMemcpyDtoHAsync_v2(a: *mut c_void, b: CUdeviceptr, c: usize, d: CUstream)
        => |law| law.works(d, &[(b, c as u64)]);
    cuMemcpyDtoDAsync_v2(a: CUdeviceptr, b: CUdeviceptr, c: usize, d: CUstream)
        => |law| law.works(d, &[(a, c as u64), (b, c as u64)]);
    cuMemcpyPeerAsync(a: CUdeviceptr, b: CUcontext, c: CUdeviceptr, d: CUcontext, e: usize, f: CUstream)
        => |law| law.works(f, &[(a, e as u64), (c, e as u64)]);
    cuLaunchKernel(
        f: CUfunction, x: c_uint, y: c_uint, z: c_uint, i: c_uint, j: c_uint, k: c_uint, shared: c_uint,
        stream: CUstream, parameters: *mut *mut c_void, extra: *mut *mut c_void
    ) => |law| {
        if law.is_wordy(f) {
            // SAFETY: the kernels that are known begin with an address and a number of words.
            let (address, words) = unsafe {
                (*(*parameters).cast::<u64>(), *(*parameters.add(1)).cast::<u64>())
            };
            law.works(stream, &[(address, 4 * words)]);
        } else {
            law.works(stream, &[]);
        }
    };
    cuModuleLoadData(a: *mut CUmodule, b: *const c_void);
    cuModuleUnload(a: CUmodule);
    cuModuleGetFunction(a: *mut CUfunction, b: CUmodule, c: *const c_char) => |law| {
        // SAFETY: the name was good enough for the driver.
        let name = unsafe { std::ffi::CStr::from_ptr(c) };
        law.function(read(a), name != c"cualloc_spin");
    };
    cuStreamCreate(a: *mut CUstream, b: c_uint) => |law| law.created(read(a), b == 0);
    cuStreamCreateWithPriority(a: *mut CUstream, b: c_uint, c: c_int)
        => |law| law.created(read(a), b == 0);
    cuStreamDestroy_v2(a: CUstream) => |law| law.destroyed(a);
    cuStreamSynchronize(a: CUstream) => |law| law.stream_done(a);
    cuStreamQuery(a: CUstream) => |law| law.stream_done(a);
    cuStreamWaitEvent(a: CUstream, b: CUevent, c: c_uint) => |law| law.waits(a, b);
    cuStreamGetCtx(a: CUstream, b: *mut CUcontext);
    cuStreamIsCapturing(a: CUstream, b: *mut CUstreamCaptureStatus);
    cuStreamGetId(a: CUstream, b: *mut c_ulonglong);
    cuStreamGetDevice(a: CUstream, b: *mut CUdevice);
    cuEventCreate(a: *mut CUevent, b: c_uint) => |law| law.event(read(a));
    cuEventRecord(a: CUevent, b: CUstream) => |law| law.records(a, b);
    cuEventQuery(a: CUevent) => |law| law.event_done(a);
    cuEventSynchronize(a: CUevent) => |law| law.event_done(a);
    cuEventDestroy_v2(a: CUevent) => |law| law.event_gone(a);
    cuThreadExchangeStreamCaptureMode(a: *mut CUstreamCaptureMode);
    cuStreamBeginCapture_v2(a: CUstream, b: CUstreamCaptureMode) => |law| law.captures(a);
    cuStreamEndCapture(a: CUstream, b: *mut CUgraph) => |law| law.captured(a);
    cuMemAddressReserve(a: *mut CUdeviceptr, b: usize, c: usize, d: CUdeviceptr, e: c_ulonglong);
    cuMemAddressFree(a: CUdeviceptr, b: usize) => |law| law.addresses_freed(a, b as u64);
    cuMemCreate(a: *mut CUmemGenericAllocationHandle, b: usize, c: *const CUmemAllocationProp, d: c_ulonglong)
        => |law| law.handle(read(a));
    cuMemRelease(a: CUmemGenericAllocationHandle) => |law| law.handle_released(a);
    cuMemMap(a: CUdeviceptr, b: usize, c: usize, d: CUmemGenericAllocationHandle, e: c_ulonglong)
        => |law| law.mapped(a, b as u64, d, c as u64);
    cuMemUnmap(a: CUdeviceptr, b: usize) => |law| law.unmapped("cuMemUnmap", a, b as u64);
    cuMemSetAccess(a: CUdeviceptr, b: usize, c: *const CUmemAccessDesc, d: usize)
        => |law| law.accessible(a, b as u64);
    cuMemGetAllocationGranularity(a: *mut usize, b: *const CUmemAllocationProp, c: CUmemAllocationGranularity_flags);
    cuMemGetAllocationPropertiesFromHandle(a: *mut CUmemAllocationProp, b: CUmemGenericAllocationHandle);
    cuMemRetainAllocationHandle(a: *mut CUmemGenericAllocationHandle, b: *mut c_void)
        => |law| law.handle_retained(read(a));
    cuMemExportToShareableHandle(a: *mut c_void, b: CUmemGenericAllocationHandle, c: CUmemAllocationHandleType, d: c_ulonglong);
    cuMemImportFromShareableHandle(a: *mut CUmemGenericAllocationHandle, b: *mut c_void, c: CUmemAllocationHandleType)
        => |law| law.handle_retained(read(a));
    cuStreamGetCaptureInfo_v2(
        a: CUstream, b: *mut CUstreamCaptureStatus, c: *mut u64, d: *mut CUgraph, e: *mut *const CUgraphNode,
        f: *mut usize
    );
    cuMemAllocAsync(a: *mut CUdeviceptr, b: usize, c: CUstream) => |law| law.works(c, &[]);
    cuMemAllocFromPoolAsync(a: *mut CUdeviceptr, b: usize, c: CUmemoryPool, d: CUstream)
        => |law| law.works(d, &[]);
    cuMemFreeAsync(a: CUdeviceptr, b: CUstream) => |law| law.works(b, &[]);
    cuMemPoolCreate(a: *mut CUmemoryPool, b: *const CUmemPoolProps);
    cuMemPoolDestroy(a: CUmemoryPool);
    cuMemPoolTrimTo(a: CUmemoryPool, b: usize);
    cuMemPoolSetAttribute(a: CUmemoryPool, b: CUmemPool_attribute, c: *mut c_void);
    cuMemPoolGetAttribute(a: CUmemoryPool, b: CUmemPool_attribute, c: *mut c_void);
    cuMemPoolExportToShareableHandle(a: *mut c_void, b: CUmemoryPool, c: CUmemAllocationHandleType, d: u64);
    cuMemPoolImportFromShareableHandle(a: *mut CUmemoryPool, b: *mut c_void, c: CUmemAllocationHandleType, d: u64);
    cuMemPoolExportPointer(a: *mut CUmemPoolPtrExportData, b: CUdeviceptr);
    cuPointerGetAttribute(a: *mut c_void, b: CUpointer_attribute, c: CUdeviceptr);
}
