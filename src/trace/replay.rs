//! Replaying a trace on an allocator.
//!
//! Blocks are freed at their release point, so a block that was also used on other streams is held until those uses
//! were over in the recorded program. Blocks that live to the end are freed after the last row. Between passes nothing
//! waits for the device.

use super::format::{Op, Trace};
use super::stage::ReplayDevice;
use super::work::{Kernels, Nothing, Use, Work};
use crate::allocator::{Allocator, Block, Config, Fragmentation, Policy, Stats};
use crate::driver::{CallCounts, Context, Stream};
use crate::error::Error;
use std::time::{Duration, Instant};

/// Number of rows between two progress reports; the time of a report is not measured.
const PROGRESS_ROWS: usize = 4096;

/// A replay of a trace: on a new allocator, over a real or a simulated device.
///
/// Blocks of the trace are freed at their release points, and those that live to the end after the last row. Work of a
/// simulated device in `Mode::Lag` completes that many rows after its own.
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

type Watch<'a> = dyn FnMut(&Watched<'_>) + 'a;

/// The outcome of a row of a replay, passed to the callback of [`Replay::watch`].
#[derive(Debug)]
#[non_exhaustive]
pub struct Watched<'a> {
    /// The index of the row in [`Trace::rows`].
    pub row: usize,
    /// The allocator as the row left it.
    pub allocator: &'a Allocator,
    /// The block that the row allocated; `None` if it did something else, or failed.
    pub block: Option<&'a Block>,
    /// Why the row failed. It is the last row reported, and all blocks are still live.
    pub error: Option<&'a Error>,
}

impl<'a> Replay<'a> {
    /// Creates a replay of one pass with the device's best policy, no limit, and no verification.
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

    /// Sets the number of passes, one after another on one allocator; nothing waits for the device between them.
    pub fn repeat(mut self, times: usize) -> Self {
        self.repeat = times;
        self
    }

    /// Sets whether the report contains every pass (the default), or only the first and the last, so that its size does
    /// not grow with their number.
    pub fn keep_all(mut self, on: bool) -> Self {
        self.keep_all = on;
        self
    }

    /// Sets the number of parts of equal length, from 1, into which the rows of each pass are divided for the report.
    pub fn parts(mut self, times: usize) -> Self {
        self.parts = times;
        self
    }

    /// Sets the allocator's settings.
    pub fn config(mut self, config: Config) -> Self {
        self.config = config;
        self
    }

    /// Sets whether kernels fill each block when it is allocated and check it before it is freed.
    pub fn verify(mut self, on: bool) -> Self {
        self.verify = on;
        self
    }

    /// Sets the seed that decides which checks are delayed, when verifying over several streams.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Sets after how many rows the allocator's data structures are checked, which is always done after the last pass;
    /// the time of a check is not measured.
    pub fn check_every(mut self, rows: Option<usize>) -> Self {
        self.check_every = rows;
        self
    }

    /// Sets whether requests that failed in the recorded program are made, too: each is allocated and freed at its row,
    /// so that a completed replay had memory for all of them. Otherwise their rows do nothing.
    pub fn serve_failed(mut self, on: bool) -> Self {
        self.serve_failed = on;
        self
    }

    /// Sets the progress callback, which gets the number of rows done over all passes; its time is not measured. A
    /// search for the [`capacity`](Self::capacity) passes the limit in bytes before each probe instead.
    pub fn on_progress(mut self, callback: impl FnMut(u64) + 'a) -> Self {
        self.progress = Box::new(callback);
        self
    }

    /// Sets the callback for each completed row, and for the one that failed; its time is not measured. Frees after the
    /// last row are not reported.
    pub fn watch(mut self, callback: impl FnMut(&Watched<'_>) + 'a) -> Self {
        self.watch = Some(Box::new(callback));
        self
    }

    /// Replays the trace. A failed pass, and any other fault, is in the report and not returned as an error.
    ///
    /// # Errors
    /// Streams, kernels or the allocator cannot be created, or the device fails outside the rows.
    pub fn run(mut self, on: &Context) -> Result<ReplayReport, Error> {
        self.run_on(&ReplayDevice::of(on)?)
    }

    pub(super) fn run_on(&mut self, stage: &ReplayDevice) -> Result<ReplayReport, Error> {
        // A program that allocates device memory has its context current, and so has this one. It is made current
        // through the replayer's own driver, so that the allocator is not charged for a switch.
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
            // One more for failed requests on streams that own no block.
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
                    // The first failure is more specific than later errors of a lost device.
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

/// The cost of a pass over the rows, or of a part of one.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Pass {
    /// Number of its rows.
    pub rows: usize,
    /// The peak of reserved bytes, from the beginning of the pass.
    pub reserved_peak: u64,
    /// The driver calls of the allocator. Their time is measured on a GPU, and modelled on the simulator.
    pub calls: CallCounts,
    /// Wall-clock nanoseconds per row, including the submission of work to the device.
    pub nanos_per_row: f64,
    /// The same by parts of the rows; empty for a part. Frees after the last row are in none of them.
    pub parts: Vec<Pass>,
}

/// The result of a replay.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct ReplayReport {
    /// The policy used; never [`Policy::Auto`].
    pub policy: Policy,
    /// The limit used.
    pub limit: Option<u64>,
    /// The peak of reserved bytes during the first pass, or until that failed.
    pub reserved_peak: u64,
    most: u64,
    /// The completed passes; only the first and the last one without [`Replay::keep_all`].
    pub passes: Vec<Pass>,
    /// The pass and the row where the replay failed, both counted from 1; the header is not a row. A failure to free
    /// blocks that live to the end counts at the last row.
    pub failed: Option<(usize, usize)>,
    /// The error of that row.
    pub error: Option<Error>,
    /// The layout of free memory in the first pass at the row with the most live bytes; `None` if it was not reached.
    pub at_peak: Option<Fragmentation>,
    /// The allocator's statistics after the last pass, or at the failure.
    pub stats: Stats,
    /// Number of 32-bit words that differed from what their block was filled with; `None` without [`Replay::verify`].
    pub mismatches: Option<u64>,
    /// The inconsistency found by the allocator's own check.
    pub check: Option<Error>,
    /// Why the allocator could not be closed.
    pub close: Option<Error>,
    /// Bytes of memory that are still held after the allocator was closed.
    pub leaked_bytes: u64,
    /// Faults found by the simulator: races, use of unmapped memory, and the like.
    pub reports: Vec<String>,
}

impl ReplayReport {
    /// Whether everything succeeded: every pass completed, no wrong word, consistent data structures, the allocator
    /// closed, nothing leaked, and no faults reported.
    pub fn is_clean(&self) -> bool {
        self.failed.is_none()
            && self.mismatches.unwrap_or(0) == 0
            && self.check.is_none()
            && self.close.is_none()
            && self.leaked_bytes == 0
            && self.reports.is_empty()
    }

    /// Returns the largest peak of reserved bytes over all passes.
    pub fn reserved_peak_max(&self) -> u64 {
        self.most
    }
}

#[derive(Clone, Copy)]
struct Step {
    action: Action,
    stream: u32,
    id: usize,
    bytes: u64,
}

#[derive(Clone, Copy)]
enum Action {
    Allocate,
    Release,
    /// Makes a request that failed in the recorded program, and frees its block.
    Attempt,
    /// The row is not its block's release point, or has no block.
    Pass,
}

struct Run<'a, 'b> {
    steps: Vec<Step>,
    /// The row with the most live bytes, and the memory layout there in the first replay.
    peak_row: usize,
    at_peak: Option<Fragmentation>,
    slots: Vec<Option<Block>>,
    streams: Vec<Stream>,
    stage: &'a ReplayDevice,
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
            ..ReplayReport::default()
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

    /// Returns the difference since `before`.
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

    /// Returns the allocator's calls so far; their driver time excludes the replayer's own work.
    fn calls(&self, work: &impl Work) -> CallCounts {
        let calls = self.stage.context().driver().calls();
        let nanos = self.stage.driver_nanos(&calls);
        calls.with_nanos(nanos.saturating_sub(work.modelled_nanos()))
    }

    /// Runs one pass: returns its time, or the index of the failed row.
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
        // The other rows of a block have the same slot, and failed requests have none.
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

/// Returns the first multiple of `every` after a row.
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

/// Replays consecutive rows; on failure returns which of them failed.
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
            // Stream numbers have 32 bits, so their indices fit as well.
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
