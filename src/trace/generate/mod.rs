//! Programs that nobody recorded: sequences of allocations made up by rules, for work of which no
//! recording is at hand.
//!
//! A program is its [`Kind`] and its numbers; equal ones give equal traces on every machine.

#![forbid(unsafe_code)]

mod draft;
mod large;
mod random;
mod sharded;
mod vary;

use super::error::{TraceError, TraceFault};
use super::format::{Op, Row, Trace};
use draft::{Draft, Maker, Ready, Release};
use std::collections::BTreeSet;

pub use draft::{Kind, Program};

impl Program {
    /// The program's rows, one by one. Of a program of n rows the first m are those of one of m rows.
    pub fn rows(&self) -> Rows<'static> {
        let (maker, usual): (Box<dyn Maker>, usize) = match self.kind {
            Kind::Large => (Box::new(large::Large::new(self)), large::ROWS),
            Kind::Sharded => (Box::new(sharded::Sharded::new(self)), usize::MAX),
            Kind::Random | Kind::Churn => (Box::new(random::Wandering::new(self)), random::ROWS),
        };
        Rows::new(maker, self.rows.unwrap_or(usual))
    }

    /// The program as a trace.
    ///
    /// # Errors
    /// None but for numbers out of all bounds (more live bytes than 64 bits can count).
    pub fn trace(&self, name: impl Into<String>) -> Result<Trace, TraceError> {
        Trace::from_rows(name, self.rows())
    }
}

/// The same program several times over, each time with every size changed at random by up to
/// `percent` (at most 99) of it: nothing repeats. Blocks that live to the end are freed at the end
/// of each copy.
///
/// # Errors
/// Only if the live bytes no longer fit into 64 bits.
pub fn vary(
    trace: &Trace,
    name: impl Into<String>,
    copies: usize,
    percent: u8,
    seed: u64,
) -> Result<Trace, TraceError> {
    Trace::from_rows(name, varied(trace, copies, percent, seed))
}

/// The rows of `vary`, one by one.
pub fn varied(trace: &Trace, copies: usize, percent: u8, seed: u64) -> Rows<'_> {
    let maker = vary::Varied::new(trace, copies, percent, seed);
    Rows::new(Box::new(maker), usize::MAX)
}

/// The rows of a program, made as they are asked for: what is held of them does not grow with their number.
pub struct Rows<'a> {
    maker: Box<dyn Maker + 'a>,
    draft: Draft,
    /// Rows that there may be.
    end: usize,
    rows: usize,
    blocks: usize,
    streams: BTreeSet<u32>,
    live: u64,
    peak: u64,
    overflow: Option<usize>,
}

impl<'a> Rows<'a> {
    fn new(maker: Box<dyn Maker + 'a>, end: usize) -> Rows<'a> {
        Rows {
            maker,
            draft: Draft::default(),
            end,
            rows: 0,
            blocks: 0,
            streams: BTreeSet::new(),
            live: 0,
            peak: 0,
            overflow: None,
        }
    }

    /// Rows so far.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Blocks allocated so far.
    pub fn allocations(&self) -> usize {
        self.blocks
    }

    /// Streams that own a block so far.
    pub fn streams(&self) -> usize {
        self.streams.len()
    }

    /// The most requested bytes that were live so far, as [`Trace::requested_peak`] of these rows.
    ///
    /// # Errors
    /// They do not fit into 64 bits: the rows make no valid trace.
    pub fn requested_peak(&self) -> Result<u64, TraceError> {
        match self.overflow {
            None => Ok(self.peak),
            Some(row) => Err(TraceFault::LiveBytesOverflow.at(Trace::line_of(row))),
        }
    }

    fn account(&mut self, ready: Ready) {
        if ready.row.op == Op::Allocate {
            self.blocks += 1;
            self.streams.insert(ready.row.stream);
            match self.live.checked_add(ready.bytes) {
                Some(live) => self.live = live,
                None => self.overflow = self.overflow.or(Some(self.rows)),
            }
            self.peak = self.peak.max(self.live);
        }
        let released = match ready.release {
            Release::Here => true,
            // Where the program is cut off, what never completes is free at once.
            Release::At(row) => row >= self.end,
            Release::Never | Release::Later => false,
        };
        if released {
            self.live = self.live.saturating_sub(ready.bytes);
        }
        self.rows += 1;
    }
}

impl Iterator for Rows<'_> {
    type Item = Row;

    fn next(&mut self) -> Option<Row> {
        if self.rows >= self.end {
            return None;
        }
        let ready = loop {
            if let Some(ready) = self.draft.next() {
                break ready;
            }
            if !self.maker.make(&mut self.draft) {
                break self.draft.rest()?;
            }
        };
        self.account(ready);
        Some(ready.row)
    }
}

debug_fields!(Rows<'_>, self => rows: self.rows);
