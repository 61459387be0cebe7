//! Completion: what markers say, and what that makes free for everybody.

use crate::allocator::extent::index::Entry;
use crate::allocator::extent::record::{MIXED, SpaceId};
use crate::allocator::heap::Heap;

impl Heap {
    /// Drops from all pieces what is complete now.
    pub(crate) fn complete_uses(&mut self) {
        self.streams.take_advanced();
        self.complete_streams(None);
    }

    /// [`complete_uses`](Self::complete_uses) for the streams of which more is complete than when this was last
    /// done.
    pub(crate) fn complete_advanced(&mut self) {
        let advanced = self.streams.take_advanced();
        self.complete_streams(Some(&advanced));
        self.streams.put_advanced(advanced);
    }

    /// Completes what is pending on several streams and on each of `classes` (or on any, if there are
    /// none), then gives up the streams of which nothing is left.
    fn complete_streams(&mut self, classes: Option<&[u32]>) {
        for id in [SpaceId::Large, SpaceId::Small] {
            self.complete_class(id, MIXED);
            if self.extents.space(id).is_none_or(|space| space.merge_own) {
                continue;
            }
            match classes {
                Some(classes) => {
                    for class in classes {
                        self.complete_class(id, *class);
                    }
                }
                None => {
                    for class in self.streams.slots() {
                        self.complete_class(id, class);
                    }
                }
            }
        }
        self.return_held_back();
        for stream in self.streams.slots() {
            if self.streams[stream].in_use {
                self.recycle(stream);
            }
        }
    }

    pub(crate) fn complete_class(&mut self, space: SpaceId, class: u32) {
        let mut pieces = std::mem::take(&mut self.pieces);
        let index = self.extents.space(space).and_then(|s| s.index(class));
        pieces.extend(index.into_iter().flat_map(|index| index.iter()));
        // By address, so that equal states end up equal.
        pieces.sort_unstable_by_key(|e: &Entry| e.addr);
        for entry in pieces.drain(..) {
            let hot = &self.extents.records[entry.id];
            if hot.is_free() && hot.addr == entry.addr && hot.stream == class {
                self.complete_piece(space, entry.id);
            }
        }
        self.pieces = pieces;
    }

    pub(crate) fn complete_piece(&mut self, space: SpaceId, id: u32) {
        let cold = self.extents.records.cold(id);
        let (owner, was_mixed) = (cold.owner, self.extents.records[id].stream == MIXED);
        // Where memory never changes streams the owner's tag stays, so that pieces merge by it.
        let keep_owner =
            self.extents.space(space).is_some_and(|s| s.merge_own) && !self.streams.rests(owner);
        let streams = &self.streams;
        let Some(uses) = cold
            .uses
            .without(|u| streams.complete(u) && !(keep_owner && u.stream == owner))
        else {
            return;
        };
        if was_mixed && uses.as_slice().len() <= 1 {
            let bytes = self.extents.records[id].bytes();
            self.stats
                .on_pool(space != SpaceId::Large, |pool| pool.active.sub(bytes));
        }
        let (at, records) = self.extents.parts(space);
        at.retag(records, id, uses);
    }
}

#[cfg(all(test, feature = "sim", not(loom)))]
mod tests {
    use std::sync::Arc;

    use crate::allocator::Config;
    use crate::allocator::tests::{Outcome, Rig};

    /// R23: a wait or a question under way means the event as it was recorded then.
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
}
