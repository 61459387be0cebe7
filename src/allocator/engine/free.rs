//! Frees, and uses by other streams: by block, by pointer, and for dropped blocks.
//!
//! A free takes one of three paths: directly in a stream cache; in the heap; or in the heap with all other concerns,
//! such as uses by other streams and captures. A dropped block that cannot be freed is left to a later call.

use std::sync::atomic::Ordering;

use crate::allocator::graph::pooled;
use crate::driver::{process, sys};

use crate::allocator::cache::deferred::{Deferred, User};
use crate::allocator::cache::grant::{Lifetime, Place};
use crate::allocator::cache::stream_cache::{Life, PageTable, SMALL_ID, thread};
use crate::allocator::engine::debug::Freed;
use crate::allocator::engine::naming::Named;
use crate::allocator::engine::{Engine, Shared};
use crate::allocator::extent::record::Recorded;
use crate::allocator::heap::Heap;
use crate::allocator::stream::slot::{AfterFree, StreamKey, Suspect, is_special};
use crate::error::Error;
use crate::sync::capture::spoilt_by_wait;
use crate::sync::order::wait_until_idle;

/// The steps of a free that run without the lock: markers, and closing an allocator whose last block was freed.
pub(crate) struct RestOfFree {
    after: AfterFree,
    orphaned: bool,
    /// After the block is freed, this may be the only reference to the engine.
    keep: Option<Shared>,
}

/// Checks for idle memory after a free.
fn tend(engine: Option<Shared>) {
    if let Some(engine) = engine {
        engine.tend();
    }
}

impl Engine {
    // ---- blocks by their identity ------------------------------------------------------------------

    /// Returns a number that identifies the block among all blocks of the allocator.
    pub(crate) fn id_of(&self, place: &Place) -> u32 {
        let id = place.record().or_else(|| self.pages.id(place.ptr));
        debug_assert!(id.is_some(), "the page of a live block is known");
        id.unwrap_or(SMALL_ID)
    }

    /// Whether the block with this id and generation is still live.
    pub(crate) fn is_live(&self, block: &Lifetime) -> bool {
        if block.id & SMALL_ID == 0 {
            return self.lock().is_live((block.id, block.generation));
        }
        self.small_at(block.ptr).is_some_and(|(cache, node)| {
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
    pub(crate) fn free_at_once(&self, block: &Lifetime) -> bool {
        if block.id & SMALL_ID == 0 || !self.unseen() {
            return false;
        }
        let Some((cache, node)) = self.small_at(block.ptr) else {
            return false;
        };
        let mut inner = cache.lock();
        // Another page may have taken the place of the block's page.
        inner
            .live(node, block.ptr, Some(block.generation))
            .is_some()
            && inner.free_at_once(node, Life::Generation(block.generation))
    }

    /// Frees the block that starts at a pointer. `pages` is the allocator's own table of pages.
    #[inline]
    pub(crate) fn free_ptr(&self, pages: &PageTable, ptr: sys::CUdeviceptr) -> Result<(), Error> {
        match Self::free_ptr_at_once(pages, ptr) {
            true => Ok(()),
            false => self.free_ptr_slowly(ptr),
        }
    }

    /// Frees a small block that needs no further checks. Otherwise returns false and changes nothing.
    #[inline(always)]
    pub(crate) fn free_ptr_at_once(pages: &PageTable, ptr: sys::CUdeviceptr) -> bool {
        thread::prefetch_for_free();
        if let Some((cache, node)) = pages.find_node(ptr)
            && pages.at_once_id() != 0
            && cache.now().is_quiet()
            && let Some(mut inner) = cache.try_lock()
        {
            // Looked up once for both calls.
            let record = inner.runs.record_at(node);
            let freed = inner.free_at_once(node, Life::At(ptr));
            if freed {
                thread::touched(record);
            }
            return freed;
        }
        false
    }

    /// [`free_ptr`](Self::free_ptr) for blocks that the fast path could not free.
    #[inline(never)]
    pub(crate) fn free_ptr_slowly(&self, ptr: sys::CUdeviceptr) -> Result<(), Error> {
        self.usable()?;
        if let Some((cache, node)) = self.small_at(ptr) {
            if self.watchful() && self.free_watched(cache, (node, ptr), Life::At(ptr)) {
                return Ok(());
            }
            return self.free_small(cache, node, ptr, None);
        }
        self.free_at(ptr)
    }

    /// Frees the live large block that begins at an address.
    pub(crate) fn free_at(&self, ptr: sys::CUdeviceptr) -> Result<(), Error> {
        self.free_record(ptr, |heap| Ok((live(heap, ptr)?, None)))
    }

    /// Frees the large block of the record that `find` returns; with a generation, only if the record still has it.
    fn free_record(
        &self,
        ptr: sys::CUdeviceptr,
        find: impl FnOnce(&mut Heap) -> Result<(u32, Option<u32>), Error>,
    ) -> Result<(), Error> {
        let mut heap = self.open()?;
        let (id, mut generation) = find(&mut heap)?;
        if let Some(debug) = &self.debug {
            // Another block may use the record when the check has finished.
            let life = generation.unwrap_or(heap.extents.records[id].generation);
            generation = Some(life);
            let live = heap.is_live((id, life));
            drop(heap);
            if live && let Freed::Later = self.check_freed(debug, ptr)? {
                return Ok(());
            }
            heap = self.open()?;
        }
        if !self.watchful()
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
                Some(used) => self.free_pooled(block, ptr, used),
                None => Err(Error::NotLive { ptr }),
            };
        }
        let stream = heap.extents.records[id].stream;
        if self.watchful()
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
        let after = match heap.free_alone(id, generation) {
            true => AfterFree::default(),
            false => heap.free(id),
        };
        let rest = self.rest_of_free(&heap, after);
        let tended = self.to_tend();
        drop(heap);
        self.finish_free(rest);
        tend(tended);
        Ok(())
    }

    /// Frees a large block in the heap if that involves neither the caches of large blocks, nor captures, nor the end
    /// of the allocator. Otherwise returns false and changes nothing.
    #[inline(never)]
    pub(crate) fn free_in_heap(&self, id: u32, generation: u32) -> bool {
        let mut heap = self.lock();
        if heap.closed || heap.orphaned {
            return false;
        }
        if process::is_recording()
            && heap.is_live((id, generation))
            && !heap.extents.records[id].cached
        {
            heap.recorder
                .record_free(&heap.streams, &heap.extents.records, id);
        }
        if heap.free_alone(id, generation) {
            let tended = self.to_tend();
            drop(heap);
            tend(tended);
            return true;
        }
        if !heap.is_live((id, generation)) || heap.extents.records[id].cached {
            return false;
        }
        let after = heap.free(id);
        let rest = self.rest_of_free(&heap, after);
        let tended = self.to_tend();
        drop(heap);
        self.finish_free(rest);
        tend(tended);
        true
    }

    /// Whether the stream of a live block was retired, or is about to be.
    pub(crate) fn stream_retired(&self, block: &Lifetime) -> bool {
        let heap = self.lock();
        let stream = match self.small_at(block.ptr) {
            Some((cache, _)) if block.id & SMALL_ID != 0 => cache.lock().slot,
            _ if block.id & SMALL_ID != 0 => return false,
            _ => heap.extents.records[block.id].stream,
        };
        heap.streams.is_unnamed(stream)
    }

    /// Frees a block by its id and generation.
    pub(crate) fn free_block(&self, block: &Lifetime) -> Result<(), Error> {
        let ptr = block.ptr;
        if block.id & SMALL_ID != 0 {
            self.usable()?;
            let (cache, node) = self.small_at(ptr).ok_or(Error::NotLive { ptr })?;
            return self.free_small(cache, node, ptr, Some(block.generation));
        }
        self.free_record(ptr, |_| Ok((block.id, Some(block.generation))))
    }

    /// Returns the engine if this free should also check for idle memory. Called under the lock: once the lock is
    /// released, the block may have been the last one and another thread may drop the last allocator, so no other
    /// reference is certain to keep the engine alive.
    fn to_tend(&self) -> Option<Shared> {
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
            self.drop_after(block, users);
        }
    }

    /// Frees a dropped block once all `users` have been recorded or waited for.
    pub(crate) fn drop_after(&self, block: Lifetime, mut users: Vec<User>) {
        // As in `drop_block`.
        if self.usable().is_err() {
            return;
        }
        let mut refused = None;
        users.retain(|user| match self.tell(&block, user) {
            Ok(()) => false,
            Err(error) => {
                refused = Some(error);
                true
            }
        });
        let Some(error) = refused else {
            return self.drop_block(block);
        };
        self.defer(block, users);
        if !matches!(error, Error::Capturing { .. })
            && let Some(count) = self.log.due()
        {
            log::warn!(
                "deferring the free of a dropped block: cannot record its last use (occurrence {count}): {error}"
            );
        }
    }

    pub(crate) fn tell(&self, block: &Lifetime, user: &User) -> Result<(), Error> {
        match user {
            User::Stream(stream) => self.record(block.ptr, &self.named(stream)?, false),
            User::Context(context) => {
                if let Ok(Some(stream)) = spoilt_by_wait(context) {
                    return Err(Error::Capturing { stream });
                }
                // A lost context has no running work.
                wait_until_idle(context).map_err(|error| self.error(error))
            }
        }
    }

    pub(crate) fn defer(&self, block: Lifetime, users: Vec<User>) {
        let orphaned = {
            let mut heap = self.lock();
            heap.deferred.push(Deferred { block, users });
            // Set under the lock: the thread that removes the last handle then sees either the flag or the free block.
            self.deferred.store(true, Ordering::Relaxed);
            heap.orphaned
        };
        if orphaned {
            self.outlive_capture();
        }
    }

    /// Frees a dropped block. If that is not possible now, a later call does it.
    pub(crate) fn drop_block(&self, block: Lifetime) {
        // In a forked child, after a loss or at exit nothing can be released, and in a forked child the lock may be
        // held by a thread that does not exist there.
        if self.usable().is_err() {
            return;
        }
        match self.free_block(&block) {
            Ok(()) => {}
            Err(Error::Capturing { .. }) => self.defer(block, Vec::new()),
            // In a forked child, after a loss or at exit nothing can be released.
            Err(
                Error::ForkedChild | Error::Exiting | Error::ContextLost(_) | Error::NotLive { .. },
            ) => {}
            Err(error) => {
                self.defer(block, Vec::new());
                if let Some(count) = self.log.due() {
                    log::warn!(
                        "deferring the free of a dropped block (occurrence {count}): {error}"
                    );
                }
            }
        }
    }

    // ---- uses by other streams -----------------------------------------------------------------------

    /// Records a use of a block on another stream: all work submitted to that stream until the free, or with `now` only
    /// the work submitted so far.
    #[inline]
    pub(crate) fn record(
        &self,
        ptr: sys::CUdeviceptr,
        named: &Named<'_>,
        now: bool,
    ) -> Result<(), Error> {
        self.usable()?;
        let at_once = (!now).then(|| self.record_at_once(ptr, named.key));
        let recorded = match at_once.flatten() {
            Some(done) => done,
            None => self.record_in_heap(ptr, named, now),
        };
        if process::is_recording() && recorded.is_ok() {
            let heap = self.lock();
            heap.recorder.record_use(&heap.streams, ptr, named.key);
        }
        recorded
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
                return Err(heap.physical.not_live(ptr));
            }
            if let Some(block) = pooled::around(&mut heap, ptr) {
                drop(heap);
                return self.record_pooled(block, named, now);
            }
        }
        // A graph pool serves the capture of the stream. Its markers wait for the end of the capture, and so does the
        // use.
        let captures = match self.refuse_capture(named) {
            Err(Error::Capturing { .. }) if self.is_scoped() && self.is_served(named)? => true,
            refused => refused.map(|()| false)?,
        };
        if self.unretired && !captures {
            self.mark_while_named(named);
        }
        let (mut heap, stream) = self.slot(self.open()?, named)?;
        if let StreamKey::Id(key) = named.key {
            thread::remember(key, heap.cache_of(stream));
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
        // Covered by the marker below or the next one: later frees get a later ticket.
        let ticket = now.then(|| {
            let slot = &mut heap.streams[stream];
            slot.open_uses = slot.open_uses.saturating_add(1);
            slot.open
        });
        if now && !captures {
            // Steps that may fail come first, so that a use is not recorded if the call returns an error.
            drop(heap);
            self.mark(stream, named.key)?;
            heap = self.open()?;
            let slot = &heap.streams[stream];
            if !slot.in_use || slot.key != named.key {
                // A stream is forgotten only when all its work is complete.
                return Ok(());
            }
        }
        match heap.large_around(ptr) {
            Some(id) => heap.record(id, stream, ticket),
            None => {
                let heap = &mut *heap;
                let new = Recorded { stream, ticket };
                if !heap.caches.record_use(&mut heap.streams, ptr, new) {
                    return Err(Error::NotLive { ptr });
                }
            }
        }
        Ok(())
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
