//! Which buffers of a pool are live, and where the last returned ones lay. Only names and hints: whether
//! memory is free the allocator alone says.

#![forbid(unsafe_code)]

use std::any::TypeId;
use std::collections::{HashMap, VecDeque};
use std::hash::BuildHasher;

use crate::allocator::Mixed;
use crate::driver::{process, sys};
use crate::locks::lock::Lock;

/// Independently locked parts of a table.
const SHARDS: usize = 16;
/// Returned addresses to try for one request.
pub(super) const TRIES: usize = 4;
/// Returned addresses that are remembered for a stream and size; the oldest are forgotten first.
const REMEMBERED: usize = 1024;
/// Streams and sizes of which a shard remembers returns; beyond them it begins anew.
const KEYS: usize = 64;

/// What a [`TypedPool`](super::TypedPool) counted since the start or the last reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TypedStats {
    /// Requests served from cached memory.
    pub hits: u64,
    /// Requests that were not.
    pub misses: u64,
    /// Buffers that came back.
    pub returns: u64,
}

impl TypedStats {
    pub(super) fn add(&mut self, other: TypedStats) {
        self.hits += other.hits;
        self.misses += other.misses;
        self.returns += other.returns;
    }
}

/// The stream and the bytes by which returned memory is found again.
pub(super) type Key = (u64, usize);

/// A live buffer as [`TypedPool::record_use_of`](super::TypedPool::record_use_of) names it.
#[derive(Clone, Copy)]
pub(super) struct Live {
    pub address: sys::CUdeviceptr,
    /// The rounded length; 0 for an entry that is vacant.
    pub capacity: usize,
    pub element: TypeId,
}

/// Where a live buffer is entered.
#[derive(Debug, Clone, Copy)]
pub(super) struct Slot {
    shard: u32,
    at: u32,
}

#[derive(Default)]
struct Shard {
    live: Vec<Live>,
    vacant: Vec<u32>,
    /// Addresses of returned memory, the last returned at the end.
    returned: HashMap<Key, VecDeque<sys::CUdeviceptr>, Mixed>,
    stats: TypedStats,
}

/// See the text of the module. Sharded by stream and size, so that streams of their own do not meet.
pub(super) struct Table {
    shards: [Lock<Shard>; SHARDS],
}

impl Default for Table {
    fn default() -> Self {
        Table {
            shards: std::array::from_fn(|_| Lock::new(Shard::default())),
        }
    }
}

/// The addresses that one request is to try, the last returned first.
pub(super) struct Hints {
    addresses: [sys::CUdeviceptr; TRIES],
    count: usize,
}

impl Hints {
    pub fn as_slice(&self) -> &[sys::CUdeviceptr] {
        &self.addresses[..self.count]
    }
}

#[inline]
fn shard_of(key: &Key) -> usize {
    // The upper bits: a shard's own map goes by the lower ones.
    (Mixed::default().hash_one(key) >> 32) as usize % SHARDS
}

impl Table {
    /// All shards; none in a forked child, where a lock may be held by a thread that does not exist there.
    fn shards(&self) -> impl Iterator<Item = &Lock<Shard>> {
        let forked = process::is_forked_child();
        self.shards.iter().take_while(move |_| !forked)
    }

    /// A request that is to be a hit at once. `take` gets the address that was returned last for the key, `None`
    /// if none is remembered; what it takes there is no hint any more. It may not wait: the shard is locked.
    #[inline]
    pub fn hit<T>(
        &self,
        key: &Key,
        take: impl FnOnce(Option<sys::CUdeviceptr>) -> Option<T>,
    ) -> Option<T> {
        let mut shard = self.shards[shard_of(key)].lock();
        let shard = &mut *shard;
        let Some(returned) = shard.returned.get_mut(key) else {
            let taken = take(None)?;
            shard.stats.hits += 1;
            return Some(taken);
        };
        let taken = take(returned.back().copied())?;
        returned.pop_back();
        shard.stats.hits += 1;
        Some(taken)
    }

    /// Where memory for a key was returned.
    pub fn hints(&self, key: &Key) -> Hints {
        let mut hints = Hints {
            addresses: [0; TRIES],
            count: 0,
        };
        let shard = self.shards[shard_of(key)].lock();
        if let Some(returned) = shard.returned.get(key) {
            for (hint, address) in hints.addresses.iter_mut().zip(returned.iter().rev()) {
                *hint = *address;
                hints.count += 1;
            }
        }
        hints
    }

    /// A request was a hit or a miss. Of its hints only those stay that lie in free memory still.
    pub fn answered(&self, key: &Key, hints: &Hints, hit: bool, free: &[sys::CUdeviceptr]) {
        let mut shard = self.shards[shard_of(key)].lock();
        if hit {
            shard.stats.hits += 1;
        } else {
            shard.stats.misses += 1;
        }
        for hint in hints.as_slice() {
            if !free.contains(hint) {
                shard.forget(key, *hint);
            }
        }
    }

    /// Enters a live buffer.
    #[inline]
    pub fn enter(&self, key: &Key, live: Live) -> Slot {
        let shard = shard_of(key);
        let at = self.shards[shard].lock().enter(live);
        Slot {
            shard: shard as u32,
            at,
        }
    }

    /// Before a buffer is freed: from then on its address may belong to another one. Whoever takes the
    /// hint before the memory is free does not get it, and loses no more than the hint.
    #[inline]
    pub fn leave(&self, slot: Slot, key: &Key) -> Live {
        let home = shard_of(key);
        let mut shard = self.shards[slot.shard as usize].lock();
        let live = shard.leave(slot.at);
        if home == slot.shard as usize {
            shard.remember(key, live.address);
            return live;
        }
        drop(shard);
        self.shards[home].lock().remember(key, live.address);
        live
    }

    /// After a [`leave`](Self::leave) the buffer could not be freed.
    pub fn stay(&self, key: &Key, live: Live) -> Slot {
        let mut shard = self.shards[shard_of(key)].lock();
        shard.forget(key, live.address);
        shard.stats.returns = shard.stats.returns.saturating_sub(1);
        drop(shard);
        self.enter(key, live)
    }

    /// Notes where memory was returned that was never entered.
    pub fn remember(&self, key: &Key, address: sys::CUdeviceptr) {
        self.shards[shard_of(key)].lock().remember(key, address);
    }

    /// Addresses of the live buffers of a rounded length and type.
    pub fn live(&self, capacity: usize, element: TypeId) -> Vec<sys::CUdeviceptr> {
        let mut found = Vec::new();
        if capacity == 0 {
            return found;
        }
        for shard in self.shards() {
            let shard = shard.lock();
            let named = shard.live.iter().filter(|live| live.capacity == capacity);
            let named = named.filter(|live| live.element == element);
            found.extend(named.map(|live| live.address));
        }
        found
    }

    pub fn stats(&self) -> TypedStats {
        let mut sum = TypedStats::default();
        for shard in self.shards() {
            sum.add(shard.lock().stats);
        }
        sum
    }

    pub fn reset_stats(&self) {
        for shard in self.shards() {
            shard.lock().stats = TypedStats::default();
        }
    }
}

impl Shard {
    #[inline]
    fn enter(&mut self, live: Live) -> u32 {
        if let Some(at) = self.vacant.pop() {
            self.live[at as usize] = live;
            return at;
        }
        self.live.push(live);
        (self.live.len() - 1) as u32
    }

    #[inline]
    fn leave(&mut self, at: u32) -> Live {
        let left = self.live[at as usize];
        self.live[at as usize].capacity = 0;
        self.vacant.push(at);
        left
    }

    #[inline]
    fn remember(&mut self, key: &Key, address: sys::CUdeviceptr) {
        self.stats.returns += 1;
        let Some(returned) = self.returned.get_mut(key) else {
            return self.remember_first(key, address);
        };
        if returned.len() == REMEMBERED {
            returned.pop_front();
        }
        returned.push_back(address);
    }

    #[cold]
    fn remember_first(&mut self, key: &Key, address: sys::CUdeviceptr) {
        if self.returned.len() >= KEYS {
            self.returned.clear();
        }
        self.returned.insert(*key, VecDeque::from([address]));
    }

    fn forget(&mut self, key: &Key, address: sys::CUdeviceptr) {
        let Some(returned) = self.returned.get_mut(key) else {
            return;
        };
        let at = returned
            .iter()
            .rev()
            .take(TRIES)
            .position(|at| *at == address);
        if let Some(back) = at {
            returned.remove(returned.len() - 1 - back);
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
            capacity: 512,
            element: TypeId::of::<u8>(),
        }
    }

    #[test]
    fn hints_are_the_last_returns_and_any_is_forgotten() {
        let table = Table::default();
        for address in 1..=6 {
            table.remember(&KEY, address);
        }
        let hints = table.hints(&KEY);
        assert_eq!(hints.as_slice(), [6, 5, 4, 3]);
        table.answered(&KEY, &hints, true, &[5, 3]);
        assert_eq!(table.hints(&KEY).as_slice(), [5, 3, 2, 1]);
        assert!(table.hints(&(8, 512)).as_slice().is_empty());
        assert_eq!(table.stats().hits, 1);
    }

    /// S2.2
    #[test]
    fn s2_2_a_hit_takes_the_last_hint_and_a_miss_leaves_it() {
        let table = Table::default();
        assert_eq!(table.hit(&KEY, Some), Some(None));
        for address in 1..=3 {
            table.remember(&KEY, address);
        }
        assert_eq!(table.hit(&KEY, |_| None::<()>), None);
        assert_eq!(table.hit(&KEY, |last| last), Some(3));
        assert_eq!(table.hints(&KEY).as_slice(), [2, 1]);
        assert_eq!(table.stats().hits, 2);
    }

    #[test]
    fn entries_are_used_again_and_found_by_length_and_type() {
        let table = Table::default();
        let slots: Vec<_> = (1..=3).map(|at| table.enter(&KEY, live(at))).collect();
        assert_eq!(table.live(512, TypeId::of::<u8>()), [1, 2, 3]);
        assert!(table.live(512, TypeId::of::<u16>()).is_empty());
        // A return on another stream is found there.
        for stream in 8..40 {
            let left = table.leave(slots[1], &(stream, 512));
            assert_eq!(table.hints(&(stream, 512)).as_slice(), [left.address]);
            let again = table.stay(&(stream, 512), left);
            assert!(table.hints(&(stream, 512)).as_slice().is_empty());
            assert_eq!(table.leave(again, &(stream, 512)).address, 2);
            assert_eq!(table.enter(&KEY, left).at, slots[1].at);
        }
        assert_eq!(table.live(512, TypeId::of::<u8>()).len(), 3);
        assert_eq!(table.stats().returns, 32);
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let table = Table::default();
        for address in 0..2 * REMEMBERED as u64 {
            table.remember(&KEY, address + 1);
        }
        let returned = |shard: &Lock<Shard>| {
            let shard = shard.lock();
            let most = shard.returned.values().map(VecDeque::len).max();
            (shard.returned.len(), most.unwrap_or(0))
        };
        assert_eq!(returned(&table.shards[shard_of(&KEY)]).1, REMEMBERED);
        for stream in 0..SHARDS as u64 * KEYS as u64 * 4 {
            table.remember(&(stream, 512), 1);
        }
        let keys = table.shards.iter().map(|shard| returned(shard).0).max();
        assert!(keys.is_some_and(|keys| (1..=KEYS).contains(&keys)));
    }
}
