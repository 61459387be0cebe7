//! The invariants of graph pools, verified by one walk over their metadata.

use crate::allocator::extent::invariant::{holds, same};
use crate::allocator::graph::arena::{Arena, Live, Part, View};
use crate::allocator::graph::{Graphs, Pool};
use crate::allocator::size::GRANULE;
use crate::error::Error;

impl Graphs {
    /// Recomputes every figure and compares it.
    ///
    /// # Errors
    /// The first inconsistency.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.pools.values().try_for_each(check_pool)?;
        let known =
            |number: &u64| self.events.contains_key(number) || self.unqueried.contains(number);
        let pools = self.pools.values().map(|pool| &pool.arena);
        for arena in pools {
            holds(
                "what memory of a pool waits for has an event",
                arena.pending().all(|used| known(&used.event)),
            )?;
            let mut marks = arena.tags().flat_map(|(_, tag)| &tag.marks);
            holds(
                "memory that was freed in a capture is that capture's until its end",
                marks.all(|mark| self.captures.contains_key(&mark.capture)),
            )?;
        }
        Ok(())
    }
}

fn check_pool(pool: &Pool) -> Result<(), Error> {
    let arena = &pool.arena;
    let live = arena.live.bytes();
    let counted: u64 = arena.live.values().map(Live::bytes).sum();
    same("bytes of a pool's live blocks", live, counted)?;
    holds("a pool's peak is not below the present", pool.peak >= live)?;
    let mut parts: Vec<Part> = arena.tags().map(|(part, _)| part).collect();
    let free = parts.len();
    parts.extend(arena.live.values().flat_map(|live| &live.parts));
    let covered: u64 = parts
        .iter()
        .map(|part| u64::from(part.granules) * GRANULE)
        .sum();
    if pool.calls == 0 {
        let held: u64 = arena.handles.values().map(|handle| handle.bytes).sum();
        same(
            "every byte of a pool is free or in one block",
            held,
            covered,
        )?;
    }
    holds(
        "free memory of a pool has a size",
        parts[..free].iter().all(|part| part.granules > 0),
    )?;
    parts.sort_unstable();
    let apart = parts.windows(2).all(|pair| pair[0].end() <= pair[1].home);
    holds("no byte of a pool is in two places", apart)?;
    let early = |live: &Live| live.pending.iter().any(|used| used.event <= live.born);
    holds(
        "a capture gets no memory that work outside of captures may use",
        !arena.live.values().any(early),
    )?;
    if pool.calls == 0 {
        let homes: u64 = arena.handles.values().map(|handle| handle.bytes).sum();
        let views: u64 = arena.views.values().map(View::bytes).sum();
        same(
            "what was mapped for a pool is mapped until it gives everything back",
            arena.mapped,
            homes + views,
        )?;
    }
    check_mapped(arena)
}

/// Checks that every address of a live block is mapped, and to the bytes that the pool records.
fn check_mapped(arena: &Arena) -> Result<(), Error> {
    for (addr, live) in arena.live.iter() {
        holds(
            "a block of a pool lies where its address is mapped to",
            arena.parts_at(*addr, live.granules).as_ref() == Some(&live.parts),
        )?;
        let granules: u32 = live.parts.iter().map(|part| part.granules).sum();
        same(
            "the parts of a block of a pool are its size",
            live.granules,
            granules,
        )?;
    }
    for view in arena.views.values() {
        let held = |(home, bytes): &(u64, u64)| {
            arena
                .handles
                .get(home)
                .is_some_and(|handle| handle.bytes == *bytes)
        };
        holds(
            "a view of a pool maps handles that the pool holds",
            view.handles.iter().all(held),
        )?;
        let mut shown: Vec<u64> = view.handles.iter().map(|(home, _)| *home).collect();
        shown.sort_unstable();
        shown.dedup();
        same(
            "a view of a pool shows no handle twice",
            view.handles.len(),
            shown.len(),
        )?;
    }
    Ok(())
}
