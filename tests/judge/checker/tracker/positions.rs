//! For a program that keeps to the order of streams itself: positions, and where memory lies.

use std::collections::HashSet;

use super::{Lane, Tracker};
use crate::checker::ranges::Position;

impl Tracker {
    /// The newest position of a stream, or the one at which the program left it.
    pub fn position(&self, stream: usize) -> Position {
        let Lane { clock, left, .. } = &self.lanes[stream];
        let newest = clock.get(stream).copied().unwrap_or(0);
        (stream, left.unwrap_or(newest))
    }

    /// The program does not use the stream any more. The allocator may still submit markers to it.
    pub fn left(&mut self, stream: usize) {
        self.lanes[stream].left = Some(self.position(stream).1);
    }

    /// Whether what is submitted to a stream next comes after a position.
    pub fn is_ordered(&self, stream: usize, at: Position) -> bool {
        at.1 == 0 || self.ordered(stream, &self.implied(stream), at)
    }

    /// A block is being freed, and streams may have used it until these positions, whether or not they did.
    pub fn freed_after(&mut self, start: u64, uses: &[Position]) {
        let end = self.live.get(&start).map_or(start, |block| block.end);
        for (at, end, physical) in self.parts(start, end) {
            for used in uses.iter().filter(|used| used.1 > 0) {
                self.used_at.add(at, end, *used);
                self.used.add(physical, physical + (end - at), *used);
            }
        }
        self.freed(start);
    }

    /// Whether an address lies in a second layout of memory.
    pub fn in_view(&self, address: u64) -> bool {
        let mapping = self.mappings.range(..=address).next_back();
        mapping.is_some_and(|(_, mapping)| mapping.view)
    }

    /// Whether a handle's (for `None`, a segment's) byte is mapped at an address.
    pub fn is_at(&self, address: u64, handle: Option<u64>, offset: u64) -> bool {
        let Some((base, mapping)) = self.mappings.range(..=address).next_back() else {
            return false;
        };
        let first = match handle {
            Some(handle) => self.handles.get(&handle).map(|handle| handle.physical),
            None => Some(mapping.physical),
        };
        address < mapping.end
            && first.is_some_and(|first| first + offset == mapping.physical + (address - base))
    }

    /// Physical memory in which no block is live or guarded, in bytes, counted once; of which, if asked for, only
    /// what is in no view with such a block.
    pub fn idle_bytes(&self, in_no_live_view: bool) -> u64 {
        let pinned = match in_no_live_view {
            true => self.live_views(),
            false => HashSet::new(),
        };
        let mut counted = HashSet::new();
        let mappings = self.mappings.iter();
        let memory = mappings.map(|(start, m)| (m.physical, m.end - start));
        let idle = memory.filter(|&(from, bytes)| {
            let used = self.occupied.range(..from + bytes).next_back();
            counted.insert(from)
                && !pinned.contains(&from)
                && used.is_none_or(|(_, (end, _))| *end <= from)
                && !self.is_guarded(from, from + bytes)
        });
        idle.map(|(_, bytes)| bytes).sum()
    }

    fn is_guarded(&self, from: u64, to: u64) -> bool {
        let mut parts = self.guards.iter().flat_map(|(_, block)| &block.parts);
        parts.any(|(start, end)| from < *end && *start < to)
    }

    /// Memory in unbroken rows of mappings in views in which a block is live or guarded.
    fn live_views(&self) -> HashSet<u64> {
        let mut found = HashSet::new();
        let (mut row, mut start, mut end) = (Vec::new(), 0, 0);
        let views = self.mappings.iter().filter(|(_, mapping)| mapping.view);
        for (at, mapping) in views.map(|(at, m)| (*at, Some(m))).chain([(0, None)]) {
            if at != end || mapping.is_none() {
                let within = |(s, block): &(u64, super::Block)| *s < end && start < block.end;
                if self.guards.iter().any(within) || self.live_around(start, end).is_some() {
                    found.extend(row.drain(..));
                }
                row.clear();
                start = at;
            }
            if let Some(mapping) = mapping {
                row.push(mapping.physical);
                end = mapping.end;
            }
        }
        found
    }
}
