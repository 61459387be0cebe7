//! Checkpoints: the live blocks of a pool at some time, and the return to that state.
//!
//! Nothing is unmapped while a graph may use a pool, so a block can be restored at its address, whatever was captured
//! since.

use crate::allocator::graph::Graphs;
use crate::allocator::graph::arena::Live;
use crate::allocator::graph::user::{Names, User};
use crate::error::GraphPoolError;

/// The blocks of a pool at some time.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    /// Value of the pools' counter at that time.
    at: u64,
    /// Live blocks by address, ascending.
    pub live: Vec<(u64, Live)>,
}

/// The changes that make exactly the blocks of a checkpoint live.
#[derive(Debug)]
pub(crate) struct Changes {
    /// Addresses of blocks that are live now but not in the checkpoint.
    pub cease: Vec<u64>,
    /// Blocks of the checkpoint that are not live now.
    pub revive: Vec<(u64, Live)>,
}

impl Graphs {
    /// Returns the live blocks of a pool, by address.
    pub(crate) fn checkpoint(&mut self, pool: u64) -> Layout {
        self.has_checkpoints = true;
        let at = self.number();
        let pool = self.pools.get(&pool).into_iter();
        let live = pool.flat_map(|pool| pool.arena.live.iter());
        let mut live: Vec<_> = live.map(|(addr, live)| (*addr, live.listed())).collect();
        live.sort_unstable_by_key(|(addr, _)| *addr);
        Layout { at, live }
    }

    /// Returns the streams that used the blocks that a restore ends, each with the block's bytes.
    pub(crate) fn uses_of(&self, pool: u64, changes: &Changes) -> Vec<(User, u64)> {
        let pool = self.pools.get(&pool);
        let ceasing = changes.cease.iter();
        let live = ceasing.filter_map(|addr| pool?.arena.live.get(addr));
        live.flat_map(|live| live.users.iter().map(|user| (user.clone(), live.bytes())))
            .collect()
    }

    /// Returns the changes that restore a checkpoint.
    ///
    /// # Errors
    /// A capture in progress or another call uses the pool, or the pool released its addresses since the checkpoint.
    pub(crate) fn changes(&self, id: u64, to: &Layout) -> Result<Changes, GraphPoolError> {
        let Some(pool) = self.pools.get(&id) else {
            return Err(GraphPoolError::Released);
        };
        let (arena, at, to) = (&pool.arena, to.at, &to.live);
        let in_capture = self.captures.values().any(|capture| capture.may_use(id));
        if in_capture || pool.calls > 0 || arena.tags().any(|(_, tag)| !tag.marks.is_empty()) {
            let bytes = arena.live.bytes();
            return Err(GraphPoolError::NotComplete { bytes });
        }
        let mapped = |(addr, live): &(u64, Live)| {
            arena.parts_at(*addr, live.granules).as_ref() == Some(&live.parts)
        };
        if !to.iter().all(mapped) {
            return Err(GraphPoolError::ForeignCheckpoint);
        }
        let same =
            |one: &Live, other: &Live| (one.id, one.generation) == (other.id, other.generation);
        let known = |addr: &u64, live: &Live| {
            let place = to.binary_search_by_key(addr, |(at, _)| *at);
            place.is_ok_and(|place| same(&to[place].1, live))
        };
        let cease = arena.live.iter().filter(|(addr, live)| !known(addr, live));
        let lives =
            |(addr, kept): &&(u64, Live)| arena.live.get(addr).is_some_and(|live| same(kept, live));
        let revive = to.iter().filter(|kept| !lives(kept));
        let mut cease: Vec<u64> = cease.map(|(addr, _)| *addr).collect();
        cease.sort_unstable();
        let departed = self.departed.iter().filter(|(when, _)| *when > at);
        let departed: Names = departed.map(|(_, user)| user).collect();
        let revived = |(addr, kept): &(u64, Live)| (*addr, kept.revived(&departed));
        Ok(Changes {
            cease,
            revive: revive.map(revived).collect(),
        })
    }
}

impl Live {
    /// Returns the block as it is revived, with those of its users that were not retired.
    fn revived(&self, departed: &Names) -> Live {
        let mut live = self.listed();
        live.users
            .retain(|user| user.stream.is_some() || !departed.has(user));
        live
    }
}

#[cfg(test)]
mod tests;
