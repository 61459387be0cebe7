//! The driver: generated bindings, the lazily loaded function table, and thin checked calls.
//!
//! [`Driver`] is a loaded function table. It comes from the driver's shared library ([`Driver::load`],
//! [`Driver::open`]) or from functions of this process ([`Driver::from_functions`]), and it counts the calls made
//! through it. [`Context`], [`Stream`] and [`Event`] are handles, owned or foreign; [`Entered`] keeps a context current
//! on the calling thread, for direct calls through [`Driver::functions`].
//!
//! Nothing here panics. A failed call is a [`DriverError`], with the driver's own code unless documented otherwise; a
//! driver that cannot be loaded is a [`LoadError`]. In a forked child of the process that loaded the driver, every call
//! fails with `CUDA_ERROR_NOT_INITIALIZED` and destructors do nothing; destructors also do nothing while the process
//! exits and after the driver has reported a fatal error.

mod capture;
mod context;
mod counts;
pub(crate) mod defaults;
mod deferred;
mod device;
mod error;
mod event;
mod found;
mod graph;
mod graph_exec;
pub(crate) mod kept_stream;
mod load;
mod memory;
mod module;
mod pages;
mod pool;
pub(crate) mod process;
mod registry;
mod share;
mod stream;
mod symbols;
mod table;
mod trials;
mod user_object;
mod vmm;

pub use capture::{Capture, CaptureInfo};
pub(crate) use context::Current;
pub use context::{Context, Entered};
pub use counts::CallCounts;
pub(crate) use deferred::in_host_function;
pub use device::Device;
pub use error::{DriverError, LoadError};
pub use event::Event;
pub(crate) use found::REVIEW;
pub use graph::{Dependency, Graph};
pub use graph_exec::GraphExec;
pub use memory::MemInfo;
#[doc(hidden)]
pub use memory::{HostAllocation, HostMemory};
pub(crate) use module::WORD_KERNELS;
pub use module::{Function, KernelParam, Module};
#[doc(hidden)]
pub use pool::{MemoryPool, PoolProperties};
pub use stream::Stream;
pub(crate) use stream::StreamKind;
pub use symbols::Feature;
#[doc(hidden)]
pub use symbols::Symbol;
pub use table::Driver;
pub(crate) use trials::Trials;
pub use user_object::UserObject;
pub use vmm::MemoryProperties;

/// The generated bindings: names, types and layouts exactly as in `wrapper.h`.
#[allow(
    clippy::type_complexity,
    clippy::undocumented_unsafe_blocks,
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals
)]
pub mod sys {
    include!(concat!(env!("OUT_DIR"), "/bindings.rs"));
}

#[cfg(test)]
mod tests;
