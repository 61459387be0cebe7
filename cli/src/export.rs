//! `export`: a recording in the formats of other tools.

use crate::input::{self, InputError};
use crate::options::{ExportOptions, FormatChoice};
use crate::output::Output;
use crate::{Failure, Outcome, text};
use cualloc::record::{Profile, Recording, Snapshot};
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::Path;

/// What messages call stdout.
const STDOUT: &str = "<stdout>";

/// Why nothing was exported.
#[derive(Debug, thiserror::Error)]
enum ExportError {
    #[error(transparent)]
    Input(#[from] InputError),
    #[error(
        "{}: is no recording of cualloc, which this format is made of",
        text::file(path, input::STDIN)
    )]
    NotARecording { path: std::path::PathBuf },
    #[error("{}: cannot be written", text::file(path, STDOUT))]
    Write {
        path: std::path::PathBuf,
        source: io::Error,
    },
}

pub fn run(options: &ExportOptions, output: &mut Output) -> Outcome {
    match export(options) {
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

fn export(options: &ExportOptions) -> Result<(), ExportError> {
    let bytes = match options.to {
        FormatChoice::Csv => {
            let trace = input::read(&options.file, options.max_rows)?;
            let mut text = Vec::new();
            trace
                .write(&mut text)
                .map_err(|source| ExportError::Write {
                    path: options.out.clone(),
                    source,
                })?;
            text
        }
        format => {
            let recording = input::recording(&options.file, options.max_rows)?;
            let recording = recording.ok_or_else(|| ExportError::NotARecording {
                path: options.file.clone(),
            })?;
            made(format, &recording)
        }
    };
    write(&options.out, &bytes).map_err(|source| ExportError::Write {
        path: options.out.clone(),
        source,
    })
}

fn made(format: FormatChoice, recording: &Recording) -> Vec<u8> {
    match format {
        FormatChoice::Pytorch => Snapshot::of(recording).to_pickle(),
        FormatChoice::PytorchJson => Snapshot::of(recording).to_json().into_bytes(),
        FormatChoice::Pprof => Profile::of(recording).to_pprof(),
        FormatChoice::Collapsed => Profile::of(recording).to_collapsed().into_bytes(),
        FormatChoice::Csv => Vec::new(),
    }
}

/// Writes the file anew, for its owner's eyes, in the place of what was there.
fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    if text::is_standard(path) {
        return io::stdout().lock().write_all(bytes);
    }
    let name = path
        .file_name()
        .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
    let mut beside = std::ffi::OsString::from(".");
    beside.push(name);
    beside.push(format!(".{}", std::process::id()));
    let beside = path.with_file_name(beside);
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let written = options
        .open(&beside)
        .and_then(|mut file| file.write_all(bytes))
        .and_then(|()| std::fs::rename(&beside, path));
    if written.is_err() {
        let _ = std::fs::remove_file(&beside);
    }
    written
}
