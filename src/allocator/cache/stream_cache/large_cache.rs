//! Large blocks that a stream cache may hand out and take back without the heap.
//!
//! To the heap a block in a large-block cache is in use, whether somebody holds it or not. The large-block
//! cache knows better: it keeps the last few large blocks of its stream cache, and one that was freed here is
//! handed out again to the next request of the same length on the same stream, which needs no order and no
//! search.
//!
//! What lies here free is not merged with its neighbours, and must not change where other blocks go. So
//! the next request that the large-block cache cannot serve sends everything back, and a block is only here while
//! nothing else happened in the heap since it was handed out: the best fit for the next request of its
//! length is then the place where it lies. Only where threads meet at the lock of the heap, so that
//! their order is chance anyway, do blocks stay beside other work.

use crate::allocator::extent::invariant::{holds, same};
use crate::allocator::extent::origin::{Names, Origin};
use crate::allocator::extent::record::{NIL, SPENT};
use crate::error::Error;

/// Blocks in a large-block cache at most.
const PLACES: usize = 64;

/// A block in a large-block cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct CachedBlock {
    pub id: u32,
    /// Of its present life, or of its last one.
    pub generation: u32,
    pub ptr: u64,
    pub granules: u32,
    /// Bytes as the heap counts them for it: no life of it in the large-block cache asks for more.
    pub counted: u64,
    /// Bytes that its present life asked for; 0 if it is free.
    pub requested: u64,
    /// How often it was handed out again here.
    pub reuses: u32,
    /// Who asked for it.
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

/// Bytes of blocks, bytes as asked for, and blocks.
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
    /// Lengths of the free ones; 0 elsewhere. Apart from the rest, as every request reads all of them.
    free: [u32; PLACES],
    /// Numbers of the blocks; [`NIL`] where a place is empty.
    ids: [u32; PLACES],
    blocks: [CachedBlock; PLACES],
    /// When each was last allocated or freed here.
    touched: [u32; PLACES],
    now: u32,
    /// Blocks here, free ones among them.
    count: u32,
    /// What the heap counts and nobody holds.
    held: Amounts,
    /// What was ever handed out again.
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
    /// Hands out a free block of exactly this length.
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
        // One that has no other life after this goes back to the heap.
        if granules == 0 || requested > block.counted || block.generation >= SPENT - 1 {
            return None;
        }
        block.requested = requested;
        block.reuses = block.reuses.saturating_add(1);
        // Odd while it is live, as at each birth in the heap.
        block.generation += 2;
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

    /// Takes a live block back, with a generation only that life of it. `None` if the block is not
    /// here; whether it was live.
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

    /// Puts a live block here. Gives back the one that has to go for it.
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

    /// Where the free block lies, else the live one, that was touched longest ago.
    fn least_wanted(&self) -> Option<usize> {
        let worth = |at: &usize| {
            let age = self.now.wrapping_sub(self.touched[*at]);
            (self.free[*at] == 0, u32::MAX - age)
        };
        (0..PLACES).min_by_key(worth)
    }

    /// The block, if it is here.
    pub(crate) fn find(&self, id: u32) -> Option<&CachedBlock> {
        let at = self.place(id)?;
        Some(&self.blocks[at])
    }

    /// Who asked for a block that is here, in its present life, to be noted.
    pub(crate) fn names_mut(&mut self, id: u32) -> Option<&mut Names> {
        let at = self.place(id)?;
        let block = &mut self.blocks[at];
        Some(block.origin.names_mut(block.generation))
    }

    /// Takes a block out of the large-block cache.
    pub(crate) fn remove(&mut self, id: u32) -> Option<CachedBlock> {
        let at = self.place(id)?;
        self.clear(at)
    }

    /// Takes a free block out of the large-block cache.
    pub(crate) fn remove_idle(&mut self) -> Option<CachedBlock> {
        if self.held.blocks == 0 {
            return None;
        }
        let at = self.free.iter().position(|free| *free != 0)?;
        self.clear(at)
    }

    /// Takes any block out of the large-block cache.
    pub(crate) fn remove_any(&mut self) -> Option<CachedBlock> {
        if self.count == 0 {
            return None;
        }
        let at = self.ids.iter().position(|id| *id != NIL)?;
        self.clear(at)
    }

    /// All blocks here.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = &CachedBlock> {
        let known = self.ids.iter().zip(&self.blocks);
        known.filter(|(id, _)| **id != NIL).map(|(_, block)| block)
    }

    /// What the heap counts and nobody holds.
    pub(crate) fn held(&self) -> Amounts {
        self.held
    }

    /// Bytes of the largest block that nobody holds.
    pub(crate) fn largest_free(&self) -> u64 {
        let granules = self.free.iter().max().copied().unwrap_or(0);
        u64::from(granules) * crate::allocator::size::GRANULE
    }

    /// What was ever handed out again.
    pub(crate) fn reused(&self) -> Amounts {
        self.reused
    }

    /// The sums are those of the blocks.
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

/// Where a number stands first. In groups, which processors compare at once.
fn position(numbers: &[u32; PLACES], wanted: u32) -> Option<usize> {
    const GROUP: usize = 8;
    let hit = |group: &[u32]| group.iter().fold(false, |hit, one| hit | (*one == wanted));
    let group = numbers.chunks_exact(GROUP).position(hit)?;
    let within = &numbers[group * GROUP..][..GROUP];
    Some(group * GROUP + within.iter().position(|one| *one == wanted)?)
}
