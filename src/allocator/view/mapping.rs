//! Views: second layouts of physical memory.

#![forbid(unsafe_code)]

use crate::driver::DriverError;

use crate::allocator::extent::handle::{BACK, Borders, Handles};
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

/// See the module's text.
#[derive(Debug)]
pub(crate) struct View {
    /// The record of the view's address range.
    pub range: u32,
    /// Granules of that range.
    pub room: u32,
    /// The handles in it, from its base on, without gaps.
    pub mappings: Vec<Mapping>,
    /// Granules of the handles.
    pub granules: u32,
    /// Calls under way that keep it.
    pub calls: u32,
    /// Where the blocks lie: granules from the base, to their start and to their end.
    pub blocks: Vec<(u32, u32)>,
    /// Last uses through the view's addresses, of blocks that were freed.
    pub uses: Uses,
    /// When it last gave a block (a count of blocks in views).
    pub stamp: u64,
    /// A stitch is extending it.
    pub busy: bool,
    /// A failed roll-back left mappings in an unknown state: not used any more, only unmapped.
    pub dead: bool,
}

/// Free bytes at home that a request may use.
#[derive(Debug)]
pub(crate) struct Openings {
    /// Sorted intervals that do not touch.
    pub ranges: Vec<(u64, u64)>,
    /// How far each handle is open.
    pub borders: Borders,
    /// There are more behind waits.
    pub more: bool,
}

impl Openings {
    /// What is ready, or all that can be reached.
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

    /// The free bytes in the pieces that may be used, as sorted intervals that do not touch.
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
    /// Whether nobody can reach memory through it any more.
    pub(crate) fn is_over(&self, streams: &Streams) -> bool {
        self.blocks.is_empty()
            && self.calls == 0
            && self.uses.as_slice().iter().all(|u| streams.complete(u))
    }

    /// A view of these handles from the base of its range on, whose record this is.
    pub(crate) fn new(range: u32, room: u32, mappings: Vec<Mapping>) -> View {
        View {
            range,
            room,
            granules: mappings.iter().map(|mapping| mapping.granules).sum(),
            mappings,
            calls: 0,
            blocks: Vec::new(),
            uses: Uses::None,
            stamp: 0,
            busy: false,
            dead: false,
        }
    }

    /// The smallest run that holds a request, goes over more than one handle or touches an end of
    /// one, and is open at home: where the request begins in it, and its length, in granules.
    pub(crate) fn tightest(&self, base: u64, borders: &Borders, want: &Want) -> Option<(u32, u32)> {
        let mut best: Option<(u32, u32)> = None;
        let (mut offset, mut run) = (0u32, 0u32);
        let mut found = |end: u32, run: u32| {
            if run < want.granules || best.is_some_and(|(_, length)| run >= length) {
                return;
            }
            let start = end - run;
            let skip = want.skip(base + u64::from(start) * GRANULE);
            if run - want.granules >= skip {
                best = Some((start + skip, run));
            }
        };
        for mapping in &self.mappings {
            let (cache, back) = borders.of(mapping.handle);
            if cache < mapping.granules {
                found(offset + cache, run + cache);
                run = back;
            } else {
                run += mapping.granules;
            }
            offset += mapping.granules;
        }
        found(offset, run);
        best
    }

    /// Open bytes at the view's end.
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

    /// The home ranges of a part of the view, as few as there can be.
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

/// Adds a home range to a list; one that continues the last range extends it.
pub(crate) fn push_part(parts: &mut Vec<(u64, u32)>, (addr, granules): (u64, u32)) {
    match parts.last_mut() {
        Some((last, size)) if *last + u64::from(*size) * GRANULE == addr => *size += granules,
        _ => parts.push((addr, granules)),
    }
}

/// A claim on home memory for a block in a view.
#[derive(Debug, Default)]
pub(crate) struct Aliased {
    /// Home extents in the order of the view, with what they were.
    pub parts: Vec<(u32, Vec<Shard>)>,
    pub waits: Vec<PendingWait>,
}

/// A layout that would hold the request.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    /// The view to extend, or none for a new one.
    pub base: Option<u64>,
    /// Bytes between the end of the view's handles and the block's start: of an extended view the
    /// open suffix (counted backwards), of a new one what its first handle has before its open part.
    pub back: u64,
    pub skip: u64,
    pub adds: Vec<(u64, u64)>,
    /// Bytes to create behind them,
    pub fresh: u64,
    /// or, if they are made before, so few.
    pub lacking: u64,
    /// They are created in handles of this many bytes at least.
    pub fresh_handle: u64,
}

impl Layout {
    pub(crate) fn cost(&self) -> (u64, usize) {
        (self.fresh, self.adds.len())
    }
}

/// Views that are tried for an extension.
pub(crate) const EXTENSIONS: usize = 6;

/// A stitch that is claimed and waits for its driver calls.
#[derive(Debug)]
pub(crate) struct Stitch {
    pub site: Site,
    /// Held handles to map behind what is there: (home, bytes, handle).
    pub adds: Vec<(u64, u64, u64)>,
    /// Home memory of the block that is held already.
    pub aliased: Aliased,
    /// Home range of memory to create, claimed.
    pub fresh: Option<Fresh>,
}

/// Where a stitch maps.
#[derive(Debug)]
pub(crate) struct Site {
    /// The view that is extended, or begins.
    pub base: u64,
    /// The record of a new view's addresses.
    pub range: Option<u32>,
    /// Granules of the view's range.
    pub room: u32,
    /// Where the block begins in the view.
    pub offset: u32,
    /// Address in the view from which to map.
    pub at: u64,
}

impl Stitch {
    /// Handles that are mapped into the view.
    pub(crate) fn maps(&self) -> usize {
        self.adds.len() + self.fresh.as_ref().map_or(0, |f| f.sizes.len())
    }
}

/// How a stitch failed in the driver.
pub(crate) enum Unmapped {
    /// Undone: nothing is left of it.
    Undone(DriverError),
    /// New memory could not be made; what is left of that.
    NotMade(GrowthFailure),
    /// Failed with this many mappings, and the handles of new memory, left in the view.
    Stuck(DriverError, usize, Vec<u64>),
}

impl Unmapped {
    pub(crate) fn error(&self) -> DriverError {
        match self {
            Unmapped::Undone(error) | Unmapped::Stuck(error, ..) => *error,
            Unmapped::NotMade(failure) => failure.error,
        }
    }
}
