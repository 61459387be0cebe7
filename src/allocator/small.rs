//! Small blocks of the packed policy: what fronts do alone, and what they need the books for.

use super::engine::{Engine, Guard};
use super::error::Error;
use super::front::{Allocated, Freed, Held, Inner, Node, PAGE_GRAINS, Small, Taken, Using, cache};
use super::fronts::EngineFront;
use super::raw::{Grant, Lifetime, Request};
use super::records::SpaceId;
use super::size::{GRANULE, PACKED_SMALL_LIMIT};
use super::state::{AfterFree, PAGE_GRANULES, Want};
use super::streams::StreamKey;

#[inline(always)]
pub(super) fn granted(home: &'static EngineFront, taken: Taken, granules: u32) -> Grant {
    Grant {
        id: taken.id,
        generation: taken.generation,
        ptr: taken.ptr,
        bytes: u64::from(granules) * GRANULE,
        home,
        node: Some(taken.node),
    }
}

impl Engine {
    /// The request to a front, if fronts serve it here.
    #[inline]
    pub(crate) fn small_request(&self, request: &Request) -> Option<Small> {
        if self.packed { request.small() } else { None }
    }

    // ---- allocation --------------------------------------------------------------------------

    /// Allocates from the front that the thread used last for the stream, if that can be done
    /// without a look at anything else.
    #[inline(always)]
    pub(crate) fn allocate_at_once(&self, key: u64, bytes: usize) -> Option<Grant> {
        let last = bytes.wrapping_sub(1);
        if !self.unwatched() {
            return None;
        }
        if last >= PACKED_SMALL_LIMIT as usize {
            return self.allocate_shelved(key, bytes);
        }
        let granules = (last as u64 / GRANULE) as u32 + 1;
        let (front, pass) = cache::find(self.id, key)?;
        let mut inner = front.lock();
        let Some(taken) = inner.take_at_once(pass, granules, bytes as u32) else {
            drop(inner);
            let request = Small {
                granules,
                align: 1,
                requested: bytes as u32,
            };
            return self.allocate_with_effort(key, (front, pass), request);
        };
        if inner.contended {
            return Some(self.granted_in_a_crowd(key, front, inner, taken, granules));
        }
        drop(inner);
        Some(granted(front, taken, granules))
    }

    /// Allocates from a front that could not serve at once, as long as that needs no books.
    #[inline(never)]
    fn allocate_with_effort(
        &self,
        key: u64,
        (front, pass): (&'static EngineFront, u64),
        request: Small,
    ) -> Option<Grant> {
        loop {
            let mut inner = front.lock();
            if inner.pass() != Some(pass) {
                return None;
            }
            match inner.take(request) {
                Allocated::Taken(taken) if inner.contended => {
                    let granules = request.granules;
                    return Some(self.granted_in_a_crowd(key, front, inner, taken, granules));
                }
                Allocated::Taken(taken) => return Some(granted(front, taken, request.granules)),
                Allocated::NoRun if inner.heap.flush_if_many() => {}
                Allocated::NoRun | Allocated::Stranger => return None,
                Allocated::NoRoom => break,
            }
        }
        match front.take_with_help(self.id, request) {
            Allocated::Taken(taken) => Some(granted(front, taken, request.granules)),
            _ => None,
        }
    }

    #[cold]
    fn granted_in_a_crowd(
        &self,
        key: u64,
        front: &'static EngineFront,
        mut inner: Held<'_, Inner<Engine>>,
        taken: Taken,
        granules: u32,
    ) -> Grant {
        let crowded = inner.crowded();
        drop(inner);
        if crowded {
            self.crowded(key, front);
        }
        granted(front, taken, granules)
    }

    /// Threads keep meeting at a front: its stream gets more of them, and this thread chooses anew.
    #[cold]
    pub(super) fn crowded(&self, key: u64, front: &'static EngineFront) {
        cache::forget(key);
        let mut state = self.lock();
        let (stream, own) = {
            let inner = front.lock();
            (inner.slot, inner.allocator == self.id && inner.key == key)
        };
        if own {
            state.split_front(stream, StreamKey::Id(key));
        }
    }

    /// Allocates from a front with the books at hand.
    pub(crate) fn obtain_small<'a>(
        &'a self,
        mut state: Guard<'a>,
        (key, stream): (StreamKey, u32),
        front: &'static EngineFront,
        request: Small,
    ) -> Result<(Guard<'a>, Grant), Error> {
        if let StreamKey::Id(key) = key {
            cache::remember(self.id, key, front);
        }
        let (mut missed, mut polled) = (false, false);
        loop {
            let outcome = front.lock().take(request);
            let outcome = match outcome {
                Allocated::NoRoom => {
                    drop(state);
                    let helped = front.take_with_help(self.id, request);
                    state = self.lock();
                    match helped {
                        Allocated::NoRoom => state.take_at_peak(front, request),
                        helped => helped,
                    }
                }
                outcome => outcome,
            };
            if let Allocated::Taken(taken) = outcome {
                if missed {
                    state.stats.misses += 1;
                    state.fronts.misses += 1;
                }
                return Ok((state, granted(front, taken, request.granules)));
            }
            if front.lock().heap.flush_if_many() {
                continue;
            }
            if !polled && front.lock().asks() {
                // Blocks that other streams used may be free by now.
                polled = true;
                let close = front.lock().holds_much();
                let freed;
                (state, freed) = self.reclaim(state, front, close)?;
                front.lock().asked(freed);
                continue;
            }
            let grown;
            (state, grown) = self.obtain_page(state, stream, front, request)?;
            missed |= grown;
        }
    }

    /// Brings another page to a front. Returns whether memory was added for it.
    fn obtain_page<'a>(
        &'a self,
        state: Guard<'a>,
        stream: u32,
        front: &'static EngineFront,
        request: Small,
    ) -> Result<(Guard<'a>, bool), Error> {
        let page = Want {
            space: SpaceId::Small,
            stream,
            granules: PAGE_GRANULES,
            // Everything in the arena of pages is a multiple of a page.
            align: 1,
            requested: u64::from(request.requested),
            single: false,
            views: true,
        };
        let mut state = state;
        let mut ready = state.take_best(&page);
        if ready.is_none() && state.flush_fronts() {
            // What other fronts keep for themselves comes before more memory.
            ready = state.take_best(&page);
        }
        if let Some(id) = ready {
            state.page_taken(id, front)?;
            return Ok((state, false));
        }
        let (mut state, id, missed) = self.obtain(state, &page)?;
        state.page_taken(id, front)?;
        Ok((state, missed))
    }

    /// Asks whether other streams are done with what a front holds back for them; with `close` also
    /// about what no batch was full of yet. Whether anything came of it.
    fn reclaim<'a>(
        &'a self,
        mut state: Guard<'a>,
        front: &'static EngineFront,
        close: bool,
    ) -> Result<(Guard<'a>, bool), Error> {
        let before = front.lock().pending_bytes();
        if close && state.close_batches(front, None) {
            let ours = state.kept_uncovered();
            drop(state);
            self.mark_all(&ours);
            state = self.lock();
        }
        state = self.poll(state)?;
        state.settle_held_back();
        let freed = front.lock().pending_bytes() < before;
        Ok((state, freed))
    }

    // ---- memory at hand ----------------------------------------------------------------------

    /// Takes a request at the first of the addresses that is free in the front which the thread used
    /// last for the stream. `None`: somebody must look at the books.
    pub(crate) fn small_near(
        &self,
        key: u64,
        request: Small,
        near: &[u64],
    ) -> Option<(Option<Grant>, Vec<u64>)> {
        if !self.unwatched() || near.is_empty() {
            return None;
        }
        let (front, pass) = cache::find(self.id, key)?;
        let mut inner = front.lock();
        if inner.pass() != Some(pass) {
            return None;
        }
        let Allocated::Taken(taken) = self.take_near(front, &mut inner, request, near) else {
            return None;
        };
        let free = near.iter().copied().filter(|ptr| {
            let page = self.pages.find(*ptr);
            let own = page.filter(|(owner, _)| std::ptr::eq(*owner, front));
            own.is_some_and(|(_, page)| inner.heap.is_free(page, *ptr))
        });
        let free = free.collect();
        drop(inner);
        Some((Some(granted(front, taken, request.granules)), free))
    }

    fn take_near(
        &self,
        front: &'static EngineFront,
        inner: &mut Inner<Engine>,
        request: Small,
        near: &[u64],
    ) -> Allocated {
        let pages = near
            .iter()
            .filter_map(|ptr| Some((*ptr, self.pages.find(*ptr)?)));
        for (ptr, (owner, page)) in pages {
            if std::ptr::eq(owner, front) {
                match inner.take_at(page, ptr, request) {
                    Allocated::NoRun => {}
                    outcome => return outcome,
                }
            }
        }
        Allocated::NoRun
    }

    /// Takes a request from memory that its stream may use without a wait, if there is any.
    pub(crate) fn take_small<'a>(
        &'a self,
        mut state: Guard<'a>,
        front: &'static EngineFront,
        request: Small,
        near: &[u64],
    ) -> Result<(Guard<'a>, Option<Grant>), Error> {
        let (mut polled, mut paged) = (false, false);
        loop {
            let near = self.take_near(front, &mut front.lock(), request, near);
            let outcome = match near {
                Allocated::NoRun => front.lock().take(request),
                outcome => outcome,
            };
            let outcome = match outcome {
                Allocated::NoRoom => state.take_at_peak(front, request),
                outcome => outcome,
            };
            if let Allocated::Taken(taken) = outcome {
                return Ok((state, Some(granted(front, taken, request.granules))));
            }
            if front.lock().heap.flush_quick() {
                continue;
            }
            if !polled {
                // Memory that other streams used may be free by now.
                polled = true;
                state.ask_again();
                (state, _) = self.reclaim(state, front, true)?;
                continue;
            }
            let page = Want {
                space: SpaceId::Small,
                stream: front.lock().slot,
                granules: PAGE_GRANULES,
                align: 1,
                requested: u64::from(request.requested),
                single: false,
                views: true,
            };
            let page = if paged { None } else { state.take_best(&page) };
            let Some(id) = page else {
                return Ok((state, None));
            };
            paged = true;
            state.page_taken(id, front)?;
        }
    }

    /// Whether an address lies in free memory of a page.
    pub(crate) fn is_free_small(&self, ptr: u64) -> bool {
        self.pages.find(ptr).is_some_and(|(front, page)| {
            let inner = front.lock();
            inner.allocator == self.id && inner.heap.is_free(page, ptr)
        })
    }

    // ---- lookup ------------------------------------------------------------------------------

    /// The front and the place of a small block that begins at an address, if one does.
    #[inline]
    pub(crate) fn small_at(&self, ptr: u64) -> Option<(&'static EngineFront, Node)> {
        if !ptr.is_multiple_of(GRANULE) {
            return None;
        }
        let (front, page) = self.pages.find(ptr)?;
        let place = (ptr / GRANULE) as u32 & (PAGE_GRAINS - 1);
        Some((front, Node::new(page, place)))
    }

    // ---- free --------------------------------------------------------------------------------

    /// Frees the small block that begins at an address; with a generation only that life of it.
    #[inline]
    pub(crate) fn free_small(
        &self,
        front: &'static EngineFront,
        node: Node,
        ptr: u64,
        generation: Option<u32>,
    ) -> Result<(), Error> {
        if self.watchful() {
            self.refuse_captured_free(front)?;
        }
        let freed = front.lock().free(node, ptr, generation);
        if freed == Freed::Done {
            return Ok(());
        }
        self.small_freed(front, (node, ptr), generation, freed)
    }

    /// What a front left to do of a free.
    #[inline(never)]
    pub(crate) fn small_freed(
        &self,
        front: &'static EngineFront,
        block: (Node, u64),
        generation: Option<u32>,
        freed: Freed,
    ) -> Result<(), Error> {
        let mut state = self.lock();
        let (ours, owner) = {
            let inner = front.lock();
            (inner.allocator == self.id, inner.slot)
        };
        let mut after = AfterFree::default();
        match freed {
            Freed::Done => {}
            // The page may have gone with the last of its blocks.
            Freed::Page if !ours => {}
            Freed::Page => {
                let keep = front.lock().spare_pages();
                state.return_pages(front, keep, &mut after);
            }
            Freed::Full(batch) => {
                let stream = batch.stream;
                after.mark.push((stream, state.streams[stream].key));
                state.batch_closed(front, owner, batch, &mut after);
            }
            Freed::Books if state.closed => return Err(Error::Closed),
            Freed::Books => {
                if !ours || !state.free_small(front, block, generation, &mut after) {
                    return Err(Error::NotLive { ptr: block.1 });
                }
            }
            Freed::NotLive => {
                let (_, ptr) = block;
                return Err(match state.small_around(ptr) {
                    Some((_, run, _)) if generation.is_none() && run.ptr != ptr => {
                        Error::InteriorPointer { ptr, base: run.ptr }
                    }
                    _ => Error::NotLive { ptr },
                });
            }
        }
        self.finish_free(state, &after);
        Ok(())
    }

    /// [`small_freed`](Self::small_freed) for a block whose owner went out of scope.
    #[cold]
    pub(crate) fn small_dropped(
        &self,
        front: &'static EngineFront,
        block: Lifetime,
        node: Node,
        freed: Freed,
    ) {
        let generation = Some(block.generation);
        match self.small_freed(front, (node, block.ptr), generation, freed) {
            Ok(()) => {}
            Err(error) => debug_assert!(false, "a live block is freed: {error}"),
        }
    }

    /// Refuses a free on a stream that is being captured.
    #[cold]
    fn refuse_captured_free(&self, front: &'static EngineFront) -> Result<(), Error> {
        let suspect = {
            let state = self.lock();
            let inner = front.lock();
            (inner.allocator == self.id)
                .then(|| state.capture_suspect(inner.slot))
                .flatten()
        };
        match suspect {
            Some(suspect) => self.refuse_if_capturing(&suspect),
            None => Ok(()),
        }
    }

    // ---- other streams -----------------------------------------------------------------------

    /// Records another stream on a small block, if the two fronts can do it alone.
    #[inline]
    pub(crate) fn record_at_once(&self, ptr: u64, key: StreamKey) -> Option<Result<(), Error>> {
        let StreamKey::Id(key) = key else {
            return None;
        };
        if !self.unwatched() {
            return None;
        }
        let (front, node) = self.small_at(ptr)?;
        let (user, pass) = cache::find(self.id, key)?;
        let using = {
            let mut inner = user.lock();
            if inner.pass() != Some(pass) {
                return None;
            }
            let using = Using::one(inner.slot)?;
            // Counted before it is noted: the stream stays known from here on.
            inner.recorded += 1;
            using
        };
        let noted = {
            let mut inner = front.lock();
            match inner.live(node, ptr, None) {
                Some(live) if live.using == Using::NONE && Some(inner.slot) != using.slot() => {
                    inner.heap.set_using(node, using);
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
