//! Resources: one suite over all of them, page-locked memory too, and what each kind promises beyond it.
#![cfg(feature = "sim")]

mod budgets;
#[path = "../common/mod.rs"]
mod common;
mod host;
mod launches;
mod lines;
mod managers;
mod parts;
mod pools;
mod pressure;
mod relief;
mod suite;

use cualloc::resource::MemoryResource;

/// Live and pending bytes of a resource.
fn held(resource: &impl MemoryResource) -> (u64, u64) {
    let usage = resource.usage().unwrap();
    (usage.requested.current, usage.pending)
}
