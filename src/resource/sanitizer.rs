//! The debugging adaptor: live blocks, overlaps, and poison.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use crate::allocator::Request;
use crate::block::{Access, BlockId, Tag};
use crate::driver::{Stream, process};
use crate::environment;
use crate::error::{Error, Refused};
use crate::locks::held::{Locked, Mutex};
use crate::sync::capture;
use crate::sync::event::EventPools;
use crate::sync::order::wait_for_context;
use crate::sync::point::{Point, add_user};

use super::block::RawBlock;
use super::dropped::give_back_now;
use super::traits::{MemoryResource, UseTracking, is_unmarked};

/// The byte for checks turned on by the environment.
const POISON: u8 = 0xDD;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Checks {
    poison_allocated: Option<u8>,
    poison_freed: Option<u8>,
    overlap: bool,
}

/// A live block of a [`Sanitizer`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct LiveBlock {
    /// The identity of the block.
    pub id: BlockId,
    /// The label of the request.
    pub tag: Tag,
}

/// Finds errors of a program or a resource: lists live blocks with labels, refuses blocks that overlap, and fills memory
/// with a pattern when it is allocated and when it is freed. It works over any resource; an allocator's own
/// [debug modes](crate::allocator::DebugModes) check more.
///
/// Fills are queued on the block's stream: the first before the block is handed out, the last after all recorded uses. A
/// block whose deallocation fails after the last fill has lost its contents. A block that is to be filled is refused
/// while one of its streams captures.
///
/// ```
/// use cualloc::{Request, resource::{MemoryResource, Sanitizer}};
/// # use cualloc::{sim::{SimConfig, Simulator}, Allocator, Config};
/// # let sim = Simulator::new(SimConfig::default())?;
/// # let allocator = Allocator::with_config(&sim.driver()?.context(0)?, Config::new())?;
/// # let stream = allocator.create_stream()?;
/// let checked = Sanitizer::new(allocator).poison_freed(Some(0xDD));
/// let block = checked.allocate_block(&Request::new(64).tag("cache"), &stream)?;
/// assert_eq!(checked.live()[0].tag.as_str(), "cache");
/// let ptr = block.ptr();
/// checked.deallocate_block(block)?;
/// assert_eq!(sim.read_memory(ptr, 64), Some(vec![0xDD; 64]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Sanitizer<R> {
    inner: R,
    checks: Checks,
    events: EventPools,
    /// Live blocks by address.
    live: Mutex<BTreeMap<u64, Entry>>,
}

#[derive(Debug)]
struct Entry {
    block: LiveBlock,
    size: u64,
    stream: Stream,
    /// Other streams that used the block: the last fill comes after all their work before the deallocation.
    users: Vec<Point>,
}

impl<R: MemoryResource> Sanitizer<R> {
    /// Creates it over another resource, with all checks off.
    pub fn new(inner: R) -> Self {
        Sanitizer {
            inner,
            checks: Checks::default(),
            events: EventPools::default(),
            live: Mutex::default(),
        }
    }

    /// Creates it with the checks that environment variables turn on: `CUALLOC_POISON_ALLOC` and `CUALLOC_POISON_FREE`
    /// (fill with 0xDD) and `CUALLOC_OVERLAP_GUARD`, unless empty or 0. They are read once per process.
    pub fn from_env(inner: R) -> Self {
        static READ: OnceLock<Checks> = OnceLock::new();
        let on =
            |name| environment::text(name).is_some_and(|value| !matches!(value.trim(), "" | "0"));
        let checks = *READ.get_or_init(|| Checks {
            poison_allocated: on("CUALLOC_POISON_ALLOC").then_some(POISON),
            poison_freed: on("CUALLOC_POISON_FREE").then_some(POISON),
            overlap: on("CUALLOC_OVERLAP_GUARD"),
        });
        Sanitizer {
            checks,
            ..Sanitizer::new(inner)
        }
    }

    /// Sets the byte that new blocks are filled with.
    pub fn poison_allocated(mut self, byte: Option<u8>) -> Self {
        self.checks.poison_allocated = byte;
        self
    }

    /// Sets the byte that blocks are filled with before they are freed.
    pub fn poison_freed(mut self, byte: Option<u8>) -> Self {
        self.checks.poison_freed = byte;
        self
    }

    /// Sets whether a block that overlaps a live one is refused.
    pub fn check_overlap(mut self, on: bool) -> Self {
        self.checks.overlap = on;
        self
    }

    pub(super) fn is_off(&self) -> bool {
        self.checks == Checks::default()
    }

    /// The resource below.
    pub fn get_ref(&self) -> &R {
        &self.inner
    }

    /// Removes the adaptor.
    pub fn into_inner(self) -> R {
        self.inner
    }

    /// All live blocks, by address.
    pub fn live(&self) -> Vec<LiveBlock> {
        let entries = self.entries();
        entries.values().map(|entry| entry.block).collect()
    }

    fn entries(&self) -> Locked<'_, BTreeMap<u64, Entry>> {
        process::lock(&self.live)
    }

    /// Adds a block, unless it overlaps a live one.
    fn enter(&self, block: &RawBlock, stream: &Stream) -> Result<(), Error> {
        let (ptr, size) = (block.ptr(), block.size() as u64);
        let entry = Entry {
            block: LiveBlock {
                id: block.id(),
                tag: block.tag(),
            },
            size,
            stream: stream.clone(),
            users: Vec::new(),
        };
        let mut entries = self.entries();
        let below = entries.range(..ptr + size).next_back();
        let below = below.map(|(start, other)| (*start, other.size));
        let Some(old) = below.filter(|(start, size)| self.checks.overlap && start + size > ptr)
        else {
            entries.insert(ptr, entry);
            return Ok(());
        };
        drop(entries);
        let new = (ptr, size);
        let error = Error::Overlap { new, old };
        log::error!("{error}; the new block leaks");
        Err(error)
    }

    fn fill(&self, id: &BlockId, byte: u8, stream: &Stream) -> Result<(), Error> {
        let entered = stream.context().enter()?;
        // SAFETY: the block is live, and its stream is alive.
        Ok(unsafe { entered.memset_d8(id.ptr(), byte, id.bytes(), stream.raw()) }?)
    }

    fn poison_new(&self, id: &BlockId, byte: u8, stream: &Stream) -> Result<(), Error> {
        self.fill(id, byte, stream)?;
        match self.inner.use_tracking() {
            // The first write, for uses on other streams.
            UseTracking::Access => self.inner.finish_use(id, stream, Access::Write),
            UseTracking::Reuse => Ok(()),
            // Other streams may use the block without waiting.
            UseTracking::None => Ok(stream.synchronize()?),
        }
    }

    fn poison_old(&self, entry: &Entry, byte: u8) -> Result<(), Error> {
        let (id, stream) = (&entry.block.id, &entry.stream);
        let here = stream.own_id();
        // The fill must not become part of a graph, and a wait for work outside the capture would invalidate it.
        capture::refuse_capture(stream)?;
        let tracking = self.inner.use_tracking();
        if here != id.stream_id() || tracking == UseTracking::None {
            // On this thread the handle means another stream, or any stream may use the block.
            wait_for_context(self.inner.context().unwrap_or(stream.context()))?;
        }
        for user in &entry.users {
            user.hold_back(stream, here, &self.events)?;
        }
        if tracking == UseTracking::Access {
            self.inner.prepare_use(id, stream, Access::Write)?;
        }
        self.fill(id, byte, stream)?;
        match tracking {
            UseTracking::Access => self.inner.finish_use(id, stream, Access::Write),
            // The stream was retired, or is not the block's own on this thread.
            UseTracking::Reuse => self.inner.record_use(id, stream),
            UseTracking::None => Ok(()),
        }
    }

    /// Adds the user of a recorded use, also of one whose end could not be marked.
    fn used(
        &self,
        id: &BlockId,
        stream: &Stream,
        recorded: Result<(), Error>,
    ) -> Result<(), Error> {
        let matters = self.checks.poison_freed.is_some() && stream.own_id() != id.stream_id();
        if matters && (recorded.is_ok() || is_unmarked(&recorded)) {
            let mut entries = self.entries();
            let entry = entries.get_mut(&id.ptr());
            if let Some(entry) = entry.filter(|entry| entry.block.id == *id) {
                add_user(&mut entry.users, stream);
            }
        }
        recorded
    }
}

// SAFETY: passes everything on.
unsafe impl<R: MemoryResource> MemoryResource for Sanitizer<R> {
    fn allocate_block(&self, request: &Request, stream: &Stream) -> Result<RawBlock, Error> {
        let block = self.inner.allocate_block(request, stream)?;
        self.enter(&block, stream)?;
        if let Some(byte) = self.checks.poison_allocated
            && let Err(error) = self.poison_new(&block.id(), byte, stream)
        {
            self.entries().remove(&block.ptr());
            give_back_now(&self.inner, block, "leaking a block that cannot be filled");
            return Err(error);
        }
        Ok(block)
    }

    fn deallocate_block(&self, block: RawBlock) -> Result<(), Refused<RawBlock>> {
        let id = block.id();
        // Removed before another thread can get the address.
        let removed = {
            let mut entries = self.entries();
            let known = entries.get(&id.ptr());
            let known = known.is_some_and(|known| known.block.id == id);
            known.then(|| entries.remove(&id.ptr())).flatten()
        };
        let Some(entry) = removed else {
            return self.inner.deallocate_block(block);
        };
        let poisoned = match self.checks.poison_freed {
            Some(byte) => self.poison_old(&entry, byte),
            None => Ok(()),
        };
        let result = match poisoned {
            Ok(()) => self.inner.deallocate_block(block),
            Err(error) => Err(Refused::new(block, error)),
        };
        if result.is_err() {
            self.entries().insert(id.ptr(), entry);
        }
        result
    }

    fn record_use(&self, id: &BlockId, stream: &Stream) -> Result<(), Error> {
        self.used(id, stream, self.inner.record_use(id, stream))
    }

    fn record_stream(&self, id: &BlockId, stream: &Stream) -> Result<(), Error> {
        self.used(id, stream, self.inner.record_stream(id, stream))
    }

    fn finish_use(&self, id: &BlockId, stream: &Stream, access: Access) -> Result<(), Error> {
        self.used(id, stream, self.inner.finish_use(id, stream, access))
    }

    fn upstream(&self) -> Option<&dyn MemoryResource> {
        Some(&self.inner)
    }
}
