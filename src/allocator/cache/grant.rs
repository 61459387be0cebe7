//! Live blocks as values: the grant of an allocation, and the place by which a block is found again.

use crate::driver::sys;

use crate::allocator::cache::stream_cache::{
    Held, Inner, Node, Owner, PageTable, SMALL_ID, Small, StreamCache, Taken, thread,
};
use crate::allocator::size::GRANULE;

/// A live block as allocated.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Grant {
    pub place: Place,
    granules: u32,
}

/// The location of a live block, which suffices to find and free it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    /// The block's owning cache, which keeps the allocator alive for it.
    home: &'static StreamCache,
    pub ptr: sys::CUdeviceptr,
    /// For a small block its node in the owning cache. For other blocks `RECORD` and the number of a record, with
    /// `WIDE` if the block has more bytes than its rounded request, and `CACHED` if it was put in a large-block cache.
    node: u32,
    pub generation: u32,
}

/// Bits that no node has.
const RECORD: u32 = 1 << 31;
const WIDE: u32 = 1 << 30;
const CACHED: u32 = 1 << 29;
const FLAGS: u32 = RECORD | WIDE | CACHED;

/// A request that the fast path could not serve: the stream cache that was tried, still locked unless another thread
/// holds it. `None` if no cache was tried.
pub(crate) struct Missed(pub(crate) Option<(&'static StreamCache, Option<Held<'static, Inner>>)>);

impl Missed {
    /// Returns the number of an allocator's stream, if the cache that was tried identifies the stream by this handle.
    /// Otherwise forgets that cache.
    pub(crate) fn key_of_handle(&mut self, allocator: u64, raw: usize) -> Option<u64> {
        let (cache, inner) = self.0.take()?;
        // A lock that another thread holds counts as contention.
        let inner = inner.or_else(|| cache.try_lock());
        let key = match &inner {
            Some(inner) => inner.key_in(allocator, raw),
            None => cache.lock().key_in(allocator, raw),
        }?;
        self.0 = Some((cache, inner));
        Some(key)
    }
}

impl Grant {
    /// Takes a small block from a stream cache in a process without recordings, captures or other conditions.
    #[inline(always)]
    pub(crate) fn take(
        cache: &'static StreamCache,
        owner: Owner,
        request: Small,
    ) -> Result<Self, Missed> {
        let Some(mut inner) = cache.try_lock() else {
            return Err(Missed(Some((cache, None))));
        };
        match inner.take_anywhere(owner, request) {
            Some(taken) => Ok(Grant::small(cache, taken, request.granules)),
            None => Err(Missed(Some((cache, Some(inner))))),
        }
    }

    /// [`take`](Self::take) at one address only: that of the last block of this size which the stream cache took back.
    #[inline]
    pub(crate) fn take_at(
        cache: &'static StreamCache,
        owner: Owner,
        request: Small,
        ptr: u64,
    ) -> Option<Self> {
        let mut inner = cache.now().is_normal().then(|| cache.try_lock())??;
        if inner.runs.next_quick(request.granules) != Some(ptr) {
            return None;
        }
        let taken = inner.take_anywhere(owner, request)?;
        Some(Grant::small(cache, taken, request.granules))
    }

    /// [`take`](Self::take) for the stream with this handle, from the stream cache that the thread used last for it, if
    /// the handle stays valid. `pages` is the allocator's own table of pages.
    #[inline(always)]
    pub(crate) fn take_by_handle(
        cache: &'static StreamCache,
        (pages, raw): (&PageTable, usize),
        request: Small,
    ) -> Option<Self> {
        thread::prefetch_for(cache, request.granules);
        if !cache.now().is_normal() {
            return None;
        }
        let allocator = pages.fast_id();
        let mut inner = cache.try_lock()?;
        let key = inner.key_of_handle(raw)?;
        let taken = inner.take_anywhere(Owner { allocator, key }, request)?;
        Some(Grant::small(cache, taken, request.granules))
    }

    #[inline(always)]
    pub(crate) fn small(home: &'static StreamCache, taken: Taken, granules: u32) -> Self {
        let place = Place {
            home,
            ptr: taken.ptr,
            node: taken.node.0,
            generation: taken.generation,
        };
        Grant { place, granules }
    }

    /// Creates the grant of a block with a record: its number and generation, its granules, and its requested bytes.
    #[inline]
    pub(crate) fn large(
        home: &'static StreamCache,
        ptr: u64,
        (id, generation): (u32, u32),
        (granules, requested): (u32, u64),
    ) -> Self {
        let wide = requested.div_ceil(GRANULE) < u64::from(granules);
        let place = Place {
            home,
            ptr,
            node: RECORD | if wide { WIDE } else { 0 } | id,
            generation,
        };
        Grant { place, granules }
    }

    /// Sets whether the block lies in the large-block cache of its stream cache.
    #[inline]
    pub(crate) fn set_cached(&mut self, cached: bool) {
        self.place.node |= if cached { CACHED } else { 0 };
    }

    #[inline(always)]
    pub(crate) fn ptr(&self) -> u64 {
        self.place.ptr
    }

    #[inline(always)]
    pub(crate) fn granules(&self) -> u32 {
        self.granules
    }

    pub(crate) fn bytes(&self) -> u64 {
        u64::from(self.granules) * GRANULE
    }
}

impl Place {
    /// Returns the stream cache that keeps the allocator alive.
    #[inline(always)]
    pub(crate) fn home(&self) -> &'static StreamCache {
        self.home
    }

    /// Returns the node of a small block in its stream cache.
    #[inline(always)]
    pub(crate) fn node(&self) -> Option<Node> {
        (self.node & RECORD == 0).then_some(Node(self.node))
    }

    /// Returns the record of any other block.
    #[inline]
    pub(crate) fn record(&self) -> Option<u32> {
        (self.node & RECORD != 0).then_some(self.node & !FLAGS)
    }

    /// Returns the record of a block that was put in a large-block cache and may have left it since.
    #[inline]
    pub(crate) fn cached(&self) -> Option<u32> {
        let cached = self.node & (RECORD | CACHED) == RECORD | CACHED;
        cached.then_some(self.node & !FLAGS)
    }

    /// Returns the number that identifies the block among all blocks of its allocator, whose pages these are.
    pub(crate) fn id(&self, pages: &PageTable) -> u32 {
        let id = self.record().or_else(|| pages.id(self.ptr));
        debug_assert!(id.is_some(), "the page of a live block is known");
        id.unwrap_or(SMALL_ID)
    }

    /// Whether the block has more bytes than its rounded request.
    pub(crate) fn wide(&self) -> bool {
        self.node & (RECORD | WIDE) == RECORD | WIDE
    }
}

/// One allocation of a block: its number, its generation, and its address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Lifetime {
    pub id: u32,
    pub generation: u32,
    pub ptr: sys::CUdeviceptr,
}
