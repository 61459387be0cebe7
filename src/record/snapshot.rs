//! PyTorch's memory snapshots, written as pickle or JSON.

use std::collections::BTreeMap;

#[cfg(feature = "json")]
use crate::record::pickle;
use crate::record::pickle::Pickle;
use crate::record::tree::MOST_FRAMES;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Live,
    /// Freed, but other streams may still use it.
    Pending,
    Free,
}

impl State {
    pub(super) const NAMES: [(State, &'static str); 3] = [
        (State::Live, "active_allocated"),
        (State::Pending, "active_pending_free"),
        (State::Free, "inactive"),
    ];

    fn name(self) -> &'static str {
        let found = State::NAMES.iter().find(|(state, _)| *state == self);
        found.map_or("inactive", |(_, name)| name)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Block {
    pub address: u64,
    pub size: u64,
    pub requested: u64,
    pub state: State,
    /// Index into the snapshot's names, from 1; 0 for none.
    pub context: u32,
}

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

/// Event kinds, with the names of the format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Act {
    Alloc,
    FreeRequested,
    FreeCompleted,
    /// Both in one event, in files of older versions.
    Free,
    SegmentAlloc,
    SegmentFree,
    SegmentMap,
    SegmentUnmap,
    Oom,
    Snapshot,
}

impl Act {
    pub(super) const NAMES: [(Act, &'static str); 10] = [
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

    pub(super) fn is_of_block(self) -> bool {
        matches!(
            self,
            Act::Alloc | Act::Free | Act::FreeRequested | Act::FreeCompleted
        )
    }

    fn name(self) -> &'static str {
        let found = Act::NAMES.iter().find(|(act, _)| *act == self);
        found.map_or("", |(_, name)| name)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry {
    pub act: Act,
    /// For [`Act::Oom`], the free bytes of the device.
    pub address: u64,
    pub size: u64,
    pub stream: u64,
    /// Missing in older files.
    pub time_us: Option<u64>,
    pub context: u32,
}

/// Device ordinals are below this.
pub(super) const DEVICES: usize = 1024;

/// Information that the file of a snapshot lacks.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Gaps {
    /// Number of blocks in use whose requested size is unknown. Their own size is used.
    pub unrequested: u64,
    /// Number of entries with an unknown action, by name. They are omitted.
    pub unknown: BTreeMap<String, u64>,
}

/// A PyTorch memory snapshot: the layout of each device's memory, and the events that led to it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Snapshot {
    pub(super) segments: Vec<Segment>,
    pub(super) traces: Vec<Vec<Entry>>,
    /// Names of contexts, starting with that of context 1.
    pub(super) contexts: Vec<String>,
    pub(super) gaps: Gaps,
}

impl Snapshot {
    /// Writes it as a pickle of protocol 2, which PyTorch's tools and its viewer open.
    pub fn to_pickle(&self) -> Vec<u8> {
        let mut out = Pickle::default();
        self.write(&mut out);
        out.end()
    }

    /// Writes it as JSON with the same keys.
    #[cfg(feature = "json")]
    pub fn to_json(&self) -> String {
        // Neither step can fail: the pickle was just written, and all its keys are texts.
        let tree = pickle::read(&self.to_pickle()).unwrap_or_default();
        serde_json::to_string(&tree.root()).unwrap_or_default()
    }

    fn write(&self, out: &mut Pickle) {
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

    fn write_segment(&self, segment: &Segment, out: &mut Pickle) {
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

    fn write_entry(&self, entry: &Entry, out: &mut Pickle) {
        out.open_dict();
        out.text_entry("action", entry.act.name());
        match entry.act {
            Act::Oom => out.entry("device_free", entry.address),
            _ => out.entry("addr", entry.address),
        }
        out.entry("size", entry.size);
        out.entry("stream", entry.stream);
        if let Some(time_us) = entry.time_us {
            out.entry("time_us", time_us);
        }
        self.write_frames(entry.context, out);
        out.text_entry("compile_context", "N/A");
        out.text_entry(
            "user_metadata",
            self.context(entry.context).unwrap_or_default(),
        );
        out.close_dict();
    }

    pub(super) fn context(&self, context: u32) -> Option<&str> {
        let at = (context as usize).checked_sub(1)?;
        self.contexts.get(at).map(String::as_str)
    }

    /// Splits the innermost parts of a context's name at semicolons, innermost first.
    fn write_frames(&self, context: u32, out: &mut Pickle) {
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
}
