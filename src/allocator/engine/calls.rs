//! Allocation, free and recording by handle and by pointer: what every stream cache end stands on.
//!
//! A request asks once. Its stream's caches are asked without the heap's lock ([`Engine::hit`],
//! [`Engine::hit_slowly`]); then the heap, for memory that is ready ([`Engine::allocate_missed`]); then
//! [`reclaim`](crate::allocator::reclaim) makes room. A free goes the same way: to a cache
//! ([`Engine::free_small`] and a block's drop), else to the heap, else it waits until it may be made.
//!
//! The rule of the lock: this file and `reclaim/run.rs` alone take the heap's guard as a value and return it.
//! Everything below them takes the heap by reference, or takes the lock itself.

use std::sync::atomic::Ordering;

use crate::driver::sys;

use crate::allocator::cache::grant::{Grant, Lifetime, Place};
use crate::allocator::cache::stream_cache;
use crate::allocator::cache::stream_cache::{Life, SMALL_ID, StreamCache, page_of};
use crate::allocator::engine::naming::Named;
use crate::allocator::engine::{Engine, Guard, Shared};
use crate::allocator::extent::record::{Recorded, SpaceId};
use crate::allocator::extent::want::Want;
use crate::allocator::heap::Heap;
use crate::allocator::heap::request::Checked;
use crate::allocator::request::Request;
use crate::allocator::size::PACKED_SMALL_LIMIT;
use crate::allocator::stream::slot::AfterFree;
use crate::allocator::stream::slot::StreamKey;
use crate::allocator::stream::slot::Suspect;
use crate::allocator::stream::slot::is_special;
use crate::error::Error;

/// An allocation under way. The stream's slot stays the stream's while the lock is let go; what a
/// call announced is withdrawn if it fails, or if a hook of the user panics in it.
pub(crate) struct Call<'a> {
    engine: &'a Engine,
    stream: u32,
    peak: (u64, u64),
}

impl<'a> Call<'a> {
    pub(crate) fn begin(engine: &'a Engine, heap: &mut Heap, stream: u32, requested: u64) -> Self {
        heap.streams[stream].calls += 1;
        let peak = heap.announce(requested);
        Call {
            engine,
            stream,
            peak,
        }
    }

    /// The call got its block.
    pub(crate) fn end(self, heap: &mut Heap) {
        heap.streams[self.stream].calls -= 1;
        std::mem::forget(self);
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        let mut heap = self.engine.lock();
        heap.streams[self.stream].calls -= 1;
        heap.withdraw(self.peak);
    }
}

/// What a free leaves to do without the lock: markers, and the end of an allocator whose last block it was.
pub(crate) struct RestOfFree {
    after: AfterFree,
    orphaned: bool,
    /// Without the block nothing may keep the engine but this.
    keep: Option<Shared>,
}

impl Engine {
    /// Allocates on a stream.
    #[inline]
    pub(crate) fn allocate(&self, named: &Named<'_>, request: &Request) -> Result<Grant, Error> {
        let checked = Checked::of(request)?;
        if request.is_plain()
            && let StreamKey::Id(key) = named.key
        {
            match self.hit(key, request.bytes()) {
                Ok(grant) => return Ok(grant),
                Err(missed) => {
                    if let Some(grant) = self.hit_slowly(key, request.bytes(), missed) {
                        return Ok(grant);
                    }
                }
            }
        }
        if request.cached_only {
            return self
                .allocate_cached(named, &checked, &[])?
                .0
                .ok_or(Error::NotCached);
        }
        self.allocate_missed(named, &checked)
    }

    /// The number of a block among all that the allocator can have.
    pub(crate) fn id_of(&self, place: &Place) -> u32 {
        let id = place.record().or_else(|| self.pages.id(place.ptr));
        debug_assert!(id.is_some(), "the page of a live block is known");
        id.unwrap_or(SMALL_ID)
    }

    /// Allocates what no cache had: out of the heap's free memory, or by making room.
    #[inline(never)]
    pub(crate) fn allocate_missed(
        &self,
        named: &Named<'_>,
        request: &Checked,
    ) -> Result<Grant, Error> {
        if !self.unwatched() {
            self.usable()?;
        }
        self.refuse_capture(named)?;
        if self.deferred.load(Ordering::Relaxed) {
            self.free_deferred();
        }
        let mut heap = self.lock();
        if heap.closed {
            return Err(Error::Closed);
        }
        if !heap.contended
            && let Some(grant) = heap.take_ready(&self.device, named.key, request)
        {
            return Ok(grant);
        }
        self.reclaim(heap, named, request)
    }

    /// Goes on where more is to be done than to take memory that is ready. Out of line, since what comes before
    /// needs less of the stack.
    #[inline(never)]
    fn reclaim<'a>(
        &'a self,
        heap: Guard<'a>,
        named: &Named<'_>,
        request: &Checked,
    ) -> Result<Grant, Error> {
        let (mut heap, stream) = self.slot(heap, named)?;
        self.same_device(&heap, stream)?;
        if heap.closed {
            return Err(Error::Closed);
        }
        let cache = heap.cache_of(stream, stream_cache::thread::thread_number());
        let call = Call::begin(self, &mut heap, stream, request.requested);
        let (mut heap, grant) = match self.small_request(request) {
            Some(small) => match self.obtain_small(heap, (named.key, stream), cache, small) {
                // At a limit memory of the other arena is better than none.
                Err(Error::OutOfMemory(refusal)) => self
                    .left_over(&request.want(SpaceId::Large, stream), cache)
                    .ok_or(Error::OutOfMemory(refusal))?,
                obtained => obtained?,
            },
            None => self.allocate_large(heap, (named.key, stream), cache, request)?,
        };
        call.end(&mut heap);
        let repays = heap.physical.bursts.debt && grant.bytes() > PACKED_SMALL_LIMIT;
        drop(heap);
        if repays {
            self.repay(stream);
        }
        Ok(grant)
    }

    /// Allocates from memory that the stream may use without a wait: at the first of the addresses
    /// `near` that is free, else the best fit. `None` if there is none. Also returns which of the
    /// addresses lie in free memory still.
    pub(crate) fn allocate_cached(
        &self,
        named: &Named<'_>,
        request: &Checked,
        near: &[u64],
    ) -> Result<(Option<Grant>, Vec<u64>), Error> {
        if let Some(small) = self.small_request(request)
            && let StreamKey::Id(key) = named.key
            && let Some(found) = self.small_near(key, small, near)
        {
            return Ok(found);
        }
        drop(self.open()?);
        self.refuse_capture(named)?;
        self.free_deferred();
        let (mut heap, stream) = self.slot(self.open()?, named)?;
        self.same_device(&heap, stream)?;
        if heap.closed {
            return Err(Error::Closed);
        }
        // Nothing is announced before there is a block: a request for cached memory may find none.
        let call = Call::begin(self, &mut heap, stream, 0);
        let cache = heap.cache_of(stream, stream_cache::thread::thread_number());
        let near_left = near.iter().copied();
        let (mut heap, found, free) = match self.small_request(request) {
            Some(small) => {
                if let StreamKey::Id(key) = named.key {
                    stream_cache::thread::remember(key, cache);
                }
                let (heap, found) = self.take_cached_small(heap, cache, small, near)?;
                let free = near_left.filter(|at| self.is_free_small(*at)).collect();
                (heap, found, free)
            }
            None => {
                let (heap, found) = self.take_cached(heap, (stream, cache), request, near)?;
                let space = heap.rules.space_of(request.span_bytes());
                let free = near_left.filter(|at| heap.extents.piece_around(space, *at).is_some());
                let free = free.collect();
                (heap, found, free)
            }
        };
        call.end(&mut heap);
        Ok((found, free))
    }

    fn take_cached<'a>(
        &'a self,
        mut heap: Guard<'a>,
        (stream, cache): (u32, &'static StreamCache),
        request: &Checked,
        near: &[u64],
    ) -> Result<(Guard<'a>, Option<Grant>), Error> {
        heap.uncache_provisional();
        heap.empty_large_caches_of(stream);
        let want = heap.want(request, stream);
        let whole = want.in_one_handle();
        let take = |heap: &mut Heap| match whole {
            true => heap.take_in_handle(&want),
            false => heap.take_near(&want, near),
        };
        let mut found = take(&mut heap);
        if found.is_none() && (whole || !near.is_empty() || heap.best(&want).is_none()) {
            // Memory that other streams used may be free by now.
            heap.streams.ask_again();
            heap = self.poll_before(heap, stream)?;
            found = take(&mut heap);
        }
        if found.is_none() && !whole {
            found = heap.take_best(&want);
        }
        if found.is_none()
            && let Some(run) = heap.cached_view(&want, (self.views_allowed(), self.total_memory))
        {
            (heap, found) = self.take_in_view(heap, &want, run)?;
        }
        let grant = found.map(|id| {
            heap.stats.hits += 1;
            heap.announce(want.requested);
            heap.granted(id, stream, want.requested, cache)
        });
        Ok((heap, grant))
    }

    /// The slot of a stream, registered if it is new.
    fn slot<'a>(
        &'a self,
        mut heap: Guard<'a>,
        named: &Named<'_>,
    ) -> Result<(Guard<'a>, u32), Error> {
        if let Some(stream) = heap.known_slot(named) {
            return Ok((heap, stream));
        }
        drop(heap);
        let (context, holder) = self.newcomer(named)?;
        heap = self.lock();
        let stream = heap.adopt(named.key, named.raw as usize, context, holder);
        Ok((heap, stream))
    }

    /// Room for a small request in the arena of large ones, when no page could be had for it.
    fn left_over(&self, want: &Want, cache: &'static StreamCache) -> Option<(Guard<'_>, Grant)> {
        let mut heap = self.lock();
        let run = heap.finder(want.space, want.stream)?.ready_run(want)?;
        let id = heap.take(want, run)?;
        // It did not run out after all.
        heap.stats.ooms -= 1;
        let grant = heap.granted(id, want.stream, want.requested, cache);
        Some((heap, grant))
    }

    fn allocate_large<'a>(
        &'a self,
        mut heap: Guard<'a>,
        (key, stream): (StreamKey, u32),
        cache: &'static StreamCache,
        request: &Checked,
    ) -> Result<(Guard<'a>, Grant), Error> {
        if let StreamKey::Id(key) = key {
            stream_cache::thread::remember(key, cache);
        }
        let want = heap.want(request, stream);
        let contended = heap.contended;
        heap.pass_by_cache(cache, contended);
        let heap = self.mark_due(heap, stream);
        let (mut heap, id, missed) = self.obtain(heap, &want)?;
        if missed {
            heap.stats.misses += 1;
        } else {
            heap.stats.hits += 1;
        }
        let mut grant = heap.granted(id, stream, request.requested, cache);
        if self.rules.caches() {
            let id = grant.place.record().unwrap_or(id);
            grant.set_cached(heap.cache_handed_out(id, cache, request.is_plain()));
        }
        Ok((heap, grant))
    }

    /// The live large block that starts at a pointer.
    fn live(&self, heap: &mut Heap, ptr: sys::CUdeviceptr) -> Result<u32, Error> {
        if let Some(id) = heap.extents.lookup.exact(ptr) {
            return Ok(id);
        }
        let interior = |base| Error::InteriorPointer { ptr, base };
        Err(match heap.large_around(ptr) {
            Some(id) => interior(heap.extents.records[id].addr),
            None => match heap.caches.small_around(ptr) {
                Some((_, run, _)) => interior(run.ptr),
                None if heap.physical.ours(ptr) => Error::NotLive { ptr },
                None => Error::NotOurs { ptr },
            },
        })
    }

    /// Frees the block that starts at a pointer.
    #[inline]
    pub(crate) fn free_ptr(&self, ptr: sys::CUdeviceptr) -> Result<(), Error> {
        if self.unwatched()
            && let Some((cache, node)) = self.small_at(ptr)
            && let Some(mut inner) = cache.try_lock()
            && inner.free_at_once(node, Life::At(ptr))
        {
            return Ok(());
        }
        self.free_slowly(ptr)
    }

    #[inline(never)]
    fn free_slowly(&self, ptr: sys::CUdeviceptr) -> Result<(), Error> {
        self.usable()?;
        if let Some((cache, node)) = self.small_at(ptr) {
            return self.free_small(cache, node, ptr, None);
        }
        let mut heap = self.open()?;
        let id = self.live(&mut heap, ptr)?;
        self.free_record(heap, (id, None), ptr)
    }

    /// Frees the large block of a record; with a generation only that life of it.
    fn free_record<'a>(
        &'a self,
        mut heap: Guard<'a>,
        (id, generation): (u32, Option<u32>),
        ptr: sys::CUdeviceptr,
    ) -> Result<(), Error> {
        if !self.watchful()
            && let Some(freed) = heap.free_into_cache(id, generation)
        {
            return if freed {
                Ok(())
            } else {
                Err(Error::NotLive { ptr })
            };
        }
        heap.uncache(id);
        let generation = generation.unwrap_or(heap.extents.records[id].generation);
        let block = (id, generation);
        if !heap.is_live(block) {
            return Err(Error::NotLive { ptr });
        }
        let stream = heap.extents.records[id].stream;
        if self.watchful()
            && let Some(suspect) = heap.streams[stream].suspect()
        {
            drop(heap);
            self.refuse_if_capturing(&suspect)?;
            // It may be the last to hold its stream, which is destroyed outside the lock.
            drop(suspect);
            heap = self.open()?;
            if !heap.is_live(block) {
                return Err(Error::NotLive { ptr });
            }
        }
        let after = heap.free(id);
        let rest = self.rest_of_free(&heap, after);
        drop(heap);
        self.finish_free(rest);
        Ok(())
    }

    /// Frees a large block in the heap, if that needs no look at anything else: neither the caches of large
    /// blocks, nor captures, nor what comes after the last block. False, with nothing changed, if it does.
    #[inline(never)]
    pub(crate) fn free_in_heap(&self, id: u32, generation: u32) -> bool {
        let mut heap = self.lock();
        if heap.closed || heap.orphaned {
            return false;
        }
        if heap.free_alone(id, generation) {
            return true;
        }
        if !heap.is_live((id, generation)) || heap.extents.records[id].cached {
            return false;
        }
        let after = heap.free(id);
        let rest = self.rest_of_free(&heap, after);
        drop(heap);
        self.finish_free(rest);
        true
    }

    /// Whether a block's life, by its identity, is going on.
    pub(crate) fn is_live(&self, block: &Lifetime) -> bool {
        if block.id & SMALL_ID == 0 {
            return self.lock().is_live((block.id, block.generation));
        }
        self.small_at(block.ptr).is_some_and(|(cache, node)| {
            let inner = cache.lock();
            inner.runs.is_numbered(node, page_of(block.id))
                && inner
                    .live(node, block.ptr, Some(block.generation))
                    .is_some()
        })
    }

    /// Whether the stream of a live block was retired, or is about to be, by the block's identity.
    pub(crate) fn stream_retired(&self, block: &Lifetime) -> bool {
        let heap = self.lock();
        let stream = match self.small_at(block.ptr) {
            Some((cache, _)) if block.id & SMALL_ID != 0 => cache.lock().slot,
            _ if block.id & SMALL_ID != 0 => return false,
            _ => heap.extents.records[block.id].stream,
        };
        !heap.streams[stream].named
    }

    /// Frees a block by its identity.
    pub(crate) fn free_block(&self, block: &Lifetime) -> Result<(), Error> {
        let ptr = block.ptr;
        if block.id & SMALL_ID != 0 {
            self.usable()?;
            let (cache, node) = self.small_at(ptr).ok_or(Error::NotLive { ptr })?;
            // A page that came again has another number, and its generations begin anew.
            if !cache.lock().runs.is_numbered(node, page_of(block.id)) {
                return Err(Error::NotLive { ptr });
            }
            return self.free_small(cache, node, ptr, Some(block.generation));
        }
        let heap = self.open()?;
        self.free_record(heap, (block.id, Some(block.generation)), ptr)
    }

    /// What a free leaves to do once the lock is let go, if anything.
    #[inline]
    pub(crate) fn rest_of_free(&self, heap: &Heap, after: AfterFree) -> Option<RestOfFree> {
        if after.is_empty() && !heap.orphaned {
            return None;
        }
        Some(RestOfFree {
            after,
            orphaned: heap.orphaned,
            keep: self.keep(),
        })
    }

    /// Does, without the lock, what a free left to do.
    #[inline]
    pub(crate) fn finish_free(&self, rest: Option<RestOfFree>) {
        if let Some(rest) = rest {
            self.mark_all(rest.after.streams());
            if rest.orphaned {
                self.abandon();
            }
            drop(rest.keep);
        }
    }

    pub(crate) fn refuse_if_capturing(&self, suspect: &Suspect) -> Result<(), Error> {
        let named = Named {
            key: suspect.key,
            raw: std::ptr::with_exposed_provenance_mut(suspect.raw),
            stream: None,
        };
        if is_special(named.raw) {
            return self.refuse_special_capture(&named, &suspect.context);
        }
        self.refuse_capture(&named)
    }

    /// Records a use of a block on another stream: everything that stream is given until the free,
    /// or with `now` only what it was given so far.
    #[inline]
    pub(crate) fn record(
        &self,
        ptr: sys::CUdeviceptr,
        named: &Named<'_>,
        now: bool,
    ) -> Result<(), Error> {
        self.usable()?;
        if !now && let Some(done) = self.record_at_once(ptr, named.key) {
            return done;
        }
        self.record_in_heap(ptr, named, now)
    }

    #[inline(never)]
    fn record_in_heap(
        &self,
        ptr: sys::CUdeviceptr,
        named: &Named<'_>,
        now: bool,
    ) -> Result<(), Error> {
        {
            let mut heap = self.open()?;
            if heap.large_around(ptr).is_none() && heap.caches.small_around(ptr).is_none() {
                return Err(if heap.physical.ours(ptr) {
                    Error::NotLive { ptr }
                } else {
                    Error::NotOurs { ptr }
                });
            }
        }
        self.refuse_capture(named)?;
        let (mut heap, stream) = self.slot(self.open()?, named)?;
        let cache = heap.cache_of(stream, stream_cache::thread::thread_number());
        if let StreamKey::Id(key) = named.key {
            stream_cache::thread::remember(key, cache);
        }
        let block = heap.large_around(ptr);
        let owner = match block {
            Some(id) => Some(heap.extents.records[id].stream),
            None => heap.caches.small_around(ptr).map(|(_, _, owner)| owner),
        };
        let Some(owner) = owner else {
            return Err(Error::NotLive { ptr });
        };
        let now = now && owner != stream;
        // Covered by the marker below: frees after it get a later ticket.
        let ticket = now.then(|| {
            let slot = &mut heap.streams[stream];
            slot.open_uses = slot.open_uses.saturating_add(1);
            slot.open
        });
        if now {
            // What may fail comes first: a use of which the caller hears that it failed is not recorded.
            drop(heap);
            self.mark(stream, named.key)?;
            heap = self.open()?;
            let slot = &heap.streams[stream];
            if !slot.in_use || slot.key != named.key {
                // Only a stream of which everything is complete is forgotten.
                return Ok(());
            }
        }
        match heap.large_around(ptr) {
            Some(id) => heap.record(id, stream, ticket),
            None => {
                if !heap.record_small(ptr, Recorded { stream, ticket }) {
                    return Err(Error::NotLive { ptr });
                }
            }
        }
        Ok(())
    }

    /// The slot of a stream that is known, or why it is not.
    pub(crate) fn known(&self, named: &Named<'_>) -> Result<u32, Error> {
        let heap = self.open()?;
        let known = heap.streams.find(named.key);
        known.ok_or_else(|| heap.streams.not_here(named.raw as usize))
    }

    /// All slots of a stream that is known: more than one where others retired it while it went on.
    fn known_all(&self, named: &Named<'_>) -> Result<Vec<u32>, Error> {
        let heap = self.open()?;
        let slots = heap.streams.all_of(named.key);
        if slots.is_empty() {
            return Err(heap.streams.not_here(named.raw as usize));
        }
        Ok(slots)
    }

    /// Records the last marker of a stream whose owner is about to destroy it.
    pub(crate) fn retire(&self, named: &Named<'_>) -> Result<(), Error> {
        let slots = self.known_all(named)?;
        self.refuse_capture(named)?;
        for stream in slots {
            self.retire_slot(stream, named.key)?;
        }
        Ok(())
    }
}
