//! An exact best-fit index of free extents.
//!
//! There are 32 bins per power of two, found through a two-level bitmap; every bin is ordered by size, then address. So
//! the first entry that is large enough is the best fit, with the lowest address on ties. A bin is one cache line while
//! it has few entries, then a sorted array, and a tree when it is long, so that a search stays logarithmic whatever the
//! fragmentation.

use std::collections::BTreeSet;

use crate::allocator::extent::boxed::boxed_array;

/// Bins per power of two.
const BINS_PER_GROUP: usize = 32;
/// Groups: sizes below 32 granules, then one group per power of two up to 2^31 granules.
const GROUPS: usize = 28;
/// A bin with more entries becomes a tree.
const TREE_FROM: usize = 64;
/// A tree becomes an array again when it has shrunk to this many entries.
const LIST_FROM: usize = 24;

/// A free extent as the index sees it; the order of the fields is the order of the index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Entry {
    pub granules: u32,
    pub addr: u64,
    pub id: u32,
}

/// An entry as one number with the same order, so that a comparison takes two instructions instead of six.
type Key = u128;

impl Entry {
    #[inline]
    const fn key(&self) -> Key {
        (self.granules as Key) << 96 | (self.addr as Key) << 32 | self.id as Key
    }

    #[inline]
    const fn of(key: Key) -> Entry {
        Entry {
            granules: (key >> 96) as u32,
            addr: (key >> 32) as u64,
            id: key as u32,
        }
    }
}

/// Entries of one bin.
#[derive(Debug)]
#[repr(align(64))]
enum Bin {
    /// Few enough to lie in the bin's own cache line.
    Few(FewKeys),
    List(Vec<Key>),
    Tree(BTreeSet<Key>),
}

const _: () = assert!(size_of::<Bin>() == 64);

/// Number of entries that fit into a bin's own cache line.
const FEW: usize = 3;

/// The keys in order, filled up with a value above every key.
#[derive(Debug, Clone, Copy)]
struct FewKeys([Key; FEW]);

/// No entry: no record has this number.
const NONE: Key = Key::MAX;

impl FewKeys {
    const EMPTY: FewKeys = FewKeys([NONE; FEW]);

    #[inline(always)]
    fn is_full(&self) -> bool {
        self.0[FEW - 1] != NONE
    }

    #[inline(always)]
    fn as_slice(&self) -> &[Key] {
        &self.0[..self.place(NONE).min(FEW)]
    }

    /// Position of a key, or of its insertion.
    #[inline(always)]
    fn place(&self, key: Key) -> usize {
        self.0.iter().map(|k| usize::from(*k < key)).sum()
    }

    /// Returns the first key that is not below `from`.
    #[inline(always)]
    fn first_from(&self, from: Key) -> Option<(usize, Key)> {
        let at = self.place(from);
        let key = *self.0.get(at)?;
        (key != NONE).then_some((at, key))
    }

    /// Adds a key if there is room.
    #[inline(always)]
    fn insert(&mut self, key: Key) {
        debug_assert!(!self.is_full(), "there is room");
        // Sorts by compare and exchange; the last entry is dropped.
        let [a, b, _] = self.0;
        let (a, key) = (a.min(key), a.max(key));
        self.0 = [a, b.min(key), b.max(key)];
    }

    #[inline(always)]
    fn remove_at(&mut self, at: usize) {
        let [a, b, c] = self.0;
        self.0 = match at {
            0 => [b, c, NONE],
            1 => [a, c, NONE],
            _ => [a, b, NONE],
        };
    }
}

/// Position of a key in a list, or of its insertion.
#[inline]
fn place(list: &[Key], key: Key) -> usize {
    list.partition_point(|k| *k < key)
}

impl Bin {
    const EMPTY: Bin = Bin::Few(FewKeys::EMPTY);

    fn is_empty(&self) -> bool {
        match self {
            Bin::Few(few) => few.0[0] == NONE,
            // A list or tree becomes `Few` before it is empty.
            Bin::List(_) | Bin::Tree(_) => false,
        }
    }

    #[inline(always)]
    fn insert(&mut self, key: Key) {
        match self {
            Bin::Few(few) if !few.is_full() => few.insert(key),
            _ => self.insert_among_many(key),
        }
    }

    #[inline(never)]
    fn insert_among_many(&mut self, key: Key) {
        match self {
            Bin::Few(few) => {
                let mut list = few.as_slice().to_vec();
                list.insert(place(&list, key), key);
                *self = Bin::List(list);
            }
            Bin::List(list) if list.len() < TREE_FROM => list.insert(place(list, key), key),
            Bin::List(list) => {
                list.push(key);
                *self = Bin::Tree(list.drain(..).collect());
            }
            Bin::Tree(tree) => {
                tree.insert(key);
            }
        }
    }

    #[inline(always)]
    fn remove(&mut self, key: Key) -> bool {
        match self {
            Bin::Few(few) => {
                let found = few.first_from(key).filter(|(_, found)| *found == key);
                found.map(|(at, _)| few.remove_at(at)).is_some()
            }
            _ => self.take_among_many(key, |found| found == key).is_some(),
        }
    }

    /// Whether there is a key that is not below `from`.
    #[inline(always)]
    fn reaches(&self, from: Key) -> bool {
        match self {
            // An empty place is above every key.
            Bin::Few(few) => few.place(NONE) > few.place(from),
            Bin::List(list) => list.last().is_some_and(|last| *last >= from),
            Bin::Tree(tree) => tree.last().is_some_and(|last| *last >= from),
        }
    }

    /// Removes the first key that is not below `from`.
    #[inline(always)]
    fn take_from(&mut self, from: Key) -> Option<Key> {
        match self {
            Bin::Few(few) => {
                let (at, key) = few.first_from(from)?;
                few.remove_at(at);
                Some(key)
            }
            _ => self.take_among_many(from, |_| true),
        }
    }

    /// Removes the first key that is not below `from`, if it is the right one.
    #[inline(never)]
    fn take_among_many(&mut self, from: Key, right: impl Fn(Key) -> bool) -> Option<Key> {
        match self {
            Bin::Few(_) => None,
            Bin::List(list) => {
                let at = place(list, from);
                let key = list.get(at).copied().filter(|key| right(*key))?;
                list.remove(at);
                // One entry below the capacity of `Few`, so that the bin does not change its form with every call at
                // the border.
                if list.len() < FEW {
                    let mut few = FewKeys::EMPTY;
                    list.drain(..).for_each(|key| few.insert(key));
                    *self = Bin::Few(few);
                }
                Some(key)
            }
            Bin::Tree(tree) => {
                let key = tree
                    .range(from..)
                    .next()
                    .copied()
                    .filter(|key| right(*key))?;
                tree.remove(&key);
                if tree.len() <= LIST_FROM {
                    *self = Bin::List(std::mem::take(tree).into_iter().collect());
                }
                Some(key)
            }
        }
    }

    /// Returns the first key that is not below `from`.
    #[inline]
    fn first_from(&self, from: Key) -> Option<Key> {
        match self {
            Bin::Few(few) => few.first_from(from).map(|(_, key)| key),
            Bin::List(list) => list.get(place(list, from)).copied(),
            Bin::Tree(tree) => tree.range(from..).next().copied(),
        }
    }

    /// Returns the keys of an array, or none, and those of a tree, or none.
    fn parts(&self) -> (&[Key], Option<&BTreeSet<Key>>) {
        match self {
            Bin::Few(few) => (few.as_slice(), None),
            Bin::List(list) => (list, None),
            Bin::Tree(tree) => (&[], Some(tree)),
        }
    }

    /// Iterates over all entries in order.
    fn iter(&self) -> impl Iterator<Item = Entry> + '_ {
        let (list, tree) = self.parts();
        list.iter()
            .chain(tree.into_iter().flatten())
            .map(|key| Entry::of(*key))
    }

    fn last(&self) -> Option<Entry> {
        let (list, tree) = self.parts();
        let key = list.last().or_else(|| tree?.last());
        key.map(|key| Entry::of(*key))
    }
}

/// The index; see the module documentation. The order of the fields places what an operation on pieces of up to 32 MiB
/// accesses on one cache line, beside the pointer to the bins.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct FreeIndex {
    summary: u32,
    len: u32,
    granules: u64,
    groups: [u32; GROUPS],
    /// The bins of a group are allocated at its first insertion, because most streams never have entries in most
    /// groups.
    bins: [Option<Box<[Bin; BINS_PER_GROUP]>>; GROUPS],
}

/// Iterates over the positions of set bits, ascending.
fn set_bits(mut bits: u32) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let at = bits.trailing_zeros();
        // Clears the lowest bit.
        bits &= bits.checked_sub(1)?;
        Some(at as usize)
    })
}

const fn bin_of(granules: u32) -> (usize, usize) {
    if granules < BINS_PER_GROUP as u32 {
        return (0, granules as usize);
    }
    let msb = 31 - granules.leading_zeros();
    (
        (msb - 4) as usize,
        (granules >> (msb - 5)) as usize & (BINS_PER_GROUP - 1),
    )
}

#[cold]
#[inline(never)]
fn empty_bins() -> Box<[Bin; BINS_PER_GROUP]> {
    boxed_array(|| Bin::EMPTY)
}

impl FreeIndex {
    pub(crate) fn len(&self) -> usize {
        self.len as usize
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Granules of all entries together.
    pub(crate) fn granules(&self) -> u64 {
        self.granules
    }

    pub(crate) fn insert(&mut self, entry: Entry) {
        self.len += 1;
        let (group, sub) = bin_of(entry.granules);
        let bins = self.bins[group].get_or_insert_with(empty_bins);
        bins[sub].insert(entry.key());
        self.groups[group] |= 1 << sub;
        self.summary |= 1 << group;
        self.granules += u64::from(entry.granules);
    }

    /// Removes an entry; false if it is not there.
    pub(crate) fn remove(&mut self, entry: &Entry) -> bool {
        let (group, sub) = bin_of(entry.granules);
        let Some(bins) = &mut self.bins[group] else {
            return false;
        };
        let bin = &mut bins[sub];
        if !bin.remove(entry.key()) {
            return false;
        }
        let emptied = bin.is_empty();
        self.removed(group, sub, emptied, entry.granules);
        true
    }

    #[inline(always)]
    fn removed(&mut self, group: usize, sub: usize, emptied: bool, granules: u32) {
        self.len -= 1;
        if emptied {
            self.groups[group] &= !(1 << sub);
            if self.groups[group] == 0 {
                self.summary &= !(1 << group);
            }
        }
        self.granules -= u64::from(granules);
    }

    /// Removes the entry that [`best_fit`](Self::best_fit) returns.
    #[inline]
    pub(crate) fn take_best_fit(&mut self, granules: u32) -> Option<Entry> {
        let (mut group, mut sub) = bin_of(granules);
        let from = Key::from(granules) << 96;
        let bin = self.bins[group].as_ref().map(|bins| &bins[sub]);
        if bin.is_none_or(|bin| !bin.reaches(from)) {
            (group, sub) = self.filled_above(group, sub)?;
        }
        let bin = &mut self.bins[group].as_mut()?[sub];
        let entry = Entry::of(bin.take_from(from)?);
        let emptied = bin.is_empty();
        self.removed(group, sub, emptied, entry.granules);
        Some(entry)
    }

    /// Returns the first nonempty bin above a bin.
    #[inline(always)]
    fn filled_above(&self, group: usize, sub: usize) -> Option<(usize, usize)> {
        let above = self.groups[group] & (u32::MAX << sub << 1);
        if above != 0 {
            return Some((group, above.trailing_zeros() as usize));
        }
        let groups = self.summary & (u32::MAX << group << 1);
        if groups == 0 {
            return None;
        }
        let group = groups.trailing_zeros() as usize;
        Some((group, self.groups[group].trailing_zeros() as usize))
    }

    /// Drops the bins of an empty index, so that an inactive stream does not keep them.
    pub(crate) fn shrink(&mut self) {
        if self.len == 0 {
            self.bins = Default::default();
        }
    }

    /// Returns the smallest entry of at least `granules`, the lowest address among equals.
    pub(crate) fn best_fit(&self, granules: u32) -> Option<Entry> {
        self.first_from(&Entry {
            granules,
            addr: 0,
            id: 0,
        })
    }

    /// Iterates over the nonempty bins, ascending.
    fn filled(&self) -> impl Iterator<Item = &Bin> {
        let groups = set_bits(self.summary);
        groups.flat_map(|group| {
            let bins = self.bins[group].as_deref();
            let subs = bins.map(|bins| set_bits(self.groups[group]).map(|at| &bins[at]));
            subs.into_iter().flatten()
        })
    }

    /// Visits all entries in order until `look` returns false. Faster than [`iter`](Self::iter).
    pub(crate) fn look_at_each(&self, mut look: impl FnMut(Entry) -> bool) {
        for group in set_bits(self.summary) {
            let Some(bins) = &self.bins[group] else {
                continue;
            };
            for sub in set_bits(self.groups[group]) {
                let (list, tree) = bins[sub].parts();
                let goes_on = list.iter().all(|key| look(Entry::of(*key)))
                    && tree.is_none_or(|tree| tree.iter().all(|key| look(Entry::of(*key))));
                if !goes_on {
                    return;
                }
            }
        }
    }

    /// Iterates over all entries of at least `granules`, in the order of the index.
    pub(crate) fn iter_from(&self, granules: u32) -> impl Iterator<Item = Entry> + '_ {
        let mut from = Entry {
            granules,
            addr: 0,
            id: 0,
        };
        std::iter::from_fn(move || {
            let entry = self.first_from(&from)?;
            from = Entry {
                id: entry.id + 1,
                ..entry
            };
            Some(entry)
        })
    }

    /// Iterates over all entries in the order of the index.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Entry> + '_ {
        self.filled().flat_map(Bin::iter)
    }

    /// Returns the largest entry.
    pub(crate) fn largest(&self) -> Option<Entry> {
        if self.summary == 0 {
            return None;
        }
        let group = 31 - self.summary.leading_zeros() as usize;
        let sub = 31 - self.groups[group].leading_zeros() as usize;
        self.bins[group].as_ref()?[sub].last()
    }

    fn first_from(&self, from: &Entry) -> Option<Entry> {
        let (group, sub) = bin_of(from.granules);
        let first = |group: usize, sub: usize, from| {
            let bins = self.bins[group].as_ref()?;
            bins[sub].first_from(from).map(Entry::of)
        };
        first(group, sub, from.key()).or_else(|| {
            let (group, sub) = self.filled_above(group, sub)?;
            first(group, sub, 0)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(granules: u32, addr: u64, id: u32) -> Entry {
        Entry { granules, addr, id }
    }

    #[test]
    fn every_size_has_one_bin_and_bins_are_ordered() {
        let mut last = (0, 0);
        for granules in 1..200_000u32 {
            let bin = bin_of(granules);
            assert!(
                bin >= last && bin.0 < GROUPS && bin.1 < BINS_PER_GROUP,
                "{granules}: {bin:?} after {last:?}"
            );
            last = bin;
        }
        assert!(bin_of(u32::MAX).0 < GROUPS);
    }

    #[test]
    fn agrees_with_an_ordered_set() {
        let mut seed = 7u64;
        let mut random = move || {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed
        };
        let (mut index, mut model) = (FreeIndex::default(), BTreeSet::new());
        for step in 0..40_000u32 {
            // Few distinct sizes, so that bins become trees and shrink again.
            let grow = if step % 8000 < 4000 { 5 } else { 2 };
            if random() % 7 < grow {
                let e = entry(
                    1 + (random() % 40) as u32 * if random() % 3 == 0 { 1009 } else { 1 },
                    random() % 4096,
                    step,
                );
                index.insert(e);
                model.insert(e);
            } else if let Some(&e) = model
                .iter()
                .nth((random() % (model.len().max(1) as u64)) as usize)
            {
                assert!(index.remove(&e));
                assert!(!index.remove(&e), "an entry can be removed once");
                model.remove(&e);
            }
            let want = (random() % 50_000) as u32;
            if step % 5 == 0 {
                let best = model.range(entry(want, 0, 0)..).next().copied();
                assert_eq!(index.take_best_fit(want), best);
                best.map(|best| model.remove(&best));
            }
            assert_eq!(
                index.best_fit(want),
                model.range(entry(want, 0, 0)..).next().copied()
            );
            assert_eq!(index.largest(), model.last().copied());
            assert_eq!(
                (index.len(), index.is_empty()),
                (model.len(), model.is_empty())
            );
            if step % 1000 == 0 {
                assert!(index.iter().eq(model.iter().copied()));
                assert!(
                    index
                        .iter_from(want)
                        .eq(model.range(entry(want, 0, 0)..).copied())
                );
                assert_eq!(
                    index.granules(),
                    model.iter().map(|e| u64::from(e.granules)).sum::<u64>()
                );
            }
        }
    }
}
