//! What devices say about themselves.

use super::device::Device;
use super::error::DriverError;
use super::symbols::Feature;
use super::sys::{self, CUdevice_attribute};
use super::table::{Driver, call};
use std::ffi::{CStr, c_char, c_int};

impl Driver {
    /// How many devices this process may see; 0 is not an error.
    ///
    /// # Errors
    /// The driver's.
    pub fn device_count(&self) -> Result<usize, DriverError> {
        let mut count = 0;
        // SAFETY: the pointer is to a local integer.
        unsafe { call!(self, cuDeviceGetCount(&mut count)) }?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// The device with this number.
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
        Ok(Device::new(ordinal, raw))
    }

    /// The device's product name.
    ///
    /// # Errors
    /// The driver's.
    pub fn device_name(&self, device: Device) -> Result<String, DriverError> {
        let mut text: [c_char; 256] = [0; 256];
        // SAFETY: the pointer is to a local array of the length that is given.
        unsafe { call!(self, cuDeviceGetName(text.as_mut_ptr(), 256, device.raw())) }?;
        Ok(string(&text))
    }

    /// The device's memory in bytes.
    ///
    /// # Errors
    /// The driver's.
    pub fn total_memory(&self, device: Device) -> Result<u64, DriverError> {
        let mut bytes = 0_usize;
        // SAFETY: the pointer is to a local integer.
        unsafe { call!(self, cuDeviceTotalMem_v2(&mut bytes, device.raw())) }?;
        Ok(bytes as u64)
    }

    /// A number that describes the device; also numbers newer than the bindings may be asked for.
    ///
    /// # Errors
    /// The driver's; `CUDA_ERROR_INVALID_VALUE` for an attribute that it does not know.
    pub fn attribute(
        &self,
        device: Device,
        attribute: CUdevice_attribute,
    ) -> Result<i32, DriverError> {
        let mut value = 0;
        // SAFETY: the pointer is to a local integer.
        unsafe {
            call!(
                self,
                cuDeviceGetAttribute(&mut value, attribute, device.raw())
            )
        }?;
        Ok(value)
    }

    /// The device's UUID, or that of the MIG instance; none if the driver cannot say.
    ///
    /// # Errors
    /// The driver's.
    pub fn uuid(&self, device: Device) -> Result<Option<[u8; 16]>, DriverError> {
        if !self.has(Feature::DeviceUuid) {
            return Ok(None);
        }
        let mut uuid = sys::CUuuid::default();
        // SAFETY: the pointer is to a local struct.
        unsafe { call!(self, cuDeviceGetUuid_v2(&mut uuid, device.raw())) }?;
        Ok(Some(uuid.bytes.map(|byte| byte.to_ne_bytes()[0])))
    }

    /// The device's PCI address, such as `0000:3b:00.0`; none if the driver cannot say.
    ///
    /// # Errors
    /// The driver's.
    pub fn pci_bus_id(&self, device: Device) -> Result<Option<String>, DriverError> {
        if !self.has(Feature::PciBusId) {
            return Ok(None);
        }
        let mut text: [c_char; 64] = [0; 64];
        // SAFETY: the pointer is to a local array of the length that is given.
        unsafe {
            call!(
                self,
                cuDeviceGetPCIBusId(text.as_mut_ptr(), 64, device.raw())
            )
        }?;
        Ok(Some(string(&text)))
    }

    /// True if driver and device support virtual memory management.
    ///
    /// # Errors
    /// The driver's.
    pub fn supports_vmm(&self, device: Device) -> Result<bool, DriverError> {
        self.supports(
            device,
            Feature::Vmm,
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
        )
    }

    /// True if driver and device support the driver's own memory pools.
    ///
    /// # Errors
    /// The driver's.
    pub fn supports_pools(&self, device: Device) -> Result<bool, DriverError> {
        self.supports(
            device,
            Feature::Pools,
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED,
        )
    }

    /// True if the driver exports `feature` and the device reports `attribute` as non-zero.
    ///
    /// # Errors
    /// The driver's. An attribute that the driver does not know counts as false.
    pub fn supports(
        &self,
        device: Device,
        feature: Feature,
        attribute: CUdevice_attribute,
    ) -> Result<bool, DriverError> {
        if !self.has(feature) {
            return Ok(false);
        }
        match self.attribute(device, attribute) {
            Ok(value) => Ok(value != 0),
            Err(error) if error.code() == sys::CUresult::CUDA_ERROR_INVALID_VALUE => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// True if kernels on `device` can be given access to memory on `peer`; false if the driver
    /// lacks [`Feature::Peers`].
    ///
    /// # Errors
    /// The driver's.
    pub fn can_access_peer(&self, device: Device, peer: Device) -> Result<bool, DriverError> {
        if !self.has(Feature::Peers) {
            return Ok(false);
        }
        let mut can = 0;
        // SAFETY: the pointer is to a local integer.
        unsafe {
            call!(
                self,
                cuDeviceCanAccessPeer(&mut can, device.raw(), peer.raw())
            )
        }?;
        Ok(can != 0)
    }
}

/// The text up to the first zero, or all of it.
fn string(text: &[c_char]) -> String {
    let bytes: Vec<u8> = text.iter().map(|unit| unit.to_ne_bytes()[0]).collect();
    match CStr::from_bytes_until_nul(&bytes) {
        Ok(text) => text.to_string_lossy().into_owned(),
        Err(_) => String::from_utf8_lossy(&bytes).into_owned(),
    }
}
