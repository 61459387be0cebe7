//! A stitch under way: what it claims for its driver calls, and how the heap ends it.

use crate::allocator::extent::record::SpaceId;
use crate::allocator::extent::want::Want;
use crate::allocator::heap::Heap;
use crate::allocator::size::GRANULE;
use crate::allocator::view::mapping::{Aliased, Fresh, Layout, Mapping, Site, Stitch, View};

impl Heap {
    /// Claims what a layout takes.
    pub(crate) fn claim_layout(&mut self, want: &Want, layout: Layout) -> Option<Stitch> {
        let site = self.site(want, &layout)?;
        let claimed = self.claim_memory(want, &layout, &site);
        let Some((aliased, fresh)) = claimed else {
            if let Some(range) = site.range {
                self.extents.range_freed(range);
            }
            return None;
        };
        let adds: Vec<_> = layout
            .adds
            .iter()
            .filter_map(|(home, bytes)| {
                Some((*home, *bytes, self.physical.holdings.get(home)?.handle?))
            })
            .collect();
        // Nobody may take the handles away, or extend the same view, meanwhile.
        self.views.segs_under_way += adds.len();
        for (home, _, _) in &adds {
            if let Some(holding) = self.physical.holdings.get_mut(home) {
                holding.views += 1;
            }
        }
        if let Some(view) = self.views.map.get_mut(&site.base) {
            view.calls += 1;
            view.busy = true;
        }
        Some(Stitch {
            site,
            adds,
            aliased,
            fresh,
        })
    }

    /// Where a layout goes: a view that there is, or claimed addresses for a new one.
    fn site(&mut self, want: &Want, layout: &Layout) -> Option<Site> {
        let (base, range, room, filled) = match layout.base {
            Some(base) => {
                let view = self.views.map.get(&base)?;
                (base, None, view.room, view.granules)
            }
            None => {
                let added = layout.adds.iter().map(|(_, bytes)| bytes).sum::<u64>();
                let room = self.view_room(want, added + layout.fresh);
                let range = self.extents.take_range(room)?;
                (self.extents.records[range].addr, Some(range), room, 0)
            }
        };
        let at = base + u64::from(filled) * GRANULE;
        let start = at - layout.back + layout.skip;
        Some(Site {
            base,
            range,
            room,
            offset: ((start - base) / GRANULE) as u32,
            at,
        })
    }

    /// Claims the home memory of a layout's block, and a home for what is created.
    fn claim_memory(
        &mut self,
        want: &Want,
        layout: &Layout,
        site: &Site,
    ) -> Option<(Aliased, Option<Fresh>)> {
        let parts = self.views.homes(want, layout, site)?;
        let aliased = self.lend(SpaceId::Large, want.stream, &parts)?;
        if layout.fresh == 0 {
            return Some((aliased, None));
        }
        match self.claim_fresh(want, layout.fresh, layout.fresh_handle) {
            Some(fresh) => Some((aliased, Some(fresh))),
            None => {
                self.give_home(SpaceId::Large, aliased);
                None
            }
        }
    }

    /// Claims a home for new memory, in handles of at least so many bytes: the lowest hole that takes
    /// it.
    pub(crate) fn claim_fresh(&mut self, want: &Want, bytes: u64, least: u64) -> Option<Fresh> {
        let granules = (bytes / GRANULE) as u32;
        let hole = self
            .extents
            .large
            .holes()
            .values()
            .copied()
            .find(|id| self.extents.records[*id].granules >= granules)?;
        let addr = self.extents.records[hole].addr;
        let (id, shards) = self.claim(SpaceId::Large, hole, 0, granules)?;
        self.physical.planned += bytes;
        let size = self
            .physical
            .handle_size(want, bytes, self.stats.all.reserved.current)
            .max(least);
        Some(Fresh {
            id,
            shards,
            addr,
            sizes: self.physical.tiles(addr, bytes, size),
        })
    }

    /// The driver did what a stitch needs: enters the view into the heap, and returns the block.
    pub(crate) fn stitched(&mut self, want: &Want, mut stitch: Stitch, handles: &[u64]) -> u32 {
        self.views.segs_under_way -= stitch.adds.len();
        let mut parts: Vec<u32> = stitch.aliased.parts.iter().map(|(id, _)| *id).collect();
        if let Some(fresh) = stitch.fresh {
            stitch.adds.extend(self.hold_fresh(&fresh, handles));
            let taken: u32 = parts
                .iter()
                .map(|id| self.extents.records[*id].granules)
                .sum();
            let needed = want.granules - taken;
            if needed < self.extents.records[fresh.id].granules {
                let (space, records) = self.extents.parts(SpaceId::Large);
                let rest = space.cut(records, fresh.id, needed);
                self.extents.put_fresh(SpaceId::Large, rest, want.stream);
            }
            parts.push(fresh.id);
        }
        let mappings = self.physical.mappings(&stitch.adds);
        let site = stitch.site;
        self.end_site(&site, mappings, false);
        self.view_block(site.base, site.offset, want.granules, parts)
    }

    /// A stitch failed and was undone: everything as before. What is still mapped, if anything,
    /// stays in the view, which is not used any more. `fresh` are the handles of new memory that
    /// could not be taken out of the view again, and so are held.
    pub(crate) fn not_stitched(
        &mut self,
        want: &Want,
        mut stitch: Stitch,
        still_mapped: usize,
        fresh: &[u64],
    ) {
        self.views.segs_under_way -= stitch.adds.len();
        if !fresh.is_empty()
            && let Some(new) = stitch.fresh.take()
        {
            stitch.adds.extend(self.hold_fresh(&new, fresh));
            self.extents.put_fresh(SpaceId::Large, new.id, want.stream);
        }
        let (kept, undone) = stitch.adds.split_at(still_mapped.min(stitch.adds.len()));
        for (home, _, _) in undone {
            if let Some(holding) = self.physical.holdings.get_mut(home) {
                holding.views -= 1;
            }
        }
        let kept = self.physical.mappings(kept);
        if let Some(fresh) = stitch.fresh {
            self.physical.planned -= fresh.bytes();
            self.restore(SpaceId::Large, fresh.id, fresh.shards);
        }
        self.give_home(SpaceId::Large, stitch.aliased);
        match stitch.site.range {
            Some(range) if kept.is_empty() => self.extents.range_freed(range),
            _ => {
                let dead = !kept.is_empty();
                self.end_site(&stitch.site, kept, dead);
            }
        }
    }

    /// Enters the handles of new memory, each with the view that it is mapped in. Returns them as a
    /// stitch adds them.
    fn hold_fresh(&mut self, fresh: &Fresh, handles: &[u64]) -> Vec<(u64, u64, u64)> {
        self.physical.planned -= fresh.bytes();
        let mut home = fresh.addr;
        let mut held = Vec::with_capacity(handles.len());
        for (bytes, handle) in fresh.sizes.iter().zip(handles) {
            self.hold(home, *bytes, Some(*handle), SpaceId::Large);
            if let Some(holding) = self.physical.holdings.get_mut(&home) {
                holding.views += 1;
            }
            held.push((home, *bytes, *handle));
            home += bytes;
        }
        held
    }

    /// The view of a stitch has what is mapped now, and others may use it; a dead one is only unmapped.
    fn end_site(&mut self, site: &Site, mappings: Vec<Mapping>, dead: bool) {
        if let Some(range) = site.range {
            let mut view = View::new(range, site.room, mappings);
            view.dead = dead;
            return self.put_view(site.base, view);
        }
        if let Some(view) = self.views.map.get_mut(&site.base) {
            view.calls -= 1;
            view.busy = false;
            view.dead |= dead;
        }
        self.views.extend_view(site.base, mappings);
    }
}
