//! Resources: sources of device memory that can be stacked.
//!
//! [`MemoryResource`] is the one trait. These sources implement it:
//!
//! | source | allocation | deallocation | uses on other streams |
//! |---|---|---|---|
//! | [`Allocator`](crate::Allocator) | from its cache | into its cache, no driver call on one stream | `record_use`: reuse waits |
//! | [`AsyncResource`] over another | that one's, with a ready point | its stream waits for all uses | reads and writes are put in order |
//! | [`OpenThresholdPool`], [`DeviceTypedPool`] | from their allocator | into its cache | as there |
//! | [`WorkspacePool`] | a slab of its size class | kept for the stream | `record_use`: reuse waits |
//! | [`NativePool`] | `cuMemAllocFromPoolAsync` | its stream waits for recorded uses | `record_use`: reuse waits |
//! | [`DirectResource`] | `cuMemAlloc` | waits for the device, `cuMemFree` | none needed |
//!
//! Adaptors wrap any resource, other adaptors included, and are resources themselves: [`Budget`],
//! [`Guard`], [`Logging`], [`Statistics`], [`Tracked`], [`FailureCallback`], [`Probe`]. A
//! [`Runtime`] is a stack with its streams, one per device where wanted; a [`Manager`] gives typed
//! slices out of it under a budget of its own; a [`LaunchRecorder`] says what a launch reads and
//! writes.
//!
//! [`OpenThresholdPool`]: crate::pool::OpenThresholdPool
//! [`DeviceTypedPool`]: crate::pool::DeviceTypedPool
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
mod error;
mod events;
mod gauge;
mod guard;
mod logging;
mod manager;
mod ordered;
mod owned;
mod pools;
mod probe;
mod recorder;
mod relief;
mod reservation;
mod runtime;
mod statistics;
mod stranded;
mod stream_pool;
mod tracked;
mod traits;
mod uses;
mod watchdog;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};

pub use block::{Access, BlockIdentity, BlockKey, BlockState, ResourceBlock, Tag};
pub use budget::Budget;
pub use callback::FailureCallback;
pub use clock::{Clock, ManualClock, SystemClock, Wakeup};
pub use direct::DirectResource;
pub use error::{DeallocateError, RejectedKind, ResourceError, StreamMisuse};
pub use gauge::{Pressure, PressureListener};
pub use guard::{Guard, GuardBuilder, GuardStats, OomPolicy};
pub use logging::{LogAction, LogRecord, LogSink, Logging, NullSink, RingSink, SinkError};
pub use manager::{Manager, ManagerConfig, Slice, SliceFreeError};
pub use ordered::AsyncResource;
pub use owned::OwnedBlock;
pub use probe::{Probe, ProbeConfig};
pub use recorder::{Buffer, LaunchRecorder, RecordMode, Recordable};
pub use relief::ReliefHook;
pub use reservation::Reservation;
pub use runtime::{Runtime, Runtimes, planned_stream_budget};
pub use statistics::{ResourceStats, Statistics};
pub use stream_pool::StreamPool;
pub use tracked::{LiveBlock, Tracked};
pub use traits::{MemoryResource, Outstanding, Tracking};
pub use watchdog::{Watchdog, WatchdogConfig};

use crate::driver::process;
use crate::pool::next_source;

/// Logs the first and every power-of-two-th failure of a drop or a callback.
pub(crate) fn log_rarely(error: &dyn std::error::Error, what: &str) {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    // A logger has locks, and a thread of the parent may have held them.
    if process::is_forked_child() {
        return;
    }
    let count = COUNT.fetch_add(1, Ordering::Relaxed) + 1;
    if count.is_power_of_two() {
        log::warn!("{what} ({count} such events): {error}");
    }
}

/// Deallocates a block that nobody can name from here on. Allocators, the driver's pools, and what keeps an order
/// over them, take it and give it back later where they cannot now; of others a refusal may be over at once, so it
/// is tried once more.
pub(crate) fn give_back(
    resource: &(impl MemoryResource + ?Sized),
    mut block: ResourceBlock,
    what: &str,
) {
    block.abandon();
    let done = resource.deallocate(block);
    if let Err(failure) = done.or_else(|failure| resource.deallocate(*failure.block)) {
        log_rarely(&failure.error, what);
    }
}

/// Runs code of the user's. A panic in it is logged and goes no further: the books of the caller
/// are half-way, and a drop may be under way.
pub(crate) fn guarded<T>(what: &str, run: impl FnOnce() -> T) -> Option<T> {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(value) => Some(value),
        Err(_) => {
            log::error!("{what} panicked");
            None
        }
    }
}
