//! Where the buffers of a typed pool are and were, for one device.

use std::any::TypeId;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use crate::driver::sys;

use super::threshold::ThresholdPool;
use super::typed::TypedStats;
use crate::allocator::Mixed;

/// Returned addresses that are remembered for each stream and size.
const REMEMBERED: usize = 32;
/// Stream and size pairs of which addresses are remembered.
const PAIRS: usize = 256;
/// Remembered addresses to try for one request.
const TRIES: usize = 4;

/// A typed pool's part for one device.
pub(super) struct Cache {
    pub pool: ThresholdPool,
    index: Mutex<Index>,
}

/// Hints and names, no books: whether memory is free only the allocator says.
#[derive(Default)]
struct Index {
    /// By stream and bytes: the addresses returned last, the newest at the end.
    returned: HashMap<(u64, usize), VecDeque<sys::CUdeviceptr>, Mixed>,
    /// Live buffers, and vacant places between them.
    live: Vec<Live>,
    vacant: Vec<u32>,
    stats: TypedStats,
}

/// A live buffer as others may name it.
struct Live {
    /// Its rounded length.
    capacity: usize,
    element: TypeId,
    /// 0 where there is none.
    address: sys::CUdeviceptr,
}

/// What a request looks for.
#[derive(Clone, Copy)]
pub(super) struct Sought {
    pub stream: u64,
    pub bytes: usize,
    /// The rounded length.
    pub capacity: usize,
    pub element: TypeId,
}

/// A request under way: a place for its buffer, which others may take for live at the first of the
/// hints already, and where it might be.
pub(super) struct Asked {
    slot: u32,
    hints: [sys::CUdeviceptr; TRIES],
    count: usize,
}

impl Asked {
    /// The addresses returned last, the newest first.
    pub fn hints(&self) -> &[sys::CUdeviceptr] {
        &self.hints[..self.count]
    }
}

impl Index {
    fn occupy(&mut self, live: Live) -> u32 {
        if let Some(slot) = self.vacant.pop() {
            self.live[slot as usize] = live;
            return slot;
        }
        self.live.push(live);
        (self.live.len() - 1) as u32
    }

    fn vacate(&mut self, slot: u32) {
        self.live[slot as usize].address = 0;
        self.vacant.push(slot);
    }

    fn remember(&mut self, key: (u64, usize), address: sys::CUdeviceptr) {
        if self.returned.len() >= PAIRS && !self.returned.contains_key(&key) {
            self.returned.clear();
        }
        let addresses = self.returned.entry(key).or_default();
        if addresses.len() == REMEMBERED {
            addresses.pop_front();
        }
        addresses.push_back(address);
    }

    fn forget(&mut self, key: (u64, usize), address: sys::CUdeviceptr) {
        if let Some(addresses) = self.returned.get_mut(&key)
            && let Some(at) = addresses.iter().rposition(|known| *known == address)
        {
            addresses.remove(at);
        }
    }
}

impl Cache {
    pub fn new(pool: ThresholdPool) -> Arc<Cache> {
        Arc::new(Cache {
            pool,
            index: Mutex::default(),
        })
    }

    fn index<T>(&self, run: impl FnOnce(&mut Index) -> T) -> T {
        run(&mut self.index.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Begins a request; [`found`](Self::found) or [`missed`](Self::missed) ends it. It counts as a hit
    /// at the newest hint until then, for that is what it mostly is.
    pub fn ask(&self, sought: &Sought) -> Asked {
        let key = (sought.stream, sought.bytes);
        self.index(|index| {
            let mut hints = [0; TRIES];
            let mut count = 0;
            if let Some(addresses) = index.returned.get_mut(&key) {
                for (hint, address) in hints.iter_mut().zip(addresses.iter().rev()) {
                    *hint = *address;
                    count += 1;
                }
                addresses.pop_back();
            }
            index.stats.hits += 1;
            let slot = index.occupy(Live {
                capacity: sought.capacity,
                element: sought.element,
                address: hints[0],
            });
            Asked { slot, hints, count }
        })
    }

    /// The request got its memory, and `free` are those of its hints that lie in free memory still.
    pub fn found(&self, sought: &Sought, asked: &Asked, address: u64, free: &[u64]) -> u32 {
        if asked.hints().first() != Some(&address) {
            self.index(|index| {
                index.live[asked.slot as usize].address = address;
                index.keep(sought, asked, free);
            });
        }
        asked.slot
    }

    /// The request found nothing at hand.
    pub fn missed(&self, sought: &Sought, asked: &Asked, free: &[u64]) {
        self.index(|index| {
            index.keep(sought, asked, free);
            index.vacate(asked.slot);
            index.stats.hits = index.stats.hits.saturating_sub(1);
            index.stats.misses += 1;
        });
    }

    /// The request failed, and is neither hit nor miss.
    pub fn failed(&self, asked: &Asked) {
        self.index(|index| {
            index.vacate(asked.slot);
            index.stats.hits = index.stats.hits.saturating_sub(1);
        });
    }

    /// Enters a buffer that was a miss.
    pub fn enter(&self, sought: &Sought, address: u64) -> u32 {
        self.index(|index| {
            index.occupy(Live {
                capacity: sought.capacity,
                element: sought.element,
                address,
            })
        })
    }

    /// A block that nobody names by length and type needs no place.
    pub fn unname(&self, slot: u32) {
        self.index(|index| index.vacate(slot));
    }

    /// Such a block was freed.
    pub fn returned(&self, stream: u64, bytes: usize, address: u64) {
        self.index(|index| {
            index.remember((stream, bytes), address);
            index.stats.returns += 1;
        });
    }

    /// Addresses of the live buffers of a rounded length and type.
    pub fn live(&self, capacity: usize, element: TypeId) -> Vec<sys::CUdeviceptr> {
        self.index(|index| {
            let live = index.live.iter().filter(|live| {
                live.address != 0 && live.capacity == capacity && live.element == element
            });
            live.map(|live| live.address).collect()
        })
    }

    pub fn stats(&self) -> TypedStats {
        self.index(|index| index.stats)
    }

    pub fn reset_stats(&self) {
        self.index(|index| index.stats = TypedStats::default());
    }
}

impl Index {
    /// Of the hints of a request only those stay that lie in free memory. The first was taken out when
    /// it began.
    fn keep(&mut self, sought: &Sought, asked: &Asked, free: &[u64]) {
        let key = (sought.stream, sought.bytes);
        for (at, hint) in asked.hints().iter().enumerate() {
            match free.contains(hint) {
                true if at == 0 => self.remember(key, *hint),
                false if at > 0 => self.forget(key, *hint),
                _ => {}
            }
        }
    }
}

/// A live buffer as its cache knows it.
pub(super) struct Place {
    cache: Arc<Cache>,
    sought: Sought,
    slot: u32,
    address: sys::CUdeviceptr,
}

impl Place {
    pub fn new(cache: &Arc<Cache>, sought: Sought, slot: u32, address: u64) -> Place {
        let cache = Arc::clone(cache);
        Place {
            cache,
            sought,
            slot,
            address,
        }
    }

    /// The buffer is to be returned on another stream than its own.
    pub fn move_to(&mut self, stream: u64) {
        self.sought.stream = stream;
    }

    /// Just before the buffer is freed: from then on its address may be somebody else's. Who takes the
    /// hint before the memory is free does not get it, and loses no more than the hint.
    pub fn leave(&self) {
        self.cache.index(|index| {
            index.vacate(self.slot);
            index.remember((self.sought.stream, self.sought.bytes), self.address);
            index.stats.returns += 1;
        });
    }

    /// After a [`leave`](Self::leave) the buffer could not be freed.
    pub fn stay(&mut self) {
        let (sought, address) = (self.sought, self.address);
        self.slot = self.cache.index(|index| {
            index.forget((sought.stream, sought.bytes), address);
            index.stats.returns = index.stats.returns.saturating_sub(1);
            index.occupy(Live {
                capacity: sought.capacity,
                element: sought.element,
                address,
            })
        });
    }

    /// After the buffer was freed.
    pub fn release_surplus(&self) {
        self.cache.pool.0.release_surplus(false);
    }
}
