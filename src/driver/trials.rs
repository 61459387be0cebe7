//! What trials of virtual memory came to, for all users of a driver.

use crate::locks::held::Mutex;

/// Devices, by their ordinals, whose virtual memory was tried. An allocator asks here before it tries one.
#[derive(Default)]
pub(crate) struct Trials {
    passed: Mutex<Vec<usize>>,
    /// Those of which a refusal was reported.
    refused: Mutex<Vec<usize>>,
}

impl Trials {
    /// Whether a device gave everything that was wished for.
    pub(crate) fn passed(&self, device: usize) -> bool {
        self.passed.lock().contains(&device)
    }

    pub(crate) fn pass(&self, device: usize) {
        note(&self.passed, device);
    }

    /// Whether this is the first refusal of a device.
    pub(crate) fn first_refusal(&self, device: usize) -> bool {
        note(&self.refused, device)
    }
}

/// Whether the device was not there yet.
fn note(devices: &Mutex<Vec<usize>>, device: usize) -> bool {
    let mut devices = devices.lock();
    let new = !devices.contains(&device);
    if new {
        devices.push(device);
    }
    new
}
