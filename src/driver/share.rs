//! Memory shared with other processes and devices.

use super::context::Entered;
use super::error::DriverError;
#[cfg(unix)]
use super::sys::{self, CUmemAllocationHandleType};
use super::sys::{CUdeviceptr, CUmemGenericAllocationHandle};
use super::table::{call, thin};
use std::ffi::c_void;
#[cfg(unix)]
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

#[cfg(unix)]
pub(super) const DESCRIPTOR: CUmemAllocationHandleType =
    CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// Each kind of sharing requires its [`Feature`](super::Feature). Unsafe methods require live handles. Imported handles
/// must be released with [`Entered::mem_release`].
#[doc(hidden)]
impl Entered<'_> {
    thin! {
        /// Returns the physical handle behind an address; it must be released like an imported one.
        pub fn retain_handle(&self, address: CUdeviceptr) -> handle: CUmemGenericAllocationHandle
            = cuMemRetainAllocationHandle(&mut handle, address as usize as *mut c_void);

        /// Imports the handle behind a file descriptor of [`Entered::export_fd`]. The descriptor may be closed
        /// afterwards.
        #[cfg(unix)]
        pub fn import_fd(&self, fd: BorrowedFd<'_>) -> handle: CUmemGenericAllocationHandle
            = cuMemImportFromShareableHandle(&mut handle, number_of(fd), DESCRIPTOR);
    }

    /// Returns a file descriptor that stands for a handle in other processes. The handle must have been created as
    /// exportable.
    #[cfg(unix)]
    pub unsafe fn export_fd(
        &self,
        handle: CUmemGenericAllocationHandle,
    ) -> Result<OwnedFd, DriverError> {
        let driver = self.driver();
        // SAFETY: for this kind the driver opens a descriptor and writes it; the caller is responsible for the handle.
        unsafe {
            opened("cuMemExportToShareableHandle", |out| {
                call!(
                    driver,
                    cuMemExportToShareableHandle(out, handle, DESCRIPTOR, 0)
                )
            })
        }
    }

    /// Returns a dma-buf for a range of mapped device memory; address and bytes must be multiples of the host's page
    /// size.
    #[cfg(unix)]
    pub fn dma_buf(&self, address: CUdeviceptr, bytes: usize) -> Result<OwnedFd, DriverError> {
        let driver = self.driver();
        let kind = sys::CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
        // SAFETY: for this kind the driver opens a descriptor and writes it; it checks the range itself.
        unsafe {
            opened("cuMemGetHandleForAddressRange", |out| {
                call!(
                    driver,
                    cuMemGetHandleForAddressRange(out, address, bytes, kind, 0)
                )
            })
        }
    }
}

/// Converts a file descriptor to the driver's form: a "pointer" whose value is the number.
#[cfg(unix)]
pub(super) fn number_of(fd: BorrowedFd<'_>) -> *mut c_void {
    fd.as_raw_fd() as usize as *mut c_void
}

/// Returns the file descriptor that a call opens.
///
/// # Safety
/// `open` writes a descriptor that it opened, or none.
#[cfg(unix)]
pub(super) unsafe fn opened(
    call: &'static str,
    open: impl FnOnce(*mut c_void) -> Result<(), DriverError>,
) -> Result<OwnedFd, DriverError> {
    let mut fd: std::ffi::c_int = -1;
    open(std::ptr::from_mut(&mut fd).cast())?;
    if fd < 0 {
        return Err(DriverError::new(call, sys::CUresult::CUDA_ERROR_UNKNOWN));
    }
    // SAFETY: as the caller says.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
