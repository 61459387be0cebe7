//! Which blocks of a typed pool are live, and where the last returned ones were. Only names and hints: whether
//! memory is free the allocator alone decides.

#![forbid(unsafe_code)]

use std::any::TypeId;
use std::hash::BuildHasher;

use crate::allocator::Mixed;
use crate::driver::{process, sys};
use crate::locks::lock::Lock;
use crate::resource::Usage;

/// Independently locked parts of a table.
const SHARDS: usize = 16;
/// Returned addresses to try for one request.
const TRIES: usize = 4;
/// Returned addresses that are remembered for a key, at most; beyond them the older half is forgotten.
const REMEMBERED: usize = 1024;
/// Keys of which a shard remembers returns; beyond them the one that was used longest ago is forgotten.
const KEYS: usize = 32;

/// The stream and the bytes by which returned memory is found again.
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
    /// Addresses of returned memory, the last returned at the end; the keys used last come first.
    returned: Vec<(Key, Vec<sys::CUdeviceptr>)>,
    /// Hits, misses, and blocks, of which the peak means nothing.
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

    /// All shards; none in a forked child, where a thread that does not exist may hold a lock.
    fn shards(&self) -> impl Iterator<Item = &Lock<Shard>> {
        let forked = process::is_forked_child();
        self.shards.iter().take_while(move |_| !forked)
    }

    /// Serves a request by `take`, which gets the address that was returned last for the key and may not wait: the
    /// shard is locked. Enters the block; its note.
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

    /// The addresses that were returned last for a key, the last one first.
    pub fn hints(&self, key: &Key) -> Vec<sys::CUdeviceptr> {
        let mut shard = self.shard(key).1.lock();
        let returned = shard.returned(key).into_iter().flatten();
        returned.rev().take(TRIES).map(|hint| *hint).collect()
    }

    /// Counts a request that was served or not, and forgets those of its hints that are not in free memory any more.
    pub fn answered(&self, key: &Key, hit: bool, hints: &[sys::CUdeviceptr], free: &[u64]) {
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

    /// Enters a live block; its note.
    pub fn enter(&self, live: Live) -> u64 {
        let (number, shard) = self.shard(&live.key);
        shard.lock().enter(number, live)
    }

    /// Removes the entry of a block that `free` gives back, and remembers where it was. None, with the entry
    /// unchanged, if `free` fails or the entry is not the block's. `free` may not wait: the shard is locked.
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

    /// Restores the entry of a block that could not be freed after [`leave`](Self::leave); its new note.
    pub fn stay(&self, live: Live) -> u64 {
        let (number, shard) = self.shard(&live.key);
        let mut shard = shard.lock();
        shard.forget(&live.key, live.address);
        let note = shard.enter(number, live);
        let blocks = &mut shard.usage.blocks;
        blocks.total_freed = blocks.total_freed.saturating_sub(1);
        blocks.total_allocated -= 1;
        note
    }

    /// Addresses of the live buffers of a rounded length and type.
    pub fn live(&self, capacity: usize, element: TypeId) -> Vec<sys::CUdeviceptr> {
        let mut found = Vec::new();
        for shard in self.shards().filter(|_| capacity > 0) {
            let shard = shard.lock();
            let named = |live: &&Live| live.capacity == capacity && live.element == element;
            found.extend(shard.live.iter().filter(named).map(|live| live.address));
        }
        found
    }

    /// Hits, misses and blocks of all shards, without a peak.
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

    /// The remembered addresses of a key, which becomes the first.
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

    /// S2.2
    #[test]
    fn s2_2_a_hit_takes_the_last_hint_and_a_miss_leaves_it() {
        let table = Table::default();
        type Taken = Option<(u64, Option<u64>)>;
        let hit = |take: fn(Option<u64>) -> Taken| table.hit(live(0), take).map(|(seen, _)| seen);
        assert_eq!(hit(|last| Some((9, last))), Some(None));
        for address in 1..=6 {
            let note = table.enter(live(address));
            assert!(table.leave(note, 77, || true).is_none(), "another's entry");
            assert!(table.leave(u64::MAX, address, || true).is_none());
            assert!(table.leave(note, address, || false).is_none());
            let left = table.leave(note, address, || true).unwrap();
            // The free failed after all.
            let note = table.stay(left);
            assert_eq!(table.live(512, TypeId::of::<u8>()), [9, address]);
            assert!(table.live(512, TypeId::of::<u16>()).is_empty());
            assert!(table.leave(note, address, || true).is_some());
        }
        assert_eq!(hit(|_| None), None);
        assert_eq!(hit(|last| Some((6, last))), Some(Some(6)));
        assert_eq!(table.hints(&KEY), [5, 4, 3, 2]);
        table.answered(&KEY, true, &[5, 4, 3, 2], &[4, 2]);
        assert_eq!(table.hints(&KEY), [4, 2, 1]);
        assert!(table.hints(&(8, 512)).is_empty());
        let (hits, blocks) = (table.usage().hits, table.usage().blocks);
        let blocks = (blocks.current, blocks.total_allocated, blocks.total_freed);
        assert_eq!((hits, blocks), (3, (2, 8, 6)));
        table.reset_sums();
        assert_eq!((table.usage().hits, table.usage().blocks.current), (0, 2));
    }

    #[test]
    fn what_is_remembered_is_bounded() {
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
