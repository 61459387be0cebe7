//! The caching allocator.

pub(crate) mod api;
pub(crate) mod cache;
#[cfg(all(test, feature = "sim", not(loom)))]
mod carried;
mod config;
pub(crate) mod engine;
pub(crate) mod extent;
#[cfg(all(test, unix, feature = "sim"))]
mod forked;
#[cfg(all(test, feature = "sim", not(loom)))]
mod generations;
pub(crate) mod graph;
pub(crate) mod heap;
pub(crate) mod physical;
pub(crate) mod reclaim;
mod report;
mod request;
pub mod size;
mod stats;
pub(crate) mod stream;
pub(crate) mod suspend;
#[cfg(all(test, feature = "sim", not(loom)))]
mod tickets;
pub(crate) mod view;

pub use api::Allocator;
pub use api::block::Block;
pub use api::carver::{Carved, Carver, CarverStats};
pub use api::graph::{Checkpoint, GraphFamily, GraphPool, PoolScope, Restored, Scope};
pub use api::guard::RangeGuard;
pub use api::suspend::Select;
pub(crate) use cache::deferred::User;
pub(crate) use cache::grant::{Grant, Lifetime};
pub(crate) use cache::stream_cache::Gauge;
#[doc(hidden)]
pub use cache::stream_cache::thread::{of_caller, set_of_caller};
pub use config::{CONFIG_VARIABLE, Config, DebugModes, Limit, Policy, Profile, Waits};
pub(crate) use engine::Engine;
pub(crate) use engine::hooks::Hooks;
pub use engine::hooks::ReliefHook;
pub(crate) use engine::recorded;
pub use engine::segments::{Segment, SegmentChange, SegmentHook};
pub(crate) use engine::small::unaligned;
pub use engine::suspend::{Resumed, Suspended};
pub(crate) use extent::hash::Mixed;
pub use graph::Footprint;
#[doc(hidden)]
pub use graph::scope::{as_predicate, is_in_predicate};
pub use report::{
    BlockInfo, BlockState, Bursts, Fragmentation, GrowthInfo, GrowthReason, Packing,
    PhysicalSegment, SegmentInfo, SelfTest, Trimmed,
};
pub(crate) use request::Element;
pub use request::Request;
pub use stats::{Counter, PoolStats, ReclaimStats, Stats};
pub use suspend::contents::{Contents, Keep};
