//! A caching GPU memory allocator on the raw CUDA driver API.
#![deny(missing_docs)]

pub mod allocator;
pub mod driver;
#[cfg(feature = "sim")]
pub mod sim;

pub use allocator::{Allocator, Block, Config, Error, Policy, Stats};
