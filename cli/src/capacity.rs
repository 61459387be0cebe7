//! `cualloc capacity`.

use crate::machine::Machine;
use crate::options::{GlobalOptions, TraceOptions};
use crate::output::{self, Output, SCHEMA};
use crate::settings::Settings;
use crate::table::{Cell, Column, Table};
use crate::{Failure, Outcome, for_each, input, replay, text};
use cualloc::trace::{Capacity, Trace};
use serde::Serialize;
use std::path::Path;

/// One line of `--json`.
#[derive(Serialize)]
struct Line<'a> {
    schema: u32,
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
    /// What `CUALLOC_CONFIG` says.
    config: Option<&'a str>,
    /// Why there is no limit.
    error: Option<String>,
    /// All that went wrong.
    reasons: Vec<String>,
    /// What the file lacks.
    warnings: Vec<String>,
}

pub fn run(global: &GlobalOptions, options: &TraceOptions, output: &mut Output) -> Outcome {
    replay::check(&options.files)?;
    let settings = Settings::read(options.policy, options.no_views)?;
    let machine = Machine::choose(global, output)?;
    machine.check_lag(options.lag)?;
    settings.announce(output);
    if settings.limit().is_some() {
        output.note("the limit of CUALLOC_CONFIG is not used: limits are what is searched for");
    }
    let columns = vec![
        Column::new("trace", "", replay::name_width(&options.files), 0),
        Column::new("policy", "", 7, 3),
        Column::new("requested", "MiB", 0, 1),
        Column::new("limit", "MiB", 10, 0),
        Column::new("ratio", "", 6, 0),
        Column::new("ns/row", "last", 7, 4),
        Column::new("handles", "last", 0, 5),
    ];
    let terminal = if options.wide { None } else { output::width() };
    let table = Table::new(columns, terminal);
    for_each(&options.files, output, |path, output| {
        let read = input::read(path, &options.input, output)?;
        let (trace, warnings) = (read.trace, read.warnings);
        let search = search(&machine, path, &trace, options, &settings, output)?;
        let faults = match &search.fault {
            Some(report) => replay::faults(report),
            None if search.limit.is_none() => {
                vec![replay::Fault::new(text::no_limit(trace.required_peak()))]
            }
            None => Vec::new(),
        };
        let line = line(&machine, &settings, (&trace, warnings), &search, &faults);
        if output.json {
            output.json(&line)?;
        } else {
            output.row(&table, cells(&line))?;
        }
        replay::complain(path, &faults);
        Ok(search.limit.is_some())
    })
}

fn search(
    machine: &Machine,
    path: &Path,
    trace: &Trace,
    options: &TraceOptions,
    settings: &Settings,
    output: &Output,
) -> Result<Capacity, Failure> {
    let ground = machine.context(options.lag)?;
    let bar = output.spinner(trace.name());
    let mut probes = 0;
    let search = settings
        .replay(trace, options, None)
        .serve_failed(true)
        .on_progress(|limit| {
            let limit = output::mebibytes(limit);
            bar.set_message(format!("{probes} limits tried, now {limit} MiB"));
            bar.tick();
            probes += 1;
        })
        .capacity(ground.context());
    bar.finish_and_clear();
    search.map_err(|error| Failure::no_replay(path, error))
}

fn line<'a>(
    machine: &'a Machine,
    settings: &'a Settings,
    (trace, warnings): (&'a Trace, Vec<String>),
    search: &Capacity,
    faults: &[replay::Fault],
) -> Line<'a> {
    let (limit, pass) = (search.limit, search.pass.as_ref());
    Line {
        schema: SCHEMA,
        trace: trace.name(),
        device: machine.name(),
        policy: search.policy.name(),
        requested_peak_bytes: trace.requested_peak(),
        min_limit_bytes: limit,
        min_limit_ratio: limit.and_then(|limit| output::ratio_of(limit, trace.requested_peak())),
        ns_per_row_at_limit: pass.map(|pass| pass.nanos_per_row),
        handle_ops: pass.map(|pass| pass.calls.handle_ops()),
        config: settings.text(),
        error: faults.first().map(|fault| fault.text.clone()),
        reasons: faults.iter().map(|fault| fault.text.clone()).collect(),
        warnings,
    }
}

fn cells(line: &Line<'_>) -> Vec<Cell> {
    vec![
        line.trace.into(),
        line.policy.into(),
        output::mebibytes(line.requested_peak_bytes).into(),
        Cell::or_dash(line.min_limit_bytes.map(output::mebibytes)),
        output::ratio(line.min_limit_ratio).into(),
        Cell::or_dash(line.ns_per_row_at_limit.map(output::nanos)),
        Cell::or_dash(line.handle_ops),
    ]
}
