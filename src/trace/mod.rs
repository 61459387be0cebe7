//! Recorded allocation sequences: reading and replaying them, and the smallest limit that they run
//! under.
//!
//! [`Trace`] reads a recording and checks it; [`replay`] runs it on an [`Allocator`] on a [`Stage`],
//! which is a device of a real or of a simulated driver; [`capacity`] repeats that under smaller and
//! smaller limits. [`generate`] makes up traces where there are no recordings.
//!
//! [`Allocator`]: crate::allocator::Allocator

mod capacity;
mod format;
pub mod generate;
mod replay;
mod stage;
mod work;

pub use capacity::{Capacity, LIMIT_FACTOR, LIMIT_STEP, MARGINS, REPLAYS, Search, capacity};
pub use format::{Allocation, Fault, HEADER, Op, Row, Trace, TraceError};
pub use replay::{Failure, Figures, Options, Part, Report, replay};
pub use stage::Stage;
