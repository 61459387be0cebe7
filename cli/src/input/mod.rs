//! Files of allocations: opens them, detects their kind, and converts them to traces.

mod kind;
mod page;
mod source;

use crate::options::InputOptions;
use crate::output::Output;
use crate::{FileError, text};
use cualloc::record::{FailedRequest, Profile, Recording, Snapshot, SnapshotError};
use cualloc::trace::{AllocationLog, Trace, TraceError, TraceFault};
use kind::Kind;
use source::{Begun, Bounded, Source, buffered, decompress, open, too_many, whole};
use std::collections::BTreeSet;
use std::io::{self, Read};
use std::path::Path;

const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// How many bytes of a compressed file are read after a fault, to find out whether its checksum is right.
const READ_ON: u64 = 64 << 20;

pub const STDIN: &str = "<stdin>";

/// The message for a file that cannot be read to its end, or is too large.
const UNREAD: &str = "cannot be read";

const FORMATS: &str = "traces (`op,id,bytes,stream`), recordings of cualloc, memory snapshots of PyTorch (pickle, JSON, or \
                       the page of trace_plot), and allocation logs of RMM or cualloc \
                       (`Thread,Time,Action,Pointer,Size,Stream`), plain or gzip";

/// An error whose path is added later.
type Fault = FileError;

impl Fault {
    fn foreign(found: &str) -> Fault {
        Fault::new(format!(
            "this looks like {found}, which is not read; the formats that are read: {FORMATS}"
        ))
    }

    fn damaged(line: u64, why: &str) -> Fault {
        Fault::new(format!("the compressed data is damaged: {why}")).in_line(line)
    }

    fn no_gpu(gpu: usize, found: &str) -> Fault {
        Fault::new(format!("--gpu {gpu}: {found}"))
    }
}

/// The error for an invalid line of the file.
fn in_line(error: &TraceError) -> Fault {
    Fault::new(text::chain(error.fault())).in_line(error.line())
}

/// Traces converted from other formats have no line numbers.
impl From<TraceError> for Fault {
    fn from(error: TraceError) -> Fault {
        Fault::new(text::chain(error.fault()))
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

/// Opens a file and decompresses it if necessary; the flag tells whether it was compressed.
fn unpack_if_needed(file: Source) -> Result<(Source, bool), Fault> {
    if !file.first().starts_with(&GZIP_MAGIC) {
        return Ok((file, false));
    }
    let text = Begun::new(decompress(file));
    let text = text.map_err(|error| match describe_damage(&error) {
        Some(why) => Fault::damaged(1, &why),
        None => Fault::new(UNREAD).with_source(error),
    });
    Ok((text?, true))
}

/// Reads a recording from a plain or gzip file, restricted to one GPU if the options name one. Warns of what is
/// missing.
pub fn recording(
    path: &Path,
    options: &InputOptions,
    output: &Output,
) -> Result<Recording, FileError> {
    let recording = open(path).and_then(|file| read_opened_recording(file, options));
    let recording = recording.map_err(|fault| fault.of(path, STDIN))?;
    warn(path, &missing(&recording), output);
    Ok(recording)
}

fn read_opened_recording(file: Source, options: &InputOptions) -> Result<Recording, Fault> {
    let (file, _) = unpack_if_needed(file)?;
    let found = match Kind::of(file.first()) {
        Kind::Recording => {
            let recording = read_recording(file, options)?;
            let Some(gpu) = options.gpu else {
                return Ok(recording);
            };
            check_gpu(gpu, &devices_of(&recording))?;
            return Ok(recording.of_device(gpu));
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

fn read_recording(file: Source, options: &InputOptions) -> Result<Recording, Fault> {
    let bytes = whole(file, options.max_rows)?;
    let recording = Recording::read_at_most(&bytes, options.max_rows);
    recording.map_err(|error| Fault::new(error.to_string()))
}

/// Returns the ordinals of the devices of a recording, ascending.
fn devices_of(recording: &Recording) -> Vec<usize> {
    let devices = recording.allocators().map(|(_, device)| device);
    Vec::from_iter(BTreeSet::from_iter(devices))
}

fn check_gpu(gpu: usize, devices: &[usize]) -> Result<(), Fault> {
    if devices.contains(&gpu) {
        return Ok(());
    }
    let names: Vec<String> = devices.iter().map(usize::to_string).collect();
    let found = format!("the file has the GPUs {}", names.join(", "));
    Err(Fault::no_gpu(gpu, &found))
}

/// Returns the trace of one of several devices: the one that the options name, or else the one with the most rows, with
/// a warning that names the others.
fn choose(
    gpu: Option<usize>,
    devices: &[usize],
    trace_of: impl Fn(usize) -> Result<Trace, TraceError>,
) -> Result<(usize, Trace, Option<String>), Fault> {
    if let Some(gpu) = gpu {
        check_gpu(gpu, devices)?;
        return Ok((gpu, trace_of(gpu)?, None));
    }
    let mut traces = Vec::new();
    for (at, device) in devices.iter().enumerate() {
        let trace = trace_of(*device)?;
        if at == 0 || !trace.rows().is_empty() {
            traces.push((*device, trace));
        }
    }
    // Among equally long traces, the first one.
    let longest = (0..traces.len()).rev();
    let longest = longest.max_by_key(|at| traces[*at].1.rows().len());
    let Some(longest) = longest else {
        return Ok((0, trace_of(0)?, None));
    };
    let (device, trace) = traces.remove(longest);
    let others = Vec::from_iter(traces.iter().map(described)).join(", ");
    let note = format!(
        "only GPU {device} is shown, which has the most rows; not shown: {others}; --gpu N selects another one"
    );
    Ok((device, trace, (!traces.is_empty()).then_some(note)))
}

fn described((device, trace): &(usize, Trace)) -> String {
    let rows = text::count_noun(trace.rows().len(), "row");
    match trace.failed_requests().count() {
        0 => format!("GPU {device} ({rows})"),
        failed => {
            let failed = text::count_noun(failed, "failed request");
            format!("GPU {device} ({rows}, {failed})")
        }
    }
}

fn from_recording(
    name: &str,
    mut recording: Recording,
    options: &InputOptions,
) -> Result<Input, Fault> {
    let (devices, mut warnings) = (devices_of(&recording), missing(&recording));
    let trace = if devices.len() > 1 || options.gpu.is_some() {
        let of_device = |device| recording.of_device(device).to_trace(name, None);
        let (device, trace, note) = choose(options.gpu, &devices, of_device)?;
        recording = recording.of_device(device);
        warnings.extend(note);
        trace
    } else {
        recording.to_trace(name, None)?
    };
    Ok(Input {
        trace,
        stacks: (recording.sampling() > 0).then(|| Profile::of_stacks(&recording)),
        warnings,
        recorded: Recorded::of(&recording),
    })
}

fn from_snapshot(name: &str, bytes: &[u8], options: &InputOptions) -> Result<Input, Fault> {
    let snapshot = Snapshot::read(bytes)?;
    let devices = Vec::from_iter(0..snapshot.devices().max(1));
    let trace_of = |device| snapshot.to_trace(name, device);
    let (device, trace, note) = choose(options.gpu, &devices, trace_of)?;
    let warnings = snapshot.gaps(device).into_iter().chain(note).collect();
    let mut input = Input::new(trace, warnings);
    input.recorded.failed = snapshot.failed_requests(device);
    Ok(input)
}

/// Reads a trace from a plain or gzip file in one of the [`FORMATS`], detected by its first bytes; `-` is stdin. Warns
/// of what is missing from the file.
pub fn read(path: &Path, options: &InputOptions, output: &Output) -> Result<Input, FileError> {
    let input = open(path).and_then(|file| read_opened(&text::trace_name(path), file, options));
    let input = input.map_err(|fault| fault.of(path, STDIN))?;
    warn(path, &input.warnings, output);
    Ok(input)
}

fn warn(path: &Path, warnings: &[String], output: &Output) {
    let file = text::file(path, STDIN);
    for warning in warnings {
        output.warning(&format!("{file}: {warning}"));
    }
}

pub struct Input {
    pub trace: Trace,
    /// The live memory at the end by stack, if the recording has stacks.
    pub stacks: Option<Profile>,
    /// What is missing from the file; its figures may therefore be too small.
    pub warnings: Vec<String>,
    pub recorded: Recorded,
}

impl Input {
    pub fn new(trace: Trace, warnings: Vec<String>) -> Input {
        Input {
            trace,
            stacks: None,
            warnings,
            recorded: Recorded::default(),
        }
    }
}

/// What a recording or a snapshot contains in addition to its rows.
#[derive(Default)]
pub struct Recorded {
    /// The details of each row of a failed request, in order.
    pub failed: Vec<FailedRequest>,
    /// The limit at the end, if there is only one allocator.
    pub limit: Option<u64>,
    /// The memory of its device in bytes.
    pub memory: Option<u64>,
    /// The time of each row in nanoseconds since the recording began; empty without times.
    pub times: Vec<u64>,
}

impl Recorded {
    fn of(recording: &Recording) -> Recorded {
        let mut allocators = recording.allocators().map(|(id, _)| id);
        let only = allocators.next().filter(|_| allocators.next().is_none());
        Recorded {
            failed: recording.failed_requests(None),
            limit: only.and_then(|id| recording.limit_of(id)),
            memory: only.and_then(|id| recording.device_memory_of(id)),
            times: recording.row_times(None),
        }
    }
}

fn read_opened(name: &str, file: Source, options: &InputOptions) -> Result<Input, Fault> {
    let (mut file, packed) = unpack_if_needed(file)?;
    let kind = Kind::of(file.first());
    let input = match kind {
        Kind::Other(found) => match file.fault() {
            // The available bytes are too few to detect the kind.
            Some(source) => Err(Fault::new(UNREAD).with_source(source)),
            None if packed => Err(match find_damage(&mut file) {
                Some(damage) => Fault::damaged(1, &damage.to_string()),
                None => Fault::foreign(&format!("gzip data of {found}")),
            }),
            None => Err(Fault::foreign(&found)),
        },
        Kind::Recording => from_recording(name, read_recording(file, options)?, options),
        Kind::Snapshot => from_snapshot(name, &whole(file, options.max_rows)?, options),
        Kind::Page => {
            let inside = page::snapshot(&whole(file, options.max_rows)?);
            let inside = inside.map_err(|found| Fault::foreign(&found))?;
            from_snapshot(name, &inside, options)
        }
        Kind::Trace | Kind::Log => lines(name, &kind, file, packed, options),
    }?;
    match input.trace.rows().len() as u64 > options.max_rows {
        true => Err(Fault::new(UNREAD).with_source(too_many(options.max_rows))),
        false => Ok(input),
    }
}

/// A text file with one record per line.
enum Lines {
    Trace(Trace),
    Log(AllocationLog),
}

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
        true => describe_packed_fault(&error, &mut text),
        false => in_line(&error),
    })?;
    Ok(match read {
        Lines::Trace(trace) => Input::new(trace, Vec::new()),
        Lines::Log(log) => {
            let trace_of = |device| log.to_trace(name, device);
            let (device, trace, note) = choose(options.gpu, &log.devices(), trace_of)?;
            let warnings = log.gaps(device).into_iter().chain(note).collect();
            Input::new(trace, warnings)
        }
    })
}

/// Returns why a compressed trace cannot be read: often the compression itself is damaged.
fn describe_packed_fault(error: &TraceError, text: &mut impl Read) -> Fault {
    let why = match error.fault() {
        TraceFault::Read { source } => describe_damage(source),
        fault => find_damage(text).map(|damage| {
            let read = text::chain(fault);
            format!("{damage} (what is read there: {read})")
        }),
    };
    match why {
        Some(why) => Fault::damaged(error.line(), &why),
        None => in_line(error),
    }
}

/// Describes damaged compressed data, if that is the cause of the error.
fn describe_damage(error: &io::Error) -> Option<String> {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => Some("it ends too early".to_owned()),
        io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData => Some(error.to_string()),
        _ => None,
    }
}

/// Reads on to the end: damaged data may decompress to anything, and only the checksum at the end reveals it.
fn find_damage(text: &mut impl Read) -> Option<io::Error> {
    io::copy(&mut text.take(READ_ON), &mut io::sink()).err()
}

pub fn is_same(one: &Path, other: &Path) -> bool {
    if text::is_standard(one) || text::is_standard(other) {
        return false;
    }
    match (std::fs::canonicalize(one), std::fs::canonicalize(other)) {
        (Ok(one), Ok(other)) => one == other && one.is_file(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base64::Engine;
    use base64::prelude::BASE64_STANDARD;
    use flate2::Compression;
    use flate2::bufread::GzEncoder;
    use std::io::Cursor;

    struct Slow {
        bytes: Cursor<Vec<u8>>,
        /// Maximum number of bytes per read.
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
        let read = Begun::new(file).map(|file| read_opened("stdin", file, &options()));
        let read = read.map_err(|error| error.to_string())?;
        read.map(|input| input.trace)
            .map_err(|fault| text::chain(&fault.of(Path::new("-"), STDIN)))
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
    fn the_kind_of_a_file_does_not_depend_on_how_it_is_read() {
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
