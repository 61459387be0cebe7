//! Inactive streams. Work left by a silent stream is completed first; later the stream rests.
//!
//! A stream *rests* when no call has named it or freed its memory for a long time, and all its work is complete. The
//! others behave as if it did not exist, so a stream that is then the only active one is served as if it had always
//! been alone.
//!
//! Resting says nothing about memory: uses alone determine which memory may still be accessed. A stream that was named
//! in the meantime merely starts to rest later.

use crate::allocator::stream::Streams;
use crate::allocator::stream::slot::Slot;

/// A stream rests after this number of large requests of other streams without a call that names it or frees its
/// memory.
const RESTS_AFTER: u64 = 1024;
/// Work left by a stream is completed after this number of large requests without a call for the stream, long before it
/// rests.
const COMPLETES_AFTER: u64 = 512;
/// Number of large requests without a call for a stream that may have been destroyed, after which the allocator waits
/// for it.
const SILENT: u64 = 16;

impl Streams {
    /// Counts a large request. Returns the other streams that have been silent for long enough to complete their work,
    /// or to rest; usually none, because the search is not due.
    pub(crate) fn silent(&mut self, stream: u32) -> Vec<u32> {
        self.requests += 1;
        if self.requests < self.look_at {
            return Vec::new();
        }
        let mut silent = Vec::new();
        let mut next = self.requests + COMPLETES_AFTER;
        for (at, slot) in self.iter().filter(|(_, slot)| !slot.resting) {
            // Counted from the last call for the stream, so that repeated work gives the same result each time.
            if self.silence(slot) < COMPLETES_AFTER {
                next = next.min(slot.told_at + COMPLETES_AFTER);
            } else if at != stream && slot.has_nothing_left() && !self.is_due(slot) {
                next = next.min(slot.told_at + RESTS_AFTER);
            } else if at != stream {
                silent.push(at);
            }
        }
        self.look_at = next;
        silent
    }

    /// Whether a large request of a stream needs no queries, `near` the limit or not: no full batch needs a marker, no
    /// marker is due for a query, and no search for silent streams is due.
    pub(crate) fn nothing_to_ask(&self, stream: u32, near: bool) -> bool {
        let due = |slot: &Slot| !slot.markers.is_empty() && slot.backoff == 0;
        !self.woken
            && self.requests + 1 < self.look_at
            && self.full().iter().all(|full| !near && *full == stream)
            && (self.all_seen() || !self.iter().any(|(_, slot)| due(slot)))
    }

    /// Counts a large request for which there is [nothing to ask](Self::nothing_to_ask).
    pub(crate) fn pass(&mut self) {
        self.requests += 1;
        if !self.all_seen() {
            for (_, slot) in self.iter_mut() {
                let waits = u32::from(!slot.markers.is_empty());
                slot.backoff = slot.backoff.saturating_sub(waits);
            }
        }
    }

    /// Returns the number of large requests since the last call for a stream.
    fn silence(&self, slot: &Slot) -> u64 {
        self.requests - slot.told_at
    }

    /// Whether a stream has been silent for long enough to rest.
    fn is_due(&self, slot: &Slot) -> bool {
        self.silence(slot) >= RESTS_AFTER
    }

    /// [`rest`](Self::rest) if the stream has been silent for long enough.
    pub(crate) fn rest_if_due(&mut self, stream: u32) -> bool {
        self.is_due(&self[stream]) && self.rest(stream)
    }

    /// Returns the bytes that were freed on silent streams which may have been destroyed, and that no marker covers.
    pub(crate) fn left_behind(&self) -> u64 {
        let silent = |slot: &Slot| self.silence(slot) >= SILENT;
        let slots = self.iter();
        slots
            .filter(|(_, slot)| slot.may_be_gone() && slot.distrusted.is_none() && silent(slot))
            .map(|(_, slot)| slot.open_bytes)
            .sum()
    }

    /// Makes a stream rest if it has nothing pending. Returns whether it does.
    pub(crate) fn rest(&mut self, stream: u32) -> bool {
        let slot = &mut self.slots[stream as usize];
        let rests = slot.in_use && !slot.resting && slot.has_nothing_left();
        slot.resting |= rests;
        self.resting += usize::from(rests);
        rests
    }

    /// Whether a stream rests, or does not exist.
    pub(crate) fn rests(&self, stream: u32) -> bool {
        self.slots
            .get(stream as usize)
            .is_none_or(|slot| slot.resting)
    }

    /// Records a call for a stream, and ends its rest.
    #[inline]
    pub(crate) fn tell(&mut self, stream: u32) {
        let now = self.requests;
        let slot = &mut self.slots[stream as usize];
        slot.told_at = now;
        if slot.resting {
            self.wake(stream);
        }
    }

    #[cold]
    fn wake(&mut self, stream: u32) {
        let slot = &mut self.slots[stream as usize];
        slot.resting = false;
        self.resting -= 1;
        self.woken = true;
        self.second_came();
    }
}
