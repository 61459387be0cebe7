//! Guards, which keep blocks and their physical segments in place.

#![forbid(unsafe_code)]

pub(crate) mod blocks;

use std::collections::HashMap;

use crate::allocator::cache::HeldBack;
use crate::allocator::extent::record::{Records, SpaceId, State as Extent};
use crate::allocator::extent::uses::Uses;
use crate::allocator::stats::Stats;
use crate::allocator::stream::Streams;
use crate::error::Error;

/// The object of a guard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Guarding {
    /// Record of a block.
    Record(u32),
    /// Address of a block from a stream cache.
    Small(u64),
    /// Number of the graph pool of a block, which a lease of the pool keeps.
    Pooled(u64),
}

/// A block that was freed while it was guarded.
#[derive(Debug)]
pub(crate) enum Freed {
    Small(HeldBack),
    /// Record and last uses.
    Large(u32, Uses),
}

/// Guarded blocks by record, which is not reused while a guard lives, or by address.
#[derive(Debug, Default)]
pub(crate) struct Guards {
    blocks: HashMap<u32, Guarded>,
    small: HashMap<u64, GuardedSmall>,
    /// Numbers of guards by graph pool.
    pools: HashMap<u64, u64>,
    /// Bytes of freed blocks.
    pub bytes: u64,
}

#[derive(Debug, Default)]
struct Guarded {
    guards: u64,
    /// Last uses of the block, if it was freed meanwhile.
    freed: Option<Uses>,
}

#[derive(Debug, Default)]
struct GuardedSmall {
    guards: u64,
    /// The block, if it was freed meanwhile.
    freed: Option<HeldBack>,
}

impl Guards {
    /// Returns the freed small blocks that guards keep.
    pub(crate) fn held_back(&self) -> impl Iterator<Item = &HeldBack> {
        self.small
            .values()
            .filter_map(|guarded| guarded.freed.as_ref())
    }

    pub(crate) fn add(&mut self, block: Guarding, records: &mut Records) {
        match block {
            Guarding::Record(id) => {
                self.blocks.entry(id).or_default().guards += 1;
                records[id].guarded = true;
            }
            Guarding::Small(ptr) => self.small.entry(ptr).or_default().guards += 1,
            Guarding::Pooled(pool) => *self.pools.entry(pool).or_default() += 1,
        }
    }

    /// Drops a guard of a block. Returns the block if this was its last guard and it was freed meanwhile.
    pub(crate) fn remove(&mut self, block: Guarding, records: &mut Records) -> Option<Freed> {
        match block {
            Guarding::Record(id) => {
                let guarded = self.blocks.get_mut(&id)?;
                guarded.guards -= 1;
                if guarded.guards > 0 {
                    return None;
                }
                records[id].guarded = false;
                let uses = self.blocks.remove(&id)?.freed?;
                self.bytes -= records[id].bytes();
                Some(Freed::Large(id, uses))
            }
            Guarding::Small(ptr) => {
                let guarded = self.small.get_mut(&ptr)?;
                guarded.guards -= 1;
                if guarded.guards > 0 {
                    return None;
                }
                let held = self.small.remove(&ptr)?.freed?;
                self.bytes -= held.bytes;
                Some(Freed::Small(held))
            }
            Guarding::Pooled(pool) => {
                let guards = self.pools.get_mut(&pool)?;
                *guards -= 1;
                if *guards == 0 {
                    self.pools.remove(&pool);
                }
                None
            }
        }
    }

    /// Keeps a freed small block if it is guarded; otherwise returns it.
    pub(crate) fn keep_small(&mut self, ptr: u64, held: HeldBack) -> Option<HeldBack> {
        let Some(guarded) = self.small.get_mut(&ptr) else {
            return Some(held);
        };
        self.bytes += held.bytes;
        guarded.freed = Some(held);
        None
    }

    /// Keeps a large block that is being freed if it is guarded; otherwise returns its uses.
    pub(crate) fn keep_large(
        &mut self,
        (id, uses): (u32, Uses),
        records: &mut Records,
        streams: &mut Streams,
        stats: &mut Stats,
    ) -> Option<Uses> {
        let Some(guarded) = self.blocks.get_mut(&id) else {
            return Some(uses);
        };
        let hot = &mut records[id];
        hot.state = Extent::Busy;
        let (bytes, small) = (hot.bytes(), hot.space != SpaceId::Large);
        self.bytes += bytes;
        if matches!(uses, Uses::Many(_)) {
            // When the guard ends and the block becomes free, it counts again as memory that other streams use.
            stats.on_pool(small, |pool| pool.active.sub(bytes));
        }
        // Keeps the slot of the block's stream.
        streams[records.cold(id).owner].calls += 1;
        guarded.freed = Some(uses);
        None
    }

    /// Returns the records of the freed large blocks that guards keep.
    pub(crate) fn freed_records(&self) -> impl Iterator<Item = u32> {
        let freed = self.blocks.iter().filter(|(_, kept)| kept.freed.is_some());
        freed.map(|(id, _)| *id)
    }

    /// Fails while there is any guard on blocks outside graph pools.
    pub(crate) fn ensure_none(&self) -> Result<(), Error> {
        let small: u64 = self.small.values().map(|guarded| guarded.guards).sum();
        let large = self.blocks.values().map(|guarded| guarded.guards);
        self.ensure(small + large.sum::<u64>())
    }

    /// Fails while there is any guard on blocks of these graph pools.
    pub(crate) fn ensure_none_in(&self, wanted: impl Fn(u64) -> bool) -> Result<(), Error> {
        let pools = self.pools.iter().filter(|(pool, _)| wanted(**pool));
        self.ensure(pools.map(|(_, guards)| guards).sum())
    }

    fn ensure(&self, guards: u64) -> Result<(), Error> {
        let bytes = self.bytes;
        match guards {
            0 => Ok(()),
            guards => Err(Error::Guarded { guards, bytes }),
        }
    }
}
