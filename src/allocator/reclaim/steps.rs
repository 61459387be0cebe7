//! From a request to memory: the ladder that a miss climbs.
//!
//! Each rung is tried only when those below have nothing, and after a rung that changed something
//! the climb begins again at the first. Driver calls happen without the lock; what they work on is
//! claimed before, so that nobody else can touch it, and put back if they fail.

use crate::allocator::engine::{Engine, Guard};
use crate::allocator::error::Error;
use crate::allocator::extent::plan::Growth;
use crate::allocator::extent::record::SpaceId;
use crate::allocator::extent::space::Shard;
use crate::allocator::extent::want::Want;
use crate::allocator::heap::State;
use crate::allocator::heap::figures::free_among;
use crate::allocator::physical::GrowthFailure;
use crate::allocator::reclaim::climb::{Climb, Step};
use crate::allocator::report::GrowthReason;
use crate::allocator::stream::answers::is_void_wait;

/// So many markers that stand for nothing may stand in the way of a request.
const VOID_WAITS: u32 = 16;

impl Engine {
    /// Finds or makes room for a request. The extent comes back claimed, ready for its
    /// stream, with whether the ladder had to be climbed for it.
    pub(crate) fn obtain<'a>(
        &'a self,
        mut state: Guard<'a>,
        want: &Want,
    ) -> Result<(Guard<'a>, u32, bool), Error> {
        if state.streams.several() {
            state = self.poll_for(state, want.stream)?;
        } else {
            state.extents.adopt_complete(want.space, want.stream);
        }
        state.physical.large_request(want);
        let mut climb = Climb::default();
        let mut void = 0;
        loop {
            let step = self.next_step(&mut state, want, &mut climb);
            let taken;
            (state, taken) = match self.take_step(state, want, step, &mut climb) {
                // The marker is gone that it was about, and stood for nothing.
                Err(Error::Driver(error)) if is_void_wait(&error) && void < VOID_WAITS => {
                    void += 1;
                    (self.poll_for(self.lock(), want.stream)?, None)
                }
                step => step?,
            };
            if let Some(id) = taken {
                return Ok((state, id, climb.missed));
            }
        }
    }

    /// Takes a step of the climb, with the extent if that found or made one.
    fn take_step<'a>(
        &'a self,
        mut state: Guard<'a>,
        want: &Want,
        step: Step,
        climb: &mut Climb,
    ) -> Result<(Guard<'a>, Option<u32>), Error> {
        climb.note(&step);
        let state = match step {
            Step::Take(run) => {
                let id = state.take(want, run);
                state.stats.rungs.ready += u64::from(id.is_some());
                return Ok((state, id));
            }
            Step::Wait(run) => {
                let claimed = state.claim_run(want, run);
                return self.wait_for(state, want, claimed);
            }
            Step::Place(place) => {
                let claimed = state.claim(want.space, place.first, place.skip, want.granules);
                return self.wait_for(state, want, claimed);
            }
            Step::View(run) => return self.take_in_view(state, want, run),
            Step::Stitch(stitch) => {
                let (state, id) = self.stitch(state, want, *stitch, climb)?;
                climb.unstitched = id.is_none();
                return Ok((state, id));
            }
            Step::Grow(growth) => return self.grow(state, want, growth, climb),
            Step::Supply(growth) => self.supply(state, want, growth, climb)?,
            Step::Reserve(space, bytes) => self.reserve_for(state, want, (space, bytes), climb)?,
            Step::Evict(idle) => self.apart(state, || self.evict(&idle))?,
            Step::MakeWay(idle) => self.make_way(state, &idle, climb)?,
            Step::Shorten(cut) => self.apart(state, || match self.shorten(cut) {
                // A view that keeps its end stands in nobody's way.
                Err(Error::Driver(error)) => {
                    log::debug!("a view was kept: {error}");
                    Ok(())
                }
                done => done,
            })?,
            Step::Settle => self.settle_for(state, want)?,
            Step::Flush => {
                state.stats.rungs.flushed += u64::from(state.flush_fronts());
                state
            }
            Step::Retry => self.apart(state, || match self.retry_strays() {
                // What still cannot be released stays behind.
                Ok(_) | Err(Error::Driver(_)) => Ok(()),
                Err(error) => Err(error),
            })?,
            Step::Release(plan) => {
                state.stats.rungs.released += 1;
                self.apart(state, || self.release(plan).map(drop))?
            }
            Step::Mark => {
                let key = state.streams[want.stream].key;
                self.apart(state, || self.mark_unless_idle(want.stream, key))?
            }
            Step::AskAgain => {
                state.physical.full_at = None;
                state
            }
            Step::HostWait(stream, bound, event) => {
                state.stats.rungs.host_waits += 1;
                self.apart(state, || self.host_wait(stream, bound, event))?
            }
            Step::Hook(hook, bytes) => {
                state.stats.rungs.hooks += 1;
                drop(state);
                hook.run(bytes);
                state = self.lock();
                // What it freed may be the driver's again, without having been ours.
                state.physical.full_at = None;
                state
            }
            Step::Synchronise => {
                state.stats.rungs.synchronised += 1;
                self.apart(state, || match self.synchronise(false) {
                    // The rung is not there while something captures.
                    Err(Error::Capturing { .. }) => Ok(()),
                    done => done,
                })?
            }
            Step::Fail => {
                state.stats.misses += 1;
                state.stats.ooms += 1;
                // The next request asks the driver anew: others may have freed meanwhile.
                state.physical.full_at = None;
                return Err(self.out_of_memory(state, want, climb.refusal.or(climb.failure)));
            }
        };
        Ok((state, None))
    }

    /// Does something without the lock.
    fn apart<'a>(
        &'a self,
        state: Guard<'a>,
        work: impl FnOnce() -> Result<(), Error>,
    ) -> Result<Guard<'a>, Error> {
        drop(state);
        work()?;
        Ok(self.lock())
    }

    /// Has the stream wait for what it needs of a claimed extent, which goes back if it cannot.
    fn wait_for<'a>(
        &'a self,
        mut state: Guard<'a>,
        want: &Want,
        claimed: Option<(u32, Vec<Shard>)>,
    ) -> Result<(Guard<'a>, Option<u32>), Error> {
        let Some((id, shards)) = claimed else {
            return Ok((state, None));
        };
        let waits = state.streams.waits_for(want.stream, &shards);
        if waits.is_empty() {
            return Ok((state, Some(id)));
        }
        drop(state);
        let waited = self.queue_waits(want.stream, &waits);
        drop(waits);
        state = self.lock();
        if let Err(error) = waited {
            state.restore(want.space, id, shards);
            return Err(error);
        }
        Ok((state, Some(id)))
    }

    /// Reserves so much more address space.
    fn reserve_for<'a>(
        &'a self,
        state: Guard<'a>,
        want: &Want,
        (space, bytes): (SpaceId, u64),
        climb: &mut Climb,
    ) -> Result<Guard<'a>, Error> {
        drop(state);
        let reserved = self.reserve_span(space, bytes);
        let mut state = self.lock();
        match reserved {
            Ok(()) => Ok(state),
            // Without addresses for a view there is always growth.
            Err(Error::Driver(error)) if space == SpaceId::Views => {
                climb.unstitched = true;
                climb.failure = Some(error);
                Ok(state)
            }
            Err(Error::Driver(error)) if state.missing(want).is_some() => {
                climb.cramped = true;
                climb.failure = Some(error);
                Ok(state)
            }
            Err(error) => match error.driver_error() {
                // No address space: as good as no memory.
                Some(refusal) if refusal.is_out_of_memory() => {
                    state.stats.misses += 1;
                    state.stats.ooms += 1;
                    Err(self.out_of_memory(state, want, Some(refusal)))
                }
                _ => Err(error),
            },
        }
    }

    /// Lets idle views go for their addresses.
    fn make_way<'a>(
        &'a self,
        state: Guard<'a>,
        idle: &[u64],
        climb: &mut Climb,
    ) -> Result<Guard<'a>, Error> {
        self.apart(state, || match self.evict(idle) {
            // Without addresses for a view there is always growth.
            Err(Error::Driver(error)) => {
                climb.unstitched = true;
                climb.failure = Some(error);
                Ok(())
            }
            done => done,
        })
    }

    /// Takes off the shelves what nobody holds, and sees what is complete by now: of the asking stream, too,
    /// for what only complete memory is good for.
    fn settle_for<'a>(&'a self, mut state: Guard<'a>, want: &Want) -> Result<Guard<'a>, Error> {
        if state.settle_shelves() {
            state = self.mark_due(state, want.stream);
            state = self.poll_for(state, want.stream)?;
        }
        self.mark_full(state, |stream| stream == want.stream)
    }

    /// Asks the driver for memory.
    fn grow<'a>(
        &'a self,
        state: Guard<'a>,
        want: &Want,
        mut growth: Growth,
        climb: &mut Climb,
    ) -> Result<(Guard<'a>, Option<u32>), Error> {
        let reason = state.growth_reason(want, free_among(&growth.shards));
        drop(state);
        if !self.packed {
            return self.grow_segment(want, growth, reason, climb);
        }
        // Their events may have no other holder by the end, and are not destroyed under the lock.
        let waits = std::mem::take(&mut growth.waits);
        match self.map(growth.addr, &growth.sizes) {
            Ok(handles) => {
                // Before anything is cut: if one fails, each part is what it was.
                let waited = self.queue_waits(want.stream, &waits);
                drop(waits);
                let mut state = self.lock();
                let bytes = growth.bytes();
                let id = match &waited {
                    Ok(()) => Some(state.grown(want, &growth, &handles)),
                    Err(_) => {
                        state.ungrown(want, growth, &handles);
                        None
                    }
                };
                state.note_growth(reason, want, bytes);
                waited.map(|()| (state, id))
            }
            Err(failure) => {
                drop(waits);
                Ok((self.not_grown(growth, failure, climb)?, None))
            }
        }
    }

    /// Asks the driver for free memory.
    fn supply<'a>(
        &'a self,
        state: Guard<'a>,
        want: &Want,
        growth: Growth,
        climb: &mut Climb,
    ) -> Result<Guard<'a>, Error> {
        let reason = state.growth_reason(want, 0);
        drop(state);
        match self.map(growth.addr, &growth.sizes) {
            Ok(handles) => {
                let mut state = self.lock();
                state.supplied(want, &growth, &handles);
                state.note_growth(reason, want, growth.bytes());
                Ok(state)
            }
            Err(failure) => self.not_grown(growth, failure, climb),
        }
    }

    /// The driver had no memory for a growth.
    fn not_grown<'a>(
        &'a self,
        growth: Growth,
        failure: GrowthFailure,
        climb: &mut Climb,
    ) -> Result<Guard<'a>, Error> {
        let (error, asked) = (failure.error, growth.bytes());
        let free = self.driver_free(error);
        let mut state = self.lock();
        state.growth_failed(growth, failure);
        self.refused(&mut state, error, free.min(asked - 1), climb)?;
        Ok(state)
    }

    fn grow_segment<'a>(
        &'a self,
        want: &Want,
        growth: Growth,
        reason: GrowthReason,
        climb: &mut Climb,
    ) -> Result<(Guard<'a>, Option<u32>), Error> {
        let bytes = growth.bytes();
        let made = self
            .context
            .enter()
            .and_then(|entered| entered.mem_alloc(bytes as usize));
        let free = made
            .as_ref()
            .err()
            .map_or(0, |error| self.driver_free(*error));
        let mut state = self.lock();
        state.physical.planned -= bytes;
        match made {
            Ok(addr) => {
                let id = state.segment(want, addr, bytes);
                state.note_growth(reason, want, bytes);
                Ok((state, id))
            }
            Err(error) => {
                self.refused(&mut state, error, free.min(bytes - 1), climb)?;
                Ok((state, None))
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
        state: &mut State,
        error: crate::driver::DriverError,
        free: u64,
        climb: &mut Climb,
    ) -> Result<(), Error> {
        if !error.is_out_of_memory() {
            return Err(self.error(error));
        }
        state.stats.retries += 1;
        state.physical.full_at =
            Some(state.stats.all.reserved.current + state.physical.planned + free);
        climb.refusal = Some(error);
        Ok(())
    }
}
