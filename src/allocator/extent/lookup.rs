//! Lookup from pointer to block: a sparse table of block starts.
//!
//! The address space is divided into leaves of 2 MiB, which store where in them blocks start. Most blocks are large.
//! Therefore a leaf is one cache line with room for a few starts; only a leaf with more has an id per 512-byte granule,
//! with a bitmap, so that the start below an interior pointer is found without reading the ids. Leaves are grouped in
//! directories of 2 GiB. Starts are granule aligned, so an unaligned pointer can only be an interior one.

use crate::allocator::extent::boxed::boxed_array;
use crate::allocator::size::GRANULE;

const LEAF_BITS: u32 = 21;
const DIR_BITS: u32 = 31;
const LEAF_SLOTS: usize = 1 << (LEAF_BITS - 9);
const DIR_SLOTS: usize = 1 << (DIR_BITS - LEAF_BITS);
/// Number of starts that fit into a leaf's own cache line.
const FEW: usize = 8;

#[derive(Debug, Clone, Default)]
#[repr(C, align(64))]
struct Leaf {
    /// Number of block starts in the leaf.
    count: u32,
    /// Ids of the blocks while they are few, unordered; `slots` are their granules in the leaf.
    ids: [u32; FEW],
    slots: [u16; FEW],
    /// All starts, once there have been more than `FEW`.
    many: Option<Box<Many>>,
}

const _: () = assert!(size_of::<Leaf>() == 64);

#[derive(Debug, Clone)]
struct Many {
    starts: [u64; LEAF_SLOTS / 64],
    ids: [u32; LEAF_SLOTS],
}

impl Leaf {
    /// Position of a start in the leaf's own cache line.
    #[inline(always)]
    fn few(&self, slot: u16) -> Option<usize> {
        let few = &self.slots[..FEW.min(self.count as usize)];
        few.iter().position(|known| *known == slot)
    }

    /// Adds a start. Returns whether it is new.
    #[inline]
    fn insert(&mut self, slot: u16, id: u32) -> bool {
        if self.many.is_some() {
            return self.insert_among_many(slot, id);
        }
        if let Some(at) = self.few(slot) {
            self.ids[at] = id;
            return false;
        }
        let at = self.count as usize;
        if at >= FEW {
            return self.insert_among_many(slot, id);
        }
        (self.slots[at], self.ids[at]) = (slot, id);
        self.count += 1;
        true
    }

    /// Out of line, so that its large stack frame is not part of each call.
    #[cold]
    #[inline(never)]
    fn insert_among_many(&mut self, slot: u16, id: u32) -> bool {
        let many = self.many.get_or_insert_with(|| {
            let mut many = Box::new(Many {
                starts: [0; LEAF_SLOTS / 64],
                ids: [0; LEAF_SLOTS],
            });
            for (slot, id) in self.slots.iter().zip(self.ids).take(self.count as usize) {
                many.insert(*slot, id);
            }
            many
        });
        let new = many.insert(slot, id);
        self.count += u32::from(new);
        new
    }

    /// Removes a start. Returns whether it was there.
    #[inline]
    fn remove(&mut self, slot: u16) -> bool {
        if let Some(many) = &mut self.many {
            let found = many.remove(slot);
            self.count -= u32::from(found);
            return found;
        }
        let Some(at) = self.few(slot) else {
            return false;
        };
        self.count -= 1;
        let last = self.count as usize % FEW;
        (self.slots[at], self.ids[at]) = (self.slots[last], self.ids[last]);
        true
    }

    /// Returns the block that starts at a granule.
    #[inline]
    fn exact(&self, slot: u16) -> Option<u32> {
        match &self.many {
            Some(many) => many.starts_at(slot).then(|| many.ids[usize::from(slot)]),
            None => self.few(slot).map(|at| self.ids[at]),
        }
    }

    /// Returns the block with the highest start at or below a granule.
    fn at_or_below(&self, slot: u16) -> Option<u32> {
        if let Some(many) = &self.many {
            return last_bit(&many.starts, usize::from(slot)).map(|slot| many.ids[slot]);
        }
        let few = self.slots.iter().zip(&self.ids).take(self.count as usize);
        let below = few.filter(|(start, _)| **start <= slot);
        below.max_by_key(|(start, _)| **start).map(|(_, id)| *id)
    }
}

impl Many {
    fn insert(&mut self, slot: u16, id: u32) -> bool {
        let new = !self.starts_at(slot);
        self.starts[usize::from(slot) / 64] |= 1 << (slot % 64);
        self.ids[usize::from(slot)] = id;
        new
    }

    fn remove(&mut self, slot: u16) -> bool {
        let found = self.starts_at(slot);
        self.starts[usize::from(slot) / 64] &= !(1 << (slot % 64));
        found
    }

    fn starts_at(&self, slot: u16) -> bool {
        self.starts[usize::from(slot) / 64] >> (slot % 64) & 1 == 1
    }
}

#[derive(Debug)]
#[repr(C)]
struct Directory {
    number: u64,
    leaves: Box<[Leaf; DIR_SLOTS]>,
    /// One bit for each leaf with a start.
    occupied: [u64; DIR_SLOTS / 64],
}

impl Directory {
    #[cold]
    #[inline(never)]
    fn new(number: u64) -> Self {
        Directory {
            number,
            leaves: boxed_array(Leaf::default),
            occupied: [0; DIR_SLOTS / 64],
        }
    }
}

/// Returns the highest set bit at or below `at`.
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

/// The table; see the module documentation.
#[derive(Debug, Default)]
pub(crate) struct Lookup {
    /// Sorted by number. There are few directories, because the address space of an allocator is mostly contiguous.
    directories: Vec<Directory>,
    len: usize,
}

const fn split(addr: u64) -> (u64, usize, u16) {
    (
        addr >> DIR_BITS,
        (addr >> LEAF_BITS) as usize & (DIR_SLOTS - 1),
        (addr >> 9) as u16 & (LEAF_SLOTS - 1) as u16,
    )
}

impl Lookup {
    /// Returns the number of block starts.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Position of a directory, or of its insertion.
    #[inline]
    fn place(&self, dir: u64) -> Result<usize, usize> {
        self.directories
            .binary_search_by_key(&dir, |directory| directory.number)
    }

    #[inline]
    fn directory(&self, dir: u64) -> Option<&Directory> {
        let at = self.place(dir).ok()?;
        Some(&self.directories[at])
    }

    pub(crate) fn insert(&mut self, addr: u64, id: u32) {
        debug_assert!(addr.is_multiple_of(GRANULE));
        let (dir, leaf, slot) = split(addr);
        let at = self.place(dir).unwrap_or_else(|at| {
            self.directories.insert(at, Directory::new(dir));
            at
        });
        let directory = &mut self.directories[at];
        let entry = &mut directory.leaves[leaf];
        if !entry.insert(slot, id) {
            return;
        }
        directory.occupied[leaf / 64] |= 1 << (leaf % 64);
        self.len += 1;
    }

    pub(crate) fn remove(&mut self, addr: u64) {
        let (dir, leaf, slot) = split(addr);
        let Ok(at) = self.place(dir) else {
            return;
        };
        let directory = &mut self.directories[at];
        let entry = &mut directory.leaves[leaf];
        if !entry.remove(slot) {
            return;
        }
        self.len -= 1;
        let emptied = entry.count == 0;
        directory.occupied[leaf / 64] &= !(u64::from(emptied) << (leaf % 64));
    }

    /// Returns the block that starts exactly at `addr`.
    pub(crate) fn exact(&self, addr: u64) -> Option<u32> {
        if !addr.is_multiple_of(GRANULE) {
            return None;
        }
        let (dir, leaf, slot) = split(addr);
        self.directory(dir)?.leaves[leaf].exact(slot)
    }

    /// Returns the block with the highest start at or below `addr`. The caller checks whether it reaches `addr`.
    pub(crate) fn at_or_below(&self, addr: u64) -> Option<u32> {
        let (dir, leaf, slot) = split(addr);
        let place = self.place(dir);
        if let Ok(at) = place {
            let directory = &self.directories[at];
            if let Some(id) = directory.leaves[leaf].at_or_below(slot) {
                return Some(id);
            }
            if leaf > 0
                && let Some(id) = last_in(directory, leaf - 1)
            {
                return Some(id);
            }
        }
        let (Ok(below) | Err(below)) = place;
        let mut below = self.directories[..below].iter().rev();
        below.find_map(|directory| last_in(directory, DIR_SLOTS - 1))
    }

    /// Removes the leaves of a range that no longer holds memory.
    pub(crate) fn forget(&mut self, addr: u64, bytes: u64) {
        let mut leaf_addr = addr.next_multiple_of(1 << LEAF_BITS);
        while leaf_addr + (1 << LEAF_BITS) <= addr + bytes {
            let (dir, leaf, _) = split(leaf_addr);
            leaf_addr += 1 << LEAF_BITS;
            let Ok(at) = self.place(dir) else {
                continue;
            };
            let directory = &mut self.directories[at];
            let entry = &mut directory.leaves[leaf];
            if entry.count == 0 {
                entry.many = None;
            }
            if directory.occupied == [0; DIR_SLOTS / 64] {
                self.directories.remove(at);
            }
        }
    }
}

fn last_in(directory: &Directory, leaf: usize) -> Option<u32> {
    let leaf = last_bit(&directory.occupied, leaf)?;
    directory.leaves[leaf].at_or_below(LEAF_SLOTS as u16 - 1)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

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
