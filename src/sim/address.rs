//! Free address ranges of one region.

use std::collections::{BTreeMap, BTreeSet};

/// The free ranges of an address region, found by size and by address.
pub(super) struct Addresses {
    by_start: BTreeMap<u64, u64>,
    by_size: BTreeSet<(u64, u64)>,
}

impl Addresses {
    pub(super) fn new(start: u64, end: u64) -> Addresses {
        let mut free = Addresses {
            by_start: BTreeMap::new(),
            by_size: BTreeSet::new(),
        };
        free.insert(start, end - start);
        free
    }

    fn insert(&mut self, start: u64, len: u64) {
        if len > 0 {
            self.by_start.insert(start, len);
            self.by_size.insert((len, start));
        }
    }

    fn remove(&mut self, start: u64, len: u64) {
        self.by_start.remove(&start);
        self.by_size.remove(&(len, start));
    }

    /// Takes `len` bytes at a multiple of `align` (a power of two).
    pub(super) fn take(&mut self, len: u64, align: u64) -> Option<u64> {
        let (start, size) = self.by_size.range((len, 0)..).find_map(|&(size, start)| {
            let at = start.checked_next_multiple_of(align)?;
            (at + len <= start + size).then_some((start, size))
        })?;
        let at = start.next_multiple_of(align);
        self.cut(start, size, at, len);
        Some(at)
    }

    /// Takes exactly `at..at + len` if all of it is free.
    pub(super) fn take_at(&mut self, at: u64, len: u64) -> bool {
        let Some((&start, &size)) = self.by_start.range(..=at).next_back() else {
            return false;
        };
        let Some(end) = at.checked_add(len) else {
            return false;
        };
        if end > start + size {
            return false;
        }
        self.cut(start, size, at, len);
        true
    }

    fn cut(&mut self, start: u64, size: u64, at: u64, len: u64) {
        self.remove(start, size);
        self.insert(start, at - start);
        self.insert(at + len, start + size - at - len);
    }

    pub(super) fn give(&mut self, mut start: u64, mut len: u64) {
        if let Some((&before, &size)) = self.by_start.range(..start).next_back()
            && before + size == start
        {
            self.remove(before, size);
            start = before;
            len += size;
        }
        let end = start + len;
        if let Some(&size) = self.by_start.get(&end) {
            self.remove(end, size);
            len += size;
        }
        self.insert(start, len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_given_back_merge_and_are_taken_again() {
        let mut free = Addresses::new(0x1000, 0x9000);
        let first = free.take(0x1000, 0x1000);
        let second = free.take(0x2000, 0x2000);
        assert_eq!((first, second), (Some(0x1000), Some(0x2000)));
        assert!(!free.take_at(0x3000, 0x1000), "taken");
        assert!(free.take_at(0x8000, 0x1000));
        assert!(!free.take_at(0x7000, 0x2000), "beyond the end");
        free.give(0x1000, 0x1000);
        free.give(0x8000, 0x1000);
        free.give(0x2000, 0x2000);
        assert_eq!(free.by_start.len(), 1);
        assert_eq!(free.take(0x8000, 0x1000), Some(0x1000));
        assert_eq!(free.take(1, 1), None);
    }
}
