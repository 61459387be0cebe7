//! Recordings of what allocators do, and what can be made of them.
//!
//! A [`Recorder`] has every allocator of the process write what it does: to memory, to a file, or to a file that is
//! mapped, so that it outlives a crash. The environment variable `CUALLOC_RECORD` does the same for any program
//! without a change to it. A [`Recording`] is what was written, read back and merged by time. It becomes a
//! [`Trace`](crate::trace::Trace) that can be replayed, a [`Snapshot`] in PyTorch's formats, or a [`Profile`].
//! [`metrics`] and [`summary`] need no recording.

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
