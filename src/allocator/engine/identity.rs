//! Small blocks by their identity, for those who hold neither a handle nor an owner.

use crate::allocator::cache::grant::Lifetime;
use crate::allocator::cache::stream_cache::{Life, SMALL_ID, page_of};
use crate::allocator::engine::Engine;

impl Engine {
    /// Frees a block by its identity, if that is a live small one and its stream cache can do it without a
    /// look at anything else. False, with nothing changed, if not.
    #[inline(always)]
    pub(crate) fn free_at_once(&self, block: &Lifetime) -> bool {
        if block.id & SMALL_ID == 0 || !self.unwatched() {
            return false;
        }
        let Some((cache, node)) = self.small_at(block.ptr) else {
            return false;
        };
        let mut inner = cache.lock();
        // The page may have gone, and another have its place.
        inner.runs.is_numbered(node, page_of(block.id))
            && inner
                .live(node, block.ptr, Some(block.generation))
                .is_some()
            && inner.free_at_once(node, Life::Generation(block.generation))
    }
}
