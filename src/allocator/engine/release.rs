//! What goes back to the driver: claimed before it is asked, and put back where it refuses.

use crate::driver::{DriverError, Entered, process};

use crate::allocator::engine::Engine;
use crate::allocator::engine::decay::Decay;
use crate::allocator::heap::Heap;
use crate::allocator::heap::cut::Cut;
use crate::allocator::physical::Release;
use crate::allocator::physical::commit::{give_back, release_orphan};
use crate::allocator::size::GRANULE;
use crate::allocator::view::commit as view;
use crate::error::Error;
use crate::error::memory::Bytes;

impl Engine {
    /// Gives claimed memory back to the driver. What fails stays in the heap, or goes back to the
    /// free memory if it is still mapped; the first error is returned after all was tried.
    pub(crate) fn release(&self, plan: Vec<Release>) -> Result<u64, Error> {
        let entered = match self.context.enter() {
            Ok(entered) => entered,
            Err(error) => {
                let mut heap = self.lock();
                plan.into_iter().for_each(|release| heap.keep(release));
                return Err(self.error(error));
            }
        };
        let mut first: Option<DriverError> = None;
        let mut released = 0;
        let mut plan = plan.into_iter();
        for release in plan.by_ref() {
            let done = match release.handle {
                None => self.release_segment(&entered, release),
                Some(_) => {
                    let done = give_back(&entered, &release);
                    self.lock().given_back(release, done, Heap::keep)
                }
            };
            match done {
                (bytes, None) => released += bytes,
                (_, failed) => first = first.or(failed),
            }
            if first.is_some_and(|e| e.is_fatal()) {
                // Nothing more can be done in this context; what is left stays as it is.
                break;
            }
        }
        for release in plan {
            self.lock().keep(release);
        }
        match first {
            Some(error) => Err(self.error(error)),
            None => Ok(released),
        }
    }

    /// Frees a plain segment. It leaves the heap first: as soon as the driver has it, another thread
    /// may be given its address again.
    fn release_segment(
        &self,
        entered: &Entered<'_>,
        release: Release,
    ) -> (u64, Option<DriverError>) {
        let bytes = release.bytes;
        {
            let mut heap = self.lock();
            heap.gone(&release);
            heap.unhold(bytes, release.space);
            heap.physical.planned += bytes;
        }
        let (freed, _) = give_back(entered, &release);
        let mut heap = self.lock();
        heap.physical.planned -= bytes;
        if let Err(error) = freed {
            heap.readmit(release);
            return (0, Some(error));
        }
        (bytes, None)
    }

    /// Tries again to release what an earlier failure left behind.
    pub(crate) fn retry_orphaned_handles(&self) -> Result<u64, Error> {
        let (orphaned_handles, quarantined) = self.lock().claim_leftovers();
        if orphaned_handles.is_empty() && quarantined.is_empty() {
            return Ok(0);
        }
        let entered = self.context.enter();
        let mut first: Option<DriverError> = entered.as_ref().err().copied();
        let mut released = 0;
        for orphan in orphaned_handles {
            let freed = match &entered {
                Ok(entered) => release_orphan(entered, &orphan),
                Err(error) => Err(*error),
            };
            self.lock().orphan_tried(&orphan, freed.is_ok());
            match freed {
                Ok(()) => released += orphan.bytes,
                Err(error) => first = first.or(Some(error)),
            }
        }
        for release in quarantined {
            let done = match &entered {
                Ok(entered) => give_back(entered, &release),
                Err(error) => (Err(*error), Ok(())),
            };
            match self.lock().given_back(release, done, |heap, release| {
                heap.quarantine(release.id);
            }) {
                (bytes, None) => released += bytes,
                (_, failed) => first = first.or(failed),
            }
        }
        match first {
            Some(error) => Err(self.error(error)),
            None => Ok(released),
        }
    }

    // ---- views --------------------------------------------------------------------------------

    /// Unmaps idle views. One that cannot be unmapped stays; the first error is returned.
    pub(crate) fn evict(&self, bases: &[u64]) -> Result<(), Error> {
        let mut first = None;
        for base in bases {
            let Some(view) = self.lock().take_view(*base) else {
                continue;
            };
            let bytes = u64::from(view.granules) * GRANULE;
            let unmapped = view::unmap(&self.context, *base, bytes);
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

    /// Unmaps the end of a view. If that fails, the view stays as it was.
    pub(crate) fn shorten(&self, cut: Cut) -> Result<(), Error> {
        let taken = self.lock().cut_view(cut);
        let Some((at, gone)) = taken else {
            return Ok(());
        };
        let granules = gone.iter().map(|mapping| u64::from(mapping.granules));
        let bytes = granules.sum::<u64>() * GRANULE;
        let unmapped = view::unmap(&self.context, at, bytes);
        let mut heap = self.lock();
        if unmapped.is_ok() {
            heap.extents.lookup.forget(at, bytes);
        }
        heap.cut_done(cut, gone, unmapped.is_ok());
        drop(heap);
        unmapped.map_err(|error| self.error(error))
    }
}

impl Engine {
    /// Gives back what has been idle for long, if it is time to look. A failure is left to the next time.
    #[inline]
    pub(crate) fn tend(&self) {
        if let Some(decay) = &self.decay {
            self.tend_now(decay);
        }
    }

    #[cold]
    fn tend_now(&self, decay: &Decay) {
        if !process::is_unwatched() {
            return;
        }
        match self.decay(decay) {
            Ok(0) => {}
            Ok(bytes) => log::debug!(
                "allocator {}: released {} of idle memory",
                self.id,
                Bytes(bytes)
            ),
            Err(error) => log::debug!("allocator {}: cannot release idle memory: {error}", self.id),
        }
    }

    /// The same with its outcome: bytes that went back.
    pub(crate) fn decay(&self, decay: &Decay) -> Result<u64, Error> {
        if !decay.is_due() {
            return Ok(0);
        }
        let ours = {
            let mut heap = self.open()?;
            heap.flush_caches();
            heap.streams.kept_uncovered()
        };
        self.cover_all(&ours)?;
        self.lock().streams.ask_again();
        self.poll()?;
        let mut heap = self.open()?;
        heap.complete_uses();
        // What was held back for streams that are done by now.
        heap.flush_caches();
        let views = decay.turn(heap.views.clock);
        let (_, allocated) = heap.live_totals();
        let all = &heap.stats.all;
        let keep = (all.allocated.peak as f64 * decay.keep) as u64;
        let spare = all.reserved.current.saturating_sub(allocated);
        // What no block has had since the last look.
        let held = heap.stats.large.reserved.current;
        let idle = held.saturating_sub(heap.turn_recent_peak());
        let idle = idle.min(spare.saturating_sub(keep));
        if idle == 0 {
            return Ok(0);
        }
        let unused = heap.idle_views_since(views);
        drop(heap);
        self.evict(&unused)?;
        let plan = self.lock().plan_decay(idle);
        self.release(plan)
    }
}
