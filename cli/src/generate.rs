//! `cualloc generate` and `cualloc vary`: synthetic traces, written row by row.

use crate::options::{GenerateOptions, GlobalOptions, KindChoice, VaryOptions};
use crate::output::{Output, SCHEMA};
use crate::sink::{self, STDOUT};
use crate::{Failure, Outcome, input, text};
use cualloc::trace::Trace;
use cualloc::trace::generate::{self, Kind, Program, Rows};
use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::json;
use std::io::{self, Write};
use std::path::Path;

/// Number of rows between two updates of the progress.
const LOOK: usize = 1 << 16;

pub fn run(global: &GlobalOptions, options: &GenerateOptions, output: &mut Output) -> Outcome {
    check(global, "generate", &options.out)?;
    let kind = match options.kind {
        KindChoice::Large => Kind::Large,
        KindChoice::Sharded => Kind::Sharded,
        KindChoice::Random => Kind::Random,
        KindChoice::Churn => Kind::Churn,
    };
    let chosen = options.streams.map(|_| "--streams");
    if let Some(option) = chosen.or(options.live.map(|_| "--live"))
        && matches!(kind, Kind::Large | Kind::Sharded)
    {
        return Err(Failure::usage(format!(
            "{option} is for the random kinds, `random` and `churn`"
        )));
    }
    let mut program = Program::new(kind, options.seed);
    program.rows = options.rows;
    program.streams = options.streams;
    program.live = options.live.map(|size| size.0);
    finish(program.rows(), &options.out, output)
}

pub fn vary(global: &GlobalOptions, options: &VaryOptions, output: &mut Output) -> Outcome {
    check(global, "vary", &options.out)?;
    if input::is_same(&options.file, &options.out) {
        let file = text::file(&options.file, input::STDIN);
        return Err(Failure::usage(format!(
            "{file} cannot be its own copy: --out names the file that is read"
        )));
    }
    let trace = input::read(&options.file, &options.input, output)?.trace;
    let copies = options.copies as usize;
    let rows = generate::vary_rows(&trace, copies, options.percent, options.seed);
    finish(rows, &options.out, output)
}

/// Rejects options that have no effect here.
fn check(global: &GlobalOptions, command: &str, out: &Path) -> Result<(), Failure> {
    if let Some(option) = global.device_option() {
        return Err(Failure::usage(format!(
            "{option} is not for {command}, which runs on no device"
        )));
    }
    if global.json && text::is_standard(out) {
        return Err(Failure::usage(
            "--json and --out - would both write to stdout",
        ));
    }
    Ok(())
}

/// Writes the rows, compressed if the name of the file ends in `.gz`, and reports what was written.
fn finish(mut rows: Rows<'_>, path: &Path, output: &mut Output) -> Outcome {
    let compressed = path.extension().is_some_and(|ending| ending == "gz");
    let peak = sink::write(path, |writer| {
        if !compressed {
            return write(&mut rows, writer);
        }
        let mut encoder = GzEncoder::new(writer, Compression::default());
        let peak = write(&mut rows, &mut encoder)?;
        encoder.finish()?;
        Ok(peak)
    })?;
    let file = text::file(path, STDOUT);
    if output.json {
        output.json(&json!({
            "schema": SCHEMA,
            "trace": text::trace_name(path),
            "file": path.to_string_lossy(),
            "rows": rows.rows(),
            "allocations": rows.allocations(),
            "streams": rows.streams(),
            "requested_peak_bytes": peak,
        }))?;
    } else {
        output.note(&format!(
            "{file}: {} rows, {} blocks, {} streams, requested peak {peak} bytes",
            rows.rows(),
            rows.allocations(),
            rows.streams(),
        ));
    }
    Ok(true)
}

fn write(rows: &mut Rows<'_>, writer: &mut dyn Write) -> io::Result<u64> {
    writeln!(writer, "{}", Trace::HEADER)?;
    while let Some(row) = rows.next() {
        writeln!(writer, "{row}")?;
        if rows.rows().is_multiple_of(LOOK) {
            rows.requested_peak().map_err(io::Error::other)?;
        }
    }
    rows.requested_peak().map_err(io::Error::other)
}
