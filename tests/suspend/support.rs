//! Shared parts of these tests.

pub use super::common::capturing::{Capturing, MODE, capture_output, pooled_on};
pub use super::common::prelude::*;
pub use cualloc::allocator::{Contents, GraphPool, Keep, Resumed, Scope, Select, Suspended};
pub use cualloc::driver::{Graph, GraphExec};

/// Only packed memory can be suspended.
pub fn packed(test: impl Fn(&Rig)) {
    only(Policy::Packed, test);
}

/// [`packed`], with an allocator, a pool and streams.
pub fn pooled<const N: usize>(test: impl Fn(&Rig, Allocator, GraphPool, [Stream; N])) {
    pooled_on(SimConfig::with_devices(1, 8 << 30), test);
}

/// Suspends all of an allocator.
pub fn suspend(allocator: &Allocator, contents: Contents) -> Suspended {
    try_suspend(allocator, Select::Allocator, contents).unwrap()
}

pub fn try_suspend(
    allocator: &Allocator,
    select: Select<'_>,
    keep: impl Into<Keep>,
) -> Result<Suspended, Error> {
    // SAFETY: the simulator says where a test breaks its promise.
    unsafe { allocator.suspend(select, keep) }
}

pub fn resume(allocator: &Allocator) -> Resumed {
    allocator.resume(Select::Allocator).unwrap()
}

pub fn is_suspended(allocator: &Allocator) -> bool {
    allocator.is_suspended(Select::Allocator).unwrap()
}

/// Blocks of all kinds with contents that tell them apart: small, large, and one in a view. They go before the
/// allocator is closed.
pub struct World<'a> {
    pub blocks: Vec<Block>,
    pub stream: Stream,
    pub allocator: Checked<'a>,
}

impl<'a> World<'a> {
    pub fn new(rig: &'a Rig, config: Config) -> World<'a> {
        World::of(rig, config, 6)
    }

    /// With a number of large blocks of 5 MiB, and as many small ones.
    pub fn of(rig: &'a Rig, config: Config, rounds: usize) -> World<'a> {
        let limit = (rounds * 10 + 4) * MIB;
        let (allocator, [stream]) = rig.scene_with(config.limit(Some(limit as u64)));
        let mut blocks = Vec::new();
        let mut gaps = Vec::new();
        for round in 0..rounds {
            blocks.push(allocator.allocate(5 * MIB, &stream).unwrap());
            gaps.push(allocator.allocate(5 * MIB, &stream).unwrap());
            blocks.push(allocator.allocate(700 + 4096 * round, &stream).unwrap());
        }
        stream.synchronize().unwrap();
        drop(gaps);
        // Only where scattered handles are shown back to back is there room for it.
        blocks.push(allocator.allocate(9 * MIB, &stream).unwrap());
        let views = allocator.snapshot().into_iter().filter(|s| s.view);
        assert_eq!(views.count(), 1);
        let world = World {
            blocks,
            stream,
            allocator,
        };
        world.stamp(rig);
        world
    }

    pub fn stamp(&self, rig: &Rig) {
        for (word, block) in (1000..).zip(&self.blocks) {
            rig.stamp(block.ptr(), block.requested() / 4 * 4, word, &self.stream);
        }
        self.stream.synchronize().unwrap();
    }

    /// All contents are what they were.
    pub fn assert_intact(&self, rig: &Rig) {
        for (word, block) in (1000..).zip(&self.blocks) {
            let bytes = block.requested() / 4 * 4;
            let wrong = rig.mismatches(block.ptr(), bytes, word, &self.stream);
            assert_eq!(wrong, 0, "block {word} at {:#x}", block.ptr());
        }
    }

    pub fn addresses(&self) -> Vec<u64> {
        self.blocks.iter().map(Block::ptr).collect()
    }
}

/// Bytes that an allocator without graph pools holds, or held before it was suspended.
pub fn reserved(allocator: &Allocator) -> u64 {
    allocator.stats().all.reserved.current
}
