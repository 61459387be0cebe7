//! The driver's own stream-ordered pools, as one pool among others.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::allocator::{Counter, Request, Trimmed};
use crate::block::{BlockId, BlockState};
use crate::driver::{
    Context, Device, DriverError, Feature, MemoryPool, PoolProperties, Stream, sys,
};
use crate::error::{Error, InvalidArgument, OutOfMemory, Refused};
use crate::resource::{
    DRIVER_ALIGNMENT, MemoryResource, RawBlock, Usage, UseTracking, check_request, give_back,
};

use super::driver_blocks::{DESTROYED, Inner, free_those_of};
use super::driver_pool_config::{
    DriverPoolConfig, OPPORTUNISTIC, RELEASE_THRESHOLD, RESERVED_CURRENT, RESERVED_HIGH,
    USED_CURRENT, USED_HIGH, takes, within,
};

/// Opportunistic reuse can hand out memory in use on drivers before this version.
const SAFE_OPPORTUNISTIC: u32 = 11_050;

/// A pool of the driver (`cuMemPool*`), for comparison with ours and for sharing with code that uses
/// such pools. It is a [`MemoryResource`]: typed memory of it is a [`DeviceBuffer`](crate::DeviceBuffer).
///
/// Clones are handles to the same pool; `Send` and `Sync`. The last handle or block that goes destroys
/// it, if it was made here. The addresses are the driver's: a pool on the real driver never gives
/// simulated ones.
///
/// # Destruction
/// [`destroy`](Self::destroy) refuses while blocks are live. Work in flight on blocks that were freed
/// is no obstacle: the driver keeps the memory until that work is done.
#[derive(Clone)]
pub struct DriverPool(Arc<Inner>);

impl DriverPool {
    /// A pool of a context's device.
    ///
    /// # Errors
    /// As [`DriverPoolConfig::validate`]; [`Error::NotSupported`] if driver or device have no pools, or
    /// cannot export them and that was asked for; driver errors.
    pub fn new(context: &Context, config: DriverPoolConfig) -> Result<DriverPool, Error> {
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
                give_back(
                    &pool,
                    *refused.value,
                    "a driver's pool could not be warmed up",
                );
                return Err(refused.error);
            }
            stream.synchronize()?;
        }
        Ok(pool)
    }

    /// The device's default pool, which everything in the process shares: settings apply to all.
    /// Never destroyed.
    ///
    /// # Errors
    /// [`Error::NotSupported`], driver errors.
    pub fn default_of(context: &Context) -> Result<DriverPool, Error> {
        supported(context)?;
        Ok(Self::wrap(context, MemoryPool::default_of(context)?, None))
    }

    /// The pool of another process behind a descriptor of [`export`](Self::export).
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

    /// Destroys the pool, with an error if that fails. A pool that was not made here is only let go
    /// of. A second call does nothing.
    ///
    /// # Errors
    /// [`Error::InUse`]; driver errors, after which the pool is destroyed or lost: the driver may have done it.
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
        Ok(unsafe { self.0.pool.destroy() }?)
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
            within("release_threshold", value, self.0.maximum)?;
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

    /// Frees memory of the pool by its address, in the order of a stream: work that the stream was given
    /// before may still use it. For what other code took from the pool; a block of this crate is not counted
    /// any more then.
    ///
    /// # Errors
    /// A stream that is capturing or of another device; a lost context; [`Error::Closed`]. The memory is live still
    /// then. After any other error of the driver it may be freed or not: it counts as freed, with a warning.
    ///
    /// # Safety
    /// Nobody else gives the memory back: no buffer stands for it, nor a block that is deallocated. Its allocation
    /// is complete on the stream or in its order, and so are all uses of it on other streams.
    pub unsafe fn free_raw_on(&self, ptr: sys::CUdeviceptr, stream: &Stream) -> Result<(), Error> {
        let _use = self.0.enter()?;
        super::admit(stream, &self.0.context)?;
        // SAFETY: the stream is alive by the contract under which it was made; the rest is the caller's.
        unsafe { self.0.free_on(ptr, stream) }?;
        self.0.forget(ptr);
        Ok(())
    }

    /// Asks the driver for memory.
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
                current: self.0.get(current)?,
                peak: self.0.get(peak)?,
                ..Counter::default()
            })
        };
        let (blocks, requested) = self.0.counts();
        Ok(Usage {
            requested,
            used: counter(USED_CURRENT, USED_HIGH)?,
            reserved: counter(RESERVED_CURRENT, RESERVED_HIGH)?,
            blocks,
            limit: self.0.maximum,
            ..Usage::default()
        })
    }

    fn shrink_to(&self, keep: u64) -> Result<u64, Error> {
        free_those_of(&self.0);
        let _use = self.0.enter()?;
        let before = self.0.get(RESERVED_CURRENT)?;
        let keep = usize::try_from(keep).unwrap_or(usize::MAX);
        self.0.pool.trim_to(keep)?;
        let after = self.0.get(RESERVED_CURRENT)?;
        Ok(before.saturating_sub(after))
    }
}

/// A live block keeps the pool, also when its last handle is dropped. What cannot be given back when its owner is
/// dropped, because the stream captures or the driver refuses, goes back at a later call: of its pool, when a
/// capture is ended through this crate, or when an allocator is made, trimmed, synchronised, closed or dropped.
/// Until then it is live, and keeps its pool and its streams.
// SAFETY: the driver's memory has one owner by the table of the pool, and goes back behind all who were told to
// use it.
unsafe impl MemoryResource for DriverPool {
    fn allocate_block(&self, request: &Request, stream: &Stream) -> Result<RawBlock, Error> {
        let pool = &self.0;
        let bytes = request.bytes();
        check_request(request, DRIVER_ALIGNMENT)?;
        free_those_of(pool);
        let call = pool.enter()?;
        super::admit(stream, &pool.context)?;
        let id = stream.id()?;
        let ptr = self.take(bytes, stream)?;
        let generation = pool.hand_out(call, (ptr, bytes), (stream, id))?;
        let ordinal = MemoryResource::ordinal(self);
        let id = BlockId::new((pool.source, generation), (ptr, bytes), id, ordinal);
        // SAFETY: the table has the block, and gives it to whoever brings its name back.
        Ok(unsafe { RawBlock::new(id, bytes, request) })
    }

    fn deallocate_block(&self, block: RawBlock) -> Result<(), Refused<RawBlock>> {
        let (id, abandoned) = (block.id(), block.is_abandoned());
        let done = block.returned();
        done.and_then(|()| self.0.take_back(&id, abandoned))
            .map_err(|error| Refused::new(block, error))
    }

    fn ordinal(&self) -> usize {
        self.0.context.device().ordinal()
    }

    fn context(&self) -> Option<&Context> {
        Some(&self.0.context)
    }

    fn id(&self) -> u64 {
        self.0.source
    }

    /// What the pool holds and hands out; of requests only the live ones. [`Error::Closed`] after
    /// [`destroy`](DriverPool::destroy).
    fn usage(&self) -> Result<Usage, Error> {
        let _use = self.0.enter()?;
        self.measure()
    }

    /// Gives unused memory back to the driver until at most `keep` bytes are held, in use or not. What is in use,
    /// also by work in flight, stays, and so does what the host has not seen to be unused, by a synchronisation.
    fn trim(&self, keep: u64) -> Result<Trimmed, Error> {
        Ok(Trimmed {
            released: self.shrink_to(keep)?,
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
        match self.0.is_live(block) {
            true => BlockState::Live,
            false => BlockState::Free,
        }
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
        free_those_of(&self.0);
    }
}

impl fmt::Debug for DriverPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DriverPool")
            .field("pool", &self.0.pool)
            .field("usage", &self.measure().ok())
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
