//! Allocation, free and recording by handle and by pointer: what every front end stands on.

use crate::driver::sys;

use super::engine::{Engine, Guard, Named, is_per_thread};
use super::error::Error;
use super::records::{SpaceId, State as Extent};
use super::size::{GRANULE, MAX_ALIGNMENT, round_size};
use super::state::{AfterFree, PAGE_GRANULES, State, Want};
use super::streams::{Holder, StreamKey};

/// A live block as it was handed out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Grant {
    pub id: u32,
    pub generation: u32,
    pub ptr: sys::CUdeviceptr,
    pub bytes: u64,
}

/// An allocation under way. The stream's slot stays the stream's while the lock is let go; what a
/// call announced is withdrawn if it fails, or if a hook of the user panics in it.
pub(crate) struct Call<'a> {
    engine: &'a Engine,
    stream: u32,
    peak: (u64, u64),
}

impl<'a> Call<'a> {
    pub(crate) fn begin(
        engine: &'a Engine,
        state: &mut State,
        stream: u32,
        requested: u64,
    ) -> Self {
        state.streams[stream].calls += 1;
        let peak = state.announce(requested);
        Call {
            engine,
            stream,
            peak,
        }
    }

    /// The call got its block.
    pub(crate) fn end(self, state: &mut State) {
        state.streams[self.stream].calls -= 1;
        std::mem::forget(self);
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        let mut state = self.engine.lock();
        state.streams[self.stream].calls -= 1;
        state.withdraw(self.peak);
    }
}

/// A request whose numbers are in order.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Request {
    requested: u64,
    granules: u32,
    align: u32,
    /// See [`Placement`](super::Placement).
    pub single: bool,
    pub views: bool,
}

impl Request {
    pub(crate) fn new(bytes: usize, alignment: usize) -> Result<Self, Error> {
        if bytes == 0 {
            return Err(Error::InvalidSize { requested: 0 });
        }
        let rounded = round_size(bytes).ok_or(Error::InvalidSize {
            requested: bytes as u64,
        })?;
        if !alignment.is_power_of_two() || alignment as u64 > MAX_ALIGNMENT {
            return Err(Error::InvalidAlignment {
                alignment: alignment as u64,
            });
        }
        let granules = |bytes: u64| u32::try_from(bytes / GRANULE).unwrap_or(u32::MAX);
        Ok(Request {
            requested: bytes as u64,
            granules: granules(rounded),
            align: granules((alignment as u64).max(GRANULE)),
            single: false,
            views: true,
        })
    }

    /// Bytes of a run in which the request surely fits.
    pub(crate) fn span_bytes(&self) -> u64 {
        u64::from(self.granules + self.align - 1) * GRANULE
    }

    pub(crate) fn want(&self, space: SpaceId, stream: u32) -> Want {
        Want {
            space,
            stream,
            granules: self.granules,
            align: self.align,
            requested: self.requested,
            single: self.single,
            views: self.views,
        }
    }
}

impl Engine {
    /// Allocates on a stream.
    pub(crate) fn allocate(
        &self,
        named: &Named<'_>,
        bytes: usize,
        alignment: usize,
    ) -> Result<Grant, Error> {
        self.allocate_request(named, &Request::new(bytes, alignment)?)
    }

    /// [`allocate`](Self::allocate) of a request with wishes.
    pub(crate) fn allocate_request(
        &self,
        named: &Named<'_>,
        request: &Request,
    ) -> Result<Grant, Error> {
        drop(self.open()?);
        self.refuse_capture(named)?;
        self.free_deferred();
        let (mut state, stream) = self.slot(self.open()?, named)?;
        self.same_device(&state, stream)?;
        if state.closed {
            return Err(Error::Closed);
        }
        let call = Call::begin(self, &mut state, stream, request.requested);
        let (mut state, grant) = self.allocate_on(state, stream, request)?;
        call.end(&mut state);
        self.repay(state, stream, grant.bytes);
        Ok(grant)
    }

    fn allocate_on<'a>(
        &'a self,
        state: Guard<'a>,
        stream: u32,
        request: &Request,
    ) -> Result<(Guard<'a>, Grant), Error> {
        let span = request.span_bytes();
        let (mut state, id, missed) = if state.packed && state.is_small(span) {
            self.obtain_in_page(state, &request.want(SpaceId::Pages(stream), stream))?
        } else {
            let space = if !state.packed && state.is_small(span) {
                SpaceId::Small
            } else {
                SpaceId::Large
            };
            self.obtain(state, &request.want(space, stream))?
        };
        if missed {
            state.stats.misses += 1;
        } else {
            state.stats.hits += 1;
        }
        let grant = state.granted(id, stream, request.requested);
        Ok((state, grant))
    }

    /// Finds room in the pages of a stream, with another page if need be.
    fn obtain_in_page<'a>(
        &'a self,
        mut state: Guard<'a>,
        want: &Want,
    ) -> Result<(Guard<'a>, u32, bool), Error> {
        if let Some(id) = state.fit_in_page(want) {
            return Ok((state, id, false));
        }
        if state.waits_in_pages(want.stream) {
            // Blocks that other streams used may be free by now.
            state = self.poll(state)?;
            if let Some(id) = state.fit_in_page(want) {
                return Ok((state, id, false));
            }
        }
        let page = Want {
            space: SpaceId::Small,
            stream: want.stream,
            granules: PAGE_GRANULES,
            // Everything in the arena of pages is a multiple of a page.
            align: 1,
            requested: want.requested,
            single: false,
            views: true,
        };
        let missed;
        let id;
        (state, id, missed) = self.obtain(state, &page)?;
        state.page_taken(id, want.stream);
        match state.fit_in_page(want) {
            Some(id) => Ok((state, id, missed)),
            // A whole page holds every request that comes here.
            None => Err(Error::InvalidSize {
                requested: want.requested,
            }),
        }
    }

    /// The live block that starts at a pointer.
    fn live(&self, state: &State, ptr: sys::CUdeviceptr) -> Result<u32, Error> {
        if let Some(id) = state.lookup.exact(ptr) {
            return Ok(id);
        }
        Err(match self.around(state, ptr) {
            Some(id) => Error::InteriorPointer {
                ptr,
                base: state.records[id].addr,
            },
            None if state.ours(ptr) => Error::NotLive { ptr },
            None => Error::NotOurs { ptr },
        })
    }

    /// The live block around a pointer.
    pub(crate) fn around(&self, state: &State, ptr: sys::CUdeviceptr) -> Option<u32> {
        state
            .lookup
            .at_or_below(ptr)
            .filter(|id| ptr < state.records[*id].end())
    }

    /// Frees the block that starts at a pointer.
    pub(crate) fn free_ptr(&self, ptr: sys::CUdeviceptr) -> Result<(), Error> {
        let mut state = self.open()?;
        let id = self.live(&state, ptr)?;
        let stream = state.records[id].stream;
        if let Some((key, raw)) = state.capture_suspect(stream) {
            let generation = state.records[id].generation;
            drop(state);
            self.refuse_if_capturing(key, raw)?;
            state = self.open()?;
            if state.lookup.exact(ptr) != Some(id) || state.records[id].generation != generation {
                return Err(Error::NotLive { ptr });
            }
        }
        let after = state.free(id);
        drop(state);
        self.finish_free(after);
        Ok(())
    }

    /// Whether a block's life, by its identity, is going on.
    pub(crate) fn is_live(&self, id: u32, generation: u32) -> bool {
        self.lock().is_live((id, generation))
    }

    /// Frees a block by its identity.
    pub(crate) fn free_block(
        &self,
        id: u32,
        generation: u32,
        ptr: sys::CUdeviceptr,
    ) -> Result<(), Error> {
        drop(self.open()?);
        if !self.is_live(id, generation) {
            return Err(Error::NotLive { ptr });
        }
        self.free_ptr(ptr)
    }

    /// Frees a block whose owner went out of scope: what cannot be done now is done later.
    pub(crate) fn drop_block(&self, id: u32, generation: u32) {
        // In a child, after a loss or at exit there is nothing to give back to, and in a child the
        // lock may be held by a thread that does not exist there.
        if self.usable().is_err() {
            return;
        }
        let ptr = match self.lock().records.get(id) {
            Some(hot) if hot.generation == generation => hot.addr,
            _ => return,
        };
        match self.free_block(id, generation, ptr) {
            Ok(()) => {}
            Err(Error::Capturing { .. }) => self.lock().deferred.push((id, generation)),
            // In a child, after a loss or at exit there is nothing to give back to.
            Err(
                Error::ForkedChild | Error::Exiting | Error::ContextLost(_) | Error::NotLive { .. },
            ) => {}
            Err(error) => {
                self.lock().deferred.push((id, generation));
                if let Some(count) = self.log.due() {
                    log::warn!(
                        "a dropped block is freed later, now it could not be ({count} such \
                         events): {error}"
                    );
                }
            }
        }
    }

    fn finish_free(&self, after: AfterFree) {
        if !after.mark.is_empty() {
            self.mark_all(&after.mark);
        }
    }

    fn refuse_if_capturing(&self, key: StreamKey, raw: usize) -> Result<(), Error> {
        self.refuse_capture(&Named {
            key,
            raw: std::ptr::with_exposed_provenance_mut(raw),
            stream: None,
        })
    }

    /// Records a use of a block on another stream: everything that stream is given until the free,
    /// or with `now` only what it was given so far.
    pub(crate) fn record(
        &self,
        ptr: sys::CUdeviceptr,
        named: &Named<'_>,
        now: bool,
    ) -> Result<(), Error> {
        {
            let state = self.open()?;
            if self.around(&state, ptr).is_none() {
                return Err(if state.ours(ptr) {
                    Error::NotLive { ptr }
                } else {
                    Error::NotOurs { ptr }
                });
            }
        }
        self.refuse_capture(named)?;
        let (mut state, stream) = self.slot(self.open()?, named)?;
        let Some(id) = self.around(&state, ptr) else {
            return Err(Error::NotLive { ptr });
        };
        if !now || state.records[id].stream == stream {
            state.record(id, stream, None);
            return Ok(());
        }
        // Covered by the marker below: frees after it get a later ticket.
        let ticket = state.streams[stream].open;
        state.streams[stream].open_uses += 1;
        state.record(id, stream, Some(ticket));
        drop(state);
        self.mark(stream, named.key)
    }

    /// Records the last marker of a stream whose owner is about to destroy it.
    pub(crate) fn retire(&self, named: &Named<'_>) -> Result<(), Error> {
        let stream = self.open()?.streams.find(named.key);
        let Some(stream) = stream else {
            return Err(Error::UnknownStream {
                stream: named.raw as usize,
            });
        };
        self.refuse_capture(named)?;
        self.retire_slot(stream, named.key)
    }
}

impl State {
    /// Whether a block with this identity is live.
    pub(crate) fn is_live(&self, (id, generation): (u32, u32)) -> bool {
        let hot = self.records.get(id);
        hot.is_some_and(|hot| hot.generation == generation && hot.state == Extent::Used)
    }

    /// Makes a taken extent a live block, and says what it is.
    pub(crate) fn granted(&mut self, id: u32, stream: u32, requested: u64) -> Grant {
        self.born(id, stream, requested);
        let hot = &self.records[id];
        Grant {
            id,
            generation: hot.generation,
            ptr: hot.addr,
            bytes: hot.bytes(),
        }
    }

    /// Whether an address lies in memory that the allocator holds.
    pub(crate) fn ours(&self, ptr: u64) -> bool {
        self.holdings
            .range(..=ptr)
            .next_back()
            .is_some_and(|(base, h)| ptr < base + h.bytes)
    }

    /// Whether blocks of a stream's pages wait for other streams.
    fn waits_in_pages(&self, stream: u32) -> bool {
        self.space(SpaceId::Pages(stream)).is_some_and(|s| {
            s.index(stream)
                .is_none_or(|own| own.len() < s.piece_count())
        })
    }

    /// Takes a small request out of its stream's pages.
    pub(crate) fn fit_in_page(&mut self, want: &Want) -> Option<u32> {
        let run = self.finder(want.space, want.stream)?.ready_run(want)?;
        self.take(want, run)
    }

    /// The stream of a block, if it may be asked whether it is capturing.
    fn capture_suspect(&self, stream: u32) -> Option<(StreamKey, usize)> {
        let slot = &self.streams[stream];
        // The per-thread handle would ask about the calling thread's stream.
        let ask = !matches!(slot.holder, Holder::Retired) && !is_per_thread(slot.raw);
        ask.then_some((slot.key, slot.raw))
    }
}
