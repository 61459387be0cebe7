//! Memory that has left its range becomes free memory of the large arena.

use crate::allocator::engine::segment_hooks::SegmentChange;
use crate::allocator::engine::{Engine, segments};
use crate::allocator::extent::record::SpaceId;
use crate::allocator::extent::want::Want;
use crate::allocator::physical::Release;
use crate::allocator::physical::commit::{PhysicalConfig, remap};
use crate::allocator::plan::{growth, release};
use crate::allocator::range::{Cell, Granule, Layout, State, Taken};
use crate::driver::DriverError;
use crate::error::Error;

/// Makes settled granules free memory of the large arena, about as many bytes as a request lacks. Returns the bytes.
pub(crate) fn move_to_arena(engine: &Engine, want: &Want, lacking: u64) -> Result<u64, Error> {
    engine.lock().streams.reset_backoff();
    engine.poll()?;
    let mut taken = {
        let heap = &mut *engine.lock();
        let left = |_, _: &Layout, _, granule: &Granule| granule.state == State::Leaving;
        (heap.ranges).take_settled(&heap.streams, None, lacking, left)
    };
    let leave = taken.iter().flat_map(Taken::places);
    segments::report(engine, SegmentChange::Death, None, leave);
    let (mut moved, mut first, mut gone) = (0, Ok(()), Vec::new());
    let maker = engine.maker();
    for taken in &mut taken {
        let size = taken.size;
        taken.granule.cells.retain(|cell| {
            if first.is_err() {
                return true;
            }
            let (left, done) = move_cell(engine, &maker, want, (cell, size));
            taken.doubtful |= !left && done.is_err();
            moved += size * u64::from(matches!(done, Ok(true)));
            gone.extend(left.then_some((cell.address, size)));
            first = done.map(drop);
            !left
        });
    }
    let stay = taken.iter().flat_map(Taken::places);
    segments::report(engine, SegmentChange::Birth, None, stay);
    let heap = &mut *engine.lock();
    gone.into_iter()
        .for_each(|place| release::forget_mapping(heap, place));
    heap.ranges.put_back(None, taken);
    first.map(|()| moved).map_err(|e| engine.error(e))
}

/// Moves one handle to a home in the large arena, if that has addresses for it. Also returns whether it left its cell.
fn move_cell(
    engine: &Engine,
    maker: &PhysicalConfig<'_>,
    want: &Want,
    (cell, size): (&Cell, u64),
) -> (bool, Result<bool, DriverError>) {
    let fresh = growth::claim_handle(&mut engine.lock(), want, size);
    let Some(fresh) = fresh else {
        return (false, Ok(false));
    };
    let from = Release::of_cell(cell.address, size, cell.handle);
    let (left, made) = remap(maker, &fresh, (&from, cell.handle));
    if made.is_ok() {
        segments::report_fresh(engine, &fresh);
    }
    let heap = &mut *engine.lock();
    let done = match made {
        Ok(handles) => {
            growth::hold_all(heap, &fresh, &handles);
            heap.extents.free_fresh(fresh.space, fresh.id, want.stream);
            Ok(true)
        }
        Err(failure) => {
            let error = failure.error;
            growth::revert(heap, fresh);
            release::set_apart(heap, SpaceId::Large, failure);
            Err(error)
        }
    };
    (left, done)
}
