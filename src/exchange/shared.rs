//! Memory that a tensor shares with its exports, and the end of its life.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

use crate::block::BlockId;
use crate::buffer::{Foreign, Memory, Owner};
use crate::driver::{Context, Stream, StreamKind, process, sys};
use crate::error::{Error, ImportFault, StreamMisuse};
use crate::resource::{Access, Buffer};
use crate::sync::capture;
use crate::sync::order::wait_until_idle;

use super::layout::Described;
use super::peer::{Kind, Peer, order, wait_until_over};

/// What keeps memory until its drop.
pub(super) type Kept = Box<dyn Send + Sync>;

/// Whose the memory is.
enum Holder {
    /// Memory of the device, ours or imported: a [`Memory`] sees to the order of all that is done to it.
    Device(Memory),
    /// Page-locked memory of our own, or no memory at all. No stream of ours uses it.
    Kept(#[expect(dead_code, reason = "kept for its drop")] Kept),
}

/// Memory with the stream in whose order it is used. A tensor and its exports share it, and so do the tensors
/// that are made of these in this process; the last one frees it.
pub(super) struct Shared {
    holder: Option<Holder>,
    stream: Stream,
    start: sys::CUdeviceptr,
    bytes: usize,
    external: bool,
    host: bool,
    /// Streams that use it until it goes, and of which nobody else keeps a record.
    uses: Mutex<Vec<Stream>>,
    /// Contexts of users whose streams are not known: the end waits for all their work.
    untracked: Mutex<Vec<Context>>,
}

/// What was imported. Its drop lets the producer have it back, after all work of the home, which waits for
/// every other use.
struct Import {
    kept: Option<Kept>,
    home: Stream,
    producer: Option<Stream>,
}

impl Import {
    /// The producer's stream waits for the home in our place, or else the host does.
    fn settle(&self) -> Result<(), Error> {
        // Streams that are others on each thread cannot be named any more.
        let fixed = |stream: &Stream| stream.kind() != StreamKind::PerThreadDefault;
        match &self.producer {
            Some(producer) if fixed(producer) && fixed(&self.home) => {
                order(&self.home, producer).or_else(|_| wait_until_over(&self.home))
            }
            _ => wait_until_over(&self.home),
        }
    }
}

impl Drop for Import {
    fn drop(&mut self) {
        let kept = self.kept.take();
        // A refusal may be over at once, and nobody can try later.
        match self.settle().or_else(|_| self.settle()) {
            Ok(()) => release(kept),
            Err(error) => {
                log::error!("imported memory is never released: {error}");
                std::mem::forget(kept);
            }
        }
    }
}

/// Drops what others made, whose panics are not ours.
fn release(kept: impl Sized) {
    if catch_unwind(AssertUnwindSafe(|| drop(kept))).is_err() {
        log::error!("releasing memory panicked");
    }
}

impl Shared {
    fn new(holder: Option<Holder>, stream: &Stream, start: sys::CUdeviceptr, bytes: usize) -> Self {
        Shared {
            holder,
            stream: stream.clone(),
            start,
            bytes,
            external: false,
            host: false,
            uses: Mutex::default(),
            untracked: Mutex::default(),
        }
    }

    /// No bytes, no memory.
    pub(super) fn empty(stream: &Stream) -> Arc<Shared> {
        Arc::new(Shared::new(None, stream, 0, 0))
    }

    /// The first `bytes` of a buffer's memory.
    pub(super) fn of_memory(memory: Memory, bytes: usize) -> Arc<Shared> {
        let (stream, start) = (memory.stream().clone(), memory.ptr());
        let external = matches!(memory.owner(), Owner::Foreign(_));
        let holder = Some(Holder::Device(memory.shared(true)));
        let mut shared = Shared::new(holder, &stream, start, bytes);
        shared.external = external;
        Arc::new(shared)
    }

    /// Page-locked memory of our own.
    pub(super) fn pinned(kept: Kept, start: u64, bytes: usize, stream: &Stream) -> Arc<Shared> {
        let mut shared = Shared::new(Some(Holder::Kept(kept)), stream, start, bytes);
        shared.host = true;
        Arc::new(shared)
    }

    /// Gets a stream ready for memory that is about to be imported: orders it after the producer, and after
    /// the home of our own memory come back (`returned`), whose owner is told of the new user.
    pub(super) fn expect(
        returned: Option<&Shared>,
        described: &Described,
        stream: &Stream,
        peer: &Peer,
    ) -> Result<(), Error> {
        // An array does not say of what type its elements are, and whoever imports it may be wrong.
        if let Some(shared) = returned
            && !shared.contains(described.start, described.bytes)
        {
            return Err(ImportFault::Beyond {
                address: described.start,
                bytes: described.bytes,
                memory: shared.bytes,
            }
            .into());
        }
        if let Kind::On(earlier) | Kind::StartingOn(earlier) = &peer.0 {
            order(earlier, stream)?;
        }
        match returned {
            // Whatever the two sides said of each other: this is ours to see to.
            Some(shared) if shared.bytes > 0 => {
                shared.follow(stream)?;
                shared.record(stream)
            }
            _ => Ok(()),
        }
    }

    /// Takes over what was imported, after [`expect`](Self::expect).
    pub(super) fn import(
        kept: impl Send + Sync + 'static,
        described: &Described,
        stream: &Stream,
        stream_id: u64,
        peer: Peer,
    ) -> Arc<Shared> {
        let (ptr, bytes) = (described.start, described.bytes);
        let kept: Kept = Box::new(kept);
        let holder = if bytes == 0 {
            Holder::Kept(kept)
        } else {
            let owner = Box::new(Import {
                kept: Some(kept),
                home: stream.clone(),
                producer: match peer.0 {
                    Kind::On(stream) => Some(stream),
                    Kind::StartingOn(_) | Kind::Ordered => None,
                },
            });
            let owner = Owner::Foreign(Box::new(Foreign { ptr, owner }));
            Holder::Device(Memory::new(owner, stream.clone(), stream_id).shared(true))
        };
        let mut shared = Shared::new(Some(holder), stream, ptr, bytes);
        (shared.external, shared.host) = (true, described.host);
        Arc::new(shared)
    }

    /// Whether all of a range is the memory's.
    fn contains(&self, ptr: sys::CUdeviceptr, bytes: usize) -> bool {
        let before = ptr.checked_sub(self.start);
        let end = before.and_then(|before| before.checked_add(bytes as u64));
        bytes == 0 || end.is_some_and(|end| end <= self.bytes as u64)
    }

    pub(super) fn stream(&self) -> &Stream {
        &self.stream
    }

    pub(super) fn is_external(&self) -> bool {
        self.external
    }

    pub(super) fn is_host(&self) -> bool {
        self.host
    }

    /// The memory, if it is a device's.
    pub(super) fn memory(&self) -> Option<&Memory> {
        match &self.holder {
            Some(Holder::Device(memory)) => Some(memory),
            _ => None,
        }
    }

    /// The block; none of memory of others.
    pub(super) fn id(&self) -> Option<BlockId> {
        let memory = self.memory()?;
        memory.owner().identity(memory.stream_id())
    }

    /// What the memory is to a launch recorder.
    pub(super) fn buffer(&self) -> Buffer {
        match self.id() {
            Some(id) => Buffer::Block(id),
            None if self.external => Buffer::External,
            None if self.bytes == 0 => Buffer::Empty,
            None => Buffer::Untracked,
        }
    }

    /// Notes that a stream uses the memory until it goes.
    pub(super) fn record(&self, stream: &Stream) -> Result<(), Error> {
        if self.bytes == 0 {
            return Ok(());
        }
        if let Some(memory) = self.memory()
            && memory.owner().record(stream, false)?
        {
            return Ok(());
        }
        capture::refuse_capture(stream)?;
        let id = stream.id()?;
        if stream.kind() == StreamKind::PerThreadDefault {
            // Another thread could not name it.
            self.lend_untracked(stream.context());
            return Ok(());
        }
        let known = |known: &Stream| known.id().is_ok_and(|known| known == id);
        if known(&self.stream) {
            return Ok(());
        }
        let mut uses = process::lock(&self.uses);
        if !uses.iter().any(known) {
            uses.push(stream.clone());
        }
        Ok(())
    }

    /// Hands the memory to a consumer: orders its stream after ours, and notes its use.
    pub(super) fn lend(&self, peer: &Peer) -> Result<(), Error> {
        if self.bytes == 0 {
            return Ok(());
        }
        match &peer.0 {
            Kind::On(stream) => {
                self.follow(stream)?;
                self.record(stream)?;
            }
            Kind::StartingOn(stream) => {
                self.follow(stream)?;
                self.lend_untracked(self.stream.context());
                self.lend_untracked(stream.context());
            }
            Kind::Ordered => self.lend_untracked(self.stream.context()),
        }
        Ok(())
    }

    /// Lets the memory's stream, as the calling thread can name it, come after everything that was done to
    /// the memory.
    #[cfg(feature = "arrow")]
    pub(super) fn gather(&self) -> Result<(), Error> {
        self.follow(&self.stream)
    }

    /// Orders a stream after everything that was done to the memory.
    fn follow(&self, stream: &Stream) -> Result<(), Error> {
        let Some(memory) = self.memory() else {
            return capture::refuse_capture(stream);
        };
        match memory.prepare_use(stream, Access::ReadWrite) {
            // Here the handle means this thread's stream, not the one that was meant.
            Err(Error::Stream(StreamMisuse::WrongThread)) => {
                Ok(wait_until_idle(self.stream.context())?)
            }
            result => result,
        }
    }

    /// Lets everything that is done to the memory from now on come after what a stream was given so far.
    pub(super) fn wait_for(&self, stream: &Stream) -> Result<(), Error> {
        match self.memory() {
            Some(memory) => memory.finish_use(stream, Access::ReadWrite),
            None => Ok(()),
        }
    }

    /// The end waits for a context.
    pub(super) fn lend_untracked(&self, context: &Context) {
        let mut contexts = process::lock(&self.untracked);
        if contexts.iter().all(|known| known.id() != context.id()) {
            contexts.push(context.clone());
        }
    }

    /// The memory alone, if it is ours, and nobody else has a part in it.
    pub(super) fn into_memory(self: Arc<Shared>) -> Result<Memory, Arc<Shared>> {
        let ours = !self.external && self.memory().is_some();
        if !ours || !process::lock(&self.untracked).is_empty() {
            return Err(self);
        }
        let mut shared = Arc::try_unwrap(self)?;
        let uses = std::mem::take(&mut *process::lock(&shared.uses));
        if let Some(at) = uses.iter().position(|user| shared.wait_for(user).is_err()) {
            *process::lock(&shared.uses) = uses[at..].to_vec();
            return Err(Arc::new(shared));
        }
        match shared.holder.take() {
            Some(Holder::Device(memory)) => Ok(memory.shared(false)),
            holder => {
                shared.holder = holder;
                Err(Arc::new(shared))
            }
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let holder = self.holder.take();
        if process::is_gone() {
            // Neither the driver nor whoever made the memory can be called here.
            return std::mem::forget(holder);
        }
        let uses = std::mem::take(self.uses.get_mut().unwrap_or_else(PoisonError::into_inner));
        let contexts = self.untracked.get_mut();
        let mut contexts = std::mem::take(contexts.unwrap_or_else(PoisonError::into_inner));
        match holder {
            Some(Holder::Device(memory)) => {
                let unseen = uses.iter().filter(|user| {
                    let waited = memory.finish_use(user, Access::ReadWrite);
                    waited.is_err()
                });
                contexts.extend(unseen.map(|user| user.context().clone()));
                memory.end_after(contexts);
            }
            Some(kept) => {
                let wait = || {
                    contexts.iter().try_for_each(wait_until_idle)?;
                    uses.iter().try_for_each(wait_until_over)
                };
                // A refusal may be over at once, and nobody can try later.
                match wait().or_else(|_: Error| wait()) {
                    Ok(()) => release(kept),
                    Err(error) => {
                        log::error!("page-locked memory is never freed: {error}");
                        std::mem::forget(kept);
                    }
                }
            }
            None => {}
        }
    }
}
