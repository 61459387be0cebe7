//! What a program's driver calls order, seen at the function table, and which ranges it orders.
//!
//! The shadow stands between the allocator and the simulator: the functions that make order pass
//! through it. It keeps a vector clock for each stream and for the host, knows nothing of the
//! allocator, and judges each address that is handed out, unmapped or freed.
//!
//! A position on a stream counts the work submitted to it and the waits queued on it. Recording an
//! event submits nothing: an event stands for the positions before it.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::{c_uint, c_void};
use std::rc::Rc;

use cualloc::driver::sys::*;
use cualloc::sim::Leaks;

use super::lost;

/// Positions by stream number; what is beyond the end is 0.
pub type Clock = Vec<u64>;

fn merge(into: &mut Clock, from: &[u64]) {
    if into.len() < from.len() {
        into.resize(from.len(), 0);
    }
    for (a, b) in into.iter_mut().zip(from) {
        *a = (*a).max(*b);
    }
}

fn covers(clock: &[u64], (stream, position): Position) -> bool {
    position <= clock.get(stream).copied().unwrap_or(0)
}

/// A stream by its number, and a count of what was submitted to it.
pub type Position = (usize, u64);

/// Physical bytes from a key on, and until when streams may touch them.
struct Pending {
    end: u64,
    /// The address under which the first of them was used.
    address: u64,
    uses: Rc<[Position]>,
}

/// Memory at an address.
#[derive(Clone, Copy)]
struct Mapping {
    bytes: u64,
    /// Where it is in the numbering of physical bytes: each handle has numbers of its own.
    physical: u64,
    /// Not the first address of its memory: a second layout.
    view: bool,
}

/// A block that a guard keeps, by its address.
struct Guarded {
    start: u64,
    end: u64,
    /// Its physical bytes, in ranges.
    parts: Vec<(u64, u64)>,
}

/// Physical bytes of each handle are numbered from a multiple of this.
const HANDLE_SPAN: u64 = 1 << 40;

#[derive(Default)]
pub struct Shadow {
    real: CuFunctions,
    clocks: Vec<Clock>,
    by_handle: HashMap<usize, usize>,
    events: HashMap<usize, Clock>,
    host: Clock,
    /// Live blocks: start to end.
    live: BTreeMap<u64, u64>,
    /// The same in physical bytes: one memory may be mapped at several addresses.
    occupied: BTreeMap<u64, u64>,
    /// By physical bytes.
    pending: BTreeMap<u64, Pending>,
    /// As often as there are guards.
    guarded: Vec<Guarded>,
    /// Mapped or allocated memory by address.
    held: BTreeMap<u64, Mapping>,
    /// The first physical byte of each handle.
    handles: HashMap<u64, u64>,
    handles_made: u64,
    /// Memory that is mapped at its first address.
    at_home: HashSet<u64>,
    /// Calls that report an error were executed, but for those that make or observe something.
    executed: bool,
    /// Objects that faults keep the allocator from destroying, at most.
    pub lost: Leaks,
    pub violations: Vec<String>,
    /// Mappings in views that were taken away.
    pub views_unmapped: u64,
    frees: u32,
}

thread_local! {
    static SHADOW: RefCell<Option<Shadow>> = const { RefCell::new(None) };
}

/// Runs `f` on the calling thread's shadow.
pub fn shadow<T>(f: impl FnOnce(&mut Shadow) -> T) -> T {
    SHADOW.with_borrow_mut(|s| f(s.get_or_insert_default()))
}

/// Starts a new shadow on this thread before `functions`, whose faults are `executed` or not; returns the table to use
/// instead.
pub fn install(functions: CuFunctions, executed: bool) -> CuFunctions {
    SHADOW.set(Some(Shadow {
        real: functions,
        executed,
        ..Shadow::default()
    }));
    let mut table = functions;
    macro_rules! replace {
        ($($name:ident)*) => { $(if table.$name.is_some() { table.$name = Some($name); })* };
    }
    replace! {
        cuStreamCreate cuStreamCreateWithPriority cuStreamDestroy_v2 cuStreamWaitEvent
        cuStreamSynchronize cuStreamQuery cuEventRecord cuEventQuery cuEventSynchronize
        cuCtxSynchronize cuMemsetD8Async cuMemcpyDtoHAsync_v2 cuMemAlloc_v2 cuMemFree_v2 cuMemCreate
        cuMemMap cuMemUnmap cuMemRelease cuPointerGetAttributes
    }
    table
}

impl Shadow {
    /// The number of a stream.
    pub fn number(&mut self, handle: CUstream) -> usize {
        // Null and 1 are the same stream.
        let key = (handle as usize).max(1);
        if let Some(number) = self.by_handle.get(&key) {
            return *number;
        }
        self.created(key)
    }

    fn created(&mut self, key: usize) -> usize {
        let number = self.clocks.len();
        self.clocks.push(Clock::new());
        self.by_handle.insert(key, number);
        number
    }

    /// The newest position of a stream.
    pub fn position(&self, stream: usize) -> Position {
        let clock = &self.clocks[stream];
        (stream, clock.get(stream).copied().unwrap_or(0))
    }

    /// Whether what is submitted to `stream` next comes after a position.
    pub fn ordered(&self, stream: usize, at: Position) -> bool {
        at.0 == stream || covers(&self.clocks[stream], at) || covers(&self.host, at)
    }

    fn submitted(&mut self, handle: CUstream) {
        let stream = self.number(handle);
        let clock = &mut self.clocks[stream];
        merge(clock, &self.host);
        if clock.len() <= stream {
            clock.resize(stream + 1, 0);
        }
        clock[stream] += 1;
    }

    fn observe(&mut self, stream: usize) {
        merge(&mut self.host, &self.clocks[stream]);
    }

    /// A block was handed out for use on a stream. Says whether it lies in a view.
    pub fn handed_out(&mut self, start: u64, bytes: u64, stream: usize) -> Result<bool, String> {
        let end = start + bytes;
        if let Some((s, e)) = overlapping(&self.live, start, end) {
            return Err(format!(
                "block {start:#x}..{end:#x} overlaps the live block {s:#x}..{e:#x}"
            ));
        }
        let Some(parts) = self.translate(start, end) else {
            return Err(format!("block {start:#x}..{end:#x} is not all mapped"));
        };
        for (address, from, to) in parts {
            if overlapping(&self.occupied, from, to).is_some() {
                return Err(format!(
                    "block {start:#x}..{end:#x} shares its memory at {address:#x} with a live block"
                ));
            }
            if self.is_guarded(from, to) {
                return Err(format!(
                    "block {start:#x}..{end:#x} has its memory at {address:#x} from a guarded one"
                ));
            }
            for piece in self.take_pending(from, to) {
                if let Some(use_) = piece.uses.iter().find(|u| !self.ordered(stream, **u)) {
                    return Err(format!(
                        "block {start:#x}..{end:#x} for stream {stream} overlaps memory used at \
                         {:#x}, which stream {} may use until {} (stream {stream} follows it to \
                         {}, the host to {})",
                        piece.address,
                        use_.0,
                        use_.1,
                        self.clocks[stream].get(use_.0).unwrap_or(&0),
                        self.host.get(use_.0).unwrap_or(&0)
                    ));
                }
            }
            self.occupied.insert(from, to);
        }
        self.live.insert(start, end);
        let at = self.held.range(..=start).next_back();
        Ok(at.is_some_and(|(_, mapping)| mapping.view))
    }

    /// A guard keeps a block from now on.
    pub fn guarded(&mut self, start: u64, end: u64) {
        let parts = self.translate(start, end).unwrap_or_default();
        let parts = parts.into_iter().map(|(_, from, to)| (from, to)).collect();
        self.guarded.push(Guarded { start, end, parts });
    }

    /// One guard less.
    pub fn unguarded(&mut self, start: u64, end: u64) {
        let mut guarded = self.guarded.iter();
        let at = guarded.position(|g| (g.start, g.end) == (start, end));
        if let Some(at) = at {
            self.guarded.swap_remove(at);
        }
    }

    /// A guarded block in a range of addresses.
    fn guarded_around(&self, start: u64, end: u64) -> Option<(u64, u64)> {
        let mut guarded = self.guarded.iter();
        let found = guarded.find(|g| g.start < end && start < g.end)?;
        Some((found.start, found.end))
    }

    /// Whether physical bytes are those of a guarded block.
    fn is_guarded(&self, from: u64, to: u64) -> bool {
        let mut parts = self.guarded.iter().flat_map(|g| &g.parts);
        parts.any(|(start, end)| from < *end && *start < to)
    }

    /// Whether a handle's (for `None`, a segment's) byte is mapped at an address.
    pub fn is_at(&self, address: u64, handle: Option<u64>, offset: u64) -> bool {
        let Some((base, mapping)) = self.held.range(..=address).next_back() else {
            return false;
        };
        let first = match handle {
            Some(handle) => self.handles.get(&handle).copied(),
            None => Some(mapping.physical),
        };
        address - base < mapping.bytes
            && first.is_some_and(|first| first + offset == mapping.physical + (address - base))
    }

    /// Takes what is pending out of a physical range; what sticks out of it stays.
    fn take_pending(&mut self, from: u64, to: u64) -> Vec<Pending> {
        let mut taken = Vec::new();
        while let Some((at, piece)) = self.pending.range(..to).next_back() {
            let at = *at;
            if piece.end <= from {
                break;
            }
            let Some(piece) = self.pending.remove(&at) else {
                break;
            };
            if at < from {
                let uses = Rc::clone(&piece.uses);
                let address = piece.address;
                self.pending.insert(
                    at,
                    Pending {
                        end: from,
                        address,
                        uses,
                    },
                );
            }
            if piece.end > to {
                let (end, uses) = (piece.end, Rc::clone(&piece.uses));
                let address = piece.address + (to - at);
                self.pending.insert(to, Pending { end, address, uses });
            }
            let cut = from.saturating_sub(at);
            taken.push(Pending {
                end: piece.end.min(to),
                address: piece.address + cut,
                uses: piece.uses,
            });
        }
        taken
    }

    /// The physical ranges behind an address range, with their addresses.
    fn translate(&self, start: u64, end: u64) -> Option<Vec<(u64, u64, u64)>> {
        let (mut at, mut parts) = (start, Vec::new());
        while at < end {
            let (base, mapping) = self.held.range(..=at).next_back()?;
            let stop = (base + mapping.bytes).min(end);
            if stop <= at {
                return None;
            }
            let from = mapping.physical + (at - base);
            parts.push((at, from, from + (stop - at)));
            at = stop;
        }
        Some(parts)
    }

    /// A block was freed, to be touched until the given positions.
    pub fn freed(&mut self, start: u64, uses: Vec<Position>) {
        if let Some(end) = self.live.remove(&start) {
            let uses: Rc<[Position]> = uses.into();
            for (address, from, to) in self.translate(start, end).unwrap_or_default() {
                self.occupied.remove(&from);
                let uses = Rc::clone(&uses);
                self.pending.insert(
                    from,
                    Pending {
                        end: to,
                        address,
                        uses,
                    },
                );
            }
        }
        self.frees += 1;
        if self.frees.is_multiple_of(256) {
            let host = &self.host;
            self.pending
                .retain(|_, p| !p.uses.iter().all(|u| covers(host, *u)));
        }
    }

    /// Physical memory in which no block is live, in bytes, counted once; of which, if asked for, only
    /// what is in no view with a live block.
    pub fn idle_bytes(&self, in_no_live_view: bool) -> u64 {
        let pinned = if in_no_live_view {
            self.live_views()
        } else {
            HashSet::new()
        };
        let ranges: BTreeMap<u64, u64> =
            self.held.values().map(|m| (m.physical, m.bytes)).collect();
        let idle = |(from, bytes): &(&u64, &u64)| {
            !pinned.contains(*from)
                && !self.is_guarded(**from, **from + **bytes)
                && overlapping(&self.occupied, **from, **from + **bytes).is_none()
        };
        ranges.iter().filter(idle).map(|(_, bytes)| bytes).sum()
    }

    /// Memory in unbroken rows of mappings in views in which a block is live.
    fn live_views(&self) -> HashSet<u64> {
        let mut found = HashSet::new();
        let (mut row, mut start, mut end) = (Vec::new(), 0, 0);
        let views = self.held.iter().filter(|(_, mapping)| mapping.view);
        for (at, mapping) in views.map(|(at, m)| (*at, Some(m))).chain([(0, None)]) {
            if at != end || mapping.is_none() {
                let guarded = self.guarded_around(start, end).is_some();
                if guarded || overlapping(&self.live, start, end).is_some() {
                    found.extend(row.drain(..));
                }
                row.clear();
                start = at;
            }
            if let Some(mapping) = mapping {
                row.push(mapping.physical);
                end = at + mapping.bytes;
            }
        }
        found
    }

    /// A call reported an error. Says whether it was executed, as far as that is to be noted.
    fn failed(&mut self, call: &str) -> bool {
        lost::count(&mut self.lost, call, self.executed);
        self.executed && matches!(call, "cuMemMap" | "cuMemUnmap" | "cuMemFree_v2")
    }

    /// Memory goes from an address: nobody may use it there any more.
    fn leaving(&mut self, call: &str, start: u64) {
        let Some(mapping) = self.held.remove(&start) else {
            return;
        };
        if mapping.view {
            self.views_unmapped += 1;
        } else {
            self.at_home.remove(&mapping.physical);
        }
        let end = start + mapping.bytes;
        if let Some((s, e)) = overlapping(&self.live, start, end) {
            self.violations.push(format!(
                "{call} of {start:#x}..{end:#x} under the live block {s:#x}..{e:#x}"
            ));
        }
        if let Some((s, e)) = self.guarded_around(start, end) {
            self.violations.push(format!(
                "{call} of {start:#x}..{end:#x} under the guarded block {s:#x}..{e:#x}"
            ));
        }
        let range = mapping.physical..mapping.physical + mapping.bytes;
        for (_, piece) in self.pending.range(range) {
            let here = (start..end).contains(&piece.address);
            if here && !piece.uses.iter().all(|u| covers(&self.host, *u)) {
                self.violations.push(format!(
                    "{call} of {start:#x}..{end:#x}: what was used at {:#x} was not seen complete",
                    piece.address
                ));
            }
        }
    }

    fn new_handle(&mut self) -> u64 {
        self.handles_made += 1;
        self.handles_made * HANDLE_SPAN
    }
}

fn overlapping(ranges: &BTreeMap<u64, u64>, start: u64, end: u64) -> Option<(u64, u64)> {
    let (s, e) = ranges.range(..end).next_back()?;
    (*e > start).then_some((*s, *e))
}

// ---- the functions between ---------------------------------------------------------------------

const OK: CUresult = CUresult::CUDA_SUCCESS;

/// Calls the simulator's function.
macro_rules! real {
    ($name:ident($($arg:expr),*)) => {
        match shadow(|s| s.real.$name) {
            // SAFETY: the same arguments, passed on.
            Some(function) => unsafe { function($($arg),*) },
            None => CUresult::CUDA_ERROR_NOT_FOUND,
        }
    };
}

/// Passes a call on and notes it if it was executed.
macro_rules! between {
    ($(fn $name:ident($($arg:ident: $ty:ty),*) $then:expr;)*) => {
        $(
            #[allow(non_snake_case)]
            unsafe extern "C" fn $name($($arg: $ty),*) -> CUresult {
                let result = real!($name($($arg),*));
                if result == OK || shadow(|s| s.failed(stringify!($name))) {
                    #[allow(clippy::redundant_closure_call)]
                    shadow(|s| $then(s));
                }
                result
            }
        )*
    };
}

/// A handle that the driver has just written.
///
/// # Safety
/// `out` must point to it.
unsafe fn written(out: *mut CUstream) -> usize {
    // SAFETY: the caller's contract.
    unsafe { *out as usize }
}

between! {
    fn cuStreamCreate(out: *mut CUstream, flags: c_uint) |s: &mut Shadow| {
        // SAFETY: the call succeeded, so it wrote its result.
        s.created(unsafe { written(out) });
    };
    fn cuStreamCreateWithPriority(out: *mut CUstream, flags: c_uint, priority: i32) |s: &mut Shadow| {
        // SAFETY: as above.
        s.created(unsafe { written(out) });
    };
    fn cuStreamDestroy_v2(stream: CUstream) |s: &mut Shadow| {
        s.by_handle.remove(&(stream as usize));
    };
    fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint) |s: &mut Shadow| {
        let known = s.events.get(&(event as usize)).cloned().unwrap_or_default();
        s.submitted(stream);
        let number = s.number(stream);
        merge(&mut s.clocks[number], &known);
    };
    fn cuStreamSynchronize(stream: CUstream) |s: &mut Shadow| {
        let number = s.number(stream);
        s.observe(number);
    };
    fn cuStreamQuery(stream: CUstream) |s: &mut Shadow| {
        let number = s.number(stream);
        s.observe(number);
    };
    fn cuEventRecord(event: CUevent, stream: CUstream) |s: &mut Shadow| {
        let number = s.number(stream);
        let clock = s.clocks[number].clone();
        s.events.insert(event as usize, clock);
    };
    fn cuEventQuery(event: CUevent) |s: &mut Shadow| {
        if let Some(clock) = s.events.get(&(event as usize)) {
            merge(&mut s.host, clock);
        }
    };
    fn cuEventSynchronize(event: CUevent) |s: &mut Shadow| {
        if let Some(clock) = s.events.get(&(event as usize)) {
            merge(&mut s.host, clock);
        }
    };
    fn cuCtxSynchronize() |s: &mut Shadow| {
        (0..s.clocks.len()).for_each(|stream| s.observe(stream));
    };
    fn cuMemsetD8Async(to: CUdeviceptr, value: u8, bytes: usize, stream: CUstream) |s: &mut Shadow| {
        s.submitted(stream);
    };
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream) |s: &mut Shadow| {
        s.submitted(stream);
    };
    fn cuMemAlloc_v2(out: *mut CUdeviceptr, bytes: usize) |s: &mut Shadow| {
        let mapping = Mapping { bytes: bytes as u64, physical: s.new_handle(), view: false };
        // SAFETY: the call succeeded, so it wrote its result.
        s.held.insert(unsafe { *out }, mapping);
    };
    fn cuMemCreate(out: *mut CUmemGenericAllocationHandle, bytes: usize, properties: *const CUmemAllocationProp, flags: u64) |s: &mut Shadow| {
        let first = s.new_handle();
        // SAFETY: the call succeeded, so it wrote its result.
        s.handles.insert(unsafe { *out }, first);
    };
    fn cuMemRelease(handle: CUmemGenericAllocationHandle) |_: &mut Shadow| {};
    fn cuPointerGetAttributes(count: c_uint, list: *mut CUpointer_attribute, out: *mut *mut c_void, address: CUdeviceptr) |_: &mut Shadow| {};
    fn cuMemMap(start: CUdeviceptr, bytes: usize, offset: usize, handle: CUmemGenericAllocationHandle, flags: u64) |s: &mut Shadow| {
        let first = s.handles.get(&handle).copied().unwrap_or(0);
        let physical = first + offset as u64;
        let view = !s.at_home.insert(physical);
        let mapping = Mapping { bytes: bytes as u64, physical, view };
        s.held.insert(start, mapping);
    };
    fn cuMemUnmap(start: CUdeviceptr, bytes: usize) |s: &mut Shadow| {
        let range = start..start + bytes as u64;
        let starts: Vec<u64> = s.held.range(range).map(|(at, _)| *at).collect();
        starts.into_iter().for_each(|at| s.leaving("cuMemUnmap", at));
    };
    fn cuMemFree_v2(start: CUdeviceptr) |s: &mut Shadow| {
        // The call may wait, which orders nothing.
        s.leaving("cuMemFree", start);
    };
}
