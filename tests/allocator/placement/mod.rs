//! Bounds on what one allocation maps, placement constraints, guards, and the test before the first view.

mod aliasing;
mod figures;
mod guards;
mod handles;

use crate::common::prelude::*;

/// Handles of 2 MiB whatever the pool's size, and as little slack as there can be.
fn small_handles() -> Config {
    dense().handle(2 << 20)
}

/// `count` free pieces of 2 MiB, each between two blocks that stay: the blocks.
fn scatter(allocator: &Allocator, stream: &Stream, count: usize) -> Vec<Block> {
    let blocks = allocator.allocate_blocks(2 * count + 1, 2 * MIB, stream);
    blocks.into_iter().step_by(2).collect()
}
