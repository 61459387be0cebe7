//! The caching allocator.

mod api;
mod bins;
mod block;
mod check;
mod config;
mod engine;
mod error;
mod fit;
mod hooks;
mod ladder;
mod life;
mod lookup;
mod markers;
mod memory;
mod plan;
mod raw;
mod records;
mod remap;
pub mod size;
mod snapshot;
mod space;
mod state;
mod stats;
mod stitch;
mod streams;
mod uses;
mod view;

pub use api::Allocator;
pub use block::{Block, FreeError};
pub use check::CheckError;
pub use config::{CONFIG_VARIABLE, Config, ConfigError, Limit, Policy};
pub use error::{Error, OutOfMemory, PendingBytes, PinnedSegment};
pub use hooks::ReliefHook;
pub use life::Trimmed;
pub use snapshot::{BlockInfo, BlockState, SegmentInfo};
pub use stats::{Counter, PoolStats, Rungs, Stats};
