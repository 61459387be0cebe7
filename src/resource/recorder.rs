//! What a launch reads and writes.

use crate::driver::{Stream, StreamKind, process};

use super::block::{Access, BlockIdentity, BlockState};
use super::traits::{MemoryResource, Tracking};
use crate::error::{Error, StreamMisuse};

/// How a launch recorder takes buffers that nobody tracks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RecordMode {
    /// They are refused, with a reason, before anything is queued.
    Strict,
    /// They are passed over.
    Permissive,
}

/// What a buffer is to a recorder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Buffer {
    /// A block of a resource.
    Block(BlockIdentity),
    /// No bytes: there is nothing to track.
    Empty,
    /// Memory of ours that belongs to no resource.
    Untracked,
    /// Memory that somebody else owns.
    External,
}

/// Something that a launch can use: a block, a slice, a column.
pub trait Recordable {
    /// What it is; identities are kept, not borrows.
    fn buffer(&self) -> Buffer;
}

impl Recordable for Buffer {
    fn buffer(&self) -> Buffer {
        *self
    }
}

impl Recordable for BlockIdentity {
    fn buffer(&self) -> Buffer {
        Buffer::Block(*self)
    }
}

impl Recordable for super::ResourceBlock {
    fn buffer(&self) -> Buffer {
        Buffer::Block(self.identity())
    }
}

impl<R: MemoryResource> Recordable for super::OwnedBlock<R> {
    fn buffer(&self) -> Buffer {
        self.identity().map_or(Buffer::Untracked, Buffer::Block)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Recording,
    Ready,
    Committed,
}

/// Puts one launch in order with all other uses of its buffers: record what it reads and writes,
/// [`preflight`](Self::preflight), launch, [`commit`](Self::commit).
///
/// ```
/// use cualloc::resource::{AsyncResource, LaunchRecorder, MemoryResource, RecordMode};
/// # use cualloc::{driver::{Context, Stream}, sim::{SimConfig, Simulator}, Allocator, Config};
/// # let sim = Simulator::new(SimConfig::with_devices(1, 1 << 30))?;
/// # let driver = sim.driver()?;
/// # let context = driver.context(0)?;
/// # let allocator = Allocator::with_config(&context, Config::new())?;
/// let resource = AsyncResource::new(allocator);
/// let (a, b) = (Stream::new(&context)?, Stream::new(&context)?);
/// let (input, output) =
///     (resource.allocate_block(64, &a, "in".into())?, resource.allocate_block(64, &a, "out".into())?);
/// let mut recorder = LaunchRecorder::new(&resource, &b, RecordMode::Strict);
/// recorder.read(&input)?.write(&output)?;
/// recorder.preflight()?;
/// // ... launch on b ...
/// recorder.commit()?;
/// resource.deallocate_block(input)?;
/// resource.deallocate_block(output)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[must_use = "a launch that is not committed is not tracked"]
pub struct LaunchRecorder<R: MemoryResource> {
    resource: R,
    stream: Stream,
    /// The stream's id at the preflight.
    named: u64,
    mode: RecordMode,
    phase: Phase,
    blocks: Vec<Entry>,
    /// Buffers that are not blocks, by their place in the order of recording; whether somebody else owns them.
    others: Vec<(usize, bool)>,
    recorded: usize,
}

#[derive(Debug)]
struct Entry {
    block: BlockIdentity,
    access: Access,
    /// Its place in the order of recording.
    index: usize,
}

impl<R: MemoryResource> LaunchRecorder<R> {
    /// For one launch on a stream, with blocks of a resource (or a handle to it).
    pub fn new(resource: R, stream: &Stream, mode: RecordMode) -> Self {
        LaunchRecorder {
            resource,
            stream: stream.clone(),
            named: 0,
            mode,
            phase: Phase::Recording,
            blocks: Vec::new(),
            others: Vec::new(),
            recorded: 0,
        }
    }

    /// The launch reads a buffer.
    ///
    /// # Errors
    /// [`StreamMisuse::LaunchOrder`] after the preflight.
    pub fn read(&mut self, buffer: &impl Recordable) -> Result<&mut Self, Error> {
        self.record(buffer, Access::Read)
    }

    /// The launch writes a buffer.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn write(&mut self, buffer: &impl Recordable) -> Result<&mut Self, Error> {
        self.record(buffer, Access::Write)
    }

    /// The launch reads and writes a buffer.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn read_write(&mut self, buffer: &impl Recordable) -> Result<&mut Self, Error> {
        self.record(buffer, Access::ReadWrite)
    }

    /// The launch uses a buffer.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn record(&mut self, buffer: &impl Recordable, access: Access) -> Result<&mut Self, Error> {
        if self.phase != Phase::Recording {
            return Err(StreamMisuse::LaunchOrder {
                asked: "recording a buffer",
                because: "the preflight is over",
            }
            .into());
        }
        let index = self.recorded;
        self.recorded += 1;
        match buffer.buffer() {
            Buffer::Empty => {}
            Buffer::External => self.others.push((index, true)),
            Buffer::Untracked => self.others.push((index, false)),
            Buffer::Block(identity) => {
                let same = |other: &BlockIdentity| {
                    (other.key, other.ptr, other.device)
                        == (identity.key, identity.ptr, identity.device)
                };
                match self.blocks.iter_mut().find(|entry| same(&entry.block)) {
                    Some(known) => known.access = known.access.merge(access),
                    None => self.blocks.push(Entry {
                        block: identity,
                        access,
                        index,
                    }),
                }
            }
        }
        Ok(self)
    }

    /// The blocks recorded so far, each once, with what is done to it.
    pub fn blocks(&self) -> impl Iterator<Item = (BlockIdentity, Access)> + '_ {
        self.blocks.iter().map(|entry| (entry.block, entry.access))
    }

    /// Queues all waits of the launch on its stream. After an error nothing of the launch is
    /// recorded, and it may be called again: waits that were queued already are only repeated.
    ///
    /// # Errors
    /// [`Error::Rejected`] in strict mode, before any wait; those of
    /// [`MemoryResource::prepare_use`]; [`StreamMisuse::LaunchOrder`] the second time.
    pub fn preflight(&mut self) -> Result<(), Error> {
        if self.phase != Phase::Recording {
            return Err(StreamMisuse::LaunchOrder {
                asked: "a preflight",
                because: "it is over",
            }
            .into());
        }
        let (stream, device) = (self.stream.id()?, self.resource.device());
        let tracking = self.resource.tracking();
        // Where only reuse is tracked, a stream is in order with itself and no other.
        let in_order = |block: &BlockIdentity| match tracking {
            Tracking::Access => true,
            Tracking::Reuse => block.stream == stream,
            Tracking::None => false,
        };
        if self.mode == RecordMode::Strict {
            let untracked = self.blocks.iter().filter(|entry| !in_order(&entry.block));
            let untracked = untracked.map(|entry| (entry.index, false));
            let others = self.others.iter().copied();
            if let Some((index, external)) = others.chain(untracked).min_by_key(|(index, _)| *index)
            {
                return Err(Error::Rejected { index, external });
            }
        }
        for Entry { block, .. } in &self.blocks {
            if block.device != device {
                return Err(Error::WrongDevice {
                    expected: device,
                    found: block.device,
                });
            }
            if self.resource.state(block) != BlockState::Live {
                return Err(block.gone());
            }
        }
        for entry in self.blocks.iter().filter(|entry| in_order(&entry.block)) {
            self.resource
                .prepare_use(&entry.block, &self.stream, entry.access)?;
        }
        self.phase = Phase::Ready;
        self.named = stream;
        Ok(())
    }

    /// Records the uses, after the launch.
    ///
    /// # Errors
    /// [`StreamMisuse::LaunchOrder`] without a preflight, except for a recorder without
    /// buffers. The first of [`MemoryResource::finish_use`], after which every block of the launch
    /// counts as used on its stream all the same.
    pub fn commit(mut self) -> Result<(), Error> {
        if self.phase != Phase::Ready && self.recorded > 0 {
            return Err(StreamMisuse::LaunchOrder {
                asked: "a commit",
                because: "there was no preflight",
            }
            .into());
        }
        self.phase = Phase::Committed;
        if self.resource.tracking() == Tracking::None {
            return Ok(());
        }
        if self.stream.kind() == StreamKind::PerThreadDefault && self.stream.id()? != self.named {
            // On this thread the handle means another stream. What is complete needs no record.
            return Ok(self.stream.context().enter()?.synchronize()?);
        }
        let mut first = Ok(());
        for entry in &self.blocks {
            let finished = self
                .resource
                .finish_use(&entry.block, &self.stream, entry.access);
            first = first.and(finished);
        }
        first
    }
}

impl<R: MemoryResource> Drop for LaunchRecorder<R> {
    fn drop(&mut self) {
        if cfg!(debug_assertions)
            && !process::is_gone()
            && self.phase != Phase::Committed
            && self.recorded > 0
        {
            log::warn!(
                "a launch recorder of {} buffers on stream {:?} ({:?}) goes without a commit",
                self.recorded,
                self.stream.raw(),
                self.mode
            );
        }
    }
}
