//! The live blocks of a typed pool, and the addresses of the last returned ones. These are hints: the allocator decides
//! whether memory is free.

#![forbid(unsafe_code)]

use std::any::TypeId;
use std::hash::BuildHasher;

use crate::allocator::Mixed;
use crate::driver::{process, sys};
use crate::locks::lock::Lock;
use crate::resource::Usage;

/// Independently locked parts of a table.
const SHARDS: usize = 16;
/// The number of returned addresses to try for a request.
const TRIES: usize = 4;
/// The maximum number of returned addresses of a key; at the limit the older half is removed.
const REMEMBERED: usize = 1024;
/// The maximum number of keys with returned addresses in a shard; the least recently used one is removed.
const KEYS: usize = 32;

/// The stream and the size in bytes of returned memory.
pub(super) type Key = (u64, usize);

/// A live block.
#[derive(Clone, Copy)]
pub(super) struct Live {
    pub address: sys::CUdeviceptr,
    pub key: Key,
    /// The rounded length; 0 for a block without elements.
    pub capacity: usize,
    pub element: TypeId,
}

#[derive(Default)]
struct Shard {
    live: Vec<Live>,
    vacant: Vec<u32>,
    /// Addresses of returned memory, the last returned at the end, by key, the most recently used first.
    returned: Vec<(Key, Vec<sys::CUdeviceptr>)>,
    /// Hits, misses, and blocks, without a valid peak.
    usage: Usage,
}

/// Sharded by stream and size, so that streams do not contend.
#[derive(Default)]
pub(super) struct Table {
    shards: [Lock<Shard>; SHARDS],
}

impl Table {
    #[inline]
    fn shard(&self, key: &Key) -> (usize, &Lock<Shard>) {
        let at = (Mixed::default().hash_one(key) >> 32) as usize % SHARDS;
        (at, &self.shards[at])
    }

    /// All shards; none in a forked child, where a lock may be held by a thread that does not exist.
    fn shards(&self) -> impl Iterator<Item = &Lock<Shard>> {
        let forked = process::is_forked_child();
        self.shards.iter().take_while(move |_| !forked)
    }

    /// Serves a request by `take`, which gets the last returned address of the key and must not wait, since the shard is
    /// locked. Adds the block, and returns its note.
    #[inline]
    pub fn hit<T>(
        &self,
        live: Live,
        take: impl FnOnce(Option<sys::CUdeviceptr>) -> Option<(sys::CUdeviceptr, T)>,
    ) -> Option<(T, u64)> {
        let (number, shard) = self.shard(&live.key);
        let mut shard = shard.lock();
        let returned = shard.returned(&live.key);
        let last = returned.as_ref().and_then(|returned| returned.last());
        let (address, taken) = take(last.copied())?;
        if let Some(returned) = returned {
            returned.pop();
        }
        shard.usage.hits += 1;
        Some((taken, shard.enter(number, Live { address, ..live })))
    }

    /// Returns the last returned addresses of a key, the last one first.
    pub fn hints(&self, key: &Key) -> Vec<sys::CUdeviceptr> {
        let mut shard = self.shard(key).1.lock();
        let returned = shard.returned(key).into_iter().flatten();
        returned.rev().take(TRIES).map(|hint| *hint).collect()
    }

    /// Counts a hit or a miss, and removes those of its hints that are no longer in free memory.
    pub fn update_hints(&self, key: &Key, hit: bool, hints: &[sys::CUdeviceptr], free: &[u64]) {
        let mut shard = self.shard(key).1.lock();
        let count = match hit {
            true => &mut shard.usage.hits,
            false => &mut shard.usage.misses,
        };
        *count += 1;
        for hint in hints.iter().filter(|hint| !free.contains(hint)) {
            shard.forget(key, *hint);
        }
    }

    /// Adds a live block, and returns its note.
    pub fn enter(&self, live: Live) -> u64 {
        let (number, shard) = self.shard(&live.key);
        shard.lock().enter(number, live)
    }

    /// Frees a block by `free`, which must not wait, since the shard is locked. Removes its entry and keeps the address
    /// as a hint. Returns none and changes nothing if `free` fails or the entry is not the block's.
    #[inline]
    pub fn leave(
        &self,
        note: u64,
        address: sys::CUdeviceptr,
        free: impl FnOnce() -> bool,
    ) -> Option<Live> {
        let at = note as u32;
        let mut shard = self.shards.get((note >> 32) as usize)?.lock();
        let entry = shard.live.get_mut(at as usize)?;
        if entry.address != address || !free() {
            return None;
        }
        let live = *entry;
        // No block begins there.
        (entry.address, entry.capacity) = (0, 0);
        shard.vacant.push(at);
        shard.usage.blocks.sub(1);
        shard.remember(&live.key, address);
        Some(live)
    }

    /// Restores the entry of a block that could not be freed after [`leave`](Self::leave), and returns its new note.
    pub fn restore(&self, live: Live) -> u64 {
        let (number, shard) = self.shard(&live.key);
        let mut shard = shard.lock();
        shard.forget(&live.key, live.address);
        let note = shard.enter(number, live);
        let blocks = &mut shard.usage.blocks;
        blocks.total_freed = blocks.total_freed.saturating_sub(1);
        blocks.total_allocated -= 1;
        note
    }

    /// Returns the addresses of live buffers of a rounded length and a type.
    pub fn live(&self, capacity: usize, element: TypeId) -> Vec<sys::CUdeviceptr> {
        let mut found = Vec::new();
        for shard in self.shards().filter(|_| capacity > 0) {
            let shard = shard.lock();
            let named = |live: &&Live| live.capacity == capacity && live.element == element;
            found.extend(shard.live.iter().filter(named).map(|live| live.address));
        }
        found
    }

    /// Returns hits, misses and blocks of all shards, without a peak.
    pub fn usage(&self) -> Usage {
        let mut sum = Usage::default();
        for shard in self.shards() {
            let usage = shard.lock().usage;
            sum.hits += usage.hits;
            sum.misses += usage.misses;
            sum.blocks.current += usage.blocks.current;
            sum.blocks.total_allocated += usage.blocks.total_allocated;
            sum.blocks.total_freed += usage.blocks.total_freed;
        }
        sum
    }

    pub fn reset_sums(&self) {
        self.shards()
            .for_each(|shard| shard.lock().usage.reset_sums());
    }
}

impl Shard {
    #[inline]
    fn enter(&mut self, number: usize, live: Live) -> u64 {
        self.usage.blocks.add(1);
        let at = self.vacant.pop().unwrap_or(self.live.len() as u32);
        match self.live.get_mut(at as usize) {
            Some(place) => *place = live,
            None => self.live.push(live),
        }
        (number as u64) << 32 | u64::from(at)
    }

    /// Returns the addresses of a key, which becomes the most recently used.
    #[inline]
    fn returned(&mut self, key: &Key) -> Option<&mut Vec<sys::CUdeviceptr>> {
        let at = self.returned.iter().position(|(known, _)| known == key)?;
        if at > 0 {
            self.returned[..=at].rotate_right(1);
        }
        self.returned.first_mut().map(|(_, addresses)| addresses)
    }

    #[inline]
    fn remember(&mut self, key: &Key, address: sys::CUdeviceptr) {
        let Some(returned) = self.returned(key) else {
            self.returned.truncate(KEYS - 1);
            return self.returned.insert(0, (*key, vec![address]));
        };
        if returned.len() == REMEMBERED {
            returned.drain(..REMEMBERED / 2);
        }
        returned.push(address);
    }

    fn forget(&mut self, key: &Key, address: sys::CUdeviceptr) {
        if let Some(returned) = self.returned(key)
            && let Some(at) = returned.iter().rposition(|known| *known == address)
        {
            returned.remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: Key = (7, 512);

    fn live(address: u64) -> Live {
        Live {
            address,
            key: KEY,
            capacity: 512,
            element: TypeId::of::<u8>(),
        }
    }

    #[test]
    fn the_remembered_history_is_bounded() {
        let table = Table::default();
        let keys = (0..SHARDS as u64 * KEYS as u64 * 4).map(|stream| (stream, 512));
        for key in keys.chain(vec![KEY; 2 * REMEMBERED]) {
            let note = table.enter(Live { key, ..live(1) });
            assert!(table.leave(note, 1, || true).is_some());
        }
        for shard in &table.shards {
            let shard = shard.lock();
            assert!((1..=KEYS).contains(&shard.returned.len()));
            let most = shard.returned.iter().map(|(_, known)| known.len()).max();
            assert!(most.is_some_and(|most| most <= REMEMBERED));
        }
    }
}
