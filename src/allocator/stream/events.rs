//! The events of markers, by context, and distrusted contexts.
//!
//! A context other than the allocator's is distrusted once a driver call on something of it returned
//! `CUDA_ERROR_INVALID_HANDLE`. The answer does not tell a context that was destroyed from one that lives on: it may
//! concern one stream or event, or report an error of earlier work. So from then on nothing of the context is used, since
//! its handles may dangle, and nothing of it counts as complete, since its work may go on. The slot of each of its streams
//! has the distrust, which ends with the last of them.

use std::sync::Arc;

use crate::allocator::stream::Streams;
use crate::driver::{DriverError, Event};

impl Streams {
    /// Keeps the events that no marker needs any more for the next markers of the same context.
    pub(crate) fn pool_spent(&mut self) {
        for (context, event) in self.spent.drain(..) {
            self.events.entry(context).or_default().push(event);
        }
    }

    /// An event of a context for the next marker.
    pub(crate) fn pooled_event(&mut self, context: u64) -> Option<Arc<Event>> {
        let pool = self.events.get_mut(&context)?;
        // A wait or a question under way may still hold one.
        let idle = |event: &mut Arc<Event>| Arc::get_mut(event).is_some();
        let at = pool.iter_mut().rposition(idle)?;
        Some(pool.swap_remove(at))
    }

    /// Keeps events for the next markers of their contexts.
    pub(crate) fn pool_events(&mut self, events: impl IntoIterator<Item = Arc<Event>>) {
        for event in events {
            let context = event.context().id();
            self.events.entry(context).or_default().push(event);
        }
    }

    /// Takes the markers of a stream that are events of a context.
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
        self.unseen -= gone.len();
        gone
    }

    /// Why a context is distrusted, if it is.
    pub(crate) fn distrust_of(&self, context: u64) -> Option<DriverError> {
        let mut slots = self.iter().filter(|(_, s)| s.context.id() == context);
        slots.find_map(|(_, slot)| slot.distrusted)
    }

    /// Distrusts a context, and takes the markers away that are events of it. Returns the streams of the context.
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
