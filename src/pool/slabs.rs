//! The slabs of a workspace pool: idle ones by their size, and those on lease by name.

#![forbid(unsafe_code)]

use crate::allocator::Block;
use crate::block::BlockId;
use crate::driver::sys;
use crate::resource::identity_of;

use super::recent::Recent;

/// Sizes of which an empty list is kept.
const KEPT_SIZES: usize = 64;
/// The first part of a generation says which slab it is of.
const PLACES: u64 = 1 << 20;

/// Memory to lease.
#[derive(Default)]
pub(super) struct Slab {
    /// None if there is no slab here.
    block: Option<Block>,
    pub bytes: usize,
    /// The stream that it belongs to, by its id.
    pub stream: u64,
    /// The number of retirements of streams after which the slab's own was known not to be among them.
    pub retirements: u64,
    /// The name of the lease, none of which is used again; 0 without one.
    generation: u64,
    /// The bytes that the lease was asked for with.
    requested: usize,
    /// Whether other streams than its own use the lease.
    pub shared: bool,
}

impl Slab {
    /// Who the allocator's block is.
    pub fn identity(&self) -> Option<BlockId> {
        self.block
            .as_ref()
            .map(|block| identity_of(block, self.stream))
    }
}

/// What a lease was that is over.
pub(super) struct Returned {
    pub requested: usize,
    pub bytes: usize,
    pub shared: bool,
}

/// All slabs, by place. A list of idle ones has the places of one size of all streams, the last returned at the
/// end; it is short, as the cap of the pool says.
#[derive(Default)]
pub(super) struct Slabs {
    all: Vec<Slab>,
    vacant: Vec<u32>,
    idle: Recent<usize, Vec<(u64, u32)>>,
    /// Leases so far.
    leases: u64,
}

impl Slabs {
    /// The most slabs there may be.
    pub const MAXIMUM: usize = PLACES as usize;

    pub fn at(&mut self, place: u32) -> &mut Slab {
        &mut self.all[place as usize]
    }

    /// Takes the slab of a size that was returned last on a stream from its list.
    #[inline(always)]
    pub fn take(&mut self, stream: u64, bytes: usize) -> Option<u32> {
        let places = self.idle.get(&bytes)?;
        let (owner, _) = places.last()?;
        let (_, place) = if *owner == stream {
            places.pop()?
        } else {
            let at = places.iter().rposition(|(owner, _)| *owner == stream)?;
            places.remove(at)
        };
        // An empty list spares the next return an allocation, but sizes may be without number.
        if places.is_empty() && self.idle.len() > KEPT_SIZES {
            self.idle.remove(&bytes);
        }
        Some(place)
    }

    /// Keeps a slab as an idle one, unless there are as many of its size as the cap says.
    #[inline(always)]
    pub fn give(&mut self, place: u32, cap: usize) -> bool {
        let Slab { bytes, stream, .. } = self.all[place as usize];
        match self.idle.get(&bytes) {
            Some(places) if places.len() >= cap => return false,
            Some(places) => places.push((stream, place)),
            None => self.idle.insert(bytes, vec![(stream, place)]),
        }
        true
    }

    /// Whether there is room for another slab.
    pub fn has_room(&self) -> bool {
        !self.vacant.is_empty() || (self.all.len() as u64) < PLACES
    }

    /// Enters a slab of a stream and a size, neither idle nor on lease. There is [room](Self::has_room).
    pub fn add(&mut self, block: Block, (stream, bytes): (u64, usize), retirements: u64) -> u32 {
        let slab = Slab {
            block: Some(block),
            bytes,
            stream,
            retirements,
            ..Slab::default()
        };
        let place = self.vacant.pop().unwrap_or(self.all.len() as u32);
        match self.all.get_mut(place as usize) {
            Some(vacant) => *vacant = slab,
            None => self.all.push(slab),
        }
        place
    }

    /// Removes a slab that is neither idle nor on lease; its block, its stream and its size.
    pub fn remove(&mut self, place: u32) -> Option<(Block, (u64, usize))> {
        let slab = std::mem::take(self.at(place));
        self.vacant.push(place);
        slab.block.map(|block| (block, (slab.stream, slab.bytes)))
    }

    /// A slab goes on lease: its address, and the lease's name.
    #[inline(always)]
    pub fn hand_out(&mut self, place: u32, requested: usize) -> (sys::CUdeviceptr, u64) {
        self.leases += 1;
        let generation = self.leases * PLACES + u64::from(place);
        let slab = self.at(place);
        slab.generation = generation;
        slab.requested = requested;
        (slab.block.as_ref().map_or(0, Block::ptr), generation)
    }

    /// The slab of a lease that is not over.
    #[inline(always)]
    pub fn leased(&mut self, generation: u64) -> Option<&mut Slab> {
        let place = generation % PLACES;
        let slab = self.all.get_mut(place as usize)?;
        (slab.generation == generation && generation != 0).then_some(slab)
    }

    /// Ends a lease: its place, and what it was.
    #[inline(always)]
    pub fn returned(&mut self, generation: u64) -> Option<(u32, Returned)> {
        let slab = self.leased(generation)?;
        slab.generation = 0;
        let back = Returned {
            requested: slab.requested,
            bytes: slab.bytes,
            shared: std::mem::take(&mut slab.shared),
        };
        Some(((generation % PLACES) as u32, back))
    }

    /// Ends a lease whose slab is idle from here on, if that takes no look at anything else: the bytes that it was asked
    /// for with, and those of the slab.
    #[inline(always)]
    pub fn returned_at_once(&mut self, generation: u64, cap: usize) -> Option<(usize, usize)> {
        let place = generation % PLACES;
        let slab = self.all.get_mut(place as usize)?;
        if slab.generation != generation || generation == 0 || slab.shared {
            return None;
        }
        let places = self.idle.again(&slab.bytes)?;
        if places.len() >= cap || places.len() == places.capacity() {
            return None;
        }
        // At once, so that compilers know that there is room.
        places.push((slab.stream, place as u32));
        slab.generation = 0;
        Some((slab.requested, slab.bytes))
    }

    /// How many idle slabs there are.
    pub fn idle(&self) -> usize {
        self.idle.iter().map(|(_, places)| places.len()).sum()
    }

    /// Streams and sizes of all idle slabs.
    pub fn keys(&self) -> impl Iterator<Item = (u64, usize)> {
        let lists = self.idle.iter();
        lists.flat_map(|(bytes, places)| places.iter().map(|(stream, _)| (*stream, *bytes)))
    }
}
