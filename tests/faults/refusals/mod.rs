//! Every driver call of what stands on the allocator fails in turn: columns, pools, resources, streams,
//! replays.
//!
//! A program is run with the k-th driver call failing, for each k that it reaches, so a new call site is
//! tested as soon as it exists. After each failure the error names it, nothing is lost, nothing was
//! used by two, and the program goes through once the fault is over.

mod programs;

use std::error::Error;
use std::panic::{AssertUnwindSafe, catch_unwind};

use cualloc::driver::{Context, Driver, sys};
use cualloc::sim::{FailPlan, Mode, SimConfig, Simulator};
use cualloc::{Allocator, Config, Policy};
use std::sync::Arc;

pub type Outcome = Result<(), Box<dyn Error>>;

pub struct Program {
    pub name: &'static str,
    pub run: fn(&World) -> Outcome,
}

/// Where a program runs. What it makes it also drops.
pub struct World {
    pub alloc: Allocator,
    pub context: Context,
    pub driver: Driver,
    pub sim: Arc<Simulator>,
}

/// Queries that counts leave out, and which a plan for "any call" leaves alone.
const UNCOUNTED: [&str; 3] = ["cuStreamGetId", "cuStreamIsCapturing", "cuCtxGetCurrent"];

/// Calls that destroy something, or put back what was: what they refuse to end lives on.
const ENDS: [&str; 8] = [
    "cuEventDestroy_v2",
    "cuStreamDestroy_v2",
    "cuCtxSetCurrent",
    "cuCtxGetCurrent",
    "cuThreadExchangeStreamCaptureMode",
    "cuMemFreeHost",
    "cuMemPoolDestroy",
    "cuModuleUnload",
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

    /// What holds after every run, once the fault is over.
    fn judge(&self, at: &str) -> Result<(), String> {
        self.sim.complete_all();
        self.alloc.check().map_err(|e| format!("{at}: {e}"))?;
        let reports = self.sim.take_reports();
        match reports.first() {
            Some(report) => Err(format!("{at}: {report}")),
            None => Ok(()),
        }
    }

    fn end(self, at: &str, ends: bool) -> Result<(), String> {
        // What was dropped and could not be freed is freed by the next call that may.
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
        // A driver's pool that is gone keeps its memory until the host has seen its last work.
        let synchronised = context.enter().and_then(|entered| entered.synchronize());
        synchronised.map_err(|e| format!("{at}: {e}"))?;
        drop((alloc, context, driver));
        let mut leaks = sim.leaks();
        if ends {
            if leaks.pools > 0 {
                leaks.bytes = 0;
            }
            (leaks.events, leaks.streams, leaks.host, leaks.pools) = (0, 0, 0, 0);
        }
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

struct Fault {
    code: sys::CUresult,
    times: u64,
    mode: Mode,
}

impl Fault {
    /// It is not over when the program ends, or the context is lost by it.
    fn lasts(&self) -> bool {
        self.times > 2 || self.code == sys::CUresult::CUDA_ERROR_LAUNCH_FAILED
    }
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
fn once(program: &Program, name: Option<&str>, nth: u64, fault: &Fault) -> Run {
    let Fault { code, times, mode } = *fault;
    let world = World::new(mode);
    let plan = match name {
        None => FailPlan::any(code),
        Some(name) => FailPlan::call(name, code).unwrap(),
    };
    world.sim.record_log(true);
    world.sim.fail(plan.nth(nth).times(times));
    let result = catch_unwind(AssertUnwindSafe(|| {
        let result = (program.run)(&world);
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
    let hit = log.iter().filter(|entry| entry.result == code);
    let hit: Vec<&str> = hit.map(|entry| entry.call).take(3).collect();
    let at = format!(
        "{} ({mode:?}), call {nth} of {} fails {times} times with {} ({})",
        program.name,
        name.unwrap_or("any"),
        code.0,
        hit.join(", ")
    );
    match (result, reached) {
        (Err(_), _) => Run::Faulty(Err(format!("{at}: panicked"))),
        (Ok(result), true) => Run::Faulty(judge_fault(program, world, result, &at, fault, &hit)),
        (Ok(result), false) => Run::Whole(judge_whole(world, result, program.name)),
    }
}

fn judge_whole(world: World, result: Outcome, at: &str) -> Result<(), String> {
    result.map_err(|error| format!("{at}: {}", crate::common::chain(&*error)))?;
    world.judge(at)?;
    world.end(at, false)
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
        && !fault.lasts()
        && !named(&**error, fault.code, fault.times)
    {
        return Err(format!(
            "{at}: not named: {}",
            crate::common::chain(&**error)
        ));
    }
    // Errors own what could not be given up.
    drop(result);
    if fault.lasts() {
        // What is dropped meanwhile may have to be given up.
        return Ok(());
    }
    let again = format!("{at}, again");
    (program.run)(&world).map_err(|e| format!("{again}: {}", crate::common::chain(&*e)))?;
    world.judge(&again)?;
    if fault.times > 1 {
        return Ok(());
    }
    let ends = hit.iter().any(|call| ENDS.contains(call));
    world.end(at, ends)
}

/// Blocks of the driver's pools that could not go are kept for the whole process, and whoever comes next tries
/// to free them: two sweeps at once would meet each other's.
static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());

fn sweep(fault: &Fault) {
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
                match once(program, name, nth, fault) {
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

/// R2
#[test]
fn r2_one_failing_call_loses_nothing() {
    sweep(&Fault {
        code: REFUSED,
        times: 1,
        mode: Mode::Manual,
    });
}

/// R2: work that completes meanwhile, and a code that has others try to help.
#[test]
fn r2_one_call_without_memory_loses_nothing() {
    sweep(&Fault {
        code: sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY,
        times: 1,
        mode: Mode::Lag(2),
    });
}

/// R2
#[test]
fn r2_two_failing_calls_in_a_row_spoil_nothing() {
    sweep(&Fault {
        code: REFUSED,
        times: 2,
        mode: Mode::Manual,
    });
}

/// R2
#[test]
fn r2_a_driver_that_refuses_for_ever_spoils_nothing() {
    sweep(&Fault {
        code: REFUSED,
        times: u64::MAX,
        mode: Mode::Manual,
    });
}

#[test]
fn fatal_codes_are_borne() {
    sweep(&Fault {
        code: sys::CUresult::CUDA_ERROR_LAUNCH_FAILED,
        times: 1,
        mode: Mode::Manual,
    });
}
