//! The async resource: stream order with reads and writes told apart.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crate::allocator::{Allocator, Counter, Request, Trimmed};
use crate::driver::{Context, NO_ID, Stream, StreamKind, process};
use crate::locks::held::{Locked, Mutex};

use super::block::{Access, RawBlock};
use super::dropped::{give_back, log_rarely};
use super::meter::Charge;
use super::stranded::Stranded;
use super::traits::{MemoryResource, UseTracking};
use super::usage::Usage;
use super::uses::Uses;
use crate::block::{BlockId, BlockState};
use crate::error::{Error, Refused, StreamMisuse};
use crate::sync::capture;
use crate::sync::event::{EventPools, Pooled};
use crate::sync::order::wait_for_context;

/// Deallocations that share a marker at most.
const BATCH: usize = 256;

/// Memory in the order of streams, with the use of each block tracked by access.
///
/// Allocating records a ready point on the stream, which counts as the first write.
/// [`prepare_use`](MemoryResource::prepare_use) makes a stream wait for the last write, and before a
/// write also for all reads since; [`finish_use`](MemoryResource::finish_use) records the new use.
/// Deallocating makes the block's own stream wait for all uses on others and then gives the block
/// back in the order of that stream; its bytes count as pending until a
/// [`reap`](MemoryResource::reap) has seen the stream get there. (With several hundred of them
/// pending on a stream, a deallocation also asks, without waiting, for the oldest.)
///
/// Events come from a pool per context, so steady work creates none. No lock is held during a driver
/// call. A stream that is borrowed must live until the blocks allocated on it are deallocated; what
/// is pending on it then is known by events and needs the stream no more.
///
/// ```
/// # use cualloc::Request;
/// use cualloc::resource::{Access, AccessOrdered, MemoryResource};
/// # use cualloc::{driver::{Stream}, sim::{SimConfig, Simulator}, Allocator, Config};
/// # let sim = Simulator::new(SimConfig::with_devices(1, 1 << 30))?;
/// # let driver = sim.driver()?;
/// # let context = driver.context(0)?;
/// # let allocator = Allocator::with_config(&context, Config::new())?;
/// let resource = AccessOrdered::new(allocator);
/// let (a, b) = (Stream::new(&context)?, Stream::new(&context)?);
/// let block = resource.allocate_block(&Request::new(4096).tag("pair"), &a)?;
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
    stranded: Stranded,
}

/// What the resource knows of its blocks.
#[derive(Debug, Default)]
struct Metadata {
    /// The bytes of live blocks, and the number of them.
    live: Counter,
    count: Counter,
    blocks: HashMap<u64, Arc<Entry>>,
    pending: HashMap<u64, Queue>,
    next_batch: u64,
    /// Deallocations so far, of all streams.
    pushes: u64,
}

/// A live block.
#[derive(Debug)]
struct Entry {
    id: BlockId,
    stream: Stream,
    /// Charges that belong to what is below this resource, and leave with the block.
    charges_below: usize,
    /// Resources below this one that keep an order, too.
    keepers_below: u32,
    uses: Mutex<Uses>,
}

impl Entry {
    fn uses(&self) -> Locked<'_, Uses> {
        // Of an entry, of which a forked child finds none.
        self.uses.lock()
    }
}

/// The pending deallocations of one stream.
#[derive(Debug, Default)]
struct Queue {
    /// The number of the newest deallocation.
    newest: u64,
    batches: VecDeque<Batch>,
}

/// Deallocations that one marker covers.
#[derive(Debug)]
struct Batch {
    id: u64,
    marker: Arc<Pooled>,
    retired: Vec<Retired>,
    /// Somebody waits for this marker: it must not be replaced.
    closed: bool,
    quarantined: bool,
}

#[derive(Debug)]
struct Retired {
    id: BlockId,
    /// End when the bytes leave.
    #[expect(dead_code, reason = "held for its drop")]
    charges: Vec<Charge>,
}

/// Whether a stream belongs to the driver of a resource, as far as that has one.
fn same_driver(resource: &impl MemoryResource, stream: &Stream) -> Result<(), Error> {
    let foreign = |context: &Context| !context.driver().same_library(stream.context().driver());
    if resource.context().is_some_and(foreign) {
        return Err(StreamMisuse::ForeignDriver.into());
    }
    Ok(())
}

/// Whether a stream can be used with memory of a resource: the same driver and device.
pub(super) fn same_place(resource: &impl MemoryResource, stream: &Stream) -> Result<(), Error> {
    same_driver(resource, stream)?;
    let (expected, found) = (resource.ordinal(), stream.context().device().ordinal());
    if expected != found {
        return Err(Error::WrongDevice { expected, found });
    }
    Ok(())
}

impl<R: MemoryResource> AccessOrdered<R> {
    /// Over another resource, whose memory must be in the order of streams.
    pub fn new(inner: R) -> AccessOrdered<R> {
        AccessOrdered {
            inner,
            events: EventPools::default(),
            metadata: Mutex::default(),
            stranded: Stranded::default(),
        }
    }

    /// The resource below.
    pub fn get_ref(&self) -> &R {
        &self.inner
    }

    /// Bytes that are pending on a stream, by the driver's id of it.
    pub fn pending_on(&self, stream: u64) -> u64 {
        let metadata = self.metadata();
        metadata.pending.get(&stream).map_or(0, Queue::bytes)
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

    /// Makes the block's stream wait for all uses on others, and marks the place; no marker if all
    /// of it is already complete.
    fn complete_uses(
        &self,
        entry: &Entry,
        points: &[super::uses::Point],
    ) -> Result<Option<Pooled>, Error> {
        let home = entry.id.stream_id();
        if entry.stream.kind() == StreamKind::PerThreadDefault && entry.stream.id()? != home {
            // On this thread the handle means another stream. What other contexts do is waited for
            // by this thread's stream, and that with all others of its context.
            let here = entry.stream.id()?;
            for point in points {
                point.hold_back(&entry.stream, here, &self.events)?;
            }
            wait_for_context(entry.stream.context())?;
            return Ok(None);
        }
        for point in points {
            point.hold_back(&entry.stream, home, &self.events)?;
        }
        if entry.uses().is_any() && self.inner.use_tracking() != UseTracking::None {
            // A stream that was retired below has got work again, if only by the waits.
            self.inner.record_use(&entry.id, &entry.stream)?;
        }
        Ok(Some(self.events.record(&entry.stream)?))
    }

    fn retire(&self, entry: &Arc<Entry>, mut block: RawBlock) -> Result<(), Refused<RawBlock>> {
        let id = entry.id;
        let points = {
            let mut uses = entry.uses();
            if uses.closed {
                return Err(Refused::new(block, id.gone()));
            }
            uses.closed = true;
            uses.all()
        };
        let reopen = |block, error: Error| {
            entry.uses().closed = false;
            Err(Refused::new(block, error))
        };
        let newest = self.metadata().newest(id.stream_id());
        let capture = capture::refuse_capture(&entry.stream);
        let marker = match capture.and_then(|()| self.complete_uses(entry, &points)) {
            Ok(marker) => marker,
            Err(error) => return reopen(block, error),
        };
        // Out of the table before the address can be given to somebody else.
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
        let retired = Retired { id, charges };
        self.push(id.stream_id(), retired, marker, newest);
        Ok(())
    }

    /// Takes a block back, or keeps one that nobody else can give back.
    fn take_back(&self, block: RawBlock) -> Result<(), Refused<RawBlock>> {
        let entry = match self.entry(&block.id()) {
            Ok(entry) => entry,
            Err(error) => return Err(Refused::new(block, error)),
        };
        if block.keepers() != entry.keepers_below.saturating_add(1) {
            return Err(Refused::new(block, StreamMisuse::KeptAbove));
        }
        match self.retire(&entry, block) {
            Err(failure) if failure.value.is_abandoned() => {
                self.stranded.keep(*failure.value);
                Ok(())
            }
            done => done,
        }
    }

    /// Takes back what was stranded, as far as that goes now.
    fn retry(&self) {
        for block in self.stranded.take() {
            // One that cannot go yet is kept again.
            if let Err(failure) = self.take_back(block) {
                log_rarely(&failure.error, "a dropped block leaks");
            }
        }
    }

    /// Puts a deallocation into the queue of its stream.
    fn push(&self, stream: u64, retired: Retired, marker: Option<Pooled>, newest: u64) {
        let mut guard = self.metadata();
        let metadata = &mut *guard;
        metadata.live.sub(retired.bytes());
        metadata.count.sub(1);
        let Some(marker) = marker else {
            drop(guard);
            drop(retired);
            return;
        };
        metadata.pushes += 1;
        let queue = metadata.pending.entry(stream).or_default();
        let alone = queue.newest == newest;
        queue.newest = metadata.pushes;
        let mut replaced = None;
        let oldest = match queue.batches.back_mut() {
            // The new marker was recorded after everything in the batch.
            Some(batch) if alone && !batch.closed && batch.retired.len() < BATCH => {
                replaced = Some(std::mem::replace(&mut batch.marker, Arc::new(marker)));
                batch.retired.push(retired);
                None
            }
            _ => {
                queue.batches.push_back(Batch {
                    id: metadata.next_batch,
                    marker: Arc::new(marker),
                    retired: vec![retired],
                    closed: false,
                    quarantined: false,
                });
                let many = queue.batches.len() > 2;
                let oldest = queue.batches.front_mut().filter(|_| many);
                let oldest = oldest.map(|batch| {
                    batch.closed = true;
                    (batch.id, Arc::clone(&batch.marker))
                });
                metadata.next_batch += 1;
                oldest
            }
        };
        drop(guard);
        drop(replaced);
        if let Some((batch, marker)) = oldest
            && matches!(marker.is_complete(), Ok(true))
        {
            self.complete(stream, batch);
        }
    }

    /// A batch's marker was seen complete: its bytes leave. How many.
    fn complete(&self, stream: u64, batch: u64) -> u64 {
        let done = {
            let mut metadata = self.metadata();
            let Some(queue) = metadata.pending.get_mut(&stream) else {
                return 0;
            };
            let at = queue.batches.iter().position(|b| b.id == batch);
            let done = at.and_then(|at| queue.batches.remove(at));
            if queue.batches.is_empty() {
                metadata.pending.remove(&stream);
            }
            done
        };
        // Charges end outside the lock.
        done.map_or(0, |batch| batch.bytes())
    }
}

impl<R: MemoryResource> Drop for AccessOrdered<R> {
    fn drop(&mut self) {
        if !process::is_gone() {
            self.retry();
        }
    }
}

impl Retired {
    fn bytes(&self) -> u64 {
        self.id.bytes() as u64
    }
}

impl Batch {
    fn bytes(&self) -> u64 {
        self.retired.iter().map(Retired::bytes).sum()
    }
}

impl Queue {
    fn bytes(&self) -> u64 {
        self.batches.iter().map(Batch::bytes).sum()
    }
}

impl Metadata {
    fn newest(&self, stream: u64) -> u64 {
        self.pending.get(&stream).map_or(0, |queue| queue.newest)
    }
}

// SAFETY: passes blocks on, and frees them behind every use it was told of.
unsafe impl<R: MemoryResource> MemoryResource for AccessOrdered<R> {
    fn allocate_block(&self, request: &Request, stream: &Stream) -> Result<RawBlock, Error> {
        same_place(&self.inner, stream)?;
        let id = stream.id()?;
        self.retry();
        capture::refuse_capture(stream)?;
        let mut block = self.inner.allocate_block(request, stream)?;
        let ptr = block.ptr();
        let ready = match self.events.record(stream) {
            Ok(ready) => ready,
            Err(error) => {
                give_back(&self.inner, block, "a block leaks");
                return Err(error.into());
            }
        };
        let entry = Entry {
            id: block.id(),
            stream: stream.clone(),
            charges_below: block.charges().count(),
            keepers_below: block.keepers(),
            uses: Mutex::new(Uses::new(id, ready)),
        };
        let mut metadata = self.metadata();
        if let Some(old) = metadata.blocks.get(&ptr) {
            let old = (ptr, old.id.bytes() as u64);
            drop(metadata);
            // Giving it back below would free the memory of the block that is there.
            log::error!("memory at {ptr:#x} was handed out twice; the second block leaks");
            return Err(Error::Overlap {
                new: (ptr, request.bytes() as u64),
                old,
            });
        }
        metadata.live.add(request.bytes() as u64);
        metadata.count.add(1);
        block.set_keepers(entry.keepers_below.saturating_add(1));
        metadata.blocks.insert(ptr, Arc::new(entry));
        drop(metadata);
        Ok(block)
    }

    fn deallocate_block(&self, block: RawBlock) -> Result<(), Refused<RawBlock>> {
        self.retry();
        self.take_back(block)
    }

    fn ordinal(&self) -> usize {
        self.inner.ordinal()
    }

    #[inline]
    fn upstream(&self) -> Option<&dyn MemoryResource> {
        Some(&self.inner)
    }

    /// As the resource below says, but for live and pending blocks, which are those of this one.
    fn usage(&self) -> Result<Usage, Error> {
        let mut usage = self.inner.usage()?;
        // Both of one instant: what is not live any more is pending.
        let metadata = self.metadata();
        usage.requested = metadata.live;
        usage.blocks = metadata.count;
        usage.pending = metadata.pending.values().map(Queue::bytes).sum();
        Ok(usage)
    }

    fn reset_peak_stats(&self) {
        {
            let mut metadata = self.metadata();
            metadata.live.reset_peak();
            metadata.count.reset_peak();
        }
        self.inner.reset_peak_stats();
    }

    fn reap(&self) -> Result<u64, Error> {
        self.retry();
        let mut waits: Vec<(u64, u64, Arc<Pooled>)> = {
            let mut metadata = self.metadata();
            let queues = metadata.pending.iter_mut();
            queues
                .flat_map(|(stream, queue)| {
                    queue.batches.iter_mut().map(|batch| {
                        batch.closed = true;
                        (*stream, batch.id, Arc::clone(&batch.marker))
                    })
                })
                .collect()
        };
        waits.sort_by_key(|(_, batch, _)| *batch);
        let mut left = 0;
        for (stream, batch, marker) in waits {
            let waited = marker.wait();
            drop(marker);
            if let Err(error) = waited {
                let mut metadata = self.metadata();
                let queue = metadata.pending.get_mut(&stream);
                for batch in queue.into_iter().flat_map(|queue| &mut queue.batches) {
                    batch.quarantined = true;
                }
                return Err(error.into());
            }
            left += self.complete(stream, batch);
        }
        self.inner.reap()?;
        Ok(left)
    }

    fn trim(&self, keep: u64) -> Result<Trimmed, Error> {
        self.retry();
        self.inner.trim(keep)
    }

    fn state(&self, id: &BlockId) -> BlockState {
        let metadata = self.metadata();
        if let Some(entry) = metadata.blocks.get(&id.ptr())
            && entry.id == *id
        {
            return BlockState::Live;
        }
        let mut batches = metadata.pending.values().flat_map(|queue| &queue.batches);
        let found = batches.find(|batch| batch.retired.iter().any(|r| r.id == *id));
        match found {
            Some(batch) if batch.quarantined => BlockState::Quarantined,
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
        same_driver(&self.inner, stream)?;
        let entry = self.entry(id)?;
        let by = stream.id()?;
        let mut uses = entry.uses();
        if uses.closed {
            return Err(id.gone());
        }
        uses.until_freed(stream, by);
        Ok(())
    }

    fn prepare_use(&self, id: &BlockId, stream: &Stream, access: Access) -> Result<(), Error> {
        same_driver(&self.inner, stream)?;
        let entry = self.entry(id)?;
        let by = stream.id()?;
        capture::refuse_capture(stream)?;
        let (points, tick) = {
            let uses = entry.uses();
            if uses.closed {
                return Err(id.gone());
            }
            uses.before(access)
        };
        for point in &points {
            point.hold_back(stream, by, &self.events)?;
        }
        if access.writes() {
            entry.uses().ordered(by, tick);
        }
        Ok(())
    }

    fn finish_use(&self, id: &BlockId, stream: &Stream, access: Access) -> Result<(), Error> {
        same_driver(&self.inner, stream)?;
        let entry = self.entry(id)?;
        // A stream that cannot be named now is taken for one of its own.
        let (by, named) = match stream.id() {
            Ok(id) => (id, Ok(())),
            Err(error) => (NO_ID, Err(error.into())),
        };
        let asked = match capture::refuse_capture(stream) {
            // What is captured has not run.
            Err(Error::Stream(misuse)) => return Err(misuse.into()),
            asked => named.and(asked),
        };
        let begin = {
            let mut uses = entry.uses();
            if uses.closed {
                return Err(id.gone());
            }
            uses.begin()
        };
        // There is work, whatever the driver said: it counts.
        let recorded = asked.and_then(|()| Ok(self.events.record(stream)?));
        let (event, result) = match recorded {
            Ok(event) => (Some(event), Ok(())),
            Err(error) => (None, Err(error)),
        };
        let mut uses = entry.uses();
        uses.done(stream, by, access, begin, event);
        // A free that began meanwhile does not know of this use.
        if uses.closed { Err(id.gone()) } else { result }
    }
}
