//! Virtual memory management: address space, physical handles, mappings and access rights.
//!
//! Sizes and addresses are multiples of [`Entered::granularity`]. A handle is mapped and unmapped as a whole; it may be
//! mapped at several addresses at the same time. Nothing here waits for running kernels or is stream-ordered: every
//! call takes effect immediately.

use super::context::Entered;
use super::device::Device;
use super::error::DriverError;
use super::symbols::Feature;
use super::sys::{
    self, CUdevice_attribute, CUdeviceptr, CUmemAllocationGranularity_flags,
    CUmemAllocationHandleType, CUmemGenericAllocationHandle,
};
use super::table::{call, thin};

const SMALLEST: CUmemAllocationGranularity_flags =
    CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
pub(super) const READ_WRITE: sys::CUmemAccess_flags =
    sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;

/// The properties of physical memory, fixed at [`Entered::mem_create`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct MemoryProperties {
    /// The handle of the device that has the memory.
    pub device: sys::CUdevice,
    /// The handle types it can be exported as: a bit set of the constants.
    pub export: CUmemAllocationHandleType,
    /// Whether other devices on the bus may access it directly.
    pub gpu_direct_rdma: bool,
}

impl MemoryProperties {
    /// Returns the properties that the device supports and that cost nothing on current drivers: exportable as a POSIX
    /// file descriptor, and ready for GPUDirect RDMA.
    pub fn for_device(device: &Device) -> Result<MemoryProperties, DriverError> {
        let posix = device.supports(
            Feature::VmmExport,
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
        )?;
        let rdma = device.supports(
            Feature::Vmm,
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
        )?;
        Ok(MemoryProperties {
            export: if posix {
                CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            } else {
                CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE
            },
            gpu_direct_rdma: rdma,
            ..MemoryProperties::plain(device)
        })
    }

    /// Returns properties without export and RDMA.
    pub fn plain(device: &Device) -> MemoryProperties {
        MemoryProperties {
            device: device.raw(),
            export: CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
            gpu_direct_rdma: false,
        }
    }

    /// Converts to the driver's structure.
    pub fn raw(&self) -> sys::CUmemAllocationProp {
        let mut raw = sys::CUmemAllocationProp {
            type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: self.export,
            location: location_of(self.device),
            ..Default::default()
        };
        raw.allocFlags.gpuDirectRDMACapable = u8::from(self.gpu_direct_rdma);
        raw
    }
}

/// Virtual memory. Requires [`Feature::Vmm`]. Unsafe methods require live handles, and ranges that the caller has
/// reserved or mapped as documented.
#[doc(hidden)]
impl Entered<'_> {
    thin! {
        /// Reserves `bytes` of address space, aligned to `alignment` (a power of two, or 0 for the driver's choice), at
        /// `hint` if that is free and not 0.
        pub fn address_reserve(&self, bytes: usize, alignment: usize, hint: CUdeviceptr) -> address: CUdeviceptr
            = cuMemAddressReserve(&mut address, bytes, alignment, hint, 0);

        /// Releases a reservation, given by its exact address and size. Nothing in it may be mapped or used any more.
        /// After an error the range must not be used either.
        pub unsafe fn address_free(&self, address: CUdeviceptr, bytes: usize) = cuMemAddressFree(address, bytes);

        /// Maps a whole handle, whose size is `bytes`, at `address`, where nothing is mapped. The mapping is
        /// inaccessible before [`Entered::set_access`]. After an error it may exist.
        pub unsafe fn mem_map(&self, address: CUdeviceptr, bytes: usize, handle: CUmemGenericAllocationHandle)
            = cuMemMap(address, bytes, 0, handle, 0);

        /// The smallest unit of physical memory with these properties, in bytes.
        pub fn granularity(&self, properties: &MemoryProperties) -> bytes: usize
            = cuMemGetAllocationGranularity(&mut bytes, &properties.raw(), SMALLEST);

        /// Creates `bytes` of physical memory. Counts as one handle operation.
        pub fn mem_create(&self, bytes: usize, properties: &MemoryProperties) -> handle: CUmemGenericAllocationHandle
            = cuMemCreate(&mut handle, bytes, &properties.raw(), 0)
            => CUmemGenericAllocationHandle: { self.driver().add_handle_op(); handle };

        /// Grants the devices access to a range of one or more whole mappings. Access belongs to the mapping and ends
        /// with it.
        pub unsafe fn set_access(&self, address: CUdeviceptr, bytes: usize, devices: &[Device])
            = cuMemSetAccess(address, bytes, access_list(devices, true).as_ptr(), devices.len());

        /// Whether `device` may read and write at `address`.
        pub fn has_access(&self, address: CUdeviceptr, device: &Device) -> flags: u64
            = cuMemGetAccess(&mut flags, &location_of(device.raw()), address)
            => bool: flags == u64::from(READ_WRITE.0);
    }

    /// Unmaps a range of one or more whole mappings: no work may use the addresses any more, neither submitted nor
    /// later. An error means that the range is still mapped, or that its state cannot be determined, since a failed
    /// call may have unmapped it.
    pub unsafe fn mem_unmap(&self, address: CUdeviceptr, bytes: usize) -> Result<(), DriverError> {
        // SAFETY: the caller's contract.
        let unmapped = unsafe { call!(self.driver(), cuMemUnmap(address, bytes)) };
        let Some(error) = unmapped.err().filter(|error| !error.is_fatal()) else {
            return unmapped;
        };
        match self.memory_at(address) {
            Ok(None) => Ok(()),
            Err(lost) if lost.is_fatal() => Err(lost),
            _ => Err(error),
        }
    }

    /// [`mem_unmap`](Self::mem_unmap) of one mapping after a failed [`Entered::mem_map`], which may have mapped it, or
    /// after a failed unmapping.
    pub unsafe fn mem_unmap_if_mapped(
        &self,
        address: CUdeviceptr,
        bytes: usize,
    ) -> Result<(), DriverError> {
        match self.memory_at(address)? {
            // SAFETY: the caller's contract, and the mapping exists.
            Some(_) => unsafe { self.mem_unmap(address, bytes) },
            None => Ok(()),
        }
    }

    /// Releases a handle. The memory lives on while it is mapped or exported. Counts as one handle operation. After an
    /// error the handle must not be used any more: the driver may have released it and reused its value.
    pub unsafe fn mem_release(
        &self,
        handle: CUmemGenericAllocationHandle,
    ) -> Result<(), DriverError> {
        // SAFETY: the caller is responsible for the handle.
        let released = unsafe { call!(self.driver(), cuMemRelease(handle)) };
        match released {
            Ok(()) => self.driver().add_handle_op(),
            Err(error) => self.driver().drop_failed(&"a memory handle", error),
        }
        released
    }
}

/// Returns the driver's location of a device's memory.
pub(super) fn location_of(device: sys::CUdevice) -> sys::CUmemLocation {
    sys::CUmemLocation {
        type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        id: device,
    }
}

/// Returns read and write access, or no access, for each device.
pub(super) fn access_list(devices: &[Device], on: bool) -> Vec<sys::CUmemAccessDesc> {
    let flags = match on {
        true => READ_WRITE,
        false => sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_NONE,
    };
    devices
        .iter()
        .map(|device| sys::CUmemAccessDesc {
            location: location_of(device.raw()),
            flags,
        })
        .collect()
}
