//! Commits, decommits and the end of a range.

use std::ops::Range as Span;

use crate::allocator::config::Waits;
use crate::allocator::engine::hooks::ReliefHook;
use crate::allocator::engine::naming::Named;
use crate::allocator::engine::segment_hooks::SegmentChange;
use crate::allocator::engine::{Engine, contexts, device, idle, release, segments};
use crate::allocator::graph::run::pools;
use crate::allocator::inspect::shortage::out_of_memory_in_range;
use crate::allocator::plan;
use crate::allocator::plan::release::ARENAS;
use crate::allocator::range::plan::{apply, awaited, revert};
use crate::allocator::range::{Granule, Layout, State, commit, plan as work_plan};
use crate::allocator::stream::slot::{Slot, StreamKey};
use crate::allocator::suspend::{Target, discard};
use crate::block::Tag;
use crate::driver::{DriverError, process};
use crate::error::Error;
use crate::locks::lock::pause;
use crate::sync::capture::is_void_wait;

/// Maximum number of rounds in which a commit waits for granules that are leaving.
const ROUNDS: u32 = 16;

/// Reserves the addresses of a range. Returns its id and the layout.
pub(crate) fn reserve(engine: &Engine, layout: Layout, tag: Tag) -> Result<(u64, Layout), Error> {
    if !engine.rules.maps() {
        return Err(Error::NotSupported {
            what: "ranges without virtual memory management",
        });
    }
    drop(engine.open()?);
    let span = layout.span();
    let leased = engine.addresses.lease_for(&engine.context, None, [span; 2]);
    let lease = leased.map_err(|error| match error.is_fatal() {
        true => engine.error(error),
        false => short(engine, span, Some(error)),
    })?;
    let base = lease.base;
    let mut heap = match engine.open() {
        Ok(heap) => heap,
        Err(error) => {
            engine.addresses.give_back(base, span);
            return Err(error);
        }
    };
    let layout = Layout { base, ..layout };
    let id = heap.ranges.add(layout);
    if tag != Tag::NONE {
        heap.suspended.tags.insert(Target::Range(id), tag);
    }
    Ok((id, layout))
}

/// Returns the error for bytes that a range lacks.
fn short(engine: &Engine, bytes: u64, refusal: Option<DriverError>) -> Error {
    let error = out_of_memory_in_range(&mut engine.lock(), bytes);
    device::out_of_memory(engine, error, refusal)
}

/// A range whose driver calls the current call makes: it excludes other calls that do.
struct Claim<'a> {
    engine: &'a Engine,
    id: u64,
}

impl<'a> Claim<'a> {
    /// Claims a range as soon as no other call has claimed it.
    fn begin(engine: &'a Engine, id: u64) -> Result<Claim<'a>, Error> {
        let mut round = 0;
        loop {
            {
                let mut heap = engine.open()?;
                let range = heap.ranges.live(id)?;
                if range.suspended {
                    return Err(Error::Suspended);
                }
                if !std::mem::replace(&mut range.working, true) {
                    return Ok(Claim { engine, id });
                }
            }
            pause(round);
            round += 1;
        }
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        if let Some(range) = self.engine.lock().ranges.map.get_mut(&self.id) {
            range.working = false;
        }
    }
}

// ---- commit ------------------------------------------------------------------------------------

/// The progress of a commit that found too little memory.
struct Search {
    /// Whether idle memory was looked for, and the free memory of the device was queried.
    looked: bool,
    /// Hooks that remain to be called, once they have been collected.
    hooks: Option<std::vec::IntoIter<ReliefHook>>,
    synchronised: bool,
    refusal: Option<DriverError>,
}

/// Gives memory to the granules that overlap a range of bytes: all of them or, after an error, none. Without a stream,
/// the stream is capturing.
pub(crate) fn commit(
    engine: &Engine,
    id: u64,
    bytes: &Span<u64>,
    named: Option<&Named<'_>>,
) -> Result<(), Error> {
    engine.usable()?;
    process::do_postponed();
    engine.free_deferred();
    let named = match named.map(|named| (named, engine.refuse_capture(named))) {
        None | Some((_, Err(Error::Capturing { .. }))) => None,
        Some((named, done)) => done.map(|()| Some(named))?,
    };
    let mut search = Search {
        looked: false,
        hooks: None,
        synchronised: false,
        refusal: None,
    };
    loop {
        let claim = Claim::begin(engine, id)?;
        let span = engine
            .open()?
            .ranges
            .live(id)?
            .layout
            .granules(bytes, false)?;
        if span.is_empty() {
            return Ok(());
        }
        let stream = named.map(|named| add_user(engine, id, named)).transpose()?;
        wait_for_leaving(engine, id, &span, stream)?;
        let Some(missing) = fill(engine, id, &span, &mut search)? else {
            return Ok(());
        };
        // Hooks may use the range.
        drop(claim);
        if !search.make_room(engine, missing, stream.is_some())? {
            return Err(short(engine, missing, search.refusal));
        }
    }
}

fn poll(engine: &Engine) -> Result<(), Error> {
    engine.lock().streams.reset_backoff();
    engine.poll()
}

fn add_user(engine: &Engine, id: u64, named: &Named<'_>) -> Result<u32, Error> {
    let (mut heap, stream) = engine.slot(engine.open()?, named)?;
    let heap = &mut *heap;
    heap.streams.check_device(&engine.device, stream)?;
    heap.ranges.live(id)?.add_user(stream, &mut heap.streams);
    Ok(stream)
}

/// Orders the stream behind the uses of granules that are leaving, and are to be committed again at the same addresses.
fn wait_for_leaving(
    engine: &Engine,
    id: u64,
    span: &Span<u64>,
    stream: Option<u32>,
) -> Result<(), Error> {
    let mut pending = 0;
    for round in 0..ROUNDS {
        let waits = {
            let heap = engine.open()?;
            let shards = awaited(&heap, id, span, stream);
            if shards.is_empty() {
                return Ok(());
            }
            let row = heap
                .ranges
                .map
                .get(&id)
                .map_or(0, |range| range.layout.row());
            pending = shards.len() as u64 * row;
            let may_wait = round > 0 && heap.physical.tuning.waits != Waits::Never;
            let stream = stream.filter(|_| may_wait);
            stream.map(|stream| (stream, heap.streams.waits_for(stream, &shards)))
        };
        let waited = match waits {
            None if round > 0 => break,
            None => poll(engine),
            // No marker covers the uses.
            Some((_, waits)) if waits.is_empty() => contexts::synchronise(engine, false),
            Some((stream, waits)) => engine.queue_waits(stream, &waits),
        };
        match waited {
            Err(Error::Driver(error)) if is_void_wait(&error) => {}
            waited => waited?,
        }
    }
    Err(short(engine, pending, None))
}

/// Makes the granules of a span committed, or returns the bytes that the driver would have to provide.
fn fill(
    engine: &Engine,
    id: u64,
    span: &Span<u64>,
    search: &mut Search,
) -> Result<Option<u64>, Error> {
    let stuck = |of: u64, _: &Layout, index: u64, granule: &Granule| {
        of == id && span.contains(&index) && granule.state == State::Stuck
    };
    release::release_settled(engine, Some(id), u64::MAX, stuck)?;
    if engine.lock().ranges.leaving > 0 {
        poll(engine)?;
    }
    let mut work = loop {
        let first = !search.looked;
        let create = {
            let heap = &mut *engine.open()?;
            let held = heap.counted();
            let work = work_plan::plan(heap, id, span);
            let (room, create) = (heap.physical.room(held), work.create);
            if create > 0 && heap.physical.choose_regime(held + create).is_some() {
                heap.recorder.record_regime(heap.physical.regime);
            }
            if create == 0 || (create <= room && !first) {
                break work;
            }
            revert(heap, id, work, Vec::new());
            create
        };
        if !first {
            return Ok(Some(create));
        }
        search.looked = true;
        find_idle(engine)?;
        device::query_device(engine);
    };
    let maker = engine.maker();
    segments::report(engine, SegmentChange::Death, None, work.at_home());
    let made = commit::make(&maker, &mut work);
    let failures = match made {
        Ok(handles) => {
            let new = work.runs.iter();
            let new = new.flat_map(|run| segments::handles_from(run.addr, &run.sizes));
            segments::report(engine, SegmentChange::Birth, None, new);
            apply(&mut engine.lock(), id, span, work, &handles);
            return Ok(None);
        }
        Err(failures) => failures,
    };
    segments::report(engine, SegmentChange::Birth, None, work.at_home());
    let error = failures.iter().map(|failure| failure.error);
    let Some(error) = error.max_by_key(DriverError::is_fatal) else {
        return Ok(None);
    };
    let (free, create) = (device::driver_free(engine, error), work.create);
    let heap = &mut *engine.lock();
    revert(heap, id, work, failures);
    drop(maker);
    if !error.is_out_of_memory() {
        return Err(engine.error(error));
    }
    heap.stats.retries += 1;
    let full_at = heap.present() + free.min(create.saturating_sub(1));
    if heap.physical.note_refusal(full_at).is_some() {
        heap.recorder.record_regime(heap.physical.regime);
    }
    search.refusal = Some(error);
    Ok(Some(create))
}

/// Finds idle memory without a wait, and unmaps idle views, which keep handles in the arenas.
fn find_idle(engine: &Engine) -> Result<(), Error> {
    match idle::find(engine) {
        // Memory outside the ranges is suspended.
        Err(Error::Suspended) => return Ok(()),
        found => found.map(drop)?,
    }
    let views = {
        let heap = engine.lock();
        heap.views.idle_views(&heap.streams, usize::MAX)
    };
    release::evict(engine, &views)
}

impl Search {
    /// Takes the next step that may make room for these bytes, and returns whether there was one: releases idle memory,
    /// and with `waits` waits for work, calls hooks, and waits for the contexts.
    fn make_room(&mut self, engine: &Engine, missing: u64, waits: bool) -> Result<bool, Error> {
        find_idle(engine)?;
        let mut released =
            pools::poll_all(engine).and_then(|()| pools::release_pool_memory(engine, true))?;
        let excess = |engine: &Engine| missing.saturating_sub(engine.lock().room());
        released += release::release_settled(engine, None, excess(engine), |_, _, _, _| true)?;
        let plan = {
            let heap = &mut *engine.lock();
            let room = heap.room();
            plan::release::plan(heap, &ARENAS, missing, room)
        };
        released += release::release(engine, plan)?;
        if released > 0 {
            return Ok(true);
        }
        if !waits {
            return Ok(false);
        }
        let oldest = {
            let heap = engine.lock();
            let waits = heap.physical.tuning.waits != Waits::Never;
            heap.streams.oldest_marker(|_| waits)
        };
        if let Some((stream, bound, event)) = oldest {
            return match engine.host_wait(stream, bound, event) {
                Err(Error::Driver(error)) if is_void_wait(&error) => Ok(true),
                waited => waited.map(|()| true),
            };
        }
        let hooks = self
            .hooks
            .get_or_insert_with(|| engine.hooks.due().into_iter());
        if let Some(hook) = hooks.next() {
            let lacking = excess(engine);
            engine.lock().stats.reclaim.hooks += 1;
            hook.run(lacking);
            engine.lock().physical.full_at = None;
            return Ok(true);
        }
        let waits = {
            let heap = engine.lock();
            let mut slots = heap.streams.iter().map(|(_, slot)| slot);
            let never = heap.physical.tuning.waits == Waits::Never;
            !never && slots.any(Slot::needs_context_wait)
        };
        if !waits || std::mem::replace(&mut self.synchronised, true) {
            return Ok(false);
        }
        match contexts::synchronise(engine, false) {
            Err(Error::Capturing { .. }) => Ok(false),
            waited => waited.map(|()| true),
        }
    }
}

// ---- decommit ----------------------------------------------------------------------------------

/// Records a use of the granules that overlap a range of bytes by another stream, until they are decommitted.
pub(crate) fn record(
    engine: &Engine,
    id: u64,
    bytes: &Span<u64>,
    named: &Named<'_>,
) -> Result<(), Error> {
    engine.refuse_capture(named)?;
    let (mut heap, stream) = engine.slot(engine.open()?, named)?;
    let heap = &mut *heap;
    let range = heap.ranges.live(id)?;
    let span = range.layout.granules(bytes, false)?;
    if !span.is_empty() {
        range.record(span, stream, &mut heap.streams);
    }
    Ok(())
}

/// Decommits the granules that lie in a range of bytes.
pub(crate) fn decommit(
    engine: &Engine,
    id: u64,
    bytes: &Span<u64>,
    named: &Named<'_>,
) -> Result<(), Error> {
    engine.refuse_capture(named)?;
    let due = {
        let (mut heap, stream) = engine.slot(engine.open()?, named)?;
        let heap = &mut *heap;
        let range = heap.ranges.live(id)?;
        if range.suspended {
            return Err(Error::Suspended);
        }
        let span = range.layout.granules(bytes, true)?;
        let due = range.decommit(span, Some(stream), &mut heap.streams);
        heap.ranges.recount();
        due
    };
    after_decommit(engine, due)
}

/// Records the markers of a decommit. The debug mode that detects uses of freed memory waits for them and unmaps the
/// memory, so that a later use is a fault.
fn after_decommit(engine: &Engine, mut due: Vec<(u32, StreamKey)>) -> Result<(), Error> {
    if engine.unretired {
        let heap = engine.lock();
        due.retain(|(stream, _)| !heap.streams[*stream].may_be_destroyed());
    }
    let any = !due.is_empty();
    engine.mark_all(due);
    let quarantine = engine
        .debug
        .as_ref()
        .map_or(0, |debug| debug.modes.quarantine);
    if any && quarantine > 0 {
        match contexts::synchronise(engine, false) {
            // The memory stays mapped until a later call observes that its uses are complete.
            Err(Error::Capturing { .. }) => {}
            waited => waited?,
        }
        release::release_all_settled(engine)?;
    }
    release::sweep(engine);
    Ok(())
}

/// Ends a range: its memory is decommitted, by a stream or by all streams that its commits named, and its addresses are
/// free with the last of it.
pub(crate) fn destroy(engine: &Engine, id: u64, named: Option<&Named<'_>>) -> Result<(), Error> {
    engine.usable()?;
    if let Some(named) = named {
        engine.refuse_capture(named)?;
    }
    let mut round = 0;
    let due = loop {
        let mut heap = engine.open()?;
        let mut stream = None;
        if let Some(named) = named {
            let (known, slot) = engine.slot(heap, named)?;
            (heap, stream) = (known, Some(slot));
        }
        let state = &mut *heap;
        let range = state.ranges.live(id)?;
        if !range.working {
            let due = range.decommit(0..u64::MAX, stream, &mut state.streams);
            range.released = true;
            state.ranges.recount();
            break due;
        }
        drop(heap);
        pause(round);
        round += 1;
    };
    after_decommit(engine, due)?;
    discard::discard_unused(engine)?;
    release::sweep(engine);
    Ok(())
}
