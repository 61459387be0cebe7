//! How much one allocation may map, and how what it created instead is paid back.
//!
//! Mapping costs the driver's time per handle, so a stitch of hundreds of small handles would make
//! one allocation wait for milliseconds. A stitch of many handles spends a token; without one, or
//! beyond what a token allows, it maps the largest free handles only and creates the rest, beyond the
//! soft cap if it must be. Later large allocations give that back, a few handles each. Above half of
//! a hard limit none of this holds: there memory always wins. Nothing here reads a clock: times are counted
//! in handles.

use super::engine::{Engine, Guard};
use super::growth::Release;
use super::mapping::{Layout, Openings};
use super::records::SpaceId;
use super::size::{GRANULE, PACKED_SMALL_LIMIT, PHYSICAL_GRANULE};
use super::sources::Source;
use super::state::State;
use super::want::Want;

/// Handles that any allocation may map: 2 ms at the 20 us that mapping one costs on an H200.
const MAPS: usize = 100;
/// Handles that an allocation with a token may map: 6 ms.
const BURST_MAPS: usize = 300;
/// Handles that are mapped where the bound cuts a stitch,
const CUT_MAPS: usize = 90;
/// and handles that are created beside them.
const CUT_CREATED: u64 = 10;
/// Handles that one allocation gives back: 0.3 ms at the 33.5 us that unmapping and releasing one
/// costs on an H200.
const REPAID: usize = 8;
/// They are not larger than this, because one small block keeps a whole handle.
const CREATED_MAX: u64 = 32 << 20;
/// Above this part of the limit the bounds do not hold. New handles are small there
/// ([`State::handle_size`]); with larger ones, and bounds up to 0.8 of the limit, the smallest limit
/// of recorded work rose by 1.5 points.
const NEAR_PART: u64 = 2;

impl State {
    /// Whether so many bytes more leave the bounds in force.
    pub(crate) fn bounds_hold(&self, more: u64) -> bool {
        let limit = self.physical.limit.unwrap_or(u64::MAX);
        let bound = limit.min(self.physical.full_at.unwrap_or(u64::MAX));
        let held = self.stats.all.reserved.current + self.physical.planned;
        held.saturating_add(more) <= bound / NEAR_PART
    }

    /// The layout itself if its number of handles is bearable, else one that maps fewer of the open
    /// ones and creates more.
    pub(crate) fn bounded(&mut self, want: &Want, layout: Layout, open: &Openings) -> Layout {
        let size = self.handle_size(want, layout.fresh);
        let created = layout.fresh.div_ceil(size.max(PHYSICAL_GRANULE));
        let maps = layout.adds.len() + usize::try_from(created).unwrap_or(usize::MAX);
        if maps <= MAPS {
            return layout;
        }
        let cut = cut(want, &self.physical.sources(&open.ranges));
        if cut.adds.is_empty() || !self.bounds_hold(cut.fresh) {
            self.physical.bursts.figures.unbounded += 1;
            return layout;
        }
        if maps <= BURST_MAPS && self.physical.bursts.tokens() > 0 {
            self.physical.bursts.figures.spent += 1;
            return layout;
        }
        self.physical.bursts.figures.cut += 1;
        let held = self.stats.all.reserved.current + self.physical.planned;
        self.physical.bursts.debt |= held + cut.fresh > self.soft_cap();
        cut
    }

    /// Claims free handles that go back because an allocation created more than the soft cap allows:
    /// the smallest first, and only such as nobody can touch.
    fn plan_repayment(&mut self) -> Vec<Release> {
        let held = self.stats.all.reserved.current + self.physical.planned;
        let mut excess = held.saturating_sub(self.soft_cap());
        if excess == 0 {
            self.physical.bursts.debt = false;
            return Vec::new();
        }
        if !self.bounds_hold(0) {
            return Vec::new();
        }
        let mut free = self.releasable(SpaceId::Large, |id| self.over(id));
        // Highest addresses first among equals: the low end of the arena stays dense.
        free.sort_unstable_by_key(|(addr, bytes)| (*bytes, std::cmp::Reverse(*addr)));
        let mut plan = Vec::new();
        for (addr, bytes) in free.into_iter().take(REPAID) {
            if excess == 0 {
                break;
            }
            plan.extend(self.claim_holding(SpaceId::Large, addr));
            excess = excess.saturating_sub(bytes);
        }
        plan
    }
}

/// A layout of the largest whole handles that fit, with the rest created.
fn cut(want: &Want, sources: &[Source]) -> Layout {
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

impl Engine {
    /// After an allocation of so many bytes: gives a part back of what an earlier one created beyond
    /// the soft cap. Never waits; what cannot go now goes with a later allocation.
    pub(crate) fn repay(&self, state: Guard<'_>, stream: u32, bytes: u64) {
        if !state.physical.bursts.debt || bytes <= PACKED_SMALL_LIMIT {
            return;
        }
        let mut state = match self.poll_for(state, stream) {
            Ok(state) => state,
            Err(error) => return log::debug!("nothing was repaid: {error}"),
        };
        let plan = state.plan_repayment();
        let handles = plan.len() as u64;
        let slot = &state.streams[stream];
        // What one stream alone frees is never marked otherwise.
        let mark =
            (handles == 0 && state.physical.bursts.debt && !slot.covered()).then_some(slot.key);
        drop(state);
        if let Some(key) = mark {
            return self.mark_all([(stream, key)]);
        }
        if handles == 0 {
            return;
        }
        match self.release(plan) {
            Ok(released) => {
                let mut state = self.lock();
                state.physical.bursts.figures.repaid += handles;
                state.physical.bursts.figures.repaid_bytes += released;
            }
            Err(error) => log::debug!("less was repaid than planned: {error}"),
        }
    }
}
