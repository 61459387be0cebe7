//! From a request to memory: the reclaim of a miss, one step after another, from what costs least.
//!
//! Each step is tried only when those before it have nothing, and after a step that changed something the
//! choice begins again. Driver calls happen without the lock; what they work on is claimed before, so that
//! nobody else can touch it, and put back if they fail.
//!
//! The rule of the lock: this file and `engine/calls.rs` alone take the heap's guard as a value and return it,
//! so only here a caller has to ask whether the lock was let go in between. Everything below them takes the
//! heap by reference, and holds the lock all the time, or nothing, and takes the lock itself.
//! `tests/layers.py` watches over that.

use crate::allocator::cache::grant::Grant;
use crate::allocator::cache::stream_cache::{Allocated, Small, StreamCache, thread};
use crate::allocator::engine::{Engine, Guard};
use crate::allocator::extent::record::SpaceId;
use crate::allocator::extent::space::Shard;
use crate::allocator::extent::want::{PAGE_GRANULES, Want};
use crate::allocator::reclaim::stage::{Reclaim, Step};
use crate::allocator::stream::slot::{AfterFree, StreamKey};
use crate::allocator::view::mapping::ViewRun;
use crate::error::Error;
use crate::sync::capture::is_void_wait;

/// So many markers that stand for nothing may stand in the way of a request.
const VOID_WAITS: u32 = 16;

impl Engine {
    /// Does something without the lock.
    pub(crate) fn unlocked<'a, T>(
        &'a self,
        heap: Guard<'a>,
        work: impl FnOnce() -> Result<T, Error>,
    ) -> Result<(Guard<'a>, T), Error> {
        drop(heap);
        let done = work()?;
        Ok((self.lock(), done))
    }

    /// Finds out what other streams are done with, for a request of a stream. See
    /// [`poll_for`](Self::poll_for), which needs no lock.
    pub(crate) fn poll_before<'a>(
        &'a self,
        mut heap: Guard<'a>,
        stream: u32,
    ) -> Result<Guard<'a>, Error> {
        match heap.questions_for(stream) {
            None => Ok(heap),
            Some(questions) => Ok(self.unlocked(heap, || self.poll_with(stream, questions))?.0),
        }
    }

    /// Records the markers that are due for what came out of the caches of large blocks, in a call that names
    /// a stream.
    pub(crate) fn mark_due<'a>(&'a self, mut heap: Guard<'a>, named: u32) -> Guard<'a> {
        if heap.caches.due.is_empty() {
            return heap;
        }
        let due = heap.take_due(named);
        drop(heap);
        self.mark_all(due);
        self.lock()
    }

    /// Finds or makes room for a request. The extent comes back claimed, ready for its stream, with whether
    /// more was to be done for it than to look.
    pub(crate) fn obtain<'a>(
        &'a self,
        mut heap: Guard<'a>,
        want: &Want,
    ) -> Result<(Guard<'a>, u32, bool), Error> {
        if heap.streams.several() {
            heap = self.poll_before(heap, want.stream)?;
        } else {
            heap.extents.adopt_complete(want.space, want.stream);
        }
        heap.physical.large_request(want);
        let mut reclaim = Reclaim::new(&self.hooks, self.total_memory);
        let (mut void, mut missed) = (0, false);
        loop {
            reclaim.views = self.views_allowed();
            let step = reclaim.next(&mut heap, want);
            missed |= step.is_miss();
            let taken;
            (heap, taken) = match self.take_step(heap, want, step, &mut reclaim) {
                // The marker is gone that it was about, and stood for nothing.
                Err(Error::Driver(error)) if is_void_wait(&error) && void < VOID_WAITS => {
                    void += 1;
                    (self.poll_before(self.lock(), want.stream)?, None)
                }
                step => step?,
            };
            if let Some(id) = taken {
                return Ok((heap, id, missed));
            }
        }
    }

    /// Takes a step of the reclaim, with the extent if that found or made one. What needs the driver is done
    /// without the lock.
    fn take_step<'a>(
        &'a self,
        mut heap: Guard<'a>,
        want: &Want,
        step: Step,
        reclaim: &mut Reclaim<'_>,
    ) -> Result<(Guard<'a>, Option<u32>), Error> {
        match step {
            Step::Take(run) => {
                let id = heap.take(want, run);
                heap.stats.reclaim.ready += u64::from(id.is_some());
                Ok((heap, id))
            }
            Step::Wait(run) => {
                let claimed = heap.claim_run(want, run);
                self.wait_for(heap, want, claimed)
            }
            Step::Place(place) => {
                let claimed = heap.claim(want.space, place.first, place.skip, want.granules);
                self.wait_for(heap, want, claimed)
            }
            Step::View(run) => self.take_in_view(heap, want, run),
            Step::Flush => {
                heap.stats.reclaim.flushed += u64::from(heap.flush_caches());
                Ok((heap, None))
            }
            Step::AskAgain => {
                heap.physical.full_at = None;
                Ok((heap, None))
            }
            Step::EmptyCaches => {
                if heap.empty_large_caches() {
                    heap = self.mark_due(heap, want.stream);
                    heap = self.poll_before(heap, want.stream)?;
                }
                // Of the asking stream, too, for what only complete memory is good for.
                let full = heap.full_batches(|stream| stream == want.stream);
                if !full.is_empty() {
                    (heap, _) = self.unlocked(heap, || self.cover_all(&full))?;
                }
                Ok((heap, None))
            }
            Step::Fail => {
                // The next request asks the driver anew: others may have freed meanwhile.
                heap.physical.full_at = None;
                let error = heap.out_of_memory(want.requested);
                drop(heap);
                Err(self.out_of_memory(error, reclaim.cause()))
            }
            step => self.unlocked(heap, || self.execute(want, step, reclaim)),
        }
    }

    /// Has the stream wait for what it needs of a claimed extent, which goes back if it cannot.
    fn wait_for<'a>(
        &'a self,
        mut heap: Guard<'a>,
        want: &Want,
        claimed: Option<(u32, Vec<Shard>)>,
    ) -> Result<(Guard<'a>, Option<u32>), Error> {
        let Some((id, shards)) = claimed else {
            return Ok((heap, None));
        };
        let waits = heap.streams.waits_for(want.stream, &shards);
        if waits.is_empty() {
            return Ok((heap, Some(id)));
        }
        drop(heap);
        let waited = self.queue_waits(want.stream, &waits);
        drop(waits);
        heap = self.lock();
        if let Err(error) = waited {
            heap.restore(want.space, id, shards);
            return Err(error);
        }
        Ok((heap, Some(id)))
    }

    /// Takes a run in a view, after the waits that it needs.
    pub(crate) fn take_in_view<'a>(
        &'a self,
        mut heap: Guard<'a>,
        want: &Want,
        run: ViewRun,
    ) -> Result<(Guard<'a>, Option<u32>), Error> {
        let Some(view) = heap.views.map.get(&run.base) else {
            return Ok((heap, None));
        };
        let parts = view.home_parts(run.offset, want.granules);
        let Some(mut aliased) = heap.lend(want.space, want.stream, &parts) else {
            return Ok((heap, None));
        };
        if !aliased.waits.is_empty() {
            // The view must not go while the waits are made.
            heap.views.hold_view(run.base, true);
            drop(heap);
            let waits = std::mem::take(&mut aliased.waits);
            let waited = self.queue_waits(want.stream, &waits);
            drop(waits);
            heap = self.lock();
            heap.views.hold_view(run.base, false);
            if let Err(error) = waited {
                heap.give_home(want.space, aliased);
                return Err(error);
            }
        }
        heap.stats.reclaim.views += 1;
        let parts = aliased.parts.into_iter().map(|(id, _)| id).collect();
        let id = heap.view_block(run.base, run.offset, want.granules, parts);
        Ok((heap, Some(id)))
    }

    // ---- small blocks ------------------------------------------------------------------------

    /// Allocates a small block from a stream cache, which gets more pages if it has no room.
    pub(crate) fn obtain_small<'a>(
        &'a self,
        mut heap: Guard<'a>,
        (key, stream): (StreamKey, u32),
        cache: &'static StreamCache,
        request: Small,
    ) -> Result<(Guard<'a>, Grant), Error> {
        if let StreamKey::Id(key) = key {
            thread::remember(key, cache);
        }
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
            if !polled && cache.lock().asks() {
                // Blocks that other streams used may be free by now.
                polled = true;
                let close = cache.lock().holds_much();
                let freed;
                (heap, freed) = self.take_back_shared(heap, cache, close)?;
                cache.lock().asked(freed);
                continue;
            }
            let grown;
            (heap, grown) = self.obtain_page(heap, stream, cache, request)?;
            missed |= grown;
        }
    }

    /// Brings another page to a stream cache, or merges what it keeps at hand. Returns whether memory was
    /// added for it.
    fn obtain_page<'a>(
        &'a self,
        mut heap: Guard<'a>,
        stream: u32,
        cache: &'static StreamCache,
        request: Small,
    ) -> Result<(Guard<'a>, bool), Error> {
        let page = a_page(stream, request);
        if cache.lock().runs.is_worn() {
            heap.return_pages(cache, u32::MAX, &mut AfterFree::default());
        }
        let mut ready = heap.take_best(&page);
        if ready.is_none() && cache.lock().runs.flush_quick() {
            return Ok((heap, false));
        }
        if ready.is_none() {
            // What other stream caches did not need lately comes before more memory.
            let mut givers = heap.flush_idle();
            if !givers.is_empty() {
                givers.retain(|giver| *giver != stream);
                heap = self.cover(heap, &givers)?;
                ready = heap.take_best(&page);
            }
        }
        if let Some(id) = ready {
            heap.page_taken(id, cache)?;
            return Ok((heap, false));
        }
        let (mut heap, id, missed) = self.obtain(heap, &page)?;
        heap.page_taken(id, cache)?;
        Ok((heap, missed))
    }

    /// Covers what streams freed by markers, as far as that may be done here, and asks about them.
    fn cover<'a>(&'a self, heap: Guard<'a>, streams: &[u32]) -> Result<Guard<'a>, Error> {
        let mut ours = heap.streams.kept_uncovered();
        ours.retain(|(stream, _)| streams.contains(stream));
        if ours.is_empty() {
            return Ok(heap);
        }
        let covered = self.unlocked(heap, || {
            self.cover_all(&ours)?;
            self.poll_some(|stream| streams.contains(&stream))
        })?;
        Ok(covered.0)
    }

    /// Asks whether other streams are done with what a stream cache holds back for them; with `close` also
    /// about what no batch was full of yet. Whether anything came of it.
    fn take_back_shared<'a>(
        &'a self,
        mut heap: Guard<'a>,
        cache: &'static StreamCache,
        close: bool,
    ) -> Result<(Guard<'a>, bool), Error> {
        let before = cache.lock().pending_bytes();
        if close && heap.close_batches(cache, None, &mut AfterFree::default()) {
            let ours = heap.streams.kept_uncovered();
            (heap, _) = self.unlocked(heap, || self.cover_all(&ours))?;
        }
        // Of no use to ask about streams for which others hold blocks back: they ask themselves.
        let users = heap.caches.held_back_for(cache);
        let wanted = |stream| users.contains(&stream);
        let full = heap.full_batches(wanted);
        if !full.is_empty() {
            (heap, _) = self.unlocked(heap, || self.cover_all(&full))?;
        }
        if let Some(due) = heap.streams.due_markers(wanted) {
            (heap, _) = self.unlocked(heap, || self.poll_due(due, wanted))?;
        }
        heap.return_held_back();
        let freed = cache.lock().pending_bytes() < before;
        Ok((heap, freed))
    }

    /// Takes a request from memory that its stream may use without a wait, if there is any.
    pub(crate) fn take_cached_small<'a>(
        &'a self,
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
                match self.take_near(cache, &mut inner, request, near) {
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
                // Memory that other streams used may be free by now.
                polled = true;
                heap.streams.ask_again();
                (heap, _) = self.take_back_shared(heap, cache, true)?;
                let stream = cache.lock().slot;
                heap = self.poll_before(heap, stream)?;
                continue;
            }
            let page = a_page(cache.lock().slot, request);
            let page = if paged { None } else { heap.take_best(&page) };
            let Some(id) = page else {
                return Ok((heap, None));
            };
            paged = true;
            heap.page_taken(id, cache)?;
        }
    }
}

/// A page of the arena of small blocks, where everything is a multiple of a page.
fn a_page(stream: u32, request: Small) -> Want {
    Want {
        space: SpaceId::Small,
        stream,
        granules: PAGE_GRANULES,
        align: 1,
        requested: u64::from(request.requested),
        single: false,
        views: true,
    }
}
