//! The choice of handles for a stitch.

#![forbid(unsafe_code)]

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::allocator::extent::handle::Marks;
use crate::allocator::size::{GRANULE, PHYSICAL_GRANULE};

/// From this many handles on, a choice by size is tried as well.
const MANY_HANDLES: usize = 24;
/// A choice by size replaces a choice by rows if its number of handles times this is at most ten times the other's.
const FEWER_TENTHS: usize = 13;

/// A handle that a stitch may use, with its open part.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Source {
    pub home: u64,
    pub bytes: u64,
    /// First byte and end of the open part.
    pub open: (u64, u64),
    /// The handle's number.
    pub number: u32,
}

impl Source {
    fn end(&self) -> u64 {
        self.home + self.bytes
    }

    pub(crate) fn whole(&self) -> bool {
        self.open == (self.home, self.end())
    }

    /// Returns the open bytes at the handle's start.
    fn prefix(&self) -> u64 {
        if self.open.0 == self.home {
            self.open.1 - self.home
        } else {
            0
        }
    }
}

/// Consecutive whole handles. Longer rows compare as greater; among equals, the one with the lowest address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Row {
    bytes: u64,
    home: Reverse<u64>,
    /// Index of its first source.
    first: usize,
    end: usize,
}

/// All handles that a stitch may use.
#[derive(Debug)]
pub(crate) struct Sources {
    /// By address.
    all: Vec<Source>,
    /// Rows, the longest first.
    rows: Vec<Row>,
    /// Indexes of the whole ones, the largest first.
    by_size: Vec<usize>,
    /// Prefix sums of their bytes.
    sums: Vec<u64>,
    /// Bytes of the smallest whole handle.
    smallest: u64,
    /// For each handle, the granules that are open at its start.
    caches: Vec<u32>,
    /// Maximum of these, in bytes.
    cache: u64,
}

/// Returns indexes sorted by `size`, equal ones by index, without those for which `size` returns `None`. Sorting plain
/// words is several times faster than sorting the elements.
fn ordered<T>(all: &[T], size: impl Fn(&T) -> Option<u32>) -> impl Iterator<Item = usize> {
    let sizes = (0u32..).zip(all);
    let key = |(at, item)| Some(u64::from(size(item)?) << 32 | u64::from(at));
    let mut keys: Vec<u64> = sizes.filter_map(key).collect();
    keys.sort_unstable();
    keys.into_iter().map(|key| key as u32 as usize)
}

fn granules(bytes: u64) -> u32 {
    (bytes / GRANULE) as u32
}

impl Sources {
    /// Builds the sources from a list sorted by address.
    pub(crate) fn new(all: Vec<Source>) -> Self {
        let rows = rows_in(&all, 0, all.len(), |_| true);
        let longest = |row: &Row| Some(!granules(row.bytes));
        let rows = ordered(&rows, longest).map(|at| rows[at]).collect();
        let largest = |s: &Source| s.whole().then(|| !granules(s.bytes));
        let by_size: Vec<usize> = ordered(&all, largest).collect();
        let mut sum = 0;
        let sums = by_size.iter().map(|at| {
            sum += all[*at].bytes;
            sum
        });
        let caches: Vec<u32> = all.iter().map(|s| granules(s.prefix())).collect();
        let cache = caches.iter().max().copied().unwrap_or(0);
        Sources {
            sums: sums.collect(),
            smallest: by_size.last().map_or(u64::MAX, |at| all[*at].bytes),
            cache: u64::from(cache) * GRANULE,
            caches,
            all,
            rows,
            by_size,
        }
    }

    /// Returns a lower bound of the number of handles for `need` bytes.
    pub(crate) fn fewest(&self, need: u64) -> usize {
        match need.checked_sub(self.cache) {
            None | Some(0) => usize::from(need > 0),
            Some(rest) => self.sums.partition_point(|sum| *sum < rest) + 2,
        }
    }

    /// Returns the run with the most bytes in an open tail of one handle and the whole handles after it; of whole
    /// handles alone if the tail may not be used.
    pub(crate) fn best_head(&self, aligned: bool) -> Option<&[Source]> {
        let mut best: Option<(u64, usize, usize)> = None;
        let mut at = 0;
        while at < self.all.len() {
            let first = at;
            let head = &self.all[first];
            at += 1;
            if !(head.whole() || (!aligned && head.open.0 > head.home && head.open.1 == head.end()))
            {
                continue;
            }
            while let Some(next) = self.all.get(at)
                && next.whole()
                && next.home == self.all[at - 1].end()
            {
                at += 1;
            }
            let bytes = self.all[at - 1].open.1 - head.open.0;
            if best.is_none_or(|(most, ..)| bytes > most) {
                best = Some((bytes, first, at));
            }
        }
        best.map(|(_, first, end)| &self.all[first..end])
    }

    /// Returns the handle with the longest open tail.
    pub(crate) fn longest_tail(&self) -> Option<&[Source]> {
        let tail = |s: &Source| match s.open.1 == s.end() && !s.whole() {
            true => s.end() - s.open.0,
            false => 0,
        };
        let longest = (0..self.all.len())
            .rev()
            .max_by_key(|at| tail(&self.all[*at]))?;
        (tail(&self.all[longest]) > 0).then(|| &self.all[longest..=longest])
    }

    /// Chooses handles for `need` bytes: those of `lead` first, then rows of whole handles by length, and finally the
    /// smallest sufficient open beginning of a handle. Handles in `used` are already part of the layout.
    pub(crate) fn gather(&self, lead: &[Source], need: u64, used: &Marks) -> Choice {
        let mut by_rows = self.filling(lead, need, used);
        self.fill_rows(&mut by_rows, used);
        let by_rows = self.finish(by_rows);
        if by_rows.adds.len() <= MANY_HANDLES {
            return by_rows;
        }
        let mut by_size = self.filling(lead, need, used);
        for at in &self.by_size {
            if by_size.left < self.smallest {
                break;
            }
            by_size.offer(&self.all[*at]);
        }
        let by_size = self.finish(by_size);
        if by_size.missing <= by_rows.missing
            && by_size.adds.len() * FEWER_TENTHS <= by_rows.adds.len() * 10
        {
            by_size
        } else {
            by_rows
        }
    }

    fn filling(&self, lead: &[Source], need: u64, used: &Marks) -> Filling {
        let mut filling = Filling {
            adds: Vec::new(),
            left: need,
            taken: used.clone(),
        };
        lead.iter().for_each(|source| filling.offer(source));
        filling
    }

    /// Offers rows, the longest first. A row in which some handles are used is divided into shorter ones.
    fn fill_rows(&self, filling: &mut Filling, used: &Marks) {
        let mut parts: BinaryHeap<Row> = BinaryHeap::new();
        let mut rows = self.rows.iter().copied().peekable();
        while filling.left >= self.smallest {
            let part = parts.peek().copied();
            let row = match rows.peek().copied() {
                Some(row) if part.is_none_or(|part| row > part) => {
                    rows.next();
                    let open = |at: usize| !used.has(self.all[at].number);
                    if !(row.first..row.end).all(open) {
                        parts.extend(rows_in(&self.all, row.first, row.end, open));
                        continue;
                    }
                    row
                }
                _ => match parts.pop() {
                    Some(part) => part,
                    None => return,
                },
            };
            for source in &self.all[row.first..row.end] {
                filling.offer(source);
            }
        }
    }

    /// Returns the unused handle with the smallest open beginning of at least `least` granules, the lowest among
    /// equals.
    fn last(&self, mut least: u32, taken: &Marks) -> Option<&Source> {
        loop {
            // Branchless over plain numbers, because this loop is most of the work.
            let enough = |cache: &u32| if *cache < least { u32::MAX } else { *cache };
            let cache = self.caches.iter().map(enough).min()?;
            if cache == u32::MAX {
                return None;
            }
            let caches = self.all.iter().zip(&self.caches);
            let mut equal = caches.filter(|(_, bytes)| **bytes == cache);
            if let Some((source, _)) = equal.find(|(source, _)| !taken.has(source.number)) {
                return Some(source);
            }
            least = cache + 1;
        }
    }

    /// Adds the last handle.
    fn finish(&self, mut filling: Filling) -> Choice {
        let Filling { left, taken, .. } = &filling;
        let mut cache = 0;
        if *left > 0 {
            if let Some(last) = self.last(granules(left.next_multiple_of(GRANULE)), taken) {
                filling.adds.push((last.home, last.bytes));
                filling.left = 0;
            } else {
                let open = self.all.iter().filter(|s| !taken.has(s.number));
                cache = open.map(Source::prefix).max().unwrap_or(0);
            }
        }
        Choice {
            adds: filling.adds,
            missing: filling.left.next_multiple_of(PHYSICAL_GRANULE),
            lacking: (filling.left.saturating_sub(cache)).next_multiple_of(PHYSICAL_GRANULE),
        }
    }
}

/// Handles chosen for a request.
#[derive(Debug)]
pub(crate) struct Choice {
    /// Home and size of each handle.
    pub adds: Vec<(u64, u64)>,
    /// Bytes that are missing after them, in whole granules.
    pub missing: u64,
    /// Bytes that would complete the choice if they were created before: an open beginning can then be the last part.
    pub lacking: u64,
}

/// A choice in progress.
struct Filling {
    adds: Vec<(u64, u64)>,
    left: u64,
    taken: Marks,
}

impl Filling {
    /// Takes a handle if all of it is needed and it is not used yet.
    fn offer(&mut self, source: &Source) {
        if source.bytes <= self.left && !self.taken.has(source.number) {
            self.taken.set(source.number);
            self.adds.push((source.home, source.bytes));
            self.left -= source.bytes;
        }
    }
}

/// Returns the rows of whole sources in a part of the list, as far as they are usable.
fn rows_in(all: &[Source], first: usize, end: usize, open: impl Fn(usize) -> bool) -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    for (at, source) in all.iter().enumerate().take(end).skip(first) {
        if !source.whole() || !open(at) {
            continue;
        }
        match rows.last_mut() {
            Some(row) if row.end == at && all[at - 1].end() == source.home => {
                row.bytes += source.bytes;
                row.end += 1;
            }
            _ => rows.push(Row {
                bytes: source.bytes,
                home: Reverse(source.home),
                first: at,
                end: at + 1,
            }),
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::allocator::extent::handle::Handles;

    const MIB: u64 = 1 << 20;
    const HANDLE: u64 = 8 * MIB;

    /// Adjacent handles of 8 MiB, with the given MiB open at the start of each.
    fn open_caches(handles: &mut Handles, caches: &[u64]) -> Sources {
        let each = (0..).zip(caches).map(|(at, mib)| Source {
            home: at * HANDLE,
            bytes: HANDLE,
            open: (at * HANDLE, at * HANDLE + mib * MIB),
            number: handles.add(at * HANDLE, granules(HANDLE)),
        });
        Sources::new(each.collect())
    }

    /// A row of small handles, and large ones separate from each other.
    #[test]
    fn the_largest_handles_of_a_row_come_first() {
        let mut handles = Handles::default();
        let (mut all, mut home) = (Vec::new(), 0);
        let large = [8, 0].into_iter().cycle().take(28);
        for mib in std::iter::repeat_n(4, 28).chain([0]).chain(large) {
            let bytes = u64::max(mib, 1) * MIB;
            if mib > 0 {
                all.push(Source {
                    home,
                    bytes,
                    open: (home, home + bytes),
                    number: handles.add(home, granules(bytes)),
                });
            }
            home += bytes;
        }
        let sources = Sources::new(all);
        let order = |mib: u64| -> Vec<u64> {
            let choice = sources.gather(&[], mib * MIB, &handles.marks());
            choice.adds.iter().map(|(_, bytes)| bytes / MIB).collect()
        };
        assert_eq!(order(16), [4; 4]);
        assert_eq!(order(112), [8; 14]);
    }

    #[test]
    fn the_last_handle_is_the_smallest_that_is_enough() {
        let mut handles = Handles::default();
        let sources = open_caches(&mut handles, &[7, 3, 5, 3, 0]);
        let mut taken = handles.marks();
        let mut last = |least: u64, take: bool| {
            let found = sources.last(granules(least), &taken).copied();
            if let Some(source) = found.filter(|_| take) {
                taken.set(source.number);
            }
            found.map(|source| source.home / HANDLE)
        };
        assert_eq!(last(3 * MIB, false), Some(1), "the lowest among equals");
        assert_eq!(last(3 * MIB + GRANULE, false), Some(2));
        assert_eq!(last(7 * MIB + GRANULE, false), None);
        let all: Vec<_> = (0..5).map(|_| last(2 * MIB, true)).collect();
        assert_eq!(all, [Some(1), Some(3), Some(2), Some(0), None]);
    }

    /// Bytes that an open beginning provides need not be created.
    #[test]
    fn an_open_beginning_reduces_the_missing_memory() {
        let mut handles = Handles::default();
        let sources = open_caches(&mut handles, &[8, 1, 7, 8, 0]);
        let none = handles.marks();
        let lacks = |mib: u64| {
            let choice = sources.gather(&[], mib * MIB, &none);
            (choice.missing / MIB, choice.lacking / MIB)
        };
        assert_eq!(lacks(23), (0, 0));
        assert_eq!(lacks(24), (8, 2));
        assert_eq!(lacks(26), (10, 4));
        assert!(sources.longest_tail().is_none());
    }

    #[test]
    fn the_longest_tail_is_the_lowest_among_equals() {
        let mut handles = Handles::default();
        let tails = [3, 5, 8, 5, 0].into_iter().zip(0..);
        let each = tails.map(|(mib, at)| Source {
            home: at * HANDLE,
            bytes: HANDLE,
            open: ((at + 1) * HANDLE - mib * MIB, (at + 1) * HANDLE),
            number: handles.add(at * HANDLE, granules(HANDLE)),
        });
        let sources = Sources::new(each.collect());
        let found: Vec<u64> = sources
            .longest_tail()
            .iter()
            .flat_map(|s| s.iter().map(|s| s.home / HANDLE))
            .collect();
        assert_eq!(found, [1], "a whole handle is no tail");
    }

    #[test]
    fn rows_go_by_length_and_equal_ones_by_address() {
        let mut handles = Handles::default();
        // The whole handles are: one, three in a row, one, three in a row.
        let sources = open_caches(&mut handles, &[8, 1, 8, 8, 8, 1, 8, 1, 8, 8, 8]);
        let none = handles.marks();
        let choice = sources.gather(&[], 8 * HANDLE, &none);
        let order: Vec<u64> = choice.adds.iter().map(|(home, _)| home / HANDLE).collect();
        assert_eq!((order, choice.missing), (vec![2, 3, 4, 8, 9, 10, 0, 6], 0));
        assert_eq!(sources.fewest(8 * HANDLE), 8);
        assert_eq!(sources.fewest(HANDLE), 1);
    }
}
