//! By which rules more memory is taken from the driver: the budget for stitching, and what follows from how
//! much of it is spent.
//!
//! Nothing here reads a clock: work is counted in handles and requests.

use crate::allocator::extent::record::SpaceId;
use crate::allocator::extent::want::Want;
use crate::allocator::physical::bursts::NEAR_PART;
use crate::allocator::physical::{LEVELS, Physical};
use crate::allocator::size::{GRANULE, PHYSICAL_GRANULE};

/// Handles that may be mapped into views on each level,
const LEVEL_MAPS: [u64; LEVELS] = [1500, 1500, 1500, 1500, 12_000, u64::MAX];
/// less one for so many large requests.
pub(crate) const REQUESTS_PER_MAP: u64 = 50;
/// A handle counts so many times if it is mapped while streams have work under way: what is free
/// then depends on what happens to be complete, layouts come back less often, and room or a wait is
/// the better remedy.
const IN_FLIGHT: u64 = 6;
/// The last level is for work that never comes to rest, whatever it waits for: none counts more on
/// the way there.
const LAST_STEP: usize = LEVELS - 2;
/// Slack of the soft cap over the peak of live requested bytes, by level: a share in 1/1000, or an
/// amount, whichever is more. Values from simulation over recorded work.
const CAP_SHARES: [u64; LEVELS] = [10, 20, 30, 40, 50, 68];
/// It is this at most while streams have work under way: what stitches add goes beyond the cap then.
const CAP_SHARE_IN_FLIGHT: u64 = 60;
const CAP_SLACK: u64 = 16 << 20;

/// A new handle is at least this part of the request that it is made for, by level. Most memory is made
/// on the levels between, and what is large there is pinned by a small part for ever: with an eighth from
/// the fourth level on, random programs on eight streams that run 200 rows late held 1.10 of their peak
/// instead of 1.07.
const HANDLE_PARTS: [u64; LEVELS] = [32, 16, 16, 16, 16, 8];
/// The share of a handle in the pool grows until the pool has about this many.
const POOL_HANDLES: u64 = 1024;
const POOL_HANDLE_MAX: u64 = 32 << 20;
/// Near a hard limit handles are at most this part of it.
const SCARCE_PART: u64 = 2048;

/// Slack of the soft cap in 1/1000.
fn cap_share(level: usize, in_flight: bool) -> u64 {
    match in_flight {
        true => CAP_SHARES[level].min(CAP_SHARE_IN_FLIGHT),
        false => CAP_SHARES[level],
    }
}

/// Whether work on this level will hardly come to rest. What is under way may make it count more than it
/// is, up to the last level but one.
fn is_churning(level: usize, in_flight: bool) -> bool {
    level > LAST_STEP || (level == LAST_STEP && !in_flight)
}

impl Physical {
    /// Whether layouts will hardly come back, so that few mappings now count more than a layout that can
    /// be used again. `in_flight`: streams have work under way, as far as is known.
    pub(crate) fn churning(&self, in_flight: bool) -> bool {
        is_churning(self.level, in_flight)
    }

    /// Bytes that growth should not pass while anything else helps, after so many live at once.
    pub(crate) fn soft_cap(&self, peak_live: u64, in_flight: bool) -> u64 {
        let share = match self.tuning.slack {
            Some(share) => (peak_live as f64 * share) as u64,
            None => peak_live / 100 * cap_share(self.level, in_flight) / 10,
        };
        peak_live.saturating_add(share.max(CAP_SLACK))
    }

    /// Counts handles that a stitch mapped.
    pub(crate) fn spent(&mut self, maps: usize, in_flight: bool) {
        self.bursts.mapped(maps);
        let weight = match self.level < LAST_STEP && in_flight {
            true => IN_FLIGHT,
            false => 1,
        };
        self.work += maps as u64 * REQUESTS_PER_MAP * weight;
        let budget = self.tuning.budget.unwrap_or(LEVEL_MAPS[self.level]);
        let spent = self.work / REQUESTS_PER_MAP > budget;
        if spent && self.level + 1 < LEVELS {
            self.level += 1;
            self.work = 0;
        }
    }

    /// Bytes that may be held from the driver.
    fn bound(&self) -> u64 {
        let limit = self.limit.unwrap_or(u64::MAX);
        limit.min(self.full_at.unwrap_or(u64::MAX))
    }

    /// Bytes that may still be taken from the driver when so many are held.
    pub(crate) fn room(&self, held: u64) -> u64 {
        self.bound().saturating_sub(held)
    }

    /// Whether to hold so many bytes leaves the bounds in force of what one allocation may map.
    pub(crate) fn bounds_hold(&self, held: u64) -> bool {
        held <= self.bound() / NEAR_PART
    }

    /// Size of the handles for a growth by `missing` bytes, when so many are reserved.
    pub(crate) fn handle_size(&self, want: &Want, missing: u64, reserved: u64) -> u64 {
        if want.space == SpaceId::Small {
            return PHYSICAL_GRANULE;
        }
        let mut share = PHYSICAL_GRANULE;
        while share * POOL_HANDLES < reserved && share < POOL_HANDLE_MAX {
            share *= 2;
        }
        let request = u64::from(want.granules) * GRANULE;
        let part = request / HANDLE_PARTS[self.level] / PHYSICAL_GRANULE * PHYSICAL_GRANULE;
        let size = self.tuning.handle.unwrap_or(share.max(part));
        match self.limit {
            Some(limit) if reserved + missing > limit / 2 => {
                let scarce = limit / SCARCE_PART / PHYSICAL_GRANULE * PHYSICAL_GRANULE;
                size.min(scarce.max(PHYSICAL_GRANULE))
            }
            _ => size,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stitching_beyond_the_budget_raises_the_level() {
        let tuning = crate::allocator::Config::new().tuning();
        let mut physical = Physical::new(None, tuning);
        let want = Want {
            space: SpaceId::Large,
            stream: 0,
            granules: (960 << 20 >> 9) as u32,
            align: 1,
            requested: 960 << 20,
            single: false,
            views: true,
        };
        let figures = |physical: &Physical| {
            let slack = (physical.soft_cap(10_000 << 20, false) - (10_000 << 20)) >> 20;
            (slack, physical.handle_size(&want, want.requested, 0) >> 20)
        };
        let levels = [(100, 30), (200, 60), (300, 60), (400, 60), (500, 60)];
        for (level, expected) in levels.into_iter().enumerate() {
            assert_eq!((physical.level, figures(&physical)), (level, expected));
            physical.spent(LEVEL_MAPS[level] as usize, false);
            assert_eq!(physical.level, level, "the budget is just spent");
            // As many requests make up for one map, so one more is still within it.
            (0..REQUESTS_PER_MAP).for_each(|_| physical.large_request(&want));
            physical.spent(1, false);
            assert_eq!(physical.level, level);
            physical.spent(1, false);
        }
        physical.spent(1 << 40, false);
        assert_eq!(
            (physical.level, figures(&physical)),
            (LEVELS - 1, (680, 120))
        );
    }

    #[test]
    fn slack_grows_with_the_level_and_less_while_work_is_under_way() {
        let shares = |in_flight| (0..LEVELS).map(move |level| cap_share(level, in_flight));
        assert!(shares(false).eq([10, 20, 30, 40, 50, 68]));
        assert!(shares(true).eq([10, 20, 30, 40, 50, 60]));
    }

    #[test]
    fn work_churns_on_the_last_levels() {
        let levels = |in_flight| (0..LEVELS).filter(move |level| is_churning(*level, in_flight));
        assert!(levels(false).eq([4, 5]));
        assert!(levels(true).eq([5]), "it counts more than it maps");
    }
}
