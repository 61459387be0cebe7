//! Blocks that lie inside one physical handle.

use crate::allocator::extent::want::Want;
use crate::allocator::heap::Heap;
use crate::allocator::heap::growth::Growth;
use crate::allocator::size::GRANULE;
use crate::allocator::stream::finder::Finder;
use crate::allocator::view::mapping::Openings;

/// A place inside free memory: the piece that it begins in, and how many granules into it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub first: u32,
    pub skip: u32,
}

/// How such a request goes on.
pub(crate) enum Next {
    Take(Place),
    Reserve(u64),
    Grow(Growth),
    /// As for any other request.
    MakeRoom,
}

impl Heap {
    /// The next thing to try: the tightest open stretch of a handle, a handle of its own below the
    /// soft cap, a stretch behind waits, a handle below the limit.
    pub(crate) fn next_in_one_handle(&mut self, want: &Want) -> Next {
        if let Some(place) = self.place_in_handle(want, |finder, id| finder.ready(id)) {
            self.stats.reclaim.ready += 1;
            return Next::Take(place);
        }
        let bytes = want.handle_bytes();
        let Some((hole, skip)) = self.hole_for_handle(want) else {
            return Next::Reserve(bytes);
        };
        if bytes <= self.soft_room().min(self.room()) {
            self.stats.reclaim.grown += 1;
            return self.one_handle(want, hole, skip);
        }
        if self.streams.several()
            && let Some(place) = self.place_in_handle(want, |finder, id| finder.reachable(id))
        {
            self.stats.reclaim.waited += 1;
            return Next::Take(place);
        }
        if bytes <= self.room() {
            self.stats.reclaim.grown_hard += 1;
            return self.one_handle(want, hole, skip);
        }
        Next::MakeRoom
    }

    /// Takes a request that has to lie inside one handle from memory that is ready.
    pub(crate) fn take_in_handle(&mut self, want: &Want) -> Option<u32> {
        let place = self.place_in_handle(want, |finder, id| finder.ready(id))?;
        let (id, _) = self.claim(want.space, place.first, place.skip, want.granules)?;
        self.stats.reclaim.ready += 1;
        Some(id)
    }

    fn place_in_handle(
        &self,
        want: &Want,
        usable: impl Fn(&Finder<'_>, u32) -> bool,
    ) -> Option<Place> {
        let finder = self.finder(want.space, want.stream)?;
        let open = Openings::ranges(&finder, |id| usable(&finder, id));
        let mut best: Option<(u64, u64)> = None;
        for source in self.physical.sources(&open) {
            let (from, to) = source.open;
            let skip = want.skip(from);
            let needed = u64::from(skip + want.granules) * GRANULE;
            if to - from >= needed && best.is_none_or(|b| (to - from, from) < b) {
                best = Some((to - from, from));
            }
        }
        let (_, from) = best?;
        let addr = from + u64::from(want.skip(from)) * GRANULE;
        let (first, start) = self.extents.piece_at(want.space, addr)?;
        let skip = ((addr - start) / GRANULE) as u32;
        Some(Place { first, skip })
    }

    /// The lowest hole that takes a handle for the request, which no border of a reservation cuts,
    /// and how many granules into the hole it begins.
    pub(crate) fn hole_for_handle(&self, want: &Want) -> Option<(u32, u32)> {
        let bytes = want.handle_bytes();
        let holes = self.extents.space(want.space)?.holes();
        holes.iter().find_map(|(addr, id)| {
            let stretches = self
                .physical
                .stretches(*addr, self.extents.records[*id].bytes());
            let stretch = stretches.into_iter().find(|(_, len)| *len >= bytes);
            stretch.map(|(start, _)| (*id, ((start - addr) / GRANULE) as u32))
        })
    }

    fn one_handle(&mut self, want: &Want, hole: u32, skip: u32) -> Next {
        let bytes = want.handle_bytes();
        let addr = self.extents.records[hole].addr + u64::from(skip) * GRANULE;
        let granules = (bytes / GRANULE) as u32;
        let Some((id, shards)) = self.claim(want.space, hole, skip, granules) else {
            return Next::MakeRoom;
        };
        self.physical.planned += bytes;
        Next::Grow(Growth {
            space: want.space,
            id,
            shards,
            waits: Vec::new(),
            skip: 0,
            addr,
            sizes: vec![bytes],
        })
    }
}
