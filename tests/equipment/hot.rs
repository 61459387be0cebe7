//! The operations whose instructions `benches/instructions.sh` counts, on the simulator:
//!
//! ```text
//! hot WORK COUNT
//! ```
//!
//! does as much as is needed to warm up, then COUNT operations more. The difference of two runs with
//! different counts is what the operations between them cost. For pairs it also writes `calls N`: how often the
//! driver was called, including queries that nothing else counts.

#[path = "crossing.rs"]
mod crossing;
#[path = "../../cli/src/bench/source.rs"]
mod source;
#[path = "../../cli/src/bench/workload.rs"]
mod workload;

use crossing::Crossing;
use cualloc::allocator::{GraphPool, Scope};
use cualloc::driver::{Context, Graph, Stream, sys};
use cualloc::record::{Recorder, Target};
use cualloc::sim::{Mode, SimConfig, Simulator};
use cualloc::trace::Op;
use cualloc::trace::generate::{Kind, Program};
use cualloc::{Allocator, Block, Config};
use source::{Handles, Pointers, Stack, typed, workspaces};
use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use workload::{Churn, Failure, Source, pairs};

const BYTES: usize = 4096;
/// Pairs and operations before those that count.
const WARM_PAIRS: usize = 1000;
/// Live blocks beside the pairs in a capture.
const CAPTURED_LIVE: usize = 256;
const WARM_CAPTURES: usize = 10;
const WARM_CHURN: usize = 60_000;
const WARM_ROWS: usize = 2000;
/// Rows of the program that is replayed.
const REPLAYED_ROWS: usize = 4000;
/// The sequence is drawn for as many, whatever is asked for, so that drawing it costs the same.
const MOST_CHURN: usize = 400_000;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let work = arguments.next().unwrap_or_default();
    let count = arguments.next().and_then(|count| count.parse().ok());
    let Some(count) = count else {
        eprintln!("usage: hot WORK COUNT");
        return ExitCode::from(2);
    };
    match run(&work, count) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {work}: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(work: &str, count: usize) -> Result<(), Failure> {
    let simulator = Simulator::new(SimConfig::default())?;
    let driver = simulator.driver()?;
    let context = driver.context(0)?;
    let allocator = Allocator::with_config(&context, Config::new())?;
    let streams = &[Stream::new(&context)?];
    let allocator = &allocator;
    let handles = Handles { allocator, streams };
    let sim = &simulator;
    match work {
        "pair" => pair(sim, &handles, count)?,
        "pair_raw" => {
            let streams = &[foreign(&context)?];
            pair(sim, &Pointers { allocator, streams }, count)?;
        }
        "pair_adopted" => {
            let streams = &[foreign(&context)?];
            // SAFETY: the stream lives as long as the process.
            unsafe { allocator.adopt_raw(streams[0].raw()) }?;
            pair(sim, &Pointers { allocator, streams }, count)?;
        }
        "pair_default" => {
            // SAFETY: the null handle is always valid.
            let streams = &[unsafe { Stream::from_raw(&context, std::ptr::null_mut()) }?];
            pair(sim, &Pointers { allocator, streams }, count)?;
        }
        "pair_after_capture" => {
            capture_and_end(allocator)?;
            pair(sim, &handles, count)?;
        }
        "pair_recorded" => {
            let recorder = Recorder::start(Target::Memory)?;
            pair(sim, &handles, count)?;
            drop(recorder);
        }
        "pair_while_capturing" => {
            let other = Stream::new(&context)?;
            let begun = std::thread::scope(|scope| scope.spawn(|| begin(&other)).join());
            begun.map_err(|_| "the thread that captures is gone")??;
            pair(sim, &handles, count)?;
        }
        "pair_captured" => captured(sim, allocator, (CAPTURED_LIVE, 0), count)?,
        "pair_captured_16" => captured(sim, allocator, (16, 0), count)?,
        "pair_captured_1024" => captured(sim, allocator, (1024, 0), count)?,
        "pair_captured_after_16" => captured(sim, allocator, (CAPTURED_LIVE, 16), count)?,
        "pair_captured_after_64" => captured(sim, allocator, (CAPTURED_LIVE, 64), count)?,
        "capture" => captures(sim, allocator, 1, count)?,
        "capture_after_16" => captures(sim, allocator, 16, count)?,
        "capture_after_64" => captures(sim, allocator, 64, count)?,
        "churn_op" => churn(&handles, &small(), count)?,
        "churn_harness" => churn(&Nothing, &small(), count)?,
        "churn_wide" => churn(&handles, &wide(), count)?,
        "churn_after" => {
            use_once(allocator)?;
            churn(&handles, &wide(), count)?;
        }
        "churn_equal" => churn(&handles, &equal(), count)?,
        "streams_3" => cross(sim, allocator, (1, 3), count)?,
        "streams_4x2" => cross(sim, allocator, (4, 2), count)?,
        "replay" => replay(allocator, &streams[0], count)?,
        "replay_after" => {
            Crossing::new(sim, allocator, (1, 3))?.run(WARM_ROWS)?;
            settle(sim);
            replay(allocator, &streams[0], count)?;
        }
        "stack" => pair(sim, &Stack::new(allocator, streams), count)?,
        "workspace" => pair(sim, &workspaces(allocator, streams), count)?,
        "large" | "large_2" => {
            if work == "large_2" {
                use_once(allocator)?;
            }
            let stream = foreign(&context)?;
            // SAFETY: the stream lives as long as the process.
            unsafe { allocator.adopt_raw(stream.raw()) }?;
            large(allocator, stream.raw(), count)?;
        }
        "typed_pool" => pair(sim, &typed(allocator, streams), count)?,
        _ => return Err("there is no such work".into()),
    }
    // Nothing is closed: live blocks end with the process, and their frees are not counted.
    std::process::exit(0)
}

/// Also counts the calls of the driver, for the difference of two runs.
fn pair<S: Source>(simulator: &Simulator, source: &S, count: usize) -> Result<(), Failure> {
    let calls = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&calls);
    simulator.before(move |_| {
        counter.fetch_add(1, Ordering::Relaxed);
    });
    pairs(source, BYTES, &source.stream(0), WARM_PAIRS + count)?;
    println!("calls {}", calls.load(Ordering::Relaxed));
    Ok(())
}

/// A number of graphs of a pool, which are kept.
fn earlier(
    allocator: &Allocator,
    pool: &GraphPool,
    stream: &Stream,
    graphs: usize,
) -> Result<Vec<Graph>, Failure> {
    let captured = (0..graphs).map(|graph| capture(allocator, pool, stream, 1 + graph));
    captured.collect()
}

/// Pairs in a capture, from a graph pool with a number of live blocks and of earlier graphs; each pair has a node
/// between.
fn captured(
    simulator: &Simulator,
    allocator: &Allocator,
    (live, graphs): (usize, usize),
    count: usize,
) -> Result<(), Failure> {
    let stream = &Stream::new(allocator.context())?;
    let pool = allocator.graph_pool()?;
    let _earlier = earlier(allocator, &pool, stream, graphs)?;
    let _scope = pool.enter(Scope::NextCapture)?;
    begin(stream)?;
    let live: Result<Vec<Block>, _> = (0..live)
        .map(|_| allocator.allocate(BYTES, stream))
        .collect();
    let _live = live?;
    let calls = Counted::new(simulator);
    for _ in 0..WARM_PAIRS + count {
        let block = allocator.allocate(BYTES, stream)?;
        // SAFETY: the block is as long.
        unsafe { stream.memset(block.ptr(), 0, BYTES) }?;
    }
    calls.tell();
    // Nothing is given back: the capture is never ended.
    std::process::exit(0)
}

/// Whole captures in one pool, of one pair each, after a number of captures whose graphs are kept.
fn captures(
    simulator: &Simulator,
    allocator: &Allocator,
    graphs: usize,
    count: usize,
) -> Result<(), Failure> {
    let stream = &Stream::new(allocator.context())?;
    let pool = allocator.graph_pool()?;
    let earlier = earlier(allocator, &pool, stream, graphs)?;
    let calls = Counted::new(simulator);
    for _ in 0..WARM_CAPTURES + count {
        drop(capture(allocator, &pool, stream, 1)?);
    }
    calls.tell();
    drop(earlier);
    std::process::exit(0)
}

/// A graph of a number of pairs with a node between, whose first block stays until the end.
fn capture(
    allocator: &Allocator,
    pool: &GraphPool,
    stream: &Stream,
    pairs: usize,
) -> Result<Graph, Failure> {
    let scope = pool.enter(Scope::NextCapture)?;
    begin(stream)?;
    let first = allocator.allocate(BYTES, stream)?;
    for _ in 0..pairs {
        let block = allocator.allocate(BYTES, stream)?;
        // SAFETY: the block is as long.
        unsafe { stream.memset(block.ptr(), 0, BYTES) }?;
    }
    drop(first);
    let graph = stream.end_capture()?;
    drop(scope);
    Ok(graph)
}

/// The driver's calls, by name.
struct Counted(Arc<Mutex<BTreeMap<&'static str, u64>>>);

impl Counted {
    fn new(simulator: &Simulator) -> Counted {
        let counts = Counted(Arc::default());
        let calls = Arc::clone(&counts.0);
        simulator.before(move |call| {
            if let Ok(mut calls) = calls.lock() {
                *calls.entry(call.call).or_default() += 1;
            }
        });
        counts
    }

    fn tell(&self) {
        let Ok(calls) = self.0.lock() else {
            return;
        };
        println!("calls {}", calls.values().sum::<u64>());
        for (name, count) in calls.iter() {
            println!("{name} {count}");
        }
    }
}

/// Rows of a program whose blocks cross streams: also says how many operations there were, which calls of the driver,
/// and how much was held.
fn cross(
    simulator: &Simulator,
    allocator: &Allocator,
    shape: (usize, usize),
    count: usize,
) -> Result<(), Failure> {
    let mut program = Crossing::new(simulator, allocator, shape)?;
    let operations = program.run(WARM_ROWS + count)?;
    println!("operations {operations}");
    let calls = program.calls();
    println!("calls {}", calls.values().sum::<u64>());
    for (name, count) in calls {
        println!("{name} {count}");
    }
    println!("held {}", program.held());
    Ok(())
}

/// All work of the device is complete from here on as soon as it was given to it.
fn settle(simulator: &Simulator) {
    simulator.set_mode(Mode::Instant);
    simulator.complete_all();
}

/// Replays a generated program on one stream a number of times; also returns the number of rows.
fn replay(allocator: &Allocator, stream: &Stream, times: usize) -> Result<(), Failure> {
    let mut program = Program::new(Kind::Random, 1);
    program.rows = Some(REPLAYED_ROWS);
    program.streams = Some(1);
    program.live = Some(1 << 30);
    let trace = program.trace("made up")?;
    for _ in 0..times {
        let mut blocks = Vec::with_capacity(trace.rows().len());
        for row in trace.rows() {
            match row.op {
                Op::Allocate => {
                    blocks.push(Some(allocator.allocate(row.bytes as usize, stream)?));
                }
                Op::Free => blocks[row.id] = None,
                _ => {}
            }
        }
    }
    println!("operations {}", times * trace.rows().len());
    Ok(())
}

/// A stream of other code, which never destroys it.
fn foreign(context: &Context) -> Result<Stream, Failure> {
    let entered = context.enter()?;
    let create = entered.driver().functions().cuStreamCreate;
    let mut raw = std::ptr::null_mut();
    // SAFETY: a context is current, and the output is a local. 1: non-blocking.
    let code = create.map(|create| unsafe { create(&mut raw, 1) });
    if code != Some(sys::CUresult::CUDA_SUCCESS) {
        return Err("no stream was made".into());
    }
    // SAFETY: it was made just now, and lives as long as the process.
    Ok(unsafe { Stream::from_raw(context, raw) }?)
}

const MODE: sys::CUstreamCaptureMode =
    sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;

/// Begins a capture that is never ended.
fn begin(stream: &Stream) -> Result<(), Failure> {
    Ok(stream.begin_capture(MODE)?)
}

/// Captures two streams, one through the crate, one behind its back (where an allocation meets it), and ends both.
fn capture_and_end(allocator: &Allocator) -> Result<(), Failure> {
    let context = allocator.context();
    let streams = [Stream::new(context)?, Stream::new(context)?];
    begin(&streams[0])?;
    drop(streams[0].end_capture()?);
    let functions = context.driver().functions();
    let (Some(begin), Some(end)) = (
        functions.cuStreamBeginCapture_v2,
        functions.cuStreamEndCapture,
    ) else {
        return Err("the driver knows no captures".into());
    };
    let raw = streams[1].raw();
    drop(allocator.allocate(BYTES, &streams[1])?);
    let mut graph = std::ptr::null_mut();
    // SAFETY: the stream is alive, and the output a local. The graph goes with the process.
    unsafe {
        if begin(raw, MODE) != sys::CUresult::CUDA_SUCCESS {
            return Err("no capture was begun".into());
        }
        if allocator.allocate(1 << 20, &streams[1]).is_ok() {
            return Err("the allocator did not notice a capture".into());
        }
        if end(raw, &mut graph) != sys::CUresult::CUDA_SUCCESS {
            return Err("no capture was ended".into());
        }
    }
    Ok(())
}

/// A second stream that is used once and lives on.
fn use_once(allocator: &Allocator) -> Result<(), Failure> {
    let stream = Stream::new(allocator.context())?;
    drop(allocator.allocate(BYTES, &stream)?);
    drop(allocator.allocate(1 << 20, &stream)?);
    std::mem::forget(stream);
    Ok(())
}

/// Blocks of stream caches.
fn small() -> Churn {
    Churn::log_uniform(4096, WARM_CHURN + MOST_CHURN, 1, 512, 64 << 10)
}

/// Mostly large blocks.
fn wide() -> Churn {
    Churn::log_uniform(2048, WARM_CHURN + MOST_CHURN, 2, 512, 32 << 20)
}

/// Blocks of one size that is large.
fn equal() -> Churn {
    Churn::of_thread_sized(0, WARM_CHURN + MOST_CHURN, 1 << 20)
}

fn churn<S: Source>(source: &S, work: &Churn, count: usize) -> Result<(), Failure> {
    if count > MOST_CHURN {
        return Err("so many operations are not drawn".into());
    }
    let mut slots = work.slots::<S>();
    work.run(source, &source.stream(0), &mut slots, WARM_CHURN + count)?;
    // How many blocks live at the end depends on the count: their frees must not be part of it.
    std::mem::forget(slots);
    Ok(())
}

/// Written where a large operation begins (first word: an allocation, second: a free) and ends (third), so that a trace
/// of memory accesses can be divided.
#[repr(align(64))]
struct Marks([AtomicU64; 8]);

static MARKS: Marks = Marks([const { AtomicU64::new(0) }; 8]);
const LARGE_SLOTS: usize = 64;

/// Allocations and frees of 1 to 8 MiB by pointer, in random slots, between marks once it is warm.
fn large(allocator: &Allocator, stream: sys::CUstream, count: usize) -> Result<(), Failure> {
    let mark = |place: usize| MARKS.0[place].store(1, Ordering::Relaxed);
    println!("marks {:p}", &MARKS);
    let mut slots = [None; LARGE_SLOTS];
    let mut random = 1u64;
    for _ in 0..WARM_PAIRS + count {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let slot = &mut slots[(random >> 58) as usize];
        let bytes = (1 << 20) + (random >> 32) as usize % (7 << 20);
        match slot.take() {
            Some(block) => {
                mark(1);
                // SAFETY: no work uses the block.
                unsafe { allocator.free_raw(block) }?;
            }
            None => {
                mark(0);
                // SAFETY: the stream is alive.
                *slot = Some(unsafe { allocator.allocate_raw(bytes, stream) }?);
            }
        }
        mark(2);
    }
    Ok(())
}

/// Blocks that cost nothing, so that what is left is the churn itself.
struct Nothing;

impl Source for Nothing {
    type Stream = ();
    type Block = u64;

    fn stream(&self, _index: usize) {}

    #[inline]
    fn allocate(&self, bytes: usize, (): &()) -> Result<u64, Failure> {
        Ok(std::hint::black_box(bytes as u64))
    }

    #[inline]
    fn free(&self, block: u64) -> Result<(), Failure> {
        std::hint::black_box(block);
        Ok(())
    }
}
