//! Stream caches: what an allocation of up to 64 KiB meets first, and mostly nothing else.
//!
//! A stream cache belongs to one stream and has pages of its own; a stream has one, and more when threads
//! meet at its lock, up to one per thread of execution. Everything about a small block (its run, its
//! generation, the statistics, the streams recorded on it) is under the lock of the stream cache that owns
//! its page, so that two streams, or two stream caches of one, share no word that either writes. What a
//! stream cache cannot do alone (pages, markers, peaks) its callers do with the heap outside.
//!
//! Lock order: the heap, then stream caches by rank. A stream cache is never waited for with a higher one held.

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
mod worn;

use std::sync::Arc;

use crate::driver::process::{Now, State};
use crate::locks::lock::{self, AtomicPtr, Lock, pause};
pub(crate) use account::QUANTITIES;
pub(crate) use granule::{Kind, Live, Node, PAGE_GRANULES, Run, Taken, Using};
pub(crate) use held_back::{Batch, Returned};
pub(crate) use large_cache::{Amounts, CachedBlock, LargeCache};
pub(crate) use pages::{PageTable, SMALL_ID, page_of};
pub(crate) use pool::StreamCachePool;
pub(crate) use runs::Runs;

use crate::allocator::size::GRANULE;
use crate::event::Tap;
use account::anew;
pub(crate) use account::rarely;
use std::sync::atomic::{AtomicUsize, Ordering};

/// No allocator: every call needs the heap.
const CLOSED: u64 = u64::MAX;
/// No allocator: the next allocation looks for worn pages first.
const USED_UP: u64 = u64::MAX - 1;
/// Most stream caches of a stream.
pub(crate) const MOST_CACHES: usize = 16;
/// Wholly free pages that a stream cache keeps when it hands some back: this part of its pages, between so
/// many and so many. Of those that it did not need lately no memory is added for others.
const SPARE_PART: usize = 4;
const SPARE_LEAST: usize = 8;
const SPARE_PAGES: usize = 16;
/// It hands none back before there are more than so many times that: a stream cache whose need goes up and
/// down would give and ask all the time.
const SPARE_EXCESS: u32 = 2;
/// Times that threads met at a stream cache's lock before its stream gets another stream cache.
const CONTENTIONS: u32 = 32;

/// What keeps an allocator: stream caches with live blocks hold it, and know nothing else of it.
pub(crate) trait KeepAlive: std::fmt::Debug + Send + Sync {}

/// One stream cache. Never freed: a stream cache that nobody needs waits for its next stream.
///
/// On cache lines of its own, and the first of them is all that other stream caches touch when they ask for
/// room.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct StreamCache {
    /// With what happened to the process, for calls that find all else here.
    lock: Lock<Inner, State>,
    /// Place in the order of locks.
    pub(crate) rank: u32,
    /// The allocator while the stream cache has a stream.
    owner: AtomicPtr<()>,
    /// [`Inner::handle`], for who has no lock.
    handle: AtomicUsize,
}

/// A stream cache's contents, while they are this thread's.
pub(crate) type Held<'a, T> = lock::Held<'a, T, State>;

/// What a stream cache is to its stream.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Inner {
    /// The number of the allocator as long as calls may go on without a look at the heap, else 0.
    open: u64,
    /// The stream's number in that allocator: calls for this stream may go on.
    pub key: u64,
    /// The stream's handle, if it is that stream's and no other's as long as calls may go on without a look at the
    /// heap; else 0.
    handle: usize,
    pub runs: Runs,
    /// Number of the allocator, 0 for none.
    pub allocator: u64,
    /// The stream's slot.
    pub slot: u32,
    /// The stream's handle, as long as it may be asked whether it captures; 0 if that takes more than its handle.
    pub raw: usize,
    /// Frees under way that ask the stream just now, without a lock: who ends the stream waits for them.
    pub asking: u32,
    /// Large blocks.
    pub large_cache: LargeCache,
    /// The allocator, as long as it is open or blocks of this stream cache are live.
    pub owner: Option<Arc<dyn KeepAlive>>,
    pub batches: Vec<Batch>,
    /// Batches that wait for their streams, outside of the stream cache.
    pub waiting: u32,
    /// Batches that are complete, and came back.
    pub returned: Vec<Returned>,
    /// Small blocks of other streams on which this stream is recorded, live or in a batch that is
    /// open, as far as this stream cache counts them: only the sum over a stream's stream caches means something.
    pub recorded: i64,
    /// Most bytes that were held back at once.
    pub pending_peak: u64,
    contentions: u32,
    /// Requests that find nothing to let pass before the other streams are asked again, and how many
    /// that were the last time.
    skips: u32,
    next_skips: u32,
    /// Blocks handed out when the room was last shared out, and the last sharing before which there
    /// were more.
    shared_at: u64,
    busy_at: u64,
    /// Blocks handed out when it was last asked what the stream cache did not need.
    asked_at: u64,
    /// Stream caches that were busy then, this one among them if it was, by rank: who may have room, and where
    /// in the row to ask next.
    others: Option<Others>,
    turn: u32,
    /// Where a recording gets what happens here. It stays with the stream cache, whoever's that is.
    pub tap: Tap,
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
            tap: Tap::default(),
        }
    }
}

/// A stream by its number in an allocator, by its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Owner {
    pub allocator: u64,
    pub key: u64,
}

/// A small request in numbers that fit.
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

    /// Granules of a run in which it surely fits.
    pub(crate) fn span(self) -> u32 {
        self.granules + self.align.max(1) - 1
    }
}

/// How a request to a stream cache ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Allocated {
    Taken(Taken),
    /// No run is long enough.
    NoRun,
    /// It could be a new peak.
    NoRoom,
    /// The stream cache is another stream's by now, or its stream needs a closer look.
    Stranger,
}

/// Which life of a block is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Life {
    /// The one with this generation, which has an owner.
    Generation(u32),
    /// The present one of the block that begins at an address.
    At(u64),
}

/// How a free ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Freed {
    Done,
    /// Done, and there is a page to hand back.
    Page,
    /// Done, and the batch for this stream is full.
    Full(u32),
    /// Nothing is done yet: it needs the heap.
    NeedsHeap,
    /// There is no such block.
    NotLive,
}

impl StreamCache {
    /// Where the list of quick runs of so many granules begins, from the stream cache's beginning on.
    #[cfg(not(loom))]
    #[inline(always)]
    const fn quick_at(granules: u32) -> usize {
        std::mem::offset_of!(StreamCache, lock)
            + Lock::<Inner, State>::value_at()
            + std::mem::offset_of!(Inner, runs)
            + Runs::quick_at(granules)
    }

    /// What [`process::now`] says.
    #[inline(always)]
    pub(crate) fn now(&self) -> Now {
        self.lock.beside.now()
    }

    #[inline]
    pub(crate) fn lock(&self) -> Held<'_, Inner> {
        self.lock.lock()
    }

    /// The stream cache, if nobody is at it.
    #[inline(always)]
    pub(crate) fn try_lock(&self) -> Option<Held<'_, Inner>> {
        self.lock.try_lock()
    }

    /// Waits until no free asks the stream any more. None begins to.
    pub(crate) fn let_go(&self) {
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

    /// The stream is known by a handle from now on, or by none if that is 0.
    pub(crate) fn set_handle(&self, raw: usize) {
        self.lock().handle = raw;
        self.handle.store(raw, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn handle(&self) -> usize {
        self.handle.load(Ordering::Relaxed)
    }

    /// The allocator from now on.
    pub(crate) fn set_owner(&self, owner: &Arc<dyn KeepAlive>) {
        let owner = Arc::as_ptr(owner).cast_mut().cast();
        self.owner.store(owner, Ordering::Release);
    }

    /// The allocator that was set last. Alive as long as a block has this stream cache as its home.
    #[inline]
    pub(crate) fn owner(&self) -> *const () {
        self.owner.load(Ordering::Acquire)
    }
}

impl Inner {
    /// The stream's number if it is known by this handle, which is its own as long as the stream cache serves.
    #[inline(always)]
    pub(crate) fn key_of_handle(&self, raw: usize) -> Option<u64> {
        (self.handle == raw).then_some(self.key)
    }

    /// Lets the stream cache work without a look at the heap, or stops it.
    pub(crate) fn set_fast(&mut self, fast: bool) {
        self.open = match fast {
            true if self.runs.accounts.blocks.is_used_up() => USED_UP,
            true => self.allocator,
            false => CLOSED,
        };
        self.runs.keep_quick(fast);
    }

    /// Threads met here: whether the stream should get another stream cache, because they keep doing so.
    pub(crate) fn contended(&mut self) -> bool {
        self.contentions += 1;
        let contended = self.contentions >= CONTENTIONS;
        if contended {
            self.contentions = 0;
        }
        contended
    }

    /// Whether allocations and frees may go on without a look at the heap.
    #[inline(always)]
    pub(crate) fn is_fast(&self) -> bool {
        self.open != CLOSED
    }

    /// Takes an unaligned request if nothing stands in the way, and any free run is long enough.
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
        self.tell_taken(&taken, request.requested);
        Allocated::Taken(taken)
    }

    /// Adds a block to the sums.
    #[inline(always)]
    fn account(&mut self, bytes: u64, requested: u32) {
        if self.runs.accounts.add(bytes, u64::from(requested)) {
            let inner = anew(self);
            if inner.open != CLOSED {
                inner.open = USED_UP;
            }
        }
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
                self.tell_taken(&taken, request.requested);
                Allocated::Taken(taken)
            }
            None => Allocated::NoRun,
        }
    }

    /// Takes a request whatever it does to the peak, which is the caller's to look at.
    pub(crate) fn take_beyond(&mut self, request: Small) -> Allocated {
        self.runs.accounts.allocated.extend(request.bytes());
        self.take(request)
    }

    /// Whether calls for a stream may go on here without a look at the heap.
    #[inline(always)]
    pub(crate) fn serves(&self, owner: Owner) -> bool {
        self.open == owner.allocator && self.key == owner.key
    }

    /// The live block that begins at an address.
    pub(crate) fn live(&self, node: Node, ptr: u64, generation: Option<u32>) -> Option<Live> {
        let live = self.runs.live(node, ptr)?;
        generation
            .is_none_or(|g| g == live.generation)
            .then_some(live)
    }

    /// Leaves to the heap what is noted on a live block: what was, or `None` if the block is gone. Reading it and saying
    /// so are one step, since another thread may be about to note a use of its own.
    pub(crate) fn leave_to_heap(&mut self, node: Node, ptr: u64) -> Option<Using> {
        let live = self.runs.live(node, ptr)?;
        self.runs.set_using(node, Using::MANY);
        Some(live.using)
    }

    #[inline(always)]
    fn live_in(&self, node: Node, life: Life) -> Option<Live> {
        match life {
            // The page of a block that somebody owns cannot have gone.
            Life::Generation(generation) => self.runs.live_as(node, generation),
            Life::At(ptr) => self.runs.live(node, ptr),
        }
    }

    /// Frees a block if nothing stands in the way; with a generation only that life of it.
    #[inline(always)]
    pub(crate) fn free_at_once(&mut self, node: Node, life: Life) -> bool {
        self.freed_at_once(node, life).is_some()
    }

    /// [`free_at_once`](Self::free_at_once), with what the block was.
    #[inline(always)]
    fn freed_at_once(&mut self, node: Node, life: Life) -> Option<Live> {
        let live = self.live_in(node, life)?;
        // A stream cache that was stopped keeps no quick runs: its blocks come no further than this.
        if live.using != Using::NONE || !self.runs.put_quick(node, live.granules) {
            return None;
        }
        debug_assert!(self.is_fast(), "else there is no room for quick runs");
        self.account_free(live);
        Some(live)
    }

    /// Frees a block in this life of it that [`free_at_once`](Self::free_at_once) did not, if that was for
    /// want of room to keep its run as it is: merges it. Whether there is a page to hand back then; `None`,
    /// with nothing done, if more stands in the way.
    #[inline(always)]
    pub(crate) fn free_merged(&mut self, node: Node, generation: u32) -> Option<bool> {
        let live = self.runs.live_as(node, generation)?;
        if live.using != Using::NONE || !self.is_fast() {
            return None;
        }
        self.account_free(live);
        self.runs.put_merged_here(node);
        Some(self.pages_to_keep().is_some())
    }

    /// Whom to ask about captures before the block in this life of it is freed, if its stream's handle is enough.
    /// Counted in [`asking`](Self::asking) until the answer is there.
    #[inline(always)]
    pub(crate) fn ask_for(&mut self, node: Node, life: Life) -> Option<usize> {
        // A block that somebody owns is live, and so its stream is known.
        let live = matches!(life, Life::Generation(_)) || self.live_in(node, life).is_some();
        if !live || self.raw == 0 {
            return None;
        }
        self.asking += 1;
        Some(self.raw)
    }

    /// Takes a large block back into the large-block cache. False if the heap has to free it.
    #[inline]
    pub(crate) fn free_large(&mut self, id: u32, generation: u32) -> bool {
        self.is_fast() && self.put_large(id, Some(generation)) == Some(true)
    }

    /// Frees a block that begins at an address; with a generation only that life of it.
    pub(crate) fn free(&mut self, node: Node, ptr: u64, generation: Option<u32>) -> Freed {
        let Some(live) = self.live(node, ptr, generation) else {
            return Freed::NotLive;
        };
        let freed = self.free_live(node, live);
        if freed != Freed::NeedsHeap {
            self.tell_freed(ptr, live.requested);
        }
        freed
    }

    #[inline(always)]
    fn free_live(&mut self, node: Node, live: Live) -> Freed {
        if !self.is_fast() || live.using != Using::NONE {
            return self.free_shared(node, live);
        }
        self.account_free(live);
        self.runs.put(node, live.granules);
        match self.pages_to_keep() {
            Some(_) => Freed::Page,
            None => Freed::Done,
        }
    }

    /// How many wholly free pages to keep, if there are so many that some should be handed back.
    pub(crate) fn pages_to_keep(&self) -> Option<u32> {
        let whole = self.runs.whole_pages();
        if whole <= SPARE_EXCESS * SPARE_LEAST as u32 {
            return None;
        }
        let pages = self.runs.page_count() / SPARE_PART;
        let keep = pages.clamp(SPARE_LEAST, SPARE_PAGES) as u32;
        (whole > SPARE_EXCESS * keep).then_some(keep)
    }

    /// Takes a block out of the sums.
    #[inline(always)]
    pub(crate) fn account_free(&mut self, live: Live) {
        let bytes = u64::from(live.granules) * GRANULE;
        self.runs.accounts.sub(bytes, u64::from(live.requested));
    }

    /// Whether the stream cache handed nothing out, also from its large-block cache, since this was last asked.
    pub(crate) fn take_quiet(&mut self) -> bool {
        let total = self.runs.accounts.blocks.total() + self.large_cache.reused().blocks;
        std::mem::replace(&mut self.asked_at, total) == total
    }

    /// Whether the stream cache handed anything out lately. `now` is the number of the sharing.
    pub(crate) fn busy(&mut self, now: u64) -> bool {
        let total = self.runs.accounts.blocks.total();
        if total != self.shared_at {
            self.shared_at = total;
            self.busy_at = now;
        }
        now - self.busy_at <= EPOCH
    }
}

/// Sharings after which a stream cache that hands nothing out gets no room.
const EPOCH: u64 = 16;
