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
        let (mut heap, stream) = self.slot(self.open()?, named)?;
        self.same_device(&heap, stream)?;
        if heap.closed {
            return Err(Error::Closed);
        }
        // Nothing is announced before there is a block: a request for what is at hand may find none.
        let call = Call::begin(self, &mut heap, stream, 0);
        let front = heap.front_of(stream, cache::thread_number());
        let (mut heap, found, free) = match self.small_request(&request) {
            Some(small) => {
                if let StreamKey::Id(key) = named.key {
                    cache::remember(key, front);
                }
                let (heap, found) = self.take_small(heap, front, small, near)?;
                let free = near.iter().copied();
                (
                    heap,
                    found,
                    free.filter(|at| self.is_free_small(*at)).collect(),
                )
            }
            None => self.take_on(heap, front, &request, near)?,
        };
        call.end(&mut heap);
        Ok((found, free))
    }

    fn take_on<'a>(
        &'a self,
        mut heap: Guard<'a>,
        front: &'static Front,
        request: &Request,
        near: &[u64],
    ) -> Result<(Guard<'a>, Option<Grant>, Vec<u64>), Error> {
        let space = heap.space_of(request);
        let stream = front.lock().slot;
        heap.unshelve_loose();
        heap.settle_shelves_of(stream);
        let want = request.want(space, stream);
        let mut found = heap.take_near(&want, near);
        if found.is_none() && (!near.is_empty() || heap.best(&want).is_none()) {
            // Memory that other streams used may be free by now.
            heap.streams.ask_again();
            heap = self.poll_for(heap, stream)?;
            found = heap.take_near(&want, near);
        }
        let mut found = found.or_else(|| heap.take_best(&want));
        if found.is_none()
            && let Some(run) = self.view_at_hand(&heap, &want)
        {
            (heap, found) = self.take_in_view(heap, &want, run)?;
        }
        let free = near.iter().copied();
        let free = free.filter(|addr| heap.extents.piece_around(space, *addr).is_some());
        let free = free.collect();
        let Some(id) = found else {
            return Ok((heap, None, free));
        };
        heap.stats.hits += 1;
        heap.announce(want.requested);
        let grant = heap.granted(id, stream, want.requested, front);
        Ok((heap, Some(grant), free))
    }
}
