//! Releasing memory to the driver, and closing.

use std::sync::Arc;

use crate::allocator::inspect::figures::pending_bytes;
use crate::allocator::plan::release;
use crate::driver::{StreamKind, process};
use crate::locks::lines::keep_lines;

use crate::allocator::engine::Engine;
use crate::allocator::engine::graph_pools::SOON;
use crate::allocator::extent::record::SpaceId;
use crate::allocator::report::Trimmed;
use crate::allocator::stream::slot::{Holder, StreamKey};
use crate::error::Error;
use crate::nvtx::{self, Category};
use crate::sync::capture::is_of_capture;

/// Name of the holder that keeps an allocator open while graphs may use memory of its pools.
const GRAPH: &str = "graph";

impl Engine {
    /// Releases unused memory until no more than `keep` bytes of it are held. It waits only in order to close orphaned
    /// allocators.
    pub(crate) fn trim(&self, keep: u64) -> Result<Trimmed, Error> {
        let _span = nvtx::span(Category::Trim, || format!("{keep} bytes are kept"));
        // In a forked child, which is refused below, taking such a lock would leak memory.
        if !process::is_forked_child() {
            self.suspender.drop_spare();
        }
        let (finished, retried) = self.find_idle()?;
        let mut heap = self.lock();
        let (_, allocated) = heap.live_totals();
        let all = &heap.stats.all;
        let idle = if keep.saturating_add(allocated) < all.reserved.current {
            heap.views.idle_views(&heap.streams, usize::MAX)
        } else {
            Vec::new()
        };
        drop(heap);
        let evicted = self.evict(&idle);
        let mut heap = self.lock();
        let (plan, pending) = release::plan_trim(&mut heap, keep);
        let streams = match pending {
            0 => Vec::new(),
            _ => pending_bytes(&heap),
        };
        heap.peak_live = heap.requested_now();
        heap.peak_active = 0;
        drop(heap);
        let dissolved = self.ask_pools().and_then(|()| self.dissolve_pools(true));
        let released = self.release(plan)?;
        evicted?;
        Ok(Trimmed {
            released: finished + released + retried? + dissolved?,
            pending,
            streams,
        })
    }

    /// Finds idle memory without a wait: records and polls markers where that is allowed, and makes caches return
    /// memory that they do not need. Returns the bytes that this released to the driver, and the result of retrying
    /// earlier failed releases.
    pub(crate) fn find_idle(&self) -> Result<(u64, Result<u64, Error>), Error> {
        process::do_postponed();
        self.free_deferred();
        let ours: Vec<(u32, StreamKey)> = {
            let mut heap = self.open()?;
            heap.ensure_serving()?;
            heap.flush_caches();
            heap.streams.kept_uncovered()
        };
        self.cover_all(&ours)?;
        let retried = self.release_quarantined();
        let finished = self.finish_tests(false)?;
        self.lock().streams.reset_backoff();
        self.poll()?;
        let mut heap = self.lock();
        heap.complete_uses();
        // Includes blocks held back for streams that have completed by now.
        heap.flush_caches();
        drop(heap);
        Ok((finished.released, retried))
    }

    /// Releases all unused memory, and waits where only a wait can show that memory is unused: first for the
    /// allocator's own markers; then for the contexts, if there is memory that no marker will ever cover and no capture
    /// is known there. It does not wait again for memory that other threads free meanwhile, because that could
    /// invalidate captures of streams that the allocator never saw.
    pub(crate) fn empty_cache(&self) -> Result<Trimmed, Error> {
        self.usable()?;
        // Only released pools are declared to be no longer needed.
        self.await_leases(SOON, |pool| pool.released);
        let mut done = self.trim(0)?;
        for last in [false, true] {
            let contexts = {
                let heap = self.lock();
                if done.pending == 0 && heap.caches.held_back.is_empty() {
                    break;
                }
                let mut slots = heap.streams.iter();
                last && slots.any(|(_, slot)| slot.lacks_markers())
                    && !heap.graphs.scopes.await_captures()
            };
            let waited = match contexts {
                true => self.synchronise(false),
                false => self.wait_for_markers(),
            };
            match waited {
                // Memory whose completion a capture hides stays pending.
                Err(Error::Capturing { .. }) => break,
                waited => waited?,
            }
            let more = self.trim(0)?;
            done = Trimmed {
                released: done.released + more.released,
                ..more
            };
        }
        Ok(done)
    }

    /// Waits on the host for the newest marker of each stream that is not known to capture.
    fn wait_for_markers(&self) -> Result<(), Error> {
        let _lines = keep_lines();
        let waits: Vec<_> = {
            let heap = self.lock();
            let found = self.found_capturing(&heap);
            let streams = heap.streams.iter();
            streams
                .filter(|(_, slot)| found.iter().all(|(raw, _)| *raw != slot.raw))
                .filter_map(|(stream, slot)| Some((stream, slot.holder.clone(), slot.newest()?)))
                .map(|(stream, holder, m)| (stream, holder, m.bound, Arc::clone(&m.event)))
                .collect()
        };
        for (stream, holder, bound, event) in waits {
            let asked = match &holder {
                Holder::Kept(kept) => self.refuse_capture(&self.named(kept)?),
                Holder::Foreign(_) | Holder::Adopted(_) | Holder::Retired => Ok(()),
            };
            match asked.and_then(|()| self.host_wait(stream, bound, event)) {
                Err(Error::Capturing { .. }) => {}
                Err(Error::Driver(error)) if is_of_capture(error.code()) => {}
                waited => waited?,
            }
        }
        Ok(())
    }

    /// [`close`](Self::close), repeated while graphs give up leases of the pools.
    pub(crate) fn close_after_graphs(&self) -> Result<(), Error> {
        let ended = Arc::clone(&self.open()?.graphs.ended);
        loop {
            let seen = ended.count();
            match self.close() {
                Err(Error::InUse { what: GRAPH, .. }) if ended.count() > seen => {}
                closed => return closed,
            }
        }
    }

    /// Waits for the allocator's markers, releases everything, and refuses further calls. After an error the allocator
    /// is open again and owns what could not be released.
    pub(crate) fn close(&self) -> Result<(), Error> {
        self.free_deferred();
        self.release_quarantine(0);
        {
            let mut heap = self.open()?;
            heap.guards.ensure_none()?;
            let leases = heap.graphs.count_leases();
            if leases > 0 {
                return Err(Error::InUse {
                    what: GRAPH,
                    count: leases,
                    bytes: heap.graphs.held,
                });
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
                if !orphaned {
                    self.report_leaks();
                }
                return Err(Error::InUse {
                    what: "block",
                    count: blocks,
                    bytes,
                });
            }
            heap.closed = true;
        }
        let result = self.give_everything_back();
        let mut heap = self.lock();
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
            self.events.clear();
            // From here on the owners may destroy the streams.
            foreign.into_iter().for_each(Holder::wait_unused);
        }
        result
    }

    fn give_everything_back(&self) -> Result<(), Error> {
        // A page that is returned may still be in use by its stream, and a page that other streams used can be returned
        // only when their uses are complete.
        self.lock().flush_caches();
        loop {
            self.complete_all()?;
            let mut heap = self.lock();
            heap.complete_uses();
            if !heap.flush_caches() && heap.streams.iter().all(|(_, slot)| slot.covered()) {
                break;
            }
        }
        self.discard_suspended()?;
        self.finish_tests(true)?;
        self.close_pools()?;
        let idle = {
            let heap = self.lock();
            heap.views.idle_views(&heap.streams, usize::MAX)
        };
        self.evict(&idle)?;
        let retried = self.release_quarantined();
        let (plan, _) = release::plan_trim(&mut self.lock(), 0);
        self.release(plan)?;
        retried?;
        self.return_spans()
    }

    /// Waits until every free is complete: for markers where they can be recorded, otherwise for the context.
    fn complete_all(&self) -> Result<(), Error> {
        let ours: Vec<(u32, StreamKey)> = {
            let heap = self.lock();
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
        self.cover_all(&ours)?;
        loop {
            let oldest = {
                let heap = self.lock();
                let caches = heap.streams.iter().filter_map(|(stream, slot)| {
                    slot.newest()
                        .map(|m| (stream, m.bound, Arc::clone(&m.event)))
                });
                caches.min_by_key(|(stream, _, _)| *stream)
            };
            let Some((stream, bound, event)) = oldest else {
                break;
            };
            self.host_wait(stream, bound, event)?;
        }
        let uncovered = self.lock().streams.iter().any(|(_, slot)| !slot.covered());
        if uncovered {
            self.synchronise(true)
        } else {
            Ok(())
        }
    }

    fn return_spans(&self) -> Result<(), Error> {
        let spans = {
            let mut heap = self.lock();
            // If a concurrent trim fails to free a segment, the segment returns to the heap.
            let held = heap.held();
            if held > 0 || !heap.views.map.is_empty() {
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
            self.addresses.give_back(base, bytes);
        }
        if !self.addresses.is_idle() {
            return Ok(());
        }
        let entered = self.context.enter().map_err(|e| self.error(e))?;
        self.addresses
            .return_idle(&entered)
            .map_err(|e| self.error(e))
    }
}
