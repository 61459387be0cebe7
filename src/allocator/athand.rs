//! Memory at hand: what a cache in front of the allocator asks for.
//!
//! Nothing here grows, waits or gives back, so the caller learns whether its request is a hit.

use super::engine::{Engine, Guard};
use super::error::Error;
use super::fit::Run;
use super::front::Front;
use super::front::cache;
use super::grant::Grant;
use super::naming::Named;
use super::raw::Call;
use super::request::Request;
use super::size::GRANULE;
use super::slot::StreamKey;
use super::state::State;
use super::want::Want;

impl Engine {
    /// Allocates from memory that the stream may use without a wait: at the first of the addresses
    /// `near` that is free, else the best fit. `None` if there is none. Also returns which of the
    /// addresses lie in free memory still.
    pub(crate) fn allocate_at_hand(
        &self,
        named: &Named<'_>,
        bytes: usize,
        alignment: usize,
        near: &[u64],
    ) -> Result<(Option<Grant>, Vec<u64>), Error> {
        let request = Request::new(bytes, alignment)?;
        if let Some(small) = self.small_request(&request)
            && let StreamKey::Id(key) = named.key
            && let Some(found) = self.small_near(key, small, near)
        {
            return Ok(found);
        }
        drop(self.open()?);
        self.refuse_capture(named)?;
        self.free_deferred();
        let (mut state, stream) = self.slot(self.open()?, named)?;
        self.same_device(&state, stream)?;
        if state.closed {
            return Err(Error::Closed);
        }
        // Nothing is announced before there is a block: a request for what is at hand may find none.
        let call = Call::begin(self, &mut state, stream, 0);
        let front = state.front_of(stream, cache::thread_number());
        let (mut state, found, free) = match self.small_request(&request) {
            Some(small) => {
                if let StreamKey::Id(key) = named.key {
                    cache::remember(key, front);
                }
                let (state, found) = self.take_small(state, front, small, near)?;
                let free = near.iter().copied();
                (
                    state,
                    found,
                    free.filter(|at| self.is_free_small(*at)).collect(),
                )
            }
            None => self.take_on(state, front, &request, near)?,
        };
        call.end(&mut state);
        Ok((found, free))
    }

    fn take_on<'a>(
        &'a self,
        mut state: Guard<'a>,
        front: &'static Front,
        request: &Request,
        near: &[u64],
    ) -> Result<(Guard<'a>, Option<Grant>, Vec<u64>), Error> {
        let space = state.space_of(request);
        let stream = front.lock().slot;
        state.unshelve_loose();
        state.settle_shelves_of(stream);
        let want = request.want(space, stream);
        let mut found = state.take_near(&want, near);
        if found.is_none() && (!near.is_empty() || state.best(&want).is_none()) {
            // Memory that other streams used may be free by now.
            state.streams.ask_again();
            state = self.poll_for(state, stream)?;
            found = state.take_near(&want, near);
        }
        let mut found = found.or_else(|| state.take_best(&want));
        if found.is_none()
            && let Some(run) = self.view_at_hand(&state, &want)
        {
            (state, found) = self.take_in_view(state, &want, run)?;
        }
        let free = near.iter().copied();
        let free = free.filter(|addr| state.extents.piece_around(space, *addr).is_some());
        let free = free.collect();
        let Some(id) = found else {
            return Ok((state, None, free));
        };
        state.stats.hits += 1;
        state.announce(want.requested);
        let grant = state.granted(id, stream, want.requested, front);
        Ok((state, Some(grant), free))
    }
}

impl State {
    fn take_near(&mut self, want: &Want, near: &[u64]) -> Option<u32> {
        let id = near.iter().find_map(|addr| self.take_at(want, *addr))?;
        self.stats.rungs.ready += 1;
        Some(id)
    }

    fn best(&mut self, want: &Want) -> Option<Run> {
        if !self.streams.several() {
            self.extents.adopt_complete(want.space, want.stream);
        }
        self.finder(want.space, want.stream)?.ready_run(want)
    }

    pub(crate) fn take_best(&mut self, want: &Want) -> Option<u32> {
        let run = self.best(want)?;
        let id = self.take(want, run)?;
        self.stats.rungs.ready += 1;
        Some(id)
    }

    /// Takes a request at an address, if that lies in a free piece which is ready.
    fn take_at(&mut self, want: &Want, addr: u64) -> Option<u32> {
        if !addr.is_multiple_of(u64::from(want.align) * GRANULE) {
            return None;
        }
        let first = self.extents.piece_around(want.space, addr)?;
        if !self.finder(want.space, want.stream)?.ready(first) {
            return None;
        }
        let hot = self.extents.records[first];
        let skip = ((addr - hot.addr) / GRANULE) as u32;
        let left = hot.granules - skip;
        if left < want.granules {
            return None;
        }
        if skip == 0 {
            let run = Run {
                first,
                addr,
                granules: u64::from(left),
            };
            return self.take(want, run);
        }
        let granules = self.granules_of(want, u64::from(left));
        let (id, _) = self.claim(want.space, first, skip, granules)?;
        Some(id)
    }
}
