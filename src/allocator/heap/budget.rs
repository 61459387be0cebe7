//! The budget for stitching, and what follows from how much of it is spent.
//!
//! Nothing here reads a clock: work is counted in handles and requests.

use crate::allocator::heap::Heap;
use crate::allocator::physical::LEVELS;

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

/// Slack of the soft cap in 1/1000.
fn cap_share(level: usize, in_flight: bool) -> u64 {
    match in_flight {
        true => CAP_SHARES[level].min(CAP_SHARE_IN_FLIGHT),
        false => CAP_SHARES[level],
    }
}

/// Whether work on this level will hardly come to rest. What is under way may make it count more than it
/// is, up to the last level but one.
fn is_restless(level: usize, in_flight: bool) -> bool {
    level > LAST_STEP || (level == LAST_STEP && !in_flight)
}

impl Heap {
    /// Whether layouts will hardly come back, so that few mappings now count more than a layout that can
    /// be used again.
    pub(crate) fn restless(&self) -> bool {
        is_restless(self.physical.level, self.streams.in_flight())
    }

    /// Bytes that growth should not pass while anything else helps.
    pub(crate) fn soft_cap(&self) -> u64 {
        let share = match self.physical.tuning.slack {
            Some(share) => (self.peak_live as f64 * share) as u64,
            None => {
                self.peak_live / 100 * cap_share(self.physical.level, self.streams.in_flight()) / 10
            }
        };
        self.peak_live.saturating_add(share.max(CAP_SLACK))
    }

    /// Counts handles that a stitch mapped.
    pub(crate) fn spent(&mut self, maps: usize) {
        self.physical.bursts.mapped(maps);
        let weight = match self.physical.level < LAST_STEP && self.streams.in_flight() {
            true => IN_FLIGHT,
            false => 1,
        };
        self.physical.work += maps as u64 * REQUESTS_PER_MAP * weight;
        let budget = self
            .physical
            .tuning
            .budget
            .unwrap_or(LEVEL_MAPS[self.physical.level]);
        let spent = self.physical.work / REQUESTS_PER_MAP > budget;
        if spent && self.physical.level + 1 < LEVELS {
            self.physical.level += 1;
            self.physical.work = 0;
        }
    }

    /// Bytes below the soft cap.
    pub(crate) fn soft_room(&self) -> u64 {
        self.soft_cap()
            .saturating_sub(self.stats.all.reserved.current + self.physical.planned)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::allocator::extent::record::SpaceId;
    use crate::allocator::extent::want::Want;
    use crate::allocator::physical::policy::Rules;

    #[test]
    fn stitching_beyond_the_budget_raises_the_level() {
        let nobody = (crate::allocator::cache::front::nobody(), 0);
        let table = std::sync::Arc::new(crate::allocator::cache::front::PageTable::new());
        let tuning = crate::allocator::Config::new().tuning();
        let mut heap = Heap::new(nobody, table, 0, Rules::Packed, None, tuning);
        let want = Want {
            space: SpaceId::Large,
            stream: 0,
            granules: (960 << 20 >> 9) as u32,
            align: 1,
            requested: 960 << 20,
            single: false,
            views: true,
        };
        heap.peak_live = 10_000 << 20;
        let figures = |heap: &Heap| {
            let slack = (heap.soft_cap() - heap.peak_live) >> 20;
            (slack, heap.handle_size(&want, want.requested) >> 20)
        };
        let levels = [(100, 30), (200, 60), (300, 60), (400, 60), (500, 60)];
        for (level, expected) in levels.into_iter().enumerate() {
            assert_eq!((heap.physical.level, figures(&heap)), (level, expected));
            heap.spent(LEVEL_MAPS[level] as usize);
            assert_eq!(heap.physical.level, level, "the budget is just spent");
            // As many requests make up for one map, so one more is still within it.
            (0..REQUESTS_PER_MAP).for_each(|_| heap.physical.large_request(&want));
            heap.spent(1);
            assert_eq!(heap.physical.level, level);
            heap.spent(1);
        }
        heap.spent(1 << 40);
        assert_eq!(
            (heap.physical.level, figures(&heap)),
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
    fn work_is_restless_on_the_last_levels() {
        let levels = |in_flight| (0..LEVELS).filter(move |level| is_restless(*level, in_flight));
        assert!(levels(false).eq([4, 5]));
        assert!(levels(true).eq([5]), "it counts more than it maps");
    }
}
