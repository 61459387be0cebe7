//! Giving memory back, and the end.

use std::sync::Arc;

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

/// What keeps an allocator open while graphs may use memory of its pools.
const GRAPH: &str = "graph";

impl Engine {
    /// Gives unused memory back until no more than `keep` bytes of it are held. Never waits, unless to close
    /// others that a capture kept from it.
    pub(crate) fn trim(&self, keep: u64) -> Result<Trimmed, Error> {
        let _span = nvtx::span(Category::Trim, || format!("{keep} bytes are kept"));
        // In a forked child, which is refused below, each such lock is memory that nobody has any more.
        if !process::is_forked_child() {
            self.suspender.drop_spare();
        }
        let (finished, retried) = self.find_idle()?;
        let mut heap = self.lock();
        let (_, allocated) = heap.live_totals();
        let all = &heap.stats.all;
        let idle = if keep.saturating_add(allocated) < all.reserved.current {
            heap.idle_views(usize::MAX)
        } else {
            Vec::new()
        };
        drop(heap);
        let evicted = self.evict(&idle);
        let mut heap = self.lock();
        let (plan, pending) = heap.plan_trim(keep);
        let streams = match pending {
            0 => Vec::new(),
            _ => heap.pending_bytes(),
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

    /// Finds out without a wait what memory is idle: markers are recorded and asked for where that may be done, and
    /// caches hand back what they can spare. Returns the bytes that this gave back to the driver, and those of earlier
    /// failures, which are tried again.
    pub(crate) fn find_idle(&self) -> Result<(u64, Result<u64, Error>), Error> {
        process::do_postponed();
        self.free_deferred();
        let ours: Vec<(u32, StreamKey)> = {
            let mut heap = self.open()?;
            heap.refuse()?;
            heap.flush_caches();
            heap.streams.kept_uncovered()
        };
        self.cover_all(&ours)?;
        let retried = self.release_quarantined();
        let finished = self.finish_tests(false)?;
        self.lock().streams.ask_again();
        self.poll()?;
        let mut heap = self.lock();
        heap.complete_uses();
        // What was held back for streams that are done by now.
        heap.flush_caches();
        drop(heap);
        Ok((finished.released, retried))
    }

    /// Gives all unused memory back, with waits for what only a wait can tell: first for the allocator's own
    /// markers, then for the contexts, if there is memory that no marker will ever cover and nothing is known to
    /// capture there. What others free meanwhile is not waited for so: a capture of streams that the allocator never
    /// saw would be spoilt.
    pub(crate) fn empty_cache(&self) -> Result<Trimmed, Error> {
        self.usable()?;
        // Only of these somebody says that they are not needed any more.
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
                // What a capture keeps from its end stays pending.
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

    /// [`close`](Self::close), which looks again while leases end that graphs have of pools.
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

    /// Waits for the allocator's markers, gives everything back, and refuses further calls. After
    /// an error the allocator is open again and owns what could not be given back.
    pub(crate) fn close(&self) -> Result<(), Error> {
        self.free_deferred();
        self.release_quarantine(0);
        {
            let mut heap = self.open()?;
            heap.refuse_guarded()?;
            let leases = heap.graphs.count_leases();
            if leases > 0 {
                return Err(Error::InUse {
                    what: GRAPH,
                    count: leases,
                    bytes: heap.graphs.held,
                });
            }
            // An allocation under way is as good as a block.
            let suspending = u64::from(heap.suspended.working);
            let calls: u64 = heap
                .streams
                .iter()
                .map(|(_, slot)| u64::from(slot.calls))
                .chain(heap.graphs.pools.values().map(|pool| u64::from(pool.calls)))
                .sum::<u64>()
                + suspending;
            heap.empty_large_caches();
            let (blocks, bytes) = heap.shut(calls);
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
                heap.drop_caches(stream);
            }
            heap.drop_graph_home();
            let foreign = heap.streams.take_foreign();
            // Handles are destroyed outside the lock.
            let events = std::mem::take(&mut heap.streams.events);
            drop(heap);
            drop(events);
            self.events.clear();
            // From here on the streams may be destroyed.
            foreign.into_iter().for_each(Holder::let_go);
        }
        result
    }

    fn give_everything_back(&self) -> Result<(), Error> {
        // A page that is handed back may still be in use by its stream, and one that other streams
        // used can be handed back only when they are done.
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
        let idle = self.lock().idle_views(usize::MAX);
        self.evict(&idle)?;
        let retried = self.release_quarantined();
        let (plan, _) = self.lock().plan_trim(0);
        self.release(plan)?;
        retried?;
        self.return_spans()
    }

    /// Waits until every free is complete: by markers where they can be had, else by the context.
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
            // A segment that a trim beside this one frees just now is back in the heap if that fails.
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
