//! What a replay showed: blocks, curves, and memory maps at some instants.

use super::contexts::Contexts;
use super::encode::Columns;
use cualloc::allocator::{BlockState, SegmentInfo};
use cualloc::trace::{Trace, Watched};
use std::collections::{BTreeMap, BTreeSet};

/// The maximum number of pieces in all maps together; after that no more periodic maps are taken.
const MAP_PIECES: usize = 300_000;

/// A block of the trace as the allocator placed it.
pub struct PlacedBlock {
    pub born: usize,
    /// The row from which its memory may be reused; `None` if it lives to the end.
    pub freed: Option<usize>,
    address: u64,
    pub asked: u64,
    pub held: u64,
    /// The index of its stream in the trace.
    stream: usize,
}

/// The memory map after a row.
pub struct Map {
    pub row: usize,
    pub segments: Vec<SegmentInfo>,
    /// Indexes of streams by driver id, where live blocks reveal them.
    streams: BTreeMap<u64, usize>,
}

/// Data collected while a trace is replayed.
pub struct ReplayData<'a> {
    trace: &'a Trace,
    pub blocks: Vec<PlacedBlock>,
    /// Bytes reserved from the driver, after each row.
    pub reserved: Vec<u64>,
    pub maps: Vec<Map>,
    pieces: usize,
    /// Rows after which the periodic maps are taken.
    instants: BTreeSet<usize>,
    peak_row: usize,
    /// The row of the last request that failed in the recorded program.
    failed_row: Option<usize>,
}

impl<'a> ReplayData<'a> {
    pub fn new(trace: &'a Trace, maps: u16) -> ReplayData<'a> {
        let rows = trace.rows().len();
        let distances = 1..=u128::from(maps);
        let instants = distances.map(|n| (rows as u128 * n / (u128::from(maps) + 1)) as usize);
        ReplayData {
            trace,
            blocks: Vec::with_capacity(trace.allocations().len()),
            reserved: Vec::with_capacity(rows),
            maps: Vec::new(),
            pieces: 0,
            instants: instants.collect(),
            peak_row: trace.peak_row(),
            failed_row: trace.failed_requests().last().map(|(row, _)| row),
        }
    }

    /// Records the outcome of a row.
    pub fn watch(&mut self, seen: &Watched<'_>) {
        let row = self.trace.rows()[seen.row];
        if let Some(block) = seen.block {
            let outline = &self.trace.allocations()[row.id];
            let streams = self.trace.streams();
            self.blocks.push(PlacedBlock {
                born: seen.row,
                freed: outline.released,
                address: block.ptr(),
                asked: outline.bytes,
                held: block.size(),
                stream: streams.partition_point(|number| *number < outline.stream),
            });
        }
        let must = seen.row == self.peak_row
            || Some(seen.row) == self.failed_row
            || seen.error.is_some()
            || seen.row + 1 == self.trace.rows().len();
        if must || (self.instants.contains(&seen.row) && self.pieces < MAP_PIECES) {
            let (stats, segments) = seen.allocator.stats_and_snapshot();
            self.reserved.push(stats.all.reserved.current);
            self.pieces += segments.iter().map(|s| s.blocks.len()).sum::<usize>();
            let streams = self.map_streams(seen.row, &segments);
            self.maps.push(Map {
                row: seen.row,
                segments,
                streams,
            });
        } else {
            self.reserved
                .push(seen.allocator.stats().all.reserved.current);
        }
    }

    /// Maps driver ids to streams of the trace by means of live blocks.
    fn map_streams(&self, row: usize, segments: &[SegmentInfo]) -> BTreeMap<u64, usize> {
        let shown = self.blocks.iter();
        let shown = shown.filter(|block| block.freed.is_none_or(|freed| freed > row));
        let by_address: BTreeMap<u64, usize> =
            shown.map(|block| (block.address, block.stream)).collect();
        let blocks = segments.iter().flat_map(|segment| &segment.blocks);
        let live = blocks.filter(|block| block.state == BlockState::Live);
        live.filter_map(|block| Some((block.stream?, *by_address.get(&block.address)?)))
            .collect()
    }

    /// Returns the number of rows replayed, including a failed one.
    pub fn rows(&self) -> usize {
        self.reserved.len()
    }

    /// Returns all data as columns.
    pub fn columns(&self, contexts: &Contexts) -> Columns {
        let mut columns = Columns::default();
        let end = self.rows() as u64;
        let blocks = || self.blocks.iter();
        columns.add("born", blocks().map(|block| block.born as u64));
        let freed = |block: &PlacedBlock| block.freed.map_or(end, |row| end.min(row as u64));
        columns.add("life", blocks().map(|b| freed(b) - b.born as u64));
        columns.add("address", blocks().map(|block| block.address));
        columns.add("asked", blocks().map(|block| block.asked));
        columns.add("held", blocks().map(|block| block.held));
        columns.add("stream", blocks().map(|block| block.stream as u64));
        let ids = 0..self.blocks.len();
        columns.add("context", ids.map(|id| contexts.number(self.trace, id)));
        // Segments are created and released rarely.
        let changes: Vec<usize> = (0..self.rows())
            .filter(|row| *row == 0 || self.reserved[*row] != self.reserved[*row - 1])
            .collect();
        columns.add("reserved.row", changes.iter().map(|row| *row as u64));
        columns.add("reserved", changes.iter().map(|row| self.reserved[*row]));
        self.add_maps(&mut columns);
        columns
    }

    fn add_maps(&self, columns: &mut Columns) {
        let maps = || self.maps.iter();
        columns.add("map.row", maps().map(|map| map.row as u64));
        columns.add("map.segments", maps().map(|map| map.segments.len() as u64));
        let segments = || maps().flat_map(|map| &map.segments);
        columns.add("segment.address", segments().map(|s| s.address));
        columns.add("segment.size", segments().map(|s| s.size));
        let kind = |s: &SegmentInfo| {
            u64::from(s.small) | u64::from(s.mapped) << 1 | u64::from(s.view) << 2
        };
        columns.add("segment.kind", segments().map(kind));
        columns.add("segment.blocks", segments().map(|s| s.blocks.len() as u64));
        let blocks = || {
            maps().flat_map(|map| {
                let blocks = map.segments.iter().flat_map(|segment| {
                    let blocks = segment.blocks.iter();
                    blocks.map(|block| (segment.address, block))
                });
                blocks.map(move |(begin, block)| (map, block.address - begin, block))
            })
        };
        columns.add("piece.offset", blocks().map(|(_, offset, _)| offset));
        columns.add("piece.size", blocks().map(|(.., block)| block.size));
        columns.add("piece.asked", blocks().map(|(.., block)| block.requested));
        columns.add("piece.state", blocks().map(|(.., b)| state(b.state)));
        // Streams are numbered from 1; 0 is none, and an unknown stream has the number after the last.
        let unknown = self.trace.streams().len();
        let number = |map: &Map, id: Option<u64>| {
            id.map_or(0, |id| {
                map.streams.get(&id).copied().unwrap_or(unknown) as u64 + 1
            })
        };
        columns.add(
            "piece.stream",
            blocks().map(|(m, _, b)| number(m, b.stream)),
        );
        let waits = |map, pending: &[u64]| number(map, pending.first().copied());
        columns.add(
            "piece.pending",
            blocks().map(|(m, _, b)| waits(m, &b.pending)),
        );
    }
}

fn state(state: BlockState) -> u64 {
    match state {
        BlockState::Live => 0,
        BlockState::Free => 1,
        BlockState::Pending => 2,
        BlockState::Aliased => 3,
        BlockState::Quarantined => 4,
        _ => 5,
    }
}
