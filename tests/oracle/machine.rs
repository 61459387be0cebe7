//! Runs a program on an allocator over the simulator, and judges every step.

use std::collections::HashMap;

use cualloc::driver::{Context, Driver, DriverError, Entered, Event, Stream, sys};
use cualloc::sim::{FailPlan, Mode, SimConfig, Simulator};
use cualloc::{Allocator, Block, Config, Error, Policy, Stats};

use super::program::{Bad, CALLS, Op, Setup};
use super::shadow::{Position, install, shadow};

/// Why a program failed, and at which step; the last is one beyond its end.
#[derive(Debug, Clone)]
pub struct Failure {
    pub step: usize,
    pub what: String,
}

/// What a run did.
#[derive(Default, Debug, Clone, Copy)]
pub struct Summary {
    pub allocations: u64,
    pub out_of_memory: u64,
    pub waits: u64,
    pub faults: u64,
}

type Step<T = ()> = Result<T, String>;

enum Handle {
    Owned(Stream),
    Raw(sys::CUstream),
    /// A default stream: never destroyed.
    Special(sys::CUstream),
}

struct Lane {
    handle: Handle,
    /// Its number in the shadow.
    number: usize,
    /// Whether the allocator keeps the stream alive.
    kept: bool,
}

impl Lane {
    fn raw(&self) -> sys::CUstream {
        match &self.handle {
            Handle::Owned(stream) => stream.raw(),
            Handle::Raw(raw) | Handle::Special(raw) => *raw,
        }
    }
}

struct Held {
    ptr: u64,
    size: u64,
    requested: u64,
    owner: usize,
    /// Until when its own stream may touch it, if that is over.
    until: Option<Position>,
    /// Owned, or held by address alone.
    block: Option<Block>,
    /// Streams recorded on the block: until the free, or until a position.
    recorded: Vec<(usize, Option<Position>)>,
    writer: Position,
    readers: Vec<Position>,
}

/// Live figures as the model has them.
#[derive(Default)]
struct Figures {
    live: u64,
    requested: u64,
    allocated: u64,
    peak: u64,
}

pub struct Machine<'a> {
    sim: &'a Simulator,
    setup: &'a Setup,
    context: Context,
    alloc: Allocator,
    lanes: Vec<Lane>,
    /// The last event of each stream that is gone.
    finals: HashMap<usize, Event>,
    blocks: Vec<Held>,
    freed: Vec<u64>,
    deferred: Vec<Held>,
    figures: Figures,
    reserved: u64,
    limit: Option<u64>,
    taken: u64,
    armed: bool,
    /// Where copies to the host end up.
    sink: Box<[u8; 64]>,
    pub summary: Summary,
}

/// Runs a program. The machine of a failed run is leaked: it may be in any state.
pub fn run(setup: &Setup, ops: &[Op], check_every: usize) -> Result<Summary, Failure> {
    let at = |step: usize| move |what: String| Failure { step, what };
    let mut config = SimConfig::with_devices(1, setup.memory);
    config.mode = setup.mode;
    if !setup.stream_ids {
        config.missing = vec!["cuStreamGetId".into()];
    }
    let sim = Simulator::new(config).map_err(|e| at(0)(e.to_string()))?;
    let machine = Machine::new(&sim, setup).map_err(at(0))?;
    let mut machine = std::mem::ManuallyDrop::new(machine);
    for (step, op) in ops.iter().enumerate() {
        machine
            .step(*op)
            .and_then(|()| machine.judge((step + 1).is_multiple_of(check_every)))
            .map_err(at(step))?;
    }
    machine.finish().map_err(at(ops.len()))?;
    let summary = machine.summary;
    drop(std::mem::ManuallyDrop::into_inner(machine));
    let leaks = sim.leaks();
    if !leaks.is_empty() {
        return Err(at(ops.len())(format!("leaks: {leaks:?}")));
    }
    first_report(&sim).map_err(at(ops.len()))?;
    Ok(summary)
}

fn first_report(sim: &Simulator) -> Step {
    if sim.report_count() == 0 {
        return Ok(());
    }
    let first = sim.reports().first().map(ToString::to_string);
    Err(format!(
        "the simulator reports: {}",
        first.unwrap_or_default()
    ))
}

fn text(error: impl std::error::Error) -> String {
    let mut all = error.to_string();
    let mut source = error.source();
    while let Some(inner) = source {
        all.push_str(": ");
        all.push_str(&inner.to_string());
        source = inner.source();
    }
    all
}

fn outcome(call: &'static str, code: Option<sys::CUresult>) -> Result<(), DriverError> {
    match code {
        Some(sys::CUresult::CUDA_SUCCESS) => Ok(()),
        other => Err(DriverError::new(
            call,
            other.unwrap_or(sys::CUresult::CUDA_ERROR_NOT_FOUND),
        )),
    }
}

/// A stream as foreign code makes it.
fn create_raw(entered: &Entered<'_>) -> Result<sys::CUstream, DriverError> {
    let mut stream = std::ptr::null_mut();
    let create = entered.driver().functions().cuStreamCreate;
    // SAFETY: the pointer is to a local handle; the context is current.
    let code = create.map(|create| unsafe { create(&mut stream, 1) });
    outcome("cuStreamCreate", code).map(|()| stream)
}

fn destroy_raw(entered: &Entered<'_>, stream: sys::CUstream) -> Result<(), DriverError> {
    let destroy = entered.driver().functions().cuStreamDestroy_v2;
    // SAFETY: made by `create_raw`, retired where it has to be, and not used again.
    let code = destroy.map(|destroy| unsafe { destroy(stream) });
    outcome("cuStreamDestroy_v2", code)
}

impl<'a> Machine<'a> {
    fn new(sim: &'a Simulator, setup: &'a Setup) -> Step<Self> {
        let table = install(sim.functions());
        // SAFETY: the simulator's functions, some of them behind ones of the same types.
        let driver = unsafe { Driver::from_functions(table) }.map_err(text)?;
        let device = driver.device(0).map_err(text)?;
        let context = Context::primary(&driver, device).map_err(text)?;
        let config = Config::new().policy(setup.policy).limit(setup.limit);
        let alloc = Allocator::with_config(&context, config).map_err(text)?;
        let mut machine = Machine {
            sim,
            setup,
            context,
            alloc,
            lanes: Vec::new(),
            finals: HashMap::new(),
            blocks: Vec::new(),
            freed: Vec::new(),
            deferred: Vec::new(),
            figures: Figures::default(),
            reserved: 0,
            limit: setup.limit,
            taken: 0,
            armed: false,
            sink: Box::new([0; 64]),
            summary: Summary::default(),
        };
        machine.new_stream(false)?;
        for (wanted, raw) in [(setup.legacy, 1), (setup.per_thread, 2)] {
            if wanted {
                let raw = std::ptr::without_provenance_mut(raw);
                machine.lanes.push(Lane {
                    handle: Handle::Special(raw),
                    number: shadow(|s| s.number(raw)),
                    kept: false,
                });
            }
        }
        Ok(machine)
    }

    /// Makes driver calls of the program's own: an injected fault that hits them is lifted.
    fn own<T>(&mut self, f: impl Fn(&Entered<'_>) -> Result<T, DriverError>) -> Step<T> {
        let attempt = || self.context.enter().and_then(|entered| f(&entered));
        attempt()
            .or_else(|_| {
                self.sim.clear_failures();
                attempt()
            })
            .map_err(text)
    }

    fn new_stream(&mut self, raw: bool) -> Step {
        let handle = if raw {
            Handle::Raw(self.own(create_raw)?)
        } else {
            let context = self.context.clone();
            Handle::Owned(self.own(|_| Stream::new(&context))?)
        };
        let mut lane = Lane {
            handle,
            number: 0,
            kept: false,
        };
        lane.number = shadow(|s| s.number(lane.raw()));
        self.lanes.push(lane);
        Ok(())
    }

    fn lane(&self, pick: u8) -> usize {
        usize::from(pick) % self.lanes.len()
    }

    fn block(&self, pick: u16) -> Option<usize> {
        (!self.blocks.is_empty()).then(|| usize::from(pick) % self.blocks.len())
    }

    fn step(&mut self, op: Op) -> Step {
        if matches!(self.setup.mode, Mode::Lag(_)) {
            self.sim.advance_row();
        }
        match op {
            Op::Alloc {
                stream,
                bytes,
                align,
                raw,
            } => self.allocate(stream, bytes, align, raw),
            Op::Absurd {
                stream,
                bytes,
                alignment,
            } => self.absurd(stream, bytes, alignment),
            Op::Free { block } => self.free(block, false),
            Op::Drop { block } => self.free(block, true),
            Op::IntoRaw { block } => {
                if let Some(at) = self.block(block)
                    && let Some(block) = self.blocks[at].block.take()
                {
                    block.into_raw();
                }
                Ok(())
            }
            Op::FreeBad { block, kind } => self.free_bad(block, kind),
            Op::RecordStream {
                block,
                stream,
                inside,
            } => self.record_stream(block, stream, inside),
            Op::RecordUse {
                block,
                stream,
                write,
            } => self.record_use(block, stream, write),
            Op::Use { block, on, write } => self.use_block(block, on, write),
            Op::Wait { from, to } => {
                let (from, to) = (self.lane(from), self.lane(to));
                let at = shadow(|s| s.position(self.lanes[from].number));
                self.order(self.lanes[to].number, at)
            }
            Op::HostSync { stream } => {
                let raw = self.lanes[self.lane(stream)].raw();
                // SAFETY: a live stream of the context.
                self.own(|entered| unsafe { entered.stream_synchronize(raw) })
            }
            Op::NewStream { raw } => self.new_stream(raw),
            Op::Retire { stream } => self.leave(stream, true),
            Op::Leave { stream } => self.leave(stream, false),
            Op::Limit { bytes } => {
                self.limit = bytes;
                self.alloc.set_limit(bytes);
                Ok(())
            }
            Op::Trim { keep } => {
                let result = self.alloc.trim(keep);
                self.tolerate(result).map(drop)
            }
            Op::Reserve { stream, bytes } => self.reserve(stream, bytes),
            Op::Mark { stream } => {
                let raw = self.lanes[self.lane(stream)].raw();
                // SAFETY: a live stream of the context.
                match unsafe { self.alloc.mark_raw(raw) } {
                    Err(Error::UnknownStream { .. }) => Ok(()),
                    result => self.tolerate(result).map(drop),
                }
            }
            Op::Synchronize => {
                let result = self.alloc.synchronize();
                self.tolerate(result).map(drop)
            }
            Op::ResetPeaks => {
                self.alloc.reset_peaks();
                self.figures.peak = self.figures.requested;
                Ok(())
            }
            Op::Check => self.alloc.check().map_err(text),
            Op::Complete { pick, count } => {
                let ready = self.sim.ready_streams();
                if !ready.is_empty() {
                    let stream = ready[usize::from(pick) % ready.len()];
                    self.sim.complete_stream(stream, usize::from(count));
                }
                Ok(())
            }
            Op::CompleteAll => {
                self.sim.complete_all();
                Ok(())
            }
            Op::Fail {
                call,
                nth,
                times,
                code,
            } => self.fail(call, nth, times, code),
            Op::Mend => {
                self.sim.clear_failures();
                self.armed = false;
                Ok(())
            }
            Op::Taken { bytes } => {
                self.taken = bytes;
                self.sim.take_memory(0, bytes);
                Ok(())
            }
        }
    }

    fn fail(&mut self, call: u8, nth: u8, times: u8, code: u8) -> Step {
        let code = [
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY,
            sys::CUresult::CUDA_ERROR_INVALID_VALUE,
            sys::CUresult::CUDA_ERROR_NOT_PERMITTED,
        ][usize::from(code) % 3];
        let plan = match CALLS[usize::from(call) % CALLS.len()] {
            "" => FailPlan::any(code),
            name => FailPlan::call(name, code).map_err(text)?,
        };
        self.sim.fail(plan.nth(nth.into()).times(times.into()));
        self.armed = true;
        self.summary.faults += 1;
        Ok(())
    }

    /// An error that an injected fault explains.
    fn tolerate<T>(&mut self, result: Result<T, Error>) -> Step<Option<T>> {
        match result {
            Ok(value) => Ok(Some(value)),
            Err(Error::Driver(_)) if self.armed => Ok(None),
            Err(error) => Err(text(error)),
        }
    }

    /// Runs a call that must change nothing.
    fn unchanged<T>(&self, f: impl FnOnce(&Self) -> T) -> Step<T> {
        let before = (self.alloc.stats(), self.alloc.snapshot());
        let result = f(self);
        let after = (self.alloc.stats(), self.alloc.snapshot());
        if before != after {
            return Err(format!(
                "an error changed the books: {before:?} to {after:?}"
            ));
        }
        Ok(result)
    }

    // ---- blocks ----------------------------------------------------------------------------

    fn obtain(
        &mut self,
        at: usize,
        bytes: usize,
        align: usize,
        raw: bool,
    ) -> Result<(u64, Option<Block>), Error> {
        let lane = &self.lanes[at];
        match &lane.handle {
            Handle::Owned(stream) => {
                let block = if align > 1 {
                    self.alloc.allocate_aligned(bytes, align, stream)?
                } else {
                    self.alloc.allocate(bytes, stream)?
                };
                Ok(if raw {
                    (block.into_raw(), None)
                } else {
                    (block.ptr(), Some(block))
                })
            }
            // Without ids each borrowed handle would be a stream of its own.
            Handle::Raw(handle) | Handle::Special(handle) if raw || !self.setup.stream_ids => {
                // SAFETY: a live stream of the context, retired before it is destroyed.
                Ok((unsafe { self.alloc.allocate_raw(bytes, *handle) }?, None))
            }
            Handle::Raw(handle) | Handle::Special(handle) => {
                // SAFETY: as above; the result goes at once.
                let stream = unsafe { Stream::from_raw(&self.context, *handle) }?;
                let block = self.alloc.allocate_aligned(bytes, align, &stream)?;
                Ok((block.ptr(), Some(block)))
            }
        }
    }

    fn allocate(&mut self, stream: u8, bytes: usize, align: u8, raw: bool) -> Step {
        let (at, align) = (self.lane(stream), 1usize << (align % 22));
        let (ptr, block) = match self.obtain(at, bytes, align, raw) {
            Ok(got) => got,
            Err(error) => return self.refused(error, bytes as u64, align as u64),
        };
        let owned = matches!(self.lanes[at].handle, Handle::Owned(_));
        self.lanes[at].kept |= owned;
        let aligned = owned || (block.is_some() && self.setup.stream_ids);
        let size = self
            .alloc
            .usable_size(ptr)
            .ok_or("a block without a size")?;
        if ptr % 512 != 0 || (aligned && !ptr.is_multiple_of(align as u64)) {
            return Err(format!("{ptr:#x} is not aligned to {align}"));
        }
        if size < bytes as u64 || block.as_ref().is_some_and(|b| b.size() != size) {
            return Err(format!("{size} usable bytes for {bytes}"));
        }
        self.late(Some((ptr, ptr + size)));
        let owner = self.lanes[at].number;
        let writer = shadow(|s| {
            s.handed_out(ptr, size, owner)?;
            Ok::<_, String>(s.position(owner))
        })?;
        self.blocks.push(Held {
            ptr,
            size,
            requested: bytes as u64,
            owner,
            until: None,
            block,
            recorded: Vec::new(),
            writer,
            readers: Vec::new(),
        });
        self.figures.live += 1;
        self.figures.allocated += size;
        self.figures.requested += bytes as u64;
        self.figures.peak = self.figures.peak.max(self.figures.requested);
        self.summary.allocations += 1;
        Ok(())
    }

    /// Whether a refused allocation was right to be.
    fn refused(&mut self, error: Error, bytes: u64, align: u64) -> Step {
        if self.armed && matches!(error, Error::OutOfMemory(_) | Error::Driver(_)) {
            return Ok(());
        }
        let Error::OutOfMemory(oom) = &error else {
            return Err(text(error));
        };
        self.summary.out_of_memory += 1;
        let span = bytes.next_multiple_of(512) + align.saturating_sub(512);
        let needed = match self.setup.policy {
            Policy::Classic => {
                cualloc::allocator::size::classic_segment_size(span as usize).unwrap_or(u64::MAX)
            }
            _ => span.next_multiple_of(2 << 20),
        };
        let reserved = self.alloc.stats().all.reserved.current;
        let idle = shadow(|s| s.idle_bytes());
        let device = self
            .setup
            .memory
            .saturating_sub(self.taken + self.sim.memory_in_use(0))
            + idle;
        let below = self
            .limit
            .map_or(u64::MAX, |limit| (limit + idle).saturating_sub(reserved));
        if needed <= device.min(below) {
            return Err(format!(
                "{oom} although {needed} bytes could be had: {device} of the device, {below} of \
                 the limit, of which {idle} by giving idle memory back"
            ));
        }
        Ok(())
    }

    fn absurd(&mut self, stream: u8, bytes: usize, alignment: usize) -> Step {
        let Handle::Owned(stream) = &self.lanes[self.lane(stream)].handle else {
            return Ok(());
        };
        let stream = stream.clone();
        match self.unchanged(|m| m.alloc.allocate_aligned(bytes, alignment, &stream))? {
            Err(Error::InvalidSize { .. } | Error::InvalidAlignment { .. }) => Ok(()),
            other => Err(format!("{bytes} bytes at {alignment}: {other:?}")),
        }
    }

    fn reserve(&mut self, stream: u8, bytes: usize) -> Step {
        let at = self.lane(stream);
        let Handle::Owned(stream) = &self.lanes[at].handle else {
            return Ok(());
        };
        // Its own block would be freed later if a fault hit the free.
        self.sim.clear_failures();
        self.armed = false;
        match self.alloc.reserve(bytes, stream) {
            Ok(()) => {
                self.lanes[at].kept = true;
                self.figures.peak = self.figures.peak.max(self.figures.requested + bytes as u64);
                Ok(())
            }
            Err(error) => self.refused(error, bytes as u64, 1),
        }
    }

    fn free(&mut self, pick: u16, drop_it: bool) -> Step {
        let Some(at) = self.block(pick) else {
            return Ok(());
        };
        let mut held = self.blocks.swap_remove(at);
        match held.block.take() {
            Some(block) if drop_it => {
                drop(block);
                if self.armed && self.alloc.usable_size(held.ptr).is_some() {
                    // The program is done with it, whenever the allocator is.
                    held.until = Some(shadow(|s| s.position(held.owner)));
                    for (stream, until) in &mut held.recorded {
                        until.get_or_insert_with(|| shadow(|s| s.position(*stream)));
                    }
                    self.deferred.push(held);
                    return Ok(());
                }
            }
            Some(block) => {
                if let Err(refused) = block.free() {
                    let (block, error) = (refused.block, refused.error);
                    self.blocks.push(Held {
                        block: Some(block),
                        ..held
                    });
                    return self.tolerate(Err::<(), _>(error)).map(drop);
                }
            }
            // SAFETY: allocated here, held by its address alone; its streams live or are retired.
            None => {
                if let Err(error) = unsafe { self.alloc.free_raw(held.ptr) } {
                    self.blocks.push(held);
                    return self.tolerate(Err::<(), _>(error)).map(drop);
                }
            }
        }
        self.gone(&held);
        Ok(())
    }

    /// Blocks that were dropped while a fault kept them from being freed are freed by later calls.
    /// `taken` is the range that was handed out since.
    fn late(&mut self, taken: Option<(u64, u64)>) {
        let mut at = 0;
        while at < self.deferred.len() {
            let held = &self.deferred[at];
            let again = taken.is_some_and(|(s, e)| s < held.ptr + held.size && held.ptr < e);
            if again || self.alloc.usable_size(held.ptr).is_none() {
                let held = self.deferred.swap_remove(at);
                self.gone(&held);
            } else {
                at += 1;
            }
        }
    }

    fn gone(&mut self, held: &Held) {
        self.figures.live -= 1;
        self.figures.allocated -= held.size;
        self.figures.requested -= held.requested;
        self.freed.push(held.ptr);
        shadow(|s| {
            let mut uses = vec![held.until.unwrap_or_else(|| s.position(held.owner))];
            uses.extend(
                held.recorded
                    .iter()
                    .map(|(stream, until)| until.unwrap_or_else(|| s.position(*stream))),
            );
            s.freed(held.ptr, uses);
        });
    }

    fn free_bad(&mut self, pick: u16, kind: Bad) -> Step {
        let held = self.blocks.iter().chain(&self.deferred);
        let live = |ptr: u64| held.clone().any(|b| b.ptr == ptr);
        let ptr = match kind {
            Bad::Foreign => 0x1000 + u64::from(pick) * 8,
            Bad::Interior => match self.block(pick) {
                Some(at) => self.blocks[at].ptr + 1 + u64::from(pick) % (self.blocks[at].size - 1),
                None => return Ok(()),
            },
            Bad::Double => match self.freed.last() {
                Some(ptr) if !live(*ptr) => *ptr,
                _ => return Ok(()),
            },
        };
        // SAFETY: no block starts there; the call has to refuse.
        let result = self.unchanged(|m| unsafe { m.alloc.free_raw(ptr) })?;
        match (kind, &result) {
            (Bad::Foreign, Err(Error::NotOurs { .. }))
            | (Bad::Interior, Err(Error::InteriorPointer { .. }))
            // The memory may have been given back, or be inside a newer block.
            | (Bad::Double, Err(Error::NotLive { .. } | Error::NotOurs { .. } | Error::InteriorPointer { .. })) => Ok(()),
            // Asking which stream it is comes first where the free has to.
            _ => Err(format!("free of {ptr:#x} ({kind:?}): {result:?}")),
        }
    }

    // ---- uses ------------------------------------------------------------------------------

    /// Makes what a stream is given next follow a position.
    fn order(&mut self, stream: usize, at: Position) -> Step {
        if shadow(|s| s.ordered(stream, at)) {
            return Ok(());
        }
        let Some(to) = self
            .lanes
            .iter()
            .find(|l| l.number == stream)
            .map(Lane::raw)
        else {
            return Ok(());
        };
        self.summary.waits += 1;
        match self.lanes.iter().find(|l| l.number == at.0).map(Lane::raw) {
            // SAFETY: live streams of the context.
            Some(from) => self.own(|entered| unsafe {
                let event = entered.create_event()?;
                entered.record(&event, from)?;
                entered.stream_wait(to, &event)
            }),
            None => {
                let event = self
                    .finals
                    .remove(&at.0)
                    .ok_or("no last event of a stream")?;
                // SAFETY: as above.
                let waited = self.own(|entered| unsafe { entered.stream_wait(to, &event) });
                self.finals.insert(at.0, event);
                waited
            }
        }
    }

    /// Submits work on a block to a stream, after what it has to follow.
    fn touch(&mut self, at: usize, lane: usize, write: bool) -> Step {
        let (number, raw) = (self.lanes[lane].number, self.lanes[lane].raw());
        let held = &self.blocks[at];
        let (ptr, bytes) = (held.ptr, held.requested);
        let mut after = vec![held.writer];
        if write {
            after.extend(held.readers.iter().copied());
        }
        for position in after {
            self.order(number, position)?;
        }
        let sink = self.sink.as_mut_ptr();
        // SAFETY: the block is live, the stream is, and everything that uses the bytes is ordered;
        // the sink outlives the work, which is done before the machine is dropped.
        self.own(|entered| unsafe {
            if write {
                entered.memset_d8(ptr, 7, bytes as usize, raw)
            } else {
                let bytes = bytes.min(64);
                entered.copy_device_to_host(sink.cast(), ptr, bytes as usize, raw)
            }
        })?;
        let position = shadow(|s| s.position(number));
        let held = &mut self.blocks[at];
        if write {
            held.writer = position;
            held.readers.clear();
        } else {
            held.readers.retain(|r| r.0 != number);
            held.readers.push(position);
        }
        Ok(())
    }

    fn use_block(&mut self, pick: u16, on: u8, write: bool) -> Step {
        let Some(at) = self.block(pick) else {
            return Ok(());
        };
        let held = &self.blocks[at];
        let open: Vec<usize> = [held.owner]
            .into_iter()
            .chain(held.recorded.iter().filter(|r| r.1.is_none()).map(|r| r.0))
            .filter_map(|number| self.lanes.iter().position(|l| l.number == number))
            .collect();
        if open.is_empty() {
            return Ok(());
        }
        self.touch(at, open[usize::from(on) % open.len()], write)
    }

    /// Whether the block's entry points can name the stream as the allocator knows it.
    fn nameable(&self, at: usize, lane: usize) -> bool {
        let ids = self.setup.stream_ids;
        match (&self.lanes[lane].handle, &self.blocks[at].block) {
            (Handle::Owned(_), Some(_)) => true,
            (Handle::Owned(_), None) => ids && self.lanes[lane].kept,
            (_, Some(_)) => ids,
            (_, None) => true,
        }
    }

    fn record(&mut self, at: usize, lane: usize, now: bool, offset: u64) -> Result<(), Error> {
        let (held, lane) = (&self.blocks[at], &self.lanes[lane]);
        match (&held.block, &lane.handle) {
            (Some(block), Handle::Owned(stream)) if now => block.record_use(stream),
            (Some(block), Handle::Owned(stream)) => block.record_stream(stream),
            // SAFETY: live streams, retired before they are destroyed.
            (_, _) if now => unsafe { self.alloc.record_use_raw(held.ptr + offset, lane.raw()) },
            // SAFETY: as above.
            (_, _) => unsafe { self.alloc.record_stream_raw(held.ptr + offset, lane.raw()) },
        }
    }

    fn record_stream(&mut self, pick: u16, stream: u8, inside: bool) -> Step {
        let (Some(at), lane) = (self.block(pick), self.lane(stream)) else {
            return Ok(());
        };
        if !self.nameable(at, lane) {
            return Ok(());
        }
        let offset = if inside { self.blocks[at].size - 1 } else { 0 };
        let result = self.record(at, lane, false, offset);
        let known = self.tolerate(result)?.is_some();
        let number = self.lanes[lane].number;
        if known && number != self.blocks[at].owner {
            self.blocks[at].recorded.retain(|r| r.0 != number);
            self.blocks[at].recorded.push((number, None));
        }
        Ok(())
    }

    fn record_use(&mut self, pick: u16, stream: u8, write: bool) -> Step {
        let (Some(at), lane) = (self.block(pick), self.lane(stream)) else {
            return Ok(());
        };
        if !self.nameable(at, lane) {
            return Ok(());
        }
        self.touch(at, lane, write)?;
        let result = self.record(at, lane, true, 0);
        if self.tolerate(result)?.is_none() {
            // The work is submitted: somebody has to know of it.
            self.sim.clear_failures();
            self.record(at, lane, true, 0).map_err(text)?;
        }
        let number = self.lanes[lane].number;
        let position = shadow(|s| s.position(number));
        let owner = self.blocks[at].owner;
        let recorded = &mut self.blocks[at].recorded;
        if number != owner && !recorded.contains(&(number, None)) {
            recorded.retain(|r| r.0 != number);
            recorded.push((number, Some(position)));
        }
        Ok(())
    }

    // ---- streams ---------------------------------------------------------------------------

    fn leave(&mut self, pick: u8, retire: bool) -> Step {
        let at = self.lane(pick);
        if self.lanes.len() < 2 || matches!(self.lanes[at].handle, Handle::Special(_)) {
            return Ok(());
        }
        let (number, raw) = (self.lanes[at].number, self.lanes[at].raw());
        // SAFETY: a live stream of the context.
        let last = self.own(|entered| unsafe {
            let event = entered.create_event()?;
            entered.record(&event, raw)?;
            Ok(event)
        })?;
        let named = |b: &Held| b.owner == number || b.recorded.iter().any(|r| r.0 == number);
        let needed = matches!(self.lanes[at].handle, Handle::Raw(_))
            && (!self.setup.stream_ids || self.blocks.iter().chain(&self.deferred).any(named));
        if retire || needed {
            for _ in 0..2 {
                let result = match &self.lanes[at].handle {
                    Handle::Owned(stream) => self.alloc.retire(stream),
                    // SAFETY: a live stream; the program gives it no more work.
                    _ => unsafe { self.alloc.retire_raw(raw) },
                };
                match result {
                    Err(Error::UnknownStream { .. }) => break,
                    result => {
                        if self.tolerate(result)?.is_some() {
                            break;
                        }
                    }
                }
                self.sim.clear_failures();
            }
        }
        let lane = self.lanes.swap_remove(at);
        self.finals.insert(number, last);
        match lane.handle {
            Handle::Owned(stream) => drop(stream),
            Handle::Raw(raw) => self.own(|entered| destroy_raw(entered, raw))?,
            Handle::Special(_) => {}
        }
        Ok(())
    }

    // ---- judgement -------------------------------------------------------------------------

    fn judge(&mut self, thorough: bool) -> Step {
        self.late(None);
        first_report(self.sim)?;
        if let Some(violation) = shadow(|s| s.violations.pop()) {
            return Err(violation);
        }
        let stats = self.alloc.stats();
        self.compare(&stats)?;
        let reserved = stats.all.reserved.current;
        if let Some(limit) = self.limit
            && reserved > limit.max(self.reserved)
        {
            return Err(format!(
                "{reserved} bytes reserved above the limit of {limit}"
            ));
        }
        self.reserved = reserved;
        if thorough {
            self.alloc.check().map_err(text)?;
        }
        Ok(())
    }

    fn compare(&self, stats: &Stats) -> Step {
        let all = &stats.all;
        let figures = [
            ("live blocks", self.figures.live, all.allocations.current),
            ("requested", self.figures.requested, all.requested.current),
            ("allocated", self.figures.allocated, all.allocated.current),
            ("peak requested", self.figures.peak, all.requested.peak),
            ("reserved", self.sim.memory_in_use(0), all.reserved.current),
        ];
        for (what, model, found) in figures {
            if model != found {
                return Err(format!(
                    "{what}: {model} by the model, {found} by the statistics"
                ));
            }
        }
        Ok(())
    }

    fn finish(&mut self) -> Step {
        self.step(Op::Mend)?;
        self.judge(true)?;
        if self.figures.live > 0 {
            match self.unchanged(|m| m.alloc.close())? {
                Err(Error::LiveBlocks { .. }) => {}
                other => return Err(format!("close with live blocks: {other:?}")),
            }
        }
        while !self.blocks.is_empty() {
            self.free(0, false)?;
        }
        self.judge(true)?;
        self.alloc.close().map_err(text)?;
        self.judge(true)?;
        if self.reserved != 0 {
            return Err(format!("{} bytes reserved after close", self.reserved));
        }
        self.sim.complete_all();
        while let Some(lane) = self.lanes.pop() {
            if let Handle::Raw(raw) = lane.handle {
                self.own(|entered| destroy_raw(entered, raw))?;
            }
        }
        Ok(())
    }
}
