//! Blocks that guards keep.

use std::collections::HashMap;

use crate::allocator::cache::HeldBack;
use crate::allocator::extent::uses::Uses;

/// What a guard is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Guarding {
    /// The record of a block.
    Record(u32),
    /// The address of a block that stream caches gave.
    Small(u64),
}

/// Guarded blocks by their records, which stay theirs while a guard lives, or by their addresses.
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
    /// The last uses of a block that was freed meanwhile.
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

    /// Bytes of freed blocks that wait for their guards.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Small blocks that were freed and wait for their guards.
    pub(crate) fn held_back(&self) -> impl Iterator<Item = &HeldBack> {
        self.small
            .values()
            .filter_map(|guarded| guarded.freed.as_ref())
    }

    /// A small block was freed: if a guard keeps its memory, that waits. Gives it back if none does.
    pub(crate) fn unless_guarded(&mut self, ptr: u64, held: HeldBack) -> Option<HeldBack> {
        let Some(guarded) = self.small.get_mut(&ptr) else {
            return Some(held);
        };
        self.bytes += held.bytes;
        guarded.freed = Some(held);
        None
    }

    /// Guards that live.
    pub(crate) fn count(&self) -> u64 {
        let small: u64 = self.small.values().map(|g| g.guards).sum();
        small + self.blocks.values().map(|g| g.guards).sum::<u64>()
    }
}
