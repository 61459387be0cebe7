//! `export`: a recording in the formats of other tools.

use crate::input::{self, InputError};
use crate::options::{ExportOptions, FormatChoice};
use crate::output::Output;
use crate::sink::Sink;
use crate::{Failure, Outcome, text};
use cualloc::record::{Profile, Recording, Snapshot};
use flate2::Compression;
use flate2::bufread::GzEncoder;
use std::io::{self, Read};
use std::path::PathBuf;

/// What messages call stdout.
const STDOUT: &str = "<stdout>";

/// Why nothing was exported.
#[derive(Debug, thiserror::Error)]
enum ExportError {
    #[error(transparent)]
    Input(#[from] InputError),
    #[error("{}: cannot be written", text::file(path, STDOUT))]
    Write { path: PathBuf, source: io::Error },
}

pub fn run(options: &ExportOptions, output: &mut Output) -> Outcome {
    match export(options, output) {
        Ok(()) => Ok(true),
        Err(ExportError::Write { source, .. }) if source.kind() == io::ErrorKind::BrokenPipe => {
            Err(Failure::Output(source))
        }
        Err(error) => {
            let line = match &error {
                ExportError::Input(error) => error.line(),
                _ => None,
            };
            output.failed(&input::name(&options.file), line, &error)?;
            Ok(false)
        }
    }
}

fn export(options: &ExportOptions, output: &Output) -> Result<(), ExportError> {
    let bytes = match options.to {
        FormatChoice::Csv => {
            let input = input::read(&options.file, &options.input, output)?;
            let mut text = Vec::new();
            input
                .trace
                .write(&mut text)
                .map_err(|source| ExportError::Write {
                    path: options.out.clone(),
                    source,
                })?;
            text
        }
        format => {
            let recording = input::recording(&options.file, &options.input, output)?;
            made(format, &recording)
        }
    };
    let sink = Sink::create(&options.out);
    let written = sink.and_then(|sink| sink.write(|writer| writer.write_all(&bytes)));
    written.map_err(|source| ExportError::Write {
        path: options.out.clone(),
        source,
    })
}

fn made(format: FormatChoice, recording: &Recording) -> Vec<u8> {
    match format {
        FormatChoice::Pytorch => Snapshot::of(recording).to_pickle(),
        FormatChoice::PytorchJson => Snapshot::of(recording).to_json().into_bytes(),
        FormatChoice::Pprof => compressed(&profile(recording).to_pprof()),
        FormatChoice::Collapsed => profile(recording).to_collapsed().into_bytes(),
        FormatChoice::Csv => Vec::new(),
    }
}

/// As profiles lie in files: some of their readers know no others.
fn compressed(bytes: &[u8]) -> Vec<u8> {
    let mut packed = Vec::new();
    let mut reader = GzEncoder::new(bytes, Compression::default());
    // What lies in memory is read without an error.
    match reader.read_to_end(&mut packed) {
        Ok(_) => packed,
        Err(_) => bytes.to_vec(),
    }
}

/// By stacks if the recording has them, else by contexts.
fn profile(recording: &Recording) -> Profile {
    match recording.sampling() {
        0 => Profile::of(recording),
        _ => Profile::of_stacks(recording),
    }
}
