//! Suspending and resuming memory: checks, waits and error handling.
//!
//! A suspension closes the selected memory under the lock, waits, takes the handles out of the heap, and calls the
//! driver without the lock. [`Work`] records in the end what is suspended and what is not, also after a failure.

use crate::allocator::calls::close;
use crate::allocator::engine::Engine;
use crate::allocator::engine::contexts;
use crate::allocator::engine::device;
use crate::allocator::engine::release;
use crate::allocator::engine::segment_hooks::{Segment, SegmentChange};
use crate::allocator::graph::run::pools;
use crate::allocator::graph::run::refuse_released;
use crate::allocator::heap::Heap;
use crate::allocator::inspect::shortage::out_of_memory_in_resume;
use crate::allocator::physical::commit::PhysicalConfig;
use crate::allocator::suspend::commit;
use crate::allocator::suspend::contents::{Contents, Keep};
use crate::allocator::suspend::discard;
use crate::allocator::suspend::host::HostCopy;
use crate::allocator::suspend::target;
use crate::allocator::suspend::{Suspension, Target};
use crate::block::Tag;
use crate::driver::{Stream, process};
use crate::error::{Error, GraphPoolError};

/// Result of a suspension.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Suspended {
    /// Bytes released to the driver.
    pub bytes: u64,
    /// Number of handles of these bytes.
    pub handles: u64,
    /// Bytes of contents kept on the host.
    pub kept: u64,
}

/// Result of a resume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Resumed {
    /// Bytes that were restored.
    pub bytes: u64,
    /// Number of handles of these bytes.
    pub handles: u64,
    /// Bytes of contents that were kept on the host.
    pub kept: u64,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Selected {
    Allocator,
    One(Target),
    Tag(Tag),
}

impl Selected {
    /// Returns the selected targets that are suspended, or those that are not.
    fn targets(self, heap: &Heap, suspended: bool) -> Result<Vec<Target>, Error> {
        let is_away = |target: &Target| heap.suspended.map.contains_key(target);
        let pools = heap.graphs.pools.keys().map(|id| Target::Pool(*id));
        let pools = pools.chain(heap.ranges.live_ids().map(Target::Range));
        let of_tag = |tag: Tag| {
            let tags = heap.suspended.tags.iter();
            let tagged = tags.filter(move |(_, known)| **known == tag);
            tagged
                .map(|(target, _)| *target)
                .filter(|target| match target {
                    Target::Pool(id) => heap.graphs.pools.contains_key(id),
                    Target::Range(id) => !heap.ranges.is_unused(*id),
                    Target::Arenas => false,
                })
        };
        let all: Vec<Target> = match self {
            Selected::Allocator => {
                let away = heap.suspended.map.keys().copied();
                let mut all: Vec<Target> = away.chain(pools).chain([Target::Arenas]).collect();
                all.sort_unstable();
                all.dedup();
                all
            }
            Selected::One(target) => vec![target],
            Selected::Tag(tag) => of_tag(tag).collect(),
        };
        if let (Selected::Tag(tag), true) = (self, all.is_empty()) {
            let tag = tag.as_str();
            return Err(GraphPoolError::UnknownTag { tag }.into());
        }
        let meant: Vec<Target> = all
            .into_iter()
            .filter(|t| is_away(t) == suspended)
            .collect();
        match (meant.is_empty(), suspended) {
            (true, true) => Err(Error::NotSuspended),
            (true, false) => Err(Error::Suspended),
            (false, _) => Ok(meant),
        }
    }
}

/// Sets the tag of a pool.
pub(crate) fn set_tag(engine: &Engine, pool: u64, tag: Tag) -> Result<(), Error> {
    let mut heap = engine.open()?;
    let heap = &mut *heap;
    refuse_released(&heap.graphs, pool)?;
    heap.graphs.ensure_present(pool)?;
    target::refuse_source(&heap.graphs, pool)?;
    let pools = &heap.graphs.pools;
    let known = |target: &Target| !matches!(target, Target::Pool(id) if !pools.contains_key(id));
    heap.suspended.tags.retain(|target, _| known(target));
    heap.suspended.tags.insert(Target::Pool(pool), tag);
    Ok(())
}

/// A suspension or resume in progress, which excludes any other.
struct Work<'a> {
    engine: &'a Engine,
    targets: Vec<Target>,
    /// The suspensions of the targets, as far as they have been chosen.
    suspensions: Vec<Suspension>,
}

impl<'a> Work<'a> {
    /// Begins a suspension, or the resume of one.
    fn begin(engine: &'a Engine, selected: Selected, suspended: bool) -> Result<Work<'a>, Error> {
        let mut heap = engine.open()?;
        if heap.suspended.working {
            let (what, count, bytes) = ("call", 1, 0);
            return Err(Error::InUse { what, count, bytes });
        }
        let targets = selected.targets(&heap, suspended)?;
        let mut suspensions = Vec::new();
        if suspended {
            let map = &mut heap.suspended.map;
            suspensions.extend(targets.iter().filter_map(|target| map.remove(target)));
            let homes = suspensions.iter().flat_map(Suspension::homes);
            heap.suspended.under_way = homes.collect();
        } else {
            for (at, target) in targets.iter().enumerate() {
                if let Err(error) = target::close(&mut heap, *target) {
                    targets[..at]
                        .iter()
                        .for_each(|t| target::open(&mut heap, *t));
                    return Err(error);
                }
            }
        }
        heap.suspended.working = true;
        Ok(Work {
            engine,
            targets,
            suspensions,
        })
    }

    /// Returns the segments as they are now, or as they were last reported.
    fn segments(&self, change: SegmentChange) -> Vec<Segment> {
        let mut heap = self.engine.lock();
        let suspensions = self.targets.iter().zip(&self.suspensions);
        let handles = suspensions.flat_map(|(target, one)| {
            let pool = target.pool();
            one.handles.iter().map(move |handle| (pool, handle))
        });
        let segments = handles.map(|(pool, handle)| {
            let id = heap.suspended.id_of(handle.home);
            if change == SegmentChange::Death {
                heap.suspended.forget_segment(handle.home);
            }
            Segment {
                id,
                address: handle.home,
                bytes: handle.bytes,
                pool,
            }
        });
        segments.collect()
    }

    fn sum_bytes(&self) -> (u64, u64, u64) {
        let suspensions = self.suspensions.iter();
        suspensions.fold((0, 0, 0), |(bytes, handles, kept), one| {
            let count = one.handles.len() as u64;
            (
                bytes + one.bytes(),
                handles + count,
                kept + one.kept_bytes(),
            )
        })
    }

    fn set_suspended(&mut self, away: bool) {
        self.suspensions.iter_mut().for_each(|one| one.away = away);
    }
}

impl Drop for Work<'_> {
    fn drop(&mut self) {
        let mut copies = Vec::new();
        let mut suspensions = std::mem::take(&mut self.suspensions).into_iter();
        let mut heap = self.engine.lock();
        for target in std::mem::take(&mut self.targets) {
            match suspensions.next() {
                Some(suspension) if suspension.away => {
                    match target {
                        Target::Pool(id) => {
                            let pool = heap.graphs.pools.get_mut(&id);
                            pool.into_iter().for_each(|pool| pool.away = true);
                        }
                        Target::Range(id) => {
                            let range = heap.ranges.map.get_mut(&id);
                            range.into_iter().for_each(|range| range.away = true);
                        }
                        Target::Arenas => {}
                    }
                    heap.suspended.map.insert(target, suspension);
                }
                Some(suspension) => {
                    target::restore(&mut heap, target, &suspension);
                    copies.push(suspension.copy);
                }
                None => target::open(&mut heap, target),
            }
        }
        heap.graphs.recount();
        heap.ranges.recount();
        heap.count_held();
        (heap.suspended.working, heap.suspended.coming) = (false, 0);
        heap.suspended.under_way.clear();
        drop(heap);
        // Pageable memory is freed without the lock.
        let spare = copies.into_iter().flat_map(HostCopy::into_spare).collect();
        self.engine.suspender.keep_spare(spare);
    }
}

/// Suspends memory. After an error everything is as before, or suspended if that could not be restored.
pub(crate) fn suspend(
    engine: &Engine,
    selected: Selected,
    keep: &Keep,
) -> Result<Suspended, Error> {
    if !engine.rules.maps() {
        return Err(Error::NotSupported {
            what: "suspension without virtual memory management",
        });
    }
    engine.usable()?;
    process::do_postponed();
    engine.free_deferred();
    if let Some(debug) = &engine.debug {
        debug.release_quarantine(engine, 0);
    }
    contexts::review_captures(engine);
    let mut work = Work::begin(engine, selected, false)?;
    if let Some(debug) = &engine.debug {
        debug.pause(engine);
    }
    // Idle views would only have to be mapped again, or prevent the release of handles.
    let idle = match selected {
        Selected::Allocator => {
            let heap = engine.lock();
            heap.views.idle_views(&heap.streams, usize::MAX)
        }
        Selected::One(_) | Selected::Tag(_) => Vec::new(),
    };
    release::evict(engine, &idle)?;
    contexts::synchronise(engine, true)?;
    {
        let mut heap = engine.lock();
        for target in &work.targets {
            let contents = keep.of(heap.suspended.tag_of(*target));
            let suspension = target::select_memory(&mut heap, *target, contents)?;
            heap.suspended.under_way.extend(suspension.homes());
            work.suspensions.push(suspension);
        }
    }
    let mut suspensions = work.targets.iter().zip(&work.suspensions);
    if let Some(debug) = &engine.debug
        && suspensions.any(|(target, suspension)| {
            matches!(
                (suspension.contents, target),
                (Contents::Drop, Target::Arenas)
            )
        })
    {
        debug.mark_guards_lost();
    }
    let dying = work.segments(SegmentChange::Death);
    engine.segment_hooks.notify(SegmentChange::Death, &dying);
    match release_all(engine, &mut work.suspensions) {
        Ok(()) => {
            work.set_suspended(true);
            let (bytes, handles, kept) = work.sum_bytes();
            Ok(Suspended {
                bytes,
                handles,
                kept,
            })
        }
        Err(error) => {
            // Until this succeeds, the memory counts as suspended, and can be resumed as such.
            work.set_suspended(true);
            if let Ok(maker) = recreate_all(engine, &mut work.suspensions) {
                report_restored(engine, work, maker);
            }
            Err(error)
        }
    }
}

/// Resumes suspended memory. After an error it is suspended as before.
pub(crate) fn resume(engine: &Engine, selected: Selected) -> Result<Resumed, Error> {
    engine.usable()?;
    engine.free_deferred();
    // No memory is created for pools that can no longer be used.
    discard::discard_unused(engine)?;
    let mut work = Work::begin(engine, selected, true)?;
    let missing = {
        let mut heap = engine.lock();
        // An earlier refusal by the driver is outdated, and requests cannot retry by themselves.
        heap.physical.full_at = None;
        for (target, suspension) in work.targets.iter().zip(&mut work.suspensions) {
            match target {
                Target::Arenas => target::drop_unused(&mut heap, suspension),
                Target::Range(id) => target::drop_leaving(&mut heap, *id, suspension),
                Target::Pool(_) => {}
            }
        }
        // The limit counts suspended memory only if the whole allocator is suspended.
        let suspensions = work.targets.iter().zip(&work.suspensions);
        let suspensions = suspensions.filter(|(target, _)| !matches!(target, Target::Arenas));
        suspensions.map(|(_, one)| one.missing()).sum::<u64>()
    };
    if !target::reserve_room(&mut engine.lock(), missing) {
        trim_unused(engine)?;
        if !target::reserve_room(&mut engine.lock(), missing) {
            drop(work);
            let error = out_of_memory_in_resume(&mut engine.lock(), missing);
            return Err(device::out_of_memory(engine, error, None));
        }
    }
    let mut done = recreate_all(engine, &mut work.suspensions);
    if done.as_ref().is_err_and(Error::is_out_of_memory) {
        trim_unused(engine)?;
        done = recreate_all(engine, &mut work.suspensions);
    }
    let maker = match done {
        Ok(maker) => maker,
        Err(error) => {
            let missing = work.suspensions.iter().map(Suspension::missing).sum();
            drop(work);
            return Err(match error.driver_error() {
                Some(cause) if cause.is_out_of_memory() => {
                    let error = out_of_memory_in_resume(&mut engine.lock(), missing);
                    device::out_of_memory(engine, error, Some(cause))
                }
                _ => error,
            });
        }
    };
    let (bytes, handles, kept) = work.sum_bytes();
    report_restored(engine, work, maker);
    pools::release_unused(engine);
    Ok(Resumed {
        bytes,
        handles,
        kept,
    })
}

/// Releases unused memory that is not suspended.
fn trim_unused(engine: &Engine) -> Result<(), Error> {
    match close::trim_device(engine, 0) {
        Err(Error::ContextLost(error)) => Err(Error::ContextLost(error)),
        // Memory that could not be released stays where it was.
        _ => Ok(()),
    }
}

/// Records that everything is restored.
fn report_restored(engine: &Engine, mut work: Work<'_>, maker: PhysicalConfig<'_>) {
    work.set_suspended(false);
    let born = work.segments(SegmentChange::Birth);
    // Publishes the memory.
    drop(work);
    drop(maker);
    engine.segment_hooks.notify(SegmentChange::Birth, &born);
}

fn copy_stream(engine: &Engine, suspensions: &[Suspension]) -> Result<Option<Stream>, Error> {
    let copies = suspensions.iter().any(|one| !one.kept.is_empty());
    let stream = copies.then(|| Stream::new(&engine.context));
    stream.transpose().map_err(|e| engine.error(e))
}

fn release_all(engine: &Engine, suspensions: &mut [Suspension]) -> Result<(), Error> {
    let stream = copy_stream(engine, suspensions)?;
    let entered = engine.context.enter().map_err(|e| engine.error(e))?;
    let mut spare = engine.suspender.take_spare();
    let saved = suspensions.iter_mut().try_for_each(|one| match &stream {
        Some(stream) if !one.kept.is_empty() => {
            commit::save_contents(&entered, stream, one, &mut spare)
        }
        _ => Ok(()),
    });
    engine.suspender.keep_spare(spare);
    match saved {
        Err(Error::Driver(error)) => return Err(engine.error(error)),
        saved => saved?,
    }
    commit::give_back(&entered, suspensions).map_err(|e| engine.error(e))
}

fn recreate_all<'a>(
    engine: &'a Engine,
    suspensions: &mut [Suspension],
) -> Result<PhysicalConfig<'a>, Error> {
    let stream = copy_stream(engine, suspensions)?;
    let entered = engine.context.enter().map_err(|e| engine.error(e))?;
    let maker = engine.maker();
    let made = commit::recreate(&maker, &entered, stream.as_ref(), suspensions);
    made.map(|()| maker).map_err(|e| engine.error(e))
}

/// Whether any memory, or the selected memory, is suspended.
pub(crate) fn is_suspended(engine: &Engine, selected: Selected) -> Result<bool, Error> {
    let heap = engine.open()?;
    match selected {
        Selected::Allocator => Ok(heap.suspended.working || !heap.suspended.map.is_empty()),
        named => match named.targets(&heap, true) {
            Ok(_) => Ok(true),
            Err(Error::NotSuspended) => Ok(false),
            Err(error) => Err(error),
        },
    }
}

/// Refuses a launch that would use suspended memory of a pool.
pub(crate) fn refuse_launch(engine: &Engine, pool: u64) -> Result<(), Error> {
    engine.open()?.graphs.ensure_present(pool)
}
