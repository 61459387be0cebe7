//! The caching allocator.

mod api;
mod athand;
mod bins;
mod block;
mod carver;
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
pub mod size;
mod snapshot;
mod space;
mod state;
mod stats;
mod streams;
mod uses;

pub use api::Allocator;
pub use block::{Block, FreeError};
pub use carver::{CarveError, Carved, Carver};
pub use check::CheckError;
pub use config::{CONFIG_VARIABLE, Config, ConfigError, Limit, Policy};
pub use error::{Error, OutOfMemory, PendingBytes, PinnedSegment};
pub use hooks::ReliefHook;
pub use life::Trimmed;
pub use snapshot::{BlockInfo, BlockState, SegmentInfo};
pub use stats::{Counter, PoolStats, Rungs, Stats};
