//! The driver's functions, in one list from which everything else is derived, and the result of a call.

use crate::driver::sys::CUresult;

/// Result of a driver call.
pub(super) type R<T = ()> = Result<T, CUresult>;

pub(super) fn fail<T>(code: CUresult) -> R<T> {
    Err(code)
}

/// Calls the macro `$go` with every driver function as `name(argument: type, ...);`.
///
/// The types are those of `cualloc::driver::sys` and `std::ffi`, which the caller has to import.
#[doc(hidden)]
#[macro_export]
macro_rules! sim_driver_functions {
    ($go:ident) => {
        $go! {
            cuInit(flags: c_uint);
            cuDriverGetVersion(driver_version: *mut c_int);
            cuGetErrorName(error: CUresult, p_str: *mut *const c_char);
            cuGetErrorString(error: CUresult, p_str: *mut *const c_char);
            cuDeviceGetCount(count: *mut c_int);
            cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
            cuDeviceGetName(name: *mut c_char, len: c_int, dev: CUdevice);
            cuDeviceGetAttribute(pi: *mut c_int, attrib: CUdevice_attribute, dev: CUdevice);
            cuDeviceTotalMem_v2(bytes: *mut usize, dev: CUdevice);
            cuDeviceGetUuid_v2(uuid: *mut CUuuid, dev: CUdevice);
            cuDeviceGetPCIBusId(pci_bus_id: *mut c_char, len: c_int, dev: CUdevice);
            cuDeviceCanAccessPeer(can_access_peer: *mut c_int, dev: CUdevice, peer_dev: CUdevice);
            cuDevicePrimaryCtxRetain(pctx: *mut CUcontext, dev: CUdevice);
            cuDevicePrimaryCtxRelease_v2(dev: CUdevice);
            cuCtxGetCurrent(pctx: *mut CUcontext);
            cuCtxSetCurrent(ctx: CUcontext);
            cuCtxGetDevice(device: *mut CUdevice);
            cuCtxGetId(ctx: CUcontext, ctx_id: *mut u64);
            cuCtxSynchronize();
            cuCtxEnablePeerAccess(peer_context: CUcontext, flags: c_uint);
            cuMemAlloc_v2(dptr: *mut CUdeviceptr, bytesize: usize);
            cuMemFree_v2(dptr: CUdeviceptr);
            cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
            cuMemGetAddressRange_v2(pbase: *mut CUdeviceptr, psize: *mut usize, dptr: CUdeviceptr);
            cuMemHostAlloc(pp: *mut *mut c_void, bytesize: usize, flags: c_uint);
            cuMemFreeHost(p: *mut c_void);
            cuMemHostGetDevicePointer_v2(pdptr: *mut CUdeviceptr, p: *mut c_void, flags: c_uint);
            cuMemHostRegister_v2(p: *mut c_void, bytesize: usize, flags: c_uint);
            cuMemHostUnregister(p: *mut c_void);
            cuMemsetD8Async(dst_device: CUdeviceptr, uc: c_uchar, n: usize, h_stream: CUstream);
            cuMemsetD32Async(dst_device: CUdeviceptr, ui: c_uint, n: usize, h_stream: CUstream);
            cuMemcpyAsync(dst: CUdeviceptr, src: CUdeviceptr, byte_count: usize, h_stream: CUstream);
            cuMemcpyHtoDAsync_v2(dst_device: CUdeviceptr, src_host: *const c_void, byte_count: usize, h_stream: CUstream);
            cuMemcpyDtoHAsync_v2(dst_host: *mut c_void, src_device: CUdeviceptr, byte_count: usize, h_stream: CUstream);
            cuMemcpyDtoDAsync_v2(dst_device: CUdeviceptr, src_device: CUdeviceptr, byte_count: usize, h_stream: CUstream);
            cuMemcpyPeerAsync(dst_device: CUdeviceptr, dst_context: CUcontext, src_device: CUdeviceptr, src_context: CUcontext, byte_count: usize, h_stream: CUstream);
            cuStreamCreate(ph_stream: *mut CUstream, flags: c_uint);
            cuStreamCreateWithPriority(ph_stream: *mut CUstream, flags: c_uint, priority: c_int);
            cuStreamDestroy_v2(h_stream: CUstream);
            cuStreamSynchronize(h_stream: CUstream);
            cuStreamQuery(h_stream: CUstream);
            cuStreamWaitEvent(h_stream: CUstream, h_event: CUevent, flags: c_uint);
            cuStreamGetCtx(h_stream: CUstream, pctx: *mut CUcontext);
            cuStreamGetId(h_stream: CUstream, stream_id: *mut u64);
            cuStreamGetDevice(h_stream: CUstream, device: *mut CUdevice);
            cuStreamIsCapturing(h_stream: CUstream, capture_status: *mut CUstreamCaptureStatus);
            cuEventCreate(ph_event: *mut CUevent, flags: c_uint);
            cuEventRecord(h_event: CUevent, h_stream: CUstream);
            cuEventQuery(h_event: CUevent);
            cuEventSynchronize(h_event: CUevent);
            cuEventDestroy_v2(h_event: CUevent);
            cuThreadExchangeStreamCaptureMode(mode: *mut CUstreamCaptureMode);
            cuStreamBeginCapture_v2(h_stream: CUstream, mode: CUstreamCaptureMode);
            cuStreamEndCapture(h_stream: CUstream, ph_graph: *mut CUgraph);
            cuStreamGetCaptureInfo_v2(h_stream: CUstream, capture_status_out: *mut CUstreamCaptureStatus, id_out: *mut u64, graph_out: *mut CUgraph, dependencies_out: *mut *const CUgraphNode, num_dependencies_out: *mut usize);
            cuStreamGetCaptureInfo_v3(h_stream: CUstream, capture_status_out: *mut CUstreamCaptureStatus, id_out: *mut u64, graph_out: *mut CUgraph, dependencies_out: *mut *const CUgraphNode, edge_data_out: *mut *const CUgraphEdgeData, num_dependencies_out: *mut usize);
            cuStreamUpdateCaptureDependencies_v2(h_stream: CUstream, dependencies: *mut CUgraphNode, dependency_data: *const CUgraphEdgeData, num_dependencies: usize, flags: c_uint);
            cuStreamBeginCaptureToGraph(h_stream: CUstream, h_graph: CUgraph, dependencies: *const CUgraphNode, dependency_data: *const CUgraphEdgeData, num_dependencies: usize, mode: CUstreamCaptureMode);
            cuGraphCreate(ph_graph: *mut CUgraph, flags: c_uint);
            cuGraphDestroy(h_graph: CUgraph);
            cuGraphClone(ph_graph_clone: *mut CUgraph, original_graph: CUgraph);
            cuGraphAddEmptyNode(ph_graph_node: *mut CUgraphNode, h_graph: CUgraph, dependencies: *const CUgraphNode, num_dependencies: usize);
            cuGraphAddKernelNode_v2(ph_graph_node: *mut CUgraphNode, h_graph: CUgraph, dependencies: *const CUgraphNode, num_dependencies: usize, node_params: *const CUDA_KERNEL_NODE_PARAMS_v2);
            cuGraphAddMemsetNode(ph_graph_node: *mut CUgraphNode, h_graph: CUgraph, dependencies: *const CUgraphNode, num_dependencies: usize, memset_params: *const CUDA_MEMSET_NODE_PARAMS, ctx: CUcontext);
            cuGraphGetNodes(h_graph: CUgraph, nodes: *mut CUgraphNode, num_nodes: *mut usize);
            cuGraphGetEdges_v2(h_graph: CUgraph, from: *mut CUgraphNode, to: *mut CUgraphNode, edge_data: *mut CUgraphEdgeData, num_edges: *mut usize);
            cuGraphNodeGetType(h_node: CUgraphNode, kind: *mut CUgraphNodeType);
            cuGraphNodeGetDependencies(h_node: CUgraphNode, dependencies: *mut CUgraphNode, num_dependencies: *mut usize);
            cuGraphNodeGetDependencies_v2(h_node: CUgraphNode, dependencies: *mut CUgraphNode, edge_data: *mut CUgraphEdgeData, num_dependencies: *mut usize);
            cuGraphInstantiateWithFlags(ph_graph_exec: *mut CUgraphExec, h_graph: CUgraph, flags: u64);
            cuGraphLaunch(h_graph_exec: CUgraphExec, h_stream: CUstream);
            cuGraphExecUpdate_v2(h_graph_exec: CUgraphExec, h_graph: CUgraph, result_info: *mut CUgraphExecUpdateResultInfo);
            cuGraphExecDestroy(h_graph_exec: CUgraphExec);
            cuUserObjectCreate(object_out: *mut CUuserObject, ptr: *mut c_void, destroy: CUhostFn, initial_refcount: c_uint, flags: c_uint);
            cuUserObjectRetain(object: CUuserObject, count: c_uint);
            cuUserObjectRelease(object: CUuserObject, count: c_uint);
            cuGraphRetainUserObject(graph: CUgraph, object: CUuserObject, count: c_uint, flags: c_uint);
            cuGraphReleaseUserObject(graph: CUgraph, object: CUuserObject, count: c_uint);
            cuDeviceGetGraphMemAttribute(device: CUdevice, attr: CUgraphMem_attribute, value: *mut c_void);
            cuDeviceGraphMemTrim(device: CUdevice);
            cuPointerGetAttribute(data: *mut c_void, attribute: CUpointer_attribute, ptr: CUdeviceptr);
            cuPointerGetAttributes(num_attributes: c_uint, attributes: *mut CUpointer_attribute, data: *mut *mut c_void, ptr: CUdeviceptr);
            cuPointerSetAttribute(value: *const c_void, attribute: CUpointer_attribute, ptr: CUdeviceptr);
            cuMemAddressReserve(ptr: *mut CUdeviceptr, size: usize, alignment: usize, addr: CUdeviceptr, flags: u64);
            cuMemAddressFree(ptr: CUdeviceptr, size: usize);
            cuMemCreate(handle: *mut CUmemGenericAllocationHandle, size: usize, prop: *const CUmemAllocationProp, flags: u64);
            cuMemRelease(handle: CUmemGenericAllocationHandle);
            cuMemMap(ptr: CUdeviceptr, size: usize, offset: usize, handle: CUmemGenericAllocationHandle, flags: u64);
            cuMemUnmap(ptr: CUdeviceptr, size: usize);
            cuMemSetAccess(ptr: CUdeviceptr, size: usize, desc: *const CUmemAccessDesc, count: usize);
            cuMemGetAccess(flags: *mut u64, location: *const CUmemLocation, ptr: CUdeviceptr);
            cuMemGetAllocationGranularity(granularity: *mut usize, prop: *const CUmemAllocationProp, option: CUmemAllocationGranularity_flags);
            cuMemGetAllocationPropertiesFromHandle(prop: *mut CUmemAllocationProp, handle: CUmemGenericAllocationHandle);
            cuMemExportToShareableHandle(shareable_handle: *mut c_void, handle: CUmemGenericAllocationHandle, handle_type: CUmemAllocationHandleType, flags: u64);
            cuMemImportFromShareableHandle(handle: *mut CUmemGenericAllocationHandle, os_handle: *mut c_void, sh_handle_type: CUmemAllocationHandleType);
            cuMemRetainAllocationHandle(handle: *mut CUmemGenericAllocationHandle, addr: *mut c_void);
            cuMemGetHandleForAddressRange(handle: *mut c_void, dptr: CUdeviceptr, size: usize, handle_type: CUmemRangeHandleType, flags: u64);
            cuIpcGetMemHandle(p_handle: *mut CUipcMemHandle, dptr: CUdeviceptr);
            cuIpcOpenMemHandle_v2(pdptr: *mut CUdeviceptr, handle: CUipcMemHandle, flags: c_uint);
            cuIpcCloseMemHandle(dptr: CUdeviceptr);
            cuMemAllocAsync(dptr: *mut CUdeviceptr, bytesize: usize, h_stream: CUstream);
            cuMemAllocFromPoolAsync(dptr: *mut CUdeviceptr, bytesize: usize, pool: CUmemoryPool, h_stream: CUstream);
            cuMemFreeAsync(dptr: CUdeviceptr, h_stream: CUstream);
            cuMemPoolCreate(pool: *mut CUmemoryPool, pool_props: *const CUmemPoolProps);
            cuMemPoolDestroy(pool: CUmemoryPool);
            cuMemPoolTrimTo(pool: CUmemoryPool, min_bytes_to_keep: usize);
            cuMemPoolSetAttribute(pool: CUmemoryPool, attr: CUmemPool_attribute, value: *mut c_void);
            cuMemPoolGetAttribute(pool: CUmemoryPool, attr: CUmemPool_attribute, value: *mut c_void);
            cuMemPoolSetAccess(pool: CUmemoryPool, map: *const CUmemAccessDesc, count: usize);
            cuMemPoolGetAccess(flags: *mut CUmemAccess_flags, mem_pool: CUmemoryPool, location: *mut CUmemLocation);
            cuDeviceGetDefaultMemPool(pool_out: *mut CUmemoryPool, dev: CUdevice);
            cuDeviceGetMemPool(pool: *mut CUmemoryPool, dev: CUdevice);
            cuDeviceSetMemPool(dev: CUdevice, pool: CUmemoryPool);
            cuMemPoolExportToShareableHandle(handle_out: *mut c_void, pool: CUmemoryPool, handle_type: CUmemAllocationHandleType, flags: u64);
            cuMemPoolImportFromShareableHandle(pool_out: *mut CUmemoryPool, handle: *mut c_void, handle_type: CUmemAllocationHandleType, flags: u64);
            cuMemPoolExportPointer(share_data_out: *mut CUmemPoolPtrExportData, ptr: CUdeviceptr);
            cuMemPoolImportPointer(ptr_out: *mut CUdeviceptr, pool: CUmemoryPool, share_data: *mut CUmemPoolPtrExportData);
            cuModuleLoadData(module: *mut CUmodule, image: *const c_void);
            cuModuleUnload(hmod: CUmodule);
            cuModuleGetFunction(hfunc: *mut CUfunction, hmod: CUmodule, name: *const c_char);
            cuLaunchKernel(f: CUfunction, grid_dim_x: c_uint, grid_dim_y: c_uint, grid_dim_z: c_uint, block_dim_x: c_uint, block_dim_y: c_uint, block_dim_z: c_uint, shared_mem_bytes: c_uint, h_stream: CUstream, kernel_params: *mut *mut c_void, extra: *mut *mut c_void);
            cuLaunchHostFunc(h_stream: CUstream, func: CUhostFn, user_data: *mut c_void);        }
    };
}

macro_rules! calls {
    ($($name:ident($($arg:ident: $ty:ty),*);)*) => {
        /// One driver function.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        #[allow(non_camel_case_types)]
        pub(super) enum Call { $($name),* }

        /// The names of all functions, in the order of [`Call`].
        pub(super) const NAMES: &[&str] = &[$(stringify!($name)),*];
    };
}
sim_driver_functions!(calls);

impl Call {
    /// The exported name.
    pub(super) fn name(self) -> &'static str {
        NAMES[self as usize]
    }

    /// The function of that name.
    pub(super) fn index_of(name: &str) -> Option<usize> {
        NAMES.iter().position(|known| *known == name)
    }

    /// Queries excluded from counts, because callers make them in every operation.
    pub(super) fn is_uncounted(self) -> bool {
        matches!(
            self,
            Call::cuStreamGetId | Call::cuStreamIsCapturing | Call::cuCtxGetCurrent
        )
    }
}
