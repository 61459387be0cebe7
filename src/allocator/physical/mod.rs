//! Physical memory: what is held from the driver, and by which rules more is taken and given back.
//!
//! Nothing here reads a clock: work is counted in handles and requests.

pub(crate) mod address;
pub(crate) mod commit;
pub(crate) mod policy;

use std::collections::BTreeMap;

use crate::allocator::config::{Profile, Tuning};
use crate::allocator::extent::handle::{Handles, Holding};
use crate::allocator::extent::record::SpaceId;
use crate::allocator::extent::space::Shard;
use crate::allocator::extent::want::Want;
use crate::allocator::report::{Bursts, GrowthInfo, GrowthReason, PhysicalSegment};
use crate::allocator::size::{GRANULE, PHYSICAL_GRANULE};
use crate::driver::DriverError;
use crate::error::Error;

/// Levels of the budget for stitching. Work that keeps stitching moves up a level: more slack,
/// larger handles, more willingness to wait.
pub(crate) const LEVELS: usize = 6;

/// Handles that may be mapped into views on each level of the stitching budget.
const LEVEL_MAPS: [u64; LEVELS] = [1500, 1500, 1500, 1500, 12_000, u64::MAX];
/// Large requests that earn one such handle back.
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
/// While several streams are about it is twice that part on the first level, up to so many bytes: what is free then
/// changes more from one round to the next, and layouts come back less often.
const SHARED_PART_MAX: u64 = 16 << 20;
/// The share of a handle in the pool grows until the pool has about this many, since the driver's price is
/// per handle: while a stream is alone,
const POOL_HANDLES: u64 = 320;
/// and while several are about, or from the second level on: with 384 a pipeline over three streams holds 1.035 of
/// its peak, with 448 on the later levels random programs hold 1.072.
const SHARED_POOL_HANDLES: u64 = 640;
const POOL_HANDLE_MAX: u64 = 32 << 20;
/// Where time counts more than memory, a growth is one handle of up to so many shares, or this many handles,
/// none of more shares than that.
const QUICK_HANDLES: u64 = 4;
/// Handles of a growth of a graph pool are this part of it, in whole granules: few, as somebody captures meanwhile.
const GRAPH_PARTS: u64 = 8;
/// Near a hard limit handles are at most this part of it.
const SCARCE_PART: u64 = 2048;

/// Tokens for bursts at the start.
pub(crate) const TOKENS: u64 = 16;
/// Large requests that earn another token: 10,000 allocations and frees.
pub(crate) const REQUESTS_PER_TOKEN: u64 = 5000;
/// Handles that any allocation may map: 2 ms at the 20 us that mapping one costs on an H200.
pub(crate) const MAPS: usize = 100;
/// Handles that an allocation with a token may map: 6 ms.
pub(crate) const BURST_MAPS: usize = 300;
/// Handles that one allocation gives back: 0.3 ms at the 33.5 us that unmapping and releasing one
/// costs on an H200.
pub(crate) const REPAID: usize = 8;
/// Above this part of the limit the bounds do not hold. New handles are small there
/// (`Physical::handle_size`); with larger ones, and bounds up to 0.8 of the limit, the smallest limit
/// of recorded work rose by 1.5 points.
pub(crate) const NEAR_PART: u64 = 2;

/// Whom new memory is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sharers {
    /// A stream that is alone.
    One,
    /// A stream among several.
    Several,
    /// A graph pool.
    Pool,
}

/// The physical memory of an allocator.
#[derive(Debug)]
pub(crate) struct Physical {
    /// What is held from the driver, by its home address.
    pub holdings: BTreeMap<u64, Holding>,
    /// The handles of the large arena by number.
    pub handles: Handles,
    /// Records of handles that could not be unmapped yet: nobody can use them.
    pub quarantined: Vec<u32>,
    /// Reserved address ranges: base to bytes.
    pub spans: BTreeMap<u64, u64>,
    /// Bytes that growth under way will add.
    pub planned: u64,
    /// Bytes that may be held from the driver at most.
    pub limit: Option<u64>,
    /// The driver refused to hold more than this; lifted when something is released, and before a
    /// request fails or waits for it.
    pub full_at: Option<u64>,
    /// Why memory was last added.
    pub last_growth: Option<GrowthInfo>,
    /// Level of the stitching budget.
    pub level: usize,
    /// What was spent on the level of the stitching budget.
    pub work: u64,
    /// What the configuration says of cap, budget and handles.
    pub tuning: Tuning,
    /// Allocations that map very many handles, and what they owe.
    pub bursts: Account,
}

impl Physical {
    pub(crate) fn new(limit: Option<u64>, tuning: Tuning) -> Self {
        Physical {
            holdings: BTreeMap::new(),
            handles: Handles::default(),
            quarantined: Vec::new(),
            spans: BTreeMap::new(),
            planned: 0,
            limit,
            full_at: None,
            last_growth: None,
            level: 0,
            work: 0,
            tuning,
            bursts: Account::default(),
        }
    }

    /// Handles, by their homes, are mapped in one view more, or one less.
    pub(crate) fn viewed(&mut self, homes: impl IntoIterator<Item = u64>, more: bool) {
        for home in homes {
            if let Some(holding) = self.holdings.get_mut(&home) {
                holding.views = if more {
                    holding.views + 1
                } else {
                    holding.views - 1
                };
            }
        }
    }

    /// The handle whose home this is.
    pub(crate) fn handle_at(&self, home: u64) -> Option<u64> {
        self.holdings.get(&home)?.handle
    }

    /// Counts a large request, which makes up for a part of a map.
    pub(crate) fn large_request(&mut self, want: &Want) {
        if want.space == SpaceId::Large {
            self.work = self.work.saturating_sub(1);
            self.bursts.requests += 1;
        }
    }

    pub(crate) fn home_segments(&self, ptr: u64, end: u64) -> Vec<PhysicalSegment> {
        let first = self.holdings.range(..=ptr).next_back();
        let first = first.map_or(ptr, |(base, _)| *base);
        let held = self.holdings.range(first..end);
        held.filter_map(|(base, holding)| {
            let (from, to) = (ptr.max(*base), end.min(base + holding.bytes));
            (from < to).then(|| PhysicalSegment {
                address: from,
                bytes: to - from,
                handle: holding.handle,
                offset: from - base,
                handle_bytes: holding.bytes,
            })
        })
        .collect()
    }

    /// Cuts a range of address space where one reservation ends and the next begins: no handle may
    /// lie in two.
    pub(crate) fn stretches(&self, addr: u64, bytes: u64) -> Vec<(u64, u64)> {
        let (mut stretches, mut at) = (Vec::new(), addr);
        for (base, _) in self.spans.range(addr + 1..addr + bytes) {
            stretches.push((at, base - at));
            at = *base;
        }
        stretches.push((at, addr + bytes - at));
        stretches
    }

    /// Sizes of the handles for a range.
    pub(crate) fn tiles(&self, addr: u64, bytes: u64, size: u64) -> Vec<u64> {
        let stretches = self.stretches(addr, bytes).into_iter();
        stretches.flat_map(|(_, part)| tile(part, size)).collect()
    }

    /// Why a pointer is no live block.
    pub(crate) fn not_live(&self, ptr: u64) -> Error {
        match self.ours(ptr) {
            true => Error::NotLive { ptr },
            false => Error::NotOurs { ptr },
        }
    }

    /// Whether an address lies in memory that the allocator holds.
    pub(crate) fn ours(&self, ptr: u64) -> bool {
        self.holdings
            .range(..=ptr)
            .next_back()
            .is_some_and(|(base, h)| ptr < base + h.bytes)
    }

    // ---- the budget for stitching, and the soft cap ---------------------------------------------

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
        let figures = &mut self.bursts.figures;
        figures.largest = figures.largest.max(maps as u64);
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

    /// How many handles the pool should have.
    fn pool_handles(&self, sharers: Sharers) -> u64 {
        match (self.tuning.profile, self.level, sharers) {
            (Profile::Quick, ..) | (Profile::Dense, 0, Sharers::One) => POOL_HANDLES,
            (Profile::Dense, ..) => SHARED_POOL_HANDLES,
        }
    }

    /// Size of the handles for a growth by `missing` bytes, when so many are reserved.
    pub(crate) fn handle_size(
        &self,
        want: &Want,
        missing: u64,
        reserved: u64,
        sharers: Sharers,
    ) -> u64 {
        if want.space == SpaceId::Small {
            return PHYSICAL_GRANULE;
        }
        let handles = self.pool_handles(sharers);
        let mut share = PHYSICAL_GRANULE;
        while share * handles < reserved && share < POOL_HANDLE_MAX {
            share *= 2;
        }
        let request = u64::from(want.granules) * GRANULE;
        let mut part = request / HANDLE_PARTS[self.level];
        if sharers == Sharers::Several && self.level == 0 {
            part = (2 * part).min(SHARED_PART_MAX).max(part);
        }
        if sharers == Sharers::Pool {
            part = part.max(missing / GRAPH_PARTS);
        }
        let part = part / PHYSICAL_GRANULE * PHYSICAL_GRANULE;
        let quick = match self.tuning.profile {
            Profile::Dense => 0,
            Profile::Quick => quick_size(missing, share),
        };
        let size = self.tuning.handle.unwrap_or(share.max(part).max(quick));
        match self.limit {
            Some(limit) if reserved + missing > limit / 2 => {
                let scarce = limit / SCARCE_PART / PHYSICAL_GRANULE * PHYSICAL_GRANULE;
                size.min(scarce.max(PHYSICAL_GRANULE))
            }
            _ => size,
        }
    }
}

/// Size of the handles for a growth by `missing` bytes where few count more than small ones.
fn quick_size(missing: u64, share: u64) -> u64 {
    let most = share * QUICK_HANDLES;
    if missing <= most {
        return missing;
    }
    let part = missing / QUICK_HANDLES / PHYSICAL_GRANULE * PHYSICAL_GRANULE;
    part.min(most)
}

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

/// A growth that failed, with what could not be undone.
#[derive(Debug)]
pub(crate) struct GrowthFailure {
    pub error: DriverError,
    /// Handles that may still be mapped: (address, bytes, handle).
    pub mapped: Vec<(u64, u64, u64)>,
}

/// How the two calls went that give a handle back: the unmapping, and the release. The second counts
/// only if the first is good.
pub(crate) type GivenBack = (Result<(), DriverError>, Result<(), DriverError>);

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
    pub(crate) fn tokens(&self) -> u64 {
        let earned = TOKENS + self.requests / REQUESTS_PER_TOKEN;
        earned.saturating_sub(self.figures.spent)
    }
}

/// Memory that is about to be made: a claimed extent, and the handles to map there.
#[derive(Debug)]
pub(crate) struct Fresh {
    pub space: SpaceId,
    pub id: u32,
    pub shards: Vec<Shard>,
    /// First byte to map.
    pub addr: u64,
    /// Sizes of the handles to make, in address order.
    pub sizes: Vec<u64>,
    /// The range, cut where a reservation ends: start and bytes.
    pub stretches: Vec<(u64, u64)>,
    /// Why there was too little.
    pub reason: GrowthReason,
}

impl Fresh {
    pub(crate) fn bytes(&self) -> u64 {
        self.sizes.iter().sum()
    }
}

/// Memory to give back.
#[derive(Debug)]
pub(crate) struct Release {
    pub space: SpaceId,
    pub id: u32,
    pub shards: Vec<Shard>,
    pub addr: u64,
    pub bytes: u64,
    pub handle: Option<u64>,
}

/// Sizes of the handles for `bytes`: whole ones, then halves down to the granule.
pub(crate) fn tile(bytes: u64, size: u64) -> Vec<u64> {
    let (mut sizes, mut left, mut size) = (Vec::new(), bytes, size.max(PHYSICAL_GRANULE));
    while left > 0 {
        if size <= left {
            sizes.push(size);
            left -= size;
        } else {
            size = (size / 2 / PHYSICAL_GRANULE * PHYSICAL_GRANULE).max(PHYSICAL_GRANULE);
        }
    }
    sizes
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
            (
                slack,
                physical.handle_size(&want, want.requested, 0, Sharers::One) >> 20,
            )
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
    fn few_handles_are_made_where_time_counts() {
        let mib = 1 << 20;
        let tuning = |profile| crate::allocator::Config::new().profile(profile).tuning();
        let made = |profile, missing: u64| {
            let physical = Physical::new(None, tuning(profile));
            let want = Want {
                space: SpaceId::Large,
                stream: 0,
                granules: (missing / GRANULE) as u32,
                align: 1,
                requested: missing,
                single: false,
                views: true,
            };
            // A share of the pool is 4 MiB.
            let held = 2 * POOL_HANDLES * mib + 1;
            let size = physical.handle_size(&want, missing, held, Sharers::One);
            tile(missing, size).len()
        };
        for (missing, few, many) in [(16, 1, 4), (24, 4, 6), (64, 4, 16), (128, 8, 32)] {
            assert_eq!(made(Profile::Quick, missing * mib), few, "{missing} MiB");
            assert_eq!(made(Profile::Dense, missing * mib), many, "{missing} MiB");
        }
    }

    /// A handle's share of the pool, in MiB, for a request that is too small to ask for more.
    #[test]
    fn handles_are_larger_while_a_stream_is_alone() {
        let mib = 1 << 20;
        let mut physical = Physical::new(None, crate::allocator::Config::new().tuning());
        let want = Want {
            space: SpaceId::Large,
            stream: 0,
            granules: (2 * mib / GRANULE) as u32,
            align: 1,
            requested: 2 * mib,
            single: false,
            views: true,
        };
        let shares = |physical: &Physical, sharers| {
            let size = |held: u64| physical.handle_size(&want, 2 * mib, held * mib, sharers) / mib;
            [640, 641, 1280, 1281, 1792, 1793].map(size)
        };
        let parts = |physical: &Physical, sharers| {
            let size = |mib: u64| {
                let granules = (mib << 20 >> 9) as u32;
                physical.handle_size(&Want { granules, ..want }, mib << 20, 0, sharers) >> 20
            };
            [128, 240, 256, 512, 960].map(size)
        };
        let all = [Sharers::One, Sharers::Several, Sharers::Pool];
        let [one, several, pool] = all;
        assert_eq!(shares(&physical, one), [2, 4, 4, 8, 8, 8]);
        assert_eq!(parts(&physical, one), [4, 6, 8, 16, 30]);
        assert_eq!(shares(&physical, several), [2, 2, 2, 4, 4, 4]);
        assert_eq!(parts(&physical, several), [8, 14, 16, 16, 30]);
        assert_eq!(shares(&physical, pool), [2, 2, 2, 4, 4, 4]);
        assert_eq!(parts(&physical, pool), [16, 30, 32, 64, 120]);
        physical.level = 1;
        for sharers in all {
            assert_eq!(shares(&physical, sharers), [2, 2, 2, 4, 4, 4]);
        }
        for sharers in [one, several] {
            assert_eq!(parts(&physical, sharers), [8, 14, 16, 32, 60]);
        }
        assert_eq!(parts(&physical, pool), [16, 30, 32, 64, 120]);
        let quick = crate::allocator::Config::new().profile(Profile::Quick);
        let mut physical = Physical::new(None, quick.tuning());
        physical.level = 1;
        for sharers in all {
            assert_eq!(shares(&physical, sharers), [2, 4, 4, 8, 8, 8]);
        }
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

    #[test]
    fn tiling_covers_exactly_with_the_fewest_pieces_of_halving_size() {
        let mib = 1 << 20;
        assert_eq!(tile(14 * mib, 8 * mib), [8 * mib, 4 * mib, 2 * mib]);
        assert_eq!(tile(6 * mib, 6 * mib), [6 * mib]);
        assert_eq!(tile(2 * mib, 64 * mib), [2 * mib]);
        for granules in 1..200 {
            for size in [1, 2, 3, 5, 8, 16] {
                let sizes = tile(granules * PHYSICAL_GRANULE, size * PHYSICAL_GRANULE);
                assert_eq!(sizes.iter().sum::<u64>(), granules * PHYSICAL_GRANULE);
                assert!(
                    sizes
                        .iter()
                        .all(|s| s % PHYSICAL_GRANULE == 0 && *s <= size * PHYSICAL_GRANULE)
                );
            }
        }
    }
}
