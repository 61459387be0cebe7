//! A caching GPU memory allocator on the raw CUDA driver API.
//!
//! The crate links to nothing: the driver's shared library is loaded at run time, on first use.
//! Where there is none, the crate builds, loads nothing, and says so with an error value.
#![deny(missing_docs)]

#[cfg(not(target_pointer_width = "64"))]
compile_error!("cualloc supports 64-bit targets only: the driver's API differs on others");

pub mod allocator;
pub mod driver;
#[cfg(feature = "sim")]
pub mod sim;
pub mod trace;
