//! Devices, as values.

use super::sys;

/// A device of a driver, by its ordinal among the devices that this process may see
/// (`CUDA_VISIBLE_DEVICES` and MIG are the driver's business). Plain data, `Send` and `Sync`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Device {
    ordinal: usize,
    raw: sys::CUdevice,
}

impl Device {
    pub(super) fn new(ordinal: usize, raw: sys::CUdevice) -> Device {
        Device { ordinal, raw }
    }

    /// The device's number, from 0.
    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// The driver's handle.
    pub fn raw(&self) -> sys::CUdevice {
        self.raw
    }

    /// The location of this device's memory, as the driver wants it.
    pub(super) fn location(&self) -> sys::CUmemLocation {
        sys::CUmemLocation {
            type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
            id: self.raw,
        }
    }

    /// The device behind a handle that the driver gave out; handles are ordinals.
    pub(super) fn from_raw(raw: sys::CUdevice) -> Device {
        Device {
            ordinal: usize::try_from(raw).unwrap_or(usize::MAX),
            raw,
        }
    }
}
