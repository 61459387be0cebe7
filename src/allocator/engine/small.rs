//! Small blocks of the packed policy: what stream caches do alone, and what needs the heap.

use std::sync::atomic::Ordering;

use crate::driver::{REVIEW, Stream};

use crate::allocator::cache::grant::Grant;
use crate::allocator::cache::stream_cache::StreamCache;
use crate::allocator::cache::stream_cache::thread::Known;
use crate::allocator::cache::stream_cache::{
    Allocated, Freed, Held, Inner, Life, Node, Owner, PageTable, Small, Using, rarely, thread,
};
use crate::allocator::engine::Engine;
use crate::allocator::engine::naming::Named;
use crate::allocator::heap::request::Checked;
use crate::allocator::size::{GRANULE, PACKED_SMALL_LIMIT};
use crate::allocator::stream::slot::AfterFree;
use crate::allocator::stream::slot::{StreamKey, is_special};
use crate::error::Error;

/// A request that the fast path could not serve: the stream cache that was tried, still locked unless another thread
/// holds it.
pub(crate) struct Missed(pub(super) Option<(&'static StreamCache, Option<Locked>)>);

type Locked = Held<'static, Inner>;

/// Number of attempts to obtain room before the heap serves the request.
const ROUNDS: u32 = 4;

/// Returns the request for this many bytes at any address, if stream caches serve it: above 0 and up to
/// [`PACKED_SMALL_LIMIT`].
#[inline(always)]
pub(crate) fn unaligned(bytes: usize) -> Option<Small> {
    let last = bytes.wrapping_sub(1);
    (last < PACKED_SMALL_LIMIT as usize).then(|| Small {
        granules: (last / GRANULE as usize + 1) as u32,
        align: 1,
        requested: bytes as u32,
    })
}

impl Engine {
    /// Returns the request to a stream cache, if stream caches serve it here.
    #[inline]
    pub(crate) fn small_request(&self, request: &Checked) -> Option<Small> {
        if self.rules.caches() && self.debug.is_none() {
            request.small()
        } else {
            None
        }
    }

    // ---- allocation --------------------------------------------------------------------------

    /// Allocates from the stream cache that the thread used last for the stream, if the cache suffices. While a
    /// recording without stacks runs, the cache also writes the record.
    #[inline(always)]
    pub(crate) fn hit(&self, key: u64, small: Small) -> Result<Grant, Missed> {
        let Some(cache) = thread::find(key) else {
            rarely();
            return Err(Missed(None));
        };
        let now = cache.now();
        if !now.is_quiet() {
            rarely();
            let hit = match now.only_records_blocks() {
                true => self.hit_recorded(key, (small, cache)),
                false => None,
            };
            return hit.ok_or(Missed(None));
        }
        self.hit_quiet(key, (small, cache))
    }

    /// [`hit`](Self::hit) for a stream by its handle, whose id the driver has just reported.
    #[inline(always)]
    pub(crate) fn hit_asked_raw(
        &self,
        (raw, key): (usize, u64),
        small: Small,
        known: Known,
    ) -> Result<Grant, Missed> {
        let Known::Passing(cache) = known else {
            let grant = self.hit(key, small)?;
            thread::remember_asked(raw, grant.place.home());
            return Ok(grant);
        };
        if !cache.now().is_quiet() {
            return Err(Missed(None));
        }
        let grant = self.hit_quiet(key, (small, cache))?;
        // The stream may have been adopted since the thread used it last.
        thread::remember_handle(cache);
        Ok(grant)
    }

    /// [`hit`](Self::hit) in a process without recordings, captures or other watchers.
    #[inline(always)]
    fn hit_quiet(
        &self,
        key: u64,
        (request, cache): (Small, &'static StreamCache),
    ) -> Result<Grant, Missed> {
        let owner = self.owner(key);
        let Some(mut inner) = cache.try_lock() else {
            return Err(Missed(Some((cache, None))));
        };
        match inner.take_anywhere(owner, request) {
            Some(taken) => Ok(Grant::small(cache, taken, request.granules)),
            None => Err(Missed(Some((cache, Some(inner))))),
        }
    }

    #[inline(always)]
    fn hit_recorded(
        &self,
        key: u64,
        (request, cache): (Small, &'static StreamCache),
    ) -> Option<Grant> {
        let mut inner = cache.try_lock()?;
        let taken = inner.take_recorded(self.owner(key), request)?;
        Some(Grant::small(cache, taken, request.granules))
    }

    /// [`hit`](Self::hit) by the handle of a stream, from the stream cache that the thread used last for it, if the
    /// handle stays valid.
    #[inline(always)]
    pub(crate) fn hit_by_handle(
        pages: &PageTable,
        (request, cache): (Small, &'static StreamCache),
        raw: usize,
    ) -> Option<Grant> {
        thread::prefetch_for(cache, request.granules);
        if !cache.now().is_quiet() {
            return None;
        }
        let allocator = pages.at_once_id();
        let mut inner = cache.try_lock()?;
        let key = inner.key_of_handle(raw)?;
        let owner = Owner { allocator, key };
        let taken = inner.take_anywhere(owner, request)?;
        Some(Grant::small(cache, taken, request.granules))
    }

    /// Allocates what [`hit_by_handle`](Self::hit_by_handle) did not serve, if the caches of the stream suffice.
    #[inline(never)]
    pub(crate) fn hit_small_by_handle(
        &self,
        (small, cache): (Small, &'static StreamCache),
        raw: usize,
    ) -> Option<Grant> {
        if !self.unwatched() {
            return None;
        }
        // A lock that another thread holds counts as contention.
        let free = cache.try_lock();
        let key = free.as_ref().map_or_else(
            || cache.lock().key_of_handle(raw),
            |inner| inner.key_of_handle(raw),
        )?;
        self.hit_small(key, small, Missed(Some((cache, free))))
    }

    /// Returns the id of a stream by its handle, if the handle stays valid and the thread knows it.
    pub(crate) fn key_at_hand(&self, raw: usize) -> Option<u64> {
        let Known::Lasting(cache) = thread::find_handle(raw) else {
            return None;
        };
        let inner = cache.lock();
        let key = inner.key_of_handle(raw)?;
        let allocator = self.id;
        inner.serves(Owner { allocator, key }).then_some(key)
    }

    /// [`hit`](Self::hit) for a stream that was just found not to be capturing.
    pub(crate) fn hit_asked(&self, key: StreamKey, request: &Checked) -> Option<Grant> {
        let StreamKey::Id(key) = key else {
            return None;
        };
        let small = self.small_request(request).filter(|_| request.is_plain())?;
        self.hit_now(key, small)
    }

    #[inline(always)]
    fn hit_now(&self, key: u64, small: Small) -> Option<Grant> {
        let cache = thread::find(key)?;
        let mut inner = cache.try_lock()?;
        let allocator = self.id;
        let taken = inner.take_anywhere(Owner { allocator, key }, small)?;
        inner.tell_taken(&taken, small.requested);
        drop(inner);
        // The generations of a page count its allocations.
        if taken.generation.is_multiple_of(REVIEW) {
            self.driver().review_captures();
        }
        Some(Grant::small(cache, taken, small.granules))
    }

    /// [`hit`](Self::hit) while calls query captures: queries the stream, if its handle suffices for that. On a miss
    /// the heap determines the reason.
    #[inline]
    pub(crate) fn hit_watched(&self, stream: &Stream, small: Small) -> Option<Grant> {
        if !self.rules.caches() {
            return None;
        }
        let raw = stream.raw();
        let simple =
            !is_special(raw) && !self.deferred.load(Ordering::Relaxed) && !self.is_scoped();
        if !simple || self.is_past_use() || self.same_driver(stream).is_err() {
            return None;
        }
        // SAFETY: the stream is alive, as the creator of the object guarantees.
        if !unsafe { self.driver().is_uncaptured(raw) } {
            return None;
        }
        self.hit_now(stream.id_at_hand(), small)
    }

    /// Frees a small block while calls query captures, if its stream's handle suffices for the query, the stream is not
    /// capturing, and nothing else has to be checked. Otherwise returns false and changes nothing.
    #[inline(always)]
    pub(crate) fn free_watched(
        &self,
        cache: &'static StreamCache,
        (node, ptr): (Node, u64),
        life: Life,
    ) -> bool {
        if self.is_past_use() {
            return false;
        }
        let Some(raw) = cache.lock().ask_for(node, life) else {
            return false;
        };
        let raw = std::ptr::with_exposed_provenance_mut(raw);
        // SAFETY: a retirement of the stream waits until no query uses it.
        let uncaptured = unsafe { self.driver().is_uncaptured(raw) };
        let mut inner = cache.lock();
        inner.asking -= 1;
        uncaptured && inner.free_told(node, life, ptr)
    }

    /// [`hit`](Self::hit) at one address only: that of the last block of this size which the stream cache took back.
    #[inline]
    pub(crate) fn hit_at(&self, key: u64, bytes: usize, ptr: u64) -> Option<Grant> {
        let request = unaligned(bytes)?;
        let cache = thread::find(key).filter(|cache| cache.now().is_quiet())?;
        let mut inner = cache.try_lock()?;
        if inner.runs.next_quick(request.granules) != Some(ptr) {
            return None;
        }
        let taken = inner.take_anywhere(self.owner(key), request)?;
        Some(Grant::small(cache, taken, request.granules))
    }

    /// Allocates a small block that [`hit`](Self::hit) did not serve. It takes the bytes, because a request passed on
    /// would have to be stored in memory by the caller.
    #[inline(never)]
    pub(crate) fn miss(
        &self,
        bytes: usize,
        stream: &Stream,
        missed: Missed,
    ) -> Result<Grant, Error> {
        let hit = if self.watchful() {
            // It may hold the lock of the cache.
            drop(missed);
            unaligned(bytes).and_then(|small| self.hit_watched(stream, small))
        } else {
            unaligned(bytes).and_then(|small| self.hit_small(stream.id_at_hand(), small, missed))
        };
        let made = hit.map_or_else(|| self.miss_caches(bytes, stream), Ok);
        self.sample(&made, bytes);
        made
    }

    /// Allocates a block that is too large for stream caches, from a large-block cache or the heap.
    #[inline(never)]
    pub(crate) fn allocate_large(&self, bytes: usize, stream: &Stream) -> Result<Grant, Error> {
        let hit = self.hit_large(stream.id_at_hand(), bytes);
        let made = hit.map_or_else(|| self.miss_caches(bytes, stream), Ok);
        self.sample(&made, bytes);
        made
    }

    /// Allocates what no cache served.
    #[inline]
    fn miss_caches(&self, bytes: usize, stream: &Stream) -> Result<Grant, Error> {
        let request = Checked::new(bytes, 1)?;
        self.same_driver(stream)?;
        let named = match stream.known_id() {
            Some(id) => Named {
                key: StreamKey::Id(id),
                raw: stream.raw(),
                stream: Some(stream),
            },
            None => self.named(stream)?,
        };
        self.allocate_missed(&named, &request)
    }

    /// Allocates from the caches of the stream what the fast path could not serve, if that needs no driver call.
    #[inline(never)]
    pub(crate) fn hit_small(&self, key: u64, request: Small, missed: Missed) -> Option<Grant> {
        let (cache, inner) = match missed.0 {
            Some(missed) => missed,
            // No cache was tried, because a recording has to see the allocation.
            None if self.unwatched() => {
                let cache = thread::find(key)?;
                (cache, cache.try_lock())
            }
            None => return None,
        };
        let owner = self.owner(key);
        let (mut inner, contended) = match inner {
            Some(inner) => (inner, false),
            None => {
                let mut inner = cache.lock();
                let contended = inner.serves(owner) && inner.contended();
                (inner, contended)
            }
        };
        let mut outcome = Allocated::Stranger;
        let mut rounds = 0;
        while inner.serves(owner) {
            outcome = inner.take(request);
            match outcome {
                Allocated::NoRun if inner.take_back(true) => {}
                Allocated::NoRun if inner.runs.flush_for(request.span()) => {}
                Allocated::NoRoom if rounds < ROUNDS => {
                    rounds += 1;
                    let bytes = request.bytes();
                    let borrowed;
                    (inner, borrowed) = cache.borrow_room(inner, bytes);
                    if !borrowed {
                        drop(inner);
                        if !cache.pool_room(bytes) {
                            rounds = ROUNDS;
                        }
                        inner = cache.lock();
                    }
                }
                _ => break,
            }
        }
        drop(inner);
        if outcome == Allocated::NoRoom {
            outcome = self.lock().take_at_peak(cache, request, Some(owner));
        }
        if contended {
            self.contended(owner.key, cache);
        }
        match outcome {
            Allocated::Taken(taken) => Some(Grant::small(cache, taken, request.granules)),
            _ => None,
        }
    }

    /// Returns the owner that a stream cache serves without further checks; no owner matches if further checks are
    /// required.
    #[inline(always)]
    pub(crate) fn owner(&self, key: u64) -> Owner {
        let allocator = self.at_once_id();
        Owner { allocator, key }
    }

    /// Handles repeated contention at a stream cache: its stream gets more caches, and this thread chooses another.
    #[cold]
    pub(crate) fn contended(&self, key: u64, cache: &'static StreamCache) {
        thread::forget(key, cache);
        let mut heap = self.lock();
        let (stream, own) = {
            let inner = cache.lock();
            (inner.slot, inner.allocator == self.id && inner.key == key)
        };
        if own {
            heap.split_cache(stream, StreamKey::Id(key));
        }
    }

    // ---- cached memory ------------------------------------------------------------------------

    /// Takes a request at the first address that is free in the stream cache that the thread used last for the stream.
    /// `None` if the heap has to be searched.
    pub(crate) fn small_near(
        &self,
        key: u64,
        request: Small,
        near: &[u64],
    ) -> Option<(Option<Grant>, Vec<u64>)> {
        if !self.unwatched() || near.is_empty() {
            return None;
        }
        let cache = thread::find(key)?;
        let mut inner = cache.lock();
        if !inner.serves(self.owner(key)) {
            return None;
        }
        let Allocated::Taken(taken) = self.take_near(cache, &mut inner, request, near) else {
            return None;
        };
        let free = near.iter().copied().filter(|ptr| {
            let page = self.pages.find(*ptr);
            let own = page.filter(|(owner, _)| std::ptr::eq(*owner, cache));
            own.is_some_and(|(_, page)| inner.runs.is_free(page, *ptr))
        });
        let free = free.collect();
        drop(inner);
        Some((Some(Grant::small(cache, taken, request.granules)), free))
    }

    pub(crate) fn take_near(
        &self,
        cache: &'static StreamCache,
        inner: &mut Inner,
        request: Small,
        near: &[u64],
    ) -> Allocated {
        let pages = near
            .iter()
            .filter_map(|ptr| Some((*ptr, self.pages.find(*ptr)?)));
        for (ptr, (owner, page)) in pages {
            if std::ptr::eq(owner, cache) {
                match inner.take_at(page, ptr, request) {
                    Allocated::NoRun => {}
                    outcome => return outcome,
                }
            }
        }
        Allocated::NoRun
    }

    /// Whether an address lies in free memory of a page.
    pub(crate) fn is_free_small(&self, ptr: u64) -> bool {
        self.pages.find(ptr).is_some_and(|(cache, page)| {
            let inner = cache.lock();
            inner.allocator == self.id && inner.runs.is_free(page, ptr)
        })
    }

    // ---- lookup ------------------------------------------------------------------------------

    /// Returns the stream cache and the node of the small block that begins at an address, if there is one.
    #[inline]
    pub(crate) fn small_at(&self, ptr: u64) -> Option<(&'static StreamCache, Node)> {
        self.pages.find_node(ptr)
    }

    // ---- free --------------------------------------------------------------------------------

    /// Frees the small block that begins at an address; with a generation, only if the block still has it.
    #[inline]
    pub(crate) fn free_small(
        &self,
        cache: &'static StreamCache,
        node: Node,
        ptr: u64,
        generation: Option<u32>,
    ) -> Result<(), Error> {
        if self.watchful() {
            self.refuse_captured_free(cache, (node, ptr), generation)?;
        }
        let mut inner = cache.lock();
        let freed = inner.free(node, ptr, generation);
        if freed == Freed::Done {
            return Ok(());
        }
        // From here on this may be the only reference to the engine, if the block was the last one.
        let keep = inner.owner.clone();
        drop(inner);
        let ended = self.small_freed(cache, (node, ptr), generation, freed);
        drop(keep);
        ended
    }

    /// Completes the steps of a free that a stream cache left to its caller.
    #[inline(never)]
    pub(crate) fn small_freed(
        &self,
        cache: &'static StreamCache,
        block: (Node, u64),
        generation: Option<u32>,
        freed: Freed,
    ) -> Result<(), Error> {
        let mut heap = self.lock();
        let ours = cache.lock().allocator == self.id;
        let mut after = AfterFree::default();
        match freed {
            Freed::Done => {}
            // The page or the batch may have been removed with its last block.
            Freed::Page | Freed::Full(_) if !ours => {}
            Freed::Page => heap.return_surplus(cache, &mut after),
            Freed::Full(stream) => {
                let heap = &mut *heap;
                let (caches, streams) = (&mut heap.caches, &mut heap.streams);
                if caches.close_batches(streams, cache, Some(stream), &mut after) {
                    after.mark(stream, heap.streams[stream].key);
                }
            }
            Freed::NeedsHeap if heap.closed => return Err(Error::Closed),
            Freed::NeedsHeap => {
                if !ours || !heap.free_small(cache, block, generation, &mut after) {
                    return Err(Error::NotLive { ptr: block.1 });
                }
            }
            Freed::NotLive => {
                let (_, ptr) = block;
                return Err(match heap.caches.small_around(ptr) {
                    Some((_, run, _)) if generation.is_none() && run.ptr != ptr => {
                        Error::InteriorPointer { ptr, base: run.ptr }
                    }
                    _ => Error::NotLive { ptr },
                });
            }
        }
        let rest = self.rest_of_free(&heap, after);
        drop(heap);
        self.finish_free(rest);
        Ok(())
    }

    /// [`small_freed`](Self::small_freed) for a dropped block.
    #[cold]
    pub(crate) fn small_dropped(
        &self,
        cache: &'static StreamCache,
        block: (Node, u64),
        generation: u32,
        freed: Freed,
    ) {
        match self.small_freed(cache, block, Some(generation), freed) {
            Ok(()) => {}
            Err(error) => debug_assert!(false, "a live block is freed: {error}"),
        }
    }

    /// Refuses a free on a stream that is capturing.
    #[cold]
    fn refuse_captured_free(
        &self,
        cache: &'static StreamCache,
        (node, ptr): (Node, u64),
        generation: Option<u32>,
    ) -> Result<(), Error> {
        let suspect = {
            let heap = self.lock();
            let inner = cache.lock();
            // A block that is not live is refused for that reason, even where the driver would not answer.
            (inner.allocator == self.id && inner.live(node, ptr, generation).is_some())
                .then(|| heap.streams[inner.slot].suspect())
                .flatten()
        };
        match suspect {
            Some(suspect) => self.refuse_if_capturing(&suspect),
            None => Ok(()),
        }
    }

    // ---- other streams -----------------------------------------------------------------------

    /// Records another stream on a small block, if the two stream caches suffice.
    #[inline]
    pub(crate) fn record_at_once(&self, ptr: u64, key: StreamKey) -> Option<Result<(), Error>> {
        let StreamKey::Id(key) = key else {
            return None;
        };
        if !self.unwatched() {
            return None;
        }
        let (cache, node) = self.small_at(ptr)?;
        let user = thread::find(key)?;
        let using = {
            let mut inner = user.lock();
            if !inner.serves(self.owner(key)) {
                return None;
            }
            let using = Using::one(inner.slot)?;
            // Counted first, because the stream must stay known from here on.
            inner.recorded += 1;
            using
        };
        let noted = {
            let mut inner = cache.lock();
            match inner.live(node, ptr, None) {
                Some(live) if live.using == Using::NONE && Some(inner.slot) != using.slot() => {
                    inner.runs.set_using(node, using);
                    return Some(Ok(()));
                }
                Some(live) => live.using == using || Some(inner.slot) == using.slot(),
                None => false,
            }
        };
        user.lock().recorded -= 1;
        noted.then_some(Ok(()))
    }
}
