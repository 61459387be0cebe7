//! What allocations that map very many handles may do, and owe.

use super::report::Bursts;

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
