//! Frees: by block, by pointer, and for dropped blocks.
//!
//! A free takes one of three paths: directly in a stream cache; in the heap; or in the heap with all other concerns,
//! such as uses by other streams and captures. A dropped block that cannot be freed is left to a later call.

use crate::allocator::graph::pooled;
use std::sync::atomic::Ordering;

use crate::allocator::calls::close;
use crate::allocator::calls::orphans;
use crate::allocator::calls::record;
use crate::allocator::engine::idle;
use crate::allocator::graph::run::uses;
use crate::driver::{process, sys};

use crate::allocator::cache::deferred::{Deferred, User};
use crate::allocator::cache::grant::Lifetime;
use crate::allocator::cache::stream_cache::{Freed, Life, Node, SMALL_ID, StreamCache};
use crate::allocator::debug;
use crate::allocator::engine::naming::Named;
use crate::allocator::engine::{Engine, Shared};
use crate::allocator::heap::{Heap, PlainFree};
use crate::allocator::stream::slot::{AfterFree, Suspect, is_special};
use crate::error::Error;
use crate::sync::capture::invalidated_by_wait;
use crate::sync::order::wait_until_idle;

/// The steps of a free that run without the lock: markers, and closing an allocator whose last block was freed.
pub(crate) struct RestOfFree {
    after: AfterFree,
    orphaned: bool,
    /// After the block is freed, this may be the only reference to the engine.
    keep: Option<Shared>,
}

/// Releases idle memory after a free, if a check is due.
fn release_if_due(engine: Option<Shared>) {
    if let Some(engine) = engine {
        idle::release_if_due(&engine);
    }
}

impl Engine {
    /// Whether the block with this id and generation is still live.
    pub(crate) fn is_live(&self, block: &Lifetime) -> bool {
        if block.id & SMALL_ID == 0 {
            return self.lock().is_live((block.id, block.generation));
        }
        self.pages
            .find_node(block.ptr)
            .is_some_and(|(cache, node)| {
                let inner = cache.lock();
                inner
                    .live(node, block.ptr, Some(block.generation))
                    .is_some()
            })
    }

    // ---- frees -----------------------------------------------------------------------------------

    /// Frees a block by its id and generation, if it is a live small block and its stream cache can free it without
    /// further checks. Otherwise returns false and changes nothing.
    #[inline(always)]
    pub(crate) fn free_quick(&self, block: &Lifetime) -> bool {
        if block.id & SMALL_ID == 0 || self.fast_id() == 0 || !process::is_normal() {
            return false;
        }
        let Some((cache, node)) = self.pages.find_node(block.ptr) else {
            return false;
        };
        let mut inner = cache.lock();
        // Another page may have taken the place of the block's page.
        inner.runs.is_at(node, block.ptr)
            && inner
                .free_quick(node, Life::Generation(block.generation))
                .is_some()
    }

    /// Frees the live block that begins at an address, after its stream cache could not.
    #[inline(never)]
    pub(crate) fn free_raw(&self, ptr: sys::CUdeviceptr) -> Result<(), Error> {
        let large = self.is_fast() && self.pages.find_node(ptr).is_none();
        match large && self.free_large(ptr, None) {
            true => Ok(()),
            false => self.free(ptr, None),
        }
    }

    /// Frees the live block that begins at an address; with `block`, only if it is still that block.
    #[inline(never)]
    pub(crate) fn free(
        &self,
        ptr: sys::CUdeviceptr,
        block: Option<&Lifetime>,
    ) -> Result<(), Error> {
        if block.is_some_and(|block| block.id & SMALL_ID == 0) {
            return self.free_record(ptr, block);
        }
        self.usable()?;
        match (self.pages.find_node(ptr), block) {
            (Some((cache, node)), Some(block)) => {
                self.free_small(cache, (node, ptr), Some(block.generation))
            }
            (Some((cache, node)), None) => {
                if self.needs_checks() && self.free_checked(cache, (node, ptr), Life::At(ptr)) {
                    return Ok(());
                }
                self.free_small(cache, (node, ptr), None)
            }
            (None, Some(_)) => Err(Error::NotLive { ptr }),
            (None, None) => self.free_record(ptr, None),
        }
    }

    /// [`free`](Self::free) for a block with a record.
    fn free_record(&self, ptr: sys::CUdeviceptr, block: Option<&Lifetime>) -> Result<(), Error> {
        let mut heap = self.open()?;
        let (id, mut generation) = match block {
            Some(block) => (block.id, Some(block.generation)),
            None => (live(&mut heap, ptr)?, None),
        };
        if let Some(debug) = &self.debug {
            // Another block may use the record when the check has finished.
            let life = generation.unwrap_or(heap.extents.records[id].generation);
            generation = Some(life);
            let live = heap.is_live((id, life));
            drop(heap);
            if live && let debug::Freed::Later = debug.check_freed(self, ptr)? {
                return Ok(());
            }
            heap = self.open()?;
        }
        if !self.needs_checks()
            && let Some(freed) = heap
                .caches
                .free_large(&heap.extents.records, id, generation)
        {
            return match freed {
                true => Ok(()),
                false => Err(Error::NotLive { ptr }),
            };
        }
        heap.uncache(id);
        let generation = generation.unwrap_or(heap.extents.records[id].generation);
        let block = (id, generation);
        if !heap.is_live(block) {
            let pooled = heap
                .graphs
                .live(ptr)
                .filter(|_| pooled::is_live(&heap, block));
            let pooled = pooled.map(|live| (live.owner, live.users.clone()));
            drop(heap);
            return match pooled {
                Some(used) => uses::free(self, block, ptr, used),
                None => Err(Error::NotLive { ptr }),
            };
        }
        let stream = heap.extents.records[id].stream;
        if self.needs_checks()
            && let Some(suspect) = heap.streams[stream].suspect()
        {
            drop(heap);
            self.refuse_if_capturing(&suspect)?;
            // This may be the last reference to the stream, whose destruction must happen outside the lock.
            drop(suspect);
            heap = self.open()?;
            if !heap.is_live(block) {
                return Err(Error::NotLive { ptr });
            }
        }
        heap.recorder
            .record_free(&heap.streams, &heap.extents.records, id);
        let after = heap.free(id);
        let rest = self.rest_of_free(&heap, after);
        let engine = self.keep_for_decay();
        drop(heap);
        self.finish_free(rest);
        release_if_due(engine);
        Ok(())
    }

    /// Frees the large block that begins at an address, or the one with this id and generation, in the heap if that
    /// involves neither the caches of large blocks, nor captures, nor the end of the allocator. Otherwise returns false
    /// and changes nothing.
    #[inline(never)]
    pub(crate) fn free_large(&self, ptr: sys::CUdeviceptr, life: Option<(u32, u32)>) -> bool {
        let mut heap = self.lock();
        if heap.closed || heap.orphaned {
            return false;
        }
        let at = || heap.extents.lookup.exact(ptr);
        let found = life.or_else(|| at().map(|id| (id, heap.extents.records[id].generation)));
        let Some((id, generation)) = found else {
            return false;
        };
        if process::is_recording()
            && heap.is_live((id, generation))
            && !heap.extents.records[id].cached
        {
            heap.recorder
                .record_free(&heap.streams, &heap.extents.records, id);
        }
        let mut after = AfterFree::default();
        match heap.free_plain(id, generation) {
            PlainFree::Done => {
                let engine = self.keep_for_decay();
                drop(heap);
                release_if_due(engine);
                return true;
            }
            PlainFree::Full(stream) => after.mark(stream, heap.streams[stream].key),
            PlainFree::Refused => {
                if !heap.is_live((id, generation)) || heap.extents.records[id].cached {
                    return false;
                }
                after = heap.free(id);
            }
        }
        let rest = self.rest_of_free(&heap, after);
        let engine = self.keep_for_decay();
        drop(heap);
        self.finish_free(rest);
        release_if_due(engine);
        true
    }

    /// Whether the stream of a live block was retired, or is about to be.
    pub(crate) fn stream_retired(&self, block: &Lifetime) -> bool {
        let heap = self.lock();
        let stream = match self.pages.find_node(block.ptr) {
            Some((cache, _)) if block.id & SMALL_ID != 0 => cache.lock().slot,
            _ if block.id & SMALL_ID != 0 => return false,
            _ => heap.extents.records[block.id].stream,
        };
        heap.streams.is_unnamed(stream)
    }

    // ---- small blocks ----------------------------------------------------------------------------

    /// Frees a small block while calls query captures, if its stream's handle suffices for the query, the stream is not
    /// capturing, and nothing else has to be checked. Otherwise returns false and changes nothing.
    #[inline(always)]
    pub(crate) fn free_checked(
        &self,
        cache: &'static StreamCache,
        (node, ptr): (Node, u64),
        life: Life,
    ) -> bool {
        if self.is_not_usable() {
            return false;
        }
        let Some(raw) = cache.lock().begin_query(node, life) else {
            return false;
        };
        let raw = std::ptr::with_exposed_provenance_mut(raw);
        // SAFETY: a retirement of the stream waits until no query uses it.
        let uncaptured = unsafe { self.driver().is_uncaptured(raw) };
        let mut inner = cache.lock();
        inner.asking -= 1;
        let freed = match uncaptured {
            true => inner.free_quick(node, life),
            false => None,
        };
        if let Some(live) = freed {
            inner.record_free(ptr, live.requested);
        }
        freed.is_some()
    }

    /// Frees the small block that begins at an address; with a generation, only if the block still has it.
    #[inline]
    pub(crate) fn free_small(
        &self,
        cache: &'static StreamCache,
        (node, ptr): (Node, u64),
        generation: Option<u32>,
    ) -> Result<(), Error> {
        if self.needs_checks() {
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
        let ended = self.finish_small(cache, (node, ptr), generation, freed);
        drop(keep);
        ended
    }

    /// Completes the steps of a free that a stream cache left to its caller.
    #[inline(never)]
    pub(crate) fn finish_small(
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

    // ---- after a free ----------------------------------------------------------------------------

    /// Returns the engine if this free should also check for idle memory. Called under the lock: once the lock is
    /// released, the block may have been the last one and another thread may drop the last allocator, so no other
    /// reference is certain to keep the engine alive.
    fn keep_for_decay(&self) -> Option<Shared> {
        self.decay.as_ref().and_then(|_| self.keep())
    }

    /// Returns the steps of a free that remain after the lock is released, if there are any.
    #[inline]
    pub(crate) fn rest_of_free(&self, heap: &Heap, mut after: AfterFree) -> Option<RestOfFree> {
        if self.unretired && !after.is_empty() {
            after.retain(|stream| !heap.streams[stream].may_be_destroyed());
        }
        if after.is_empty() && !heap.orphaned {
            return None;
        }
        Some(RestOfFree {
            after,
            orphaned: heap.orphaned,
            keep: self.keep(),
        })
    }

    /// Performs the remaining steps of a free, without the lock.
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
            cache: None,
        };
        let refused = match is_special(named.raw) {
            true => self.refuse_special_capture(&named, &suspect.context),
            false => self.refuse_capture(&named),
        };
        match refused {
            // The free continues: this context is not used from here on.
            Err(Error::Driver(error)) if self.is_unreachable(&suspect.context, &error) => Ok(()),
            refused => refused,
        }
    }

    // ---- blocks whose owner went out of scope --------------------------------------------------------

    /// Frees the blocks whose drop was deferred.
    pub(crate) fn free_deferred(&self) {
        if !self.deferred.load(Ordering::Relaxed) || !self.deferred.swap(false, Ordering::Relaxed) {
            return;
        }
        let deferred = std::mem::take(&mut self.lock().deferred);
        for Deferred { block, users } in deferred {
            // A block that still cannot be freed is deferred again by this call.
            self.drop_block(block, users);
        }
    }

    /// Frees a dropped block once all `users` have been recorded or waited for. If that is not possible now, a later
    /// call does it.
    pub(crate) fn drop_block(&self, block: Lifetime, mut users: Vec<User>) {
        // In a forked child, after a loss or at exit nothing can be released, and in a forked child the lock may be
        // held by a thread that does not exist there.
        if self.usable().is_err() {
            return;
        }
        let free = || self.free(block.ptr, Some(&block));
        let done = match users.is_empty() {
            true => free(),
            false => self.record_users(&block, &mut users).and_then(|()| free()),
        };
        match done {
            // In a forked child, after a loss or at exit nothing can be released.
            Ok(())
            | Err(
                Error::ForkedChild | Error::Exiting | Error::ContextLost(_) | Error::NotLive { .. },
            ) => {}
            Err(error) => {
                self.defer(block, users);
                if !matches!(error, Error::Capturing { .. })
                    && let Some(count) = self.log.due()
                {
                    log::warn!(
                        "deferring the free of a dropped block (occurrence {count}): {error}"
                    );
                }
            }
        }
    }

    /// Records the uses of a dropped block by streams, and waits for contexts whose streams cannot be named. Those that
    /// have to be tried again are left.
    fn record_users(&self, block: &Lifetime, users: &mut Vec<User>) -> Result<(), Error> {
        let record = |user: &User| match user {
            User::Stream(stream) => record::use_by(self, block.ptr, &self.named(stream)?, false),
            User::Context(context) => {
                if let Ok(Some(stream)) = invalidated_by_wait(context) {
                    return Err(Error::Capturing { stream });
                }
                // A lost context has no running work.
                wait_until_idle(context).map_err(|error| self.error(error))
            }
        };
        let mut refused = Ok(());
        users.retain(|user| match record(user) {
            Ok(()) => false,
            Err(error) => {
                refused = Err(error);
                true
            }
        });
        refused
    }

    fn defer(&self, block: Lifetime, users: Vec<User>) {
        let orphaned = {
            let mut heap = self.lock();
            heap.deferred.push(Deferred { block, users });
            // Set under the lock: the thread that removes the last handle then sees either the flag or the free block.
            self.deferred.store(true, Ordering::Relaxed);
            heap.orphaned
        };
        if orphaned {
            orphans::outlive_capture(self);
        }
    }
}

/// Returns the live large block that starts at a pointer.
fn live(heap: &mut Heap, ptr: sys::CUdeviceptr) -> Result<u32, Error> {
    if let Some(id) = heap.extents.lookup.exact(ptr) {
        return Ok(id);
    }
    let interior = |base| Error::InteriorPointer { ptr, base };
    Err(match heap.large_around(ptr) {
        Some(id) => interior(heap.extents.records[id].addr),
        None => match heap.caches.small_around(ptr) {
            Some((_, run, _)) => interior(run.ptr),
            None => heap.physical.not_live(ptr),
        },
    })
}

impl Engine {
    /// Ends an engine without handles: releases everything now, or when the last block is freed.
    pub(crate) fn abandon(&self) {
        if self.usable().is_err() || self.handles.load(Ordering::Acquire) > 0 {
            return;
        }
        if let Some(debug) = &self.debug
            && !self.lock().orphaned
        {
            self.free_deferred();
            debug.release_quarantine(self, 0);
            debug.report_leaks(self);
        }
        {
            let mut heap = self.lock();
            if heap.closed {
                return;
            }
            heap.set_orphaned(true);
        }
        // If this frees the last blocks, it closes the engine, or registers it as an orphan.
        self.free_deferred();
        if orphans::may_close_later(self) {
            return;
        }
        match close::close(self) {
            Ok(()) | Err(Error::Guarded { .. } | Error::Closed) => {}
            // The remaining blocks may belong to a stream that is capturing. Graphs may have ended since the close looked.
            Err(Error::InUse { what, .. })
                if what == close::GRAPH
                    || self.deferred.load(Ordering::Relaxed)
                    || self.lock().graphs.are_leased() =>
            {
                orphans::outlive_capture(self);
            }
            Err(Error::InUse { .. }) => {}
            Err(Error::Capturing { .. }) => orphans::outlive_capture(self),
            // The driver may accept later what it refused this time.
            Err(error) => orphans::outlive_refusal(self, &error),
        }
    }
}
