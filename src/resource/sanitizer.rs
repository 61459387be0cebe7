//! Checks for debugging: poison, and no overlapping blocks.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use crate::allocator::Request;
use crate::driver::{Stream, process};
use crate::environment;
use crate::locks::held::{Locked, Mutex};

use super::block::{Access, RawBlock};
use super::dropped::give_back;
use super::traits::{MemoryResource, UseTracking, must_last};
use super::uses::Point;
use crate::block::BlockId;
use crate::error::{Error, Refused};
use crate::sync::capture;
use crate::sync::event::{EventPools, Pooled};
use crate::sync::order::wait_for_context;

/// What memory is filled with where the environment asks for it.
const POISON: u8 = 0xDD;

/// What a [`Sanitizer`] does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Checks {
    /// The byte that new blocks are filled with.
    poison_allocated: Option<u8>,
    /// The byte that blocks are filled with before they go back.
    poison_freed: Option<u8>,
    /// Whether no two live blocks may overlap.
    overlap: bool,
    /// Whether an overlap is a panic, too.
    panic: bool,
}

impl Checks {
    /// By the environment, of which each variable is read once in the life of the process.
    pub(super) fn from_env() -> Checks {
        static READ: OnceLock<Checks> = OnceLock::new();
        let on =
            |name| environment::text(name).is_some_and(|value| !matches!(value.trim(), "" | "0"));
        *READ.get_or_init(|| Checks {
            poison_allocated: on("CUALLOC_POISON_ALLOC").then_some(POISON),
            poison_freed: on("CUALLOC_POISON_FREE").then_some(POISON),
            overlap: on("CUALLOC_OVERLAP_GUARD"),
            panic: false,
        })
    }

    pub(super) fn is_any(&self) -> bool {
        *self != Checks::default()
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
/// use cualloc::{Request, resource::{MemoryResource, Sanitizer}};
/// # use cualloc::{sim::{SimConfig, Simulator}, Allocator, Config};
/// # let sim = Simulator::new(SimConfig::with_devices(1, 1 << 30))?;
/// # let driver = sim.driver()?;
/// # let context = driver.context(0)?;
/// # let allocator = Allocator::with_config(&context, Config::new())?;
/// # let stream = allocator.create_stream()?;
/// let probe = Sanitizer::from_env(allocator).poison_freed(Some(0xDD));
/// let block = probe.allocate_block(&Request::new(64).tag("x"), &stream)?;
/// let ptr = block.ptr();
/// probe.deallocate_block(block)?;
/// assert_eq!(sim.read_memory(ptr, 64), Some(vec![0xDD; 64]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Sanitizer<R> {
    inner: R,
    config: Checks,
    events: EventPools,
    live: Mutex<BTreeMap<u64, Live>>,
}

#[derive(Debug)]
struct Live {
    id: BlockId,
    size: u64,
    stream: Stream,
    /// Uses on other streams, where the resource below does not put them in order.
    uses: Vec<(u64, Pooled)>,
    /// Streams that use the block until it is freed.
    lasting: Vec<Point>,
}

impl<R: MemoryResource> Sanitizer<R> {
    /// Over another resource, with every check off.
    pub fn new(inner: R) -> Self {
        Sanitizer::with_checks(inner, Checks::default())
    }

    /// Over another resource, with the checks that the environment asks for: `CUALLOC_POISON_ALLOC` and
    /// `CUALLOC_POISON_FREE` (fill with 0xDD) and `CUALLOC_OVERLAP_GUARD`, each on if set to anything but nothing
    /// or 0. Each is read once in the life of the process. The
    /// [process-wide runtimes](super::DeviceRuntime::global) ask for them.
    pub fn from_env(inner: R) -> Self {
        Sanitizer::with_checks(inner, Checks::from_env())
    }

    fn with_checks(inner: R, config: Checks) -> Self {
        Sanitizer {
            inner,
            config,
            events: EventPools::default(),
            live: Mutex::default(),
        }
    }

    /// The byte that new blocks are filled with.
    pub fn poison_allocated(mut self, byte: Option<u8>) -> Self {
        self.config.poison_allocated = byte;
        self
    }

    /// The byte that blocks are filled with before they go back.
    pub fn poison_freed(mut self, byte: Option<u8>) -> Self {
        self.config.poison_freed = byte;
        self
    }

    /// Whether blocks are refused that overlap a live one.
    pub fn check_overlap(mut self, on: bool) -> Self {
        self.config.overlap = on;
        self
    }

    /// Whether an overlap is a panic, instead of only an error.
    pub fn panic(mut self, on: bool) -> Self {
        self.config.panic = on;
        self
    }

    /// The resource below.
    pub fn get_ref(&self) -> &R {
        &self.inner
    }

    /// Gives up the checks.
    pub fn into_inner(self) -> R {
        self.inner
    }

    fn live(&self) -> Locked<'_, BTreeMap<u64, Live>> {
        process::lock(&self.live)
    }

    /// Enters a block, unless it overlaps another one.
    fn enter(&self, block: &RawBlock, stream: &Stream) -> Result<(), Error> {
        let id = block.id();
        let (ptr, size) = (id.ptr(), block.size() as u64);
        let overlap = {
            let mut live = self.live();
            let below = live.range(..ptr + size).next_back();
            let other = below.filter(|(start, other)| *start + other.size > ptr);
            match other {
                Some((start, other)) if self.config.overlap => Some((*start, other.size)),
                _ => {
                    let entry = Live {
                        id,
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

    fn fill(&self, id: &BlockId, byte: u8, stream: &Stream) -> Result<(), Error> {
        let entered = stream.context().enter()?;
        // SAFETY: the block is live, and its stream is alive.
        unsafe { entered.memset_d8(id.ptr(), byte, id.bytes(), stream.raw()) }?;
        Ok(())
    }

    fn poison_new(&self, id: &BlockId, byte: u8, stream: &Stream) -> Result<(), Error> {
        self.fill(id, byte, stream)?;
        match self.inner.use_tracking() {
            // The first write, for uses on other streams.
            UseTracking::Access => self.inner.finish_use(id, stream, Access::Write),
            UseTracking::Reuse => Ok(()),
            // The block may be used on any stream at once.
            UseTracking::None => Ok(stream.synchronize()?),
        }
    }

    fn poison_old(&self, live: &Live, byte: u8) -> Result<(), Error> {
        let (id, stream) = (&live.id, &live.stream);
        let here = stream.id()?;
        // A graph is no place for the fill, and a wait in it for what is not captured spoils it.
        capture::refuse_capture(stream)?;
        if here != id.stream_id() {
            // On this thread the handle means another stream.
            self.wait_for_all(stream)?;
        }
        for point in &live.lasting {
            point.hold_back(stream, here, &self.events)?;
        }
        match self.inner.use_tracking() {
            UseTracking::Access => {
                self.inner.prepare_use(id, stream, Access::Write)?;
                self.fill(id, byte, stream)?;
                self.inner.finish_use(id, stream, Access::Write)
            }
            UseTracking::Reuse => {
                for (_, event) in &live.uses {
                    event.hold_back(stream)?;
                }
                self.fill(id, byte, stream)?;
                // For a stream that was retired, or is not the block's on this thread.
                self.inner.record_use(id, stream)
            }
            UseTracking::None => {
                self.wait_for_all(stream)?;
                self.fill(id, byte, stream)
            }
        }
    }

    /// Waits for whatever may use a block of a stream.
    fn wait_for_all(&self, stream: &Stream) -> Result<(), Error> {
        let context = self.inner.context().unwrap_or(stream.context());
        Ok(wait_for_context(context)?)
    }

    /// The last fill has to come after whatever a stream was given until then.
    fn lasts(&self, id: &BlockId, stream: &Stream) {
        let by = stream.own_id();
        if self.config.poison_freed.is_none() || by == id.stream_id() {
            return;
        }
        let mut live = self.live();
        if let Some(entry) = live.get_mut(&id.ptr())
            && entry.id == *id
            && !entry.lasting.iter().any(|known| known.stream() == by)
        {
            entry.lasting.push(Point::late(stream, by));
        }
    }

    /// A use went through: the last fill has to come after it.
    fn used(&self, id: &BlockId, stream: &Stream) -> Result<(), Error> {
        let watched = self.config.poison_freed.is_some();
        let by = stream.id()?;
        if !watched || self.inner.use_tracking() != UseTracking::Reuse || by == id.stream_id() {
            return Ok(());
        }
        let event = self.events.record(stream)?;
        let mut live = self.live();
        let entry = live.get_mut(&id.ptr());
        let Some(entry) = entry.filter(|entry| entry.id == *id) else {
            return Ok(());
        };
        // Two threads may record in either order, so no use is replaced while it is not complete.
        entry.uses.push((by, event));
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
            if let Some(entry) = live.get_mut(&id.ptr())
                && entry.id == *id
            {
                entry.uses.extend(pending);
            }
        }
        Ok(())
    }
}

// SAFETY: passes everything on.
unsafe impl<R: MemoryResource> MemoryResource for Sanitizer<R> {
    fn allocate_block(&self, request: &Request, stream: &Stream) -> Result<RawBlock, Error> {
        let block = self.inner.allocate_block(request, stream)?;
        if !self.config.is_any() {
            return Ok(block);
        }
        self.enter(&block, stream)?;
        if let Some(byte) = self.config.poison_allocated
            && let Err(error) = self.poison_new(&block.id(), byte, stream)
        {
            self.live().remove(&block.ptr());
            give_back(&self.inner, block, "a block leaks");
            return Err(error);
        }
        Ok(block)
    }

    /// As [`MemoryResource::deallocate_block`]; where it fails after the fill was queued, the contents
    /// are gone.
    fn deallocate_block(&self, block: RawBlock) -> Result<(), Refused<RawBlock>> {
        if !self.config.is_any() {
            return self.inner.deallocate_block(block);
        }
        let id = block.id();
        let entry = {
            let mut live = self.live();
            match live.get(&id.ptr()) {
                Some(known) if known.id == id => live.remove(&id.ptr()),
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
            self.live().insert(id.ptr(), entry);
        }
        result
    }

    fn record_use(&self, id: &BlockId, stream: &Stream) -> Result<(), Error> {
        let recorded = self.inner.record_use(id, stream);
        let noted = recorded.and_then(|()| self.used(id, stream));
        if must_last(&noted) {
            // The work was given already.
            self.lasts(id, stream);
        }
        noted
    }

    fn record_stream(&self, id: &BlockId, stream: &Stream) -> Result<(), Error> {
        let recorded = self.inner.record_stream(id, stream);
        if recorded.is_ok() || must_last(&recorded) {
            self.lasts(id, stream);
        }
        recorded
    }

    fn finish_use(&self, id: &BlockId, stream: &Stream, access: Access) -> Result<(), Error> {
        let finished = self.inner.finish_use(id, stream, access);
        let noted = finished.and_then(|()| self.used(id, stream));
        if must_last(&noted) {
            self.lasts(id, stream);
            // The first error is the one to tell of.
            let _ = self.inner.record_stream(id, stream);
        }
        noted
    }

    fn ordinal(&self) -> usize {
        self.inner.ordinal()
    }

    #[inline]
    fn upstream(&self) -> Option<&dyn MemoryResource> {
        Some(&self.inner)
    }
}
