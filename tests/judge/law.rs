//! What the driver's calls order, and who may use which bytes.
//!
//! Everything here comes from calls of the table, but for three things that the program says: a block was
//! handed out for a stream, a block was freed, a guard was taken or dropped. No order comes from
//! `cuMemFree`, `cuMemFreeHost`, `cuMemHostAlloc` or the loading of modules: the driver promises none.
//!
//! A position counts what was submitted to a stream. What the host has seen complete is complete for all
//! threads: the calls are let through one at a time, so any later one of any thread comes after it.

mod blocks;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::thread::ThreadId;

use cualloc::driver::sys::*;

use super::ranges::{Position, Ranges};

type Clock = Vec<u64>;

fn merge(into: &mut Clock, from: &[u64]) {
    if into.len() < from.len() {
        into.resize(from.len(), 0);
    }
    for (a, b) in into.iter_mut().zip(from) {
        *a = (*a).max(*b);
    }
}

fn covers(clock: &[u64], (stream, position): Position) -> bool {
    clock.get(stream).is_some_and(|known| *known >= position)
}

struct Lane {
    /// What comes before the next thing that is submitted, and its own position.
    clock: Clock,
    context: usize,
    blocking: bool,
    /// Of which capture it is part.
    capture: Option<u64>,
}

enum Stamp {
    Never,
    At(Clock),
    /// It belongs to a capture, and orders nothing outside of it.
    Captured(u64),
}

/// Memory at addresses.
struct Mapping {
    end: u64,
    /// Where it is in the numbering of physical bytes.
    physical: u64,
    accessible: bool,
    /// One of `cuMemAlloc`.
    plain: bool,
}

/// Physical memory of a handle.
struct Handle {
    physical: u64,
    references: u64,
}

/// A block that was handed out.
#[derive(Clone)]
pub struct Block {
    end: u64,
    parts: Vec<(u64, u64)>,
}

/// Each memory has its own numbers of bytes, from a multiple of this on.
const SPAN: u64 = 1 << 40;

pub struct Law {
    real: CuFunctions,
    lanes: Vec<Lane>,
    by_handle: HashMap<u64, usize>,
    defaults: HashMap<(usize, Option<ThreadId>), usize>,
    events: HashMap<u64, Stamp>,
    captures: u64,
    seen: Clock,
    mappings: BTreeMap<u64, Mapping>,
    handles: HashMap<u64, Handle>,
    memories: u64,
    kernels: HashSet<usize>,
    /// By physical bytes, and by addresses.
    used: Ranges,
    used_at: Ranges,
    live: BTreeMap<u64, Block>,
    /// Live blocks by physical bytes: end, address.
    occupied: BTreeMap<u64, (u64, u64)>,
    guards: Vec<(u64, Block)>,
    verdicts: Vec<String>,
    /// Handed out so far.
    pub blocks: u64,
    /// What the classic policy once rested on: `cuMemFree` of a segment under work.
    pub frees_may_wait: bool,
}

impl Law {
    pub fn new(real: CuFunctions) -> Law {
        Law {
            real,
            lanes: Vec::new(),
            by_handle: HashMap::new(),
            defaults: HashMap::new(),
            events: HashMap::new(),
            captures: 0,
            seen: Clock::new(),
            mappings: BTreeMap::new(),
            handles: HashMap::new(),
            memories: 0,
            kernels: HashSet::new(),
            used: Ranges::default(),
            used_at: Ranges::default(),
            live: BTreeMap::new(),
            occupied: BTreeMap::new(),
            guards: Vec::new(),
            verdicts: Vec::new(),
            blocks: 0,
            frees_may_wait: false,
        }
    }

    /// What was found, if anything.
    pub fn take_verdict(&mut self) -> Option<String> {
        if self.verdicts.is_empty() {
            return None;
        }
        Some(std::mem::take(&mut self.verdicts).swap_remove(0))
    }

    fn found(&mut self, what: String) {
        if self.verdicts.len() < 10 {
            self.verdicts.push(what);
        }
    }

    // ---- streams ---------------------------------------------------------------------------

    fn lane(&mut self, context: usize, blocking: bool) -> usize {
        self.lanes.push(Lane {
            clock: Clock::new(),
            context,
            blocking,
            capture: None,
        });
        self.lanes.len() - 1
    }

    fn current(&self) -> usize {
        let mut context: CUcontext = std::ptr::null_mut();
        if let Some(ask) = self.real.cuCtxGetCurrent {
            // SAFETY: the pointer is to a local.
            let _ = unsafe { ask(&mut context) };
        }
        context as usize
    }

    /// The number of a stream, whose default ones are those of the current context.
    pub fn number(&mut self, stream: CUstream) -> usize {
        let value = stream as u64;
        if value > 2 {
            if let Some(number) = self.by_handle.get(&value) {
                return *number;
            }
            let number = self.lane(0, false);
            self.by_handle.insert(value, number);
            return number;
        }
        let context = self.current();
        self.default_of(context, value == 2)
    }

    /// The number of a default stream of a context.
    pub fn default_of(&mut self, context: usize, per_thread: bool) -> usize {
        let thread = per_thread.then(|| std::thread::current().id());
        match self.defaults.get(&(context, thread)) {
            Some(number) => *number,
            None => {
                let number = self.lane(context, true);
                self.defaults.insert((context, thread), number);
                number
            }
        }
    }

    pub fn created(&mut self, stream: CUstream, blocking: bool) {
        let context = self.current();
        let number = self.lane(context, blocking);
        self.by_handle.insert(stream as u64, number);
    }

    pub fn destroyed(&mut self, stream: CUstream) {
        self.by_handle.remove(&(stream as u64));
    }

    /// A context was destroyed by its owner, who let its work end first.
    pub fn context_destroyed(&mut self, context: usize) {
        for lane in self.lanes.iter_mut().filter(|l| l.context == context) {
            merge(&mut self.seen, &lane.clock);
            // The value of its handle may come back.
            lane.context = usize::MAX;
        }
        self.defaults.retain(|(owner, _), _| *owner != context);
    }

    /// The streams that the next thing on this one comes after by itself.
    fn implied(&self, stream: usize) -> Vec<usize> {
        let lane = &self.lanes[stream];
        if !lane.blocking {
            return Vec::new();
        }
        let legacy = self.defaults.get(&(lane.context, None)).copied();
        match legacy {
            None => Vec::new(),
            Some(legacy) if legacy != stream => vec![legacy],
            Some(_) => {
                let of_it = |(index, other): (usize, &Lane)| {
                    (other.blocking && other.context == lane.context && index != stream)
                        .then_some(index)
                };
                self.lanes.iter().enumerate().filter_map(of_it).collect()
            }
        }
    }

    /// Something is submitted; `None` where a capture only takes note of it.
    fn submitted(&mut self, stream: usize) -> Option<u64> {
        if self.lanes[stream].capture.is_some() {
            return None;
        }
        for other in self.implied(stream) {
            let clock = std::mem::take(&mut self.lanes[other].clock);
            merge(&mut self.lanes[stream].clock, &clock);
            self.lanes[other].clock = clock;
        }
        let clock = &mut self.lanes[stream].clock;
        if clock.len() <= stream {
            clock.resize(stream + 1, 0);
        }
        clock[stream] += 1;
        Some(clock[stream])
    }

    /// Whether the next thing on a stream comes after a use.
    fn ordered(&self, stream: usize, implied: &[usize], used: Position) -> bool {
        used.0 == stream
            || covers(&self.seen, used)
            || covers(&self.lanes[stream].clock, used)
            || implied
                .iter()
                .any(|&other| covers(&self.lanes[other].clock, used))
    }

    /// Work on device memory.
    pub fn works(&mut self, stream: CUstream, ranges: &[(u64, u64)]) {
        let stream = self.number(stream);
        let Some(position) = self.submitted(stream) else {
            return;
        };
        for &(start, bytes) in ranges {
            let used = (stream, position);
            for (at, end, physical) in self.parts(start, start + bytes) {
                self.used_at.add(at, end, used);
                self.used.add(physical, physical + (end - at), used);
            }
        }
    }

    pub fn function(&mut self, function: CUfunction, wordy: bool) {
        if wordy {
            self.kernels.insert(function as usize);
        } else {
            self.kernels.remove(&(function as usize));
        }
    }

    pub fn is_wordy(&self, function: CUfunction) -> bool {
        self.kernels.contains(&(function as usize))
    }

    // ---- order -----------------------------------------------------------------------------

    pub fn event(&mut self, event: CUevent) {
        self.events.insert(event as u64, Stamp::Never);
    }

    pub fn event_gone(&mut self, event: CUevent) {
        self.events.remove(&(event as u64));
    }

    pub fn records(&mut self, event: CUevent, stream: CUstream) {
        let stream = self.number(stream);
        let stamp = match self.submitted(stream) {
            Some(_) => Stamp::At(self.lanes[stream].clock.clone()),
            None => Stamp::Captured(self.lanes[stream].capture.unwrap_or(0)),
        };
        self.events.insert(event as u64, stamp);
    }

    pub fn waits(&mut self, stream: CUstream, event: CUevent) {
        let stream = self.number(stream);
        match self.events.get(&(event as u64)) {
            Some(Stamp::At(clock)) => {
                let clock = clock.clone();
                if self.submitted(stream).is_some() {
                    merge(&mut self.lanes[stream].clock, &clock);
                }
            }
            Some(Stamp::Captured(capture)) => self.lanes[stream].capture = Some(*capture),
            Some(Stamp::Never) | None => {}
        }
    }

    pub fn event_done(&mut self, event: CUevent) {
        if let Some(Stamp::At(clock)) = self.events.get(&(event as u64)) {
            merge(&mut self.seen, clock);
        }
    }

    pub fn stream_done(&mut self, stream: CUstream) {
        let stream = self.number(stream);
        merge(&mut self.seen, &self.lanes[stream].clock);
    }

    pub fn context_done(&mut self) {
        let context = self.current();
        for lane in self.lanes.iter().filter(|l| l.context == context) {
            merge(&mut self.seen, &lane.clock);
        }
    }

    pub fn captures(&mut self, stream: CUstream) {
        let stream = self.number(stream);
        self.captures += 1;
        self.lanes[stream].capture = Some(self.captures);
    }

    /// A capture was to end; whether it did, the driver says.
    pub fn captured(&mut self, stream: CUstream) {
        let stream = self.number(stream);
        let Some(capture) = self.lanes[stream].capture else {
            return;
        };
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let handle = self.by_handle.iter().find(|(_, number)| **number == stream);
        if let (Some(ask), Some((handle, _))) = (self.real.cuStreamIsCapturing, handle) {
            // SAFETY: the stream was given to a call just now, the output is a local.
            let _ = unsafe { ask(*handle as CUstream, &mut status) };
        }
        if status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
            return;
        }
        for lane in &mut self.lanes {
            if lane.capture == Some(capture) {
                lane.capture = None;
            }
        }
    }

    // ---- memory ----------------------------------------------------------------------------

    fn memory(&mut self) -> u64 {
        self.memories += 1;
        self.memories * SPAN
    }

    /// Where addresses lie: start, end, first physical byte of each part. What is not mapped is left out.
    fn parts(&self, start: u64, end: u64) -> Vec<(u64, u64, u64)> {
        let first = self.mappings.range(..=start).next_back();
        let first = first.map_or(start, |(&at, _)| at);
        let mut parts = Vec::new();
        for (&at, mapping) in self.mappings.range(first..end) {
            let (from, to) = (start.max(at), end.min(mapping.end));
            if from < to {
                parts.push((from, to, mapping.physical + (from - at)));
            }
        }
        parts
    }

    fn insert(&mut self, start: u64, bytes: u64, physical: u64, plain: bool) {
        let mapping = Mapping {
            end: start + bytes,
            physical,
            accessible: plain,
            plain,
        };
        self.mappings.insert(start, mapping);
    }

    pub fn segment(&mut self, start: u64, bytes: u64) {
        let physical = self.memory();
        self.insert(start, bytes, physical, true);
    }

    pub fn segment_freed(&mut self, start: u64) {
        match self.mappings.get(&start).map(|m| (m.end, m.plain)) {
            Some((end, true)) => self.unmapped("cuMemFree", start, end - start),
            Some((_, false)) => self.found(format!("cuMemFree of {start:#x}, which is mapped")),
            None => {}
        }
    }

    pub fn handle(&mut self, handle: CUmemGenericAllocationHandle) {
        let physical = self.memory();
        self.handles.insert(
            handle,
            Handle {
                physical,
                references: 1,
            },
        );
    }

    pub fn handle_retained(&mut self, handle: CUmemGenericAllocationHandle) {
        if let Some(known) = self.handles.get_mut(&handle) {
            known.references += 1;
        }
    }

    pub fn handle_released(&mut self, handle: CUmemGenericAllocationHandle) {
        let Some(known) = self.handles.get_mut(&handle) else {
            return;
        };
        known.references -= 1;
        let physical = known.physical;
        if known.references > 0 {
            return;
        }
        self.handles.remove(&handle);
        self.perhaps_gone(physical);
    }

    /// Physical memory goes with its last handle and mapping.
    fn perhaps_gone(&mut self, physical: u64) {
        let base = physical / SPAN * SPAN;
        let held = self.handles.values().any(|h| h.physical == base);
        let shown = |m: &Mapping| m.physical / SPAN * SPAN == base;
        if held || self.mappings.values().any(shown) {
            return;
        }
        let (from, to) = (base, base + SPAN);
        if let Some((_, (_, address))) = self.occupied.range(from..to).next() {
            self.found(format!(
                "memory of the live block {address:#x} is given back"
            ));
        }
        self.used.forget(from, to);
    }

    pub fn mapped(
        &mut self,
        start: u64,
        bytes: u64,
        handle: CUmemGenericAllocationHandle,
        offset: u64,
    ) {
        if let Some(physical) = self.handles.get(&handle).map(|h| h.physical) {
            self.insert(start, bytes, physical + offset, false);
        }
    }

    pub fn accessible(&mut self, start: u64, bytes: u64) {
        for (_, mapping) in self.mappings.range_mut(start..start + bytes) {
            mapping.accessible = true;
        }
    }

    /// Addresses lose their memory: nobody may use them any more.
    pub fn unmapped(&mut self, call: &str, start: u64, bytes: u64) {
        let end = start + bytes;
        if let Some((s, e)) = self.live_around(start, end) {
            self.found(format!(
                "{call} of {start:#x}..{end:#x} under the live block {s:#x}..{e:#x}"
            ));
        }
        let guarded = self.guards.iter();
        let guarded = guarded.map(|(s, block)| (*s, block.end));
        if let Some((s, e)) = guarded.clone().find(|(s, e)| *s < end && start < *e) {
            self.found(format!(
                "{call} of {start:#x}..{end:#x} under the guard {s:#x}..{e:#x}"
            ));
        }
        let seen = &self.seen;
        let done = |used| covers(seen, used);
        if let Some((at, used)) = self.used_at.find(start, end, done, done)
            && !(call == "cuMemFree" && self.frees_may_wait)
        {
            self.found(format!(
                "{call} of {start:#x}..{end:#x}: stream {} may use {at:#x} until {}, which the host \
                 has not seen",
                used.0, used.1
            ));
        }
        self.used_at.forget(start, end);
        let gone: Vec<u64> = self.mappings.range(start..end).map(|(&at, _)| at).collect();
        for at in gone {
            if let Some(mapping) = self.mappings.remove(&at) {
                self.perhaps_gone(mapping.physical);
            }
        }
    }

    pub fn addresses_freed(&mut self, start: u64, bytes: u64) {
        let end = start + bytes;
        if let Some((s, e)) = self.live_around(start, end) {
            self.found(format!(
                "cuMemAddressFree of {start:#x}..{end:#x} under the live block {s:#x}..{e:#x}"
            ));
        }
        if let Some((at, _)) = self.mappings.range(start..end).next() {
            let at = *at;
            self.found(format!(
                "cuMemAddressFree of {start:#x}..{end:#x}, which is mapped at {at:#x}"
            ));
        }
    }
}
