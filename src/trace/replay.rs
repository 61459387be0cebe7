//! Replaying a trace on an allocator.
//!
//! Blocks are freed at their release point, so a block that was also used on other streams is held
//! until those uses were over in the recorded program. Blocks that live to the end are freed after
//! the last row. Between the replays nothing waits for the device.

use super::format::{Op, Trace};
use super::stage::Stage;
use super::work::{Kernels, Nothing, Use, Work};
use crate::allocator::{Allocator, Block, Config, Fragmentation, Packing, Policy};
use crate::driver::{CallCounts, Stream};
use crate::error::Error;
use std::time::{Duration, Instant};

/// How many rows pass between two reports of progress; the clock stands still during a report.
const PROGRESS_ROWS: usize = 4096;

/// How a trace is replayed.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// How often, one after another on one allocator.
    pub repeat: usize,
    /// Whether the report has every replay, or the first and the last one alone: then its size does not
    /// grow with their number.
    pub keep_all: bool,
    /// Further settings of the allocator; those of the next three fields count instead of its own.
    pub config: Config,
    /// The allocator's segment policy.
    pub policy: Policy,
    /// Whether the packed policy may use second layouts of its memory.
    pub views: bool,
    /// The most bytes of memory that the allocator may hold.
    pub limit: Option<u64>,
    /// Whether kernels fill each block when it is allocated and check it before it is freed.
    pub verify: bool,
    /// Decides which checks are delayed, when verifying over several streams.
    pub seed: u64,
    /// In how many parts of equal length the rows of each replay are reported on their own, from 1
    /// on.
    pub parts: usize,
    /// The allocator's structures are walked each time so many rows are done, and after the last
    /// replay in any case; the clock stands still meanwhile.
    pub check_every: Option<usize>,
}

impl Default for Options {
    /// One replay with the device's best policy, no limit, no verification.
    fn default() -> Options {
        Options {
            repeat: 1,
            keep_all: true,
            config: Config::default(),
            policy: Policy::Auto,
            views: true,
            limit: None,
            verify: false,
            seed: 1,
            parts: 1,
            check_every: None,
        }
    }
}

/// What one whole replay cost.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Figures {
    /// The most bytes of memory that the allocator held during the replay.
    pub reserved_peak: u64,
    /// The driver calls that the allocator made, by name, as the table counted them.
    pub driver_calls: CallCounts,
    /// Nanoseconds that the allocator spent in the driver: measured on a GPU; on the simulator what
    /// its table of costs charges.
    pub driver_ns: u64,
    /// Nanoseconds of wall time per row, the work given to the device included.
    pub ns_per_row: f64,
    /// The same by parts of the rows. What is freed after the last row is in none of them.
    pub parts: Vec<Part>,
}

/// What a part of a replay cost.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Part {
    /// Rows of the part.
    pub rows: usize,
    /// The driver calls that the allocator made, by name.
    pub driver_calls: CallCounts,
    /// Nanoseconds that the allocator spent in the driver, as in [`Figures`].
    pub driver_ns: u64,
}

/// What became of a trace.
#[derive(Debug)]
#[non_exhaustive]
pub struct Report {
    /// The policy in force; never [`Policy::Auto`].
    pub policy: Policy,
    /// The limit in force.
    pub limit: Option<u64>,
    /// The most bytes of memory that the allocator held during the first replay, or until that
    /// failed.
    pub reserved_peak: u64,
    /// The largest of that and of what was held in the replays that completed.
    pub reserved_peak_max: u64,
    /// The replays that completed; the first and the last of them without [`Options::keep_all`].
    pub replays: Vec<Figures>,
    /// Why the next replay did not complete.
    pub failure: Option<Failure>,
    /// How the free memory lay in the first replay at the row with the most live bytes; `None` if it
    /// was not reached.
    pub at_peak: Option<Fragmentation>,
    /// How the policy stood after the last replay.
    pub packing: Packing,
    /// 32-bit words that were not what their block had been filled with; `None` without
    /// [`Options::verify`].
    pub mismatches: Option<u64>,
    /// What the allocator's own walk over its structures found wrong after the last replay.
    pub check: Option<Error>,
    /// Why the allocator could not be closed.
    pub close: Option<Error>,
    /// Bytes of memory that are still held after the allocator was closed.
    pub leaked_bytes: u64,
    /// What the simulator found wrong: races, use of memory that is not mapped, and the like.
    pub reports: Vec<String>,
}

impl Report {
    /// Whether every replay ran to its last row.
    pub fn completed(&self) -> bool {
        self.failure.is_none()
    }

    /// Whether all went well: completed, no wrong word, heap in order, closed, nothing leaked, and
    /// nothing reported.
    pub fn is_clean(&self) -> bool {
        self.completed()
            && self.mismatches.unwrap_or(0) == 0
            && self.check.is_none()
            && self.close.is_none()
            && self.leaked_bytes == 0
            && self.reports.is_empty()
    }
}

/// A replay stopped before its last row.
#[derive(Debug, thiserror::Error)]
#[error("replay {replay} failed at row {row}")]
pub struct Failure {
    /// Which replay, counted from 1.
    pub replay: usize,
    /// Which row, counted from 1; the header is not a row. Blocks that live to the end are freed at
    /// the last one.
    pub row: usize,
    /// What failed there.
    pub source: Error,
}

impl Failure {
    /// Whether the allocator had no memory left to give.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self.source, Error::OutOfMemory(_))
    }
}

/// Replays `trace` on a new allocator. `progress` is told now and then how many rows are done, over
/// all replays.
///
/// A replay that fails, and anything else found wrong, is in the report, not in the error.
///
/// # Errors
/// Streams, kernels or the allocator cannot be made, or the device fails outside the rows.
pub fn replay(
    stage: &Stage,
    trace: &Trace,
    options: &Options,
    progress: &mut dyn FnMut(u64),
) -> Result<Report, Error> {
    // A program that allocates device memory has its context current; so has this one, and through
    // the replayer's own driver, so that the allocator is charged for no switch of its own making.
    let entered = stage.own().enter()?;
    let held_before = stage.memory_in_use();
    let kernels = if options.verify || stage.lags() {
        Some(Kernels::new(
            stage,
            &entered,
            trace,
            options.verify,
            options.seed,
        )?)
    } else {
        None
    };
    let config = options
        .config
        .clone()
        .policy(options.policy)
        .views(options.views)
        .limit(options.limit);
    let allocator = Allocator::with_config(stage.context(), config)?;
    let steps = steps(trace);
    let mut run = Run {
        peak_row: peak_row(&steps, trace),
        at_peak: None,
        steps,
        slots: std::iter::repeat_with(|| None)
            .take(trace.allocations().len())
            .collect(),
        streams: trace
            .streams()
            .iter()
            .map(|_| Stream::new(stage.context()))
            .collect::<Result<_, _>>()?,
        stage,
        allocator: &allocator,
        progress,
        rows_done: 0,
    };
    let mut report = match kernels {
        None => run.all(options, &mut Nothing, |_| {}),
        Some(mut kernels) => {
            let mut report = run.all(options, &mut kernels, Kernels::begin_replay);
            match kernels.finish() {
                Ok(mismatches) => report.mismatches = mismatches,
                // What failed first says more than what a lost device says afterwards.
                Err(_) if report.failure.is_some() => {}
                Err(error) => return Err(error.into()),
            }
            report
        }
    };
    drop(run);
    report.check = allocator.check().err();
    report.close = allocator.close().err();
    report.leaked_bytes = allocator.stats().all.reserved.current;
    if let (Some(before), Some(after)) = (held_before, stage.memory_in_use()) {
        report.leaked_bytes = report.leaked_bytes.max(after.saturating_sub(before));
    }
    report.reports = stage.take_reports();
    Ok(report)
}

/// What the replayer does at a row, with everything looked up beforehand.
#[derive(Clone, Copy)]
struct Step {
    action: Action,
    /// Index of the stream.
    stream: u16,
    id: usize,
    bytes: u64,
}

#[derive(Clone, Copy)]
enum Action {
    Allocate,
    Release,
    /// The row is not its block's release point.
    Pass,
}

struct Run<'a> {
    steps: Vec<Step>,
    /// The row with the most live bytes, and how memory lay there in the first replay.
    peak_row: usize,
    at_peak: Option<Fragmentation>,
    slots: Vec<Option<Block>>,
    streams: Vec<Stream>,
    stage: &'a Stage,
    allocator: &'a Allocator,
    progress: &'a mut dyn FnMut(u64),
    rows_done: u64,
}

impl Run<'_> {
    fn all<W: Work>(
        &mut self,
        options: &Options,
        work: &mut W,
        begin_replay: impl Fn(&mut W),
    ) -> Report {
        let mut report = Report {
            policy: self.allocator.policy(),
            limit: options.limit,
            reserved_peak: 0,
            reserved_peak_max: 0,
            replays: Vec::new(),
            failure: None,
            at_peak: None,
            packing: Packing::default(),
            mismatches: None,
            check: None,
            close: None,
            leaked_bytes: 0,
            reports: Vec::new(),
        };
        let driver = self.stage.context().driver();
        for index in 0..options.repeat {
            begin_replay(work);
            if index > 0 {
                self.allocator.reset_peaks();
            }
            let calls_before = driver.calls();
            let nanos_before = self.driver_nanos(&calls_before, work);
            let mut parts = Vec::with_capacity(options.parts);
            let outcome = self.once(options, work, &mut parts);
            if index == 0 {
                report.at_peak = self.at_peak.take();
            }
            let calls = driver.calls();
            let driver_ns = self.driver_nanos(&calls, work).saturating_sub(nanos_before);
            let reserved_peak = self.allocator.stats().all.reserved.peak;
            if index == 0 {
                report.reserved_peak = reserved_peak;
                report.reserved_peak_max = reserved_peak;
            }
            match outcome {
                Ok(wall) => {
                    report.reserved_peak_max = report.reserved_peak_max.max(reserved_peak);
                    if !options.keep_all {
                        report.replays.truncate(1);
                    }
                    report.replays.push(Figures {
                        reserved_peak,
                        driver_calls: calls.since(&calls_before),
                        driver_ns,
                        ns_per_row: match self.steps.len() {
                            0 => 0.0,
                            rows => wall.as_nanos() as f64 / rows as f64,
                        },
                        parts,
                    });
                }
                Err((row, source)) => {
                    report.failure = Some(Failure {
                        replay: index + 1,
                        row: row + 1,
                        source,
                    });
                    self.slots.fill_with(|| None);
                    break;
                }
            }
        }
        report.packing = self.allocator.stats().packing;
        report
    }

    /// Time in the driver so far, less what the replayer's own work was charged.
    fn driver_nanos(&self, calls: &CallCounts, work: &impl Work) -> u64 {
        self.stage
            .driver_nanos(calls)
            .saturating_sub(work.modelled_nanos())
    }

    /// One replay: how long it took, or the index of the row that failed.
    fn once(
        &mut self,
        options: &Options,
        work: &mut impl Work,
        parts: &mut Vec<Part>,
    ) -> Result<Duration, (usize, Error)> {
        let mut wall = Duration::ZERO;
        let (rows, count) = (self.steps.len(), options.parts.max(1));
        let mut done = 0;
        for part in 1..=count {
            let end = (rows as u128 * part as u128 / count as u128) as usize;
            let first = done;
            let calls_before = self.stage.context().driver().calls();
            let nanos_before = self.driver_nanos(&calls_before, work);
            while done < end {
                let next = stop(done, PROGRESS_ROWS).min(end);
                let next = options
                    .check_every
                    .map_or(next, |every| next.min(stop(done, every)));
                let next = match (done..next).contains(&self.peak_row) {
                    true => self.peak_row + 1,
                    false => next,
                };
                wall += self.stretch(done, next, work)?;
                if next == self.peak_row + 1 && self.rows_done <= rows as u64 {
                    self.at_peak = Some(self.allocator.fragmentation());
                }
                done = next;
                if options
                    .check_every
                    .is_some_and(|every| done.is_multiple_of(every))
                {
                    self.allocator.check().map_err(|error| (done - 1, error))?;
                }
                (self.progress)(self.rows_done);
            }
            let calls = self.stage.context().driver().calls();
            parts.push(Part {
                rows: end - first,
                driver_ns: self.driver_nanos(&calls, work).saturating_sub(nanos_before),
                driver_calls: calls.since(&calls_before),
            });
        }
        let start = Instant::now();
        for step in &self.steps {
            if let (Action::Allocate, Some(block)) = (step.action, self.slots[step.id].take()) {
                work.releasing(step.use_of(&block, &self.streams))
                    .map_err(|error| (self.steps.len() - 1, error.into()))?;
                block
                    .free()
                    .map_err(|failed| (self.steps.len() - 1, failed.error))?;
            }
        }
        Ok(wall + start.elapsed())
    }

    /// Rows from one to before another.
    fn stretch(
        &mut self,
        from: usize,
        to: usize,
        work: &mut impl Work,
    ) -> Result<Duration, (usize, Error)> {
        let start = Instant::now();
        let steps = &self.steps[from..to];
        rows(steps, &mut self.slots, &self.streams, self.allocator, work)
            .map_err(|(row, error)| (from + row, error))?;
        self.rows_done += steps.len() as u64;
        Ok(start.elapsed())
    }
}

/// The first multiple of `every` behind a row.
fn stop(row: usize, every: usize) -> usize {
    let every = every.max(1);
    (row / every + 1).saturating_mul(every)
}

impl Step {
    fn use_of<'a>(&self, block: &Block, streams: &'a [Stream]) -> Use<'a> {
        Use {
            stream: &streams[usize::from(self.stream)],
            address: block.ptr(),
            bytes: self.bytes,
            id: self.id,
        }
    }
}

/// Replays consecutive rows; on failure says which of them.
fn rows(
    steps: &[Step],
    slots: &mut [Option<Block>],
    streams: &[Stream],
    allocator: &Allocator,
    work: &mut impl Work,
) -> Result<(), (usize, Error)> {
    for (row, step) in steps.iter().enumerate() {
        match step.action {
            Action::Allocate => {
                let stream = &streams[usize::from(step.stream)];
                let block = allocator
                    .allocate(step.bytes as usize, stream)
                    .map_err(|error| (row, error))?;
                work.allocated(step.use_of(&block, streams))
                    .map_err(|error| (row, error.into()))?;
                slots[step.id] = Some(block);
            }
            Action::Release => {
                if let Some(block) = slots[step.id].take() {
                    work.releasing(step.use_of(&block, streams))
                        .map_err(|error| (row, error.into()))?;
                    block.free().map_err(|failed| (row, failed.error))?;
                }
            }
            Action::Pass => {}
        }
        work.row_over();
    }
    Ok(())
}

/// The row after which the most bytes are live.
fn peak_row(steps: &[Step], trace: &Trace) -> usize {
    let (mut live, mut peak, mut row) = (0u64, 0, 0);
    for (index, step) in steps.iter().enumerate() {
        match step.action {
            Action::Allocate => live += step.bytes,
            Action::Release => live -= trace.allocations()[step.id].bytes,
            Action::Pass => {}
        }
        if live > peak {
            (peak, row) = (live, index);
        }
    }
    row
}

fn steps(trace: &Trace) -> Vec<Step> {
    let rows = trace.rows().iter().enumerate();
    rows.map(|(index, row)| {
        let block = &trace.allocations()[row.id];
        let stream = trace
            .streams()
            .partition_point(|number| *number < row.stream);
        Step {
            action: match row.op {
                Op::Allocate => Action::Allocate,
                _ if block.released == Some(index) => Action::Release,
                _ => Action::Pass,
            },
            // Stream numbers have 16 bits, so their indices have no more.
            stream: stream as u16,
            id: row.id,
            bytes: block.bytes,
        }
    })
    .collect()
}
