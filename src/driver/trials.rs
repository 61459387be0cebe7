//! Results of virtual memory trials, shared by all users of a driver.

use crate::locks::held::Mutex;

/// Devices, by ordinal, whose virtual memory was tried. An allocator checks here before it tries one.
#[derive(Default)]
pub(crate) struct Trials {
    passed: Mutex<Vec<usize>>,
    /// Devices for which a refusal was logged.
    refused: Mutex<Vec<usize>>,
}

impl Trials {
    /// Whether a device passed the trial with all requested properties.
    pub(crate) fn passed(&self, device: usize) -> bool {
        self.passed.lock().contains(&device)
    }

    pub(crate) fn pass(&self, device: usize) {
        note(&self.passed, device);
    }

    /// Whether this is the first refusal by a device.
    pub(crate) fn first_refusal(&self, device: usize) -> bool {
        note(&self.refused, device)
    }
}

/// Adds a device; returns whether it was new.
fn note(devices: &Mutex<Vec<usize>>, device: usize) -> bool {
    let mut devices = devices.lock();
    let new = !devices.contains(&device);
    if new {
        devices.push(device);
    }
    new
}
