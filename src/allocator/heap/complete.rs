//! Completion: applies observed markers to the free pieces, which other streams can then use.

use crate::allocator::extent::index::Entry;
use crate::allocator::extent::record::{MIXED, SpaceId};
use crate::allocator::heap::Heap;

/// Maximum number of pieces that a call completes while it has memory for its request.
const PIECES_PER_CALL: usize = 64;

impl Heap {
    /// Removes all completed uses from all pieces.
    pub(crate) fn complete_uses(&mut self) {
        self.streams.take_advanced();
        let all: Vec<u32> = self.streams.slots().collect();
        self.complete_streams(&all, usize::MAX);
        for stream in all {
            self.recycle_if_used(stream);
        }
    }

    /// Removes completed uses from some pieces of the streams that have advanced since all of their pieces were last
    /// processed. A larger number would delay the call that observes the completion; a request that finds no memory
    /// processes the rest, see [`Streams::have_advanced`](crate::allocator::stream::Streams).
    pub(crate) fn complete_advanced(&mut self) {
        let advanced = self.streams.take_advanced();
        let all = self.complete_streams(&advanced, PIECES_PER_CALL);
        self.streams.put_advanced(advanced, !all);
        for stream in self.streams.next_slots() {
            self.recycle_if_used(stream);
        }
    }

    /// Completes at most `most` pieces that are pending on several streams or on one of `classes`. Returns whether all
    /// of them were processed.
    fn complete_streams(&mut self, classes: &[u32], most: usize) -> bool {
        let mut left = most;
        for id in [SpaceId::Large, SpaceId::Small] {
            left -= self.complete_pieces(id, MIXED, left);
            if self.extents.space(id).is_none_or(|space| space.merge_own) {
                continue;
            }
            for class in classes {
                left -= self.complete_pieces(id, *class, left);
            }
        }
        self.return_held_back();
        left > 0
    }

    /// Recycles the slot of a stream without remaining state.
    fn recycle_if_used(&mut self, stream: u32) {
        if self.streams[stream].in_use {
            self.recycle(stream);
        }
    }

    /// Removes completed uses from all pieces that are pending on one stream alone.
    pub(crate) fn complete_class(&mut self, space: SpaceId, class: u32) {
        self.complete_pieces(space, class, usize::MAX);
    }

    /// Like [`complete_class`](Self::complete_class), for at most `most` pieces with a completed use. Returns their
    /// number.
    fn complete_pieces(&mut self, space: SpaceId, class: u32, most: usize) -> usize {
        let index = self.extents.space(space).and_then(|s| s.index(class));
        let Some(index) = index.filter(|_| most > 0) else {
            return 0;
        };
        let mut pieces = std::mem::take(&mut self.pieces);
        let (records, streams) = (&self.extents.records, &self.streams);
        let is_due = |entry: &Entry| {
            let uses = records.cold(entry.id).uses.as_slice();
            uses.iter().any(|u| streams.complete(u))
        };
        pieces.extend(index.iter().filter(is_due));
        // Processed by address, so that equal states give equal results.
        pieces.sort_unstable_by_key(|e: &Entry| e.addr);
        let mut count = 0;
        for entry in pieces.drain(..) {
            if count == most {
                break;
            }
            let hot = &self.extents.records[entry.id];
            if hot.is_free() && hot.addr == entry.addr && hot.stream == class {
                count += usize::from(self.complete_piece(space, entry.id));
            }
        }
        self.pieces = pieces;
        count
    }

    /// Removes completed uses from a piece. Returns whether there were any.
    pub(crate) fn complete_piece(&mut self, space: SpaceId, id: u32) -> bool {
        let cold = self.extents.records.cold(id);
        let (owner, was_mixed) = (cold.owner, self.extents.records[id].stream == MIXED);
        // Where memory never changes streams, the owner's tag stays, because pieces merge by it.
        let keep_owner =
            self.extents.space(space).is_some_and(|s| s.merge_own) && !self.streams.rests(owner);
        let streams = &self.streams;
        let Some(uses) = cold
            .uses
            .without(|u| streams.complete(u) && !(keep_owner && u.stream == owner))
        else {
            return false;
        };
        if was_mixed && uses.as_slice().len() <= 1 {
            let bytes = self.extents.records[id].bytes();
            self.stats
                .on_pool(space != SpaceId::Large, |pool| pool.active.sub(bytes));
        }
        let (at, records) = self.extents.parts(space);
        at.retag(records, id, uses);
        true
    }
}

#[cfg(all(test, feature = "sim", not(loom)))]
mod tests {
    use std::sync::Arc;

    use super::PIECES_PER_CALL;
    use crate::allocator::Config;
    use crate::allocator::extent::record::COMPLETE;
    use crate::allocator::tests::{Outcome, Rig};

    /// R23: a wait or query in progress relies on the event as it was recorded then.
    #[test]
    fn an_event_that_somebody_holds_is_not_recorded_again() -> Outcome {
        let rig = Rig::new(Config::new())?;
        let [a, b] = rig.streams()?;
        let engine = rig.allocator.engine();
        drop(rig.allocator.allocate(512, &b)?);
        drop(rig.allocator.allocate(12 << 20, &a)?);
        let _block = rig.allocator.allocate(12 << 20, &b)?;
        let key = rig.context.id();
        let held: Arc<_> = {
            let heap = engine.lock();
            let pool = heap.streams.events.get(&key).ok_or("no pool")?;
            Arc::clone(pool.first().ok_or("no event")?)
        };
        let mut others = Vec::new();
        while let Some(event) = engine.lock().streams.pooled_event(key) {
            assert!(!Arc::ptr_eq(&held, &event));
            others.push(event);
        }
        drop(held);
        assert!(engine.lock().streams.pooled_event(key).is_some());
        Ok(())
    }

    /// A request that finds memory completes few pieces; one that does not completes all before growth.
    #[test]
    fn completion_is_divided_among_calls() -> Outcome {
        const BLOCKS: usize = 1000;
        const BYTES: usize = 128 << 10;
        let rig = Rig::new(Config::new().limit(Some((2 * BLOCKS * BYTES) as u64)))?;
        let [a, b] = rig.streams()?;
        drop(rig.allocator.allocate(BYTES, &b)?);
        let mut blocks: Vec<_> = (0..2 * BLOCKS - 100)
            .map(|_| rig.allocator.allocate(BYTES, &a))
            .collect::<Result<_, _>>()?;
        // Every second block, so that no two pieces are adjacent.
        let mut at = 0;
        blocks.retain(|_| {
            at += 1;
            at % 2 == 0
        });
        rig.sim.complete_all();
        let pending = || {
            let heap = rig.allocator.engine().lock();
            let large = heap.extents.large.pieces();
            large
                .filter(|piece| heap.extents.records[piece.id].stream != COMPLETE)
                .count()
        };
        let before = pending();
        let block = rig.allocator.allocate(BYTES, &b)?;
        // The piece that the request takes is no longer pending either.
        let completed = before - pending();
        assert!(
            (1..=PIECES_PER_CALL + 1).contains(&completed),
            "{completed}"
        );
        let held = rig.allocator.stats().all.reserved.current;
        drop(blocks);
        rig.sim.complete_all();
        let all = (held - 2 * BYTES as u64) / (2 << 20) * (2 << 20);
        drop(block);
        rig.sim.complete_all();
        drop(rig.allocator.allocate(all as usize, &b)?);
        assert_eq!(rig.allocator.stats().all.reserved.current, held);
        rig.end()
    }
}
