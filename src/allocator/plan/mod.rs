//! Plans of work for the driver: growth, stitches and releases.
//!
//! A plan is made under the heap's lock and claims the memory that it needs. The driver is called without the lock, and
//! the plan is then committed or reverted under it.

#![forbid(unsafe_code)]

pub(crate) mod alias;
pub(crate) mod growth;
pub(crate) mod release;
pub(crate) mod stitch;
