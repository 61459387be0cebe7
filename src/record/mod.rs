//! Recordings of what allocators do, and their uses.
//!
//! A [`Recorder`] makes every allocator of the process record its events: to memory, to a file, or to a memory-mapped
//! file that survives a crash. The environment variable `CUALLOC_RECORD` does the same for an unmodified program. A
//! [`Recording`] contains the events, read back and merged by time. It can be converted to a
//! [`Trace`](crate::trace::Trace) for replay, to a [`Snapshot`] in PyTorch's formats, or to a [`Profile`]. [`metrics`]
//! and [`summary`] need no recording.

mod failed;
mod history;
mod import;
#[cfg(feature = "json")]
mod json;
mod pickle;
mod profile;
mod protobuf;
mod read;
mod recorder;
mod recording;
mod scene;
mod snapshot;
mod stacks;
mod text;
mod tree;

pub use failed::FailedRequest;
pub use import::SnapshotError;
pub use profile::{Moment, Profile, Share};
pub use read::ReadError;
pub use recorder::{Context, Recorded, Recorder, RecorderError, Target, set_stack_source};
pub use recording::{Action, Event, RecordedStream, Recording};
pub use snapshot::Snapshot;
pub use text::{metrics, summary};
