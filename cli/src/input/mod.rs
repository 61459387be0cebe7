//! Files of allocations: opened, told apart, and made traces of.

mod kind;
mod page;
mod source;

use crate::options::InputOptions;
use crate::output::Output;
use crate::{Failure, text};
use cualloc::record::{FailedRequest, Profile, ReadError, Recording, Snapshot, SnapshotError};
use cualloc::trace::{AllocationLog, Op, Trace, TraceError, TraceFault};
use kind::Kind;
use source::{Begun, Bounded, Source, buffered, decompressed, open, too_many, whole};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// The first two bytes of every gzip file.
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// How much of a compressed file is read on behind a fault, to see whether its checksum is right.
const READ_ON: u64 = 64 << 20;

/// What messages call stdin.
pub const STDIN: &str = "<stdin>";

/// What is said of a file that ends in an error, or has too much.
const UNREAD: &str = "cannot be read";

/// The formats that are read.
const FORMATS: &str = "traces (`op,id,bytes,stream`), recordings of cualloc, memory snapshots of PyTorch (pickle, JSON, or \
                       the page of trace_plot), and allocation logs of RMM or cualloc \
                       (`Thread,Time,Action,Pointer,Size,Stream`), plain or gzip";

/// A file could not be read; the message begins with the file, and its line if one is to blame.
#[derive(Debug, thiserror::Error)]
#[error("{}: {what}", place(path, *line))]
pub struct InputError {
    path: PathBuf,
    line: Option<u64>,
    what: String,
    source: Option<io::Error>,
}

impl InputError {
    /// The line of the file that is to blame.
    pub fn line(&self) -> Option<u64> {
        self.line
    }
}

impl From<InputError> for Failure {
    fn from(error: InputError) -> Failure {
        Failure::File {
            trace: name(&error.path),
            line: error.line,
            error: Box::new(error),
        }
    }
}

fn place(path: &Path, line: Option<u64>) -> String {
    let file = text::file(path, STDIN);
    line.map_or(file.clone(), |line| format!("{file}:{line}"))
}

/// An [`InputError`] before it has the path.
#[derive(Debug)]
struct Fault {
    line: Option<u64>,
    what: String,
    source: Option<io::Error>,
}

impl Fault {
    fn new(what: String) -> Fault {
        Fault {
            line: None,
            what,
            source: None,
        }
    }

    /// The file is of a kind that is not read.
    fn foreign(found: &str) -> Fault {
        Fault::new(format!(
            "this looks like {found}, which is not read; the formats that are read: {FORMATS}"
        ))
    }

    fn failed(what: &str, source: io::Error) -> Fault {
        Fault {
            source: Some(source),
            ..Fault::new(what.to_owned())
        }
    }

    fn damaged(line: u64, why: &str) -> Fault {
        Fault {
            line: Some(line),
            ..Fault::new(format!("the compressed data is damaged: {why}"))
        }
    }

    fn no_gpu(gpu: usize, found: &str) -> Fault {
        Fault::new(format!("--gpu {gpu}: {found}"))
    }

    /// What is wrong with a line of the file.
    fn in_line(error: &TraceError) -> Fault {
        Fault {
            line: Some(error.line()),
            ..Fault::new(text::chain(error.fault()))
        }
    }

    fn of(self, path: &Path) -> InputError {
        InputError {
            path: path.to_owned(),
            line: self.line,
            what: self.what,
            source: self.source,
        }
    }
}

/// A trace that is made of another file has no lines.
impl From<TraceError> for Fault {
    fn from(error: TraceError) -> Fault {
        Fault::new(text::chain(error.fault()))
    }
}

impl From<ReadError> for Fault {
    fn from(error: ReadError) -> Fault {
        Fault::new(error.to_string())
    }
}

impl From<SnapshotError> for Fault {
    fn from(error: SnapshotError) -> Fault {
        match error {
            SnapshotError::NotASnapshot { found } => Fault::foreign(&found),
            SnapshotError::Json { what } => Fault::foreign(&format!("JSON with an error ({what})")),
            SnapshotError::Opcode { .. } => {
                Fault::foreign(&format!("a pickle of other objects ({error})"))
            }
            error => Fault::new(error.to_string()),
        }
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

/// Opens a file, decompressed if it is compressed, which the flag says.
fn opened(file: Source) -> Result<(Source, bool), Fault> {
    if !file.first().starts_with(&GZIP_MAGIC) {
        return Ok((file, false));
    }
    let text = Begun::new(decompressed(file));
    let text = text.map_err(|error| match unpacking(&error) {
        Some(why) => Fault::damaged(1, &why),
        None => Fault::failed(UNREAD, error),
    });
    Ok((text?, true))
}

/// Reads a recording from a plain or gzip file, of one GPU if the options name one, and warns of what it lacks.
pub fn recording(
    path: &Path,
    options: &InputOptions,
    output: &Output,
) -> Result<Recording, InputError> {
    let recording = open(path).and_then(|file| recording_of(file, options));
    let recording = recording.map_err(|fault| fault.of(path))?;
    warn(path, &missing(&recording), output);
    match options.gpu {
        None => Ok(recording),
        Some(gpu) => {
            let known = check_gpu(gpu, &devices_of(&recording));
            known.map_err(|fault| fault.of(path))?;
            Ok(recording.of_device(gpu))
        }
    }
}

fn recording_of(file: Source, options: &InputOptions) -> Result<Recording, Fault> {
    let (file, _) = opened(file)?;
    let found = match Kind::of(file.first()) {
        Kind::Recording => {
            let bytes = whole(file, options.max_rows)?;
            return Ok(Recording::read_at_most(&bytes, options.max_rows)?);
        }
        Kind::Other(found) => return Err(Fault::foreign(&found)),
        Kind::Trace => "a trace",
        Kind::Log => "an allocation log",
        Kind::Snapshot => "a pickle or JSON",
        Kind::Page => "a page",
    };
    Err(Fault::new(format!(
        "expected a recording of cualloc, found {found}: only `--to csv` reads other formats"
    )))
}

/// The ordinals of the devices of a recording, ascending.
fn devices_of(recording: &Recording) -> Vec<usize> {
    let mut devices: Vec<usize> = recording.allocators().map(|(_, device)| device).collect();
    devices.sort_unstable();
    devices.dedup();
    devices
}

fn check_gpu(gpu: usize, devices: &[usize]) -> Result<(), Fault> {
    if devices.contains(&gpu) {
        return Ok(());
    }
    let names: Vec<String> = devices.iter().map(usize::to_string).collect();
    let found = format!("the file has the GPUs {}", names.join(", "));
    Err(Fault::no_gpu(gpu, &found))
}

/// The trace of one of several devices: that which the options name, or the one with the most rows and a warning that names
/// the others.
fn choose(
    gpu: Option<usize>,
    devices: &[usize],
    trace_of: impl Fn(usize) -> Result<Trace, TraceError>,
) -> Result<(usize, Trace, Option<String>), Fault> {
    if let Some(gpu) = gpu {
        check_gpu(gpu, devices)?;
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
    name: &str,
    kind: &Kind,
    bytes: &[u8],
    options: &InputOptions,
) -> Result<Input, Fault> {
    let gpu = options.gpu;
    let (mut warnings, mut stacks, mut recorded) = (Vec::new(), None, Recorded::default());
    let (_, trace, note) = if *kind == Kind::Recording {
        let mut recording = Recording::read_at_most(bytes, options.max_rows)?;
        warnings = missing(&recording);
        let devices = devices_of(&recording);
        let chosen = match devices.len() {
            0 | 1 if gpu.is_none() => (0, recording.to_trace(name, None)?, None),
            _ => {
                let of_device = |device| recording.of_device(device).to_trace(name, None);
                let chosen = choose(gpu, &devices, of_device)?;
                recording = recording.of_device(chosen.0);
                chosen
            }
        };
        stacks = (recording.sampling() > 0).then(|| Profile::of_stacks(&recording));
        recorded = Recorded::of(&recording);
        chosen
    } else {
        let inside = match kind {
            Kind::Page => Some(page::snapshot(bytes).map_err(|found| Fault::foreign(&found))?),
            _ => None,
        };
        let snapshot = Snapshot::read(inside.as_deref().unwrap_or(bytes))?;
        let devices: Vec<usize> = (0..snapshot.devices().max(1)).collect();
        let chosen = choose(gpu, &devices, |device| snapshot.to_trace(name, device))?;
        warnings.extend(snapshot.gaps(chosen.0));
        recorded.failed = snapshot.failed_requests(chosen.0);
        chosen
    };
    warnings.extend(note);
    if trace.rows().len() as u64 > options.max_rows {
        return Err(Fault::failed(UNREAD, too_many(options.max_rows)));
    }
    Ok(Input {
        trace,
        stacks,
        warnings,
        recorded,
    })
}

/// Reads a trace from a plain or gzip file in one of the [`FORMATS`], told apart by their first bytes; from stdin if it is
/// called `-`. Warns of what the file lacks.
pub fn read(path: &Path, options: &InputOptions, output: &Output) -> Result<Input, InputError> {
    let input = open(path).and_then(|file| read_begun(&name(path), file, options));
    let input = input.map_err(|fault| fault.of(path))?;
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
fn read_begun(name: &str, file: Source, options: &InputOptions) -> Result<Input, Fault> {
    let (mut file, packed) = opened(file)?;
    let kind = Kind::of(file.first());
    match kind {
        Kind::Other(found) => Err(match file.fault() {
            // What is there is too short to tell.
            Some(source) => Fault::failed(UNREAD, source),
            None if packed => match broken(&mut file) {
                Some(damage) => Fault::damaged(1, &damage.to_string()),
                None => Fault::foreign(&format!("gzip data of {found}")),
            },
            None => Fault::foreign(&found),
        }),
        Kind::Recording | Kind::Snapshot | Kind::Page => {
            converted(name, &kind, &whole(file, options.max_rows)?, options)
        }
        Kind::Trace | Kind::Log => lines(name, &kind, file, packed, options),
    }
}

/// A file of lines.
enum Lines {
    Trace(Trace),
    Log(AllocationLog),
}

/// Reads a file of lines.
fn lines(
    name: &str,
    kind: &Kind,
    file: Source,
    packed: bool,
    options: &InputOptions,
) -> Result<Input, Fault> {
    let mut text = buffered(file);
    let rows = Bounded::new(&mut text, options.max_rows);
    let read = match (kind, options.gpu) {
        (Kind::Log, _) => AllocationLog::read(rows).map(Lines::Log),
        (_, None) => Trace::read(name, rows).map(Lines::Trace),
        (_, Some(gpu)) => {
            return Err(Fault::no_gpu(
                gpu,
                "a trace does not say which GPU it is of",
            ));
        }
    };
    let read = read.map_err(|error| match packed {
        true => packed_fault(&error, &mut text),
        false => Fault::in_line(&error),
    })?;
    let (trace, warnings) = match read {
        Lines::Trace(trace) => (trace, Vec::new()),
        Lines::Log(log) => {
            let trace_of = |device| log.to_trace(name, device);
            let (device, trace, note) = choose(options.gpu, &log.devices(), trace_of)?;
            (trace, log.gaps(device).into_iter().chain(note).collect())
        }
    };
    Ok(Input {
        trace,
        stacks: None,
        warnings,
        recorded: Recorded::default(),
    })
}

/// Why a compressed trace cannot be read: often its compression is what is wrong.
fn packed_fault(error: &TraceError, text: &mut impl Read) -> Fault {
    let why = match error.fault() {
        TraceFault::Read { source } => unpacking(source),
        fault => broken(text).map(|damage| {
            let read = text::chain(fault);
            format!("{damage} (what is read there: {read})")
        }),
    };
    match why {
        Some(why) => Fault::damaged(error.line(), &why),
        None => Fault::in_line(error),
    }
}

/// What is wrong with compressed data, if that is what the error is about.
fn unpacking(error: &io::Error) -> Option<String> {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => Some("it ends too early".to_owned()),
        io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData => Some(error.to_string()),
        _ => None,
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
        let read = Begun::new(file).map(|file| read_begun("stdin", file, &options()));
        let read = read.map_err(|error| error.to_string())?;
        read.map(|input| input.trace)
            .map_err(|fault| text::chain(&fault.of(Path::new("-"))))
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
