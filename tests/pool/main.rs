//! Pools: what each is for. The suite over all of them is with the resources.

#[path = "../common/mod.rs"]
mod common;

mod diagnostics;
mod lives;
mod model;
mod native;
mod pinned;
mod threshold;
mod typed;
mod workspace;

use cualloc::driver::{Context, Stream};

/// Fills memory in the order of a stream.
fn fill(context: &Context, ptr: u64, bytes: usize, stream: &Stream) {
    let entered = context.enter().unwrap();
    // SAFETY: the tests pass live memory of that many bytes, and live streams.
    unsafe { entered.memset_d8(ptr, 0x5a, bytes, stream.raw()) }.unwrap();
}
