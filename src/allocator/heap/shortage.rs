//! The report of a failed request: what it lacked, who holds the memory, and how the free memory is fragmented.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashSet};

use crate::allocator::extent::handle::Holding;
use crate::allocator::extent::record::{SpaceId, State as Extent};
use crate::allocator::extent::want::Want;
use crate::allocator::graph::arena::Arena;
use crate::allocator::heap::Heap;
use crate::allocator::heap::graph::PoolRequest;
use crate::allocator::heap::release::joined;
use crate::allocator::size::{GRANULE, PHYSICAL_GRANULE};
use crate::allocator::suspend::{Suspension, Target};
use crate::error::{Hole, OutOfMemory, PinnedSegment, Shortage};

impl Heap {
    /// Counts a request that failed for lack of memory, and returns the heap's part of the error.
    pub(crate) fn out_of_memory(&mut self, want: &Want) -> OutOfMemory {
        self.stats.misses += 1;
        self.stats.ooms += 1;
        let shortage = self.shortage(want);
        self.picture(want.requested, shortage)
    }

    /// [`out_of_memory`](Self::out_of_memory) for a request to a graph pool that needs these bytes from the driver.
    pub(crate) fn out_of_memory_in_pool(
        &mut self,
        request: &PoolRequest,
        needed: u64,
    ) -> OutOfMemory {
        self.stats.misses += 1;
        self.stats.ooms += 1;
        let (ready, waiting) = self.graphs.free_for(request.pool, request.asker);
        let shortage = Shortage {
            growth: request.fit.bytes().next_multiple_of(PHYSICAL_GRANULE),
            needed,
            ready,
            waiting,
            kept: self
                .kept(Some(request.pool))
                .saturating_sub(ready + waiting),
            counted: self.present() + self.suspended.coming,
            coming: self.suspended.coming,
            ..Shortage::default()
        };
        self.picture(request.requested, shortage)
    }

    /// Returns the report for a resume that lacks these bytes from the driver. It counts no request.
    pub(crate) fn short_of(&mut self, bytes: u64) -> OutOfMemory {
        let absent = self.absent();
        let shortage = Shortage {
            growth: bytes,
            needed: bytes,
            kept: self.kept(None) - absent,
            counted: self.present() - absent + self.suspended.coming,
            coming: self.suspended.coming,
            ..Shortage::default()
        };
        // A resume may use the headroom.
        OutOfMemory {
            headroom: 0,
            ..self.picture(bytes, shortage)
        }
    }

    /// Returns the graph pools whose memory is not suspended, by id.
    fn present_arenas(&self) -> impl Iterator<Item = (u64, &Arena)> {
        let pools = self.graphs.pools.iter().filter(|(_, pool)| !pool.away);
        pools.map(|(id, pool)| (*id, &pool.arena))
    }

    /// Returns the suspended bytes, which count as reserved.
    fn absent(&self) -> u64 {
        let arenas = self.suspended.map.get(&Target::Arenas);
        arenas.map_or(0, Suspension::missing)
    }

    /// Returns runs of free memory in these arenas that is unused according to `over`, and, if `guarded`, also of freed
    /// blocks that guards keep.
    fn runs(
        &self,
        spaces: &[SpaceId],
        guarded: bool,
        over: impl Fn(u32) -> bool,
    ) -> Vec<(u64, u64)> {
        let free = spaces.iter().filter_map(|id| self.extents.space(*id));
        let free = free.flat_map(|space| space.pieces());
        let free = free.filter(|piece| over(piece.id));
        let kept = self.guards.blocks.iter();
        let kept = kept.filter(|(_, kept)| guarded && kept.freed.is_some());
        let kept = kept.map(|(id, _)| &self.extents.records[*id]);
        let free = free.map(|piece| (piece.addr, piece.granules));
        joined(free.chain(kept.map(|hot| (hot.addr, hot.granules))))
    }

    /// Returns the bytes of handles and segments that lie wholly in such runs. Views without blocks are ignored,
    /// because they can be removed.
    fn whole_bytes(&self, guarded: bool, over: impl Fn(u32) -> bool) -> u64 {
        if self.suspended.closed {
            return 0;
        }
        let in_use = self.views.map.values();
        let in_use = in_use.filter(|view| !view.blocks.is_empty());
        let mapped: HashSet<u64> = in_use
            .flat_map(|view| view.mappings.iter().map(|mapping| mapping.home))
            .collect();
        let runs = self.runs(&[SpaceId::Large, SpaceId::Small], guarded, over);
        let whole = self.whole_handles(runs);
        let whole = whole.filter(|(home, _)| !mapped.contains(home));
        whole.map(|(_, holding)| holding.bytes).sum()
    }

    /// Whether a run of free memory, pending or not, fits a request.
    fn has_run(&self, want: &Want, guarded: bool) -> bool {
        let span = u64::from(want.span()) * GRANULE;
        // Adjacent segments of the driver do not form a run.
        let joins = self.rules.segment_for(want).is_none();
        let runs = self.runs(&[want.space], guarded, |_| true);
        runs.into_iter().any(|(start, end)| {
            let segments = self.physical.holdings.range(..end).rev();
            let mut segments = segments.take_while(|(base, of)| *base + of.bytes > start);
            let fits = |(base, of): (&u64, &Holding)| {
                (base + of.bytes).min(end) - start.max(*base) >= span
            };
            end - start >= span && (joins || segments.any(fits))
        })
    }

    /// Returns the freed bytes that guards and graph pools keep, the suspended bytes that count towards the limit, and
    /// the bytes that a resume in progress will take. A graph pool returns its memory to the driver only as a whole, so
    /// the free bytes of a pool with live blocks count only for requests to that pool.
    fn kept(&self, own: Option<u64>) -> u64 {
        let pools = self.present_arenas();
        let pools = pools.filter(|(id, arena)| arena.live.is_empty() || own == Some(*id));
        let free = pools.map(|(_, arena)| arena.held().saturating_sub(arena.live.bytes()));
        free.sum::<u64>()
            + (self.whole_bytes(true, |_| true) - self.whole_bytes(false, |_| true))
            + self.absent()
            + self.suspended.coming
    }

    fn shortage(&self, want: &Want) -> Shortage {
        let span = u64::from(want.span()) * GRANULE;
        let growth = match self.rules.segment_for(want) {
            Some(segment) => segment,
            None if want.in_one_handle() => want.handle_bytes(),
            None => span.next_multiple_of(PHYSICAL_GRANULE),
        };
        let spaces = [SpaceId::Large, SpaceId::Small].into_iter();
        let idle = spaces.flat_map(|space| self.releasable(space, |id| self.over(id)));
        let idle: u64 = idle.map(|(_, bytes)| bytes).sum();
        let at_home = self.missing(want).unwrap_or(growth);
        let space = self.extents.space(want.space);
        let pieces = space.into_iter().flat_map(|space| space.pieces());
        let finder = self.finder(want.space, want.stream);
        let is_ready = |id| finder.as_ref().is_some_and(|of| of.ready(id));
        let ready = pieces.filter(|piece| is_ready(piece.id));
        let needed = growth.saturating_sub(idle).min(at_home);
        // Pending memory may be released for the whole request, or for what the ready memory at home lacks.
        let waiting = self.whole_bytes(false, |_| true).saturating_sub(idle);
        let for_all = waiting.saturating_sub(growth.saturating_sub(idle) - needed);
        let for_rest = self.whole_bytes(false, |id| self.over(id) || !is_ready(id));
        let has_run = self.has_run(want, false);
        Shortage {
            growth,
            needed,
            ready: ready.map(|piece| u64::from(piece.granules) * GRANULE).sum(),
            waiting: for_all.max(for_rest.saturating_sub(idle)),
            fits_pending: !want.in_one_handle() && has_run && !self.pending_bytes().is_empty(),
            kept: self.kept(None),
            fits_guarded: !has_run && self.has_run(want, true),
            counted: self.present() + self.suspended.coming,
            coming: self.suspended.coming,
        }
    }

    fn picture(&mut self, requested: u64, shortage: Shortage) -> OutOfMemory {
        let (_, allocated) = self.live_totals();
        let reserved = self.stats.all.reserved.current;
        let largest = self.extents.spaces().map(|space| space.largest_piece());
        OutOfMemory {
            requested,
            limit: self.physical.limit,
            reserved,
            allocated,
            cached: reserved.saturating_sub(allocated),
            largest_free: largest.max().unwrap_or(0),
            largest_run: self.extents.largest_run(),
            in_views: self.views.aliased_bytes,
            guarded: self.guards.bytes(),
            suspended: self.absent(),
            graph_pools: self.graphs.held,
            in_graph_pools: self
                .present_arenas()
                .map(|(_, arena)| arena.live.bytes())
                .sum(),
            holders: self.holders(),
            pending: self.pending_bytes(),
            pinned: self.pinned(),
            holes: self.holes(),
            mapped: self.rules.maps(),
            headroom: self.physical.headroom,
            regime: self.rules.maps().then(|| self.physical.regime.name()),
            shortage,
            ..OutOfMemory::default()
        }
    }

    /// Returns the longest runs of adjacent free memory, longest first.
    fn holes(&self) -> Vec<Hole> {
        let mut holes = self.extents.free_runs();
        holes.sort_by_key(|(_, bytes)| Reverse(*bytes));
        holes.truncate(HOLES_NAMED);
        let bounded = |(address, bytes): (u64, u64)| {
            let below = address.checked_sub(1);
            let before = below.and_then(|at| self.extents.lookup.at_or_below(at));
            let before = before.map(|id| &self.extents.records[id]);
            let before = before.filter(|block| block.end() == address);
            let after = self.extents.lookup.exact(address + bytes);
            let after = after.map(|id| self.extents.records[id].addr);
            Hole::new((address, bytes), before.map(|block| block.addr), after)
        };
        holes.into_iter().map(bounded).collect()
    }

    /// Returns the segments in which few live bytes hold the most memory.
    pub(crate) fn pinned(&self) -> Vec<PinnedSegment> {
        let mut live: BTreeMap<u64, PinnedSegment> = BTreeMap::new();
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
        pinned.sort_by_key(|p| Reverse(p.bytes - p.live));
        pinned.truncate(PINNED_NAMED);
        pinned
    }
}

/// Number of pinned segments that an out-of-memory error names.
pub(crate) const PINNED_NAMED: usize = 3;
/// Number of holes that an out-of-memory error names.
const HOLES_NAMED: usize = 4;
