//! Numbers for the handles of the large arena, and the open parts of each handle.
//!
//! With numbers, a search over views costs one array access per mapping. A handle is described by its open beginning
//! and its open end. Other open parts are irrelevant: a part that touches neither end cannot belong to a run across
//! handles, and a run inside one handle is already contiguous at home.

use std::collections::BTreeMap;

use crate::allocator::extent::record::SpaceId;
use crate::allocator::size::{GRANULE, PHYSICAL_GRANULE};

/// Physical granules per leaf of the address table.
const LEAF: usize = 1 << 13;

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Handle {
    pub home: u64,
    pub granules: u32,
}

impl Handle {
    pub(crate) fn end(&self) -> u64 {
        self.home + u64::from(self.granules) * GRANULE
    }
}

/// The numbered handles; see the module documentation. Numbers begin at 1.
#[derive(Debug)]
pub(crate) struct Handles {
    by_number: Vec<Handle>,
    vacant: Vec<u32>,
    /// Numbers by physical granule of the address; 0 means none. There are few leaves.
    leaves: Vec<(u64, Box<[u32]>)>,
    /// Number of handles of each size.
    sizes: BTreeMap<u32, u32>,
}

impl Default for Handles {
    fn default() -> Self {
        Handles {
            by_number: vec![Handle::default()],
            vacant: Vec::new(),
            leaves: Vec::new(),
            sizes: BTreeMap::new(),
        }
    }
}

impl Handles {
    /// Adds a handle; its number stays the same until it is removed.
    pub(crate) fn add(&mut self, home: u64, granules: u32) -> u32 {
        let handle = Handle { home, granules };
        let number = match self.vacant.pop() {
            Some(number) => {
                self.by_number[number as usize] = handle;
                number
            }
            None => {
                self.by_number.push(handle);
                self.by_number.len() as u32 - 1
            }
        };
        *self.sizes.entry(granules).or_default() += 1;
        self.set_number(handle, number);
        number
    }

    /// Removes the handle with a home address, if there is one.
    pub(crate) fn remove(&mut self, home: u64) {
        let number = self.at(home);
        let handle = self.by_number[number as usize];
        if number == 0 || handle.home != home {
            return;
        }
        self.set_number(handle, 0);
        self.vacant.push(number);
        if let Some(count) = self.sizes.get_mut(&handle.granules) {
            *count -= 1;
            if *count == 0 {
                self.sizes.remove(&handle.granules);
            }
        }
    }

    fn set_number(&mut self, handle: Handle, number: u32) {
        let pages = handle.home / PHYSICAL_GRANULE..handle.end().div_ceil(PHYSICAL_GRANULE);
        for page in pages {
            let key = page / LEAF as u64;
            let found = self.leaves.iter().position(|(at, _)| *at == key);
            let at = found.unwrap_or_else(|| {
                self.leaves.push((key, vec![0; LEAF].into_boxed_slice()));
                self.leaves.len() - 1
            });
            self.leaves[at].1[page as usize % LEAF] = number;
        }
    }

    /// Returns the number of the handle around an address; 0 if there is none.
    pub(crate) fn at(&self, addr: u64) -> u32 {
        let page = addr / PHYSICAL_GRANULE;
        let key = page / LEAF as u64;
        let leaf = self.leaves.iter().find(|(at, _)| *at == key);
        leaf.map_or(0, |(_, numbers)| numbers[page as usize % LEAF])
    }

    /// Returns the handle with a number.
    pub(crate) fn get(&self, number: u32) -> Handle {
        self.by_number[number as usize]
    }

    /// Granules of the largest handle.
    pub(crate) fn largest(&self) -> u32 {
        self.sizes.last_key_value().map_or(0, |(size, _)| *size)
    }

    /// Returns an empty set of handles.
    pub(crate) fn marks(&self) -> Marks {
        Marks(vec![0; self.by_number.len().div_ceil(64)])
    }

    /// Returns the number of handles.
    pub(crate) fn len(&self) -> usize {
        self.by_number.len() - 1 - self.vacant.len()
    }
}

/// A set of handles.
#[derive(Debug, Clone)]
pub(crate) struct Marks(Vec<u64>);

impl Marks {
    pub(crate) fn set(&mut self, number: u32) {
        self.0[number as usize / 64] |= 1 << (number % 64);
    }

    pub(crate) fn has(&self, number: u32) -> bool {
        self.0[number as usize / 64] >> (number % 64) & 1 == 1
    }
}

/// In [`Borders::touch`]: the handle is open at its start.
pub(crate) const FRONT: u8 = 1;
/// In [`Borders::touch`]: the handle is open at its end.
pub(crate) const BACK: u8 = 2;
/// In [`Borders::touch`]: the whole handle is open.
pub(crate) const WHOLE: u8 = 4 | FRONT | BACK;

/// Granules of each handle that are open at its start and at its end.
#[derive(Debug)]
pub(crate) struct Borders {
    ends: Vec<(u32, u32)>,
    touch: Vec<u8>,
}

impl Borders {
    /// Builds the borders from open ranges that do not touch.
    pub(crate) fn new(handles: &Handles, open: &[(u64, u64)]) -> Self {
        let count = handles.by_number.len();
        let mut borders = Borders {
            ends: vec![(0, 0); count],
            touch: vec![0; count],
        };
        for (start, end) in open {
            borders.open(handles, *start, *end);
        }
        borders
    }

    /// Adds an open range.
    fn open(&mut self, handles: &Handles, start: u64, end: u64) {
        // Handles begin and end at multiples of the physical granule.
        if start.next_multiple_of(PHYSICAL_GRANULE) > end {
            return;
        }
        let mut at = start;
        while at < end {
            let number = handles.at(at);
            let handle = handles.get(number);
            if number == 0 {
                return;
            }
            let to = end.min(handle.end());
            let granules = ((to - at) / GRANULE) as u32;
            let (ends, touch) = (
                &mut self.ends[number as usize],
                &mut self.touch[number as usize],
            );
            if at == handle.home {
                ends.0 = granules;
                *touch |= FRONT;
            }
            if to == handle.end() {
                ends.1 = granules;
                *touch |= BACK;
            }
            if granules == handle.granules {
                *touch = WHOLE;
            }
            at = to;
        }
    }

    /// Returns the granules that are open at the handle's start and at its end.
    pub(crate) fn of(&self, number: u32) -> (u32, u32) {
        self.ends[number as usize]
    }

    /// Returns the flags [`FRONT`], [`BACK`] and [`WHOLE`] of each handle, by number.
    pub(crate) fn touch(&self) -> &[u8] {
        &self.touch
    }
}

/// Memory held from the driver: a segment, or a physical handle at its home address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Holding {
    pub bytes: u64,
    /// The physical handle; `None` for a plain segment.
    pub handle: Option<u64>,
    pub space: SpaceId,
    /// Number of views that map the handle.
    pub views: u32,
    /// The handle's number in [`Handles`]; 0 if it has none.
    pub number: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    const HANDLE: u64 = PHYSICAL_GRANULE;
    const GRANULES: u32 = (HANDLE / GRANULE) as u32;

    #[test]
    fn numbers_stay_and_are_used_again() {
        let mut handles = Handles::default();
        assert_eq!((handles.at(0), handles.largest()), (0, 0));
        let numbers: Vec<u32> = [5, 1, 3]
            .iter()
            .map(|n| handles.add(n * HANDLE, GRANULES))
            .collect();
        handles.remove(HANDLE);
        handles.remove(2 * HANDLE);
        let found: Vec<u32> = (0..7).map(|n| handles.at(n * HANDLE + 512)).collect();
        assert_eq!(found, [0, 0, 0, numbers[2], 0, numbers[0], 0]);
        assert_eq!(handles.add(9 * HANDLE, 2 * GRANULES), numbers[1]);
        assert_eq!(handles.at(11 * HANDLE - 512), numbers[1]);
        assert_eq!((handles.len(), handles.largest()), (3, 2 * GRANULES));
        handles.remove(10 * HANDLE);
        assert_eq!(handles.len(), 3, "no handle begins there");
        handles.remove(9 * HANDLE);
        assert_eq!((handles.len(), handles.largest()), (2, GRANULES));
        let mut marks = handles.marks();
        marks.set(numbers[1]);
        assert!(marks.has(numbers[1]) && !marks.has(numbers[0]));
    }

    #[test]
    fn only_memory_at_an_end_counts() {
        let mut handles = Handles::default();
        for n in 0..5 {
            handles.add(n * HANDLE, GRANULES);
        }
        let open = [
            (0, 1024),
            // A range inside the first handle.
            (4096, 8192),
            (HANDLE - 512, 2 * HANDLE + 512),
            (4 * HANDLE + 512, 5 * HANDLE),
        ];
        let borders = Borders::new(&handles, &open);
        let found: Vec<_> = (1..6).map(|n| borders.of(n)).collect();
        assert_eq!(
            found,
            [
                (2, 1),
                (GRANULES, GRANULES),
                (1, 0),
                (0, 0),
                (0, GRANULES - 1)
            ]
        );
        assert_eq!(borders.touch(), [0, FRONT | BACK, WHOLE, FRONT, 0, BACK]);
    }
}
