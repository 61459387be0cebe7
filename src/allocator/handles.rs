//! The handles of the large arena by small numbers, and how far each is open.
//!
//! A search over views looks at every mapping of every view; with this it costs an array access
//! each. A handle is described by its open front and its open back: an open part that touches
//! neither end is no part of a run that goes from one handle to the next, and one inside a single
//! handle is a run at home already.

use super::fit::Finder;
use super::records::NIL;
use super::size::{GRANULE, PHYSICAL_GRANULE};

#[derive(Debug, Clone, Copy)]
struct Handle {
    home: u64,
    granules: u32,
}

impl Handle {
    fn end(&self) -> u64 {
        self.home + u64::from(self.granules) * GRANULE
    }
}

/// See the module's text.
#[derive(Debug, Default)]
pub(crate) struct Handles {
    by_number: Vec<Handle>,
    vacant: Vec<u32>,
    /// Numbers by home address.
    order: Vec<u32>,
}

impl Handles {
    fn place(&self, home: u64) -> usize {
        self.order
            .partition_point(|number| self.by_number[*number as usize].home < home)
    }

    /// Enters a handle; its number stays the same until it is removed.
    pub(crate) fn add(&mut self, home: u64, granules: u32) -> u32 {
        let handle = Handle { home, granules };
        let place = self.place(home);
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
        self.order.insert(place, number);
        number
    }

    /// Takes out the handle with a home address, if there is one.
    pub(crate) fn remove(&mut self, home: u64) {
        let place = self.place(home);
        let Some(number) = self.order.get(place).copied() else {
            return;
        };
        if self.by_number[number as usize].home == home {
            self.order.remove(place);
            self.vacant.push(number);
        }
    }

    /// No handle marked yet.
    pub(crate) fn marks(&self) -> Marks {
        Marks(vec![0; self.by_number.len().div_ceil(64)])
    }

    /// Numbers and home addresses, ascending by address.
    #[cfg(test)]
    fn homes(&self) -> Vec<(u64, u32)> {
        let homes = self.order.iter();
        homes
            .map(|number| (self.by_number[*number as usize].home, *number))
            .collect()
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

/// Granules of each handle that are open from its start on, and up to its end.
#[derive(Debug)]
pub(crate) struct Borders(Vec<(u32, u32)>);

impl Borders {
    /// What is open for a search, by the pieces that it may use.
    pub(crate) fn collect(
        handles: &Handles,
        finder: &Finder<'_>,
        usable: impl Fn(u32) -> bool,
    ) -> Self {
        let mut borders = Borders(vec![(0, 0); handles.by_number.len()]);
        let mut place = 0;
        for (base, region) in finder.space.regions() {
            let (mut at, mut start, mut end) = (region.first, *base, *base);
            while at != NIL {
                let hot = &finder.records[at];
                if usable(at) {
                    if end != hot.addr {
                        start = hot.addr;
                    }
                    end = hot.end();
                } else if start < end {
                    borders.open(handles, &mut place, start, end);
                    start = end;
                }
                at = hot.next;
            }
            if start < end {
                borders.open(handles, &mut place, start, end);
            }
        }
        borders
    }

    /// Enters an open range; ranges come in ascending order.
    fn open(&mut self, handles: &Handles, place: &mut usize, start: u64, end: u64) {
        // Handles begin and end at multiples of the granule.
        if start.next_multiple_of(PHYSICAL_GRANULE) > end {
            return;
        }
        while let Some(number) = handles.order.get(*place) {
            let handle = &handles.by_number[*number as usize];
            if handle.home >= end {
                return;
            }
            let (from, to) = (start.max(handle.home), end.min(handle.end()));
            if from < to {
                let granules = ((to - from) / GRANULE) as u32;
                let front = &mut self.0[*number as usize];
                if from == handle.home {
                    front.0 = granules;
                }
                if to == handle.end() {
                    front.1 = granules;
                }
            }
            if handle.end() > end {
                // More of this one may follow.
                return;
            }
            *place += 1;
        }
    }

    /// Granules that are open from the handle's start on, and up to its end.
    pub(crate) fn of(&self, number: u32) -> (u32, u32) {
        self.0[number as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HANDLE: u64 = PHYSICAL_GRANULE;
    const GRANULES: u32 = (HANDLE / GRANULE) as u32;

    #[test]
    fn numbers_stay_and_are_used_again() {
        let mut handles = Handles::default();
        let numbers: Vec<u32> = [5, 1, 3]
            .iter()
            .map(|n| handles.add(n * HANDLE, GRANULES))
            .collect();
        handles.remove(HANDLE);
        handles.remove(2 * HANDLE);
        assert_eq!(
            handles.homes(),
            [(3 * HANDLE, numbers[2]), (5 * HANDLE, numbers[0])]
        );
        assert_eq!(handles.add(9 * HANDLE, 2 * GRANULES), numbers[1]);
        let mut marks = handles.marks();
        marks.set(numbers[1]);
        assert!(marks.has(numbers[1]) && !marks.has(numbers[0]));
    }

    #[test]
    fn only_what_touches_an_end_counts() {
        let mut handles = Handles::default();
        for n in 0..5 {
            handles.add(n * HANDLE, GRANULES);
        }
        let mut borders = Borders(vec![(0, 0); 5]);
        let mut place = 0;
        let mut open = |start, end| borders.open(&handles, &mut place, start, end);
        open(0, 1024);
        // Inside the first handle.
        open(4096, 8192);
        open(HANDLE - 512, 2 * HANDLE + 512);
        open(4 * HANDLE + 512, 5 * HANDLE);
        let found: Vec<_> = (0..5).map(|n| borders.of(n)).collect();
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
    }
}
