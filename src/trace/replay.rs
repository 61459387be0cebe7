//! Replaying a trace on an allocator.
//!
//! Blocks are freed at their release point, so a block that was also used on other streams is held
//! until those uses were over in the recorded program. Blocks that live to the end are freed after
//! the last row. Between the replays nothing waits for the device.

use super::format::{Op, Trace};
use super::stage::Stage;
use super::work::{Kernels, Nothing, Use, Work};
use crate::allocator::{Allocator, Block, Config, Fragmentation, Policy, Stats};
use crate::driver::{CallCounts, Context, Stream};
use crate::error::Error;
use std::time::{Duration, Instant};

/// How many rows pass between two reports of progress; the clock stands still during a report.
const PROGRESS_ROWS: usize = 4096;

/// How a trace is replayed: on a new allocator, over a real or a simulated device.
///
/// Blocks of the trace are freed at their release points, and those that live to the end after the last row. Work
/// of a simulated device in `Mode::Lag` completes so many rows after its own.
///
/// ```
/// # use cualloc::sim::{SimConfig, Simulator};
/// # use cualloc::trace::{Replay, Trace};
/// let trace = Trace::read("two blocks", "op,id,bytes,stream\na,0,4096,0\na,1,512,0\nf,0,0,0\n".as_bytes())?;
/// let simulator = Simulator::new(SimConfig::default())?;
/// let report = Replay::new(&trace).repeat(2).verify(true).run(&simulator.context(0)?)?;
/// assert!(report.is_clean());
/// assert_eq!(report.passes.len(), 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Replay<'a> {
    pub(super) trace: &'a Trace,
    pub(super) repeat: usize,
    keep_all: bool,
    parts: usize,
    pub(super) config: Config,
    verify: bool,
    seed: u64,
    check_every: Option<usize>,
    pub(super) serve_failed: bool,
    pub(super) progress: Box<dyn FnMut(u64) + 'a>,
    watch: Option<Box<Watch<'a>>>,
}

/// What is told of each row.
type Watch<'a> = dyn FnMut(&Watched<'_>) + 'a;

/// What a row of a replay came to, as [`Replay::watch`] tells it.
#[derive(Debug)]
#[non_exhaustive]
pub struct Watched<'a> {
    /// The index of the row in [`Trace::rows`].
    pub row: usize,
    /// The allocator as the row left it.
    pub allocator: &'a Allocator,
    /// The block that the row allocated; `None` if it did something else, or failed.
    pub block: Option<&'a Block>,
    /// Why the row failed. Nothing comes after it, and all blocks are still live.
    pub error: Option<&'a Error>,
}

impl<'a> Replay<'a> {
    /// One pass over the trace with the device's best policy, no limit, no verification.
    pub fn new(trace: &'a Trace) -> Self {
        Replay {
            trace,
            repeat: 1,
            keep_all: true,
            parts: 1,
            config: Config::default(),
            verify: false,
            seed: 1,
            check_every: None,
            serve_failed: false,
            progress: Box::new(|_| {}),
            watch: None,
        }
    }

    /// How often, one pass after another on one allocator; nothing waits for the device between them.
    pub fn repeat(mut self, times: usize) -> Self {
        self.repeat = times;
        self
    }

    /// Whether the report has every pass, as it has if nothing is said, or the first and the last one alone: then its
    /// size does not grow with their number.
    pub fn keep_all(mut self, on: bool) -> Self {
        self.keep_all = on;
        self
    }

    /// In how many parts of equal length the rows of each pass are reported on their own, from 1 on.
    pub fn parts(mut self, times: usize) -> Self {
        self.parts = times;
        self
    }

    /// The allocator's settings.
    pub fn config(mut self, config: Config) -> Self {
        self.config = config;
        self
    }

    /// Whether kernels fill each block when it is allocated and check it before it is freed.
    pub fn verify(mut self, on: bool) -> Self {
        self.verify = on;
        self
    }

    /// Decides which checks are delayed, when verifying over several streams.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// The allocator's structures are walked each time so many rows are done, and after the last pass in any case;
    /// the clock stands still meanwhile.
    pub fn check_every(mut self, rows: Option<usize>) -> Self {
        self.check_every = rows;
        self
    }

    /// Whether requests that failed in the recorded program are made, too: each is allocated and freed at its row, so
    /// that a replay which completes had memory for all of them. Else their rows do nothing.
    pub fn serve_failed(mut self, on: bool) -> Self {
        self.serve_failed = on;
        self
    }

    /// Is told now and then how many rows are done, over all passes; the clock stands still meanwhile. A search for
    /// the [`capacity`](Self::capacity) tells before each probe the limit in bytes instead.
    pub fn on_progress(mut self, told: impl FnMut(u64) + 'a) -> Self {
        self.progress = Box::new(told);
        self
    }

    /// Is told of each row when it is done, and of the one that failed; the clock stands still meanwhile. What is
    /// freed after the last row is not told.
    pub fn watch(mut self, told: impl FnMut(&Watched<'_>) + 'a) -> Self {
        self.watch = Some(Box::new(told));
        self
    }

    /// Replays the trace. A pass that fails, and anything else found wrong, is in the report, not in the error.
    ///
    /// # Errors
    /// Streams, kernels or the allocator cannot be made, or the device fails outside the rows.
    pub fn run(mut self, on: &Context) -> Result<ReplayReport, Error> {
        self.run_on(&Stage::of(on)?)
    }

    pub(super) fn run_on(&mut self, stage: &Stage) -> Result<ReplayReport, Error> {
        // A program that allocates device memory has its context current; so has this one, and through
        // the replayer's own driver, so that the allocator is charged for no switch of its own making.
        let entered = stage.own().enter()?;
        let held_before = stage.memory_in_use();
        let trace = self.trace;
        let kernels = match self.verify || stage.lags() {
            true => Some(Kernels::new(
                stage,
                &entered,
                trace,
                self.verify,
                self.seed,
            )?),
            false => None,
        };
        let allocator = Allocator::with_config(stage.context(), self.config.clone())?;
        let steps = steps(trace, self.serve_failed);
        let mut run = Run {
            peak_row: trace.peak_row(),
            at_peak: None,
            steps,
            slots: std::iter::repeat_with(|| None)
                .take(trace.allocations().len())
                .collect(),
            // One more for requests that failed on streams which own no block.
            streams: (0..trace.streams().len() + usize::from(self.serve_failed))
                .map(|_| Stream::new(stage.context()))
                .collect::<Result<_, _>>()?,
            stage,
            allocator: &allocator,
            options: self,
            rows_done: 0,
        };
        let mut report = match kernels {
            None => run.all(&mut Nothing, |_| {}),
            Some(mut kernels) => {
                let mut report = run.all(&mut kernels, Kernels::begin_replay);
                match kernels.finish() {
                    Ok(mismatches) => report.mismatches = mismatches,
                    // What failed first says more than what a lost device says afterwards.
                    Err(_) if report.failed.is_some() => {}
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
}

debug_fields!(Replay<'_>, self => trace: self.trace.name(), config: self.config);

/// What a pass over the rows cost, or a part of one.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Pass {
    /// Rows of it.
    pub rows: usize,
    /// The most bytes of memory that the allocator held, from the begin of the pass on.
    pub reserved_peak: u64,
    /// The driver calls that the allocator made. Their nanoseconds are measured on a GPU; on the simulator they are
    /// what its costs charge.
    pub calls: CallCounts,
    /// Nanoseconds of wall time per row, the work given to the device included.
    pub nanos_per_row: f64,
    /// The same by parts of the rows; none of a part. What is freed after the last row is in none of them.
    pub parts: Vec<Pass>,
}

/// What became of a trace.
#[derive(Debug)]
#[non_exhaustive]
pub struct ReplayReport {
    /// The policy in force; never [`Policy::Auto`].
    pub policy: Policy,
    /// The limit in force.
    pub limit: Option<u64>,
    /// The most bytes of memory that the allocator held during the first pass, or until that failed.
    pub reserved_peak: u64,
    most: u64,
    /// The passes that completed; the first and the last of them without [`Replay::keep_all`].
    pub passes: Vec<Pass>,
    /// Where the next pass failed: which one, and at which row, both counted from 1; the header is not a row.
    /// Blocks that live to the end are freed at the last one.
    pub failed: Option<(usize, usize)>,
    /// What failed there.
    pub error: Option<Error>,
    /// How the free memory lay in the first pass at the row with the most live bytes; `None` if it was not reached.
    pub at_peak: Option<Fragmentation>,
    /// The allocator's figures after the last pass, or when that failed.
    pub stats: Stats,
    /// 32-bit words that were not what their block had been filled with; `None` without [`Replay::verify`].
    pub mismatches: Option<u64>,
    /// What the allocator's own walk over its structures found wrong.
    pub check: Option<Error>,
    /// Why the allocator could not be closed.
    pub close: Option<Error>,
    /// Bytes of memory that are still held after the allocator was closed.
    pub leaked_bytes: u64,
    /// What the simulator found wrong: races, use of memory that is not mapped, and the like.
    pub reports: Vec<String>,
}

impl ReplayReport {
    /// Whether all went well: every pass ran to its last row, no wrong word, structures in order, closed, nothing
    /// leaked, and nothing reported.
    pub fn is_clean(&self) -> bool {
        self.failed.is_none()
            && self.mismatches.unwrap_or(0) == 0
            && self.check.is_none()
            && self.close.is_none()
            && self.leaked_bytes == 0
            && self.reports.is_empty()
    }

    /// The largest peak of held memory over all passes, in bytes.
    pub fn reserved_peak_max(&self) -> u64 {
        self.most
    }
}

/// What the replayer does at a row, with everything looked up beforehand.
#[derive(Clone, Copy)]
struct Step {
    action: Action,
    /// Index of the stream.
    stream: u32,
    id: usize,
    bytes: u64,
}

#[derive(Clone, Copy)]
enum Action {
    Allocate,
    Release,
    /// A request that failed in the recorded program is made, and its block freed.
    Attempt,
    /// The row is not its block's release point, or has no block.
    Pass,
}

struct Run<'a, 'b> {
    steps: Vec<Step>,
    /// The row with the most live bytes, and how memory lay there in the first replay.
    peak_row: usize,
    at_peak: Option<Fragmentation>,
    slots: Vec<Option<Block>>,
    streams: Vec<Stream>,
    stage: &'a Stage,
    allocator: &'a Allocator,
    options: &'a mut Replay<'b>,
    rows_done: u64,
}

impl Run<'_, '_> {
    fn all<W: Work>(&mut self, work: &mut W, begin_replay: impl Fn(&mut W)) -> ReplayReport {
        let repeat = self.options.repeat;
        let mut report = ReplayReport {
            policy: self.allocator.policy(),
            limit: self.allocator.limit(),
            reserved_peak: 0,
            most: 0,
            passes: Vec::new(),
            failed: None,
            error: None,
            at_peak: None,
            stats: Stats::default(),
            mismatches: None,
            check: None,
            close: None,
            leaked_bytes: 0,
            reports: Vec::new(),
        };
        for index in 0..repeat {
            begin_replay(work);
            if index > 0 {
                self.allocator.reset_peaks();
            }
            let before = self.calls(work);
            let mut parts = Vec::with_capacity(self.options.parts);
            let outcome = self.once(work, &mut parts);
            if index == 0 {
                report.at_peak = self.at_peak.take();
                report.reserved_peak = self.allocator.stats().all.reserved.peak;
                report.most = report.reserved_peak;
            }
            match outcome {
                Ok(wall) => {
                    let pass = self.pass(self.steps.len(), wall, &before, work);
                    report.most = report.most.max(pass.reserved_peak);
                    if !self.options.keep_all {
                        report.passes.truncate(1);
                    }
                    report.passes.push(Pass { parts, ..pass });
                }
                Err((row, error)) => {
                    report.failed = Some((index + 1, row + 1));
                    report.error = Some(error);
                    self.slots.fill_with(|| None);
                    break;
                }
            }
        }
        report.stats = self.allocator.stats();
        report
    }

    /// What was done since `before`.
    fn pass(&self, rows: usize, wall: Duration, before: &CallCounts, work: &impl Work) -> Pass {
        Pass {
            rows,
            calls: self.calls(work).since(before),
            reserved_peak: self.allocator.stats().all.reserved.peak,
            nanos_per_row: match rows {
                0 => 0.0,
                rows => wall.as_nanos() as f64 / rows as f64,
            },
            parts: Vec::new(),
        }
    }

    /// The allocator's calls so far; the time in the driver is that without what the replayer's own work was charged.
    fn calls(&self, work: &impl Work) -> CallCounts {
        let calls = self.stage.context().driver().calls();
        let nanos = self.stage.driver_nanos(&calls);
        calls.with_nanos(nanos.saturating_sub(work.modelled_nanos()))
    }

    /// One replay: how long it took, or the index of the row that failed.
    fn once(
        &mut self,
        work: &mut impl Work,
        parts: &mut Vec<Pass>,
    ) -> Result<Duration, (usize, Error)> {
        let mut total = Duration::ZERO;
        let (rows, count) = (self.steps.len(), self.options.parts.max(1));
        let check_every = self.options.check_every;
        let mut done = 0;
        for part in 1..=count {
            let end = (rows as u128 * part as u128 / count as u128) as usize;
            let first = done;
            let before = self.calls(work);
            let mut wall = Duration::ZERO;
            while done < end {
                let next = stop(done, PROGRESS_ROWS).min(end);
                let next = check_every.map_or(next, |every| next.min(stop(done, every)));
                let next = match (done..next).contains(&self.peak_row) {
                    true => self.peak_row + 1,
                    false => next,
                };
                let next = match self.options.watch {
                    Some(_) => done + 1,
                    None => next,
                };
                wall += self.stretch(done, next, work)?;
                if next == self.peak_row + 1 && self.rows_done <= rows as u64 {
                    self.at_peak = Some(self.allocator.fragmentation());
                }
                done = next;
                if check_every.is_some_and(|every| done.is_multiple_of(every)) {
                    let checked = self.allocator.check();
                    checked.map_err(|error| (done - 1, error))?;
                }
                (self.options.progress)(self.rows_done);
            }
            parts.push(self.pass(end - first, wall, &before, work));
            total += wall;
        }
        let start = Instant::now();
        // The other rows of a block have the same slot, and requests that failed have none.
        let allocations = self
            .steps
            .iter()
            .filter(|step| matches!(step.action, Action::Allocate));
        for step in allocations {
            if let Some(block) = self.slots[step.id].take() {
                work.releasing(step.use_of(&block, &self.streams))
                    .map_err(|error| (self.steps.len() - 1, error.into()))?;
                block
                    .free()
                    .map_err(|failed| (self.steps.len() - 1, failed.error))?;
            }
        }
        Ok(total + start.elapsed())
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
        let outcome = rows(steps, &mut self.slots, &self.streams, self.allocator, work)
            .map_err(|(row, error)| (from + row, error));
        let took = start.elapsed();
        if let Some(watch) = &mut self.options.watch {
            let (row, error) = match &outcome {
                Ok(()) => (to - 1, None),
                Err((row, error)) => (*row, Some(error)),
            };
            let step = &self.steps[row];
            let block = match step.action {
                Action::Allocate => self.slots[step.id].as_ref(),
                _ => None,
            };
            watch(&Watched {
                row,
                allocator: self.allocator,
                block,
                error,
            });
        }
        outcome?;
        self.rows_done += (to - from) as u64;
        Ok(took)
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
            stream: &streams[self.stream as usize],
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
                let stream = &streams[step.stream as usize];
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
            Action::Attempt => {
                let stream = &streams[step.stream as usize];
                let block = allocator.allocate(step.bytes as usize, stream);
                drop(block.map_err(|error| (row, error))?);
            }
            Action::Pass => {}
        }
        work.row_over();
    }
    Ok(())
}

fn steps(trace: &Trace, serve_failed: bool) -> Vec<Step> {
    let rows = trace.rows().iter().enumerate();
    rows.map(|(index, row)| {
        let block = trace.allocations().get(row.id);
        let streams = trace.streams();
        let stream = match (row.op, streams.binary_search(&row.stream)) {
            (Op::Oom, Err(_)) => streams.len(),
            (_, Ok(index) | Err(index)) => index,
        };
        Step {
            action: match row.op {
                Op::Allocate => Action::Allocate,
                Op::Oom if serve_failed => Action::Attempt,
                Op::Oom => Action::Pass,
                _ if block.is_some_and(|block| block.released == Some(index)) => Action::Release,
                _ => Action::Pass,
            },
            // Stream numbers have 32 bits, so their indices have no more.
            stream: stream as u32,
            id: row.id,
            bytes: match row.op {
                Op::Oom => row.bytes,
                _ => block.map_or(0, |block| block.bytes),
            },
        }
    })
    .collect()
}
