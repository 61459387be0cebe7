//! Resources: sources of device memory that can be stacked.
//!
//! [`MemoryResource`] is the one trait. These sources implement it:
//!
//! | source | allocation | deallocation | uses on other streams |
//! |---|---|---|---|
//! | [`Allocator`](crate::Allocator) | from its cache | into its cache, no driver call on one stream | `record_use`: reuse waits |
//! | [`AsyncResource`] over another | that one's, with a ready point | its stream waits for all uses | reads and writes are put in order |
//! | [`DevicePool`] | from its allocator | into its cache | as there |
//! | [`WorkspacePool`] | a slab of its size class | kept for the stream | `record_use`: reuse waits |
//! | [`NativePool`] | `cuMemAllocFromPoolAsync` | its stream waits for recorded uses | `record_use`: reuse waits |
//! | [`DirectResource`] | `cuMemAlloc` | waits for the device, `cuMemFree` | none needed |
//!
//! Adaptors wrap any resource, other adaptors included, and are resources themselves: [`Budget`],
//! [`Relief`] ([`Guard`] is both), [`Logging`], [`Statistics`], [`Tracked`], [`FailureCallback`], [`Probe`]. A
//! [`Runtime`] is a stack with its streams, one per device where wanted; a [`Manager`] gives typed
//! slices out of it under a budget of its own; a [`LaunchRecorder`] says what a launch reads and
//! writes.
//!
//! [`DevicePool`]: crate::pool::DevicePool
//! [`WorkspacePool`]: crate::pool::WorkspacePool
//! [`NativePool`]: crate::pool::NativePool
//!
//! No adaptor takes a lock where it only passes through, and no driver call, hook, listener or
//! callback runs under a lock.

mod block;
mod budget;
mod caching;
mod callback;
mod clock;
mod direct;
mod foreign;
mod guard;
mod key;
mod logging;
mod manager;
mod meter;
mod ordered;
mod owned;
mod probe;
mod recorder;
mod relief;
mod runtime;
mod statistics;
mod stranded;
mod stream_pool;
mod tracked;
mod traits;
mod usage;
mod uses;
mod watchdog;

pub use crate::allocator::ReliefHook;
pub use block::{Access, BlockIdentity, BlockState, ResourceBlock, Tag};
pub use budget::Budget;
pub use callback::FailureCallback;
pub use clock::{Clock, ManualClock, SystemClock, Wakeup};
pub use direct::DirectResource;
pub use guard::{Guard, GuardBuilder, GuardStats};
pub use key::BlockKey;
pub use logging::{LogAction, LogRecord, LogSink, Logging, NullSink, RingSink, SinkError};
pub use manager::{Managed, Manager, ManagerConfig, Slice};
pub use meter::Pressure;
pub use ordered::AsyncResource;
pub use owned::OwnedBlock;
pub use probe::{Probe, ProbeConfig};
pub use recorder::{Buffer, LaunchRecorder, RecordMode, Recordable};
pub use relief::{OomPolicy, Relief};
pub use runtime::{Runtime, Runtimes, planned_stream_budget};
pub use statistics::{ResourceStats, Statistics};
pub use stream_pool::StreamPool;
pub use tracked::{LiveBlock, Tracked};
pub use traits::{MemoryResource, Outstanding, Tracking};
pub use usage::{Gauge, PoolUsage};
pub use watchdog::Watchdog;

pub(crate) use caching::{adopt, identity_of};
pub(crate) use key::Table;
