//! The slabs of a workspace pool: idle ones by size, leased ones by the number of their lease.

#![forbid(unsafe_code)]

use std::collections::HashMap;

use crate::allocator::{Block, Mixed};
use crate::resource::Usage;

/// The default maximum number of idle slabs of each size.
const CAP: usize = 4;
/// Empty lists of idle slabs are kept for up to this number of sizes.
const KEPT_SIZES: usize = 64;
/// The maximum number of slabs of a pool. The number of a lease modulo this is the index of its slab.
pub(super) const PLACES: usize = 1 << 20;

pub(super) struct Slab {
    pub block: Block,
    pub bytes: usize,
    /// The id of the stream that it belongs to.
    pub stream: u64,
    /// The number of retired streams at the last check that the slab's own stream was not among them.
    pub retirements: u64,
    /// The number of the lease, which is never reused; 0 if idle.
    pub lease: u64,
    /// The requested bytes of the lease.
    pub requested: usize,
    /// Whether other streams use the lease.
    pub shared: bool,
}

type Idle = Vec<(u64, u32)>;

#[derive(Default)]
pub(super) struct State {
    pub slabs: Vec<Option<Slab>>,
    pub vacant: Vec<u32>,
    /// Streams and indices of idle slabs, the last returned at the end: those of the size used last, and all others.
    last: (usize, Idle),
    others: HashMap<usize, Idle, Mixed>,
    /// The figures of leases, with the bytes of all slabs as reserved.
    pub usage: Usage,
    /// Overrides [`CAP`].
    pub cap: Option<usize>,
}

impl State {
    /// Removes the idle slab of a size that was returned last on a stream, and returns its index.
    #[inline(always)]
    pub fn take(&mut self, stream: u64, bytes: usize) -> Option<u32> {
        let idle = self.idle(bytes);
        if idle.last().is_some_and(|(owner, _)| *owner == stream) {
            return idle.pop().map(|(_, place)| place);
        }
        let at = idle.iter().rposition(|(owner, _)| *owner == stream)?;
        Some(idle.remove(at).1)
    }

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

    /// Iterates over the sizes and streams of idle slabs.
    pub fn all_idle(&self) -> impl Iterator<Item = (usize, u64)> {
        let lists = self.others.iter().map(|(bytes, idle)| (*bytes, idle));
        let lists = lists.chain([(self.last.0, &self.last.1)]);
        lists.flat_map(|(bytes, idle)| idle.iter().map(move |(stream, _)| (bytes, *stream)))
    }

    /// Adds a slab that is not idle, and returns its index.
    pub fn add(&mut self, slab: Slab) -> u32 {
        self.usage.reserved.add(slab.bytes as u64);
        let place = self.vacant.pop().unwrap_or(self.slabs.len() as u32);
        match self.slabs.get_mut(place as usize) {
            Some(vacant) => *vacant = Some(slab),
            None => self.slabs.push(Some(slab)),
        }
        place
    }

    /// Removes a slab that is not idle; the caller frees it without the lock.
    pub fn remove(&mut self, place: u32) -> Option<Slab> {
        let slab = self.slabs.get_mut(place as usize)?.take()?;
        self.vacant.push(place);
        self.usage.reserved.sub(slab.bytes as u64);
        Some(slab)
    }

    /// Leases a slab, and returns its address and the number of the lease.
    #[inline(always)]
    pub fn lease(&mut self, place: u32, requested: usize) -> Option<(u64, u64)> {
        let slab = self.slabs.get_mut(place as usize)?.as_mut()?;
        self.usage.add(requested as u64);
        self.usage.used.add(slab.bytes as u64);
        slab.lease = self.usage.blocks.total_allocated * PLACES as u64 + u64::from(place);
        slab.requested = requested;
        Some((slab.block.ptr(), slab.lease))
    }

    /// Returns the slab of a current lease.
    #[inline(always)]
    pub fn leased(&mut self, lease: u64) -> Option<&mut Slab> {
        let slab = self.slabs.get_mut(lease as usize % PLACES)?.as_mut()?;
        (slab.lease == lease).then_some(slab)
    }

    /// Ends a lease, if it is current. The slab becomes idle; it is returned to the caller if it is not kept, or if
    /// other streams used it, which the allocator has recorded.
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

    pub fn cached_bytes(&self) -> u64 {
        self.usage.reserved.current - self.usage.used.current
    }

    /// Removes idle slabs until at most `keep` bytes are left: the largest first, and equal ones in the order of
    /// streams, which makes the result deterministic.
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
