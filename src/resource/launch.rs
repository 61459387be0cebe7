//! Orders a launch with other uses of the memory that it reads and writes.

use crate::block::{Access, BlockId, BlockState};
use crate::driver::{Stream, process};
use crate::error::{Error, StreamMisuse};

use super::traits::{MemoryResource, UseTracking};

/// Memory that a launch can use. A launch stores identities, not borrows.
pub trait LaunchBuffer {
    /// The block of the memory; none for empty or foreign memory.
    fn launch_id(&self) -> Option<BlockId>;

    /// Whether the memory is foreign: no resource of this crate allocated it.
    fn is_external(&self) -> bool {
        false
    }
}

impl LaunchBuffer for BlockId {
    fn launch_id(&self) -> Option<BlockId> {
        Some(*self)
    }
}

impl LaunchBuffer for super::RawBlock {
    fn launch_id(&self) -> Option<BlockId> {
        Some(self.id())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Recording,
    /// After the preflight; the id that the stream had then.
    Ready(u64),
    Committed,
}

/// Orders one launch with all other uses of its buffers: record what it reads and writes,
/// [`preflight`](Self::preflight), launch, [`commit`](Self::commit).
///
/// ```
/// use cualloc::{Request, resource::{AccessOrdered, Launch, MemoryResource}};
/// # use cualloc::{driver::Stream, sim::{SimConfig, Simulator}, Allocator, Config};
/// # let sim = Simulator::new(SimConfig::default())?;
/// # let context = sim.driver()?.context(0)?;
/// let resource = AccessOrdered::new(Allocator::with_config(&context, Config::new())?);
/// let (a, b) = (Stream::new(&context)?, Stream::new(&context)?);
/// let input = resource.allocate_block(&Request::new(64), &a)?;
/// let output = resource.allocate_block(&Request::new(64), &a)?;
/// let mut launch = Launch::strict(&resource, &b);
/// launch.read(&input)?.write(&output)?;
/// launch.preflight()?;
/// // ... launch on b ...
/// launch.commit()?;
/// resource.deallocate_block(input)?;
/// resource.deallocate_block(output)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[must_use = "a launch that is not committed is not tracked"]
pub struct Launch<R: MemoryResource> {
    resource: R,
    stream: Stream,
    /// Whether buffers whose uses are not tracked are rejected.
    strict: bool,
    phase: Phase,
    /// The blocks, each with its first place in the order of recording.
    blocks: Vec<(BlockId, Access, usize)>,
    /// The first foreign buffer, by its place in the order of recording.
    external: Option<usize>,
    recorded: usize,
}

impl<R: MemoryResource> Launch<R> {
    /// Creates a launch on a stream, with blocks of a resource. Buffers whose uses are not tracked are rejected before
    /// anything is queued.
    pub fn strict(resource: R, on: &Stream) -> Self {
        Launch::new(resource, on, true)
    }

    /// Like [`strict`](Self::strict), but ignores buffers whose uses are not tracked.
    pub fn permissive(resource: R, on: &Stream) -> Self {
        Launch::new(resource, on, false)
    }

    fn new(resource: R, stream: &Stream, strict: bool) -> Self {
        Launch {
            resource,
            stream: stream.clone(),
            strict,
            phase: Phase::Recording,
            blocks: Vec::new(),
            external: None,
            recorded: 0,
        }
    }

    /// Records that the launch reads a buffer.
    ///
    /// # Errors
    /// [`StreamMisuse::LaunchOrder`] after the preflight.
    pub fn read(&mut self, buffer: &impl LaunchBuffer) -> Result<&mut Self, Error> {
        self.record(buffer, Access::Read)
    }

    /// Records that the launch writes a buffer. Fails like [`read`](Self::read).
    pub fn write(&mut self, buffer: &impl LaunchBuffer) -> Result<&mut Self, Error> {
        self.record(buffer, Access::Write)
    }

    /// Records that the launch reads and writes a buffer. Fails like [`read`](Self::read).
    pub fn read_write(&mut self, buffer: &impl LaunchBuffer) -> Result<&mut Self, Error> {
        self.record(buffer, Access::ReadWrite)
    }

    fn record(&mut self, buffer: &impl LaunchBuffer, access: Access) -> Result<&mut Self, Error> {
        if self.phase != Phase::Recording {
            return out_of_order("record a buffer", "the preflight is over");
        }
        let index = self.recorded;
        self.recorded += 1;
        if let Some(block) = buffer.launch_id() {
            match self.blocks.iter_mut().find(|(known, ..)| *known == block) {
                Some((_, known, _)) => *known = known.merge(access),
                None => self.blocks.push((block, access, index)),
            }
        } else if buffer.is_external() && self.strict {
            self.external.get_or_insert(index);
        }
        Ok(self)
    }

    /// Returns the blocks recorded so far, without duplicates, with their accesses.
    pub fn blocks(&self) -> impl Iterator<Item = (BlockId, Access)> + '_ {
        self.blocks
            .iter()
            .map(|(block, access, _)| (*block, *access))
    }

    /// Queues all waits of the launch on its stream. After an error nothing of the launch is recorded, and a second call
    /// only repeats waits that were queued already.
    ///
    /// # Errors
    /// [`Error::Rejected`] in strict mode, before any wait; those of
    /// [`MemoryResource::prepare_use`]; [`StreamMisuse::LaunchOrder`] the second time.
    pub fn preflight(&mut self) -> Result<(), Error> {
        if self.phase != Phase::Recording {
            return out_of_order("run the preflight", "it has already run");
        }
        let (stream, device) = (self.stream.own_id(), self.resource.ordinal());
        let tracking = self.resource.use_tracking();
        // Where only reuse is tracked, a block can be used in order on its own stream alone.
        let in_order = |block: &BlockId| match tracking {
            UseTracking::Access => true,
            UseTracking::Reuse => block.stream_id() == stream,
            UseTracking::None => false,
        };
        if self.strict {
            let untracked = self.blocks.iter().filter(|(block, ..)| !in_order(block));
            let untracked = untracked.map(|(.., index)| (*index, false));
            let external = self.external.map(|index| (index, true));
            if let Some((index, external)) = external.into_iter().chain(untracked).min() {
                return Err(Error::Rejected { index, external });
            }
        }
        for (block, ..) in &self.blocks {
            let (expected, found) = (device, block.ordinal());
            if found != expected {
                return Err(Error::WrongDevice { expected, found });
            }
            if self.resource.state(block) != BlockState::Live {
                return Err(block.gone());
            }
        }
        for (block, access, _) in self.blocks.iter().filter(|(block, ..)| in_order(block)) {
            self.resource.prepare_use(block, &self.stream, *access)?;
        }
        self.phase = Phase::Ready(stream);
        Ok(())
    }

    /// Records the uses, after the launch.
    ///
    /// # Errors
    /// [`StreamMisuse::LaunchOrder`] without a preflight, except for a launch without buffers. The first of
    /// [`MemoryResource::finish_use`], after which every block of the launch counts as used on its stream all the same.
    pub fn commit(mut self) -> Result<(), Error> {
        let Phase::Ready(named) = self.phase else {
            return match self.recorded {
                0 => Ok(()),
                _ => out_of_order("commit the launch", "its preflight has not run"),
            };
        };
        self.phase = Phase::Committed;
        if self.resource.use_tracking() == UseTracking::None {
            return Ok(());
        }
        if self.stream.own_id() != named {
            // On this thread the handle means another stream. Complete work needs no record.
            return Ok(self.stream.context().enter()?.synchronize()?);
        }
        let mut first = Ok(());
        for (block, access, _) in &self.blocks {
            first = first.and(self.resource.finish_use(block, &self.stream, *access));
        }
        first
    }
}

fn out_of_order<T>(asked: &'static str, because: &'static str) -> Result<T, Error> {
    Err(StreamMisuse::LaunchOrder { asked, because }.into())
}

impl<R: MemoryResource> Drop for Launch<R> {
    fn drop(&mut self) {
        if cfg!(debug_assertions)
            && !process::is_unavailable()
            && self.phase != Phase::Committed
            && self.recorded > 0
        {
            log::warn!(
                "a {} launch of {} buffers on stream {:#x} is dropped without a commit",
                if self.strict { "strict" } else { "permissive" },
                self.recorded,
                self.stream.raw() as usize
            );
        }
    }
}
