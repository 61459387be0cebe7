//! Idle slabs of a workspace pool.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use crate::allocator::{Block, Mixed};

/// Sizes whose empty shelf is kept.
const KEPT_SIZES: usize = 64;
/// Sizes that are found without a search.
const RECENT: usize = 32;

/// Memory to lease.
pub(super) struct Slab {
    pub block: Block,
    pub bytes: usize,
    /// How often it was returned.
    pub life: Arc<AtomicU64>,
    /// After so many retirements of streams its own was known not to be among them.
    pub retirements: u64,
}

/// Idle slabs of one size.
struct Shelf {
    bytes: usize,
    /// All streams together, with their streams: few, as the cap says. The last returned is at the
    /// end.
    slabs: Vec<(u64, Box<Slab>)>,
}

/// All shelves.
#[derive(Default)]
pub(super) struct Shelves {
    shelves: Vec<Shelf>,
    /// Of a size, and of those met last by their last bits.
    places: HashMap<usize, u32, Mixed>,
    recent: [u32; RECENT],
}

impl Shelves {
    /// The place of a size's shelf.
    #[inline]
    fn shelf(&mut self, bytes: usize) -> Option<usize> {
        // A power of two has all of its figure in one bit.
        let near = &mut self.recent[(bytes.trailing_zeros() as usize) % RECENT];
        let known = self.shelves.get(*near as usize);
        if known.is_none_or(|shelf| shelf.bytes != bytes) {
            *near = *self.places.get(&bytes)?;
        }
        Some(*near as usize)
    }

    #[inline(always)]
    pub fn take(&mut self, stream: u64, bytes: usize) -> Option<Box<Slab>> {
        let place = self.shelf(bytes)?;
        let slabs = &mut self.shelves.get_mut(place)?.slabs;
        let (owner, _) = slabs.last()?;
        let slab = if *owner == stream {
            slabs.pop()
        } else {
            let at = slabs.iter().rposition(|(owner, _)| *owner == stream)?;
            Some(slabs.remove(at))
        };
        // An empty shelf spares the next return an allocation, but sizes may be without number.
        if slabs.is_empty() && self.shelves.len() > KEPT_SIZES {
            self.remove_shelf(place);
        }
        slab.map(|(_, slab)| slab)
    }

    #[cold]
    fn remove_shelf(&mut self, place: usize) {
        let gone = self.shelves.swap_remove(place);
        self.places.remove(&gone.bytes);
        if let Some(moved) = self.shelves.get(place) {
            self.places.insert(moved.bytes, place as u32);
        }
    }

    /// Keeps a slab; gives it again if there are as many of its size as the cap says.
    #[inline]
    pub fn give(&mut self, slab: Box<Slab>, stream: u64, cap: usize) -> Option<Box<Slab>> {
        let bytes = slab.bytes;
        let place = match self.shelf(bytes) {
            Some(place) => place,
            None => self.add_shelf(bytes),
        };
        let slabs = match self.shelves.get_mut(place) {
            Some(shelf) if shelf.slabs.len() < cap => &mut shelf.slabs,
            _ => return Some(slab),
        };
        slabs.push((stream, slab));
        None
    }

    #[cold]
    fn add_shelf(&mut self, bytes: usize) -> usize {
        let place = self.shelves.len();
        self.places.insert(bytes, place as u32);
        self.shelves.push(Shelf {
            bytes,
            slabs: Vec::new(),
        });
        place
    }

    /// Streams and sizes of all slabs.
    pub fn keys(&self) -> impl Iterator<Item = (u64, usize)> {
        let keys = |shelf: &Shelf| {
            let bytes = shelf.bytes;
            let streams = shelf.slabs.iter().map(|(stream, _)| *stream);
            streams
                .map(move |stream| (stream, bytes))
                .collect::<Vec<_>>()
        };
        self.shelves.iter().flat_map(keys)
    }
}
