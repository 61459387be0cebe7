//! The ordering rule that makes buffers safe.
//!
//! All operations on a buffer are ordered by its home, the stream it was allocated on. An operation on another stream
//! waits for the work submitted to the home so far, and the home waits for the operation. So every later operation, on
//! any stream, comes after it, and the free, which is ordered on the home stream, needs no information about other
//! streams.

use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::allocator::{Block, Request};
use crate::driver::{Context, DriverError, Entered, Stream, StreamKind, process, sys};
use crate::resource::{Access, Source};
use crate::sync::event::EventPools;
use crate::sync::order::{Ended, observe_end};
use crate::sync::{capture, order};

use super::owner::{Loan, Owner};
use super::turn::Turn;
use super::unordered::{self, Unordered};
use crate::error::{Error, Refused, StreamMisuse};

pub(crate) struct Memory {
    owner: ManuallyDrop<Owner>,
    stream: ManuallyDrop<Stream>,
    /// The id of the home stream; for a per-thread default stream, that of the allocating thread.
    stream_id: u64,
    /// Whether there are streams that the home must wait for: see [`unordered`].
    has_unordered: AtomicBool,
    /// Whether several owners, which no borrow separates, submit work: a tensor and those made of its exports.
    shared: bool,
}

impl Memory {
    /// Allocates memory from a resource. A block of an allocator is returned to it directly.
    #[inline]
    pub(super) fn allocate(
        from: &impl Source,
        request: Request,
        stream: &Stream,
    ) -> Result<Memory, Error> {
        let stream_id = stream.id()?;
        let owner = match from.as_allocator() {
            Some(allocator) => Owner::Block(allocator.allocate_with(request, stream)?),
            None => {
                // Cloned before the allocation, so that the block is moved only once.
                let (resource, home) = (from.shared(), stream.clone());
                let block = from.allocate_block(&request, stream)?;
                let owner = Owner::Resource(Loan { resource, block });
                return Ok(Memory::new(owner, home, stream_id));
            }
        };
        Ok(Memory::new(owner, stream.clone(), stream_id))
    }

    #[inline(always)]
    pub(crate) fn new(owner: Owner, stream: Stream, stream_id: u64) -> Memory {
        Memory {
            owner: ManuallyDrop::new(owner),
            stream: ManuallyDrop::new(stream),
            stream_id,
            has_unordered: AtomicBool::new(false),
            shared: false,
        }
    }

    /// Marks the memory as having several owners, or one.
    pub(crate) fn shared(mut self, shared: bool) -> Memory {
        self.shared = shared;
        self
    }

    pub(crate) fn owner(&self) -> &Owner {
        &self.owner
    }

    pub(crate) fn ptr(&self) -> sys::CUdeviceptr {
        self.owner.ptr()
    }

    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }

    pub(crate) fn stream_id(&self) -> u64 {
        self.stream_id
    }

    pub(super) fn context(&self) -> &Context {
        self.stream.context()
    }

    /// Whether the home stream's handle is valid on the calling thread.
    fn at_home(&self) -> Result<(), Error> {
        if self.stream.kind() == StreamKind::PerThreadDefault && self.stream.id()? != self.stream_id
        {
            return Err(Error::Stream(StreamMisuse::WrongThread));
        }
        Ok(())
    }

    /// Rejects a stream of another device.
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

    /// Whether `stream` can be ordered with the home stream. Returns whether it is being captured, which is an error
    /// unless the work is `capturable`.
    fn admit(&self, stream: &Stream, id: u64, capturable: bool) -> Result<bool, Error> {
        if process::is_forked_child() {
            return Err(Error::ForkedChild);
        }
        self.owner.usable()?;
        let home = self.context().driver();
        if !home.same_library(stream.context().driver()) {
            return Err(Error::Stream(StreamMisuse::ForeignDriver));
        }
        self.at_home()?;
        let captured = capture::is_capturing(stream)?;
        if captured {
            self.admit_capture(stream, id, capturable)?;
        } else if id != self.stream_id {
            capture::refuse_capture(&self.stream)?;
        }
        self.catch_up(false)?;
        Ok(captured)
    }

    /// Whether captured work may use the memory: it belongs to a graph pool, whose addresses the graph then keeps, and
    /// the home is in the same capture, so that it orders all captured work on the memory.
    #[cold]
    fn admit_capture(&self, stream: &Stream, id: u64, capturable: bool) -> Result<(), Error> {
        let capture = |of: &Stream| of.capture_id().ok().flatten().filter(|id| *id != 0);
        let is_home = || id == self.stream_id;
        if capturable
            && let Owner::Block(block) = &*self.owner
            && (is_home() || capture(stream).is_some_and(|id| capture(&self.stream) == Some(id)))
            && block.record_in_pool(stream)?
        {
            return Ok(());
        }
        Err(Error::Capturing {
            stream: stream.raw() as usize,
        })
    }

    /// Makes the home wait for the streams that an earlier failure left unordered. Before the memory is freed (`last`),
    /// also for those that may use it until then.
    #[inline]
    fn catch_up(&self, last: bool) -> Result<(), Error> {
        if self.has_unordered.load(Ordering::Acquire) {
            self.order_all(last)?;
        }
        Ok(())
    }

    #[cold]
    fn order_all(&self, last: bool) -> Result<(), Error> {
        self.at_home()?;
        let all = unordered::all_of(self.key()).into_iter();
        for user in all.filter(|user| last || !user.lasting) {
            self.order_after(&user)?;
            unordered::remove(&self.has_unordered, &user);
        }
        self.finish(Access::ReadWrite)
    }

    fn order_after(&self, user: &Unordered) -> Result<(), Error> {
        user.stream.with(|stream| match stream {
            Some(stream) if stream.own_id() == user.id => {
                capture::refuse_capture(stream)?;
                capture::refuse_capture(&self.stream)?;
                Ok(self.make_home_wait(stream)?)
            }
            // The stream was retired, or its handle means another stream on this thread.
            _ => {
                capture::refuse_capture(&self.stream)?;
                Ok(order::wait_for_context(user.stream.stream().context())?)
            }
        })
    }

    /// Orders the home after the accesses that the resource tracks.
    #[inline]
    fn prepare(&self, access: Access) -> Result<(), Error> {
        match self.owner.ordered() {
            Some(Loan { resource, block }) => {
                resource.prepare_use(&block.id(), &self.stream, access)
            }
            None => Ok(()),
        }
    }

    /// Reports to a resource that tracks accesses that the home waits for one.
    #[inline]
    fn finish(&self, access: Access) -> Result<(), Error> {
        match self.owner.ordered() {
            Some(Loan { resource, block }) => {
                resource.finish_use(&block.id(), &self.stream, access)
            }
            None => Ok(()),
        }
    }

    /// Orders later work of `stream` after all operations on the memory so far.
    pub(crate) fn prepare_use(&self, stream: &Stream, access: Access) -> Result<(), Error> {
        let id = stream.id()?;
        let captured = self.admit(stream, id, true)?;
        self.prepare(access)?;
        Ok(self.order_behind(stream, id, captured)?)
    }

    /// Orders all later operations on the memory after the work of `stream` so far.
    pub(crate) fn finish_use(&self, stream: &Stream, access: Access) -> Result<(), Error> {
        let id = stream.id()?;
        match self.admit(stream, id, true) {
            Ok(captured) => self.join(stream, id, captured, access),
            // Captured work has not run, and this stream does not determine when it will.
            Err(Error::Capturing { stream: named }) if named == stream.raw() as usize => {
                Err(Error::Capturing { stream: named })
            }
            Err(error) => {
                // The caller reports that work exists, so the memory must stay until it is complete.
                self.add_unordered(stream, id, false);
                Err(error)
            }
        }
    }

    /// Makes `stream` wait for the work of the home.
    fn order_behind(&self, stream: &Stream, id: u64, captured: bool) -> Result<(), DriverError> {
        match captured {
            _ if id == self.stream_id => Ok(()),
            // Pooled events are not recorded in captures, where they could not be reused.
            true => stream.wait_for(&self.stream),
            false => order::order(&self.stream, stream, self.events()),
        }
    }

    /// Makes the home wait for the work of `stream`. If that fails, the next operation has to do it first.
    fn join(&self, stream: &Stream, id: u64, captured: bool, access: Access) -> Result<(), Error> {
        if id != self.stream_id {
            let joined = match captured {
                true => self.stream.wait_for(stream),
                false => self.make_home_wait(stream),
            };
            joined.inspect_err(|_| self.add_unordered(stream, id, false))?;
        }
        self.finish(access)
    }

    /// Records that `stream` uses the memory until it is freed or, with `now`, that it has used it for the last time.
    pub(crate) fn record(&self, stream: &Stream, now: bool) -> Result<(), Error> {
        if self.owner.record(stream, now)? {
            return Ok(());
        }
        let id = stream.id()?;
        self.owner.admit_use(stream)?;
        if id == self.stream_id {
            return Ok(());
        }
        if now {
            return self.join(stream, id, false, Access::ReadWrite);
        }
        // The home waits for the stream before the memory is freed.
        self.add_unordered(stream, id, true);
        Ok(())
    }

    /// Makes the home wait for the work of `stream`, or if that fails, the host.
    fn make_home_wait(&self, stream: &Stream) -> Result<(), DriverError> {
        order::order(stream, &self.stream, self.events()).or_else(|error| {
            // Waiting for captured work cannot end, and would invalidate the capture.
            if capture::refuse_capture(stream).is_err() {
                return Err(error);
            }
            stream.synchronize().map_err(|_| error)
        })
    }

    #[cold]
    fn add_unordered(&self, stream: &Stream, id: u64, lasting: bool) {
        unordered::add(&self.has_unordered, self.key(), stream, id, lasting);
    }

    /// Returns the events for ordering this memory.
    pub(super) fn events(&self) -> &EventPools {
        self.owner.events()
    }

    fn key(&self) -> unordered::Key {
        self.owner.key()
    }

    /// Reports uses that the owner must know before it takes the memory back.
    fn report_uses(&self) -> Result<(), Error> {
        self.catch_up(true)?;
        // A retired stream was promised to get no more work, but operations on the buffer may have submitted some. It
        // then counts as a new stream for the allocator.
        if self.owner.is_retired() {
            self.at_home()?;
            self.owner.record(&self.stream, false)?;
        }
        Ok(())
    }

    /// Returns the owner, ready to take the memory back, and the home with its id.
    pub(super) fn into_parts(self) -> Result<(Owner, Stream, u64), Refused<Memory>> {
        if process::is_forked_child() {
            return Err(Refused::new(self, Error::ForkedChild));
        }
        if let Err(error) = self.report_uses() {
            return Err(Refused::new(self, error));
        }
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is not dropped, and the fields are not used again.
        unsafe {
            let stream = ManuallyDrop::take(&mut this.stream);
            Ok((ManuallyDrop::take(&mut this.owner), stream, this.stream_id))
        }
    }

    pub(super) fn into_block(self) -> Result<Block, Refused<Memory>> {
        if !matches!(*self.owner, Owner::Block(_)) {
            let what = "a block out of memory that is not an allocator's own";
            return Err(Refused::new(self, Error::NotSupported { what }));
        }
        match self.into_parts()? {
            (Owner::Block(block), ..) => Ok(block),
            (owner, stream, id) => {
                let memory = Memory::new(owner, stream, id);
                Err(Refused::new(memory, Error::Abandoned))
            }
        }
    }

    pub(super) fn free(self) -> Result<(), Refused<Memory>> {
        let (owner, stream, id) = self.into_parts()?;
        owner
            .free()
            .map_err(|failed| failed.map(|owner| Memory::new(owner, stream, id)))
    }
}

impl Memory {
    /// Frees the memory after all work of these contexts. The host waits for them; if a wait fails, it is left to the
    /// owner of the memory.
    pub(crate) fn end_after(self, mut contexts: Vec<Context>) {
        let wait = |context: &Context| order::wait_until_idle(context);
        // A failure may be transient.
        contexts.retain(|context| wait(context).or_else(|_| wait(context)).is_err());
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is not dropped.
        unsafe { this.end(contexts) }
    }

    /// # Safety
    /// This is the drop, or the value is never dropped.
    #[inline(never)]
    unsafe fn end(&mut self, contexts: Vec<Context>) {
        if process::is_unavailable() {
            // In a forked child, a thread that does not exist there may hold a lock.
            return;
        }
        let reported = self.report_uses();
        let user = match *self.has_unordered.get_mut() {
            true => unordered::take_all_of(self.key()),
            false => Vec::new(),
        };
        // SAFETY: by the caller's contract the owner is not used again.
        let owner = unsafe { ManuallyDrop::take(&mut self.owner) };
        if reported.is_err() || !contexts.is_empty() {
            owner.end_after(&self.stream, user, contexts);
        } else {
            owner.end();
        }
        // SAFETY: as above; the memory is dropped before its stream.
        unsafe { ManuallyDrop::drop(&mut self.stream) };
    }
}

impl Drop for Memory {
    #[inline]
    fn drop(&mut self) {
        let is_fast = !process::is_unavailable() && !*self.has_unordered.get_mut();
        // SAFETY: this is the drop, in which the owner is not used again if the call returns true.
        if is_fast && unsafe { self.owner.try_end() } {
            // SAFETY: as above; the memory is dropped before its stream.
            unsafe { ManuallyDrop::drop(&mut self.stream) };
            return;
        }
        // SAFETY: this is the drop.
        unsafe { self.end(Vec::new()) }
    }
}

pub(super) enum Failed {
    /// The operation was not submitted.
    Before(Error),
    /// The operation may have been submitted.
    Submitted(Error),
}

impl From<Failed> for Error {
    fn from(failed: Failed) -> Error {
        match failed {
            Failed::Before(error) | Failed::Submitted(error) => error,
        }
    }
}

/// Submits `operation` to `stream`, ordered after all earlier operations on the memory it uses, and before all later
/// ones. An operation that is `capturable` may run again with each launch of a graph.
pub(super) fn submit(
    stream: &Stream,
    used: &[&Memory],
    capturable: bool,
    operation: impl FnOnce(&Entered<'_>) -> Result<(), DriverError>,
) -> Result<(), Failed> {
    let before = |error: DriverError| Failed::Before(error.into());
    let id = stream.id().map_err(before)?;
    let shared = used.iter().filter(|memory| memory.shared);
    let turn = Turn::take(shared.map(|memory| memory.key()).collect());
    let _turn = turn.map_err(Failed::Before)?;
    let mut captured = false;
    for memory in used {
        let admitted = memory.admit(stream, id, capturable);
        captured |= admitted.map_err(Failed::Before)?;
        let ready = memory.prepare(Access::ReadWrite);
        ready.map_err(Failed::Before)?;
    }
    for memory in used {
        memory.order_behind(stream, id, captured).map_err(before)?;
    }
    let entered = stream.context().enter().map_err(before)?;
    // The failure may come from earlier work, so the operation may have been submitted nevertheless.
    let mut result = operation(&entered).map_err(Error::from);
    drop(entered);
    for memory in used {
        result = result.and(memory.join(stream, id, captured, Access::ReadWrite));
    }
    result.map_err(Failed::Submitted)?;
    if captured {
        return Ok(());
    }
    // Another thread may have begun a capture since the check; then nothing has run yet.
    capture::refuse_capture(stream).map_err(Failed::Submitted)
}

/// Like [`submit`], for an operation on one memory, and waits until it is complete.
pub(super) fn submit_and_wait(
    stream: &Stream,
    memory: &Memory,
    operation: impl FnOnce(&Entered<'_>) -> Result<(), DriverError>,
) -> Ended {
    let result = match submit(stream, &[memory], false, operation) {
        Ok(()) => Ok(()),
        Err(Failed::Before(error)) => return Ended::Over(Err(error)),
        Err(Failed::Submitted(error)) => Err(error),
    };
    observe_end(stream, result, memory.events())
}

/// After a failed copy with memory of the caller, waits for it, since it may have started.
pub(super) fn started(
    stream: &Stream,
    memory: &Memory,
    submitted: Result<(), Failed>,
) -> Result<(), Error> {
    match submitted {
        Ok(()) => Ok(()),
        Err(Failed::Before(error)) => Err(error),
        Err(Failed::Submitted(error)) => match observe_end(stream, Err(error), memory.events()) {
            Ended::Over(result) => result,
            Ended::Unseen(error) => Err(Error::Unseen(error)),
        },
    }
}
