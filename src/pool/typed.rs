//! Typed buffers over all devices, last returned first.

use std::any::TypeId;
use std::fmt;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use crate::allocator::{Allocator, Block, Config, Error, Trimmed, size};
use crate::buffer::{DeviceBuffer, DeviceCopy};
use crate::driver::{Driver, Stream};

use super::buffer::{Pool, PooledBuffer};
use super::device_of;
use super::error::PoolError;
use super::notes::{Sought, TypedStats};
use super::places::{Cache, Wish};
use super::surplus::Surplus;
use super::typed_device::DeviceTypedPool;

/// Every block is aligned to this many bytes.
const GRANULE: usize = size::GRANULE as usize;
/// Lengths are rounded to a multiple of this many elements.
const UNIT: usize = 256;

/// Rounds a length up to a multiple of 256 elements; at the top it stays at the largest number.
///
/// ```
/// use cualloc::pool::round_elements;
/// assert_eq!([0, 1, 256, 257].map(round_elements), [0, 256, 256, 512]);
/// assert_eq!(round_elements(usize::MAX - 1), usize::MAX);
/// ```
pub const fn round_elements(len: usize) -> usize {
    match len.checked_next_multiple_of(UNIT) {
        Some(rounded) => rounded,
        None => usize::MAX,
    }
}

/// A pool of typed buffers over all devices of a driver.
///
/// A view on one allocator for each device. What is returned is free memory of the allocator, so that
/// buffers of other types and sizes, and every other user of the allocator, may have it; the pool only
/// remembers where the last returned ones were, and asks for those first. A buffer comes from memory
/// that its stream may use without a wait ([`take`](Self::take)) or from wherever the allocator finds
/// it ([`uninit`](Self::uninit)), never from memory that a recorded use still needs.
///
/// A buffer keeps its stream alive, as a [`DeviceBuffer`] does; for small buffers one clone of an owned
/// stream does that for all of them, and stays for the next until the pool sees buffers of other streams
/// and nobody but the allocator holds it.
///
/// The device is that of the stream. Clones are handles to the same pool; all methods may be called
/// from any thread, and driver calls are made without any lock of the pool.
///
/// ```
/// # #[cfg(feature = "sim")] {
/// # use cualloc::sim::{SimConfig, Simulator};
/// # use cualloc::driver::{Context, Stream};
/// use cualloc::{Config, pool::TypedPool};
///
/// # let sim = Simulator::new(SimConfig::default())?;
/// # let driver = sim.driver()?;
/// # let context = Context::primary(&driver, driver.device(0)?)?;
/// # let stream = Stream::new(&context)?;
/// let pool = TypedPool::new(&driver, Config::new());
/// assert!(pool.take::<f32>(1000, &stream)?.is_none());
/// let buffer = pool.zeroed::<f32>(1000, &stream)?;
/// let address = buffer.as_device_ptr();
/// drop(buffer);
/// let again = pool.take::<u32>(1000, &stream)?.expect("it is free");
/// assert_eq!(again.as_device_ptr(), address);
/// # }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct TypedPool(Arc<Inner>);

struct Inner {
    driver: Option<Driver>,
    config: Config,
    devices: Devices,
    cap: AtomicU64,
}

/// The caches of all devices that were used. Only ever added to, so that they are found without a lock.
#[derive(Default)]
struct Devices(OnceLock<Box<Device>>);

struct Device {
    ordinal: usize,
    cache: Arc<Cache>,
    next: Devices,
}

impl Devices {
    #[inline]
    fn iter(&self) -> impl Iterator<Item = &Device> {
        std::iter::successors(self.0.get(), |device| device.next.0.get()).map(|device| &**device)
    }

    #[inline]
    fn find(&self, ordinal: usize) -> Option<&Arc<Cache>> {
        let mut devices = self.iter();
        let device = devices.find(|device| device.ordinal == ordinal)?;
        Some(&device.cache)
    }

    /// The cache of a device: the given one, unless there is one already.
    fn add(&self, ordinal: usize, cache: Arc<Cache>) -> &Arc<Cache> {
        let mut at = self;
        loop {
            let device = at.0.get_or_init(|| {
                Box::new(Device {
                    ordinal,
                    cache: Arc::clone(&cache),
                    next: Devices::default(),
                })
            });
            if device.ordinal == ordinal {
                return &device.cache;
            }
            at = &device.next;
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Live buffers keep their device's part.
        self.devices.iter().for_each(|device| device.cache.close());
    }
}

impl TypedPool {
    /// The pool of the process: over the process-wide driver, with the settings of `CUALLOC_CONFIG`
    /// (the default ones if those are invalid; [`Config::from_env`] tells). Made on first use; needs no
    /// driver before memory is asked for.
    pub fn global() -> &'static TypedPool {
        static GLOBAL: OnceLock<TypedPool> = OnceLock::new();
        GLOBAL.get_or_init(|| Self::make(None, Config::from_env().unwrap_or_default()))
    }

    /// A pool of its own, with allocators of its own.
    pub fn new(driver: &Driver, config: Config) -> TypedPool {
        Self::make(Some(driver.clone()), config)
    }

    /// A pool over allocators that others may use as well. On devices without one it cannot allocate.
    /// Of several for one device the last counts.
    pub fn over<'a>(allocators: impl IntoIterator<Item = &'a Allocator>) -> TypedPool {
        let allocators: Vec<&Allocator> = allocators.into_iter().collect();
        let devices = Devices::default();
        // The first one that is added for a device stays.
        for allocator in allocators.iter().rev() {
            let ordinal = allocator.context().device().ordinal();
            let surplus = Arc::new(Surplus::over(allocator));
            devices.add(ordinal, Cache::new(surplus, Allocator::clone(allocator)));
        }
        let first = allocators.first();
        TypedPool(Arc::new(Inner {
            driver: first.map(|allocator| allocator.context().driver().clone()),
            config: Config::new(),
            devices,
            cap: AtomicU64::new(u64::MAX),
        }))
    }

    fn make(driver: Option<Driver>, config: Config) -> TypedPool {
        TypedPool(Arc::new(Inner {
            driver,
            config,
            devices: Devices::default(),
            cap: AtomicU64::new(u64::MAX),
        }))
    }

    /// By ordinal.
    fn known(&self) -> Vec<&Arc<Cache>> {
        let mut devices: Vec<_> = self.0.devices.iter().collect();
        devices.sort_unstable_by_key(|device| device.ordinal);
        devices.into_iter().map(|device| &device.cache).collect()
    }

    #[inline]
    fn find(&self, ordinal: usize) -> Option<&Arc<Cache>> {
        self.0.devices.find(ordinal)
    }

    fn cache(&self, ordinal: i64) -> Result<&Arc<Cache>, PoolError> {
        let known = usize::try_from(ordinal).ok().and_then(|o| self.find(o));
        if let Some(cache) = known {
            return Ok(cache);
        }
        let driver = match &self.0.driver {
            Some(driver) => driver.clone(),
            None => Driver::load()?,
        };
        let device = device_of(&driver, ordinal)?;
        let surplus = Surplus::new(Some(driver.clone()), ordinal, self.0.config.clone())?;
        let allocator = surplus.allocator()?.clone();
        surplus.set_threshold(self.0.cap.load(Ordering::Relaxed))?;
        // Another thread may have been quicker; then this one's allocator, which holds nothing, goes.
        let cache = Cache::new(Arc::new(surplus), allocator);
        Ok(self.0.devices.add(device.ordinal(), cache))
    }

    /// The allocator of a device, made on first use.
    ///
    /// # Errors
    /// [`PoolError::InvalidDevice`]; a driver that cannot be had; those of
    /// [`Allocator::with_config`].
    pub fn allocator(&self, ordinal: i64) -> Result<Allocator, PoolError> {
        Ok(self.cache(ordinal)?.allocator.clone())
    }

    /// The pool's part for one device, as a source of memory without a type; its allocator is made if
    /// there is none yet.
    ///
    /// # Errors
    /// As [`allocator`](Self::allocator).
    pub fn on_device(&self, ordinal: i64) -> Result<DeviceTypedPool, PoolError> {
        let cache = Arc::clone(self.cache(ordinal)?);
        Ok(DeviceTypedPool::new(cache))
    }

    /// A buffer of `len` elements from memory at hand that the stream may use without a wait: what was
    /// returned last on the stream with the same number of bytes, else the best fit. `None`, a miss, if
    /// there is none. Makes no driver call that takes memory, and creates no event; the memory is as its
    /// last user left it.
    ///
    /// A buffer of no elements has no memory and is neither hit nor miss.
    ///
    /// # Errors
    /// [`PoolError::TooLarge`]; a stream that is capturing; driver errors.
    pub fn take<T: DeviceCopy>(
        &self,
        len: usize,
        stream: &Stream,
    ) -> Result<Option<PooledBuffer<MaybeUninit<T>>>, PoolError> {
        if let Some(buffer) = self.at_once(len, stream) {
            return Ok(Some(buffer));
        }
        let Some(wish) = self.wish::<T>(len, stream)? else {
            return Ok(Some(Self::empty_buffer()));
        };
        match wish.at_hand(stream)? {
            Some(block) => Ok(Some(wish.buffer(block, stream)?)),
            None => Ok(None),
        }
    }

    /// A buffer of `len` elements that is not initialised: one at hand as [`take`](Self::take), else a
    /// new one.
    ///
    /// # Errors
    /// As [`take`](Self::take) and [`Allocator::allocate`].
    pub fn uninit<T: DeviceCopy>(
        &self,
        len: usize,
        stream: &Stream,
    ) -> Result<PooledBuffer<MaybeUninit<T>>, PoolError> {
        if let Some(buffer) = self.at_once(len, stream) {
            return Ok(buffer);
        }
        self.obtain(len, stream)
    }

    /// A buffer of the memory that was returned last, if it needs no closer look.
    #[inline(always)]
    fn at_once<T: DeviceCopy>(
        &self,
        len: usize,
        stream: &Stream,
    ) -> Option<PooledBuffer<MaybeUninit<T>>> {
        let capacity = round_elements(len);
        let sought = Sought {
            stream: stream.known_id()?,
            bytes: capacity.checked_mul(size_of::<T>())?,
            capacity,
            element: TypeId::of::<T>(),
        };
        let cache = self.find(stream.context().device().ordinal())?;
        if align_of::<T>() > GRANULE || cache.surplus.is_bounded() {
            return None;
        }
        let (buffer, place) = cache.at_once(&sought, len, stream)?;
        Some(PooledBuffer::new(buffer, Pool::Typed(place)))
    }

    #[inline(never)]
    fn obtain<T: DeviceCopy>(
        &self,
        len: usize,
        stream: &Stream,
    ) -> Result<PooledBuffer<MaybeUninit<T>>, PoolError> {
        let Some(wish) = self.wish::<T>(len, stream)? else {
            return Ok(Self::empty_buffer());
        };
        wish.buffer(wish.obtain(stream)?, stream)
    }

    /// A buffer of `len` elements whose bytes are all zero, in the order of the stream.
    ///
    /// # Errors
    /// As [`uninit`](Self::uninit), and driver errors.
    pub fn zeroed<T: DeviceCopy>(
        &self,
        len: usize,
        stream: &Stream,
    ) -> Result<PooledBuffer<T>, PoolError> {
        self.uninit::<T>(len, stream)?.zeroed(stream)
    }

    fn empty_buffer<T: DeviceCopy>() -> PooledBuffer<MaybeUninit<T>> {
        PooledBuffer::new(DeviceBuffer::empty(), Pool::None)
    }

    fn wish<T: DeviceCopy>(
        &self,
        len: usize,
        stream: &Stream,
    ) -> Result<Option<Wish<'_>>, PoolError> {
        let capacity = round_elements(len);
        let too_large = PoolError::TooLarge {
            len,
            element_bytes: size_of::<T>(),
        };
        let Some(bytes) = capacity.checked_mul(size_of::<T>()) else {
            return Err(too_large);
        };
        if isize::try_from(bytes).is_err() {
            return Err(too_large);
        }
        if bytes == 0 {
            return Ok(None);
        }
        let ordinal = stream.context().device().ordinal();
        Ok(Some(Wish {
            cache: self.cache(ordinal as i64)?,
            len,
            alignment: align_of::<T>(),
            sought: Sought {
                stream: stream.id()?,
                bytes,
                capacity,
                element: TypeId::of::<T>(),
            },
        }))
    }

    /// Returns a buffer on a stream: that stream is to use it next. Without one it is the legacy
    /// default stream. Work of the buffer's own stream and of recorded ones comes first in any case; a
    /// drop returns it on its own stream.
    ///
    /// # Errors
    /// A stream that is capturing; driver errors. The buffer is returned all the same, on its own
    /// stream.
    pub fn put<T: DeviceCopy>(
        &self,
        buffer: PooledBuffer<T>,
        stream: Option<&Stream>,
    ) -> Result<(), PoolError> {
        let (Some((home, from)), Some(block)) = (buffer.home(), buffer.block()) else {
            return Ok(());
        };
        let next = match stream {
            Some(stream) => stream.clone(),
            None => Stream::legacy_default(home.context())?,
        };
        let id = next.id()?;
        if id == from {
            drop(buffer);
            return Ok(());
        }
        block.record_use(&next)?;
        let allocator = Allocator::of(block);
        if let Some(place) = buffer.place() {
            place.move_to(id);
        }
        drop(buffer);
        // Without a marker the other stream could not see when the first one is done.
        // SAFETY: the buffer kept its stream alive, and so does this clone of it.
        match unsafe { allocator.mark_raw(home.raw()) } {
            Ok(()) | Err(Error::UnknownStream { .. } | Error::OtherThread { .. }) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Records a use by `stream` on all live buffers of a device with the length and type of
    /// `len` elements of `T`; returns how many there were.
    ///
    /// # Errors
    /// As [`PooledBuffer::record_use`]; some may have been recorded then.
    pub fn record_use_of<T: DeviceCopy>(
        &self,
        ordinal: usize,
        len: usize,
        stream: &Stream,
    ) -> Result<usize, PoolError> {
        self.record_use_of_type(ordinal, len, TypeId::of::<T>(), stream)
    }

    /// [`record_use_of`](Self::record_use_of) by the type's id.
    ///
    /// # Errors
    /// As [`record_use_of`](Self::record_use_of).
    pub fn record_use_of_type(
        &self,
        ordinal: usize,
        len: usize,
        element: TypeId,
        stream: &Stream,
    ) -> Result<usize, PoolError> {
        let Some(cache) = self.find(ordinal) else {
            return Ok(0);
        };
        let live = cache.live(round_elements(len), element);
        let allocator = &cache.allocator;
        let mut recorded = 0;
        for address in live {
            match allocator.record_use_at(address, stream) {
                Ok(()) => recorded += 1,
                // Returned meanwhile.
                Err(Error::NotLive { .. } | Error::NotOurs { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(recorded)
    }

    // ---- memory ----------------------------------------------------------------------------

    /// Bytes held on a device and not in live blocks; 0 for one that was not used.
    pub fn cached_bytes(&self, ordinal: usize) -> u64 {
        self.find(ordinal).map_or(0, |c| c.surplus.cached())
    }

    /// [`cached_bytes`](Self::cached_bytes) of all devices together.
    pub fn cached_bytes_total(&self) -> u64 {
        self.known().iter().map(|c| c.surplus.cached()).sum()
    }

    /// The most bytes to hold on each device beside live blocks; `u64::MAX`, the default, for any
    /// number.
    pub fn cap(&self) -> u64 {
        self.0.cap.load(Ordering::Relaxed)
    }

    /// Sets the cap, and gives back at once what is above it. It is then honoured as the threshold of
    /// a [`ThresholdPool`](super::ThresholdPool).
    ///
    /// # Errors
    /// As [`ThresholdPool::set_release_threshold`](super::ThresholdPool::set_release_threshold); the cap is set all the same.
    pub fn set_cap(&self, bytes: u64) -> Result<(), PoolError> {
        self.0.cap.store(bytes, Ordering::Relaxed);
        let results = self.known();
        let mut results = results
            .iter()
            .map(|c| c.surplus.set_threshold(bytes))
            .collect::<Vec<_>>()
            .into_iter();
        results.try_for_each(|result| result)
    }

    /// Gives all unused memory of one device back to the driver. Others are not touched.
    ///
    /// # Errors
    /// As [`ThresholdPool::trim`](super::ThresholdPool::trim).
    pub fn empty(&self, ordinal: usize) -> Result<Trimmed, PoolError> {
        match self.find(ordinal) {
            Some(cache) => cache.surplus.trim(0),
            None => Ok(Trimmed::default()),
        }
    }

    /// Gives all unused memory of all devices back to the driver.
    ///
    /// # Errors
    /// As [`ThresholdPool::trim`](super::ThresholdPool::trim); devices behind the first failure are not reached.
    pub fn empty_all(&self) -> Result<Trimmed, PoolError> {
        let mut sum = Trimmed::default();
        for cache in self.known() {
            let done = cache.surplus.trim(0)?;
            sum.released += done.released;
            sum.pending += done.pending;
            sum.streams.extend(done.streams);
        }
        Ok(sum)
    }

    /// A relief hook, for an allocator of others that runs out of memory on the device: gives unused
    /// memory of this pool back.
    ///
    /// # Errors
    /// As [`allocator`](Self::allocator).
    pub fn relief(
        &self,
        ordinal: i64,
    ) -> Result<impl Fn(u64) -> u64 + Send + Sync + use<>, PoolError> {
        Ok(self.cache(ordinal)?.surplus.relief())
    }

    // ---- figures ---------------------------------------------------------------------------

    /// Counts over all devices.
    pub fn stats(&self) -> TypedStats {
        let mut sum = TypedStats::default();
        for cache in self.known() {
            sum.add(cache.stats());
        }
        sum
    }

    /// Sets all counts to 0.
    pub fn reset_stats(&self) {
        for cache in self.known() {
            cache.reset_stats();
        }
    }
}

impl Wish<'_> {
    fn buffer<T: DeviceCopy>(
        &self,
        block: Block,
        stream: &Stream,
    ) -> Result<PooledBuffer<MaybeUninit<T>>, PoolError> {
        let place = self.cache.enter(&self.sought, &block, stream);
        // SAFETY: the block was allocated on the stream just now, and its elements need no
        // initialisation.
        let made = unsafe { DeviceBuffer::<MaybeUninit<T>>::from_block(block, self.len, stream) };
        match made {
            Ok(buffer) => Ok(PooledBuffer::new(buffer, Pool::Typed(place))),
            Err(failed) => {
                let left = place.leave();
                drop(failed.block);
                place.end(left);
                Err(failed.error.into())
            }
        }
    }
}

impl fmt::Debug for TypedPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TypedPool")
            .field("stats", &self.stats())
            .field("cached_bytes", &self.cached_bytes_total())
            .finish_non_exhaustive()
    }
}
