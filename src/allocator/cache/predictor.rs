//! Prediction of the lengths of large blocks that are freed and immediately requested again.
//!
//! While the heap's lock is uncontended, only such blocks are put in a large-block cache: any other block would leave
//! it at the next event without a reuse. The rule is that of a branch predictor with saturating counters (J. E. Smith,
//! "A study of branch prediction strategies", 1981), by a hash of the length.

const COUNTERS: usize = 128;
/// Maximum value of a counter.
const MOST: u8 = 4;
/// Value of a counter from which a length is expected to recur.
const EXPECTED: u8 = 2;
/// Decrement of a counter for a block that left the large-block cache without a reuse.
const LOSS: u8 = 2;

/// The last large event in the heap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Last {
    #[default]
    Other,
    /// This record was allocated.
    Allocated(u32),
    /// A block of this length was freed directly after its allocation.
    Returned(u32),
}

/// The predictor; see the module documentation.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct ReusePredictor {
    last: Last,
    counters: [u8; COUNTERS],
}

impl Default for ReusePredictor {
    fn default() -> Self {
        ReusePredictor {
            last: Last::Other,
            counters: [0; COUNTERS],
        }
    }
}

impl ReusePredictor {
    fn counter(&mut self, granules: u32) -> &mut u8 {
        let hash = granules.wrapping_mul(0x9e37_79b1) >> 25;
        &mut self.counters[hash as usize % COUNTERS]
    }

    /// Records the allocation of a block of this length. Returns whether the block is expected to be freed and
    /// requested again before any other event.
    pub(crate) fn allocated(&mut self, id: u32, granules: u32) -> bool {
        if self.last == Last::Returned(granules) {
            self.count_recurrences(granules, 1);
        }
        self.last = Last::Allocated(id);
        *self.counter(granules) >= EXPECTED
    }

    /// Records the free of a block.
    pub(crate) fn freed(&mut self, id: u32, granules: u32) {
        self.last = match self.last {
            Last::Allocated(last) if last == id => Last::Returned(granules),
            _ => Last::Other,
        };
    }

    /// Records that a block left its large-block cache after this number of reuses.
    pub(crate) fn was_cached(&mut self, granules: u32, reuses: u32) {
        if reuses > 0 {
            self.count_recurrences(granules, reuses);
        } else {
            let counter = self.counter(granules);
            *counter = counter.saturating_sub(LOSS);
        }
    }

    fn count_recurrences(&mut self, granules: u32, times: u32) {
        let counter = self.counter(granules);
        *counter = u32::from(*counter)
            .saturating_add(times)
            .min(u32::from(MOST)) as u8;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(predictor: &mut ReusePredictor, id: u32) -> bool {
        let expected = predictor.allocated(id, 300);
        predictor.freed(id, 300);
        expected
    }

    #[test]
    fn a_length_is_expected_once_it_was_repeated_twice() {
        let mut predictor = ReusePredictor::default();
        assert!(!pair(&mut predictor, 1));
        assert!(!pair(&mut predictor, 2));
        assert!(pair(&mut predictor, 3));
        assert!(!predictor.allocated(4, 301));
        predictor.was_cached(300, 0);
        assert!(!predictor.allocated(5, 300));
        predictor.was_cached(300, 9);
        predictor.was_cached(300, 0);
        assert!(predictor.allocated(6, 300));
    }

    #[test]
    fn interrupted_lengths_are_not_expected() {
        let mut predictor = ReusePredictor::default();
        for at in 0..10 {
            assert!(!predictor.allocated(2 * at, 300));
            predictor.allocated(2 * at + 1, 500);
            predictor.freed(2 * at, 300);
            predictor.freed(2 * at + 1, 500);
        }
    }
}
