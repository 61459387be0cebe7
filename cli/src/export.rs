//! `export`: a recording in the formats of other tools.

use crate::options::{ExportOptions, FormatChoice};
use crate::output::{self, Output, SCHEMA};
use crate::{Failure, Outcome, input, sink, text};
use cualloc::record::{Moment, Profile, Recording, Snapshot};
use flate2::Compression;
use flate2::bufread::GzEncoder;
use serde_json::json;
use std::io::Read;

struct Exported {
    bytes: Vec<u8>,
    sums_at: Option<Moment>,
    empty: Option<String>,
    /// What the file lacks; reported when the file was read.
    lacks: Vec<String>,
}

pub fn run(options: &ExportOptions, output: &mut Output) -> Outcome {
    let made = export(options, output)?;
    sink::write(&options.out, |writer| writer.write_all(&made.bytes))?;
    let file = text::file(&options.file, input::STDIN);
    let sums_at = made.sums_at.map(|moment| moment.to_string());
    if let Some(moment) = &sums_at {
        output.note(&format!("{file}: the export shows memory {moment}"));
    }
    let empty = made.empty.map(|why| format!("the export is empty: {why}"));
    if let Some(why) = &empty {
        output.warning(&format!("{file}: {why}"));
    }
    if output.json {
        let line = json!({
            "schema": SCHEMA,
            "trace": text::trace_name(&options.file),
            "completed": true,
            "bytes": made.bytes.len(),
            "sums_at": sums_at,
            "warnings": Vec::from_iter(made.lacks.into_iter().chain(empty)),
        });
        // If the export goes to stdout, it has been written there already.
        match text::is_standard(&options.out) {
            true => output::plain(&line.to_string()),
            false => output.json(&line)?,
        }
    }
    Ok(true)
}

fn export(options: &ExportOptions, output: &Output) -> Result<Exported, Failure> {
    if options.to != FormatChoice::Csv {
        let recording = input::recording(&options.file, &options.input, output)?;
        return Ok(made(options.to, &recording));
    }
    let input = input::read(&options.file, &options.input, output)?;
    let mut bytes = Vec::new();
    input.trace.write(&mut bytes)?;
    let empty = input.trace.rows().is_empty();
    Ok(Exported {
        bytes,
        sums_at: None,
        empty: empty.then(|| "the file has no allocation".to_owned()),
        lacks: input.warnings,
    })
}

fn made(format: FormatChoice, recording: &Recording) -> Exported {
    // Groups by stack if the recording has stacks, else by context.
    let profile = match recording.sampling() {
        0 => Profile::of(recording),
        _ => Profile::of_stacks(recording),
    };
    let bytes = match format {
        FormatChoice::Pytorch => Snapshot::of(recording).to_pickle(),
        FormatChoice::PytorchJson => Snapshot::of(recording).to_json().into_bytes(),
        FormatChoice::Pprof => compress_gzip(&profile.to_pprof()),
        FormatChoice::Collapsed => profile.to_collapsed().into_bytes(),
        FormatChoice::Csv => Vec::new(),
    };
    let is_profile = matches!(format, FormatChoice::Pprof | FormatChoice::Collapsed);
    Exported {
        bytes,
        sums_at: profile.moment().filter(|_| is_profile),
        empty: empty_reason(&profile, is_profile, recording.sampling()),
        lacks: input::missing(recording),
    }
}

fn empty_reason(profile: &Profile, is_profile: bool, sampling: u64) -> Option<String> {
    let Some(Moment { live, .. }) = profile.moment() else {
        return Some("the recording has no allocation".to_owned());
    };
    if !is_profile || profile.shares().any(|(_, share)| share.live_bytes > 0) {
        return None;
    }
    Some(match live {
        0 => "no block was live then".to_owned(),
        _ => format!(
            "no block that was live then has a stack: one is recorded per {} KiB requested",
            sampling >> 10
        ),
    })
}

/// Always compressed with gzip: some readers of profiles accept nothing else.
fn compress_gzip(bytes: &[u8]) -> Vec<u8> {
    let mut packed = Vec::new();
    let mut reader = GzEncoder::new(bytes, Compression::default());
    // Reading from memory cannot fail.
    match reader.read_to_end(&mut packed) {
        Ok(_) => packed,
        Err(_) => bytes.to_vec(),
    }
}
