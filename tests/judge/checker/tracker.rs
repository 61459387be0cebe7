//! What the driver's calls order, and who may use which bytes.
//!
//! Everything here comes from calls of the table, but for what the program says: a block was handed out for a
//! stream, and from which graph pool if it is of one, another stream was recorded on it, it was freed, a guard was
//! taken or dropped, memory is suspended or back. No order comes from `cuMemFree`, `cuMemFreeHost`,
//! `cuMemHostAlloc` or the loading of modules: the driver promises none.
//!
//! A position counts what was submitted to a stream. What the host has seen complete is complete for all
//! threads: the calls are let through one at a time, so any later one of any thread comes after it.

mod blocks;
mod captures;
mod claims;
mod graphs;
mod memory;
mod node_order;
mod positions;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::thread::ThreadId;

use cualloc::allocator::Waits;
use cualloc::driver::sys::*;

use self::captures::Capture;
use self::claims::Claim;
use self::graphs::{Exec, Graph, Object};
use self::node_order::Link;
use super::ranges::{Position, Ranges};

type Clock = Vec<u64>;

/// A request under way, as far as waits for it are judged.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    pub waits: Waits,
    /// Bytes that were requested.
    pub bytes: u64,
    /// Bytes that a growth for it takes at most.
    pub needed: u64,
    /// Bytes that the limit and the device leave for growth.
    pub room: u64,
}

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
    /// The position at which the program stopped using the stream.
    left: Option<u64>,
}

enum Stamp {
    Never,
    At(Clock),
    /// It belongs to a capture, behind these nodes, and orders nothing outside of it.
    Captured(u64, Vec<Link>),
}

/// Memory at addresses.
struct Mapping {
    end: u64,
    /// Where it is in the numbering of physical bytes.
    physical: u64,
    accessible: bool,
    /// One of `cuMemAlloc`.
    plain: bool,
    /// Its memory was mapped elsewhere before: a second layout.
    view: bool,
}

/// Physical memory of a handle.
struct Handle {
    physical: u64,
    references: u64,
}

/// A block that was handed out.
#[derive(Clone, Default)]
pub struct Block {
    end: u64,
    parts: Vec<(u64, u64)>,
    /// The graph pool whose memory it is.
    pool: Option<u64>,
    /// The streams that it was handed out for and recorded on.
    users: Vec<usize>,
    /// Captures in which nodes touch it.
    touched: Vec<u64>,
    /// A capture got it, or uses it.
    captured: bool,
    /// How many blocks had been handed out by then.
    born: u64,
}

/// Each memory has its own numbers of bytes, from a multiple of this on.
const SPAN: u64 = 1 << 40;

#[derive(Default)]
pub struct Tracker {
    real: CuFunctions,
    lanes: Vec<Lane>,
    by_handle: HashMap<u64, usize>,
    defaults: HashMap<(usize, Option<ThreadId>), usize>,
    events: HashMap<u64, Stamp>,
    /// Captures so far.
    count: u64,
    captures: HashMap<u64, Capture>,
    graphs: HashMap<u64, Graph>,
    execs: HashMap<u64, Exec>,
    objects: HashMap<u64, Object>,
    /// What graphs may touch, by the captures that made them.
    claims: BTreeMap<u64, Claim>,
    /// Graph pools whose blocks outside of captures may have memory of their graphs.
    pub reusing: HashSet<u64>,
    /// Graph pools whose memory is away; none stands for what is in no pool.
    asleep: HashSet<Option<u64>>,
    /// Where their memory was: start, end, and whose.
    homes: Vec<(u64, u64, Option<u64>)>,
    /// How often mappings changed.
    layout: u64,
    seen: Clock,
    mappings: BTreeMap<u64, Mapping>,
    handles: HashMap<u64, Handle>,
    memories: u64,
    kernels: HashSet<usize>,
    /// By physical bytes, and by addresses.
    used: Ranges,
    used_at: Ranges,
    /// The same of launches.
    launched: Ranges,
    launched_at: Ranges,
    /// The graph pool that owns the memory of a handle, if one does.
    owners: HashMap<u64, Option<u64>>,
    live: BTreeMap<u64, Block>,
    /// Live blocks by physical bytes: end, address.
    occupied: BTreeMap<u64, (u64, u64)>,
    guards: Vec<(u64, Block)>,
    violations: Vec<String>,
    /// Mappings in views that were taken away.
    pub views_unmapped: u64,
    /// Handed out so far.
    pub blocks: u64,
    /// What the classic policy once rested on: `cuMemFree` of a segment under work.
    pub frees_may_wait: bool,
}

impl Tracker {
    pub fn new(real: CuFunctions) -> Tracker {
        Tracker {
            real,
            ..Tracker::default()
        }
    }

    /// What was found, if anything.
    pub fn take_violation(&mut self) -> Option<String> {
        if self.violations.is_empty() {
            return None;
        }
        Some(std::mem::take(&mut self.violations).swap_remove(0))
    }

    fn found(&mut self, what: String) {
        if self.violations.len() < 10 {
            self.violations.push(what);
        }
    }

    // ---- streams ---------------------------------------------------------------------------

    fn lane(&mut self, context: usize, blocking: bool) -> usize {
        self.lanes.push(Lane {
            clock: Clock::new(),
            context,
            blocking,
            capture: None,
            left: None,
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
    pub fn works(&mut self, handle: CUstream, ranges: &[(u64, u64)]) {
        let stream = self.number(handle);
        let Some(position) = self.submitted(stream) else {
            return self.captured_work(handle, stream, ranges);
        };
        for &(start, bytes) in ranges {
            let used = (stream, position);
            if let Some((at, _)) = self.live_around(start, start + bytes)
                && self.is_asleep(at)
                && !self.is_there(start, start + bytes)
            {
                self.found(format!(
                    "work of stream {stream} on the block {at:#x} while its memory is away"
                ));
            }
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
            None => self.captured_stamp(stream),
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
            Some(Stamp::Captured(capture, links)) => {
                let (capture, links) = (*capture, links.clone());
                self.joins(stream, capture, &links);
            }
            Some(Stamp::Never) | None => {}
        }
    }

    /// Judges a wait that the allocator queues on a stream for a request: it may do so only where no new memory can
    /// serve the request.
    pub fn judge_wait(&mut self, stream: CUstream, event: CUevent, request: &Request) {
        let lane = self.number(stream);
        let Some(Stamp::At(clock)) = self.events.get(&(event as u64)) else {
            return;
        };
        let uses = || clock.iter().copied().enumerate();
        if uses().all(|used| used.1 == 0 || self.ordered(lane, &[], used)) {
            return;
        }
        match request.waits {
            Waits::Never => self.found(format!(
                "stream {lane} is ordered behind unfinished work for a request of {} bytes under waits=never",
                request.bytes
            )),
            Waits::Scarce if request.needed <= request.room => self.found(format!(
                "stream {lane} is ordered behind unfinished work for a request of {} bytes, although {} bytes can \
                 be had",
                request.bytes, request.room
            )),
            _ => {}
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
}
