//! Releasing memory to the driver, and closing.

use crate::allocator::inspect::figures::pending_bytes;
use crate::allocator::plan;
use std::sync::Arc;

use crate::allocator::engine::contexts;
use crate::allocator::engine::idle;
use crate::allocator::engine::release;
use crate::allocator::engine::self_test;
use crate::allocator::graph::run::pools;
use crate::allocator::suspend::discard;
use crate::driver::{StreamKind, process};
use crate::locks::lines::keep_lines;

use crate::allocator::engine::Engine;
use crate::allocator::extent::record::SpaceId;
use crate::allocator::graph::run::pools::SOON;
use crate::allocator::report::Trimmed;
use crate::allocator::stream::slot::{Holder, StreamKey};
use crate::error::Error;
use crate::nvtx::{self, Category};
use crate::sync::capture::{is_of_capture, is_void_wait};

/// Name of the holder that keeps an allocator open while graphs may use memory of its pools.
pub(crate) const GRAPH: &str = "graph";

/// Releases unused memory until no more than `keep` bytes of it are held. It waits only in order to close orphaned
/// allocators.
pub(crate) fn trim(engine: &Engine, keep: u64) -> Result<Trimmed, Error> {
    // In a forked child, which is refused below, taking such a lock would leak memory.
    if !process::is_forked_child() {
        engine.suspender.drop_spare();
    }
    trim_device(engine, keep)
}

/// [`trim`], except for page-locked host memory.
pub(crate) fn trim_device(engine: &Engine, keep: u64) -> Result<Trimmed, Error> {
    let _span = nvtx::span(Category::Trim, || format!("{keep} bytes are kept"));
    let (finished, retried) = idle::find(engine)?;
    let mut heap = engine.lock();
    let (_, allocated) = heap.live_totals();
    let leaving = heap.ranges.leaving;
    let all = &heap.stats.all;
    // Memory that has left a range returns first.
    let excess = all.reserved.current + leaving;
    let excess = excess
        .saturating_sub(keep.saturating_add(allocated))
        .min(leaving);
    let idle = if keep.saturating_add(allocated) < all.reserved.current {
        heap.views.idle_views(&heap.streams, usize::MAX)
    } else {
        Vec::new()
    };
    drop(heap);
    let evicted = release::evict(engine, &idle);
    let left = release::release_settled(engine, None, excess, |_, _, _, _| true);
    let mut heap = engine.lock();
    let leaving = heap.ranges.leaving.min(excess);
    let (plan, pending) = plan::release::plan_trim(&mut heap, keep);
    let pending = pending + leaving;
    let streams = match pending {
        0 => Vec::new(),
        _ => pending_bytes(&heap),
    };
    heap.peak_live = heap.requested_now();
    heap.peak_active = 0;
    drop(heap);
    let released_pools =
        pools::poll_all(engine).and_then(|()| pools::release_pool_memory(engine, true));
    let released = release::release(engine, plan)?;
    evicted?;
    Ok(Trimmed {
        released: finished + released + left? + retried? + released_pools?,
        pending,
        streams,
    })
}

/// Releases all unused memory, and waits where only a wait can show that memory is unused: first for the
/// allocator's own markers; then for the contexts, if there is memory that no marker will ever cover and no capture
/// is known there. It does not wait again for memory that other threads free meanwhile, because that could
/// invalidate captures of streams that the allocator never saw.
pub(crate) fn empty_cache(engine: &Engine) -> Result<Trimmed, Error> {
    engine.usable()?;
    // Pools that were not released may serve further captures, so their graphs are not waited for.
    pools::await_leases(engine, SOON, |pool| pool.released);
    let mut done = trim(engine, 0)?;
    for last in [false, true] {
        let contexts = {
            let heap = engine.lock();
            if done.pending == 0 && heap.caches.held_back.is_empty() {
                break;
            }
            let mut slots = heap.streams.iter();
            last && slots.any(|(_, slot)| slot.lacks_markers())
                && !heap.graphs.scopes.await_captures()
        };
        let waited = match contexts {
            true => contexts::synchronise(engine, false),
            false => wait_for_markers(engine),
        };
        match waited {
            // Memory whose completion a capture hides stays pending.
            Err(Error::Capturing { .. }) => break,
            waited => waited?,
        }
        let more = trim(engine, 0)?;
        done = Trimmed {
            released: done.released + more.released,
            ..more
        };
    }
    Ok(done)
}

/// Waits on the host for the newest marker of each stream that is not known to capture.
fn wait_for_markers(engine: &Engine) -> Result<(), Error> {
    let _lines = keep_lines();
    let waits: Vec<_> = {
        let heap = engine.lock();
        let found = contexts::found_capturing(engine, &heap);
        let streams = heap.streams.iter();
        streams
            .filter(|(_, slot)| found.iter().all(|(raw, _)| *raw != slot.raw))
            .filter_map(|(stream, slot)| Some((stream, slot.holder.clone(), slot.newest()?)))
            .map(|(stream, holder, m)| (stream, holder, m.bound, Arc::clone(&m.event)))
            .collect()
    };
    for (stream, holder, bound, event) in waits {
        let asked = match &holder {
            Holder::Kept(kept) => engine.refuse_capture(&engine.named(kept)?),
            Holder::Foreign(_) | Holder::Adopted(_) | Holder::Retired => Ok(()),
        };
        match asked.and_then(|()| engine.host_wait(stream, bound, event)) {
            Err(Error::Capturing { .. }) => {}
            Err(Error::Driver(error)) if is_of_capture(error.code()) || is_void_wait(&error) => {}
            waited => waited?,
        }
    }
    Ok(())
}

/// [`close`], repeated while graphs give up leases of the pools.
pub(crate) fn close_after_graphs(engine: &Engine) -> Result<(), Error> {
    let ended = Arc::clone(&engine.open()?.graphs.ended);
    loop {
        let seen = ended.count();
        match close(engine) {
            Err(Error::InUse { what: GRAPH, .. }) if ended.count() > seen => {}
            closed => return closed,
        }
    }
}

/// Waits for the allocator's markers, releases everything, and refuses further calls. After an error the allocator
/// is open again and owns what could not be released.
pub(crate) fn close(engine: &Engine) -> Result<(), Error> {
    engine.free_deferred();
    if let Some(debug) = &engine.debug {
        debug.release_quarantine(engine, 0);
    }
    {
        let mut heap = engine.open()?;
        heap.guards.ensure_none()?;
        heap.guards.ensure_none_in(|_| true)?;
        let leases = heap.graphs.count_leases();
        if leases > 0 {
            return Err(Error::InUse {
                what: GRAPH,
                count: leases,
                bytes: heap.graphs.held,
            });
        }
        if let Some((count, bytes)) = heap.ranges.count_live() {
            let what = "range";
            return Err(Error::InUse { what, count, bytes });
        }
        // An allocation in progress counts as a block.
        let suspending = u64::from(heap.suspended.working);
        let calls: u64 = heap
            .streams
            .iter()
            .map(|(_, slot)| u64::from(slot.calls))
            .chain(heap.graphs.pools.values().map(|pool| u64::from(pool.calls)))
            .sum::<u64>()
            + suspending;
        heap.empty_large_caches();
        let (blocks, bytes) = (heap.caches).shut(&heap.stats, heap.graphs.live_totals(), calls);
        if blocks > 0 {
            let orphaned = heap.orphaned;
            drop(heap);
            if let Some(debug) = engine.debug.as_ref().filter(|_| !orphaned) {
                debug.report_leaks(engine);
            }
            return Err(Error::InUse {
                what: "block",
                count: blocks,
                bytes,
            });
        }
        heap.closed = true;
    }
    let result = release_everything(engine);
    let mut heap = engine.lock();
    heap.closed = result.is_ok();
    if result.is_err() {
        heap.open_caches();
    }
    if heap.closed {
        let streams: Vec<u32> = heap.streams.iter().map(|(stream, _)| stream).collect();
        for stream in streams {
            let heap = &mut *heap;
            heap.caches.drop_caches(&mut heap.stats, stream);
        }
        heap.caches.drop_graph_home();
        let foreign = heap.streams.take_foreign();
        // Events are destroyed outside the lock.
        let events = std::mem::take(&mut heap.streams.events);
        drop(heap);
        drop(events);
        engine.events.clear();
        // From here on the owners may destroy the streams.
        foreign.into_iter().for_each(Holder::await_calls);
    }
    result
}

fn release_everything(engine: &Engine) -> Result<(), Error> {
    // A page that is returned may still be in use by its stream, and a page that other streams used can be returned
    // only when their uses are complete.
    engine.lock().flush_caches();
    loop {
        complete_all(engine)?;
        let mut heap = engine.lock();
        heap.complete_uses();
        if !heap.flush_caches() && heap.streams.iter().all(|(_, slot)| slot.covered()) {
            break;
        }
    }
    discard::discard_all(engine)?;
    self_test::finish(engine, true)?;
    release::release_all_settled(engine)?;
    pools::close(engine)?;
    let idle = {
        let heap = engine.lock();
        heap.views.idle_views(&heap.streams, usize::MAX)
    };
    release::evict(engine, &idle)?;
    let retried = release::release_quarantined(engine);
    let (plan, _) = plan::release::plan_trim(&mut engine.lock(), 0);
    release::release(engine, plan)?;
    retried?;
    return_spans(engine)
}

/// Waits until every free is complete: for markers where they can be recorded, otherwise for the context.
fn complete_all(engine: &Engine) -> Result<(), Error> {
    let ours: Vec<(u32, StreamKey)> = {
        let heap = engine.lock();
        let slots = heap.streams.iter();
        slots
            .filter(|(_, slot)| match &slot.holder {
                Holder::Kept(stream) => {
                    stream.kind() != StreamKind::PerThreadDefault && !slot.covered()
                }
                Holder::Adopted(_) => !slot.covered(),
                _ => false,
            })
            .map(|(stream, slot)| (stream, slot.key))
            .collect()
    };
    engine.cover_all(&ours)?;
    loop {
        let oldest = {
            let heap = engine.lock();
            let caches = heap.streams.iter().filter_map(|(stream, slot)| {
                slot.newest()
                    .map(|m| (stream, m.bound, Arc::clone(&m.event)))
            });
            caches.min_by_key(|(stream, _, _)| *stream)
        };
        let Some((stream, bound, event)) = oldest else {
            break;
        };
        match engine.host_wait(stream, bound, event) {
            Err(Error::Driver(error)) if is_void_wait(&error) => {}
            waited => waited?,
        }
    }
    let uncovered = engine
        .lock()
        .streams
        .iter()
        .any(|(_, slot)| !slot.covered());
    if uncovered {
        contexts::synchronise(engine, true)
    } else {
        Ok(())
    }
}

fn return_spans(engine: &Engine) -> Result<(), Error> {
    let spans = {
        let mut heap = engine.lock();
        // If a concurrent trim fails to free a segment, the segment returns to the heap.
        let held = heap.held();
        if held > 0 || !heap.views.map.is_empty() || !heap.ranges.map.is_empty() {
            return Err(Error::StillHeld { bytes: held });
        }
        for space in [SpaceId::Large, SpaceId::Small, SpaceId::Views] {
            let (at, records) = heap.extents.parts(space);
            let firsts: Vec<u32> = at.regions().values().map(|r| r.first).collect();
            for id in firsts {
                at.remove_region(records, id);
            }
        }
        std::mem::take(&mut heap.physical.spans)
    };
    for (base, bytes) in spans {
        engine.addresses.give_back(base, bytes);
    }
    if !engine.addresses.is_idle() {
        return Ok(());
    }
    let entered = engine.context.enter().map_err(|e| engine.error(e))?;
    engine
        .addresses
        .return_idle(&entered)
        .map_err(|e| engine.error(e))
}
