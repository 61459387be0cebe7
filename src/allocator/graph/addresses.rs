//! The addresses of a graph pool, with or without memory.

use std::collections::BTreeMap;

/// Reserved addresses of one kind, and the unused ranges among them.
#[derive(Debug, Default)]
pub(crate) struct Addresses {
    /// Base to bytes. Spans are disjoint.
    pub spans: BTreeMap<u64, u64>,
    holes: BTreeMap<u64, u64>,
}

impl Addresses {
    /// Adds addresses; `grown` is whether they extend the span that ends there.
    pub(crate) fn add(&mut self, base: u64, bytes: u64, grown: bool) {
        match self.spans.range_mut(..base).next_back() {
            Some((before, span)) if grown && before + *span == base => *span += bytes,
            _ => {
                self.spans.insert(base, bytes);
            }
        }
        self.put(base, bytes);
    }

    /// Returns the end of the last span.
    pub(crate) fn end(&self) -> Option<u64> {
        self.spans
            .last_key_value()
            .map(|(base, bytes)| base + bytes)
    }

    pub(crate) fn held(&self) -> u64 {
        self.spans.values().sum()
    }

    /// Returns the lowest unused addresses of this length.
    pub(crate) fn lowest(&self, bytes: u64) -> Option<u64> {
        let mut holes = self.holes.iter();
        holes.find(|(_, room)| **room >= bytes).map(|(at, _)| *at)
    }

    /// Takes bytes at the start of a hole.
    pub(crate) fn cut(&mut self, at: u64, bytes: u64) {
        if let Some(room) = self.holes.remove(&at)
            && room > bytes
        {
            self.holes.insert(at + bytes, room - bytes);
        }
    }

    /// Returns addresses that are no longer in use.
    pub(crate) fn put(&mut self, mut at: u64, mut bytes: u64) {
        if let Some((before, room)) = self.holes.range(..at).next_back()
            && before + room == at
            && !self.spans.contains_key(&at)
        {
            (at, bytes) = (*before, room + bytes);
        }
        let end = at + bytes;
        if !self.spans.contains_key(&end)
            && let Some(room) = self.holes.remove(&end)
        {
            bytes += room;
        }
        self.holes.insert(at, bytes);
    }

    pub(crate) fn holes(&self) -> impl Iterator<Item = (u64, u64)> {
        self.holes.iter().map(|(at, bytes)| (*at, *bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_extend_only_an_adjacent_span() {
        let mut addresses = Addresses::default();
        addresses.add(1 << 20, 512, false);
        addresses.add(3 << 20, 512, true);
        assert_eq!(addresses.spans.len(), 2, "something else lies between");
        addresses.cut(3 << 20, 256);
        addresses.add((3 << 20) + 512, 512, true);
        assert_eq!(addresses.spans[&(3 << 20)], 1024);
        assert_eq!(addresses.end(), Some((3 << 20) + 1024));
        let holes: Vec<_> = addresses.holes().collect();
        assert_eq!(holes, [(1 << 20, 512), ((3 << 20) + 256, 768)]);
    }
}
