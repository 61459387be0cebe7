//! Carving while one stream owns all free memory, and coalescing of blocks that one stream used.
//!
//! The result equals that of [`Space`] for any uses and any number of streams, with fewer checks.

use crate::allocator::extent::index::{Entry, FreeIndex};
use crate::allocator::extent::record::{NIL, Records, State};
use crate::allocator::extent::space::{Space, class_of, cut};
use crate::allocator::extent::uses::{Use, Uses};

impl Space {
    /// Whether all free pieces are pending on one stream alone.
    #[inline]
    pub(crate) fn has_only(&self, stream: u32) -> bool {
        let own = self.pending.get(stream as usize);
        own.map_or(0, FreeIndex::len) == self.count
    }

    /// Takes `granules` from the front of the best fit among the pieces of one stream, the lowest address on ties.
    /// Returns `None` and changes nothing if no piece fits, or pieces of another class exist.
    pub(crate) fn carve_own(
        &mut self,
        records: &mut Records,
        stream: u32,
        granules: u32,
    ) -> Option<Entry> {
        if !self.has_only(stream) {
            return None;
        }
        let own = self.pending.get_mut(stream as usize)?;
        let entry = own.take_best_fit(granules)?;
        match cut(records, entry.id, granules) {
            Some(rest) => own.insert(rest),
            None => self.count -= 1,
        }
        Some(Entry { granules, ..entry })
    }

    /// [`release`](Self::release) for a block whose only use is `last`, the newest on its stream. `freed` is the number
    /// of the free.
    pub(crate) fn release_own(&mut self, records: &mut Records, id: u32, last: Use, freed: u64) {
        let (class, any_use) = (last.stream, self.merge_own);
        let merges = |records: &Records, id: u32| {
            id != NIL && {
                let hot = &records[id];
                let own = hot.is_free() && hot.stream == class;
                own && (any_use || records.cold(id).uses == Uses::One(last))
            }
        };
        let hot = &mut records[id];
        hot.state = State::Free;
        hot.stream = class;
        let (prev, next) = (hot.prev, hot.next);
        let at = class as usize;
        if at >= self.pending.len() {
            self.pending.resize_with(at + 1, FreeIndex::default);
        }
        let index = &mut self.pending[at];
        debug_assert!(
            [prev, next].iter().all(|at| !merges(records, *at)
                || class_of(&records.cold(*at).uses) == class
                    && records.cold(*at).uses.as_slice()[0].ticket <= last.ticket),
            "the newest use of all"
        );
        self.count += 1;
        let mut head = id;
        if merges(records, prev) {
            self.count -= 1;
            let found = index.remove(&Self::entry(records, prev).1);
            debug_assert!(found, "a free piece is in the index of its class");
            head = prev;
            records.join_next(head);
        }
        if merges(records, next) {
            self.count -= 1;
            let found = index.remove(&Self::entry(records, next).1);
            debug_assert!(found, "a free piece is in the index of its class");
            records.join_next(head);
        }
        let cold = records.cold_mut(head);
        // The newest of the merged uses covers the others.
        cold.uses = Uses::One(last);
        cold.freed = freed;
        cold.requested = 0;
        index.insert(Self::entry(records, head).1);
    }
}

#[cfg(all(test, feature = "sim", not(loom)))]
mod tests {
    use crate::allocator::extent::record::SpaceId;
    use crate::allocator::extent::uses::Uses;
    use crate::allocator::tests::{Outcome, Rig};
    use crate::allocator::{Block, Config, Policy};

    /// S1.6: if free pieces of another class exist, one of them may be the best fit.
    #[test]
    fn s1_6_nothing_is_carved_beside_pieces_of_others() -> Outcome {
        let rig = Rig::new(Config::new().policy(Policy::Packed).views(false))?;
        let [stream] = rig.streams()?;
        let allocator = &rig.allocator;
        drop(allocator.allocate(24 << 20, &stream)?);
        let row: Result<Vec<Block>, _> = (0..4)
            .map(|_| allocator.allocate(6 << 20, &stream))
            .collect();
        let mut row = row?;
        let (early, late) = (row.remove(2), row.remove(0));
        let ptr = early.ptr();
        drop((early, late));
        // A snapshot empties the large-block caches.
        allocator.snapshot();
        let mut state = allocator.engine().lock();
        let piece = state
            .extents
            .piece_around(SpaceId::Large, ptr)
            .ok_or("in use")?;
        let (space, records) = state.extents.parts(SpaceId::Large);
        space.retag(records, piece, Uses::None);
        assert!(space.carve_own(records, 0, 1).is_none(), "one is all's");
        drop(state);
        drop(row);
        rig.end()
    }
}
