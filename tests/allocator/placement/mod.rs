//! Bounds on what one allocation maps, wishes about a block's place, guards, and the test before the
//! first view.

mod aliasing;
mod figures;
mod guards;
mod handles;

use crate::common::*;
use cualloc::allocator::{Allocator, Block, Config};
use cualloc::driver::Stream;
use cualloc::sim::SimConfig;

/// Handles of 2 MiB whatever the pool's size, and as little slack as there can be.
fn small_handles() -> Config {
    dense().handle(2 << 20)
}

/// `count` free pieces of 2 MiB, each between two blocks that stay: the blocks.
fn scatter(allocator: &Allocator, stream: &Stream, count: usize) -> Vec<Block> {
    let mut blocks: Vec<Block> = (0..=2 * count)
        .map(|_| allocator.allocate(2 * MIB, stream).unwrap())
        .collect();
    let mut at = 0;
    blocks.retain(|_| {
        at += 1;
        at % 2 == 1
    });
    blocks
}
