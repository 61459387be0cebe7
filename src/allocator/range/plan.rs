//! The plan of a commit: which memory it uses, claimed before any driver call, and its outcome.

#![forbid(unsafe_code)]

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range as Span;

use crate::allocator::extent::record::SpaceId;
use crate::allocator::extent::space::Shard;
use crate::allocator::extent::uses::Uses;
use crate::allocator::heap::Heap;
use crate::allocator::physical::{Fresh, GrowthFailure, Release};
use crate::allocator::plan::release::{self, ARENAS};
use crate::allocator::range::{Cell, Granule, Layout, State, Taken};
use crate::error::{Error, InvalidArgument};
use crate::event::Kind;

impl Layout {
    /// Returns the granules that overlap a range of bytes, or with `inside` those that lie in it.
    pub(crate) fn granules(&self, bytes: &Span<u64>, inside: bool) -> Result<Span<u64>, Error> {
        let Span { start, end } = *bytes;
        if start > end || end > self.bytes {
            let (ptr, bytes) = (self.base.wrapping_add(start), end.wrapping_sub(start));
            return Err(InvalidArgument::Range { ptr, bytes }.into());
        }
        let (first, end) = match inside {
            // The last granule may be longer than the bytes that were asked for.
            true => (start.div_ceil(self.granule), end / self.granule),
            false => (start / self.granule, end.div_ceil(self.granule)),
        };
        Ok(first..end.max(first))
    }
}

/// Where the handle of a new cell comes from.
#[derive(Debug)]
pub(crate) enum Source {
    /// A cell of a granule in [`Work::taken`], by its place there.
    Leaving(usize, Cell),
    /// An idle handle of an arena.
    Arena(Release),
    /// The driver.
    Create,
}

/// What became of a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    Unused,
    /// It was unmapped.
    Left,
    /// A call for it failed.
    Doubtful,
}

/// A commit in progress: runs of adjacent cells, and a source for each cell.
#[derive(Debug, Default)]
pub(crate) struct Work {
    pub runs: Vec<Fresh>,
    pub sources: VecDeque<Source>,
    pub used: Vec<(Source, Fate)>,
    taken: Vec<Taken>,
    /// Bytes to obtain from the driver.
    pub create: u64,
}

impl Work {
    /// Returns the sources that are mapped at their old places: address and bytes.
    pub(crate) fn at_home(&self) -> Vec<(u64, u64)> {
        let used = self.used.iter().filter(|(_, fate)| *fate != Fate::Left);
        let sources = used.map(|(source, _)| source).chain(&self.sources);
        let mapped = sources.filter_map(|source| match source {
            Source::Leaving(at, cell) => Some((cell.address, self.taken[*at].size)),
            Source::Arena(release) => Some((release.addr, release.bytes)),
            Source::Create => None,
        });
        mapped.collect()
    }
}

/// Returns the granules of a span without memory.
fn missing(heap: &Heap, id: u64, span: &Span<u64>) -> Vec<u64> {
    let range = heap.ranges.map.get(&id);
    let known = |index: &u64| range.is_some_and(|range| range.granules.contains_key(index));
    span.clone().filter(|index| !known(index)).collect()
}

/// Returns the idle handles of the arenas that have a size.
fn idle(heap: &Heap, bytes: u64) -> impl Iterator<Item = (SpaceId, u64)> {
    let idle = release::releasable(heap, &ARENAS, false).into_iter();
    idle.filter(move |(.., size)| *size == bytes)
        .map(|(space, addr, _)| (space, addr))
}

/// Claims the memory for the granules of a span that have none: granules that have left their ranges, idle handles, and
/// for the rest room to create them.
pub(crate) fn plan(heap: &mut Heap, id: u64, span: &Span<u64>) -> Work {
    let Some(layout) = heap.ranges.map.get(&id).map(|range| range.layout) else {
        return Work::default();
    };
    let fills = missing(heap, id, span);
    let (mut work, mut end) = (Work::default(), 0);
    for stripe in 0..layout.stripes {
        for index in &fills {
            let addr = layout.address(stripe, *index);
            match work.runs.last_mut() {
                Some(run) if addr == end => run.sizes.push(layout.granule),
                _ => work.runs.push(Fresh::at(addr, vec![layout.granule])),
            }
            end = addr + layout.granule;
        }
    }
    for run in &mut work.runs {
        run.stretches = vec![(run.addr, run.bytes())];
    }
    let cells = fills.len() * layout.stripes as usize;
    let bytes = cells as u64 * layout.granule;
    let fits = |of: u64, other: &Layout, index: u64, granule: &Granule| {
        let outside = of != id || !span.contains(&index);
        outside && other.granule == layout.granule && granule.state == State::Leaving
    };
    work.taken = heap
        .ranges
        .take_settled(&heap.streams, Some(id), bytes, fits);
    let taken = work.taken.iter().enumerate();
    let taken = taken.flat_map(|(at, taken)| taken.granule.cells.iter().map(move |c| (at, *c)));
    let taken = taken.map(|(at, cell)| Source::Leaving(at, cell));
    // The last granule may have more cells than are needed.
    work.sources.extend(taken.take(cells));
    if work.sources.len() < cells {
        let found: Vec<_> = idle(heap, layout.granule)
            .take(cells - work.sources.len())
            .collect();
        let claimed = found
            .into_iter()
            .filter_map(|(space, addr)| release::claim(heap, space, addr));
        work.sources.extend(claimed.map(Source::Arena));
    }
    let create = cells.saturating_sub(work.sources.len());
    work.sources.extend((0..create).map(|_| Source::Create));
    work.create = create as u64 * layout.granule;
    heap.ranges.planned += work.create;
    heap.ranges.recount();
    work
}

/// Returns the uses of leaving granules in a span that prevent a commit of the granules: those that are not complete
/// or, for a commit on a stream, not ordered before the stream's next work either.
pub(crate) fn awaited(heap: &Heap, id: u64, span: &Span<u64>, stream: Option<u32>) -> Vec<Shard> {
    let ready = |uses: &Uses| {
        uses.as_slice().iter().all(|u| match stream {
            Some(stream) => heap.streams.ready(stream, u),
            None => heap.streams.is_complete(u),
        })
    };
    let range = heap.ranges.map.get(&id).into_iter();
    let inside = range.flat_map(|range| range.within(span));
    let leaving = inside.filter(|(_, g)| g.state == State::Leaving && !ready(&g.uses));
    let shards = leaving.map(|(_, granule)| Shard {
        granules: 0,
        uses: granule.uses.clone(),
        owner: 0,
        freed: 0,
        mapped: true,
    });
    shards.collect()
}

/// Records the outcome for the sources, and puts back what was not used.
fn finish(heap: &mut Heap, id: u64, work: Work) {
    let Work {
        sources,
        used,
        mut taken,
        create,
        ..
    } = work;
    let unused = sources.into_iter().map(|source| (source, Fate::Unused));
    for (source, fate) in used.into_iter().chain(unused) {
        match (source, fate) {
            (Source::Leaving(at, cell), Fate::Left) => {
                taken[at].granule.cells.retain(|other| *other != cell);
                release::forget_mapping(heap, (cell.address, taken[at].size));
            }
            (Source::Leaving(at, _), Fate::Doubtful) => taken[at].doubtful = true,
            (Source::Arena(release), Fate::Left) => release::remove(heap, &release),
            (Source::Arena(release), Fate::Doubtful) => release::quarantine(heap, release.id),
            (Source::Arena(release), Fate::Unused) => release::revert(heap, release),
            (Source::Leaving(..), Fate::Unused) | (Source::Create, _) => {}
        }
    }
    heap.ranges.planned -= create;
    // A granule of which a part was moved cannot be used any more.
    heap.ranges.put_back(Some(id), taken);
}

/// Commits the granules of a span, which have the new handles of the work, or whose uses were waited for.
pub(crate) fn apply(heap: &mut Heap, id: u64, span: &Span<u64>, work: Work, handles: &[Vec<u64>]) {
    let mut cells: BTreeMap<u64, Vec<Cell>> = BTreeMap::new();
    if let Some(layout) = heap.ranges.map.get(&id).map(|range| range.layout) {
        for (run, handles) in work.runs.iter().zip(handles) {
            let mut address = run.addr;
            for handle in handles {
                let made = cells.entry(layout.index_of(address)).or_default();
                made.push(Cell {
                    address,
                    handle: *handle,
                });
                let (place, memory) = ((address, layout.granule), (SpaceId::Large, true));
                heap.recorder.record_memory(Kind::Map, place, memory);
                address += layout.granule;
            }
        }
    }
    finish(heap, id, work);
    if let Some(range) = heap.ranges.map.get_mut(&id) {
        let leaving = range.within(span);
        let leaving = leaving.filter(|(_, granule)| granule.state == State::Leaving);
        let leaving: Vec<u64> = leaving.map(|(index, _)| index).collect();
        for index in leaving {
            range.set_state(index, State::Committed);
        }
        for (index, cells) in cells {
            let granule = Granule {
                state: State::Committed,
                uses: Uses::None,
                cells,
                seen: false,
            };
            range.put(index, granule);
        }
    }
    heap.ranges.recount();
    heap.count_held();
}

/// Reverts a commit: the range is as before, except for mappings that could not be undone.
pub(crate) fn revert(heap: &mut Heap, id: u64, work: Work, failures: Vec<GrowthFailure>) {
    finish(heap, id, work);
    if let Some(range) = heap.ranges.map.get_mut(&id) {
        let left = failures.into_iter().flat_map(|failure| failure.mapped);
        left.for_each(|(address, _, handle)| range.put_stuck(Cell { address, handle }));
    }
    heap.ranges.recount();
}
