//! The operations whose instructions `benches/instructions.sh` counts, on the simulator:
//!
//! ```text
//! hot WORK COUNT
//! ```
//!
//! does as much as is needed to warm up, then COUNT operations more. The difference of two runs with
//! different counts is what the operations between them cost.

#[path = "../../cli/src/bench/source.rs"]
mod source;
#[path = "../../cli/src/bench/workload.rs"]
mod workload;

use cualloc::driver::Stream;
use cualloc::sim::{SimConfig, Simulator};
use cualloc::{Allocator, Config};
use source::{Handles, Pointers, Stack, Typed, Workspaces};
use std::process::ExitCode;
use workload::{Churn, Failure, Source, pairs};

const BYTES: usize = 4096;
/// Pairs and operations before those that count.
const WARM_PAIRS: usize = 1000;
const WARM_CHURN: usize = 60_000;
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
    match work {
        "pair" => pair(&handles, count)?,
        "pair_raw" => pair(&Pointers { allocator, streams }, count)?,
        "churn_op" => churn(&handles, &small(), count)?,
        "churn_harness" => churn(&Nothing, &small(), count)?,
        "churn_wide" => churn(&handles, &wide(), count)?,
        "churn_equal" => churn(&handles, &equal(), count)?,
        "stack" => pair(&Stack::new(allocator, streams), count)?,
        "workspace" => pair(&Workspaces::new(allocator, streams), count)?,
        "typed_pool" => pair(&Typed::new(allocator, streams), count)?,
        _ => return Err("there is no such work".into()),
    }
    // Nothing is closed: live blocks go with the process, and nobody counts their frees.
    std::process::exit(0)
}

fn pair(source: &impl Source, count: usize) -> Result<(), Failure> {
    pairs(source, BYTES, &source.stream(0), WARM_PAIRS + count)
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
