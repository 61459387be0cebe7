//! The source of memory: a driver and a context of it.

use std::ffi::c_void;

use cualloc::driver::sys::CUresult;
use cualloc::driver::{Context, Driver};

use crate::results::{CUALLOC_INVALID_ARGUMENT, CUALLOC_UNSUPPORTED, Failure};

/// A value of the option `device`.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) enum Source {
    /// The driver of this machine.
    #[default]
    Cuda,
    /// The simulated driver that all its users in the process share.
    Simulated,
}

impl Source {
    pub(crate) fn named(name: &str) -> Result<Source, Failure> {
        match name {
            "cuda" => Ok(Source::Cuda),
            "sim" if cfg!(feature = "sim") => Ok(Source::Simulated),
            "sim" => {
                let why = "device=sim: this library was built without the simulator (feature sim)";
                Err(Failure::Reason(CUALLOC_UNSUPPORTED, why))
            }
            _ => {
                let why = "expected device=cuda or device=sim";
                Err(Failure::Reason(CUALLOC_INVALID_ARGUMENT, why))
            }
        }
    }

    pub(crate) fn driver(self) -> Result<Driver, Failure> {
        match self {
            Source::Cuda => Ok(Driver::load()?),
            Source::Simulated => simulated(),
        }
    }
}

#[cfg(feature = "sim")]
pub(crate) mod simulator {
    use std::sync::OnceLock;

    use cualloc::sim::{SimConfig, Simulator};

    /// Returns the shared simulator, which lives as long as the process, or nothing if it could not be created.
    pub(crate) fn shared() -> Option<&'static Simulator> {
        static SIMULATOR: OnceLock<Option<Simulator>> = OnceLock::new();
        let made = SIMULATOR.get_or_init(|| Simulator::new(SimConfig::default()).ok());
        made.as_ref()
    }
}

#[cfg(feature = "sim")]
fn simulated() -> Result<Driver, Failure> {
    match simulator::shared() {
        Some(simulator) => Ok(simulator.driver()?),
        None => Err(Failure::Reason(
            CUALLOC_UNSUPPORTED,
            "cannot create the simulator",
        )),
    }
}

#[cfg(not(feature = "sim"))]
fn simulated() -> Result<Driver, Failure> {
    Err(Failure::Reason(
        CUALLOC_UNSUPPORTED,
        "this library was built without the simulator",
    ))
}

/// Retains the primary context of a device.
pub(crate) fn primary(driver: &Driver, device: i32) -> Result<Context, Failure> {
    let count = driver.device_count()?;
    let Some(ordinal) = usize::try_from(device)
        .ok()
        .filter(|&ordinal| ordinal < count)
    else {
        return Err(Failure::NoSuchDevice { device, count });
    };
    Ok(Context::primary(&driver.device(ordinal)?)?)
}

/// Returns the caller's context; null means the context that is current on this thread.
///
/// # Safety
/// A non-null context is alive, and the context (given or current) outlives the result and its clones.
pub(crate) unsafe fn context_of(driver: &Driver, context: *mut c_void) -> Result<Context, Failure> {
    let found = match context.is_null() {
        // SAFETY: the caller's contract.
        true => unsafe { Context::current(driver) },
        // SAFETY: the caller's contract.
        false => unsafe { Context::from_raw(driver, context.cast()) }.map(Some),
    };
    match found {
        Ok(Some(context)) => Ok(context),
        Ok(None) => {
            let why = "no context is current on this thread";
            Err(Failure::Reason(CUALLOC_INVALID_ARGUMENT, why))
        }
        Err(error) if error.code() == CUresult::CUDA_ERROR_INVALID_CONTEXT => {
            let why = "the context does not exist";
            Err(Failure::Reason(CUALLOC_INVALID_ARGUMENT, why))
        }
        Err(error) => Err(error.into()),
    }
}
