//! Runs a program on an allocator over the simulator, and judges every step.

mod blocks;
mod other;
mod places;
mod spares;
mod steps;
mod streams;
mod uses;

use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::Arc;

use cualloc::allocator::{BlockState, Profile, SegmentInfo};
use cualloc::driver::{Context, Driver, DriverError, Entered, Event};
use cualloc::sim::{Mode, SimConfig, Simulator};
use cualloc::{Allocator, Block, Config, Error, Policy, Stats};

use super::checker::ranges::Position;
use super::checker::table::{Checker, install, own};
use super::common::shrink::{Failure, guarded};
use super::program::Setup;
use spares::Spares;
use streams::{Handle, Lane, destroy_raw};

/// The totals of a run.
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

pub type Done<T = ()> = Result<T, String>;

struct Held {
    ptr: u64,
    size: u64,
    requested: u64,
    owner: usize,
    /// Lies in a view.
    view: bool,
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
    checker: Arc<Checker>,
    setup: &'a Setup,
    context: Context,
    alloc: Allocator,
    lanes: Vec<Lane>,
    /// The last event of each destroyed stream.
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
    /// Requests that fill a limit wait until memory was freed.
    freeing: bool,
    /// Live blocks in views.
    in_views: u64,
    /// Where copies to the host end up.
    sink: Box<[u8; 64]>,
    pub summary: Summary,
}

/// Runs the steps of a program, checking the heap every few of them; a panic is a failure like any other.
pub fn attempt<S>(
    setup: &Setup,
    steps: &[S],
    act: impl Fn(&mut Machine<'_>, &S) -> Done,
    check_every: usize,
) -> Result<Summary, Failure> {
    let mut at = 0;
    let result = guarded(|| run(setup, steps, act, check_every, &mut at));
    Checker::leave();
    result.map_err(|what| Failure { step: at, what })
}

/// The machine of a failed run is leaked: it may be in any state.
fn run<S>(
    setup: &Setup,
    steps: &[S],
    act: impl Fn(&mut Machine<'_>, &S) -> Done,
    check_every: usize,
    at: &mut usize,
) -> Done<Summary> {
    let mut config = SimConfig::with_devices(1, setup.memory);
    config.mode = setup.mode;
    if !setup.stream_ids {
        config.missing = vec!["cuStreamGetId".into()];
    }
    let sim = Simulator::new(config).map_err(text)?;
    let mut machine = std::mem::ManuallyDrop::new(Machine::new(&sim, setup)?);
    for step in steps {
        if matches!(setup.mode, Mode::Lag(_)) {
            sim.advance_row();
        }
        machine.summary.steps += 1;
        act(&mut machine, step)?;
        machine.judge((*at + 1).is_multiple_of(check_every))?;
        *at += 1;
    }
    machine.finish()?;
    let (summary, checker) = (machine.summary, Arc::clone(&machine.checker));
    drop(std::mem::ManuallyDrop::into_inner(machine));
    let leaks = checker.unexplained(sim.leaks());
    if !leaks.is_empty() {
        return Err(format!("leaks: {leaks:?}"));
    }
    first_report(&sim)?;
    Ok(summary)
}

fn first_report(sim: &Simulator) -> Done {
    if sim.report_count() == 0 {
        return Ok(());
    }
    let first = sim.reports().first().map(ToString::to_string);
    Err(format!(
        "the simulator reports: {}",
        first.unwrap_or_default()
    ))
}

/// Figures without those that tell a block that is free in a large-block cache, in use for the heap, from
/// the same bytes out of the large-block cache, free there. A call that looks at the block takes it off.
fn without_large_caches(stats: Stats) -> Stats {
    let mut apart = stats;
    apart.cache_bytes = 0;
    apart.free_blocks = 0;
    apart.largest_free = 0;
    apart.nodes = 0;
    apart
}

fn same<T: PartialEq + Debug>(before: &T, after: &T) -> Done {
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
    let mut config = Config::new().policy(setup.policy).limit(setup.limit);
    config = config.context_checks(true);
    config.views = setup.views;
    config.capture_checks = setup.capture_checks;
    if setup.dense {
        config.profile = Profile::Dense;
    }
    config.handle = setup.handle;
    config
}

impl<'a> Machine<'a> {
    fn new(sim: &'a Simulator, setup: &'a Setup) -> Done<Self> {
        let checker = Checker::new(sim.functions(), 1);
        checker.enter();
        // SAFETY: the simulator's functions, behind ones of the same types.
        let driver = unsafe { Driver::from_functions(install(sim.functions())) }.map_err(text)?;
        let device = driver.device(0).map_err(text)?;
        let context = Context::primary(&device).map_err(text)?;
        let alloc = Allocator::with_config(&context, config(setup)).map_err(text)?;
        let mut machine = Machine {
            sim,
            checker,
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
            freeing: false,
            in_views: 0,
            sink: Box::new([0; 64]),
            summary: Summary::default(),
        };
        machine.new_stream(false)?;
        for (wanted, raw) in [(setup.legacy, 1), (setup.per_thread, 2)] {
            if wanted {
                let context = machine.context.raw() as usize;
                machine.lanes.push(Lane {
                    handle: Handle::Special(std::ptr::without_provenance_mut(raw)),
                    number: machine.checker.tracker().default_of(context, raw == 2),
                    kept: false,
                });
            }
        }
        Ok(machine)
    }

    /// Makes driver calls of the program's own, which do not fail.
    fn own<T>(&self, f: impl FnOnce(&Entered<'_>) -> Result<T, DriverError>) -> Done<T> {
        own(|_| self.context.enter().and_then(|entered| f(&entered))).map_err(text)
    }

    fn position(&self, stream: usize) -> Position {
        self.checker.tracker().position(stream)
    }

    fn block(&self, pick: u32) -> Option<usize> {
        (!self.blocks.is_empty()).then(|| pick as usize % self.blocks.len())
    }

    /// Memory that another process takes.
    pub fn take_memory(&mut self, bytes: u64) -> Done {
        self.taken = bytes;
        self.sim.take_memory(0, bytes);
        Ok(())
    }

    /// No call fails any more.
    fn mend(&mut self) {
        self.checker.fail(None);
        self.armed = false;
    }

    /// An error that an injected fault explains.
    fn tolerate<T>(&mut self, result: Result<T, Error>) -> Done<Option<T>> {
        match result {
            Ok(value) => Ok(Some(value)),
            Err(Error::Driver(_)) if self.armed => Ok(None),
            Err(error) => Err(text(error)),
        }
    }

    /// Runs a call that must change nothing, twice: beside what lies in the large-block caches of stream
    /// caches, and when nothing lies there any more, as a snapshot takes everything off.
    fn unchanged<T>(&self, f: impl Fn(&Self) -> T) -> Done<[T; 2]> {
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
    fn compare_live(&self, snapshot: &[SegmentInfo]) -> Done {
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

    fn judge(&mut self, thorough: bool) -> Done {
        self.late(None);
        first_report(self.sim)?;
        let mut tracker = self.checker.tracker();
        tracker.take_violation().map_or(Ok(()), Err)?;
        let evicted = std::mem::take(&mut tracker.views_unmapped);
        drop(tracker);
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

    fn compare(&mut self, stats: &Stats) -> Done {
        let all = &stats.all;
        let in_use = self.sim.memory_in_use(0) - self.other.reserved();
        let memory = self.checker.lost_memory();
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

    fn finish(&mut self) -> Done {
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
    fn reopen(&mut self) -> Done {
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
    fn wind_up(&mut self) -> Done {
        self.mend();
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
