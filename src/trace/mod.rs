//! Recorded allocation sequences: reading and replaying them, and the smallest limit that they run
//! under.

mod format;

pub use format::{Allocation, Fault, HEADER, Op, Row, Trace, TraceError};
