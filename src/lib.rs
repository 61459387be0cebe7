//! A caching GPU memory allocator on the raw CUDA driver API.
pub mod driver;
pub mod trace;
