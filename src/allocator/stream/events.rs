//! Pools of marker events, by context, and distrusted contexts.
//!
//! A context other than the allocator's is distrusted once a driver call on one of its objects returned
//! `CUDA_ERROR_INVALID_HANDLE`. The error does not distinguish a destroyed context from a live one: it may concern one
//! stream or event, or report an error of earlier work. From then on none of its handles is used, because they may
//! dangle, and none of its work counts as complete, because it may continue. Each slot of its streams stores the
//! distrust, which ends with the last of them.

use std::sync::Arc;

use crate::allocator::stream::Streams;
use crate::driver::{DriverError, Event};

impl Streams {
    /// Returns spent events to the pools for the next markers of their contexts.
    pub(crate) fn pool_unused_events(&mut self) {
        for (context, event) in self.unused_events.drain(..) {
            self.events.entry(context).or_default().push(event);
        }
    }

    /// Returns an event of a context for the next marker.
    pub(crate) fn pooled_event(&mut self, context: u64) -> Option<Arc<Event>> {
        let pool = self.events.get_mut(&context)?;
        // A wait or query in progress may still hold an event.
        let idle = |event: &mut Arc<Event>| Arc::get_mut(event).is_some();
        let at = pool.iter_mut().rposition(idle)?;
        Some(pool.swap_remove(at))
    }

    /// Returns events to the pools for the next markers of their contexts.
    pub(crate) fn pool_events(&mut self, events: impl IntoIterator<Item = Arc<Event>>) {
        for event in events {
            let context = event.context().id();
            self.events.entry(context).or_default().push(event);
        }
    }

    /// Removes the markers of a stream whose events belong to a context.
    #[must_use = "an event must not be destroyed under the lock"]
    pub(crate) fn take_markers_of(&mut self, stream: u32, context: u64) -> Vec<Arc<Event>> {
        let slot = &mut self.slots[stream as usize];
        let mut gone = Vec::new();
        slot.markers.retain(|marker| {
            let other = marker.event.context().id() != context;
            if !other {
                gone.push(Arc::clone(&marker.event));
            }
            other
        });
        self.incomplete -= gone.len();
        gone
    }

    /// Returns the reason why a context is distrusted, if it is.
    pub(crate) fn distrust_of(&self, context: u64) -> Option<DriverError> {
        let mut slots = self.iter().filter(|(_, s)| s.context.id() == context);
        slots.find_map(|(_, slot)| slot.distrusted)
    }

    /// Distrusts a context and removes the markers whose events belong to it. Returns the streams of the context.
    pub(crate) fn distrust(&mut self, context: u64, error: DriverError) -> Vec<u32> {
        let slots = self.iter().filter(|(_, s)| s.context.id() == context);
        let streams: Vec<u32> = slots.map(|(stream, _)| stream).collect();
        for &stream in &streams {
            self[stream].distrusted.get_or_insert(error);
            let events = self.take_markers_of(stream, context);
            self.pool_events(events);
            self.unlist(stream);
        }
        streams
    }
}
