//! Small blocks of the packed policy: what fronts do alone, and what they need the books for.

use std::sync::atomic::Ordering;

use crate::driver::process;

use crate::allocator::cache::front::Front;
use crate::allocator::cache::front::{
    Allocated, Freed, Held, Inner, Node, Owner, PAGE_GRAINS, Small, Using, cache,
};
use crate::allocator::cache::grant::Grant;
use crate::allocator::engine::{Engine, Guard};
use crate::allocator::error::Error;
use crate::allocator::extent::record::SpaceId;
use crate::allocator::extent::want::{PAGE_GRANULES, Want};
use crate::allocator::heap::request::Request;
use crate::allocator::size::{GRANULE, PACKED_SMALL_LIMIT};
use crate::allocator::stream::slot::AfterFree;
use crate::allocator::stream::slot::StreamKey;

/// A request that no front served at once: the front that was tried, still locked if nobody else was
/// at it.
pub(crate) struct Missed(Option<(&'static Front, Option<Locked>)>);

type Locked = Held<'static, Inner>;

/// Rounds of getting room until the books are asked.
const ROUNDS: u32 = 4;

/// A request for bytes anywhere, if it is one for fronts.
#[inline(always)]
pub(crate) fn unaligned(bytes: usize) -> Option<Small> {
    let last = bytes.wrapping_sub(1);
    (last < PACKED_SMALL_LIMIT as usize).then(|| Small {
        granules: (last / GRANULE as usize) as u32 + 1,
        align: 1,
        requested: bytes as u32,
    })
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
    pub(crate) fn allocate_at_once(&self, key: u64, bytes: usize) -> Result<Grant, Missed> {
        let Some(request) = unaligned(bytes).filter(|_| process::is_quiet()) else {
            return Err(Missed(None));
        };
        let Some(front) = cache::find(key) else {
            return Err(Missed(None));
        };
        let owner = self.owner(key);
        let Some(mut inner) = front.try_lock() else {
            return Err(Missed(Some((front, None))));
        };
        match inner.take_anywhere(owner, request) {
            Some(taken) => Ok(Grant::small(front, taken, request.granules)),
            None => Err(Missed(Some((front, Some(inner))))),
        }
    }

    /// Allocates from a front that could not serve at once, if it can be had without the driver.
    #[inline]
    pub(crate) fn allocate_with_effort(
        &self,
        key: u64,
        bytes: usize,
        missed: Missed,
    ) -> Option<Grant> {
        if bytes as u64 > PACKED_SMALL_LIMIT && self.unwatched() {
            return match self.on_shelves.load(Ordering::Relaxed) {
                0 => None,
                _ => self.allocate_shelved(key, bytes),
            };
        }
        self.take_with_effort(key, bytes, missed)
    }

    #[inline(never)]
    fn take_with_effort(&self, key: u64, bytes: usize, missed: Missed) -> Option<Grant> {
        let (front, inner) = missed.0?;
        let (owner, request) = (self.owner(key), unaligned(bytes)?);
        let (mut inner, crowded) = match inner {
            Some(mut inner) => {
                inner.look_for_worn();
                (inner, false)
            }
            None => {
                let mut inner = front.lock();
                inner.look_for_worn();
                let crowded = inner.serves(owner) && inner.crowded();
                (inner, crowded)
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
                    (inner, borrowed) = front.borrow_room(inner, bytes);
                    if !borrowed {
                        drop(inner);
                        if !front.pool_room(bytes) {
                            rounds = ROUNDS;
                        }
                        inner = front.lock();
                    }
                }
                _ => break,
            }
        }
        drop(inner);
        if outcome == Allocated::NoRoom {
            outcome = self.lock().take_at_peak(front, request, Some(owner));
        }
        if crowded {
            self.crowded(owner.key, front);
        }
        match outcome {
            Allocated::Taken(taken) => Some(Grant::small(front, taken, request.granules)),
            _ => None,
        }
    }

    /// Whom a front serves without a look at anything else; nobody, where more is to be looked at.
    #[inline(always)]
    pub(crate) fn owner(&self, key: u64) -> Owner {
        let allocator = self.at_once_id();
        Owner { allocator, key }
    }

    /// Threads keep meeting at a front: its stream gets more of them, and this thread chooses anew.
    #[cold]
    pub(crate) fn crowded(&self, key: u64, front: &'static Front) {
        cache::forget(key);
        let mut heap = self.lock();
        let (stream, own) = {
            let inner = front.lock();
            (inner.slot, inner.allocator == self.id && inner.key == key)
        };
        if own {
            heap.split_front(stream, StreamKey::Id(key));
        }
    }

    /// Allocates from a front with the books at hand.
    pub(crate) fn obtain_small<'a>(
        &'a self,
        mut heap: Guard<'a>,
        (key, stream): (StreamKey, u32),
        front: &'static Front,
        request: Small,
    ) -> Result<(Guard<'a>, Grant), Error> {
        if let StreamKey::Id(key) = key {
            cache::remember(key, front);
        }
        let (mut missed, mut polled) = (false, false);
        loop {
            let outcome = front.lock().take(request);
            let outcome = match outcome {
                Allocated::NoRoom => heap.take_at_peak(front, request, None),
                outcome => outcome,
            };
            if let Allocated::Taken(taken) = outcome {
                if missed {
                    heap.stats.misses += 1;
                    heap.fronts.misses += 1;
                }
                return Ok((heap, Grant::small(front, taken, request.granules)));
            }
            {
                let mut inner = front.lock();
                if inner.take_back(true) || inner.runs.flush_for(request.span()) {
                    continue;
                }
            }
            if !polled && front.lock().asks() {
                // Blocks that other streams used may be free by now.
                polled = true;
                let close = front.lock().holds_much();
                let freed;
                (heap, freed) = self.reclaim(heap, front, close)?;
                front.lock().asked(freed);
                continue;
            }
            let grown;
            (heap, grown) = self.obtain_page(heap, stream, front, request)?;
            missed |= grown;
        }
    }

    /// Brings another page to a front, or merges what it keeps at hand. Returns whether memory was
    /// added for it.
    fn obtain_page<'a>(
        &'a self,
        heap: Guard<'a>,
        stream: u32,
        front: &'static Front,
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
        let mut heap = heap;
        if front.lock().runs.is_worn() {
            heap.return_pages(front, u32::MAX, &mut AfterFree::default());
        }
        let mut ready = heap.take_best(&page);
        if ready.is_none() && front.lock().runs.flush_quick() {
            return Ok((heap, false));
        }
        if ready.is_none() {
            // What other fronts did not need lately comes before more memory.
            let mut givers = heap.flush_idle();
            if !givers.is_empty() {
                givers.retain(|giver| *giver != stream);
                heap = self.cover(heap, &givers)?;
                ready = heap.take_best(&page);
            }
        }
        if let Some(id) = ready {
            heap.page_taken(id, front)?;
            return Ok((heap, false));
        }
        let (mut heap, id, missed) = self.obtain(heap, &page)?;
        heap.page_taken(id, front)?;
        Ok((heap, missed))
    }

    /// Covers what streams freed by markers, as far as that may be done here, and asks about them.
    fn cover<'a>(&'a self, heap: Guard<'a>, streams: &[u32]) -> Result<Guard<'a>, Error> {
        let mut ours = heap.streams.kept_uncovered();
        ours.retain(|(stream, _)| streams.contains(stream));
        if ours.is_empty() {
            return Ok(heap);
        }
        drop(heap);
        let heap = self.cover_all(&ours)?;
        self.poll_some(heap, |stream| streams.contains(&stream))
    }

    /// Asks whether other streams are done with what a front holds back for them; with `close` also
    /// about what no batch was full of yet. Whether anything came of it.
    fn reclaim<'a>(
        &'a self,
        mut heap: Guard<'a>,
        front: &'static Front,
        close: bool,
    ) -> Result<(Guard<'a>, bool), Error> {
        let before = front.lock().pending_bytes();
        if close && heap.close_batches(front, None, &mut AfterFree::default()) {
            let ours = heap.streams.kept_uncovered();
            drop(heap);
            heap = self.cover_all(&ours)?;
        }
        // Of no use to ask about streams for which others hold blocks back: they ask themselves.
        let users = heap.fronts.held_back_for(front);
        heap = self.mark_full(heap, |stream| users.contains(&stream))?;
        heap = self.poll_some(heap, |stream| users.contains(&stream))?;
        heap.settle_held_back();
        let freed = front.lock().pending_bytes() < before;
        Ok((heap, freed))
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
        let front = cache::find(key)?;
        let mut inner = front.lock();
        if !inner.serves(self.owner(key)) {
            return None;
        }
        let Allocated::Taken(taken) = self.take_near(front, &mut inner, request, near) else {
            return None;
        };
        let free = near.iter().copied().filter(|ptr| {
            let page = self.pages.find(*ptr);
            let own = page.filter(|(owner, _)| std::ptr::eq(*owner, front));
            own.is_some_and(|(_, page)| inner.runs.is_free(page, *ptr))
        });
        let free = free.collect();
        drop(inner);
        Some((Some(Grant::small(front, taken, request.granules)), free))
    }

    fn take_near(
        &self,
        front: &'static Front,
        inner: &mut Inner,
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
        mut heap: Guard<'a>,
        front: &'static Front,
        request: Small,
        near: &[u64],
    ) -> Result<(Guard<'a>, Option<Grant>), Error> {
        let (mut polled, mut paged) = (false, false);
        loop {
            let outcome = {
                let mut inner = front.lock();
                inner.take_back(true);
                match self.take_near(front, &mut inner, request, near) {
                    Allocated::NoRun => inner.take(request),
                    outcome => outcome,
                }
            };
            let outcome = match outcome {
                Allocated::NoRoom => heap.take_at_peak(front, request, None),
                outcome => outcome,
            };
            if let Allocated::Taken(taken) = outcome {
                return Ok((heap, Some(Grant::small(front, taken, request.granules))));
            }
            if front.lock().runs.flush_quick() {
                continue;
            }
            if !polled {
                // Memory that other streams used may be free by now.
                polled = true;
                heap.streams.ask_again();
                (heap, _) = self.reclaim(heap, front, true)?;
                let stream = front.lock().slot;
                heap = self.poll_for(heap, stream)?;
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
            let page = if paged { None } else { heap.take_best(&page) };
            let Some(id) = page else {
                return Ok((heap, None));
            };
            paged = true;
            heap.page_taken(id, front)?;
        }
    }

    /// Whether an address lies in free memory of a page.
    pub(crate) fn is_free_small(&self, ptr: u64) -> bool {
        self.pages.find(ptr).is_some_and(|(front, page)| {
            let inner = front.lock();
            inner.allocator == self.id && inner.runs.is_free(page, ptr)
        })
    }

    // ---- lookup ------------------------------------------------------------------------------

    /// The front and the place of a small block that begins at an address, if one does.
    #[inline]
    pub(crate) fn small_at(&self, ptr: u64) -> Option<(&'static Front, Node)> {
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
        front: &'static Front,
        node: Node,
        ptr: u64,
        generation: Option<u32>,
    ) -> Result<(), Error> {
        if self.watchful() {
            self.refuse_captured_free(front, (node, ptr), generation)?;
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
        front: &'static Front,
        block: (Node, u64),
        generation: Option<u32>,
        freed: Freed,
    ) -> Result<(), Error> {
        let mut heap = self.lock();
        let ours = front.lock().allocator == self.id;
        let mut after = AfterFree::default();
        match freed {
            Freed::Done => {}
            // The page, or the batch, may have gone with the last of its blocks.
            Freed::Page | Freed::Full(_) if !ours => {}
            Freed::Page => {
                heap.return_surplus(front, &mut after);
            }
            Freed::Full(stream) => {
                if heap.close_batches(front, Some(stream), &mut after) {
                    after.mark(stream, heap.streams[stream].key);
                }
            }
            Freed::Books if heap.closed => return Err(Error::Closed),
            Freed::Books => {
                if !ours || !heap.free_small(front, block, generation, &mut after) {
                    return Err(Error::NotLive { ptr: block.1 });
                }
            }
            Freed::NotLive => {
                let (_, ptr) = block;
                return Err(match heap.fronts.small_around(ptr) {
                    Some((_, run, _)) if generation.is_none() && run.ptr != ptr => {
                        Error::InteriorPointer { ptr, base: run.ptr }
                    }
                    _ => Error::NotLive { ptr },
                });
            }
        }
        self.finish_free(heap, &after);
        Ok(())
    }

    /// [`small_freed`](Self::small_freed) for a block whose owner went out of scope.
    #[cold]
    pub(crate) fn small_dropped(
        &self,
        front: &'static Front,
        block: (Node, u64),
        generation: u32,
        freed: Freed,
    ) {
        match self.small_freed(front, block, Some(generation), freed) {
            Ok(()) => {}
            Err(error) => debug_assert!(false, "a live block is freed: {error}"),
        }
    }

    /// Refuses a free on a stream that is being captured.
    #[cold]
    fn refuse_captured_free(
        &self,
        front: &'static Front,
        (node, ptr): (Node, u64),
        generation: Option<u32>,
    ) -> Result<(), Error> {
        let suspect = {
            let heap = self.lock();
            let inner = front.lock();
            // What is not live is refused for that, also where the driver would not answer.
            (inner.allocator == self.id && inner.live(node, ptr, generation).is_some())
                .then(|| heap.capture_suspect(inner.slot))
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
        let user = cache::find(key)?;
        let using = {
            let mut inner = user.lock();
            if !inner.serves(self.owner(key)) {
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
