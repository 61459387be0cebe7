//! Memory at hand: what a cache in front of the allocator asks for.
//!
//! Nothing here grows, waits or gives back, so the caller learns whether its request is a hit.

use crate::allocator::cache::front::{Front, cache};
use crate::allocator::cache::grant::Grant;
use crate::allocator::engine::calls::Call;
use crate::allocator::engine::naming::Named;
use crate::allocator::engine::{Engine, Guard};
use crate::allocator::error::Error;
use crate::allocator::heap::request::Request;
use crate::allocator::stream::slot::StreamKey;

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
