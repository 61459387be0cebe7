//! Plain device memory, page-locked host memory, copies and fills.

use super::context::{Context, Entered};
use super::error::DriverError;
use super::owed::Owed;
use super::sys::{self, CUdeviceptr, CUpointer_attribute, CUstream};
use super::table::call;
use std::ffi::c_void;
use std::fmt;
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};

/// A device's memory as the driver sees it, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct MemInfo {
    /// What can still be allocated, by all processes together.
    pub free: u64,
    /// What there is.
    pub total: u64,
}

/// How page-locked host memory is made; the default is plain.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct HostMemory {
    /// Page-locked for all contexts, not only the one that is current.
    pub portable: bool,
    /// Mapped into the device's address space.
    pub device_map: bool,
    /// Write-combined: fast to write and to transfer, slow to read on the host.
    pub write_combined: bool,
}

impl HostMemory {
    fn flags(self) -> u32 {
        let flag = |on: bool, bit: u32| if on { bit } else { 0 };
        flag(self.portable, sys::CU_MEMHOSTALLOC_PORTABLE)
            | flag(self.device_map, sys::CU_MEMHOSTALLOC_DEVICEMAP)
            | flag(self.write_combined, sys::CU_MEMHOSTALLOC_WRITECOMBINED)
    }
}

/// Page-locked host memory, freed on drop, which may wait for work that uses it. `Send` and `Sync`: an
/// address with a lifetime; what may be done with the bytes is for its owner to say.
pub struct HostAllocation {
    context: Context,
    address: NonNull<c_void>,
    bytes: usize,
}

// SAFETY: page-locked memory may be used and freed from any thread.
unsafe impl Send for HostAllocation {}
// SAFETY: as above, and nothing in here reads or writes the memory.
unsafe impl Sync for HostAllocation {}

impl HostAllocation {
    /// The first byte.
    pub fn ptr(&self) -> NonNull<c_void> {
        self.address
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl fmt::Debug for HostAllocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostAllocation")
            .field("address", &self.address)
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

impl Drop for HostAllocation {
    fn drop(&mut self) {
        self.context.release(Owed::Host(self.address));
    }
}

impl Entered<'_> {
    /// Allocates `bytes` of device memory; the address is a multiple of 256 at least.
    ///
    /// # Errors
    /// The driver's; `CUDA_ERROR_INVALID_VALUE` for 0 bytes.
    pub fn mem_alloc(&self, bytes: usize) -> Result<CUdeviceptr, DriverError> {
        let mut address = 0;
        // SAFETY: the pointer is to a local integer.
        unsafe { call!(self.driver(), cuMemAlloc_v2(&mut address, bytes)) }?;
        Ok(address)
    }

    /// Frees memory of [`Entered::mem_alloc`]. May wait until all running kernels have finished.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// No work may use the memory any more, neither submitted nor later.
    pub unsafe fn mem_free(&self, address: CUdeviceptr) -> Result<(), DriverError> {
        // SAFETY: the caller vouches for the memory.
        unsafe { call!(self.driver(), cuMemFree_v2(address)) }
    }

    /// Free and total memory of the context's device, in bytes. Costs microseconds.
    ///
    /// # Errors
    /// The driver's.
    pub fn mem_info(&self) -> Result<MemInfo, DriverError> {
        let (mut free, mut total) = (0_usize, 0_usize);
        // SAFETY: both pointers are to local integers.
        unsafe { call!(self.driver(), cuMemGetInfo_v2(&mut free, &mut total)) }?;
        Ok(MemInfo {
            free: free as u64,
            total: total as u64,
        })
    }

    /// Base address and bytes of the allocation or mapping that contains `address`.
    ///
    /// # Errors
    /// The driver's.
    pub fn address_range(&self, address: CUdeviceptr) -> Result<(CUdeviceptr, usize), DriverError> {
        let (mut base, mut bytes) = (0, 0);
        // SAFETY: both outputs are locals; any address may be asked about.
        unsafe {
            call!(
                self.driver(),
                cuMemGetAddressRange_v2(&mut base, &mut bytes, address)
            )
        }?;
        Ok((base, bytes))
    }

    /// One attribute of an address.
    ///
    /// # Errors
    /// The driver's; `CUDA_ERROR_INVALID_VALUE` for an address that it does not know.
    ///
    /// # Safety
    /// `T` must be the type that the driver writes for `attribute`.
    pub unsafe fn pointer_attribute<T: Copy>(
        &self,
        attribute: CUpointer_attribute,
        address: CUdeviceptr,
    ) -> Result<T, DriverError> {
        let mut value = MaybeUninit::<T>::zeroed();
        let out = value.as_mut_ptr().cast();
        // SAFETY: the output is a local of the type that the caller vouches for.
        unsafe {
            call!(
                self.driver(),
                cuPointerGetAttribute(out, attribute, address)
            )
        }?;
        // SAFETY: the driver has written it.
        Ok(unsafe { value.assume_init() })
    }

    /// Makes synchronous copies to and from this allocation really synchronous, as transfers by
    /// other devices need it.
    ///
    /// # Errors
    /// The driver's.
    pub fn set_sync_memops(&self, address: CUdeviceptr, on: bool) -> Result<(), DriverError> {
        let value = u32::from(on);
        let attribute = CUpointer_attribute::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS;
        // SAFETY: the driver reads one integer from the local.
        unsafe {
            call!(
                self.driver(),
                cuPointerSetAttribute(ptr::from_ref(&value).cast(), attribute, address)
            )
        }
    }

    /// Allocates `bytes` of page-locked host memory.
    ///
    /// # Errors
    /// The driver's.
    pub fn host_alloc(&self, bytes: usize, how: HostMemory) -> Result<*mut c_void, DriverError> {
        let mut address = ptr::null_mut();
        // SAFETY: the pointer is to a local.
        unsafe {
            call!(
                self.driver(),
                cuMemHostAlloc(&mut address, bytes, how.flags())
            )
        }?;
        Ok(address)
    }

    /// Allocates `bytes` of page-locked host memory that frees itself. Its bytes are undefined.
    ///
    /// # Errors
    /// The driver's.
    pub fn host_allocation(
        &self,
        bytes: usize,
        how: HostMemory,
    ) -> Result<HostAllocation, DriverError> {
        let address = NonNull::new(self.host_alloc(bytes, how)?)
            .ok_or_else(|| DriverError::new("cuMemHostAlloc", sys::CUresult::CUDA_ERROR_UNKNOWN))?;
        Ok(HostAllocation {
            context: self.context().clone(),
            address,
            bytes,
        })
    }

    /// Frees memory of [`Entered::host_alloc`].
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// Nothing may use the memory any more, neither the host nor submitted work.
    pub unsafe fn host_free(&self, address: *mut c_void) -> Result<(), DriverError> {
        // SAFETY: the caller vouches for the memory.
        unsafe { call!(self.driver(), cuMemFreeHost(address)) }
    }

    /// The address under which the device sees page-locked host memory.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// `address` must lie in live page-locked memory.
    pub unsafe fn host_device_pointer(
        &self,
        address: *mut c_void,
    ) -> Result<CUdeviceptr, DriverError> {
        let mut device = 0;
        // SAFETY: the output is a local, and the caller vouches for the memory.
        unsafe {
            call!(
                self.driver(),
                cuMemHostGetDevicePointer_v2(&mut device, address, 0)
            )
        }?;
        Ok(device)
    }

    /// Page-locks `bytes` of host memory that the caller owns. `write_combined` does not apply.
    ///
    /// # Errors
    /// The driver's; `CUDA_ERROR_NOT_FOUND` without
    /// [`Feature::HostRegister`](super::Feature::HostRegister).
    ///
    /// # Safety
    /// The memory must stay allocated until [`Entered::host_unregister`].
    pub unsafe fn host_register(
        &self,
        address: *mut c_void,
        bytes: usize,
        how: HostMemory,
    ) -> Result<(), DriverError> {
        let flags = HostMemory {
            write_combined: false,
            ..how
        }
        .flags();
        // SAFETY: the caller vouches for the memory.
        unsafe { call!(self.driver(), cuMemHostRegister_v2(address, bytes, flags)) }
    }

    /// Undoes [`Entered::host_register`].
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// No submitted work may rely on the memory being page-locked.
    pub unsafe fn host_unregister(&self, address: *mut c_void) -> Result<(), DriverError> {
        // SAFETY: the caller vouches for the memory.
        unsafe { call!(self.driver(), cuMemHostUnregister(address)) }
    }
}

/// Copies and fills in stream order: they return before the work is done.
///
/// All of them share one contract. `stream` must be valid as for [`Entered::record`]. The ranges
/// must be accessible where the operation runs, must stay allocated and mapped until it has
/// completed, and nothing may write to them (or, for what is written, touch them) at the same time.
/// A host range that is not page-locked may be copied before the call returns, but need not be.
impl Entered<'_> {
    /// Fills `bytes` bytes with `value`.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// The contract of stream-ordered operations above.
    pub unsafe fn memset_d8(
        &self,
        to: CUdeviceptr,
        value: u8,
        bytes: usize,
        stream: CUstream,
    ) -> Result<(), DriverError> {
        // SAFETY: the caller vouches for range and stream.
        unsafe { call!(self.driver(), cuMemsetD8Async(to, value, bytes, stream)) }
    }

    /// Fills `words` 32-bit words with `value`; `to` must be a multiple of 4.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// The contract of stream-ordered operations above.
    pub unsafe fn memset_d32(
        &self,
        to: CUdeviceptr,
        value: u32,
        words: usize,
        stream: CUstream,
    ) -> Result<(), DriverError> {
        // SAFETY: the caller vouches for range and stream.
        unsafe { call!(self.driver(), cuMemsetD32Async(to, value, words, stream)) }
    }

    /// Copies `bytes` bytes from the host to the device.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// The contract of stream-ordered operations above.
    pub unsafe fn copy_host_to_device(
        &self,
        to: CUdeviceptr,
        from: *const c_void,
        bytes: usize,
        stream: CUstream,
    ) -> Result<(), DriverError> {
        // SAFETY: the caller vouches for ranges and stream.
        unsafe { call!(self.driver(), cuMemcpyHtoDAsync_v2(to, from, bytes, stream)) }
    }

    /// Copies `bytes` bytes from the device to the host.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// The contract of stream-ordered operations above.
    pub unsafe fn copy_device_to_host(
        &self,
        to: *mut c_void,
        from: CUdeviceptr,
        bytes: usize,
        stream: CUstream,
    ) -> Result<(), DriverError> {
        // SAFETY: the caller vouches for ranges and stream.
        unsafe { call!(self.driver(), cuMemcpyDtoHAsync_v2(to, from, bytes, stream)) }
    }

    /// Words of the device, after everything that the stream was given. Waits for the stream. Host memory
    /// that the copy may still write to, since no wait succeeded, is leaked.
    ///
    /// # Safety
    /// The contract of stream-ordered operations above.
    pub(crate) unsafe fn read_words(
        &self,
        from: CUdeviceptr,
        words: usize,
        stream: CUstream,
    ) -> Result<Vec<u32>, DriverError> {
        let mut read = vec![0u32; words];
        let (to, bytes) = (read.as_mut_ptr().cast(), size_of_val(&read[..]));
        // SAFETY: the caller vouches for the source and the stream. The target has as many bytes, and is
        // kept until the stream was waited for, also if the copy failed: that may be for earlier work.
        let (copied, waited) = unsafe {
            (
                self.copy_device_to_host(to, from, bytes, stream),
                self.stream_synchronize(stream),
            )
        };
        match waited {
            Ok(()) => copied.map(|()| read),
            Err(error) => {
                std::mem::forget(read);
                Err(copied.err().unwrap_or(error))
            }
        }
    }

    /// Copies `bytes` bytes on the device.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// The contract of stream-ordered operations above; the ranges must not overlap.
    pub unsafe fn copy_device_to_device(
        &self,
        to: CUdeviceptr,
        from: CUdeviceptr,
        bytes: usize,
        stream: CUstream,
    ) -> Result<(), DriverError> {
        // SAFETY: the caller vouches for ranges and stream.
        unsafe { call!(self.driver(), cuMemcpyDtoDAsync_v2(to, from, bytes, stream)) }
    }

    /// Copies `bytes` bytes between any two addresses of the unified address space.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// The contract of stream-ordered operations above; the ranges must not overlap.
    pub unsafe fn copy(
        &self,
        to: CUdeviceptr,
        from: CUdeviceptr,
        bytes: usize,
        stream: CUstream,
    ) -> Result<(), DriverError> {
        // SAFETY: the caller vouches for ranges and stream.
        unsafe { call!(self.driver(), cuMemcpyAsync(to, from, bytes, stream)) }
    }

    /// Copies `bytes` bytes from one context's memory to another's.
    ///
    /// # Errors
    /// The driver's; `CUDA_ERROR_NOT_FOUND` without [`Feature::Peers`](super::Feature::Peers).
    ///
    /// # Safety
    /// The contract of stream-ordered operations above; the ranges must not overlap.
    pub unsafe fn copy_peer(
        &self,
        to: CUdeviceptr,
        to_context: &Context,
        from: CUdeviceptr,
        from_context: &Context,
        bytes: usize,
        stream: CUstream,
    ) -> Result<(), DriverError> {
        let (to_raw, from_raw) = (to_context.raw(), from_context.raw());
        // SAFETY: the contexts are alive, and the caller vouches for ranges and stream.
        unsafe {
            call!(
                self.driver(),
                cuMemcpyPeerAsync(to, to_raw, from, from_raw, bytes, stream)
            )
        }
    }
}
