//! Pointer to block: a sparse table of block starts.
//!
//! The address space is cut into leaves of 2 MiB; a leaf holds one id per 512-byte granule and a
//! bitmap of the granules at which a block starts, so that the start below an interior pointer is
//! found without touching the ids. Leaves hang below directories of 16 GiB. Starts are granule
//! aligned, so a pointer that is not can only be an interior one.

use super::size::GRANULE;

const LEAF_BITS: u32 = 21;
const DIR_BITS: u32 = 34;
const LEAF_SLOTS: usize = 1 << (LEAF_BITS - 9);
const DIR_SLOTS: usize = 1 << (DIR_BITS - LEAF_BITS);

#[derive(Debug)]
struct Leaf {
    count: u32,
    starts: [u64; LEAF_SLOTS / 64],
    ids: [u32; LEAF_SLOTS],
}

impl Leaf {
    /// Out of line: so much on the stack must not be part of each call.
    #[cold]
    #[inline(never)]
    fn new() -> Box<Self> {
        Box::new(Leaf {
            count: 0,
            starts: [0; LEAF_SLOTS / 64],
            ids: [0; LEAF_SLOTS],
        })
    }

    /// Whether a block starts at a granule.
    #[inline]
    fn starts_at(&self, slot: usize) -> bool {
        self.starts[slot / 64] >> (slot % 64) & 1 == 1
    }
}

#[derive(Debug)]
struct Directory {
    leaves: Box<[Option<Box<Leaf>>; DIR_SLOTS]>,
    /// Leaves that exist.
    count: u32,
    /// Bit per leaf that holds at least one start.
    occupied: [u64; DIR_SLOTS / 64],
}

impl Directory {
    #[cold]
    #[inline(never)]
    fn new() -> Box<Self> {
        Box::new(Directory {
            leaves: Box::new([const { None }; DIR_SLOTS]),
            count: 0,
            occupied: [0; DIR_SLOTS / 64],
        })
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
    /// By number. There are few: the address space of an allocator is of one piece, mostly.
    directories: Vec<(u64, Box<Directory>)>,
    /// Where the last one is that something was entered in or taken out of.
    latest: usize,
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

    /// Where a directory is, or would be.
    #[inline]
    fn place(&self, dir: u64) -> Result<usize, usize> {
        let at = self
            .directories
            .iter()
            .position(|(number, _)| *number >= dir);
        match at {
            Some(at) if self.directories[at].0 == dir => Ok(at),
            _ => Err(at.unwrap_or(self.directories.len())),
        }
    }

    /// [`place`](Self::place), mostly without a search.
    #[inline]
    fn place_again(&mut self, dir: u64) -> Result<usize, usize> {
        if self
            .directories
            .get(self.latest)
            .is_some_and(|(number, _)| *number == dir)
        {
            return Ok(self.latest);
        }
        let place = self.place(dir);
        let (Ok(at) | Err(at)) = place;
        self.latest = at;
        place
    }

    #[inline]
    fn directory(&self, dir: u64) -> Option<&Directory> {
        let at = self.place(dir).ok()?;
        Some(&self.directories[at].1)
    }

    pub(crate) fn insert(&mut self, addr: u64, id: u32) {
        debug_assert!(addr.is_multiple_of(GRANULE));
        let (dir, leaf, slot) = split(addr);
        let at = self.place_again(dir).unwrap_or_else(|at| {
            self.directories.insert(at, (dir, Directory::new()));
            at
        });
        let directory = &mut self.directories[at].1;
        let entry = directory.leaves[leaf].get_or_insert_with(|| {
            directory.count += 1;
            Leaf::new()
        });
        entry.ids[slot] = id;
        if entry.starts_at(slot) {
            return;
        }
        entry.starts[slot / 64] |= 1 << (slot % 64);
        if entry.count == 0 {
            directory.occupied[leaf / 64] |= 1 << (leaf % 64);
        }
        entry.count += 1;
        self.len += 1;
    }

    pub(crate) fn remove(&mut self, addr: u64) {
        let (dir, leaf, slot) = split(addr);
        let Ok(at) = self.place_again(dir) else {
            return;
        };
        let directory = &mut self.directories[at].1;
        let Some(entry) = &mut directory.leaves[leaf] else {
            return;
        };
        if !entry.starts_at(slot) {
            return;
        }
        entry.starts[slot / 64] &= !(1 << (slot % 64));
        entry.count -= 1;
        self.len -= 1;
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
        let entry = self.directory(dir)?.leaves[leaf].as_ref()?;
        entry.starts_at(slot).then(|| entry.ids[slot])
    }

    /// The block with the highest start at or below `addr`. Whether it reaches `addr` is for the
    /// caller to see.
    pub(crate) fn at_or_below(&self, addr: u64) -> Option<u32> {
        let (dir, leaf, slot) = split(addr);
        let place = self.place(dir);
        if let Ok(at) = place {
            let directory = &self.directories[at].1;
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
        let (Ok(below) | Err(below)) = place;
        let mut below = self.directories[..below].iter().rev();
        below.find_map(|(_, directory)| last_in(directory, DIR_SLOTS - 1))
    }

    /// Drops the leaves of a range that no longer holds memory.
    pub(crate) fn forget(&mut self, addr: u64, bytes: u64) {
        let mut leaf_addr = addr.next_multiple_of(1 << LEAF_BITS);
        while leaf_addr + (1 << LEAF_BITS) <= addr + bytes {
            let (dir, leaf, _) = split(leaf_addr);
            leaf_addr += 1 << LEAF_BITS;
            let Ok(at) = self.place(dir) else {
                continue;
            };
            let directory = &mut self.directories[at].1;
            if directory.leaves[leaf]
                .as_ref()
                .is_some_and(|l| l.count == 0)
            {
                directory.leaves[leaf] = None;
                directory.count -= 1;
                if directory.count == 0 {
                    self.directories.remove(at);
                }
            }
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
