//! The device that traces are replayed on: of a real or of a simulated driver.

use crate::driver::{CallCounts, Context, Driver};
use crate::error::Error;
#[cfg(feature = "sim")]
use crate::sim::Simulator;

/// A context, and the same through a separate driver of the replayer, whose calls are not counted as the allocator's.
pub(super) struct ReplayDevice {
    allocator: Context,
    own: Context,
    #[cfg(feature = "sim")]
    simulator: Option<Simulator>,
}

impl ReplayDevice {
    /// From here on the calls of an allocator on a GPU are timed.
    pub(super) fn of(context: &Context) -> Result<ReplayDevice, Error> {
        let driver = context.driver();
        #[cfg(feature = "sim")]
        let simulator = Simulator::of(driver);
        #[cfg(feature = "sim")]
        let simulated = simulator.as_ref().map(Simulator::driver).transpose()?;
        #[cfg(not(feature = "sim"))]
        let simulated: Option<Driver> = None;
        let own = match simulated {
            Some(own) => own,
            None => {
                driver.set_timing(true);
                // SAFETY: the functions are those of `driver`, which the stage keeps loaded; a second table
                // over them only counts apart.
                unsafe { Driver::from_functions(*driver.functions()) }?
            }
        };
        Ok(ReplayDevice {
            allocator: context.clone(),
            // SAFETY: the context is kept beside it, and both drivers have the same functions.
            own: unsafe { Context::from_raw_with_owner(&own, context.raw(), context.clone()) }?,
            #[cfg(feature = "sim")]
            simulator,
        })
    }

    pub(super) fn context(&self) -> &Context {
        &self.allocator
    }

    /// Returns the context for the replayer's own work.
    pub(super) fn own(&self) -> &Context {
        &self.own
    }

    /// Whether the device completes work only as rows pass.
    pub(super) fn lags(&self) -> bool {
        #[cfg(feature = "sim")]
        return self.simulator.as_ref().is_some_and(Simulator::lags);
        #[cfg(not(feature = "sim"))]
        false
    }

    pub(super) fn advance_row(&self) {
        #[cfg(feature = "sim")]
        if let Some(simulator) = &self.simulator {
            simulator.advance_row();
        }
    }

    /// Returns the nanoseconds spent in the driver so far: on a GPU only those of the allocator's calls, on the
    /// simulator those of all calls, by its cost model.
    pub(super) fn driver_nanos(&self, calls: &CallCounts) -> u64 {
        self.modelled_nanos().unwrap_or_else(|| calls.nanos())
    }

    /// Returns the simulator's own account of time, over all its drivers.
    pub(super) fn modelled_nanos(&self) -> Option<u64> {
        #[cfg(feature = "sim")]
        return self.simulator.as_ref().map(Simulator::nanos);
        #[cfg(not(feature = "sim"))]
        None
    }

    /// Returns the physical memory that a simulated device currently holds; `None` on a GPU, which others use as well.
    pub(super) fn memory_in_use(&self) -> Option<u64> {
        #[cfg(feature = "sim")]
        if let Some(simulator) = &self.simulator {
            return Some(simulator.memory_in_use(self.allocator.device().ordinal()));
        }
        None
    }

    /// Returns the faults that a simulator has found since the last call; nothing on a GPU.
    pub(super) fn take_reports(&self) -> Vec<String> {
        #[cfg(feature = "sim")]
        if let Some(simulator) = &self.simulator {
            let reports = simulator.take_reports();
            return reports.iter().map(ToString::to_string).collect();
        }
        Vec::new()
    }
}
