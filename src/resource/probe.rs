//! Probes for debugging: poison, and a guard against overlapping blocks.

use std::collections::BTreeMap;
use std::sync::{Mutex, OnceLock};

use crate::driver::{Context, Stream, process};
use crate::locks::held::Locked;

use super::block::{Access, BlockIdentity, ResourceBlock, Tag};
use super::owned::give_back;
use super::traits::{MemoryResource, Tracking, must_last};
use super::uses::Point;
use crate::error::{Error, Refused};
use crate::sync::capture;
use crate::sync::event::{EventPools, Pooled};

/// What probes that the environment turns on fill memory with.
const POISON: u8 = 0xDD;

/// What a [`Probe`] does. Everything is off by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ProbeConfig {
    /// The byte that new blocks are filled with.
    pub poison_allocated: Option<u8>,
    /// The byte that blocks are filled with before they go back.
    pub poison_freed: Option<u8>,
    /// Check that no two live blocks overlap.
    pub overlap: bool,
    /// Panic on an overlap, instead of only reporting it.
    pub panic: bool,
}

impl ProbeConfig {
    /// By the environment: `CUALLOC_POISON_ALLOC` and `CUALLOC_POISON_FREE` (fill with 0xDD) and
    /// `CUALLOC_OVERLAP_GUARD`, each on if set to anything but nothing or 0. Each is read once in the life
    /// of the process. [`Runtime::on`](super::Runtime::on) asks for them.
    pub fn from_env() -> ProbeConfig {
        static READ: OnceLock<ProbeConfig> = OnceLock::new();
        *READ.get_or_init(|| Self::from_settings(|name| std::env::var(name).ok()))
    }

    /// By settings that a function gives for the names of [`from_env`](Self::from_env).
    pub fn from_settings(get: impl Fn(&str) -> Option<String>) -> ProbeConfig {
        let on = |name| get(name).is_some_and(|value| !matches!(value.trim(), "" | "0"));
        ProbeConfig {
            poison_allocated: on("CUALLOC_POISON_ALLOC").then_some(POISON),
            poison_freed: on("CUALLOC_POISON_FREE").then_some(POISON),
            overlap: on("CUALLOC_OVERLAP_GUARD"),
            panic: false,
        }
    }

    pub(super) fn is_on(&self) -> bool {
        *self != ProbeConfig::default()
    }
}

/// Finds errors of a program, or of a resource: fills memory with a pattern when it comes and when it
/// goes, and reports blocks that overlap.
///
/// Fills are queued on the block's stream: the first before the block is handed out, the last after
/// all recorded uses. A block whose deallocation fails after the last fill has lost its contents. While
/// one of its streams is being captured a block that is to be filled is not taken back. With everything
/// off it only passes through.
///
/// ```
/// use cualloc::resource::{MemoryResource, Probe, ProbeConfig};
/// # use cualloc::{driver::Context, sim::{SimConfig, Simulator}, Allocator, Config};
/// # let sim = Simulator::new(SimConfig::with_devices(1, 1 << 30))?;
/// # let driver = sim.driver()?;
/// # let context = driver.context(0)?;
/// # let allocator = Allocator::with_config(&context, Config::new())?;
/// # let stream = allocator.create_stream()?;
/// let mut config = ProbeConfig::from_env();
/// config.poison_freed = Some(0xDD);
/// let probe = Probe::new(allocator, config);
/// let block = probe.allocate_block(64, &stream, "x".into())?;
/// let ptr = block.ptr();
/// probe.deallocate_block(block)?;
/// assert_eq!(sim.read_memory(ptr, 64), Some(vec![0xDD; 64]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Probe<R> {
    inner: R,
    config: ProbeConfig,
    events: EventPools,
    live: Mutex<BTreeMap<u64, Live>>,
}

#[derive(Debug)]
struct Live {
    identity: BlockIdentity,
    size: u64,
    stream: Stream,
    /// Uses on other streams, where the resource below does not put them in order.
    uses: Vec<(u64, Pooled)>,
    /// Streams that use the block until it is freed.
    lasting: Vec<Point>,
}

impl<R: MemoryResource> Probe<R> {
    /// Over another resource.
    pub fn new(inner: R, config: ProbeConfig) -> Self {
        Probe {
            inner,
            config,
            events: EventPools::default(),
            live: Mutex::default(),
        }
    }

    /// The resource below.
    pub fn inner(&self) -> &R {
        &self.inner
    }

    fn live(&self) -> Locked<'_, BTreeMap<u64, Live>> {
        process::lock(&self.live)
    }

    /// Enters a block, unless it overlaps another one.
    fn enter(&self, block: &ResourceBlock, stream: &Stream) -> Result<(), Error> {
        let identity = block.identity();
        let (ptr, size) = (identity.ptr, block.size().max(identity.bytes as u64));
        let overlap = {
            let mut live = self.live();
            let below = live.range(..ptr + size).next_back();
            let other = below.filter(|(start, other)| *start + other.size > ptr);
            match other {
                Some((start, other)) if self.config.overlap => Some((*start, other.size)),
                _ => {
                    let entry = Live {
                        identity,
                        size,
                        stream: stream.clone(),
                        uses: Vec::new(),
                        lasting: Vec::new(),
                    };
                    live.insert(ptr, entry);
                    None
                }
            }
        };
        let Some((old_ptr, old_bytes)) = overlap else {
            return Ok(());
        };
        let error = Error::Overlap {
            new: (ptr, size),
            old: (old_ptr, old_bytes),
        };
        log::error!("{error}; the new block leaks");
        assert!(!self.config.panic, "{error}");
        Err(error)
    }

    fn fill(&self, block: &BlockIdentity, byte: u8, stream: &Stream) -> Result<(), Error> {
        let entered = self.inner.context().enter()?;
        // SAFETY: the block is live, and its stream is alive.
        unsafe { entered.memset_d8(block.ptr, byte, block.bytes, stream.raw()) }?;
        Ok(())
    }

    fn poison_new(&self, block: &BlockIdentity, byte: u8, stream: &Stream) -> Result<(), Error> {
        self.fill(block, byte, stream)?;
        match self.inner.tracking() {
            // The first write, for uses on other streams.
            Tracking::Access => self.inner.finish_use(block, stream, Access::Write),
            Tracking::Reuse => Ok(()),
            // The block may be used on any stream at once.
            Tracking::None => Ok(stream.synchronize()?),
        }
    }

    fn poison_old(&self, live: &Live, byte: u8) -> Result<(), Error> {
        let (block, stream) = (&live.identity, &live.stream);
        let id = stream.id()?;
        // A graph is no place for the fill, and a wait in it for what is not captured spoils it.
        capture::refuse_capture(stream)?;
        if id != block.stream {
            // On this thread the handle means another stream.
            self.inner.context().enter()?.synchronize()?;
        }
        for point in &live.lasting {
            point.hold_back(stream, id, &self.events)?;
        }
        match self.inner.tracking() {
            Tracking::Access => {
                self.inner.prepare_use(block, stream, Access::Write)?;
                self.fill(block, byte, stream)?;
                self.inner.finish_use(block, stream, Access::Write)
            }
            Tracking::Reuse => {
                for (_, event) in &live.uses {
                    event.hold_back(stream)?;
                }
                self.fill(block, byte, stream)?;
                // For a stream that was retired, or is not the block's on this thread.
                self.inner.record_use(block, stream)
            }
            Tracking::None => {
                self.inner.context().enter()?.synchronize()?;
                self.fill(block, byte, stream)
            }
        }
    }

    /// A use went through: the last fill has to come after it.
    fn used(&self, block: &BlockIdentity, stream: &Stream) -> Result<(), Error> {
        let watched = self.config.poison_freed.is_some();
        let id = stream.id()?;
        if !watched || self.inner.tracking() != Tracking::Reuse || id == block.stream {
            return Ok(());
        }
        let event = self.events.record(stream)?;
        let mut live = self.live();
        let entry = live.get_mut(&block.ptr);
        let Some(entry) = entry.filter(|entry| entry.identity.key == block.key) else {
            return Ok(());
        };
        // Two threads may record in either order, so no use is replaced while it is not complete.
        entry.uses.push((id, event));
        let many = entry.uses.len() > 16;
        let old = if many {
            std::mem::take(&mut entry.uses)
        } else {
            Vec::new()
        };
        drop(live);
        if many {
            let pending: Vec<_> = old
                .into_iter()
                .filter(|(_, event)| !matches!(event.is_complete(), Ok(true)))
                .collect();
            let mut live = self.live();
            if let Some(entry) = live.get_mut(&block.ptr)
                && entry.identity.key == block.key
            {
                entry.uses.extend(pending);
            }
        }
        Ok(())
    }
}

// SAFETY: passes everything on.
unsafe impl<R: MemoryResource> MemoryResource for Probe<R> {
    fn allocate_block_aligned(
        &self,
        bytes: usize,
        alignment: usize,
        stream: &Stream,
        tag: Tag,
    ) -> Result<ResourceBlock, Error> {
        let block = self
            .inner
            .allocate_block_aligned(bytes, alignment, stream, tag)?;
        if !self.config.is_on() {
            return Ok(block);
        }
        self.enter(&block, stream)?;
        if let Some(byte) = self.config.poison_allocated
            && let Err(error) = self.poison_new(&block.identity(), byte, stream)
        {
            self.live().remove(&block.ptr());
            give_back(&self.inner, block, "a block leaks");
            return Err(error);
        }
        Ok(block)
    }

    /// As [`MemoryResource::deallocate_block`]; where it fails after the fill was queued, the contents
    /// are gone.
    fn deallocate_block(&self, block: ResourceBlock) -> Result<(), Refused<ResourceBlock>> {
        if !self.config.is_on() {
            return self.inner.deallocate_block(block);
        }
        let identity = block.identity();
        let entry = {
            let mut live = self.live();
            match live.get(&identity.ptr) {
                Some(known) if known.identity.key == identity.key => live.remove(&identity.ptr),
                _ => None,
            }
        };
        let Some(entry) = entry else {
            return self.inner.deallocate_block(block);
        };
        let poisoned = match self.config.poison_freed {
            Some(byte) => self.poison_old(&entry, byte),
            None => Ok(()),
        };
        let result = match poisoned {
            Ok(()) => self.inner.deallocate_block(block),
            Err(error) => Err(Refused::new(block, error)),
        };
        if result.is_err() {
            self.live().insert(identity.ptr, entry);
        }
        result
    }

    fn record_use(&self, block: &BlockIdentity, stream: &Stream) -> Result<(), Error> {
        self.inner.record_use(block, stream)?;
        self.used(block, stream)
    }

    fn record_stream(&self, block: &BlockIdentity, stream: &Stream) -> Result<(), Error> {
        self.inner.record_stream(block, stream)?;
        let id = stream.id()?;
        if self.config.poison_freed.is_none() || id == block.stream {
            return Ok(());
        }
        let mut live = self.live();
        if let Some(entry) = live.get_mut(&block.ptr)
            && entry.identity.key == block.key
            && !entry.lasting.iter().any(|known| known.stream() == id)
        {
            entry.lasting.push(Point::late(stream, id));
        }
        Ok(())
    }

    fn finish_use(
        &self,
        block: &BlockIdentity,
        stream: &Stream,
        access: Access,
    ) -> Result<(), Error> {
        let finished = self.inner.finish_use(block, stream, access);
        let noted = finished.and_then(|()| self.used(block, stream));
        if must_last(&noted) {
            // The first error is the one to tell of.
            let _ = self.record_stream(block, stream);
        }
        noted
    }

    fn context(&self) -> &Context {
        self.inner.context()
    }

    #[inline]
    fn upstream(&self) -> Option<&dyn MemoryResource> {
        Some(&self.inner)
    }
}
