//! An exact best-fit index of free extents.
//!
//! 16 bins per power of two, found through a two-level bitmap; every bin is ordered by size, then
//! address. So the first entry that is large enough is the best fit, and on ties the one with the
//! lowest address. A bin is a sorted array while it is short and a tree when it is long, so that a
//! search stays logarithmic whatever the fragmentation.

use std::collections::BTreeSet;

/// Bins per power of two.
const BINS_PER_GROUP: usize = 16;
/// Groups: sizes below 16 granules, then one group per power of two up to 2^31 granules.
const GROUPS: usize = 29;
/// A bin with more entries becomes a tree,
const TREE_FROM: usize = 64;
/// and an array again when it has shrunk to this many.
const LIST_FROM: usize = 24;

/// A free extent as the index sees it; the order of the fields is the order of the index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Entry {
    pub granules: u32,
    pub addr: u64,
    pub id: u32,
}

/// An entry as one number, of the same order: two comparisons instead of six.
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

#[derive(Debug)]
enum Bin {
    List(Vec<Key>),
    Tree(BTreeSet<Key>),
}

/// Where a key is in a list, or would be.
#[inline]
fn place(list: &[Key], key: Key) -> usize {
    list.partition_point(|k| *k < key)
}

/// Takes out a key by its place, which it has; mostly there is nothing behind it to be moved.
#[inline(always)]
fn remove_at(list: &mut Vec<Key>, at: usize) {
    if at + 1 == list.len() {
        list.pop();
    } else {
        list.remove(at);
    }
}

impl Bin {
    #[inline]
    fn is_empty(&self) -> bool {
        match self {
            Bin::List(list) => list.is_empty(),
            Bin::Tree(tree) => tree.is_empty(),
        }
    }

    #[inline(always)]
    fn insert(&mut self, key: Key) {
        match self {
            Bin::List(list) if list.len() < TREE_FROM => list.insert(place(list, key), key),
            _ => self.insert_in_tree(key),
        }
    }

    #[cold]
    #[inline(never)]
    fn insert_in_tree(&mut self, key: Key) {
        match self {
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
            Bin::List(list) => {
                let at = place(list, key);
                let found = list.get(at) == Some(&key);
                if found {
                    remove_at(list, at);
                }
                found
            }
            Bin::Tree(_) => self.remove_from_tree(key).is_some(),
        }
    }

    /// Takes out the first key that is not below `from`.
    #[inline(always)]
    fn take_from(&mut self, from: Key) -> Option<Key> {
        match self {
            Bin::List(list) => {
                let at = place(list, from);
                let key = *list.get(at)?;
                remove_at(list, at);
                Some(key)
            }
            Bin::Tree(tree) => {
                let key = *tree.range(from..).next()?;
                self.remove_from_tree(key)
            }
        }
    }

    #[cold]
    #[inline(never)]
    fn remove_from_tree(&mut self, key: Key) -> Option<Key> {
        let Bin::Tree(tree) = self else {
            return None;
        };
        let found = tree.remove(&key).then_some(key);
        if tree.len() <= LIST_FROM {
            *self = Bin::List(std::mem::take(tree).into_iter().collect());
        }
        found
    }

    /// The first key that is not below `from`.
    #[inline]
    fn first_from(&self, from: Key) -> Option<Key> {
        match self {
            Bin::List(list) => list.get(place(list, from)).copied(),
            Bin::Tree(tree) => tree.range(from..).next().copied(),
        }
    }

    /// The first of all.
    #[inline]
    fn first(&self) -> Option<Key> {
        match self {
            Bin::List(list) => list.first().copied(),
            Bin::Tree(tree) => tree.first().copied(),
        }
    }

    /// All entries in order.
    fn iter(&self) -> impl Iterator<Item = Entry> + '_ {
        let (list, tree) = match self {
            Bin::List(list) => (Some(list), None),
            Bin::Tree(tree) => (None, Some(tree)),
        };
        list.into_iter()
            .flatten()
            .chain(tree.into_iter().flatten())
            .map(|key| Entry::of(*key))
    }

    fn last(&self) -> Option<Entry> {
        let key = match self {
            Bin::List(list) => list.last(),
            Bin::Tree(tree) => tree.last(),
        };
        key.map(|key| Entry::of(*key))
    }
}

/// The index; see the module's text.
#[derive(Debug, Default)]
pub(crate) struct FreeIndex {
    summary: u32,
    groups: [u16; GROUPS],
    /// Empty until the first insertion: most streams never have entries in most indexes.
    bins: Vec<Bin>,
    len: usize,
    granules: u64,
}

/// The positions of the bits that are set, ascending.
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
        (msb - 3) as usize,
        (granules >> (msb - 4)) as usize & (BINS_PER_GROUP - 1),
    )
}

impl FreeIndex {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Granules of all entries together.
    pub(crate) fn granules(&self) -> u64 {
        self.granules
    }

    pub(crate) fn insert(&mut self, entry: Entry) {
        if self.bins.is_empty() {
            self.make_bins();
        }
        self.len += 1;
        let (group, sub) = bin_of(entry.granules);
        self.bins[group * BINS_PER_GROUP + sub].insert(entry.key());
        self.groups[group] |= 1 << sub;
        self.summary |= 1 << group;
        self.granules += u64::from(entry.granules);
    }

    #[cold]
    #[inline(never)]
    fn make_bins(&mut self) {
        self.bins
            .resize_with(GROUPS * BINS_PER_GROUP, || Bin::List(Vec::new()));
    }

    /// Takes an entry out; false if it is not there.
    pub(crate) fn remove(&mut self, entry: &Entry) -> bool {
        if self.bins.is_empty() {
            return false;
        }
        let (group, sub) = bin_of(entry.granules);
        let bin = &mut self.bins[group * BINS_PER_GROUP + sub];
        if !bin.remove(entry.key()) {
            return false;
        }
        self.removed(group, sub, entry.granules);
        true
    }

    #[inline(always)]
    fn removed(&mut self, group: usize, sub: usize, granules: u32) {
        self.len -= 1;
        if self.bins[group * BINS_PER_GROUP + sub].is_empty() {
            self.groups[group] &= !(1 << sub);
            if self.groups[group] == 0 {
                self.summary &= !(1 << group);
            }
        }
        self.granules -= u64::from(granules);
    }

    /// Takes out what [`best_fit`](Self::best_fit) finds.
    pub(crate) fn take_best_fit(&mut self, granules: u32) -> Option<Entry> {
        if self.bins.is_empty() {
            return None;
        }
        let (mut group, mut sub) = bin_of(granules);
        let from = Key::from(granules) << 96;
        let mut taken = self.bins[group * BINS_PER_GROUP + sub].take_from(from);
        if taken.is_none() {
            (group, sub) = self.filled_above(group, sub)?;
            taken = self.bins[group * BINS_PER_GROUP + sub].take_from(0);
        }
        let entry = Entry::of(taken?);
        self.removed(group, sub, entry.granules);
        Some(entry)
    }

    /// The first bin above one that holds anything.
    #[inline(always)]
    fn filled_above(&self, group: usize, sub: usize) -> Option<(usize, usize)> {
        let above = self.groups[group] & (u16::MAX << sub << 1);
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

    /// Gives up the bins of an empty index: a stream that is gone must not keep them.
    pub(crate) fn shrink(&mut self) {
        if self.len == 0 {
            self.bins = Vec::new();
        }
    }

    /// The smallest entry of at least `granules`, the lowest address among equals.
    pub(crate) fn best_fit(&self, granules: u32) -> Option<Entry> {
        self.first_from(&Entry {
            granules,
            addr: 0,
            id: 0,
        })
    }

    /// Shows all entries in order, as long as `look` says so. Faster than [`iter`](Self::iter).
    pub(crate) fn look_at_each(&self, mut look: impl FnMut(Entry) -> bool) {
        for group in set_bits(self.summary) {
            for sub in set_bits(u32::from(self.groups[group])) {
                let goes_on = match &self.bins[group * BINS_PER_GROUP + sub] {
                    Bin::List(list) => list.iter().all(|key| look(Entry::of(*key))),
                    Bin::Tree(tree) => tree.iter().all(|key| look(Entry::of(*key))),
                };
                if !goes_on {
                    return;
                }
            }
        }
    }

    /// All entries of at least `granules` in the order of the index.
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

    /// All entries in the order of the index.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Entry> + '_ {
        set_bits(self.summary)
            .flat_map(|group| {
                set_bits(u32::from(self.groups[group])).map(move |sub| group * BINS_PER_GROUP + sub)
            })
            .flat_map(|bin| self.bins[bin].iter())
    }

    /// The largest entry.
    pub(crate) fn largest(&self) -> Option<Entry> {
        if self.summary == 0 {
            return None;
        }
        let group = 31 - self.summary.leading_zeros() as usize;
        let sub = 15 - self.groups[group].leading_zeros() as usize;
        self.bins[group * BINS_PER_GROUP + sub].last()
    }

    fn first_from(&self, from: &Entry) -> Option<Entry> {
        if self.bins.is_empty() {
            return None;
        }
        let (group, sub) = bin_of(from.granules);
        if let Some(key) = self.bins[group * BINS_PER_GROUP + sub].first_from(from.key()) {
            return Some(Entry::of(key));
        }
        let (group, sub) = self.filled_above(group, sub)?;
        self.bins[group * BINS_PER_GROUP + sub]
            .first()
            .map(Entry::of)
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
