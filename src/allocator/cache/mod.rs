//! The caches of small and large blocks in front of the heap.

pub(crate) mod deferred;
pub(crate) mod grant;
pub(crate) mod lives;
mod peaks;
pub(crate) mod predictor;
pub(crate) mod shared;
pub(crate) mod stream_cache;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use smallvec::SmallVec;

use crate::allocator::cache::predictor::ReusePredictor;
use crate::allocator::cache::stream_cache::{
    Amounts, Held, Inner, KeepAlive, Node, PageTable, QUANTITIES, Run, StreamCache,
};
use crate::allocator::extent::hash::Mixed;
use crate::allocator::extent::record::Recorded;
use crate::allocator::extent::uses::Uses;
use crate::allocator::stream::slot::StreamKey;

/// Freed small blocks that other streams may still access.
#[derive(Debug)]
pub(crate) struct HeldBack {
    pub cache: &'static StreamCache,
    /// Slot of the stream that owns the stream cache.
    pub owner: u32,
    pub uses: Uses,
    pub nodes: Vec<Node>,
    pub bytes: u64,
}

/// The heap's state of all stream caches. A large request accesses the fields before `table`, on three cache lines.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct StreamCaches {
    /// Number of large requests until large-block caches again follow the order of the heap, after threads contended
    /// for the heap's lock.
    pub contention: u32,
    /// The provisional block, which must leave its large-block cache at the next operation on the heap.
    pub provisional: Option<u32>,
    /// Sum of the limits of all stream caches.
    pub(crate) limit: u64,
    /// Peaks of requested bytes and of the number of blocks, small blocks excluded, since the stream caches' own peaks
    /// were last reset.
    pub(crate) high: [u64; 2],
    /// Requested bytes of small blocks as of the last update.
    pub requested: u64,
    pub predictor: ReusePredictor,
    /// By slot of their stream.
    by_stream: Vec<SmallVec<[&'static StreamCache; 1]>>,
    /// Streams that need a marker for blocks that left the large-block caches.
    pub due: Vec<(u32, StreamKey)>,
    /// Maps each page to its stream cache.
    pub table: Arc<PageTable>,
    /// The allocator, for the stream caches that keep it alive.
    pub owner: Weak<dyn KeepAlive>,
    /// The allocator's number.
    pub id: u64,
    /// Packed: page address to its record in the small arena.
    pub page_ids: HashMap<u64, u32, Mixed>,
    /// The cache that keeps the allocator alive for blocks of graph pools.
    pub graph_home: Option<&'static StreamCache>,
    /// Number of the legacy default stream of the allocator's context, if its handles alone identify it, that is,
    /// without checks of the current context.
    pub legacy: Option<u64>,
    /// Number of threads that can run concurrently.
    pub threads: usize,
    /// All stream caches, by rank.
    pub(crate) all: Vec<&'static StreamCache>,
    pub(crate) sharings: u64,
    pub held_back: Vec<HeldBack>,
    /// Number of blocks in large-block caches, live or free. It changes under the heap's lock, and is read without it.
    pub(crate) in_large_caches: Arc<AtomicU32>,
    /// Stream cache in whose large-block cache a block lies, by record.
    pub cached: HashMap<u32, &'static StreamCache, Mixed>,
    /// Uses of live small blocks that their stream caches cannot store themselves, by address.
    pub recorded: HashMap<u64, Vec<Recorded>>,
    /// Number of small requests that the fast path of their stream cache could not serve.
    pub misses: u64,
    /// Totals of the stream caches that were removed.
    pub(crate) gone: [u64; QUANTITIES],
    /// Totals of reuses in the large-block caches of removed stream caches.
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

    /// Returns the stream caches of a stream, from which its small blocks come.
    #[inline]
    pub(crate) fn of(&self, stream: u32) -> &[&'static StreamCache] {
        let own = self.by_stream.get(stream as usize);
        own.map_or(&[], SmallVec::as_slice)
    }

    /// Adds a stream cache to those of a stream.
    pub(crate) fn add(&mut self, stream: u32, cache: &'static StreamCache) {
        let known = self.by_stream.len().max(stream as usize + 1);
        self.by_stream.resize_with(known, SmallVec::new);
        self.by_stream[stream as usize].push(cache);
        let at = self.all.partition_point(|f| f.rank < cache.rank);
        self.all.insert(at, cache);
    }

    /// Removes the stream caches of a stream, and adds their totals to the sums.
    pub(crate) fn remove(&mut self, stream: u32) -> SmallVec<[&'static StreamCache; 1]> {
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

    /// Lets the stream caches of a stream serve requests without the heap, or stops them.
    pub(crate) fn set_fast(&self, stream: u32, fast: bool) {
        for cache in self.of(stream) {
            cache.lock().set_fast(fast);
        }
    }

    /// Sets the handle by which a stream is known; 0 for none.
    pub(crate) fn set_handle(&self, stream: u32, raw: usize) {
        for cache in self.of(stream) {
            cache.set_handle(raw);
        }
    }

    /// Prevents new capture queries of a stream by frees in its stream caches. [`StreamCache::await_queries`] waits for
    /// the queries in progress.
    pub(crate) fn stop_queries(&self, stream: u32) -> Vec<&'static StreamCache> {
        let caches = self.of(stream).to_vec();
        for cache in &caches {
            cache.lock().raw = 0;
        }
        caches
    }

    /// Sets the ticket of a stream's later frees in its stream caches.
    pub(crate) fn set_ticket(&self, stream: u32, ticket: u64) {
        for cache in self.of(stream) {
            cache.lock().runs.set_ticket(ticket);
        }
    }

    /// Returns the number of pages in the stream caches of a stream.
    pub(crate) fn pages_of(&self, stream: u32) -> usize {
        let pages = |cache: &&'static StreamCache| cache.lock().runs.page_count();
        self.of(stream).iter().map(pages).sum()
    }

    /// Returns the number of items that a stream's stream caches know to be in use: live blocks, uses recorded on the
    /// stream, and pages.
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

    /// Subtracts completed uses that were recorded on a stream.
    pub(crate) fn uncount_recorded(&self, stream: u32, count: i64) {
        if let Some(cache) = self.of(stream).first() {
            cache.lock().recorded -= count;
        }
    }

    /// Returns the uses of a stream on live small blocks that the heap stores.
    pub(crate) fn small_uses(&self, stream: u32) -> u64 {
        let uses = self.recorded.values().flatten();
        uses.filter(|r| r.stream == stream).count() as u64
    }

    /// Returns the live small block around an address, with its stream cache and the slot of its stream.
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

    /// Returns the streams for which a stream cache holds back blocks.
    pub(crate) fn held_back_for(&self, cache: &'static StreamCache) -> Vec<u32> {
        let held = self.held_back.iter();
        let own = held.filter(|held| std::ptr::eq(held.cache, cache));
        own.flat_map(|held| held.uses.as_slice())
            .map(|u| u.stream)
            .collect()
    }

    /// Drops the rings of a finished recording.
    pub(crate) fn clear_taps(&self) {
        for cache in &self.all {
            cache.lock().event_writer.clear();
        }
    }

    pub(crate) fn lock_caches(&self) -> Vec<Locked<'static>> {
        self.all.iter().map(|cache| cache.lock()).collect()
    }

    /// Returns the totals of live small blocks in stream caches.
    pub(crate) fn small_totals(&mut self) -> SmallTotals {
        let totals = totals(&self.lock_caches());
        self.requested = totals[1];
        totals
    }

    /// Returns the free bytes in the pages of each stream that has any, by slot.
    pub(crate) fn free_in_caches(&self) -> Vec<(u32, u64)> {
        let free = self.all.iter().map(|cache| {
            let inner = cache.lock();
            (inner.slot, inner.free_bytes() + inner.pending_bytes())
        });
        free.filter(|(_, bytes)| *bytes > 0).collect()
    }

    /// Whether blocks lie in large-block caches, live or free.
    pub(crate) fn have_large(&self) -> bool {
        self.in_large_caches.load(Ordering::Relaxed) > 0
    }

    /// Whether a large-block cache may hold a block: without contention it holds the provisional block at most. Cheaper
    /// than [`have_large`](Self::have_large), which is exact.
    #[inline]
    pub(crate) fn may_have_large(&self) -> bool {
        self.provisional.is_some() || self.contention > 0
    }

    /// Returns what the heap counts for free blocks in large-block caches.
    pub(crate) fn idle_in_large_caches(&self) -> Amounts {
        let mut held = Amounts::default();
        for cache in &self.all {
            held += cache.lock().large_cache.held();
        }
        held
    }
}

pub(crate) type Locked<'a> = Held<'a, Inner>;

/// Live small blocks: bytes, requested bytes, and their number.
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
