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
use cualloc::driver::sys::CUresult;
use cualloc::resource::{MemoryResource, RawBlock};
use cualloc::sim::FailPlan;
use cualloc::{Error, Policy, Request, Tag};

const T: Tag = Tag::new("test");

/// Not fatal, so the driver remains usable.
const REFUSAL: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

fn refusal(call: &str) -> FailPlan {
    FailPlan::call(call, REFUSAL).unwrap()
}

fn packed(test: impl Fn(&common::Rig)) {
    common::only(Policy::Packed, test);
}

/// The outcome of a request.
fn ask(
    resource: &(impl MemoryResource + ?Sized),
    bytes: usize,
    stream: &Stream,
) -> Result<RawBlock, Error> {
    resource.allocate_block(&Request::new(bytes).tag(T), stream)
}

/// A block that there must be.
fn take(resource: &(impl MemoryResource + ?Sized), bytes: usize, stream: &Stream) -> RawBlock {
    ask(resource, bytes, stream).unwrap()
}

/// Live and pending bytes of a resource.
fn held(resource: &impl MemoryResource) -> (u64, u64) {
    let usage = resource.usage().unwrap();
    (usage.requested.current, usage.pending)
}

fn outstanding(resource: &(impl MemoryResource + ?Sized)) -> u64 {
    resource.usage().unwrap().outstanding()
}

fn recoveries(resource: &impl MemoryResource) -> u64 {
    resource.usage().unwrap().recoveries
}
