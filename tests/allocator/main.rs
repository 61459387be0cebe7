//! The allocator: placement, reuse, statistics, and behaviour when memory runs out.
//!
//! Nothing here captures a stream: calls look at more from the first capture of the process on.
#![cfg(feature = "sim")]

mod addresses;
mod aliasing;
mod carver;
mod carving;
#[path = "../common/mod.rs"]
mod common;
mod contention;
mod debug;
mod decay;
mod exact;
mod figures;
mod large_blocks;
mod limits;
mod placement;
mod reuse;
mod segment_hooks;
mod single_stream;
mod views;
