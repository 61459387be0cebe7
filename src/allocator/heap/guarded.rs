//! Guarded blocks.

use std::collections::HashMap;

use crate::allocator::cache::HeldBack;
use crate::allocator::extent::uses::Uses;

/// The object of a guard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Guarding {
    /// Record of a block.
    Record(u32),
    /// Address of a block from a stream cache.
    Small(u64),
}

/// Guarded blocks by record, which is not reused while a guard lives, or by address.
#[derive(Debug, Default)]
pub(crate) struct Guards {
    pub(crate) blocks: HashMap<u32, Guarded>,
    pub(crate) small: HashMap<u64, GuardedSmall>,
    /// Bytes of freed blocks.
    pub(crate) bytes: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Guarded {
    pub(crate) guards: u64,
    /// Last uses of the block, if it was freed meanwhile.
    pub(crate) freed: Option<Uses>,
}

#[derive(Debug, Default)]
pub(crate) struct GuardedSmall {
    pub(crate) guards: u64,
    /// The block, if it was freed meanwhile.
    pub(crate) freed: Option<HeldBack>,
}

impl Guards {
    /// Whether any large block is guarded.
    #[inline]
    pub(crate) fn any(&self) -> bool {
        !self.blocks.is_empty()
    }

    /// Returns the bytes of freed blocks that guards keep.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the freed small blocks that guards keep.
    pub(crate) fn held_back(&self) -> impl Iterator<Item = &HeldBack> {
        self.small
            .values()
            .filter_map(|guarded| guarded.freed.as_ref())
    }

    /// Keeps a freed small block if its memory is guarded; otherwise returns it.
    pub(crate) fn unless_guarded(&mut self, ptr: u64, held: HeldBack) -> Option<HeldBack> {
        let Some(guarded) = self.small.get_mut(&ptr) else {
            return Some(held);
        };
        self.bytes += held.bytes;
        guarded.freed = Some(held);
        None
    }

    /// Returns the number of guards.
    pub(crate) fn count(&self) -> u64 {
        let small: u64 = self.small.values().map(|g| g.guards).sum();
        small + self.blocks.values().map(|g| g.guards).sum::<u64>()
    }
}
