//! Completion: what markers say, and what that makes free for everybody.

use std::sync::Arc;

use crate::driver::Event;

use super::records::{MIXED, SpaceId};
use super::state::State;
use super::streams::Probe;
use super::uses::Use;

/// Large allocations to let pass before a marker that was not ready is asked again.
const BACKOFF: u32 = 8;

impl State {
    /// Drops from all pieces what is complete now.
    pub(crate) fn settle(&mut self) {
        self.streams.take_advanced();
        self.settle_streams(None);
    }

    /// [`settle`](Self::settle) for the streams of which more is complete than when this was last
    /// done.
    pub(crate) fn settle_advanced(&mut self) {
        let advanced = self.streams.take_advanced();
        self.settle_streams(Some(&advanced));
    }

    /// Settles what is pending on several streams and on each of `classes` (or on any, if there are
    /// none), then gives up the streams of which nothing is left.
    fn settle_streams(&mut self, classes: Option<&[u32]>) {
        let ids: Vec<SpaceId> = self.spaces().map(|s| s.id).collect();
        for id in ids {
            let Some(space) = self.space(id) else {
                continue;
            };
            let mut pending: Vec<u32> = Vec::new();
            if space.index(MIXED).is_some_and(|index| !index.is_empty()) {
                pending.push(MIXED);
            }
            if !space.merge_own {
                match classes {
                    Some(classes) => pending.extend(classes),
                    None => pending.extend(space.pending_streams()),
                }
            }
            for class in pending {
                self.settle_class(id, class);
            }
        }
        self.settle_held_back();
        let streams: Vec<u32> = self.streams.iter().map(|(stream, _)| stream).collect();
        for stream in streams {
            self.recycle(stream);
        }
    }

    pub(crate) fn settle_class(&mut self, space: SpaceId, class: u32) {
        let Some(index) = self.space(space).and_then(|s| s.index(class)) else {
            return;
        };
        // By address, so that equal states settle equally.
        let mut pieces: Vec<_> = index.iter().collect();
        pieces.sort_unstable_by_key(|e| e.addr);
        for entry in pieces {
            let hot = &self.records[entry.id];
            if hot.is_free() && hot.addr == entry.addr && hot.stream == class {
                self.settle_piece(space, entry.id);
            }
        }
    }

    pub(crate) fn settle_piece(&mut self, space: SpaceId, id: u32) {
        let cold = self.records.cold(id);
        let (owner, was_mixed) = (cold.owner, self.records[id].stream == MIXED);
        // Where memory never changes streams the owner's tag stays, so that pieces merge by it.
        let keep_owner = self.space(space).is_some_and(|s| s.merge_own);
        let streams = &self.streams;
        let Some(uses) = cold
            .uses
            .without(|u| streams.complete(u) && !(keep_owner && u.stream == owner))
        else {
            return;
        };
        if was_mixed && uses.as_slice().len() <= 1 {
            let bytes = self.records[id].bytes();
            self.stats
                .on_pool(space != SpaceId::Large, |pool| pool.active.sub(bytes));
        }
        let (at, records) = self.parts(space);
        at.retag(records, id, uses);
    }

    /// The streams that are due to be asked for completed markers, each with a marker to begin with.
    pub(crate) fn due_markers(&mut self, wanted: impl Fn(u32) -> bool) -> Vec<Probe> {
        let mut due = Vec::new();
        for (stream, slot) in self.streams.iter_mut() {
            if slot.markers.is_empty() || !wanted(stream) {
                continue;
            }
            if slot.backoff > 0 {
                slot.backoff -= 1;
                continue;
            }
            due.push(Probe::new(stream, slot));
        }
        due
    }

    /// Lets the next poll ask every stream, also one that was not ready a moment ago.
    pub(crate) fn ask_again(&mut self) {
        let streams: Vec<u32> = self.streams.iter().map(|(stream, _)| stream).collect();
        for stream in streams {
            self.streams[stream].backoff = 0;
        }
    }

    /// What asking a stream came to: the newest marker seen complete, how many were, and whether one
    /// was not.
    pub(crate) fn asked(&mut self, stream: u32, done: Option<u64>, count: usize, late: bool) {
        if let Some(bound) = done {
            self.observed(stream, bound);
        }
        let slot = &mut self.streams[stream];
        slot.stride = count.max(1) as u32;
        if late {
            slot.backoff = BACKOFF;
        }
    }

    /// A marker was seen complete.
    pub(crate) fn observed(&mut self, stream: u32, bound: u64) {
        let row = self
            .streams
            .marker(&Use {
                stream,
                ticket: bound,
            })
            // Gone already if another marker's completion implied this one; what comes next in
            // line says nothing yet.
            .filter(|m| m.bound == bound)
            .map(|m| m.row.clone());
        let events = self
            .streams
            .completed(stream, bound, row.as_deref().unwrap_or(&[]));
        self.pool_events(events);
    }

    /// Keeps events for the next markers of the same context.
    pub(crate) fn pool_events(&mut self, events: Vec<(u32, Arc<Event>)>) {
        for (stream, event) in events {
            // One that a wait under way still holds is destroyed by its last holder instead.
            if let Some(event) = Arc::into_inner(event) {
                let key = self.streams[stream].context.key();
                self.events.entry(key).or_default().push(event);
            }
        }
    }
}
