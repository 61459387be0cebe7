//! The data of views: second mappings of physical memory.

#![forbid(unsafe_code)]

use crate::driver::DriverError;

use crate::allocator::extent::handle::{BACK, Borders, Handles, WHOLE};
use crate::allocator::extent::space::Shard;
use crate::allocator::extent::uses::Uses;
use crate::allocator::extent::want::Want;
use crate::allocator::physical::{Fresh, GrowthFailure};
use crate::allocator::size::GRANULE;
use crate::allocator::stream::Streams;
use crate::allocator::stream::finder::Finder;
use crate::allocator::stream::slot::PendingWait;

/// One handle in a view.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Mapping {
    /// Home address of the handle.
    pub home: u64,
    pub granules: u32,
    /// Number of the handle.
    pub handle: u32,
}

/// A view; see the module documentation of `view`.
#[derive(Debug)]
pub(crate) struct View {
    /// The record of the view's address range.
    pub range: u32,
    /// Granules of that range.
    pub room: u32,
    /// The handles in it, contiguous from its base.
    pub mappings: Vec<Mapping>,
    /// Granules of the handles.
    pub granules: u32,
    /// Granules of the largest handle that it has or had.
    largest: u32,
    /// Number of calls in progress that keep it.
    pub calls: u32,
    /// The blocks in it: granules from the base to their start and to their end.
    pub blocks: Vec<(u32, u32)>,
    /// Last uses of freed blocks through the view's addresses.
    pub uses: Uses,
    /// Value of the clock of views at its last allocation.
    pub stamp: u64,
    /// Whether a stitch is extending it.
    pub busy: bool,
    /// Whether some of the mappings may be missing, because a call to unmap them failed: the view is not used any more,
    /// only unmapped.
    pub dead: bool,
}

/// Free bytes at home that a request may use.
#[derive(Debug)]
pub(crate) struct Openings {
    /// Sorted intervals that do not touch.
    pub ranges: Vec<(u64, u64)>,
    /// Open parts of each handle.
    pub borders: Borders,
    /// Whether more is open behind waits.
    pub more: bool,
}

impl Openings {
    /// Collects the ready bytes, or with `reachable` also those behind waits.
    pub(crate) fn collect(handles: &Handles, finder: &Finder<'_>, reachable: bool) -> Self {
        let mut more = false;
        let usable = |id| {
            let ready = finder.ready(id);
            let waits = !ready && (reachable || !more) && finder.reachable(id);
            more |= waits;
            ready || (waits && reachable)
        };
        let ranges = Self::ranges(finder, usable);
        Openings {
            borders: Borders::new(handles, &ranges),
            ranges,
            more,
        }
    }

    /// Returns the free bytes of usable pieces, as sorted intervals that do not touch.
    pub(crate) fn ranges(
        finder: &Finder<'_>,
        mut usable: impl FnMut(u32) -> bool,
    ) -> Vec<(u64, u64)> {
        let mut ranges: Vec<(u64, u64)> = Vec::with_capacity(finder.space.piece_count());
        finder.space.pieces().for_each(|piece| {
            if usable(piece.id) {
                ranges.push((piece.addr, piece.addr + u64::from(piece.granules) * GRANULE));
            }
        });
        ranges.sort_unstable_by_key(|(start, _)| *start);
        ranges.dedup_by(|next, last| {
            let touch = last.1 == next.0;
            if touch {
                last.1 = next.1;
            }
            touch
        });
        ranges
    }
}

/// A run in a view, in granules from the view's base.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ViewRun {
    pub base: u64,
    pub offset: u32,
    pub granules: u32,
}

impl View {
    /// Whether all uses of memory through the view are complete.
    pub(crate) fn is_over(&self, streams: &Streams) -> bool {
        self.blocks.is_empty()
            && self.calls == 0
            && self.uses.as_slice().iter().all(|u| streams.is_complete(u))
    }

    /// Creates a view of these handles from the base of its range, whose record is `range`.
    pub(crate) fn new(range: u32, room: u32, mappings: Vec<Mapping>) -> View {
        View {
            range,
            room,
            granules: mappings.iter().map(|mapping| mapping.granules).sum(),
            largest: largest(&mappings),
            mappings,
            calls: 0,
            blocks: Vec::new(),
            uses: Uses::None,
            stamp: 0,
            busy: false,
            dead: false,
        }
    }

    /// Adds handles that were mapped after the present ones.
    pub(crate) fn extend(&mut self, mappings: Vec<Mapping>) {
        self.granules += mappings.iter().map(|mapping| mapping.granules).sum::<u32>();
        self.largest = self.largest.max(largest(&mappings));
        self.mappings.extend(mappings);
    }

    /// Returns the smallest run that fits a request, spans several handles or touches an end of one, and is open at
    /// home: the offset of the request in it, and the length of the run, in granules.
    pub(crate) fn tightest(&self, base: u64, borders: &Borders, want: &Want) -> Option<(u32, u32)> {
        // Such a run contains this many consecutive whole handles, because the open parts of the handles on either side
        // are smaller than the largest handle.
        let row = (want.granules / self.largest.max(1)).saturating_sub(1) as usize;
        let of = |mapping: &Mapping| borders.of(mapping.handle);
        let mut best: Option<(u32, u32)> = None;
        // The first `counted` handles end at `offset`.
        let (mut at, mut counted, mut offset) = (0, 0, 0u32);
        while let Some(first) = self.row_from(at, row, borders.touch()) {
            let (mut end, mut run) = (first, 0);
            while let Some(mapping) = self.mappings.get(end)
                && is_open(mapping, borders.touch()) == WHOLE
            {
                (end, run) = (end + 1, run + mapping.granules);
            }
            at = end + 1;
            let before = first
                .checked_sub(1)
                .and_then(|last| self.mappings.get(last));
            let before = before.map_or(0, |last| of(last).1);
            run += before + self.mappings.get(end).map_or(0, |next| of(next).0);
            if run < want.granules || best.is_some_and(|(_, length)| run >= length) {
                continue;
            }
            let passed = self.mappings.get(counted..first).unwrap_or_default();
            offset += passed.iter().map(|mapping| mapping.granules).sum::<u32>();
            counted = first;
            let start = offset - before;
            let skip = want.skip(base + u64::from(start) * GRANULE);
            if run - want.granules >= skip {
                best = Some((start + skip, run));
            }
        }
        best
    }

    /// Returns the first position from `at` on with `row` consecutive whole handles, where the handle before `at` is
    /// not whole; if `row` is 0, the first position with any open part.
    fn row_from(&self, mut at: usize, row: usize, touch: &[u8]) -> Option<usize> {
        if row == 0 {
            let before = at.checked_sub(1).and_then(|last| self.mappings.get(last));
            if before.is_some_and(|last| is_open(last, touch) & BACK != 0) {
                return Some(at);
            }
            let rest = self.mappings.get(at..)?.iter();
            return Some(at + rest.map(|m| is_open(m, touch)).position(|open| open != 0)?);
        }
        loop {
            // If the last handle of a candidate row is not whole, no row can begin at any handle of that candidate.
            let mut last = at + row - 1;
            while is_open(self.mappings.get(last)?, touch) != WHOLE {
                last += row;
            }
            at = last + 1 - row;
            let mut others = self.mappings.get(at..last)?.iter();
            match others.rposition(|mapping| is_open(mapping, touch) != WHOLE) {
                Some(closed) => at += closed + 1,
                None => return Some(at),
            }
        }
    }

    /// Returns the open bytes at the view's end.
    pub(crate) fn open_suffix(&self, borders: &Borders) -> u64 {
        let mut suffix = 0;
        for mapping in self.mappings.iter().rev() {
            if borders.touch()[mapping.handle as usize] & BACK == 0 {
                break;
            }
            let (_, back) = borders.of(mapping.handle);
            suffix += back;
            if back < mapping.granules {
                break;
            }
        }
        u64::from(suffix) * GRANULE
    }

    /// Returns the home ranges of a part of the view, joined where they are adjacent.
    pub(crate) fn home_parts(&self, offset: u32, granules: u32) -> Vec<(u64, u32)> {
        let (mut parts, mut at) = (Vec::new(), 0u32);
        let end = offset + granules;
        for mapping in &self.mappings {
            let (from, to) = (offset.max(at), end.min(at + mapping.granules));
            if from < to {
                push_part(
                    &mut parts,
                    (mapping.home + u64::from(from - at) * GRANULE, to - from),
                );
            }
            at += mapping.granules;
        }
        parts
    }
}

/// Returns the open ends of a mapping's handle, from the table of all handles.
#[inline(always)]
fn is_open(mapping: &Mapping, touch: &[u8]) -> u8 {
    touch.get(mapping.handle as usize).copied().unwrap_or(0)
}

/// Returns the granules of the largest handle.
fn largest(mappings: &[Mapping]) -> u32 {
    let granules = mappings.iter().map(|mapping| mapping.granules);
    granules.max().unwrap_or(0)
}

/// Appends a home range to a list, and extends the last range if the new one continues it.
pub(crate) fn push_part(parts: &mut Vec<(u64, u32)>, (addr, granules): (u64, u32)) {
    match parts.last_mut() {
        Some((last, size)) if *last + u64::from(*size) * GRANULE == addr => *size += granules,
        _ => parts.push((addr, granules)),
    }
}

/// A claim on home memory for a block in a view.
#[derive(Debug, Default)]
pub(crate) struct Aliased {
    /// Home extents in the order of the view, with their earlier state.
    pub parts: Vec<(u32, Vec<Shard>)>,
    pub waits: Vec<PendingWait>,
}

/// A layout that fits the request.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    /// The view to extend, or none for a new one.
    pub base: Option<u64>,
    /// Bytes between the end of the view's handles and the block's start: for an extended view the open suffix (counted
    /// backwards), for a new one the bytes before the open part of its first handle.
    pub back: u64,
    pub skip: u64,
    pub adds: Vec<(u64, u64)>,
    /// Bytes to create after them.
    pub fresh: u64,
    /// Bytes that suffice if they are created before the stitch.
    pub lacking: u64,
}

impl Layout {
    pub(crate) fn cost(&self) -> (u64, usize) {
        (self.fresh, self.adds.len())
    }
}

/// Number of views that are tried for an extension.
pub(crate) const EXTENSIONS: usize = 6;

/// A claimed stitch that waits for its driver calls.
#[derive(Debug)]
pub(crate) struct Stitch {
    pub site: Site,
    /// Held handles to map after the present mappings: (home, bytes, handle).
    pub adds: Vec<(u64, u64, u64)>,
    /// The part of the block's home memory that is already held.
    pub aliased: Aliased,
    /// Home range of the memory to create, claimed.
    pub fresh: Option<Fresh>,
}

/// The place where a stitch maps handles.
#[derive(Debug)]
pub(crate) struct Site {
    /// Base of the view that is extended or created.
    pub base: u64,
    /// The record of a new view's addresses.
    pub range: Option<u32>,
    /// Granules of the view's range.
    pub room: u32,
    /// Offset of the block in the view.
    pub offset: u32,
    /// Address in the view at which to start mapping.
    pub at: u64,
}

impl Stitch {
    /// Returns the number of handles that are mapped into the view.
    pub(crate) fn maps(&self) -> usize {
        self.adds.len() + self.fresh.as_ref().map_or(0, |f| f.sizes.len())
    }
}

/// A failed stitch, by what the driver calls left behind.
pub(crate) enum Unmapped {
    /// Nothing is left of it.
    Undone(DriverError),
    /// New memory could not be created; contains the parts that could not be undone.
    FailedPlan(GrowthFailure),
    /// This many mappings, and the handles of new memory, are left in the view.
    Stuck(DriverError, usize, Vec<u64>),
}

impl Unmapped {
    pub(crate) fn error(&self) -> DriverError {
        match self {
            Unmapped::Undone(error) | Unmapped::Stuck(error, ..) => *error,
            Unmapped::FailedPlan(failure) => failure.error,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::allocator::extent::record::SpaceId;
    use crate::allocator::size::PHYSICAL_GRANULE;

    const UNIT: u32 = (PHYSICAL_GRANULE / GRANULE) as u32;

    /// Finds the smallest run by checking every handle.
    fn by_all(view: &View, base: u64, borders: &Borders, want: &Want) -> Option<(u32, u32)> {
        let (mut runs, mut offset, mut run) = (Vec::new(), 0, 0);
        for mapping in &view.mappings {
            let (front, back) = borders.of(mapping.handle);
            if front < mapping.granules {
                runs.push((offset - run, run + front));
                run = back;
            } else {
                run += mapping.granules;
            }
            offset += mapping.granules;
        }
        runs.push((offset - run, run));
        let fits = |(start, run): (u32, u32)| {
            let skip = want.skip(base + u64::from(start) * GRANULE);
            (run >= want.granules + skip).then_some((start + skip, run))
        };
        runs.into_iter()
            .filter_map(fits)
            .min_by_key(|(_, run)| *run)
    }

    #[test]
    fn the_tightest_run_is_that_of_a_look_at_every_handle() {
        let mut seed = 1u32;
        let mut random = |below: u32| {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 8) % below
        };
        let (mut found, mut none) = (0, 0);
        for round in 0..400 {
            let (mut handles, mut open) = (Handles::default(), Vec::new());
            let (mut mappings, mut home) = (Vec::new(), PHYSICAL_GRANULE);
            for _ in 0..random(60) {
                let granules = UNIT * (1 + random(1 + round % 4));
                let handle = handles.add(home, granules);
                mappings.push(Mapping {
                    home,
                    granules,
                    handle,
                });
                let end = home + u64::from(granules) * GRANULE;
                let mut edge = || u64::from(1 + random(granules / 2)) * GRANULE;
                let (low, high) = ((home, home + edge()), (end - edge(), end));
                match random(6) {
                    0 => {}
                    1 => open.push(low),
                    2 => open.push(high),
                    // Together they may cover the whole handle.
                    3 if low.1 < high.0 => open.extend([low, high]),
                    _ => open.push((home, end)),
                }
                home = end + PHYSICAL_GRANULE;
            }
            let borders = Borders::new(&handles, &open);
            let mut view = View::new(0, 1 << 20, mappings.split_off(mappings.len() / 2));
            view.extend(mappings);
            for _ in 0..8 {
                let granules = 1 + random(12 * UNIT);
                let want = Want {
                    space: SpaceId::Large,
                    stream: 0,
                    granules,
                    align: [1, UNIT / 2][random(2) as usize],
                    requested: u64::from(granules) * GRANULE,
                    single: false,
                    whole: false,
                    views: true,
                };
                let tightest = view.tightest(1 << 40, &borders, &want);
                assert_eq!(
                    tightest,
                    by_all(&view, 1 << 40, &borders, &want),
                    "{want:?}"
                );
                found += u32::from(tightest.is_some());
                none += u32::from(tightest.is_none());
            }
        }
        assert!(found > 500 && none > 500, "{found} found, {none} not");
    }
}
