//! Memory whose reads and writes on several streams are ordered.

use std::collections::HashMap;
use std::sync::Arc;

use crate::allocator::{Allocator, Request, Trimmed};
use crate::driver::{Stream, process};
use crate::locks::held::{Locked, Mutex};

use super::block::RawBlock;
use super::checks::{same_device, same_driver};
use super::dropped::{give_back_now, retry};
use super::meter::Charge;
use super::traits::{MemoryResource, UseTracking};
use super::usage::Usage;
use crate::block::{Access, BlockId, BlockState};
use crate::error::{Error, Refused, StreamMisuse};
use crate::sync::capture;
use crate::sync::event::{EventPools, Pooled};
use crate::sync::order::wait_for_context;
use crate::sync::point::Point;
use crate::sync::uses::Uses;

/// A deallocation queries the driver once per this number of pending ones on a stream.
const QUERY: usize = 32;

/// Memory in the order of streams, with the uses of each block tracked by access.
///
/// An allocation records a ready event on the stream, which counts as the first write.
/// [`prepare_use`](MemoryResource::prepare_use) makes a stream wait for the last write, and before a write also for all
/// reads since; [`finish_use`](MemoryResource::finish_use) records the new use. A deallocation makes the block's own
/// stream wait for all other uses; the bytes are pending until a [`reap`](MemoryResource::reap), or one of every 32
/// later deallocations on the stream, finds that work complete.
///
/// Events are pooled per context. No lock is held during a driver call. A borrowed stream must live until the blocks
/// allocated on it are deallocated.
///
/// ```
/// use cualloc::{Request, resource::{Access, AccessOrdered, MemoryResource}};
/// # use cualloc::{driver::Stream, sim::{SimConfig, Simulator}, Allocator, Config};
/// # let sim = Simulator::new(SimConfig::default())?;
/// # let context = sim.driver()?.context(0)?;
/// let resource = AccessOrdered::new(Allocator::with_config(&context, Config::new())?);
/// let (a, b) = (Stream::new(&context)?, Stream::new(&context)?);
/// let block = resource.allocate_block(&Request::new(4096), &a)?;
/// let id = block.id();
/// resource.prepare_use(&id, &b, Access::Write)?; // b waits for the allocation on a
/// // ... launch on b ...
/// resource.finish_use(&id, &b, Access::Write)?;
/// resource.deallocate_block(block)?; // a waits for b
/// assert_eq!(resource.usage()?.pending, 4096);
/// assert_eq!(resource.reap()?, 4096);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct AccessOrdered<R: MemoryResource = Allocator> {
    inner: R,
    events: EventPools,
    metadata: Mutex<Metadata>,
}

#[derive(Debug, Default)]
struct Metadata {
    /// The figures of live blocks.
    usage: Usage,
    blocks: HashMap<u64, Arc<Entry>>,
    /// Pending deallocations by stream, in numerical order.
    pending: HashMap<u64, Vec<Pending>>,
    /// The number of the last deallocation on any stream.
    numbers: u64,
}

/// A live block.
#[derive(Debug)]
struct Entry {
    id: BlockId,
    stream: Stream,
    /// The number of charges of budgets below this resource.
    charges_below: usize,
    /// The number of resources below this one that also order uses.
    keepers_below: u32,
    uses: Mutex<Uses>,
}

impl Entry {
    fn uses(&self) -> Locked<'_, Uses> {
        // A forked child finds no entry.
        self.uses.lock()
    }

    /// The uses, unless the block is being deallocated.
    fn open_uses(&self) -> Result<Locked<'_, Uses>, Error> {
        let uses = self.uses();
        match uses.closed {
            true => Err(self.id.gone()),
            false => Ok(uses),
        }
    }
}

/// A deallocation that is pending on its stream.
#[derive(Debug)]
struct Pending {
    id: BlockId,
    number: u64,
    /// The marker also covers all deallocations up to this number.
    covers: u64,
    marker: Arc<Pooled>,
    quarantined: bool,
    #[expect(dead_code, reason = "charges end when the bytes leave")]
    charges: Vec<Charge>,
}

fn bytes<'a>(pending: impl IntoIterator<Item = &'a Pending>) -> u64 {
    let pending = pending.into_iter();
    pending.map(|pending| pending.id.bytes() as u64).sum()
}

impl<R: MemoryResource> AccessOrdered<R> {
    /// Creates it over another resource, whose memory must be in the order of streams.
    pub fn new(inner: R) -> AccessOrdered<R> {
        AccessOrdered {
            inner,
            events: EventPools::default(),
            metadata: Mutex::default(),
        }
    }

    /// The resource below.
    pub fn get_ref(&self) -> &R {
        &self.inner
    }

    /// Returns the bytes that are pending on a stream, by the driver's id of it.
    pub fn pending_on(&self, stream: u64) -> u64 {
        let metadata = self.metadata();
        metadata.pending.get(&stream).map_or(0, bytes)
    }

    fn metadata(&self) -> Locked<'_, Metadata> {
        process::lock(&self.metadata)
    }

    fn entry(&self, id: &BlockId) -> Result<Arc<Entry>, Error> {
        match self.metadata().blocks.get(&id.ptr()) {
            Some(entry) if entry.id == *id => Ok(Arc::clone(entry)),
            _ => Err(id.gone()),
        }
    }

    /// Makes the block's stream wait for all other uses, and records a marker; none if everything is complete.
    fn complete_uses(&self, entry: &Entry, points: &[Point]) -> Result<Option<Pooled>, Error> {
        let here = entry.stream.own_id();
        for point in points {
            point.hold_back(&entry.stream, here, &self.events)?;
        }
        if here != entry.id.stream_id() {
            // A per-thread handle means another stream on this thread, so the host waits for the context.
            wait_for_context(entry.stream.context())?;
            return Ok(None);
        }
        if entry.uses().is_any() && self.inner.use_tracking() != UseTracking::None {
            // If the stream was retired below, the waits above are new work on it.
            self.inner.record_use(&entry.id, &entry.stream)?;
        }
        Ok(Some(self.events.record(&entry.stream)?))
    }

    fn retire(&self, entry: &Arc<Entry>, mut block: RawBlock) -> Result<(), Refused<RawBlock>> {
        let id = entry.id;
        let points = match entry.open_uses() {
            Ok(mut uses) => {
                uses.closed = true;
                uses.all()
            }
            Err(gone) => return Err(Refused::new(block, gone)),
        };
        let reopen = |block, error: Error| {
            entry.uses().closed = false;
            Err(Refused::new(block, error))
        };
        let covers = self.metadata().numbers;
        let capture = capture::refuse_capture(&entry.stream);
        let marker = match capture.and_then(|()| self.complete_uses(entry, &points)) {
            Ok(marker) => marker,
            Err(error) => return reopen(block, error),
        };
        // Removed before another thread can get the address.
        self.metadata().blocks.remove(&id.ptr());
        let charges = block.split_charges(entry.charges_below);
        let keepers = block.keepers();
        block.set_keepers(entry.keepers_below);
        if let Err(failure) = self.inner.deallocate_block(block) {
            self.metadata().blocks.insert(id.ptr(), Arc::clone(entry));
            let mut block = *failure.value;
            block.set_keepers(keepers);
            charges.into_iter().for_each(|charge| block.attach(charge));
            return reopen(block, failure.error);
        }
        self.note_deallocation(id, marker, covers, charges);
        Ok(())
    }

    /// Adds a pending deallocation, unless there is no marker to wait for.
    fn note_deallocation(
        &self,
        id: BlockId,
        marker: Option<Pooled>,
        covers: u64,
        charges: Vec<Charge>,
    ) {
        let mut guard = self.metadata();
        let metadata = &mut *guard;
        metadata.usage.sub(id.bytes() as u64);
        let Some(marker) = marker else {
            // Charges end without the lock.
            return drop(guard);
        };
        metadata.numbers += 1;
        let (number, marker) = (metadata.numbers, Arc::new(marker));
        let queue = metadata.pending.entry(id.stream_id()).or_default();
        queue.push(Pending {
            id,
            number,
            covers,
            marker: Arc::clone(&marker),
            quarantined: false,
            charges,
        });
        let many = queue.len().is_multiple_of(QUERY);
        drop(guard);
        if many && matches!(marker.is_complete(), Ok(true)) {
            self.complete(id.stream_id(), number, covers);
        }
    }

    /// Removes the deallocations that a complete marker covers, and returns their bytes.
    fn complete(&self, stream: u64, number: u64, covers: u64) -> u64 {
        let mut metadata = self.metadata();
        let Some(queue) = metadata.pending.get_mut(&stream) else {
            return 0;
        };
        let is_over = |it: &mut Pending| it.number == number || it.number <= covers;
        let over: Vec<_> = queue.extract_if(.., is_over).collect();
        if queue.is_empty() {
            metadata.pending.remove(&stream);
        }
        drop(metadata);
        // Charges end without the lock.
        bytes(&over)
    }

    /// Waits for the deallocations of a stream up to number `last`; the newest marker usually covers all.
    fn reap_stream(&self, stream: u64, last: u64) -> Result<u64, Error> {
        let newest = || {
            let metadata = self.metadata();
            let mut queue = metadata.pending.get(&stream)?.iter().rev();
            let newest = queue.find(|pending| pending.number <= last)?;
            Some((Arc::clone(&newest.marker), newest.number, newest.covers))
        };
        let mut left = 0;
        while let Some((marker, number, covers)) = newest() {
            if let Err(error) = marker.wait() {
                let mut metadata = self.metadata();
                for pending in metadata.pending.get_mut(&stream).into_iter().flatten() {
                    pending.quarantined = true;
                }
                return Err(error.into());
            }
            left += self.complete(stream, number, covers);
        }
        Ok(left)
    }
}

// SAFETY: passes blocks on, and frees them behind every recorded use.
unsafe impl<R: MemoryResource> MemoryResource for AccessOrdered<R> {
    fn allocate_block(&self, request: &Request, stream: &Stream) -> Result<RawBlock, Error> {
        same_device(self.inner.context(), self.inner.ordinal(), stream)?;
        retry(self);
        capture::refuse_capture(stream)?;
        let mut block = self.inner.allocate_block(request, stream)?;
        let ptr = block.ptr();
        let ready = match self.events.record(stream) {
            Ok(ready) => ready,
            Err(error) => {
                give_back_now(&self.inner, block, "leaking a block without a ready event");
                return Err(error.into());
            }
        };
        let entry = Entry {
            id: block.id(),
            stream: stream.clone(),
            charges_below: block.charges().count(),
            keepers_below: block.keepers(),
            uses: Mutex::new(Uses::new(stream.own_id(), ready)),
        };
        let mut metadata = self.metadata();
        if let Some(old) = metadata.blocks.get(&ptr) {
            let old = (ptr, old.id.bytes() as u64);
            drop(metadata);
            // Deallocating it below would free the memory of the existing block.
            log::error!("memory at {ptr:#x} was handed out twice; the second block leaks");
            return Err(Error::Overlap {
                new: (ptr, request.bytes() as u64),
                old,
            });
        }
        metadata.usage.add(request.bytes() as u64);
        block.set_keepers(entry.keepers_below.saturating_add(1));
        metadata.blocks.insert(ptr, Arc::new(entry));
        drop(metadata);
        Ok(block)
    }

    fn deallocate_block(&self, block: RawBlock) -> Result<(), Refused<RawBlock>> {
        if !block.is_abandoned() {
            retry(self);
        }
        let entry = match self.entry(&block.id()) {
            Ok(entry) => entry,
            Err(error) => return Err(Refused::new(block, error)),
        };
        match block.keepers() == entry.keepers_below.saturating_add(1) {
            true => self.retire(&entry, block),
            false => Err(Refused::new(block, StreamMisuse::KeptAbove)),
        }
    }

    fn upstream(&self) -> Option<&dyn MemoryResource> {
        Some(&self.inner)
    }

    /// As the resource below, except for live and pending blocks, which this one counts.
    fn usage(&self) -> Result<Usage, Error> {
        let mut usage = self.inner.usage()?;
        // A consistent snapshot: a block is either live or pending.
        let metadata = self.metadata();
        (usage.requested, usage.blocks) = (metadata.usage.requested, metadata.usage.blocks);
        usage.pending = metadata.pending.values().map(bytes).sum();
        Ok(usage)
    }

    fn reset_peak_stats(&self) {
        self.metadata().usage.reset_peaks();
        self.inner.reset_peak_stats();
    }

    fn reap(&self) -> Result<u64, Error> {
        retry(self);
        let (last, mut streams) = {
            let metadata = self.metadata();
            let streams: Vec<u64> = metadata.pending.keys().copied().collect();
            (metadata.numbers, streams)
        };
        streams.sort_unstable();
        let mut left = 0;
        for stream in streams {
            left += self.reap_stream(stream, last)?;
        }
        self.inner.reap()?;
        Ok(left)
    }

    fn trim(&self, keep: u64) -> Result<Trimmed, Error> {
        retry(self);
        self.inner.trim(keep)
    }

    fn state(&self, id: &BlockId) -> BlockState {
        if self.entry(id).is_ok() {
            return BlockState::Live;
        }
        let metadata = self.metadata();
        let mut pending = metadata.pending.values().flatten();
        match pending.find(|pending| pending.id == *id) {
            Some(pending) if pending.quarantined => BlockState::Quarantined,
            Some(_) => BlockState::Pending,
            None => BlockState::Free,
        }
    }

    fn use_tracking(&self) -> UseTracking {
        UseTracking::Access
    }

    fn record_use(&self, id: &BlockId, stream: &Stream) -> Result<(), Error> {
        self.finish_use(id, stream, Access::Read)
    }

    fn record_stream(&self, id: &BlockId, stream: &Stream) -> Result<(), Error> {
        same_driver(self.inner.context(), stream)?;
        let entry = self.entry(id)?;
        entry.open_uses()?.until_freed(stream);
        Ok(())
    }

    fn prepare_use(&self, id: &BlockId, stream: &Stream, access: Access) -> Result<(), Error> {
        same_driver(self.inner.context(), stream)?;
        let entry = self.entry(id)?;
        let by = stream.own_id();
        capture::refuse_capture(stream)?;
        let (points, tick) = entry.open_uses()?.before(access);
        for point in &points {
            point.hold_back(stream, by, &self.events)?;
        }
        if access.writes() {
            entry.uses().ordered(by, tick);
        }
        Ok(())
    }

    fn finish_use(&self, id: &BlockId, stream: &Stream, access: Access) -> Result<(), Error> {
        same_driver(self.inner.context(), stream)?;
        let entry = self.entry(id)?;
        let begin = entry.open_uses()?.begin();
        // The work is queued, whatever the driver reports: it counts.
        let free = capture::refuse_capture(stream);
        let recorded = free.and_then(|()| Ok(self.events.record(stream)?));
        let (event, result) = match recorded {
            Ok(event) => (Some(event), Ok(())),
            Err(error) => (None, Err(error)),
        };
        let mut uses = entry.uses();
        uses.done(stream, access, begin, event);
        // A deallocation that began meanwhile does not wait for this use.
        if uses.closed { Err(id.gone()) } else { result }
    }
}
