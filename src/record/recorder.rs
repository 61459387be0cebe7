//! How a program has itself recorded.

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

/// Where a recording goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Target<'a> {
    /// To memory: the newest events, 32767 of each stream cache (a stream has one, or one for each thread that uses
    /// it), as many of other blocks, as many of allocators, streams and memory of the driver, and all blocks that are
    /// live at the start. [`Recorder::read`] and [`Recorder::dump`] have them.
    Memory,
    /// To a file, by a thread of its own every 20 milliseconds, or when a ring is half full: all events that the thread
    /// keeps up with. Those that were overwritten before are counted as lost.
    File(&'a Path),
    /// To a file that is mapped into memory: the newest events, 16383 of each stream cache, for at most 62 stream
    /// caches; events of further ones are counted as lost. The file is whole whenever the process ends, however that
    /// happens. It has 33 MiB, which are taken from the file system at the start.
    /// Nobody may make it shorter meanwhile: that ends the process, as with any mapped file. Linux only.
    Mapped(&'a Path),
}

/// Why there is no recording.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecorderError {
    /// Another one runs, or is just ending: there is one in a process, at most.
    #[error("another recording runs in this process, or is just ending")]
    Busy,
    /// The file cannot be written.
    #[error("the recording cannot be written")]
    Io(#[from] io::Error),
    /// What was written cannot be read.
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

/// What a recording came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Recorded {
    /// Events in the file; 0 if there was none that a thread wrote.
    pub events: u64,
    /// Events that the rings had no room for until they were written.
    pub lost: u64,
}

/// A recording of all allocators of the process while it lives. What is live when it starts is recorded as that.
///
/// All methods may be called from any thread. Files are made with access for their owner alone, replace whatever
/// stands in their place (a link, not what that leads to), and are never opened by a name that was there before.
#[derive(Debug)]
pub struct Recorder {
    running: Running,
}

impl Recorder {
    /// Begins to record. The first call in a process takes two milliseconds, in which the clock is measured. A call of
    /// another thread that is under way meanwhile may be missed, so a recording that has to be exact begins before
    /// threads do. In a process that is forked later the recording is over: nothing of the child is recorded.
    ///
    /// # Errors
    /// [`RecorderError::Busy`], also while `CUALLOC_RECORD` has the process recorded; [`RecorderError::Io`].
    pub fn start(target: Target<'_>) -> Result<Recorder, RecorderError> {
        Recorder::start_with_stacks(target, 0)
    }

    /// [`start`](Self::start), with the stacks of some allocations: one for each `bytes` that are asked for, on the
    /// average, whatever the sizes of blocks are (rounded up to a multiple of 512; 0 for none). So few are taken with
    /// some hundreds of KiB that it can stay on, and [`Profile::of_stacks`](crate::record::Profile::of_stacks) tells
    /// from them who holds how much, with an error of about one part in the square root of the stacks taken.
    ///
    /// A stack is that of the thread, of its 64 innermost functions, or what [`set_stack_source`] says. It takes some
    /// microseconds, and at the first time milliseconds for its names. A program may have 65535 stacks and contexts. On other systems than Unix there
    /// is one stack for all, unless a source says more.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_with_stacks(target: Target<'_>, bytes: u64) -> Result<Recorder, RecorderError> {
        let target = match target {
            Target::Memory => recorded::Target::Memory,
            Target::File(path) => recorded::Target::File(path),
            Target::Mapped(path) => recorded::Target::Mapped(path),
        };
        let running = Running::begin(target, bytes)?;
        Ok(Recorder { running })
    }

    /// Writes a file of what the rings hold now; the recording goes on. The file at `path` is replaced when the new one
    /// is whole.
    ///
    /// # Errors
    /// The file system's.
    pub fn dump(&self, path: &Path) -> io::Result<()> {
        file::write_whole(path, |writer| self.write(writer))
    }

    /// As [`dump`](Self::dump), but a memory snapshot of PyTorch's, as a pickle ([`Snapshot::to_pickle`]).
    ///
    /// # Errors
    /// As [`read`](Self::read), and the file system's.
    pub fn dump_snapshot(&self, path: &Path) -> Result<(), RecorderError> {
        let pickle = Snapshot::of(&self.read()?).to_pickle();
        Ok(file::write_whole(path, |writer| {
            std::io::Write::write_all(writer, &pickle)
        })?)
    }

    /// [`dump`](Self::dump) to a writer.
    ///
    /// # Errors
    /// The writer's.
    pub fn write(&self, writer: &mut dyn io::Write) -> io::Result<()> {
        let session = &self.running.session;
        let mut chunks = Chunks::begin(session, writer)?;
        chunks.write(&session.read(&mut Progress::default()))?;
        chunks.end()
    }

    /// What the rings hold now, read back.
    ///
    /// # Errors
    /// [`RecorderError::Read`], which no recording of this crate gives.
    pub fn read(&self) -> Result<Recording, RecorderError> {
        let mut bytes = Vec::new();
        self.write(&mut bytes)?;
        Ok(Recording::read(&bytes)?)
    }

    /// Ends the recording, and its file if it has one. Dropping it does the same without a word of failures.
    ///
    /// # Errors
    /// [`RecorderError::Io`] if the file could not be written: what is in it is good as far as it goes.
    pub fn finish(self) -> Result<Recorded, RecorderError> {
        let (events, lost) = self.running.finish()?;
        Ok(Recorded { events, lost })
    }
}

/// Has samples of stacks ask `source` for the place in the program: a context, whose name is a stack with its outermost
/// function first and semicolons between; of [`Context::NONE`] the thread's own stack is taken. `None` does without.
///
/// It is called by the thread that has just been given a block, which holds no lock of this crate. What it allocates
/// itself is not sampled. When another one is set, or none, this waits until no other thread is in the former one; for two
/// seconds at most, as that thread may wait for something that the caller holds.
pub fn set_stack_source(source: Option<Arc<dyn Fn() -> Context + Send + Sync>>) {
    let source = source.map(|source| -> sample::Source { Arc::new(move || source().0) });
    sample::set_source(source);
}

/// A name for what a thread is doing: the events that it causes carry it.
///
/// A program may have 65535 of them; those that come later have none. Of a name longer than 4096 bytes the
/// innermost parts are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Context(u32);

impl Context {
    /// What a thread is in at first.
    pub const NONE: Context = Context(0);

    /// The context with a name. Takes a lock: keep what it returns.
    pub fn new(name: &str) -> Context {
        let context = Context(names::number_of(name));
        session::names_changed();
        context
    }

    /// The context's number in recordings, from 1; 0 for [`NONE`](Self::NONE).
    pub fn id(self) -> u32 {
        self.0
    }

    /// The context with a number that [`id`](Self::id) gave. One that nobody has stands for no name.
    pub fn from_id(id: u32) -> Context {
        Context(id)
    }

    /// Puts the calling thread into the context until it is put into another. The one that it was in.
    pub fn enter(self) -> Context {
        Context(names::set_context(self.0))
    }
}
