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
//! The first three are front ends over one [`Allocator`](crate::Allocator) per device, which accounts for all device
//! memory: what one pool does not use is available to every other user of the allocator.
//!
//! Pools of device memory are [`MemoryResource`](crate::resource::MemoryResource)s of one device, so each can be
//! replaced by another or by the allocator, and carries every adaptor. [`PoolReport`], [`SizeHistogram`] and
//! [`Fragmentation`] describe an allocator.

mod driver_blocks;
mod driver_pool;
mod report;
mod slabs;
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

/// Refuses a stream that captures, or that belongs to another driver or device.
#[inline]
fn admit(stream: &Stream, home: &Context) -> Result<(), Error> {
    same_device(Some(home), home.device().ordinal(), stream)?;
    capture::refuse_capture(stream)
}
