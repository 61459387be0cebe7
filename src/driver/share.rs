//! Memory shared with other processes and devices.

use super::context::Entered;
use super::error::DriverError;
use super::sys::{
    self, CUdeviceptr, CUmemAllocationHandleType, CUmemFabricHandle, CUmemGenericAllocationHandle,
};
use super::table::call;
use std::ffi::c_void;
use std::ptr;

impl Entered<'_> {
    /// The physical handle behind an address; it must be released again with
    /// [`Entered::mem_release`].
    ///
    /// # Errors
    /// The driver's; `CUDA_ERROR_NOT_FOUND` without
    /// [`Feature::HandleFromAddress`](super::Feature::HandleFromAddress).
    pub fn retain_handle(
        &self,
        address: CUdeviceptr,
    ) -> Result<CUmemGenericAllocationHandle, DriverError> {
        let mut handle = 0;
        let at = address as usize as *mut c_void;
        // SAFETY: the output is a local; the address is looked up, not followed.
        unsafe { call!(self.driver(), cuMemRetainAllocationHandle(&mut handle, at)) }?;
        Ok(handle)
    }

    /// A file descriptor that stands for a handle in other processes. The handle must have been
    /// created as exportable.
    ///
    /// # Errors
    /// The driver's; `CUDA_ERROR_NOT_FOUND` without
    /// [`Feature::VmmExport`](super::Feature::VmmExport).
    ///
    /// # Safety
    /// The handle must be live.
    #[cfg(unix)]
    pub unsafe fn export_fd(
        &self,
        handle: CUmemGenericAllocationHandle,
    ) -> Result<std::os::fd::OwnedFd, DriverError> {
        use std::os::fd::FromRawFd;
        let mut fd: std::ffi::c_int = -1;
        let out = ptr::from_mut(&mut fd).cast();
        let kind = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        // SAFETY: for this kind the driver writes one integer; the caller vouches for the handle.
        unsafe {
            call!(
                self.driver(),
                cuMemExportToShareableHandle(out, handle, kind, 0)
            )
        }?;
        if fd < 0 {
            let code = sys::CUresult::CUDA_ERROR_UNKNOWN;
            return Err(DriverError::new("cuMemExportToShareableHandle", code));
        }
        // SAFETY: the driver has just opened it for us.
        Ok(unsafe { std::os::fd::OwnedFd::from_raw_fd(fd) })
    }

    /// The handle that a file descriptor of [`Entered::export_fd`] stands for; it must be released
    /// with [`Entered::mem_release`]. The descriptor may be closed afterwards.
    ///
    /// # Errors
    /// The driver's; `CUDA_ERROR_NOT_FOUND` without
    /// [`Feature::VmmExport`](super::Feature::VmmExport).
    #[cfg(unix)]
    pub fn import_fd(
        &self,
        fd: std::os::fd::BorrowedFd<'_>,
    ) -> Result<CUmemGenericAllocationHandle, DriverError> {
        use std::os::fd::AsRawFd;
        let mut handle = 0;
        let kind = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        let number = fd.as_raw_fd() as usize as *mut c_void;
        // SAFETY: the output is a local; for this kind the "pointer" is the number itself.
        unsafe {
            call!(
                self.driver(),
                cuMemImportFromShareableHandle(&mut handle, number, kind)
            )
        }?;
        Ok(handle)
    }

    /// The fabric handle that stands for a handle on other machines.
    ///
    /// # Errors
    /// The driver's; `CUDA_ERROR_NOT_FOUND` without
    /// [`Feature::VmmExport`](super::Feature::VmmExport).
    ///
    /// # Safety
    /// The handle must be live.
    pub unsafe fn export_fabric(
        &self,
        handle: CUmemGenericAllocationHandle,
    ) -> Result<CUmemFabricHandle, DriverError> {
        let mut fabric = CUmemFabricHandle::default();
        let out = ptr::from_mut(&mut fabric).cast();
        let kind = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC;
        // SAFETY: for this kind the driver writes this struct; the caller vouches for the handle.
        unsafe {
            call!(
                self.driver(),
                cuMemExportToShareableHandle(out, handle, kind, 0)
            )
        }?;
        Ok(fabric)
    }

    /// The handle that a fabric handle stands for; it must be released with
    /// [`Entered::mem_release`].
    ///
    /// # Errors
    /// The driver's; `CUDA_ERROR_NOT_FOUND` without
    /// [`Feature::VmmExport`](super::Feature::VmmExport).
    pub fn import_fabric(
        &self,
        mut fabric: CUmemFabricHandle,
    ) -> Result<CUmemGenericAllocationHandle, DriverError> {
        let mut handle = 0;
        let from = ptr::from_mut(&mut fabric).cast();
        let kind = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC;
        // SAFETY: both pointers are to locals; for this kind the driver reads this struct.
        unsafe {
            call!(
                self.driver(),
                cuMemImportFromShareableHandle(&mut handle, from, kind)
            )
        }?;
        Ok(handle)
    }

    /// A dma-buf for a range of mapped device memory; address and bytes must be multiples of the
    /// host's page size.
    ///
    /// # Errors
    /// The driver's; `CUDA_ERROR_NOT_FOUND` without
    /// [`Feature::RangeHandles`](super::Feature::RangeHandles).
    #[cfg(unix)]
    pub fn dma_buf(
        &self,
        address: CUdeviceptr,
        bytes: usize,
    ) -> Result<std::os::fd::OwnedFd, DriverError> {
        use std::os::fd::FromRawFd;
        let mut fd: std::ffi::c_int = -1;
        let out = ptr::from_mut(&mut fd).cast();
        let kind = sys::CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
        // SAFETY: for this kind the driver writes one integer; it checks the range itself.
        unsafe {
            call!(
                self.driver(),
                cuMemGetHandleForAddressRange(out, address, bytes, kind, 0)
            )
        }?;
        if fd < 0 {
            let code = sys::CUresult::CUDA_ERROR_UNKNOWN;
            return Err(DriverError::new("cuMemGetHandleForAddressRange", code));
        }
        // SAFETY: the driver has just opened it for us.
        Ok(unsafe { std::os::fd::OwnedFd::from_raw_fd(fd) })
    }

    /// The handle that stands for a plain allocation ([`Entered::mem_alloc`]) in other processes:
    /// for the whole allocation that contains `address`.
    ///
    /// # Errors
    /// The driver's; `CUDA_ERROR_NOT_FOUND` without
    /// [`Feature::LegacyIpc`](super::Feature::LegacyIpc).
    pub fn ipc_handle(&self, address: CUdeviceptr) -> Result<sys::CUipcMemHandle, DriverError> {
        let mut handle = sys::CUipcMemHandle::default();
        // SAFETY: the output is a local; the driver checks the address.
        unsafe { call!(self.driver(), cuIpcGetMemHandle(&mut handle, address)) }?;
        Ok(handle)
    }

    /// Maps another process's allocation; its base address here.
    ///
    /// # Errors
    /// The driver's; `CUDA_ERROR_NOT_FOUND` without
    /// [`Feature::LegacyIpc`](super::Feature::LegacyIpc).
    pub fn ipc_open(&self, handle: sys::CUipcMemHandle) -> Result<CUdeviceptr, DriverError> {
        let mut address = 0;
        let flags = sys::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS;
        // SAFETY: the output is a local; the driver checks the handle.
        unsafe {
            call!(
                self.driver(),
                cuIpcOpenMemHandle_v2(&mut address, handle, flags)
            )
        }?;
        Ok(address)
    }

    /// Unmaps what [`Entered::ipc_open`] mapped.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// No work may use the memory any more, neither submitted nor later.
    pub unsafe fn ipc_close(&self, address: CUdeviceptr) -> Result<(), DriverError> {
        // SAFETY: the caller vouches for the memory.
        unsafe { call!(self.driver(), cuIpcCloseMemHandle(address)) }
    }
}
