//! Resources: sources of device memory that can be stacked.
//!
//! [`MemoryResource`] is the one trait. These sources implement it:
//!
//! | source | allocation | deallocation | uses on other streams |
//! |---|---|---|---|
//! | [`Allocator`](crate::Allocator) | from its cache | into its cache, no driver call on one stream | `record_use`: reuse waits |
//! | [`AccessOrdered`] over another | that one's, with a ready event | its stream waits for all uses | reads and writes are ordered |
//! | [`TypedPool`](crate::pool::TypedPool), [`ThresholdPool`](crate::pool::ThresholdPool) | from their allocator | into its cache | as there |
//! | [`WorkspacePool`](crate::pool::WorkspacePool) | a slab of its size class | kept for the stream | `record_use`: reuse waits |
//! | [`DriverPool`](crate::pool::DriverPool) | `cuMemAllocFromPoolAsync` | its stream waits for recorded uses | `record_use`: reuse waits |
//! | [`CudaMemory`] | `cuMemAlloc` | waits for the device, `cuMemFree` | none needed |
//!
//! Adaptors wrap any resource, other adaptors included, and are resources themselves: [`Budget`], [`Relief`],
//! [`Logging`], [`Sanitizer`]. A [`Launch`] declares what a launch reads and writes. A memory guard of other systems is
//! a `Relief<Budget<R>>`, statistics and a memory manager are a [`Budget::of_live`] without and with a limit, and a
//! device runtime is a stack such as the [`standard`] one with a [`StreamPool`], one per device in a [`PerDevice`].
//!
//! No adaptor takes a lock where it only passes calls on, and no driver call, hook, listener or callback runs under a
//! lock.

mod block;
mod budget;
mod caching;
mod checks;
mod cuda_memory;
mod dropped;
mod launch;
mod logging;
mod meter;
mod ordered;
mod per_device;
mod pressure;
mod relief;
mod sanitizer;
mod stream_pool;
mod traits;
mod usage;
mod watchdog;

pub use crate::allocator::ReliefHook;
pub use crate::block::{Access, BlockState};
#[doc(hidden)]
pub use crate::clock::Clock;
pub use block::RawBlock;
pub use budget::Budget;
pub use cuda_memory::CudaMemory;
pub use launch::{Launch, LaunchBuffer};
pub use logging::{LogAction, LogRecord, LogSink, Logging, RingSink};
pub use ordered::AccessOrdered;
pub use per_device::{PerDevice, standard};
pub use pressure::{Pressure, PressureMonitor};
pub use relief::{OomPolicy, Relief};
pub use sanitizer::{LiveBlock, Sanitizer};
pub use stream_pool::StreamPool;
pub use traits::{MemoryResource, Source, UseTracking};
pub use usage::Usage;
pub use watchdog::Watchdog;

pub(crate) use caching::{identity_of, is_retired, named, try_free};
pub(crate) use checks::{DRIVER_ALIGNMENT, check_request, device_of, next_source, same_device};
pub(crate) use dropped::{give_back, keep, retry};
pub(crate) use traits::forward;
