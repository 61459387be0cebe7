//! The GPU, or a simulated one if there is none.

use std::sync::{Mutex, PoisonError};

use super::{SimConfig, Simulator};
use crate::driver::sys::CUresult;
use crate::driver::{Driver, LoadError};

/// The simulator in place of the process's driver, created on first use. It lives as long as the process.
static STAND_IN: Mutex<Option<Simulator>> = Mutex::new(None);

impl Driver {
    /// The process's driver ([`Driver::load`]), or where there is none, or none with a device, a simulated one with
    /// one default device (feature `sim`).
    ///
    /// All simulated drivers that this returns are of one simulator, which lives as long as the process.
    ///
    /// # Errors
    /// As [`Driver::load`], where a driver is there and does not work.
    ///
    /// ```
    /// use cualloc::driver::Driver;
    /// let driver = Driver::load_or_simulate()?;
    /// assert!(driver.device_count()? > 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn load_or_simulate() -> Result<Driver, LoadError> {
        match Driver::load() {
            Ok(driver) if driver.device_count().is_ok_and(|count| count == 0) => {}
            Err(LoadError::NotFound { .. } | LoadError::UnsupportedPlatform) => {}
            Err(LoadError::Init(error)) if error.code() == CUresult::CUDA_ERROR_NO_DEVICE => {}
            loaded => return loaded,
        }
        let mut stand_in = STAND_IN.lock().unwrap_or_else(PoisonError::into_inner);
        match &*stand_in {
            Some(simulator) => simulator.driver(),
            None => match Simulator::new(SimConfig::default()) {
                Ok(simulator) => stand_in.insert(simulator).driver(),
                // The default configuration is valid; were it not, there would be no driver either way.
                Err(_) => Driver::load(),
            },
        }
    }
}
