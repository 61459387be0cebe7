//! Inactive streams.
//!
//! A stream is *idle* when no call has named it or freed its memory for some number of large requests of other streams.
//! Its work is then completed, and later it becomes *inactive*: the others behave as if it did not exist, so a stream
//! that is then the only active one is served as if it had always been alone.
//!
//! Neither says anything about memory: uses alone determine which memory may still be accessed. A stream that a call
//! named in the meantime merely becomes inactive later.

use crate::allocator::stream::Streams;
use crate::allocator::stream::slot::Slot;

/// A stream becomes inactive after this number of large requests of other streams without a call that names it or frees
/// its memory.
const INACTIVE_AFTER: u64 = 1024;
/// Work left by a stream is completed after this number of large requests without a call for the stream, long before it
/// becomes inactive.
const IDLE_AFTER: u64 = 512;
/// Number of large requests without a call for a stream that may have been destroyed, after which the allocator waits
/// for it.
const MAY_BE_GONE_AFTER: u64 = 16;

impl Streams {
    /// Counts a large request. Returns the other streams that have been idle for long enough to complete their work,
    /// or to become inactive; usually none, because the search is not due.
    pub(crate) fn count_request_and_find_idle(&mut self, stream: u32) -> Vec<u32> {
        self.requests += 1;
        if self.requests < self.next_search {
            return Vec::new();
        }
        let mut idle = Vec::new();
        let mut next = self.requests + IDLE_AFTER;
        for (at, slot) in self.iter().filter(|(_, slot)| !slot.inactive) {
            // Counted from the last call for the stream, so that repeated work gives the same result each time.
            if self.requests_since_call(slot) < IDLE_AFTER {
                next = next.min(slot.last_call + IDLE_AFTER);
            } else if at != stream && slot.has_no_work() && !self.is_due(slot) {
                next = next.min(slot.last_call + INACTIVE_AFTER);
            } else if at != stream {
                idle.push(at);
            }
        }
        self.next_search = next;
        idle
    }

    /// Whether a large request of a stream needs no queries, `near` the limit or not: no full batch needs a marker, no
    /// marker is due for a query, and no search for idle streams is due.
    pub(crate) fn needs_no_query(&self, stream: u32, near: bool) -> bool {
        let due = |slot: &Slot| !slot.markers.is_empty() && slot.backoff == 0;
        !self.reactivated
            && self.requests + 1 < self.next_search
            && self.full.iter().all(|full| !near && *full == stream)
            && (self.has_no_markers() || !self.iter().any(|(_, slot)| due(slot)))
    }

    /// Counts a large request for which [no query](Self::needs_no_query) is needed.
    pub(crate) fn count_request(&mut self) {
        self.requests += 1;
        if !self.has_no_markers() {
            for (_, slot) in self.iter_mut() {
                let waits = u32::from(!slot.markers.is_empty());
                slot.backoff = slot.backoff.saturating_sub(waits);
            }
        }
    }

    /// Returns the number of large requests since the last call for a stream.
    fn requests_since_call(&self, slot: &Slot) -> u64 {
        self.requests - slot.last_call
    }

    /// Whether a stream has been idle for long enough to become inactive.
    fn is_due(&self, slot: &Slot) -> bool {
        self.requests_since_call(slot) >= INACTIVE_AFTER
    }

    /// [`deactivate`](Self::deactivate) if the stream has been idle for long enough.
    pub(crate) fn deactivate_if_due(&mut self, stream: u32) -> bool {
        self.is_due(&self[stream]) && self.deactivate(stream)
    }

    /// Returns the bytes that were freed on idle streams which may have been destroyed, and that no marker covers.
    pub(crate) fn left_behind(&self) -> u64 {
        let idle = |slot: &Slot| self.requests_since_call(slot) >= MAY_BE_GONE_AFTER;
        let slots = self.iter();
        slots
            .filter(|(_, slot)| slot.may_be_destroyed() && slot.distrusted.is_none() && idle(slot))
            .map(|(_, slot)| slot.open_bytes)
            .sum()
    }

    /// Makes a stream inactive if it has nothing pending. Returns whether it did.
    pub(crate) fn deactivate(&mut self, stream: u32) -> bool {
        let slot = &mut self.slots[stream as usize];
        let ends = slot.in_use && !slot.inactive && slot.has_no_work();
        slot.inactive |= ends;
        self.inactive += usize::from(ends);
        ends
    }

    /// Whether a stream is inactive, or does not exist.
    pub(crate) fn is_inactive(&self, stream: u32) -> bool {
        self.slots
            .get(stream as usize)
            .is_none_or(|slot| slot.inactive)
    }

    /// Records a call for a stream, which is active from here on.
    #[inline]
    pub(crate) fn note_call(&mut self, stream: u32) {
        let now = self.requests;
        let slot = &mut self.slots[stream as usize];
        slot.last_call = now;
        if slot.inactive {
            self.reactivate(stream);
        }
    }

    #[cold]
    fn reactivate(&mut self, stream: u32) {
        let slot = &mut self.slots[stream as usize];
        slot.inactive = false;
        self.inactive -= 1;
        self.reactivated = true;
        self.list_deferred_batches();
    }
}
