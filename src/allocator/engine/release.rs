//! Releases to the driver: memory is claimed before the calls; afterwards it is removed from the heap, or set apart.

use crate::allocator::plan::release;
use crate::driver::{DriverError, Entered, process};

use crate::allocator::engine::Engine;
use crate::allocator::engine::decay::Decay;
use crate::allocator::physical::Release;
use crate::allocator::physical::commit::{free, give_back};
use crate::allocator::size::GRANULE;
use crate::allocator::view::commit as view;
use crate::error::Error;
use crate::error::memory::Bytes;

impl Engine {
    /// Releases claimed memory to the driver, and returns the first error after trying everything. A segment that was
    /// not freed is free memory again. A handle that could not be unmapped stays set apart and is tried again. A failed
    /// release is not repeated, because the driver may have performed it: the memory leaves the heap.
    pub(crate) fn release(&self, plan: Vec<Release>) -> Result<u64, Error> {
        let entered = match self.context.enter() {
            Ok(entered) => entered,
            Err(error) => {
                let mut heap = self.lock();
                plan.into_iter()
                    .for_each(|release| release::revert(&mut heap, release));
                return Err(self.error(error));
            }
        };
        let mut first: Option<DriverError> = None;
        let mut released = 0;
        let mut plan = plan.into_iter();
        for release in plan.by_ref() {
            let done = match release.handle {
                None => self.release_segment(&entered, release),
                Some(handle) => {
                    let done = give_back(&entered, (&release, handle), false);
                    release::commit(&mut self.lock(), &release, done)
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
        for release in plan {
            release::revert(&mut self.lock(), release);
        }
        match first {
            Some(error) => Err(self.error(error)),
            None => Ok(released),
        }
    }

    /// Frees a plain segment. It leaves the heap first, because another thread may obtain its address as soon as the
    /// driver has freed it.
    fn release_segment(
        &self,
        entered: &Entered<'_>,
        release: Release,
    ) -> (u64, Option<DriverError>) {
        let bytes = release.bytes;
        {
            let mut heap = self.lock();
            release::remove(&mut heap, &release);
            heap.physical.planned += bytes;
        }
        let freed = free(entered, &release);
        let mut heap = self.lock();
        heap.physical.planned -= bytes;
        if let Err(error) = freed {
            release::readmit(&mut heap, release);
            return (0, Some(error));
        }
        (bytes, None)
    }

    /// Releases handles that could not be unmapped before.
    pub(crate) fn release_quarantined(&self) -> Result<u64, Error> {
        let quarantined = release::claim_quarantined(&mut self.lock());
        if quarantined.is_empty() {
            return Ok(0);
        }
        let entered = self.context.enter();
        let mut first = None;
        let mut released = 0;
        for release in quarantined {
            let done = match (&entered, release.handle) {
                (Ok(entered), Some(handle)) => give_back(entered, (&release, handle), true),
                (Err(error), _) => (Err(*error), Ok(())),
                // Segments are never mapped.
                (Ok(_), None) => continue,
            };
            let (bytes, failed) = release::commit(&mut self.lock(), &release, done);
            released += bytes;
            first = first.or(failed);
        }
        match first {
            Some(error) => Err(self.error(error)),
            None => Ok(released),
        }
    }

    // ---- views --------------------------------------------------------------------------------

    /// Unmaps idle views. A view that cannot be unmapped stays, but serves no requests; the first error is returned.
    pub(crate) fn evict(&self, bases: &[u64]) -> Result<(), Error> {
        let mut first = None;
        for base in bases {
            let taken = {
                let heap = &mut *self.lock();
                match heap.suspended.closed {
                    true => None,
                    false => (heap.views).take(&mut heap.extents.records, &heap.streams, *base),
                }
            };
            let Some(view) = taken else {
                continue;
            };
            let bytes = u64::from(view.granules) * GRANULE;
            let unmapped = view::unmap(&self.context, *base, &view.mappings, view.dead);
            let heap = &mut *self.lock();
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
            Some(error) => Err(self.error(error)),
            None => Ok(()),
        }
    }
}

impl Engine {
    /// Releases memory that has been idle for long, if a check is due. On a failure the next check tries again.
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

    /// The same, but returns the bytes released.
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
        self.lock().streams.reset_backoff();
        self.poll()?;
        let mut heap = self.open()?;
        heap.complete_uses();
        // Includes blocks held back for streams that have completed by now.
        heap.flush_caches();
        let views = decay.turn(heap.views.clock);
        let (_, allocated) = heap.live_totals();
        let all = &heap.stats.all;
        let keep = (all.allocated.peak as f64 * decay.keep) as u64;
        let spare = all.reserved.current.saturating_sub(allocated);
        // Memory that no block has used since the last check.
        let held = heap.stats.large.reserved.current;
        let idle = held.saturating_sub({
            let now = heap.stats.large.allocated.current;
            std::mem::replace(&mut heap.recent_peak, now).max(now)
        });
        let idle = idle.min(spare.saturating_sub(keep));
        if idle == 0 {
            return Ok(0);
        }
        let unused = heap.views.idle_since(&heap.streams, views);
        drop(heap);
        self.evict(&unused)?;
        let plan = release::plan_decay(&mut self.lock(), idle);
        self.release(plan)
    }
}
