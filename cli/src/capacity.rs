//! `cualloc capacity`.

use crate::machine::Machine;
use crate::options::TraceOptions;
use crate::output::{self, Output, Table, note};
use crate::{Outcome, input, replay};
use cualloc::Error;
use cualloc::trace::{self, Options, Search, Trace};
use serde::Serialize;

/// One line of `--json`.
#[derive(Serialize)]
struct Line<'a> {
    trace: &'a str,
    device: &'a str,
    policy: &'a str,
    requested_peak_bytes: u64,
    min_limit_bytes: Option<u64>,
    min_limit_ratio: Option<f64>,
    /// Of the last of the replays under that limit.
    ns_per_row_at_limit: Option<f64>,
    /// Of the last of the replays under that limit.
    handle_ops: Option<u64>,
}

pub fn run(options: &TraceOptions, output: &mut Output) -> Outcome {
    let machine = Machine::choose(&options.machine)?;
    machine.check_lag(options.lag)?;
    let table = Table::new(&[
        ("trace", output::name_width(&options.files)),
        ("policy", 7),
        ("requested MiB", 0),
        ("limit MiB", 10),
        ("ratio", 6),
        ("ns/row", 7),
        ("handles", 0),
    ]);
    if !options.machine.json {
        output.line(&table.header())?;
    }
    let mut well = true;
    for path in &options.files {
        let trace = match input::read(path) {
            Ok(trace) => trace,
            Err(error) => {
                output::complain(&error);
                well = false;
                continue;
            }
        };
        let search = match search(&machine, &trace, options)? {
            Ok(search) => search,
            Err(error) => {
                note!("error: {}: {}", path.display(), output::chain(&error));
                well = false;
                continue;
            }
        };
        let line = line(&machine, &trace, &search);
        if options.machine.json {
            output.json(&line)?;
        } else {
            output.line(&table.row(cells(&line)))?;
        }
        if let Some(report) = &search.fault {
            replay::report_faults(path, report);
        } else if search.capacity.is_none() {
            let most = trace.requested_peak().saturating_mul(trace::LIMIT_FACTOR);
            note!(
                "error: {}: runs under no limit up to {most} bytes",
                path.display()
            );
        }
        well &= search.capacity.is_some();
    }
    Ok(well)
}

fn search(
    machine: &Machine,
    trace: &Trace,
    options: &TraceOptions,
) -> Result<Result<Search, Error>, crate::Failure> {
    let stage = machine.stage(options.lag)?;
    let mut replay = Options::default();
    replay.policy = options.policy();
    replay.views = !options.no_views;
    replay.verify = options.verify;
    replay.seed = options.seed;
    let bar = indicatif::ProgressBar::new_spinner().with_prefix(trace.name().to_owned());
    let search = trace::capacity(&stage, trace, &replay, &mut |probes, limit| {
        let limit = output::mebibytes(limit);
        bar.set_message(format!(
            "{}: {probes} limits tried, now {limit} MiB",
            trace.name()
        ));
        bar.tick();
    });
    bar.finish_and_clear();
    Ok(search)
}

fn line<'a>(machine: &'a Machine, trace: &'a Trace, search: &Search) -> Line<'a> {
    let found = search.capacity.as_ref();
    let limit = found.map(|found| found.limit);
    Line {
        trace: trace.name(),
        device: machine.name(),
        policy: replay::policy_name(search.policy),
        requested_peak_bytes: trace.requested_peak(),
        min_limit_bytes: limit,
        min_limit_ratio: limit.and_then(|limit| output::ratio_of(limit, trace.requested_peak())),
        ns_per_row_at_limit: found.map(|found| found.figures.ns_per_row),
        handle_ops: found.map(|found| found.figures.driver_calls.handle_ops()),
    }
}

fn cells(line: &Line<'_>) -> Vec<String> {
    let dash = || "-".to_owned();
    vec![
        line.trace.to_owned(),
        line.policy.to_owned(),
        output::mebibytes(line.requested_peak_bytes),
        line.min_limit_bytes.map_or_else(dash, output::mebibytes),
        output::ratio(line.min_limit_ratio),
        line.ns_per_row_at_limit
            .map_or_else(dash, |nanos| format!("{nanos:.0}")),
        line.handle_ops
            .map_or_else(dash, |handles| handles.to_string()),
    ]
}
