//! The simulated driver as a shared library with the driver's own names.
//!
//! One simulator serves the whole process. Environment, read at the first call:
//! `CUALLOC_SIM_DEVICES` (count, default 1, 0 for a machine without devices),
//! `CUALLOC_SIM_MEMORY` (of each device, like `80G`; default 80 GiB), `CUALLOC_SIM_VERSION` (driver version,
//! default 13000), `CUALLOC_SIM_VMM` (0: no virtual memory management). A value that is no number
//! makes every call return `CUDA_ERROR_INVALID_VALUE`.

use cualloc::allocator::Limit;
use cualloc::driver::sys::*;
use cualloc::sim::{SimConfig, Simulator};
use std::ffi::{c_char, c_int, c_uchar, c_uint, c_void};
use std::sync::OnceLock;

struct Library {
    table: CuFunctions,
    // Lives as long as the process.
    _simulator: Simulator,
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
    let simulator = Simulator::new(config).ok()?;
    Some(Library {
        table: simulator.functions(),
        _simulator: simulator,
    })
}

fn library() -> Option<&'static Library> {
    static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
    LIBRARY.get_or_init(start).as_ref()
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
    )*};
}
cualloc::sim_driver_functions!(export);
