//! Recorded allocation sequences: reading and replaying them, and the smallest limit that they run
//! under.
//!
//! [`Trace`] reads a recording and checks it; [`Replay::run`] runs it on an [`Allocator`] on a device of a real or
//! of a simulated driver; [`Replay::capacity`] repeats that under smaller and smaller limits.
//!
//! [`Allocator`]: crate::allocator::Allocator

mod capacity;
mod format;
#[doc(hidden)]
pub mod generate;
mod replay;
mod stage;
mod work;

pub use capacity::Capacity;
#[doc(hidden)]
pub use format::Allocation;
pub use format::{Op, Row, Trace, TraceError};
pub use replay::{Pass, Replay, ReplayReport, Watched};
