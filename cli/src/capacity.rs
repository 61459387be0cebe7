//! `cualloc capacity`.

use crate::machine::Machine;
use crate::options::{GlobalOptions, TraceOptions};
use crate::output::{self, Output, SCHEMA};
use crate::settings::Settings;
use crate::table::{Cell, Column, Table};
use crate::{Failure, FileError, Outcome, for_each, input, replay, text};
use cualloc::trace::{Capacity, Trace};
use serde_json::json;
use std::path::Path;

pub fn run(global: &GlobalOptions, options: &TraceOptions, output: &mut Output) -> Outcome {
    let files = &options.table;
    replay::check(&files.files)?;
    let settings = Settings::read(&options.placement)?;
    let machine = Machine::choose(global, output)?;
    machine.check_lag(files.lag)?;
    settings.announce(output);
    if settings.limit().is_some() {
        output.note("the limit of CUALLOC_CONFIG is not used: limits are what is searched for");
    }
    let table = Table::of_traces(
        files,
        vec![
            Column::new("policy", "", 7, 3),
            Column::new("requested", "MiB", 0, 1),
            Column::new("limit", "MiB", 10, 0),
            Column::new("ratio", "", 6, 0),
            Column::new("ns/row", "last", 7, 4),
            Column::new("handles", "last", 0, 5),
        ],
    );
    for_each(&files.files, output, |path, output| {
        let input = input::read(path, &files.input, output)?;
        let trace = &input.trace;
        let search = search(&machine, path, trace, options, &settings, output)?;
        let faults = match &search.fault {
            Some(report) => replay::faults(report),
            None if search.limit.is_none() => {
                vec![replay::Fault::new(text::no_limit_message(
                    trace.required_peak(),
                ))]
            }
            None => Vec::new(),
        };
        let (limit, peak) = (search.limit, trace.requested_peak());
        let ratio = limit.and_then(|limit| output::ratio_of(limit, peak));
        // The figures of the last replay under that limit.
        let nanos = search.pass.as_ref().map(|pass| pass.nanos_per_row);
        let handle_ops = search.pass.as_ref().map(|pass| pass.calls.handle_ops());
        if output.json {
            let reasons = replay::texts(&faults);
            output.json(&json!({
                "schema": SCHEMA,
                "trace": trace.name(),
                "device": machine.name(),
                "policy": search.policy.name(),
                "requested_peak_bytes": peak,
                "min_limit_bytes": limit,
                "min_limit_ratio": ratio,
                "ns_per_row_at_limit": nanos,
                "handle_ops": handle_ops,
                "assumes": text::ASSUMED,
                "config": settings.text(),
                "error": reasons.first(),
                "reasons": reasons,
                "warnings": input.warnings,
            }))?;
        } else {
            let cells = [
                trace.name().into(),
                search.policy.name().into(),
                output::mebibytes(peak).into(),
                Cell::or_dash(limit.map(output::mebibytes)),
                output::ratio(ratio),
                Cell::or_dash(nanos.map(output::nanos)),
                Cell::or_dash(handle_ops),
            ];
            output.row(&table, cells)?;
        }
        replay::print_faults(path, &faults);
        Ok(limit.is_some())
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
    let ground = machine.context(options.table.lag)?;
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
    Ok(search.map_err(|error| FileError::cannot_replay(path, error))?)
}
