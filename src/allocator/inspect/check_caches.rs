//! The invariants of stream caches: see [`check`](super::check).

use std::collections::HashMap;
use std::sync::atomic::Ordering;

use crate::allocator::cache::stream_cache::{Kind, Node};
use crate::allocator::extent::invariant::{holds, same};
use crate::allocator::extent::record::State as Extent;
use crate::allocator::heap::Heap;
use crate::allocator::size::GRANULE;
use crate::error::Error;

/// Checks stream caches, their pages, and the blocks that they hold back.
pub(crate) fn check_stream_caches(heap: &Heap, pages_known: u64) -> Result<(), Error> {
    let (mut pages, mut caches) = (0u64, 0u64);
    let mut waiting: HashMap<u32, u64> = HashMap::new();
    let mut held_back: HashMap<(u32, Node), u64> = HashMap::new();
    for held in heap.caches.held_back.iter().chain(heap.guards.held_back()) {
        *waiting.entry(held.cache.rank).or_default() += 1;
        for node in &held.nodes {
            *held_back.entry((held.cache.rank, *node)).or_default() += 1;
        }
    }
    for (stream, _) in heap.streams.iter() {
        let mut own = 0u64;
        for cache in heap.caches.of(stream) {
            let inner = cache.lock();
            caches += 1;
            own += inner.runs.page_count() as u64;
            same("a stream cache knows its stream", stream, inner.slot)?;
            same(
                "a stream cache knows its allocator",
                heap.caches.id,
                inner.allocator,
            )?;
            if let Err(what) = inner.runs.check() {
                return holds(what, false);
            }
            let mut live = [0; 3];
            let batches = inner.batches.iter().map(|batch| &batch.nodes);
            let returned = inner.returned.iter().map(|returned| &returned.nodes);
            for node in batches.chain(returned).flatten() {
                *held_back.entry((cache.rank, *node)).or_default() += 1;
            }
            for (page, info) in inner.runs.pages() {
                let found = heap
                    .caches
                    .table
                    .find(info.base)
                    .map(|(f, at)| (f.rank, at));
                holds(
                    "a page is found by its address",
                    found == Some((cache.rank, page)),
                )?;
                for run in inner
                    .runs
                    .runs(page)
                    .filter(|run| run.kind == Kind::Pending)
                {
                    let times = held_back.remove(&(cache.rank, run.node)).unwrap_or(0);
                    same("a run that waits is held back once", 1u64, times)?;
                }
                for block in inner.runs.runs(page).filter_map(|run| run.live) {
                    let bytes = u64::from(block.granules) * GRANULE;
                    live[0] += bytes;
                    live[1] += u64::from(block.requested);
                    live[2] += 1;
                }
            }
            for (count, live) in inner.runs.accounts.current().into_iter().zip(live) {
                same("a stream cache counts what is live in it", live, count)?;
            }
            same(
                "batches that wait are known to their stream cache",
                waiting.get(&cache.rank).copied().unwrap_or(0),
                inner.waiting,
            )?;
        }
        pages += own;
    }
    holds("what is held back waits in a page", held_back.is_empty())?;
    same(
        "every stream cache has a stream",
        caches,
        heap.caches.all.len(),
    )?;
    same("every page has a stream cache", pages_known, pages)
}

/// Checks that the heap knows exactly the blocks that are in large-block caches.
pub(crate) fn check_large_caches(heap: &Heap) -> Result<(), Error> {
    let mut known = 0u64;
    for cache in &heap.caches.all {
        let inner = cache.lock();
        inner.large_cache.check()?;
        for block in inner.large_cache.blocks() {
            known += 1;
            let provisional = heap.caches.provisional == Some(block.id);
            holds(
                "without a contention there is one block in a large-block cache at most",
                provisional || heap.caches.contention > 0,
            )?;
            let (hot, cold) = (
                &heap.extents.records[block.id],
                heap.extents.records.cold(block.id),
            );
            let here = heap.caches.cached.get(&block.id);
            let here = here.is_some_and(|known| std::ptr::eq(*known, *cache));
            holds(
                "a block in a large-block cache is known there",
                hot.cached && here,
            )?;
            holds(
                "a block in a large-block cache is in use for the heap",
                hot.state == Extent::Used && hot.stream == inner.slot,
            )?;
            holds(
                "only its own stream uses a block in a large-block cache",
                cold.recorded().is_empty(),
            )?;
            same(
                "address of a block in a large-block cache",
                block.ptr,
                hot.addr,
            )?;
            same(
                "length of a block in a large-block cache",
                block.granules,
                hot.granules,
            )?;
            same(
                "bytes asked for in a large-block cache",
                block.counted,
                cold.requested,
            )?;
            holds(
                "a block in a large-block cache asks for no more than is counted",
                block.requested <= block.counted,
            )?;
        }
    }
    let marked = heap
        .extents
        .records
        .iter()
        .filter(|(_, hot)| hot.cached)
        .count() as u64;
    let in_large_caches = heap.caches.in_large_caches.load(Ordering::Relaxed);
    same(
        "published number of blocks in large-block caches",
        known,
        in_large_caches,
    )?;
    same("blocks in large-block caches", known, marked)
}

/// Checks that the limits of the stream caches never exceed a peak.
pub(crate) fn check_limits(heap: &Heap) -> Result<(), Error> {
    let locked = heap.caches.lock_caches();
    let limits = locked
        .iter()
        .map(|inner| inner.runs.accounts.allocated.limit());
    let limit: u64 = limits.sum();
    same(
        "limits of stream caches are known",
        limit,
        heap.caches.limit,
    )?;
    let (all, small) = (&heap.stats.all.allocated, &heap.stats.small.allocated);
    holds(
        "stream caches stay below the peak",
        limit <= small.peak && all.current + limit <= all.peak,
    )
}
