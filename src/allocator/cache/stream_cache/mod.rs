//! Stream caches, which serve most allocations of up to 64 KiB by themselves.
//!
//! A stream cache belongs to one stream and has pages of its own. A stream has one, and gets more when threads contend
//! for its lock, up to one per hardware thread. All state of a small block (its run, its generation, the statistics,
//! the streams recorded on it) is under the lock of the stream cache that owns its page, so that two streams, or two
//! stream caches of one stream, share no word that either writes. What a stream cache cannot do alone (pages, markers,
//! peaks) its callers do with the heap.
//!
//! Lock order: the heap, then stream caches by rank. No thread waits for a stream cache while it holds one of higher
//! rank.

mod account;
mod batch;
mod granule;
mod held_back;
#[cfg(all(loom, test))]
mod interleavings;
mod large_cache;
mod pages;
mod pool;
mod recorded;
mod room;
mod runs;
#[cfg(all(test, not(loom)))]
mod tests;
pub(crate) mod thread;
mod walk;

use std::sync::Arc;

use crate::driver::process::{Now, State};
use crate::locks::lock::{self, AtomicPtr, Lock, pause};
pub(crate) use account::QUANTITIES;
pub(crate) use granule::{Kind, Live, Node, Run, Taken, Using};
pub(crate) use held_back::{Batch, Returned};
pub(crate) use large_cache::{Amounts, CachedBlock, LargeCache};
pub(crate) use pages::{PageTable, SMALL_ID};
pub(crate) use pool::StreamCachePool;
pub(crate) use runs::Runs;

use crate::allocator::size::GRANULE;
use crate::event::EventWriter;
pub(crate) use account::cold_path;
use std::sync::atomic::{AtomicUsize, Ordering};

/// No allocator: every call needs the heap.
const CLOSED: u64 = u64::MAX;
/// Maximum number of stream caches of a stream.
pub(crate) const MOST_CACHES: usize = 16;
/// Number of wholly free pages that a stream cache keeps when it returns some: this part of its pages, within two
/// bounds. While a cache has pages that it has not needed lately, no memory is added for others.
const SPARE_PART: usize = 4;
const SPARE_LEAST: usize = 8;
const SPARE_PAGES: usize = 16;
/// A stream cache returns no page before it has more than this multiple of that number: one with a varying need would
/// return and request pages all the time.
const SPARE_EXCESS: u32 = 2;
/// Number of contentions for a stream cache's lock before its stream gets another stream cache.
const CONTENTIONS: u32 = 32;

/// The object that keeps an allocator alive: stream caches with live blocks hold it, and know nothing else about it.
pub(crate) trait KeepAlive: std::fmt::Debug + Send + Sync {}

/// One stream cache. It is never freed: an unused stream cache waits for its next stream.
///
/// It has its own cache lines, and other stream caches touch only the first of them when they request room.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct StreamCache {
    /// Holds the state of the process as well, for calls that find everything else here.
    lock: Lock<Inner, State>,
    /// Position in the lock order.
    pub(crate) rank: u32,
    /// The allocator while the stream cache has a stream.
    owner: AtomicPtr<()>,
    /// A copy of [`Inner::handle`], to be read without the lock.
    handle: AtomicUsize,
}

/// The contents of a locked stream cache.
pub(crate) type Held<'a, T> = lock::Held<'a, T, State>;

/// The state of a stream cache.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Inner {
    /// The allocator's number while calls may be served without the heap, otherwise 0.
    open: u64,
    /// The stream's number in that allocator, whose calls may be served.
    pub key: u64,
    /// The stream's handle, if it identifies the stream as long as calls may be served without the heap; otherwise 0.
    handle: usize,
    pub runs: Runs,
    /// Number of the allocator, 0 for none.
    pub allocator: u64,
    /// The stream's slot.
    pub slot: u32,
    /// The stream's handle, if it suffices to query whether the stream is capturing; otherwise 0.
    pub raw: usize,
    /// Number of frees that are querying the stream now, without a lock: a retirement waits for them.
    pub asking: u32,
    /// Large blocks.
    pub large_cache: LargeCache,
    /// The allocator, while it is open or blocks of this stream cache are live.
    pub owner: Option<Arc<dyn KeepAlive>>,
    pub batches: Vec<Batch>,
    /// Number of batches that wait for their streams, outside the stream cache.
    pub waiting: u32,
    /// Complete batches that have returned.
    pub returned: Vec<Returned>,
    /// Number of small blocks of other streams on which this stream is recorded, live or in an open batch, as counted
    /// by this stream cache. Only the sum over a stream's caches is meaningful.
    pub recorded: i64,
    /// Peak of the bytes held back.
    pub pending_peak: u64,
    contentions: u32,
    /// Number of unsuccessful requests to pass before the other streams are polled again, and its last initial value.
    skips: u32,
    next_skips: u32,
    /// Blocks allocated when the room was last divided, and the last division before which the number had grown.
    shared_at: u64,
    busy_at: u64,
    /// Blocks allocated when the heap last checked what the stream cache did not need.
    asked_at: u64,
    /// The stream caches that were busy then, by rank, including this one if it was: the possible lenders of room, and
    /// the position of the next one to ask.
    others: Option<Others>,
    turn: u32,
    /// Destination of a recording's events from this cache. It stays with the stream cache when that changes its
    /// stream.
    pub event_writer: EventWriter,
}

/// Stream caches, by rank.
pub(crate) type Others = Arc<[&'static StreamCache]>;

impl Default for Inner {
    fn default() -> Self {
        Inner {
            owner: None,
            allocator: 0,
            key: 0,
            handle: 0,
            slot: 0,
            raw: 0,
            asking: 0,
            open: CLOSED,
            runs: Runs::default(),
            large_cache: LargeCache::default(),
            batches: Vec::new(),
            waiting: 0,
            returned: Vec::new(),
            recorded: 0,
            pending_peak: 0,
            contentions: 0,
            skips: 0,
            next_skips: 0,
            shared_at: 0,
            busy_at: 0,
            asked_at: 0,
            others: None,
            turn: 0,
            event_writer: EventWriter::default(),
        }
    }
}

/// A stream: the number of its allocator, and its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Owner {
    pub allocator: u64,
    pub key: u64,
}

/// A small request in compact numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Small {
    pub granules: u32,
    /// Alignment in granules.
    pub align: u32,
    pub requested: u32,
}

impl Small {
    #[inline(always)]
    pub(crate) fn bytes(self) -> u64 {
        u64::from(self.granules) * GRANULE
    }

    /// Granules of a run that fits the request at any start.
    pub(crate) fn span(self) -> u32 {
        self.granules + self.align.max(1) - 1
    }
}

/// Outcome of a request to a stream cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Allocated {
    Taken(Taken),
    /// No run is long enough.
    NoRun,
    /// The request might raise the peak.
    NoRoom,
    /// The stream cache belongs to another stream by now, or its stream requires further checks.
    Stranger,
}

/// Which allocation of a block is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Life {
    /// The one with this generation, which has an owner.
    Generation(u32),
    /// The present one of the block that begins at an address.
    At(u64),
}

/// Outcome of a free.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Freed {
    Done,
    /// The block is freed, and a page can be returned.
    Page,
    /// The block is freed, and the batch for this stream is full.
    Full(u32),
    /// The block is not freed yet: the free needs the heap.
    NeedsHeap,
    /// There is no such live block.
    NotLive,
}

impl StreamCache {
    /// Offset of the list of quick runs of this length from the start of the stream cache.
    #[cfg(not(loom))]
    #[inline(always)]
    const fn quick_at(granules: u32) -> usize {
        std::mem::offset_of!(StreamCache, lock)
            + Lock::<Inner, State>::value_at()
            + std::mem::offset_of!(Inner, runs)
            + Runs::quick_at(granules)
    }

    /// Returns the value of `process::now`.
    #[inline(always)]
    pub(crate) fn now(&self) -> Now {
        self.lock.beside.now()
    }

    #[inline]
    pub(crate) fn lock(&self) -> Held<'_, Inner> {
        self.lock.lock()
    }

    /// Locks the stream cache, unless another thread holds it.
    #[inline(always)]
    pub(crate) fn try_lock(&self) -> Option<Held<'_, Inner>> {
        self.lock.try_lock()
    }

    /// Waits until no free queries the stream any more. No new query begins.
    pub(crate) fn await_queries(&self) {
        let mut round = 0;
        while self.lock().asking > 0 {
            pause(round);
            round += 1;
        }
    }

    fn new(rank: u32) -> Self {
        StreamCache {
            lock: Lock::with(Inner::default(), State::default()),
            rank,
            owner: AtomicPtr::new(std::ptr::null_mut()),
            handle: AtomicUsize::new(0),
        }
    }

    /// Sets the handle by which the stream is known; 0 for none.
    pub(crate) fn set_handle(&self, raw: usize) {
        self.lock().handle = raw;
        self.handle.store(raw, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn handle(&self) -> usize {
        self.handle.load(Ordering::Relaxed)
    }

    /// Sets the allocator.
    pub(crate) fn set_owner(&self, owner: &Arc<dyn KeepAlive>) {
        let owner = Arc::as_ptr(owner).cast_mut().cast();
        self.owner.store(owner, Ordering::Release);
    }

    /// Returns the allocator that was set last. It is alive as long as a block has this stream cache as its owning
    /// cache.
    #[inline]
    pub(crate) fn owner(&self) -> *const () {
        self.owner.load(Ordering::Acquire)
    }
}

impl Inner {
    /// Returns the stream's number if this is its handle, which identifies it while the stream cache serves.
    #[inline(always)]
    pub(crate) fn key_of_handle(&self, raw: usize) -> Option<u64> {
        (self.handle == raw).then_some(self.key)
    }

    /// [`key_of_handle`](Self::key_of_handle), if the stream cache serves this allocator.
    pub(crate) fn key_in(&self, allocator: u64, raw: usize) -> Option<u64> {
        let key = self.key_of_handle(raw)?;
        self.serves(Owner { allocator, key }).then_some(key)
    }

    /// Lets the stream cache serve calls without the heap, or stops it.
    pub(crate) fn set_fast(&mut self, fast: bool) {
        self.open = match fast {
            true => self.allocator,
            false => CLOSED,
        };
        self.runs.keep_quick(fast);
    }

    /// Counts a contention. Returns whether the stream should get another stream cache because of repeated contention.
    pub(crate) fn contended(&mut self) -> bool {
        self.contentions += 1;
        let contended = self.contentions >= CONTENTIONS;
        if contended {
            self.contentions = 0;
        }
        contended
    }

    /// Whether allocations and frees may be served without the heap.
    #[inline(always)]
    pub(crate) fn is_fast(&self) -> bool {
        self.open != CLOSED
    }

    /// Takes an unaligned request if the cache may serve it and any free run is long enough.
    #[inline(always)]
    pub(crate) fn take_anywhere(&mut self, owner: Owner, request: Small) -> Option<Taken> {
        let bytes = request.bytes();
        if !self.serves(owner) || !self.runs.accounts.allocated.fits(bytes) {
            return None;
        }
        let (granules, requested) = (request.granules, request.requested);
        let (taken, bytes) = self.runs.take_anywhere(granules, requested)?;
        self.account(bytes, requested);
        Some(taken)
    }

    /// Takes a request.
    pub(crate) fn take(&mut self, request: Small) -> Allocated {
        let bytes = request.bytes();
        if !self.runs.accounts.allocated.fits(bytes) {
            return Allocated::NoRoom;
        }
        let (granules, align) = (request.granules, request.align);
        let Some(taken) = self.runs.take(granules, align, request.requested) else {
            return Allocated::NoRun;
        };
        self.account(bytes, request.requested);
        self.record_allocation(&taken, request.requested);
        Allocated::Taken(taken)
    }

    /// Adds a block to the sums.
    #[inline(always)]
    fn account(&mut self, bytes: u64, requested: u32) {
        self.runs.accounts.add(bytes, u64::from(requested));
    }

    /// Takes a request at an address of a page, if it is free there.
    pub(crate) fn take_at(&mut self, page: u32, ptr: u64, request: Small) -> Allocated {
        let bytes = request.bytes();
        let aligned = ptr.is_multiple_of(u64::from(request.align.max(1)) * GRANULE);
        if !aligned {
            return Allocated::NoRun;
        }
        if !self.runs.accounts.allocated.fits(bytes) {
            return Allocated::NoRoom;
        }
        match self
            .runs
            .take_at(page, ptr, request.granules, request.requested)
        {
            Some(taken) => {
                self.account(bytes, request.requested);
                self.record_allocation(&taken, request.requested);
                Allocated::Taken(taken)
            }
            None => Allocated::NoRun,
        }
    }

    /// Takes a request regardless of the peak, which the caller checks.
    pub(crate) fn take_ignoring_peak(&mut self, request: Small) -> Allocated {
        self.runs.accounts.allocated.extend(request.bytes());
        self.take(request)
    }

    /// Whether calls for a stream may be served here without the heap.
    #[inline(always)]
    pub(crate) fn serves(&self, owner: Owner) -> bool {
        self.open == owner.allocator && self.key == owner.key
    }

    /// Returns the live block that begins at an address.
    pub(crate) fn live(&self, node: Node, ptr: u64, generation: Option<u32>) -> Option<Live> {
        let live = self.runs.live(node, ptr)?;
        generation
            .is_none_or(|g| g == live.generation)
            .then_some(live)
    }

    /// Leaves the recorded uses of a live block to the heap. Returns the present ones, or `None` if the block is no
    /// longer live. Reading them and marking the block is one step, because another thread may be about to record a use
    /// of its own.
    pub(crate) fn leave_to_heap(&mut self, node: Node, ptr: u64) -> Option<Using> {
        let live = self.runs.live(node, ptr)?;
        self.runs.set_using(node, Using::MANY);
        Some(live.using)
    }

    #[inline(always)]
    fn live_in(&self, node: Node, life: Life) -> Option<Live> {
        match life {
            // While the owner of a block exists its page cannot be removed, so the address need not be compared.
            Life::Generation(generation) => self.runs.live_as(node, generation),
            Life::At(ptr) => self.runs.live(node, ptr),
        }
    }

    /// Frees a block if the fast path suffices, and returns it; with a generation, only if the block still has it.
    #[inline(always)]
    pub(crate) fn free_quick(&mut self, node: Node, life: Life) -> Option<Live> {
        let live = self.live_in(node, life)?;
        // A stopped stream cache keeps no quick runs, so its blocks leave the fast path here.
        if live.using != Using::NONE || !self.runs.put_quick(node, live.granules) {
            return None;
        }
        debug_assert!(self.is_fast(), "else there is no room for quick runs");
        self.account_free(live);
        Some(live)
    }

    /// Frees a block that [`free_quick`](Self::free_quick) could not free because there was no room for another quick
    /// run: merges it. Returns whether a page can be returned; returns `None` and does nothing if the free needs the
    /// heap.
    #[inline(always)]
    pub(crate) fn free_merged(&mut self, node: Node, generation: u32) -> Option<bool> {
        let live = self.runs.live_as(node, generation)?;
        if live.using != Using::NONE || !self.is_fast() {
            return None;
        }
        self.account_free(live);
        self.runs.merge(node, Some(self.runs.ticket));
        Some(self.pages_to_keep().is_some())
    }

    /// Returns the stream handle to query for captures before a block is freed, if the handle suffices. The query is
    /// counted in [`asking`](Self::asking) until it has returned.
    #[inline(always)]
    pub(crate) fn begin_query(&mut self, node: Node, life: Life) -> Option<usize> {
        // A block with an owner is live, so its stream is known.
        let live = matches!(life, Life::Generation(_)) || self.live_in(node, life).is_some();
        if !live || self.raw == 0 {
            return None;
        }
        self.asking += 1;
        Some(self.raw)
    }

    /// Frees a block that begins at an address; with a generation, only if the block still has it.
    pub(crate) fn free(&mut self, node: Node, ptr: u64, generation: Option<u32>) -> Freed {
        let Some(live) = self.live(node, ptr, generation) else {
            return Freed::NotLive;
        };
        let freed = if !self.is_fast() || live.using != Using::NONE {
            self.free_shared(node, live)
        } else {
            self.account_free(live);
            self.runs.put(node, live.granules);
            match self.pages_to_keep() {
                Some(_) => Freed::Page,
                None => Freed::Done,
            }
        };
        if freed != Freed::NeedsHeap {
            self.record_free(ptr, live.requested);
        }
        freed
    }

    /// Returns the number of wholly free pages to keep, if some of them should be returned.
    pub(crate) fn pages_to_keep(&self) -> Option<u32> {
        let whole = self.runs.whole_pages();
        if whole <= SPARE_EXCESS * SPARE_LEAST as u32 {
            return None;
        }
        let pages = self.runs.page_count() / SPARE_PART;
        let keep = pages.clamp(SPARE_LEAST, SPARE_PAGES) as u32;
        (whole > SPARE_EXCESS * keep).then_some(keep)
    }

    /// Removes a block from the sums.
    #[inline(always)]
    pub(crate) fn account_free(&mut self, live: Live) {
        let bytes = u64::from(live.granules) * GRANULE;
        self.runs.accounts.sub(bytes, u64::from(live.requested));
    }

    /// Whether the stream cache has allocated nothing since the last call, including from its large-block cache.
    pub(crate) fn was_idle(&mut self) -> bool {
        let total = self.runs.accounts.blocks.total() + self.large_cache.reused().blocks;
        std::mem::replace(&mut self.asked_at, total) == total
    }

    /// Whether the stream cache has allocated recently. `now` is the number of the division of room.
    pub(crate) fn busy(&mut self, now: u64) -> bool {
        let total = self.runs.accounts.blocks.total();
        if total != self.shared_at {
            self.shared_at = total;
            self.busy_at = now;
        }
        now - self.busy_at <= EPOCH
    }
}

/// Number of divisions after which a stream cache without allocations gets no room.
const EPOCH: u64 = 16;
