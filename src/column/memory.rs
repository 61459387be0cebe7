//! The memory under a column, whoever it belongs to, and the end of its life.

use std::ffi::c_void;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

use crate::allocator::{Block, User};
use crate::block::BlockId;
use crate::driver::{Context, DriverError, Stream, StreamKind, process, sys};
use crate::error::{Error, ImportFault, StreamMisuse};
use crate::locks::held::locked;
use crate::resource::{Access, MemoryResource, OwnedBlock, UseTracking, identity_of};
use crate::sync::capture;
use crate::sync::event::EventPools;
use crate::sync::order::wait_until_idle;

use super::described::Described;
use super::order::{Consumer, Producer, order, wait_until_over};

/// Where a column's memory came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ColumnSource {
    /// Allocated for it.
    Owned,
    /// Imported as a DLPack tensor.
    Dlpack,
    /// Imported as an Arrow device array.
    Arrow,
}

/// What was imported: dropping it releases it.
#[derive(Debug)]
pub(super) struct Foreign {
    format: ColumnSource,
    #[expect(dead_code, reason = "kept for its drop")]
    kept: Box<dyn fmt::Debug + Send + Sync>,
}

impl Foreign {
    pub(super) fn new(
        format: ColumnSource,
        kept: impl fmt::Debug + Send + Sync + 'static,
    ) -> Foreign {
        Foreign {
            format,
            kept: Box::new(kept),
        }
    }
}

/// Whether freeing a block of an untracked resource waits for more, or less, than all of a context.
fn is_elsewhere(block: &SharedBlock, context: &Context) -> bool {
    let home = block.resource().context();
    home.is_none_or(|home| home.id() != context.id())
}

/// A block of any resource.
pub(super) type SharedBlock = OwnedBlock<Arc<dyn MemoryResource>>;

/// Whose the memory is.
#[derive(Debug)]
enum Owner {
    /// No bytes, no memory.
    Nobody,
    Block(Block, BlockId),
    Resource(SharedBlock, BlockId),
    /// Our own memory come back through an export: the export, then the memory it keeps.
    Returned(Foreign, Arc<Memory>),
    Foreign {
        source: Foreign,
        producer: Option<Stream>,
        /// Streams that use the memory beside the column's own.
        uses: Mutex<Vec<Stream>>,
    },
}

/// Memory with the stream in whose order it is used. Columns and their exports share it; the last one
/// frees it.
#[derive(Debug)]
pub(super) struct Memory {
    owner: Option<Owner>,
    stream: Stream,
    /// The thread whose stream it is, where the handle means another one on each.
    thread: Option<ThreadId>,
    ptr: sys::CUdeviceptr,
    bytes: usize,
    /// Contexts of consumers whose streams are not known, or are not told of: freeing waits for them.
    untracked: Mutex<Vec<Context>>,
    events: EventPools,
    /// Held by whoever copies to or from the memory, until that is done: of our own memory come back there
    /// may be several columns, each with a home of its own.
    turn: Mutex<()>,
}

impl Memory {
    fn new(owner: Owner, stream: &Stream, ptr: sys::CUdeviceptr, bytes: usize) -> Arc<Memory> {
        let events = match &owner {
            Owner::Block(block, _) => block.engine().events.clone(),
            Owner::Returned(_, memory) => memory.events.clone(),
            Owner::Resource(..) | Owner::Foreign { .. } | Owner::Nobody => EventPools::default(),
        };
        Arc::new(Memory {
            owner: Some(owner),
            stream: stream.clone(),
            thread: (stream.kind() == StreamKind::PerThreadDefault)
                .then(|| std::thread::current().id()),
            ptr,
            bytes,
            untracked: Mutex::default(),
            events,
            turn: Mutex::new(()),
        })
    }

    pub(super) fn empty(stream: &Stream) -> Arc<Memory> {
        Memory::new(Owner::Nobody, stream, 0, 0)
    }

    /// The first `bytes` of a block.
    pub(super) fn block(
        block: Block,
        bytes: usize,
        stream: &Stream,
    ) -> Result<Arc<Memory>, (Block, DriverError)> {
        let stream_id = match stream.id() {
            Ok(id) => id,
            Err(error) => return Err((block, error)),
        };
        let ptr = block.ptr();
        let identity = identity_of(&block, stream_id);
        Ok(Memory::new(
            Owner::Block(block, identity),
            stream,
            ptr,
            bytes,
        ))
    }

    /// The first `bytes` of a resource's block.
    pub(super) fn resource(
        block: SharedBlock,
        identity: BlockId,
        bytes: usize,
        stream: &Stream,
    ) -> Arc<Memory> {
        let owner = Owner::Resource(block, identity);
        Memory::new(owner, stream, identity.ptr(), bytes)
    }

    /// Where events for the order of the memory come from.
    pub(super) fn events(&self) -> &EventPools {
        &self.events
    }

    /// Whether the calling thread can name the memory's stream.
    fn at_home(&self) -> bool {
        self.thread
            .is_none_or(|thread| thread == std::thread::current().id())
    }

    /// Gets ready for a copy on the memory's stream that is waited for: nobody else copies while the result
    /// lives, through whichever column of the memory.
    pub(super) fn begin(&self) -> Result<MutexGuard<'_, ()>, Error> {
        // Before the lock: a forked child fails here.
        capture::refuse_capture(&self.stream)?;
        if !self.at_home() {
            return Err(Error::Stream(StreamMisuse::WrongThread));
        }
        let mut first = self;
        while let Some(Owner::Returned(_, memory)) = &first.owner {
            first = memory;
        }
        // Not counted as a lock that is held: whoever copies next waits for this copy in any case.
        Ok(first.turn.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Lets an access on the memory's stream come after the uses that its resource has put in order.
    pub(super) fn prepare(&self, access: Access) -> Result<(), Error> {
        match self.ordered() {
            Some((block, id)) => Ok(block.resource().prepare_use(id, &self.stream, access)?),
            None => Ok(()),
        }
    }

    /// Says that the access was given to the memory's stream.
    pub(super) fn finish(&self, access: Access) -> Result<(), Error> {
        match self.ordered() {
            Some((block, id)) => Ok(block.resource().finish_use(id, &self.stream, access)?),
            None => Ok(()),
        }
    }

    /// The block under the memory, if its resource puts accesses in order.
    fn ordered(&self) -> Option<(&SharedBlock, &BlockId)> {
        match self.owner.as_ref()? {
            Owner::Resource(block, identity) => {
                let ordered = block.resource().use_tracking() == UseTracking::Access;
                ordered.then_some((block, identity))
            }
            Owner::Returned(_, memory) => memory.ordered(),
            Owner::Block(..) | Owner::Foreign { .. } | Owner::Nobody => None,
        }
    }

    /// Gets a stream ready for memory that is about to be imported: orders it after the producer, and
    /// after the home of our own memory come back (`returned`), whose owner is told of the new user.
    pub(super) fn expect(
        returned: Option<&Memory>,
        described: &Described,
        stream: &Stream,
        producer: &Producer,
    ) -> Result<(), Error> {
        // An array does not say of what type its elements are, and whoever imports it may be wrong.
        if let Some(memory) = returned
            && !memory.contains(described.ptr, described.bytes)
        {
            return Err(ImportFault::Beyond {
                address: described.ptr,
                bytes: described.bytes,
                memory: memory.bytes,
            }
            .into());
        }
        if let Producer::Stream(earlier) = producer {
            order(earlier, stream, &EventPools::default())?;
        }
        match returned {
            // Whatever consumer and producer said of each other: this is ours to see to.
            Some(memory) if memory.bytes > 0 => {
                memory.follow(stream)?;
                memory.record(stream)
            }
            _ => Ok(()),
        }
    }

    /// Whether all of a range is the memory's.
    fn contains(&self, ptr: sys::CUdeviceptr, bytes: usize) -> bool {
        let before = ptr.checked_sub(self.ptr);
        let end = before.and_then(|before| before.checked_add(bytes as u64));
        bytes == 0 || end.is_some_and(|end| end <= self.bytes as u64)
    }

    /// Takes over what was imported, after [`expect`](Self::expect).
    pub(super) fn import(
        source: Foreign,
        returned: Option<Arc<Memory>>,
        ptr: sys::CUdeviceptr,
        bytes: usize,
        stream: &Stream,
        producer: Producer,
    ) -> Arc<Memory> {
        let owner = match returned {
            Some(memory) => Owner::Returned(source, memory),
            None => Owner::Foreign {
                source,
                producer: match producer {
                    Producer::Ordered => None,
                    Producer::Stream(stream) => Some(stream),
                },
                uses: Mutex::default(),
            },
        };
        Memory::new(owner, stream, ptr, bytes)
    }

    pub(super) fn stream(&self) -> &Stream {
        &self.stream
    }

    pub(super) fn ptr(&self) -> sys::CUdeviceptr {
        self.ptr
    }

    /// Where the address stands, for kernels that take it.
    pub(super) fn param(&self) -> *const c_void {
        (&raw const self.ptr).cast()
    }

    /// The block under the memory, if it is ours.
    pub(super) fn id(&self) -> Option<BlockId> {
        match &self.owner {
            Some(Owner::Block(_, id) | Owner::Resource(_, id)) => Some(*id),
            Some(Owner::Returned(_, memory)) => memory.id(),
            Some(Owner::Foreign { .. } | Owner::Nobody) | None => None,
        }
    }

    /// Whether somebody else owns the memory.
    pub(super) fn is_external(&self) -> bool {
        match &self.owner {
            Some(Owner::Returned(_, memory)) => memory.is_external(),
            owner => matches!(owner, Some(Owner::Foreign { .. })),
        }
    }

    pub(super) fn source(&self) -> ColumnSource {
        match &self.owner {
            Some(Owner::Returned(source, _) | Owner::Foreign { source, .. }) => source.format,
            Some(Owner::Nobody | Owner::Block(..) | Owner::Resource(..)) | None => {
                ColumnSource::Owned
            }
        }
    }

    /// Notes that a stream uses the memory until it is freed.
    pub(super) fn record(&self, stream: &Stream) -> Result<(), Error> {
        match &self.owner {
            Some(Owner::Block(block, _)) => Ok(block.record_stream(stream)?),
            // Where no uses are tracked, freeing waits for all of the resource's context.
            Some(Owner::Resource(block, _))
                if block.resource().use_tracking() == UseTracking::None =>
            {
                if is_elsewhere(block, stream.context()) {
                    self.lend_untracked(stream.context());
                }
                Ok(())
            }
            Some(Owner::Resource(block, _)) => Ok(block.record_stream(stream)?),
            Some(Owner::Returned(_, memory)) => memory.record(stream),
            Some(Owner::Foreign { uses, .. }) => {
                capture::refuse_capture(stream)?;
                let id = stream.id()?;
                if id == self.stream.id()? {
                    return Ok(());
                }
                let mut uses = locked(uses);
                for known in uses.iter() {
                    if known.id()? == id {
                        return Ok(());
                    }
                }
                uses.push(stream.clone());
                Ok(())
            }
            Some(Owner::Nobody) | None => Ok(()),
        }
    }

    /// Hands the memory to a consumer: orders its stream after ours, and notes its use.
    pub(super) fn lend(&self, consumer: &Consumer) -> Result<(), Error> {
        if self.bytes == 0 {
            return Ok(());
        }
        match consumer {
            Consumer::Tracked(stream) => {
                self.follow(stream)?;
                self.record(stream)
            }
            Consumer::Untracked(stream) => {
                self.follow(stream)?;
                self.lend_untracked(self.stream.context());
                self.lend_untracked(stream.context());
                Ok(())
            }
            Consumer::Unordered => {
                self.lend_untracked(self.stream.context());
                Ok(())
            }
        }
    }

    /// Lets the memory's stream, as the calling thread can name it, come after everything that was done to
    /// the memory.
    #[cfg(feature = "arrow")]
    pub(super) fn gather(&self) -> Result<(), Error> {
        self.prepare(Access::ReadWrite)?;
        if !self.at_home() {
            // Here the handle means this thread's stream, not the one that was meant.
            wait_until_idle(self.stream.context())?;
        }
        Ok(())
    }

    /// Orders a stream after everything that was done to the memory.
    fn follow(&self, stream: &Stream) -> Result<(), Error> {
        self.prepare(Access::ReadWrite)?;
        if !self.at_home() {
            // Here the handle means this thread's stream, not the one that was meant.
            return Ok(wait_until_idle(self.stream.context())?);
        }
        order(&self.stream, stream, &self.events)
    }

    /// The last release waits for a context.
    fn lend_untracked(&self, context: &Context) {
        let mut contexts = process::lock(&self.untracked);
        if contexts.iter().all(|known| known.id() != context.id()) {
            contexts.push(context.clone());
        }
    }

    /// The block alone, if nobody else has a part in it.
    pub(super) fn into_block(self: Arc<Memory>) -> Result<Block, Arc<Memory>> {
        let whole = matches!(&self.owner, Some(Owner::Block(..)));
        match self.alone(whole)? {
            (Some(Owner::Block(block, _)), _) => Ok(block),
            (owner, memory) => Err(memory.again(owner)),
        }
    }

    /// The resource's block alone, if nobody else has a part in it.
    pub(super) fn into_owned(self: Arc<Memory>) -> Result<SharedBlock, Arc<Memory>> {
        let whole = matches!(&self.owner, Some(Owner::Resource(..)));
        match self.alone(whole)? {
            (Some(Owner::Resource(block, _)), _) => Ok(block),
            (owner, memory) => Err(memory.again(owner)),
        }
    }

    /// Takes the memory apart, if it is what was asked for, and nobody else has a part in it.
    fn alone(self: Arc<Memory>, whole: bool) -> Result<(Option<Owner>, Memory), Arc<Memory>> {
        if !whole || !process::lock(&self.untracked).is_empty() {
            return Err(self);
        }
        let mut memory = Arc::try_unwrap(self)?;
        let told = match &memory.owner {
            Some(owner) => memory.tell_uses(owner).or_else(|_| memory.tell_uses(owner)),
            None => Ok(()),
        };
        if told.is_err() {
            return Err(Arc::new(memory));
        }
        Ok((memory.owner.take(), memory))
    }

    fn again(mut self, owner: Option<Owner>) -> Arc<Memory> {
        self.owner = owner;
        Arc::new(self)
    }

    /// Tells whoever is to free the memory that this stream used it until now. That goes without saying on
    /// the memory's own stream, unless that was retired since: then what it was given later is not covered by
    /// its last marker.
    fn tell_uses(&self, owner: &Owner) -> Result<(), Error> {
        match owner {
            Owner::Block(block, _) if block.stream_retired() => match self.at_home() {
                true => Ok(block.record_stream(&self.stream)?),
                false => Ok(wait_until_idle(self.stream.context())?),
            },
            // A resource that orders accesses, or waits for all of them, sees to it by itself.
            Owner::Resource(block, _) if block.resource().use_tracking() == UseTracking::Reuse => {
                Ok(block.record_stream(&self.stream)?)
            }
            // Where nothing is tracked it waits for the work of its own context alone.
            Owner::Resource(block, _)
                if block.resource().use_tracking() == UseTracking::None
                    && is_elsewhere(block, self.stream.context()) =>
            {
                Ok(wait_until_idle(self.stream.context())?)
            }
            Owner::Returned(_, memory) => memory.record(&self.stream),
            Owner::Block(..) | Owner::Resource(..) | Owner::Foreign { .. } | Owner::Nobody => {
                Ok(())
            }
        }
    }

    /// Whom the allocator has to be told of, or to wait for, before it frees the block.
    fn users(&mut self, block: &Block) -> Vec<User> {
        let untracked = self.untracked.get_mut();
        let contexts = untracked.unwrap_or_else(PoisonError::into_inner);
        let mut users: Vec<User> = contexts.drain(..).map(User::Context).collect();
        if block.stream_retired() {
            users.push(User::of(&self.stream));
        }
        users
    }

    /// Whoever frees the memory of ours that came back sees to what could not be waited for here.
    fn hand_on(&mut self, memory: &Memory) {
        let untracked = self.untracked.get_mut();
        for context in untracked.unwrap_or_else(PoisonError::into_inner) {
            memory.lend_untracked(context);
        }
        if !self.at_home() || memory.record(&self.stream).is_err() {
            memory.lend_untracked(self.stream.context());
        }
    }

    /// Waits until the memory can be freed, or released, as far as that is not in the order of a stream.
    fn let_go(&mut self, owner: &mut Owner) -> Result<(), Error> {
        if self.bytes == 0 {
            return Ok(());
        }
        let untracked = self.untracked.get_mut();
        for context in untracked.unwrap_or_else(PoisonError::into_inner) {
            wait_until_idle(context)?;
        }
        self.tell_uses(owner)?;
        let Owner::Foreign { producer, uses, .. } = owner else {
            return Ok(());
        };
        let uses = uses.get_mut().unwrap_or_else(PoisonError::into_inner);
        self.quiesce(producer.as_ref(), uses)
    }

    /// Whether nothing uses foreign memory any more, by host waits or because its producer's stream
    /// waits in our place.
    fn quiesce(&self, producer: Option<&Stream>, uses: &[Stream]) -> Result<(), Error> {
        for stream in std::iter::once(&self.stream).chain(uses) {
            if stream.kind() == StreamKind::PerThreadDefault {
                // Here the handle means this thread's stream, not the one that was meant.
                wait_until_idle(stream.context())?;
                continue;
            }
            // A producer's stream that is another one on each thread cannot be named any more.
            let named = producer.filter(|p| p.kind() != StreamKind::PerThreadDefault);
            let ordered =
                named.is_some_and(|producer| order(stream, producer, &self.events).is_ok());
            if !ordered {
                wait_until_over(stream)?;
            }
        }
        Ok(())
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let Some(mut owner) = self.owner.take() else {
            return;
        };
        if self.stream.context().driver().is_forked_child() {
            // Neither the driver nor whoever made the memory can be called here.
            std::mem::forget(owner);
            return;
        }
        // A refusal may be over at once, and nobody can try later.
        let result = self.let_go(&mut owner).or_else(|_| self.let_go(&mut owner));
        if let Err(error) = result {
            let owner = match owner {
                // A later call of the allocator tries again.
                Owner::Block(block, _) => {
                    let users = self.users(&block);
                    return block.drop_after(users);
                }
                Owner::Returned(source, memory) => {
                    self.hand_on(&memory);
                    return drop((source, memory));
                }
                other => other,
            };
            log::error!(
                "{} bytes at {:#x} are never freed: their last use cannot be waited for: {error}",
                self.bytes,
                self.ptr
            );
            std::mem::forget(owner);
        }
    }
}
