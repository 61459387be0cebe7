//! The simulated driver as a shared library with the driver's own names: a GPU for any program of the driver's API.
//!
//! `cargo build --example simdriver --features sim` makes `libsimdriver.so`. A program finds it by the name that it
//! loads, `libcuda.so.1`: a link of that name in a folder of `LD_LIBRARY_PATH`. `program.c` beside this file is one
//! that is linked to it.
//!
//! One simulator serves the whole process. Work completes at once, kernels are those of [`cualloc::sim`], whatever
//! a module is loaded from, and an event knows no time. What the simulator finds wrong it says at the end of the
//! process, on standard error. Environment, read at the first call:
//! `CUALLOC_SIM_DEVICES` (count, default 1, 0 for a machine without devices),
//! `CUALLOC_SIM_MEMORY` (of each device, like `80G`; default 80 GiB), `CUALLOC_SIM_VERSION` (driver version,
//! default 13000), `CUALLOC_SIM_VMM` (0: no virtual memory management). A value that is no number
//! makes every call return `CUDA_ERROR_INVALID_VALUE`.

use cualloc::allocator::Limit;
use cualloc::driver::sys::*;
use cualloc::sim::{SimConfig, Simulator};
use std::ffi::{c_char, c_int, c_uchar, c_uint, c_void};
use std::sync::OnceLock;

mod more;

struct Library {
    table: CuFunctions,
    // Lives as long as the process.
    simulator: Simulator,
    version: c_int,
}

fn number<T: std::str::FromStr>(name: &str, default: T) -> Option<T> {
    match std::env::var(name) {
        Ok(text) => text.parse().ok(),
        Err(std::env::VarError::NotPresent) => Some(default),
        Err(std::env::VarError::NotUnicode(_)) => None,
    }
}

fn start() -> Option<Library> {
    let devices = number("CUALLOC_SIM_DEVICES", 1)?;
    let Limit::Bytes(memory) = number("CUALLOC_SIM_MEMORY", Limit::Bytes(80 << 30))? else {
        return None;
    };
    let mut config = SimConfig::with_devices(devices, memory);
    config.driver_version = number("CUALLOC_SIM_VERSION", config.driver_version)?;
    let vmm = number("CUALLOC_SIM_VMM", 1)? != 0;
    for device in &mut config.devices {
        device.vmm = vmm;
    }
    let version = config.driver_version;
    let simulator = Simulator::new(config).ok()?;
    tell_at_exit();
    Some(Library {
        table: simulator.functions(),
        simulator,
        version,
    })
}

static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();

fn library() -> Option<&'static Library> {
    LIBRARY.get_or_init(start).as_ref()
}

/// The process that the simulator is of.
static PROCESS: OnceLock<u32> = OnceLock::new();

/// Has the findings written when the process ends. One that was forked ends in silence: it has nothing to do with the
/// simulator, whose lock a thread may hold that is not there.
fn tell_at_exit() {
    unsafe extern "C" {
        fn atexit(run: extern "C" fn()) -> c_int;
    }
    extern "C" fn tell() {
        if PROCESS.get() != Some(&std::process::id()) {
            return;
        }
        // Not `library`, which waits for a thread that just begins.
        if let Some(Some(library)) = LIBRARY.get() {
            for report in library.simulator.take_reports() {
                eprintln!("simulated driver: {report}");
            }
        }
    }
    PROCESS.get_or_init(std::process::id);
    // SAFETY: the function of the C library; what it is given stays as long as this library, which is never
    // unloaded before the process ends, as it holds the simulator. Without it nothing is said.
    let _refused = unsafe { atexit(tell) };
}

macro_rules! export {
    ($($name:ident($($arg:ident: $ty:ty),*);)*) => {$(
        /// As the driver's function of that name.
        ///
        /// # Safety
        /// As the driver's documentation asks for.
        #[allow(non_snake_case, clippy::too_many_arguments)]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $ty),*) -> CUresult {
            match library().and_then(|library| library.table.$name) {
                // SAFETY: the same contract, passed on.
                Some(function) => unsafe { function($($arg),*) },
                None => CUresult::CUDA_ERROR_INVALID_VALUE,
            }
        }
    )*
        /// Every function of the simulator's table with its address.
        fn addresses() -> Vec<(&'static str, *const c_void)> {
            vec![$((
                stringify!($name),
                $name as unsafe extern "C" fn($($ty),*) -> CUresult as *const c_void,
            )),*]
        }
    };
}
cualloc::sim_driver_functions!(export);
