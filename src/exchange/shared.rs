//! Memory that a tensor shares with its exports, and its release.

use std::sync::Arc;

use crate::block::BlockId;
use crate::buffer::{Foreign, HostBlock, Memory, Owner};
use crate::driver::kept_stream::KeptStream;
use crate::driver::sys::CUresult;
use crate::driver::{Context, DriverError, Stream, StreamKind, process, sys};
use crate::error::{Error, ImportFault, StreamMisuse};
use crate::resource::Access;
use crate::sync::capture;
use crate::sync::order::wait_until_idle;

use super::layout::Described;
use super::peer::{Kind, Peer, order, wait_until_over};
use crate::locks::held::Mutex;

pub(super) type Kept = Box<dyn Send + Sync>;

enum Holder {
    /// Device memory, our own or imported: [`Memory`] orders all operations on it.
    Device(Memory),
    /// Page-locked memory of this crate that none of its streams uses, and the foreign streams that use it until it is
    /// freed.
    Host(HostBlock, Mutex<Vec<KeptStream>>),
    /// No memory at all.
    Kept(#[expect(dead_code, reason = "kept for its drop")] Kept),
}

/// Memory with the stream in whose order it is used. It is shared by a tensor, its exports, and the tensors imported
/// from these in this process; the last one frees it.
pub(super) struct Shared {
    holder: Option<Holder>,
    stream: Stream,
    start: sys::CUdeviceptr,
    bytes: usize,
    external: bool,
    host: bool,
    /// Contexts of users whose streams are unknown: the release waits for all their work.
    untracked: Mutex<Vec<Context>>,
}

/// Imported memory. Dropping it returns it to the producer after all work of the home, which waits for every other use.
struct Import {
    kept: Option<Kept>,
    home: KeptStream,
    /// The home's id; for a per-thread default stream, that of the importing thread.
    home_id: u64,
    producer: Option<KeptStream>,
}

impl Import {
    /// The producer's stream, which waits for the home; otherwise the host does.
    fn order_home(&self) -> Result<(), Error> {
        self.home.with(|home| match home {
            Some(home) if self.producer_waits_for(home) => Ok(()),
            Some(home) => wait_until_over(home, self.home_id),
            None => Ok(wait_until_idle(self.home.stream().context())?),
        })
    }

    /// Makes the producer's stream wait for the home if both handles are valid here. Returns whether it does.
    fn producer_waits_for(&self, home: &Stream) -> bool {
        // The handle of a per-thread default stream may mean another stream by now.
        let fixed = |stream: &&Stream| stream.kind() != StreamKind::PerThreadDefault;
        let Some(producer) = self.producer.as_ref().filter(|_| fixed(&home)) else {
            return false;
        };
        producer.with(|producer| {
            let producer = producer.filter(fixed);
            producer.is_some_and(|producer| order(home, producer).is_ok())
        })
    }
}

impl Drop for Import {
    fn drop(&mut self) {
        let kept = self.kept.take();
        // A failure may be transient, and there is no later chance to retry.
        match self.order_home().or_else(|_| self.order_home()) {
            Ok(()) => drop(kept),
            Err(error) => {
                log::error!("leaking imported memory: {error}");
                std::mem::forget(kept);
            }
        }
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
            untracked: Mutex::default(),
        }
    }

    /// Memory of no bytes.
    pub(super) fn empty(stream: &Stream) -> Arc<Shared> {
        Arc::new(Shared::new(None, stream, 0, 0))
    }

    /// Creates the memory of the first `bytes` of a buffer.
    pub(super) fn of_memory(memory: Memory, bytes: usize) -> Arc<Shared> {
        let (stream, start) = (memory.stream().clone(), memory.ptr());
        let external = matches!(memory.owner(), Owner::Foreign(_));
        let holder = Some(Holder::Device(memory.shared(true)));
        let mut shared = Shared::new(holder, &stream, start, bytes);
        shared.external = external;
        Arc::new(shared)
    }

    pub(super) fn pinned(
        block: HostBlock,
        start: u64,
        bytes: usize,
        stream: &Stream,
    ) -> Arc<Shared> {
        let holder = Holder::Host(block, Mutex::default());
        let mut shared = Shared::new(Some(holder), stream, start, bytes);
        shared.host = true;
        Arc::new(shared)
    }

    /// Prepares a stream for memory that is about to be imported: orders it after the producer and, for our own memory
    /// that comes back (`returned`), after the memory's home, and reports the new user to its owner.
    pub(super) fn expect(
        returned: Option<&Shared>,
        described: &Described,
        stream: &Stream,
        peer: &Peer,
    ) -> Result<(), Error> {
        // An array does not specify the type of its elements, so the importer may be wrong about it.
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
            // This order is our responsibility, whatever the two sides have agreed on.
            Some(shared) if shared.bytes > 0 => {
                shared.follow(stream)?;
                shared.record(stream)
            }
            _ => Ok(()),
        }
    }

    /// Takes over the imported memory, after [`expect`](Self::expect).
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
                home: KeptStream::new(stream),
                home_id: stream_id,
                producer: match peer.0 {
                    Kind::On(stream) => Some(KeptStream::new(&stream)),
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

    /// Whether a whole range belongs to the memory.
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

    /// Returns the memory, if it is device memory.
    pub(super) fn memory(&self) -> Option<&Memory> {
        match &self.holder {
            Some(Holder::Device(memory)) => Some(memory),
            _ => None,
        }
    }

    /// Returns the block; none for foreign memory.
    pub(super) fn id(&self) -> Option<BlockId> {
        let memory = self.memory()?;
        memory.owner().identity(memory.stream_id())
    }

    pub(super) fn record(&self, stream: &Stream) -> Result<(), Error> {
        let uses = match &self.holder {
            _ if self.bytes == 0 => return Ok(()),
            Some(Holder::Device(memory)) => return memory.record(stream, false),
            Some(Holder::Host(_, uses)) => uses,
            Some(Holder::Kept(_)) | None => return Ok(()),
        };
        capture::refuse_capture(stream)?;
        let id = stream.id()?;
        if stream.kind() == StreamKind::PerThreadDefault {
            // Another thread has no handle for the stream.
            self.lend_untracked(stream.context());
            return Ok(());
        }
        let mut uses = process::lock(uses);
        if uses.iter().all(|known| known.stream().own_id() != id) {
            uses.push(KeptStream::new(stream));
        }
        Ok(())
    }

    /// Passes the memory to a consumer: orders its stream after ours, and records its use.
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

    /// Orders the memory's stream, by its handle on the calling thread, after all operations on the memory.
    #[cfg(feature = "arrow")]
    pub(super) fn gather(&self) -> Result<(), Error> {
        self.follow(&self.stream)
    }

    /// Orders a stream after all operations on the memory.
    fn follow(&self, stream: &Stream) -> Result<(), Error> {
        let Some(memory) = self.memory() else {
            return capture::refuse_capture(stream);
        };
        match memory.prepare_use(stream, Access::ReadWrite) {
            // On this thread the handle means this thread's stream, not the intended one.
            Err(Error::Stream(StreamMisuse::WrongThread)) => {
                Ok(wait_until_idle(self.stream.context())?)
            }
            result => result,
        }
    }

    /// Orders all later operations on the memory after all work submitted to a stream so far.
    pub(super) fn wait_for(&self, stream: &Stream) -> Result<(), Error> {
        match self.memory() {
            Some(memory) => memory.finish_use(stream, Access::ReadWrite),
            None => Ok(()),
        }
    }

    /// Makes the release wait for a context.
    pub(super) fn lend_untracked(&self, context: &Context) {
        let mut contexts = process::lock(&self.untracked);
        if contexts.iter().all(|known| known.id() != context.id()) {
            contexts.push(context.clone());
        }
    }

    /// Returns the memory itself, if it is our own and not shared.
    pub(super) fn into_memory(self: Arc<Shared>) -> Result<Memory, Arc<Shared>> {
        let ours = !self.external && self.memory().is_some();
        if !ours || !process::lock(&self.untracked).is_empty() {
            return Err(self);
        }
        let mut shared = Arc::try_unwrap(self)?;
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
        if process::is_unavailable() {
            // Neither the driver nor the producer can be called here.
            return std::mem::forget(holder);
        }
        let mut contexts = std::mem::take(self.untracked.get_mut());
        match holder {
            Some(Holder::Device(memory)) => memory.end_after(contexts),
            Some(Holder::Host(mut block, uses)) => {
                let uses = uses.into_inner();
                let events = block.events().clone();
                for kept in &uses {
                    kept.with(|user| {
                        let Some(user) = user else {
                            contexts.push(kept.stream().context().clone());
                            return;
                        };
                        // If the use cannot be marked, it is waited for; otherwise the block is never used again.
                        match capture::is_capturing(user) {
                            Ok(false) => drop(block.used_by(user, &events)),
                            Ok(true) => block.lose(DriverError::new(
                                "cuEventRecord",
                                CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                            )),
                            Err(error) => block.lose(error),
                        }
                    });
                }
                let wait = || contexts.iter().try_for_each(wait_until_idle);
                // A failure may be transient, and there is no later chance to retry.
                if let Err(error) = wait().or_else(|_| wait()) {
                    block.lose(error);
                }
            }
            Some(Holder::Kept(_)) | None => {}
        }
    }
}
