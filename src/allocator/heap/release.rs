//! Releases: planned before any driver call, and committed or reverted after it.

use std::cmp::Reverse;

use crate::allocator::extent::handle::Holding;
use crate::allocator::extent::record::{SpaceId, State as Extent};
use crate::allocator::extent::uses::Uses;
use crate::allocator::heap::Heap;
use crate::allocator::physical::{GivenBack, GrowthFailure, Release};
use crate::allocator::size::GRANULE;
use crate::driver::DriverError;
use crate::event::Kind;

/// Joins adjacent pieces to runs, and returns their starts and ends by address.
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
    /// Returns the memory that can be released now, by address: whole handles or segments in free memory that is unused
    /// according to `over`.
    pub(crate) fn releasable(&self, space: SpaceId, over: impl Fn(u32) -> bool) -> Vec<(u64, u64)> {
        // Suspended memory cannot be released.
        match self.suspended.closed {
            true => Vec::new(),
            false => self.unused(space, over),
        }
    }

    /// Returns whole handles or segments in free memory that is unused according to `over`, suspended or not, by
    /// address.
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

    /// Returns the handles or segments that lie wholly in one of these runs, by address.
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

    /// Whether all work on a free piece is complete, as observed by the host. The classic policy requires this too,
    /// because `cuMemFree` is not documented to wait for the work of its context.
    pub(crate) fn over(&self, id: u32) -> bool {
        let uses = self.extents.records.cold(id).uses.as_slice();
        uses.iter().all(|u| self.streams.complete(u))
    }

    /// Claims memory of some arenas to release, so that there is room for `missing` bytes where there is `room` now:
    /// the smallest piece that suffices, otherwise the largest first. Returns nothing and changes nothing if that
    /// cannot suffice to get below the limit. A room that is only a guess after a driver refusal is not part of this
    /// check: then everything may be claimed.
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
        // The highest addresses first among equals, so that the low end of an arena stays dense.
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

    /// Claims releasable memory until at most `keep` bytes are cached, the longest idle first, and returns how much
    /// more can be released once pending work is complete.
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
            // Longest idle first; within one run of free memory the order from the top stays.
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

    /// Claims at most `bytes` of releasable memory, the longest idle first.
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
            // A handle that would have to stay in part is not released.
            if bytes <= left
                && let Some(release) = self.claim_holding(SpaceId::Large, addr)
            {
                left -= bytes;
                plan.push(release);
            }
        }
        plan
    }

    /// Returns the peak of the bytes of large blocks since the last call.
    pub(crate) fn turn_recent_peak(&mut self) -> u64 {
        let now = self.stats.large.allocated.current;
        std::mem::replace(&mut self.recent_peak, now).max(now)
    }

    pub(crate) fn claim_holding(&mut self, space: SpaceId, addr: u64) -> Option<Release> {
        let holding = *self.physical.holdings.get(&addr)?;
        // The piece in which the handle or segment begins.
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

    /// Removes memory from the heap.
    pub(crate) fn unhold(&mut self, bytes: u64, space: SpaceId) {
        self.physical.full_at = None;
        self.stats.segment_gone(space == SpaceId::Small, bytes);
    }

    /// Records that memory was unmapped, or a segment freed.
    pub(crate) fn gone(&mut self, release: &Release) {
        self.physical.holdings.remove(&release.addr);
        self.suspended.died(release.addr);
        let memory = (release.space, release.handle.is_some());
        self.recorder
            .record_memory(Kind::Unmap, (release.addr, release.bytes), memory);
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

    /// Adds memory that could not be unmapped after a failed growth to the heap. Its homes are holes.
    pub(crate) fn set_apart(&mut self, space: SpaceId, failure: GrowthFailure) {
        for (addr, bytes, handle) in failure.mapped {
            // The range is a hole again; it is taken out of circulation with its handle.
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

    /// Records the outcome of releasing a mapped handle. If unmapping failed, the handle stays set apart. If the
    /// release failed, its bytes are no longer held, because it is unknown whether the driver has them. Returns the
    /// bytes released, and the failure.
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

    /// Reverts a planned release: the memory is free again.
    pub(crate) fn keep(&mut self, release: Release) {
        self.restore(release.space, release.id, release.shards);
    }

    /// Adds a segment that the driver did not free back to the heap.
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

    /// Sets a handle apart that could not be unmapped.
    pub(crate) fn quarantine(&mut self, id: u32) {
        self.extents.records[id].state = Extent::Quarantined;
        self.physical.quarantined.push(id);
    }

    /// Claims the handles that could not be unmapped, so that no other call retries them concurrently.
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
