//! Growth of a pool: planned before any driver call, and committed or reverted after it.

use std::collections::BTreeMap;

use crate::allocator::graph::arena::{Arena, Fit, Handle, Part, Place, Tag, View};
use crate::allocator::graph::few::Few;
use crate::allocator::physical::{GrowthFailure, tile};
use crate::allocator::size::{GRANULE, PHYSICAL_GRANULE};

/// A planned growth for a request: new memory, free memory beside it, or both. All of it is out of circulation
/// meanwhile.
#[derive(Debug)]
pub(crate) struct Plan {
    /// Its parts of free memory are [set aside](Arena::aside).
    pub place: Place,
    /// Home of the new handles, and their sizes.
    pub fresh: Option<(u64, Vec<u64>)>,
    /// Base of a view, and its handles by their homes, including new ones.
    pub view: Option<(u64, View)>,
    /// Existing memory that the view shows: bytes and handle.
    pub shown: Vec<(u64, Option<u64>)>,
}

impl Plan {
    /// Creates a plan for new handles at a home, all of which become free memory.
    pub(crate) fn free((home, sizes): (u64, Vec<u64>)) -> Plan {
        Plan {
            place: Place {
                addr: home,
                parts: Few::new(),
                open: Vec::new(),
            },
            fresh: Some((home, sizes)),
            view: None,
            shown: Vec::new(),
        }
    }

    /// Returns the bytes of new memory.
    pub(crate) fn fresh_bytes(&self) -> u64 {
        let sizes = self.fresh.iter().flat_map(|(_, sizes)| sizes);
        sizes.sum()
    }
}

/// Why no plan is possible.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum PlanFailure {
    /// Addresses for this many bytes at home are missing.
    Homes(u64),
    /// Addresses for this many bytes of a view are missing.
    Sites(u64),
    /// The plan exceeds the allowed memory by this many bytes.
    Memory(u64),
}

/// The resources that a plan may use.
pub(crate) struct PlanResources<'a> {
    /// Bytes that may be added.
    pub room: u64,
    /// Whether views may be created.
    pub views: bool,
    /// Size of new handles for a number of missing bytes.
    pub size: &'a dyn Fn(u64) -> u64,
}

/// The memory that a view would show, in its order.
#[derive(Debug, Default)]
struct Stitch {
    /// Bytes at the start of the first handle that are not usable.
    skip: u64,
    handles: Vec<(u64, u64)>,
    /// The last handle, of which only the front is free.
    front: Option<(u64, u64)>,
    /// Bytes of new memory between these.
    fresh: u64,
}

/// A place for new memory at home: the start of its run, the hole after it, and the bytes of new memory.
#[derive(Debug, Clone, Copy)]
struct Opening {
    start: u64,
    hole: u64,
    fresh: u64,
}

impl Arena {
    /// Plans the room for a request that fits nowhere, with as little new memory as possible: after free memory at
    /// home, or in a new view.
    pub(crate) fn plan(
        &mut self,
        fit: Fit,
        runs: &[(u64, u64)],
        means: &PlanResources<'_>,
    ) -> Result<Plan, PlanFailure> {
        let opening = self.opening(fit, runs);
        // Leased addresses and views begin at a multiple of a physical granule; larger alignments are not supported in
        // views.
        let aligned = u64::from(fit.align) * GRANULE <= PHYSICAL_GRANULE;
        let stitch = (means.views && aligned).then(|| self.stitch(fit, runs));
        let at_home = opening.map_or(u64::MAX, |opening| opening.fresh);
        if let Some(stitch) = stitch
            && !stitch.handles.is_empty()
            && stitch.fresh < at_home.min(fit.bytes().next_multiple_of(PHYSICAL_GRANULE))
        {
            return self.plan_view(fit, stitch, means);
        }
        let Some(opening) = opening else {
            let slack = if aligned { 0 } else { fit.aligned(1) - 1 };
            return Err(PlanFailure::Homes(fit.bytes() + slack));
        };
        if opening.fresh > means.room {
            return Err(PlanFailure::Memory(opening.fresh));
        }
        let addr = fit.aligned(opening.start);
        let part = Part {
            home: addr,
            granules: fit.granules,
        };
        let before = Part {
            home: addr.min(opening.hole),
            granules: ((opening.hole - addr.min(opening.hole)) / GRANULE) as u32,
        };
        let taken = self.take(before);
        self.aside.insert(addr, taken);
        self.homes.cut(opening.hole, opening.fresh);
        let sizes = tile(opening.fresh, (means.size)(opening.fresh));
        Ok(Plan {
            place: Place {
                addr,
                parts: Few::from([part]),
                open: Vec::new(),
            },
            fresh: Some((opening.hole, sizes)),
            view: None,
            shown: Vec::new(),
        })
    }

    /// Returns the opening at home that needs the least new memory, the lowest on ties.
    fn opening(&self, fit: Fit, runs: &[(u64, u64)]) -> Option<Opening> {
        let openings = self.homes.holes().filter_map(|(hole, room)| {
            let at = runs.partition_point(|run| run.1 < hole);
            let run = runs.get(at).filter(|run| run.1 == hole);
            let beside = run.filter(|_| !self.homes.spans.contains_key(&hole));
            let start = beside.map_or(hole, |run| run.0);
            let end = fit.aligned(start) + fit.bytes();
            let fresh = end.saturating_sub(hole).next_multiple_of(PHYSICAL_GRANULE);
            (fresh > 0 && fresh <= room).then_some(Opening { start, hole, fresh })
        });
        openings.min_by_key(|opening| (opening.fresh, opening.hole))
    }

    /// Returns the handles of a view for a request: one whose end is free, whole ones, and one whose front is free, the
    /// largest of each.
    fn stitch(&self, fit: Fit, runs: &[(u64, u64)]) -> Stitch {
        let (mut whole, mut back, mut heads) = (Vec::new(), None, Vec::new());
        let mut at = 0;
        for (home, handle) in &self.handles {
            let end = home + handle.bytes;
            while runs.get(at).is_some_and(|run| run.1 <= *home) {
                at += 1;
            }
            let inside = runs[at..].iter().take_while(|run| run.0 < end);
            for run in inside {
                let (from, to) = (run.0.max(*home), run.1.min(end));
                let begins = fit.aligned(from - home);
                if to - from == handle.bytes {
                    whole.push((handle.bytes, *home));
                } else if to == end && begins < handle.bytes {
                    back = back.max(Some((handle.bytes - begins, *home)));
                } else if from == *home {
                    heads.push((to - from, *home));
                }
            }
        }
        let mut stitch = Stitch::default();
        let mut missing = fit.bytes();
        whole.sort_unstable_by_key(|(bytes, home)| (u64::MAX - bytes, *home));
        let all: u64 = whole.iter().map(|(bytes, _)| bytes).sum();
        let size = |home: u64| self.handles.get(&home).map_or(0, |handle| handle.bytes);
        if all < missing
            && let Some((bytes, home)) = back
        {
            stitch.skip = size(home) - bytes;
            stitch.handles.push((home, size(home)));
            missing -= bytes.min(missing);
        }
        for (bytes, home) in whole {
            if missing == 0 {
                break;
            }
            stitch.handles.push((home, bytes));
            missing -= bytes.min(missing);
        }
        let fresh = missing.next_multiple_of(PHYSICAL_GRANULE);
        // If a view showed a handle twice, its bytes could be allocated twice.
        heads.retain(|(_, home)| Some(*home) != back.map(|(_, back)| back));
        if let Some((bytes, home)) = heads.into_iter().max().filter(|_| missing > 0) {
            let less = missing.saturating_sub(bytes);
            let less = less.next_multiple_of(PHYSICAL_GRANULE);
            if less < fresh {
                stitch.front = Some((home, size(home)));
                stitch.fresh = less;
                return stitch;
            }
        }
        stitch.fresh = fresh;
        stitch
    }

    fn plan_view(
        &mut self,
        fit: Fit,
        stitch: Stitch,
        means: &PlanResources<'_>,
    ) -> Result<Plan, PlanFailure> {
        if stitch.fresh > means.room {
            return Err(PlanFailure::Memory(stitch.fresh));
        }
        let home = match stitch.fresh {
            0 => None,
            bytes => Some(self.homes.lowest(bytes).ok_or(PlanFailure::Homes(bytes))?),
        };
        let sizes = home.map_or_else(Vec::new, |_| tile(stitch.fresh, (means.size)(stitch.fresh)));
        let mut handles = stitch.handles;
        let mut at = home.unwrap_or(0);
        for bytes in &sizes {
            handles.push((at, *bytes));
            at += bytes;
        }
        handles.extend(stitch.front);
        let view = View { handles };
        let bytes = view.bytes();
        let base = self.sites.lowest(bytes).ok_or(PlanFailure::Sites(bytes))?;
        let (mut parts, mut skip, mut left) = (Few::new(), stitch.skip, fit.bytes());
        for (home, bytes) in &view.handles {
            let used = left.min(bytes - skip);
            if used > 0 {
                parts.push(Part {
                    home: home + skip,
                    granules: (used / GRANULE) as u32,
                });
            }
            (skip, left) = (0, left - used);
        }
        self.sites.cut(base, bytes);
        if let Some(home) = home {
            self.homes.cut(home, stitch.fresh);
        }
        let new =
            |part: &&Part| !home.is_some_and(|at| (at..at + stitch.fresh).contains(&part.home));
        let old: Vec<Part> = parts.iter().filter(new).copied().collect();
        let taken = old.into_iter().flat_map(|part| self.take(part)).collect();
        let addr = base + stitch.skip;
        self.aside.insert(addr, taken);
        Ok(Plan {
            place: Place {
                addr,
                parts,
                open: Vec::new(),
            },
            fresh: home.map(|home| (home, sizes)),
            shown: self.shown(&view),
            view: Some((base, view)),
        })
    }

    fn shown(&self, view: &View) -> Vec<(u64, Option<u64>)> {
        let known = |home: &u64| self.handles.get(home).map(|known| known.handle);
        let handles = view.handles.iter();
        handles.map(|(home, bytes)| (*bytes, known(home))).collect()
    }

    /// Commits a plan with its new handles. Returns the block's place, which stays reserved until the block is
    /// [entered](Arena::live).
    pub(crate) fn planned(&mut self, mut plan: Plan, handles: &[u64]) -> Place {
        let taken = self.aside.remove(&plan.place.addr).unwrap_or_default();
        plan.place.open = taken.into_iter().flat_map(|(_, tag)| tag.pending).collect();
        if let Some((home, sizes)) = plan.fresh {
            let mut at = home;
            for (bytes, handle) in sizes.into_iter().zip(handles) {
                let handle = *handle;
                self.handles.insert(at, Handle { handle, bytes });
                self.mapped += bytes;
                at += bytes;
            }
            // The block takes the front of the new memory; the rest follows it.
            let used = plan.place.parts.iter().map(Part::end);
            let used = used.filter(|end| (home..=at).contains(end)).max();
            let from = used.unwrap_or(home);
            if from < at {
                let rest = Part {
                    home: from,
                    granules: ((at - from) / GRANULE) as u32,
                };
                self.put(rest, Tag::default());
            }
        }
        if let Some((base, view)) = plan.view {
            self.mapped += view.bytes();
            self.views.insert(base, view);
        }
        plan.place
    }

    /// Returns handles that are mapped at home, including those that a failed call left there: address and bytes.
    pub(crate) fn at_home(&self) -> BTreeMap<u64, u64> {
        let handles = self.handles.iter();
        let handles = handles.map(|(home, handle)| (*home, handle.bytes));
        let stuck = self.stuck.iter();
        let stuck = stuck.map(|(home, handle)| (*home, handle.bytes));
        handles.chain(stuck).collect()
    }

    /// Reverts a failed plan, except for what could not be undone, such as these mappings of the view.
    pub(crate) fn revert(&mut self, plan: Plan, failure: &GrowthFailure, lost: &[(u64, u64)]) {
        for (part, tag) in self.aside.remove(&plan.place.addr).unwrap_or_default() {
            self.put(part, tag);
        }
        let mapped = failure.mapped.iter();
        self.stuck.extend(mapped.map(|(home, bytes, handle)| {
            let (handle, bytes) = (*handle, *bytes);
            (*home, Handle { handle, bytes })
        }));
        if let Some((home, sizes)) = plan.fresh
            && failure.mapped.is_empty()
        {
            self.homes.put(home, sizes.iter().sum());
        }
        match plan.view {
            Some((base, view)) if lost.is_empty() => self.sites.put(base, view.bytes()),
            _ => self.lost.extend(lost.iter().copied()),
        }
    }
}
