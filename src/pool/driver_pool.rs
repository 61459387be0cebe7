//! The driver's own stream-ordered pools.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::allocator::{Counter, Request, Trimmed};
use crate::block::{BlockId, BlockState};
use crate::driver::{
    Context, Device, DriverError, Feature, MemoryPool, PoolProperties, Stream, sys,
};
use crate::error::{Error, InvalidArgument, OutOfMemory, Refused};
use crate::resource::{
    DRIVER_ALIGNMENT, MemoryResource, RawBlock, Usage, UseTracking, check_request, give_back, keep,
    retry,
};
use crate::sync::capture;

use super::driver_blocks::{DESTROYED, Inner};

use sys::CUmemPool_attribute as A;

/// Opportunistic reuse can hand out memory in use on drivers before this version.
const SAFE_OPPORTUNISTIC: u32 = 11_050;

const LATER: &str = "deferring the free of a block of a driver pool";

/// A pool of the driver (`cuMemPool*`) as a [`MemoryResource`], for comparison and for sharing with code that uses such
/// pools.
///
/// Clones are handles to the same pool; `Send` and `Sync`. A pool created here is destroyed with its last handle or
/// block; the driver keeps memory of freed blocks until the work that uses it is complete.
#[derive(Clone)]
pub struct DriverPool(Arc<Inner>);

impl DriverPool {
    /// Creates a pool of a context's device.
    ///
    /// # Errors
    /// As [`DriverPoolConfig::validate`]; [`Error::NotSupported`] if driver or device lack pools, or their export if
    /// it is requested; driver errors.
    pub fn new(context: &Context, config: DriverPoolConfig) -> Result<DriverPool, Error> {
        config.validate()?;
        supported(context)?;
        let driver = context.driver();
        if config.exportable && !driver.has(Feature::PoolExport) {
            return not_supported("export of memory pools");
        }
        use sys::CUmemAllocationHandleType as Handle;
        let properties = PoolProperties {
            device: context.device().raw(),
            export: match config.exportable {
                true => Handle::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                false => Handle::CU_MEM_HANDLE_TYPE_NONE,
            },
            max_bytes: config.maximum.unwrap_or(0) as usize,
        };
        let pool = MemoryPool::new(context, &properties)?;
        let pool = Self::wrap(context, pool, config.maximum);
        // The driver's own default, 0, gives everything back at every synchronisation.
        let threshold = config.release_threshold.or(config.maximum);
        pool.set(RELEASE_THRESHOLD, threshold.unwrap_or(u64::MAX))?;
        if driver.version() < SAFE_OPPORTUNISTIC {
            pool.set(OPPORTUNISTIC, 0)?;
        }
        if config.initial > 0 {
            let stream = Stream::new(context)?;
            let block = pool.allocate_block(&Request::new(config.initial as usize), &stream)?;
            if let Err(refused) = pool.deallocate_block(block) {
                give_back(&pool.shared(), *refused.value, LATER);
                return Err(refused.error);
            }
            stream.synchronize()?;
        }
        Ok(pool)
    }

    /// The device's default pool, which the whole process shares. Never destroyed.
    ///
    /// # Errors
    /// [`Error::NotSupported`], driver errors.
    pub fn default_of(context: &Context) -> Result<DriverPool, Error> {
        supported(context)?;
        Ok(Self::wrap(context, MemoryPool::default_of(context)?, None))
    }

    /// Opens the pool of another process by a descriptor from [`export`](Self::export).
    ///
    /// # Errors
    /// [`Error::NotSupported`], driver errors.
    #[cfg(unix)]
    pub fn import(
        context: &Context,
        descriptor: std::os::fd::BorrowedFd<'_>,
    ) -> Result<DriverPool, Error> {
        supported(context)?;
        let pool = MemoryPool::import_fd(context, descriptor).map_err(absent)?;
        Ok(Self::wrap(context, pool, None))
    }

    fn wrap(context: &Context, pool: MemoryPool, max_bytes: Option<u64>) -> DriverPool {
        DriverPool(Arc::new(Inner::new(context, pool, max_bytes)))
    }

    /// The driver's handle.
    pub fn raw(&self) -> sys::CUmemoryPool {
        self.0.pool.raw()
    }

    /// Destroys the pool if it was created here, and closes this object. A second call does nothing.
    ///
    /// # Errors
    /// [`Error::InUse`] while blocks are live; driver errors, after which the pool is destroyed or lost.
    pub fn destroy(&self) -> Result<(), Error> {
        retry(self);
        let users = &self.0.users;
        match users.compare_exchange(0, DESTROYED, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: no block is live and no call under way, and none begins from now on.
            Ok(_) => Ok(unsafe { self.0.pool.destroy() }?),
            Err(DESTROYED) => Ok(()),
            Err(count) => {
                let (what, bytes) = ("user", 0);
                Err(Error::InUse { what, count, bytes })
            }
        }
    }

    /// Reads an attribute.
    ///
    /// # Errors
    /// Driver errors, [`Error::Closed`].
    pub fn get(&self, attribute: sys::CUmemPool_attribute) -> Result<u64, Error> {
        let _use = self.0.enter()?;
        Ok(self.0.pool.get(attribute)?)
    }

    /// Sets an attribute: a reuse policy to 0 or 1, the release threshold in bytes, or a high-water mark to 0, which
    /// resets it to the current value.
    ///
    /// # Errors
    /// [`InvalidArgument::Setting`] for an invalid value, [`InvalidArgument::Contradiction`] for a threshold above the
    /// maximum, [`Error::NotSupported`] for opportunistic reuse on a driver where it is unsafe; driver errors,
    /// [`Error::Closed`].
    pub fn set(&self, attribute: sys::CUmemPool_attribute, value: u64) -> Result<(), Error> {
        let _use = self.0.enter()?;
        if !takes(attribute, value) {
            let what = "a pool's attribute";
            return Err(InvalidArgument::Setting { what, value }.into());
        }
        let old = self.0.context.driver().version() < SAFE_OPPORTUNISTIC;
        if attribute == OPPORTUNISTIC && value == 1 && old {
            return not_supported("opportunistic reuse by a driver before CUDA 11.5");
        }
        if attribute == RELEASE_THRESHOLD {
            within("release_threshold", value, self.0.maximum)?;
        }
        Ok(self.0.pool.set(attribute, value)?)
    }

    /// Grants a device access to all memory of the pool, or revokes it.
    ///
    /// # Errors
    /// Driver errors, [`Error::Closed`].
    pub fn set_access(&self, device: &Device, on: bool) -> Result<(), Error> {
        let _use = self.0.enter()?;
        Ok(self.0.pool.set_access(std::slice::from_ref(device), on)?)
    }

    /// Whether a device has access to all memory of the pool.
    ///
    /// # Errors
    /// Driver errors, [`Error::Closed`].
    pub fn has_access(&self, device: &Device) -> Result<bool, Error> {
        let _use = self.0.enter()?;
        Ok(self.0.pool.has_access(device)?)
    }

    /// Returns a file descriptor by which other processes open the pool.
    ///
    /// # Errors
    /// [`Error::NotSupported`], driver errors (such as for a pool that is not exportable), [`Error::Closed`].
    #[cfg(unix)]
    pub fn export(&self) -> Result<std::os::fd::OwnedFd, Error> {
        let _use = self.0.enter()?;
        self.0.pool.export_fd().map_err(absent)
    }

    /// Returns data by which other processes open the block at an address of an exported pool.
    ///
    /// # Errors
    /// Driver errors.
    pub fn export_block(
        &self,
        ptr: sys::CUdeviceptr,
    ) -> Result<sys::CUmemPoolPtrExportData, Error> {
        let _use = self.0.enter()?;
        Ok(self.0.pool.export_pointer(ptr)?)
    }

    /// Frees memory of the pool by its address, in the order of a stream. For memory that other code allocated from the
    /// pool, or a block that is then not deallocated.
    ///
    /// # Errors
    /// A stream that captures or belongs to another device; a lost context; [`Error::Closed`]. The memory is still live
    /// then. After any other driver error it counts as freed, with a warning, since the driver may have freed it.
    ///
    /// # Safety
    /// No other code frees the memory. Its allocation, and all its uses on other streams, are complete or ordered
    /// before on the stream.
    pub unsafe fn free_raw_on(&self, ptr: sys::CUdeviceptr, stream: &Stream) -> Result<(), Error> {
        let _use = self.0.enter()?;
        super::admit(stream, &self.0.context)?;
        // SAFETY: the stream is alive by the contract under which it was made; the rest is the caller's.
        unsafe { self.0.free_on(ptr, stream) }?;
        self.0.forget(ptr);
        Ok(())
    }

    fn take(&self, bytes: usize, stream: &Stream) -> Result<sys::CUdeviceptr, Error> {
        let attempt = || {
            let entered = stream.context().enter()?;
            // SAFETY: the stream is alive by the contract under which it was made.
            unsafe { entered.mem_alloc_from_pool(bytes, &self.0.pool, stream.raw()) }
        };
        let refused = match attempt() {
            Err(error) if error.is_out_of_memory() => error,
            done => return Ok(done?),
        };
        // The memory may be fragmented: unused memory is released once the stream's own frees are complete, and a second
        // attempt follows. The host does not wait for the context, where another stream may be capturing. If a step
        // fails, the error is the first one.
        let freed = stream.synchronize().and_then(|()| self.0.pool.trim_to(0));
        let refused = match freed.and_then(|()| attempt()) {
            Ok(ptr) => return Ok(ptr),
            Err(error) if error.is_fatal() => return Err(error.into()),
            Err(error) if error.is_out_of_memory() => error,
            Err(_) => refused,
        };
        Err(self.out_of_memory(bytes, refused))
    }

    fn out_of_memory(&self, bytes: usize, refused: DriverError) -> Error {
        let usage = self.measure().unwrap_or_default();
        let info = self.0.context.enter().and_then(|e| e.mem_info()).ok();
        let picture = OutOfMemory {
            device: MemoryResource::ordinal(self),
            requested: bytes as u64,
            limit: self.0.maximum,
            reserved: usage.reserved.current,
            allocated: usage.used.current,
            cached: usage.cached_bytes(),
            driver_free: info.map(|i| i.free),
            driver_total: info.map(|i| i.total),
            driver: Some(refused),
            ..OutOfMemory::default()
        };
        Error::OutOfMemory(Box::new(picture))
    }

    fn measure(&self) -> Result<Usage, Error> {
        let counter = |current, peak| {
            Ok::<_, Error>(Counter {
                current: self.0.pool.get(current)?,
                peak: self.0.pool.get(peak)?,
                ..Counter::default()
            })
        };
        Ok(Usage {
            used: counter(USED_CURRENT, USED_HIGH)?,
            reserved: counter(RESERVED_CURRENT, RESERVED_HIGH)?,
            limit: self.0.maximum,
            ..self.0.usage()
        })
    }
}

/// A live block keeps its pool. If it cannot be freed when its owner is dropped, because the stream captures or the
/// driver refuses, a later call frees it: one of its pool, the end of a capture through this crate, or the creation,
/// trim, synchronisation, close or drop of an allocator.
// SAFETY: the driver's memory has one owner by the table of the pool, and is freed after all recorded uses.
unsafe impl MemoryResource for DriverPool {
    fn allocate_block(&self, request: &Request, stream: &Stream) -> Result<RawBlock, Error> {
        let pool = &self.0;
        let bytes = request.bytes();
        check_request(request, DRIVER_ALIGNMENT)?;
        retry(self);
        let call = pool.enter()?;
        super::admit(stream, &pool.context)?;
        let ptr = self.take(bytes, stream)?;
        let id = pool.hand_out(call, (ptr, bytes), stream);
        // SAFETY: the table has the block, and frees it once.
        let mut block = unsafe { RawBlock::new(id, bytes, request) };
        let Err(error) = capture::refuse_capture(stream) else {
            return Ok(block);
        };
        // Memory of the graph is freed in the capture, any other after it.
        if pool.take_back(&id, Inner::give_back).is_err() {
            block.abandon();
            keep(&self.shared(), block, &error, LATER);
        }
        Err(error)
    }

    fn deallocate_block(&self, block: RawBlock) -> Result<(), Refused<RawBlock>> {
        let done = block.returned();
        done.and_then(|()| self.0.take_back(&block.id(), Inner::free))
            .map_err(|error| Refused::new(block, error))
    }

    fn context(&self) -> Option<&Context> {
        Some(&self.0.context)
    }

    fn id(&self) -> u64 {
        self.0.source
    }

    fn usage(&self) -> Result<Usage, Error> {
        let _use = self.0.enter()?;
        self.measure()
    }

    /// Releases memory that a synchronisation has shown to be unused, until at most `keep` bytes are held.
    fn trim(&self, keep: u64) -> Result<Trimmed, Error> {
        retry(self);
        let _use = self.0.enter()?;
        let before = self.0.pool.get(RESERVED_CURRENT)?;
        let keep = usize::try_from(keep).unwrap_or(usize::MAX);
        self.0.pool.trim_to(keep)?;
        let after = self.0.pool.get(RESERVED_CURRENT)?;
        Ok(Trimmed {
            released: before.saturating_sub(after),
            ..Trimmed::default()
        })
    }

    fn reset_peak_stats(&self) {
        self.0.reset_peaks();
        let high = self.set(RESERVED_HIGH, 0).and(self.set(USED_HIGH, 0));
        if let Err(error) = high {
            log::warn!("cannot reset the peaks of a memory pool: {error}");
        }
    }

    fn state(&self, block: &BlockId) -> BlockState {
        BlockState::live_if(self.0.is_live(block))
    }

    fn use_tracking(&self) -> UseTracking {
        UseTracking::Reuse
    }

    fn record_use(&self, block: &BlockId, stream: &Stream) -> Result<(), Error> {
        self.0.record_use(block, stream)
    }

    fn record_stream(&self, block: &BlockId, stream: &Stream) -> Result<(), Error> {
        self.0.record_stream(block, stream)
    }
}

impl Drop for DriverPool {
    fn drop(&mut self) {
        retry(self);
    }
}

debug_fields!(DriverPool, self => pool: self.0.pool, usage: self.measure().ok());

fn supported(context: &Context) -> Result<(), Error> {
    match context.device().supports_pools()? {
        true => Ok(()),
        false => not_supported("stream-ordered memory pools"),
    }
}

fn not_supported<T>(what: &'static str) -> Result<T, Error> {
    Err(Error::NotSupported { what })
}

#[cfg(unix)]
fn absent(error: DriverError) -> Error {
    let what = "export of memory pools";
    match error.code() {
        sys::CUresult::CUDA_ERROR_NOT_FOUND => Error::NotSupported { what },
        _ => error.into(),
    }
}

/// Settings of a [`DriverPool`]; only the threshold can be changed later.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DriverPoolConfig {
    maximum: Option<u64>,
    initial: u64,
    release_threshold: Option<u64>,
    exportable: bool,
}

impl DriverPoolConfig {
    /// No maximum, no initial memory, all unused memory kept, not exportable.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the maximum number of bytes that the pool holds; `None` for no maximum.
    pub const fn maximum(mut self, bytes: Option<u64>) -> Self {
        self.maximum = bytes;
        self
    }

    /// Sets the bytes to obtain from the driver initially.
    pub const fn initial(mut self, bytes: u64) -> Self {
        self.initial = bytes;
        self
    }

    /// Sets the unused bytes above which memory is released at every synchronisation; `None` keeps all.
    pub const fn release_threshold(mut self, bytes: Option<u64>) -> Self {
        self.release_threshold = bytes;
        self
    }

    /// Sets whether the pool can be exported.
    pub const fn exportable(mut self, on: bool) -> Self {
        self.exportable = on;
        self
    }

    /// Checks the settings. Needs no driver.
    ///
    /// # Errors
    /// [`InvalidArgument::Setting`] for a maximum of 0, [`InvalidArgument::Contradiction`].
    pub fn validate(&self) -> Result<(), Error> {
        // To the driver a maximum of 0 is none.
        if self.maximum == Some(0) {
            let (what, value) = ("maximum", 0);
            return Err(InvalidArgument::Setting { what, value }.into());
        }
        within("initial", self.initial, self.maximum)?;
        let threshold = self.release_threshold.unwrap_or(0);
        within("release_threshold", threshold, self.maximum)
    }
}

fn within(setting: &'static str, value: u64, maximum: Option<u64>) -> Result<(), Error> {
    match maximum {
        Some(limit) if value > limit => Err(InvalidArgument::Contradiction {
            larger: setting,
            value,
            bound: "maximum",
            limit,
        }
        .into()),
        _ => Ok(()),
    }
}

fn takes(attribute: A, value: u64) -> bool {
    match attribute {
        FOLLOW_EVENTS | OPPORTUNISTIC | INTERNAL_DEPENDENCIES => value <= 1,
        RESERVED_HIGH | USED_HIGH => value == 0,
        RESERVED_CURRENT | USED_CURRENT => false,
        _ => true,
    }
}

const FOLLOW_EVENTS: A = A::CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES;
const OPPORTUNISTIC: A = A::CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC;
const INTERNAL_DEPENDENCIES: A = A::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES;
const RELEASE_THRESHOLD: A = A::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
const RESERVED_CURRENT: A = A::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT;
const RESERVED_HIGH: A = A::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH;
const USED_CURRENT: A = A::CU_MEMPOOL_ATTR_USED_MEM_CURRENT;
const USED_HIGH: A = A::CU_MEMPOOL_ATTR_USED_MEM_HIGH;
