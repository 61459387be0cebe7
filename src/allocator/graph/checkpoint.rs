//! Checkpoints: which blocks of a pool were live at some time, and the way back there.
//!
//! Nothing is unmapped while a graph may use a pool, so a block can be had again where it was, whatever was captured
//! since.

use crate::allocator::graph::Graphs;
use crate::allocator::graph::arena::{Arena, Live, PLAIN, Part, Tag};
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
        let memory = self.pools.get(&self.memory_of(pool));
        let live = memory
            .into_iter()
            .flat_map(|memory| memory.arena.live.iter());
        let own = live.filter(|(_, live)| live.owner == pool);
        let mut live: Vec<_> = own.map(|(addr, live)| (*addr, live.listed())).collect();
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
    /// Memory is in use outside of captures, or in one under way; the pool gave its addresses back since; or other pools
    /// of its family have blocks in the memory by now.
    pub(crate) fn changes(&self, id: u64, to: &Layout) -> Result<Changes, GraphPoolError> {
        let of = self.share(id);
        let Some(pool) = self.pools.get(&of.memory) else {
            return Err(GraphPoolError::Released);
        };
        let (arena, at, to) = (&pool.arena, to.at, &to.live);
        let mut captures = self.captures.keys();
        if captures.any(|capture| self.may_use_memory(*capture, of.memory)) {
            let bytes = arena.live.bytes_of(id);
            return Err(GraphPoolError::NotComplete { bytes });
        }
        let own = || arena.live.iter().filter(|(_, live)| live.owner == id);
        let open = |tag: &Tag| !(tag.pending.is_empty() && tag.marks.is_empty());
        let free = arena.tags().filter(|(_, tag)| open(tag));
        let free = free.map(|(part, _)| part.end() - part.home);
        let live = own().filter(|(_, live)| !live.pending.is_empty());
        let bytes = free.chain(live.map(|(_, live)| live.bytes())).sum();
        if bytes > 0 || pool.calls > 0 {
            return Err(GraphPoolError::NotComplete { bytes });
        }
        let mapped = |(addr, live): &(u64, Live)| {
            arena.owner_at(*addr) == of.sight()
                && arena.parts_at(*addr, live.granules).as_ref() == Some(&live.parts)
        };
        if !to.iter().all(mapped) {
            return Err(GraphPoolError::ForeignCheckpoint);
        }
        let same =
            |one: &Live, other: &Live| (one.id, one.generation) == (other.id, other.generation);
        let known =
            |addr: &u64, live: &Live| to.iter().any(|(at, kept)| at == addr && same(kept, live));
        let cease = own().filter(|(addr, live)| !known(addr, live));
        let lives =
            |(addr, kept): &&(u64, Live)| arena.live.get(addr).is_some_and(|live| same(kept, live));
        let revive = || to.iter().filter(|kept| !lives(kept));
        let bytes = arena.shared_with_others(id, revive().flat_map(|(_, kept)| &kept.parts));
        if bytes > 0 {
            return Err(GraphPoolError::Taken { bytes });
        }
        let mut cease: Vec<u64> = cease.map(|(addr, _)| *addr).collect();
        cease.sort_unstable();
        Ok(Changes {
            cease,
            revive: revive()
                .map(|(addr, kept)| (*addr, self.revived(at, kept)))
                .collect(),
        })
    }
}

impl Arena {
    /// Whose view an address lies in.
    fn owner_at(&self, addr: u64) -> u64 {
        let view = self.views.range(..=addr).next_back();
        let view = view.filter(|(base, view)| addr < *base + view.bytes());
        view.map_or(PLAIN, |(_, view)| view.owner)
    }

    /// Bytes of these parts that lie in live blocks of other pools than one.
    fn shared_with_others<'a>(&self, owner: u64, parts: impl Iterator<Item = &'a Part>) -> u64 {
        let others = self.live.values().filter(|live| live.owner != owner);
        let mut others: Vec<&Part> = others.flat_map(|live| &live.parts).collect();
        if others.is_empty() {
            return 0;
        }
        others.sort_unstable();
        let shared = parts.map(|part| {
            let first = others.partition_point(|other| other.end() <= part.home);
            let over = others[first..].iter();
            let over = over.take_while(|other| other.home < part.end());
            let bytes = over.map(|other| other.end().min(part.end()) - other.home.max(part.home));
            bytes.sum::<u64>()
        });
        shared.sum()
    }
}
