//! Idle slabs of a workspace pool.

#![forbid(unsafe_code)]

use std::collections::HashMap;

use crate::allocator::{Block, Mixed};

/// Sizes of which an empty list is kept.
const KEPT_SIZES: usize = 64;

/// Memory to lease.
pub(super) struct Slab {
    pub block: Block,
    pub bytes: usize,
    /// The number of retirements of streams after which the slab's own was known not to be among them.
    pub retirements: u64,
}

/// The idle slabs by their size, each list with the slabs of all streams, the last returned at the end. A
/// list is short, as the cap of the pool says.
#[derive(Default)]
pub(super) struct Slabs(HashMap<usize, Vec<(u64, Box<Slab>)>, Mixed>);

impl Slabs {
    /// The slab of a size that was returned last on a stream.
    #[inline(always)]
    pub fn take(&mut self, stream: u64, bytes: usize) -> Option<Box<Slab>> {
        let slabs = self.0.get_mut(&bytes)?;
        let (owner, _) = slabs.last()?;
        let (_, slab) = if *owner == stream {
            slabs.pop()?
        } else {
            let at = slabs.iter().rposition(|(owner, _)| *owner == stream)?;
            slabs.remove(at)
        };
        // An empty list spares the next return an allocation, but sizes may be without number.
        if slabs.is_empty() && self.0.len() > KEPT_SIZES {
            self.0.remove(&bytes);
        }
        Some(slab)
    }

    /// Keeps a slab; gives it again if there are as many of its size as the cap says.
    #[inline]
    pub fn give(&mut self, slab: Box<Slab>, stream: u64, cap: usize) -> Option<Box<Slab>> {
        let Some(slabs) = self.0.get_mut(&slab.bytes) else {
            self.add(slab, stream);
            return None;
        };
        if slabs.len() >= cap {
            return Some(slab);
        }
        slabs.push((stream, slab));
        None
    }

    /// Keeps the first slab of its size.
    #[cold]
    fn add(&mut self, slab: Box<Slab>, stream: u64) {
        self.0.insert(slab.bytes, vec![(stream, slab)]);
    }

    /// Streams and sizes of all slabs.
    pub fn keys(&self) -> impl Iterator<Item = (u64, usize)> {
        let lists = self.0.iter();
        lists.flat_map(|(bytes, slabs)| slabs.iter().map(|(stream, _)| (*stream, *bytes)))
    }
}
