//! Blocks and guards, as the program tells of them.

use super::{Block, Clock, SPAN, Tracker, covers};
use crate::checker::ranges::{Position, Ranges};

impl Tracker {
    pub(super) fn live_around(&self, start: u64, end: u64) -> Option<(u64, u64)> {
        let (&s, block) = self.live.range(..end).next_back()?;
        (block.end > start).then_some((s, block.end))
    }

    /// A block was handed out for use on a stream.
    pub fn handed_out(&mut self, start: u64, bytes: u64, stream: usize) {
        self.handed_out_of(None, start, bytes, stream);
    }

    /// A block was handed out for use on a stream, by a request that was sent to a graph pool, or to none.
    pub fn handed_out_of(&mut self, pool: Option<u64>, start: u64, bytes: u64, stream: usize) {
        let end = start + bytes;
        let parts = self.judge_place(pool, start, end);
        let captured = pool.and(self.lanes[stream].capture);
        for &part in &parts {
            match (captured, pool) {
                (Some(_), Some(pool)) => self.judge_captured(pool, start, part, stream),
                _ => self.judge_outside(pool, start, part, stream),
            }
        }
        let block = Block {
            end,
            parts,
            pool,
            users: vec![stream],
            captured: captured.is_some(),
            born: self.blocks,
            ..Block::default()
        };
        if let Some(capture) = captured {
            self.claims_block(capture, start, &block);
        }
        self.add(start, block);
    }

    /// A block of a graph pool is live again: the program came back to a time when it was.
    pub fn revived(&mut self, pool: u64, start: u64, bytes: u64) {
        let end = start + bytes;
        let parts = self.judge_place(Some(pool), start, end);
        let block = Block {
            end,
            parts,
            pool: Some(pool),
            captured: true,
            born: self.blocks,
            ..Block::default()
        };
        self.add(start, block);
    }

    /// Another stream is recorded on a block: from here on it may use it.
    pub fn recorded(&mut self, start: u64, stream: usize) {
        let capture = self.lanes[stream].capture;
        let Some(block) = self.live.get_mut(&start) else {
            return;
        };
        block.users.push(stream);
        if let Some(capture) = capture {
            block.captured |= block.pool.is_some();
            let block = block.clone();
            self.claims_block(capture, start, &block);
        }
    }

    /// Whether a block may lie where it does: where that is, in physical bytes.
    fn judge_place(&mut self, pool: Option<u64>, start: u64, end: u64) -> Vec<(u64, u64)> {
        self.blocks += 1;
        if self.asleep.contains(&pool) {
            self.found(format!(
                "block {start:#x}..{end:#x} is handed out while that memory is away"
            ));
        }
        if let Some((s, e)) = self.live_around(start, end) {
            self.found(format!(
                "block {start:#x}..{end:#x} overlaps the live block {s:#x}..{e:#x}"
            ));
        }
        let parts = self.physical(start, end);
        let mapped: u64 = parts.iter().map(|(from, to, ..)| to - from).sum();
        if mapped != end - start {
            self.found(format!(
                "block {start:#x}..{end:#x}: {mapped} bytes of it are mapped"
            ));
        }
        if parts.iter().any(|(from, ..)| !self.is_open(*from)) {
            self.found(format!(
                "block {start:#x}..{end:#x} has memory without access"
            ));
        }
        let parts: Vec<(u64, u64)> = parts.iter().map(|(_, _, from, to)| (*from, *to)).collect();
        for &(from, to) in &parts {
            self.judge_alone(start, (from, to));
            self.judge_pool(pool, start, from);
        }
        parts
    }

    /// No other block has the bytes of a block.
    pub(super) fn judge_alone(&mut self, start: u64, (from, to): (u64, u64)) {
        let other = self.occupied.range(..to).next_back();
        if let Some((_, (end, address))) = other
            && *end > from
        {
            let address = *address;
            self.found(format!(
                "block {start:#x} shares memory with the live block {address:#x}"
            ));
        }
        let within = |block: &Block| block.parts.iter().any(|(s, e)| *s < to && from < *e);
        if let Some((address, _)) = self.guards.iter().find(|(_, block)| within(block)) {
            let address = *address;
            self.found(format!(
                "block {start:#x} has memory that a guard keeps at {address:#x}"
            ));
        }
    }

    /// Memory of a pool is no other's as long as it is there.
    fn judge_pool(&mut self, pool: Option<u64>, start: u64, from: u64) {
        let base = from / SPAN * SPAN;
        let owner = *self.owners.entry(base).or_insert(pool);
        if owner != pool {
            let name = |pool: Option<u64>| match pool {
                Some(pool) => format!("pool {pool}"),
                None => "no pool".to_owned(),
            };
            self.found(format!(
                "block {start:#x} of {} has memory of {}",
                name(pool),
                name(owner)
            ));
        }
    }

    /// The next thing on the block's stream comes after all uses of its bytes, and no launch uses them, except for those
    /// of a pool whose program permits it.
    fn judge_outside(
        &mut self,
        pool: Option<u64>,
        start: u64,
        (from, to): (u64, u64),
        stream: usize,
    ) {
        let own = pool.filter(|pool| self.reusing.contains(pool));
        if let Some((graph, at)) = self.claimed(from, to, own) {
            self.found(format!(
                "block {start:#x} for stream {stream} has memory that graph {graph:#x} may touch at {at:#x}"
            ));
        }
        for launches in [false, true] {
            let bad = self.use_beside(launches, stream, (from, to));
            let Some((at, (other, position))) = bad else {
                continue;
            };
            let known = |clock: &Clock| clock.get(other).copied().unwrap_or(0);
            let by = if launches {
                "a launch on stream"
            } else {
                "stream"
            };
            self.found(format!(
                "block {start:#x} for stream {stream}: byte {:#x} of it may be used by {by} {other} until \
                 {position}; stream {stream} follows it to {}, the host to {}",
                at - from,
                known(&self.lanes[stream].clock),
                known(&self.seen)
            ));
        }
    }

    /// A use of physical bytes, by a launch or by other work, that the next thing on a stream does not come after.
    pub(super) fn use_beside(
        &mut self,
        launches: bool,
        stream: usize,
        (from, to): (u64, u64),
    ) -> Option<(u64, Position)> {
        let implied = self.implied(stream);
        let mut used = std::mem::take(self.uses(launches));
        let found = used.find(
            from,
            to,
            |used| covers(&self.seen, used),
            |used| self.ordered(stream, &implied, used),
        );
        *self.uses(launches) = used;
        found
    }

    fn uses(&mut self, launches: bool) -> &mut Ranges {
        match launches {
            true => &mut self.launched,
            false => &mut self.used,
        }
    }

    /// A capture's block: nodes that touched its bytes come before the next node of its stream, work outside of
    /// captures is over, and no graph of another pool may touch them. That of the same pool may, by the promise that
    /// their launches are ordered.
    fn judge_captured(&mut self, pool: u64, start: u64, (from, to): (u64, u64), stream: usize) {
        if let Some((graph, at)) = self.claimed(from, to, Some(pool)) {
            self.found(format!(
                "block {start:#x} of a capture has memory that graph {graph:#x} of another pool may touch at {at:#x}"
            ));
        }
        let mut used = std::mem::take(&mut self.used);
        let seen = |used| covers(&self.seen, used);
        let bad = used.find(from, to, seen, seen);
        self.used = used;
        if let Some((at, (other, position))) = bad {
            self.found(format!(
                "block {start:#x} of a capture: byte {:#x} of it may be used by work of stream {other} outside until \
                 {position}, which the host has not seen",
                at - from
            ));
        }
        let Some((graph, present, hand)) = self.present(stream) else {
            return;
        };
        let Some(graph) = self.graphs.get_mut(&graph) else {
            return;
        };
        if let Some((at, node)) = graph.order.beside(&present, hand, (from, to)) {
            let node = &graph.order.nodes[node];
            let touched = node.touches.iter().find_map(|touch| touch.block);
            let by = node.hand.map_or(0, |(_, stream, _)| stream);
            let text = format!(
                "block {start:#x} for stream {stream} of capture {}: byte {:#x} of it is touched by a node of stream \
                 {by} with the block {:#x}, which stream {stream} is not behind",
                hand.0,
                at - from,
                touched.unwrap_or(0)
            );
            self.found(text);
        }
    }

    pub(super) fn add(&mut self, start: u64, block: Block) {
        for &(from, to) in &block.parts {
            self.occupied.insert(from, (to, start));
        }
        self.live.insert(start, block);
    }

    /// A block is being freed: the program does not use it any more.
    pub fn freed(&mut self, start: u64) -> Option<Block> {
        let block = self.live.remove(&start)?;
        for (from, _) in &block.parts {
            self.occupied.remove(from);
        }
        // Whose streams capture while it is freed, of those it is known that the graph may touch it.
        let users = block.users.iter();
        let captures: Vec<u64> = users.filter_map(|&user| self.lanes[user].capture).collect();
        for capture in captures {
            if block.touched.contains(&capture) {
                self.claims_block(capture, start, &block);
            }
        }
        Some(block)
    }

    /// The free was refused: it is live as before.
    pub fn live_again(&mut self, start: u64, block: Option<Block>) {
        if let Some(block) = block {
            self.add(start, block);
        }
    }

    /// A guard keeps a range.
    pub fn guarded(&mut self, start: u64, bytes: u64) {
        let end = start + bytes;
        let parts = self.parts(start, end);
        let parts = parts.iter().map(|(s, e, p)| (*p, p + (e - s))).collect();
        let block = Block {
            end,
            parts,
            ..Block::default()
        };
        self.guards.push((start, block));
    }

    pub fn unguarded(&mut self, start: u64, bytes: u64) {
        let end = start + bytes;
        let at = self
            .guards
            .iter()
            .position(|(s, b)| (*s, b.end) == (start, end));
        if let Some(at) = at {
            self.guards.swap_remove(at);
        }
    }
}
