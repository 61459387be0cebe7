//! Devices and their properties.

use super::error::DriverError;
use super::symbols::Feature;
use super::sys::{self, CUdevice_attribute};
use super::table::{Driver, call, thin};
use std::ffi::{CStr, c_char, c_int};

/// A device of a driver, by its ordinal among the devices visible to this process (the driver applies
/// `CUDA_VISIBLE_DEVICES` and MIG).
///
/// Cheap to clone, `Send` and `Sync`. Two are equal if they are the same device of the same driver.
#[derive(Clone)]
pub struct Device {
    driver: Driver,
    ordinal: usize,
    raw: sys::CUdevice,
}

impl Driver {
    /// Returns the number of devices visible to this process; 0 is not an error.
    pub fn device_count(&self) -> Result<usize, DriverError> {
        let mut count = 0;
        // SAFETY: the pointer is to a local integer.
        unsafe { call!(self, cuDeviceGetCount(&mut count)) }?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// Returns the device with this number.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_DEVICE` for an unknown number, or the driver's.
    pub fn device(&self, ordinal: usize) -> Result<Device, DriverError> {
        let number = c_int::try_from(ordinal).map_err(|_| {
            DriverError::new("cuDeviceGet", sys::CUresult::CUDA_ERROR_INVALID_DEVICE)
        })?;
        let mut raw = 0;
        // SAFETY: the pointer is to a local handle.
        unsafe { call!(self, cuDeviceGet(&mut raw, number)) }?;
        Ok(Device {
            driver: self.clone(),
            ordinal,
            raw,
        })
    }
}

impl Device {
    /// Returns the device for a handle of the driver; handles are ordinals.
    pub(super) fn from_raw(driver: &Driver, raw: sys::CUdevice) -> Device {
        Device {
            driver: driver.clone(),
            ordinal: usize::try_from(raw).unwrap_or(usize::MAX),
            raw,
        }
    }

    /// Returns the device's number, from 0.
    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// Returns the driver's handle.
    pub fn raw(&self) -> sys::CUdevice {
        self.raw
    }

    /// Returns the driver that the device belongs to.
    #[inline]
    pub fn driver(&self) -> &Driver {
        &self.driver
    }

    thin! {
        /// Returns the size of the device's memory in bytes.
        pub fn total_memory(&self) -> bytes: usize = cuDeviceTotalMem_v2(&mut bytes, self.raw) => u64: bytes as u64;

        /// Returns the value of an attribute; attributes newer than the bindings are allowed.
        ///
        /// # Errors
        /// The driver's; `CUDA_ERROR_INVALID_VALUE` for an attribute that it does not know.
        pub fn attribute(&self, attribute: CUdevice_attribute) -> value: i32
            = cuDeviceGetAttribute(&mut value, attribute, self.raw);

        /// Returns the device's product name.
        pub fn name(&self) -> text: [c_char; 256] = cuDeviceGetName(text.as_mut_ptr(), 256, self.raw)
            => String: string(&text);

        fn known_uuid(&self) -> uuid: sys::CUuuid = cuDeviceGetUuid_v2(&mut uuid, self.raw)
            => [u8; 16]: uuid.bytes.map(|byte| byte.to_ne_bytes()[0]);

        fn known_bus_id(&self) -> text: [c_char; 64] = cuDeviceGetPCIBusId(text.as_mut_ptr(), 64, self.raw)
            => String: string(&text);

        fn reaches(&self, peer: &Device) -> can: c_int = cuDeviceCanAccessPeer(&mut can, self.raw, peer.raw)
            => bool: can != 0;
    }

    /// Returns the device's UUID, or that of the MIG instance; none if the driver does not support the query.
    pub fn uuid(&self) -> Result<Option<[u8; 16]>, DriverError> {
        if !self.driver.has(Feature::DeviceUuid) {
            return Ok(None);
        }
        self.known_uuid().map(Some)
    }

    /// Returns the device's PCI address, such as `0000:3b:00.0`; none if the driver does not support the query.
    pub fn pci_bus_id(&self) -> Result<Option<String>, DriverError> {
        if !self.driver.has(Feature::PciBusId) {
            return Ok(None);
        }
        self.known_bus_id().map(Some)
    }

    /// Whether driver and device support virtual memory management.
    pub fn supports_vmm(&self) -> Result<bool, DriverError> {
        self.supports(
            Feature::Vmm,
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
        )
    }

    /// Whether driver and device support the driver's own memory pools.
    pub fn supports_pools(&self) -> Result<bool, DriverError> {
        self.supports(
            Feature::Pools,
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED,
        )
    }

    /// Whether the driver exports `feature` and the device reports `attribute` as non-zero; an attribute unknown to the
    /// driver counts as zero.
    #[doc(hidden)]
    pub fn supports(
        &self,
        feature: Feature,
        attribute: CUdevice_attribute,
    ) -> Result<bool, DriverError> {
        if !self.driver.has(feature) {
            return Ok(false);
        }
        match self.attribute(attribute) {
            Ok(value) => Ok(value != 0),
            Err(error) if error.code() == sys::CUresult::CUDA_ERROR_INVALID_VALUE => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Whether kernels on this device can be given access to memory on `peer`; false if the driver lacks
    /// [`Feature::Peers`].
    ///
    /// # Errors
    /// The driver's; `CUDA_ERROR_INVALID_HANDLE` for a device of another driver.
    pub fn can_access_peer(&self, peer: &Device) -> Result<bool, DriverError> {
        self.driver
            .refuse_foreign(&peer.driver, "cuDeviceCanAccessPeer")?;
        if !self.driver.has(Feature::Peers) {
            return Ok(false);
        }
        self.reaches(peer)
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Device) -> bool {
        self.ordinal == other.ordinal && self.driver.same_library(&other.driver)
    }
}

impl Eq for Device {}

debug_fields!(Device, self => ordinal: self.ordinal);

/// Converts the text up to the first zero, or all of it.
fn string(text: &[c_char]) -> String {
    let bytes: Vec<u8> = text.iter().map(|unit| unit.to_ne_bytes()[0]).collect();
    match CStr::from_bytes_until_nul(&bytes) {
        Ok(text) => text.to_string_lossy().into_owned(),
        Err(_) => String::from_utf8_lossy(&bytes).into_owned(),
    }
}
