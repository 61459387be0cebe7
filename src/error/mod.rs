//! Parts of an [`Error`]: values with data.
//!
//! There is one error type above the driver. Its text names its cause, and its `source` is the reason of that cause, so
//! that printing a chain of errors repeats nothing. Addresses and handles are hexadecimal.

mod argument;
pub(crate) mod cause;
mod config;
mod finding;
mod graph;
mod import;
mod json;
pub(crate) mod kinds;
pub(crate) mod memory;
mod rare_log;
mod report;
mod share;

pub use argument::{InvalidArgument, StreamMisuse};
pub use cause::Cause;
pub use config::ConfigError;
pub use finding::{Finding, Misuse};
pub use graph::GraphPoolError;
pub use import::ImportFault;
pub(crate) use kinds::{Error, Refused};
pub(crate) use memory::Shortage;
pub use memory::{HeldBy, Holder, Hole, OutOfMemory, PinnedSegment, StreamBytes};
pub(crate) use rare_log::RareLog;
pub use share::ShareError;
