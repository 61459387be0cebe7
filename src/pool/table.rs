//! Which buffers of a pool are live, and where the last returned ones lay. Only names and hints: whether
//! memory is free the allocator alone says.

#![forbid(unsafe_code)]

use std::any::TypeId;
use std::hash::BuildHasher;

use crate::allocator::Mixed;
use crate::driver::{process, sys};
use crate::locks::lock::Lock;

use super::recent::Recent;

/// Independently locked parts of a table.
const SHARDS: usize = 16;
/// Returned addresses to try for one request.
pub(super) const TRIES: usize = 4;
/// Returned addresses that are remembered for a stream and size, at most; beyond them the older half is forgotten.
const REMEMBERED: usize = 1024;
/// Streams and sizes of which a shard remembers returns; beyond them it begins anew.
const KEYS: usize = 64;

/// What was counted since the start or the last reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Counts {
    /// Requests served from cached memory.
    pub hits: u64,
    /// Requests that were not.
    pub misses: u64,
    /// Blocks that were handed out.
    pub entered: u64,
    /// Blocks that came back.
    pub returns: u64,
    /// Blocks that are live, whenever they were handed out.
    pub live: u64,
}

/// The stream and the bytes by which returned memory is found again.
pub(super) type Key = (u64, usize);

/// A live block as [`TypedPool::record_use_of`](super::TypedPool::record_use_of) names it.
#[derive(Clone, Copy)]
pub(super) struct Live {
    pub address: sys::CUdeviceptr,
    /// The stream and the bytes under which the address is remembered when the block is returned.
    pub key: Key,
    /// The shard that remembers addresses under `key`.
    home: u32,
    /// The rounded length; 0 for a block without elements.
    pub capacity: usize,
    pub element: TypeId,
}

impl Live {
    /// A block that is not there yet.
    #[inline]
    pub fn new(key: Key, capacity: usize, element: TypeId) -> Live {
        Live {
            address: 0,
            key,
            home: shard_of(&key) as u32,
            capacity,
            element,
        }
    }

    pub fn at(self, address: sys::CUdeviceptr) -> Live {
        Live { address, ..self }
    }
}

/// Where a live block is entered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Slot {
    shard: u32,
    at: u32,
}

impl Slot {
    /// As the note of a block.
    pub fn note(self) -> u64 {
        u64::from(self.shard) << 32 | u64::from(self.at)
    }

    /// The slot that a block notes; any for one that was never entered.
    pub fn of(note: u64) -> Slot {
        Slot {
            shard: (note >> 32) as u32,
            at: note as u32,
        }
    }
}

#[derive(Default)]
struct Shard {
    live: Vec<Live>,
    vacant: Vec<u32>,
    /// Addresses of returned memory, the last returned at the end.
    returned: Recent<Key, Vec<sys::CUdeviceptr>>,
    counts: Counts,
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

    /// A request that is to be a hit at once, and its entry. `take` gets the address that was returned last for
    /// the key, `None` if none is remembered; what it takes there is no hint any more. It may not wait: the shard
    /// is locked.
    #[inline]
    pub fn hit<T>(
        &self,
        live: Live,
        take: impl FnOnce(Option<sys::CUdeviceptr>) -> Option<(sys::CUdeviceptr, T)>,
    ) -> Option<(T, Slot)> {
        let mut shard = self.shards[live.home as usize].lock();
        let (address, taken) = match shard.returned.get(&live.key) {
            Some(returned) => {
                let taken = take(returned.last().copied())?;
                returned.pop();
                taken
            }
            None => take(None)?,
        };
        shard.counts.hits += 1;
        shard.counts.entered += 1;
        let slot = shard.enter(live.at(address));
        Some((taken, slot))
    }

    /// Where memory for a key was returned.
    pub fn hints(&self, key: &Key) -> Hints {
        let mut hints = Hints {
            addresses: [0; TRIES],
            count: 0,
        };
        let mut shard = self.shards[shard_of(key)].lock();
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
            shard.counts.hits += 1;
        } else {
            shard.counts.misses += 1;
        }
        for hint in hints.as_slice() {
            if !free.contains(hint) {
                shard.forget(key, *hint);
            }
        }
    }

    /// Enters a live block.
    pub fn enter(&self, live: Live) -> Slot {
        let mut shard = self.shards[live.home as usize].lock();
        shard.counts.entered += 1;
        shard.enter(live)
    }

    /// A block goes: takes its entry out, and remembers where it was. `None` if the entry is not its own.
    pub fn leave(&self, slot: Slot, address: sys::CUdeviceptr) -> Option<Live> {
        let mut shard = self.shards.get(slot.shard as usize)?.lock();
        let live = shard.leave(slot.at, address)?;
        if live.home == slot.shard {
            shard.remember(&live.key, address);
        } else {
            drop(shard);
            let mut home = self.shards[live.home as usize].lock();
            home.remember(&live.key, address);
        }
        Some(live)
    }

    /// [`leave`](Self::leave) of a block that `free` gives back under the shard's lock, so that nobody takes the hint
    /// before. False, with the entry as it was, if that cannot, or the block is to be remembered in another shard.
    #[inline]
    pub fn leave_at_once(
        &self,
        slot: Slot,
        address: sys::CUdeviceptr,
        free: impl FnOnce() -> bool,
    ) -> bool {
        let Some(shard) = self.shards.get(slot.shard as usize) else {
            return false;
        };
        let mut shard = shard.lock();
        let live = shard.live.get(slot.at as usize);
        let own = live.filter(|live| live.address == address && live.home == slot.shard);
        let Some(Live { key, .. }) = own else {
            return false;
        };
        let key = *key;
        if !free() {
            return false;
        }
        shard.vacate(slot.at);
        shard.remember(&key, address);
        true
    }

    /// After a [`leave`](Self::leave) the block could not be freed.
    pub fn stay(&self, live: Live) -> Slot {
        let mut shard = self.shards[live.home as usize].lock();
        shard.forget(&live.key, live.address);
        shard.counts.returns = shard.counts.returns.saturating_sub(1);
        shard.enter(live)
    }

    /// A live block is to be remembered as returned on another stream than its own.
    pub fn return_on(&self, slot: Slot, stream: u64) {
        if let Some(shard) = self.shards.get(slot.shard as usize)
            && let Some(live) = shard.lock().live.get_mut(slot.at as usize)
        {
            live.key.0 = stream;
            live.home = shard_of(&live.key) as u32;
        }
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

    pub fn counts(&self) -> Counts {
        let mut sum = Counts::default();
        for shard in self.shards() {
            let shard = shard.lock();
            sum.hits += shard.counts.hits;
            sum.misses += shard.counts.misses;
            sum.entered += shard.counts.entered;
            sum.returns += shard.counts.returns;
            sum.live += (shard.live.len() - shard.vacant.len()) as u64;
        }
        sum
    }

    /// Sets all counts to 0.
    pub fn reset_counts(&self) {
        for shard in self.shards() {
            shard.lock().counts = Counts::default();
        }
    }
}

impl Shard {
    #[inline(always)]
    fn enter(&mut self, live: Live) -> Slot {
        let shard = live.home;
        let vacant = self.vacant.pop();
        let at = vacant.unwrap_or(self.live.len() as u32);
        match self.live.get_mut(at as usize) {
            Some(place) => *place = live,
            None => self.live.push(live),
        }
        Slot { shard, at }
    }

    fn leave(&mut self, at: u32, address: sys::CUdeviceptr) -> Option<Live> {
        let live = *self.live.get(at as usize)?;
        if live.address != address {
            return None;
        }
        self.vacate(at);
        Some(live)
    }

    #[inline(always)]
    fn vacate(&mut self, at: u32) {
        if let Some(live) = self.live.get_mut(at as usize) {
            // No block begins there.
            (live.address, live.capacity) = (0, 0);
            self.vacant.push(at);
        }
    }

    #[inline(always)]
    fn remember(&mut self, key: &Key, address: sys::CUdeviceptr) {
        self.counts.returns += 1;
        let Some(returned) = self.returned.get(key) else {
            return self.remember_first(key, address);
        };
        if returned.len() == REMEMBERED {
            returned.drain(..REMEMBERED / 2);
        }
        returned.push(address);
    }

    #[cold]
    fn remember_first(&mut self, key: &Key, address: sys::CUdeviceptr) {
        if self.returned.len() >= KEYS {
            self.returned.clear();
        }
        self.returned.insert(*key, vec![address]);
    }

    fn forget(&mut self, key: &Key, address: sys::CUdeviceptr) {
        let Some(returned) = self.returned.get(key) else {
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
        Live::new(KEY, 512, TypeId::of::<u8>()).at(address)
    }

    /// A block that comes and goes.
    fn returned(table: &Table, address: u64) {
        let slot = table.enter(live(address));
        assert!(table.leave(slot, address).is_some());
    }

    #[test]
    fn hints_are_the_last_returns_and_any_is_forgotten() {
        let table = Table::default();
        for address in 1..=6 {
            returned(&table, address);
        }
        let hints = table.hints(&KEY);
        assert_eq!(hints.as_slice(), [6, 5, 4, 3]);
        table.answered(&KEY, &hints, true, &[5, 3]);
        assert_eq!(table.hints(&KEY).as_slice(), [5, 3, 2, 1]);
        assert!(table.hints(&(8, 512)).as_slice().is_empty());
        assert_eq!(table.counts().hits, 1);
    }

    /// S2.2
    #[test]
    fn s2_2_a_hit_takes_the_last_hint_and_a_miss_leaves_it() {
        let table = Table::default();
        type Taken = Option<(u64, Option<u64>)>;
        let hit = |take: fn(Option<u64>) -> Taken| table.hit(live(0), take).map(|(seen, _)| seen);
        assert_eq!(hit(|last| Some((9, last))), Some(None));
        for address in 1..=3 {
            returned(&table, address);
        }
        assert_eq!(hit(|_| None), None);
        assert_eq!(hit(|last| Some((3, last))), Some(Some(3)));
        assert_eq!(table.hints(&KEY).as_slice(), [2, 1]);
        let counts = table.counts();
        assert_eq!((counts.hits, counts.live, counts.returns), (2, 2, 3));
    }

    #[test]
    fn entries_are_used_again_and_found_by_length_and_type() {
        let table = Table::default();
        let mut slots: Vec<_> = (1..=3).map(|at| table.enter(live(at))).collect();
        assert_eq!(table.live(512, TypeId::of::<u8>()), [1, 2, 3]);
        assert!(table.live(512, TypeId::of::<u16>()).is_empty());
        assert!(table.leave(slots[1], 3).is_none(), "another's entry");
        assert!(table.leave(Slot::of(u64::MAX), 3).is_none());
        assert_eq!(Slot::of(slots[2].note()), slots[2]);
        // A return on another stream is found there.
        for stream in 8..40 {
            table.return_on(slots[1], stream);
            let left = table.leave(slots[1], 2).unwrap();
            assert_eq!(table.hints(&(stream, 512)).as_slice(), [left.address]);
            slots[1] = table.stay(left);
            assert!(table.hints(&(stream, 512)).as_slice().is_empty());
        }
        assert_eq!(table.live(512, TypeId::of::<u8>()).len(), 3);
        let counts = table.counts();
        assert_eq!((counts.entered, counts.returns, counts.live), (3, 0, 3));
    }

    /// S2.2
    #[test]
    fn a_block_that_cannot_be_freed_at_once_stays_entered() {
        let table = Table::default();
        let slot = table.enter(live(1));
        assert!(!table.leave_at_once(slot, 2, || true), "another's entry");
        assert!(!table.leave_at_once(Slot::of(u64::MAX), 1, || true));
        assert!(!table.leave_at_once(slot, 1, || false));
        let elsewhere = (8..40).find(|stream| shard_of(&(*stream, 512)) != shard_of(&KEY));
        table.return_on(slot, elsewhere.unwrap());
        assert!(!table.leave_at_once(slot, 1, || true), "another shard's");
        table.return_on(slot, KEY.0);
        assert!(table.hints(&KEY).as_slice().is_empty());
        assert_eq!(table.live(512, TypeId::of::<u8>()), [1]);
        assert!(table.leave_at_once(slot, 1, || true));
        assert_eq!(table.hints(&KEY).as_slice(), [1]);
        let counts = table.counts();
        assert_eq!((counts.returns, counts.live), (1, 0));
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let table = Table::default();
        let slot = table.enter(live(1));
        for address in 0..2 * REMEMBERED as u64 {
            returned(&table, address + 2);
        }
        let remembered = |shard: &Lock<Shard>| {
            let shard = shard.lock();
            let most = shard.returned.iter().map(|(_, of)| of.len()).max();
            (shard.returned.len(), most.unwrap_or(0))
        };
        assert_eq!(remembered(&table.shards[shard_of(&KEY)]).1, REMEMBERED);
        let mut slot = slot;
        for stream in 0..SHARDS as u64 * KEYS as u64 * 4 {
            table.return_on(slot, stream);
            assert!(table.leave(slot, 1).is_some());
            slot = table.enter(live(1));
        }
        let keys = table.shards.iter().map(|shard| remembered(shard).0).max();
        assert!(keys.is_some_and(|keys| (1..=KEYS).contains(&keys)));
    }
}
