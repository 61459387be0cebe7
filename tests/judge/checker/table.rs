//! The judge's place: the function table between the allocator and the driver.
//!
//! Every function that the allocator calls passes here. A call may be made to fail, with or without being executed,
//! and another thread's action may run just before or after it. The judge notes what a call did: all of it when the
//! call succeeded, all but observed completions when it was executed and reported an error. Calls pass one
//! at a time, so that the judge notes them in the order in which they happened.

use std::cell::{Cell, RefCell};
use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cualloc::driver::sys::*;
use cualloc::sim::Leaks;

use super::tracker::{Request, Tracker};
use crate::common::{lost, rng::Rng};

/// Calls of a name, or of any if it is empty, that fail now and then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    pub name: &'static str,
    pub permille: u64,
    pub code: CUresult,
    /// The call is executed before it reports the code.
    pub executed: bool,
}

/// The judge of one program.
pub struct Checker {
    tracker: Mutex<Tracker>,
    real: CuFunctions,
    order: Mutex<()>,
    fault: Mutex<Option<Fault>>,
    failing: AtomicBool,
    dice: AtomicU64,
    pub failed: AtomicU64,
    pub calls: AtomicU64,
    /// Objects that faults keep the caller from destroying, at most.
    lost: Mutex<Leaks>,
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
    static CHECKER: RefCell<Option<Arc<Checker>>> = const { RefCell::new(None) };
    /// The program's own calls, not those of the allocator.
    static OWN: Cell<bool> = const { Cell::new(false) };
    static INSIDE: Cell<bool> = const { Cell::new(false) };
    static NEXT: RefCell<Option<Interlude>> = const { RefCell::new(None) };
    static REQUEST: Cell<Option<Request>> = const { Cell::new(None) };
}

/// The judge of the calling thread.
fn judge() -> Option<Arc<Checker>> {
    CHECKER.try_with(|checker| checker.borrow().clone()).ok()?
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Checker {
    pub fn new(real: CuFunctions, seed: u64) -> Arc<Checker> {
        Arc::new(Checker {
            tracker: Mutex::new(Tracker::new(real)),
            real,
            order: Mutex::new(()),
            fault: Mutex::new(None),
            failing: AtomicBool::new(false),
            dice: AtomicU64::new(seed),
            failed: AtomicU64::new(0),
            calls: AtomicU64::new(0),
            lost: Mutex::default(),
        })
    }

    /// Makes it the judge of this thread's calls.
    pub fn enter(self: &Arc<Checker>) {
        CHECKER.set(Some(Arc::clone(self)));
    }

    pub fn leave() {
        CHECKER.set(None);
        NEXT.set(None);
    }

    pub fn tracker(&self) -> MutexGuard<'_, Tracker> {
        locked(&self.tracker)
    }

    /// Has calls fail from now on, or none.
    pub fn fail(&self, fault: Option<Fault>) {
        *locked(&self.fault) = fault;
        self.failing.store(fault.is_some(), Ordering::Relaxed);
    }

    pub fn is_failing(&self) -> bool {
        self.failing.load(Ordering::Relaxed)
    }

    /// The fault of a call that is about to be made, if it has one.
    fn fault_of(&self, name: &str) -> Option<Fault> {
        let fault = (*locked(&self.fault))?;
        let chance = || {
            let seed = self.dice.fetch_add(1, Ordering::Relaxed);
            Rng::new(seed.wrapping_mul(0x5851_f42d_4c95_7f2d)).below(1000)
        };
        let hit = fault.name.is_empty() || fault.name == name;
        if !hit || chance() >= fault.permille {
            return None;
        }
        self.failed.fetch_add(1, Ordering::Relaxed);
        lost::count(&mut locked(&self.lost), name, fault.executed);
        Some(fault)
    }

    /// How much memory faults may have left behind.
    pub fn lost_memory(&self) -> usize {
        let lost = locked(&self.lost);
        lost.handles + lost.allocations
    }

    /// What exists in the end and is no consequence of faults.
    pub fn unexplained(&self, found: Leaks) -> Leaks {
        lost::unexplained(found, &locked(&self.lost))
    }
}

/// Whether a call only tells the host what is complete, which it does not when it reports an error.
fn observes(name: &str) -> bool {
    matches!(
        name,
        "cuStreamSynchronize"
            | "cuStreamQuery"
            | "cuEventSynchronize"
            | "cuEventQuery"
            | "cuCtxSynchronize"
    )
}

/// The judge of this thread.
pub fn checker() -> Arc<Checker> {
    CHECKER.with_borrow(Clone::clone).expect("a judged thread")
}

/// Makes calls that are the program's own: they do not fail, and nothing happens inside them.
pub fn own<T>(act: impl FnOnce(&CuFunctions) -> T) -> T {
    let table = install(checker().real);
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

/// Makes a request of the allocator whose waits are judged, unless something else happens inside its calls.
pub fn requesting<T>(request: Request, act: impl FnOnce() -> T) -> T {
    let quiet = NEXT.with_borrow(Option::is_none) && !checker().is_failing();
    REQUEST.set(quiet.then_some(request));
    let result = act();
    REQUEST.set(None);
    result
}

/// The request under way takes memory from the driver.
fn grows(bytes: usize) {
    if let Some(mut request) = REQUEST.get() {
        request.room = request.room.saturating_sub(bytes as u64);
        REQUEST.set(Some(request));
    }
}

/// A stream waits for an event.
fn waits(tracker: &mut Tracker, stream: CUstream, event: CUevent) {
    if let Some(request) = REQUEST.get()
        && !OWN.get()
    {
        tracker.judge_wait(stream, event, &request);
    }
    tracker.waits(stream, event);
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
    note: impl FnOnce(&mut Tracker),
) -> CUresult {
    let Some(checker) = judge() else {
        return CUresult::CUDA_ERROR_DEINITIALIZED;
    };
    checker.calls.fetch_add(1, Ordering::Relaxed);
    interlude(name, false);
    let fault = match !OWN.get() && checker.is_failing() {
        true => checker.fault_of(name),
        false => None,
    };
    if let Some(refused) = fault.filter(|fault| !fault.executed) {
        return refused.code;
    }
    let nested = INSIDE.replace(true);
    // A callback inside a call may call again.
    let order = (!nested).then(|| locked(&checker.order));
    let code = call(&checker.real);
    // The end of a spoilt capture is an end.
    let ended = code == CUresult::CUDA_SUCCESS || name == "cuStreamEndCapture";
    if ended && !(fault.is_some() && observes(name)) {
        note(&mut checker.tracker());
    }
    drop(order);
    INSIDE.set(nested);
    interlude(name, true);
    fault.map_or(code, |fault| fault.code)
}

macro_rules! table {
    ($($name:ident($($argument:ident: $type:ty),*) $(=> $note:expr)?;)*) => {
        $(#[allow(non_snake_case, clippy::too_many_arguments)]
        unsafe extern "C" fn $name($($argument: $type),*) -> CUresult {
            // SAFETY: the caller's arguments, to the function whose name this is.
            pass(stringify!($name), |real| unsafe { real.$name.unwrap()($($argument),*) }, |_tracker| {
                $(
                    let note: &dyn Fn(&mut Tracker) = &$note;
                    note(_tracker);
                )?
            })
        })*

        /// The table with the judge before it.
        pub fn install(functions: CuFunctions) -> CuFunctions {
            CuFunctions {
                $($name: functions.$name.and(Some($name)),)*
                cuUserObjectCreate: functions.cuUserObjectCreate.and(Some(create_object)),
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

/// Nodes that a call passes.
fn nodes(list: *const CUgraphNode, count: usize) -> Vec<u64> {
    // SAFETY: the call succeeded, so the array has this many elements.
    (0..count)
        .map(|at| unsafe { *list.add(at) } as u64)
        .collect()
}

/// The same, and whether each is complete before what depends on it begins.
fn dependencies(
    list: *const CUgraphNode,
    edges: *const CUgraphEdgeData,
    count: usize,
) -> Vec<(u64, bool)> {
    let whole = |at: usize| {
        // SAFETY: as above, if there is an array.
        edges.is_null() || unsafe { ((*edges.add(at)).type_, (*edges.add(at)).from_port) } == (0, 0)
    };
    let nodes = nodes(list, count).into_iter().enumerate();
    nodes.map(|(at, node)| (node, whole(at))).collect()
}

/// The flag of dependencies that are added to those that there are.
const ADD: c_uint = CUstreamUpdateCaptureDependencies_flags::CU_STREAM_ADD_CAPTURE_DEPENDENCIES.0;

/// What the driver is to call at the end of a user object.
struct Over {
    checker: Arc<Checker>,
    token: u64,
    then: CUhostFn,
    data: *mut c_void,
}

unsafe extern "C" fn over(object: *mut c_void) {
    // SAFETY: made for the one object whose function this is.
    let Over {
        checker,
        token,
        then,
        data,
    } = *unsafe { Box::from_raw(object.cast::<Over>()) };
    checker.tracker().object_over(token);
    if let Some(then) = then {
        // SAFETY: the creator's own function and data, once.
        unsafe { then(data) };
    }
}

/// The judge hears of an object's end before its creator does.
unsafe extern "C" fn create_object(
    object: *mut CUuserObject,
    data: *mut c_void,
    then: CUhostFn,
    references: c_uint,
    flags: c_uint,
) -> CUresult {
    static TOKENS: AtomicU64 = AtomicU64::new(1);
    let token = TOKENS.fetch_add(1, Ordering::Relaxed);
    let Some(checker) = judge() else {
        return CUresult::CUDA_ERROR_DEINITIALIZED;
    };
    let own = Box::into_raw(Box::new(Over {
        checker,
        token,
        then,
        data,
    }));
    let made = Cell::new(false);
    let create = |real: &CuFunctions| {
        // SAFETY: the caller's arguments, but for a function that calls the caller's.
        let code = unsafe {
            real.cuUserObjectCreate.unwrap()(
                object,
                own.cast(),
                then.and(Some(over)),
                references,
                flags,
            )
        };
        made.set(code == CUresult::CUDA_SUCCESS);
        code
    };
    let code = pass("cuUserObjectCreate", create, |tracker| {
        tracker.object(read(object), token);
    });
    if !made.get() {
        // SAFETY: no other code has the handle.
        drop(unsafe { Box::from_raw(own) });
    }
    code
}

table! {
    cuCtxGetCurrent(a: *mut CUcontext);
    cuCtxSetCurrent(a: CUcontext);
    cuCtxGetDevice(a: *mut CUdevice);
    cuCtxSynchronize() => |tracker| tracker.context_done();
    cuCtxGetId(a: CUcontext, b: *mut c_ulonglong);
    cuMemAlloc_v2(a: *mut CUdeviceptr, b: usize) => |tracker| {
        grows(b);
        tracker.segment(read(a), b as u64);
    };
    cuMemFree_v2(a: CUdeviceptr) => |tracker| tracker.segment_freed(a);
    cuMemGetInfo_v2(a: *mut usize, b: *mut usize);
    cuMemHostAlloc(a: *mut *mut c_void, b: usize, c: c_uint);
    cuMemFreeHost(a: *mut c_void);
    cuMemHostRegister_v2(a: *mut c_void, b: usize, c: c_uint);
    cuMemHostUnregister(a: *mut c_void);
    cuMemsetD8Async(a: CUdeviceptr, b: c_uchar, c: usize, d: CUstream)
        => |tracker| tracker.works(d, &[(a, c as u64)]);
    cuMemsetD32Async(a: CUdeviceptr, b: c_uint, c: usize, d: CUstream)
        => |tracker| tracker.works(d, &[(a, 4 * c as u64)]);
    cuMemcpyAsync(a: CUdeviceptr, b: CUdeviceptr, c: usize, d: CUstream)
        => |tracker| tracker.works(d, &[(a, c as u64), (b, c as u64)]);
    cuMemcpyHtoDAsync_v2(a: CUdeviceptr, b: *const c_void, c: usize, d: CUstream)
        => |tracker| tracker.works(d, &[(a, c as u64)]);
    cuMemcpyDtoHAsync_v2(a: *mut c_void, b: CUdeviceptr, c: usize, d: CUstream)
        => |tracker| tracker.works(d, &[(b, c as u64)]);
    cuMemcpyDtoDAsync_v2(a: CUdeviceptr, b: CUdeviceptr, c: usize, d: CUstream)
        => |tracker| tracker.works(d, &[(a, c as u64), (b, c as u64)]);
    cuMemcpyPeerAsync(a: CUdeviceptr, b: CUcontext, c: CUdeviceptr, d: CUcontext, e: usize, f: CUstream)
        => |tracker| tracker.works(f, &[(a, e as u64), (c, e as u64)]);
    cuLaunchKernel(
        f: CUfunction, x: c_uint, y: c_uint, z: c_uint, i: c_uint, j: c_uint, k: c_uint, shared: c_uint,
        stream: CUstream, parameters: *mut *mut c_void, extra: *mut *mut c_void
    ) => |tracker| {
        if tracker.is_wordy(f) {
            // SAFETY: the kernels that are known begin with an address and a number of words.
            let (address, words) = unsafe {
                (*(*parameters).cast::<u64>(), *(*parameters.add(1)).cast::<u64>())
            };
            tracker.works(stream, &[(address, 4 * words)]);
        } else {
            tracker.works(stream, &[]);
        }
    };
    cuModuleLoadData(a: *mut CUmodule, b: *const c_void);
    cuModuleUnload(a: CUmodule);
    cuModuleGetFunction(a: *mut CUfunction, b: CUmodule, c: *const c_char) => |tracker| {
        // SAFETY: the name was good enough for the driver.
        let name = unsafe { std::ffi::CStr::from_ptr(c) };
        tracker.function(read(a), name != c"cualloc_spin");
    };
    cuStreamCreate(a: *mut CUstream, b: c_uint) => |tracker| tracker.created(read(a), b == 0);
    cuStreamCreateWithPriority(a: *mut CUstream, b: c_uint, c: c_int)
        => |tracker| tracker.created(read(a), b == 0);
    cuStreamDestroy_v2(a: CUstream) => |tracker| tracker.destroyed(a);
    cuStreamSynchronize(a: CUstream) => |tracker| tracker.stream_done(a);
    cuStreamQuery(a: CUstream) => |tracker| tracker.stream_done(a);
    cuStreamWaitEvent(a: CUstream, b: CUevent, c: c_uint) => |tracker| waits(tracker, a, b);
    cuStreamGetCtx(a: CUstream, b: *mut CUcontext);
    cuStreamIsCapturing(a: CUstream, b: *mut CUstreamCaptureStatus);
    cuStreamGetId(a: CUstream, b: *mut c_ulonglong);
    cuStreamGetDevice(a: CUstream, b: *mut CUdevice);
    cuEventCreate(a: *mut CUevent, b: c_uint) => |tracker| tracker.event(read(a));
    cuEventRecord(a: CUevent, b: CUstream) => |tracker| tracker.records(a, b);
    cuEventQuery(a: CUevent) => |tracker| tracker.event_done(a);
    cuEventSynchronize(a: CUevent) => |tracker| tracker.event_done(a);
    cuEventDestroy_v2(a: CUevent) => |tracker| tracker.event_gone(a);
    cuThreadExchangeStreamCaptureMode(a: *mut CUstreamCaptureMode);
    cuStreamBeginCapture_v2(a: CUstream, b: CUstreamCaptureMode) => |tracker| tracker.captures(a, None);
    cuStreamBeginCaptureToGraph(
        a: CUstream, b: CUgraph, c: *const CUgraphNode, d: *const CUgraphEdgeData, e: usize, f: CUstreamCaptureMode
    ) => |tracker| tracker.captures(a, Some((b, dependencies(c, d, e))));
    cuStreamEndCapture(a: CUstream, b: *mut CUgraph) => |tracker| tracker.captured(a, || read(b));
    cuStreamUpdateCaptureDependencies_v2(
        a: CUstream, b: *mut CUgraphNode, c: *const CUgraphEdgeData, d: usize, e: c_uint
    ) => |tracker| tracker.depends(a, &dependencies(b, c, d), e == ADD);
    cuGraphCreate(a: *mut CUgraph, b: c_uint) => |tracker| tracker.graph(read(a));
    cuGraphDestroy(a: CUgraph) => |tracker| tracker.graph_destroyed(a);
    cuGraphClone(a: *mut CUgraph, b: CUgraph) => |tracker| tracker.graph_cloned(read(a), b);
    cuGraphAddEmptyNode(a: *mut CUgraphNode, b: CUgraph, c: *const CUgraphNode, d: usize)
        => |tracker| tracker.node(b, read(a), &nodes(c, d), &[]);
    cuGraphAddMemsetNode(
        a: *mut CUgraphNode, b: CUgraph, c: *const CUgraphNode, d: usize, e: *const CUDA_MEMSET_NODE_PARAMS,
        f: CUcontext
    ) => |tracker| {
        let fill = read(e);
        let bytes = fill.elementSize as usize * fill.width * fill.height;
        tracker.node(b, read(a), &nodes(c, d), &[(fill.dst, bytes as u64)]);
    };
    cuGraphInstantiateWithFlags(a: *mut CUgraphExec, b: CUgraph, c: c_ulonglong)
        => |tracker| tracker.instantiated(read(a), b);
    cuGraphExecUpdate_v2(a: CUgraphExec, b: CUgraph, c: *mut CUgraphExecUpdateResultInfo)
        => |tracker| tracker.updated(a, b);
    cuGraphExecDestroy(a: CUgraphExec) => |tracker| tracker.exec_destroyed(a);
    cuGraphLaunch(a: CUgraphExec, b: CUstream) => |tracker| tracker.launched(a, b);
    cuGraphRetainUserObject(a: CUgraph, b: CUuserObject, c: c_uint, d: c_uint)
        => |tracker| tracker.object_retained(a, b);
    cuLaunchHostFunc(a: CUstream, b: CUhostFn, c: *mut c_void) => |tracker| tracker.works(a, &[]);
    cuMemAddressReserve(a: *mut CUdeviceptr, b: usize, c: usize, d: CUdeviceptr, e: c_ulonglong);
    cuMemAddressFree(a: CUdeviceptr, b: usize) => |tracker| tracker.addresses_freed(a, b as u64);
    cuMemCreate(a: *mut CUmemGenericAllocationHandle, b: usize, c: *const CUmemAllocationProp, d: c_ulonglong)
        => |tracker| {
            grows(b);
            tracker.handle(read(a));
        };
    cuMemRelease(a: CUmemGenericAllocationHandle) => |tracker| tracker.handle_released(a);
    cuMemMap(a: CUdeviceptr, b: usize, c: usize, d: CUmemGenericAllocationHandle, e: c_ulonglong)
        => |tracker| tracker.mapped(a, b as u64, d, c as u64);
    cuMemUnmap(a: CUdeviceptr, b: usize) => |tracker| tracker.unmapped("cuMemUnmap", a, b as u64);
    cuMemSetAccess(a: CUdeviceptr, b: usize, c: *const CUmemAccessDesc, d: usize)
        => |tracker| tracker.accessible(a, b as u64);
    cuMemGetAllocationGranularity(a: *mut usize, b: *const CUmemAllocationProp, c: CUmemAllocationGranularity_flags);
    cuMemGetAllocationPropertiesFromHandle(a: *mut CUmemAllocationProp, b: CUmemGenericAllocationHandle);
    cuMemRetainAllocationHandle(a: *mut CUmemGenericAllocationHandle, b: *mut c_void)
        => |tracker| tracker.handle_retained(read(a));
    cuMemExportToShareableHandle(a: *mut c_void, b: CUmemGenericAllocationHandle, c: CUmemAllocationHandleType, d: c_ulonglong);
    cuMemImportFromShareableHandle(a: *mut CUmemGenericAllocationHandle, b: *mut c_void, c: CUmemAllocationHandleType)
        => |tracker| tracker.handle_retained(read(a));
    cuStreamGetCaptureInfo_v2(
        a: CUstream, b: *mut CUstreamCaptureStatus, c: *mut u64, d: *mut CUgraph, e: *mut *const CUgraphNode,
        f: *mut usize
    );
    cuStreamGetCaptureInfo_v3(
        a: CUstream, b: *mut CUstreamCaptureStatus, c: *mut u64, d: *mut CUgraph, e: *mut *const CUgraphNode,
        f: *mut *const CUgraphEdgeData, g: *mut usize
    );
    cuGraphNodeGetDependencies_v2(a: CUgraphNode, b: *mut CUgraphNode, c: *mut CUgraphEdgeData, d: *mut usize);
    cuUserObjectRelease(a: CUuserObject, b: c_uint);
    cuMemAllocAsync(a: *mut CUdeviceptr, b: usize, c: CUstream) => |tracker| tracker.works(c, &[]);
    cuMemAllocFromPoolAsync(a: *mut CUdeviceptr, b: usize, c: CUmemoryPool, d: CUstream)
        => |tracker| tracker.works(d, &[]);
    cuMemFreeAsync(a: CUdeviceptr, b: CUstream) => |tracker| tracker.works(b, &[]);
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
