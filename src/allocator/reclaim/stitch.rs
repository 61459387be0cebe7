//! Execution of a stitch: the view with its block, and the removal of other views for it.

use crate::allocator::engine::Engine;
use crate::allocator::extent::want::Want;
use crate::allocator::heap::Heap;
use crate::allocator::physical::Fresh;
use crate::allocator::plan::{growth, stitch};
use crate::allocator::reclaim::choice::{Reclaim, VIEW_ADDRESSES};
use crate::allocator::view::commit;
use crate::allocator::view::mapping::Stitch;
use crate::error::Error;
use crate::nvtx::{self, Category};

impl Engine {
    /// Maps a planned stitch, and takes the block.
    pub(crate) fn stitch(
        &self,
        want: &Want,
        mut stitch: Stitch,
        reclaim: &mut Reclaim<'_>,
    ) -> Result<Option<u32>, Error> {
        let new = stitch.fresh.as_ref().map_or(0, Fresh::bytes);
        // These may be the last references to the events, which must not be destroyed under the lock.
        let waits = std::mem::take(&mut stitch.aliased.waits);
        match self.may_stitch() {
            Ok(true) => {}
            refused => {
                drop(waits);
                stitch::revert(&mut self.lock(), want, stitch, 0, &[]);
                return refused.map(|_| None);
            }
        }
        let waited = self.queue_waits(want.stream, &waits);
        drop(waits);
        if let Err(error) = waited {
            stitch::revert(&mut self.lock(), want, stitch, 0, &[]);
            return Err(error);
        }
        let outcome = {
            let _span = nvtx::span(Category::Stitch, || format!("{} mappings", stitch.maps()));
            commit::map(&self.maker(), &stitch)
        };
        let free = match &outcome {
            Ok(_) => 0,
            Err(failed) => self.driver_free(failed.error()),
        };
        let mut heap = self.lock();
        let error = match outcome {
            Ok(handles) => {
                let maps = stitch.maps();
                if let Some(fresh) = &stitch.fresh {
                    growth::note_reason(&mut heap, want, fresh);
                }
                heap.stats.reclaim.stitched += 1;
                self.driver().add_view_maps(maps as u64);
                let id = stitch::commit(&mut heap, want, stitch, &handles);
                drop(heap);
                // A view that cannot be unmapped stays; the request does not fail because of it.
                if let Err(error) = self.shed_views(want.stream) {
                    log::debug!("cannot remove idle views: {error}");
                }
                return Ok(Some(id));
            }
            Err(failed) => stitch::revert_failed(&mut heap, want, stitch, failed),
        };
        self.refused(&mut heap, error, free.min(new.saturating_sub(1)), reclaim)?;
        Ok(None)
    }

    /// Unmaps idle views after a stitch, if all views together have too many mappings.
    fn shed_views(&self, stream: u32) -> Result<(), Error> {
        let (excess, asks) = {
            let heap = self.lock();
            (
                heap.views.excess_maps(heap.physical.holdings.len()),
                self.asks_about_views(&heap),
            )
        };
        if asks {
            self.see_views_idle(stream)?;
        }
        if excess == 0 {
            return Ok(());
        }
        let idle = {
            let heap = self.lock();
            heap.views.idle_views(&heap.streams, excess)
        };
        self.evict(&idle)
    }

    /// Whether one stream is active, and a view might be unmapped before its next stitch: no other call queries then
    /// whether the stream has finished with it.
    fn asks_about_views(&self, heap: &Heap) -> bool {
        let most = self.total_memory.saturating_mul(VIEW_ADDRESSES);
        let wanted = heap.views.excess_maps(heap.physical.holdings.len()) > 0
            || heap.extents.view_addresses() > most;
        wanted && !heap.streams.several()
    }

    /// Records a marker of the stream's work so far, and polls the previous one.
    fn see_views_idle(&self, stream: u32) -> Result<(), Error> {
        let key = self.lock().streams[stream].key;
        self.mark_all([(stream, key)]);
        self.poll()
    }
}
