//! Growth and release in the heap: what failed, what is set apart, what comes back, and the picture of a want
//! of memory.

use crate::allocator::extent::handle::OrphanedHandle;
use crate::allocator::extent::record::{SpaceId, State as Extent};
use crate::allocator::extent::uses::Uses;
use crate::allocator::heap::Heap;
use crate::allocator::heap::growth::Growth;
use crate::allocator::physical::GrowthFailure;
use crate::allocator::physical::plan::Release;
use crate::allocator::size::GRANULE;
use crate::driver::DriverError;
use crate::error::{OutOfMemory, PinnedSegment};

impl Heap {
    /// Enters address space that was leased for an arena; `grown`: it lengthens the lease before it.
    pub(crate) fn add_addresses(&mut self, space: SpaceId, base: u64, bytes: u64, grown: bool) {
        match self.physical.spans.range_mut(..base).next_back() {
            Some((_, span)) if grown => *span += bytes,
            _ => {
                self.physical.spans.insert(base, bytes);
            }
        }
        let (at, records) = self.extents.parts(space);
        let granules = (bytes / GRANULE) as u32;
        if space == SpaceId::Views {
            // No view may lie in two reservations.
            at.add_range(records, base, granules, grown);
        } else {
            at.add_hole(records, base, granules);
        }
    }

    /// A growth failed: the heap as before, and what could not be undone set apart.
    pub(crate) fn growth_failed(&mut self, growth: Growth, failure: GrowthFailure) {
        let space = growth.space;
        self.not_grown(growth);
        self.set_apart(space, failure);
    }

    /// Enters what could not be undone into the heap. The homes of it are holes.
    pub(crate) fn set_apart(&mut self, space: SpaceId, failure: GrowthFailure) {
        for (handle, bytes) in failure.orphaned_handles {
            self.stats.segment_added(space == SpaceId::Small, bytes);
            self.physical.orphaned_handles.push(OrphanedHandle {
                handle,
                bytes,
                space,
                busy: false,
            });
        }
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

    /// Heap what became of a mapped handle that was to be given back. One that is still mapped goes
    /// where `still_mapped` puts it; one that is unmapped and could not be released is a orphaned handle.
    /// Returns the bytes that are the driver's again, and what failed.
    pub(crate) fn given_back(
        &mut self,
        release: Release,
        (unmapped, freed): GivenBack,
        still_mapped: impl FnOnce(&mut Heap, Release),
    ) -> (u64, Option<DriverError>) {
        if let Err(error) = unmapped {
            still_mapped(self, release);
            return (0, Some(error));
        }
        self.gone(&release);
        match (freed, release.handle) {
            (Err(error), Some(handle)) => {
                self.physical.orphaned_handles.push(OrphanedHandle {
                    handle,
                    bytes: release.bytes,
                    space: release.space,
                    busy: false,
                });
                (0, Some(error))
            }
            _ => {
                self.unhold(release.bytes, release.space);
                (release.bytes, None)
            }
        }
    }

    /// A handle that could not be unmapped is free memory again.
    pub(crate) fn give_home_again(&mut self, release: Release) {
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

    /// What an earlier failure left behind, claimed so that nobody else tries at the same time.
    pub(crate) fn claim_leftovers(&mut self) -> (Vec<OrphanedHandle>, Vec<Release>) {
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
        let releases = releases.collect();
        let idle = self
            .physical
            .orphaned_handles
            .iter_mut()
            .filter(|orphan| !orphan.busy);
        let claim = |orphan: &mut OrphanedHandle| {
            orphan.busy = true;
            *orphan
        };
        (idle.map(claim).collect(), releases)
    }

    /// A orphaned handle was released, or stays one.
    pub(crate) fn orphan_tried(&mut self, orphan: &OrphanedHandle, released: bool) {
        let same = |other: &OrphanedHandle| other.busy && other.handle == orphan.handle;
        let Some(at) = self.physical.orphaned_handles.iter().position(same) else {
            return;
        };
        if released {
            self.physical.orphaned_handles.remove(at);
            self.unhold(orphan.bytes, orphan.space);
        } else {
            self.physical.orphaned_handles[at].busy = false;
        }
    }

    /// Counts a request that found no memory. What the error reports of the heap.
    pub(crate) fn out_of_memory(&mut self, requested: u64) -> OutOfMemory {
        self.stats.misses += 1;
        self.stats.ooms += 1;
        let (_, allocated) = self.live_totals();
        OutOfMemory {
            requested,
            limit: self.physical.limit,
            reserved: self.stats.all.reserved.current,
            allocated,
            cached: self.stats.all.reserved.current.saturating_sub(allocated),
            largest_free: self
                .extents
                .spaces()
                .map(|s| s.largest_piece())
                .max()
                .unwrap_or(0),
            largest_run: self.extents.largest_run(),
            in_views: self.views.aliased_bytes,
            guarded: self.guards.bytes(),
            pending: self.pending_bytes(),
            pinned: self.pinned(),
            ..OutOfMemory::default()
        }
    }

    /// Where few live bytes hold the most memory.
    pub(crate) fn pinned(&self) -> Vec<PinnedSegment> {
        let mut live: std::collections::BTreeMap<u64, PinnedSegment> =
            std::collections::BTreeMap::new();
        for (_, hot) in self.extents.records.iter() {
            if hot.state != Extent::Used {
                continue;
            }
            let (mut addr, end) = (hot.addr, hot.end());
            while addr < end {
                let Some((base, holding)) = self.physical.holdings.range(..=addr).next_back()
                else {
                    break;
                };
                let top = base + holding.bytes;
                if top <= addr {
                    break;
                }
                let entry = live.entry(*base).or_insert(PinnedSegment {
                    address: *base,
                    bytes: holding.bytes,
                    live: 0,
                    block: hot.addr,
                });
                entry.live += end.min(top) - addr;
                entry.block = entry.block.min(hot.addr);
                addr = top;
            }
        }
        let mut pinned: Vec<PinnedSegment> =
            live.into_values().filter(|p| p.live < p.bytes).collect();
        pinned.sort_by_key(|p| std::cmp::Reverse(p.bytes - p.live));
        pinned.truncate(PINNED_NAMED);
        pinned
    }
}

/// How many pinned segments an out-of-memory error names.
pub(crate) const PINNED_NAMED: usize = 3;

/// How the two calls went that give a handle back: the unmapping, and the release. The second counts
/// only if the first is good.
pub(crate) type GivenBack = (Result<(), DriverError>, Result<(), DriverError>);
