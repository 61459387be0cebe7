//! Allocation, by stream object and by stream handle.
//!
//! A request tries three steps: its stream's caches, without the heap's lock ([`Engine::hit`], [`Engine::hit_slow`]);
//! then ready memory of the heap ([`Engine::allocate_missed`]); then [`reclaim`](crate::allocator::reclaim), which
//! makes room.
//!
//! Rule of the lock: only functions of this file and of `reclaim/run.rs` take the heap's guard and return it, because
//! they release the lock meanwhile. All others take the heap by reference, or take the lock themselves.

use std::sync::atomic::Ordering;

use crate::allocator::cache::grant::{Grant, Missed, Place};
use crate::allocator::cache::stream_cache::{Allocated, Small, StreamCache};
use crate::allocator::calls::cached;
use crate::allocator::engine::naming::Named;
use crate::allocator::engine::{Engine, Guard, idle, recorded};
use crate::allocator::extent::record::SpaceId;
use crate::allocator::extent::want::Want;
use crate::allocator::graph::run as graph_run;
use crate::allocator::heap::request::Checked;
use crate::allocator::heap::{Heap, PeakUpdate};
use crate::allocator::inspect::holders::set_label;
use crate::allocator::plan::alias::ready_in_view;
use crate::allocator::plan::growth;
use crate::allocator::reclaim::run;
use crate::allocator::request::Request;
use crate::allocator::size::PAGE_GRANULES;
use crate::allocator::stream::slot::{AfterFree, StreamKey};
use crate::block::Tag;
use crate::driver::process;
use crate::error::Error;
use crate::event::names;

/// An allocation in progress. It keeps the stream's slot reserved while the lock is released. If the allocation fails,
/// or if a hook of the user panics in it, its update of the peak is reverted.
struct PendingAllocation<'a> {
    engine: &'a Engine,
    stream: u32,
    /// The stream cache that the thread uses for the stream from now on.
    cache: &'static StreamCache,
    peak: PeakUpdate,
}

impl PendingAllocation<'_> {
    /// Ends the allocation after it has obtained its block.
    fn end(self, heap: &mut Heap) {
        heap.streams[self.stream].calls -= 1;
        std::mem::forget(self);
    }
}

impl Drop for PendingAllocation<'_> {
    fn drop(&mut self) {
        let mut heap = self.engine.lock();
        heap.streams[self.stream].calls -= 1;
        heap.revert_peak_live(self.peak);
    }
}

impl Engine {
    /// Allocates on a stream what the fast path did not serve.
    pub(crate) fn allocate(
        &self,
        named: &Named<'_>,
        request: &Request,
        missed: Missed,
    ) -> Result<Grant, Error> {
        let checked = Checked::of(request)?;
        let hit = match named.key {
            StreamKey::Id(key) if request.is_plain() => self.hit_slow(key, request.bytes(), missed),
            _ => {
                // It may hold the lock of a cache.
                drop(missed);
                None
            }
        };
        let made = match hit {
            Some(grant) => Ok(grant),
            None if request.cached_only => {
                match graph_run::allocate::allocate(self, named, &checked, true)? {
                    Some(grant) => Ok(grant),
                    None => (self.allocate_cached(named, &checked, &[])?.0).ok_or(Error::NotCached),
                }
            }
            None => self.allocate_missed(named, &checked),
        };
        if request.tag != Tag::NONE
            && let Ok(grant) = &made
        {
            self.label(grant, request.tag);
        }
        recorded::sample(self, &made, request.bytes());
        made
    }

    /// Sets a block's label for out-of-memory reports, debug modes and the NVTX tool.
    #[inline(never)]
    fn label(&self, grant: &Grant, tag: Tag) {
        if let Some(debug) = &self.debug {
            debug.name(grant.ptr(), tag);
        }
        if process::has_tool()
            && let Some(tool) = self.lock().recorder.tool
        {
            tool.name(grant.ptr(), tag.as_str());
        }
        let label = names::number_of(tag.as_str()) as u16;
        let Place { generation, .. } = grant.place;
        match (grant.place.node(), grant.place.record()) {
            (Some(node), _) => {
                let mut inner = grant.place.home().lock();
                if let Some(names) = inner.runs.names_mut(node, generation) {
                    names.label = label;
                }
            }
            (None, Some(id)) => set_label(&mut self.lock(), id, label),
            (None, None) => {}
        }
    }

    /// Allocates what no cache could serve: from a graph pool if the request belongs to one, else from the heap's free
    /// memory, or by making room.
    #[inline(never)]
    pub(crate) fn allocate_missed(
        &self,
        named: &Named<'_>,
        request: &Checked,
    ) -> Result<Grant, Error> {
        if !self.is_fast() || self.unretired || self.deferred.load(Ordering::Relaxed) {
            return allocate_checked(self, named, request);
        }
        self.refuse_capture(named)?;
        self.allocate_locked(named, request)
    }

    /// Allocates for a request that belongs to no graph pool.
    pub(crate) fn allocate_in_heap(
        &self,
        named: &Named<'_>,
        request: &Checked,
    ) -> Result<Grant, Error> {
        self.refuse_capture(named)?;
        if self.unretired {
            self.mark_while_named(named);
        }
        self.free_deferred();
        if self.needs_checks()
            && request.is_plain()
            && let StreamKey::Id(key) = named.key
            && let Some(small) = self.small_request(request)
            && let Some(grant) = self.hit_checked(key, small)
        {
            return Ok(grant);
        }
        self.allocate_locked(named, request)
    }

    /// Allocates from the heap's ready memory, or by making room.
    #[inline(always)]
    fn allocate_locked(&self, named: &Named<'_>, request: &Checked) -> Result<Grant, Error> {
        let mut heap = self.lock();
        if !heap.contended
            && let Some(grant) =
                heap.take_ready(named.key, named.stream.is_some(), named.cache, request)
        {
            drop(heap);
            idle::release_if_due(self);
            return Ok(grant);
        }
        self.make_room(heap, named, request)
    }

    /// Continues an allocation that no ready memory could serve. Kept out of line, because the code before it needs
    /// less stack.
    #[inline(never)]
    fn make_room<'a>(
        &'a self,
        heap: Guard<'a>,
        named: &Named<'_>,
        request: &Checked,
    ) -> Result<Grant, Error> {
        let made = obtain_grant(self, heap, named, request);
        if let Err(Error::OutOfMemory(refused)) = &made {
            let mut heap = self.lock();
            heap.stats.ooms += 1;
            if process::is_recording() {
                let stream = (named.key, named.raw as usize);
                heap.recorder.record_refusal(&heap.streams, refused, stream);
            }
        }
        made
    }

    /// Allocates from memory that the stream may use without a wait: at the first free address of `near`, or else by
    /// best fit. `None` if no memory fits. Also returns the addresses of `near` that still lie in free memory.
    pub(crate) fn allocate_cached(
        &self,
        named: &Named<'_>,
        request: &Checked,
        near: &[u64],
    ) -> Result<(Option<Grant>, Vec<u64>), Error> {
        if let Some(small) = self.small_request(request)
            && let StreamKey::Id(key) = named.key
            && let Some(found) = cached::small_near(self, key, small, near)
        {
            return Ok(found);
        }
        drop(self.open()?);
        self.refuse_capture(named)?;
        self.free_deferred();
        let request = &match &self.debug {
            Some(debug) => debug.with_guard(request)?,
            None => *request,
        };
        // It begins with 0 bytes, because a request for cached memory may find none.
        let (heap, pending) = begin(self, self.open()?, named, 0)?;
        let (stream, cache) = (pending.stream, pending.cache);
        let near_left = near.iter().copied();
        let (mut heap, found, free) = match self.small_request(request) {
            Some(small) => {
                let (heap, found) = take_cached_small(self, heap, cache, small, near)?;
                let free = near_left
                    .filter(|at| cached::is_free_small(self, *at))
                    .collect();
                (heap, found, free)
            }
            None => {
                let want = heap.want(request, stream);
                let (heap, found) = take_cached(self, heap, cache, &want, near)?;
                let free =
                    near_left.filter(|at| heap.extents.piece_around(want.space, *at).is_some());
                let free = free.collect();
                (heap, found, free)
            }
        };
        pending.end(&mut heap);
        drop(heap);
        if let (Some(debug), Some(grant)) = (&self.debug, &found) {
            debug.watch(self, grant, named, request.requested);
        }
        Ok((found, free))
    }

    /// Returns the slot of a stream, and registers the stream if it is new.
    pub(crate) fn slot<'a>(
        &'a self,
        mut heap: Guard<'a>,
        named: &Named<'_>,
    ) -> Result<(Guard<'a>, u32), Error> {
        if let Some(stream) = heap.known_slot(named.key, named.raw as usize, named.kept()) {
            return Ok((heap, stream));
        }
        drop(heap);
        let (context, holder) = self.prepare_registration(named)?;
        heap = self.lock();
        let stream = heap.register(named.key, named.raw as usize, context, holder);
        Ok((heap, stream))
    }
}

/// [`Engine::allocate_missed`] where a call has to do more before it locks the heap.
#[cold]
#[inline(never)]
fn allocate_checked(engine: &Engine, named: &Named<'_>, request: &Checked) -> Result<Grant, Error> {
    if let Some(debug) = &engine.debug {
        return debug.allocate(engine, named, request);
    }
    if !engine.is_fast()
        && let Some(grant) = graph_run::allocate::allocate(engine, named, request, false)?
    {
        return Ok(grant);
    }
    engine.allocate_in_heap(named, request)
}

/// Obtains a block for a request that no ready memory could serve.
fn obtain_grant<'a>(
    engine: &'a Engine,
    heap: Guard<'a>,
    named: &Named<'_>,
    request: &Checked,
) -> Result<Grant, Error> {
    heap.ensure_serving()?;
    let (mut heap, pending) = begin(engine, heap, named, request.requested)?;
    let (stream, cache) = (pending.stream, pending.cache);
    let (mut heap, grant) = match engine.small_request(request) {
        Some(small) => match obtain_small(engine, heap, stream, cache, small) {
            // At a limit, memory of the other arena is better than a failure.
            Err(Error::OutOfMemory(refusal)) => {
                left_over(engine, &request.want(SpaceId::Large, stream), cache)
                    .ok_or(Error::OutOfMemory(refusal))?
            }
            obtained => obtained?,
        },
        None => {
            let want = heap.want(request, stream);
            let contended = heap.contended;
            heap.prepare_large_request(cache, contended);
            let heap = run::record_due_markers(engine, heap, stream);
            let (mut heap, id, missed) = run::obtain(engine, heap, &want)?;
            if missed {
                heap.stats.misses += 1;
            } else {
                heap.stats.hits += 1;
            }
            let grant = heap.hand_out(id, &want, cache, request.is_plain());
            (heap, grant)
        }
    };
    pending.end(&mut heap);
    drop(heap);
    idle::release_if_due(engine);
    Ok(grant)
}

/// Begins an allocation of `bytes`, and registers its stream if that is new.
fn begin<'a>(
    engine: &'a Engine,
    heap: Guard<'a>,
    named: &Named<'_>,
    requested: u64,
) -> Result<(Guard<'a>, PendingAllocation<'a>), Error> {
    let (mut heap, stream) = engine.slot(heap, named)?;
    heap.streams.check_device(&engine.device, stream)?;
    heap.ensure_serving()?;
    let cache = heap.find_cache(named.key, stream);
    heap.streams[stream].calls += 1;
    let pending = PendingAllocation {
        engine,
        stream,
        cache,
        peak: heap.raise_peak_live(requested),
    };
    Ok((heap, pending))
}

/// Takes a large block for [`Engine::allocate_cached`], if ready memory serves it.
fn take_cached<'a>(
    engine: &'a Engine,
    mut heap: Guard<'a>,
    cache: &'static StreamCache,
    want: &Want,
    near: &[u64],
) -> Result<(Guard<'a>, Option<Grant>), Error> {
    heap.uncache_provisional();
    for at in 0..heap.caches.of(want.stream).len() {
        let cache = heap.caches.of(want.stream)[at];
        heap.empty_large_cache(cache);
    }
    let whole = want.in_one_handle();
    let take = |heap: &mut Heap| match whole {
        true => growth::take_in_handle(heap, want),
        false => heap.take_near(want, near),
    };
    let mut found = take(&mut heap);
    if found.is_none() && (whole || !near.is_empty() || heap.best(want).is_none()) {
        // Memory that other streams used may be complete by now.
        heap.streams.reset_backoff();
        heap = run::poll_before(engine, heap, want.stream)?;
        found = take(&mut heap);
    }
    if found.is_none() && !whole {
        found = heap.take_best(want);
    }
    if found.is_none()
        && want.fits_views(engine.views.are_allowed(), engine.total_memory)
        && let Some(run) = ready_in_view(&heap, want, &mut None)
    {
        (heap, found) = run::take_in_view(engine, heap, want, run)?;
    }
    let grant = found.map(|id| {
        heap.stats.hits += 1;
        heap.raise_peak_live(want.requested);
        heap.grant(id, want.stream, want.requested, cache)
    });
    Ok((heap, grant))
}

/// Serves a small request from the arena of large blocks when no page could be obtained for it.
fn left_over<'a>(
    engine: &'a Engine,
    want: &Want,
    cache: &'static StreamCache,
) -> Option<(Guard<'a>, Grant)> {
    let mut heap = engine.lock();
    let run = heap.finder(want.space, want.stream)?.ready_run(want)?;
    let id = heap.take(want, run)?;
    let grant = heap.grant(id, want.stream, want.requested, cache);
    Some((heap, grant))
}

/// Allocates a small block from a stream cache, and adds pages to the cache if it has no room.
fn obtain_small<'a>(
    engine: &'a Engine,
    mut heap: Guard<'a>,
    stream: u32,
    cache: &'static StreamCache,
    request: Small,
) -> Result<(Guard<'a>, Grant), Error> {
    let (mut missed, mut polled) = (false, false);
    loop {
        let outcome = cache.lock().take(request);
        let outcome = match outcome {
            Allocated::NoRoom => heap.take_at_peak(cache, request, None),
            outcome => outcome,
        };
        if let Allocated::Taken(taken) = outcome {
            if missed {
                heap.stats.misses += 1;
                heap.caches.misses += 1;
            }
            return Ok((heap, Grant::small(cache, taken, request.granules)));
        }
        {
            let mut inner = cache.lock();
            if inner.take_back(true) || inner.runs.flush_for(request.span()) {
                continue;
            }
        }
        if !polled && cache.lock().take_poll_due() {
            // Blocks that other streams used may be complete by now.
            polled = true;
            let close = cache.lock().holds_much();
            let freed;
            (heap, freed) = take_back_shared(engine, heap, cache, close)?;
            cache.lock().record_poll(freed);
            continue;
        }
        let grown;
        (heap, grown) = obtain_page(engine, heap, stream, cache, request)?;
        missed |= grown;
    }
}

/// Adds a page to a stream cache, or merges the blocks that the cache keeps unmerged. Returns whether memory was
/// obtained for it.
fn obtain_page<'a>(
    engine: &'a Engine,
    mut heap: Guard<'a>,
    stream: u32,
    cache: &'static StreamCache,
    request: Small,
) -> Result<(Guard<'a>, bool), Error> {
    let want = page_want(stream, request);
    let mut ready = heap.take_best(&want);
    if ready.is_none() && cache.lock().runs.flush_quick() {
        return Ok((heap, false));
    }
    if ready.is_none() {
        // Memory that other stream caches have not used lately is taken before growth.
        let mut givers = heap.flush_idle();
        if !givers.is_empty() {
            givers.retain(|giver| *giver != stream);
            heap = cover(engine, heap, &givers)?;
            ready = heap.take_best(&want);
        }
    }
    if ready.is_none() && cache.lock().holds_a_page() {
        // So are blocks that this cache holds back for other streams in batches that are not full.
        let freed;
        (heap, freed) = take_back_shared(engine, heap, cache, true)?;
        if freed {
            return Ok((heap, false));
        }
        ready = heap.take_best(&want);
    }
    if let Some(id) = ready {
        heap.add_page(id, cache)?;
        return Ok((heap, false));
    }
    let (mut heap, id, missed) = run::obtain(engine, heap, &want)?;
    heap.add_page(id, cache)?;
    Ok((heap, missed))
}

/// Records markers for the streams' frees where that is allowed, and polls the streams.
fn cover<'a>(engine: &'a Engine, heap: Guard<'a>, streams: &[u32]) -> Result<Guard<'a>, Error> {
    let mut ours = heap.streams.kept_without_marker();
    ours.retain(|(stream, _)| streams.contains(stream));
    if ours.is_empty() {
        return Ok(heap);
    }
    let covered = run::run_unlocked(engine, heap, || {
        engine.cover_all(&ours)?;
        engine.poll_some(|stream| streams.contains(&stream))
    })?;
    Ok(covered.0)
}

/// Polls whether other streams have completed their uses of the blocks that a stream cache holds back for them;
/// with `close`, also those in batches that are not full. Returns whether any block became free.
fn take_back_shared<'a>(
    engine: &'a Engine,
    mut heap: Guard<'a>,
    cache: &'static StreamCache,
    close: bool,
) -> Result<(Guard<'a>, bool), Error> {
    let before = cache.lock().pending_bytes();
    let closed = close && {
        let heap = &mut *heap;
        let mut after = AfterFree::default();
        heap.caches
            .close_batches(&mut heap.streams, cache, None, &mut after)
    };
    if closed {
        let ours = heap.streams.kept_without_marker();
        (heap, _) = run::run_unlocked(engine, heap, || engine.cover_all(&ours))?;
    }
    // Streams for which other caches hold blocks back are skipped: their own requests poll them.
    let users = heap.caches.held_back_for(cache);
    let wanted = |stream| users.contains(&stream);
    let full = heap.streams.full_batches(wanted);
    if !full.is_empty() {
        (heap, _) = run::run_unlocked(engine, heap, || engine.cover_all(&full))?;
    }
    if let Some(due) = heap.streams.due_markers(wanted) {
        (heap, _) = run::run_unlocked(engine, heap, || engine.poll_due(due, wanted))?;
    }
    heap.return_held_back();
    let freed = cache.lock().pending_bytes() < before;
    Ok((heap, freed))
}

/// Takes a small block for [`Engine::allocate_cached`], if ready memory serves it.
fn take_cached_small<'a>(
    engine: &'a Engine,
    mut heap: Guard<'a>,
    cache: &'static StreamCache,
    request: Small,
    near: &[u64],
) -> Result<(Guard<'a>, Option<Grant>), Error> {
    let (mut polled, mut paged) = (false, false);
    loop {
        let outcome = {
            let mut inner = cache.lock();
            inner.take_back(true);
            match cached::take_near(engine, cache, &mut inner, request, near) {
                Allocated::NoRun => inner.take(request),
                outcome => outcome,
            }
        };
        let outcome = match outcome {
            Allocated::NoRoom => heap.take_at_peak(cache, request, None),
            outcome => outcome,
        };
        if let Allocated::Taken(taken) = outcome {
            return Ok((heap, Some(Grant::small(cache, taken, request.granules))));
        }
        if cache.lock().runs.flush_quick() {
            continue;
        }
        if !polled {
            // Memory that other streams used may be complete by now.
            polled = true;
            heap.streams.reset_backoff();
            (heap, _) = take_back_shared(engine, heap, cache, true)?;
            let stream = cache.lock().slot;
            heap = run::poll_before(engine, heap, stream)?;
            continue;
        }
        let want = page_want(cache.lock().slot, request);
        let taken = if paged { None } else { heap.take_best(&want) };
        let Some(page) = taken else {
            return Ok((heap, None));
        };
        paged = true;
        heap.add_page(page, cache)?;
    }
}

/// Returns the request for a page of the small arena, where every size is a multiple of a page.
fn page_want(stream: u32, request: Small) -> Want {
    Want {
        space: SpaceId::Small,
        stream,
        granules: PAGE_GRANULES,
        align: 1,
        requested: u64::from(request.requested),
        single: false,
        whole: false,
        views: true,
    }
}
