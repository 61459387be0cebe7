//! `cualloc replay`.

use crate::machine::Machine;
use crate::options::{ReplayOptions, TraceOptions};
use crate::output::{self, Output, Table, note};
use crate::{Failure, Outcome, input};
use cualloc::Error;
use cualloc::allocator::{Config, Fragmentation, Policy};
use cualloc::driver::CallCounts;
use cualloc::trace::{Pass, Replay, ReplayReport, Trace};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;

/// One line of `--json`.
#[derive(Serialize)]
struct Line<'a> {
    trace: &'a str,
    device: &'a str,
    policy: &'a str,
    rows: usize,
    allocations: usize,
    streams: usize,
    limit_bytes: Option<u64>,
    requested_peak_bytes: u64,
    /// Of the first replay.
    reserved_peak_bytes: u64,
    /// Of the first replay.
    ratio: Option<f64>,
    /// Of all replays.
    ratio_max: Option<f64>,
    completed: bool,
    /// Counted from 1; the header is not a row.
    failed_row: Option<usize>,
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
    level: u32,
    views: u64,
    view_bytes: u64,
    last_growth: Option<&'static str>,
    largest_maps: u64,
    bursts: u64,
    cut: u64,
    unbounded: u64,
    repaid_handles: u64,
    self_test: &'static str,
}

impl MemoryLine {
    fn new(report: &ReplayReport) -> MemoryLine {
        let (peak, packing) = (report.at_peak.as_ref(), &report.packing);
        let stranded = |f: &Fragmentation| f.stranded.iter().map(|s| s.bytes).sum();
        MemoryLine {
            free_bytes: peak.map(|f| f.free),
            largest_free_bytes: peak.map(|f| f.largest),
            fragmentation: peak.map(Fragmentation::ratio),
            stranded_bytes: peak.map(stranded),
            view_live_bytes: peak.map(|f| f.view_live),
            soft_cap_bytes: packing.soft_cap,
            level: packing.level,
            views: packing.views,
            view_bytes: packing.view_bytes,
            last_growth: packing.last_growth.map(|growth| growth.reason.name()),
            largest_maps: packing.bursts.largest,
            bursts: packing.bursts.spent,
            cut: packing.bursts.cut,
            unbounded: packing.bursts.unbounded,
            repaid_handles: packing.bursts.repaid,
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

pub fn run(options: &ReplayOptions, output: &mut Output) -> Outcome {
    let machine = Machine::choose(&options.traces.machine)?;
    machine.check_lag(options.traces.lag)?;
    let json = options.traces.machine.json;
    let table = table(&options.traces.files);
    if !json {
        output.line(&table.header())?;
    }
    let mut well = true;
    for path in &options.traces.files {
        let trace = match input::read(path) {
            Ok(trace) => trace,
            Err(error) => {
                output::complain(&error);
                well = false;
                continue;
            }
        };
        let Some(report) = replay(&machine, path, &trace, options)? else {
            well = false;
            continue;
        };
        let line = line(&machine, &trace, &report);
        if json {
            output.json(&line)?;
        } else {
            output.line(&table.row(cells(&line, &report)))?;
        }
        well &= report_faults(path, &report);
    }
    Ok(well)
}

/// Replays one trace; complains and gives `None` if it could not even begin.
fn replay(
    machine: &Machine,
    path: &Path,
    trace: &Trace,
    options: &ReplayOptions,
) -> Result<Option<ReplayReport>, Failure> {
    let ground = machine.context(options.traces.lag)?;
    let limit = options
        .limit
        .map(|limit| limit.bytes(trace.requested_peak()));
    let rows = trace.rows().len() as u64 * u64::from(options.repeat);
    let bar = output::progress(rows, trace.name());
    let report = begin(trace, &options.traces, limit)
        .repeat(options.repeat as usize)
        .parts(options.parts as usize)
        .check_every(options.check_every.map(|rows| rows as usize))
        .on_progress(|done| bar.set_position(done))
        .run(ground.context());
    bar.finish_and_clear();
    match report {
        Ok(report) => Ok(Some(report)),
        Err(error) => {
            cannot_begin(path, &error);
            Ok(None)
        }
    }
}

/// A replay as all commands on traces set it up.
pub fn begin<'a>(trace: &'a Trace, options: &TraceOptions, limit: Option<u64>) -> Replay<'a> {
    let config = Config::new()
        .policy(options.policy())
        .views(!options.no_views)
        .limit(limit);
    Replay::new(trace)
        .config(config)
        .verify(options.verify)
        .seed(options.seed)
}

/// Says on stderr why a trace cannot be replayed.
pub fn cannot_begin(path: &Path, error: &Error) {
    let (what, words) = match error {
        Error::Driver(error) => ("the device cannot be used", output::chain(error)),
        error => ("the allocator cannot be made", output::chain(error)),
    };
    note!("error: {}: {what}: {words}", path.display());
}

fn line<'a>(machine: &'a Machine, trace: &'a Trace, report: &ReplayReport) -> Line<'a> {
    let peak = trace.requested_peak();
    Line {
        trace: trace.name(),
        device: machine.name(),
        policy: policy_name(report.policy),
        rows: trace.rows().len(),
        allocations: trace.allocations().len(),
        streams: trace.streams().len(),
        limit_bytes: report.limit,
        requested_peak_bytes: peak,
        reserved_peak_bytes: report.reserved_peak,
        ratio: output::ratio_of(report.reserved_peak, peak),
        ratio_max: output::ratio_of(report.reserved_peak_max(), peak),
        completed: report.failed.is_none(),
        failed_row: report.failed.map(|(_, row)| row),
        memory: MemoryLine::new(report),
        replays: report.passes.iter().map(ReplayLine::new).collect(),
    }
}

/// The policy as `--policy` calls it.
pub fn policy_name(policy: Policy) -> &'static str {
    match policy {
        Policy::Classic => "classic",
        _ => "packed",
    }
}

/// Says on stderr everything that went wrong; whether nothing did.
pub fn report_faults(path: &Path, report: &ReplayReport) -> bool {
    let file = path.display();
    if let Some((pass, row)) = report.failed {
        let line = Trace::line_of(row.saturating_sub(1));
        let words = match (&report.error, &report.check) {
            // The only calls of the replayer's own between the rows.
            (Some(Error::Driver(error)), _) if error.call() == "cuLaunchKernel" => {
                format!(
                    "the device could not be given work: {}",
                    output::chain(error)
                )
            }
            (Some(error), _) => output::chain(error),
            (None, check) => check
                .as_ref()
                .map_or_else(String::new, |error| output::chain(error)),
        };
        note!("error: {file}:{line}: replay {pass} failed at row {row}: {words}");
    }
    if let Some(mismatches) = report.mismatches.filter(|count| *count > 0) {
        note!("error: {file}: {mismatches} words were not what their block was filled with");
    }
    if let Some(error) = &report.check {
        note!(
            "error: {file}: the allocator's heap are wrong: {}",
            output::chain(error)
        );
    }
    if let Some(error) = &report.close {
        note!(
            "error: {file}: the allocator cannot be closed: {}",
            output::chain(error)
        );
    }
    if report.leaked_bytes > 0 {
        note!(
            "error: {file}: {} bytes are held after the end",
            report.leaked_bytes
        );
    }
    for text in &report.reports {
        note!("error: {file}: the simulator reports: {text}");
    }
    report.is_clean()
}

fn table(files: &[std::path::PathBuf]) -> Table {
    Table::new(&[
        ("trace", output::name_width(files)),
        ("policy", 7),
        ("rows", 7),
        ("allocs", 7),
        ("streams", 0),
        ("requested MiB", 0),
        ("reserved MiB", 0),
        ("ratio", 6),
        ("max", 6),
        ("calls first", 0),
        ("calls last", 0),
        ("handles last", 0),
        ("ns/row last", 0),
        ("result", 8),
    ])
}

fn cells(line: &Line<'_>, report: &ReplayReport) -> Vec<String> {
    let dash = || "-".to_owned();
    let first = report.passes.first();
    let last = report.passes.last();
    let calls = |pass: Option<&Pass>| pass.map_or_else(dash, |pass| pass.calls.total().to_string());
    let end = match (report.is_clean(), line.failed_row) {
        (true, _) if report.mismatches.is_some() => "verified".to_owned(),
        (true, _) => "ok".to_owned(),
        (false, Some(row)) => format!("FAILED at row {row}"),
        (false, None) => "FAILED".to_owned(),
    };
    vec![
        line.trace.to_owned(),
        line.policy.to_owned(),
        line.rows.to_string(),
        line.allocations.to_string(),
        line.streams.to_string(),
        output::mebibytes(line.requested_peak_bytes),
        output::mebibytes(line.reserved_peak_bytes),
        output::ratio(line.ratio),
        output::ratio(line.ratio_max),
        calls(first),
        calls(last),
        last.map_or_else(dash, |pass| pass.calls.handle_ops().to_string()),
        last.map_or_else(dash, |pass| format!("{:.0}", pass.nanos_per_row)),
        end,
    ]
}
