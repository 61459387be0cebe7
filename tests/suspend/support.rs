//! What these tests share.

pub use super::common::capturing::{Capturing, MODE};
pub use super::common::*;
pub use cualloc::Error;
pub use cualloc::allocator::{
    Allocator, Block, Config, Contents, GraphPool, Keep, Policy, Resumed, Scope, Select, Suspended,
};
pub use cualloc::driver::{Graph, GraphExec, Stream};

/// Only packed memory can be suspended.
pub fn packed(test: impl Fn(&Rig)) {
    only(Policy::Packed, test);
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

/// Blocks of all kinds with contents that tell them apart: small, large, and one in a view.
pub struct World {
    pub allocator: Allocator,
    pub blocks: Vec<Block>,
    pub stream: Stream,
}

impl World {
    pub fn new(rig: &Rig, config: Config) -> World {
        World::of(rig, config, 6)
    }

    /// Frees the blocks and drops the stream.
    pub fn into_allocator(self) -> Allocator {
        self.allocator
    }

    /// With so many large blocks of 5 MiB, and as many small ones.
    pub fn of(rig: &Rig, config: Config, rounds: usize) -> World {
        let limit = (rounds * 10 + 4) * MIB;
        let allocator = rig.allocator_with(config.limit(Some(limit as u64)));
        let stream = rig.stream();
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
            allocator,
            blocks,
            stream,
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

    /// Ends it: the driver gets everything back, or all but what is lost.
    pub fn close(self, rig: &Rig, lost: bool) {
        drop(self.blocks);
        drop(self.stream);
        match lost {
            true => rig.end(&self.allocator),
            false => rig.close(&self.allocator),
        }
    }
}

/// Bytes that an allocator without graph pools holds, or held before it was suspended.
pub fn reserved(allocator: &Allocator) -> u64 {
    allocator.stats().all.reserved.current
}

/// What the device has given away, which only the simulated one tells for this process alone.
pub fn assert_held(rig: &Rig, bytes: u64) {
    match rig.driver_held() {
        Some(held) => assert_eq!(held, bytes),
        None => eprintln!("SKIPPED in part on cuda: the device's memory is not asked"),
    }
}

/// Captures what a closure gives the stream, with memory of a pool.
pub fn capture(pool: &GraphPool, stream: &Stream, work: impl FnOnce()) -> Graph {
    let scope = pool.enter(Scope::NextCapture).unwrap();
    let under_way = Capturing::begin(stream, MODE);
    work();
    let graph = under_way.end().unwrap();
    scope.leave().unwrap();
    graph
}
