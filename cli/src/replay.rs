//! `cualloc replay`.

use crate::input::Input;
use crate::machine::Machine;
use crate::options::{GlobalOptions, PlacementOptions, PolicyChoice, ReplayOptions, TableOptions};
use crate::output::{self, Output, SCHEMA};
use crate::settings::Settings;
use crate::size::Size;
use crate::table::{Cell, Column, Table};
use crate::{Failure, FileError, Outcome, for_each, input, text};
use cualloc::Error;
use cualloc::allocator::Fragmentation;
use cualloc::trace::{Pass, ReplayReport, Trace};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Explains the figures, printed after a comparison of the policies.
const LEGEND: &str = "ratio is the peak of memory held over the peak of memory requested in the first replay (1.0 is \
    the least possible), max the same over all replays; calls are those of the CUDA driver in the first and the last replay";

pub fn run(global: &GlobalOptions, options: &ReplayOptions, output: &mut Output) -> Outcome {
    if options.parts.is_some() && !global.json {
        return Err(Failure::usage("--parts needs --json"));
    }
    let (files, placement) = (&options.traces.table, options.traces.placement);
    check(&files.files)?;
    let policies = match options.compare {
        true => vec![Some(PolicyChoice::Packed), Some(PolicyChoice::Classic)],
        false => vec![placement.policy],
    };
    let settings = policies.into_iter();
    let settings = settings.map(|policy| {
        Settings::read(&PlacementOptions {
            policy,
            ..placement
        })
    });
    let settings = settings.collect::<Result<Vec<_>, _>>()?;
    let machine = Machine::choose(global, output)?;
    machine.check_lag(files.lag)?;
    if let Some(settings) = settings.first() {
        settings.announce(output);
    }
    let table = table(files);
    let well = for_each(&files.files, output, |path, output| {
        let input = input::read(path, &files.input, output)?;
        if let Some(failed) = failed_requests(&input.trace) {
            let file = text::file(path, input::STDIN);
            output.note(&format!(
                "{file}: {failed}; replay does not repeat failed requests"
            ));
        }
        let mut well = true;
        for settings in &settings {
            let shown = replay(&machine, path, &input, options, settings, output);
            let shown = shown.and_then(|report| {
                let faults = faults(&report);
                if output.json {
                    output.json(&object(&machine, settings, &input, &report, &faults))?;
                } else {
                    output.row(&table, cells(&input.trace, &report, &table))?;
                }
                print_faults(path, &faults);
                Ok(report.is_clean())
            });
            well &= output.report_outcome(shown)?;
        }
        Ok(well)
    })?;
    if options.compare && !output.json {
        output.note(LEGEND);
    }
    Ok(well)
}

/// Describes the requests that failed in the recorded program, if any did.
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

/// Rejects a list of files that cannot all be read.
pub fn check(files: &[PathBuf]) -> Result<(), Failure> {
    match files.iter().filter(|path| text::is_standard(path)).count() {
        0 | 1 => Ok(()),
        _ => Err(Failure::usage("- is given twice: stdin can be read once")),
    }
}

fn replay(
    machine: &Machine,
    path: &Path,
    Input { trace, .. }: &Input,
    options: &ReplayOptions,
    settings: &Settings,
    output: &Output,
) -> Result<ReplayReport, Failure> {
    let device = machine.context(options.traces.table.lag)?;
    let limit = settings.limit_for(options.limit.limit, trace, machine.memory()?);
    let rows = trace.rows().len() as u64 * u64::from(options.repeat);
    let bar = output.progress(rows, trace.name());
    let report = settings
        .replay(trace, &options.traces, limit)
        .repeat(options.repeat as usize)
        .keep_all(output.json)
        .parts(usize::from(options.parts.unwrap_or(1)))
        .check_every(options.check_every.map(|rows| rows as usize))
        .on_progress(|done| bar.set_position(done))
        .run(device.context());
    bar.finish_and_clear();
    Ok(report.map_err(|error| FileError::cannot_replay(path, error))?)
}

/// Returns the peak of reserved over that of requested memory, in the first replay and over all. None where a replay
/// failed: its reserved bytes up to then say nothing about the trace.
fn ratios(trace: &Trace, report: &ReplayReport) -> [Option<f64>; 2] {
    let ratio = |held| output::ratio_of(held, trace.requested_peak());
    [
        ratio(report.reserved_peak).filter(|_| !report.passes.is_empty()),
        ratio(report.reserved_peak_max()).filter(|_| report.failed.is_none()),
    ]
}

fn object(
    machine: &Machine,
    settings: &Settings,
    Input {
        trace, warnings, ..
    }: &Input,
    report: &ReplayReport,
    faults: &[Fault],
) -> Value {
    let [ratio, ratio_max] = ratios(trace, report);
    let reasons = texts(faults);
    json!({
        "schema": SCHEMA,
        "trace": trace.name(),
        "device": machine.name(),
        "policy": report.policy.name(),
        "rows": trace.rows().len(),
        "allocations": trace.allocations().len(),
        "streams": trace.streams().len(),
        "config": settings.text(),
        "limit_bytes": report.limit,
        "requested_peak_bytes": trace.requested_peak(),
        // The replay does not repeat these requests; the required peak is that of a program in which they succeed.
        "failed_requests": trace.failed_requests().count(),
        "required_peak_bytes": trace.required_peak(),
        "reserved_peak_bytes": report.reserved_peak,
        "ratio": ratio,
        "ratio_max": ratio_max,
        "completed": report.failed.is_none(),
        "failed_row": report.failed.map(|(_, row)| row),
        "error": reasons.first(),
        "reasons": reasons,
        "warnings": warnings,
        "memory": memory(report),
        "replays": report.passes.iter().map(pass_object).collect::<Value>(),
    })
}

/// Describes the memory layout at the first replay's peak of requested bytes (null if it was not reached), and its
/// growth until the last replay ended.
fn memory(report: &ReplayReport) -> Value {
    let (peak, packing) = (report.at_peak.as_ref(), &report.stats.packing);
    let stranded = |f: &Fragmentation| f.stranded.iter().map(|s| s.bytes).sum::<u64>();
    json!({
        "free_bytes": peak.map(|f| f.free),
        "largest_free_bytes": peak.map(|f| f.largest),
        "fragmentation": peak.map(Fragmentation::ratio),
        "stranded_bytes": peak.map(stranded),
        "view_live_bytes": peak.map(|f| f.view_live),
        "soft_cap_bytes": packing.soft_cap,
        "regime": packing.regime.name(),
        "views": packing.views,
        "view_bytes": packing.view_bytes,
        "last_growth": packing.last_growth.map(|growth| growth.reason.name()),
        "self_test": packing.self_test.name(),
    })
}

fn calls_object(pass: &Pass) -> Value {
    json!({
        "driver_calls": pass.calls.iter().collect::<Value>(),
        "handle_ops": pass.calls.handle_ops(),
        "driver_ns": pass.calls.nanos(),
    })
}

fn pass_object(pass: &Pass) -> Value {
    let mut object = calls_object(pass);
    object["reserved_peak_bytes"] = pass.reserved_peak.into();
    object["ns_per_row"] = pass.nanos_per_row.into();
    if pass.parts.len() > 1 {
        let parts = pass.parts.iter().map(|part| {
            let mut object = calls_object(part);
            object["rows"] = part.rows.into();
            object
        });
        object["parts"] = parts.collect();
    }
    object
}

pub struct Fault {
    line: Option<u64>,
    pub text: String,
}

impl Fault {
    pub fn new(text: String) -> Fault {
        Fault { line: None, text }
    }
}

pub fn faults(report: &ReplayReport) -> Vec<Fault> {
    let mut faults = Vec::new();
    if let Some((pass, row)) = report.failed {
        let why = match &report.error {
            // This is the only driver call that the replay itself makes between rows.
            Some(Error::Driver(error)) if error.call() == "cuLaunchKernel" => {
                format!(": cannot submit work to the device: {}", text::chain(error))
            }
            Some(error) => format!(": {}", text::chain(error)),
            None => String::new(),
        };
        faults.push(Fault {
            line: Some(Trace::line_of(row.saturating_sub(1))),
            text: format!("replay {pass} failed at row {row}{why}"),
        });
    }
    let mismatches = report.mismatches.filter(|count| *count > 0);
    let leaked = Some(report.leaked_bytes).filter(|bytes| *bytes > 0);
    let chained =
        |what, error: Option<&Error>| error.map(|error| format!("{what}: {}", text::chain(error)));
    let others = [
        mismatches.map(|count| format!("{count} words were not what their block was filled with")),
        chained(
            "the allocator's heap is not in order",
            report.check.as_ref(),
        ),
        chained("the allocator cannot be closed", report.close.as_ref()),
        leaked.map(|bytes| format!("{bytes} bytes are held after the end")),
    ];
    let simulator = report
        .reports
        .iter()
        .map(|what| format!("the simulator reports: {what}"));
    faults.extend(
        others
            .into_iter()
            .flatten()
            .chain(simulator)
            .map(Fault::new),
    );
    faults
}

pub fn texts(faults: &[Fault]) -> Vec<String> {
    faults.iter().map(|fault| fault.text.clone()).collect()
}

pub fn print_faults(path: &Path, faults: &[Fault]) {
    for Fault { line, text } in faults {
        let place = text::place(path, input::STDIN, *line);
        output::error(&format!("{place}: {text}"));
    }
}

fn table(options: &TableOptions) -> Table {
    Table::of_traces(
        options,
        vec![
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
        ],
    )
}

fn cells(trace: &Trace, report: &ReplayReport, table: &Table) -> Vec<Cell> {
    let (first, last) = (report.passes.first(), report.passes.last());
    let calls = |pass: Option<&Pass>| Cell::or_dash(pass.map(|pass| pass.calls.total()));
    let [ratio, ratio_max] = ratios(trace, report);
    let end = match (report.is_clean(), report.failed) {
        (true, _) if report.mismatches.is_some() => "verified".to_owned(),
        (true, _) => "ok".to_owned(),
        (false, Some((_, row))) if !table.is_fitted() => format!("FAILED at row {row}"),
        (false, _) => "FAILED".to_owned(),
    };
    vec![
        trace.name().into(),
        report.policy.name().into(),
        trace.rows().len().to_string().into(),
        trace.allocations().len().to_string().into(),
        trace.streams().len().to_string().into(),
        output::mebibytes(trace.requested_peak()).into(),
        output::mebibytes(report.reserved_peak).into(),
        output::ratio(ratio),
        output::ratio(ratio_max),
        calls(first),
        calls(last),
        Cell::or_dash(last.map(|pass| pass.calls.handle_ops())),
        Cell::or_dash(last.map(|pass| output::nanos(pass.nanos_per_row))),
        Cell::verdict(end, report.is_clean()),
    ]
}
