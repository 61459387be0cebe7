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
        let mut state = self.lock();
        if state.closed || state.orphaned {
            return false;
        }
        if state.free_alone(id, generation) {
            return true;
        }
        self.drop_among(state, id, generation)
    }

    /// Goes on where others are to be thought of.
    #[inline(never)]
    fn drop_among(&self, mut state: Guard<'_>, id: u32, generation: u32) -> bool {
        if !state.is_live((id, generation)) || state.extents.records[id].shelved {
            return false;
        }
        let after = state.free(id);
        self.finish_free(state, &after);
        true
    }
}
