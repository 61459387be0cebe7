//! A block of device memory that frees itself.

use std::fmt;

use crate::allocator::calls::record;
use crate::driver::{Stream, process, sys};

use crate::allocator::cache::deferred::User;
use crate::allocator::cache::grant::{Grant, Lifetime, Place};
use crate::allocator::cache::stream_cache::{Freed, Held, Inner, Life, Node};
use crate::allocator::debug::Debug;
use crate::allocator::engine::Engine;
use crate::allocator::size;
use crate::error::{Error, Refused};

/// Device memory with one owner. Dropping a block frees it in the order of its stream: work queued before the drop may
/// still use the memory.
///
/// A block is `Send` and `Sync`, because it is an address with a lifetime: the host neither reads nor writes its
/// contents. It may outlive the [`Allocator`](crate::allocator::Allocator) handle that allocated it.
pub struct Block {
    /// Location of the block. It names the block's owning cache, which keeps the allocator alive; a reference count
    /// would be a word that all threads write.
    place: Place,
    requested: usize,
}

// SAFETY: an `Engine` is `Send` and `Sync`, and so are all other fields.
unsafe impl Send for Block {}
// SAFETY: as above.
unsafe impl Sync for Block {}

impl Block {
    #[inline(always)]
    pub(crate) fn new(engine: &Engine, grant: Grant, requested: usize) -> Self {
        debug_assert!(std::ptr::eq(engine, grant.place.home().owner().cast()));
        let rounded = size::round_size(requested);
        debug_assert!(grant.place.wide() || rounded == Some(grant.bytes()));
        Block {
            place: grant.place,
            requested,
        }
    }

    /// The first byte's address, a multiple of 512.
    pub fn ptr(&self) -> sys::CUdeviceptr {
        self.place.ptr
    }

    /// Usable bytes: the requested size rounded up, unless [`DebugModes::guard`](crate::allocator::DebugModes::guard)
    /// reserves the bytes past its end.
    pub fn size(&self) -> u64 {
        if self.engine().debug.as_ref().is_some_and(Debug::guards) {
            return self.requested as u64;
        }
        match self.place.record() {
            Some(id) if self.place.wide() => self
                .engine()
                .readable()
                .map(|s| s.extents.records[id].bytes()),
            _ => None,
        }
        .unwrap_or_else(|| (self.requested as u64).next_multiple_of(size::GRANULE))
    }

    /// Requested bytes.
    pub fn requested(&self) -> usize {
        self.requested
    }

    /// Returns an id and a generation that together identify this allocation: no two blocks of this allocator share the
    /// pair. A record of a large block, or of a page of small ones, is retired after its last generation, 2^31
    /// allocations. Page numbers repeat after 2^24 pages, that is, after 2^55 allocations of small blocks.
    pub fn generation(&self) -> (u32, u32) {
        (self.place.id(&self.engine().pages), self.place.generation)
    }

    pub(crate) fn engine(&self) -> &Engine {
        // SAFETY: the block is live, so its engine is not closed, and its owning cache holds a reference to the engine.
        unsafe { &*self.place.home().owner().cast::<Engine>() }
    }

    fn lifetime(&self) -> Lifetime {
        Lifetime {
            id: self.place.id(&self.engine().pages),
            generation: self.place.generation,
            ptr: self.place.ptr,
        }
    }

    /// Whether the block's own stream has been retired or is about to be. Then a free treats the stream's last marker
    /// as the end of all its work. Otherwise a later marker will follow everything submitted to the stream so far.
    pub(crate) fn stream_retired(&self) -> bool {
        self.engine().stream_retired(&self.lifetime())
    }

    /// Records that another stream uses the block: after the drop it is reused only when everything submitted to that
    /// stream before the drop has completed. In a capture that a graph pool serves, the use takes effect at the end of
    /// the capture.
    ///
    /// # Errors
    /// [`Error::Capturing`] in any other capture; a lost context; driver errors.
    pub fn record_stream(&self, stream: &Stream) -> Result<(), Error> {
        let engine = self.engine();
        record::use_by(engine, self.place.ptr, &engine.named(stream)?, false)
    }

    /// [`record_stream`](Self::record_stream) for memory of a graph pool: if the stream is being captured, the graph keeps
    /// the addresses from here on. Returns false for other memory.
    pub(crate) fn record_in_pool(&self, stream: &Stream) -> Result<bool, Error> {
        let Some(id) = self.place.record() else {
            return Ok(false);
        };
        let (engine, life) = (self.engine(), (id, self.place.generation));
        record::use_in_pool(engine, self.place.ptr, life, &engine.named(stream)?)
    }

    /// Records that another stream has used the block and will not use it again: reuse waits only for the work
    /// submitted to that stream so far.
    ///
    /// # Errors
    /// As [`record_stream`](Self::record_stream).
    pub fn record_use(&self, stream: &Stream) -> Result<(), Error> {
        let engine = self.engine();
        record::use_by(engine, self.place.ptr, &engine.named(stream)?, true)
    }

    /// Frees the block. Unlike a drop, it reports failures and returns the block with the error.
    ///
    /// # Errors
    /// [`Error::Capturing`]; a lost context; driver errors.
    pub fn free(self) -> Result<(), Refused<Block>> {
        match self.try_free() {
            Ok(()) => {
                std::mem::forget(self);
                Ok(())
            }
            Err(error) => Err(Refused::new(self, error)),
        }
    }

    fn try_free(&self) -> Result<(), Error> {
        let engine = self.engine();
        engine.usable()?;
        let place = &self.place;
        match place.node() {
            Some(node) => {
                engine.free_small(place.home(), (node, place.ptr), Some(place.generation))
            }
            None if !engine.needs_checks() && self.free_cached() => Ok(()),
            None => self.keep_engine(|engine, block| engine.free(block.ptr, Some(&block))),
        }
    }

    /// Runs `work`, which may free the block, and keeps the engine alive until it returns: the block may hold the last
    /// reference, and another thread may drop the last allocator.
    fn keep_engine<T>(&self, work: impl FnOnce(&Engine, Lifetime) -> T) -> T {
        let engine = self.engine();
        let keep = engine.keep();
        let done = work(engine, self.lifetime());
        drop(keep);
        done
    }

    fn life(&self) -> Life {
        Life::Generation(self.place.generation)
    }

    /// Frees a small block that the fast path could not free: `locked` is its stream cache if that was tried.
    #[inline(never)]
    fn drop_small(&self, node: Node, locked: Option<Held<'_, Inner>>) {
        let (home, generation) = (self.place.home(), self.place.generation);
        let (mut inner, merged) = match locked {
            Some(mut inner) => {
                let merged = inner.free_merged(node, generation);
                (inner, merged)
            }
            None if !process::is_unwatched() => {
                let engine = self.engine();
                if !engine.free_checked(home, (node, self.place.ptr), self.life()) {
                    self.keep_engine(|engine, block| engine.drop_block(block, Vec::new()));
                }
                return;
            }
            // A free has no stack, so a recording with stacks writes the same record.
            None if home.now().only_records()
                && home.free_recorded(node, &self.place.ptr, &generation) =>
            {
                return;
            }
            None => (home.lock(), None),
        };
        let freed = match merged {
            Some(false) => return,
            Some(true) => Freed::Page,
            None => inner.free(node, self.place.ptr, Some(generation)),
        };
        if freed != Freed::Done {
            self.finish_drop(inner, node, freed);
        }
    }

    /// Completes the steps of a free that the stream cache left to its caller.
    #[cold]
    #[inline(never)]
    fn finish_drop(&self, inner: Held<'_, Inner>, node: Node, freed: Freed) {
        // Once unlocked, the stream cache may be reassigned to another allocator.
        let engine = self.engine();
        // If the block was the last one, only this reference keeps the engine alive from here on.
        let keep = inner.owner.clone();
        drop(inner);
        if keep.is_some() {
            let (home, block) = (self.place.home(), (node, self.place.ptr));
            let done = engine.finish_small(home, block, Some(self.place.generation), freed);
            debug_assert!(done.is_ok(), "a live block is freed: {done:?}");
        }
    }

    /// Frees a large block into the large-block cache of its stream cache; false if the heap must free it.
    fn free_cached(&self) -> bool {
        let id = self.place.cached();
        id.is_some_and(|id| {
            let mut inner = self.place.home().lock();
            inner.is_fast() && inner.put_large(id, Some(self.place.generation)) == Some(true)
        })
    }

    /// Frees a large block, or one that a stream cache cannot free.
    #[inline(never)]
    fn drop_large(&self) {
        let Some(id) = self.place.record() else {
            return;
        };
        let engine = self.engine();
        let done = if engine.is_fast() {
            let life = (id, self.place.generation);
            self.free_cached() || engine.free_large(self.place.ptr, Some(life))
        } else {
            !engine.needs_checks() && self.free_cached()
        };
        if !done {
            self.keep_engine(|engine, block| engine.drop_block(block, Vec::new()));
        }
    }

    /// Like a drop, but frees the block only when all `users` have been recorded or waited for, by this call or a later
    /// one.
    #[cold]
    pub(crate) fn drop_after(self, users: Vec<User>) {
        let block = std::mem::ManuallyDrop::new(self);
        // As soon as the free is deferred, a call on another thread may perform it.
        block.keep_engine(|engine, block| engine.drop_block(block, users));
    }

    /// Gives up ownership: the memory stays allocated until its address is passed to
    /// [`Allocator::free_raw`](crate::allocator::Allocator::free_raw).
    pub fn into_raw(self) -> sys::CUdeviceptr {
        let ptr = self.place.ptr;
        std::mem::forget(self);
        ptr
    }
}

impl Drop for Block {
    #[inline]
    fn drop(&mut self) {
        let Some(node) = self.place.node() else {
            return self.drop_large();
        };
        let home = self.place.home();
        let now = home.now();
        if now.is_normal()
            && let Some(mut inner) = home.try_lock()
        {
            if inner.free_quick(node, self.life()).is_none() {
                self.drop_small(node, Some(inner));
            }
            return;
        }
        let recorded = now.only_records_blocks()
            && home.free_recorded(node, &self.place.ptr, &self.place.generation);
        if !recorded {
            self.drop_small(node, None);
        }
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Block")
            .field("ptr", &format_args!("{:#x}", self.place.ptr))
            .field("size", &self.size())
            .field("requested", &self.requested)
            .finish()
    }
}
