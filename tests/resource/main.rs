//! Resources: one suite over all of them, and what each kind promises beyond it.
#![cfg(feature = "sim")]

mod budgets;
#[path = "../common/mod.rs"]
mod common;
mod launches;
mod lines;
mod managers;
mod parts;
mod pools;
mod pressure;
mod relief;
mod suite;

use cualloc::driver::Stream;
use cualloc::resource::{MemoryResource, RawBlock};
use cualloc::{Request, Tag};

const T: Tag = Tag::new("test");

/// A block that there must be.
fn take(resource: &(impl MemoryResource + ?Sized), bytes: usize, stream: &Stream) -> RawBlock {
    let request = Request::new(bytes).tag(T);
    resource.allocate_block(&request, stream).unwrap()
}

/// Live and pending bytes of a resource.
fn held(resource: &impl MemoryResource) -> (u64, u64) {
    let usage = resource.usage().unwrap();
    (usage.requested.current, usage.pending)
}
