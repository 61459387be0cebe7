//! What a recording is told of a stream cache.

use crate::allocator::cache::stream_cache::{CachedBlock, Inner, Life, Node, Taken};
use crate::driver::process;
use crate::event::{Event, Kind};

impl Inner {
    #[inline]
    fn tell(&mut self, kind: Kind, at: u64, bytes: u64) {
        let (stream, allocator) = (self.slot, self.allocator);
        self.tap.push(Event {
            kind,
            at,
            bytes,
            stream,
            allocator,
        });
    }

    /// A block was taken.
    #[inline(always)]
    pub(crate) fn tell_taken(&mut self, taken: &Taken, requested: u32) {
        if process::is_recording() {
            self.tell(Kind::Allocate, taken.ptr, requested.into());
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
            self.tell(Kind::Allocate, block.ptr, block.requested);
        }
    }

    /// [`free_at_once`](Inner::free_at_once) while a recording may run.
    #[inline]
    pub(crate) fn free_seen(&mut self, node: Node, life: Life) -> bool {
        let live = match process::is_recording() {
            true => self.live_in(node, life),
            false => None,
        };
        let freed = self.free_at_once(node, life);
        if freed && let Some(live) = live {
            let at = self.runs.address(node);
            self.tell_freed(at, live.requested);
        }
        freed
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
