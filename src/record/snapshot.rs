//! PyTorch's memory snapshots: made of recordings, written as pickle or JSON, and read.

use std::collections::{BTreeMap, BTreeSet};

use crate::record::json::{self, Json};
use crate::record::out::Out;
use crate::record::pickle::{self, Pickle};
use crate::record::stacks::Stacks;
use crate::record::tree::{Fault, MOST_FRAMES, Tree};
use crate::trace::{Op, Row, Trace, TraceError};

/// A snapshot cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// The file ends too early.
    #[error("byte {at}: the snapshot is cut off")]
    Short {
        /// Where, in bytes from the beginning.
        at: usize,
    },
    /// The pickle has an opcode that plain values do not need. It would make an object or call something.
    #[error("byte {at}: opcode {opcode:#04x} is not one of plain values, and is not executed")]
    Opcode {
        /// Where, in bytes from the beginning.
        at: usize,
        /// The opcode.
        opcode: u8,
    },
    /// Something in the file cannot be.
    #[error("byte {at}: {what}")]
    Damaged {
        /// Where, in bytes from the beginning.
        at: usize,
        /// What is wrong.
        what: &'static str,
    },
    /// The file holds something else.
    #[error("this is no memory snapshot: {what}")]
    NotASnapshot {
        /// What is missing.
        what: &'static str,
    },
}

/// What a block of a segment is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Live,
    /// Freed, and other streams may still use it.
    Pending,
    Free,
}

impl State {
    const NAMES: [(State, &'static str); 3] = [
        (State::Live, "active_allocated"),
        (State::Pending, "active_pending_free"),
        (State::Free, "inactive"),
    ];

    fn name(self) -> &'static str {
        let found = State::NAMES.iter().find(|(state, _)| *state == self);
        found.map_or("inactive", |(_, name)| name)
    }
}

/// A block, live or free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Block {
    pub address: u64,
    pub size: u64,
    pub requested: u64,
    pub state: State,
    /// Of the snapshot's names, from 1; 0 for none.
    pub context: u32,
}

/// Memory from the driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Segment {
    pub device: usize,
    pub address: u64,
    pub size: u64,
    pub stream: u64,
    pub small: bool,
    pub expandable: bool,
    /// By address and without gaps.
    pub blocks: Vec<Block>,
}

/// What happened, by the names of the format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Act {
    Alloc,
    FreeRequested,
    FreeCompleted,
    /// Both in one, in files of older versions.
    Free,
    SegmentAlloc,
    SegmentFree,
    SegmentMap,
    SegmentUnmap,
    Oom,
    Snapshot,
}

impl Act {
    const NAMES: [(Act, &'static str); 10] = [
        (Act::Alloc, "alloc"),
        (Act::FreeRequested, "free_requested"),
        (Act::FreeCompleted, "free_completed"),
        (Act::Free, "free"),
        (Act::SegmentAlloc, "segment_alloc"),
        (Act::SegmentFree, "segment_free"),
        (Act::SegmentMap, "segment_map"),
        (Act::SegmentUnmap, "segment_unmap"),
        (Act::Oom, "oom"),
        (Act::Snapshot, "snapshot"),
    ];

    fn name(self) -> &'static str {
        let found = Act::NAMES.iter().find(|(act, _)| *act == self);
        found.map_or("", |(_, name)| name)
    }
}

/// One entry of a device's trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry {
    pub act: Act,
    pub address: u64,
    pub size: u64,
    pub stream: u64,
    pub time_us: u64,
    pub context: u32,
}

/// Most devices whose numbers are believed.
pub(super) const DEVICES: usize = 1024;

/// A block that was there before its trace begins.
struct Earlier {
    bytes: u64,
    stream: u64,
    context: u32,
}

/// A memory snapshot as PyTorch has them: what each device's memory is divided into, and how it came to that.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Snapshot {
    pub(super) segments: Vec<Segment>,
    pub(super) traces: Vec<Vec<Entry>>,
    /// Names of contexts: that of context 1 first.
    pub(super) contexts: Vec<String>,
}

impl Snapshot {
    /// Writes it as a pickle of protocol 2, which PyTorch's tools and its viewer open.
    pub fn to_pickle(&self) -> Vec<u8> {
        let mut out = Pickle::default();
        self.write(&mut out);
        out.end()
    }

    /// Writes it as JSON with the same keys.
    pub fn to_json(&self) -> String {
        let mut out = Json::default();
        self.write(&mut out);
        out.text
    }

    fn write(&self, out: &mut impl Out) {
        out.open_dict();
        out.text("segments");
        out.open_list();
        for segment in &self.segments {
            self.write_segment(segment, out);
        }
        out.close_list();
        out.text("device_traces");
        out.open_list();
        for trace in &self.traces {
            out.open_list();
            for entry in trace {
                self.write_entry(entry, out);
            }
            out.close_list();
        }
        out.close_list();
        out.text("allocator_settings");
        out.open_dict();
        out.text_entry("PYTORCH_CUDA_ALLOC_CONF", "");
        out.text("expandable_segments");
        out.flag(self.segments.iter().any(|segment| segment.expandable));
        out.text_entry("cualloc", env!("CARGO_PKG_VERSION"));
        out.close_dict();
        out.text("external_annotations");
        out.open_list();
        out.close_list();
        out.close_dict();
    }

    fn write_segment(&self, segment: &Segment, out: &mut impl Out) {
        let sum = |count: fn(&Block) -> Option<u64>| -> u64 {
            segment.blocks.iter().filter_map(count).sum()
        };
        let live = |block: &Block| (block.state == State::Live).then_some(block.size);
        let active = |block: &Block| (block.state != State::Free).then_some(block.size);
        let requested = |block: &Block| (block.state != State::Free).then_some(block.requested);
        out.open_dict();
        out.entry("device", segment.device as u64);
        out.entry("address", segment.address);
        out.entry("total_size", segment.size);
        out.entry("allocated_size", sum(live));
        out.entry("active_size", sum(active));
        out.entry("requested_size", sum(requested));
        out.entry("stream", segment.stream);
        out.text_entry(
            "segment_type",
            if segment.small { "small" } else { "large" },
        );
        out.text("segment_pool_id");
        out.pair(0, 0);
        out.text("is_expandable");
        out.flag(segment.expandable);
        self.write_frames(0, out);
        out.text("blocks");
        out.open_list();
        for block in &segment.blocks {
            out.open_dict();
            out.entry("address", block.address);
            out.entry("size", block.size);
            out.entry("requested_size", block.requested);
            out.text_entry("state", block.state.name());
            self.write_frames(block.context, out);
            out.close_dict();
        }
        out.close_list();
        out.close_dict();
    }

    fn write_entry(&self, entry: &Entry, out: &mut impl Out) {
        out.open_dict();
        out.text_entry("action", entry.act.name());
        match entry.act {
            Act::Oom => out.entry("device_free", entry.address),
            _ => out.entry("addr", entry.address),
        }
        out.entry("size", entry.size);
        out.entry("stream", entry.stream);
        out.entry("time_us", entry.time_us);
        self.write_frames(entry.context, out);
        out.text_entry("compile_context", "N/A");
        out.text_entry(
            "user_metadata",
            self.context(entry.context).unwrap_or_default(),
        );
        out.close_dict();
    }

    fn context(&self, context: u32) -> Option<&str> {
        let at = (context as usize).checked_sub(1)?;
        self.contexts.get(at).map(String::as_str)
    }

    /// The innermost parts of a context's name between semicolons as a stack, innermost first.
    fn write_frames(&self, context: u32, out: &mut impl Out) {
        out.text("frames");
        if out.again(context) {
            return;
        }
        out.open_list();
        let name = self.context(context);
        for part in name
            .into_iter()
            .flat_map(|name| name.rsplit(';').take(MOST_FRAMES))
        {
            out.open_dict();
            out.text_entry("filename", "");
            out.entry("line", 0);
            out.text_entry("name", part);
            out.close_dict();
        }
        out.close_list();
        out.keep(context);
    }

    /// Reads a pickle of PyTorch's, or JSON with the same keys: a snapshot, or a bare list of segments. Nothing in it is
    /// executed: values are numbers, texts, lists and dictionaries, and anything else is an error. Keys and actions that
    /// are not known are passed over. Of stacks the innermost 32 frames are kept, as contexts.
    ///
    /// # Errors
    /// What is wrong with the file, and where.
    pub fn read(bytes: &[u8]) -> Result<Snapshot, SnapshotError> {
        let tree = match json::is_json(bytes) {
            true => json::read(bytes),
            false => pickle::read(bytes),
        };
        let tree = tree.map_err(|(at, fault)| match fault {
            Fault::Short => SnapshotError::Short { at },
            Fault::Opcode(opcode) => SnapshotError::Opcode { at, opcode },
            Fault::Damaged(what) => SnapshotError::Damaged { at, what },
        })?;
        read(&tree)
    }

    /// The number of devices of which it has a trace or blocks; the traces of some may be empty.
    pub fn devices(&self) -> usize {
        let used = |segment: &&Segment| segment.blocks.iter().any(|b| b.state != State::Free);
        let devices = self
            .segments
            .iter()
            .filter(used)
            .map(|segment| segment.device);
        let last = devices.filter(|device| *device < DEVICES).max();
        let traces = self.traces.len().min(DEVICES);
        traces.max(last.map_or(0, |last| last + 1))
    }

    /// What was live on a device before its trace begins, by address: what the trace frees and never had, and what is
    /// live at the end and the trace says nothing about.
    fn earlier(&self, device: usize) -> BTreeMap<u64, Earlier> {
        let mut earlier = BTreeMap::new();
        let mut known = BTreeSet::new();
        for entry in self.traces.get(device).into_iter().flatten() {
            let frees = match entry.act {
                Act::Alloc => false,
                Act::Free | Act::FreeRequested | Act::FreeCompleted => true,
                _ => continue,
            };
            if known.insert(entry.address) && frees {
                let (bytes, stream, context) = (entry.size, entry.stream, entry.context);
                let block = Earlier {
                    bytes,
                    stream,
                    context,
                };
                earlier.insert(entry.address, block);
            }
        }
        let segments = self.segments.iter().filter(|s| s.device == device);
        for (segment, block) in segments.flat_map(|s| s.blocks.iter().map(move |b| (s, b))) {
            if block.state != State::Free && known.insert(block.address) {
                let bytes = match block.requested {
                    0 => block.size,
                    bytes => bytes,
                };
                let (stream, context) = (segment.stream, block.context);
                let earlier_block = Earlier {
                    bytes,
                    stream,
                    context,
                };
                earlier.insert(block.address, earlier_block);
            }
        }
        earlier.retain(|_, block| block.bytes > 0);
        earlier
    }

    /// The trace of a device, as it can be replayed. Blocks that were there before the snapshot's own trace begins come
    /// first: those that are live at its end, and those whose frees it has. A completion that directly follows its free is
    /// left out. Failed requests are rows of [`Op::Oom`].
    ///
    /// # Errors
    /// [`TraceError::LiveBytesOverflow`]: the bytes of a file from a stranger may add up to anything.
    pub fn to_trace(&self, name: &str, device: usize) -> Result<Trace, TraceError> {
        let mut rows: Vec<Row> = Vec::new();
        let mut streams: BTreeMap<u64, u32> = BTreeMap::new();
        // Blocks by address: live ones, and those that wait for their completion.
        let mut live: BTreeMap<u64, (usize, u32)> = BTreeMap::new();
        let mut freed: BTreeMap<u64, (usize, u32)> = BTreeMap::new();
        let mut contexts = Vec::new();
        let mut next = 0;
        let row = |op, (id, stream): (usize, u32), bytes| Row {
            op,
            stream,
            id,
            bytes,
        };
        let mut stream_of = |handle| {
            // Each came with a segment or an entry, and of 2^32 no memory has room.
            let known = streams.len() as u32;
            *streams.entry(handle).or_insert(known)
        };
        for (at, block) in self.earlier(device) {
            let stream = stream_of(block.stream);
            live.insert(at, (next, stream));
            rows.push(row(Op::Allocate, (next, stream), block.bytes));
            contexts.push(block.context);
            next += 1;
        }
        for entry in self.traces.get(device).into_iter().flatten() {
            let at = entry.address;
            match entry.act {
                Act::Alloc if entry.size > 0 => {
                    let stream = stream_of(entry.stream);
                    let lost = live.insert(at, (next, stream));
                    rows.extend(lost.map(|block| row(Op::Free, block, 0)));
                    freed.remove(&at);
                    rows.push(row(Op::Allocate, (next, stream), entry.size));
                    contexts.push(entry.context);
                    next += 1;
                }
                Act::FreeRequested | Act::Free => {
                    if let Some(block) = live.remove(&at) {
                        rows.push(row(Op::Free, block, 0));
                        if entry.act == Act::FreeRequested {
                            freed.insert(at, block);
                        }
                    }
                }
                Act::FreeCompleted => match freed.remove(&at) {
                    // At once: nobody else used it.
                    Some((id, _))
                        if rows.last().is_some_and(|r| r.id == id && r.op == Op::Free) => {}
                    Some(block) => rows.push(row(Op::Complete, block, 0)),
                    None => {
                        let lost = live.remove(&at);
                        rows.extend(lost.map(|block| row(Op::Free, block, 0)));
                    }
                },
                Act::Oom if entry.size > 0 => {
                    rows.push(row(Op::Oom, (0, stream_of(entry.stream)), entry.size));
                }
                _ => {}
            }
        }
        let name_of = |number| self.context(number).map(str::to_owned);
        Ok(Trace::from_rows(name, rows)?.with_contexts(&contexts, name_of))
    }
}

fn read(tree: &Tree) -> Result<Snapshot, SnapshotError> {
    let not = |what| SnapshotError::NotASnapshot { what };
    let root = tree.root();
    let segments = match tree.list(root) {
        Some(_) => root,
        None => tree
            .get(root, "segments")
            .ok_or(not("it has no segments"))?,
    };
    let listed = tree.list(segments).ok_or(not("its segments are no list"))?;
    let mut snapshot = Snapshot::default();
    // Each segment, block and entry is a value of its own in what PyTorch writes. Of one value that is used over and
    // over, a small pickle would make any number.
    let mut left = tree.len();
    let mut stacks = Stacks::default();
    for segment in listed {
        let blocks = tree.get(*segment, "blocks");
        let blocks = blocks.and_then(|blocks| tree.list(blocks));
        let blocks = blocks.unwrap_or_default();
        spend(&mut left, 1 + blocks.len())?;
        let segment = read_segment(tree, *segment, blocks, &mut stacks);
        snapshot.segments.push(segment);
    }
    let traces = tree.get(root, "device_traces");
    for trace in traces
        .and_then(|traces| tree.list(traces))
        .into_iter()
        .flatten()
    {
        let entries = tree.list(*trace).ok_or(not("a trace is no list"))?;
        spend(&mut left, entries.len())?;
        let entries = entries.iter();
        let entries = entries.filter_map(|entry| read_entry(tree, *entry, &mut stacks));
        snapshot.traces.push(entries.collect());
    }
    snapshot.contexts = stacks.names;
    Ok(snapshot)
}

/// Takes so many from the values that are left.
fn spend(left: &mut usize, values: usize) -> Result<(), SnapshotError> {
    let what = "its values are shared";
    let rest = left.checked_sub(values);
    *left = rest.ok_or(SnapshotError::NotASnapshot { what })?;
    Ok(())
}

fn number(tree: &Tree, of: u32, key: &str) -> Option<u64> {
    tree.number(tree.get(of, key)?)
}

fn read_segment(tree: &Tree, segment: u32, blocks: &[u32], stacks: &mut Stacks) -> Segment {
    let of = |key| number(tree, segment, key).unwrap_or(0);
    let text = |of: u32, key| tree.get(of, key).and_then(|value| tree.text(value));
    let mut at = of("address");
    let blocks = blocks.iter().map(|block| {
        let size = number(tree, *block, "size").unwrap_or(0);
        let address = number(tree, *block, "address").unwrap_or(at);
        at = address.saturating_add(size);
        // Older files keep what was asked for elsewhere.
        let history = tree.get(*block, "history").and_then(|list| tree.list(list));
        let first = history.and_then(|list| list.first());
        let real = first.and_then(|first| number(tree, *first, "real_size"));
        Block {
            address,
            size,
            requested: number(tree, *block, "requested_size").or(real).unwrap_or(0),
            state: match text(*block, "state") {
                Some("active_allocated") => State::Live,
                Some("active_pending_free" | "active_awaiting_free") => State::Pending,
                _ => State::Free,
            },
            context: stacks.of(tree, first.copied().unwrap_or(*block)),
        }
    });
    let blocks = blocks.collect();
    Segment {
        device: of("device") as usize,
        address: of("address"),
        size: of("total_size"),
        stream: of("stream"),
        small: text(segment, "segment_type") == Some("small"),
        expandable: false,
        blocks,
    }
}

/// An entry of a trace, if its action is known.
fn read_entry(tree: &Tree, entry: u32, stacks: &mut Stacks) -> Option<Entry> {
    let action = tree.text(tree.get(entry, "action")?)?;
    let (act, _) = Act::NAMES.iter().find(|(_, name)| *name == action)?;
    let of = |key| number(tree, entry, key);
    Some(Entry {
        act: *act,
        address: of("addr").or_else(|| of("device_free")).unwrap_or(0),
        size: of("size").unwrap_or(0),
        stream: of("stream").unwrap_or(0),
        time_us: of("time_us").unwrap_or(0),
        // Other entries than those of blocks' beginnings say nothing that is shown.
        context: match act {
            Act::Alloc => stacks.of(tree, entry),
            _ => 0,
        },
    })
}
