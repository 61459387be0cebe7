//! The steps of a reclaim that need the driver: what was chosen, and claimed for it, is done without the lock.

use crate::allocator::engine::Engine;
use crate::allocator::extent::record::SpaceId;
use crate::allocator::extent::want::Want;
use crate::allocator::heap::Heap;
use crate::allocator::heap::growth::Growth;
use crate::allocator::physical::GrowthFailure;
use crate::allocator::reclaim::stage::{Answer, Reclaim, Step};
use crate::allocator::report::GrowthReason;
use crate::error::Error;

impl Engine {
    /// Executes a step without the lock. Returns the extent, claimed and ready for its stream, if the step made
    /// one.
    pub(crate) fn execute(
        &self,
        want: &Want,
        step: Step,
        reclaim: &mut Reclaim<'_>,
    ) -> Result<Option<u32>, Error> {
        match step {
            Step::Stitch(stitch, reason) => {
                let id = self.stitch(want, *stitch, reason, reclaim)?;
                reclaim.unstitched = id.is_none();
                return Ok(id);
            }
            Step::Grow(growth, reason) if self.rules.maps() => {
                return self.grow(want, growth, reason, reclaim);
            }
            Step::Grow(growth, reason) => return self.grow_segment(want, growth, reason, reclaim),
            Step::Supply(growth, reason) => self.supply(want, growth, reason, reclaim)?,
            Step::Reserve(space, bytes) => self.reserve_for(want, (space, bytes), reclaim)?,
            Step::Evict(idle) => self.evict(&idle)?,
            Step::MakeWay(idle) => match self.evict(&idle) {
                Err(Error::Driver(error)) => reclaim.give_up_stitch(error),
                done => done?,
            },
            Step::Shorten(cut) => match self.shorten(cut) {
                // A view that keeps its end stands in nobody's way.
                Err(Error::Driver(error)) => log::debug!("a view was kept: {error}"),
                done => done?,
            },
            Step::Retry => match self.retry_orphaned_handles() {
                // What still cannot be released stays behind.
                Ok(_) | Err(Error::Driver(_)) => {}
                Err(error) => return Err(error),
            },
            Step::Release(plan) => {
                self.release(plan)?;
            }
            Step::Mark(key) => self.mark_unless_idle(want.stream, key)?,
            Step::HostWait(stream, bound, event) => self.host_wait(stream, bound, event)?,
            Step::Hook(hook, bytes) => {
                hook.run(bytes);
                // What it freed may be the driver's again, without having been ours.
                self.lock().physical.full_at = None;
            }
            Step::Synchronise => match self.synchronise(false) {
                // The step is not there while something captures.
                Err(Error::Capturing { .. }) => {}
                done => done?,
            },
            // Taken under the lock.
            Step::Take(_)
            | Step::Wait(_)
            | Step::Place(_)
            | Step::View(_)
            | Step::Flush
            | Step::EmptyCaches
            | Step::AskAgain
            | Step::Fail => {}
        }
        Ok(None)
    }

    /// Reserves so much more address space.
    fn reserve_for(
        &self,
        want: &Want,
        (space, bytes): (SpaceId, u64),
        reclaim: &mut Reclaim<'_>,
    ) -> Result<(), Error> {
        match self.reserve_span(space, bytes) {
            Ok(()) => Ok(()),
            Err(Error::Driver(error)) if space == SpaceId::Views => {
                reclaim.give_up_stitch(error);
                Ok(())
            }
            Err(error) => {
                let mut heap = self.lock();
                match error {
                    Error::Driver(error) if heap.missing(want).is_some() => {
                        reclaim.cramped = true;
                        reclaim.failure = Some(error);
                        Ok(())
                    }
                    // No address space: as good as no memory.
                    Error::Driver(refusal) if refusal.is_out_of_memory() => {
                        let error = heap.out_of_memory(want.requested);
                        drop(heap);
                        Err(self.out_of_memory(error, Some(refusal)))
                    }
                    error => Err(error),
                }
            }
        }
    }

    /// Asks the driver for memory.
    fn grow(
        &self,
        want: &Want,
        mut growth: Growth,
        reason: GrowthReason,
        reclaim: &mut Reclaim<'_>,
    ) -> Result<Option<u32>, Error> {
        // Their events may have no other holder by the end, and are not destroyed under the lock.
        let waits = std::mem::take(&mut growth.waits);
        match self.map(growth.addr, &growth.sizes) {
            Ok(handles) => {
                // Before anything is cut: if one fails, each part is what it was.
                let waited = self.queue_waits(want.stream, &waits);
                drop(waits);
                let mut heap = self.lock();
                let bytes = growth.bytes();
                let id = match &waited {
                    Ok(()) => Some(heap.grown(want, &growth, &handles)),
                    Err(_) => {
                        heap.ungrown(want, growth, &handles);
                        None
                    }
                };
                heap.note_growth(reason, want, bytes);
                waited.map(|()| id)
            }
            Err(failure) => {
                drop(waits);
                self.not_grown(growth, failure, reclaim)?;
                Ok(None)
            }
        }
    }

    /// Asks the driver for free memory.
    fn supply(
        &self,
        want: &Want,
        growth: Growth,
        reason: GrowthReason,
        reclaim: &mut Reclaim<'_>,
    ) -> Result<(), Error> {
        match self.map(growth.addr, &growth.sizes) {
            Ok(handles) => {
                let mut heap = self.lock();
                heap.supplied(want, &growth, &handles);
                heap.note_growth(reason, want, growth.bytes());
                Ok(())
            }
            Err(failure) => self.not_grown(growth, failure, reclaim),
        }
    }

    /// The driver had no memory for a growth.
    fn not_grown(
        &self,
        growth: Growth,
        failure: GrowthFailure,
        reclaim: &mut Reclaim<'_>,
    ) -> Result<(), Error> {
        let (error, asked) = (failure.error, growth.bytes());
        let free = self.driver_free(error);
        let mut heap = self.lock();
        heap.growth_failed(growth, failure);
        self.refused(&mut heap, error, free.min(asked - 1), reclaim)
    }

    /// Asks the driver for a segment.
    fn grow_segment(
        &self,
        want: &Want,
        growth: Growth,
        reason: GrowthReason,
        reclaim: &mut Reclaim<'_>,
    ) -> Result<Option<u32>, Error> {
        let bytes = growth.bytes();
        let made = self
            .context
            .enter()
            .and_then(|entered| entered.mem_alloc(bytes as usize));
        let free = made
            .as_ref()
            .err()
            .map_or(0, |error| self.driver_free(*error));
        let mut heap = self.lock();
        heap.physical.planned -= bytes;
        match made {
            Ok(addr) => {
                let id = heap.segment(want, addr, bytes);
                heap.note_growth(reason, want, bytes);
                Ok(id)
            }
            Err(error) => {
                self.refused(&mut heap, error, free.min(bytes - 1), reclaim)?;
                Ok(None)
            }
        }
    }

    /// What the driver has left after a refusal; 0 if it does not say, or refused for another
    /// reason.
    pub(crate) fn driver_free(&self, error: crate::driver::DriverError) -> u64 {
        if !error.is_out_of_memory() {
            return 0;
        }
        let info = self.context.enter().and_then(|entered| entered.mem_info());
        info.map_or(0, |info| info.free)
    }

    /// The driver refused. Want of memory below our own limit counts as a limit reached, until
    /// something is given back; anything else is an error.
    pub(crate) fn refused(
        &self,
        heap: &mut Heap,
        error: crate::driver::DriverError,
        free: u64,
        reclaim: &mut Reclaim<'_>,
    ) -> Result<(), Error> {
        if !error.is_out_of_memory() {
            return Err(self.error(error));
        }
        heap.stats.retries += 1;
        heap.physical.full_at = Some(heap.held() + free);
        reclaim.answer = Answer::Refused(error);
        Ok(())
    }
}
