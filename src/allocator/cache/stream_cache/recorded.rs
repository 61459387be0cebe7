//! The events that stream caches write to a recording.

use crate::allocator::cache::stream_cache::{
    CachedBlock, Inner, Life, Node, Owner, Small, StreamCache, Taken,
};
use crate::driver::process;
use crate::event::Kind;

impl StreamCache {
    /// [`free_quick`](Inner::free_quick) for a block with an owner while a recording is in progress, if the stream
    /// cache is not locked and a compact record suffices. Otherwise the block stays live.
    #[inline(always)]
    pub(crate) fn free_recorded(&self, node: Node, at: &u64, generation: &u32) -> bool {
        let Some(mut inner) = self.try_lock() else {
            return false;
        };
        let Some(place) = inner.event_writer.place() else {
            return false;
        };
        // Read from the block where it is needed, because keeping the value costs more.
        let life = Life::Generation(*generation);
        let Some(live) = inner.free_quick(node, life) else {
            return false;
        };
        let freed = (Kind::Free, *at, live.requested.into());
        // SAFETY: `place` belongs to the event writer, and the lock has been held since it was obtained.
        unsafe { inner.event_writer.put_own(place, freed) };
        true
    }
}

impl Inner {
    /// [`take_anywhere`](Self::take_anywhere) for a quick run while a recording is in progress, if a compact record
    /// suffices.
    #[inline(always)]
    pub(crate) fn take_recorded(&mut self, owner: Owner, request: Small) -> Option<Taken> {
        let bytes = request.bytes();
        let fits = self.serves(owner) && self.runs.accounts.allocated.fits(bytes);
        if !fits {
            return None;
        }
        let place = self.event_writer.place()?;
        let taken = self.runs.take_quick(request.granules, request.requested)?;
        self.account(bytes, request.requested);
        let event = (Kind::Allocate, taken.ptr, request.requested.into());
        // SAFETY: `place` belongs to the event writer, and the lock has been held since it was obtained.
        let context = unsafe { self.event_writer.put_own(place, event) };
        self.note_context(&taken, context);
        Some(taken)
    }

    /// Stores the context in which a block was allocated.
    #[inline(always)]
    fn note_context(&mut self, taken: &Taken, context: u32) {
        if context != 0
            && let Some(names) = self.runs.names_mut(taken.node, taken.generation)
        {
            names.context = context as u16;
        }
    }

    /// Records an allocated block.
    #[inline(always)]
    pub(crate) fn record_allocation(&mut self, taken: &Taken, requested: u32) {
        if process::is_recording() {
            let context = self
                .event_writer
                .push_own((Kind::Allocate, taken.ptr, requested.into()));
            self.note_context(taken, context);
        }
    }

    /// Records a freed block.
    #[inline(always)]
    pub(crate) fn record_free(&mut self, at: u64, requested: u32) {
        if process::is_recording() {
            self.event_writer
                .push_own((Kind::Free, at, requested.into()));
        }
    }

    /// Records that a large block was allocated again.
    #[inline]
    pub(crate) fn record_reuse(&mut self, block: &CachedBlock) {
        if process::is_recording() {
            let context = self
                .event_writer
                .push_own((Kind::Allocate, block.ptr, block.requested));
            if context != 0
                && let Some(names) = self.large_cache.names_mut(block.id)
            {
                names.context = context as u16;
            }
        }
    }

    /// Frees a live large block into the large-block cache; with a generation, only if the block still has it. Returns
    /// whether it was live; `None` if it is not there.
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
            self.event_writer
                .push_own((Kind::Free, block.ptr, block.requested));
        }
        put
    }
}
