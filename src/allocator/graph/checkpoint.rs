//! Checkpoints: which blocks of a pool were live at some time, and the way back there.
//!
//! Nothing is unmapped while a graph may use a pool, so a block can be had again where it was, whatever was captured
//! since.

use crate::allocator::graph::Graphs;
use crate::allocator::graph::arena::{Live, Tag};
use crate::allocator::graph::user::{Names, User};
use crate::error::GraphPoolError;

/// The blocks of a pool at some time.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    /// How much had been counted by then.
    at: u64,
    /// Live blocks by their addresses, ascending.
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
        let pool = self.pools.get(&pool).into_iter();
        let live = pool.flat_map(|pool| pool.arena.live.iter());
        let mut live: Vec<_> = live.map(|(addr, live)| (*addr, live.listed())).collect();
        live.sort_unstable_by_key(|(addr, _)| *addr);
        Layout { at, live }
    }

    /// The streams that used blocks of a pool which cease, each with the block's bytes.
    pub(crate) fn uses_of(&self, pool: u64, changes: &Changes) -> Vec<(User, u64)> {
        let pool = self.pools.get(&pool);
        let ceasing = changes.cease.iter();
        let live = ceasing.filter_map(|addr| pool?.arena.live.get(addr));
        live.flat_map(|live| live.users.iter().map(|user| (user.clone(), live.bytes())))
            .collect()
    }

    /// What is to be done to come back to a checkpoint.
    ///
    /// # Errors
    /// Memory is in use outside of captures, or in one under way, or the pool gave its addresses back since.
    pub(crate) fn changes(&self, id: u64, to: &Layout) -> Result<Changes, GraphPoolError> {
        let Some(pool) = self.pools.get(&id) else {
            return Err(GraphPoolError::Released);
        };
        let (arena, at, to) = (&pool.arena, to.at, &to.live);
        if self.captures.values().any(|capture| capture.may_use(id)) {
            let bytes = arena.live.bytes();
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
    /// The block as it comes back, used by those of its streams that are still there.
    fn revived(&self, departed: &Names) -> Live {
        let mut live = self.listed();
        live.users
            .retain(|user| user.stream.is_some() || !departed.has(user));
        live
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::allocator::graph::arena::{Handle, Part};
    use crate::allocator::graph::few::Few;
    use crate::allocator::size::{GRANULE, PHYSICAL_GRANULE};
    use crate::allocator::stream::slot::StreamKey;
    use std::collections::BTreeMap;

    const HOME: u64 = 1 << 40;

    fn block(place: u64, (id, generation): (u32, u32), owner: u64, users: Few<User>) -> Live {
        Live {
            id,
            generation,
            owner,
            granules: 1,
            requested: GRANULE,
            parts: Few::One(Part {
                home: HOME + place * GRANULE,
                granules: 1,
            }),
            users,
            pending: Vec::new(),
            captured: true,
            touched: Vec::new(),
            born: 1,
            names: Default::default(),
        }
    }

    /// By the words of the contract: each block is looked for among all of the other side.
    type Model = (Vec<u64>, Vec<(u64, u32, Vec<usize>)>);

    fn model(now: &BTreeMap<u64, Live>, to: &Layout, departed: &[(u64, User)]) -> Model {
        let same = |one: (&u64, &Live), other: (&u64, &Live)| {
            (one.0, one.1.id, one.1.generation) == (other.0, other.1.id, other.1.generation)
        };
        let kept = || to.live.iter().map(|(addr, live)| (addr, live));
        let cease = now
            .iter()
            .filter(|live| !kept().any(|kept| same(*live, kept)));
        let revive = kept().filter(|kept| !now.iter().any(|live| same(live, *kept)));
        let users = |live: &Live| {
            let stays = |user: &&User| {
                !departed
                    .iter()
                    .any(|(when, known)| *when > to.at && known.is(user))
            };
            live.users
                .iter()
                .filter(stays)
                .map(|user| user.raw)
                .collect()
        };
        let revive = revive.map(|(addr, live)| (*addr, live.id, users(live)));
        (cease.map(|(addr, _)| *addr).collect(), revive.collect())
    }

    #[test]
    fn what_changes_is_what_a_look_at_each_pair_of_blocks_finds() {
        let mut word: u64 = 0x2545_f491_4f6c_dd1d;
        let mut below = |end: u64| {
            word ^= word << 13;
            word ^= word >> 7;
            word ^= word << 17;
            word % end
        };
        let (mut ceased, mut revived, mut kept, mut gone) = (0, 0, 0, 0);
        for _ in 0..200 {
            let mut graphs = Graphs::default();
            let id = graphs.add_pool();
            let places = 1 + below(60);
            let mut layout = Vec::new();
            let mut now = BTreeMap::new();
            for place in 0..places {
                let addr = HOME + place * GRANULE;
                let mut user = || {
                    let (raw, by_id) = (3 + below(6), below(2) == 0);
                    let handle = StreamKey::Handle(raw as usize);
                    let key = if by_id { StreamKey::Id(raw) } else { handle };
                    User::new(key, raw as usize, None, None)
                };
                let users: Few<User> = [user(), user()].into_iter().collect();
                // The same block, another one at its place, or one of both, or none.
                let (id_then, id_now) = (below(3) as u32, below(3) as u32);
                let (then, is) = (below(4) > 0, below(4) > 0);
                if then {
                    layout.push((addr, block(place, (id_then, 1), id, users.clone())));
                }
                if is {
                    now.insert(addr, block(place, (id_now, 1), id, users));
                }
            }
            let to = Layout {
                at: 50,
                live: layout,
            };
            graphs.departed = (0..below(5))
                .map(|at| {
                    let raw = 3 + below(6) as usize;
                    let key = match below(2) {
                        0 => StreamKey::Id(raw as u64),
                        _ => StreamKey::Handle(raw),
                    };
                    (48 + at, User::new(key, raw, None, None))
                })
                .collect();
            let pool = graphs.pools.get_mut(&id).expect("made above");
            let bytes = places.div_ceil(PHYSICAL_GRANULE / GRANULE) * PHYSICAL_GRANULE;
            pool.arena.handles.insert(HOME, Handle { handle: 1, bytes });
            for (addr, live) in &now {
                pool.arena.live.insert(*addr, live.clone());
            }
            let expected = model(&now, &to, &graphs.departed);
            let changes = graphs.changes(id, &to).unwrap();
            let users = |live: &Live| live.users.iter().map(|user| user.raw).collect();
            let found = changes.revive.iter();
            let found = found.map(|(addr, live)| (*addr, live.id, users(live)));
            let found: Model = (changes.cease.clone(), found.collect());
            assert_eq!(found, expected);
            ceased += expected.0.len();
            revived += expected.1.len();
            kept += now.len() - expected.0.len();
            gone += expected
                .1
                .iter()
                .filter(|(_, _, users)| users.len() < 2)
                .count();
            let uses = graphs.uses_of(id, &changes);
            let of = uses.chunks(2).zip(&changes.cease);
            assert_eq!(uses.len(), 2 * changes.cease.len());
            for (uses, addr) in of {
                let own = uses.iter().zip(&now[addr].users);
                own.for_each(|((user, bytes), known)| {
                    assert!(user.is_copy_of(known) && *bytes == GRANULE);
                });
            }
        }
        assert!(
            ceased.min(revived).min(kept).min(gone) > 100,
            "{ceased} {revived} {kept} {gone}"
        );
    }
}
