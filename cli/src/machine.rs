//! The device of a run: the first GPU, or a simulated one.

use crate::options::{DeviceChoice, GlobalOptions};
use crate::output::Output;
use crate::{Failure, text};
use cualloc::driver::{Context, Device, Driver, DriverError, LoadError};
use cualloc::error::ConfigError;
use cualloc::sim::{Mode, SimConfig, Simulator};

#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    #[error("cannot use --device cuda: {}", load_messages(.0).join(": "))]
    NoDriver(LoadError),
    #[error("cannot use --device cuda: the driver reports no device")]
    NoDevice,
    #[error("cannot query the driver")]
    Driver(#[source] DriverError),
    #[error("cannot start the simulator")]
    Simulator(#[source] ConfigError),
}

pub enum Machine {
    Cuda(Device),
    Simulated { memory: u64 },
}

impl Machine {
    /// Chooses the device; reports on stderr what `auto` chose.
    pub fn choose(options: &GlobalOptions, output: &Output) -> Result<Machine, Failure> {
        let memory = options.sim_memory();
        let machine = match options.device() {
            DeviceChoice::Sim => return Ok(Machine::Simulated { memory }),
            DeviceChoice::Cuda => {
                options.check_simulator()?;
                return Ok(Machine::Cuda(Machine::cuda()?));
            }
            DeviceChoice::Auto => Machine::cuda(),
        };
        match machine {
            Ok(device) => {
                let name = device.name();
                let name = name.unwrap_or_else(|error| format!("a GPU without a name ({error})"));
                output.note(&format!("device: {name}"));
                if options.has_simulator_option() {
                    output.note("--sim-memory is not used: it is for the simulator");
                }
                Ok(Machine::Cuda(device))
            }
            Err(error) => {
                output.note(&format!("device: the simulator ({})", reason(&error)));
                Ok(Machine::Simulated { memory })
            }
        }
    }

    fn cuda() -> Result<Device, MachineError> {
        let driver = Driver::load().map_err(MachineError::NoDriver)?;
        if driver.device_count().map_err(MachineError::Driver)? == 0 {
            return Err(MachineError::NoDevice);
        }
        driver.device(0).map_err(MachineError::Driver)
    }

    pub fn memory(&self) -> Result<u64, MachineError> {
        match self {
            Machine::Cuda(device) => device.total_memory().map_err(MachineError::Driver),
            Machine::Simulated { memory } => Ok(*memory),
        }
    }

    pub fn name(&self) -> &'static str {
        match self {
            Machine::Cuda(_) => "cuda",
            Machine::Simulated { .. } => "sim",
        }
    }

    /// Creates a context on the device; a simulated device starts fresh, and completes work `lag` rows later.
    pub fn context(&self, lag: u64) -> Result<ReplayContext, MachineError> {
        let (context, simulator) = match self {
            Machine::Cuda(device) => (Context::primary(device), None),
            Machine::Simulated { memory } => {
                let simulator = simulator(*memory)?;
                if lag > 0 {
                    simulator.set_mode(Mode::Lag(lag));
                }
                let driver = simulator.driver().map_err(MachineError::NoDriver)?;
                (driver.context(0), Some(simulator))
            }
        };
        Ok(ReplayContext {
            context: context.map_err(MachineError::Driver)?,
            _simulator: simulator,
        })
    }

    /// Rejects a lag unless the device is simulated: only then work can complete at a chosen row.
    pub fn check_lag(&self, lag: u64) -> Result<(), Failure> {
        let wrong = "--lag is for the simulator: add --device sim";
        match self {
            Machine::Cuda(_) if lag > 0 => Err(Failure::usage(wrong)),
            _ => Ok(()),
        }
    }
}

/// A context, and the simulator behind it if there is one.
pub struct ReplayContext {
    // Declared first, because it calls the simulator and must be dropped before it.
    context: Context,
    _simulator: Option<Simulator>,
}

impl ReplayContext {
    pub fn context(&self) -> &Context {
        &self.context
    }
}

/// Summarises in few words why there is no GPU: the text appears in every run.
fn reason(error: &MachineError) -> String {
    match error {
        MachineError::NoDriver(LoadError::NotFound { .. }) => {
            "no CUDA driver; `cualloc info` says where it was looked for".to_owned()
        }
        MachineError::NoDriver(error) => load_messages(error).join(": "),
        MachineError::NoDevice => "the driver knows no device".to_owned(),
        error => text::chain(error),
    }
}

/// Returns why there is no driver: the error, then the sources that its message does not include.
pub fn load_messages(error: &LoadError) -> Vec<String> {
    match error {
        // Its message already includes its sources.
        LoadError::NotFound { .. } => vec![error.to_string()],
        error => text::messages(error),
    }
}

pub fn simulator(memory: u64) -> Result<Simulator, MachineError> {
    let config = SimConfig {
        // A measured driver waits in frees, and the cost model assumes this.
        strict_free: false,
        ..SimConfig::with_devices(1, memory)
    };
    Simulator::new(config).map_err(MachineError::Simulator)
}
