//! The driver's own stream-ordered memory pools.

use super::context::{Context, Entered};
use super::deferred::Deferred;
use super::device::Device;
use super::error::DriverError;
#[cfg(unix)]
use super::share::{DESCRIPTOR, number_of, opened};
use super::sys::{
    self, CUdeviceptr, CUmemAllocationHandleType, CUmemPool_attribute, CUmemPoolPtrExportData,
    CUstream,
};
use super::table::{Driver, call, thin};
use super::vmm::{READ_WRITE, access_list, location_of};
use std::ffi::c_void;
#[cfg(unix)]
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

/// The properties of a pool; fixed at its creation.
#[doc(hidden)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PoolProperties {
    /// The handle of the device whose memory the pool holds.
    pub device: sys::CUdevice,
    /// The handle types it can be exported as: a bit set of the constants.
    pub export: CUmemAllocationHandleType,
    /// The maximum size in bytes; 0 for no limit.
    pub max_bytes: usize,
}

impl PoolProperties {
    fn raw(&self) -> sys::CUmemPoolProps {
        // Every reserved byte must be zero.
        sys::CUmemPoolProps {
            allocType: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            handleTypes: self.export,
            location: location_of(self.device),
            maxSize: self.max_bytes,
            ..Default::default()
        }
    }
}

/// A memory pool of the driver: created here and destroyed on drop, or a device's own.
///
/// `Send` and `Sync`. Dropping a pool does not wait; its memory returns to the driver when its last allocation is
/// freed.
#[doc(hidden)]
pub struct MemoryPool {
    context: Context,
    raw: sys::CUmemoryPool,
    owned: AtomicBool,
}

// SAFETY: a pool handle may be used from any thread; the driver synchronises.
unsafe impl Send for MemoryPool {}
// SAFETY: as above, and nothing in here changes.
unsafe impl Sync for MemoryPool {}

impl MemoryPool {
    /// Creates a pool. Its release threshold is 0: the driver takes back all unused memory at every synchronisation,
    /// until the threshold is changed by [`MemoryPool::set`].
    pub fn new(context: &Context, properties: &PoolProperties) -> Result<MemoryPool, DriverError> {
        let raw = context.enter()?.create_pool(properties)?;
        Ok(MemoryPool::wrap(context, raw, true))
    }

    /// Returns the default pool of the context's device, which the whole process shares.
    pub fn default_of(context: &Context) -> Result<MemoryPool, DriverError> {
        let raw = context.device().default_pool()?;
        Ok(MemoryPool::wrap(context, raw, false))
    }

    /// Opens the pool behind a file descriptor of [`MemoryPool::export_fd`]; the result owns it.
    #[cfg(unix)]
    pub fn import_fd(context: &Context, fd: BorrowedFd<'_>) -> Result<MemoryPool, DriverError> {
        let raw = context.enter()?.import_pool(fd)?;
        Ok(MemoryPool::wrap(context, raw, true))
    }

    fn wrap(context: &Context, raw: sys::CUmemoryPool, owned: bool) -> MemoryPool {
        MemoryPool {
            context: context.clone(),
            raw,
            owned: AtomicBool::new(owned),
        }
    }

    /// Destroys the pool now, if it is owned and was not destroyed before. Unlike a drop it reports failures, after
    /// which the pool counts as destroyed, since the driver may have destroyed it.
    ///
    /// # Safety
    /// The pool must not be used afterwards, neither by other methods nor for allocations. Memory still allocated from
    /// it may be used and freed.
    pub unsafe fn destroy(&self) -> Result<(), DriverError> {
        if !self.owned.swap(false, Ordering::AcqRel) {
            return Ok(());
        }
        let entered = self.context.enter();
        let entered = entered.inspect_err(|_| self.owned.store(true, Ordering::Release))?;
        // SAFETY: the pool is owned, and the flag keeps other threads from destroying it.
        unsafe { call!(entered.driver(), cuMemPoolDestroy(self.raw)) }
    }

    /// Returns the driver's handle.
    pub fn raw(&self) -> sys::CUmemoryPool {
        self.raw
    }

    fn driver(&self) -> &Driver {
        self.context.driver()
    }

    thin! {
        /// Returns unused memory to the driver until `keep` bytes are left. Memory counts as unused once the host has
        /// observed, by a synchronisation, that its last use is complete.
        pub fn trim_to(&self, keep: usize) = cuMemPoolTrimTo(self.raw, keep);

        /// Grants the devices access to all memory of the pool, or revokes it. The pool's own device always has access.
        pub fn set_access(&self, devices: &[Device], on: bool)
            = cuMemPoolSetAccess(self.raw, access_list(devices, on).as_ptr(), devices.len());

        /// Whether `device` may access all memory of the pool.
        pub fn has_access(&self, device: &Device) -> flags: sys::CUmemAccess_flags
            = cuMemPoolGetAccess(&mut flags, self.raw, &mut location_of(device.raw()))
            => bool: flags == READ_WRITE;

        unsafe fn get_attribute(&self, attribute: CUmemPool_attribute, out: *mut c_void)
            = cuMemPoolGetAttribute(self.raw, attribute, out);

        unsafe fn set_attribute(&self, attribute: CUmemPool_attribute, from: *mut c_void)
            = cuMemPoolSetAttribute(self.raw, attribute, from);

        /// Returns data that identifies an allocation of an exported pool in other processes.
        pub fn export_pointer(&self, address: CUdeviceptr) -> data: CUmemPoolPtrExportData
            = cuMemPoolExportPointer(&mut data, address);
    }

    /// Reads an attribute: bytes, or 0 and 1 for the reuse policies.
    pub fn get(&self, attribute: CUmemPool_attribute) -> Result<u64, DriverError> {
        let mut value = 0_u64;
        // SAFETY: the pool is alive. A policy has 32 bits, which on every platform of CUDA are the low half of the local.
        unsafe { self.get_attribute(attribute, ptr::from_mut(&mut value).cast()) }?;
        Ok(value)
    }

    /// Sets an attribute: bytes, or 0 and 1 for the reuse policies.
    pub fn set(&self, attribute: CUmemPool_attribute, mut value: u64) -> Result<(), DriverError> {
        // SAFETY: as for `get`; the driver only reads the local.
        unsafe { self.set_attribute(attribute, ptr::from_mut(&mut value).cast()) }
    }

    /// Returns a file descriptor that stands for the pool in other processes. The pool must have been created as
    /// exportable.
    #[cfg(unix)]
    pub fn export_fd(&self) -> Result<OwnedFd, DriverError> {
        let driver = self.driver();
        // SAFETY: the pool is alive, and for this kind the driver opens a descriptor and writes it.
        unsafe {
            opened("cuMemPoolExportToShareableHandle", |out| {
                call!(
                    driver,
                    cuMemPoolExportToShareableHandle(out, self.raw, DESCRIPTOR, 0)
                )
            })
        }
    }
}

debug_fields!(MemoryPool, self => raw: self.raw, owned: self.owned.load(Ordering::Relaxed));

impl Drop for MemoryPool {
    fn drop(&mut self) {
        if !*self.owned.get_mut() {
            return;
        }
        self.context.release(Deferred::Pool(self.raw));
    }
}

impl Device {
    thin! {
        fn default_pool(&self) -> pool: sys::CUmemoryPool = cuDeviceGetDefaultMemPool(&mut pool, self.raw());
    }
}

/// `stream` must be valid as for [`Entered::record`]; freed memory must only be used by work ordered before the free.
#[doc(hidden)]
impl Entered<'_> {
    thin! {
        fn create_pool(&self, properties: &PoolProperties) -> pool: sys::CUmemoryPool
            = cuMemPoolCreate(&mut pool, &properties.raw());

        #[cfg(unix)]
        fn import_pool(&self, fd: BorrowedFd<'_>) -> pool: sys::CUmemoryPool
            = cuMemPoolImportFromShareableHandle(&mut pool, number_of(fd), DESCRIPTOR, 0);

        /// Allocates `bytes` from a pool; usable in the order of `stream`.
        pub unsafe fn mem_alloc_from_pool(&self, bytes: usize, pool: &MemoryPool, stream: CUstream)
            -> address: CUdeviceptr = cuMemAllocFromPoolAsync(&mut address, bytes, pool.raw, stream);

        /// Frees pool memory in the order of `stream`. After an error that is not about a capture, the memory must not
        /// be freed again: the driver may have freed it and reused the address.
        pub unsafe fn mem_free_async(&self, address: CUdeviceptr, stream: CUstream) = cuMemFreeAsync(address, stream);
    }
}
