//! Allocation from stream caches, without the heap.

use std::sync::atomic::Ordering;

use crate::allocator::engine::recorded;
use crate::driver::{REVIEW, Stream, process};

use crate::allocator::cache::grant::{Grant, Missed};
use crate::allocator::cache::stream_cache::{
    Allocated, Inner, Owner, Small, StreamCache, cold_path, thread,
};
use crate::allocator::engine::Engine;
use crate::allocator::heap::request::Checked;
use crate::allocator::size::{GRANULE, PACKED_SMALL_LIMIT};
use crate::allocator::stream::slot::{StreamKey, is_special};
use crate::error::Error;

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

    /// Returns the owner that a stream cache serves without further checks; no owner matches if further checks are
    /// required.
    #[inline(always)]
    pub(crate) fn owner(&self, key: u64) -> Owner {
        let allocator = self.fast_id();
        Owner { allocator, key }
    }

    /// Allocates from the stream cache that the thread used last for the stream, if the cache suffices. While a
    /// recording without stacks runs, the cache also writes the record.
    #[inline(always)]
    pub(crate) fn hit(&self, key: u64, small: Small) -> Result<Grant, Missed> {
        let Some(cache) = thread::find(key) else {
            cold_path();
            return Err(Missed(None));
        };
        let now = cache.now();
        if now.is_normal() {
            return Grant::take(cache, self.owner(key), small);
        }
        cold_path();
        if now.only_records_blocks()
            && let Some(mut inner) = cache.try_lock()
            && let Some(taken) = inner.take_recorded(self.owner(key), small)
        {
            return Ok(Grant::small(cache, taken, small.granules));
        }
        Err(Missed(None))
    }

    /// [`hit`](Self::hit) for a stream that was just found not to be capturing.
    #[inline(always)]
    pub(crate) fn hit_checked(&self, key: u64, small: Small) -> Option<Grant> {
        let cache = thread::find(key)?;
        let mut inner = cache.try_lock()?;
        let allocator = self.id;
        let taken = inner.take_anywhere(Owner { allocator, key }, small)?;
        inner.record_allocation(&taken, small.requested);
        drop(inner);
        // The generations of a page count its allocations.
        if taken.generation.is_multiple_of(REVIEW) {
            self.driver().review_captures();
        }
        Some(Grant::small(cache, taken, small.granules))
    }

    /// Whether a stream is not capturing, and nothing else has to be checked before a stream cache serves it. Otherwise
    /// the heap determines the reason.
    #[inline(always)]
    fn is_uncaptured(&self, stream: &Stream) -> bool {
        let raw = stream.raw();
        self.rules.caches()
            && !is_special(raw)
            && !self.deferred.load(Ordering::Relaxed)
            && !self.is_scoped()
            && !self.is_not_usable()
            && self.same_driver(stream).is_ok()
            // SAFETY: the stream is alive, as the creator of the object guarantees.
            && unsafe { self.driver().is_uncaptured(raw) }
    }

    /// Allocates on a stream what the fast path did not serve, or what is too large for it. It takes the bytes, because
    /// a request passed on would have to be stored in memory by the caller.
    #[inline(never)]
    pub(crate) fn miss(
        &self,
        bytes: usize,
        stream: &Stream,
        missed: Missed,
    ) -> Result<Grant, Error> {
        let key = stream.cached_id();
        let hit = match unaligned(bytes) {
            Some(small) if self.needs_checks() => {
                // It may hold the lock of the cache.
                drop(missed);
                let uncaptured = self.is_uncaptured(stream);
                uncaptured.then(|| self.hit_checked(key, small)).flatten()
            }
            None if self.in_large_caches.load(Ordering::Relaxed) == 0 => {
                drop(missed);
                None
            }
            _ => self.hit_slow(key, bytes, missed),
        };
        let from_heap = || {
            let request = Checked::new(bytes, 1)?;
            self.allocate_missed(&self.named(stream)?, &request)
        };
        let made = hit.map_or_else(from_heap, Ok);
        recorded::sample(self, &made, bytes);
        made
    }

    /// Allocates from the caches of the stream what the fast path could not serve, if that needs no driver call: a
    /// small block from a stream cache, or a large one from its large-block cache.
    #[inline(never)]
    pub(crate) fn hit_slow(&self, key: u64, bytes: usize, missed: Missed) -> Option<Grant> {
        if !self.is_fast() {
            return None;
        }
        let Some(request) = unaligned(bytes) else {
            return self.hit_large(key, bytes, missed);
        };
        let (cache, inner) = match missed.0 {
            Some(missed) => missed,
            // No cache was tried, because a recording has to see the allocation.
            None => {
                let cache = thread::find(key)?;
                (cache, cache.try_lock())
            }
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
            // Its stream gets more caches, and this thread chooses another.
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
        match outcome {
            Allocated::Taken(taken) => Some(Grant::small(cache, taken, request.granules)),
            _ => None,
        }
    }

    /// Whether the heap alone serves large requests: no cache has a large block, and nothing observes requests.
    #[inline]
    pub(crate) fn serves_large_from_heap(&self) -> bool {
        let cached = self.in_large_caches.load(Ordering::Relaxed) > 0;
        self.fast_id() != 0 && !cached && process::is_normal()
    }

    /// Allocates a large block from the large-block cache of the stream cache that was tried, or else of the one that
    /// the thread used last for the stream.
    #[inline(always)]
    fn hit_large(&self, key: u64, bytes: usize, missed: Missed) -> Option<Grant> {
        if self.in_large_caches.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let (cache, inner) = match missed.0 {
            Some((cache, inner)) => (cache, inner),
            None => (thread::find(key)?, None),
        };
        let mut inner = inner.unwrap_or_else(|| cache.lock());
        let granules = u32::try_from((bytes as u64).div_ceil(GRANULE)).ok()?;
        if !inner.serves(self.owner(key)) {
            return None;
        }
        let block = inner.large_cache.take(granules, bytes as u64)?;
        inner.record_reuse(&block);
        drop(inner);
        let (life, size) = ((block.id, block.generation), (granules, bytes as u64));
        let mut grant = Grant::large(cache, block.ptr, life, size);
        grant.set_cached(true);
        Some(grant)
    }
}

/// Takes a request at the first address that is free in the stream cache that the thread used last for the stream.
/// `None` if the heap has to be searched.
pub(crate) fn small_near(
    engine: &Engine,
    key: u64,
    request: Small,
    near: &[u64],
) -> Option<(Option<Grant>, Vec<u64>)> {
    if !engine.is_fast() || near.is_empty() {
        return None;
    }
    let cache = thread::find(key)?;
    let mut inner = cache.lock();
    if !inner.serves(engine.owner(key)) {
        return None;
    }
    let Allocated::Taken(taken) = take_near(engine, cache, &mut inner, request, near) else {
        return None;
    };
    let free = near.iter().copied().filter(|ptr| {
        let page = engine.pages.find(*ptr);
        let own = page.filter(|(owner, _)| std::ptr::eq(*owner, cache));
        own.is_some_and(|(_, page)| inner.runs.is_free(page, *ptr))
    });
    let free = free.collect();
    drop(inner);
    Some((Some(Grant::small(cache, taken, request.granules)), free))
}

pub(crate) fn take_near(
    engine: &Engine,
    cache: &'static StreamCache,
    inner: &mut Inner,
    request: Small,
    near: &[u64],
) -> Allocated {
    let pages = near
        .iter()
        .filter_map(|ptr| Some((*ptr, engine.pages.find(*ptr)?)));
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
pub(crate) fn is_free_small(engine: &Engine, ptr: u64) -> bool {
    engine.pages.find(ptr).is_some_and(|(cache, page)| {
        let inner = cache.lock();
        inner.allocator == engine.id && inner.runs.is_free(page, ptr)
    })
}
