//! `cualloc replay`.

use crate::input::Input;
use crate::machine::Machine;
use crate::options::{GlobalOptions, PolicyChoice, ReplayOptions};
use crate::output::{self, Output, SCHEMA};
use crate::settings::Settings;
use crate::size::Size;
use crate::table::{Cell, Column, Table};
use crate::{Failure, Outcome, input, text};
use cualloc::Error;
use cualloc::allocator::Fragmentation;
use cualloc::driver::{CallCounts, DriverError};
use cualloc::trace::{Pass, ReplayReport, Trace};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// What the figures mean, behind a comparison of the policies.
const LEGEND: &str = "ratio is the peak of memory held over the peak of memory requested in the first replay (1.0 is \
    the least possible), max the same over all replays; calls are those of the CUDA driver in the first and the last replay";

/// One line of `--json`.
#[derive(Serialize)]
struct Line<'a> {
    schema: u32,
    trace: &'a str,
    device: &'a str,
    policy: &'a str,
    rows: usize,
    allocations: usize,
    streams: usize,
    /// What `CUALLOC_CONFIG` says.
    config: Option<&'a str>,
    limit_bytes: Option<u64>,
    requested_peak_bytes: u64,
    /// Requests that failed in the recorded program, which the replay does not make.
    failed_requests: usize,
    /// What would have been live at most had they succeeded.
    required_peak_bytes: u64,
    /// Of the first replay.
    reserved_peak_bytes: u64,
    /// Of the first replay; null if that failed, for what it held until then says nothing about the trace.
    ratio: Option<f64>,
    /// Of all replays; null if one failed.
    ratio_max: Option<f64>,
    completed: bool,
    /// Counted from 1; the header is not a row.
    failed_row: Option<usize>,
    /// What went wrong first.
    error: Option<String>,
    /// All that went wrong.
    reasons: Vec<String>,
    /// What the file lacks.
    warnings: Vec<String>,
    memory: MemoryLine,
    replays: Vec<ReplayLine>,
}

/// How the memory lay, and why there was as much of it.
#[derive(Serialize)]
struct MemoryLine {
    /// At the first replay's peak of requested bytes: free bytes, those of the largest run of them,
    /// the share outside of it, and what streams keep from each other. Null if it was not reached.
    free_bytes: Option<u64>,
    largest_free_bytes: Option<u64>,
    fragmentation: Option<f64>,
    stranded_bytes: Option<u64>,
    view_live_bytes: Option<u64>,
    /// After the last replay.
    soft_cap_bytes: u64,
    regime: &'static str,
    views: u64,
    view_bytes: u64,
    last_growth: Option<&'static str>,
    self_test: &'static str,
}

impl MemoryLine {
    fn new(report: &ReplayReport) -> MemoryLine {
        let (peak, packing) = (report.at_peak.as_ref(), &report.stats.packing);
        let stranded = |f: &Fragmentation| f.stranded.iter().map(|s| s.bytes).sum();
        MemoryLine {
            free_bytes: peak.map(|f| f.free),
            largest_free_bytes: peak.map(|f| f.largest),
            fragmentation: peak.map(Fragmentation::ratio),
            stranded_bytes: peak.map(stranded),
            view_live_bytes: peak.map(|f| f.view_live),
            soft_cap_bytes: packing.soft_cap,
            regime: packing.regime.name(),
            views: packing.views,
            view_bytes: packing.view_bytes,
            last_growth: packing.last_growth.map(|growth| growth.reason.name()),
            self_test: packing.self_test.name(),
        }
    }
}

#[derive(Serialize)]
struct ReplayLine {
    reserved_peak_bytes: u64,
    driver_calls: BTreeMap<String, u64>,
    handle_ops: u64,
    driver_ns: u64,
    ns_per_row: f64,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    parts: Vec<PartLine>,
}

#[derive(Serialize)]
struct PartLine {
    rows: usize,
    driver_calls: BTreeMap<String, u64>,
    handle_ops: u64,
    driver_ns: u64,
}

impl PartLine {
    fn new(part: &Pass) -> PartLine {
        PartLine {
            rows: part.rows,
            driver_calls: by_name(&part.calls),
            handle_ops: part.calls.handle_ops(),
            driver_ns: part.calls.nanos(),
        }
    }
}

fn by_name(calls: &CallCounts) -> BTreeMap<String, u64> {
    calls
        .iter()
        .map(|(name, count)| (name.to_owned(), count))
        .collect()
}

impl ReplayLine {
    fn new(pass: &Pass) -> ReplayLine {
        let several = pass.parts.len() > 1;
        ReplayLine {
            reserved_peak_bytes: pass.reserved_peak,
            driver_calls: by_name(&pass.calls),
            handle_ops: pass.calls.handle_ops(),
            driver_ns: pass.calls.nanos(),
            ns_per_row: pass.nanos_per_row,
            parts: if several {
                pass.parts.iter().map(PartLine::new).collect()
            } else {
                Vec::new()
            },
        }
    }
}

pub fn run(global: &GlobalOptions, options: &ReplayOptions, output: &mut Output) -> Outcome {
    if options.parts.is_some() && !global.json {
        return Err(Failure::Usage("--parts needs --json".to_owned()));
    }
    let traces = &options.traces;
    check(&traces.files)?;
    let policies = match options.compare {
        true => vec![Some(PolicyChoice::Packed), Some(PolicyChoice::Classic)],
        false => vec![traces.policy],
    };
    let settings: Vec<_> = policies
        .into_iter()
        .map(|policy| Settings::read(policy, traces.no_views))
        .collect::<Result<_, _>>()?;
    let machine = Machine::choose(global, output)?;
    machine.check_lag(traces.lag)?;
    if let Some(settings) = settings.first() {
        settings.announce(output);
    }
    let terminal = if traces.wide { None } else { output::width() };
    let table = table(&traces.files, terminal);
    let mut well = true;
    for path in &traces.files {
        let Input {
            trace, warnings, ..
        } = match input::read(path, &traces.input, output) {
            Ok(input) => input,
            Err(error) => {
                output.failed(&input::name(path), error.line(), &error)?;
                well = false;
                continue;
            }
        };
        if let Some(failed) = failed_requests(&trace) {
            let file = text::file(path, input::STDIN);
            output.note(&format!(
                "{file}: {failed}; replay does not repeat failed requests"
            ));
        }
        for settings in &settings {
            let report = match replay(&machine, &trace, options, settings, output)? {
                Ok(report) => report,
                Err(error) => {
                    let file = text::file(path, input::STDIN);
                    output.failed_file(&file, trace.name(), &error)?;
                    well = false;
                    continue;
                }
            };
            let faults = faults(&report);
            let described = (&trace, warnings.clone());
            let line = line(&machine, settings, described, &report, &faults);
            if output.json {
                output.json(&line)?;
            } else {
                output.row(&table, cells(&line, &report, &table))?;
            }
            complain(path, &faults);
            well &= report.is_clean();
        }
    }
    if options.compare && !output.json {
        output.note(LEGEND);
    }
    Ok(well)
}

/// What there is to say of the requests that failed in a recorded program, if any did.
pub fn failed_requests(trace: &Trace) -> Option<String> {
    let (row, bytes) = trace.failed_requests().max_by_key(|(_, bytes)| *bytes)?;
    let (count, line, size) = (
        trace.failed_requests().count(),
        Trace::line_of(row),
        Size(bytes),
    );
    Some(match count {
        1 => format!("one request failed in the recorded program, of {size} (line {line})"),
        _ => format!(
            "{count} requests failed in the recorded program, the largest of {size} (line {line})"
        ),
    })
}

/// Refuses files that cannot all be read.
pub fn check(files: &[PathBuf]) -> Result<(), Failure> {
    match files.iter().filter(|path| text::is_standard(path)).count() {
        0 | 1 => Ok(()),
        _ => Err(Failure::Usage(
            "- is given twice: stdin can be read once".to_owned(),
        )),
    }
}

/// A replay did not come to its first row.
#[derive(Debug, thiserror::Error)]
pub enum CannotBegin {
    #[error("the device cannot be used")]
    Device(#[source] DriverError),
    #[error("the allocator cannot be made")]
    Allocator(#[source] Error),
}

impl From<Error> for CannotBegin {
    fn from(error: Error) -> CannotBegin {
        match error {
            Error::Driver(error) => CannotBegin::Device(error),
            error => CannotBegin::Allocator(error),
        }
    }
}

/// Replays one trace; the inner error if that could not even begin.
fn replay(
    machine: &Machine,
    trace: &Trace,
    options: &ReplayOptions,
    settings: &Settings,
    output: &Output,
) -> Result<Result<ReplayReport, CannotBegin>, Failure> {
    let ground = machine.context(options.traces.lag)?;
    let limit = match options.limit.or_else(|| settings.limit()) {
        None => None,
        Some(limit) => Some(limit.bytes(trace.requested_peak(), machine.memory()?)),
    };
    let rows = trace.rows().len() as u64 * u64::from(options.repeat);
    let bar = output.progress(rows, trace.name());
    let report = settings
        .replay(trace, &options.traces, limit)
        .repeat(options.repeat as usize)
        .keep_all(output.json)
        .parts(usize::from(options.parts.unwrap_or(1)))
        .check_every(options.check_every.map(|rows| rows as usize))
        .on_progress(|done| bar.set_position(done))
        .run(ground.context());
    bar.finish_and_clear();
    Ok(report.map_err(CannotBegin::from))
}

fn line<'a>(
    machine: &'a Machine,
    settings: &'a Settings,
    (trace, warnings): (&'a Trace, Vec<String>),
    report: &ReplayReport,
    faults: &[Fault],
) -> Line<'a> {
    let peak = trace.requested_peak();
    let ratio = |held, complete: bool| output::ratio_of(held, peak).filter(|_| complete);
    Line {
        schema: SCHEMA,
        trace: trace.name(),
        device: machine.name(),
        policy: report.policy.name(),
        rows: trace.rows().len(),
        allocations: trace.allocations().len(),
        streams: trace.streams().len(),
        config: settings.text(),
        limit_bytes: report.limit,
        requested_peak_bytes: peak,
        failed_requests: trace.failed_requests().count(),
        required_peak_bytes: trace.required_peak(),
        reserved_peak_bytes: report.reserved_peak,
        ratio: ratio(report.reserved_peak, !report.passes.is_empty()),
        ratio_max: ratio(report.reserved_peak_max(), report.failed.is_none()),
        completed: report.failed.is_none(),
        failed_row: report.failed.map(|(_, row)| row),
        error: faults.first().map(|fault| fault.text.clone()),
        reasons: faults.iter().map(|fault| fault.text.clone()).collect(),
        warnings,
        memory: MemoryLine::new(report),
        replays: report.passes.iter().map(ReplayLine::new).collect(),
    }
}

/// What went wrong in a replay, and at which line of its file.
pub struct Fault {
    line: Option<u64>,
    pub text: String,
}

impl Fault {
    /// One that no line is to blame for.
    pub fn new(text: String) -> Fault {
        Fault { line: None, text }
    }
}

/// Everything that went wrong.
pub fn faults(report: &ReplayReport) -> Vec<Fault> {
    let mut faults = Vec::new();
    if let Some((pass, row)) = report.failed {
        let why = match &report.error {
            // The only calls of the replayer's own between the rows.
            Some(Error::Driver(error)) if error.call() == "cuLaunchKernel" => {
                format!(
                    ": the device could not be given work: {}",
                    text::chain(error)
                )
            }
            Some(error) => format!(": {}", text::chain(error)),
            None => String::new(),
        };
        faults.push(Fault {
            line: Some(Trace::line_of(row.saturating_sub(1))),
            text: format!("replay {pass} failed at row {row}{why}"),
        });
    }
    let mut also = |text: String| faults.push(Fault::new(text));
    if let Some(mismatches) = report.mismatches.filter(|count| *count > 0) {
        also(format!(
            "{mismatches} words were not what their block was filled with"
        ));
    }
    if let Some(error) = &report.check {
        also(format!(
            "the allocator's heap is not in order: {}",
            text::chain(error)
        ));
    }
    if let Some(error) = &report.close {
        also(format!(
            "the allocator cannot be closed: {}",
            text::chain(error)
        ));
    }
    if report.leaked_bytes > 0 {
        also(format!(
            "{} bytes are held after the end",
            report.leaked_bytes
        ));
    }
    for told in &report.reports {
        also(format!("the simulator reports: {told}"));
    }
    faults
}

/// Says on stderr what went wrong with a file.
pub fn complain(path: &Path, faults: &[Fault]) {
    let file = text::file(path, input::STDIN);
    for fault in faults {
        match fault.line {
            Some(line) => output::error(&format!("{file}:{line}: {}", fault.text)),
            None => output::error(&format!("{file}: {}", fault.text)),
        }
    }
}

/// The width of the longest name that these files' traces can have.
pub fn name_width(files: &[PathBuf]) -> usize {
    let names = files.iter().map(|path| text::visible(&input::name(path)));
    let widths = names.map(|name| console::measure_text_width(&name));
    widths.max().unwrap_or(0)
}

fn table(files: &[PathBuf], terminal: Option<usize>) -> Table {
    let columns = vec![
        Column::new("trace", "", name_width(files), 0),
        Column::new("policy", "", 7, 5),
        Column::new("rows", "", 7, 6),
        Column::new("allocs", "", 7, 9),
        Column::new("streams", "", 0, 8),
        Column::new("requested", "MiB", 0, 3),
        Column::new("reserved", "MiB", 0, 2),
        Column::new("ratio", "", 6, 0),
        Column::new("max", "", 6, 4),
        Column::new("calls", "first", 7, 3),
        Column::new("calls", "last", 7, 1),
        Column::new("handles", "last", 0, 7),
        Column::new("ns/row", "last", 0, 6),
        Column::new("result", "", 8, 0),
    ];
    Table::new(columns, terminal)
}

fn cells(line: &Line<'_>, report: &ReplayReport, table: &Table) -> Vec<Cell> {
    let dash = || "-".to_owned();
    let first = report.passes.first();
    let last = report.passes.last();
    let calls = |pass: Option<&Pass>| pass.map_or_else(dash, |pass| pass.calls.total().to_string());
    let end = match (report.is_clean(), line.failed_row) {
        (true, _) if report.mismatches.is_some() => "verified".to_owned(),
        (true, _) => "ok".to_owned(),
        (false, Some(row)) if !table.is_fitted() => format!("FAILED at row {row}"),
        (false, _) => "FAILED".to_owned(),
    };
    vec![
        line.trace.into(),
        line.policy.into(),
        line.rows.to_string().into(),
        line.allocations.to_string().into(),
        line.streams.to_string().into(),
        output::mebibytes(line.requested_peak_bytes).into(),
        output::mebibytes(line.reserved_peak_bytes).into(),
        output::ratio(line.ratio).into(),
        output::ratio(line.ratio_max).into(),
        calls(first).into(),
        calls(last).into(),
        last.map_or_else(dash, |pass| pass.calls.handle_ops().to_string())
            .into(),
        last.map_or_else(dash, |pass| output::nanos(pass.nanos_per_row))
            .into(),
        Cell::verdict(end, report.is_clean()),
    ]
}
