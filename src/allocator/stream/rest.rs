//! Streams of which nobody has spoken for some time. What they left is completed; later they rest.
//!
//! Streams that rest: of which nobody has spoken for long, and all of whose work is complete. The others do as if they
//! did not exist, so one that is alone then is served as if it had always been.
//!
//! That a stream rests says nothing about memory: what may be touched still is told by uses alone. A stream that is
//! spoken of in the meantime is only found later.

use crate::allocator::stream::Streams;
use crate::allocator::stream::slot::Slot;

/// A stream rests after this number of large requests of others without a call that names it or frees its memory.
const RESTS_AFTER: u64 = 1024;
/// What a stream left is completed once so many large requests have passed without a word of it, long before it rests.
const COMPLETES_AFTER: u64 = 512;
/// A stream that may be gone is waited for when nobody has spoken of it for so many large requests.
const SILENT: u64 = 16;

impl Streams {
    /// Counts a large request. The streams of which nobody spoke for some time and that left something to complete, or
    /// for so long that they may rest, but for the one that asks; mostly it is not the time to look.
    pub(crate) fn silent(&mut self, stream: u32) -> Vec<u32> {
        self.requests += 1;
        if self.requests < self.look_at {
            return Vec::new();
        }
        let mut silent = Vec::new();
        let mut next = self.requests + COMPLETES_AFTER;
        for (at, slot) in self.iter().filter(|(_, slot)| !slot.resting) {
            // Counted from the last word of it, so that work which repeats finds the same each time.
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

    /// Whether nothing is to be found out for a large request of a stream, `near` the limit or not: no full batch waits
    /// for its marker, no marker is due to be asked for, and it is not the time to look for silent streams.
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

    /// Large requests since the heap was last told of a stream.
    fn silence(&self, slot: &Slot) -> u64 {
        self.requests - slot.told_at
    }

    /// Whether nobody has spoken of a stream for so long that it may rest.
    fn is_due(&self, slot: &Slot) -> bool {
        self.silence(slot) >= RESTS_AFTER
    }

    /// [`rest`](Self::rest) if it is time.
    pub(crate) fn rest_if_due(&mut self, stream: u32) -> bool {
        self.is_due(&self[stream]) && self.rest(stream)
    }

    /// Bytes that were freed on streams which may be gone, of which nobody spoke for some time, and that no marker
    /// covers.
    pub(crate) fn left_behind(&self) -> u64 {
        let silent = |slot: &Slot| self.silence(slot) >= SILENT;
        let slots = self.iter();
        slots
            .filter(|(_, slot)| slot.may_be_gone() && slot.distrusted.is_none() && silent(slot))
            .map(|(_, slot)| slot.open_bytes)
            .sum()
    }

    /// A stream rests, if it has nothing to wait for. Whether it does.
    pub(crate) fn rest(&mut self, stream: u32) -> bool {
        let slot = &mut self.slots[stream as usize];
        let rests = slot.in_use && !slot.resting && slot.has_nothing_left();
        slot.resting |= rests;
        self.resting += usize::from(rests);
        rests
    }

    /// Whether a stream rests, or is none.
    pub(crate) fn rests(&self, stream: u32) -> bool {
        self.slots
            .get(stream as usize)
            .is_none_or(|slot| slot.resting)
    }

    /// The heap is told of a stream: it rests no more.
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
