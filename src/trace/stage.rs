//! What traces are replayed on: a device of a real or of a simulated driver.

use crate::driver::{CallCounts, Context, Driver};
use crate::error::Error;
#[cfg(feature = "sim")]
use crate::sim::Simulator;

/// A context, and the same through a driver of the replayer's own, whose calls are not the allocator's.
pub(super) struct Stage {
    allocator: Context,
    own: Context,
    #[cfg(feature = "sim")]
    simulator: Option<Simulator>,
}

impl Stage {
    /// The calls of an allocator on a GPU are timed from here on.
    pub(super) fn of(context: &Context) -> Result<Stage, Error> {
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
        Ok(Stage {
            allocator: context.clone(),
            // SAFETY: the context is kept beside it, and both drivers have the same functions.
            own: unsafe { Context::from_raw_with_owner(&own, context.raw(), context.clone()) }?,
            #[cfg(feature = "sim")]
            simulator,
        })
    }

    /// The context that allocators are made for; its driver counts their calls.
    pub(super) fn context(&self) -> &Context {
        &self.allocator
    }

    /// The context through which the replayer does its own work.
    pub(super) fn own(&self) -> &Context {
        &self.own
    }

    /// Whether the device completes work only as rows go by.
    pub(super) fn lags(&self) -> bool {
        #[cfg(feature = "sim")]
        return self.simulator.as_ref().is_some_and(Simulator::lags);
        #[cfg(not(feature = "sim"))]
        false
    }

    /// One more row has been replayed.
    pub(super) fn advance_row(&self) {
        #[cfg(feature = "sim")]
        if let Some(simulator) = &self.simulator {
            simulator.advance_row();
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
        return self.simulator.as_ref().map(Simulator::nanos);
        #[cfg(not(feature = "sim"))]
        None
    }

    /// Physical memory that a simulated device holds now; `None` on a GPU, which others use as well.
    pub(super) fn memory_in_use(&self) -> Option<u64> {
        #[cfg(feature = "sim")]
        if let Some(simulator) = &self.simulator {
            return Some(simulator.memory_in_use(self.allocator.device().ordinal()));
        }
        None
    }

    /// What a simulator has found wrong since this was last asked; nothing on a GPU.
    pub(super) fn take_reports(&self) -> Vec<String> {
        #[cfg(feature = "sim")]
        if let Some(simulator) = &self.simulator {
            let reports = simulator.take_reports();
            return reports.iter().map(ToString::to_string).collect();
        }
        Vec::new()
    }
}
