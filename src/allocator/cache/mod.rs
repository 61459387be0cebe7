//! The caches of small and large blocks in front of the heap.

pub(crate) mod deferred;
pub(crate) mod grant;
pub(crate) mod predictor;
pub(crate) mod stream_cache;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use crate::allocator::cache::predictor::ReusePredictor;
use crate::allocator::cache::stream_cache::{
    Amounts, Held, Inner, KeepAlive, Node, PageTable, QUANTITIES, Run, StreamCache,
};
use crate::allocator::extent::hash::Mixed;
use crate::allocator::extent::record::Recorded;
use crate::allocator::extent::uses::Uses;
use crate::allocator::stream::slot::StreamKey;

/// Small blocks that were freed while other streams may still use them.
#[derive(Debug)]
pub(crate) struct HeldBack {
    pub cache: &'static StreamCache,
    /// Slot of the stream whose stream cache it is.
    pub owner: u32,
    pub uses: Uses,
    pub nodes: Vec<Node>,
    pub bytes: u64,
}

/// What the heap knows of all stream caches together.
#[derive(Debug)]
pub(crate) struct StreamCaches {
    /// The allocator, for the stream caches that keep it alive.
    pub owner: Weak<dyn KeepAlive>,
    /// The allocator's number.
    pub id: u64,
    /// Which stream cache has which page.
    pub table: Arc<PageTable>,
    /// Packed: page address to its record in the small arena.
    pub page_ids: HashMap<u64, u32, Mixed>,
    /// What keeps the allocator alive for blocks of graph pools.
    pub graph_home: Option<&'static StreamCache>,
    /// The number of the legacy default stream of the allocator's context, where its handles alone tell it: nobody
    /// checks which context is current.
    pub legacy: Option<u64>,
    /// Threads that can run at once.
    pub threads: usize,
    /// By rank.
    pub(crate) all: Vec<&'static StreamCache>,
    /// By the slot of their stream.
    by_stream: Vec<Vec<&'static StreamCache>>,
    /// What the stream caches may count to together.
    pub(crate) limit: u64,
    /// Most requested bytes and most blocks among those that are not small, since the stream caches' own peaks
    /// were last reset.
    pub(crate) high: [u64; 2],
    /// Requested bytes of small blocks as of the last look.
    pub requested: u64,
    pub(crate) sharings: u64,
    pub held_back: Vec<HeldBack>,
    pub predictor: ReusePredictor,
    /// Large requests until large-block caches keep to the order of the heap again: threads met at their lock.
    pub contention: u32,
    /// Blocks in large-block caches, held by somebody or not, for those who do not hold the lock of the heap,
    /// under which it changes.
    pub(crate) in_large_caches: Arc<AtomicU32>,
    /// In whose large-block cache a block lies, by its record.
    pub cached: HashMap<u32, &'static StreamCache, Mixed>,
    /// The block in a large-block cache that must leave it when anything else happens in the heap.
    pub provisional: Option<u32>,
    /// Streams whose markers are due for what came out of the large-block caches.
    pub due: Vec<(u32, StreamKey)>,
    /// Uses of live small blocks that their stream caches cannot note themselves, by address.
    pub recorded: HashMap<u64, Vec<Recorded>>,
    /// Small requests that did not find room in their stream cache at once.
    pub misses: u64,
    /// Everything that was ever added to stream caches that are gone.
    pub(crate) gone: [u64; QUANTITIES],
    /// Everything that was handed out again from the large-block caches of stream caches that are gone.
    pub(crate) reused: Amounts,
    pub(crate) pending_peak: u64,
}

impl StreamCaches {
    pub(crate) fn new((owner, id): (Weak<dyn KeepAlive>, u64), table: Arc<PageTable>) -> Self {
        StreamCaches {
            owner,
            id,
            table,
            page_ids: HashMap::default(),
            graph_home: None,
            legacy: None,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            all: Vec::new(),
            by_stream: Vec::new(),
            limit: 0,
            high: [0; 2],
            requested: 0,
            sharings: 0,
            held_back: Vec::new(),
            predictor: ReusePredictor::default(),
            contention: 0,
            in_large_caches: Arc::default(),
            cached: HashMap::default(),
            provisional: None,
            due: Vec::new(),
            recorded: HashMap::default(),
            misses: 0,
            gone: [0; QUANTITIES],
            reused: Amounts::default(),
            pending_peak: 0,
        }
    }

    /// Every stream cache, by rank.
    pub(crate) fn all(&self) -> &[&'static StreamCache] {
        &self.all
    }

    /// The stream caches of a stream: where its small blocks come from.
    #[inline]
    pub(crate) fn of(&self, stream: u32) -> &[&'static StreamCache] {
        let own = self.by_stream.get(stream as usize);
        own.map_or(&[], Vec::as_slice)
    }

    /// Adds a stream cache to those of a stream.
    pub(crate) fn add(&mut self, stream: u32, cache: &'static StreamCache) {
        let known = self.by_stream.len().max(stream as usize + 1);
        self.by_stream.resize_with(known, Vec::new);
        self.by_stream[stream as usize].push(cache);
        let at = self.all.partition_point(|f| f.rank < cache.rank);
        self.all.insert(at, cache);
    }

    /// Takes the stream caches of a stream out, with all that they ever counted.
    pub(crate) fn remove(&mut self, stream: u32) -> Vec<&'static StreamCache> {
        let own = self.by_stream.get_mut(stream as usize);
        let caches = own.map(std::mem::take).unwrap_or_default();
        for cache in &caches {
            let inner = cache.lock();
            self.limit -= inner.runs.accounts.allocated.limit();
            for (gone, total) in self.gone.iter_mut().zip(inner.runs.accounts.totals()) {
                *gone += total;
            }
            self.reused += inner.large_cache.reused();
            self.pending_peak += inner.pending_peak;
        }
        self.all
            .retain(|cache| !caches.iter().any(|gone| std::ptr::eq(*gone, *cache)));
        caches
    }

    /// Lets the stream caches of a stream work without a look at the heap, or stops them.
    pub(crate) fn set_fast(&self, stream: u32, fast: bool) {
        for cache in self.of(stream) {
            cache.lock().set_fast(fast);
        }
    }

    /// A stream is known by a handle from now on, or by none if that is 0.
    pub(crate) fn set_handle(&self, stream: u32, raw: usize) {
        for cache in self.of(stream) {
            cache.set_handle(raw);
        }
    }

    /// Nobody begins to ask a stream about captures any more for a free in its stream caches. Who has begun, is
    /// waited for by [`StreamCache::let_go`].
    pub(crate) fn stop_asking(&self, stream: u32) -> Vec<&'static StreamCache> {
        let caches = self.of(stream).to_vec();
        for cache in &caches {
            cache.lock().raw = 0;
        }
        caches
    }

    /// The ticket that a stream's stream caches give what is freed from now on.
    pub(crate) fn set_ticket(&self, stream: u32, ticket: u64) {
        for cache in self.of(stream) {
            cache.lock().runs.set_ticket(ticket);
        }
    }

    /// Pages in the stream caches of a stream.
    pub(crate) fn pages_of(&self, stream: u32) -> usize {
        let pages = |cache: &&'static StreamCache| cache.lock().runs.page_count();
        self.of(stream).iter().map(pages).sum()
    }

    /// Everything that a stream's stream caches know to be in use: live blocks, uses recorded on it, and
    /// pages.
    pub(crate) fn uses_of(&self, stream: u32) -> u64 {
        let (mut blocks, mut recorded) = (0, 0);
        for cache in self.of(stream) {
            let inner = cache.lock();
            blocks += inner.runs.page_count() as u64;
            blocks += inner.runs.accounts.blocks.current() + u64::from(inner.waiting);
            recorded += inner.recorded;
        }
        blocks + u64::try_from(recorded).unwrap_or(0)
    }

    /// So many uses that were recorded on a stream are over.
    pub(crate) fn uncount_recorded(&self, stream: u32, count: i64) {
        if let Some(cache) = self.of(stream).first() {
            cache.lock().recorded -= count;
        }
    }

    /// Uses of a stream on live small blocks, as far as the heap keeps them.
    pub(crate) fn small_uses(&self, stream: u32) -> u64 {
        let uses = self.recorded.values().flatten();
        uses.filter(|r| r.stream == stream).count() as u64
    }

    /// The live small block around an address, with its stream cache and the slot of its stream.
    pub(crate) fn small_around(&self, ptr: u64) -> Option<(&'static StreamCache, Run, u32)> {
        let (cache, page) = self.table.find(ptr)?;
        let inner = cache.lock();
        if inner.allocator != self.id {
            return None;
        }
        let run = inner.runs.around(page, ptr)?;
        run.live?;
        Some((cache, run, inner.slot))
    }

    /// The streams for which blocks of a stream cache are held back.
    pub(crate) fn held_back_for(&self, cache: &'static StreamCache) -> Vec<u32> {
        let held = self.held_back.iter();
        let own = held.filter(|held| std::ptr::eq(held.cache, cache));
        own.flat_map(|held| held.uses.as_slice())
            .map(|u| u.stream)
            .collect()
    }

    /// Lets go of the rings of a recording that is over.
    pub(crate) fn clear_taps(&self) {
        for cache in &self.all {
            cache.lock().tap.clear();
        }
    }

    pub(crate) fn lock_caches(&self) -> Vec<Locked<'static>> {
        self.all.iter().map(|cache| cache.lock()).collect()
    }

    /// Live small blocks in stream caches.
    pub(crate) fn small_totals(&mut self) -> SmallTotals {
        let totals = totals(&self.lock_caches());
        self.requested = totals[1];
        totals
    }

    /// Free bytes in the pages of each stream that has any, by its slot.
    pub(crate) fn free_in_caches(&self) -> Vec<(u32, u64)> {
        let free = self.all.iter().map(|cache| {
            let inner = cache.lock();
            (inner.slot, inner.free_bytes() + inner.pending_bytes())
        });
        free.filter(|(_, bytes)| *bytes > 0).collect()
    }

    /// Whether blocks lie in large-block caches, held by somebody or not.
    pub(crate) fn have_large(&self) -> bool {
        self.in_large_caches.load(Ordering::Relaxed) > 0
    }

    /// What the heap counts for blocks in large-block caches that nobody holds.
    pub(crate) fn idle_in_large_caches(&self) -> Amounts {
        let mut held = Amounts::default();
        for cache in self.all() {
            held += cache.lock().large_cache.held();
        }
        held
    }
}

pub(crate) type Locked<'a> = Held<'a, Inner>;

/// Live small blocks: bytes, bytes as asked for, and their number.
pub(crate) type SmallTotals = [u64; QUANTITIES];

pub(crate) fn totals(locked: &[Locked<'_>]) -> SmallTotals {
    let mut totals = [0; QUANTITIES];
    for inner in locked {
        for (total, own) in totals.iter_mut().zip(inner.runs.accounts.current()) {
            *total += own;
        }
    }
    totals
}
