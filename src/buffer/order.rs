//! The one rule of order that makes buffers safe.
//!
//! Everything that is done to a buffer is ordered by the stream on which it was allocated, its
//! home. An operation on another stream waits for what the home was given so far, and the home
//! waits for the operation. So whatever comes later, on whichever stream, comes after it, and the
//! free, which is an event of the home stream, needs to know of no other stream.

use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::allocator::{Allocator, Block, Request, User};
use crate::driver::{Context, DriverError, Entered, Stream, StreamKind, process, sys};
use crate::sync::event::EventPools;
use crate::sync::{capture, order};

use super::late::{self, Late};
use crate::error::{Error, Refused, StreamMisuse};

/// A block and its home stream.
pub(crate) struct Memory {
    block: ManuallyDrop<Block>,
    stream: ManuallyDrop<Stream>,
    /// For the per-thread default stream this is the one of the thread that allocated.
    stream_id: u64,
    /// Streams were given work on the block that the home does not wait for: see [`late`].
    astray: AtomicBool,
}

impl Memory {
    pub(super) fn allocate(
        alloc: &Allocator,
        bytes: usize,
        alignment: usize,
        stream: &Stream,
    ) -> Result<Memory, Error> {
        let stream_id = stream.id()?;
        let block = alloc.allocate_with(Request::new(bytes).align(alignment), stream)?;
        Ok(Memory::new(block, stream.clone(), stream_id))
    }

    pub(super) fn from_block(block: Block, stream: &Stream) -> Result<Memory, Refused<Block>> {
        match stream.id() {
            Ok(id) => Ok(Memory::new(block, stream.clone(), id)),
            Err(error) => Err(Refused::new(block, error)),
        }
    }

    #[inline(always)]
    pub(crate) fn new(block: Block, stream: Stream, stream_id: u64) -> Memory {
        Memory {
            block: ManuallyDrop::new(block),
            stream: ManuallyDrop::new(stream),
            stream_id,
            astray: AtomicBool::new(false),
        }
    }

    pub(super) fn block(&self) -> &Block {
        &self.block
    }

    pub(super) fn ptr(&self) -> sys::CUdeviceptr {
        self.block.ptr()
    }

    pub(super) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// The home stream and its id.
    pub(super) fn home(&self) -> (Stream, u64) {
        (Stream::clone(&self.stream), self.stream_id)
    }

    pub(super) fn context(&self) -> &Context {
        &self.block.engine().context
    }

    /// Whether the calling thread can name the home stream.
    fn at_home(&self) -> Result<(), Error> {
        if self.stream.kind() == StreamKind::PerThreadDefault && self.stream.id()? != self.stream_id
        {
            return Err(Error::Stream(StreamMisuse::WrongThread));
        }
        Ok(())
    }

    /// The memory is used by nobody but its device's streams.
    pub(super) fn same_device(&self, stream: &Stream) -> Result<(), Error> {
        let (device, other) = (self.context().device(), stream.context().device());
        if device.ordinal() == other.ordinal() {
            return Ok(());
        }
        Err(Error::WrongDevice {
            expected: device.ordinal(),
            found: other.ordinal(),
        })
    }

    /// Whether `stream` may be ordered with the home stream at all.
    fn admit(&self, stream: &Stream, id: u64) -> Result<(), Error> {
        let engine = self.block.engine();
        engine.usable()?;
        engine.same_driver(stream)?;
        self.at_home()?;
        capture::refuse_capture(stream)?;
        if id != self.stream_id {
            capture::refuse_capture(&self.stream)?;
        }
        self.catch_up()
    }

    /// Lets the home wait for the streams that an earlier failure left unordered with it.
    #[inline]
    fn catch_up(&self) -> Result<(), Error> {
        if self.astray.load(Ordering::Acquire) {
            self.make_up_for_all()?;
        }
        Ok(())
    }

    #[cold]
    fn make_up_for_all(&self) -> Result<(), Error> {
        self.at_home()?;
        for late in late::all_of(self.key()) {
            self.make_up_for(&late)?;
            late::made_up(&self.astray, &late);
        }
        Ok(())
    }

    fn make_up_for(&self, late: &Late) -> Result<(), Error> {
        let stream = &late.stream;
        capture::refuse_capture(stream)?;
        capture::refuse_capture(&self.stream)?;
        if stream.kind() == StreamKind::PerThreadDefault && stream.id()? != late.id {
            // Here the handle means another stream.
            return Ok(stream.context().enter()?.synchronize()?);
        }
        Ok(self.let_home_wait(stream)?)
    }

    /// Lets later work of `stream` come after everything done to the memory so far.
    pub(super) fn order_before(&self, stream: &Stream) -> Result<(), Error> {
        let id = stream.id()?;
        self.admit(stream, id)?;
        if id != self.stream_id {
            order::order(&self.stream, stream, self.events())?;
        }
        Ok(())
    }

    /// Lets everything done to the memory from now on come after the work of `stream` so far.
    pub(super) fn order_after(&self, stream: &Stream) -> Result<(), Error> {
        let id = stream.id()?;
        match self.admit(stream, id) {
            Ok(()) => Ok(self.join(stream, id)?),
            // What is captured has not run, and when it does is not for this stream to say.
            Err(Error::Capturing { stream: named }) if named == stream.raw() as usize => {
                Err(Error::Capturing { stream: named })
            }
            Err(error) => {
                // The caller says that there is work: it must not lose its memory.
                self.note_late(stream, id);
                Err(error)
            }
        }
    }

    /// Lets the home wait for the work of `stream`. If that cannot be had, whatever comes next has to
    /// see to it first.
    fn join(&self, stream: &Stream, id: u64) -> Result<(), DriverError> {
        if id == self.stream_id {
            return Ok(());
        }
        self.let_home_wait(stream)
            .inspect_err(|_| self.note_late(stream, id))
    }

    /// Lets the home wait for the work of `stream`, or else the host.
    fn let_home_wait(&self, stream: &Stream) -> Result<(), DriverError> {
        order::order(stream, &self.stream, self.events()).or_else(|error| {
            // A wait for what is captured cannot end, and would spoil the capture.
            if capture::refuse_capture(stream).is_err() {
                return Err(error);
            }
            stream.synchronize().map_err(|_| error)
        })
    }

    #[cold]
    fn note_late(&self, stream: &Stream, id: u64) {
        late::note(&self.astray, self.key(), stream, id);
    }

    /// Where events for its order come from.
    pub(super) fn events(&self) -> &EventPools {
        &self.block.engine().events
    }

    fn key(&self) -> late::Key {
        (self.block.engine().id, self.block.ptr())
    }

    /// Tells the allocator what it must know before the block is freed.
    fn tell_uses(&self) -> Result<(), Error> {
        self.catch_up()?;
        // A retired stream was promised to get no more work, but operations on the buffer may have
        // given it some. To the allocator it is a new stream then.
        if self.block.stream_retired() {
            self.at_home()?;
            self.block.record_stream(&self.stream)?;
        }
        Ok(())
    }

    /// The block, ready to be freed.
    pub(super) fn into_block(self) -> Result<Block, (Memory, Error)> {
        if process::is_forked_child() {
            return Err((self, Error::ForkedChild));
        }
        if let Err(error) = self.tell_uses() {
            return Err((self, error));
        }
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is not dropped, and the fields are not used again.
        unsafe {
            ManuallyDrop::drop(&mut this.stream);
            Ok(ManuallyDrop::take(&mut this.block))
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if process::is_gone() {
            // In a forked child a lock may be held by a thread that does not exist there.
            return;
        }
        let told = self.tell_uses();
        let late = match *self.astray.get_mut() {
            true => late::take_all_of(self.key()),
            false => Vec::new(),
        };
        // SAFETY: this is the drop, so the block is used no more.
        let block = unsafe { ManuallyDrop::take(&mut self.block) };
        if told.is_err() {
            // A refusal may be over at once; if not, a later call of the allocator tries again.
            let mut users: Vec<User> = late.iter().map(|late| User::of(&late.stream)).collect();
            if block.stream_retired() {
                users.push(User::of(&self.stream));
            }
            block.drop_after(users);
        } else {
            drop(block);
        }
        // SAFETY: as above; a block goes before its stream.
        unsafe { ManuallyDrop::drop(&mut self.stream) };
    }
}

/// An operation that failed.
pub(super) enum Failed {
    /// It was not submitted.
    Before(Error),
    /// It may have been.
    Submitted(Error),
}

impl From<Failed> for Error {
    fn from(failed: Failed) -> Error {
        match failed {
            Failed::Before(error) | Failed::Submitted(error) => error,
        }
    }
}

/// Submits `operation` to `stream`, after everything done to the memory it uses, and before
/// everything done to it from now on.
pub(super) fn submit(
    stream: &Stream,
    used: &[&Memory],
    operation: impl FnOnce(&Entered<'_>) -> Result<(), DriverError>,
) -> Result<(), Failed> {
    let before = |error: DriverError| Failed::Before(error.into());
    let id = stream.id().map_err(before)?;
    for memory in used {
        memory.admit(stream, id).map_err(Failed::Before)?;
    }
    for memory in used.iter().filter(|memory| memory.stream_id != id) {
        order::order(&memory.stream, stream, memory.events()).map_err(before)?;
    }
    let entered = stream.context().enter().map_err(before)?;
    // A failure may be that of earlier work, reported late, so it does not say that nothing was
    // submitted.
    let mut result = operation(&entered);
    drop(entered);
    for memory in used {
        result = result.and(memory.join(stream, id));
    }
    result.map_err(|error| Failed::Submitted(error.into()))?;
    // Another thread may have begun a capture since it was asked: then nothing was done yet.
    capture::refuse_capture(stream).map_err(Failed::Submitted)
}

/// As [`submit`] of an operation on one memory, and waits until it is complete.
pub(super) fn submit_and_wait(
    stream: &Stream,
    memory: &Memory,
    operation: impl FnOnce(&Entered<'_>) -> Result<(), DriverError>,
) -> Ended {
    let result = match submit(stream, &[memory], operation) {
        Ok(()) => Ok(()),
        Err(Failed::Before(error)) => return Ended::Over(Err(error)),
        Err(Failed::Submitted(error)) => Err(error),
    };
    end_of(stream, result, memory.events())
}

/// After a copy with memory of the caller: one that may have been started all the same is waited for.
pub(super) fn started(
    stream: &Stream,
    memory: &Memory,
    submitted: Result<(), Failed>,
) -> Result<(), Error> {
    match submitted {
        Ok(()) => Ok(()),
        Err(Failed::Before(error)) => Err(error),
        Err(Failed::Submitted(error)) => match end_of(stream, Err(error), memory.events()) {
            Ended::Over(result) => result,
            Ended::Unseen(error) => Err(Error::Unseen(error)),
        },
    }
}

/// How an operation ended that was waited for.
#[must_use]
pub(crate) enum Ended {
    /// The device is out of host memory that the operation used: it is complete, or was never
    /// submitted, or its context is lost and the work with it.
    Over(Result<(), Error>),
    /// It was submitted, and no wait for it succeeds.
    Unseen(DriverError),
}

/// Waits for the end of an operation that was given to `stream` with this result.
pub(crate) fn end_of(stream: &Stream, result: Result<(), Error>, events: &EventPools) -> Ended {
    match order::see_end(stream, events) {
        order::Ended::Over(end) => Ended::Over(result.and(end.map_err(Error::from))),
        order::Ended::Unseen(error) => Ended::Unseen(error),
    }
}
