//! Large blocks that a stream cache can allocate and free without the heap.
//!
//! To the heap a block in a large-block cache is in use, live or not. The large-block cache stores which: it keeps the
//! last few large blocks of its stream cache, and a block that was freed here is allocated again for the next request
//! of the same length on the same stream, without a wait or search.
//!
//! A free block here is not merged with its neighbours, but must not change where other blocks are placed. Therefore
//! the next request that the large-block cache cannot serve returns all its blocks, and a block is here only while
//! nothing else has happened in the heap since its allocation: the best fit for the next request of its length is then
//! its own place. Only under contention for the heap's lock, where the order of threads is arbitrary anyway, do blocks
//! stay here beside other work.

use crate::allocator::extent::invariant::{holds, same};
use crate::allocator::extent::origin::{Names, Origin};
use crate::allocator::extent::record::NIL;
use crate::error::Error;

/// Maximum number of blocks in a large-block cache.
const PLACES: usize = 64;

/// A block in a large-block cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct CachedBlock {
    pub id: u32,
    /// Generation of its present or last allocation.
    pub generation: u32,
    pub ptr: u64,
    pub granules: u32,
    /// Bytes that the heap counts as requested for it: no allocation of it in the large-block cache requests more.
    pub counted: u64,
    /// Requested bytes of its present allocation; 0 if it is free.
    pub requested: u64,
    /// Number of times it was allocated again here.
    pub reuses: u32,
    /// Origin of the block.
    pub origin: Origin,
}

impl CachedBlock {
    pub(crate) fn is_live(&self) -> bool {
        self.requested > 0
    }

    fn bytes(&self) -> u64 {
        u64::from(self.granules) * crate::allocator::size::GRANULE
    }
}

/// Bytes of blocks, requested bytes, and blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Amounts {
    pub bytes: u64,
    pub requested: u64,
    pub blocks: u64,
}

impl std::ops::AddAssign for Amounts {
    fn add_assign(&mut self, other: Amounts) {
        self.bytes += other.bytes;
        self.requested += other.requested;
        self.blocks += other.blocks;
    }
}

/// The large blocks that a stream cache keeps.
#[derive(Debug)]
pub(crate) struct LargeCache {
    /// Lengths of the free blocks; 0 elsewhere. Separate from the other fields, because every request reads all of
    /// them.
    free: [u32; PLACES],
    /// Numbers of the blocks; [`NIL`] for an empty slot.
    ids: [u32; PLACES],
    blocks: [CachedBlock; PLACES],
    /// Time of the last allocation or free of each block here.
    touched: [u32; PLACES],
    now: u32,
    /// Number of blocks here, including free ones.
    count: u32,
    /// What the heap counts for free blocks here.
    held: Amounts,
    /// Totals of blocks that were allocated again.
    reused: Amounts,
}

impl Default for LargeCache {
    fn default() -> Self {
        LargeCache {
            free: [0; PLACES],
            ids: [NIL; PLACES],
            blocks: [CachedBlock::default(); PLACES],
            touched: [0; PLACES],
            now: 0,
            count: 0,
            held: Amounts::default(),
            reused: Amounts::default(),
        }
    }
}

impl LargeCache {
    /// Allocates a free block of exactly this length.
    #[inline]
    pub(crate) fn take(&mut self, granules: u32, requested: u64) -> Option<CachedBlock> {
        if self.held.blocks == 0 {
            return None;
        }
        self.take_any(granules, requested)
    }

    #[inline(never)]
    fn take_any(&mut self, granules: u32, requested: u64) -> Option<CachedBlock> {
        let at = position(&self.free, granules)?;
        let block = &mut self.blocks[at];
        if granules == 0 || requested > block.counted {
            return None;
        }
        block.requested = requested;
        block.reuses = block.reuses.saturating_add(1);
        // Odd while the block is live, as in the heap.
        block.generation = block.generation.wrapping_add(2);
        let block = *block;
        self.free[at] = 0;
        self.touch(at);
        self.held.bytes -= block.bytes();
        self.held.requested -= requested;
        self.held.blocks -= 1;
        self.reused += Amounts {
            bytes: block.bytes(),
            requested,
            blocks: 1,
        };
        Some(block)
    }

    /// Frees a live block into the cache; with a generation, only if the block still has it. Returns whether it was
    /// live; `None` if the block is not here.
    pub(crate) fn put(&mut self, id: u32, generation: Option<u32>) -> Option<bool> {
        let at = self.place(id)?;
        let block = &mut self.blocks[at];
        if !block.is_live() || generation.is_some_and(|g| g != block.generation) {
            return Some(false);
        }
        let requested = std::mem::take(&mut block.requested);
        let (bytes, granules) = (block.bytes(), block.granules);
        self.free[at] = granules;
        self.touch(at);
        self.held += Amounts {
            bytes,
            requested,
            blocks: 1,
        };
        Some(true)
    }

    /// Adds a live block. Returns the block that it displaces.
    pub(crate) fn add(&mut self, block: CachedBlock) -> Option<CachedBlock> {
        let vacant = position(&self.ids, NIL);
        let at = vacant.or_else(|| self.least_wanted())?;
        let gone = self.clear(at);
        self.count += 1;
        self.ids[at] = block.id;
        self.blocks[at] = block;
        self.touch(at);
        gone
    }

    /// Returns the slot of the least recently used free block, or else of the least recently used live one.
    fn least_wanted(&self) -> Option<usize> {
        let worth = |at: &usize| {
            let age = self.now.wrapping_sub(self.touched[*at]);
            (self.free[*at] == 0, u32::MAX - age)
        };
        (0..PLACES).min_by_key(worth)
    }

    /// Returns the block, if it is here.
    pub(crate) fn find(&self, id: u32) -> Option<&CachedBlock> {
        let at = self.place(id)?;
        Some(&self.blocks[at])
    }

    /// Returns the names of a block's present allocation for modification, if the block is here.
    pub(crate) fn names_mut(&mut self, id: u32) -> Option<&mut Names> {
        let at = self.place(id)?;
        let block = &mut self.blocks[at];
        Some(block.origin.names_mut(block.generation))
    }

    /// Removes a block from the large-block cache.
    pub(crate) fn remove(&mut self, id: u32) -> Option<CachedBlock> {
        let at = self.place(id)?;
        self.clear(at)
    }

    /// Removes a free block from the large-block cache.
    pub(crate) fn remove_idle(&mut self) -> Option<CachedBlock> {
        if self.held.blocks == 0 {
            return None;
        }
        let at = self.free.iter().position(|free| *free != 0)?;
        self.clear(at)
    }

    /// Removes any block from the large-block cache.
    pub(crate) fn remove_any(&mut self) -> Option<CachedBlock> {
        if self.count == 0 {
            return None;
        }
        let at = self.ids.iter().position(|id| *id != NIL)?;
        self.clear(at)
    }

    /// Iterates over all blocks here.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = &CachedBlock> {
        let known = self.ids.iter().zip(&self.blocks);
        known.filter(|(id, _)| **id != NIL).map(|(_, block)| block)
    }

    /// Returns what the heap counts for free blocks here.
    pub(crate) fn held(&self) -> Amounts {
        self.held
    }

    /// Returns the bytes of the largest free block.
    pub(crate) fn largest_free(&self) -> u64 {
        let granules = self.free.iter().max().copied().unwrap_or(0);
        u64::from(granules) * crate::allocator::size::GRANULE
    }

    /// Returns the totals of blocks that were allocated again.
    pub(crate) fn reused(&self) -> Amounts {
        self.reused
    }

    /// Checks that the sums match the blocks.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let (mut held, mut count) = (Amounts::default(), 0u32);
        for at in 0..PLACES {
            let block = &self.blocks[at];
            if self.ids[at] == NIL {
                same("an empty place in a large-block cache", 0u32, self.free[at])?;
                continue;
            }
            count += 1;
            let free = if block.is_live() { 0 } else { block.granules };
            same("a block at hand", free, self.free[at])?;
            held.requested += block.counted - block.requested;
            if !block.is_live() {
                held.bytes += block.bytes();
                held.blocks += 1;
            }
        }
        same("blocks in a large-block cache", count, self.count)?;
        holds("sums of a large-block cache", held == self.held)
    }

    #[inline]
    fn place(&self, id: u32) -> Option<usize> {
        if self.count == 0 {
            return None;
        }
        position(&self.ids, id)
    }

    fn touch(&mut self, at: usize) {
        self.now = self.now.wrapping_add(1);
        self.touched[at] = self.now;
    }

    fn clear(&mut self, at: usize) -> Option<CachedBlock> {
        if self.ids[at] == NIL {
            return None;
        }
        let block = self.blocks[at];
        self.count -= 1;
        self.ids[at] = NIL;
        self.free[at] = 0;
        self.held.requested -= block.counted - block.requested;
        if !block.is_live() {
            self.held.bytes -= block.bytes();
            self.held.blocks -= 1;
        }
        Some(block)
    }
}

/// Returns the first index of a number. Compares in groups, which compilers vectorise.
fn position(numbers: &[u32; PLACES], wanted: u32) -> Option<usize> {
    const GROUP: usize = 8;
    let hit = |group: &[u32]| group.iter().fold(false, |hit, one| hit | (*one == wanted));
    let group = numbers.chunks_exact(GROUP).position(hit)?;
    let within = &numbers[group * GROUP..][..GROUP];
    Some(group * GROUP + within.iter().position(|one| *one == wanted)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(id: u32) -> CachedBlock {
        CachedBlock {
            id,
            granules: 200 + id,
            counted: 100,
            requested: 100,
            ..CachedBlock::default()
        }
    }

    #[test]
    fn a_full_cache_displaces_the_free_block_used_least_recently() {
        let mut cache = LargeCache::default();
        let most = PLACES as u32;
        assert!((0..most).all(|id| cache.add(block(id)).is_none()));
        assert_eq!(cache.largest_free(), 0);
        for id in [9, 3, 5] {
            assert_eq!(cache.put(id, None), Some(true));
        }
        assert_eq!(cache.largest_free(), 209 * 512);
        let mut displaced = |id| cache.add(block(id)).map(|gone| gone.id);
        assert_eq!(
            [0, 1, 2].map(|at| displaced(most + at)),
            [9, 3, 5].map(Some)
        );
        // All are live.
        assert_eq!(displaced(most + 3), Some(0));
    }
}
