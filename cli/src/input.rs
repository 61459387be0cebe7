//! Trace files: opening, decompressing, naming.

use cualloc::trace::{Trace, TraceError};
use flate2::bufread::MultiGzDecoder;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};

/// The first two bytes of every gzip file.
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// A trace could not be had from a file; the message begins with the file, and its line if one is
/// to blame.
#[derive(Debug, thiserror::Error)]
pub enum InputError {
    #[error("{}: cannot be opened", path.display())]
    Open { path: PathBuf, source: io::Error },
    // Its text begins with the line: `line 3: ...`.
    #[error("{}:{}", path.display(), source.to_string().trim_start_matches("line "))]
    Trace { path: PathBuf, source: TraceError },
}

/// Reads a trace from a plain or gzip file, told apart by their first bytes.
pub fn read(path: &Path) -> Result<Trace, InputError> {
    let open = |source| InputError::Open {
        path: path.to_owned(),
        source,
    };
    let mut file = BufReader::with_capacity(1 << 16, File::open(path).map_err(open)?);
    let compressed = file.fill_buf().map_err(open)?.starts_with(&GZIP_MAGIC);
    let trace = if compressed {
        Trace::read(name(path), BufReader::new(MultiGzDecoder::new(file)))
    } else {
        Trace::read(name(path), file)
    };
    trace.map_err(|source| InputError::Trace {
        path: path.to_owned(),
        source,
    })
}

/// The name of the file without its folder and its endings.
pub fn name(path: &Path) -> String {
    let name = path
        .file_name()
        .unwrap_or(path.as_os_str())
        .to_string_lossy();
    let name = name.strip_suffix(".gz").unwrap_or(&name);
    name.strip_suffix(".csv").unwrap_or(name).to_owned()
}
