//! Resources: sources of device memory that can be stacked.
//!
//! [`MemoryResource`] is the one trait. These sources implement it:
//!
//! | source | allocation | deallocation | uses on other streams |
//! |---|---|---|---|
//! | [`Allocator`](crate::Allocator) | from its cache | into its cache, no driver call on one stream | `record_use`: reuse waits |
//! | [`AccessOrdered`] over another | that one's, with a ready point | its stream waits for all uses | reads and writes are put in order |
//! | [`TypedPool`], [`ThresholdPool`] | from their allocator | into its cache | as there |
//! | [`WorkspacePool`] | a slab of its size class | kept for the stream | `record_use`: reuse waits |
//! | [`DriverPool`] | `cuMemAllocFromPoolAsync` | its stream waits for recorded uses | `record_use`: reuse waits |
//! | [`CudaMemory`] | `cuMemAlloc` | waits for the device, `cuMemFree` | none needed |
//!
//! Adaptors wrap any resource, other adaptors included, and are resources themselves: [`Budget`],
//! [`Relief`], [`Logging`], [`Statistics`], [`Tracking`], [`FailureCallback`], [`Sanitizer`]. A
//! [`DeviceRuntime`] is a stack with its streams, one per device where wanted ([`PerDevice`]); a [`Manager`] bounds
//! what is live of it; a [`Launch`] says what a launch reads and writes. A guard over memory is spelled
//! `Relief<Budget<R>>`: hooks, a policy and a reserve over a bound.
//!
//! [`ThresholdPool`]: crate::pool::ThresholdPool
//! [`TypedPool`]: crate::pool::TypedPool
//! [`WorkspacePool`]: crate::pool::WorkspacePool
//! [`DriverPool`]: crate::pool::DriverPool
//!
//! No adaptor takes a lock where it only passes through, and no driver call, hook, listener or
//! callback runs under a lock.

mod block;
mod budget;
mod caching;
mod callback;
mod cuda_memory;
mod dropped;
mod launch;
mod logging;
mod manager;
mod meter;
mod monitor;
mod ordered;
mod per_device;
mod relief;
mod runtime;
mod sanitizer;
mod statistics;
mod stranded;
mod stream_pool;
mod table;
mod tracking;
mod traits;
mod usage;
mod uses;
mod watchdog;

pub use crate::allocator::ReliefHook;
pub use crate::block::BlockState;
#[doc(hidden)]
pub use crate::clock::Clock;
pub use block::{Access, RawBlock};
pub use budget::Budget;
pub use callback::FailureCallback;
pub use cuda_memory::CudaMemory;
pub use launch::{Launch, LaunchBuffer};
pub use logging::{LogAction, LogRecord, LogSink, Logging, RingSink};
pub use manager::Manager;
pub use meter::Pressure;
pub use monitor::PressureMonitor;
pub use ordered::AccessOrdered;
pub use per_device::PerDevice;
pub use relief::{OomPolicy, Relief};
pub use runtime::DeviceRuntime;
pub use sanitizer::Sanitizer;
pub use statistics::Statistics;
pub use stream_pool::StreamPool;
pub use tracking::{LiveBlock, Tracking};
pub use traits::{MemoryResource, Source, UseTracking};
pub use usage::Usage;
pub use watchdog::Watchdog;

pub(crate) use caching::{free_at_once, identity_of, is_of_retired_stream, is_retired, named};
pub(crate) use dropped::give_back;
pub(crate) use table::next_source;
