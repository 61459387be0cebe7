//! The driver's own stream-ordered pools, as one pool among others.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::allocator::{Counter, size};
use crate::driver::{
    Context, Device, Driver, DriverError, Feature, MemoryPool, PoolProperties, Stream, sys,
};
use crate::error::{Error, InvalidArgument, OutOfMemory};
use crate::resource::{Table, Usage};
use crate::sync::capture;
use crate::sync::event::EventPools;

use super::native_block::{DESTROYED, Inner, NativeBlock, free_those_of};
use super::native_config::{
    NativeConfig, OPPORTUNISTIC, RELEASE_THRESHOLD, RESERVED_CURRENT, RESERVED_HIGH, USED_CURRENT,
    USED_HIGH, takes, within,
};
use super::{RareLog, device_of};

/// Opportunistic reuse can hand out memory in use on drivers before this version.
const SAFE_OPPORTUNISTIC: u32 = 11_050;

/// A pool of the driver (`cuMemPool*`), for comparison with ours and for sharing with code that uses
/// such pools.
///
/// Clones are handles to the same pool; `Send` and `Sync`. The last handle or block that goes destroys
/// it, if it was made here. The addresses are the driver's: a pool on the real driver never gives
/// simulated ones.
///
/// # Destruction
/// [`destroy`](Self::destroy) refuses while blocks are live. Work in flight on blocks that were freed
/// is no obstacle: the driver keeps the memory until that work is done.
#[derive(Clone)]
pub struct NativePool(Arc<Inner>);

impl NativePool {
    /// A pool on the device's primary context. Loads the driver on first use.
    ///
    /// # Errors
    /// As [`NativeConfig::validate`] and [`with_context`](Self::with_context); a driver that cannot be
    /// had.
    pub fn new(config: NativeConfig) -> Result<NativePool, Error> {
        config.validate()?;
        let driver = Driver::load()?;
        let device = device_of(&driver, config.ordinal)?;
        Self::with_context(&Context::primary(&device)?, config)
    }

    /// A pool on a given context, on whose device the memory is: `ordinal` is not looked at.
    ///
    /// # Errors
    /// As [`NativeConfig::validate`]; [`Error::NotSupported`] if driver or device have no pools, or
    /// cannot export them and that was asked for; driver errors.
    pub fn with_context(context: &Context, config: NativeConfig) -> Result<NativePool, Error> {
        config.validate()?;
        supported(context)?;
        let driver = context.driver();
        if config.exportable && !driver.has(Feature::PoolExport) {
            return Err(Error::NotSupported {
                what: "export of memory pools",
            });
        }
        let export = if config.exportable {
            sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        } else {
            sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE
        };
        let properties = PoolProperties {
            device: context.device().raw(),
            export,
            max_bytes: config.max_bytes.unwrap_or(0) as usize,
        };
        let pool = MemoryPool::new(context, &properties)?;
        let pool = Self::wrap(context, pool, config.max_bytes);
        // The driver's own default, 0, gives everything back at every synchronisation.
        let threshold = config.release_threshold.or(config.max_bytes);
        pool.set(RELEASE_THRESHOLD, threshold.unwrap_or(u64::MAX))?;
        if driver.version() < SAFE_OPPORTUNISTIC {
            pool.set(OPPORTUNISTIC, 0)?;
        }
        if config.initial_bytes > 0 {
            let stream = Stream::new(context)?;
            pool.allocate(config.initial_bytes as usize, &stream)?
                .free()?;
            stream.synchronize()?;
        }
        Ok(pool)
    }

    /// The device's default pool, which everything in the process shares: settings apply to all.
    /// Never destroyed.
    ///
    /// # Errors
    /// [`Error::NotSupported`], driver errors.
    pub fn default_of(context: &Context) -> Result<NativePool, Error> {
        supported(context)?;
        Ok(Self::wrap(context, MemoryPool::default_of(context)?, None))
    }

    /// The pool that `cuMemAllocAsync` takes from on the device at present. Never destroyed from here.
    ///
    /// # Errors
    /// [`Error::NotSupported`], driver errors.
    ///
    /// # Safety
    /// Whoever owns the pool keeps it as long as the result, its clones and its blocks are there.
    ///
    /// ```compile_fail,E0133
    /// # use cualloc::{Error, driver::Context, pool::NativePool};
    /// fn current(context: &Context) -> Result<NativePool, Error> {
    ///     NativePool::current_of(context)
    /// }
    /// ```
    pub unsafe fn current_of(context: &Context) -> Result<NativePool, Error> {
        supported(context)?;
        // SAFETY: the caller's contract.
        let pool = unsafe { MemoryPool::current_of(context) }?;
        Ok(Self::wrap(context, pool, None))
    }

    /// The pool of another process behind a descriptor of [`export`](Self::export).
    ///
    /// # Errors
    /// [`Error::NotSupported`], driver errors.
    #[cfg(unix)]
    pub fn import(
        context: &Context,
        descriptor: std::os::fd::BorrowedFd<'_>,
    ) -> Result<NativePool, Error> {
        supported(context)?;
        let pool = MemoryPool::import_fd(context, descriptor).map_err(absent)?;
        Ok(Self::wrap(context, pool, None))
    }

    fn wrap(context: &Context, pool: MemoryPool, max_bytes: Option<u64>) -> NativePool {
        NativePool(Arc::new(Inner {
            context: context.clone(),
            pool,
            max_bytes,
            users: AtomicU64::new(0),
            requested: AtomicU64::new(0),
            keyed: Table::default(),
            events: EventPools::of(context),
            log: RareLog::default(),
        }))
    }

    /// The driver's handle.
    pub fn raw(&self) -> sys::CUmemoryPool {
        self.0.pool.raw()
    }

    /// Ordinal of the device.
    pub fn ordinal(&self) -> usize {
        self.0.context.device().ordinal()
    }

    /// Blocks that are live (and calls under way).
    pub fn live(&self) -> u64 {
        match self.0.users.load(Ordering::Acquire) {
            DESTROYED => 0,
            users => users,
        }
    }

    /// Destroys the pool, with an error if that fails. A pool that was not made here is only let go
    /// of. A second call does nothing.
    ///
    /// # Errors
    /// [`Error::InUse`]; driver errors, after which the pool is as before.
    pub fn destroy(&self) -> Result<(), Error> {
        free_those_of(&self.0);
        let ended =
            self.0
                .users
                .compare_exchange(0, DESTROYED, Ordering::AcqRel, Ordering::Acquire);
        match ended {
            Ok(_) => {}
            Err(DESTROYED) => return Ok(()),
            Err(count) => {
                let (what, bytes) = ("user", 0);
                return Err(Error::InUse { what, count, bytes });
            }
        }
        // SAFETY: no block is live and no call under way, and none begins from now on.
        let result = unsafe { self.0.pool.destroy() };
        if result.is_err() {
            self.0.users.store(0, Ordering::Release);
        }
        Ok(result?)
    }

    /// Reads an attribute. Reserved bytes are those held, used ones those in live blocks.
    ///
    /// # Errors
    /// Driver errors, [`Error::Closed`].
    pub fn get(&self, attribute: sys::CUmemPool_attribute) -> Result<u64, Error> {
        let _use = self.0.enter()?;
        self.0.get(attribute)
    }

    /// Sets an attribute: a rule of reuse to 0 or 1, the release threshold to bytes, a high mark to 0, which
    /// means the current value.
    ///
    /// # Errors
    /// [`InvalidArgument::Setting`] for a value that the attribute does not take,
    /// [`Error::NotSupported`] for opportunistic reuse on a driver where it is not safe,
    /// [`InvalidArgument::Contradiction`] for a threshold above the maximum, driver errors,
    /// [`Error::Closed`].
    pub fn set(&self, attribute: sys::CUmemPool_attribute, value: u64) -> Result<(), Error> {
        let _use = self.0.enter()?;
        if !takes(attribute, value) {
            return Err(Error::Invalid(InvalidArgument::Setting {
                what: "a pool's attribute",
                value,
            }));
        }
        let old = self.0.context.driver().version() < SAFE_OPPORTUNISTIC;
        if attribute == OPPORTUNISTIC && value == 1 && old {
            return Err(Error::NotSupported {
                what: "opportunistic reuse by a driver before CUDA 11.5",
            });
        }
        if attribute == RELEASE_THRESHOLD {
            within("release_threshold", value, self.0.max_bytes)?;
        }
        Ok(self.0.pool.set(attribute, value)?)
    }

    /// Gives a device access to everything in the pool, or takes it away.
    ///
    /// # Errors
    /// Driver errors, among them that the device cannot have it; [`Error::Closed`].
    pub fn set_access(&self, device: &Device, on: bool) -> Result<(), Error> {
        let _use = self.0.enter()?;
        let done = if on {
            self.0.pool.set_access(std::slice::from_ref(device))
        } else {
            self.0.pool.revoke_access(std::slice::from_ref(device))
        };
        Ok(done?)
    }

    /// Whether a device may read and write everything in the pool.
    ///
    /// # Errors
    /// Driver errors, [`Error::Closed`].
    pub fn has_access(&self, device: &Device) -> Result<bool, Error> {
        let _use = self.0.enter()?;
        Ok(self.0.pool.has_access(device)?)
    }

    /// Makes this the pool that `cuMemAllocAsync` takes from on the device, for the whole process.
    ///
    /// # Errors
    /// Driver errors, [`Error::Closed`].
    pub fn make_current(&self) -> Result<(), Error> {
        let _use = self.0.enter()?;
        Ok(self.0.pool.make_current()?)
    }

    /// A descriptor that stands for the pool in other processes.
    ///
    /// # Errors
    /// [`Error::NotSupported`], driver errors (a pool that was not made exportable),
    /// [`Error::Closed`].
    #[cfg(unix)]
    pub fn export(&self) -> Result<std::os::fd::OwnedFd, Error> {
        let _use = self.0.enter()?;
        self.0.pool.export_fd().map_err(absent)
    }

    /// What stands for the block at an address of an exported pool in other processes.
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

    /// Allocates `bytes` (at least 1) for use on a stream.
    ///
    /// # Errors
    /// [`InvalidArgument::Size`]; want of memory; a stream that is capturing or of another device;
    /// driver errors; [`Error::Closed`].
    pub fn allocate(&self, bytes: usize, stream: &Stream) -> Result<NativeBlock, Error> {
        if bytes == 0 || size::round_size(bytes).is_none() {
            return Err(Error::Invalid(InvalidArgument::Size {
                bytes: bytes as u64,
            }));
        }
        free_those_of(&self.0);
        let used = self.0.enter()?;
        super::admit(stream, &self.0.context)?;
        let id = stream.id()?;
        let ptr = self.take(bytes, stream)?;
        // The block is the user from here on.
        std::mem::forget(used);
        self.0.requested.fetch_add(bytes as u64, Ordering::Relaxed);
        let block = NativeBlock::new(Arc::clone(&self.0), ptr, bytes, (stream.clone(), id));
        // If another thread has begun a capture since, it may be memory of the graph's, which is freed in there;
        // any other is freed after the capture.
        if let Err(error) = capture::refuse_capture(stream) {
            block.undo();
            return Err(error);
        }
        Ok(block)
    }

    /// Frees memory of the pool by its address, in the order of a stream: work that the stream was given
    /// before may still use it. For blocks that were [given up](NativeBlock::into_raw), and for what other
    /// code took from the pool.
    ///
    /// # Errors
    /// A stream that is capturing or of another device; driver errors, among them that the address is not
    /// live; [`Error::Closed`]. The memory is live still then.
    ///
    /// # Safety
    /// No [`NativeBlock`] stands for the memory, its allocation is complete on the stream or in its order, and
    /// so are all uses of it on other streams.
    pub unsafe fn free_raw_on(&self, ptr: sys::CUdeviceptr, stream: &Stream) -> Result<(), Error> {
        let _use = self.0.enter()?;
        super::admit(stream, &self.0.context)?;
        let entered = stream.context().enter()?;
        // SAFETY: the stream is alive by the contract under which it was made; the rest is the caller's.
        Ok(unsafe { entered.mem_free_async(ptr, stream.raw()) }?)
    }

    /// Gives unused memory back to the driver until at most `keep` bytes of it are held; returns how
    /// many bytes went. What is in use, also by work in flight, stays, and so does what the host has
    /// not seen to be unused, by a synchronisation. Does not wait.
    ///
    /// # Errors
    /// Driver errors, [`Error::Closed`].
    pub fn trim(&self, keep: u64) -> Result<u64, Error> {
        free_those_of(&self.0);
        let _use = self.0.enter()?;
        let used = self.0.get(USED_CURRENT)?;
        self.shrink_to(keep.saturating_add(used))
    }

    /// As [`trim`](Self::trim), until at most `keep` bytes are held, in use or not.
    pub(crate) fn trim_held(&self, keep: u64) -> Result<u64, Error> {
        free_those_of(&self.0);
        let _use = self.0.enter()?;
        self.shrink_to(keep)
    }

    fn shrink_to(&self, keep: u64) -> Result<u64, Error> {
        let before = self.0.get(RESERVED_CURRENT)?;
        let keep = usize::try_from(keep).unwrap_or(usize::MAX);
        self.0.pool.trim_to(keep)?;
        let after = self.0.get(RESERVED_CURRENT)?;
        Ok(before.saturating_sub(after))
    }

    /// What the pool holds and hands out.
    ///
    /// # Errors
    /// Driver errors, [`Error::Closed`].
    pub fn usage(&self) -> Result<Usage, Error> {
        let _use = self.0.enter()?;
        self.measure()
    }

    /// Sets the peaks of [`usage`](Self::usage) to the current values.
    ///
    /// # Errors
    /// As [`set`](Self::set).
    pub fn reset_peaks(&self) -> Result<(), Error> {
        self.set(RESERVED_HIGH, 0)?;
        self.set(USED_HIGH, 0)
    }

    /// The context that the memory belongs to.
    pub fn context(&self) -> &Context {
        &self.0.context
    }

    /// Bytes of live blocks, as they were asked for.
    pub fn requested(&self) -> u64 {
        self.0.requested.load(Ordering::Relaxed)
    }

    /// Blocks that go by their keys.
    pub(crate) fn keyed(&self) -> &Table<NativeBlock> {
        &self.0.keyed
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
        // The driver can be out of memory for being in pieces: what is unused goes back, after the
        // stream's own frees are seen to be complete, and it is asked once more. The whole context is
        // left alone: something may be capturing in it. A refusal of either step is no news.
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
            device: self.ordinal(),
            requested: bytes as u64,
            limit: self.0.max_bytes,
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
                current: self.0.get(current)?,
                peak: self.0.get(peak)?,
                ..Counter::default()
            })
        };
        let requested = self.requested();
        Ok(Usage {
            requested: Counter {
                current: requested,
                peak: requested,
                ..Counter::default()
            },
            reserved: counter(RESERVED_CURRENT, RESERVED_HIGH)?,
            used: counter(USED_CURRENT, USED_HIGH)?,
            ..Usage::default()
        })
    }
}

impl Drop for NativePool {
    fn drop(&mut self) {
        free_those_of(&self.0);
    }
}

impl fmt::Debug for NativePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NativePool")
            .field("pool", &self.0.pool)
            .field("device", &self.ordinal())
            .field("live", &self.live())
            .finish()
    }
}

fn supported(context: &Context) -> Result<(), Error> {
    if context.device().supports_pools()? {
        return Ok(());
    }
    Err(Error::NotSupported {
        what: "stream-ordered memory pools",
    })
}

/// A function that the driver does not export is an ability that it does not have.
#[cfg(unix)]
fn absent(error: DriverError) -> Error {
    if error.code() == sys::CUresult::CUDA_ERROR_NOT_FOUND {
        return Error::NotSupported {
            what: "export of memory pools",
        };
    }
    error.into()
}
