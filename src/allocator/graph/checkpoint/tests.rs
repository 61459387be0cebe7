use super::*;
use crate::allocator::graph::arena::{Handle, Part};
use crate::allocator::graph::few::Few;
use crate::allocator::size::{GRANULE, PHYSICAL_GRANULE};

const HOME: u64 = 1 << 40;
const PLACES: u32 = 4;

fn block(addr: u64, id: u32, owner: u64) -> (u64, Live) {
    let part = Part {
        home: addr,
        granules: 1,
    };
    let live = Live {
        id,
        generation: 1,
        owner,
        granules: 1,
        requested: GRANULE,
        parts: Few::from([part]),
        users: Few::new(),
        pending: Vec::new(),
        captured: true,
        touched: Vec::new(),
        born: 1,
        names: Default::default(),
    };
    (addr, live)
}

/// In each state, a place has no block or one of two; the test covers all combinations.
#[test]
fn blocks_cease_and_revive_where_they_differ() {
    for case in 0..9u32.pow(PLACES) {
        let mut graphs = Graphs::default();
        let id = graphs.add_pool(None);
        let arena = &mut graphs.pools.get_mut(&id).expect("made above").arena;
        let (handle, bytes) = (1, PHYSICAL_GRANULE);
        arena.handles.insert(HOME, Handle { handle, bytes });
        let (mut live, mut cease, mut revive) = (Vec::new(), Vec::new(), Vec::new());
        for place in 0..PLACES {
            let addr = HOME + u64::from(place) * GRANULE;
            let (then, now) = (case / 9u32.pow(place) % 3, case / 9u32.pow(place) / 3 % 3);
            live.extend((then > 0).then(|| block(addr, then, id)));
            if now > 0 {
                let (addr, block) = block(addr, now, id);
                arena.live.insert(addr, block);
            }
            cease.extend((now > 0 && now != then).then_some(addr));
            revive.extend((then > 0 && now != then).then_some((addr, then)));
        }
        let changes = graphs.changes(id, &Layout { at: 50, live }).unwrap();
        let revived = changes.revive.iter().map(|(addr, live)| (*addr, live.id));
        assert_eq!(
            (changes.cease, revived.collect()),
            (cease, revive),
            "{case}"
        );
    }
}
