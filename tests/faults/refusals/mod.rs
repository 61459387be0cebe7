//! Every driver call of what stands on the allocator fails in turn: columns, pools, resources, streams,
//! replays.
//!
//! A program is run with the k-th driver call failing, for each k that it reaches, so a new call site is
//! tested as soon as it exists. After each failure the error names it, nothing is lost, nothing was
//! used by two, and the program goes through once the fault is over.

mod programs;

use std::error::Error;
use std::panic::{AssertUnwindSafe, catch_unwind};

use cualloc::sim::Leaks;

use crate::Fault;
use crate::common::prelude::*;

pub type Outcome = Result<(), Box<dyn Error>>;

/// Its name, and what it does.
pub type Program = (&'static str, fn(&World) -> Outcome);

/// Where a program runs. What it makes it also drops.
pub struct World {
    pub alloc: Allocator,
    pub context: Context,
    pub driver: Driver,
    pub sim: Arc<Simulator>,
}

/// Queries that counts leave out, and which a plan for "any call" leaves alone.
const UNCOUNTED: [&str; 3] = ["cuStreamGetId", "cuStreamIsCapturing", "cuCtxGetCurrent"];

/// Calls that enter a context, or leave it: what they keep a drop from destroying is owed to the context.
const ENTERS: [&str; 3] = [
    "cuCtxSetCurrent",
    "cuCtxGetCurrent",
    "cuThreadExchangeStreamCaptureMode",
];

impl World {
    fn new(mode: Mode) -> World {
        let mut config = SimConfig::with_devices(1, 4 << 30);
        config.mode = mode;
        let sim = Arc::new(Simulator::new(config).unwrap());
        let driver = sim.driver().unwrap();
        let context = driver.context(0).unwrap();
        let config = Config::new().policy(Policy::Packed).self_test(false);
        let alloc = Allocator::with_config(&context, config).unwrap();
        World {
            alloc,
            context,
            driver,
            sim,
        }
    }

    /// Invariants after every run, once the fault is over.
    fn judge(&self, at: &str) -> Result<(), String> {
        self.sim.complete_all();
        self.alloc.check().map_err(|e| format!("{at}: {e}"))?;
        let reports = self.sim.take_reports();
        match reports.first() {
            Some(report) => Err(format!("{at}: {report}")),
            None => Ok(()),
        }
    }

    fn end(self, at: &str, lost: &Leaks) -> Result<(), String> {
        // Dropped blocks that could not be freed are freed by the next call that can.
        let trimmed = self.alloc.trim(u64::MAX);
        trimmed.map_err(|e| format!("{at}: trim: {e:?}"))?;
        let live = self.alloc.stats().all.allocations.current;
        if live > 0 {
            return Err(format!("{at}: {live} blocks are lost"));
        }
        self.alloc
            .close()
            .map_err(|e| format!("{at}: close: {e:?}"))?;
        let World {
            alloc,
            context,
            driver,
            sim,
        } = self;
        sim.complete_all();
        // A destroyed pool of the driver keeps its memory until the host has observed the completion of its last work.
        let synchronised = context.enter().and_then(|entered| entered.synchronize());
        synchronised.map_err(|e| format!("{at}: {e}"))?;
        drop((alloc, context, driver));
        let leaks = lost::unexplained(sim.leaks(), lost);
        if !leaks.is_empty() {
            return Err(format!("{at}: {leaks:?}"));
        }
        Ok(())
    }
}

fn named(error: &dyn Error, code: sys::CUresult, times: u64) -> bool {
    let text = crate::common::chain(error);
    if text == programs::LEFT {
        return times > 1;
    }
    // Where others could have helped, a want of memory says so; and a driver that does not know what it
    // is asked does not have it.
    let instead = ["out of memory on device", "not supported"];
    text.contains(&format!("({})", code.0)) || instead.iter().any(|what| text.contains(what))
}

/// Whether a fault is not over when the program ends, or the context is lost by it.
fn lasts(fault: &Fault) -> bool {
    fault.times > 2 || fault.code == sys::CUresult::CUDA_ERROR_LAUNCH_FAILED
}

enum Run {
    /// The program makes fewer calls.
    Whole(Result<(), String>),
    Faulty(Result<(), String>),
}

/// Lets late work run while the stack is in use where the program before kept its variables.
#[inline(never)]
fn canary(world: &World) {
    let words = std::hint::black_box([0x5au8; 16 << 10]);
    world.sim.advance_row();
    world.sim.advance_row();
    world.sim.complete_all();
    assert!(
        std::hint::black_box(&words)
            .iter()
            .all(|byte| *byte == 0x5a)
    );
}

/// One run with one fault: at the `nth` call of a name, or of all.
fn once(program: &Program, mode: Mode, (name, nth): (Option<&str>, u64), fault: &Fault) -> Run {
    let world = World::new(mode);
    world.sim.record_log(true);
    world.sim.fail(fault.plan(name, nth));
    let result = catch_unwind(AssertUnwindSafe(|| {
        let result = (program.1)(&world);
        canary(&world);
        result
    }));
    world.sim.clear_failures();
    let log = world.sim.take_log();
    world.sim.record_log(false);
    let counted = log.iter().filter(|entry| match name {
        Some(name) => entry.call == name,
        None => !UNCOUNTED.contains(&entry.call),
    });
    let reached = counted.count() as u64 >= nth;
    let hit = log.iter().filter(|entry| entry.result == fault.code);
    let hit: Vec<&str> = hit.map(|entry| entry.call).take(3).collect();
    let at = format!(
        "{} ({mode:?}), call {nth} of {} fails {fault} ({})",
        program.0,
        name.unwrap_or("any"),
        hit.join(", ")
    );
    match (result, reached) {
        (Err(_), _) => Run::Faulty(Err(format!("{at}: panicked"))),
        (Ok(result), true) => Run::Faulty(judge_fault(program, world, result, &at, fault, &hit)),
        (Ok(result), false) => Run::Whole(judge_whole(world, result, program.0)),
    }
}

fn judge_whole(world: World, result: Outcome, at: &str) -> Result<(), String> {
    result.map_err(|error| format!("{at}: {}", crate::common::chain(&*error)))?;
    world.judge(at)?;
    world.end(at, &Leaks::default())
}

fn judge_fault(
    program: &Program,
    world: World,
    result: Outcome,
    at: &str,
    fault: &Fault,
    hit: &[&str],
) -> Result<(), String> {
    world.judge(at)?;
    if let Err(error) = &result
        && !lasts(fault)
        && !named(&**error, fault.code, fault.times)
    {
        return Err(format!(
            "{at}: not named: {}",
            crate::common::chain(&**error)
        ));
    }
    // Errors own what could not be given up.
    drop(result);
    if lasts(fault) {
        // Blocks dropped meanwhile may be lost.
        return Ok(());
    }
    let again = format!("{at}, again");
    (program.1)(&world).map_err(|e| format!("{again}: {}", crate::common::chain(&*e)))?;
    world.judge(&again)?;
    if fault.times > 1 {
        return Ok(());
    }
    let mut lost = Leaks::default();
    for call in hit {
        lost::count(&mut lost, call, fault.executed);
        if ENTERS.contains(call) {
            (lost.events, lost.streams, lost.host, lost.pools) = (usize::MAX, usize::MAX, 1, 1);
        }
    }
    world.end(at, &lost)
}

/// Blocks of the driver's pools that could not be freed are kept for the whole process, and the next call tries to free
/// them: two concurrent sweeps would free each other's.
static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());

fn sweep(mode: Mode, fault: &Fault) {
    let _turn = TURN
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    let (mut faults, mut found) = (0, Vec::new());
    for program in programs::PROGRAMS {
        // Queries fail in one sweep.
        let queries = if fault.code == REFUSED && fault.times == 1 {
            &UNCOUNTED[..]
        } else {
            &[]
        };
        let names = queries.iter().map(|name| Some(*name));
        for name in std::iter::once(None).chain(names) {
            for nth in 1.. {
                match once(program, mode, (name, nth), fault) {
                    Run::Faulty(Ok(())) => faults += 1,
                    Run::Faulty(Err(wrong)) => found.push(wrong),
                    Run::Whole(Ok(())) => break,
                    Run::Whole(Err(wrong)) => {
                        found.push(wrong);
                        break;
                    }
                }
            }
        }
    }
    assert!(
        found.is_empty(),
        "{} of {}:\n{}",
        found.len(),
        faults + found.len(),
        found.join("\n")
    );
    assert!(faults > 2000, "{faults}");
}

const REFUSED: sys::CUresult = sys::CUresult::CUDA_ERROR_NOT_PERMITTED;

const ONCE: Fault = Fault {
    code: REFUSED,
    times: 1,
    executed: false,
};

/// R2
#[test]
fn r2_one_failing_call_loses_nothing() {
    sweep(Mode::Manual, &ONCE);
}

/// R2: a driver may execute a call and report an error all the same.
#[test]
fn r2_one_executed_and_failing_call_corrupts_nothing() {
    let executed = true;
    sweep(Mode::Manual, &Fault { executed, ..ONCE });
}

/// R2: work that completes meanwhile, and a code that has others try to help.
#[test]
fn r2_one_call_without_memory_loses_nothing() {
    let code = sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY;
    sweep(Mode::Lag(2), &Fault { code, ..ONCE });
}

/// R2
#[test]
fn r2_two_failing_calls_in_a_row_corrupt_nothing() {
    sweep(Mode::Manual, &Fault { times: 2, ..ONCE });
}

/// R2
#[test]
fn r2_a_driver_that_always_refuses_corrupts_nothing() {
    let times = u64::MAX;
    sweep(Mode::Manual, &Fault { times, ..ONCE });
}

#[test]
fn fatal_codes_are_handled() {
    let code = sys::CUresult::CUDA_ERROR_LAUNCH_FAILED;
    for executed in [false, true] {
        sweep(
            Mode::Manual,
            &Fault {
                code,
                executed,
                ..ONCE
            },
        );
    }
}
