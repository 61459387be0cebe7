//! The functions of the driver: which are required, and which are available.

use super::sys;

macro_rules! symbols {
    (
        required: { $($required:ident)* }
        $($(#[doc = $doc:literal])* $feature:ident: { $($optional:ident)* })*
    ) => {
        /// A group of driver functions that are usable only together, and only if the driver exports all of them
        /// ([`Driver::has`](super::Driver::has)). Whether a *device* supports them is a separate question.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[non_exhaustive]
        pub enum Feature { $($(#[doc = $doc])* $feature,)* }

        impl Feature {
            /// All of them.
            pub const ALL: &[Feature] = &[$(Feature::$feature,)*];
        }

        /// One variant per function of the table, named as the function.
        #[allow(non_camel_case_types, clippy::upper_case_acronyms, clippy::enum_variant_names)]
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        #[repr(u16)]
        pub(super) enum Call { $($required,)* $($($optional,)*)* }

        /// Every function of the table, in the order of [`Call`].
        pub(super) static SYMBOLS: &[Symbol] = &SYMBOL_LIST;
        pub(super) const SYMBOL_LIST: [Symbol; SYMBOL_COUNT] = [
            $(Symbol { name: stringify!($required), feature: None },)*
            $($(Symbol { name: stringify!($optional), feature: Some(Feature::$feature) },)*)*
        ];
        pub(super) const SYMBOL_COUNT: usize =
            [$(stringify!($required),)* $($(stringify!($optional),)*)*].len();

        /// Returns which functions are available, in the order of [`Call`].
        pub(super) fn present(functions: &sys::CuFunctions) -> [bool; SYMBOL_COUNT] {
            let mut there = [false; SYMBOL_COUNT];
            $(there[Call::$required as usize] = functions.$required.is_some();)*
            $($(there[Call::$optional as usize] = functions.$optional.is_some();)*)*
            there
        }

        /// Fills a table from a shared library. Absent functions stay null; the errors of absent required ones are
        /// returned with the table.
        ///
        /// # Safety
        /// The library's exports under these names must have the types of the bindings.
        pub(super) unsafe fn read_library(
            library: &libloading::Library,
        ) -> (sys::CuFunctions, Option<(&'static str, libloading::Error)>) {
            let mut functions = sys::CuFunctions::default();
            let mut missing = None;
            $(
                // SAFETY: the caller guarantees the type of the symbol.
                match unsafe { library.get(concat!(stringify!($required), "\0")) } {
                    Ok(symbol) => functions.$required = *symbol,
                    Err(error) if missing.is_none() => {
                        missing = Some((stringify!($required), error));
                    }
                    Err(_) => {}
                }
            )*
            $($(
                // SAFETY: the caller guarantees the type of the symbol.
                if let Ok(symbol) = unsafe { library.get(concat!(stringify!($optional), "\0")) } {
                    functions.$optional = *symbol;
                }
            )*)*
            (functions, missing)
        }
    };
}

symbols! {
    required: {
        cuInit cuDriverGetVersion cuGetErrorName cuGetErrorString
        cuDeviceGetCount cuDeviceGet cuDeviceGetName cuDeviceGetAttribute cuDeviceTotalMem_v2
        cuDevicePrimaryCtxRetain cuCtxGetCurrent cuCtxSetCurrent cuCtxGetDevice cuCtxSynchronize
        cuMemAlloc_v2 cuMemFree_v2 cuMemGetInfo_v2 cuMemGetAddressRange_v2
        cuMemHostAlloc cuMemFreeHost cuMemHostGetDevicePointer_v2
        cuMemsetD8Async cuMemsetD32Async
        cuMemcpyAsync cuMemcpyHtoDAsync_v2 cuMemcpyDtoHAsync_v2 cuMemcpyDtoDAsync_v2
        cuStreamCreate cuStreamCreateWithPriority cuStreamDestroy_v2 cuStreamSynchronize
        cuStreamQuery cuStreamWaitEvent cuStreamGetCtx cuStreamIsCapturing
        cuEventCreate cuEventRecord cuEventQuery cuEventSynchronize cuEventDestroy_v2
        cuThreadExchangeStreamCaptureMode
        cuPointerGetAttribute cuPointerGetAttributes
    }
    /// Virtual memory management: address space, physical handles and mappings apart (10.2).
    Vmm: {
        cuMemAddressReserve cuMemAddressFree cuMemCreate cuMemRelease cuMemMap cuMemUnmap
        cuMemSetAccess cuMemGetAccess cuMemGetAllocationGranularity
        cuMemGetAllocationPropertiesFromHandle
    }
    /// Physical handles shared between processes (10.2).
    VmmExport: { cuMemExportToShareableHandle cuMemImportFromShareableHandle }
    /// The physical handle behind an address (11.0).
    HandleFromAddress: { cuMemRetainAllocationHandle }
    /// A handle for a range of addresses, such as a dma-buf (11.7).
    RangeHandles: { cuMemGetHandleForAddressRange }
    /// The driver's own stream-ordered memory pools (11.2).
    Pools: {
        cuMemAllocAsync cuMemAllocFromPoolAsync cuMemFreeAsync cuMemPoolCreate cuMemPoolDestroy
        cuMemPoolTrimTo cuMemPoolSetAttribute cuMemPoolGetAttribute cuMemPoolSetAccess
        cuMemPoolGetAccess cuDeviceGetDefaultMemPool cuDeviceGetMemPool cuDeviceSetMemPool
    }
    /// Memory pools shared between processes (11.2).
    PoolExport: {
        cuMemPoolExportToShareableHandle cuMemPoolImportFromShareableHandle
        cuMemPoolExportPointer cuMemPoolImportPointer
    }
    /// Ids of streams and contexts, never reused while the process lives (12.0).
    StreamIds: { cuStreamGetId cuCtxGetId }
    /// The device of a stream (12.8).
    StreamDevice: { cuStreamGetDevice }
    /// The capture that a stream is in, and the dependencies of its next node (11.3).
    CaptureInfo: { cuStreamGetCaptureInfo_v2 }
    /// The dependencies of a capture's next node with the data of their edges, changes of these dependencies, and
    /// captures into an existing graph (12.3).
    EdgeData: {
        cuStreamGetCaptureInfo_v3 cuStreamUpdateCaptureDependencies_v2 cuStreamBeginCaptureToGraph
        cuGraphGetEdges_v2 cuGraphNodeGetDependencies_v2
    }
    /// Beginning and ending a capture (10.1).
    CaptureControl: { cuStreamBeginCapture_v2 cuStreamEndCapture cuGraphDestroy }
    /// Graphs built node by node, and queries of a graph's nodes (10.0).
    Graphs: {
        cuGraphCreate cuGraphClone cuGraphAddEmptyNode cuGraphAddMemsetNode cuGraphGetNodes
        cuGraphNodeGetType cuGraphNodeGetDependencies
    }
    /// Kernels added to graphs by hand (12.0).
    KernelNodes: { cuGraphAddKernelNode_v2 }
    /// Executables of graphs, and their launches (11.4).
    GraphExecs: { cuGraphInstantiateWithFlags cuGraphLaunch cuGraphExecDestroy }
    /// Executables that take over another graph of the same shape (12.0).
    GraphExecUpdate: { cuGraphExecUpdate_v2 }
    /// Objects that live as long as a graph and its executables (11.3).
    GraphLifetime: {
        cuUserObjectCreate cuUserObjectRetain cuUserObjectRelease cuGraphRetainUserObject
        cuGraphReleaseUserObject
    }
    /// The driver's own memory of graphs that allocate (11.4).
    GraphMemory: { cuDeviceGetGraphMemAttribute cuDeviceGraphMemTrim }
    /// Access and copies between devices (4.0).
    Peers: { cuDeviceCanAccessPeer cuCtxEnablePeerAccess cuMemcpyPeerAsync }
    /// Sharing of plain allocations between processes (11.0).
    LegacyIpc: { cuIpcGetMemHandle cuIpcOpenMemHandle_v2 cuIpcCloseMemHandle }
    /// Release of a retained primary context, in its current form (11.0).
    PrimaryRelease: { cuDevicePrimaryCtxRelease_v2 }
    /// A device's UUID; that of the MIG instance where there is one (11.4).
    DeviceUuid: { cuDeviceGetUuid_v2 }
    /// A device's PCI address (4.1).
    PciBusId: { cuDeviceGetPCIBusId }
    /// Page-locking of memory that the caller owns (6.5).
    HostRegister: { cuMemHostRegister_v2 cuMemHostUnregister }
    /// Settable attributes of pointers (6.0).
    PointerAttributes: { cuPointerSetAttribute }
    /// Modules and kernel launches (4.0).
    Kernels: { cuModuleLoadData cuModuleUnload cuModuleGetFunction cuLaunchKernel }
    /// Host functions in stream order (10.0).
    HostFunctions: { cuLaunchHostFunc }
}

// The list above names every function of the table exactly once: it is as long as the table (all fields are pointers),
// it contains only field names, and two equal names would not form an enum.
const _: () = assert!(SYMBOL_COUNT * size_of::<usize>() == size_of::<sys::CuFunctions>());
const _: () = assert!(Feature::ALL.len() < 32);

/// A function of the table: its exported name, whose suffix is the version of its ABI, and the group it belongs to;
/// `None` for a function that every accepted driver has.
#[doc(hidden)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Symbol {
    name: &'static str,
    feature: Option<Feature>,
}

impl Symbol {
    pub fn name(&self) -> &'static str {
        self.name
    }

    pub fn feature(&self) -> Option<Feature> {
        self.feature
    }
}

pub(super) fn name_of(call: Call) -> &'static str {
    SYMBOLS.get(call as usize).map_or("", Symbol::name)
}
