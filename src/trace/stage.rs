//! Where traces are replayed: a device of a driver, or of a simulated one.

use crate::driver::{CallCounts, Context, Device, Driver};
use crate::error::Error;
#[cfg(feature = "sim")]
use crate::sim::{Mode, Simulator};
#[cfg(feature = "sim")]
use std::sync::Arc;

/// A device with two drivers on it: the allocator calls one, the replayer the other, so that what
/// the first counts is the allocator's alone.
///
/// The calling thread's context is the caller's own again after every function of this room.
pub struct Stage {
    allocator: Context,
    own: Context,
    #[cfg(feature = "sim")]
    simulation: Option<Simulation>,
}

/// The simulator behind a stage, and how far its device lags behind the rows.
#[cfg(feature = "sim")]
struct Simulation {
    simulator: Arc<Simulator>,
    lag: u64,
}

impl Stage {
    /// A device of a loaded driver. The calls that the allocator makes are timed at the table.
    ///
    /// # Errors
    /// The device's primary context cannot be had.
    pub fn new(device: &Device) -> Result<Stage, Error> {
        let driver = device.driver();
        // SAFETY: the functions are those of `driver`, which is loaded for as long as the process
        // runs; a second table over them only counts apart.
        let own = unsafe { Driver::from_functions(*driver.functions()) }?;
        driver.set_timing(true);
        Ok(Stage {
            allocator: Context::primary(device)?,
            own: own.context(device.ordinal())?,
            #[cfg(feature = "sim")]
            simulation: None,
        })
    }

    /// A device of a simulator. With `lag` rows above 0, what is submitted to a stream at one row
    /// completes that many rows later; else it completes at once.
    ///
    /// # Errors
    /// The device's primary context cannot be had.
    #[cfg(feature = "sim")]
    pub fn simulated(simulator: &Arc<Simulator>, ordinal: usize, lag: u64) -> Result<Stage, Error> {
        simulator.set_mode(match lag {
            0 => Mode::Instant,
            rows => Mode::Lag(rows),
        });
        let driver = simulator.driver()?;
        let own = simulator.driver()?;
        Ok(Stage {
            allocator: driver.context(ordinal)?,
            own: own.context(ordinal)?,
            simulation: Some(Simulation {
                simulator: Arc::clone(simulator),
                lag,
            }),
        })
    }

    /// The context that allocators are made for; its driver counts their calls.
    pub fn context(&self) -> &Context {
        &self.allocator
    }

    /// The context through which the replayer does its own work.
    pub(super) fn own(&self) -> &Context {
        &self.own
    }

    /// Whether the device completes work only as rows go by.
    pub(super) fn lags(&self) -> bool {
        #[cfg(feature = "sim")]
        if let Some(simulation) = &self.simulation {
            return simulation.lag > 0;
        }
        false
    }

    /// One more row has been replayed.
    pub(super) fn advance_row(&self) {
        #[cfg(feature = "sim")]
        if let Some(simulation) = &self.simulation {
            simulation.simulator.advance_row();
        }
    }

    /// Nanoseconds spent in the driver so far, and by whom: on a GPU those of the allocator's calls
    /// alone, on the simulator, by its table of costs, those of all calls.
    pub(super) fn driver_nanos(&self, calls: &CallCounts) -> u64 {
        self.modelled_nanos().unwrap_or_else(|| calls.nanos())
    }

    /// The simulator's own account of time, over all its drivers.
    pub(super) fn modelled_nanos(&self) -> Option<u64> {
        #[cfg(feature = "sim")]
        if let Some(simulation) = &self.simulation {
            return Some(simulation.simulator.counters().nanos);
        }
        None
    }

    /// Physical memory that a simulated device holds now; `None` on a GPU, which others use as well.
    pub(super) fn memory_in_use(&self) -> Option<u64> {
        #[cfg(feature = "sim")]
        if let Some(simulation) = &self.simulation {
            let ordinal = self.allocator.device().ordinal();
            return Some(simulation.simulator.memory_in_use(ordinal));
        }
        None
    }

    /// What a simulator has found wrong since this was last asked; nothing on a GPU.
    pub(super) fn take_reports(&self) -> Vec<String> {
        #[cfg(feature = "sim")]
        if let Some(simulation) = &self.simulation {
            let reports = simulation.simulator.take_reports();
            return reports.iter().map(ToString::to_string).collect();
        }
        Vec::new()
    }
}
