//! Plain device memory, page-locked host memory, copies and fills.

use super::context::{Context, Entered};
use super::deferred::Deferred;
use super::error::DriverError;
use super::pages;
use super::symbols::Feature;
use super::sys::{self, CUdeviceptr, CUpointer_attribute, CUstream};
use super::table::{call, thin};
use std::ffi::c_void;
use std::num::NonZeroU64;
use std::ptr::{self, NonNull};

/// The state of a device's memory according to the driver, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub struct MemInfo {
    /// Bytes that can still be allocated, by all processes together.
    pub free: u64,
    /// All bytes of the device.
    pub total: u64,
}

impl Context {
    /// Returns free and total memory of the context's device. Costs microseconds.
    pub fn mem_info(&self) -> Result<MemInfo, DriverError> {
        self.enter()?.mem_info()
    }
}

/// Options for page-locked host memory; the default is plain.
#[doc(hidden)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct HostMemory {
    /// Page-locked for all contexts, not only for the current one.
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

/// Page-locked host memory, freed on drop, which may wait for work that uses it. `Send` and `Sync`: it is only an
/// address with a lifetime; its owner determines how the bytes may be accessed.
#[doc(hidden)]
pub struct HostAllocation {
    context: Context,
    address: NonNull<c_void>,
    bytes: usize,
    /// Whether it consists of pages of the process, which the driver has locked.
    registered: bool,
}

// SAFETY: page-locked memory may be used and freed from any thread.
unsafe impl Send for HostAllocation {}
// SAFETY: as above, and this type neither reads nor writes the memory.
unsafe impl Sync for HostAllocation {}

impl HostAllocation {
    pub fn ptr(&self) -> NonNull<c_void> {
        self.address
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn context(&self) -> &Context {
        &self.context
    }
}

debug_fields!(HostAllocation, self => address: self.address, bytes: self.bytes);

impl Drop for HostAllocation {
    fn drop(&mut self) {
        self.context.release(match self.registered {
            true => Deferred::Pages(self.address, self.bytes),
            false => Deferred::Host(self.address),
        });
    }
}

/// Device and host memory. A pointer, a range or a stream passed to an unsafe method must be live, and a stream must
/// belong to the context or be a special handle; freed memory must not be used any more, neither by submitted work nor
/// later.
#[doc(hidden)]
impl Entered<'_> {
    thin! {
        /// Allocates `bytes` of device memory; the address is a multiple of at least 256.
        pub fn mem_alloc(&self, bytes: usize) -> address: CUdeviceptr = cuMemAlloc_v2(&mut address, bytes);

        /// Returns free and total memory of the context's device, in bytes. Costs microseconds.
        pub fn mem_info(&self) -> info: (usize, usize) = cuMemGetInfo_v2(&mut info.0, &mut info.1)
            => MemInfo: MemInfo { free: info.0 as u64, total: info.1 as u64 };

        fn host_alloc(&self, bytes: usize, how: HostMemory) -> address: *mut c_void
            = cuMemHostAlloc(&mut address, bytes, how.flags());
    }

    /// Returns an id that distinguishes the memory at an address from all other memory of the process, earlier and
    /// later; `None` if there is no memory at the address.
    pub(super) fn memory_at(
        &self,
        address: CUdeviceptr,
    ) -> Result<Option<NonZeroU64>, DriverError> {
        // The function for several attributes also succeeds for addresses without memory: it returns 0.
        let mut attribute = CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID;
        let mut id = 0_u64;
        let mut out = ptr::from_mut(&mut id).cast();
        // SAFETY: one attribute, and the place for its value, in locals.
        unsafe {
            call!(
                self.driver(),
                cuPointerGetAttributes(1, &mut attribute, &mut out, address)
            )
        }?;
        Ok(NonZeroU64::new(id))
    }

    /// Frees memory of [`Entered::mem_alloc`]. May wait until all running kernels have finished. An error means that
    /// the memory is still allocated, or that the context is lost. If a call fails and it cannot be determined whether
    /// it freed the memory, the memory counts as freed, since the address may have been reused by then.
    pub unsafe fn mem_free(&self, address: CUdeviceptr) -> Result<(), DriverError> {
        let before = self.memory_at(address);
        if let Err(lost) = before
            && lost.is_fatal()
        {
            return Err(lost);
        }
        // SAFETY: the caller is responsible for the address.
        let freed = unsafe { call!(self.driver(), cuMemFree_v2(address)) };
        let Some(error) = freed.err().filter(|error| !error.is_fatal()) else {
            return freed;
        };
        match (before, self.memory_at(address)) {
            (_, Err(lost)) if lost.is_fatal() => Err(lost),
            (Ok(before), Ok(after)) if before == after => Err(error),
            (Ok(_), Ok(_)) => Ok(()),
            _ => {
                self.driver().drop_failed(&"device memory", error);
                Ok(())
            }
        }
    }

    /// Allocates `bytes` of page-locked host memory, freed on drop. Its contents are undefined.
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
            registered: false,
        })
    }

    /// Like [`host_allocation`](Self::host_allocation) for default memory, but locks pages of the process where the
    /// system and the driver support it. Several threads may do so at the same time, where the driver's own allocation
    /// of `bytes` touches the pages one after another.
    pub(crate) fn lock_pages(&self, bytes: usize) -> Result<HostAllocation, DriverError> {
        const PORTABLE: u32 = 1;
        if self.driver().has(Feature::HostRegister)
            && let Some(address) = pages::map(bytes)
        {
            // SAFETY: the pages exist until they are unregistered.
            let locked = unsafe {
                call!(
                    self.driver(),
                    cuMemHostRegister_v2(address.as_ptr(), bytes, PORTABLE)
                )
            };
            match locked {
                Ok(()) => {
                    return Ok(HostAllocation {
                        context: self.context().clone(),
                        address,
                        bytes,
                        registered: true,
                    });
                }
                Err(error) => {
                    // The call may have taken effect.
                    // SAFETY: nothing uses the pages.
                    unsafe {
                        let _ = call!(self.driver(), cuMemHostUnregister(address.as_ptr()));
                        pages::unmap(address, bytes);
                    }
                    if error.is_fatal() {
                        return Err(error);
                    }
                }
            }
        }
        self.host_allocation(bytes, HostMemory::default())
    }
}

/// Copies and fills in stream order: they return before the work is complete.
///
/// All of them share one contract. `stream` must be valid as for [`Entered::record`]. The ranges must be accessible
/// where the operation runs and stay allocated and mapped until it has completed. During that time no other code may
/// write to them, or access the ranges that are written. The ranges of a copy must not overlap. A host range that is
/// not page-locked may be copied before the call returns, but need not be.
#[doc(hidden)]
impl Entered<'_> {
    thin! {
        /// Fills `bytes` bytes with `value`.
        pub unsafe fn memset_d8(&self, to: CUdeviceptr, value: u8, bytes: usize, stream: CUstream)
            = cuMemsetD8Async(to, value, bytes, stream);

        /// Fills `words` 32-bit words with `value`; `to` must be a multiple of 4.
        pub unsafe fn memset_d32(&self, to: CUdeviceptr, value: u32, words: usize, stream: CUstream)
            = cuMemsetD32Async(to, value, words, stream);

        /// Copies from the host to the device.
        pub unsafe fn copy_host_to_device(&self,
            to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream
        ) = cuMemcpyHtoDAsync_v2(to, from, bytes, stream);

        /// Copies from the device to the host.
        pub unsafe fn copy_device_to_host(&self,
            to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream
        ) = cuMemcpyDtoHAsync_v2(to, from, bytes, stream);

        /// Copies on the device.
        pub unsafe fn copy_device_to_device(&self,
            to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream
        ) = cuMemcpyDtoDAsync_v2(to, from, bytes, stream);

        /// Copies between any two addresses of the unified address space.
        pub unsafe fn copy(&self, to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream)
            = cuMemcpyAsync(to, from, bytes, stream);

        /// Copies from one context's memory to another's; requires [`Feature::Peers`](super::Feature::Peers).
        pub unsafe fn copy_peer(&self,
            to: CUdeviceptr, to_context: &Context, from: CUdeviceptr, from_context: &Context, bytes: usize,
            stream: CUstream
        ) = cuMemcpyPeerAsync(to, to_context.raw(), from, from_context.raw(), bytes, stream);
    }

    /// Reads as many words of the device as `read` has, ordered after all work submitted to the stream. Waits for the
    /// stream. If no wait succeeds, the copy may still write to the host memory, which is therefore leaked.
    ///
    /// # Safety
    /// The contract of stream-ordered operations above.
    pub(crate) unsafe fn read_words(
        &self,
        from: CUdeviceptr,
        mut read: Vec<u32>,
        stream: CUstream,
    ) -> Result<Vec<u32>, DriverError> {
        let (to, bytes) = (read.as_mut_ptr().cast(), size_of_val(&read[..]));
        // SAFETY: the caller is responsible for the source and the stream. The target has enough bytes and is kept
        // until the stream was waited for, even if the copy failed: its error may come from earlier work.
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
}
