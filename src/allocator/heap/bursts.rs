//! How many handles one allocation may map, and the cheapest way to so much memory.

use crate::allocator::extent::record::SpaceId;
use crate::allocator::extent::want::Want;
use crate::allocator::heap::Heap;
use crate::allocator::physical::bursts::{BURST_MAPS, MAPS, NEAR_PART, REPAID};
use crate::allocator::physical::plan::Release;
use crate::allocator::size::PHYSICAL_GRANULE;
use crate::allocator::view::layout::cut;
use crate::allocator::view::mapping::{Layout, Openings};

impl Heap {
    /// Whether so many bytes more leave the bounds in force.
    pub(crate) fn bounds_hold(&self, more: u64) -> bool {
        let limit = self.physical.limit.unwrap_or(u64::MAX);
        let bound = limit.min(self.physical.full_at.unwrap_or(u64::MAX));
        let held = self.stats.all.reserved.current + self.physical.planned;
        held.saturating_add(more) <= bound / NEAR_PART
    }

    /// The layout itself if its number of handles is bearable, else one that maps fewer of the open
    /// ones and creates more.
    pub(crate) fn bounded(&mut self, want: &Want, layout: Layout, open: &Openings) -> Layout {
        let size = self.handle_size(want, layout.fresh);
        let created = layout.fresh.div_ceil(size.max(PHYSICAL_GRANULE));
        let maps = layout.adds.len() + usize::try_from(created).unwrap_or(usize::MAX);
        if maps <= MAPS {
            return layout;
        }
        let cut = cut(want, &self.physical.sources(&open.ranges));
        if cut.adds.is_empty() || !self.bounds_hold(cut.fresh) {
            self.physical.bursts.figures.unbounded += 1;
            return layout;
        }
        if maps <= BURST_MAPS && self.physical.bursts.tokens() > 0 {
            self.physical.bursts.figures.spent += 1;
            return layout;
        }
        self.physical.bursts.figures.cut += 1;
        let held = self.stats.all.reserved.current + self.physical.planned;
        self.physical.bursts.debt |= held + cut.fresh > self.soft_cap();
        cut
    }

    /// Claims free handles that go back because an allocation created more than the soft cap allows:
    /// the smallest first, and only such as nobody can touch.
    pub(crate) fn plan_repayment(&mut self) -> Vec<Release> {
        let held = self.stats.all.reserved.current + self.physical.planned;
        let mut excess = held.saturating_sub(self.soft_cap());
        if excess == 0 {
            self.physical.bursts.debt = false;
            return Vec::new();
        }
        if !self.bounds_hold(0) {
            return Vec::new();
        }
        let mut free = self.releasable(SpaceId::Large, |id| self.over(id));
        // Highest addresses first among equals: the low end of the arena stays dense.
        free.sort_unstable_by_key(|(addr, bytes)| (*bytes, std::cmp::Reverse(*addr)));
        let mut plan = Vec::new();
        for (addr, bytes) in free.into_iter().take(REPAID) {
            if excess == 0 {
                break;
            }
            plan.extend(self.claim_holding(SpaceId::Large, addr));
            excess = excess.saturating_sub(bytes);
        }
        plan
    }
}
