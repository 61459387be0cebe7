//! Shared parts of the simulator's tests: one device, raw calls, known kernels.
#![allow(dead_code)]

use cualloc::driver::sys::*;
use cualloc::driver::{Context, Driver, Entered};
use cualloc::sim::{Mode, Report, SimConfig, Simulator};
use std::ffi::c_void;
use std::ptr::{addr_of_mut, null_mut};

pub const MIB: u64 = 1 << 20;
pub const GRANULE: usize = 2 << 20;
pub const OK: CUresult = CUresult::CUDA_SUCCESS;

pub struct Bench {
    pub context: Context,
    pub driver: Driver,
    pub sim: Simulator,
    pub table: CuFunctions,
    pub module: CUmodule,
}

pub fn bench() -> Bench {
    with(SimConfig::with_devices(1, 1 << 30))
}

pub fn with(config: SimConfig) -> Bench {
    let sim = Simulator::new(config).unwrap();
    let driver = sim.driver().unwrap();
    let context = driver.context(0).unwrap();
    let table = sim.functions();
    let mut module = null_mut();
    let bench = Bench {
        context,
        driver,
        sim,
        table,
        module,
    };
    ok!(bench, cuCtxSetCurrent(bench.context.raw()));
    ok!(bench, cuModuleLoadData(&mut module, c"".as_ptr().cast()));
    // The image is not read; the pointer only must not be null.
    Bench { module, ..bench }
}

/// Calls a function of the bench's table. Arguments are expanded inside the unsafe block: these
/// tests pass plain values and pointers to locals only.
#[macro_export]
macro_rules! call {
    ($bench:expr, $name:ident($($argument:expr),* $(,)?)) => {{
        #[allow(clippy::macro_metavars_in_unsafe)]
        // SAFETY: the simulator checks handles; pointers in these tests are to locals.
        unsafe { ($bench.table.$name.unwrap())($($argument),*) }
    }};
}
pub use call;

/// A [`call`] that must succeed.
#[macro_export]
macro_rules! ok {
    ($bench:expr, $($call:tt)*) => { assert_eq!(call!($bench, $($call)*), OK) };
}
pub use ok;

/// Something that matches was reported since the last look.
#[macro_export]
macro_rules! reported {
    ($bench:expr, $pattern:pat $(if $condition:expr)?) => {
        $bench.reported(|report| matches!(report, $pattern $(if $condition)?))
    };
}
pub use reported;

impl Bench {
    pub fn entered(&self) -> Entered<'_> {
        self.context.enter().unwrap()
    }

    pub fn alloc(&self, bytes: usize) -> u64 {
        let mut address = 0;
        ok!(self, cuMemAlloc_v2(&mut address, bytes));
        address
    }

    pub fn stream(&self) -> CUstream {
        let mut stream = null_mut();
        ok!(self, cuStreamCreate(&mut stream, 1));
        stream
    }

    pub fn stream_id(&self, stream: CUstream) -> u64 {
        let mut id = 0;
        ok!(self, cuStreamGetId(stream, &mut id));
        id
    }

    pub fn event(&self) -> CUevent {
        let mut event = null_mut();
        ok!(self, cuEventCreate(&mut event, 2));
        event
    }

    pub fn record(&self, event: CUevent, stream: CUstream) {
        ok!(self, cuEventRecord(event, stream));
    }

    pub fn wait(&self, stream: CUstream, event: CUevent) {
        ok!(self, cuStreamWaitEvent(stream, event, 0));
    }

    pub fn query(&self, event: CUevent) -> CUresult {
        call!(self, cuEventQuery(event))
    }

    pub fn memset(&self, address: u64, byte: u8, bytes: usize, stream: CUstream) {
        ok!(self, cuMemsetD8Async(address, byte, bytes, stream));
    }

    fn launch(&self, name: &std::ffi::CStr, stream: CUstream, params: &mut [*mut c_void]) {
        let mut function = null_mut();
        ok!(
            self,
            cuModuleGetFunction(&mut function, self.module, name.as_ptr())
        );
        let code = call!(
            self,
            cuLaunchKernel(
                function,
                1,
                1,
                1,
                32,
                1,
                1,
                0,
                stream,
                params.as_mut_ptr(),
                null_mut()
            )
        );
        assert_eq!(code, OK);
    }

    pub fn fill(&self, mut address: u64, mut words: u64, mut seed: u32, stream: CUstream) {
        let params = &mut [
            addr_of_mut!(address).cast(),
            addr_of_mut!(words).cast(),
            addr_of_mut!(seed).cast(),
        ];
        self.launch(c"cualloc_fill", stream, params);
    }

    pub fn check(
        &self,
        mut address: u64,
        mut words: u64,
        mut seed: u32,
        mut bad: u64,
        stream: CUstream,
    ) {
        let params = &mut [
            addr_of_mut!(address).cast(),
            addr_of_mut!(words).cast(),
            addr_of_mut!(seed).cast(),
            addr_of_mut!(bad).cast(),
        ];
        self.launch(c"cualloc_check", stream, params);
    }

    pub fn spin(&self, mut nanos: u64, stream: CUstream) {
        self.launch(c"cualloc_spin", stream, &mut [addr_of_mut!(nanos).cast()]);
    }

    pub fn word(&self, address: u64) -> u32 {
        let bytes = self.sim.read_memory(address, 4).unwrap();
        u32::from_le_bytes(bytes.try_into().unwrap())
    }

    pub fn sync(&self) {
        ok!(self, cuCtxSynchronize());
    }

    pub fn reserve(&self, bytes: usize) -> u64 {
        let mut address = 0;
        ok!(self, cuMemAddressReserve(&mut address, bytes, 0, 0, 0));
        address
    }

    pub fn create(&self, bytes: usize) -> (CUresult, u64) {
        let mut handle = 0;
        let prop = props(0);
        (
            call!(self, cuMemCreate(&mut handle, bytes, &prop, 0)),
            handle,
        )
    }

    pub fn map(&self, address: u64, bytes: usize, handle: u64) -> CUresult {
        call!(self, cuMemMap(address, bytes, 0, handle, 0))
    }

    pub fn access(&self, address: u64, bytes: usize) -> CUresult {
        let desc = access(0);
        call!(self, cuMemSetAccess(address, bytes, &desc, 1))
    }

    /// A fresh reservation with one handle mapped into it, with access.
    pub fn mapped(&self, bytes: usize) -> (u64, u64) {
        let address = self.reserve(bytes);
        let (code, handle) = self.create(bytes);
        assert_eq!(code, OK);
        assert_eq!(self.map(address, bytes, handle), OK);
        assert_eq!(self.access(address, bytes), OK);
        (address, handle)
    }

    pub fn manual(&self) {
        self.sim.set_mode(Mode::Manual);
    }

    #[track_caller]
    pub fn silent(&self) {
        let reports = self.sim.take_reports();
        assert!(reports.is_empty(), "{reports:?}");
    }

    /// An object was used that had been destroyed.
    #[track_caller]
    pub fn destroyed(&self, what: &str) {
        self.reported(
            |report| matches!(report, Report::Destroyed { object, .. } if *object == what),
        );
    }

    /// Memory went in a call although the host had not seen its uses complete.
    #[track_caller]
    pub fn in_use(&self, name: &str) {
        self.reported(|report| matches!(report, Report::InUse { call, .. } if *call == name));
    }

    /// A second mapping of a handle, with access.
    pub fn view(&self, handle: u64) -> u64 {
        let view = self.reserve(GRANULE);
        assert_eq!(self.map(view, GRANULE, handle), OK);
        assert_eq!(self.access(view, GRANULE), OK);
        view
    }

    #[track_caller]
    pub fn reported(&self, matches: impl Fn(&Report) -> bool) {
        let reports = self.sim.take_reports();
        assert!(reports.iter().any(matches), "{reports:?}");
    }
}

pub fn location(device: i32) -> CUmemLocation {
    CUmemLocation {
        type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        id: device,
    }
}

pub fn props(device: i32) -> CUmemAllocationProp {
    CUmemAllocationProp {
        type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        location: location(device),
        ..Default::default()
    }
}

pub fn access(device: i32) -> CUmemAccessDesc {
    CUmemAccessDesc {
        location: location(device),
        flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    }
}
