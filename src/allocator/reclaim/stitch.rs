//! Execution of a stitch: the view with its block, and the removal of other views for it.

use crate::allocator::engine::Engine;
use crate::allocator::engine::device;
use crate::allocator::engine::release;
use crate::allocator::engine::self_test;
use crate::allocator::extent::want::Want;
use crate::allocator::heap::Heap;
use crate::allocator::physical::Fresh;
use crate::allocator::plan::{growth, stitch};
use crate::allocator::reclaim::choice::{Reclaim, VIEW_ADDRESSES};
use crate::allocator::view::commit;
use crate::allocator::view::mapping::Stitch;
use crate::error::Error;
use crate::nvtx::{self, Category};

/// Maps a planned stitch, and takes the block.
pub(crate) fn stitch(
    engine: &Engine,
    want: &Want,
    mut stitch: Stitch,
    reclaim: &mut Reclaim<'_>,
) -> Result<Option<u32>, Error> {
    let new = stitch.fresh.as_ref().map_or(0, Fresh::bytes);
    // These may be the last references to the events, which must not be destroyed under the lock.
    let waits = std::mem::take(&mut stitch.aliased.waits);
    match self_test::may_stitch(engine) {
        Ok(true) => {}
        refused => {
            drop(waits);
            stitch::revert(&mut engine.lock(), want, stitch, 0, &[]);
            return refused.map(|_| None);
        }
    }
    let waited = engine.queue_waits(want.stream, &waits);
    drop(waits);
    if let Err(error) = waited {
        stitch::revert(&mut engine.lock(), want, stitch, 0, &[]);
        return Err(error);
    }
    let maker = engine.maker();
    let outcome = {
        let _span = nvtx::span(Category::Stitch, || format!("{} mappings", stitch.maps()));
        commit::map(&maker, &stitch)
    };
    let free = match &outcome {
        Ok(_) => 0,
        Err(failed) => device::driver_free(engine, failed.error()),
    };
    let mut heap = engine.lock();
    let error = match outcome {
        Ok(handles) => {
            let maps = stitch.maps();
            if let Some(fresh) = &stitch.fresh {
                growth::note_reason(&mut heap, want, fresh);
            }
            heap.stats.reclaim.stitched += 1;
            engine.driver().add_view_maps(maps as u64);
            let id = stitch::commit(&mut heap, want, stitch, &handles);
            drop((heap, maker));
            // A view that cannot be unmapped stays; the request does not fail because of it.
            if let Err(error) = unmap_excess_views(engine, want.stream) {
                log::debug!("cannot remove idle views: {error}");
            }
            return Ok(Some(id));
        }
        Err(failed) => stitch::revert_failed(&mut heap, want, stitch, failed),
    };
    reclaim.refused(engine, &mut heap, error, free.min(new.saturating_sub(1)))?;
    Ok(None)
}

/// Unmaps idle views after a stitch, if all views together have too many mappings.
fn unmap_excess_views(engine: &Engine, stream: u32) -> Result<(), Error> {
    let (excess, asks) = {
        let heap = engine.lock();
        (
            heap.views.excess_maps(heap.physical.holdings.len()),
            asks_about_views(engine, &heap),
        )
    };
    if asks {
        mark_views(engine, stream)?;
    }
    if excess == 0 {
        return Ok(());
    }
    let idle = {
        let heap = engine.lock();
        heap.views.idle_views(&heap.streams, excess)
    };
    release::evict(engine, &idle)
}

/// Whether one stream is active, and a view might be unmapped before its next stitch: no other call queries then
/// whether the stream has finished with it.
fn asks_about_views(engine: &Engine, heap: &Heap) -> bool {
    let most = engine.total_memory.saturating_mul(VIEW_ADDRESSES);
    let wanted = heap.views.excess_maps(heap.physical.holdings.len()) > 0
        || heap.extents.view_addresses() > most;
    wanted && !heap.streams.several()
}

/// Records a marker of the stream's work so far, and polls the previous one.
fn mark_views(engine: &Engine, stream: u32) -> Result<(), Error> {
    let key = engine.lock().streams[stream].key;
    engine.mark_all([(stream, key)]);
    engine.poll()
}
