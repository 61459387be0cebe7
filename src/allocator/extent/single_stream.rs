//! Carving and coalescing while one stream owns all free memory, and adjacent pieces merge.
//!
//! The result equals that of [`Space`] for any number of streams, without the checks of uses.

use crate::allocator::extent::index::{Entry, FreeIndex};
use crate::allocator::extent::record::{Hot, NIL, Records, State};
use crate::allocator::extent::space::{Space, class_of};
use crate::allocator::extent::uses::{Use, Uses};
use crate::allocator::size::GRANULE;

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
        let rest = entry.granules - granules;
        if rest == 0 {
            self.count -= 1;
            records[entry.id].state = State::Busy;
            records.cold_mut(entry.id).uses = Uses::None;
            return Some(entry);
        }
        let addr = entry.addr + u64::from(granules) * GRANULE;
        let right = records.vacant_id();
        let hot = &mut records[entry.id];
        hot.state = State::Busy;
        hot.granules = granules;
        let next = std::mem::replace(&mut hot.next, right);
        records[right].renew(Hot {
            addr,
            granules: rest,
            generation: 0,
            prev: entry.id,
            next,
            stream,
            state: State::Free,
            space: self.id,
            cached: false,
        });
        if next != NIL {
            records[next].prev = right;
        }
        let cold = records.cold_mut(entry.id);
        let (uses, owner, freed) = (std::mem::take(&mut cold.uses), cold.owner, cold.freed);
        let cold = records.cold_mut(right);
        (cold.uses, cold.owner, cold.freed) = (uses, owner, freed);
        own.insert(Entry {
            granules: rest,
            addr,
            id: right,
        });
        Some(Entry { granules, ..entry })
    }

    /// [`release`](Self::release) for a block whose only use is `last`, the newest on its stream, where pieces pending
    /// on the same stream merge. `freed` is the number of the free.
    pub(crate) fn release_own(&mut self, records: &mut Records, id: u32, last: Use, freed: u64) {
        let class = last.stream;
        let own = |records: &Records, id: u32| {
            id != NIL && {
                let hot = &records[id];
                hot.is_free() && hot.stream == class
            }
        };
        let hot = &mut records[id];
        hot.state = State::Free;
        hot.stream = class;
        let Hot {
            addr,
            granules,
            prev,
            next,
            ..
        } = *hot;
        let at = class as usize;
        if at >= self.pending.len() {
            self.pending.resize_with(at + 1, FreeIndex::default);
        }
        let index = &mut self.pending[at];
        let mut whole = (id, addr, granules);
        debug_assert!(
            [prev, next].iter().all(|at| !own(records, *at)
                || class_of(&records.cold(*at).uses) == class
                    && records.cold(*at).uses.as_slice()[0].ticket <= last.ticket),
            "the newest use of all"
        );
        self.count += 1;
        if own(records, prev) {
            self.count -= 1;
            let found = index.remove(&Self::entry(records, prev).1);
            debug_assert!(found, "a free piece is in the index of its class");
            let left = &mut records[prev];
            let addr = left.addr;
            left.granules += whole.2;
            left.next = next;
            whole = (prev, addr, left.granules);
            if next != NIL {
                records[next].prev = prev;
            }
            records.retire(id);
        }
        let (head, addr, mut granules) = whole;
        if own(records, next) {
            self.count -= 1;
            let found = index.remove(&Self::entry(records, next).1);
            debug_assert!(found, "a free piece is in the index of its class");
            let right = records[next];
            let left = &mut records[head];
            left.granules += right.granules;
            left.next = right.next;
            granules = left.granules;
            if right.next != NIL {
                records[right.next].prev = head;
            }
            records.retire(next);
        }
        let cold = records.cold_mut(head);
        // The newest of the merged uses covers the others.
        cold.uses = Uses::One(last);
        cold.freed = freed;
        cold.requested = 0;
        index.insert(Entry {
            granules,
            addr,
            id: head,
        });
    }
}

#[cfg(all(test, feature = "sim", not(loom)))]
mod tests {
    use crate::Block;
    use crate::allocator::extent::record::SpaceId;
    use crate::allocator::extent::uses::Uses;
    use crate::allocator::tests::{Outcome, Rig};
    use crate::allocator::{Config, Policy};

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
