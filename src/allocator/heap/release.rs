//! Less memory: what to give back to the driver, planned before any call is made, and what became of it.

use std::cmp::Reverse;

use crate::allocator::extent::handle::Holding;
use crate::allocator::extent::record::{SpaceId, State as Extent};
use crate::allocator::extent::uses::Uses;
use crate::allocator::heap::Heap;
use crate::allocator::physical::{GivenBack, GrowthFailure, Release};
use crate::allocator::size::GRANULE;
use crate::driver::DriverError;
use crate::event::Kind;

/// The starts and ends of runs of adjacent pieces, by address.
pub(crate) fn joined(pieces: impl Iterator<Item = (u64, u32)>) -> Vec<(u64, u64)> {
    let mut pieces: Vec<_> = pieces.collect();
    pieces.sort_unstable();
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for (start, granules) in pieces {
        let end = start + u64::from(granules) * GRANULE;
        match runs.last_mut() {
            Some(last) if last.1 == start => last.1 = end,
            _ => runs.push((start, end)),
        }
    }
    runs
}

impl Heap {
    /// Memory that can be given back now: whole handles or segments in free memory that `over` says
    /// nobody uses. By address.
    pub(crate) fn releasable(&self, space: SpaceId, over: impl Fn(u32) -> bool) -> Vec<(u64, u64)> {
        // Of suspended memory there is nothing to give back.
        match self.suspended.closed {
            true => Vec::new(),
            false => self.unused(space, over),
        }
    }

    /// Whole handles or segments in free memory that `over` says nobody uses, suspended or not. By address.
    pub(crate) fn unused(&self, space: SpaceId, over: impl Fn(u32) -> bool) -> Vec<(u64, u64)> {
        let Some(at) = self.extents.space(space) else {
            return Vec::new();
        };
        let pieces = at.pieces().filter(|e| over(e.id));
        let runs = joined(pieces.map(|e| (e.addr, e.granules)));
        let whole = self.whole_handles(runs);
        let unmapped = whole.filter(|(_, holding)| holding.views == 0);
        unmapped
            .map(|(addr, holding)| (addr, holding.bytes))
            .collect()
    }

    /// The handles or segments that lie wholly in one of these runs, by address.
    pub(crate) fn whole_handles(
        &self,
        runs: Vec<(u64, u64)>,
    ) -> impl Iterator<Item = (u64, &Holding)> {
        runs.into_iter().flat_map(|(start, end)| {
            let inside = self.physical.holdings.range(start..end);
            let inside = inside.filter(move |(addr, holding)| *addr + holding.bytes <= end);
            inside.map(|(addr, holding)| (*addr, holding))
        })
    }

    /// Whether nobody can touch a free piece any more, as the host has seen. So under the classic policy
    /// as well: that `cuMemFree` waits for the work of its context is nowhere promised.
    pub(crate) fn over(&self, id: u32) -> bool {
        let uses = self.extents.records.cold(id).uses.as_slice();
        uses.iter().all(|u| self.streams.complete(u))
    }

    /// Claims what of some arenas to release so that there is room for `missing` bytes, where there is `room` now: the
    /// smallest that is enough, else the largest first. Empty, with nothing changed, if that cannot be enough.
    /// What a refusal of the driver told is a guess on the safe side, so it stops nothing: all goes
    /// then.
    pub(crate) fn plan_release(
        &mut self,
        arenas: &[SpaceId],
        missing: u64,
        room: u64,
    ) -> Vec<Release> {
        let excess = missing.saturating_sub(room);
        let held = self.held();
        let certain = match self.physical.limit {
            Some(limit) => missing.saturating_sub(limit.saturating_sub(held)),
            None => 0,
        };
        let mut found: Vec<(SpaceId, u64, u64)> = Vec::new();
        for space in arenas.iter().copied() {
            let releasable = self.releasable(space, |id| self.over(id));
            found.extend(
                releasable
                    .into_iter()
                    .map(|(addr, bytes)| (space, addr, bytes)),
            );
        }
        if found.iter().map(|f| f.2).sum::<u64>() < certain {
            return Vec::new();
        }
        let mut chosen = Vec::new();
        let mut left = excess;
        // Highest addresses first among equals: the low end of an arena stays dense.
        found.sort_unstable_by_key(|(_, addr, bytes)| (*bytes, *addr));
        while left > 0 && !found.is_empty() {
            let enough = found.partition_point(|(_, _, bytes)| *bytes < left);
            let at = enough.min(found.len() - 1);
            let pick = found.remove(at);
            left = left.saturating_sub(pick.2);
            chosen.push(pick);
        }
        chosen
            .into_iter()
            .filter_map(|(space, addr, _)| self.claim_holding(space, addr))
            .collect()
    }

    /// Claims what can be released until at most `keep` bytes are cached, what has been idle longest first, and
    /// says how much more could go once pending work is over.
    pub(crate) fn plan_trim(&mut self, keep: u64) -> (Vec<Release>, u64) {
        let mut plan = Vec::new();
        let (mut now, mut later) = (0, 0);
        for space in [SpaceId::Large, SpaceId::Small] {
            let over = self.releasable(space, |id| self.over(id));
            now += over.iter().map(|(_, bytes)| bytes).sum::<u64>();
            later += self
                .releasable(space, |_| true)
                .iter()
                .map(|(_, bytes)| bytes)
                .sum::<u64>();
            plan.extend(over.into_iter().map(|(addr, bytes)| (space, addr, bytes)));
        }
        let held = self.stats.all.reserved.current;
        let mut excess = held.saturating_sub(keep.saturating_add(self.live_totals().1));
        let mut releases = Vec::new();
        // From the top of the address space, so that arenas shrink from their end.
        plan.sort_unstable_by_key(|(_, addr, _)| Reverse(*addr));
        if keep > 0 {
            // Idle longest first; the order from the top stays within one run of free memory.
            plan.sort_by_cached_key(|(space, addr, bytes)| {
                self.extents.freed_at(*space, *addr, *bytes)
            });
        }
        for (space, addr, bytes) in plan {
            if excess == 0 {
                break;
            }
            if let Some(release) = self.claim_holding(space, addr) {
                excess = excess.saturating_sub(bytes);
                releases.push(release);
            }
        }
        (releases, (later - now).min(excess))
    }

    /// Claims what can be released up to so many bytes, what has been idle longest first.
    pub(crate) fn plan_decay(&mut self, bytes: u64) -> Vec<Release> {
        let mut found = self.releasable(SpaceId::Large, |id| self.over(id));
        // From the top of the address space within one run of free memory.
        found.sort_unstable_by_key(|(addr, _)| Reverse(*addr));
        found.sort_by_cached_key(|(addr, bytes)| {
            self.extents.freed_at(SpaceId::Large, *addr, *bytes)
        });
        let mut left = bytes;
        let mut plan = Vec::new();
        for (addr, bytes) in found {
            // None goes that has to stay in part.
            if bytes <= left
                && let Some(release) = self.claim_holding(SpaceId::Large, addr)
            {
                left -= bytes;
                plan.push(release);
            }
        }
        plan
    }

    /// Most bytes that large blocks had at once since this was last asked.
    pub(crate) fn turn_recent_peak(&mut self) -> u64 {
        let now = self.stats.large.allocated.current;
        std::mem::replace(&mut self.recent_peak, now).max(now)
    }

    pub(crate) fn claim_holding(&mut self, space: SpaceId, addr: u64) -> Option<Release> {
        let holding = *self.physical.holdings.get(&addr)?;
        // The piece that the holding begins in.
        let first = self.extents.piece_around(space, addr)?;
        let skip = ((addr - self.extents.records[first].addr) / GRANULE) as u32;
        let (id, shards) = self.claim(space, first, skip, (holding.bytes / GRANULE) as u32)?;
        Some(Release {
            space,
            id,
            shards,
            addr,
            bytes: holding.bytes,
            handle: holding.handle,
        })
    }

    // ---- outcomes -----------------------------------------------------------------------------

    /// Takes memory out of the heap.
    pub(crate) fn unhold(&mut self, bytes: u64, space: SpaceId) {
        self.physical.full_at = None;
        self.stats.segment_gone(space == SpaceId::Small, bytes);
    }

    /// Memory was unmapped, or a segment freed.
    pub(crate) fn gone(&mut self, release: &Release) {
        self.physical.holdings.remove(&release.addr);
        self.suspended.died(release.addr);
        let memory = (release.space, release.handle.is_some());
        self.tell_held(Kind::Unmap, release.addr, release.bytes, memory);
        if release.space == SpaceId::Large {
            self.physical.handles.remove(release.addr);
        }
        self.extents.lookup.forget(release.addr, release.bytes);
        let (space, records) = self.extents.parts(release.space);
        if release.handle.is_some() {
            space.unmapped(records, release.id);
        } else {
            records[release.id].state = Extent::Busy;
            space.remove_region(records, release.id);
        }
    }

    /// Enters what could not be undone into the heap. The homes of it are holes.
    pub(crate) fn set_apart(&mut self, space: SpaceId, failure: GrowthFailure) {
        for (addr, bytes, handle) in failure.mapped {
            // The range is a hole again; take it out of circulation with its handle.
            let hole = self.extents.space(space).and_then(|s| {
                s.holes()
                    .range(..=addr)
                    .next_back()
                    .map(|(base, id)| (*base, *id))
            });
            let Some((base, hole)) = hole else { continue };
            let skip = ((addr - base) / GRANULE) as u32;
            if let Some((id, _)) = self.claim(space, hole, skip, (bytes / GRANULE) as u32) {
                self.quarantine(id);
                self.hold(addr, bytes, Some(handle), space);
            }
        }
    }

    /// Enters what became of a mapped handle that was to be given back. If its unmapping failed, it stays apart. If
    /// its release failed, its bytes are held no more: the driver may have them or not, and there is no way to tell.
    /// Returns the bytes that are the driver's again, and what failed.
    pub(crate) fn given_back(
        &mut self,
        release: &Release,
        (unmapped, released): GivenBack,
    ) -> (u64, Option<DriverError>) {
        if let Err(error) = unmapped {
            self.quarantine(release.id);
            return (0, Some(error));
        }
        self.gone(release);
        self.unhold(release.bytes, release.space);
        match released {
            Ok(()) => (release.bytes, None),
            Err(error) => (0, Some(error)),
        }
    }

    /// A planned release was not made: free memory again.
    pub(crate) fn keep(&mut self, release: Release) {
        self.restore(release.space, release.id, release.shards);
    }

    /// Takes a segment into the heap again that the driver would not free.
    pub(crate) fn readmit(&mut self, release: Release) {
        let Ok(granules) = u32::try_from(release.bytes / GRANULE) else {
            return;
        };
        self.hold(release.addr, release.bytes, None, release.space);
        let (space, records) = self.extents.parts(release.space);
        let id = space.add_region(records, release.addr, granules, Uses::None);
        let busy = space.claim(records, id, 0, granules, Extent::Busy, &mut Vec::new());
        if let Some(id) = busy {
            self.restore(release.space, id, release.shards);
        }
    }

    /// A handle that could not be unmapped stays apart.
    pub(crate) fn quarantine(&mut self, id: u32) {
        self.extents.records[id].state = Extent::Quarantined;
        self.physical.quarantined.push(id);
    }

    /// Handles that could not be unmapped, claimed so that no other call tries at the same time.
    pub(crate) fn claim_quarantined(&mut self) -> Vec<Release> {
        let mut quarantined = std::mem::take(&mut self.physical.quarantined);
        quarantined.sort_unstable();
        let releases = quarantined.into_iter().filter_map(|id| {
            let hot = &mut self.extents.records[id];
            let holding = self.physical.holdings.get(&hot.addr)?;
            hot.state = Extent::Busy;
            Some(Release {
                space: holding.space,
                id,
                shards: Vec::new(),
                addr: hot.addr,
                bytes: holding.bytes,
                handle: holding.handle,
            })
        });
        releases.collect()
    }
}
