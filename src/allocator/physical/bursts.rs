//! What allocations that map very many handles may do, and owe.

use crate::allocator::report::Bursts;

/// The account of one allocator.
#[derive(Debug, Default)]
pub(crate) struct Account {
    pub(crate) figures: Bursts,
    /// Large requests so far.
    pub(crate) requests: u64,
    /// More was created than the soft cap allows, and is to be given back.
    pub(crate) debt: bool,
}

impl Account {
    pub(crate) fn request(&mut self) {
        self.requests += 1;
    }

    pub(crate) fn tokens(&self) -> u64 {
        let earned = TOKENS + self.requests / REQUESTS_PER_TOKEN;
        earned.saturating_sub(self.figures.spent)
    }

    pub(crate) fn mapped(&mut self, maps: usize) {
        self.figures.largest = self.figures.largest.max(maps as u64);
    }

    pub(crate) fn figures(&self) -> Bursts {
        self.figures
    }
}

/// Tokens at the start,
pub(crate) const TOKENS: u64 = 16;

/// and large requests that earn another one: 10,000 allocations and frees.
pub(crate) const REQUESTS_PER_TOKEN: u64 = 5000;

/// Handles that any allocation may map: 2 ms at the 20 us that mapping one costs on an H200.
pub(crate) const MAPS: usize = 100;

/// Handles that an allocation with a token may map: 6 ms.
pub(crate) const BURST_MAPS: usize = 300;

/// Handles that one allocation gives back: 0.3 ms at the 33.5 us that unmapping and releasing one
/// costs on an H200.
pub(crate) const REPAID: usize = 8;

/// Above this part of the limit the bounds do not hold. New handles are small there
/// (`Heap::handle_size`); with larger ones, and bounds up to 0.8 of the limit, the smallest limit
/// of recorded work rose by 1.5 points.
pub(crate) const NEAR_PART: u64 = 2;
