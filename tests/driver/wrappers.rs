//! Every wrapper passes its arguments to the right function in the right places: the fake driver
//! refuses anything else.

use crate::common::{Fake, library, open};
use cualloc::driver::{
    Context, Dependency, Device, Event, Graph, HostMemory, MemoryPool, MemoryProperties, Module,
    PoolProperties, Stream, UserObject, sys,
};
use std::collections::HashSet;
use std::ffi::c_void;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr;

const A: u64 = 0xa000;
const B: u64 = 0xb000;
const HANDLE: u64 = 0xf000;
const POSIX: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

fn host() -> *mut c_void {
    ptr::without_provenance_mut(0xc000)
}

fn stream() -> sys::CUstream {
    ptr::without_provenance_mut(0xd000)
}

fn standard_input() -> BorrowedFd<'static> {
    // SAFETY: nothing in this program closes it.
    unsafe { BorrowedFd::borrow_raw(0) }
}

unsafe extern "C" fn add_one(data: *mut c_void) {
    // SAFETY: the test passes a counter.
    unsafe { *data.cast::<u32>() += 1 };
}

#[test]
fn wrappers_pass_their_arguments_in_place() {
    let Some((_folder, path)) = library(Fake::default()) else {
        return;
    };
    let driver = open(path).unwrap();
    let devices = [driver.device(0).unwrap(), driver.device(1).unwrap()];
    let zero = Context::primary(&devices[0]).unwrap();
    let one = Context::primary(&devices[1]).unwrap();
    let entered = one.enter().unwrap();

    // SAFETY: the fake driver never looks behind a handle or an address.
    unsafe {
        let event = Event::from_raw(&one, ptr::without_provenance_mut(0xe000));
        entered.record(&event, stream()).unwrap();
        entered.stream_wait(stream(), &event).unwrap();
        entered.memset_d8(A, 2, 3, stream()).unwrap();
        entered.memset_d32(A, 0x1234_5678, 3, stream()).unwrap();
        entered.copy(A, B, 3, stream()).unwrap();
        entered.copy_host_to_device(A, host(), 3, stream()).unwrap();
        entered.copy_device_to_host(host(), A, 3, stream()).unwrap();
        entered.copy_device_to_device(A, B, 3, stream()).unwrap();
        entered.copy_peer(A, &zero, B, &one, 3, stream()).unwrap();
        entered.mem_free(A).unwrap();
    }
    let how = HostMemory {
        portable: true,
        write_combined: true,
        ..Default::default()
    };
    let address = entered.host_allocation(3, how).unwrap().ptr();
    assert_eq!(address.as_ptr(), host());
    let memory = entered.context().mem_info().unwrap();
    assert_eq!((memory.free, memory.total), (5, 7));
    virtual_memory(&one, &devices);
    sharing(&one);
    pools(&one, &devices);
    kernels_and_captures(&one);

    // Every checked function was called: a function missing here would be untested.
    drop(entered);
    let calls = driver.calls();
    let untested: HashSet<&str> = crate::common::CHECKED_CALLS
        .lines()
        .filter_map(|line| line.strip_prefix("CUresult "))
        .filter_map(|line| line.split('(').next())
        .filter(|name| calls.get(name) == 0)
        .collect();
    assert!(untested.is_empty(), "{untested:?}");
}

fn virtual_memory(context: &Context, devices: &[Device]) {
    let entered = context.enter().unwrap();
    let properties = MemoryProperties {
        device: context.device().raw(),
        export: POSIX,
        gpu_direct_rdma: true,
    };
    assert_eq!(entered.granularity(&properties).unwrap(), 3);
    assert_eq!(entered.address_reserve(3, 4, B).unwrap(), A);
    assert!(entered.has_access(A, context.device()).unwrap());
    // SAFETY: the fake driver never looks behind a handle or an address.
    unsafe {
        entered.mem_map(A, 3, HANDLE).unwrap();
        entered.set_access(A, 3, devices).unwrap();
        entered.mem_unmap(A, 3).unwrap();
        entered.address_free(A, 3).unwrap();
    }
}

fn sharing(context: &Context) {
    let entered = context.enter().unwrap();
    assert_eq!(entered.retain_handle(A).unwrap(), HANDLE);
    // SAFETY: the fake driver never looks behind a handle.
    let fd = unsafe { entered.export_fd(HANDLE) }.unwrap();
    fd.as_fd().try_clone_to_owned().unwrap();
    assert_eq!(entered.import_fd(standard_input()).unwrap(), HANDLE);
    entered.dma_buf(A, 3).unwrap();
}

fn pools(context: &Context, devices: &[Device]) {
    let properties = PoolProperties {
        device: context.device().raw(),
        export: POSIX,
        max_bytes: 3,
    };
    let pool = MemoryPool::new(context, &properties).unwrap();
    let threshold = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    pool.set(threshold, u64::MAX - 1).unwrap();
    assert_eq!(pool.get(threshold).unwrap(), u64::MAX - 1);
    let policy = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC;
    for value in [1, 0] {
        pool.set(policy, value).unwrap();
        assert_eq!(pool.get(policy).unwrap(), value);
    }
    pool.trim_to(3).unwrap();
    pool.set_access(devices, true).unwrap();
    assert!(pool.has_access(context.device()).unwrap());
    pool.export_fd().unwrap();
    pool.export_pointer(A).unwrap();
    let entered = context.enter().unwrap();
    // SAFETY: the fake driver never looks behind a handle or an address.
    unsafe {
        let address = entered.mem_alloc_from_pool(3, &pool, stream()).unwrap();
        assert_eq!(address, A);
        entered.mem_free_async(A, stream()).unwrap();
    }
    // Ours and the imported one are destroyed, the device's is not.
    let imported = MemoryPool::import_fd(context, standard_input()).unwrap();
    let default = MemoryPool::default_of(context).unwrap();
    drop((pool, imported, default));
    assert_eq!(context.driver().calls().get("cuMemPoolDestroy"), 2);
}

fn kernels_and_captures(context: &Context) {
    let entered = context.enter().unwrap();
    let module = Module::from_ptx(context, c"PTX").unwrap();
    let function = module.function(c"k").unwrap();
    drop(module);
    let (mut value, mut ran) = (42_i32, 0_u32);
    let data = ptr::from_mut(&mut ran).cast();
    let mut parameters = [ptr::from_mut(&mut value).cast()];
    // SAFETY: the fake driver reads the first parameter, calls the function immediately, and never dereferences a
    // handle.
    unsafe {
        entered
            .launch(
                &function,
                [1, 2, 3],
                [4, 5, 6],
                7,
                stream(),
                &mut parameters,
            )
            .unwrap();
        entered.launch_host(stream(), add_one, data).unwrap();
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        let captured = Stream::from_raw(context, stream()).unwrap();
        captured.begin_capture(mode).unwrap();
        assert_eq!(captured.capture_id().unwrap(), Some(11));
        assert_eq!(Stream::legacy(context).capture_id().unwrap(), None);
        let graph = captured.end_capture().unwrap();
        entered
            .on_graph_destroyed(graph.raw(), add_one, data)
            .unwrap();
        graphs(&captured, graph, mode);
    }
    assert_eq!(ran, 1);
    assert_eq!(context.driver().calls().get("cuModuleUnload"), 0);
    drop(function);
    assert_eq!(context.driver().calls().get("cuModuleUnload"), 1);
}

/// # Safety
/// The driver is the fake one.
unsafe fn graphs(stream: &Stream, mut graph: Graph, mode: sys::CUstreamCaptureMode) {
    let context = stream.context();
    let driver = context.driver();
    let info = stream.capture_info().unwrap().unwrap();
    assert_eq!((info.id, info.graph), (11, graph.raw()));
    let (ordinary, programmatic) = (info.dependencies[0], info.dependencies[1]);
    assert!(ordinary.is_complete() && !programmatic.is_complete());
    assert_eq!(
        (programmatic.edge.type_, programmatic.edge.from_port),
        (1, 1)
    );
    assert_eq!(Stream::legacy(context).capture_info().unwrap(), None);
    let node = ordinary.node;
    let by_hand = Dependency::on(node).with_edge(programmatic.edge);
    // SAFETY: the fake driver never looks behind a handle.
    unsafe { driver.set_capture_dependencies(stream.raw(), &[by_hand], false) }.unwrap();

    // Five dependencies are more than the first question has room for.
    assert_eq!(graph.nodes().unwrap(), [node]);
    let edges = graph.edges().unwrap();
    assert_eq!(edges.len(), 5);
    assert!(edges.iter().all(|(later, _)| *later == node));
    assert_eq!(edges[4].1.edge.type_, 1);
    // SAFETY: as above.
    unsafe {
        assert_eq!(graph.add_empty(&[]).unwrap(), node);
        assert_eq!(graph.add_memset(&[node], 0x700_0000, 9, 3).unwrap(), node);
    }

    let object = UserObject::new(context, || {}).unwrap();
    graph.retain(&object).unwrap();
    drop(object);
    let mut exec = graph.instantiate().unwrap();
    exec.update(&graph.try_clone().unwrap()).unwrap();
    // SAFETY: as above.
    unsafe { exec.launch(stream) }.unwrap();
    drop(exec);
    let into = Graph::new(context).unwrap();
    let destroyed = driver.calls().get("cuGraphDestroy");
    // SAFETY: as above.
    unsafe { stream.begin_capture_into(into, &[ordinary], mode) }.unwrap();
    assert_eq!(
        driver.calls().get("cuGraphDestroy"),
        destroyed,
        "it is the capture's"
    );
    drop(stream.end_capture().unwrap());
    drop(stream.capture(mode).unwrap());
    drop(stream.capture(mode).unwrap().end().unwrap());
    drop(graph);
    let calls = driver.calls();
    assert_eq!(calls.get("cuGraphDestroy"), destroyed + 4);
    assert_eq!(calls.get("cuStreamEndCapture"), 4);
    assert_eq!(calls.get("cuGraphExecDestroy"), 1);
    assert_eq!(calls.get("cuUserObjectRelease"), 1);
}
