//! Where to look in views for a long run: which handle lies at every so many bytes of each view.
//!
//! A run of some pitches covers as many points of a grid, and all of them lie in handles that are open at
//! an end. So a search for as many open points in a row tests one point in so many, as long as those are
//! closed, instead of all mappings. Where it finds them, points of the finest grid tell how far a run
//! could go. Few views are left to be looked at mapping by mapping.
//!
//! What is stored depends on the layouts alone: nothing is to be done when memory is taken or freed.

#![forbid(unsafe_code)]

use crate::allocator::extent::handle::WHOLE;
use crate::allocator::extent::invariant::holds;
use crate::allocator::size::GRANULE;
use crate::allocator::view::mapping::Mapping;
use crate::error::Error;

/// Grids: one per pitch, from the finest on, each twice as wide as the one before.
const GRIDS: usize = 5;
/// Granules between the points of the finest.
const FINEST: u32 = ((8 << 20) / GRANULE) as u32;
/// Views begin at multiples of the widest pitch.
const WIDEST: u32 = FINEST << (GRIDS - 1);

/// Points of a row that are looked for, at least.
const POINTS: u32 = 4;

/// No view's.
const NOBODY: u64 = 0;

/// See the module's text.
#[derive(Debug, Default)]
pub(crate) struct Grid {
    /// Numbers of handles, from the finest grid on; 0: none.
    points: [Vec<u32>; GRIDS],
    /// The base of the view that has each unit of the widest pitch.
    owners: Vec<u64>,
}

impl Grid {
    /// Makes room for a view of at most so many granules; where it begins, in units of the widest
    /// pitch.
    pub(crate) fn enter(&mut self, base: u64, room: u32) -> u32 {
        let units = room.div_ceil(WIDEST) as usize;
        let mut free = 0;
        let found = self.owners.iter().position(|owner| {
            free = if *owner == NOBODY { free + 1 } else { 0 };
            free == units
        });
        // At the end there may be a part of the room already.
        let first = found.map_or(self.owners.len() - free, |last| last + 1 - units);
        let end = self.owners.len().max(first + units);
        self.owners.resize(end, NOBODY);
        self.owners[first..first + units].fill(base);
        for (grid, points) in self.points.iter_mut().enumerate() {
            points.resize(end << (GRIDS - 1 - grid), 0);
        }
        first as u32
    }

    /// Enters what was mapped into a view behind its first `from` granules.
    pub(crate) fn extend(&mut self, first: u32, mappings: &[Mapping], from: u32) {
        for (grid, points) in self.points.iter_mut().enumerate() {
            let pitch = FINEST << grid;
            let start = (first as usize) << (GRIDS - 1 - grid);
            let (mut end, mut point) = (0, from.div_ceil(pitch));
            for mapping in mappings {
                end += mapping.granules;
                while point * pitch < end {
                    points[start + point as usize] = mapping.handle;
                    point += 1;
                }
            }
        }
    }

    /// Forgets what a view has behind its first `left` granules.
    pub(crate) fn shorten(&mut self, first: u32, room: u32, left: u32) {
        let (first, units) = (first as usize, room.div_ceil(WIDEST) as usize);
        for (grid, points) in self.points.iter_mut().enumerate() {
            let wide = GRIDS - 1 - grid;
            let from = (first << wide) + left.div_ceil(FINEST << grid) as usize;
            points[from..(first + units) << wide].fill(0);
        }
    }

    /// Forgets a view.
    pub(crate) fn leave(&mut self, first: u32, room: u32) {
        let (first, units) = (first as usize, room.div_ceil(WIDEST) as usize);
        self.owners[first..first + units].fill(NOBODY);
        self.shorten(first as u32, room, 0);
    }

    /// Hands out the views that may have a run of so many granules, if a grid can tell (else it is
    /// false): one that is not among them has none. What `look` returns is how many granules are of
    /// interest from then on; not fewer. `touch` says which handles are open, by number.
    pub(crate) fn candidates(
        &self,
        granules: u32,
        touch: &[u8],
        mut look: impl FnMut(u64) -> u32,
    ) -> bool {
        let grid = ((granules / (POINTS * FINEST)).max(1).ilog2() as usize).min(GRIDS - 1);
        let mut least = granules;
        let mut covered = (least / (FINEST << grid)) as usize;
        if covered == 0 {
            return false;
        }
        let points = &self.points[grid];
        let mut seen = NOBODY;
        // The last of so many points in a row is looked at first: if it is closed, none of them begins
        // a row.
        let mut last = covered - 1;
        while last < points.len() {
            let row = &points[last + 1 - covered..=last];
            if let Some(at) = row.iter().rposition(|point| touch[*point as usize] == 0) {
                last += at + 1;
                continue;
            }
            let (from, right) = self.reach(grid, last, touch);
            let owner = self.owners[last >> (GRIDS - 1 - grid)];
            if right - from >= (least / FINEST) as usize && seen != owner {
                seen = owner;
                least = least.max(look(owner));
            }
            // What is open may go on in the next view, which is not looked at yet.
            let run = (right >> grid).min(self.view_end(grid, last));
            let next = run.max(last + covered);
            covered = (least / (FINEST << grid)) as usize;
            last = next.max(covered - 1);
        }
        true
    }

    /// Where the points of the view end that a point belongs to.
    fn view_end(&self, grid: usize, point: usize) -> usize {
        let wide = GRIDS - 1 - grid;
        let units = &self.owners[point >> wide..];
        let own = units.iter().take_while(|owner| **owner == units[0]).count();
        ((point >> wide) + own) << wide
    }

    /// Which points of the finest grid a run may cover that covers a point of another: from one, up to
    /// another.
    fn reach(&self, grid: usize, point: usize, touch: &[u8]) -> (usize, usize) {
        let points = &self.points[0];
        let at = point << grid;
        let right = reach(points[at..].iter(), touch);
        let left = reach(points[..=at].iter().rev(), touch);
        (at + 1 - left, at + right)
    }

    /// Compares what is stored with the views: their places, bases, rooms and handles.
    pub(crate) fn check<'a>(
        &self,
        views: impl Iterator<Item = (u32, u64, u32, &'a [Mapping])>,
    ) -> Result<(), Error> {
        let mut right = Grid {
            owners: vec![NOBODY; self.owners.len()],
            points: std::array::from_fn(|grid| vec![0; self.points[grid].len()]),
        };
        for (place, base, room, mappings) in views {
            let (first, units) = (place as usize, room.div_ceil(WIDEST) as usize);
            let Some(own) = right.owners.get_mut(first..first + units) else {
                return holds("a view has a place in the grid", false);
            };
            holds(
                "no two views share a place",
                own.iter().all(|o| *o == NOBODY),
            )?;
            own.fill(base);
            right.extend(place, mappings, 0);
        }
        holds("the grid knows its views", self.owners == right.owners)?;
        holds(
            "the grid has the handles of views",
            self.points == right.points,
        )
    }
}

/// How many points a run that covers the first may cover at most: those of the same handle, of whole
/// ones, and of one that is open in part.
fn reach<'a>(points: impl Iterator<Item = &'a u32>, touch: &[u8]) -> usize {
    let (mut count, mut fringe, mut over) = (0, None, false);
    for handle in points {
        if *fringe.get_or_insert(*handle) != *handle {
            match touch[*handle as usize] {
                _ if over => break,
                WHOLE => {}
                0 => break,
                _ => (fringe, over) = (Some(*handle), true),
            }
        }
        count += 1;
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::allocator::extent::handle::{BACK, FRONT};

    const MIB: u32 = (1 << 20) / GRANULE as u32;

    /// Views of handles (number, MiB), with room for half as much again.
    fn grid(views: &[&[(u32, u32)]]) -> Grid {
        let mut grid = Grid::default();
        for (base, handles) in (1..).zip(views) {
            let mappings = mappings(handles);
            let granules: u32 = mappings.iter().map(|mapping| mapping.granules).sum();
            let place = grid.enter(base, granules * 3 / 2);
            grid.extend(place, &mappings, 0);
        }
        grid
    }

    fn mappings(handles: &[(u32, u32)]) -> Vec<Mapping> {
        let mapping = |(handle, mib): &(u32, u32)| Mapping {
            home: u64::from(*handle) << 30,
            granules: mib * MIB,
            handle: *handle,
        };
        handles.iter().map(mapping).collect()
    }

    /// The views that may have a run of so many granules, if the grid can tell.
    fn candidates(grid: &Grid, granules: u32, touch: &[u8]) -> Option<Vec<u64>> {
        let mut found = Vec::new();
        let told = grid.candidates(granules, touch, |base| {
            found.push(base);
            granules
        });
        told.then_some(found)
    }

    #[test]
    fn what_is_shorter_than_what_was_found_is_passed_over() {
        // Runs of 128, 512, 256, 512 and 768 MiB.
        let runs = [8, 32, 16, 32, 48].map(|count| vec![(1, 16); count]);
        let runs: Vec<&[(u32, u32)]> = runs.iter().map(Vec::as_slice).collect();
        let grid = grid(&runs);
        let touch = [0, WHOLE];
        let mut found = Vec::new();
        let told = grid.candidates(100 * MIB, &touch, |base| {
            found.push(base);
            runs[base as usize - 1].len() as u32 * 16 * MIB
        });
        assert!(told);
        assert_eq!(found, [1, 2, 4, 5]);
    }

    /// The points of a view that fills its room lie beside those of the next one.
    #[test]
    fn views_without_room_are_told_apart() {
        let mut grid = Grid::default();
        for base in 1..4 {
            let place = grid.enter(base, WIDEST);
            grid.extend(place, &mappings(&[(1, 16); 8]), 0);
        }
        for mib in [32, 64, 100, 128] {
            let found = candidates(&grid, mib * MIB, &[0, WHOLE]);
            assert_eq!(found, Some(vec![1, 2, 3]), "{mib} MiB");
        }
    }

    #[test]
    fn a_view_with_a_run_is_always_a_candidate() {
        // Sizes of handles and what is open, by a small generator.
        let mut seed = 1u32;
        let mut random = |below: u32| {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 8) % below
        };
        for _ in 0..300 {
            let count = 1 + random(60);
            let handles: Vec<(u32, u32)> = (1..=count).map(|n| (n, 2 << random(6))).collect();
            let grid = grid(&[&handles[..count as usize / 2], &handles]);
            let touch: Vec<u8> = std::iter::once(0)
                .chain((0..count).map(|_| match random(5) {
                    0 => 0,
                    1 => FRONT,
                    2 => BACK,
                    _ => WHOLE,
                }))
                .collect();
            // The longest run of the second view, as if half of a handle were open at an end.
            let (mut run, mut longest) = (0, 0);
            for (handle, mib) in &handles {
                match touch[*handle as usize] {
                    WHOLE => run += mib * MIB,
                    FRONT => {
                        longest = longest.max(run + mib * MIB / 2);
                        run = 0;
                    }
                    BACK => {
                        longest = longest.max(run);
                        run = mib * MIB / 2;
                    }
                    _ => run = 0,
                }
                longest = longest.max(run);
            }
            for granules in [longest, longest * 3 / 4, longest / 3] {
                if let Some(found) = candidates(&grid, granules.max(1), &touch) {
                    assert!(found.contains(&2), "{granules} of {handles:?}: {touch:?}");
                }
            }
        }
    }

    #[test]
    fn a_closed_handle_rules_a_view_out() {
        let handles: Vec<(u32, u32)> = (1..=32).map(|n| (n, 16)).collect();
        let grid = grid(&[&handles]);
        let mut touch = vec![WHOLE; 33];
        touch[0] = 0;
        assert_eq!(candidates(&grid, 512 * MIB, &touch), Some(vec![1]));
        touch[9] = 0;
        assert_eq!(candidates(&grid, 512 * MIB, &touch), Some(vec![]));
        assert_eq!(candidates(&grid, 400 * MIB, &touch), Some(vec![]));
        assert_eq!(candidates(&grid, 368 * MIB, &touch), Some(vec![1]));
        assert_eq!(
            candidates(&grid, 4 * MIB, &touch),
            None,
            "too short to tell"
        );
    }

    #[test]
    fn places_are_used_again() {
        let mut grid = grid(&[&[(1, 200)], &[(2, 100)], &[(3, 80)]]);
        // 300, 150 and 120 MiB in units of 128.
        assert_eq!(grid.owners, [1, 1, 1, 2, 2, 3]);
        grid.leave(3, 150 * MIB);
        assert_eq!(grid.enter(4, 120 * MIB), 3);
        grid.leave(5, 120 * MIB);
        assert_eq!(grid.enter(5, 500 * MIB), 4, "the end may be a part of it");
        assert_eq!(grid.owners, [1, 1, 1, 4, 5, 5, 5, 5]);
        let first = mappings(&[(1, 200)]);
        let views = || [(0, 1, 300 * MIB, &first[..]), (3, 4, 120 * MIB, &[])];
        let last = |place| views().into_iter().chain([(place, 5, 500 * MIB, &[][..])]);
        assert!(grid.check(last(4)).is_ok());
        for wrong in [3, 5] {
            assert!(grid.check(last(wrong)).is_err(), "another place");
        }
        assert!(grid.check(views().into_iter()).is_err(), "one view less");
        grid.extend(4, &mappings(&[(7, 20)]), 0);
        assert!(
            grid.check(last(4)).is_err(),
            "handles that the view has not"
        );
    }
}
