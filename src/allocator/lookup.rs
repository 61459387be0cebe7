//! Pointer to block: a sparse table of block starts.
//!
//! The address space is cut into leaves of 2 MiB; a leaf holds one id per 512-byte granule and a
//! bitmap of the granules at which a block starts, so that the start below an interior pointer is
//! found without touching the ids. Leaves hang below directories of 16 GiB. Starts are granule
//! aligned, so a pointer that is not can only be an interior one.

use std::collections::BTreeMap;

use super::size::GRANULE;

const LEAF_BITS: u32 = 21;
const DIR_BITS: u32 = 34;
const LEAF_SLOTS: usize = 1 << (LEAF_BITS - 9);
const DIR_SLOTS: usize = 1 << (DIR_BITS - LEAF_BITS);

#[derive(Debug)]
struct Leaf {
    ids: Box<[u32]>,
    starts: Box<[u64]>,
    count: u32,
}

impl Leaf {
    fn new() -> Self {
        Leaf {
            ids: vec![0; LEAF_SLOTS].into_boxed_slice(),
            starts: vec![0; LEAF_SLOTS / 64].into_boxed_slice(),
            count: 0,
        }
    }
}

#[derive(Debug)]
struct Directory {
    leaves: Vec<Option<Box<Leaf>>>,
    /// Leaves that exist.
    count: u32,
    /// Bit per leaf that holds at least one start.
    occupied: Box<[u64]>,
}

impl Directory {
    fn new() -> Self {
        let mut leaves = Vec::new();
        leaves.resize_with(DIR_SLOTS, || None);
        Directory {
            leaves,
            count: 0,
            occupied: vec![0; DIR_SLOTS / 64].into_boxed_slice(),
        }
    }
}

/// The highest set bit at or below `at`.
fn last_bit(words: &[u64], at: usize) -> Option<usize> {
    let (word, bit) = (at / 64, at % 64);
    let head = words[word] & (u64::MAX >> (63 - bit));
    if head != 0 {
        return Some(word * 64 + 63 - head.leading_zeros() as usize);
    }
    words[..word]
        .iter()
        .rposition(|w| *w != 0)
        .map(|w| w * 64 + 63 - words[w].leading_zeros() as usize)
}

/// The table; see the module's text.
#[derive(Debug, Default)]
pub(crate) struct Lookup {
    directories: BTreeMap<u64, Directory>,
    len: usize,
}

const fn split(addr: u64) -> (u64, usize, usize) {
    (
        addr >> DIR_BITS,
        (addr >> LEAF_BITS) as usize & (DIR_SLOTS - 1),
        (addr >> 9) as usize & (LEAF_SLOTS - 1),
    )
}

impl Lookup {
    /// Number of block starts.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn insert(&mut self, addr: u64, id: u32) {
        debug_assert!(addr.is_multiple_of(GRANULE));
        let (dir, leaf, slot) = split(addr);
        let directory = self.directories.entry(dir).or_insert_with(Directory::new);
        let entry = directory.leaves[leaf].get_or_insert_with(|| {
            directory.count += 1;
            Box::new(Leaf::new())
        });
        entry.ids[slot] = id;
        let (word, bit) = (slot / 64, 1 << (slot % 64));
        if entry.starts[word] & bit == 0 {
            entry.starts[word] |= bit;
            entry.count += 1;
            self.len += 1;
        }
        directory.occupied[leaf / 64] |= 1 << (leaf % 64);
    }

    pub(crate) fn remove(&mut self, addr: u64) {
        let (dir, leaf, slot) = split(addr);
        let Some(directory) = self.directories.get_mut(&dir) else {
            return;
        };
        let Some(entry) = directory.leaves[leaf].as_mut() else {
            return;
        };
        let (word, bit) = (slot / 64, 1 << (slot % 64));
        if entry.starts[word] & bit != 0 {
            entry.starts[word] &= !bit;
            entry.count -= 1;
            self.len -= 1;
        }
        if entry.count == 0 {
            directory.occupied[leaf / 64] &= !(1 << (leaf % 64));
        }
    }

    /// The block that starts exactly at `addr`.
    pub(crate) fn exact(&self, addr: u64) -> Option<u32> {
        if !addr.is_multiple_of(GRANULE) {
            return None;
        }
        let (dir, leaf, slot) = split(addr);
        let entry = self.directories.get(&dir)?.leaves[leaf].as_ref()?;
        (entry.starts[slot / 64] >> (slot % 64) & 1 == 1).then(|| entry.ids[slot])
    }

    /// The block with the highest start at or below `addr`. Whether it reaches `addr` is for the
    /// caller to see.
    pub(crate) fn at_or_below(&self, addr: u64) -> Option<u32> {
        let (dir, leaf, slot) = split(addr);
        if let Some(directory) = self.directories.get(&dir) {
            if let Some(entry) = &directory.leaves[leaf]
                && let Some(slot) = last_bit(&entry.starts, slot)
            {
                return Some(entry.ids[slot]);
            }
            if leaf > 0
                && let Some(id) = last_in(directory, leaf - 1)
            {
                return Some(id);
            }
        }
        self.directories
            .range(..dir)
            .rev()
            .find_map(|(_, directory)| last_in(directory, DIR_SLOTS - 1))
    }

    /// Drops the leaves of a range that no longer holds memory.
    pub(crate) fn forget(&mut self, addr: u64, bytes: u64) {
        let mut leaf_addr = addr.next_multiple_of(1 << LEAF_BITS);
        while leaf_addr + (1 << LEAF_BITS) <= addr + bytes {
            let (dir, leaf, _) = split(leaf_addr);
            if let Some(directory) = self.directories.get_mut(&dir)
                && directory.leaves[leaf]
                    .as_ref()
                    .is_some_and(|l| l.count == 0)
            {
                directory.leaves[leaf] = None;
                directory.count -= 1;
                if directory.count == 0 {
                    self.directories.remove(&dir);
                }
            }
            leaf_addr += 1 << LEAF_BITS;
        }
    }
}

fn last_in(directory: &Directory, leaf: usize) -> Option<u32> {
    let leaf = last_bit(&directory.occupied, leaf)?;
    let entry = directory.leaves[leaf].as_ref()?;
    last_bit(&entry.starts, LEAF_SLOTS - 1).map(|slot| entry.ids[slot])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_an_ordered_map() {
        let mut seed = 11u64;
        let mut random = move || {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed
        };
        let (mut lookup, mut model) = (Lookup::default(), BTreeMap::new());
        // Clusters in several leaves and directories, with wide gaps between them.
        let bases = [
            0x7f00_0000_0000u64,
            0x7f00_0020_0000,
            0x7f04_1234_0000,
            0x7fff_ffc0_0000,
            0x0002_0000_0000,
        ];
        let mut any = move || bases[random() as usize % 5] + random() % 0x40_0000;
        for step in 0..60_000u32 {
            let addr = any() & !511;
            if step % 3 != 0 {
                lookup.insert(addr, step);
                model.insert(addr, step);
            } else {
                lookup.remove(addr);
                model.remove(&addr);
            }
            let probe = any();
            assert_eq!(lookup.exact(probe), model.get(&probe).copied());
            assert_eq!(
                lookup.exact(probe & !511),
                model.get(&(probe & !511)).copied()
            );
            assert_eq!(
                lookup.at_or_below(probe),
                model.range(..=probe).next_back().map(|(_, id)| *id)
            );
            assert_eq!(lookup.len(), model.len());
        }
        for addr in model.keys() {
            lookup.remove(*addr);
        }
        lookup.forget(0, 1 << 35);
        for base in bases {
            lookup.forget(base & !0x1f_ffff, 0x80_0000);
        }
        assert!(lookup.directories.is_empty() && lookup.len() == 0);
    }
}
