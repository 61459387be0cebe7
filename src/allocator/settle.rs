//! Completion: what markers say, and what that makes free for everybody.

use std::sync::Arc;

use crate::driver::Event;

use super::records::{MIXED, SpaceId};
use super::state::State;
use super::uses::Use;

/// Large allocations to let pass before a marker that was not ready is asked again.
const BACKOFF: u32 = 8;

impl State {
    /// Drops from all pieces what is complete now.
    pub(crate) fn settle(&mut self) {
        let ids: Vec<SpaceId> = self.spaces().map(|s| s.id).collect();
        for id in ids {
            let Some(space) = self.space(id) else {
                continue;
            };
            let mut classes: Vec<u32> = vec![MIXED];
            if !space.merge_own {
                classes.extend(space.pending_streams());
            }
            for class in classes {
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

    /// The oldest marker of each stream that is due to be asked.
    pub(crate) fn due_markers(&mut self) -> Vec<(u32, u64, Arc<Event>)> {
        let streams: Vec<u32> = self.streams.iter().map(|(stream, _)| stream).collect();
        let mut due = Vec::new();
        for stream in streams {
            let slot = &mut self.streams[stream];
            let Some(marker) = slot.markers.front() else {
                continue;
            };
            if slot.backoff > 0 {
                slot.backoff -= 1;
                continue;
            }
            due.push((stream, marker.bound, Arc::clone(&marker.event)));
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

    pub(crate) fn not_ready(&mut self, stream: u32) {
        self.streams[stream].backoff = BACKOFF;
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
