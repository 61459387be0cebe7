//! Traces, recordings and snapshots: opening, decompressing, telling apart, naming.

use crate::output::Output;
use crate::text;
use cualloc::record::{Profile, ReadError, Recording, Snapshot, SnapshotError};
use cualloc::trace::{Trace, TraceError};
use flate2::bufread::MultiGzDecoder;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::path::{Path, PathBuf};

/// The first two bytes of every gzip file.
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// What some programs begin every file of text with.
const MARK: &[u8] = "\u{FEFF}".as_bytes();

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
    #[error("{}: cannot be read", text::file(path, STDIN))]
    Read { path: PathBuf, source: io::Error },
    #[error("{}: {error}", text::file(path, STDIN))]
    Recording { path: PathBuf, error: ReadError },
    #[error("{}: {error}", text::file(path, STDIN))]
    Snapshot { path: PathBuf, error: SnapshotError },
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
            InputError::Open { .. }
            | InputError::Read { .. }
            | InputError::Recording { .. }
            | InputError::Snapshot { .. } => None,
            InputError::Trace { error, .. } => Some(error.line()),
            InputError::Damaged { line, .. } => Some(*line),
        }
    }
}

/// What a file is, by its first bytes.
#[derive(PartialEq, Eq)]
enum Kind {
    Trace,
    Recording,
    /// A pickle, or JSON.
    Snapshot,
}

impl Kind {
    fn of(first: &[u8]) -> Kind {
        match first {
            _ if first.starts_with(&Recording::MAGIC) => Kind::Recording,
            [0x80, 2..=5, ..] => Kind::Snapshot,
            // A trace begins with letters.
            _ => match telling(first) {
                [b'{' | b'[', ..] => Kind::Snapshot,
                _ => Kind::Trace,
            },
        }
    }
}

/// What first bytes of a text tell with.
fn telling(first: &[u8]) -> &[u8] {
    let text = first.strip_prefix(MARK).unwrap_or(first);
    text.trim_ascii_start()
}

/// A file with its first bytes, as far as they tell what it is: a pipe may give one at a time.
struct Begun<R> {
    first: Cursor<Vec<u8>>,
    /// Why there were no more of them, which comes behind those that there were.
    fault: Option<io::Error>,
    rest: R,
}

impl<R: Read> Begun<R> {
    /// Fails if not one byte can be read.
    fn new(mut rest: R) -> io::Result<Begun<R>> {
        const TELLING: usize = Recording::MAGIC.len();
        let (mut first, mut fault) = (Vec::new(), None);
        let mut part = [0; 1 << 12];
        // White space before JSON tells nothing.
        while telling(&first).len() < TELLING && first.len() < 1 << 16 {
            match rest.read(&mut part) {
                Ok(0) => break,
                Ok(read) => first.extend_from_slice(&part[..read]),
                Err(again) if again.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if first.is_empty() => return Err(error),
                Err(error) => {
                    fault = Some(error);
                    break;
                }
            }
        }
        let first = Cursor::new(first);
        Ok(Begun { first, fault, rest })
    }

    fn first(&self) -> &[u8] {
        self.first.get_ref()
    }
}

impl<R: Read> Read for Begun<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match (
            self.first.read(into)?,
            self.fault.take_if(|_| !into.is_empty()),
        ) {
            (0, Some(fault)) => Err(fault),
            (0, None) => self.rest.read(into),
            (read, fault) => {
                self.fault = fault;
                Ok(read)
            }
        }
    }
}

type Source = Begun<Box<dyn Read>>;

/// Opens a file, or stdin if it is called `-`.
fn open(path: &Path) -> Result<Source, InputError> {
    let open = |source| InputError::Open {
        path: path.to_owned(),
        source,
    };
    let source: Box<dyn Read> = match text::is_standard(path) {
        true => Box::new(io::stdin().lock()),
        false => Box::new(File::open(path).map_err(open)?),
    };
    Begun::new(source).map_err(open)
}

fn buffered<R: Read>(file: R) -> BufReader<R> {
    BufReader::with_capacity(1 << 16, file)
}

/// What is decompressed of a file.
fn decompressed(file: Source) -> MultiGzDecoder<BufReader<Source>> {
    MultiGzDecoder::new(buffered(file))
}

/// All of a file that may have so many rows, which take this many bytes at most.
fn whole(path: &Path, file: impl Read, rows: u64) -> Result<Vec<u8>, InputError> {
    const OTHERS: u64 = 64 << 20;
    const ROW: u64 = 1 << 10;
    let most = rows.saturating_mul(ROW).saturating_add(OTHERS);
    let mut bytes = Vec::new();
    let read = file.take(most).read_to_end(&mut bytes);
    let full = read.and_then(|read| match read as u64 == most {
        true => Err(io::Error::other(format!(
            "it has more than {most} bytes; --max-rows N takes more"
        ))),
        false => Ok(bytes),
    });
    full.map_err(|source| InputError::Read {
        path: path.to_owned(),
        source,
    })
}

/// What a recording lacks.
fn missing(recording: &Recording) -> Vec<String> {
    let mut missing = Vec::new();
    if !recording.is_complete() {
        missing.push("the recording breaks off: what came later is not in it".to_owned());
    }
    match recording.lost() {
        0 => {}
        1 => missing.push("one event was lost, so figures may be wrong".to_owned()),
        lost => missing.push(format!("{lost} events were lost, so figures may be wrong")),
    }
    missing
}

fn read_recording(path: &Path, bytes: &[u8], rows: u64) -> Result<Recording, InputError> {
    Recording::read_at_most(bytes, rows).map_err(|error| InputError::Recording {
        path: path.to_owned(),
        error,
    })
}

/// Reads a recording of at most so many events from a plain or gzip file; `None` if it is something else. What it lacks is
/// told.
pub fn recording(path: &Path, rows: u64, output: &Output) -> Result<Option<Recording>, InputError> {
    let file = open(path)?;
    let bytes = match file.first().starts_with(&GZIP_MAGIC) {
        true => whole(path, decompressed(file), rows)?,
        false => whole(path, file, rows)?,
    };
    match Kind::of(&bytes) {
        Kind::Recording => {
            let recording = read_recording(path, &bytes, rows)?;
            warn(path, &missing(&recording), output);
            Ok(Some(recording))
        }
        _ => Ok(None),
    }
}

/// The trace of the device of a snapshot that has the most rows, of several the first.
fn longest(snapshot: &Snapshot, name: &str) -> Result<Trace, TraceError> {
    let mut longest = Trace::from_rows(name, [])?;
    for device in 0..snapshot.devices() {
        let trace = snapshot.to_trace(name, device)?;
        if trace.rows().len() > longest.rows().len() {
            longest = trace;
        }
    }
    Ok(longest)
}

/// The trace of a recording or of a snapshot, and who holds memory by the stacks of a recording that has any. Of a
/// snapshot it is that of the device that has the most rows.
fn converted(path: &Path, kind: &Kind, bytes: &[u8], rows: u64) -> Result<Input, InputError> {
    let name = name(path);
    let (mut stacks, mut warnings) = (None, Vec::new());
    let trace = if *kind == Kind::Recording {
        let recording = read_recording(path, bytes, rows)?;
        stacks = (recording.sampling() > 0).then(|| Profile::of_stacks(&recording));
        warnings = missing(&recording);
        recording.to_trace(&name, None)
    } else {
        let snapshot = Snapshot::read(bytes).map_err(|error| InputError::Snapshot {
            path: path.to_owned(),
            error,
        })?;
        longest(&snapshot, &name)
    };
    if let Ok(trace) = &trace
        && trace.rows().len() as u64 > rows
    {
        return Err(InputError::Read {
            path: path.to_owned(),
            source: too_many(rows),
        });
    }
    match trace {
        Ok(trace) => Ok(Input {
            trace,
            stacks,
            warnings,
        }),
        Err(error) => Err(InputError::Trace {
            path: path.to_owned(),
            error,
        }),
    }
}

/// Reads a trace of at most so many rows from a plain or gzip file: a trace, a recording, or a PyTorch snapshot, told
/// apart by their first bytes; from stdin if it is called `-`. What the file lacks is told.
pub fn read(path: &Path, rows: u64, output: &Output) -> Result<Input, InputError> {
    let input = read_silently(path, rows)?;
    warn(path, &input.warnings, output);
    Ok(input)
}

fn warn(path: &Path, warnings: &[String], output: &Output) {
    let file = text::file(path, STDIN);
    for warning in warnings {
        output.warning(&format!("{file}: {warning}"));
    }
}

/// What was read from a file.
pub struct Input {
    pub trace: Trace,
    /// Who holds memory at the end, by the stacks of a recording that has any.
    pub stacks: Option<Profile>,
    /// What the file lacks, so that figures of it may be too small.
    pub warnings: Vec<String>,
}

impl From<Trace> for Input {
    fn from(trace: Trace) -> Input {
        Input {
            trace,
            stacks: None,
            warnings: Vec::new(),
        }
    }
}

fn read_silently(path: &Path, rows: u64) -> Result<Input, InputError> {
    read_begun(path, open(path)?, rows)
}

/// Reads a file by its first bytes.
fn read_begun(path: &Path, file: Source, rows: u64) -> Result<Input, InputError> {
    if !file.first().starts_with(&GZIP_MAGIC) {
        let kind = Kind::of(file.first());
        if kind != Kind::Trace {
            return converted(path, &kind, &whole(path, file, rows)?, rows);
        }
        let trace = Trace::read(name(path), Bounded::new(buffered(file), rows));
        let trace = trace.map_err(|error| InputError::Trace {
            path: path.to_owned(),
            error,
        });
        return trace.map(Input::from);
    }
    let text = Begun::new(decompressed(file)).map_err(|source| {
        let error = TraceError::Read { line: 1, source };
        told(path, error, &mut io::empty())
    })?;
    let kind = Kind::of(text.first());
    if kind != Kind::Trace {
        return converted(path, &kind, &whole(path, text, rows)?, rows);
    }
    let mut text = buffered(text);
    let trace = Trace::read(name(path), Bounded::new(&mut text, rows));
    let trace = trace.map_err(|error| told(path, error, &mut text));
    trace.map(Input::from)
}

/// Why a compressed trace cannot be read.
fn told(path: &Path, error: TraceError, text: &mut impl Read) -> InputError {
    let path = path.to_owned();
    match damage(&error, text) {
        Some(why) => InputError::Damaged {
            path,
            line: error.line(),
            why,
        },
        None => InputError::Trace { path, error },
    }
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

fn too_many(rows: u64) -> io::Error {
    io::Error::other(format!(
        "there are more than {rows} rows; --max-rows N takes more"
    ))
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
            0 if !buffer.is_empty() => Err(too_many(self.rows)),
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
    let endings = [".csv", ".rec", ".pickle", ".json"];
    let plain = endings.iter().find_map(|end| name.strip_suffix(end));
    plain.unwrap_or(name).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::Compression;
    use flate2::bufread::GzEncoder;

    /// Bytes as they may come out of a pipe.
    struct Slow {
        bytes: Cursor<Vec<u8>>,
        /// At a time.
        most: usize,
        fails: bool,
    }

    impl Read for Slow {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            let most = into.len().min(self.most);
            match self.bytes.read(&mut into[..most])? {
                0 if self.fails && most > 0 => Err(io::Error::other("the pipe broke")),
                read => Ok(read),
            }
        }
    }

    fn read(bytes: &[u8], most: usize, fails: bool) -> Result<Trace, String> {
        let bytes = Cursor::new(bytes.to_vec());
        let file: Box<dyn Read> = Box::new(Slow { bytes, most, fails });
        let read = Begun::new(file).map(|file| read_begun(Path::new("-"), file, 1000));
        let read = read.map_err(|error| error.to_string())?;
        read.map(|input| input.trace)
            .map_err(|error| text::chain(&error))
    }

    fn packed(bytes: &[u8]) -> Vec<u8> {
        let mut packed = Vec::new();
        let mut encoder = GzEncoder::new(bytes, Compression::default());
        encoder.read_to_end(&mut packed).unwrap();
        packed
    }

    #[test]
    fn a_file_is_what_it_is_in_whatever_parts_it_comes() {
        let rows = "op,id,bytes,stream\na,0,512,0\na,1,1024,0\nf,0,0,0\n";
        let entry = |at: u32| format!(r#"{{"action":"alloc","addr":{at},"size":512,"stream":0}}"#);
        let json = format!(
            r#"{{"segments":[],"device_traces":[[{},{}]]}}"#,
            entry(4096),
            entry(8192)
        );
        let spaced = format!("{}{json}", " \n".repeat(5000));
        let marked = format!("\u{FEFF}{json}");
        let mut pickle = b"\x80\x02}(X\x08\0\0\0segments]X\x0d\0\0\0device_traces](](".to_vec();
        pickle.extend(b"}(X\x06\0\0\0actionX\x05\0\0\0allocX\x04\0\0\0sizeK\x40uee");
        pickle.extend(b"u.");
        let mut recording = Recording::MAGIC.to_vec();
        recording.extend([1, 0, 0, 0, 0, 0, 0, 0, 1]);
        recording.resize(1 << 12, 0);
        let texts = [rows, &json, &spaced, &marked].map(|text| text.as_bytes().to_vec());
        let plain = texts.into_iter().chain([pickle]).zip([3, 2, 2, 2, 1]);
        let rows = |trace: Trace| trace.rows().to_vec();
        for (file, count) in plain
            .map(|(file, count)| (file, Some(count)))
            .chain([(recording, None)])
        {
            let whole = read(&file, usize::MAX, false).map(rows);
            assert_eq!(whole.as_ref().ok().map(Vec::len), count, "{whole:?}");
            let halves = [&file[..1], &file[1..]].map(packed).concat();
            let packed = packed(&file);
            for (bytes, most) in [(&file, 1), (&file, 7), (&packed, 1), (&halves, 1 << 16)] {
                assert_eq!(
                    read(bytes, most, false).map(rows),
                    whole,
                    "{most} at a time"
                );
            }
        }
    }

    #[test]
    fn a_file_that_breaks_off_early_says_why() {
        assert_eq!(read(b"", 1, true).unwrap_err(), "the pipe broke");
        let begun: [&[u8]; 5] = [b"o", b"op,id", b"[", b"\x80\x02", b"cuallocR"];
        for begin in begun {
            let why = read(begin, 1, true).unwrap_err();
            assert!(why.contains("the pipe broke"), "{begin:?}: {why}");
        }
    }
}
