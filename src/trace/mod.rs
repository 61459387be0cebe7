//! Recorded allocation sequences: reading and replaying them, and the smallest limit that they run
//! under.
//!
//! [`Trace`] reads and validates a recording; [`Replay::run`] replays it on an [`Allocator`] on a device of a real or
//! simulated driver; [`Replay::capacity`] repeats that under decreasing limits.
//!
//! [`Allocator`]: crate::allocator::Allocator

mod capacity;
mod error;
mod format;
#[doc(hidden)]
pub mod generate;
mod lines;
mod log;
mod replay;
mod rows;
mod stage;
mod work;

pub use self::log::AllocationLog;
pub(crate) use crate::event::names::Names;
pub use capacity::Capacity;
pub use error::{TraceError, TraceFault};
#[doc(hidden)]
pub use format::Allocation;
pub use format::{Op, Row, Trace};
pub use replay::{Pass, Replay, ReplayReport, Watched};
pub(crate) use rows::RowMaker;
