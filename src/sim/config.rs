//! The configuration of a simulator.

use super::call::Call;
use crate::error::ConfigError;

/// One simulated device. Start from `SimDevice::default()`: the properties and times of an H200, and 80 GiB.
#[derive(Clone, Debug)]
pub struct SimDevice {
    /// Physical memory, in bytes.
    pub memory: u64,
    /// The name of the device.
    pub name: String,
    /// Virtual memory management (attribute 102).
    pub vmm: bool,
    /// Stream-ordered memory pools (attribute 115).
    pub pools: bool,
    /// Export as fabric handles (attribute 128).
    pub fabric: bool,
    /// Export as dma-buf (attribute 124).
    pub dma_buf: bool,
    /// Granularity of physical handles, in bytes; a power of two.
    pub granularity: u64,
    /// Whether other devices may access this one's memory.
    pub peers: bool,
}

impl Default for SimDevice {
    fn default() -> Self {
        SimDevice {
            memory: 80 << 30,
            name: "Simulated device".to_owned(),
            vmm: true,
            pools: true,
            fabric: false,
            dma_buf: false,
            granularity: 2 << 20,
            peers: true,
        }
    }
}

/// When submitted work completes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Mode {
    /// Immediately, unless it waits for incomplete work.
    #[default]
    Instant,
    /// Work submitted at row k completes this many rows later; markers complete as soon as all earlier work in their
    /// stream has. [`Simulator::advance_row`](super::Simulator::advance_row) begins a row.
    Lag(u64),
    /// When the test requests it: [`Simulator::complete`](super::Simulator::complete) and its siblings.
    Manual,
}

/// Setup of a simulator. Start from `SimConfig::default()`: one default device, instant mode.
#[derive(Clone, Debug)]
pub struct SimConfig {
    /// The devices, in the order of their ordinals; at most 64. May be empty: a machine whose
    /// driver finds no device.
    pub devices: Vec<SimDevice>,
    /// The version that `cuDriverGetVersion` returns.
    pub driver_version: i32,
    /// When work completes.
    pub mode: Mode,
    /// Whether to report reads of bytes that were never written.
    pub strict_undefined: bool,
    /// Whether `cuMemFree` and `cuMemFreeHost` give no ordering guarantee: they wait for nothing, do not let the host
    /// observe completion of earlier work, and memory that such work uses is reported. If off, they wait for all work
    /// and observe its completion, as measured on one GPU.
    pub strict_free: bool,
    /// Whether an access to missing or inaccessible memory breaks its context for good: every later call on it returns
    /// `CUDA_ERROR_ILLEGAL_ADDRESS`, and its other work does nothing. If off, the access is only reported.
    pub sticky_errors: bool,
    /// Whether the function of a user object runs on another thread, some time after its last reference is dropped, as
    /// with a real driver. If off, it runs before the call that dropped the reference returns.
    pub late_destructors: bool,
    /// Whether second mappings of a handle show other memory: the behaviour of a device that does not support aliasing.
    pub broken_aliasing: bool,
    /// Whether to detect races. Without this, long runs are faster.
    pub races: bool,
    /// Address space that all reservations share, in bytes; at most 32 TiB.
    pub address_space: u64,
    /// The longest reservation that the driver grants, in bytes.
    pub longest_reservation: u64,
    /// The seed for the order of nodes of a launched graph that neither the graph nor the mode orders: equal seeds give
    /// equal orders.
    pub seed: u64,
    /// Functions that this driver does not export: their table entries are null.
    pub missing: Vec<String>,
}

impl Default for SimConfig {
    fn default() -> Self {
        SimConfig {
            devices: vec![SimDevice::default()],
            driver_version: 13000,
            mode: Mode::Instant,
            strict_undefined: false,
            strict_free: true,
            sticky_errors: true,
            late_destructors: false,
            broken_aliasing: false,
            races: true,
            address_space: u64::MAX,
            longest_reservation: u64::MAX,
            seed: 0,
            missing: Vec::new(),
        }
    }
}

impl SimConfig {
    /// `count` default devices with `memory` bytes each.
    pub fn with_devices(count: usize, memory: u64) -> SimConfig {
        let device = SimDevice {
            memory,
            ..SimDevice::default()
        };
        SimConfig {
            devices: vec![device; count],
            ..SimConfig::default()
        }
    }

    pub(super) fn check(&self) -> Result<(), ConfigError> {
        if self.devices.len() > 64 {
            return Err(ConfigError::TooManyDevices {
                count: self.devices.len(),
            });
        }
        for (device, config) in self.devices.iter().enumerate() {
            if !config.granularity.is_power_of_two() || config.granularity < 4096 {
                return Err(ConfigError::Granularity {
                    device,
                    granularity: config.granularity,
                });
            }
        }
        match self
            .missing
            .iter()
            .find(|name| Call::index_of(name).is_none())
        {
            Some(name) => Err(ConfigError::UnknownFunction { name: name.clone() }),
            None => Ok(()),
        }
    }
}
