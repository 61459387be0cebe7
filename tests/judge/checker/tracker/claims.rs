//! What graphs may touch: memory that a capture was given, or uses as its streams say. It is theirs as long as the graph,
//! an executable made of it or a launch of that is there, and its addresses stay. Memory may be away meanwhile, when the
//! program says so.

use std::collections::BTreeMap;

use cualloc::driver::sys::*;

use super::{Block, SPAN, Tracker, covers};
use crate::checker::ranges::Position;

/// Physical bytes, the address at which a graph has them, and the pool whose they are.
type Part = (u64, u64, u64, u64);

/// What the graph of one capture may touch.
pub(super) struct Claim {
    /// The graph's handle, while it was there.
    pub graph: u64,
    /// The capture, graphs, and executables that may touch it.
    holders: u32,
    /// Launches that the host may not have seen complete.
    pub launches: Vec<Position>,
    /// Addresses: start to end and pool.
    spans: BTreeMap<u64, (u64, u64)>,
    /// Where they lie, as of a layout of mappings.
    parts: Vec<Part>,
    layout: u64,
}

impl Claim {
    pub fn new(graph: u64, holders: u32) -> Claim {
        Claim {
            graph,
            holders,
            launches: Vec::new(),
            spans: BTreeMap::new(),
            parts: Vec::new(),
            layout: 0,
        }
    }

    fn add(&mut self, start: u64, end: u64, pool: u64) {
        let span = self.spans.entry(start).or_insert((end, pool));
        span.0 = span.0.max(end);
        self.layout = 0;
    }

    /// The pool whose memory an address is.
    pub fn pool_at(&self, at: u64) -> Option<u64> {
        let spans = self.spans.range(..=at).rev();
        let mut spans = spans.filter(|(_, (end, _))| *end > at);
        spans.next().map(|(_, (_, pool))| *pool)
    }
}

impl Tracker {
    /// One more holds these claims.
    pub(super) fn held(&mut self, claims: &[u64]) {
        for claim in claims {
            if let Some(claim) = self.claims.get_mut(claim) {
                claim.holders += 1;
            }
        }
    }

    /// A holder of these was dropped.
    pub(super) fn let_go(&mut self, claims: &[u64]) {
        for claim in claims {
            if let Some(claim) = self.claims.get_mut(claim) {
                claim.holders -= 1;
            }
        }
    }

    /// Forgets claims that are not used any more.
    fn review_claims(&mut self) {
        let seen = &self.seen;
        self.claims.retain(|_, claim| {
            claim.launches.retain(|used| !covers(seen, *used));
            claim.holders > 0 || !claim.launches.is_empty()
        });
    }

    /// A capture uses a block from here on.
    pub(super) fn claims_block(&mut self, capture: u64, start: u64, block: &Block) {
        if let (Some(claim), Some(pool)) = (self.claims.get_mut(&capture), block.pool) {
            claim.add(start, block.end, pool);
        }
    }

    /// A graph that was not captured may touch all memory that a pool has.
    pub fn retained(&mut self, graph: CUgraph, pool: u64) {
        self.count += 1;
        let mut claim = Claim::new(graph as u64, 1);
        for (start, mapping) in &self.mappings {
            let base = mapping.physical / SPAN * SPAN;
            if self.owners.get(&base) == Some(&Some(pool)) {
                claim.add(*start, mapping.end, pool);
            }
        }
        self.claims.insert(self.count, claim);
        let graph = self.graphs.entry(graph as u64).or_default();
        graph.claims.push(self.count);
    }

    /// Physical bytes of addresses: addresses, then bytes.
    pub(super) fn physical(&self, start: u64, end: u64) -> Vec<(u64, u64, u64, u64)> {
        let parts = self.parts(start, end).into_iter();
        parts.map(|(s, e, p)| (s, e, p, p + (e - s))).collect()
    }

    /// Whose claim physical bytes are, of which a pool's own do not count: the graph, and its address.
    pub(super) fn claimed(&mut self, from: u64, to: u64, but: Option<u64>) -> Option<(u64, u64)> {
        self.review_claims();
        let (layout, mut claims) = (self.layout, std::mem::take(&mut self.claims));
        for claim in claims.values_mut().filter(|claim| claim.layout != layout) {
            claim.layout = layout;
            claim.parts.clear();
            for (start, (end, pool)) in &claim.spans {
                let parts = self.physical(*start, *end).into_iter();
                let parts = parts.map(|(at, _, from, to)| (from, to, at, *pool));
                claim.parts.extend(parts);
            }
        }
        let found = claims.values().find_map(|claim| {
            let meets = |(s, e, _, pool): &&Part| *s < to && from < *e && Some(*pool) != but;
            let part = claim.parts.iter().find(meets)?;
            Some((claim.graph, part.2))
        });
        self.claims = claims;
        found
    }

    /// Addresses that a graph may touch go.
    pub(super) fn judge_claims(&mut self, call: &str, start: u64, end: u64) {
        self.review_claims();
        let away = |pool: u64| call == "cuMemUnmap" && self.asleep.contains(&Some(pool));
        let found = self.claims.values().find_map(|claim| {
            let mut spans = claim.spans.range(..end);
            let lost = |(_, (stop, pool)): &(&u64, &(u64, u64))| *stop > start && !away(*pool);
            let (at, (stop, _)) = spans.find(lost)?;
            Some((claim.graph, *at, *stop))
        });
        if let Some((graph, s, e)) = found {
            self.found(format!(
                "{call} of {start:#x}..{end:#x}: graph {graph:#x} may touch {s:#x}..{e:#x}"
            ));
        }
    }

    // ---- memory that is away ---------------------------------------------------------------

    /// Whether the memory of a live block is away.
    pub(super) fn is_asleep(&self, block: u64) -> bool {
        let block = self.live.get(&block);
        block.is_some_and(|block| self.asleep.contains(&block.pool))
    }

    /// The memory of pools goes away, or of what is in none, until it [is back](Self::wakes).
    pub fn sleeps(&mut self, pools: &[Option<u64>]) {
        self.asleep.extend(pools);
        for (start, mapping) in &self.mappings {
            let owner = self.owners.get(&(mapping.physical / SPAN * SPAN));
            if let Some(owner) = owner.filter(|owner| pools.contains(owner)) {
                self.homes.push((*start, mapping.end, *owner));
            }
        }
        for block in self.live.values_mut() {
            if pools.contains(&block.pool) {
                for (from, _) in std::mem::take(&mut block.parts) {
                    self.occupied.remove(&from);
                }
            }
        }
    }

    /// The memory of pools is back: that of every live block, and all that a graph may touch, at its address.
    pub fn wakes(&mut self, pools: &[Option<u64>]) {
        self.asleep.retain(|pool| !pools.contains(pool));
        // Other memory lies there now, and it is the same pool's.
        let back = |(_, _, owner): &mut (u64, u64, Option<u64>)| pools.contains(owner);
        for (start, end, owner) in self.homes.extract_if(.., back).collect::<Vec<_>>() {
            for (_, _, physical) in self.parts(start, end) {
                self.owners.insert(physical / SPAN * SPAN, owner);
            }
        }
        let blocks = self.live.iter();
        let back = blocks.filter(|(_, block)| pools.contains(&block.pool));
        let back: Vec<(u64, u64)> = back.map(|(at, block)| (*at, block.end)).collect();
        for (start, end) in back {
            if !self.is_there(start, end) {
                self.found(format!(
                    "block {start:#x}..{end:#x} has not got its memory back"
                ));
            }
            let parts = self.physical(start, end).into_iter();
            let parts: Vec<(u64, u64)> = parts.map(|(_, _, from, to)| (from, to)).collect();
            for &(from, to) in &parts {
                self.judge_alone(start, (from, to));
            }
            if let Some(mut block) = self.live.remove(&start) {
                block.parts = parts;
                self.add(start, block);
            }
        }
        self.review_claims();
        let claims = self.claims.values().flat_map(|claim| {
            let spans = claim.spans.iter();
            spans.map(|(start, (end, pool))| (claim.graph, *start, *end, *pool))
        });
        let back = claims.filter(|(_, _, _, pool)| pools.contains(&Some(*pool)));
        for (graph, start, end, _) in back.collect::<Vec<_>>() {
            if !self.is_there(start, end) {
                self.found(format!(
                    "graph {graph:#x} has not got {start:#x}..{end:#x} back"
                ));
            }
        }
    }
}
