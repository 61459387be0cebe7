//! Pools: front ends over the allocator, and the driver's own for comparison.
//!
//! | pool | hands out | for |
//! |---|---|---|
//! | [`TypedPool`] | [`DeviceBuffer`](crate::DeviceBuffer) | buffers of a few lengths, last returned first |
//! | [`ThresholdPool`] | [`DeviceBuffer`](crate::DeviceBuffer) | a release threshold |
//! | [`WorkspacePool`] | [`DeviceBuffer`](crate::DeviceBuffer) of bytes | scratch memory of kernels, by size class or exact |
//! | [`PinnedPool`] | [`PinnedBuffer`](crate::PinnedBuffer) | page-locked host memory with copies in flight |
//! | [`DriverPool`] | [`DeviceBuffer`](crate::DeviceBuffer) | the driver's `cuMemPool*` |
//!
//! All of them but the last stand on one [`Allocator`](crate::Allocator) for each device, which alone
//! accounts for device memory: what a pool does not use is there for every other one, and memory
//! moves between streams by the allocator's rules only.
//!
//! Those of device memory are [`MemoryResource`](crate::resource::MemoryResource)s of one device. So each can be
//! swapped for another, or for the bare [`Allocator`](crate::Allocator), carries every adaptor, and gives its
//! figures by `usage` and its memory back by `trim`.
//!
//! [`PoolReport`], [`SizeHistogram`] and [`Fragmentation`] describe a pool, a
//! [`PressureMonitor`](crate::resource::PressureMonitor) says when it gets tight.

mod driver_blocks;
mod driver_pool;
mod report;
mod slabs;
mod surplus;
mod table;
mod threshold;
mod typed;
mod workspace;

pub use crate::buffer::pinned_pool::{PinnedConfig, PinnedPool};
pub use driver_pool::{DriverPool, DriverPoolConfig};
pub use report::{Fragmentation, PoolReport, SizeHistogram};
pub use threshold::ThresholdPool;
pub use typed::TypedPool;
pub use workspace::WorkspacePool;

use crate::driver::{Context, Stream};
use crate::error::Error;
use crate::resource::same_device;
use crate::sync::capture;

/// Refuses a stream that captures, or of another driver than the pool's, or of another device.
#[inline]
fn admit(stream: &Stream, home: &Context) -> Result<(), Error> {
    same_device(Some(home), home.device().ordinal(), stream)?;
    capture::refuse_capture(stream)
}
