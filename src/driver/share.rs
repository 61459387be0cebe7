//! Memory shared with other processes and devices.

use super::context::Entered;
use super::error::DriverError;
use super::sys::{
    self, CUdeviceptr, CUmemAllocationHandleType, CUmemFabricHandle, CUmemGenericAllocationHandle,
};
use super::table::{call, thin};
use std::ffi::c_void;
use std::ptr;

/// Each kind of sharing needs its [`Feature`](super::Feature). An unsafe method takes live handles.
#[doc(hidden)]
impl Entered<'_> {
    thin! {
        /// The physical handle behind an address; it must be released again with
        /// [`Entered::mem_release`].
        fn retain_handle(address: CUdeviceptr) -> handle: CUmemGenericAllocationHandle
            = cuMemRetainAllocationHandle(&mut handle, address as usize as *mut c_void);

        /// The handle that stands for a plain allocation ([`Entered::mem_alloc`]) in other processes:
        /// for the whole allocation that contains `address`.
        fn ipc_handle(address: CUdeviceptr) -> handle: sys::CUipcMemHandle
            = cuIpcGetMemHandle(&mut handle, address);

        /// Maps another process's allocation; its base address here.
        fn ipc_open(handle: sys::CUipcMemHandle) -> address: CUdeviceptr
            = cuIpcOpenMemHandle_v2(&mut address, handle, sys::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);

        /// Unmaps what [`Entered::ipc_open`] mapped: no work may use the memory any more, neither submitted nor
        /// later.
        unsafe fn ipc_close(address: CUdeviceptr) = cuIpcCloseMemHandle(address);
    }

    /// A file descriptor that stands for a handle in other processes. The handle must have been
    /// created as exportable.
    #[cfg(unix)]
    pub unsafe fn export_fd(
        &self,
        handle: CUmemGenericAllocationHandle,
    ) -> Result<std::os::fd::OwnedFd, DriverError> {
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
        // SAFETY: the driver has just opened it for us.
        unsafe { opened("cuMemExportToShareableHandle", fd) }
    }

    /// The handle that a file descriptor of [`Entered::export_fd`] stands for; it must be released
    /// with [`Entered::mem_release`]. The descriptor may be closed afterwards.
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
    #[cfg(unix)]
    pub fn dma_buf(
        &self,
        address: CUdeviceptr,
        bytes: usize,
    ) -> Result<std::os::fd::OwnedFd, DriverError> {
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
        // SAFETY: the driver has just opened it for us.
        unsafe { opened("cuMemGetHandleForAddressRange", fd) }
    }
}

/// A file descriptor that a call gave out.
///
/// # Safety
/// It is ours if it is one.
#[cfg(unix)]
pub(super) unsafe fn opened(
    call: &'static str,
    fd: std::ffi::c_int,
) -> Result<std::os::fd::OwnedFd, DriverError> {
    use std::os::fd::FromRawFd;
    if fd < 0 {
        return Err(DriverError::new(call, sys::CUresult::CUDA_ERROR_UNKNOWN));
    }
    // SAFETY: as the caller says.
    Ok(unsafe { std::os::fd::OwnedFd::from_raw_fd(fd) })
}
