//! Blocks and guards, as the program tells of them.

use super::{Block, Clock, Law, covers};

impl Law {
    pub(super) fn live_around(&self, start: u64, end: u64) -> Option<(u64, u64)> {
        let (&s, block) = self.live.range(..end).next_back()?;
        (block.end > start).then_some((s, block.end))
    }

    /// A block was handed out for use on a stream.
    pub fn handed_out(&mut self, start: u64, bytes: u64, stream: usize) {
        let end = start + bytes;
        self.blocks += 1;
        if let Some((s, e)) = self.live_around(start, end) {
            self.found(format!(
                "block {start:#x}..{end:#x} overlaps the live block {s:#x}..{e:#x}"
            ));
        }
        let parts = self.parts(start, end);
        let mapped: u64 = parts.iter().map(|(from, to, _)| to - from).sum();
        if mapped != bytes {
            self.found(format!(
                "block {start:#x}..{end:#x}: {mapped} bytes of it are mapped"
            ));
        }
        let closed = |at: u64| {
            let mapping = self.mappings.range(..=at).next_back();
            mapping.is_some_and(|(_, mapping)| !mapping.accessible)
        };
        if parts.iter().any(|(from, _, _)| closed(*from)) {
            self.found(format!(
                "block {start:#x}..{end:#x} has memory without access"
            ));
        }
        let parts: Vec<(u64, u64)> = parts.iter().map(|(s, e, p)| (*p, p + (e - s))).collect();
        for &(from, to) in &parts {
            self.judge_part(start, (from, to), stream);
        }
        let block = Block { end, parts };
        self.add(start, block);
    }

    fn judge_part(&mut self, start: u64, (from, to): (u64, u64), stream: usize) {
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
        let implied = self.implied(stream);
        let mut used = std::mem::take(&mut self.used);
        let bad = used.find(
            from,
            to,
            |used| covers(&self.seen, used),
            |used| self.ordered(stream, &implied, used),
        );
        self.used = used;
        if let Some((at, (other, position))) = bad {
            let known = |clock: &Clock| clock.get(other).copied().unwrap_or(0);
            self.found(format!(
                "block {start:#x} for stream {stream}: byte {:#x} of it may be used by stream {other} until \
                 {position}; stream {stream} follows it to {}, the host to {}",
                at - from,
                known(&self.lanes[stream].clock),
                known(&self.seen)
            ));
        }
    }

    fn add(&mut self, start: u64, block: Block) {
        for &(from, to) in &block.parts {
            self.occupied.insert(from, (to, start));
        }
        self.live.insert(start, block);
    }

    /// A block is being freed: the program uses it no more.
    pub fn freed(&mut self, start: u64) -> Option<Block> {
        let block = self.live.remove(&start)?;
        for (from, _) in &block.parts {
            self.occupied.remove(from);
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
        self.guards.push((start, Block { end, parts }));
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
