//! Events of allocators: records of 32 bytes in rings, one ring for each writer.
//!
//! Each writer holds an [`EventWriter`] under its own lock, and so is the only writer of its [`Ring`](ring::Ring).
//! Readers merge the rings by time. A full ring overwrites its oldest records, and readers count the lost ones. Nothing
//! here runs without a recording: callers check the process state first.

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
pub(crate) use session::EventWriter;
