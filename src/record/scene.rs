//! Reconstructs the memory layout at the end of a recording from its events alone, so that both always agree.

use std::collections::BTreeMap;

use crate::allocator::size::GRANULE;
use crate::record::recording::{Action, Event, Recording};
use crate::record::snapshot::{Act, Block, DEVICES, Entry, Segment, Snapshot, State};

/// Addresses and handles are limited to this value, for readers that represent all numbers as floating point.
const HIGHEST: u64 = 1 << 53;
/// The number of bytes kept of a context's name, from its end.
const MOST_NAME: usize = 256;
/// The maximum number of events between an allocation and the record of its stack.
const BESIDE: usize = 4096;

/// Driver memory, by its first byte.
#[derive(Clone, Copy)]
struct Held {
    bytes: u64,
    small: bool,
    mapped: bool,
    stream: u64,
    /// The part of a view that a block lies in.
    view: bool,
}

struct Live {
    event: Event,
    handle: u64,
}

#[derive(Default)]
struct Device {
    held: BTreeMap<u64, Held>,
    live: BTreeMap<u64, Live>,
    entries: Vec<Entry>,
}

/// Returns the granules of a block.
fn rounded(bytes: u64) -> u64 {
    bytes.next_multiple_of(GRANULE)
}

/// Whether a range overlaps none of the ranges in a map; `length` returns their lengths.
fn is_clear<T>(map: &BTreeMap<u64, T>, at: u64, bytes: u64, length: impl Fn(&T) -> u64) -> bool {
    let before = map.range(..at + bytes).next_back();
    before.is_none_or(|(first, value)| first + length(value) <= at)
}

impl Device {
    fn add(&mut self, act: Act, event: &Event, start: u64, (size, stream): (u64, u64)) {
        self.entries.push(Entry {
            act,
            address: event.address,
            size,
            stream,
            time_us: Some(start.saturating_add(event.time) / 1000),
            context: event.context,
        });
    }

    /// Whether a range lies in driver memory, possibly in several adjacent pieces.
    fn is_held(&self, mut at: u64, bytes: u64) -> bool {
        let end = at + bytes;
        while at < end {
            match self.held.range(..=at).next_back() {
                Some((base, held)) if base + held.bytes > at => at = base + held.bytes,
                _ => return false,
            }
        }
        true
    }

    fn hold(&mut self, event: &Event, start: u64, held: Held) {
        if held.bytes == 0 || !is_clear(&self.held, event.address, held.bytes, |held| held.bytes) {
            return;
        }
        let act = if held.mapped {
            Act::SegmentMap
        } else {
            Act::SegmentAlloc
        };
        self.add(act, event, start, (held.bytes, held.stream));
        self.held.insert(event.address, held);
    }

    fn unmap(&mut self, event: &Event, start: u64) {
        let end = self
            .held
            .get(&event.address)
            .map(|held| event.address + held.bytes);
        // The record of the old block's free was lost, so the block is removed first.
        let lost = end
            .into_iter()
            .flat_map(|end| self.live.range(event.address..end));
        let lost: Vec<u64> = lost.map(|(at, _)| *at).collect();
        for address in lost {
            self.free(&Event { address, ..*event }, start);
        }
        if let Some(held) = self.held.remove(&event.address) {
            let act = if held.mapped {
                Act::SegmentUnmap
            } else {
                Act::SegmentFree
            };
            self.add(act, event, start, (held.bytes, held.stream));
        }
    }

    fn allocate(&mut self, event: &Event, start: u64, handle: u64) {
        let bytes = rounded(event.bytes);
        self.free(event, start);
        if bytes == 0 || !is_clear(&self.live, event.address, bytes, |b| rounded(b.event.bytes)) {
            return;
        }
        if !self.is_held(event.address, bytes) {
            let view = Held {
                bytes,
                small: false,
                mapped: true,
                stream: handle,
                view: true,
            };
            self.hold(event, start, view);
            // Only a manipulated recording has partially existing memory.
            if !self.is_held(event.address, bytes) {
                return;
            }
        }
        self.add(Act::Alloc, event, start, (event.bytes, handle));
        let event = *event;
        self.live.insert(event.address, Live { event, handle });
    }

    fn free(&mut self, event: &Event, start: u64) {
        let Some(block) = self.live.remove(&event.address) else {
            return;
        };
        let size = (block.event.bytes, block.handle);
        self.add(Act::FreeRequested, event, start, size);
        self.add(Act::FreeCompleted, event, start, size);
        if self.held.get(&event.address).is_some_and(|held| held.view) {
            self.unmap(event, start);
        }
    }

    fn sampled(&mut self, event: &Event) {
        let Some(live) = self.live.get_mut(&event.address) else {
            return;
        };
        live.event.context = event.context;
        // Events of other threads may lie between the allocation and the stack.
        let newest = self.entries.iter_mut().rev().take(BESIDE);
        let mut own = newest.filter(|entry| entry.act == Act::Alloc);
        if let Some(entry) = own.find(|entry| entry.address == event.address) {
            entry.context = event.context;
        }
    }

    /// Returns the memory held at the end: adjacent handles form one segment.
    fn segments(&self, device: usize) -> Vec<Segment> {
        let mut segments: Vec<Segment> = Vec::new();
        let mut last_view = false;
        for (address, held) in &self.held {
            let joins = segments.last().is_some_and(|last| {
                let whole = last.address + last.size == *address && last.small == held.small;
                whole && last.expandable && held.mapped && !held.view && !last_view
            });
            last_view = held.view;
            match segments.last_mut() {
                Some(last) if joins => last.size += held.bytes,
                _ => segments.push(Segment {
                    device,
                    address: *address,
                    size: held.bytes,
                    stream: held.stream,
                    small: held.small,
                    expandable: held.mapped,
                    blocks: Vec::new(),
                }),
            }
        }
        for segment in &mut segments {
            self.fill(segment);
        }
        segments
    }

    /// Places the blocks of a segment, with free ones between them.
    fn fill(&self, segment: &mut Segment) {
        let end = segment.address + segment.size;
        let mut at = segment.address;
        let mut put = |address, size, requested, state, context| {
            segment.blocks.push(Block {
                address,
                size,
                requested,
                state,
                context,
            });
        };
        for (address, live) in self.live.range(segment.address..end) {
            if *address > at {
                put(at, address - at, 0, State::Free, 0);
            }
            let size = rounded(live.event.bytes).min(end - address);
            let requested = live.event.bytes.min(size);
            put(*address, size, requested, State::Live, live.event.context);
            at = address + size;
        }
        if at < end {
            put(at, end - at, 0, State::Free, 0);
        }
    }
}

impl Snapshot {
    /// Builds the snapshot at the end of a recording, with the recording as its traces.
    ///
    /// A block in a view is in a separate segment, which its allocation maps: its bytes are also counted at their home
    /// address. Blocks whose allocation was lost are omitted. If the stack of an allocation was
    /// [sampled](crate::record::Recorder::start_with_stacks), its frames are that stack, otherwise the context of the
    /// thread.
    pub fn of(recording: &Recording) -> Snapshot {
        snapshot(recording)
    }
}

fn snapshot(recording: &Recording) -> Snapshot {
    let mut devices: Vec<Device> = Vec::new();
    let start = recording.start();
    for event in recording.events() {
        let end = event.address.checked_add(rounded(event.bytes));
        let index = recording.device_of(event.allocator);
        let is_shown = !matches!(
            event.action,
            Action::Use | Action::Limit(_) | Action::Regime(_)
        );
        if !is_shown || end.is_none_or(|end| end >= HIGHEST) || index >= DEVICES {
            continue;
        }
        while devices.len() <= index {
            devices.push(Device::default());
        }
        let device = &mut devices[index];
        let stream = recording.streams().get(event.stream as usize);
        let handle = stream.map_or(0, |stream| stream.handle.min(HIGHEST - 1));
        match event.action {
            Action::Held | Action::Allocate => device.allocate(event, start, handle),
            Action::Free => device.free(event, start),
            Action::Map { small, mapped } => {
                let held = Held {
                    bytes: event.bytes,
                    small,
                    mapped,
                    stream: 0,
                    view: false,
                };
                device.hold(event, start, held);
            }
            Action::Unmap { .. } => device.unmap(event, start),
            Action::OutOfMemory { device_free, .. } => {
                let address = device_free.unwrap_or(0).min(HIGHEST - 1);
                let event = Event { address, ..*event };
                device.add(Act::Oom, &event, start, (event.bytes, handle));
            }
            Action::Sample => device.sampled(event),
            Action::Use | Action::Limit(_) | Action::Regime(_) => {}
        }
    }
    let most = recording.contexts.keys().next_back().copied().unwrap_or(0);
    // Numbers of a manipulated recording may have any value.
    let most = most.min(1 << 16);
    let name = |number| innermost(recording.context(number).unwrap_or_default()).to_owned();
    Snapshot {
        segments: devices
            .iter()
            .enumerate()
            .flat_map(|(index, device)| device.segments(index))
            .collect(),
        traces: devices.into_iter().map(|device| device.entries).collect(),
        contexts: (1..=most).map(name).collect(),
        ..Snapshot::default()
    }
}

/// Returns the end of a context's name, which is written with every block and event.
fn innermost(name: &str) -> &str {
    let from = name.len().saturating_sub(MOST_NAME);
    let start = (from..=name.len()).find(|at| name.is_char_boundary(*at));
    name.get(start.unwrap_or(0)..).unwrap_or_default()
}
