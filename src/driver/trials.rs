//! What trials of virtual memory came to, for all users of a driver.

use super::device::Device;
use std::sync::Mutex;

use crate::locks::held::locked;

/// Devices whose virtual memory was tried. An allocator asks here before it tries one.
#[derive(Default)]
pub(crate) struct Trials {
    passed: Mutex<Vec<Device>>,
    /// Those of which a refusal was reported.
    refused: Mutex<Vec<Device>>,
}

impl Trials {
    /// Whether a device gave everything that was wished for.
    pub(crate) fn passed(&self, device: Device) -> bool {
        locked(&self.passed).contains(&device)
    }

    pub(crate) fn pass(&self, device: Device) {
        note(&self.passed, device);
    }

    /// Whether this is the first refusal of a device.
    pub(crate) fn first_refusal(&self, device: Device) -> bool {
        note(&self.refused, device)
    }
}

/// Whether the device was not there yet.
fn note(devices: &Mutex<Vec<Device>>, device: Device) -> bool {
    let mut devices = locked(devices);
    let new = !devices.contains(&device);
    if new {
        devices.push(device);
    }
    new
}
