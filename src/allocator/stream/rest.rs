//! Streams that rest: of which nobody has spoken for long, and all of whose work is complete. The others do as if they
//! did not exist, so one that is alone then is served as if it had always been.
//!
//! That a stream rests says nothing about memory: what may be touched still is told by uses alone. A stream that is
//! spoken of in the meantime is only found later.

use crate::allocator::stream::Streams;

/// Large requests without a word of a stream before it rests: twice as many each time that it comes back, up to this.
const RESTS_AFTER_MOST: u64 = 1 << 20;
/// Large requests between two looks for streams that may rest.
const REST_ROUND: u64 = 64;

impl Streams {
    /// Counts a large request. The streams that may rest since nobody spoke of them for long, but for the one
    /// that asks; mostly it is not the time to look.
    pub(crate) fn long_silent(&mut self, stream: u32) -> Vec<u32> {
        self.requests += 1;
        if !self.requests.is_multiple_of(REST_ROUND) {
            return Vec::new();
        }
        let now = self.requests;
        let silent = self.iter().filter(|(at, slot)| {
            *at != stream && !slot.resting && now - slot.told_at >= slot.rests_after
        });
        silent.map(|(at, _)| at).collect()
    }

    /// A stream rests, if it has nothing to wait for. Whether it does.
    pub(crate) fn rest(&mut self, stream: u32) -> bool {
        let slot = &mut self.slots[stream as usize];
        let rests = slot.in_use && !slot.resting && slot.is_settled();
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
        slot.rests_after = (2 * slot.rests_after).min(RESTS_AFTER_MOST);
        self.resting -= 1;
        self.woken = true;
        self.second_came();
    }
}
