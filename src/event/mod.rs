//! Events of allocators: records of 32 bytes in rings, one ring for each writer.
//!
//! Whoever has something to record holds a [`Tap`] under a lock of its own, and so is the only writer of that tap's
//! [`Ring`]. Readers merge the rings by time. A ring that is full forgets its oldest records, and readers count them.
//! Nothing here is reached unless a recording runs: callers ask the word of the process first.

pub(crate) mod clock;
pub(crate) mod file;
pub(crate) mod mapped;
pub(crate) mod names;
pub(crate) mod record;
pub(crate) mod ring;
pub(crate) mod sample;
pub(crate) mod session;
pub(crate) mod sink;
pub(crate) mod stack;

pub(crate) use record::{Event, Kind};
pub(crate) use session::Tap;
