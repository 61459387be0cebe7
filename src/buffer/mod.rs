//! Typed buffers over memory of any resource.
//!
//! [`DeviceBuffer`] owns device memory, [`DeviceSlice`] and [`DeviceSliceMut`] borrow parts of it,
//! [`PinnedBuffer`] owns page-locked host memory. Elements are plain data: [`DeviceCopy`].
//!
//! # Waiting
//! Operations on ordinary host memory wait until they are done. Operations that take a stream do not wait: they are
//! queued, and use only device memory or a [`PinnedBuffer`], which a [`CopyInFlight`] owns until the copy is complete.
//! The `unsafe` forms with borrowed host memory are for callers who know when a copy ends.
//!
//! An operation that waits returns when the copy is complete, or with an error. In both cases the device no longer
//! accesses the caller's memory, because it never does: such copies go through staging memory of this crate, up to 4
//! MiB at a time. If every wait fails although the context is not lost, the staging memory is leaked
//! ([`Error::Unseen`](crate::Error::Unseen)). A [`PinnedBuffer`] is copied directly.
//!
//! # Order
//! A buffer has a home, the stream that it was allocated on, and all operations on it take place one after the other,
//! in program order:
//! - An operation on the home stream is simply queued there.
//! - An operation on another stream waits, on that stream, for everything submitted to the home stream so far; and
//!   everything submitted to the home stream later waits for the operation. With several buffers this holds for the
//!   home of each.
//! - The free is queued on the home stream, so it comes last.
//!
//! So an operation on another stream costs two events and two waits, and delays the home stream until it is done, even
//! if it only reads. Where that is too strict, use [`as_device_ptr`](DeviceBuffer::as_device_ptr) and the driver's
//! calls, which are `unsafe`.
//!
//! Kernels are foreign code: launch them on the home stream, or between
//! [`prepare_use`](DeviceBuffer::prepare_use) and
//! [`finish_use`](DeviceBuffer::finish_use).
//!
//! # Captures
//! Under a [`Scope`](crate::allocator::Scope) of a [`GraphPool`](crate::allocator::GraphPool), buffers can be allocated
//! directly from an [`Allocator`](crate::Allocator) on a stream that is being captured. Fills and copies between buffers
//! become nodes of the graph and run with each of its launches. The buffer's memory must belong to a graph pool, whose
//! addresses the graph then keeps, and its home must be in the same capture, so that it orders the nodes.
//! Otherwise, and for operations that wait or own host memory until they are complete, the result is
//! [`Error::Capturing`](crate::Error::Capturing). Allocate a graph's inputs on the stream that is captured, before the
//! capture under [`Scope::Thread`](crate::allocator::Scope::Thread) or during it, and write them between launches.
//! Outside of captures all operations on the buffer are possible; the program orders them with the launches.
//!
#![cfg_attr(feature = "sim", doc = "```")]
#![cfg_attr(not(feature = "sim"), doc = "```ignore")]
//! # use cualloc::sim::{SimConfig, Simulator};
//! use cualloc::allocator::{Config, Scope};
//! use cualloc::driver::sys::CUstreamCaptureMode;
//! use cualloc::{Allocator, DeviceBuffer};
//!
//! # let sim = Simulator::new(SimConfig::default())?;
//! # let context = sim.driver()?.context(0)?;
//! let alloc = Allocator::with_config(&context, Config::new())?;
//! let (pool, stream) = (alloc.graph_pool()?, alloc.create_stream()?);
//!
//! let scope = pool.enter(Scope::Thread)?;
//! let mut input = DeviceBuffer::<u32>::zeroed(&alloc, 4, &stream)?;
//! let capture = stream.capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
//! let mut output = DeviceBuffer::filled(&alloc, 4, 7u32, &stream)?;
//! output.slice_mut(..2)?.copy_from(&input.slice(..2)?, &stream)?;
//! let mut graph = capture.end()?.instantiate()?;
//! drop(scope);
//!
//! input.copy_from_slice(&[1, 2, 3, 4])?;
//! // SAFETY: both buffers live, and are used only after the launch on their stream.
//! unsafe { graph.launch(&stream)? };
//! assert_eq!(output.to_vec()?, [1, 2, 7, 7]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Example
//! ```
//! # #[cfg(feature = "sim")] {
//! # use cualloc::sim::{SimConfig, Simulator};
//! # use cualloc::driver::Context;
//! use cualloc::{Allocator, Config, DeviceBuffer, PinnedBuffer};
//!
//! # let sim = Simulator::new(SimConfig::default())?;
//! # let driver = sim.driver()?;
//! # let context = driver.context(0)?;
//! let alloc = Allocator::with_config(&context, Config::new())?;
//! let stream = alloc.create_stream()?;
//!
//! let mut squares = DeviceBuffer::from_slice(&alloc, &[0u32, 1, 4, 9], &stream)?;
//! squares.slice_mut(..2)?.fill(7, &stream)?;
//! assert_eq!(squares.to_vec()?, [7, 7, 4, 9]);
//!
//! let host = PinnedBuffer::uninit(&context, 4)?;
//! let copy = squares.download(host, &stream)?;
//! assert_eq!(copy.wait()?[..], [7, 7, 4, 9]);
//! squares.free()?;
//! # }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod device;
mod element;
mod flight;
mod host;
mod order;
mod owner;
mod pinned;
pub(crate) mod pinned_pool;
mod slice;
mod staging;
mod turn;
mod unordered;

pub use device::DeviceBuffer;
#[cfg(feature = "bytemuck")]
pub use element::Plain;
pub use element::{DeviceCopy, FillValue, Pod};
pub use flight::CopyInFlight;
pub use pinned::PinnedBuffer;
pub use slice::{DeviceSlice, DeviceSliceMut};

pub(crate) use host::HostBlock;
pub(crate) use order::Memory;
pub(crate) use owner::{Foreign, Owner};
