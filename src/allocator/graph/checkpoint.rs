//! Checkpoints: which blocks of a pool were live at some time, and the way back there.
//!
//! Nothing is unmapped while a graph may use a pool, so a block can be had again where it was, whatever was captured
//! since.

use crate::allocator::graph::Graphs;
use crate::allocator::graph::arena::{Live, Tag};
use crate::allocator::graph::user::User;
use crate::error::GraphPoolError;

/// The blocks of a pool at some time.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    /// How much had been counted by then.
    at: u64,
    /// Live blocks by their addresses.
    pub live: Vec<(u64, Live)>,
}

/// What makes the blocks of a checkpoint live, and no others.
#[derive(Debug)]
pub(crate) struct Changes {
    /// Blocks that are live and were not, by their addresses.
    pub cease: Vec<u64>,
    /// Blocks that were live and are not.
    pub revive: Vec<(u64, Live)>,
}

impl Graphs {
    /// The live blocks of a pool, by their addresses.
    pub(crate) fn checkpoint(&mut self, pool: u64) -> Layout {
        self.has_checkpoints = true;
        let at = self.number();
        let live = self.pools.get(&pool).map(|pool| pool.arena.live.iter());
        let live = live.into_iter().flatten();
        let mut live: Vec<_> = live.map(|(addr, live)| (*addr, live.listed())).collect();
        live.sort_unstable_by_key(|(addr, _)| *addr);
        Layout { at, live }
    }

    /// The streams that used blocks which cease, each with the block's bytes.
    pub(crate) fn uses_of(&self, changes: &Changes) -> Vec<(User, u64)> {
        let live = changes.cease.iter().filter_map(|addr| self.live(*addr));
        live.flat_map(|live| live.users.iter().map(|user| (user.clone(), live.bytes())))
            .collect()
    }

    /// A block that comes back, used by those of its streams that are still there.
    fn revived(&self, at: u64, kept: &Live) -> Live {
        let mut live = kept.listed();
        live.users.retain(|user| {
            let mut gone = self.departed.iter().filter(|(when, _)| *when > at);
            user.stream.is_some() || !gone.any(|(_, known)| known.is(user))
        });
        live
    }

    /// What is to be done to come back to a checkpoint.
    ///
    /// # Errors
    /// Memory is in use outside of captures, or in one under way; or the pool gave its addresses back since.
    pub(crate) fn changes(&self, id: u64, to: &Layout) -> Result<Changes, GraphPoolError> {
        let Some(pool) = self.pools.get(&id) else {
            return Err(GraphPoolError::Released);
        };
        let (arena, at, to) = (&pool.arena, to.at, &to.live);
        if self.captures.values().any(|known| known.may_use(id)) {
            let bytes = arena.live_bytes();
            return Err(GraphPoolError::NotComplete { bytes });
        }
        let open = |tag: &Tag| !(tag.pending.is_empty() && tag.marks.is_empty());
        let free = arena.tags().filter(|(_, tag)| open(tag));
        let free = free.map(|(part, _)| part.end() - part.home);
        let live = arena.live.values().filter(|live| !live.pending.is_empty());
        let bytes = free.chain(live.map(Live::bytes)).sum();
        if bytes > 0 || pool.calls > 0 {
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
        let known =
            |addr: &u64, live: &Live| to.iter().any(|(at, kept)| at == addr && same(kept, live));
        let cease = arena.live.iter().filter(|(addr, live)| !known(addr, live));
        let lives =
            |(addr, kept): &&(u64, Live)| arena.live.get(addr).is_some_and(|live| same(kept, live));
        let mut cease: Vec<u64> = cease.map(|(addr, _)| *addr).collect();
        cease.sort_unstable();
        Ok(Changes {
            cease,
            revive: to
                .iter()
                .filter(|kept| !lives(kept))
                .map(|(addr, kept)| (*addr, self.revived(at, kept)))
                .collect(),
        })
    }
}
