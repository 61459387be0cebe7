//! The trace file: reading, validation, and properties computed from the rows alone.

use std::collections::HashMap;
use std::fmt;
use std::io::{self, BufRead, Write};

use super::error::{HEADER, STREAM_LIMIT, TraceError, TraceFault};
use super::lines::Lines;
use crate::event::names::Names;

/// The operation of a row on its block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Op {
    /// `a`: the block is allocated.
    Allocate,
    /// `f`: the owner frees the block.
    Free,
    /// `c`: the last use of the freed block on another stream has completed.
    Complete,
    /// `oom`: a request failed. It has no block, so [`Row::id`] is 0 and meaningless.
    Oom,
}

/// One row of a trace.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Row {
    /// The operation.
    pub op: Op,
    /// The number of the stream, not an index: numbers may have gaps.
    pub stream: u32,
    /// Which block; blocks are numbered from 0 in order of allocation.
    pub id: usize,
    /// Bytes requested, before any rounding; 0 for [`Op::Free`] and [`Op::Complete`].
    pub bytes: u64,
}

impl Row {
    /// The row with unused fields set to 0.
    pub(crate) fn normalized(mut self) -> Row {
        match self.op {
            Op::Allocate => {}
            Op::Free | Op::Complete => self.bytes = 0,
            Op::Oom => self.id = 0,
        }
        self
    }
}

/// Formats the row as a line of a trace, without its end.
impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let op = match self.op {
            Op::Allocate => "a",
            Op::Free => "f",
            Op::Complete => "c",
            Op::Oom => "oom",
        };
        write!(f, "{op},{},{},{}", self.id, self.bytes, self.stream)
    }
}

/// One block of a trace, from its allocation to its release.
#[doc(hidden)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct Allocation {
    /// Bytes requested, before any rounding; never 0.
    pub bytes: u64,
    /// The number of the stream it belongs to.
    pub stream: u32,
    /// Index in [`Trace::rows`] of its [`Op::Allocate`].
    pub allocated: usize,
    /// Index in [`Trace::rows`] of its release point, from which its memory may be reused: its [`Op::Complete`] if it
    /// has one, else its [`Op::Free`]; `None` if it lives to the end.
    pub released: Option<usize>,
}

/// A valid trace: every rule of the format has been checked.
#[derive(Clone, Debug)]
pub struct Trace {
    name: String,
    rows: Vec<Row>,
    allocations: Vec<Allocation>,
    streams: Vec<u32>,
    requested_peak: u64,
    contexts: Vec<String>,
    /// For each block, the index of its context plus one, or 0 for none; empty if no block has a context.
    context_of: Vec<u32>,
}

impl Trace {
    /// The first line of every trace.
    pub const HEADER: &str = HEADER;

    /// The failed requests: the row index and the size of each.
    pub fn failed_requests(&self) -> impl Iterator<Item = (usize, u64)> + '_ {
        let rows = self.rows().iter().enumerate();
        let failed = rows.filter(|(_, row)| row.op == Op::Oom);
        failed.map(|(index, row)| (index, row.bytes))
    }

    /// Returns what the [`requested_peak`](Self::requested_peak) would be had the failed requests succeeded, each in
    /// addition to the blocks live at its time.
    pub fn required_peak(&self) -> u64 {
        let rows = self.rows().iter().zip(self.live_bytes());
        let failed = rows.filter(|(row, _)| row.op == Op::Oom);
        let required = failed.map(|(row, live)| live.saturating_add(row.bytes));
        required.max().unwrap_or(0).max(self.requested_peak())
    }

    /// Reads a trace as text; lines end in LF or CRLF, the last one may end with the file. A byte order
    /// mark is skipped.
    ///
    /// Decompressing files is left to the caller: any [`BufRead`] is accepted.
    ///
    /// # Errors
    /// The first violation of the format, with its line.
    pub fn read(name: impl Into<String>, reader: impl BufRead) -> Result<Trace, TraceError> {
        let mut lines = Lines::new(reader);
        match lines.next_line()? {
            Some(line) if line == HEADER.as_bytes() => {}
            found => {
                let found = String::from_utf8_lossy(found.unwrap_or_default()).into_owned();
                return Err(TraceFault::Header { found }.at(1));
            }
        }
        let mut rows = Vec::new();
        let mut blocks: Vec<Block> = Vec::new();
        while let Some(line) = lines.next_line()? {
            let row = parse_row(line).and_then(|row| note(&mut blocks, rows.len(), row));
            let row = row.map_err(|fault| fault.at(Trace::line_of(rows.len())))?;
            rows.push(row);
        }
        Trace::finish(name.into(), rows, blocks)
    }

    /// Creates a trace from rows that do not come from a file. Fields that the format does not define for a row (the
    /// bytes of a free) are ignored.
    ///
    /// # Errors
    /// The first violation of the format, with the line that it would be in.
    pub fn from_rows(
        name: impl Into<String>,
        rows: impl IntoIterator<Item = Row>,
    ) -> Result<Trace, TraceError> {
        let mut checked = Vec::new();
        let mut blocks: Vec<Block> = Vec::new();
        for row in rows {
            let row = note(&mut blocks, checked.len(), row.normalized());
            let row = row.map_err(|fault| fault.at(Trace::line_of(checked.len())))?;
            checked.push(row);
        }
        Trace::finish(name.into(), checked, blocks)
    }

    fn finish(name: String, rows: Vec<Row>, blocks: Vec<Block>) -> Result<Trace, TraceError> {
        let allocations: Vec<Allocation> = blocks.into_iter().map(|block| block.outline).collect();
        let requested_peak = requested_peak(&rows, &allocations)?;
        let mut streams: Vec<u32> = allocations.iter().map(|block| block.stream).collect();
        streams.sort_unstable();
        streams.dedup();
        Ok(Trace {
            name,
            rows,
            allocations,
            streams,
            requested_peak,
            contexts: Vec::new(),
            context_of: Vec::new(),
        })
    }

    /// Sets the context that each block, by id, was allocated in: a number whose name `name` returns; numbers without a
    /// name mean none. Numbers with the same name are one context.
    pub(crate) fn with_contexts(
        mut self,
        of: &[u32],
        name: impl Fn(u32) -> Option<String>,
    ) -> Trace {
        let mut known: HashMap<u32, u32> = HashMap::new();
        let mut names = Names::default();
        let mut context = |number: u32| {
            *known.entry(number).or_insert_with(|| {
                let name = name(number).filter(|name| !name.is_empty());
                name.map_or(0, |name| names.number(&name))
            })
        };
        self.context_of = of.iter().map(|number| context(*number)).collect();
        self.contexts = names.into_vec();
        self
    }

    /// Writes the trace as text; reading that gives an equal trace.
    ///
    /// # Errors
    /// Those of the writer.
    pub fn write(&self, mut writer: impl Write) -> io::Result<()> {
        writeln!(writer, "{}", Trace::HEADER)?;
        for row in &self.rows {
            writeln!(writer, "{row}")?;
        }
        writer.flush()
    }

    /// The name given when it was read.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// All rows, in the program's order.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// All blocks; the index is the block's id.
    #[doc(hidden)]
    pub fn allocations(&self) -> &[Allocation] {
        &self.allocations
    }

    /// The numbers of the streams that own a block, ascending.
    pub fn streams(&self) -> &[u32] {
        &self.streams
    }

    /// The largest sum of requested bytes of the blocks that are not yet at their release point.
    pub fn requested_peak(&self) -> u64 {
        self.requested_peak
    }

    /// Requested bytes of the live blocks after each row.
    #[doc(hidden)]
    pub fn live_bytes(&self) -> impl Iterator<Item = u64> + '_ {
        // All fit into 64 bits: the peak does.
        live_bytes(&self.rows, &self.allocations).map(|live| live as u64)
    }

    /// The index of the first row after which the requested bytes of the live blocks are at their peak; 0 without rows.
    #[doc(hidden)]
    pub fn peak_row(&self) -> usize {
        let at_peak = self
            .live_bytes()
            .position(|live| live == self.requested_peak);
        at_peak.unwrap_or(0)
    }

    /// Returns the names of the contexts that blocks were allocated in: tags of a recording, or stacks of a PyTorch
    /// snapshot with semicolons between their parts, outermost first. A trace read as text has none.
    pub fn contexts(&self) -> &[String] {
        &self.contexts
    }

    /// Returns which of the [`contexts`](Self::contexts) the block with this id was allocated in, if known.
    pub fn context_of(&self, id: usize) -> Option<usize> {
        let context = self.context_of.get(id)?.checked_sub(1)?;
        Some(context as usize)
    }

    /// The line of the file that holds the row with this index.
    #[doc(hidden)]
    pub fn line_of(row: usize) -> u64 {
        // The header is line 1, and there are no lines without a row.
        row as u64 + 2
    }
}

/// What the reader knows of a block while reading.
struct Block {
    outline: Allocation,
    completed: bool,
}

fn parse_row(text: &[u8]) -> Result<Row, TraceFault> {
    let owned = |field: &[u8]| String::from_utf8_lossy(field).into_owned();
    let mut fields = text.split(|byte| *byte == b',');
    let op = match fields.next() {
        Some(b"a") => Op::Allocate,
        Some(b"f") => Op::Free,
        Some(b"c") => Op::Complete,
        Some(b"oom") => Op::Oom,
        other => {
            let found = owned(other.unwrap_or_default());
            return Err(TraceFault::UnknownOp { found });
        }
    };
    let mut number = |field: &'static str| {
        let found = fields.next().ok_or(TraceFault::FieldMissing { field })?;
        parse_number(found).ok_or_else(|| TraceFault::NotANumber {
            field,
            found: owned(found),
        })
    };
    let id = number("id")?;
    let bytes = number("bytes")?;
    let stream = number("stream")?;
    if fields.next().is_some() {
        return Err(TraceFault::FieldsLeftOver);
    }
    if stream >= STREAM_LIMIT {
        return Err(TraceFault::StreamTooLarge { found: stream });
    }
    Ok(Row {
        op,
        stream: stream as u32,
        // Ids are dense, so one that does not fit is caught as out of order or unknown.
        id: usize::try_from(id).unwrap_or(usize::MAX),
        bytes,
    }
    .normalized())
}

/// Parses decimal digits only: no sign, no space, no other base; `None` also above 64 bits.
pub(super) fn parse_number(field: &[u8]) -> Option<u64> {
    if field.is_empty() {
        return None;
    }
    field.iter().try_fold(0u64, |value, byte| {
        let digit = byte.is_ascii_digit().then(|| u64::from(byte - b'0'))?;
        value.checked_mul(10)?.checked_add(digit)
    })
}

/// Checks `row`, whose index is `index`, against the blocks so far, adds it, and returns it.
fn note(blocks: &mut Vec<Block>, index: usize, row: Row) -> Result<Row, TraceFault> {
    let id = row.id as u64;
    if matches!(row.op, Op::Allocate | Op::Oom) && row.bytes == 0 {
        return Err(TraceFault::ZeroBytes);
    }
    if row.op == Op::Oom {
        return Ok(row);
    }
    if row.op == Op::Allocate {
        if row.id != blocks.len() {
            return Err(TraceFault::IdOutOfOrder {
                expected: blocks.len() as u64,
                found: id,
            });
        }
        blocks.push(Block {
            outline: Allocation {
                bytes: row.bytes,
                stream: row.stream,
                allocated: index,
                released: None,
            },
            completed: false,
        });
        return Ok(row);
    }
    let block = blocks.get_mut(row.id).ok_or(TraceFault::UnknownId { id })?;
    match row.op {
        Op::Complete if block.outline.released.is_none() => {
            return Err(TraceFault::CompletedBeforeFreed { id });
        }
        Op::Complete if block.completed => return Err(TraceFault::CompletedTwice { id }),
        Op::Complete => block.completed = true,
        _ if block.outline.released.is_some() => return Err(TraceFault::FreedTwice { id }),
        _ => {}
    }
    if row.stream != block.outline.stream {
        return Err(TraceFault::StreamChanged {
            id,
            expected: block.outline.stream,
            found: row.stream,
        });
    }
    block.outline.released = Some(index);
    Ok(row)
}

/// Requested bytes of the live blocks after each row.
fn live_bytes(rows: &[Row], allocations: &[Allocation]) -> impl Iterator<Item = u128> {
    rows.iter().enumerate().scan(0, |live, (index, row)| {
        let block = allocations.get(row.id);
        match row.op {
            Op::Allocate => *live += u128::from(row.bytes),
            _ => {
                let block = block.filter(|block| block.released == Some(index));
                *live -= block.map_or(0, |block| u128::from(block.bytes));
            }
        }
        Some(*live)
    })
}

fn requested_peak(rows: &[Row], allocations: &[Allocation]) -> Result<u64, TraceError> {
    let mut peak = 0;
    for (index, live) in live_bytes(rows, allocations).enumerate() {
        let line = Trace::line_of(index);
        let live = u64::try_from(live).map_err(|_| TraceFault::LiveBytesOverflow.at(line))?;
        peak = peak.max(live);
    }
    Ok(peak)
}
