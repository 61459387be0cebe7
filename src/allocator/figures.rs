//! How the memory that is held lies: what is free in which pieces and for whom, what views show, and
//! why there is as much of it.

use super::burst::Bursts;
use super::records::COMPLETE;
use super::size::GRANULE;
use super::state::{State, Want};

/// Why memory was added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum GrowthReason {
    /// All free memory together was less than the request.
    Short,
    /// There was enough free memory, but in pieces that were too small.
    Fragmented,
    /// There was a place, which other streams may still use.
    Pending,
}

impl GrowthReason {
    /// One word for people and machines.
    pub fn name(self) -> &'static str {
        match self {
            GrowthReason::Short => "short",
            GrowthReason::Fragmented => "fragmented",
            GrowthReason::Pending => "pending",
        }
    }
}

/// One growth of the memory that is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct GrowthInfo {
    /// Why it was needed.
    pub reason: GrowthReason,
    /// Bytes of the request that needed it.
    pub requested: u64,
    /// Bytes that were added.
    pub added: u64,
    /// Whether more was held then than the soft cap allows.
    pub beyond_cap: bool,
}

/// Whether the device was seen to keep memory the same through two addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum SelfTest {
    /// No view was needed yet, or none may be built: nothing was tested.
    #[default]
    NotRun,
    /// Switched off: views are used untested.
    Off,
    /// What was written through one address was read through the other.
    Passed,
    /// It was not: no views are used.
    Failed,
}

impl SelfTest {
    /// A few words for people and machines.
    pub fn name(self) -> &'static str {
        match self {
            SelfTest::NotRun => "not run",
            SelfTest::Off => "off",
            SelfTest::Passed => "passed",
            SelfTest::Failed => "failed",
        }
    }
}

/// How the packed policy stands; of the classic one only what is said there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Packing {
    /// Bytes that growth does not pass while anything else helps. 0 under the classic policy, and
    /// before the first request.
    pub soft_cap: u64,
    /// Level of the stitching budget, from 0 to 5: the higher, the more slack, the larger the handles
    /// and the more waits.
    pub level: u32,
    /// Views (a number).
    pub views: u64,
    /// Handles mapped in them (a number; one that lies in two views counts twice).
    pub view_maps: u64,
    /// Bytes mapped in them.
    pub view_bytes: u64,
    /// Bytes of live blocks in them.
    pub view_live: u64,
    /// Bytes of freed blocks that guards keep.
    pub guarded: u64,
    /// Why memory was last added; both policies.
    pub last_growth: Option<GrowthInfo>,
    /// Allocations that would have mapped very many handles.
    pub bursts: Bursts,
    /// Whether views were tested, and how that ended.
    pub self_test: SelfTest,
}

/// Free memory that one stream keeps from the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stranded {
    /// The driver's id of the stream.
    pub stream_id: u64,
    /// Free bytes that no other stream can have without waiting for this one: the stream may still
    /// use them, or they lie in pages that it owns.
    pub bytes: u64,
    /// Those of them in its pages.
    pub in_pages: u64,
}

/// External fragmentation: free memory, and how far it can serve.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Fragmentation {
    /// Free bytes, whatever they are pending on.
    pub free: u64,
    /// Bytes of the largest run of adjacent free memory, whatever it is pending on.
    pub largest: u64,
    /// What each stream keeps from the others, most first.
    pub stranded: Vec<Stranded>,
    /// Bytes of live blocks that lie in views: scattered memory put to use.
    pub view_live: u64,
}

impl Fragmentation {
    /// The share of the free memory that lies outside its largest run, from 0 (all free memory is
    /// one run) to 1.
    pub fn ratio(&self) -> f64 {
        match self.free {
            0 => 0.0,
            free => 1.0 - self.largest as f64 / free as f64,
        }
    }
}

impl State {
    /// The figures of how memory lies that cost little.
    pub(crate) fn packing(&self) -> Packing {
        let view_granules: u64 = self.views.values().map(|v| u64::from(v.granules)).sum();
        Packing {
            soft_cap: match self.packed && self.peak_live > 0 {
                true => self.soft_cap(),
                false => 0,
            },
            level: self.level as u32,
            views: self.views.len() as u64,
            view_maps: self.view_maps() as u64,
            view_bytes: view_granules * GRANULE,
            view_live: self.lent_bytes,
            guarded: self.guards.bytes(),
            last_growth: self.last_growth,
            bursts: self.bursts.figures(),
            self_test: self.self_test,
        }
    }

    /// A walk over all free memory.
    pub(crate) fn fragmentation(&self) -> Fragmentation {
        Fragmentation {
            free: self.free_bytes(),
            largest: self.largest_run(),
            stranded: self.stranded(),
            view_live: self.lent_bytes,
        }
    }

    pub(crate) fn largest_run(&self) -> u64 {
        let mut largest = 0;
        for space in self.spaces() {
            let mut pieces: Vec<(u64, u64)> = space
                .pieces()
                .map(|e| (e.addr, u64::from(e.granules) * GRANULE))
                .collect();
            pieces.sort_unstable();
            let (mut end, mut run) = (0, 0);
            for (addr, bytes) in pieces {
                run = if addr == end { run + bytes } else { bytes };
                end = addr + bytes;
                largest = largest.max(run);
            }
        }
        largest
    }

    fn stranded(&self) -> Vec<Stranded> {
        let mut by_slot: std::collections::BTreeMap<u32, (u64, u64)> = Default::default();
        for space in self.spaces() {
            for entry in space.pieces() {
                let bytes = u64::from(entry.granules) * GRANULE;
                if self.records[entry.id].stream == COMPLETE {
                    continue;
                }
                let uses = self.records.cold(entry.id).uses.as_slice();
                for u in uses.iter().filter(|u| !self.streams.complete(u)) {
                    by_slot.entry(u.stream).or_default().0 += bytes;
                }
            }
        }
        for (slot, bytes) in self.free_in_fronts() {
            let sum = by_slot.entry(slot).or_default();
            *sum = (sum.0 + bytes, sum.1 + bytes);
        }
        let mut stranded: Vec<Stranded> = by_slot
            .into_iter()
            .map(|(slot, (bytes, in_pages))| Stranded {
                stream_id: self.streams[slot].key.number(),
                bytes,
                in_pages,
            })
            .collect();
        stranded.sort_by_key(|s| std::cmp::Reverse(s.bytes));
        stranded
    }

    /// Why a request needs more memory. `claimed` are the free bytes that a plan has taken for it
    /// already.
    pub(crate) fn growth_reason(&self, want: &Want, claimed: u64) -> GrowthReason {
        let pending = self.streams.several()
            && self
                .finder(want.space, want.stream)
                .is_some_and(|finder| finder.tightest_run(want, u64::MAX).is_some());
        if pending {
            return GrowthReason::Pending;
        }
        let free = self.space(want.space).map_or(0, |s| s.free_bytes());
        if free + claimed >= u64::from(want.granules) * GRANULE {
            GrowthReason::Fragmented
        } else {
            GrowthReason::Short
        }
    }

    /// Notes a growth that has just been booked.
    pub(crate) fn note_growth(&mut self, reason: GrowthReason, want: &Want, added: u64) {
        let held = self.stats.all.reserved.current + self.planned;
        self.last_growth = Some(GrowthInfo {
            reason,
            requested: want.requested,
            added,
            beyond_cap: self.packed && held > self.soft_cap(),
        });
    }
}

/// Bytes of free memory among what a plan has claimed.
pub(crate) fn free_among(shards: &[super::space::Shard]) -> u64 {
    let mapped = shards.iter().filter(|s| s.mapped);
    mapped.map(|s| u64::from(s.granules) * GRANULE).sum()
}
