//! Trace files: opening, decompressing, naming.

use crate::text;
use cualloc::trace::{Trace, TraceError};
use flate2::bufread::MultiGzDecoder;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

/// The first two bytes of every gzip file.
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// How much of a compressed file is read on behind a fault, to see whether its checksum is right.
const READ_ON: u64 = 64 << 20;

/// What messages call stdin.
pub const STDIN: &str = "<stdin>";

/// A trace could not be had from a file; the message begins with the file, and its line if one is
/// to blame.
#[derive(Debug, thiserror::Error)]
pub enum InputError {
    #[error("{}: cannot be opened", text::file(path, STDIN))]
    Open { path: PathBuf, source: io::Error },
    #[error("{}:{}: {}", text::file(path, STDIN), error.line(), fault(error))]
    Trace { path: PathBuf, error: TraceError },
    #[error(
        "{}:{line}: the compressed data is damaged: {why}",
        text::file(path, STDIN)
    )]
    Damaged {
        path: PathBuf,
        line: u64,
        why: String,
    },
}

impl InputError {
    /// The line of the file that is to blame.
    pub fn line(&self) -> Option<u64> {
        match self {
            InputError::Open { .. } => None,
            InputError::Trace { error, .. } => Some(error.line()),
            InputError::Damaged { line, .. } => Some(*line),
        }
    }
}

/// Reads a trace of at most so many rows from a plain or gzip file, told apart by their first bytes; from
/// stdin if it is called `-`.
pub fn read(path: &Path, rows: u64) -> Result<Trace, InputError> {
    let open = |source| InputError::Open {
        path: path.to_owned(),
        source,
    };
    let source: Box<dyn Read> = match text::is_standard(path) {
        true => Box::new(io::stdin().lock()),
        false => Box::new(File::open(path).map_err(open)?),
    };
    let mut file = BufReader::with_capacity(1 << 16, source);
    if !file.fill_buf().map_err(open)?.starts_with(&GZIP_MAGIC) {
        let trace = Trace::read(name(path), Bounded::new(file, rows));
        return trace.map_err(|error| InputError::Trace {
            path: path.to_owned(),
            error,
        });
    }
    let mut text = BufReader::with_capacity(1 << 16, MultiGzDecoder::new(file));
    Trace::read(name(path), Bounded::new(&mut text, rows)).map_err(|error| {
        let path = path.to_owned();
        match damage(&error, &mut text) {
            Some(why) => InputError::Damaged {
                path,
                line: error.line(),
                why,
            },
            None => InputError::Trace { path, error },
        }
    })
}

/// What is wrong with a line, without its number.
fn fault(error: &TraceError) -> String {
    let words = text::chain(error);
    let number = format!("line {}: ", error.line());
    words.strip_prefix(&number).unwrap_or(&words).to_owned()
}

/// What is wrong with the compression, if that is why the trace cannot be read.
fn damage(error: &TraceError, text: &mut impl Read) -> Option<String> {
    match error {
        TraceError::Read { source, .. } => match source.kind() {
            io::ErrorKind::UnexpectedEof => Some("it ends too early".to_owned()),
            io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData => Some(source.to_string()),
            _ => None,
        },
        // What is damaged reads as anything, and only its end tells.
        _ => match io::copy(&mut text.take(READ_ON), &mut io::sink()) {
            Ok(_) => None,
            Err(damage) => Some(format!("{damage} (what is read there: {})", fault(error))),
        },
    }
}

/// A reader that fails behind so many rows, before they take all memory.
struct Bounded<R> {
    reader: R,
    rows: u64,
    /// Line ends still to come, the header's too.
    left: u64,
}

impl<R> Bounded<R> {
    fn new(reader: R, rows: u64) -> Bounded<R> {
        let left = rows.saturating_add(1);
        Bounded { reader, rows, left }
    }
}

impl<R: BufRead> BufRead for Bounded<R> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        let buffer = self.reader.fill_buf()?;
        match self.left {
            0 if !buffer.is_empty() => Err(io::Error::other(format!(
                "there are more than {} rows; --max-rows N takes more",
                self.rows
            ))),
            _ => Ok(buffer),
        }
    }

    fn consume(&mut self, amount: usize) {
        // A line is consumed to its end or not at all, so the last of what goes tells.
        let ends = match self.reader.fill_buf() {
            Ok(buffer) => buffer
                .iter()
                .take(amount)
                .filter(|byte| **byte == b'\n')
                .count(),
            Err(_) => 0,
        };
        self.left = self.left.saturating_sub(ends as u64);
        self.reader.consume(amount);
    }
}

impl<R: BufRead> Read for Bounded<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let amount = self.fill_buf()?.read(into)?;
        self.consume(amount);
        Ok(amount)
    }
}

/// The name of the file without its folder and its endings; `stdin` for `-`.
pub fn name(path: &Path) -> String {
    if text::is_standard(path) {
        return "stdin".to_owned();
    }
    let name = path
        .file_name()
        .unwrap_or(path.as_os_str())
        .to_string_lossy();
    let name = name.strip_suffix(".gz").unwrap_or(&name);
    name.strip_suffix(".csv").unwrap_or(name).to_owned()
}
