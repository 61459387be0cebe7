//! The caching allocator.
//!
//! - It takes memory from the driver in large pieces and carves blocks from them in granules of 512 bytes: exact best
//!   fit, lowest address on ties. Decisions read no clock, so equal requests in equal states give equal addresses.
//! - The *packed* policy maps physical handles into reserved address space. Blocks lie side by side, across handles.
//! - The *classic* policy carves segments of `cuMemAlloc` by the rules of PyTorch's caching allocator.
//! - Blocks of up to 64 KiB come from caches of their stream, each with its own lock, without a driver call. Large
//!   blocks whose lengths recur stay in the same caches.
//! - A freed block is reusable on its own stream immediately. Frees carry tickets, and markers (events) cover tickets;
//!   other streams reuse the block when a marker is complete, or behind a device-side wait.
//! - When no free memory fits, the reclaim loop tries the cheapest step first: completed pieces, views, growth, waits,
//!   releases, hooks of the program. It ends with an error that names the cause.
//! - A *view* maps scattered free handles a second time, contiguously, so that fragmented memory serves large requests.
//! - Captures allocate from *graph pools*, whose addresses stay for as long as the graphs can be launched.
//! - *Ranges* keep their addresses while memory is committed in them and decommitted, in stream order.
//! - *Suspension* returns physical memory to the driver and later restores it at the same addresses.
//! - All metadata is behind one lock (`heap`), except for the caches. Driver calls, hooks and log lines run without it
//!   (`engine`): a call claims what it works on, and restores it if the driver fails.
//!
//! `api` has the public types. `calls` allocates, frees and closes, with `reclaim` where memory is short. `engine`
//! holds the lock and records, polls and waits for markers; the driver calls of a feature are in its folder
//! (`graph/run`, `suspend/run`, `debug/run`). `heap` composes `extent`, `stream`, `physical`, `view`, `cache`, `graph`,
//! `suspend`, `guard` and `recording`; `plan` prepares growth, stitches and releases over it, and `inspect` reports and
//! checks it. The guide's page on architecture follows an allocation and a free through them.

pub(crate) mod api;
pub(crate) mod cache;
pub(crate) mod calls;
mod config;
pub(crate) mod debug;
pub(crate) mod engine;
pub(crate) mod extent;
pub(crate) mod graph;
pub(crate) mod guard;
pub(crate) mod heap;
pub(crate) mod inspect;
pub(crate) mod physical;
pub(crate) mod plan;
pub(crate) mod range;
pub(crate) mod reclaim;
pub(crate) mod recording;
mod report;
mod request;
pub mod size;
mod stats;
pub(crate) mod stream;
pub(crate) mod suspend;
#[cfg(all(test, feature = "sim", not(loom)))]
mod tests;
pub(crate) mod view;

pub use api::Allocator;
pub use api::block::Block;
pub use api::carver::{Carved, Carver, CarverStats};
pub use api::graph::{Checkpoint, GraphPool, PoolScope, Restored, Scope};
pub use api::guard::RangeGuard;
#[cfg(all(feature = "share", target_os = "linux"))]
pub(crate) use api::guard::{guard_block, locate_block};
pub use api::range::{Range, RangeOptions, RangeStats};
pub use api::suspend::Select;
pub(crate) use cache::deferred::User;
pub(crate) use cache::grant::{Grant, Lifetime, Missed};
#[doc(hidden)]
pub use cache::stream_cache::thread::{of_caller, set_of_caller};
pub(crate) use calls::cached::unaligned;
pub use config::{CONFIG_VARIABLE, Config, DebugModes, Limit, Policy, Profile, Waits};
pub(crate) use engine::Engine;
pub(crate) use engine::hooks::Hooks;
pub use engine::hooks::ReliefHook;
pub(crate) use engine::recorded;
pub use engine::segment_hooks::{Segment, SegmentChange, SegmentHook};
pub(crate) use extent::hash::Mixed;
pub use graph::Footprint;
#[doc(hidden)]
pub use graph::scope::{as_predicate, is_in_predicate};
pub use graph::source::SegmentSource;
#[cfg(all(feature = "share", target_os = "linux"))]
pub(crate) use guard::blocks::Located;
pub use report::{
    BlockInfo, BlockState, Fragmentation, GrowthInfo, GrowthReason, Packing, PhysicalSegment,
    Regime, Scarcity, SegmentInfo, SelfTest, Trimmed,
};
pub(crate) use request::Element;
pub use request::Request;
pub use stats::{Counter, PoolStats, ReclaimStats, Stats};
pub use suspend::contents::{Contents, Keep};
pub use suspend::run::{Resumed, Suspended};
