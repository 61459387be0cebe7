//! Starting, reading and stopping recordings of this process.

use std::io;
use std::path::Path;
use std::sync::Arc;

use crate::allocator::recorded::{self, Refusal, Running};
use crate::event::file;
use crate::event::names;
use crate::event::sample;
use crate::event::session;
use crate::event::session::Progress;
use crate::event::sink::Chunks;
use crate::record::read::ReadError;
use crate::record::recording::Recording;
use crate::record::snapshot::Snapshot;

/// The target of a recording.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Target<'a> {
    /// To memory: the newest 32767 events of each stream cache (one per stream, or one per thread that uses the
    /// stream), the same number for other blocks, and for allocators, streams and driver memory, and all blocks that
    /// are live at the start. Read by [`Recorder::read`] and [`Recorder::dump`].
    Memory,
    /// To a file, by a separate thread every 20 milliseconds, or when a ring is half full. Events overwritten before
    /// the thread has read them are counted as lost.
    File(&'a Path),
    /// To a memory-mapped file: the newest 16383 events of each stream cache, for at most 62 stream caches; events of
    /// further ones are counted as lost. The file is complete whenever and however the process ends. It has 33 MiB,
    /// which are allocated from the file system at the start. Truncating it during the recording kills the process, as
    /// with any mapped file. Linux only.
    Mapped(&'a Path),
}

/// Why a recording failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecorderError {
    /// Another recording is running, or just ending: a process has at most one.
    #[error("cannot start: another recording is running in this process, or just ending")]
    Busy,
    /// The file cannot be written.
    #[error("the recording cannot be written")]
    Io(#[from] io::Error),
    /// The recorded data cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
}

impl From<Refusal> for RecorderError {
    fn from(refusal: Refusal) -> RecorderError {
        match refusal {
            Refusal::Busy => RecorderError::Busy,
            Refusal::Io(error) => RecorderError::Io(error),
        }
    }
}

/// The result of a recording.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Recorded {
    /// Events in the file; 0 if no file was written by the writer thread.
    pub events: u64,
    /// Events overwritten in the rings before they were written to the file.
    pub lost: u64,
}

/// A recording of all allocators of the process, for as long as this value lives. Blocks that are live when it starts
/// are recorded as held.
///
/// All methods may be called from any thread. Files are accessible only for their owner, replace an existing file (a
/// link itself, not its target), and are never opened by a name that existed before.
#[derive(Debug)]
pub struct Recorder {
    running: Running,
}

impl Recorder {
    /// Starts recording. The first call in a process takes two milliseconds, in which the clock is calibrated. Calls in
    /// progress on other threads may be missed, so a recording that must be exact starts before the threads. A process
    /// forked later does not record.
    ///
    /// # Errors
    /// [`RecorderError::Busy`], also while `CUALLOC_RECORD` is recording the process; [`RecorderError::Io`].
    pub fn start(target: Target<'_>) -> Result<Recorder, RecorderError> {
        Recorder::start_with_stacks(target, 0)
    }

    /// Like [`start`](Self::start), with the stacks of sampled allocations: one per `bytes` allocated, on average,
    /// whatever the sizes of blocks (rounded up to a multiple of 512; 0 for none). With some hundreds of KiB, sampling
    /// is rare enough to stay on, and [`Profile::of_stacks`](crate::record::Profile::of_stacks) computes from the
    /// samples which code holds how much, with a relative error of about one over the square root of the number of
    /// samples.
    ///
    /// A stack consists of the 64 innermost functions of the thread, or is returned by [`set_stack_source`]. It takes
    /// some microseconds, and milliseconds the first time, for its names. A program may have 65535 stacks and contexts.
    /// On systems other than Unix all samples have the same stack, unless a source is set. Fails like
    /// [`start`](Self::start).
    pub fn start_with_stacks(target: Target<'_>, bytes: u64) -> Result<Recorder, RecorderError> {
        let target = match target {
            Target::Memory => recorded::Target::Memory,
            Target::File(path) => recorded::Target::File(path),
            Target::Mapped(path) => recorded::Target::Mapped(path),
        };
        let running = Running::begin(target, bytes)?;
        Ok(Recorder { running })
    }

    /// Writes the current contents of the rings to a file; the recording goes on. The file at `path` is replaced once
    /// the new one is complete.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn dump(&self, path: &Path) -> io::Result<()> {
        file::write_whole(path, |writer| self.write(writer))
    }

    /// Like [`dump`](Self::dump), but writes a PyTorch memory snapshot as a pickle ([`Snapshot::to_pickle`]).
    ///
    /// # Errors
    /// As [`read`](Self::read), and the file system's.
    pub fn dump_snapshot(&self, path: &Path) -> Result<(), RecorderError> {
        let pickle = Snapshot::of(&self.read()?).to_pickle();
        Ok(file::write_whole(path, |writer| {
            std::io::Write::write_all(writer, &pickle)
        })?)
    }

    /// Like [`dump`](Self::dump), to a writer.
    ///
    /// # Errors
    /// Those of the writer.
    pub fn write(&self, writer: &mut dyn io::Write) -> io::Result<()> {
        let session = &self.running.session;
        let mut chunks = Chunks::begin(session, writer)?;
        chunks.write(&session.read(&mut Progress::default()))?;
        chunks.end()
    }

    /// Reads back the current contents of the rings.
    ///
    /// # Errors
    /// [`RecorderError::Read`], which does not occur for recordings of this crate.
    pub fn read(&self) -> Result<Recording, RecorderError> {
        let mut bytes = Vec::new();
        self.write(&mut bytes)?;
        Ok(Recording::read(&bytes)?)
    }

    /// Stops the recording, and completes its file if it has one. Dropping it does the same, but ignores failures.
    ///
    /// # Errors
    /// [`RecorderError::Io`] if the file could not be written: it is readable up to the failure.
    pub fn finish(self) -> Result<Recorded, RecorderError> {
        let (events, lost) = self.running.finish()?;
        Ok(Recorded { events, lost })
    }
}

/// Sets the function that samples of stacks call for the place in the program. It returns a context whose name is a
/// stack, outermost function first, separated by semicolons; for [`Context::NONE`] the thread's native stack is taken.
/// `None` removes the function.
///
/// It is called by the thread that was just given a block, without a lock of this crate. Allocations made inside it are
/// not sampled. When it is replaced or removed, this waits until no other thread is in the former function, at most two
/// seconds, since such a thread may wait for something that the caller holds.
pub fn set_stack_source(source: Option<Arc<dyn Fn() -> Context + Send + Sync>>) {
    let source = source.map(|source| -> sample::Source { Arc::new(move || source().0) });
    sample::set_source(source);
}

/// A name for what a thread is doing, recorded with the events it causes.
///
/// A program may have 65535 names; further ones are ignored. Of a name longer than 4096 bytes the innermost parts are
/// kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Context(u32);

impl Context {
    /// The initial context of a thread.
    pub const NONE: Context = Context(0);

    /// Returns the context with a name. Takes a lock: keep the result.
    pub fn new(name: &str) -> Context {
        let context = Context(names::number_of(name));
        session::names_changed();
        context
    }

    /// Returns the context's number in recordings, from 1; 0 for [`NONE`](Self::NONE).
    pub fn id(self) -> u32 {
        self.0
    }

    /// Returns the context with a number from [`id`](Self::id). An unknown number stands for no name.
    pub fn from_id(id: u32) -> Context {
        Context(id)
    }

    /// Sets the context of the calling thread and returns the previous one.
    pub fn enter(self) -> Context {
        Context(names::set_context(self.0))
    }
}
