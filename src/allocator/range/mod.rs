//! Growable ranges: addresses that are reserved once, whose memory is committed and decommitted in stream order.
//!
//! A range is divided into granules. A committed granule has one handle of the granule's size per stripe, each mapped at
//! a *cell*. A decommitted granule is *leaving*: it stays mapped until the host has observed that its uses are complete,
//! because no mapping is removed earlier. Until then a commit of the same granule only changes its state back. Once its
//! uses are complete, its handles serve a commit of any range, or become free memory of the large arena, or return to the
//! driver:
//!
//! ```text
//!            commit                    decommit                   uses complete
//!   (none) ----------->  committed  ------------->  leaving  ----------------------> another range, the large arena,
//!                            ^                         |                             or the driver
//!                            +-------------------------+
//!                              commit, behind its uses
//! ```
//!
//! The data here belongs to the heap and is under its lock. The driver calls are in [`commit`], [`settle`] and [`run`];
//! a call that makes them for a range claims the range, and other calls that need it wait.

pub(crate) mod commit;
pub(crate) mod plan;
pub(crate) mod run;
pub(crate) mod settle;

use std::collections::BTreeMap;
use std::ops::Range as Span;

use crate::allocator::extent::invariant::{holds, same};
use crate::allocator::extent::uses::{Use, Uses};
use crate::allocator::stream::Streams;
use crate::allocator::stream::slot::StreamKey;
use crate::error::Error;

/// Addresses of a range: `stripes` parts of `bytes` each, `stride` bytes apart. Granules are counted within one stripe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    pub base: u64,
    pub bytes: u64,
    pub stripes: u64,
    pub stride: u64,
    pub granule: u64,
}

impl Layout {
    /// Returns the bytes from the first address to the last.
    pub(crate) fn span(&self) -> u64 {
        self.stride * (self.stripes - 1) + self.bytes
    }

    /// Returns the bytes of one granule in all stripes.
    fn row(&self) -> u64 {
        self.granule * self.stripes
    }

    fn address(&self, stripe: u64, index: u64) -> u64 {
        self.base + stripe * self.stride + index * self.granule
    }

    /// Returns the granule that an address of the range lies in.
    fn index_of(&self, address: u64) -> u64 {
        (address - self.base) % self.stride.max(1) / self.granule
    }
}

/// A handle, and the address at which it is mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cell {
    pub address: u64,
    pub handle: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    Committed,
    /// Decommitted, and mapped until its uses are complete.
    Leaving,
    /// What a failed driver call left behind: cells that may be mapped, for which the calls are repeated.
    Stuck,
}

/// A granule with memory.
#[derive(Debug)]
pub(crate) struct Granule {
    pub state: State,
    /// Uses before the last decommit, as far as they may be incomplete.
    pub uses: Uses,
    /// One per stripe, unless it is stuck.
    pub cells: Vec<Cell>,
    /// Whether a check for idle memory has seen it since it was decommitted.
    pub seen: bool,
}

/// A use of granules by a stream, from `first` up to `end`, which lasts until they are decommitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Recorded {
    first: u64,
    end: u64,
    stream: u32,
}

/// A range; see the module documentation.
#[derive(Debug)]
pub(crate) struct Range {
    pub layout: Layout,
    /// Granules with memory, by their index.
    granules: BTreeMap<u64, Granule>,
    recorded: Vec<Recorded>,
    /// The streams that commits named. If the range is ended without naming a stream, the work of all of them counts as
    /// its last uses.
    users: Vec<u32>,
    /// Whether a call makes driver calls for the range.
    pub working: bool,
    /// Whether it is suspended, or about to be.
    pub suspended: bool,
    /// Whether its handles are suspended, so that none of its memory is present.
    pub away: bool,
    /// Whether its owner has ended it: it is removed with its last granule.
    pub released: bool,
    /// Bytes of the granules in each state.
    bytes: [u64; 3],
}

impl Range {
    pub(crate) fn new(layout: Layout) -> Range {
        Range {
            layout,
            granules: BTreeMap::new(),
            recorded: Vec::new(),
            users: Vec::new(),
            working: false,
            suspended: false,
            away: false,
            released: false,
            bytes: [0; 3],
        }
    }

    pub(crate) fn bytes(&self, state: State) -> u64 {
        self.bytes[state as usize]
    }

    fn held(&self) -> u64 {
        self.bytes.iter().sum()
    }

    pub(crate) fn granules(&self) -> impl Iterator<Item = (u64, &Granule)> {
        self.granules
            .iter()
            .map(|(index, granule)| (*index, granule))
    }

    /// Returns the granules with memory in a span of granules.
    fn within(&self, span: &Span<u64>) -> impl Iterator<Item = (u64, &Granule)> {
        let inside = self.granules.range(span.clone());
        inside.map(|(index, granule)| (*index, granule))
    }

    /// Whether calls other than its suspension and its end may use the range and its memory.
    pub(crate) fn is_open(&self) -> bool {
        !self.working && !self.suspended
    }

    /// Adds a granule that has no memory yet.
    pub(crate) fn put(&mut self, index: u64, granule: Granule) {
        let bytes = granule.cells.len() as u64 * self.layout.granule;
        self.bytes[granule.state as usize] += bytes;
        // A failed commit may add several cells to a granule, one after another.
        match self.granules.get_mut(&index) {
            Some(known) => known.cells.extend(granule.cells),
            None => drop(self.granules.insert(index, granule)),
        }
    }

    pub(crate) fn take(&mut self, index: u64) -> Option<Granule> {
        let granule = self.granules.remove(&index)?;
        self.bytes[granule.state as usize] -= granule.cells.len() as u64 * self.layout.granule;
        Some(granule)
    }

    fn set_state(&mut self, index: u64, state: State) {
        if let Some(granule) = self.take(index) {
            self.put(index, Granule { state, ..granule });
        }
    }

    /// Adds a cell that a failed call may have left mapped.
    pub(crate) fn put_stuck(&mut self, cell: Cell) {
        let granule = Granule {
            state: State::Stuck,
            uses: Uses::None,
            cells: vec![cell],
            seen: false,
        };
        self.put(self.layout.index_of(cell.address), granule);
    }

    /// Records that a commit named a stream.
    pub(crate) fn add_user(&mut self, stream: u32, streams: &mut Streams) {
        if !self.users.contains(&stream) {
            self.users.push(stream);
            streams[stream].live += 1;
        }
    }

    /// Records a use of granules by a stream.
    pub(crate) fn record(&mut self, span: Span<u64>, stream: u32, streams: &mut Streams) {
        let (mut first, mut end) = (span.start, span.end);
        let before = self.recorded.len();
        self.recorded.retain(|known| {
            let joins = known.stream == stream && known.first <= end && first <= known.end;
            if joins {
                (first, end) = (first.min(known.first), end.max(known.end));
            }
            !joins
        });
        streams[stream].live += 1;
        streams[stream].live -= (before - self.recorded.len()) as u64;
        self.recorded.push(Recorded { first, end, stream });
    }

    /// Decommits the committed granules of a span: by a stream, or at the end of the range by every stream that a commit
    /// named. Returns the streams that need a marker.
    pub(crate) fn decommit(
        &mut self,
        span: Span<u64>,
        stream: Option<u32>,
        streams: &mut Streams,
    ) -> Vec<(u32, StreamKey)> {
        let committed = self.within(&span);
        let committed = committed.filter(|(_, granule)| granule.state == State::Committed);
        let indices: Vec<u64> = committed.map(|(index, _)| index).collect();
        let mut by: Vec<u32> = stream.map_or_else(|| self.users.clone(), |stream| vec![stream]);
        let (own, row) = (by.len(), self.layout.row());
        let mut used: Vec<(u32, u64)> = Vec::new();
        for index in indices {
            by.truncate(own);
            let recorded = self.recorded.iter();
            let recorded = recorded.filter(|known| (known.first..known.end).contains(&index));
            by.extend(recorded.map(|known| known.stream));
            let Some(granule) = self.granules.get_mut(&index) else {
                continue;
            };
            let mut uses: Vec<Use> = by.iter().map(|s| streams.use_of_free(*s, None)).collect();
            // The last marker of a retired stream covers its uses.
            for u in uses.iter().filter(|u| u.ticket == streams[u.stream].open) {
                match used.iter_mut().find(|(known, _)| *known == u.stream) {
                    Some((_, bytes)) => *bytes += row,
                    None => used.push((u.stream, row)),
                }
            }
            let earlier = granule.uses.as_slice().iter();
            uses.extend(earlier.filter(|u| !streams.is_complete(u)));
            granule.uses = Uses::collect(uses);
            granule.seen = false;
            self.set_state(index, State::Leaving);
        }
        self.forget_uses(streams);
        let counted = used.into_iter().map(|(stream, bytes)| {
            streams.count_use(stream, bytes);
            (stream, streams[stream].key)
        });
        counted.collect()
    }

    /// Forgets the recorded uses of spans that have no committed granule. If the whole range has none, also forgets the
    /// streams that commits named.
    fn forget_uses(&mut self, streams: &mut Streams) {
        let granules = &self.granules;
        self.recorded.retain(|known| {
            let mut inside = granules.range(known.first..known.end);
            let kept = inside.any(|(_, granule)| granule.state == State::Committed);
            streams[known.stream].live -= u64::from(!kept);
            kept
        });
        if self.bytes(State::Committed) == 0 {
            for stream in self.users.drain(..) {
                streams[stream].live -= 1;
            }
        }
    }

    /// Whether a granule is leaving and the host observed that its uses are complete.
    fn is_settled(granule: &Granule, streams: &Streams) -> bool {
        let mut uses = granule.uses.as_slice().iter();
        granule.state == State::Leaving && uses.all(|u| streams.is_complete(u))
    }

    /// Replaces the handle of a cell, which a resume has created again.
    pub(crate) fn set_handle(&mut self, address: u64, handle: u64) {
        let granule = self.granules.get_mut(&self.layout.index_of(address));
        let cells = granule.into_iter().flat_map(|granule| &mut granule.cells);
        for cell in cells.filter(|cell| cell.address == address) {
            cell.handle = handle;
        }
    }

    /// Removes the leaving granules, and returns the addresses of their cells, sorted.
    pub(crate) fn drop_leaving(&mut self) -> Vec<u64> {
        let unused = self.granules.iter();
        let unused = unused.filter(|(_, granule)| granule.state == State::Leaving);
        let unused: Vec<u64> = unused.map(|(index, _)| *index).collect();
        let taken = unused.into_iter().filter_map(|index| self.take(index));
        let cells = taken.flat_map(|granule| granule.cells);
        let mut gone: Vec<u64> = cells.map(|cell| cell.address).collect();
        gone.sort_unstable();
        gone
    }
}

/// A granule without incomplete uses that a call took out of its range to unmap it.
#[derive(Debug)]
pub(crate) struct Taken {
    pub range: u64,
    index: u64,
    pub granule: Granule,
    /// Bytes of each of its cells, and of those that were taken.
    pub size: u64,
    bytes: u64,
    /// Whether a call for one of its cells failed.
    pub doubtful: bool,
}

impl Taken {
    /// Returns its cells: address and bytes.
    pub(crate) fn places(&self) -> impl Iterator<Item = (u64, u64)> {
        self.granule
            .cells
            .iter()
            .map(|cell| (cell.address, self.size))
    }
}

/// The ranges of an allocator.
#[derive(Debug, Default)]
pub(crate) struct Ranges {
    pub map: BTreeMap<u64, Range>,
    made: u64,
    /// Bytes of all ranges that are present, and those that commits in progress will add. They count towards the limit.
    pub held: u64,
    /// Bytes of leaving granules that are present.
    pub leaving: u64,
    /// Bytes that commits in progress will obtain from the driver.
    pub planned: u64,
}

impl Ranges {
    pub(crate) fn add(&mut self, layout: Layout) -> u64 {
        self.made += 1;
        self.map.insert(self.made, Range::new(layout));
        self.made
    }

    /// Updates the sums after a change.
    pub(crate) fn recount(&mut self) {
        let present = || self.map.values().filter(|range| !range.away);
        self.held = self.planned + present().map(Range::held).sum::<u64>();
        self.leaving = present().map(|range| range.bytes(State::Leaving)).sum();
    }

    /// Returns the ids of the ranges that their owners have not ended.
    pub(crate) fn live_ids(&self) -> impl Iterator<Item = u64> {
        let live = self.map.iter().filter(|(_, range)| !range.released);
        live.map(|(id, _)| *id)
    }

    /// Returns the number of these ranges, and the bytes of their memory, if there are any.
    pub(crate) fn count_live(&self) -> Option<(u64, u64)> {
        let live = || self.map.values().filter(|range| !range.released);
        let bytes = live().map(Range::held).sum();
        (live().count() > 0).then(|| (live().count() as u64, bytes))
    }

    /// Returns a range that its owner has not ended.
    pub(crate) fn live(&mut self, id: u64) -> Result<&mut Range, Error> {
        let range = self.map.get_mut(&id).filter(|range| !range.released);
        range.ok_or(Error::Closed)
    }

    /// Whether a range was ended, so that its suspended memory will not be resumed.
    pub(crate) fn is_unused(&self, id: u64) -> bool {
        self.map.get(&id).is_none_or(|range| range.released)
    }

    /// Takes granules that can be unmapped out of their ranges: leaving ones whose uses are complete, up to a number of
    /// bytes, and all stuck ones. Claims their ranges, except for `own`, which the caller has claimed.
    pub(crate) fn take_settled(
        &mut self,
        streams: &Streams,
        own: Option<u64>,
        most: u64,
        wanted: impl Fn(u64, &Layout, u64, &Granule) -> bool,
    ) -> Vec<Taken> {
        let (mut taken, mut left) = (Vec::new(), most);
        for (id, range) in &mut self.map {
            // Ranges may have many granules, and usually all of them are committed.
            if range.held() == range.bytes(State::Committed)
                || (!range.is_open() && own != Some(*id))
            {
                continue;
            }
            let layout = range.layout;
            let found = range.granules.iter().filter(|(index, granule)| {
                let settled = granule.state == State::Stuck || Range::is_settled(granule, streams);
                settled && wanted(*id, &layout, **index, granule)
            });
            let found: Vec<(u64, State)> =
                found.map(|(at, granule)| (*at, granule.state)).collect();
            for (index, state) in found {
                if left == 0 && state == State::Leaving {
                    continue;
                }
                let Some(granule) = range.take(index) else {
                    continue;
                };
                range.working = true;
                let bytes = granule.cells.len() as u64 * layout.granule;
                left = left.saturating_sub(bytes);
                self.planned += bytes;
                taken.push(Taken {
                    range: *id,
                    index,
                    size: layout.granule,
                    bytes,
                    doubtful: granule.state == State::Stuck,
                    granule,
                });
            }
        }
        self.recount();
        taken
    }

    /// Puts back what remains of granules, whose other cells were unmapped, and ends the claims of their ranges, except
    /// for that of `own`.
    pub(crate) fn put_back(&mut self, own: Option<u64>, taken: Vec<Taken>) {
        for Taken {
            range: id,
            index,
            mut granule,
            doubtful,
            bytes,
            ..
        } in taken
        {
            self.planned -= bytes;
            let Some(range) = self.map.get_mut(&id) else {
                continue;
            };
            range.working &= own == Some(id);
            if doubtful || granule.cells.len() as u64 != range.layout.stripes {
                granule.state = State::Stuck;
            }
            if !granule.cells.is_empty() {
                range.put(index, granule);
            }
        }
        self.recount();
    }

    /// Records that a check for idle memory has seen the leaving granules.
    pub(crate) fn mark_checked(&mut self) {
        let granules = self
            .map
            .values_mut()
            .flat_map(|range| range.granules.values_mut());
        granules.for_each(|granule| granule.seen |= granule.state == State::Leaving);
    }

    /// Removes the ranges that were ended and have no memory left.
    pub(crate) fn take_ended(&mut self) -> Vec<(u64, Layout)> {
        let mut ended = Vec::new();
        self.map.retain(|id, range| {
            let goes = range.released && range.is_open() && range.granules.is_empty();
            ended.extend(goes.then_some((*id, range.layout)));
            !goes
        });
        ended
    }

    /// Returns the incomplete uses of leaving granules, with the bytes of each granule.
    pub(crate) fn pending<'a>(
        &'a self,
        streams: &'a Streams,
    ) -> impl Iterator<Item = (&'a Use, u64)> {
        let present = self.map.values().filter(|range| !range.away);
        let granules = present.flat_map(|range| {
            let leaving = range.granules.values();
            leaving
                .filter(|granule| granule.state == State::Leaving)
                .map(|g| (g, range.layout.row()))
        });
        granules.flat_map(move |(granule, bytes)| {
            let uses = granule.uses.as_slice().iter();
            uses.filter(|u| !streams.is_complete(u))
                .map(move |u| (u, bytes))
        })
    }

    /// Returns the number of uses that keep the slot of a stream.
    pub(crate) fn uses_of(&self, stream: u32) -> u64 {
        let of_range = |range: &Range| {
            let users = range.users.iter().filter(|user| **user == stream);
            let recorded = range.recorded.iter().filter(|known| known.stream == stream);
            users.count() + recorded.count()
        };
        self.map.values().map(of_range).sum::<usize>() as u64
    }

    /// Checks the counters and that each granule has its cells.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let (mut held, mut leaving) = (self.planned, 0);
        for range in self.map.values() {
            let layout = &range.layout;
            let mut bytes = [0; 3];
            for (index, granule) in &range.granules {
                bytes[granule.state as usize] += granule.cells.len() as u64 * layout.granule;
                holds(
                    "a granule with memory has a cell",
                    !granule.cells.is_empty(),
                )?;
                if granule.state != State::Stuck {
                    let cells = (0..layout.stripes).map(|stripe| layout.address(stripe, *index));
                    let known = granule.cells.iter().map(|cell| cell.address);
                    holds("a granule has a cell in each stripe", known.eq(cells))?;
                }
            }
            holds("a range counts its bytes by state", bytes == range.bytes)?;
            if !range.away {
                held += range.held();
                leaving += range.bytes(State::Leaving);
            }
        }
        same("bytes of ranges", held, self.held)?;
        same("leaving bytes of ranges", leaving, self.leaving)
    }
}
