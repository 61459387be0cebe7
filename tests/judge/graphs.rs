//! Programs that capture graphs with memory of pools and launch them beside other work: several pools, each
//! of whose launches are ordered and no others, captures that go on beside each other and beside work outside, memory
//! that goes away and comes back.
//!
//! What a program owes is done with events of its own. Everything else is the allocator's, and the judge's to see.

mod capture;
mod memory;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use cualloc::Error;
use cualloc::allocator::{
    Allocator, Block, Checkpoint, Config, GraphPool, PoolScope, Scope, Select,
};
use cualloc::driver::sys::*;
use cualloc::driver::{Context, Driver, Function, Graph, GraphExec, Module, Stream};
use cualloc::sim::{Mode, SimConfig, Simulator};

use self::capture::Capture;
use super::end::after;
use super::program::Setup;
use super::rng::Rng;
use super::run::Sums;
use super::table::{self, Checker, own};
use super::world::Done;

const STREAMS: usize = 5;

/// What fails in turn: the calls that these programs have the allocator make.
pub const FAILING: &str = "
    cuStreamGetCaptureInfo_v3 cuStreamIsCapturing cuGraphNodeGetDependencies_v2 cuUserObjectCreate
    cuGraphRetainUserObject cuUserObjectRelease cuMemCreate cuMemMap cuMemSetAccess cuMemUnmap cuMemRelease
    cuMemAddressReserve cuMemAddressFree cuEventCreate cuEventRecord cuEventQuery cuEventSynchronize
    cuEventDestroy_v2 cuStreamWaitEvent cuStreamSynchronize cuStreamCreate cuStreamGetId cuCtxSynchronize
    cuCtxGetCurrent cuCtxSetCurrent cuThreadExchangeStreamCaptureMode cuMemcpyHtoDAsync_v2
    cuMemcpyDtoHAsync_v2 cuMemHostAlloc cuMemFreeHost cuMemHostRegister_v2 cuMemHostUnregister
";

/// A pool whose launches are ordered among each other, and the work outside on its blocks with them.
struct Group {
    /// Its name for the judge.
    number: u64,
    /// None once it was released.
    pool: Option<GraphPool>,
    /// Behind everything that was done with the group's memory.
    tail: usize,
    asleep: bool,
    points: Vec<Checkpoint>,
}

/// A live block of the program.
struct Held {
    block: Block,
    /// None for one that is in no pool.
    group: Option<usize>,
    home: usize,
    /// The stream that used it last.
    last: usize,
    /// It came back with a checkpoint, and is only freed.
    frozen: bool,
}

/// A graph and what was made of it.
struct Made {
    group: usize,
    graph: Option<Graph>,
    execs: Vec<GraphExec>,
}

struct Scene<'a> {
    sim: &'a Simulator,
    checker: &'a Arc<Checker>,
    context: &'a Context,
    allocator: &'a Allocator,
    /// Writes words.
    fill: &'a Function,
    rng: Rng,
    streams: Vec<Stream>,
    groups: Vec<Group>,
    held: Vec<Held>,
    made: Vec<Made>,
    captures: Vec<Capture>,
    /// All memory is away.
    away: bool,
    numbers: u64,
}

/// The program's own: it does not fail.
fn ours<T>(act: impl FnOnce() -> T) -> T {
    own(|_| act())
}

fn text(error: impl std::fmt::Debug) -> String {
    format!("{error:?}")
}

pub fn attempt(setup: &Setup, steps: usize, sums: &Sums) -> Done {
    let mut rng = Rng::new(setup.seed);
    let config = SimConfig {
        mode: setup.lag.map_or(Mode::Manual, Mode::Lag),
        late_destructors: rng.chance(30),
        seed: setup.seed,
        ..SimConfig::with_devices(1, 4 << 30)
    };
    let sim = Simulator::new(config).map_err(text)?;
    let checker = Checker::new(sim.functions(), setup.seed);
    checker.enter();
    let limit = rng.chance(40).then(|| (60 + rng.below(200)) << 20);
    let wish = Config::new().policy(setup.policy).limit(limit);
    // SAFETY: the simulator's functions, behind ones of the same types.
    let driver = unsafe { Driver::from_functions(table::install(sim.functions())) };
    let context = driver.map_err(text)?.context(0).map_err(text)?;
    let allocator = Allocator::with_config(&context, wish).map_err(text)?;
    let streams = (0..STREAMS).map(|_| Stream::new(&context));
    let streams: Result<Vec<Stream>, _> = streams.collect();
    let words = concat!(include_str!("../../src/driver/words.ptx"), "\0");
    let words = std::ffi::CStr::from_bytes_with_nul(words.as_bytes()).map_err(text)?;
    let module = Module::from_ptx(&context, words).map_err(text)?;
    let fill = module.function(c"cualloc_fill").map_err(text)?;
    let mut scene = Scene {
        sim: &sim,
        checker: &checker,
        context: &context,
        allocator: &allocator,
        fill: &fill,
        rng,
        streams: streams.map_err(text)?,
        groups: Vec::new(),
        held: Vec::new(),
        made: Vec::new(),
        captures: Vec::new(),
        away: false,
        numbers: 0,
    };
    let known = scene.known()?;
    for _ in 0..1 + scene.rng.below(3) {
        scene.add_group()?;
    }
    checker.fail(setup.fault);
    let mut played = Ok(());
    for _ in 0..steps {
        played = scene.step();
        if played.is_err() {
            break;
        }
        sums.steps.fetch_add(1, Ordering::Relaxed);
    }
    let ended = played.and_then(|()| scene.end(known));
    drop(scene);
    drop((fill, module));
    sums.add(&checker);
    ended?;
    drop(allocator);
    drop(context);
    checker.tracker().take_violation().map_or(Ok(()), Err)?;
    sim.set_mode(Mode::Instant);
    after(&sim, &checker)
}

impl Scene<'_> {
    fn step(&mut self) -> Done {
        match self.rng.below(100) {
            0..6 => self.begin()?,
            6..50 if !self.captures.is_empty() => self.captured()?,
            50..56 if !self.captures.is_empty() => self.end_capture()?,
            56..66 => self.allocate()?,
            66..74 => self.work()?,
            74..80 => self.free_some(),
            80..88 => self.launch()?,
            88..91 => self.drop_made(),
            91..94 => self.complete(),
            94 => self.trim()?,
            95 => self.observe()?,
            96 => self.by_hand()?,
            97 => self.copy_made()?,
            98 => self.suspend()?,
            _ => self.turn()?,
        }
        self.finds_nothing()
    }

    fn finds_nothing(&self) -> Done {
        if let Some(report) = self.sim.take_reports().first() {
            return Err(format!("the simulator reports: {report}"));
        }
        self.checker.tracker().take_violation().map_or(Ok(()), Err)
    }

    /// What is not always possible.
    fn turn(&mut self) -> Done {
        match self.rng.below(5) {
            0 if self.groups.iter().filter(|g| g.pool.is_some()).count() < 4 => self.add_group(),
            1 => self.release(),
            2 => self.point(),
            3 => self.restore(),
            _ => self
                .allocator
                .check()
                .map_err(|e| format!("the heap is wrong: {e}")),
        }
    }

    /// Only what was made to fail, or memory that is short, is a reason.
    fn refused(&self, what: &str, error: &Error) -> Done {
        match self.checker.is_failing() || error.is_out_of_memory() {
            true => Ok(()),
            false => Err(format!("{what}: {error:?}")),
        }
    }

    /// A block of each stream, for as long as the program lasts: the allocator asks a stream that it keeps whether it
    /// captures before it waits for the context.
    fn known(&mut self) -> Result<Vec<Block>, String> {
        let mut known = Vec::new();
        for stream in 0..STREAMS {
            known.extend(self.obtain(None, stream)?);
        }
        Ok(known)
    }

    // ---- streams and order -----------------------------------------------------------------

    /// A stream that does not capture.
    fn stream(&mut self) -> Option<usize> {
        let free: Vec<usize> = (0..STREAMS).filter(|&s| !self.is_capturing(s)).collect();
        (!free.is_empty()).then(|| free[self.rng.index(free.len())])
    }

    fn is_capturing(&self, stream: usize) -> bool {
        self.captures.iter().any(|capture| capture.has(stream))
    }

    fn number(&self, stream: usize) -> usize {
        self.checker.tracker().number(self.streams[stream].raw())
    }

    /// A new event of the program's.
    fn event(&self) -> Result<usize, String> {
        let mut event: CUevent = std::ptr::null_mut();
        let entered = ours(|| self.context.enter()).map_err(text)?;
        // SAFETY: a context is current, the output is a local.
        let code = own(|f| unsafe { f.cuEventCreate.unwrap()(&mut event, 2) });
        ours(|| drop(entered));
        match code {
            CUresult::CUDA_SUCCESS => Ok(event as usize),
            code => Err(text(code)),
        }
    }

    /// What a stream does next with a group's memory comes behind what was done with it so far.
    fn follow(&self, group: usize, stream: usize) -> Done {
        let (event, stream) = (self.groups[group].tail, &self.streams[stream]);
        // SAFETY: both are alive.
        let code =
            own(|f| unsafe { f.cuStreamWaitEvent.unwrap()(stream.raw(), event as CUevent, 0) });
        match code {
            CUresult::CUDA_SUCCESS => Ok(()),
            code => Err(text(code)),
        }
    }

    /// A stream has done something with a group's memory.
    fn followed(&self, group: usize, stream: usize) -> Done {
        let (event, stream) = (self.groups[group].tail, &self.streams[stream]);
        // SAFETY: both are alive.
        let code = own(|f| unsafe { f.cuEventRecord.unwrap()(event as CUevent, stream.raw()) });
        match code {
            CUresult::CUDA_SUCCESS => Ok(()),
            code => Err(text(code)),
        }
    }

    fn complete(&mut self) {
        if self.rng.chance(10) {
            return self.sim.complete_all();
        }
        for _ in 0..1 + self.rng.below(4) {
            let ready = self.sim.ready_streams();
            if ready.is_empty() {
                return;
            }
            let stream = self.rng.pick(&ready);
            self.sim.complete_stream(stream, 1 + self.rng.index(6));
        }
    }

    fn observe(&mut self) -> Done {
        let Some(stream) = self.stream() else {
            return Ok(());
        };
        let stream = self.streams[stream].clone();
        ours(|| stream.synchronize()).map_err(text)
    }

    fn trim(&mut self) -> Done {
        let trimmed = match self.rng.chance(50) {
            true => self.allocator.trim(0),
            false => self.allocator.empty_cache(),
        };
        match trimmed {
            Err(Error::Suspended) if self.away => Ok(()),
            Err(error) => self.refused("a trim was refused", &error),
            Ok(_) => Ok(()),
        }
    }

    // ---- pools -----------------------------------------------------------------------------

    fn add_group(&mut self) -> Done {
        if self.away {
            return Ok(());
        }
        let pool = match self.allocator.graph_pool() {
            Ok(pool) => Some(pool),
            Err(error) => return self.refused("no pool", &error),
        };
        self.numbers += 1;
        let group = Group {
            number: self.numbers,
            pool,
            tail: self.event()?,
            asleep: false,
            points: Vec::new(),
        };
        self.groups.push(group);
        Ok(())
    }

    /// A group whose memory is there, with a pool that is not released.
    fn group(&mut self) -> Option<usize> {
        let fits = |group: &Group| !group.asleep && group.pool.is_some();
        let groups = (0..self.groups.len()).filter(|&g| fits(&self.groups[g]));
        let groups: Vec<usize> = groups.collect();
        if groups.is_empty() || self.away {
            return None;
        }
        Some(groups[self.rng.index(groups.len())])
    }

    /// The pool of a group that was not released.
    fn pool(&self, group: usize) -> &GraphPool {
        self.groups[group].pool.as_ref().expect("not released")
    }

    /// No capture comes to a pool any more.
    fn release(&mut self) -> Done {
        if let Some(group) = self.group()
            && !self.captures.iter().any(|capture| capture.group == group)
        {
            drop(self.groups[group].pool.take());
            self.groups[group].points.clear();
        }
        Ok(())
    }

    // ---- graphs ----------------------------------------------------------------------------

    fn launch(&mut self) -> Done {
        let Some(stream) = self.stream() else {
            return Ok(());
        };
        let some: Vec<usize> = (0..self.made.len())
            .filter(|&at| {
                let made = &self.made[at];
                !self.away && !self.groups[made.group].asleep && !made.execs.is_empty()
            })
            .collect();
        if some.is_empty() {
            return Ok(());
        }
        let at = some[self.rng.index(some.len())];
        let group = self.made[at].group;
        self.follow(group, stream)?;
        let exec = self.rng.index(self.made[at].execs.len());
        let (exec, on) = (&mut self.made[at].execs[exec], &self.streams[stream]);
        // SAFETY: the memory is the graph's, and launches of its pools are ordered.
        ours(|| unsafe { exec.launch(on) }).map_err(text)?;
        self.followed(group, stream)
    }

    /// Graphs and executables go one by one.
    fn drop_made(&mut self) {
        if self.made.is_empty() {
            return;
        }
        let at = self.rng.index(self.made.len());
        let made = &mut self.made[at];
        match self.rng.below(3) {
            0 => drop(made.graph.take()),
            1 => drop(made.execs.pop()),
            _ if self.made.len() > 6 => drop(self.made.swap_remove(at)),
            _ => {}
        }
    }

    /// One more executable, a clone in the place of a graph, or an executable that does what another graph says.
    fn copy_made(&mut self) -> Done {
        if self.made.is_empty() {
            return Ok(());
        }
        let at = self.rng.index(self.made.len());
        let group = self.made[at].group;
        let Some(graph) = &self.made[at].graph else {
            return Ok(());
        };
        match self.rng.below(3) {
            0 => {
                let clone = ours(|| graph.try_clone()).map_err(text)?;
                self.made[at].graph = Some(clone);
            }
            1 => {
                let exec = ours(|| graph.instantiate()).map_err(text)?;
                self.made[at].execs.push(exec);
            }
            _ => {
                let graph = ours(|| graph.try_clone()).map_err(text)?;
                let others = self.made.iter_mut().filter(|other| other.group == group);
                for exec in others.flat_map(|other| &mut other.execs) {
                    // Most have other nodes.
                    if ours(|| exec.update(&graph)).is_ok() {
                        break;
                    }
                }
            }
        }
        Ok(())
    }

    /// A graph that was not captured uses a block of a pool.
    fn by_hand(&mut self) -> Done {
        let Some(group) = self.group() else {
            return Ok(());
        };
        let fits = |held: &&Held| held.group == Some(group) && !held.frozen;
        let Some(held) = self.held.iter().find(fits) else {
            return Ok(());
        };
        let (at, bytes) = (held.block.ptr(), held.block.requested());
        let mut graph = ours(|| Graph::new(self.context)).map_err(text)?;
        // SAFETY: the graph is alive, and this thread's.
        match unsafe { self.pool(group).retain(graph.raw()) } {
            Ok(()) => {}
            Err(error) => return self.refused("a graph could not be retained", &error),
        }
        let number = self.groups[group].number;
        self.checker.tracker().retained(graph.raw(), number);
        let added = ours(|| -> Result<GraphExec, _> {
            // SAFETY: the graph is alive, and this thread's; the block is the program's.
            let first = unsafe { graph.add_memset(&[], at, 3, bytes) }?;
            // SAFETY: the same.
            unsafe { graph.add_memset(&[first], at, 4, bytes) }?;
            graph.instantiate()
        });
        self.made.push(Made {
            group,
            graph: Some(graph),
            execs: vec![added.map_err(text)?],
        });
        Ok(())
    }

    // ---- the end ---------------------------------------------------------------------------

    fn end(&mut self, known: Vec<Block>) -> Done {
        while !self.captures.is_empty() {
            self.end_capture()?;
        }
        self.checker.fail(None);
        for group in 0..self.groups.len() {
            self.resume(group)?;
        }
        while let Some(held) = self.held.pop() {
            self.free(held);
        }
        for block in known {
            self.checker.tracker().freed(block.ptr());
            drop(block);
        }
        self.made.clear();
        self.sim.complete_all();
        for stream in &self.streams {
            ours(|| stream.synchronize()).map_err(text)?;
        }
        self.finds_nothing()?;
        for group in self.groups.drain(..) {
            drop((group.points, group.pool));
            let event = group.tail as CUevent;
            // SAFETY: ours, and not used again.
            let _ = own(|f| unsafe { f.cuEventDestroy_v2.unwrap()(event) });
        }
        // The driver tells the end of a graph on a thread of its own.
        let begun = std::time::Instant::now();
        loop {
            match self.allocator.close() {
                Ok(()) => break,
                Err(_) if begun.elapsed().as_secs() < 60 => std::thread::yield_now(),
                Err(error) => return Err(format!("close at the end: {error:?}")),
            }
        }
        self.allocator
            .check()
            .map_err(|e| format!("the heap is wrong after close: {e}"))?;
        self.streams.clear();
        self.finds_nothing()
    }
}
