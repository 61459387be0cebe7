//! The slabs of a workspace pool: idle ones by their size, and leased ones by the name of their lease.

#![forbid(unsafe_code)]

use std::collections::HashMap;

use crate::allocator::{Block, Mixed};
use crate::resource::Usage;

/// Idle slabs to keep of each size, unless another number is set.
const CAP: usize = 4;
/// Sizes of which an empty list is kept, which spares the next return an allocation.
const KEPT_SIZES: usize = 64;
/// The most slabs of a pool. The name of a lease modulo this is the place of its slab.
pub(super) const PLACES: usize = 1 << 20;

/// Memory to lease.
pub(super) struct Slab {
    pub block: Block,
    pub bytes: usize,
    /// The stream that it belongs to, by its id.
    pub stream: u64,
    /// The number of streams that had been retired when the slab's own was known not to be among them.
    pub retirements: u64,
    /// The name of the lease, none of which is reused; 0 of an idle slab.
    pub lease: u64,
    /// The bytes that the lease was requested with.
    pub requested: usize,
    /// Whether other streams than its own use the lease.
    pub shared: bool,
}

type Idle = Vec<(u64, u32)>;

#[derive(Default)]
pub(super) struct State {
    /// The slabs by their places.
    pub slabs: Vec<Option<Slab>>,
    pub vacant: Vec<u32>,
    /// Streams and places of idle slabs, the last returned at the end: those of the size used last, and the others by
    /// their sizes.
    last: (usize, Idle),
    others: HashMap<usize, Idle, Mixed>,
    /// Of leases; reserved are the bytes of all slabs.
    pub usage: Usage,
    /// Idle slabs to keep of each size, if that was set.
    pub cap: Option<usize>,
}

impl State {
    /// Removes the slab of a size that was returned last on a stream from the idle ones; its place.
    #[inline(always)]
    pub fn take(&mut self, stream: u64, bytes: usize) -> Option<u32> {
        let idle = self.idle(bytes);
        if idle.last().is_some_and(|(owner, _)| *owner == stream) {
            return idle.pop().map(|(_, place)| place);
        }
        let at = idle.iter().rposition(|(owner, _)| *owner == stream)?;
        Some(idle.remove(at).1)
    }

    /// The idle slabs of a size.
    #[inline(always)]
    fn idle(&mut self, bytes: usize) -> &mut Idle {
        if self.last.0 != bytes {
            self.exchange(bytes);
        }
        &mut self.last.1
    }

    #[inline(never)]
    fn exchange(&mut self, bytes: usize) {
        let idle = self.others.remove(&bytes).unwrap_or_default();
        let (before, idle) = std::mem::replace(&mut self.last, (bytes, idle));
        if !idle.is_empty() || self.others.len() < KEPT_SIZES {
            self.others.insert(before, idle);
        }
    }

    /// All idle slabs with their sizes and streams.
    pub fn all_idle(&self) -> impl Iterator<Item = (usize, u64)> {
        let lists = self.others.iter().map(|(bytes, idle)| (*bytes, idle));
        let lists = lists.chain([(self.last.0, &self.last.1)]);
        lists.flat_map(|(bytes, idle)| idle.iter().map(move |(stream, _)| (bytes, *stream)))
    }

    /// Enters a new slab, which is not idle; its place.
    pub fn add(&mut self, slab: Slab) -> u32 {
        self.usage.reserved.add(slab.bytes as u64);
        let place = self.vacant.pop().unwrap_or(self.slabs.len() as u32);
        match self.slabs.get_mut(place as usize) {
            Some(vacant) => *vacant = Some(slab),
            None => self.slabs.push(Some(slab)),
        }
        place
    }

    /// Removes a slab that is not idle, for its block to be freed without the lock.
    pub fn remove(&mut self, place: u32) -> Option<Slab> {
        let slab = self.slabs.get_mut(place as usize)?.take()?;
        self.vacant.push(place);
        self.usage.reserved.sub(slab.bytes as u64);
        Some(slab)
    }

    /// Leases a slab: its address, and the name of the lease.
    #[inline(always)]
    pub fn lease(&mut self, place: u32, requested: usize) -> Option<(u64, u64)> {
        let slab = self.slabs.get_mut(place as usize)?.as_mut()?;
        self.usage.add(requested as u64);
        self.usage.used.add(slab.bytes as u64);
        slab.lease = self.usage.blocks.total_allocated * PLACES as u64 + u64::from(place);
        slab.requested = requested;
        Some((slab.block.ptr(), slab.lease))
    }

    /// The slab of a lease that was not returned.
    #[inline(always)]
    pub fn leased(&mut self, lease: u64) -> Option<&mut Slab> {
        let slab = self.slabs.get_mut(lease as usize % PLACES)?.as_mut()?;
        (slab.lease == lease).then_some(slab)
    }

    /// Ends a lease, if there is one of this name. The slab is idle then; it is returned if it is not to be kept, or
    /// other streams used it, of which the allocator knows.
    #[inline(always)]
    pub fn give_back(&mut self, lease: u64, keep: bool) -> Option<Option<Slab>> {
        let slab = self.leased(lease)?;
        slab.lease = 0;
        let (keep, bytes) = (keep && !slab.shared, slab.bytes);
        let (stream, requested) = (slab.stream, slab.requested);
        self.usage.sub(requested as u64);
        self.usage.used.sub(bytes as u64);
        let (place, cap) = ((lease % PLACES as u64) as u32, self.cap.unwrap_or(CAP));
        if keep {
            let places = self.idle(bytes);
            if places.len() < cap {
                places.push((stream, place));
                return Some(None);
            }
        }
        Some(self.remove(place))
    }

    /// Bytes of idle slabs.
    pub fn cached_bytes(&self) -> u64 {
        self.usage.reserved.current - self.usage.used.current
    }

    /// Removes idle slabs until at most `keep` bytes are left, the largest first, of equal ones by the order of
    /// streams, so that equal states shrink equally.
    pub fn shrink(&mut self, keep: u64) -> Vec<Slab> {
        let mut keys: Vec<_> = self.all_idle().collect();
        keys.sort_unstable_by_key(|(bytes, stream)| (std::cmp::Reverse(*bytes), *stream));
        let mut gone = Vec::new();
        for (bytes, stream) in keys {
            if self.cached_bytes() > keep
                && let Some(place) = self.take(stream, bytes)
            {
                gone.extend(self.remove(place));
            }
        }
        gone
    }
}
