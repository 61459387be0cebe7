//! Typed buffers over all devices, last returned first.

use std::any::TypeId;
use std::fmt;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use crate::allocator::{Allocator, Block, Config, Trimmed};
use crate::buffer::{DeviceBuffer, DeviceCopy, Memory};
use crate::driver::{Driver, Stream};
use crate::error::{Error, InvalidArgument, StreamMisuse};

use super::buffer::{Entry, Home, PooledBuffer};
use super::device::DevicePool;
use super::device_of;
use super::part::Part;
use super::table::{Key, Live, TypedStats};

/// Lengths are rounded to a multiple of this many elements.
const UNIT: usize = 256;

/// A pool of typed buffers over all devices of a driver.
///
/// A view on one allocator for each device. What is returned is free memory of the allocator, so that
/// buffers of other types and sizes, and every other user of the allocator, may have it; the pool only
/// remembers where the last returned ones were, and asks for those first. A buffer comes from memory
/// that its stream may use without a wait ([`take`](Self::take)) or from wherever the allocator finds
/// it ([`uninit`](Self::uninit)), never from memory that a recorded use still needs.
///
/// A buffer keeps its stream and its pool alive.
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
/// # let context = driver.context(0)?;
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
    parts: Parts,
    /// The cap in bytes, [`u64::MAX`] for none.
    cap: AtomicU64,
}

/// The parts of all devices that were used. Only ever added to, so that they are found without a lock.
#[derive(Default)]
struct Parts(OnceLock<Box<(Arc<Part>, Parts)>>);

impl Parts {
    #[inline]
    fn iter(&self) -> impl Iterator<Item = &Arc<Part>> {
        std::iter::successors(self.0.get(), |known| known.1.0.get()).map(|known| &known.0)
    }

    #[inline]
    fn find(&self, ordinal: usize) -> Option<&Arc<Part>> {
        self.iter().find(|part| part.ordinal == ordinal)
    }

    /// The part of a device: the given one, unless there is one already.
    fn add(&self, part: Arc<Part>) -> &Arc<Part> {
        let mut at = self;
        loop {
            let known =
                at.0.get_or_init(|| Box::new((Arc::clone(&part), Parts::default())));
            if known.0.ordinal == part.ordinal {
                return &known.0;
            }
            at = &known.1;
        }
    }
}

impl TypedPool {
    /// Rounds a length up to a multiple of 256 elements; at the top it stays at the largest number.
    ///
    /// ```
    /// use cualloc::pool::TypedPool;
    /// assert_eq!([0, 1, 256, 257].map(TypedPool::round_len), [0, 256, 256, 512]);
    /// assert_eq!(TypedPool::round_len(usize::MAX - 1), usize::MAX);
    /// ```
    pub const fn round_len(len: usize) -> usize {
        match len.checked_next_multiple_of(UNIT) {
            Some(rounded) => rounded,
            None => usize::MAX,
        }
    }

    /// The pool of the process: over the process-wide driver, with the settings of `CUALLOC_CONFIG`.
    /// Made on first use; needs no driver before memory is asked for.
    ///
    /// # Errors
    /// Invalid settings in `CUALLOC_CONFIG`, at each call until they are valid; the pool is there then.
    pub fn global() -> Result<&'static TypedPool, Error> {
        static GLOBAL: OnceLock<TypedPool> = OnceLock::new();
        if let Some(pool) = GLOBAL.get() {
            return Ok(pool);
        }
        let config = Config::from_env().map_err(Error::from)?;
        Ok(GLOBAL.get_or_init(|| Self::make(None, config)))
    }

    /// A pool of its own, with allocators of its own.
    pub fn new(driver: &Driver, config: Config) -> TypedPool {
        Self::make(Some(driver.clone()), config)
    }

    /// A pool over allocators that others may use as well. On devices without one it cannot allocate.
    /// Of several for one device the last counts.
    pub fn over<'a>(allocators: impl IntoIterator<Item = &'a Allocator>) -> TypedPool {
        let allocators: Vec<&Allocator> = allocators.into_iter().collect();
        let first = allocators.first();
        let driver = first.map(|allocator| allocator.context().driver().clone());
        let pool = Self::make(driver, Config::new());
        // The first one that is added for a device stays.
        for allocator in allocators.iter().rev() {
            pool.0.parts.add(Arc::new(Part::over(allocator)));
        }
        pool
    }

    fn make(driver: Option<Driver>, config: Config) -> TypedPool {
        TypedPool(Arc::new(Inner {
            driver,
            config,
            parts: Parts::default(),
            cap: AtomicU64::new(u64::MAX),
        }))
    }

    /// By ordinal.
    fn known(&self) -> Vec<&Arc<Part>> {
        let mut parts: Vec<_> = self.0.parts.iter().collect();
        parts.sort_unstable_by_key(|part| part.ordinal);
        parts
    }

    #[inline]
    fn part(&self, ordinal: usize) -> Result<&Arc<Part>, Error> {
        match self.0.parts.find(ordinal) {
            Some(part) => Ok(part),
            None => self.new_part(ordinal),
        }
    }

    #[cold]
    fn new_part(&self, ordinal: usize) -> Result<&Arc<Part>, Error> {
        let driver = match &self.0.driver {
            Some(driver) => driver.clone(),
            None => Driver::load()?,
        };
        device_of(&driver, ordinal)?;
        let part = Part::new(Some(driver), ordinal, self.0.config.clone());
        part.allocator()?;
        part.set_threshold(self.cap())?;
        // Another thread may have been quicker; then this one's allocator, which holds nothing, goes.
        Ok(self.0.parts.add(Arc::new(part)))
    }

    /// The allocator of a device, made on first use.
    ///
    /// # Errors
    /// [`Error::InvalidDevice`]; a driver that cannot be had; those of
    /// [`Allocator::with_config`].
    pub fn allocator(&self, ordinal: usize) -> Result<Allocator, Error> {
        Ok(self.part(ordinal)?.allocator()?.clone())
    }

    /// The pool's part for one device, as a source of memory without a type; its allocator is made if
    /// there is none yet.
    ///
    /// # Errors
    /// As [`allocator`](Self::allocator).
    pub fn on_device(&self, ordinal: usize) -> Result<DevicePool, Error> {
        DevicePool::new(self.part(ordinal)?)
    }

    /// A buffer of `len` elements from cached memory that the stream may use without a wait: what was
    /// returned last on the stream with the same number of bytes, else the best fit. `None`, a miss, if
    /// there is none. Memory that was returned on another stream counts as soon as that stream is done with
    /// it. Makes no driver call that takes memory, and creates no event; the memory is as its last user left
    /// it.
    ///
    /// A buffer of no elements has no memory and is neither hit nor miss.
    ///
    /// # Errors
    /// [`InvalidArgument::TooLarge`]; a stream that is capturing; driver errors.
    pub fn take<T: DeviceCopy>(
        &self,
        len: usize,
        stream: &Stream,
    ) -> Result<Option<PooledBuffer<MaybeUninit<T>>>, Error> {
        let Some(wanted) = Wanted::new::<T>(len, stream)? else {
            return Ok(Some(PooledBuffer::empty()));
        };
        let part = self.part(stream.context().device().ordinal())?;
        let block = part.cached_block(&wanted.key, align_of::<T>(), stream)?;
        Ok(block.map(|block| wanted.buffer(part, block, stream)))
    }

    /// A buffer of `len` elements that is not initialised: a cached one as [`take`](Self::take), else a
    /// new one.
    ///
    /// # Errors
    /// As [`take`](Self::take) and [`Allocator::allocate`].
    pub fn uninit<T: DeviceCopy>(
        &self,
        len: usize,
        stream: &Stream,
    ) -> Result<PooledBuffer<MaybeUninit<T>>, Error> {
        let Some(wanted) = Wanted::new::<T>(len, stream)? else {
            return Ok(PooledBuffer::empty());
        };
        let part = self.part(stream.context().device().ordinal())?;
        let block = part.block(&wanted.key, align_of::<T>(), stream)?;
        Ok(wanted.buffer(part, block, stream))
    }

    /// A buffer of `len` elements whose bytes are all zero, in the order of the stream.
    ///
    /// # Errors
    /// As [`uninit`](Self::uninit), and driver errors.
    pub fn zeroed<T: DeviceCopy>(
        &self,
        len: usize,
        stream: &Stream,
    ) -> Result<PooledBuffer<T>, Error> {
        self.uninit::<T>(len, stream)?.zeroed(stream)
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
        mut buffer: PooledBuffer<T>,
        stream: Option<&Stream>,
    ) -> Result<(), Error> {
        let (Some((home, from)), Some(block)) = (buffer.home(), buffer.block()) else {
            return Ok(());
        };
        let next = match stream {
            Some(stream) => stream.clone(),
            None => Stream::legacy(home.context()),
        };
        let id = next.id()?;
        if id == from {
            drop(buffer);
            return Ok(());
        }
        block.record_use(&next)?;
        let allocator = Allocator::of(block);
        buffer.return_on(id);
        drop(buffer);
        // Without a marker the other stream could not see when the first one is done.
        // SAFETY: the buffer kept its stream alive, and so does this clone of it.
        match unsafe { allocator.mark_raw(home.raw()) } {
            Ok(())
            | Err(
                Error::Stream(StreamMisuse::Unknown { .. })
                | Error::Stream(StreamMisuse::WrongThread),
            ) => Ok(()),
            Err(error) => Err(error),
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
    ) -> Result<usize, Error> {
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
    ) -> Result<usize, Error> {
        let Some(part) = self.0.parts.find(ordinal) else {
            return Ok(0);
        };
        let live = part.table.live(Self::round_len(len), element);
        let allocator = part.allocator()?;
        let mut recorded = 0;
        for address in live {
            match allocator.record_use_at(address, stream) {
                Ok(()) => recorded += 1,
                // Returned meanwhile.
                Err(Error::NotLive { .. } | Error::NotOurs { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(recorded)
    }

    // ---- memory ----------------------------------------------------------------------------

    /// Bytes held on a device and not in live blocks; 0 for one that was not used.
    pub fn cached_bytes(&self, ordinal: usize) -> u64 {
        self.0.parts.find(ordinal).map_or(0, |part| part.cached())
    }

    /// [`cached_bytes`](Self::cached_bytes) of all devices together.
    pub fn cached_bytes_total(&self) -> u64 {
        self.0.parts.iter().map(|part| part.cached()).sum()
    }

    /// The most bytes to hold on each device beyond live blocks; `None`, the default, for any number.
    pub fn cap(&self) -> Option<u64> {
        Some(self.0.cap.load(Ordering::Relaxed)).filter(|bytes| *bytes != u64::MAX)
    }

    /// Sets the cap, and gives back at once what is above it. It is then honoured as the threshold of
    /// a [`ThresholdPool`](super::ThresholdPool); `Some(0)` caches nothing.
    ///
    /// # Errors
    /// As [`ThresholdPool::set_release_threshold`](super::ThresholdPool::set_release_threshold); the cap is
    /// set all the same, on all devices.
    pub fn set_cap(&self, bytes: Option<u64>) -> Result<(), Error> {
        self.0
            .cap
            .store(bytes.unwrap_or(u64::MAX), Ordering::Relaxed);
        let mut result = Ok(());
        for part in self.known() {
            result = result.and(part.set_threshold(bytes));
        }
        result
    }

    /// Gives all unused memory of one device back to the driver. Others are not touched.
    ///
    /// # Errors
    /// As [`ThresholdPool::trim`](super::ThresholdPool::trim).
    pub fn empty(&self, ordinal: usize) -> Result<Trimmed, Error> {
        match self.0.parts.find(ordinal) {
            Some(part) => part.trim(0),
            None => Ok(Trimmed::default()),
        }
    }

    /// Gives all unused memory of all devices back to the driver.
    ///
    /// # Errors
    /// As [`ThresholdPool::trim`](super::ThresholdPool::trim); devices behind the first failure are not reached.
    pub fn empty_all(&self) -> Result<Trimmed, Error> {
        let mut sum = Trimmed::default();
        for part in self.known() {
            let done = part.trim(0)?;
            sum.released += done.released;
            sum.pending += done.pending;
            sum.streams.extend(done.streams);
        }
        Ok(sum)
    }

    // ---- figures ---------------------------------------------------------------------------

    /// Counts over all devices.
    pub fn stats(&self) -> TypedStats {
        let mut sum = TypedStats::default();
        for part in self.0.parts.iter() {
            sum.add(part.table.stats());
        }
        sum
    }

    /// Sets all counts to 0.
    pub fn reset_stats(&self) {
        for part in self.0.parts.iter() {
            part.table.reset_stats();
        }
    }
}

/// A request whose numbers are in order.
struct Wanted {
    len: usize,
    key: Key,
    /// The rounded length.
    capacity: usize,
    element: TypeId,
}

impl Wanted {
    /// `None` for a request of no bytes.
    #[inline]
    fn new<T: DeviceCopy>(len: usize, stream: &Stream) -> Result<Option<Wanted>, Error> {
        let capacity = TypedPool::round_len(len);
        let bytes = capacity.checked_mul(size_of::<T>());
        let Some(bytes) = bytes.filter(|bytes| isize::try_from(*bytes).is_ok()) else {
            return Err(Error::Invalid(InvalidArgument::TooLarge {
                len,
                element_bytes: size_of::<T>(),
            }));
        };
        if bytes == 0 {
            return Ok(None);
        }
        Ok(Some(Wanted {
            len,
            key: (stream.id()?, bytes),
            capacity,
            element: TypeId::of::<T>(),
        }))
    }

    /// The buffer in a block that was allocated for this request on the stream just now.
    #[inline]
    fn buffer<T: DeviceCopy>(
        self,
        part: &Arc<Part>,
        block: Block,
        stream: &Stream,
    ) -> PooledBuffer<MaybeUninit<T>> {
        let live = Live {
            address: block.ptr(),
            capacity: self.capacity,
            element: self.element,
        };
        let entry = Entry {
            slot: part.table.enter(&self.key, live),
            key: self.key,
        };
        let memory = Memory::new(block, stream.clone(), self.key.0);
        let home = Home {
            part: Arc::clone(part),
            entry: Some(entry),
        };
        PooledBuffer::new(DeviceBuffer::over(memory, self.len), home)
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
