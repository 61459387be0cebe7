//! `cualloc capacity`.

use crate::machine::Machine;
use crate::options::TraceOptions;
use crate::output::{self, Output, Table, note};
use crate::{Outcome, input, replay};
use cualloc::Error;
use cualloc::trace::{Capacity, Trace};
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
                replay::cannot_begin(path, &error);
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
        } else if search.limit.is_none() {
            let most = trace.requested_peak().saturating_mul(Capacity::FACTOR);
            note!(
                "error: {}: runs under no limit up to {most} bytes",
                path.display()
            );
        }
        well &= search.limit.is_some();
    }
    Ok(well)
}

fn search(
    machine: &Machine,
    trace: &Trace,
    options: &TraceOptions,
) -> Result<Result<Capacity, Error>, crate::Failure> {
    let ground = machine.context(options.lag)?;
    let bar = indicatif::ProgressBar::new_spinner().with_prefix(trace.name().to_owned());
    let mut probes = 0;
    let search = replay::begin(trace, options, None)
        .on_progress(|limit| {
            let limit = output::mebibytes(limit);
            bar.set_message(format!(
                "{}: {probes} limits tried, now {limit} MiB",
                trace.name()
            ));
            bar.tick();
            probes += 1;
        })
        .capacity(ground.context());
    bar.finish_and_clear();
    Ok(search)
}

fn line<'a>(machine: &'a Machine, trace: &'a Trace, search: &Capacity) -> Line<'a> {
    let (limit, pass) = (search.limit, search.pass.as_ref());
    Line {
        trace: trace.name(),
        device: machine.name(),
        policy: replay::policy_name(search.policy),
        requested_peak_bytes: trace.requested_peak(),
        min_limit_bytes: limit,
        min_limit_ratio: limit.and_then(|limit| output::ratio_of(limit, trace.requested_peak())),
        ns_per_row_at_limit: pass.map(|pass| pass.nanos_per_row),
        handle_ops: pass.map(|pass| pass.calls.handle_ops()),
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
