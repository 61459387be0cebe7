//! The driver calls of views: mapping handles a second time, and taking such mappings away.

use crate::driver::DriverError;

use crate::allocator::engine::Engine;
use crate::allocator::extent::want::Want;
use crate::allocator::heap::Heap;
use crate::allocator::physical::LEVELS;
use crate::allocator::reclaim::choice::VIEW_ADDRESSES;
use crate::allocator::reclaim::stage::Reclaim;
use crate::allocator::report::GrowthReason;
use crate::allocator::size::GRANULE;
use crate::allocator::view::mapping::{Stitch, Unmapped};
use crate::error::Error;

impl Engine {
    /// Maps what a stitch planned, and takes the block.
    pub(crate) fn stitch(
        &self,
        want: &Want,
        mut stitch: Stitch,
        reason: GrowthReason,
        reclaim: &mut Reclaim<'_>,
    ) -> Result<Option<u32>, Error> {
        let new = stitch.fresh.as_ref().map_or(0, |f| f.bytes());
        // Their events may have no other holder by then, and are not destroyed under the lock.
        let waits = std::mem::take(&mut stitch.aliased.waits);
        match self.may_stitch() {
            Ok(true) => {}
            refused => {
                drop(waits);
                self.lock().not_stitched(want, stitch, 0, &[]);
                return refused.map(|_| None);
            }
        }
        let waited = self.queue_waits(want.stream, &waits);
        drop(waits);
        if let Err(error) = waited {
            self.lock().not_stitched(want, stitch, 0, &[]);
            return Err(error);
        }
        let outcome = self.map_stitch(&stitch);
        let free = outcome
            .as_ref()
            .err()
            .map_or(0, |failed| self.driver_free(failed.error()));
        let mut heap = self.lock();
        let error = match outcome {
            Ok(handles) => {
                let maps = stitch.maps();
                if new > 0 {
                    heap.note_growth(reason, want, new);
                }
                heap.stats.reclaim.stitched += 1;
                let in_flight = heap.streams.in_flight();
                heap.physical.spent(maps, in_flight);
                self.driver().add_view_maps(maps as u64);
                let id = heap.stitched(want, stitch, &handles);
                drop(heap);
                // A view that cannot be unmapped stays; that is no reason to fail the request.
                if let Err(error) = self.shed_views(want.stream) {
                    log::debug!("idle views were kept: {error}");
                }
                return Ok(Some(id));
            }
            Err(failed) => heap.not_mapped(want, stitch, failed),
        };
        self.refused(&mut heap, error, free.min(new.saturating_sub(1)), reclaim)?;
        Ok(None)
    }

    /// After a stitch: lets idle views go if all of them have too many mappings.
    fn shed_views(&self, stream: u32) -> Result<(), Error> {
        let (excess, asks) = {
            let heap = self.lock();
            (heap.excess_view_maps(), self.asks_about_views(&heap))
        };
        if asks {
            self.see_views_idle(stream)?;
        }
        if excess == 0 {
            return Ok(());
        }
        let idle = self.lock().idle_views(excess);
        self.evict(&idle)
    }

    /// Whether one stream works alone, and a view might go or be cut before its next stitch: nobody else
    /// asks then if the stream is done with it.
    fn asks_about_views(&self, heap: &Heap) -> bool {
        let most = self.total_memory.saturating_mul(VIEW_ADDRESSES);
        let wanted = heap.excess_view_maps() > 0
            || heap.extents.view_addresses() > most
            || heap.physical.level + 1 == LEVELS;
        wanted && !heap.streams.several()
    }

    /// Marks what a stream uses by now, and sees what the marker of the last time says.
    fn see_views_idle(&self, stream: u32) -> Result<(), Error> {
        let key = self.lock().streams[stream].key;
        self.mark_all([(stream, key)]);
        self.poll()
    }

    pub(crate) fn map_stitch(&self, stitch: &Stitch) -> Result<Vec<u64>, Unmapped> {
        let fresh = match &stitch.fresh {
            None => Vec::new(),
            Some(fresh) => match self.map(fresh.addr, &fresh.sizes) {
                Ok(handles) => handles,
                Err(failure) => return Err(Unmapped::NotMade(failure)),
            },
        };
        let entered = match self.context.enter() {
            Ok(entered) => entered,
            Err(error) => return Err(self.unstitch(stitch, 0, fresh, error)),
        };
        let new = stitch.fresh.iter().flat_map(|f| &f.sizes).zip(&fresh);
        let all = stitch
            .adds
            .iter()
            .map(|(_, bytes, handle)| (*bytes, *handle));
        let (mut addr, mut mapped) = (stitch.site.at, 0);
        for (bytes, handle) in all.chain(new.map(|(bytes, handle)| (*bytes, *handle))) {
            // SAFETY: the range is this view's, holds no mapping there, and no one else extends the
            // view; the handle is alive and of this size.
            if let Err(error) = unsafe { entered.mem_map(addr, bytes as usize, handle) } {
                return Err(self.unstitch(stitch, mapped, fresh, error));
            }
            mapped += 1;
            addr += bytes;
        }
        // SAFETY: mapped just now by whole handles.
        match unsafe {
            entered.set_access(
                stitch.site.at,
                (addr - stitch.site.at) as usize,
                &self.access,
            )
        } {
            Ok(()) => Ok(fresh),
            Err(error) => Err(self.unstitch(stitch, mapped, fresh, error)),
        }
    }

    /// Undoes the first mappings of a stitch, newest first, and the memory that was made for it.
    fn unstitch(
        &self,
        stitch: &Stitch,
        mapped: usize,
        fresh: Vec<u64>,
        error: DriverError,
    ) -> Unmapped {
        let new = stitch.fresh.iter().flat_map(|f| &f.sizes);
        let sizes: Vec<u64> = stitch
            .adds
            .iter()
            .map(|(_, bytes, _)| bytes)
            .chain(new)
            .copied()
            .collect();
        let mut end = stitch.site.at + sizes[..mapped].iter().sum::<u64>();
        let Ok(entered) = self.context.enter() else {
            return Unmapped::Stuck(error, mapped, fresh);
        };
        for (left, bytes) in sizes[..mapped].iter().enumerate().rev() {
            end -= bytes;
            // SAFETY: mapped by this stitch as one handle; no block was ever handed out there.
            if unsafe { entered.mem_unmap(end, *bytes as usize) }.is_err() {
                let keep = if left + 1 > stitch.adds.len() {
                    fresh
                } else {
                    return self.unmake_fresh(stitch, left + 1, fresh, error);
                };
                return Unmapped::Stuck(error, left + 1, keep);
            }
        }
        drop(entered);
        self.unmake_fresh(stitch, 0, fresh, error)
    }

    fn unmake_fresh(
        &self,
        stitch: &Stitch,
        mapped: usize,
        fresh: Vec<u64>,
        error: DriverError,
    ) -> Unmapped {
        match &stitch.fresh {
            Some(new) if !fresh.is_empty() && mapped == 0 => {
                Unmapped::NotMade(self.unmake(new.addr, &new.sizes, &fresh, error))
            }
            // What is new is held from now on: the view keeps mappings all the same.
            Some(_) if mapped > 0 => Unmapped::Stuck(error, mapped, fresh),
            _ if mapped > 0 => Unmapped::Stuck(error, mapped, Vec::new()),
            _ => Unmapped::Undone(error),
        }
    }

    /// Unmaps idle views. One that cannot be unmapped stays; the first error is returned.
    pub(crate) fn evict(&self, bases: &[u64]) -> Result<(), Error> {
        let mut first = None;
        for base in bases {
            let Some(view) = self.lock().take_view(*base) else {
                continue;
            };
            let bytes = u64::from(view.granules) * GRANULE;
            let unmapped = match self.context.enter() {
                // SAFETY: the view's own mappings, whole; no block lies in it, and every use through
                // its addresses was seen complete by the host.
                Ok(entered) if bytes > 0 => unsafe { entered.mem_unmap(*base, bytes as usize) },
                Ok(_) => Ok(()),
                Err(error) => Err(error),
            };
            let mut heap = self.lock();
            match unmapped {
                Ok(()) => {
                    heap.extents.lookup.forget(*base, bytes);
                    heap.view_gone(&view);
                }
                Err(error) => {
                    heap.view_stays(*base, view);
                    first = first.or(Some(error));
                }
            }
        }
        match first {
            Some(error) => Err(self.error(error)),
            None => Ok(()),
        }
    }
}

impl Unmapped {
    pub(crate) fn error(&self) -> DriverError {
        match self {
            Unmapped::Undone(error) | Unmapped::Stuck(error, ..) => *error,
            Unmapped::NotMade(failure) => failure.error,
        }
    }
}
