//! Families: pools whose graphs are ordered among each other, too, and that have addresses and lives of their own.
//!
//! The memory of a family is that of one pool, which no request names: at its homes bytes are told apart, and who may
//! have them is said there once for all. Each pool of the family sees handles in views of its own. So no address is of
//! two pools, and the memory is what the largest needs, and what is held.

use std::collections::HashSet;

use crate::allocator::graph::arena::{Arena, PLAIN, Part, Share, Tag, View};
use crate::allocator::graph::{Graphs, Pool};
use crate::allocator::size::GRANULE;

impl Graphs {
    /// Makes a pool of a family; its number. None if the family is gone.
    pub(crate) fn add_member(&mut self, memory: u64) -> Option<u64> {
        self.pools.get(&memory)?;
        let id = self.add_pool();
        self.has_families = true;
        if let Some(pool) = self.pools.get_mut(&id) {
            pool.family = Some(memory);
        }
        Some(id)
    }

    pub(crate) fn share(&self, pool: u64) -> Share {
        let memory = self.memory_of(pool);
        Share { pool, memory }
    }

    /// The pool that has a pool's memory.
    pub(crate) fn memory_of(&self, pool: u64) -> u64 {
        if !self.has_families {
            return pool;
        }
        let known = self.pools.get(&pool);
        known.and_then(|known| known.family).unwrap_or(pool)
    }

    /// The pools that have memory of their own.
    pub(crate) fn memories(&self) -> impl Iterator<Item = u64> {
        let pools = self.pools.iter();
        pools
            .filter(|(_, pool)| pool.family.is_none())
            .map(|(id, _)| *id)
    }

    /// The pools of a family, without the one that has their memory.
    pub(crate) fn members(&self, memory: u64) -> impl Iterator<Item = (u64, &Pool)> {
        // There may be many pools, and mostly there is no family.
        let most = if self.has_families { usize::MAX } else { 0 };
        let pools = self.pools.iter().take(most);
        pools
            .filter(move |(_, pool)| pool.family == Some(memory))
            .map(|(id, pool)| (*id, pool))
    }

    /// Whether a graph may use memory, by whichever pool.
    pub(crate) fn is_memory_leased(&self, memory: u64) -> bool {
        self.pools.get(&memory).is_some_and(Pool::is_leased)
            || self.members(memory).any(|(_, pool)| pool.is_leased())
    }

    /// Whether a capture uses memory, and may get more of it, by whichever pool.
    pub(crate) fn may_use_memory(&self, capture: u64, memory: u64) -> bool {
        let known = self.captures.get(&capture);
        known.is_some_and(|known| {
            let any = || {
                self.members(memory)
                    .any(|(member, _)| known.may_use(member))
            };
            known.may_use(memory) || (!known.left.contains(&memory) && any())
        })
    }

    /// Whether a capture was left by the scopes of a pool, and gets memory of no other that shares it.
    pub(super) fn has_ended_with(&self, capture: u64, pool: u64) -> bool {
        let memory = self.memory_of(pool);
        let known = self.captures.get(&capture);
        let left =
            known.is_some_and(|known| known.left.iter().any(|id| [pool, memory].contains(id)));
        left && !self.may_use_memory(capture, memory)
    }

    /// Whether captures get memory by a scope of a pool.
    pub(super) fn is_served(&self, pool: u64) -> bool {
        let served = |scopes: &[(u64, u64)]| scopes.iter().any(|(_, of)| *of == pool);
        self.captures.values().any(|known| served(&known.served))
    }

    /// Whether no capture comes to a pool any more, nor to any of the family whose memory it has.
    pub(super) fn is_released(&self, memory: u64) -> bool {
        let released = |pool: &Pool| pool.released;
        self.pools.get(&memory).is_some_and(released)
            && self.members(memory).all(|(_, pool)| pool.released)
    }

    /// Whether nobody has, or is about to have, blocks of a pool of a family, and no work may touch what was one.
    pub(super) fn has_left(&self, of: Share) -> bool {
        let untold = self.pools.get(&of.pool).is_none_or(|pool| pool.untold);
        !untold
            && self.pools.get(&of.memory).is_none_or(|pool| {
                let mut views = pool.arena.views.values();
                pool.calls == 0
                    && pool.arena.live.bytes_of(of.pool) == 0
                    && views.all(|view| view.owner != of.pool || view.pending.is_empty())
            })
    }

    /// Whether a pool is suspended for nobody: no capture comes, no graph can use it, and there is no block.
    pub(crate) fn is_unused(&self, memory: u64) -> bool {
        self.is_released(memory)
            && !self.is_memory_leased(memory)
            && self
                .pools
                .get(&memory)
                .is_some_and(|pool| pool.away && pool.calls == 0 && pool.arena.live.is_empty())
    }

    /// Takes out what pools of families had that are gone, and no other has: their views, and handles that nobody sees
    /// any more. What goes is counted until it is [put back](Self::put_back_part).
    pub(crate) fn take_left(&mut self) -> Vec<(u64, Arena)> {
        let mut taken = Vec::new();
        if !self.has_families {
            return taken;
        }
        self.forget_released();
        for memory in self.memories().collect::<Vec<u64>>() {
            let members: Vec<u64> = self.members(memory).map(|(member, _)| member).collect();
            let Some(pool) = self.pools.get_mut(&memory) else {
                continue;
            };
            if pool.calls > 0 || pool.suspended {
                continue;
            }
            let left = pool.arena.take_left(&members);
            if !left.views.is_empty() || !left.handles.is_empty() {
                pool.calls += 1;
                pool.planned += left.held();
                taken.push((memory, left));
            }
        }
        taken
    }

    /// What was taken out is the driver's, but for what could not be given back.
    pub(crate) fn put_back_part(&mut self, memory: u64, held: u64, went: Gone, left: Arena) {
        if let Some(pool) = self.pools.get_mut(&memory) {
            pool.calls -= 1;
            pool.planned -= held;
            // What is mapped there still was not tried, or could not be undone.
            let mapped = left.at_home();
            for (home, bytes) in went.homes {
                if !mapped.contains_key(&home) {
                    pool.arena.homes.put(home, bytes);
                }
            }
            for (base, bytes) in went.sites {
                if !left.lost.contains_key(&base) && !left.views.contains_key(&base) {
                    pool.arena.sites.put(base, bytes);
                }
            }
            pool.arena.absorb(left);
        }
        self.recount();
        self.forget_released();
    }
}

/// Where taken memory was mapped: address and bytes, at home and in views.
#[derive(Debug, Default)]
pub(crate) struct Gone {
    pub homes: Vec<(u64, u64)>,
    pub sites: Vec<(u64, u64)>,
}

impl Gone {
    pub(crate) fn of(arena: &Arena) -> Gone {
        let homes = arena.handles.iter();
        let sites = arena.views.iter();
        Gone {
            homes: homes.map(|(home, handle)| (*home, handle.bytes)).collect(),
            sites: sites.map(|(base, view)| (*base, view.bytes())).collect(),
        }
    }
}

impl Arena {
    /// The views of pools that are none of these, and the free handles that are in no other view. Nothing of a pool
    /// that shares its memory with none.
    fn take_left(&mut self, members: &[u64]) -> Arena {
        let mut left = Arena::default();
        let gone = |owner: u64| owner != PLAIN && !members.contains(&owner);
        if !self.views.values().any(|view| gone(view.owner)) {
            return left;
        }
        let (views, kept) = std::mem::take(&mut self.views)
            .into_iter()
            .partition(|(_, view)| gone(view.owner));
        (left.views, self.views) = (views, kept);
        self.lay_down();
        let shown = self.views.values().flat_map(|view| &view.handles);
        let seen: HashSet<u64> = shown.map(|(home, _)| *home).collect();
        let quiet = |tag: &Tag| tag.pending.is_empty() && tag.marks.is_empty();
        let runs = self.runs(quiet);
        let free = |from: u64, to: u64| runs.iter().any(|run| run.0 <= from && to <= run.1);
        let (unseen, kept) = std::mem::take(&mut self.handles)
            .into_iter()
            .partition(|(home, handle)| !seen.contains(home) && free(*home, *home + handle.bytes));
        (left.handles, self.handles) = (unseen, kept);
        for (home, handle) in &left.handles {
            let (home, granules) = (*home, (handle.bytes / GRANULE) as u32);
            drop(self.take(Part { home, granules }));
        }
        let views: u64 = left.views.values().map(View::bytes).sum();
        self.mapped -= views + left.held();
        left
    }
}
