// The README's examples run on the simulator.
#![cfg_attr(feature = "sim", doc = include_str!("../README.md"))]
#![cfg_attr(
    not(feature = "sim"),
    doc = "A caching GPU memory allocator on the raw CUDA driver API."
)]
#![deny(missing_docs)]

#[cfg(not(target_pointer_width = "64"))]
compile_error!("cualloc supports 64-bit targets only: the driver's API differs on others");

pub mod allocator;
pub mod buffer;
pub mod column;
pub mod driver;
pub mod pool;
pub mod resource;
#[cfg(feature = "sim")]
pub mod sim;
mod sync;
pub mod trace;

pub use allocator::{Allocator, Block, Config, Error, Policy, Stats};
pub use buffer::{
    BufferError, CopyInFlight, DeviceBuffer, DeviceCopy, DeviceSlice, DeviceSliceMut, FillValue,
    PinnedBuffer, Pod,
};
