//! Results of virtual memory trials, shared by all users of a driver.

use std::collections::{BTreeMap, BTreeSet};

use crate::locks::held::Mutex;

/// Devices, by ordinal, whose virtual memory was tried. An allocator checks here before it tries one.
#[derive(Default)]
pub(crate) struct Trials {
    passed: Mutex<BTreeSet<usize>>,
    /// Devices for which a refusal was logged.
    refused: Mutex<BTreeSet<usize>>,
    /// Whether writes through one mapping are visible through another.
    aliasing: Mutex<BTreeMap<usize, bool>>,
}

impl Trials {
    /// Whether a device passed the trial with all requested properties.
    pub(crate) fn passed(&self, device: usize) -> bool {
        self.passed.lock().contains(&device)
    }

    pub(crate) fn pass(&self, device: usize) {
        self.passed.lock().insert(device);
    }

    /// Whether this is the first refusal by a device.
    pub(crate) fn first_refusal(&self, device: usize) -> bool {
        self.refused.lock().insert(device)
    }

    pub(super) fn aliasing(&self, device: usize) -> Option<bool> {
        self.aliasing.lock().get(&device).copied()
    }

    pub(super) fn set_aliasing(&self, device: usize, good: bool) {
        self.aliasing.lock().insert(device, good);
    }
}
