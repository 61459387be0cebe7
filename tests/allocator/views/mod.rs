//! Views: memory that is held already, in a second layout (packed policy).
//!
//! Blocks of [`PART`] bytes are allocated in a row under a limit that they fill, and every second
//! one is freed. What is free then is scattered: each piece is the upper half of one 2 MiB handle
//! and two whole ones, so a block over several pieces begins inside a handle, crosses from one to
//! the next where home has other memory between them, and shares its first page with a neighbour
//! that is live at home.

mod growth;
mod layout;
mod life;
mod order;
mod running_kernel;
mod share;

use crate::common::*;
use cualloc::Block;
use cualloc::allocator::{Allocator, BlockInfo, BlockState, Policy, SegmentInfo};
use cualloc::driver::Stream;

/// Two and a half handles of 2 MiB.
const PART: usize = 5 * MIB;
/// The largest block over two pieces: the half handle and all whole ones.
const TWO: usize = 9 * MIB;

fn packed(test: impl Fn(&Rig)) {
    only(Policy::Packed, test);
}

/// Every second part, live, with contents that nobody may change.
struct Kept {
    blocks: Vec<Block>,
    stream: Stream,
}

impl Kept {
    fn assert_intact(&self, rig: &Rig) {
        for (word, block) in (1000..).zip(&self.blocks) {
            let bytes = block.requested();
            assert_eq!(rig.mismatches(block.ptr(), bytes, word, &self.stream), 0);
        }
    }
}

/// An allocator whose limit is filled: `pieces` free parts lie between as many live ones.
fn scattered(rig: &Rig, pieces: usize, stream: &Stream) -> (Allocator, Kept) {
    let allocator = rig.limited(2 * pieces * PART);
    let mut kept = Vec::new();
    let mut freed = Vec::new();
    for word in 0..pieces as u32 {
        let block = allocator.allocate(PART, stream).unwrap();
        rig.stamp(block.ptr(), PART, 1000 + word, stream);
        kept.push(block);
        freed.push(allocator.allocate(PART, stream).unwrap());
    }
    stream.synchronize().unwrap();
    drop(freed);
    assert_eq!(
        allocator.stats().all.reserved.current,
        (2 * pieces * PART) as u64
    );
    let stream = stream.clone();
    let blocks = kept;
    (allocator, Kept { blocks, stream })
}

/// The base of the view that a live block lies in.
fn view_of(allocator: &Allocator, block: &Block) -> Option<u64> {
    let segments = allocator.snapshot();
    let inside = |s: &&SegmentInfo| (s.address..s.address + s.size).contains(&block.ptr());
    segments
        .iter()
        .filter(|s| s.view)
        .find(inside)
        .map(|s| s.address)
}

/// What stands at home, without live blocks in views.
fn home(allocator: &Allocator) -> Vec<BlockInfo> {
    let segments = allocator.snapshot();
    let blocks = segments.into_iter().filter(|s| !s.view && !s.small);
    blocks.flat_map(|s| s.blocks).collect()
}

/// Bytes at home that blocks in views have.
fn aliased(allocator: &Allocator) -> u64 {
    let aliased = home(allocator).into_iter();
    aliased
        .filter(|b| b.state == BlockState::Aliased)
        .map(|b| b.size)
        .sum()
}
