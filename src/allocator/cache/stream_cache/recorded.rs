//! What a recording is told of a stream cache.

use crate::allocator::cache::stream_cache::{
    CachedBlock, Inner, Life, Node, Owner, Small, StreamCache, Taken,
};
use crate::driver::process;
use crate::event::Kind;

impl StreamCache {
    /// [`free_told`](Inner::free_told) of a block with an owner while a recording runs, if nobody is at the stream cache
    /// and the recording is told with a few words. Else the block is live still.
    #[inline(always)]
    pub(crate) fn free_recorded(&self, node: Node, at: &u64, generation: &u32) -> bool {
        let Some(mut inner) = self.try_lock() else {
            return false;
        };
        let Some(place) = inner.tap.place() else {
            return false;
        };
        // Read from the block where they are needed: what has to be kept in between costs more.
        let life = Life::Generation(*generation);
        let Some(live) = inner.freed_at_once(node, life) else {
            return false;
        };
        let freed = (Kind::Free, *at, live.requested.into());
        // SAFETY: it is the tap's place: nobody else was at it since.
        unsafe { inner.tap.put_own(place, freed) };
        true
    }
}

impl Inner {
    /// [`take_anywhere`](Self::take_anywhere) of a run at hand while a recording runs, if that is told with a few words.
    #[inline(always)]
    pub(crate) fn take_recorded(&mut self, owner: Owner, request: Small) -> Option<Taken> {
        let bytes = request.bytes();
        let fits = self.serves(owner) && self.runs.accounts.allocated.fits(bytes);
        if !fits {
            return None;
        }
        let place = self.tap.place()?;
        let taken = self.runs.take_quick(request.granules, request.requested)?;
        self.account(bytes, request.requested);
        let event = (Kind::Allocate, taken.ptr, request.requested.into());
        // SAFETY: it is the tap's place: nobody else was at it since.
        let context = unsafe { self.tap.put_own(place, event) };
        self.note_context(&taken, context);
        Some(taken)
    }

    /// Notes the context that a block was taken in.
    #[inline(always)]
    fn note_context(&mut self, taken: &Taken, context: u32) {
        if context != 0
            && let Some(names) = self.runs.names_mut(taken.node, taken.generation)
        {
            names.context = context as u16;
        }
    }

    #[inline(always)]
    fn tell(&mut self, kind: Kind, at: u64, bytes: u64) -> u32 {
        self.tap.push_own((kind, at, bytes))
    }

    /// A block was taken.
    #[inline(always)]
    pub(crate) fn tell_taken(&mut self, taken: &Taken, requested: u32) {
        if process::is_recording() {
            let context = self.tell(Kind::Allocate, taken.ptr, requested.into());
            self.note_context(taken, context);
        }
    }

    /// A block was freed.
    #[inline(always)]
    pub(crate) fn tell_freed(&mut self, at: u64, requested: u32) {
        if process::is_recording() {
            self.tell(Kind::Free, at, requested.into());
        }
    }

    /// A large block was handed out again.
    #[inline]
    pub(crate) fn tell_large(&mut self, block: &CachedBlock) {
        if process::is_recording() {
            let context = self.tell(Kind::Allocate, block.ptr, block.requested);
            if context != 0
                && let Some(names) = self.large_cache.names_mut(block.id)
            {
                names.context = context as u16;
            }
        }
    }

    /// [`free_at_once`](Inner::free_at_once) of a block at an address while a recording may run.
    #[inline(always)]
    pub(crate) fn free_told(&mut self, node: Node, life: Life, at: u64) -> bool {
        let freed = self.freed_at_once(node, life);
        if let Some(live) = freed {
            self.tell_freed(at, live.requested);
        }
        freed.is_some()
    }

    /// Takes a live large block back into the large-block cache, with a generation only that life of it. `None` if
    /// it is not there; whether it was live.
    #[inline]
    pub(crate) fn put_large(&mut self, id: u32, generation: Option<u32>) -> Option<bool> {
        let before = match process::is_recording() {
            true => self.large_cache.find(id).copied(),
            false => None,
        };
        let put = self.large_cache.put(id, generation);
        if put == Some(true)
            && let Some(block) = before
        {
            self.tell(Kind::Free, block.ptr, block.requested);
        }
        put
    }
}
