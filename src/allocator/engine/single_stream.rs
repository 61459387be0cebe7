//! Large blocks that come and go without anything else to do, as almost all of them do.
//!
//! While a stream is alone, all free memory is its own and merged, so the best fit is one look into
//! one index, and nothing is to be asked or waited for. What [`Engine::obtain`] would do for such a
//! request is done here in one go, to the same end: same place, same figures.

use crate::allocator::engine::{Engine, Guard};

impl Engine {
    /// Frees a large block in the books, if that needs no look at anything else: neither the shelves, nor
    /// captures, nor what comes after the last block. False, with nothing changed, if it does.
    #[inline(never)]
    pub(crate) fn drop_large(&self, id: u32, generation: u32) -> bool {
        let mut heap = self.lock();
        if heap.closed || heap.orphaned {
            return false;
        }
        if heap.free_alone(id, generation) {
            return true;
        }
        self.drop_among(heap, id, generation)
    }

    /// Goes on where others are to be thought of.
    #[inline(never)]
    fn drop_among(&self, mut heap: Guard<'_>, id: u32, generation: u32) -> bool {
        if !heap.is_live((id, generation)) || heap.extents.records[id].shelved {
            return false;
        }
        let after = heap.free(id);
        self.finish_free(heap, &after);
        true
    }
}
