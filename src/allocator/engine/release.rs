//! Releases to the driver: memory is claimed before the calls; afterwards it is removed from the heap, or set apart.

use crate::allocator::plan::release;
use crate::driver::{DriverError, Entered};

use crate::allocator::engine::segment_hooks::SegmentChange;
use crate::allocator::engine::{Engine, segments};
use crate::allocator::physical::Release;
use crate::allocator::physical::commit::{free, give_back};
use crate::allocator::range::{Granule, Layout, Taken};
use crate::allocator::size::GRANULE;
use crate::allocator::suspend::Target;
use crate::allocator::view::commit as view;
use crate::error::Error;

/// Releases claimed memory to the driver, and returns the first error after trying everything. A segment that was
/// not freed is free memory again. A handle that could not be unmapped stays set apart and is tried again. A failed
/// release is not repeated, because the driver may have performed it: the memory leaves the heap.
pub(crate) fn release(engine: &Engine, plan: Vec<Release>) -> Result<u64, Error> {
    let entered = match engine.context.enter() {
        Ok(entered) => entered,
        Err(error) => {
            let mut heap = engine.lock();
            plan.into_iter()
                .for_each(|release| release::revert(&mut heap, release));
            return Err(engine.error(error));
        }
    };
    segments::report_claimed(engine, SegmentChange::Death, &plan);
    let mut first: Option<DriverError> = None;
    let mut released = 0;
    let mut plan = plan.into_iter();
    for release in plan.by_ref() {
        let done = match release.handle {
            None => release_segment(engine, &entered, release),
            Some(handle) => {
                let done = give_back(&entered, (&release, handle), false);
                release::commit(&mut engine.lock(), &release, done)
            }
        };
        match done {
            (bytes, None) => released += bytes,
            (_, failed) => first = first.or(failed),
        }
        if first.is_some_and(|e| e.is_fatal()) {
            // No further call can succeed in this context; the rest stays as it is.
            break;
        }
    }
    segments::report_claimed(engine, SegmentChange::Birth, plan.as_slice());
    for release in plan {
        release::revert(&mut engine.lock(), release);
    }
    match first {
        Some(error) => Err(engine.error(error)),
        None => Ok(released),
    }
}

/// Frees a plain segment. It leaves the heap first, because another thread may obtain its address as soon as the
/// driver has freed it.
fn release_segment(
    engine: &Engine,
    entered: &Entered<'_>,
    release: Release,
) -> (u64, Option<DriverError>) {
    let bytes = release.bytes;
    {
        let mut heap = engine.lock();
        release::remove(&mut heap, &release);
        heap.physical.planned += bytes;
    }
    let freed = free(entered, &release);
    let mut heap = engine.lock();
    heap.physical.planned -= bytes;
    if let Err(error) = freed {
        drop(heap);
        segments::report_claimed(engine, SegmentChange::Birth, [&release]);
        release::restore_segment(&mut engine.lock(), release);
        return (0, Some(error));
    }
    (bytes, None)
}

/// Releases handles that could not be unmapped before.
pub(crate) fn release_quarantined(engine: &Engine) -> Result<u64, Error> {
    let quarantined = release::claim_quarantined(&mut engine.lock());
    if quarantined.is_empty() {
        return Ok(0);
    }
    let entered = engine.context.enter();
    let mut first = None;
    let mut released = 0;
    for release in quarantined {
        let done = match (&entered, release.handle) {
            (Ok(entered), Some(handle)) => give_back(entered, (&release, handle), true),
            (Err(error), _) => (Err(*error), Ok(())),
            // Segments are never mapped.
            (Ok(_), None) => continue,
        };
        let (bytes, failed) = release::commit(&mut engine.lock(), &release, done);
        released += bytes;
        first = first.or(failed);
    }
    match first {
        Some(error) => Err(engine.error(error)),
        None => Ok(released),
    }
}

/// Unmaps idle views. A view that cannot be unmapped stays, but serves no requests; the first error is returned.
pub(crate) fn evict(engine: &Engine, bases: &[u64]) -> Result<(), Error> {
    let mut first = None;
    for base in bases {
        let taken = {
            let heap = &mut *engine.lock();
            match heap.is_suspended {
                true => None,
                false => (heap.views).take(&mut heap.extents.records, &heap.streams, *base),
            }
        };
        let Some(view) = taken else {
            continue;
        };
        let bytes = u64::from(view.granules) * GRANULE;
        let unmapped = view::unmap(&engine.context, *base, &view.mappings, view.dead);
        let heap = &mut *engine.lock();
        match unmapped {
            Ok(()) => {
                heap.extents.lookup.forget(*base, bytes);
                (heap.views).count_unmapped(&mut heap.extents, &mut heap.physical, &view);
            }
            Err(error) => {
                (heap.views).put_dead(&mut heap.extents.records, *base, view);
                first = first.or(Some(error));
            }
        }
    }
    match first {
        Some(error) => Err(engine.error(error)),
        None => Ok(()),
    }
}

// ---- memory that has left a range --------------------------------------------------------------

/// Unmaps settled granules, and releases their handles to the driver: those that are wanted, up to a number of bytes.
/// Returns the bytes, and the first error after trying everything. `own` is a range that the caller has claimed.
pub(crate) fn release_settled(
    engine: &Engine,
    own: Option<u64>,
    most: u64,
    wanted: impl Fn(u64, &Layout, u64, &Granule) -> bool,
) -> Result<u64, Error> {
    let mut taken = {
        let heap = &mut *engine.lock();
        if heap.ranges.held == 0 {
            Vec::new()
        } else {
            (heap.ranges).take_settled(&heap.streams, own, most, wanted)
        }
    };
    if taken.is_empty() {
        sweep(engine);
        return Ok(0);
    }
    let mapped = taken.iter().flat_map(Taken::places);
    segments::report(engine, SegmentChange::Death, None, mapped);
    let (mut first, mut released, mut gone) = (Ok(()), 0, Vec::new());
    match engine.context.enter() {
        Ok(entered) => {
            for taken in &mut taken {
                let size = taken.size;
                let again = taken.doubtful;
                taken.granule.cells.retain(|cell| {
                    let (unmapped, freed) = give_back(
                        &entered,
                        (
                            &Release::of_cell(cell.address, size, cell.handle),
                            cell.handle,
                        ),
                        again,
                    );
                    let left = unmapped.is_ok();
                    taken.doubtful |= !left;
                    released += size * u64::from(left && freed.is_ok());
                    gone.extend(left.then_some((cell.address, size)));
                    first = first.and(unmapped).and(freed);
                    !left
                });
            }
        }
        Err(error) => first = Err(error),
    }
    let stay = taken.iter().flat_map(Taken::places);
    segments::report(engine, SegmentChange::Birth, None, stay);
    {
        let heap = &mut *engine.lock();
        heap.physical.full_at = None;
        gone.into_iter()
            .for_each(|place| release::forget_mapping(heap, place));
        heap.ranges.put_back(own, taken);
    }
    sweep(engine);
    first.map(|()| released).map_err(|e| engine.error(e))
}

/// Releases all settled granules to the driver.
pub(crate) fn release_all_settled(engine: &Engine) -> Result<u64, Error> {
    release_settled(engine, None, u64::MAX, |_, _, _, _| true)
}

/// Releases the granules that left their ranges before the last call of this function.
pub(crate) fn release_aged(engine: &Engine) -> Result<u64, Error> {
    let released = release_settled(engine, None, u64::MAX, |_, _, _, granule| granule.seen)?;
    engine.lock().ranges.mark_checked();
    Ok(released)
}

/// Removes ranges that have ended and hold no memory, and returns their addresses.
pub(crate) fn sweep(engine: &Engine) {
    let ended = {
        let heap = &mut *engine.lock();
        let ended = heap.ranges.take_ended();
        for (id, _) in &ended {
            heap.suspended.tags.remove(&Target::Range(*id));
        }
        ended
    };
    for (_, layout) in ended {
        engine.addresses.give_back(layout.base, layout.span());
    }
}
