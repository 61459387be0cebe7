//! A pool of typed buffers, last returned first.

use std::any::TypeId;
use std::mem::MaybeUninit;
use std::sync::{Arc, LazyLock};

use crate::allocator::cache::stream_cache::thread;
use crate::allocator::{
    Allocator, Config, Counter, Element, Engine, Grant, Missed, Request, size, unaligned,
};
use crate::buffer::{DeviceBuffer, DeviceCopy};
use crate::driver::{Context, Driver, Stream};
use crate::error::{Error, InvalidArgument, Refused, StreamMisuse};
use crate::resource::{
    MemoryResource, PerDevice, RawBlock, Usage, device_of, forward, is_retired, named, try_free,
};

use super::table::{Live, Table};
use super::threshold::Surplus;

/// Lengths are rounded up to a multiple of this number of elements.
const UNIT: usize = 256;

/// A pool of typed buffers on one device.
///
/// A thin layer over an [`Allocator`]: a returned buffer is free memory of the allocator, for every user of it. The pool
/// rounds lengths up to a multiple of 256 elements, counts requests, and requests the addresses of the last returned
/// buffers first. [`take`](Self::take) uses only memory that its stream may use without a wait.
///
/// As a [`MemoryResource`] it is a source of [`DeviceBuffer`]s, which keep their stream and their pool alive. Clones are
/// handles to the same pool; all methods may be called from any thread.
///
/// ```
/// # use cualloc::sim::{SimConfig, Simulator};
/// # use cualloc::driver::Stream;
/// use cualloc::{Allocator, Config, DeviceBuffer, pool::TypedPool};
///
/// # let sim = Simulator::new(SimConfig::default())?;
/// # let context = sim.driver()?.context(0)?;
/// # let stream = Stream::new(&context)?;
/// let pool = TypedPool::new(&Allocator::with_config(&context, Config::new())?);
/// assert!(pool.take::<f32>(1000, &stream)?.is_none());
/// let buffer = DeviceBuffer::<f32>::zeroed(&pool, 1000, &stream)?;
/// let address = buffer.as_device_ptr();
/// drop(buffer);
/// let again = pool.take::<u32>(1000, &stream)?.expect("it is free");
/// assert_eq!(again.as_device_ptr(), address);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct TypedPool(Arc<Inner>);

struct Inner {
    allocator: Allocator,
    table: Table,
    surplus: Surplus,
}

impl TypedPool {
    /// Rounds a length up to a multiple of 256 elements, or to the largest number.
    pub const fn round_len(len: usize) -> usize {
        match len.checked_next_multiple_of(UNIT) {
            Some(rounded) => rounded,
            None => usize::MAX,
        }
    }

    /// Creates a pool over an allocator, which others may use as well.
    pub fn new(allocator: &Allocator) -> TypedPool {
        TypedPool(Arc::new(Inner {
            allocator: allocator.clone(),
            table: Table::default(),
            surplus: Surplus::default(),
        }))
    }

    /// The pools of the process, one for each device of the process-wide driver, with the settings of `CUALLOC_CONFIG`.
    /// The first [`get`](PerDevice::get) fails if settings, device or driver are unusable.
    pub fn global() -> &'static PerDevice<TypedPool> {
        static GLOBAL: LazyLock<PerDevice<TypedPool>> = LazyLock::new(|| {
            PerDevice::new(|ordinal| {
                let config = Config::from_env()?;
                let context = Context::primary(&device_of(&Driver::load()?, ordinal)?)?;
                Ok(TypedPool::new(&Allocator::with_config(&context, config)?))
            })
        });
        &GLOBAL
    }

    /// The allocator under the pool.
    pub fn allocator(&self) -> &Allocator {
        &self.0.allocator
    }

    /// Returns a buffer of `len` elements from cached memory that the stream may use without a wait: the last returned
    /// block of the same size on the stream, else the best fit; `None`, a miss, if there is none. Memory returned on
    /// another stream can be used once that stream's work is complete. The contents are those of the last user. A
    /// buffer without elements is neither a hit nor a miss.
    ///
    /// # Errors
    /// [`InvalidArgument::TooLarge`]; a stream that is capturing; driver errors.
    pub fn take<T: DeviceCopy>(
        &self,
        len: usize,
        stream: &Stream,
    ) -> Result<Option<DeviceBuffer<MaybeUninit<T>>>, Error> {
        match DeviceBuffer::<T>::uninit_cached(self, len, stream) {
            Err(Error::NotCached) => Ok(None),
            taken => taken.map(Some),
        }
    }

    /// Returns a buffer for use on another stream next, by default the legacy default stream, after the work of the
    /// buffer's own stream and of recorded ones. A drop returns it on its own stream.
    ///
    /// # Errors
    /// A stream that captures; driver errors. The buffer is then returned on its own stream.
    pub fn put<T: DeviceCopy>(
        &self,
        buffer: DeviceBuffer<T>,
        next: Option<&Stream>,
    ) -> Result<(), Error> {
        let Some((home, from, _)) = buffer.loan() else {
            return Ok(());
        };
        let home = home.clone();
        let next = next.map_or_else(|| Stream::legacy(home.context()), Stream::clone);
        if next.own_id() == from {
            return Ok(());
        }
        buffer.record_use(&next)?;
        drop(buffer);
        // Without a marker the other stream could not detect when the first one's work is complete.
        // SAFETY: the buffer kept its stream alive, and so does this clone of it.
        match unsafe { self.0.allocator.mark_raw(home.raw()) } {
            Err(Error::Stream(StreamMisuse::Unknown { .. } | StreamMisuse::WrongThread)) => Ok(()),
            marked => marked,
        }
    }

    /// Records a use by `stream` on all live buffers of `len` elements of `T`, and returns their number.
    ///
    /// # Errors
    /// As [`DeviceBuffer::record_use`]; some may have been recorded then.
    pub fn record_use_of<T: DeviceCopy>(
        &self,
        len: usize,
        stream: &Stream,
    ) -> Result<usize, Error> {
        self.record_use_of_type(len, TypeId::of::<T>(), stream)
    }

    /// [`record_use_of`](Self::record_use_of) by the type's id. Fails like [`record_use_of`](Self::record_use_of).
    pub fn record_use_of_type(
        &self,
        len: usize,
        element: TypeId,
        stream: &Stream,
    ) -> Result<usize, Error> {
        let mut recorded = 0;
        for address in self.0.table.live(Self::round_len(len), element) {
            match self.0.allocator.record_use_at(address, stream) {
                Ok(()) => recorded += 1,
                // It was returned meanwhile.
                Err(Error::NotLive { .. } | Error::NotOurs { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(recorded)
    }

    /// Sets the maximum number of unused bytes, like the threshold of a [`ThresholdPool`](super::ThresholdPool), and
    /// releases the memory above it.
    ///
    /// # Errors
    /// Those of [`Allocator::trim`]; the cap is set in any case.
    pub fn set_cap(&self, cached: Option<u64>) -> Result<(), Error> {
        self.0.surplus.set(cached, Some(&self.0.allocator))
    }
}

/// Returns the entry of a request's block, with the size rounded up.
#[inline(always)]
fn wanted(request: &Request, stream: &Stream) -> Result<Live, Error> {
    let (bytes, capacity, element) = match request.element {
        Some(Element { id, bytes }) => {
            let len = request.bytes() / bytes;
            let capacity = TypedPool::round_len(len);
            let rounded = capacity.checked_mul(bytes);
            let rounded = rounded.filter(|rounded| isize::try_from(*rounded).is_ok());
            let rounded = rounded.ok_or(InvalidArgument::TooLarge {
                len,
                element_bytes: bytes,
            })?;
            (rounded, capacity, id)
        }
        None => (request.bytes(), 0, TypeId::of::<()>()),
    };
    if bytes == 0 || Request::round(bytes).is_none() {
        let bytes = request.bytes() as u64;
        return Err(InvalidArgument::Size { bytes }.into());
    }
    Ok(Live {
        address: 0,
        key: (stream.own_id(), bytes),
        capacity,
        element,
    })
}

/// A block of the stream's cache at any address. Out of line, since usually there is a hint.
#[cold]
fn hit_anywhere(engine: &Engine, stream: u64, bytes: usize) -> Option<Grant> {
    engine.hit(stream, unaligned(bytes)?).ok()
}

/// The block of the stream's cache at one address, if it is the one of this size that the cache took back last.
#[inline(always)]
fn hit_at(engine: &Engine, stream: u64, bytes: usize, address: u64) -> Option<Grant> {
    let cache = thread::find(stream)?;
    Grant::take_at(cache, engine.owner(stream), unaligned(bytes)?, address)
}

impl Inner {
    /// The last returned block, if the stream's cache would hand it out next, as is usual; without a hint any block of
    /// the cache.
    #[inline]
    fn hit(&self, request: &Request, live: Live, stream: &Stream) -> Option<(Grant, u64)> {
        let engine = self.allocator.engine();
        if !engine.is_fast() || !request.is_plain() || !request.alignment().is_power_of_two() {
            return None;
        }
        let (id, bytes) = (stream.cached_id(), live.key.1);
        self.table.hit(
            live,
            #[inline(always)]
            |last| {
                let grant = match last {
                    Some(address) => hit_at(engine, id, bytes, address),
                    None => hit_anywhere(engine, id, bytes),
                }?;
                Some((grant.ptr(), grant))
            },
        )
    }

    /// A cached block at one of the hints, else a new one.
    #[inline(never)]
    fn find_or_allocate(
        &self,
        request: &Request,
        live: Live,
        stream: &Stream,
    ) -> Result<(Grant, u64), Error> {
        let engine = self.allocator.engine();
        engine.usable()?;
        let request = &request.resized(live.key.1);
        let hints = self.table.hints(&live.key);
        let (found, free) = self.allocator.allocate_near(request, stream, &hints)?;
        let hit = found.is_some();
        self.table.update_hints(&live.key, hit, &hints, &free);
        self.release_surplus(request);
        let grant = match found {
            Some(found) => found,
            None if request.cached_only => return Err(Error::NotCached),
            None => engine.allocate(&engine.named(stream)?, request, Missed(None))?,
        };
        let address = grant.ptr();
        Ok((grant, self.table.enter(Live { address, ..live })))
    }

    /// Releases the memory above the cap, if the request may wait.
    #[inline]
    fn release_surplus(&self, request: &Request) {
        if !request.cached_only {
            self.surplus.release(&self.allocator, true);
        }
    }
}

// SAFETY: the blocks are its allocator's.
unsafe impl MemoryResource for Inner {
    fn allocate_block(&self, request: &Request, on: &Stream) -> Result<RawBlock, Error> {
        let live = wanted(request, on)?;
        // Read before the allocation, so that a retirement meanwhile is noticed.
        let retirements = self.allocator.engine().retirements();
        let (grant, note) = match self.hit(request, live, on) {
            Some(hit) => {
                self.release_surplus(request);
                hit
            }
            None => self.find_or_allocate(request, live, on)?,
        };
        let from = (live.key.0, retirements);
        let mut block = named(self.allocator.engine(), &grant, request, from);
        block.set_note(note);
        Ok(block)
    }

    fn deallocate_block(&self, block: RawBlock) -> Result<(), Refused<RawBlock>> {
        // Before the block is free, since its address may belong to another one afterwards.
        let left = self.table.leave(block.note(), block.ptr(), || true);
        self.allocator
            .deallocate_block(block)
            .map_err(|mut refused| {
                if let Some(live) = left {
                    refused.value.set_note(self.table.restore(live));
                }
                refused
            })?;
        self.surplus.release(&self.allocator, false);
        Ok(())
    }

    fn try_take_back(&self, block: &mut RawBlock) -> bool {
        // The heap frees large blocks.
        if block.size() as u64 > size::PACKED_SMALL_LIMIT || is_retired(&self.allocator, block) {
            return false;
        }
        let (note, address) = (block.note(), block.ptr());
        let free = || try_free(&self.allocator, block);
        let freed = self.table.leave(note, address, free).is_some();
        if freed {
            self.surplus.release(&self.allocator, false);
        }
        freed
    }

    fn upstream(&self) -> Option<&dyn MemoryResource> {
        Some(&self.allocator)
    }

    /// Requests and blocks are the pool's own, the peak of blocks and all bytes the allocator's.
    fn usage(&self) -> Result<Usage, Error> {
        let (own, below) = (self.table.usage(), self.allocator.usage()?);
        Ok(Usage {
            blocks: Counter {
                peak: below.blocks.peak,
                ..own.blocks
            },
            requests: own.hits + own.misses,
            hits: own.hits,
            misses: own.misses,
            ..below
        })
    }

    fn reset_accumulated_stats(&self) {
        self.table.reset_sums();
        self.allocator.reset_accumulated_stats();
    }
}

forward! {
    [] TypedPool, self => (*self.0), Arc::<Inner>::clone(&self.0);
}

debug_fields!(TypedPool, self => usage: self.usage());
