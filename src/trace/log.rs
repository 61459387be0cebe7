//! Allocation logs as written by RMM's logging adaptor and, with further columns, by
//! [`LogRecord::to_csv`](crate::resource::LogRecord::to_csv).

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::io::BufRead;

use super::error::{TraceError, TraceFault};
use super::format::{Trace, parse_number};
use super::lines::Lines;
use super::rows::{RowBlock, RowMaker};
use crate::error::kinds::Count;
use crate::event::names::Names;

/// The columns of every log, in RMM's order.
const COLUMNS: [&str; 6] = ["Thread", "Time", "Action", "Pointer", "Size", "Stream"];
/// The additional columns of this crate's logs.
const DEVICE: &str = "Device";
const TAG: &str = "Tag";

/// RMM writes the same handle for the default streams of all threads.
const PER_THREAD: u64 = 2;

/// The maximum number of lines per record: tags may contain line ends.
const RECORD_LINES: usize = 64;

/// A log of allocations and frees: RMM's CSV (`Thread,Time,Action,Pointer,Size,Stream`), or that of
/// [`Logging`](crate::resource::Logging).
///
/// ```
/// # use cualloc::trace::AllocationLog;
/// let text = "Thread,Time,Action,Pointer,Size,Stream\n\
///             7,10:00:00.000001,allocate,0x7f0000000000,1000,0x0\n\
///             7,10:00:00.000002,allocate failure,(nil),11136000000,0x0\n";
/// let trace = AllocationLog::read(text.as_bytes())?.to_trace("log", 0)?;
/// assert_eq!(trace.requested_peak(), 1000);
/// # Ok::<(), cualloc::trace::TraceError>(())
/// ```
#[derive(Debug, Default)]
pub struct AllocationLog {
    devices: BTreeMap<usize, Device>,
    tags: Names,
    /// Whether the last line is truncated.
    torn: bool,
}

/// The events of a device.
#[derive(Debug, Default)]
struct Device {
    /// Contexts are numbers of tags.
    rows: RowMaker,
    /// Live blocks with their sizes by address; nothing for blocks of 0 bytes.
    live: HashMap<u64, Option<(RowBlock, u64)>>,
    /// Numbers of streams, by handle and thread.
    streams: HashMap<(u64, u64), u32>,
    /// Frees that must still come at an address where another block was allocated before them.
    late: HashMap<u64, Vec<u64>>,
    unknown: Findings,
    resized: Findings,
    lost: Findings,
}

/// Number of lines that contradict earlier ones.
#[derive(Debug, Default)]
struct Findings {
    count: u64,
    first: u64,
}

impl Findings {
    fn add(&mut self, line: u64) {
        if self.count == 0 {
            self.first = line;
        }
        self.count += 1;
    }
}

/// The positions of the columns of a log.
struct Columns {
    count: usize,
    required: [usize; COLUMNS.len()],
    device: Option<usize>,
    tag: Option<usize>,
}

impl Columns {
    fn of(header: &[u8]) -> Result<Columns, TraceFault> {
        let header = String::from_utf8_lossy(header);
        let names = fields(&header);
        let find = |name: &str| names.iter().position(|found| found == name);
        let mut required = [0; COLUMNS.len()];
        for (place, field) in required.iter_mut().zip(COLUMNS) {
            *place = find(field).ok_or(TraceFault::FieldMissing { field })?;
        }
        Ok(Columns {
            count: names.len(),
            required,
            device: find(DEVICE),
            tag: find(TAG),
        })
    }
}

impl AllocationLog {
    /// Whether a file with this first line is an allocation log.
    pub fn is_header(line: &[u8]) -> bool {
        Columns::of(line).is_ok()
    }

    /// Reads a log. A truncated last line is ignored, and [reported](Self::gaps).
    ///
    /// # Errors
    /// The first invalid line.
    pub fn read(reader: impl BufRead) -> Result<AllocationLog, TraceError> {
        let mut lines = Lines::new(reader);
        let columns = Columns::of(lines.next_line()?.unwrap_or_default());
        let columns = columns.map_err(|fault| fault.at(1))?;
        let mut log = AllocationLog::default();
        while let Some((line, record)) = next_record(&mut lines)? {
            let record = String::from_utf8_lossy(&record);
            if record.is_empty() {
                continue;
            }
            match columns.event(&fields(&record)) {
                Ok(event) => log.add(line, event),
                Err(_) if !lines.ended => log.torn = true,
                Err(fault) => return Err(fault.at(line)),
            }
        }
        for device in log.devices.values_mut() {
            let mut lines: Vec<u64> = device.late.drain().flat_map(|(_, lines)| lines).collect();
            lines.sort_unstable();
            lines.into_iter().for_each(|line| device.lost.add(line));
        }
        Ok(log)
    }

    /// Returns the ordinals of the devices in the log.
    pub fn devices(&self) -> Vec<usize> {
        self.devices.keys().copied().collect()
    }

    /// Returns the log of a device as a trace. Tags of blocks become contexts.
    ///
    /// # Errors
    /// [`TraceFault::LiveBytesOverflow`]: in an untrusted file the bytes may add up to any number.
    pub fn to_trace(&self, name: &str, device: usize) -> Result<Trace, TraceError> {
        let Some(device) = self.devices.get(&device) else {
            return Trace::from_rows(name, []);
        };
        let tag = |number| self.tags.name(number).map(str::to_owned);
        device.rows.trace(name, tag)
    }

    /// Returns, in sentences, what the log lacks about a device: figures computed from it may be wrong.
    pub fn gaps(&self, device: usize) -> Vec<String> {
        let mut gaps = Vec::new();
        if self.torn {
            gaps.push("the last line of the log breaks off and is left out".to_owned());
        }
        let Some(device) = self.devices.get(&device) else {
            gaps.push("the log has no allocations".to_owned());
            return gaps;
        };
        let mut add = |findings: &Findings, what: &str| {
            if findings.count > 0 {
                let Findings { count, first } = findings;
                let frees = Count(*count, "free");
                gaps.push(format!("{frees} {what}, the first in line {first}"));
            }
        };
        add(
            &device.unknown,
            "of blocks that the log does not allocate: it begins late, an earlier peak is unknown; left out",
        );
        add(&device.resized, "with another size than the allocation");
        add(
            &device.lost,
            "missing before another block has the same address",
        );
        gaps
    }

    fn add(&mut self, line: u64, event: Event<'_>) {
        let device = self.devices.entry(event.device).or_default();
        // Each block comes from a line, and 2^32 of them do not fit into memory.
        let known = device.streams.len() as u32;
        let stream = *device.streams.entry(event.stream).or_insert(known);
        let Event { address, bytes, .. } = event;
        match event.action {
            Action::Allocate => {
                let tag = match event.tag {
                    "" | "untagged" => 0,
                    tag => self.tags.number(tag),
                };
                let before = device.live.remove(&address);
                if let Some(before) = before {
                    device.rows.free(before.map(|(block, _)| block));
                    // This crate writes a free after it is done, so another thread may have reused the address before.
                    match event.ours {
                        true => device.late.entry(address).or_default().push(line),
                        false => device.lost.add(line),
                    }
                }
                let block = (bytes > 0).then(|| (device.rows.allocate(stream, bytes, tag), bytes));
                device.live.insert(address, block);
            }
            Action::Fail if bytes > 0 => device.rows.fail(stream, bytes),
            Action::Free => {
                let late = device.late.get_mut(&address);
                if late.is_some_and(|lines| lines.pop().is_some()) {
                    return;
                }
                match device.live.remove(&address) {
                    Some(block) => {
                        if block.map_or(0, |(_, bytes)| bytes) != bytes {
                            device.resized.add(line);
                        }
                        device.rows.free(block.map(|(block, _)| block));
                    }
                    None => device.unknown.add(line),
                }
            }
            Action::Fail | Action::None => {}
        }
    }
}

#[derive(Clone, Copy)]
enum Action {
    Allocate,
    /// A request that failed.
    Fail,
    Free,
    /// An event that does not concern blocks.
    None,
}

struct Event<'a> {
    action: Action,
    address: u64,
    bytes: u64,
    /// The handle, and the thread if it means a stream of the thread.
    stream: (u64, u64),
    device: usize,
    tag: &'a str,
    ours: bool,
}

impl Columns {
    /// Parses a record, whose fields must match their columns.
    fn event<'a>(&self, fields: &'a [Cow<'a, str>]) -> Result<Event<'a>, TraceFault> {
        let mut texts = [""; COLUMNS.len()];
        for ((text, column), field) in texts.iter_mut().zip(self.required).zip(COLUMNS) {
            let found = fields.get(column);
            *text = found.ok_or(TraceFault::FieldMissing { field })?;
        }
        if fields.len() > self.count {
            return Err(TraceFault::FieldsLeftOver);
        }
        let [thread, time, action, pointer, size, stream] = texts;
        let wrong = |field, expected, found: &str| TraceFault::Field {
            field,
            expected,
            found: found.to_owned(),
        };
        let number = |text: &str| parse_number(text.as_bytes());
        let thread = number(thread).ok_or_else(|| wrong("Thread", "a number", thread))?;
        // A time of day or since 1970, with or without fractions of a second; only the order of the lines is used.
        let is_time = |byte: u8| byte.is_ascii_digit() || matches!(byte, b':' | b'.');
        if time.is_empty() || !time.bytes().all(is_time) {
            return Err(wrong("Time", "a time", time));
        }
        let address =
            hexadecimal(pointer).ok_or_else(|| wrong("Pointer", "an address", pointer))?;
        let bytes = number(size).ok_or_else(|| wrong("Size", "a number of bytes", size))?;
        let handle = number(stream).or_else(|| hexadecimal(stream));
        let handle = handle.ok_or_else(|| wrong("Stream", "the handle of a stream", stream))?;
        let action = match (action, address) {
            ("allocate", 0) if bytes > 0 => return Err(wrong("Pointer", "an address", pointer)),
            ("allocate" | "free", 0) | ("free failure" | "reap", _) => Action::None,
            ("allocate", _) => Action::Allocate,
            ("allocate failure", _) => Action::Fail,
            ("free", _) => Action::Free,
            _ => {
                let known = "`allocate`, `allocate failure` or `free`";
                return Err(wrong("Action", known, action));
            }
        };
        let other = |column: Option<usize>| column.and_then(|column| fields.get(column));
        let device = match other(self.device) {
            Some(text) => {
                let device = number(text).and_then(|device| usize::try_from(device).ok());
                device.ok_or_else(|| wrong(DEVICE, "the ordinal of a device", text))?
            }
            None => 0,
        };
        let ours = self.device.is_some();
        let of_thread = !ours && handle == PER_THREAD;
        Ok(Event {
            action,
            address,
            bytes,
            stream: (handle, if of_thread { thread } else { 0 }),
            device,
            tag: other(self.tag).map_or("", Cow::as_ref),
            ours,
        })
    }
}

/// Returns the next record with the number of its first line. Quoted fields may contain line ends.
fn next_record(lines: &mut Lines<impl BufRead>) -> Result<Option<(u64, Vec<u8>)>, TraceError> {
    let Some(first) = lines.next_line()? else {
        return Ok(None);
    };
    let mut record = first.to_vec();
    let line = lines.line;
    let is_open = |record: &[u8]| record.iter().filter(|byte| **byte == b'"').count() % 2 == 1;
    for _ in 1..RECORD_LINES {
        if !is_open(&record) {
            break;
        }
        let Some(more) = lines.next_line()? else {
            break;
        };
        record.push(b'\n');
        record.extend_from_slice(more);
    }
    Ok(Some((line, record)))
}

/// Returns the fields of a record, without their quotation marks.
fn fields(record: &str) -> Vec<Cow<'_, str>> {
    let mut quoted = false;
    let parts = record.split(move |character| {
        quoted ^= character == '"';
        character == ',' && !quoted
    });
    let unquoted = |field: &'_ str| {
        field
            .strip_prefix('"')?
            .strip_suffix('"')
            .map(|it| it.replace("\"\"", "\""))
    };
    parts
        .map(|field| unquoted(field).map_or(Cow::Borrowed(field), Cow::Owned))
        .collect()
}

/// Parses an address as written by `printf` and others; a null pointer has several forms.
fn hexadecimal(text: &str) -> Option<u64> {
    match text {
        "" | "(nil)" | "nullptr" => Some(0),
        _ => {
            let digits = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X"));
            let digits = digits.unwrap_or(text);
            // Signs are rejected.
            let all = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
            u64::from_str_radix(digits, 16).ok().filter(|_| all)
        }
    }
}
