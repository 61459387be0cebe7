//! From request to memory: the reclaim of a miss, step by step, the cheapest first.
//!
//! A step is tried only when the earlier ones have failed; after a step that changed something, the choice starts
//! again. Driver calls happen without the lock; the memory that they work on is claimed before, so that no other call
//! can use it, and restored if they fail.
//!
//! Callers have to consider that the lock may have been released in between. Only `calls/allocate.rs` calls this
//! module.

use crate::allocator::config::Waits;
use crate::allocator::engine::markers::Questions;
use crate::allocator::engine::segment_hooks::SegmentChange;
use crate::allocator::engine::{Engine, Guard, contexts, device, release, segments};
use crate::allocator::extent::record::SpaceId;
use crate::allocator::extent::space::Shard;
use crate::allocator::extent::want::Want;
use crate::allocator::graph::run::pools::{self, SOON};
use crate::allocator::heap::Heap;
use crate::allocator::inspect::shortage::out_of_memory;
use crate::allocator::physical::{Fresh, GrowthFailure, commit};
use crate::allocator::plan::growth::Growth;
use crate::allocator::plan::{self, alias, growth};
use crate::allocator::range::settle;
use crate::allocator::reclaim::choice::Reclaim;
use crate::allocator::reclaim::step::Step;
use crate::allocator::reclaim::stitch;
use crate::allocator::report::Regime;
use crate::allocator::view::mapping::ViewRun;
use crate::driver::DriverError;
use crate::error::Error;
use crate::error::memory::Bytes;
use crate::nvtx::{self, Category};
use crate::sync::capture::is_void_wait;

/// Maximum number of invalid markers that a request tolerates.
const VOID_WAITS: u32 = 16;

/// Runs a closure without the lock.
pub(crate) fn run_unlocked<'a, T>(
    engine: &'a Engine,
    heap: Guard<'a>,
    work: impl FnOnce() -> Result<T, Error>,
) -> Result<(Guard<'a>, T), Error> {
    drop(heap);
    let done = work()?;
    Ok((engine.lock(), done))
}

/// Polls the uses of other streams for a request of a stream.
pub(crate) fn poll_before<'a>(
    engine: &'a Engine,
    mut heap: Guard<'a>,
    stream: u32,
) -> Result<Guard<'a>, Error> {
    match Questions::of(&mut heap, stream) {
        None => Ok(heap),
        Some(questions) => {
            Ok(run_unlocked(engine, heap, || engine.poll_with(stream, questions))?.0)
        }
    }
}

/// Records the due markers for blocks that left the large-block caches, in a call that names a stream.
pub(crate) fn record_due_markers<'a>(
    engine: &'a Engine,
    mut heap: Guard<'a>,
    named: u32,
) -> Guard<'a> {
    if heap.caches.due.is_empty() {
        return heap;
    }
    let state = &mut *heap;
    let due = state.caches.take_due(&state.streams, named);
    drop(heap);
    engine.mark_all(due);
    engine.lock()
}

/// Completes the work of idle streams. Streams that were idle for long enough become inactive, and the others are
/// served as if they were alone.
fn complete_idle_streams<'a>(
    engine: &'a Engine,
    mut heap: Guard<'a>,
    stream: u32,
) -> Result<Guard<'a>, Error> {
    let idle = heap.streams.count_request_and_find_idle(stream);
    if idle.is_empty() {
        return Ok(heap);
    }
    let mut ours = heap.streams.kept_without_marker();
    ours.retain(|(kept, _)| idle.contains(kept));
    if !ours.is_empty() || !heap.streams.has_no_markers() {
        (heap, _) = run_unlocked(engine, heap, || {
            engine.cover_all(&ours)?;
            engine.poll_some(|stream| idle.contains(&stream))
        })?;
    }
    let mut changed = false;
    for stream in idle {
        changed |= heap.streams.deactivate_if_due(stream);
    }
    if changed {
        heap.streams_changed();
    }
    Ok(heap)
}

/// Finds or makes room for a request. Returns the extent, claimed and ready for its stream, and whether the request
/// counts as a miss.
pub(crate) fn obtain<'a>(
    engine: &'a Engine,
    mut heap: Guard<'a>,
    want: &Want,
) -> Result<(Guard<'a>, u32, bool), Error> {
    if heap.streams.reactivated {
        heap.streams_changed();
    }
    if engine.unretired && heap.physical.tuning.waits != Waits::Never {
        (heap, ()) = run_unlocked(engine, heap, || engine.wait_for_unretired())?;
    }
    if heap.streams.several() {
        heap = complete_idle_streams(engine, heap, want.stream)?;
    }
    if heap.streams.several() {
        heap = poll_before(engine, heap, want.stream)?;
    } else {
        heap.extents.adopt_complete(want.space, want.stream);
    }
    heap.physical.count_request(want);
    let mut reclaim = Reclaim::new(&engine.hooks, engine.total_memory);
    let (mut void, mut missed) = (0, false);
    loop {
        reclaim.views = engine.views.are_allowed();
        let step = reclaim.next(&mut heap, want);
        missed |= step.is_miss();
        let taken;
        (heap, taken) = match take_step(engine, heap, want, step, &mut reclaim) {
            // The marker of the wait was invalid, and has been removed.
            Err(Error::Driver(error)) if is_void_wait(&error) && void < VOID_WAITS => {
                void += 1;
                (poll_before(engine, engine.lock(), want.stream)?, None)
            }
            Err(error) => {
                if let Some((before, with)) = reclaim.active {
                    let mut heap = engine.lock();
                    // Other requests may have raised the peak since.
                    if heap.peak_active == with {
                        heap.peak_active = before;
                    }
                }
                return Err(error);
            }
            Ok(step) => step,
        };
        let Some(id) = taken else {
            continue;
        };
        if let Some(regime) = reclaim.regime {
            heap.recorder.record_regime(heap.physical.regime);
            // The taken memory is claimed.
            (heap, ()) = run_unlocked(engine, heap, || {
                log_regime(engine, regime);
                Ok(())
            })?;
        }
        return Ok((heap, id, missed));
    }
}

/// Executes a step of the reclaim, and returns the extent if it found or made one. Driver calls are made without
/// the lock.
fn take_step<'a>(
    engine: &'a Engine,
    mut heap: Guard<'a>,
    want: &Want,
    step: Step,
    reclaim: &mut Reclaim<'_>,
) -> Result<(Guard<'a>, Option<u32>), Error> {
    match step {
        Step::Take(run) => {
            let id = heap.take(want, run);
            heap.stats.reclaim.ready += u64::from(id.is_some());
            Ok((heap, id))
        }
        Step::Claim(part) => {
            let claimed = heap.claim(want.space, part.first, part.skip, part.granules);
            wait_for(engine, heap, want, claimed)
        }
        Step::View(run) => take_in_view(engine, heap, want, run),
        Step::Flush => {
            heap.stats.reclaim.flushed += u64::from(heap.flush_caches());
            Ok((heap, None))
        }
        Step::Complete => {
            heap.complete_advanced();
            // Other threads can take the lock between two rounds.
            drop(heap);
            Ok((engine.lock(), None))
        }
        Step::Poll => {
            heap.streams.reset_backoff();
            heap.streams.list_unmarked();
            Ok((poll_before(engine, heap, want.stream)?, None))
        }
        Step::EmptyCaches => {
            if heap.empty_large_caches() {
                heap = record_due_markers(engine, heap, want.stream);
                heap = poll_before(engine, heap, want.stream)?;
            }
            // Includes the requesting stream, because some uses require complete memory.
            let full = heap.streams.full_batches(|stream| stream == want.stream);
            if !full.is_empty() {
                (heap, _) = run_unlocked(engine, heap, || engine.cover_all(&full))?;
            }
            Ok((heap, None))
        }
        Step::Fail => {
            // The next request queries the driver again: other processes may have freed memory meanwhile.
            heap.physical.full_at = None;
            if heap.graphs.held > 0 && !reclaim.beyond {
                let spared;
                (heap, spared) = run_unlocked(engine, heap, || {
                    pools::poll_all(engine)?;
                    pools::await_leases(engine, SOON, |pool| pool.has_only_free());
                    pools::release_pool_memory(engine, true)
                })?;
                if spared > 0 {
                    reclaim.restart();
                    return Ok((heap, None));
                }
            }
            let cause = reclaim.cause(&heap, want);
            let error = out_of_memory(&mut heap, want);
            if reclaim.regime.is_some() {
                heap.recorder.record_regime(heap.physical.regime);
            }
            drop(heap);
            if let Some(regime) = reclaim.regime {
                log_regime(engine, regime);
            }
            Err(device::out_of_memory(engine, error, cause))
        }
        step => run_unlocked(engine, heap, || execute(engine, want, step, reclaim)),
    }
}

/// Queues the waits that a claimed extent needs on the stream. If that fails, the extent is restored.
fn wait_for<'a>(
    engine: &'a Engine,
    mut heap: Guard<'a>,
    want: &Want,
    claimed: Option<(u32, Vec<Shard>)>,
) -> Result<(Guard<'a>, Option<u32>), Error> {
    let Some((id, shards)) = claimed else {
        return Ok((heap, None));
    };
    let waits = heap.streams.waits_for(want.stream, &shards);
    if waits.is_empty() {
        return Ok((heap, Some(id)));
    }
    drop(heap);
    let waited = engine.queue_waits(want.stream, &waits);
    drop(waits);
    heap = engine.lock();
    if let Err(error) = waited {
        heap.restore(want.space, id, shards);
        return Err(error);
    }
    Ok((heap, Some(id)))
}

/// Takes a run in a view, after the waits that it needs.
pub(crate) fn take_in_view<'a>(
    engine: &'a Engine,
    mut heap: Guard<'a>,
    want: &Want,
    run: ViewRun,
) -> Result<(Guard<'a>, Option<u32>), Error> {
    let Some(view) = heap.views.map.get(&run.base) else {
        return Ok((heap, None));
    };
    let parts = view.home_parts(run.offset, want.granules);
    let Some(mut aliased) = alias::claim(&mut heap, want.space, want.stream, &parts) else {
        return Ok((heap, None));
    };
    if !aliased.waits.is_empty() {
        // The view must not be removed while the waits are queued.
        heap.views.hold_view(run.base, true);
        drop(heap);
        let waits = std::mem::take(&mut aliased.waits);
        let waited = engine.queue_waits(want.stream, &waits);
        drop(waits);
        heap = engine.lock();
        heap.views.hold_view(run.base, false);
        if let Err(error) = waited {
            alias::restore(&mut heap, want.space, aliased);
            return Err(error);
        }
    }
    heap.stats.reclaim.views += 1;
    let parts = aliased.parts.into_iter().map(|(id, _)| id).collect();
    let state = &mut *heap;
    let records = &mut state.extents.records;
    let id = (state.views).add_block(records, run.base, run.offset, want.granules, parts);
    Ok((heap, Some(id)))
}

/// Executes a step without the lock. Returns the extent, claimed and ready for its stream, if the step created one.
fn execute(
    engine: &Engine,
    want: &Want,
    step: Step,
    reclaim: &mut Reclaim<'_>,
) -> Result<Option<u32>, Error> {
    match step {
        Step::Stitch(stitch) => {
            let id = stitch::stitch(engine, want, *stitch, reclaim)?;
            reclaim.no_stitch = id.is_none();
            return Ok(id);
        }
        Step::Grow(growth) => return grow(engine, want, growth, reclaim),
        Step::Segment(fresh) => return grow_segment(engine, want, &fresh, reclaim),
        Step::Supply(fresh) => obtain_from_driver(engine, want, fresh, reclaim)?,
        Step::Reserve { space, bytes } => match device::reserve_span(engine, space, bytes) {
            Err(Error::Driver(error)) if space == SpaceId::Views => {
                reclaim.abandon_stitch(error);
            }
            Err(Error::Driver(error)) => reclaim.no_addresses = Some(error),
            done => done?,
        },
        Step::Evict(idle) => release::evict(engine, &idle)?,
        Step::FreeAddresses(idle) => match release::evict(engine, &idle) {
            Err(Error::Driver(error)) => reclaim.abandon_stitch(error),
            done => done?,
        },
        Step::Retry => match release::release_quarantined(engine) {
            // Memory that still cannot be unmapped stays set apart.
            Ok(_) | Err(Error::Driver(_)) => {}
            Err(error) => return Err(error),
        },
        Step::Release(plan) => {
            release::release(engine, plan)?;
        }
        Step::Settle(bytes) => {
            let done = if want.may_span_handles() {
                settle::move_to_arena(engine, want, bytes)
            } else {
                release::release_settled(engine, None, bytes, |_, _, _, _| true)
            };
            reclaim.settled = match done {
                Err(lost @ Error::ContextLost(_)) => return Err(lost),
                // Memory that could not be unmapped stays set apart.
                done => done.unwrap_or(0) == 0,
            };
        }
        Step::Mark(key) => engine.mark_unless_idle(want.stream, key)?,
        Step::HostWait {
            stream,
            bound,
            event,
        } => engine.host_wait(stream, bound, event)?,
        Step::Hook { hook, missing } => {
            hook.run(missing);
            // The hook may have released memory to the driver that was not the allocator's.
            engine.lock().physical.full_at = None;
        }
        Step::QueryDevice => device::query_device(engine),
        Step::Synchronise => match contexts::synchronise(engine, false) {
            // This step is unavailable while a stream is capturing.
            Err(Error::Capturing { .. }) => {}
            done => done?,
        },
        // Executed under the lock.
        Step::Take(_)
        | Step::Claim(_)
        | Step::View(_)
        | Step::Flush
        | Step::Complete
        | Step::EmptyCaches
        | Step::Poll
        | Step::Fail => {}
    }
    Ok(None)
}

fn log_regime(engine: &Engine, regime: Regime) {
    log::debug!("allocator {}: memory is {}", engine.id, regime.name());
}

fn log_growth(engine: &Engine, want: &Want, fresh: &Fresh) {
    log::debug!(
        "allocator {}: allocating {} from the driver for a request of {}: {}",
        engine.id,
        Bytes(fresh.bytes()),
        Bytes(want.requested),
        fresh.reason.clause(),
    );
}

/// Obtains memory from the driver.
fn grow(
    engine: &Engine,
    want: &Want,
    mut growth: Growth,
    reclaim: &mut Reclaim<'_>,
) -> Result<Option<u32>, Error> {
    // These may be the last references to the events, which must not be destroyed under the lock.
    let waits = std::mem::take(&mut growth.waits);
    let maker = engine.maker();
    let made = grow_span(&growth.fresh, || commit::map(&maker, &growth.fresh));
    match made {
        Ok(handles) => {
            log_growth(engine, want, &growth.fresh);
            segments::report_fresh(engine, &growth.fresh);
            // The waits come before any split: if one fails, each part is restored unchanged.
            let waited = engine.queue_waits(want.stream, &waits);
            drop(waits);
            let mut heap = engine.lock();
            match waited {
                Ok(()) => {
                    let id = growth::commit(&mut heap, want, &growth, &handles);
                    Ok(Some(id))
                }
                Err(error) => {
                    growth::commit_unused(&mut heap, want, growth, &handles);
                    Err(error)
                }
            }
        }
        Err(failure) => {
            drop(waits);
            handle_refused_growth(engine, growth.fresh, failure, reclaim)?;
            Ok(None)
        }
    }
}

/// Obtains free memory from the driver.
fn obtain_from_driver(
    engine: &Engine,
    want: &Want,
    fresh: Fresh,
    reclaim: &mut Reclaim<'_>,
) -> Result<(), Error> {
    let maker = engine.maker();
    match grow_span(&fresh, || commit::map(&maker, &fresh)) {
        Ok(handles) => {
            log_growth(engine, want, &fresh);
            segments::report_fresh(engine, &fresh);
            growth::commit_free(&mut engine.lock(), want, &fresh, &handles);
            Ok(())
        }
        Err(failure) => handle_refused_growth(engine, fresh, failure, reclaim),
    }
}

/// Handles a growth for which the driver had no memory.
fn handle_refused_growth(
    engine: &Engine,
    fresh: Fresh,
    failure: GrowthFailure,
    reclaim: &mut Reclaim<'_>,
) -> Result<(), Error> {
    let (error, asked, space) = (failure.error, fresh.bytes(), fresh.space);
    let free = device::driver_free(engine, error);
    let mut heap = engine.lock();
    growth::revert(&mut heap, fresh);
    plan::release::set_apart(&mut heap, space, failure);
    reclaim.refused(engine, &mut heap, error, free.min(asked - 1))
}

/// Obtains a segment from the driver.
fn grow_segment(
    engine: &Engine,
    want: &Want,
    fresh: &Fresh,
    reclaim: &mut Reclaim<'_>,
) -> Result<Option<u32>, Error> {
    let bytes = fresh.bytes();
    let made = grow_span(fresh, || commit::allocate(&engine.context, bytes));
    if let Ok(addr) = made {
        log_growth(engine, want, fresh);
        segments::report(engine, SegmentChange::Birth, None, [(addr, bytes)]);
    }
    let free = made.map_or_else(|error| device::driver_free(engine, error), |_| 0);
    let mut heap = engine.lock();
    match made {
        Ok(addr) => Ok(growth::commit_segment(&mut heap, want, fresh, addr)),
        Err(error) => {
            heap.physical.planned -= bytes;
            reclaim.refused(engine, &mut heap, error, free.min(bytes - 1))?;
            Ok(None)
        }
    }
}

impl Reclaim<'_> {
    /// Handles a refusal by the driver. Lack of memory below the allocator's own limit counts as a limit reached, until
    /// something is released; any other refusal is an error.
    pub(crate) fn refused(
        &mut self,
        engine: &Engine,
        heap: &mut Heap,
        error: DriverError,
        free: u64,
    ) -> Result<(), Error> {
        if !error.is_out_of_memory() {
            return Err(engine.error(error));
        }
        heap.stats.retries += 1;
        let full_at = heap.present() + free;
        self.regime = heap.physical.note_refusal(full_at).or(self.regime);
        self.refusal = Some(error);
        Ok(())
    }
}

/// Runs a growth inside a range of the NVTX tool.
fn grow_span<T>(fresh: &Fresh, make: impl FnOnce() -> T) -> T {
    let _span = nvtx::span(Category::Grow, || format!("{} bytes", fresh.bytes()));
    make()
}
