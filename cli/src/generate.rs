//! `cualloc generate` and `cualloc vary`: traces that nobody recorded.

use crate::options::{GenerateOptions, KindChoice, VaryOptions};
use crate::output::{self, note};
use crate::{Outcome, input};
use cualloc::trace::generate::{self, Kind, Program};
use cualloc::trace::{Trace, TraceError};
use flate2::Compression;
use flate2::write::GzEncoder;
use std::fs::File;
use std::io::{self, BufWriter};
use std::path::{Path, PathBuf};

/// A trace could not be made.
#[derive(Debug, thiserror::Error)]
enum GenerateError {
    #[error("the program makes no valid trace")]
    Trace(#[source] TraceError),
    #[error("{}: cannot be written", path.display())]
    Write { path: PathBuf, source: io::Error },
}

pub fn run(options: &GenerateOptions) -> Outcome {
    let kind = match options.kind {
        KindChoice::Large => Kind::Large,
        KindChoice::Sharded => Kind::Sharded,
        KindChoice::Random => Kind::Random,
        KindChoice::Churn => Kind::Churn,
    };
    let mut program = Program::new(kind, options.seed);
    program.rows = options.rows;
    program.streams = options.streams;
    program.live = options.live;
    let trace = program.trace(input::name(&options.out));
    Ok(finish(trace, &options.out))
}

pub fn vary(options: &VaryOptions) -> Outcome {
    let trace = match input::read(&options.file) {
        Ok(trace) => trace,
        Err(error) => {
            output::complain(&error);
            return Ok(false);
        }
    };
    let name = input::name(&options.out);
    let varied = generate::vary(
        &trace,
        name,
        options.copies as usize,
        options.percent,
        options.seed,
    );
    Ok(finish(varied, &options.out))
}

/// Writes a trace that could be made; whether all went well.
fn finish(trace: Result<Trace, TraceError>, path: &Path) -> bool {
    let written = trace
        .map_err(GenerateError::Trace)
        .and_then(|trace| write(&trace, path).map(|()| trace));
    match written {
        Ok(trace) => {
            note!(
                "{}: {} rows, {} blocks, {} streams, requested peak {} bytes",
                path.display(),
                trace.rows().len(),
                trace.allocations().len(),
                trace.streams().len(),
                trace.requested_peak()
            );
            true
        }
        Err(error) => {
            output::complain(&error);
            false
        }
    }
}

/// Writes a trace to a file, compressed if its name ends in `.gz`.
fn write(trace: &Trace, path: &Path) -> Result<(), GenerateError> {
    let done = File::create(path).and_then(|file| {
        let file = BufWriter::new(file);
        if path.extension().is_some_and(|ending| ending == "gz") {
            let mut encoder = GzEncoder::new(file, Compression::default());
            trace.write(&mut encoder)?;
            encoder.finish()?.into_inner().map_err(|e| e.into_error())?;
            Ok(())
        } else {
            trace.write(file)
        }
    });
    done.map_err(|source| GenerateError::Write {
        path: path.to_owned(),
        source,
    })
}
