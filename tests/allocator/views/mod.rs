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

use crate::common::prelude::*;
use cualloc::allocator::{BlockInfo, BlockState, SegmentInfo};

/// Two and a half handles of 2 MiB.
const PART: usize = 5 * MIB;
/// The largest block over two pieces: the half handle and all whole ones.
const TWO: usize = 9 * MIB;

fn packed(test: impl Fn(&Rig)) {
    only(Policy::Packed, test);
}

/// Every second part, live, with contents that must stay unchanged: they are compared at the end.
struct Kept<'a> {
    rig: &'a Rig,
    blocks: Vec<Block>,
    stream: Stream,
}

impl Kept<'_> {
    fn assert_intact(&self) {
        for (word, block) in (1000..).zip(&self.blocks) {
            let bytes = block.requested();
            let wrong = self.rig.mismatches(block.ptr(), bytes, word, &self.stream);
            assert_eq!(wrong, 0);
        }
    }
}

impl Drop for Kept<'_> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.assert_intact();
        }
    }
}

/// An allocator whose limit is filled: `pieces` free parts lie between as many live ones.
fn scattered<'a>(rig: &'a Rig, pieces: usize, stream: &Stream) -> (Checked<'a>, Kept<'a>) {
    let allocator = rig.checked_limit(2 * pieces * PART);
    let blocks = rows(&allocator, stream, pieces, PART);
    for (word, block) in (1000..).zip(&blocks) {
        rig.stamp(block.ptr(), PART, word, stream);
    }
    stream.synchronize().unwrap();
    let held = allocator.stats().all.reserved.current;
    assert_eq!(held, (2 * pieces * PART) as u64);
    let stream = stream.clone();
    (
        allocator,
        Kept {
            rig,
            blocks,
            stream,
        },
    )
}

/// `pieces` blocks of `bytes` live, with as many free ones between them.
fn rows(allocator: &Allocator, stream: &Stream, pieces: usize, bytes: usize) -> Vec<Block> {
    let mut kept = Vec::new();
    let mut freed = Vec::new();
    for _ in 0..pieces {
        kept.push(allocator.allocate(bytes, stream).unwrap());
        freed.push(allocator.allocate(bytes, stream).unwrap());
    }
    kept
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

/// The blocks at home, without live blocks in views.
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
