//! What a typed pool remembers for one device.

use std::any::TypeId;
use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::allocator::Block;
use crate::buffer::{DeviceBuffer, DeviceCopy};
use crate::driver::{Stream, sys};

use super::buffer::PooledBuffer;
use super::error::PoolError;
use super::threshold::ThresholdPool;
use super::usage::zero_is_invalid;

/// Returned addresses that are remembered for each stream and size.
const REMEMBERED: usize = 32;
/// Stream and size pairs of which addresses are remembered.
const PAIRS: usize = 256;
/// Remembered addresses to try for one request.
const TRIES: usize = 4;

/// The pool's part for one device.
pub(super) struct Cache {
    pub(super) pool: ThresholdPool,
    index: Mutex<Index>,
    pub(super) hits: AtomicU64,
    pub(super) misses: AtomicU64,
    pub(super) returns: AtomicU64,
}

/// Where buffers are and were. Hints and names, no books: whether memory is free only the allocator
/// says.
#[derive(Default)]
struct Index {
    /// By stream and bytes: the addresses returned last, the newest at the end.
    returned: HashMap<(u64, usize), Vec<sys::CUdeviceptr>>,
    /// Live buffers by rounded length and type.
    live: HashMap<(usize, TypeId), Vec<sys::CUdeviceptr>>,
}

impl Cache {
    pub(super) fn new(pool: ThresholdPool) -> Arc<Cache> {
        Arc::new(Cache {
            pool,
            index: Mutex::default(),
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            returns: AtomicU64::new(0),
        })
    }

    /// Live buffers of a rounded length and type.
    pub(super) fn live(&self, capacity: usize, element: TypeId) -> Vec<sys::CUdeviceptr> {
        let key = (capacity, element);
        self.index(|index| index.live.get(&key).cloned().unwrap_or_default())
    }

    /// Memory at hand that the stream may use without a wait: the last returned of the size, else the
    /// best fit. Counts a hit or a miss.
    fn at_hand(
        &self,
        bytes: usize,
        alignment: usize,
        stream: &Stream,
    ) -> Result<Option<Block>, PoolError> {
        let key = (stream.id()?, bytes);
        // Taken out: an address that is taken is not free, and one that is not free is no hint.
        let near: Vec<sys::CUdeviceptr> = self.index(|index| {
            let Some(addresses) = index.returned.get_mut(&key) else {
                return Vec::new();
            };
            let from = addresses.len().saturating_sub(TRIES);
            let mut near = addresses.split_off(from);
            near.reverse();
            near
        });
        let allocator = self.pool.allocator()?;
        let (found, rest) = allocator.allocate_near(bytes, alignment, stream, &near)?;
        let count = if found.is_some() {
            &self.hits
        } else {
            &self.misses
        };
        count.fetch_add(1, Ordering::Relaxed);
        if !rest.is_empty() {
            self.index(|index| {
                let addresses = index.returned.entry(key).or_default();
                addresses.extend(rest.iter().rev());
            });
        }
        Ok(found)
    }

    /// Memory at hand, else new.
    pub(super) fn block(
        &self,
        bytes: usize,
        alignment: usize,
        stream: &Stream,
    ) -> Result<Block, PoolError> {
        if let Some(block) = self.at_hand(bytes, alignment, stream)? {
            return Ok(block);
        }
        self.pool.0.release_surplus(true);
        let allocator = self.pool.allocator()?;
        let made = allocator.allocate_aligned(bytes, alignment, stream);
        made.map_err(zero_is_invalid)
    }

    /// Memory that was a block of a stream came back.
    pub(super) fn returned(&self, stream: u64, bytes: usize, address: sys::CUdeviceptr) {
        self.returns.fetch_add(1, Ordering::Relaxed);
        self.index(|index| {
            if index.returned.len() >= PAIRS && !index.returned.contains_key(&(stream, bytes)) {
                index.returned.clear();
            }
            let addresses = index.returned.entry((stream, bytes)).or_default();
            if addresses.len() == REMEMBERED {
                addresses.remove(0);
            }
            addresses.push(address);
        });
    }

    fn index<T>(&self, run: impl FnOnce(&mut Index) -> T) -> T {
        run(&mut self.index.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A live buffer as its cache knows it.
pub(super) struct Place {
    cache: Arc<Cache>,
    capacity: usize,
    element: TypeId,
    bytes: usize,
    stream: u64,
    address: sys::CUdeviceptr,
}

impl Place {
    /// The stream that is to use the memory next.
    pub(super) fn redirect(&mut self, stream: u64) {
        self.stream = stream;
    }

    pub(super) fn enter<T: DeviceCopy>(&self, buffer: &DeviceBuffer<T>) {
        let address = buffer.as_device_ptr();
        self.cache.index(|index| {
            let live = index.live.entry((self.capacity, self.element));
            live.or_default().push(address);
        });
    }

    /// Before the buffer is freed: from then on its address may be somebody else's.
    pub(super) fn leave<T: DeviceCopy>(&self, buffer: &DeviceBuffer<T>) {
        let (key, address) = ((self.capacity, self.element), buffer.as_device_ptr());
        self.cache.index(|index| {
            if let Some(live) = index.live.get_mut(&key) {
                if let Some(at) = live.iter().position(|known| *known == address) {
                    live.swap_remove(at);
                }
                if live.is_empty() {
                    index.live.remove(&key);
                }
            }
        });
    }

    pub(super) fn returned(self) {
        self.cache.returned(self.stream, self.bytes, self.address);
    }
}

/// A request whose numbers are in order.
pub(super) struct Wish {
    pub(super) cache: Arc<Cache>,
    pub(super) len: usize,
    pub(super) capacity: usize,
    pub(super) bytes: usize,
    pub(super) alignment: usize,
    pub(super) element: TypeId,
    pub(super) stream: u64,
}

impl Wish {
    pub(super) fn at_hand(&self, stream: &Stream) -> Result<Option<Block>, PoolError> {
        self.cache.at_hand(self.bytes, self.alignment, stream)
    }

    /// Memory at hand, else new.
    pub(super) fn block(&self, stream: &Stream) -> Result<Block, PoolError> {
        self.cache.block(self.bytes, self.alignment, stream)
    }

    pub(super) fn buffer<T: DeviceCopy>(
        self,
        block: Block,
        stream: &Stream,
    ) -> Result<PooledBuffer<MaybeUninit<T>>, PoolError> {
        let address = block.ptr();
        // SAFETY: the block was allocated on the stream just now, and its elements need no
        // initialisation.
        let made = unsafe { DeviceBuffer::<MaybeUninit<T>>::from_block(block, self.len, stream) };
        let buffer = made.map_err(|failed| PoolError::from(failed.error))?;
        let pool = Arc::clone(&self.cache.pool.0);
        let place = Place {
            cache: self.cache,
            capacity: self.capacity,
            element: self.element,
            bytes: self.bytes,
            stream: self.stream,
            address,
        };
        place.enter(&buffer);
        Ok(PooledBuffer::new(buffer, Some(pool), Some(place)))
    }
}
