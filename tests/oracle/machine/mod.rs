//! Runs a program on an allocator over the simulator, and judges every step.

mod blocks;
mod other;
mod places;
mod spares;
mod streams;
mod uses;

use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::Arc;

use cualloc::allocator::{BlockState, Profile, SegmentInfo};
use cualloc::driver::{Context, Driver, DriverError, Entered, Event, sys};
use cualloc::error::StreamMisuse;
use cualloc::sim::{FailPlan, Mode, SimConfig, Simulator};
use cualloc::{Allocator, Block, Config, Error, Policy, Stats};

use super::common::shrink::Failure;
use super::lost;
use super::program::{CALLS, Op, Setup};
use super::shadow::{Position, install, shadow};
use spares::Spares;
use streams::{Handle, Lane, destroy_raw};

/// What a run did.
#[derive(Default, Debug, Clone, Copy)]
pub struct Summary {
    pub allocations: u64,
    pub out_of_memory: u64,
    pub waits: u64,
    pub faults: u64,
    pub steps: u64,
    /// Allocations whose block lies in a view.
    pub in_views: u64,
    /// Steps that began with a live block in a view, and what was done in such steps.
    pub beside_views: u64,
    pub trims_beside: u64,
    pub faults_beside: u64,
    pub evictions_beside: u64,
    /// Views that were unmapped.
    pub evictions: u64,
}

impl Summary {
    pub fn add(&mut self, other: &Summary) {
        for (sum, more) in [
            (&mut self.allocations, other.allocations),
            (&mut self.out_of_memory, other.out_of_memory),
            (&mut self.waits, other.waits),
            (&mut self.faults, other.faults),
            (&mut self.steps, other.steps),
            (&mut self.in_views, other.in_views),
            (&mut self.beside_views, other.beside_views),
            (&mut self.trims_beside, other.trims_beside),
            (&mut self.faults_beside, other.faults_beside),
            (&mut self.evictions_beside, other.evictions_beside),
            (&mut self.evictions, other.evictions),
        ] {
            *sum += more;
        }
    }
}

type Step<T = ()> = Result<T, String>;

struct Held {
    ptr: u64,
    size: u64,
    requested: u64,
    owner: usize,
    /// Lies in a view.
    view: bool,
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
    guards: Vec<places::Kept>,
    spares: Arc<Spares>,
    other: other::Other,
    figures: Figures,
    reserved: u64,
    /// Bytes that faults keep the allocators from giving back.
    lost: u64,
    /// How many faults may have done so.
    lost_objects: usize,
    limit: Option<u64>,
    taken: u64,
    armed: bool,
    /// Live blocks in views.
    in_views: u64,
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
    let leaks = lost::unexplained(sim.leaks(), &shadow(|s| s.lost.clone()));
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

/// Figures without those that tell a block which nobody holds in a large-block cache, in use for the heap, from
/// the same bytes out of the large-block cache, free there. A call that looks at the block takes it off.
fn without_large_caches(stats: Stats) -> Stats {
    let mut apart = stats;
    apart.cache_bytes = 0;
    apart.free_blocks = 0;
    apart.largest_free = 0;
    apart.nodes = 0;
    apart
}

fn same<T: PartialEq + Debug>(before: &T, after: &T) -> Step {
    if before == after {
        return Ok(());
    }
    Err(format!(
        "an error changed the heap: {before:?} to {after:?}"
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

fn config(setup: &Setup) -> Config {
    let tuning = &setup.tuning;
    let mut config = Config::new().policy(setup.policy).limit(setup.limit);
    config = config.context_checks(true);
    config.views = tuning.views;
    config.capture_checks = tuning.capture_checks;
    if tuning.dense {
        config.profile = Profile::Dense;
    }
    config.handle = tuning.handle;
    config
}

impl<'a> Machine<'a> {
    fn new(sim: &'a Simulator, setup: &'a Setup) -> Step<Self> {
        let table = install(sim.functions(), setup.executed);
        // SAFETY: the simulator's functions, some of them behind ones of the same types.
        let driver = unsafe { Driver::from_functions(table) }.map_err(text)?;
        let device = driver.device(0).map_err(text)?;
        let context = Context::primary(&device).map_err(text)?;
        let alloc = Allocator::with_config(&context, config(setup)).map_err(text)?;
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
            guards: Vec::new(),
            spares: Arc::default(),
            other: other::Other::default(),
            figures: Figures::default(),
            reserved: 0,
            lost: 0,
            lost_objects: 0,
            limit: setup.limit,
            taken: 0,
            armed: false,
            in_views: 0,
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

    fn block(&self, pick: u16) -> Option<usize> {
        (!self.blocks.is_empty()).then(|| usize::from(pick) % self.blocks.len())
    }

    fn step(&mut self, op: Op) -> Step {
        if matches!(self.setup.mode, Mode::Lag(_)) {
            self.sim.advance_row();
        }
        self.summary.steps += 1;
        if self.in_views > 0 {
            self.summary.beside_views += 1;
            self.summary.trims_beside += u64::from(matches!(op, Op::Trim { .. }));
            self.summary.faults_beside += u64::from(matches!(op, Op::Fail { .. }));
        }
        match op {
            Op::Alloc(want) => self.allocate(want),
            Op::Again {
                stream,
                bytes,
                times,
            } => self.again(stream, bytes, times),
            Op::Place {
                want,
                single,
                views,
            } => self.place(want, single, views),
            Op::Cached { stream, bytes } => self.take_cached(stream, bytes),
            Op::Guard { block, from, part } => self.guard(block, from, part),
            Op::Unguard { guard } => self.unguard(guard),
            Op::Segments { block, from, part } => self.segments(block, from, part),
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
            Op::EmptyCache => {
                let result = self.alloc.empty_cache();
                self.tolerate(result).map(drop)
            }
            Op::Spare { block } => self.spare(block),
            Op::Hook { relief, stream } => self.hook(relief, stream),
            Op::Look => self.look(),
            Op::Other { stream, bytes } => self.other(stream, bytes),
            Op::Reopen => self.reopen(),
            Op::Reserve { stream, bytes } => self.reserve(stream, bytes),
            Op::Mark { stream } => {
                let raw = self.lanes[self.lane(stream)].raw();
                // SAFETY: a live stream of the context.
                match unsafe { self.alloc.mark_raw(raw) } {
                    Err(Error::Stream(StreamMisuse::Unknown { .. })) => Ok(()),
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
        let plan = plan.nth(nth.into()).times(times.into());
        self.sim.fail(match self.setup.executed {
            true => plan.executed(),
            false => plan,
        });
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

    /// Runs a call that must change nothing, twice: beside what lies in the large-block caches of stream
    /// caches, and when nothing lies there any more, as a snapshot takes everything off.
    fn unchanged<T>(&self, f: impl Fn(&Self) -> T) -> Step<[T; 2]> {
        let before = without_large_caches(self.alloc.stats());
        let first = f(self);
        same(&before, &without_large_caches(self.alloc.stats()))?;
        let before = self.alloc.stats_and_snapshot();
        self.compare_live(&before.1)?;
        let second = f(self);
        same(&before, &self.alloc.stats_and_snapshot())?;
        Ok([first, second])
    }

    /// The live blocks of a snapshot are those of the model.
    fn compare_live(&self, snapshot: &[SegmentInfo]) -> Step {
        let blocks = snapshot.iter().flat_map(|segment| &segment.blocks);
        let live = blocks.filter(|block| block.state == BlockState::Live);
        let mut found: Vec<_> = live.map(|b| (b.address, b.size, b.requested)).collect();
        let mut model = Vec::new();
        self.any_held(|b| {
            model.push((b.ptr, b.size, b.requested));
            false
        });
        found.sort_unstable();
        model.sort_unstable();
        if model != found {
            return Err(format!(
                "live blocks: {model:x?} by the model, {found:x?} by the snapshot"
            ));
        }
        Ok(())
    }

    fn judge(&mut self, thorough: bool) -> Step {
        self.late(None);
        first_report(self.sim)?;
        let (violation, evicted) =
            shadow(|s| (s.violations.pop(), std::mem::take(&mut s.views_unmapped)));
        if let Some(violation) = violation {
            return Err(violation);
        }
        self.summary.evictions += evicted;
        if self.in_views > 0 {
            self.summary.evictions_beside += evicted;
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

    fn compare(&mut self, stats: &Stats) -> Step {
        let all = &stats.all;
        let in_use = self.sim.memory_in_use(0) - self.other.reserved();
        let memory = shadow(|s| s.lost.handles + s.lost.allocations);
        if memory > std::mem::replace(&mut self.lost_objects, memory) {
            // Of the calls since, some may have left memory behind.
            self.lost = self.lost.max(in_use.saturating_sub(all.reserved.current));
        }
        let held = in_use - self.lost;
        let figures = [
            ("live blocks", self.figures.live, all.allocations.current),
            ("requested", self.figures.requested, all.requested.current),
            ("allocated", self.figures.allocated, all.allocated.current),
            ("reserved", held, all.reserved.current),
            ("guarded", self.guarded_bytes(), stats.packing.guarded),
        ];
        for (what, model, found) in figures {
            if model != found {
                return Err(format!(
                    "{what}: {model} by the model, {found} by the statistics"
                ));
            }
        }
        // Several stream caches give a bound of the peak: no less than it is, and no more than was allocated.
        let peak = self.figures.peak;
        if all.requested.peak < peak || all.requested.peak > all.allocated.peak.max(peak) {
            return Err(format!(
                "peak requested: {peak} by the model, {} by the statistics",
                all.requested.peak
            ));
        }
        if self.alloc.policy() == Policy::Classic && all.requested.peak != peak {
            return Err("the peak of what was requested is exact without stream caches".to_owned());
        }
        Ok(())
    }

    fn finish(&mut self) -> Step {
        self.wind_up()?;
        self.sim.complete_all();
        while let Some(lane) = self.lanes.pop() {
            if let Handle::Raw(raw) = lane.handle {
                self.own(|entered| destroy_raw(entered, raw))?;
            }
        }
        Ok(())
    }

    /// A new allocator after the end of the one there was.
    fn reopen(&mut self) -> Step {
        self.wind_up()?;
        self.alloc = Allocator::with_config(&self.context, config(self.setup)).map_err(text)?;
        for lane in &mut self.lanes {
            lane.kept = false;
        }
        self.freed.clear();
        self.figures = Figures::default();
        self.limit = self.setup.limit;
        Ok(())
    }

    /// Frees what there is, and closes the allocator.
    fn wind_up(&mut self) -> Step {
        self.sim.clear_failures();
        self.armed = false;
        self.take_spares();
        self.close_other()?;
        // Frees what was dropped while a fault kept it from being freed.
        self.alloc.trim(u64::MAX).map_err(text)?;
        self.judge(true)?;
        if self.figures.live > 0 {
            for result in self.unchanged(|m| m.alloc.close())? {
                match result {
                    Err(Error::InUse { .. }) => {}
                    Err(Error::Guarded { .. }) if !self.guards.is_empty() => {}
                    other => return Err(format!("close with live blocks: {other:?}")),
                }
            }
        }
        while !self.blocks.is_empty() {
            self.free(0, false)?;
        }
        self.judge(true)?;
        if !self.guards.is_empty() {
            for result in self.unchanged(|m| m.alloc.close())? {
                let Err(Error::Guarded { .. }) = result else {
                    return Err(format!("close with guards: {result:?}"));
                };
            }
        }
        while !self.guards.is_empty() {
            self.unguard(0)?;
        }
        self.judge(true)?;
        self.alloc.close().map_err(text)?;
        self.judge(true)?;
        if self.reserved != 0 {
            return Err(format!("{} bytes reserved after close", self.reserved));
        }
        Ok(())
    }
}
