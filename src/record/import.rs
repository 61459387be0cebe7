//! The reader of snapshots, for files of other programs: required fields must exist and have the right type, otherwise
//! the error names the field. Nothing defaults to 0.

use crate::record::pickle;
use crate::record::snapshot::{Act, Block, DEVICES, Entry, Gaps, Segment, Snapshot, State};
use crate::record::stacks::Stacks;
use crate::record::tree::{Fault, Tree, Unexpected, Value};

/// Why a snapshot cannot be read.
#[allow(missing_docs, reason = "messages name their fields")]
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// The file ends too early.
    #[error("byte {at}: the snapshot is cut off")]
    Short { at: usize },
    /// The pickle has an opcode that plain values do not need, and that would create an object or call a function.
    #[error("byte {at}: unsupported opcode {opcode:#04x}: it is not executed")]
    Opcode { at: usize, opcode: u8 },
    /// The pickle is malformed.
    #[error("byte {at}: {what}")]
    Damaged { at: usize, what: &'static str },
    /// The file begins like JSON, but is not valid JSON.
    #[error("invalid JSON: {what}")]
    Json { what: String },
    /// A field is missing or has a value of another type.
    #[error("`{at}`: expected {expected}, found {found}")]
    Field {
        /// The path to the field, like `device_traces[0][17].addr`.
        at: String,
        expected: &'static str,
        found: String,
    },
    /// The file contains something else.
    #[error("expected a memory snapshot, found {found}")]
    NotASnapshot { found: String },
}

impl From<Unexpected> for SnapshotError {
    fn from(wrong: Unexpected) -> SnapshotError {
        SnapshotError::Field {
            at: wrong.at,
            expected: wrong.expected,
            found: wrong.found,
        }
    }
}

/// The byte order mark that some programs write at the start of text files.
const MARK: &[u8] = "\u{FEFF}".as_bytes();

impl Snapshot {
    /// Reads a PyTorch pickle, or JSON with the same keys (feature `json`): a snapshot, or a bare list of segments.
    /// Nothing in it is executed: values are numbers, texts, lists and dictionaries, and anything else is an error.
    /// Unknown keys are ignored. The innermost 32 frames of each stack are kept, as contexts.
    ///
    /// # Errors
    /// The fault of the file and its position, including missing fields and values of a wrong type.
    pub fn read(bytes: &[u8]) -> Result<Snapshot, SnapshotError> {
        let text = bytes.strip_prefix(MARK).unwrap_or(bytes);
        let tree = match text.trim_ascii_start() {
            [b'{' | b'[', ..] => json(text),
            _ => pickle::read(bytes).map_err(|(at, fault)| match fault {
                Fault::Short => SnapshotError::Short { at },
                Fault::Opcode(opcode) => SnapshotError::Opcode { at, opcode },
                Fault::Damaged(what) => SnapshotError::Damaged { at, what },
            }),
        };
        read(&tree?)
    }
}

#[cfg(feature = "json")]
fn json(text: &[u8]) -> Result<Tree, SnapshotError> {
    crate::record::json::read(text).map_err(|error| match error.is_eof() {
        true => SnapshotError::Short { at: text.len() },
        false => SnapshotError::Json {
            what: error.to_string(),
        },
    })
}

#[cfg(not(feature = "json"))]
fn json(_: &[u8]) -> Result<Tree, SnapshotError> {
    Err(SnapshotError::Json {
        what: "this build reads pickles alone; the feature `json` reads JSON".to_owned(),
    })
}

fn read(tree: &Tree) -> Result<Snapshot, SnapshotError> {
    let root = tree.root();
    let whole = root.is_dict();
    let segments = match whole {
        true => root.get("segments"),
        false => root.named("segments"),
    };
    if !may_be_segments(&segments, whole) {
        let found = describe_other(&root, &segments);
        return Err(SnapshotError::NotASnapshot { found });
    }
    let mut reader = Reader {
        left: tree.len(),
        stacks: Stacks::default(),
        gaps: Gaps::default(),
    };
    let mut snapshot = Snapshot::default();
    for (index, segment) in segments.list()?.iter().enumerate() {
        let segment = reader.segment(&segments.at(index, *segment))?;
        snapshot.segments.push(segment);
    }
    if whole {
        let traces = root.get("device_traces");
        for (device, trace) in traces.list()?.iter().enumerate() {
            let trace = reader.trace(&traces.at(device, *trace))?;
            snapshot.traces.push(trace);
        }
    }
    snapshot.contexts = reader.stacks.names.into_vec();
    snapshot.gaps = reader.gaps;
    Ok(snapshot)
}

/// Whether a list contains memory segments. Inside a snapshot it may be empty.
fn may_be_segments(segments: &Value<'_>, whole: bool) -> bool {
    match segments.list() {
        Ok([]) => whole,
        Ok([first, ..]) => {
            let first = segments.at(0, *first);
            let keys = ["address", "total_size", "blocks"];
            keys.iter().any(|key| first.get(key).exists().is_some())
        }
        Err(_) => false,
    }
}

fn describe_other(root: &Value<'_>, segments: &Value<'_>) -> String {
    if root.get("traceEvents").exists().is_some() {
        return "a trace of torch.profiler".to_owned();
    }
    let of_keys = |value: &Value<'_>| match value.keys() {
        keys if keys.is_empty() => "without keys".to_owned(),
        keys => format!("with the keys {}", keys.join(", ")),
    };
    if let Ok([first, ..]) = root.list()
        && root.at(0, *first).list().is_ok()
    {
        return "a list of lists, as memory timelines of torch.profiler are".to_owned();
    }
    let first = |value: &Value<'_>| match value.list() {
        Ok([first, ..]) => Some(value.at(0, *first))
            .filter(Value::is_dict)
            .map(|it| of_keys(&it)),
        _ => None,
    };
    match (root.is_dict(), segments.number()) {
        (true, None) => format!("a dictionary {}", of_keys(root)),
        (true, Some(_)) => match first(segments) {
            Some(keys) => format!("a dictionary whose `segments` are dictionaries {keys}"),
            None => format!("a dictionary whose `segments` are {}", segments.found()),
        },
        (false, _) => match first(root) {
            Some(keys) => format!("a list of dictionaries {keys}"),
            None => root.found(),
        },
    }
}

struct Reader {
    /// PyTorch writes each segment, block and entry as a value of its own. A small pickle that references one value
    /// repeatedly could expand to any number of them, so the number is limited.
    left: usize,
    stacks: Stacks,
    gaps: Gaps,
}

impl Reader {
    /// Subtracts a number of values from the remaining budget.
    fn spend(&mut self, values: usize) -> Result<(), SnapshotError> {
        let found = || "a pickle that uses the same values many times".to_owned();
        let rest = self.left.checked_sub(values);
        self.left = rest.ok_or_else(|| SnapshotError::NotASnapshot { found: found() })?;
        Ok(())
    }

    fn segment(&mut self, segment: &Value<'_>) -> Result<Segment, SnapshotError> {
        let segment = segment.dict()?;
        let address = segment.get("address").address("an address")?;
        let device = segment.get("device");
        let device = device.count(DEVICES as u64, "the ordinal of a device, below 1024")?;
        let kind = segment.get("segment_type");
        let small = match kind.text("`small` or `large`")? {
            "small" => true,
            "large" => false,
            _ => return Err(kind.unexpected("`small` or `large`").into()),
        };
        let expandable = segment.get("is_expandable").exists();
        let blocks = segment.get("blocks");
        let listed = blocks.list()?;
        self.spend(1 + listed.len())?;
        let mut read = Segment {
            device: device as usize,
            address,
            size: segment.get("total_size").bytes()?,
            stream: segment.get("stream").address("the handle of a stream")?,
            small,
            expandable: expandable.map_or(Ok(false), |flag| flag.flag())?,
            blocks: Vec::with_capacity(listed.len()),
        };
        let mut at = address;
        for (index, block) in listed.iter().enumerate() {
            let block = self.block(&blocks.at(index, *block), at)?;
            at = block.address.saturating_add(block.size);
            read.blocks.push(block);
        }
        Ok(read)
    }

    /// Reads a block, at this address unless it has its own.
    fn block(&mut self, block: &Value<'_>, at: u64) -> Result<Block, SnapshotError> {
        let block = block.dict()?;
        let size = block.get("size").bytes()?;
        let address = block.get("address").exists();
        let state = block.get("state");
        let state = match state.text("the state of a block")? {
            "active_awaiting_free" => State::Pending,
            name => {
                let known = State::NAMES.iter().find(|(_, known)| *known == name);
                known
                    .ok_or_else(|| state.unexpected("the state of a block"))?
                    .0
            }
        };
        // Older files store the stack and the requested size there.
        let history = block.get("history");
        let first = match history.exists().map(|history| history.list()).transpose()? {
            Some([first, ..]) => Some(history.at(0, *first).dict()?),
            _ => None,
        };
        let requested = block.get("requested_size").exists();
        let real = first
            .as_ref()
            .and_then(|first| first.get("real_size").exists().map(|real| real.bytes()));
        let requested = match requested {
            Some(requested) => Some(requested.bytes()?),
            None => real.transpose()?,
        };
        let requested = match (state, requested) {
            (State::Free, requested) => requested.unwrap_or(0),
            (_, Some(requested)) if requested > 0 => requested,
            _ => {
                self.gaps.unrequested += 1;
                size
            }
        };
        Ok(Block {
            address: address.map_or(Ok(at), |address| address.address("an address"))?,
            size,
            requested,
            state,
            context: self.stacks.of(first.as_ref().unwrap_or(&block))?,
        })
    }

    fn trace(&mut self, trace: &Value<'_>) -> Result<Vec<Entry>, SnapshotError> {
        let listed = trace.list()?;
        self.spend(listed.len())?;
        let mut entries = Vec::with_capacity(listed.len());
        for (index, entry) in listed.iter().enumerate() {
            entries.extend(self.entry(&trace.at(index, *entry))?);
        }
        Ok(entries)
    }

    fn entry(&mut self, entry: &Value<'_>) -> Result<Option<Entry>, SnapshotError> {
        let entry = entry.dict()?;
        let action = entry.get("action").text("the name of an action")?;
        let Some((act, _)) = Act::NAMES.iter().find(|(_, name)| *name == action) else {
            *self.gaps.unknown.entry(action.to_owned()).or_insert(0) += 1;
            return Ok(None);
        };
        let address = match act {
            Act::Oom => entry.get("device_free").bytes()?,
            _ => entry.get("addr").address("an address")?,
        };
        let time_us = entry.get("time_us").exists();
        let time_us = time_us.map(|time| time.count(1 << 63, "a time in microseconds"));
        Ok(Some(Entry {
            act: *act,
            address,
            size: entry.get("size").bytes()?,
            stream: entry.get("stream").address("the handle of a stream")?,
            time_us: time_us.transpose()?,
            // Entries of other origin have no such field.
            context: match act {
                Act::Alloc | Act::Oom => self.stacks.of(&entry)?,
                _ => 0,
            },
        }))
    }
}
