//! Segments that a pool gets from a source, and the release of a pool's memory.

use std::collections::BTreeMap;

use crate::allocator::graph::arena::{Arena, Handle, Part, Tag, View};
use crate::allocator::graph::source::Source;
use crate::allocator::graph::{Graphs, Pool};
use crate::allocator::report::PhysicalSegment;
use crate::allocator::size::GRANULE;

impl Graphs {
    /// Returns the source of a pool's segments, for a call to it: the call counts as one in progress until
    /// [`end_source_call`](Self::end_source_call).
    pub(crate) fn begin_source_call(&mut self, id: u64) -> Option<Source> {
        let pool = self.pools.get_mut(&id)?;
        let source = pool.source.clone()?;
        pool.calls += 1;
        Some(source)
    }

    pub(crate) fn source_of(&self, id: u64) -> Option<Source> {
        self.pools.get(&id)?.source.clone()
    }

    /// Returns the sources of removed pools. The caller drops them without the lock, because dropping them runs code of
    /// the program.
    #[must_use = "sources are not dropped under the lock"]
    pub(crate) fn take_ended_sources(&mut self) -> Vec<Source> {
        std::mem::take(&mut self.ended_sources)
    }

    /// Ends a call to a pool's source. Adds the segment (address and bytes) to the pool if the source provided one.
    pub(crate) fn end_source_call(&mut self, id: u64, segment: Option<(u64, u64)>) {
        if let Some(pool) = self.pools.get_mut(&id) {
            pool.calls -= 1;
            if let Some((home, bytes)) = segment {
                pool.arena.add_segment(home, bytes);
            }
        }
        self.recount();
    }

    /// Takes out the arenas of unused pools, with `all` of every pool, otherwise of released ones only. Released pools
    /// are removed.
    pub(crate) fn take_idle(&mut self, all: bool) -> Vec<(u64, Arena)> {
        let pools: Vec<u64> = self.pools.keys().copied().collect();
        let mut taken = Vec::new();
        for id in pools {
            let goes = |pool: &Pool| (all || pool.released) && pool.arena.has_memory();
            if !self.pools.get(&id).is_some_and(goes) || !self.is_idle(id) {
                continue;
            }
            if let Some(pool) = self.pools.get_mut(&id) {
                pool.calls += 1;
                let arena = std::mem::take(&mut pool.arena);
                pool.planned += arena.held();
                taken.push((id, arena));
            }
        }
        self.forget_released();
        taken
    }

    /// Takes out the free handles of a pool that no graph can use, and the views that show nothing else. `None` if there
    /// are none.
    pub(crate) fn take_free(&mut self, id: u64) -> Option<Arena> {
        if self.is_captured(id) {
            return None;
        }
        let pool = self.pools.get_mut(&id).filter(|pool| pool.is_unleased())?;
        let taken = pool.arena.take_free(pool.source.is_some())?;
        pool.calls += 1;
        pool.planned += taken.held();
        Some(taken)
    }

    /// Returns to a pool what could not be released of its memory.
    pub(crate) fn put_back(&mut self, id: u64, held: u64, left: Arena) {
        if let Some(pool) = self.pools.get_mut(&id) {
            pool.calls -= 1;
            pool.planned -= held;
            pool.arena.absorb(left);
        }
        self.recount();
        self.forget_released();
    }

    /// Makes addresses of a pool usable again whose memory was released: home addresses, and views.
    pub(crate) fn reuse(&mut self, id: u64, homes: &[(u64, u64)], sites: &[(u64, u64)]) {
        if let Some(Pool { arena, .. }) = self.pools.get_mut(&id) {
            homes
                .iter()
                .for_each(|(at, bytes)| arena.homes.put(*at, *bytes));
            sites
                .iter()
                .for_each(|(at, bytes)| arena.sites.put(*at, *bytes));
        }
    }

    /// Removes released pools that hold nothing.
    pub(crate) fn forget_released(&mut self) {
        let gone: Vec<u64> = self
            .pools
            .iter()
            .filter(|(_, pool)| pool.released && pool.calls == 0 && !pool.arena.has_memory())
            .map(|(id, _)| *id)
            .collect();
        for id in gone {
            if self.is_idle(id)
                && let Some(pool) = self.pools.remove(&id)
            {
                self.ended_sources.extend(pool.source);
            }
        }
    }
}

impl Graphs {
    /// Returns the physical segments of a range of the live block at an address. Segments of a source have no handle.
    pub(crate) fn segments(
        &self,
        pool: u64,
        block: u64,
        range: (u64, u64),
    ) -> Vec<PhysicalSegment> {
        let arena = self.pools.get(&pool).map(|pool| &pool.arena);
        let live = arena.and_then(|arena| Some((arena, arena.live.get(&block)?)));
        let Some((arena, live)) = live else {
            return Vec::new();
        };
        let (mut segments, mut at) = (Vec::new(), block);
        for part in &live.parts {
            let first = arena.handles.range(..=part.home).next_back();
            let first = first.map_or(part.home, |(base, _)| *base);
            for (base, held) in arena.handles.range(first..part.end()) {
                // Where the part of the handle lies in the block.
                let start = at + (part.home.max(*base) - part.home);
                let end = at + (part.end().min(base + held.bytes) - part.home);
                let (from, to) = (start.max(range.0), end.min(range.1));
                if from < to {
                    segments.push(PhysicalSegment {
                        address: from,
                        bytes: to - from,
                        handle: (held.handle != 0).then_some(held.handle),
                        offset: part.home + (from - at) - base,
                        handle_bytes: held.bytes,
                    });
                }
            }
            at += part.end() - part.home;
        }
        segments
    }
}

impl Arena {
    /// Takes out free handles of which no work is pending, and the views that show only such handles. The addresses of
    /// segments of a `source` leave with them.
    fn take_free(&mut self, source: bool) -> Option<Arena> {
        self.merge_recent();
        let runs = self.runs(Tag::is_unused);
        let is_free = |home: u64, bytes: u64| {
            let run = runs.get(runs.partition_point(|run| run.1 <= home));
            run.is_some_and(|run| run.0 <= home && home + bytes <= run.1)
        };
        let handles = self.handles.iter();
        let free = handles.filter(|(home, handle)| is_free(**home, handle.bytes));
        let mut free: BTreeMap<u64, Handle> = free.map(|(home, handle)| (*home, *handle)).collect();
        loop {
            let before = free.len();
            let stays = |view: &&View| {
                view.handles
                    .iter()
                    .any(|(home, _)| !free.contains_key(home))
            };
            let views = self.views.values().filter(stays);
            let shown: Vec<u64> = views
                .flat_map(|view| &view.handles)
                .map(|(home, _)| *home)
                .collect();
            for home in shown {
                free.remove(&home);
            }
            if free.len() == before {
                break;
            }
        }
        if free.is_empty() {
            return None;
        }
        let shows = |view: &View| view.handles.iter().all(|(home, _)| free.contains_key(home));
        let views = std::mem::take(&mut self.views).into_iter();
        let (views, left) = views.partition(|(_, view)| shows(view));
        self.views = left;
        for (home, handle) in &free {
            let granules = (handle.bytes / GRANULE) as u32;
            let part = Part {
                home: *home,
                granules,
            };
            self.take_each(part, |_, _| {});
            self.handles.remove(home);
            if source {
                self.homes.spans.remove(home);
            }
        }
        let mut taken = Arena::default();
        (taken.handles, taken.views) = (free, views);
        let views = taken.views.values().map(View::bytes);
        self.mapped -= taken.held() + views.sum::<u64>();
        Some(taken)
    }

    /// Adds a segment of a source as free memory.
    pub(crate) fn add_segment(&mut self, home: u64, bytes: u64) {
        self.homes.add(home, bytes, false);
        self.homes.cut(home, bytes);
        // It has no handle.
        self.handles.insert(home, Handle { handle: 0, bytes });
        self.mapped += bytes;
        let granules = (bytes / GRANULE) as u32;
        self.put(Part { home, granules }, Tag::default());
    }
}
