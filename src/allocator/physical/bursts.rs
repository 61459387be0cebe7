//! What allocations that map very many handles may do, and owe.

use crate::allocator::extent::want::Want;
use crate::allocator::report::Bursts;
use crate::allocator::size::{GRANULE, PHYSICAL_GRANULE};
use crate::allocator::view::mapping::Layout;
use crate::allocator::view::sources::Source;

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
/// ([`State::handle_size`]); with larger ones, and bounds up to 0.8 of the limit, the smallest limit
/// of recorded work rose by 1.5 points.
pub(crate) const NEAR_PART: u64 = 2;

/// A layout of the largest whole handles that fit, with the rest created.
pub(crate) fn cut(want: &Want, sources: &[Source]) -> Layout {
    let mut left = u64::from(want.granules) * GRANULE;
    let mut whole: Vec<&Source> = sources.iter().filter(|s| s.whole()).collect();
    whole.sort_unstable_by_key(|s| (std::cmp::Reverse(s.bytes), s.home));
    let mut adds = Vec::with_capacity(CUT_MAPS);
    for source in whole {
        if adds.len() < CUT_MAPS && source.bytes <= left {
            adds.push((source.home, source.bytes));
            left -= source.bytes;
        }
    }
    let fresh = left.next_multiple_of(PHYSICAL_GRANULE);
    let part = fresh.div_ceil(CUT_CREATED);
    Layout {
        base: None,
        back: 0,
        skip: 0,
        adds,
        fresh,
        lacking: fresh,
        fresh_handle: part.next_multiple_of(PHYSICAL_GRANULE).min(CREATED_MAX),
    }
}

/// Handles that are mapped where the bound cuts a stitch,
pub(crate) const CUT_MAPS: usize = 90;

/// and handles that are created beside them.
pub(crate) const CUT_CREATED: u64 = 10;

/// They are not larger than this, because one small block keeps a whole handle.
pub(crate) const CREATED_MAX: u64 = 32 << 20;
