//! What to ask of the driver: growth and release, planned on the heap before any call is made.

use crate::allocator::extent::record::{SpaceId, State as Extent};
use crate::allocator::extent::space::Shard;
use crate::allocator::extent::uses::Uses;
use crate::allocator::extent::want::Want;
use crate::allocator::heap::Heap;
use crate::allocator::physical::plan::Release;
use crate::allocator::size::{GRANULE, PHYSICAL_GRANULE, classic_segment_for};
use crate::allocator::stream::finder::Finder;
use crate::allocator::stream::slot::PendingWait;

const PHYSICAL_GRANULES: u64 = PHYSICAL_GRANULE / GRANULE;

/// How a request that found no memory gets some.
#[derive(Debug)]
pub(crate) struct Growth {
    pub space: SpaceId,
    /// The claimed extent: free memory before and behind a hole, and the part of the hole between.
    pub id: u32,
    pub shards: Vec<Shard>,
    /// Waits that the free memory in it needs.
    pub waits: Vec<PendingWait>,
    /// Granules of the extent before the block itself.
    pub skip: u32,
    /// First byte to map.
    pub addr: u64,
    /// Sizes of the handles to make, in address order.
    pub sizes: Vec<u64>,
}

impl Growth {
    pub(crate) fn bytes(&self) -> u64 {
        self.sizes.iter().sum()
    }
}

/// What a request could grow into.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Opening {
    /// The first extent of the claimed range.
    pub(crate) first: u32,
    /// Granules from the range's start to the block, for its alignment.
    pub(crate) skip: u32,
    /// Granules of usable memory before the hole.
    pub(crate) before: u64,
    pub(crate) hole: u32,
    /// Granules of the hole that are mapped.
    pub(crate) mapped: u64,
    /// Granules of usable memory behind the hole that the block needs.
    pub(crate) behind: u64,
}

impl Heap {
    /// The opening that needs the least new memory, the lowest on ties.
    fn opening(&self, want: &Want, usable: impl Fn(&Finder<'_>, u32) -> bool) -> Option<Opening> {
        let finder = self.finder(want.space, want.stream)?;
        let usable = |id: u32| usable(&finder, id);
        let mut best: Option<Opening> = None;
        for hole in finder.space.holes().values().copied() {
            let room = u64::from(self.extents.records[hole].granules);
            let (first, before) = finder.usable_before(hole, usable);
            let skip = want.skip(self.extents.records[first].addr);
            let needed = u64::from(skip + want.granules).saturating_sub(before);
            let mapped = needed.next_multiple_of(PHYSICAL_GRANULES);
            let opening = if mapped <= room {
                Opening {
                    first,
                    skip,
                    before,
                    hole,
                    mapped,
                    behind: 0,
                }
            } else {
                let behind = needed - room.min(needed);
                if finder.usable_behind(hole, usable) < behind {
                    continue;
                }
                Opening {
                    first,
                    skip,
                    before,
                    hole,
                    mapped: room,
                    behind,
                }
            };
            if opening.mapped > 0 && best.is_none_or(|b| opening.mapped < b.mapped) {
                best = Some(opening);
            }
        }
        best
    }

    /// Bytes that a growth for this request would add at least, if there is address space for it.
    pub(crate) fn missing(&self, want: &Want) -> Option<u64> {
        if !self.rules.maps() {
            return Some(classic_segment_for(u64::from(want.span()) * GRANULE));
        }
        if want.in_one_handle() {
            return self.hole_for_handle(want).map(|_| want.handle_bytes());
        }
        let opening = self.opening(want, |finder, id| finder.ready(id))?;
        Some(opening.mapped * GRANULE)
    }

    /// Plans a growth of the packed policy within `room` bytes. With `pending`, memory that needs a
    /// wait counts as well.
    pub(crate) fn plan_growth(&mut self, want: &Want, room: u64, pending: bool) -> Option<Growth> {
        let opening = self.opening(want, |finder, id| {
            if pending {
                finder.reachable(id)
            } else {
                finder.ready(id)
            }
        })?;
        let missing = opening.mapped * GRANULE;
        if missing > room {
            return None;
        }
        let reserved = self.stats.all.reserved.current;
        let size = self.physical.handle_size(want, missing, reserved);
        let addr = self.extents.records[opening.hole].addr;
        let granules = opening.before + opening.mapped + opening.behind;
        let (id, shards) =
            self.claim(want.space, opening.first, 0, u32::try_from(granules).ok()?)?;
        let waits = if pending {
            self.streams.waits_for(want.stream, &shards)
        } else {
            Vec::new()
        };
        self.physical.planned += missing;
        Some(Growth {
            space: want.space,
            id,
            shards,
            waits,
            skip: opening.skip,
            addr,
            sizes: self.physical.tiles(addr, missing, size),
        })
    }

    /// Memory that can be given back now: whole handles or segments in free memory that `over` says
    /// nobody uses. By address.
    pub(crate) fn releasable(&self, space: SpaceId, over: impl Fn(u32) -> bool) -> Vec<(u64, u64)> {
        let Some(at) = self.extents.space(space) else {
            return Vec::new();
        };
        let mut pieces: Vec<_> = at
            .pieces()
            .filter(|e| over(e.id))
            .map(|e| (e.addr, e.granules))
            .collect();
        pieces.sort_unstable();
        let mut found = Vec::new();
        let mut pieces = pieces.into_iter().peekable();
        while let Some((start, granules)) = pieces.next() {
            let mut end = start + u64::from(granules) * GRANULE;
            while pieces.peek().is_some_and(|(addr, _)| *addr == end) {
                if let Some((_, more)) = pieces.next() {
                    end += u64::from(more) * GRANULE;
                }
            }
            let inside = self
                .physical
                .holdings
                .range(start..end)
                .filter(|(addr, h)| *addr + h.bytes <= end && h.views == 0);
            found.extend(inside.map(|(addr, h)| (*addr, h.bytes)));
        }
        found
    }

    /// Whether nobody can touch a free piece any more, as the host has seen. So under the classic policy
    /// as well: that `cuMemFree` waits for the work of its context is nowhere promised.
    pub(crate) fn over(&self, id: u32) -> bool {
        let uses = self.extents.records.cold(id).uses.as_slice();
        uses.iter().all(|u| self.streams.complete(u))
    }

    /// Claims what of some arenas to release so that there is room for `missing` bytes: the smallest
    /// that is enough, else the largest first. Empty, with nothing changed, if that cannot be enough.
    /// What a refusal of the driver told is a guess on the safe side, so it stops nothing: all goes
    /// then.
    pub(crate) fn plan_release(&mut self, arenas: &[SpaceId], missing: u64) -> Vec<Release> {
        let excess = missing.saturating_sub(self.room());
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
        plan.sort_unstable_by_key(|(_, addr, _)| std::cmp::Reverse(*addr));
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

    /// A growth succeeded: the handles are the allocator's, the front of the extent is the block.
    pub(crate) fn grown(&mut self, want: &Want, growth: &Growth, handles: &[u64]) -> u32 {
        self.hold_all(growth, handles);
        let mut id = growth.id;
        if growth.skip > 0 {
            let (space, records) = self.extents.parts(growth.space);
            let right = space.cut(records, id, growth.skip);
            // It may have been free memory that the stream was using a moment ago.
            let slot = &mut self.streams[want.stream];
            let uses = Uses::one(want.stream, slot.open);
            slot.open_uses = slot.open_uses.saturating_add(1);
            let (space, records) = self.extents.parts(growth.space);
            records.cold_mut(id).owner = want.stream;
            space.release(records, id, uses);
            id = right;
        }
        if self.extents.records[id].granules > want.granules {
            let (space, records) = self.extents.parts(growth.space);
            let rest = space.cut(records, id, want.granules);
            self.extents.put_fresh(growth.space, rest, want.stream);
        }
        id
    }

    /// What a growth brought is held.
    fn hold_all(&mut self, growth: &Growth, handles: &[u64]) {
        let mut addr = growth.addr;
        for (bytes, handle) in growth.sizes.iter().zip(handles) {
            self.hold(addr, *bytes, Some(*handle), growth.space);
            addr += bytes;
        }
        self.physical.planned -= growth.bytes();
    }

    /// A growth succeeded that only adds free memory.
    pub(crate) fn supplied(&mut self, want: &Want, growth: &Growth, handles: &[u64]) {
        self.hold_all(growth, handles);
        self.extents.put_fresh(growth.space, growth.id, want.stream);
    }

    /// A growth succeeded, and a wait that its block needs did not: what it brought is free memory, and
    /// what was free beside it is what it was, the gap before the block as well.
    pub(crate) fn ungrown(&mut self, want: &Want, mut growth: Growth, handles: &[u64]) {
        self.hold_all(&growth, handles);
        let (at, _) = self.extents.parts(growth.space);
        let fresh = at.fresh_uses(want.stream);
        for shard in growth.shards.iter_mut().filter(|shard| !shard.mapped) {
            (shard.mapped, shard.owner) = (true, want.stream);
            shard.uses = fresh.clone();
        }
        self.restore(growth.space, growth.id, growth.shards);
    }

    /// A growth failed: everything as before.
    pub(crate) fn not_grown(&mut self, growth: Growth) {
        self.physical.planned -= growth.bytes();
        self.restore(growth.space, growth.id, growth.shards);
    }

    /// Enters memory into the heap.
    pub(crate) fn hold(&mut self, addr: u64, bytes: u64, handle: Option<u64>, space: SpaceId) {
        let number = match handle {
            Some(_) if space == SpaceId::Large => {
                self.physical.handles.add(addr, (bytes / GRANULE) as u32)
            }
            _ => 0,
        };
        self.physical.holdings.insert(
            addr,
            crate::allocator::extent::handle::Holding {
                bytes,
                handle,
                space,
                views: 0,
                number,
            },
        );
        self.stats.segment_added(space == SpaceId::Small, bytes);
    }

    /// Takes memory out of the heap.
    pub(crate) fn unhold(&mut self, bytes: u64, space: SpaceId) {
        self.physical.full_at = None;
        self.stats.segment_gone(space == SpaceId::Small, bytes);
    }

    /// Memory was unmapped, or a segment freed.
    pub(crate) fn gone(&mut self, release: &Release) {
        self.physical.holdings.remove(&release.addr);
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
}
