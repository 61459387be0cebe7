//! Files of allocations: opened, told apart, and made traces of.

mod kind;
mod page;
mod source;

use crate::options::InputOptions;
use crate::output::Output;
use crate::text;
use cualloc::record::{FailedRequest, Profile, ReadError, Recording, Snapshot, SnapshotError};
use cualloc::trace::{AllocationLog, Op, Trace, TraceError};
use kind::Kind;
use source::{Begun, Bounded, Source, buffered, decompressed, open, too_many, whole};
use std::io::{self, BufRead, Read};
use std::path::{Path, PathBuf};

/// The first two bytes of every gzip file.
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// How much of a compressed file is read on behind a fault, to see whether its checksum is right.
const READ_ON: u64 = 64 << 20;

/// What messages call stdin.
pub const STDIN: &str = "<stdin>";

/// The formats that are read.
const FORMATS: &str = "traces (`op,id,bytes,stream`), recordings of cualloc, memory snapshots of PyTorch (pickle, JSON, or \
                       the page of trace_plot), and allocation logs of RMM or cualloc \
                       (`Thread,Time,Action,Pointer,Size,Stream`), plain or gzip";

/// A trace could not be had from a file; the message begins with the file, and its line if one is
/// to blame.
#[derive(Debug, thiserror::Error)]
pub enum InputError {
    #[error("{}: cannot be opened", text::file(path, STDIN))]
    Open { path: PathBuf, source: io::Error },
    #[error("{}:{}: {}", text::file(path, STDIN), error.line(), fault(error))]
    Trace { path: PathBuf, error: TraceError },
    #[error("{}: {}", text::file(path, STDIN), fault(error))]
    Conversion { path: PathBuf, error: TraceError },
    #[error("{}: cannot be read", text::file(path, STDIN))]
    Read { path: PathBuf, source: io::Error },
    #[error("{}: {error}", text::file(path, STDIN))]
    Recording { path: PathBuf, error: ReadError },
    #[error("{}: {error}", text::file(path, STDIN))]
    Snapshot { path: PathBuf, error: SnapshotError },
    #[error(
        "{}: this looks like {found}, which is not read; the formats that are read: {FORMATS}",
        text::file(path, STDIN)
    )]
    Foreign { path: PathBuf, found: String },
    #[error(
        "{}: expected a recording of cualloc, found {found}: only `--to csv` reads other formats",
        text::file(path, STDIN)
    )]
    NotARecording { path: PathBuf, found: String },
    #[error("{}: --gpu {gpu}: {found}", text::file(path, STDIN))]
    NoGpu {
        path: PathBuf,
        gpu: usize,
        found: String,
    },
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
            InputError::Trace { error, .. } => Some(error.line()),
            InputError::Damaged { line, .. } => Some(*line),
            _ => None,
        }
    }

    fn foreign(path: &Path, found: String) -> InputError {
        let path = path.to_owned();
        InputError::Foreign { path, found }
    }

    fn trace(path: &Path, error: TraceError) -> InputError {
        let path = path.to_owned();
        InputError::Trace { path, error }
    }
}

/// What a recording lacks.
pub fn missing(recording: &Recording) -> Vec<String> {
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

fn read_snapshot(path: &Path, bytes: &[u8]) -> Result<Snapshot, InputError> {
    Snapshot::read(bytes).map_err(|error| match error {
        SnapshotError::NotASnapshot { found } => InputError::foreign(path, found),
        SnapshotError::Json { what } => {
            InputError::foreign(path, format!("JSON with an error ({what})"))
        }
        SnapshotError::Opcode { .. } => {
            InputError::foreign(path, format!("a pickle of other objects ({error})"))
        }
        error => InputError::Snapshot {
            path: path.to_owned(),
            error,
        },
    })
}

/// Opens a file, decompressed if it is compressed, which the flag says.
fn opened(path: &Path, file: Source) -> Result<(Source, bool), InputError> {
    if !file.first().starts_with(&GZIP_MAGIC) {
        return Ok((file, false));
    }
    let text = Begun::new(decompressed(file));
    let text = text.map_err(|source| {
        let error = TraceError::Read { line: 1, source };
        told(path, error, &mut io::empty())
    });
    Ok((text?, true))
}

/// Reads a recording from a plain or gzip file, of one GPU if the options name one. What it lacks is told.
pub fn recording(
    path: &Path,
    options: &InputOptions,
    output: &Output,
) -> Result<Recording, InputError> {
    let (file, _) = opened(path, open(path)?)?;
    let found = match Kind::of(file.first()) {
        Kind::Recording => {
            let bytes = whole(path, file, options.max_rows)?;
            let recording = read_recording(path, &bytes, options.max_rows)?;
            warn(path, &missing(&recording), output);
            return match options.gpu {
                None => Ok(recording),
                Some(gpu) => {
                    let devices = devices_of(&recording);
                    check_gpu(path, gpu, &devices).map(|()| recording.of_device(gpu))
                }
            };
        }
        Kind::Other(found) => return Err(InputError::foreign(path, found)),
        Kind::Trace => "a trace",
        Kind::Log => "an allocation log",
        Kind::Snapshot => "a pickle or JSON",
        Kind::Page => "a page",
    };
    Err(InputError::NotARecording {
        path: path.to_owned(),
        found: found.to_owned(),
    })
}

/// The ordinals of the devices of a recording, ascending.
fn devices_of(recording: &Recording) -> Vec<usize> {
    let mut devices: Vec<usize> = recording.allocators().map(|(_, device)| device).collect();
    devices.sort_unstable();
    devices.dedup();
    devices
}

fn check_gpu(path: &Path, gpu: usize, devices: &[usize]) -> Result<(), InputError> {
    if devices.contains(&gpu) {
        return Ok(());
    }
    let names: Vec<String> = devices.iter().map(usize::to_string).collect();
    Err(InputError::NoGpu {
        path: path.to_owned(),
        gpu,
        found: format!("the file has the GPUs {}", names.join(", ")),
    })
}

/// The trace of one of several devices: that which the options name, or the one with the most rows and a warning that names
/// the others.
fn choose(
    path: &Path,
    gpu: Option<usize>,
    devices: &[usize],
    trace_of: impl Fn(usize) -> Result<Trace, TraceError>,
) -> Result<(usize, Trace, Option<String>), InputError> {
    let trace_of = |device| trace_of(device).map_err(|error| conversion(path, error));
    if let Some(gpu) = gpu {
        check_gpu(path, gpu, devices)?;
        return Ok((gpu, trace_of(gpu)?, None));
    }
    let first = devices.first().copied().unwrap_or(0);
    let (mut device, mut longest) = (first, trace_of(first)?);
    let mut described = vec![(first, described(first, &longest))];
    for other in devices.iter().skip(1) {
        let trace = trace_of(*other)?;
        if !trace.rows().is_empty() {
            described.push((*other, self::described(*other, &trace)));
        }
        if trace.rows().len() > longest.rows().len() {
            (device, longest) = (*other, trace);
        }
    }
    let others = described.iter().filter(|(other, _)| *other != device);
    let others: Vec<&str> = others.map(|(_, text)| text.as_str()).collect();
    let note = (!others.is_empty()).then(|| {
        format!(
            "only GPU {device} is shown, which has the most rows; not shown: {}; --gpu N selects another one",
            others.join(", ")
        )
    });
    Ok((device, longest, note))
}

/// A trace that is made of another file has no lines.
fn conversion(path: &Path, error: TraceError) -> InputError {
    let path = path.to_owned();
    InputError::Conversion { path, error }
}

fn described(device: usize, trace: &Trace) -> String {
    let failed = trace.rows().iter().filter(|row| row.op == Op::Oom).count();
    let failed = match failed {
        0 => String::new(),
        failed => format!(", {}", text::counted(failed, "failed request")),
    };
    let rows = text::counted(trace.rows().len(), "row");
    format!("GPU {device} ({rows}{failed})")
}

/// What is made of all bytes of a file.
fn converted(
    path: &Path,
    kind: &Kind,
    bytes: &[u8],
    options: &InputOptions,
) -> Result<Input, InputError> {
    let (name, gpu) = (name(path), options.gpu);
    let (mut warnings, mut stacks, mut recorded) = (Vec::new(), None, Recorded::default());
    let (_, trace, note) = if *kind == Kind::Recording {
        let mut recording = read_recording(path, bytes, options.max_rows)?;
        warnings = missing(&recording);
        let devices = devices_of(&recording);
        let chosen = match devices.len() {
            0 | 1 if gpu.is_none() => {
                let trace = recording.to_trace(&name, None);
                (0, trace.map_err(|error| conversion(path, error))?, None)
            }
            _ => {
                let of_device = |device| recording.of_device(device).to_trace(&name, None);
                let chosen = choose(path, gpu, &devices, of_device)?;
                recording = recording.of_device(chosen.0);
                chosen
            }
        };
        stacks = (recording.sampling() > 0).then(|| Profile::of_stacks(&recording));
        recorded = Recorded::of(&recording);
        chosen
    } else {
        let inside = match kind {
            Kind::Page => {
                let inside = page::snapshot(bytes);
                Some(inside.map_err(|found| InputError::foreign(path, found))?)
            }
            _ => None,
        };
        let snapshot = read_snapshot(path, inside.as_deref().unwrap_or(bytes))?;
        let devices: Vec<usize> = (0..snapshot.devices().max(1)).collect();
        let of_device = |device| snapshot.to_trace(&name, device);
        let chosen = choose(path, gpu, &devices, of_device)?;
        warnings.extend(snapshot.gaps(chosen.0));
        recorded.failed = snapshot.failed_requests(chosen.0);
        chosen
    };
    warnings.extend(note);
    if trace.rows().len() as u64 > options.max_rows {
        return Err(InputError::Read {
            path: path.to_owned(),
            source: too_many(options.max_rows),
        });
    }
    Ok(Input {
        trace,
        stacks,
        warnings,
        recorded,
    })
}

/// Reads a trace from a plain or gzip file in one of the [`FORMATS`], told apart by their first bytes; from stdin if it is
/// called `-`. What the file lacks is told.
pub fn read(path: &Path, options: &InputOptions, output: &Output) -> Result<Input, InputError> {
    let input = read_begun(path, open(path)?, options)?;
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
    pub recorded: Recorded,
}

/// What a recording or a snapshot says beside its rows.
#[derive(Default)]
pub struct Recorded {
    /// Of each row of a request that failed, in their order.
    pub failed: Vec<FailedRequest>,
    /// The limit at the end, where there is one allocator.
    pub limit: Option<u64>,
    /// The memory of its device, in bytes.
    pub memory: Option<u64>,
}

impl Recorded {
    fn of(recording: &Recording) -> Recorded {
        let mut allocators = recording.allocators().map(|(id, _)| id);
        let only = allocators.next().filter(|_| allocators.next().is_none());
        Recorded {
            failed: recording.failed_requests(None),
            limit: only.and_then(|id| recording.limit_of(id)),
            memory: only.and_then(|id| recording.device_memory_of(id)),
        }
    }
}

/// Reads a file by its first bytes.
fn read_begun(path: &Path, file: Source, options: &InputOptions) -> Result<Input, InputError> {
    let (mut file, packed) = opened(path, file)?;
    let kind = Kind::of(file.first());
    match kind {
        Kind::Other(found) => match file.fault() {
            // What is there is too short to tell.
            Some(source) => Err(InputError::Read {
                path: path.to_owned(),
                source,
            }),
            None if packed => Err(match broken(&mut file) {
                Some(damage) => damaged(path, 1, damage.to_string()),
                None => InputError::foreign(path, format!("gzip data of {found}")),
            }),
            None => Err(InputError::foreign(path, found)),
        },
        Kind::Recording | Kind::Snapshot | Kind::Page => {
            converted(path, &kind, &whole(path, file, options.max_rows)?, options)
        }
        Kind::Trace | Kind::Log => {
            let mut text = buffered(file);
            let input = lines(
                path,
                &kind,
                Bounded::new(&mut text, options.max_rows),
                options,
            );
            input.map_err(|error| match error {
                InputError::Trace { error, .. } if packed => told(path, error, &mut text),
                error => error,
            })
        }
    }
}

/// Reads a file of lines.
fn lines(
    path: &Path,
    kind: &Kind,
    text: impl BufRead,
    options: &InputOptions,
) -> Result<Input, InputError> {
    let name = name(path);
    let wrong = |error| InputError::trace(path, error);
    let (trace, warnings) = if *kind == Kind::Log {
        let log = AllocationLog::read(text).map_err(wrong)?;
        let of_device = |device| log.to_trace(&name, device);
        let (device, trace, note) = choose(path, options.gpu, &log.devices(), of_device)?;
        let mut warnings = log.gaps(device);
        warnings.extend(note);
        (trace, warnings)
    } else if let Some(gpu) = options.gpu {
        let (path, found) = (path.to_owned(), "a trace does not say which GPU it is of");
        let found = found.to_owned();
        return Err(InputError::NoGpu { path, gpu, found });
    } else {
        (Trace::read(name, text).map_err(wrong)?, Vec::new())
    };
    Ok(Input {
        trace,
        stacks: None,
        warnings,
        recorded: Recorded::default(),
    })
}

/// Why a compressed trace cannot be read.
fn told(path: &Path, error: TraceError, text: &mut impl Read) -> InputError {
    match damage(&error, text) {
        Some(why) => damaged(path, error.line(), why),
        None => InputError::trace(path, error),
    }
}

fn damaged(path: &Path, line: u64, why: String) -> InputError {
    let path = path.to_owned();
    InputError::Damaged { path, line, why }
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
        _ => {
            let damage = broken(text)?;
            Some(format!("{damage} (what is read there: {})", fault(error)))
        }
    }
}

/// Reads on: what is damaged reads as anything, and only its end tells.
fn broken(text: &mut impl Read) -> Option<io::Error> {
    io::copy(&mut text.take(READ_ON), &mut io::sink()).err()
}

/// Whether both names lead to one file.
pub fn is_same(one: &Path, other: &Path) -> bool {
    if text::is_standard(one) || text::is_standard(other) {
        return false;
    }
    match (std::fs::canonicalize(one), std::fs::canonicalize(other)) {
        (Ok(one), Ok(other)) => one == other && one.is_file(),
        _ => false,
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
    let endings = [".csv", ".rec", ".pickle", ".json", ".html"];
    let plain = endings.iter().find_map(|end| name.strip_suffix(end));
    plain.unwrap_or(name).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use base64::Engine;
    use base64::prelude::BASE64_STANDARD;
    use flate2::Compression;
    use flate2::bufread::GzEncoder;
    use std::io::Cursor;

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
        let read = Begun::new(file).map(|file| read_begun(Path::new("-"), file, &options()));
        let read = read.map_err(|error| error.to_string())?;
        read.map(|input| input.trace)
            .map_err(|error| text::chain(&error))
    }

    fn options() -> InputOptions {
        InputOptions {
            gpu: None,
            max_rows: 1000,
        }
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
        pickle.extend(b"}(X\x06\0\0\0actionX\x05\0\0\0allocX\x04\0\0\0sizeK\x40");
        pickle.extend(b"X\x04\0\0\0addrK\x01X\x06\0\0\0streamK\0ueeu.");
        let log = "Thread,Time,Action,Pointer,Size,Stream\n1,1:0:0,allocate,0x200,5,0x0\n";
        let inside = BASE64_STANDARD.encode(&json);
        let page = format!("<html>const local_files = [{{\"base64\": \"{inside}\"}}]</html>");
        let mut recording = Recording::MAGIC.to_vec();
        recording.extend([1, 0, 0, 0, 0, 0, 0, 0, 1]);
        recording.resize(1 << 12, 0);
        let texts = [rows, &json, &spaced, &marked, log, &page];
        let texts = texts.map(|text| text.as_bytes().to_vec());
        let plain = texts.into_iter().chain([pickle]);
        let plain = plain.zip([3, 2, 2, 2, 1, 2, 1]);
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
