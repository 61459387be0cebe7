//! Every driver call of every path fails in turn, alone and together with the next one.
//!
//! A scenario is prepared, its act is run with the k-th driver call failing, for each k that the act
//! reaches: so the call sites come from the runs themselves, and a new one is tested as soon as it
//! exists. After each failure the heap agree, nothing is lost, and the act goes through once the
//! fault is over.
#![cfg(feature = "sim")]

#[path = "../common/mod.rs"]
mod common;
mod outside;
mod refusals;
mod scenarios;
mod views;
mod world;

use crate::common::prelude::*;
use cualloc::driver::DriverError;
use world::{Act, Scenario, World};

fn all() -> impl Iterator<Item = Scenario> {
    scenarios::scenarios().into_iter().chain(views::scenarios())
}

/// Queries that counts leave out, and which a plan for "any call" leaves alone.
const UNCOUNTED: [&str; 3] = ["cuStreamGetId", "cuStreamIsCapturing", "cuCtxGetCurrent"];

/// How a call fails.
#[derive(Clone, Copy)]
pub struct Fault {
    pub code: sys::CUresult,
    /// This number of calls in a row fail.
    pub times: u64,
    /// Each is executed before it reports the code.
    pub executed: bool,
}

impl Fault {
    /// A fault of calls of a name, or of all, from the `nth` on.
    pub fn plan(&self, name: Option<&str>, nth: u64) -> FailPlan {
        let plan = match name {
            None => FailPlan::any(self.code),
            Some(name) => FailPlan::call(name, self.code).unwrap(),
        };
        let mut plan = plan.nth(nth).times(self.times);
        if self.executed {
            plan = plan.executed();
            if DriverError::new("", self.code).is_fatal() {
                plan = plan.sticky();
            }
        }
        plan
    }
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let how = if self.executed { "after" } else { "before" };
        let (times, code) = (self.times, self.code.0);
        write!(f, "{times} times with {code} {how} it is executed")
    }
}

/// Runs scenarios with every call failing; returns how many faults were placed, and how many of them
/// failed a transaction as a whole.
fn sweep(
    scenarios: impl IntoIterator<Item = Scenario>,
    fault: Fault,
    check: impl Fn(World, Option<Act>, &str, &[&str]),
) -> (u64, u64) {
    let Fault { code, times, .. } = fault;
    let (mut faults, mut whole) = (0, 0);
    for scenario in scenarios {
        for policy in scenario.policies {
            for name in std::iter::once(None).chain(UNCOUNTED.into_iter().map(Some)) {
                for nth in 1.. {
                    let world = World::new(&scenario, *policy);
                    let at = format!(
                        "{} ({policy:?}), call {nth} of {} fails {fault}",
                        scenario.name,
                        name.unwrap_or("any"),
                    );
                    let before = scenario.atomic.then(|| world.picture());
                    let tags = world.tags();
                    world.sim.record_log(true);
                    world.sim.fail(fault.plan(name, nth));
                    let mut world = world;
                    let watched = world.alloc.clone();
                    let result = outside::looking_at(&watched, || (scenario.act)(&mut world));
                    drop(watched);
                    world.sim.clear_failures();
                    let log = world.sim.take_log();
                    world.sim.record_log(false);
                    let hit: Vec<&str> = log
                        .iter()
                        .filter(|e| e.result == code)
                        .map(|e| e.call)
                        .collect();
                    let reached = log.iter().filter(|e| match name {
                        Some(name) => e.call == name,
                        None => !UNCOUNTED.contains(&e.call),
                    });
                    if (reached.count() as u64) < nth {
                        // The act has fewer calls.
                        assert!(
                            result.is_ok() != scenario.hopeless,
                            "{at}: {result:?} without a fault"
                        );
                        assert!((scenario.proof)(&world), "{at}: not what it is about");
                        world.judge(&at);
                        world.end(&at);
                        break;
                    }
                    faults += 1;
                    world.lose(&hit, fault.executed);
                    if let Err(error) = &result {
                        let explained = match error {
                            Error::Driver(e) => e.code() == code,
                            Error::ContextLost(e) => e.code() == code && e.is_fatal(),
                            // Where others could have helped, it names what failed first.
                            Error::OutOfMemory(oom) => {
                                scenario.hopeless
                                    || code == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY
                                    || oom.driver.is_some_and(|e| e.code() == code)
                                    || world.has_lost()
                            }
                            _ => false,
                        };
                        assert!(explained, "{at} ({hit:?}): {error:?}");
                    }
                    if result.is_err() {
                        world.keeps_tags(&tags, &at);
                    }
                    if let (Some(before), Err(Error::Driver(_)), 1) = (before, &result, times) {
                        let after = world.picture();
                        assert_eq!(after.0, before.0, "{at} ({hit:?})");
                        assert_eq!(
                            world.explained(after.1),
                            world.explained(before.1),
                            "{at} ({hit:?})"
                        );
                        whole += 1;
                    }
                    let again = result.is_err().then_some(scenario.act);
                    let at = format!("{at} ({})", hit.join(", "));
                    check(world, again, &at, &hit);
                }
            }
        }
    }
    (faults, whole)
}

/// Invariants after a fault that is over: nothing is lost, and the same request goes through.
fn recovers(mut world: World, again: Option<Act>, at: &str, _: &[&str]) {
    world.judge(at);
    match again.map(|act| act(&mut world)) {
        None | Some(Ok(())) => {}
        Some(Err(Error::OutOfMemory(_))) if at.starts_with("no memory") || world.has_lost() => {}
        Some(Err(error)) => panic!("{at}: again: {error:?}"),
    }
    world.judge(&format!("{at}, again"));
    world.end(at);
}

const REFUSED: sys::CUresult = sys::CUresult::CUDA_ERROR_INVALID_VALUE;

fn sweep_usual(times: u64, executed: bool) {
    let (mut faults, mut whole) = (0, 0);
    let codes = [
        REFUSED,
        sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY,
        sys::CUresult::CUDA_ERROR_NOT_PERMITTED,
    ];
    // The effects of an executed call do not depend on the code.
    for code in codes.into_iter().take(if executed { 1 } else { 3 }) {
        let fault = Fault {
            code,
            times,
            executed,
        };
        let placed = sweep(all(), fault, recovers);
        faults += placed.0;
        whole += placed.1;
    }
    let looks = outside::looks();
    eprintln!("{faults} faults, {whole} failed a transaction, {looks} looks beside calls");
    assert!(faults > 1000 && (times > 1 || whole > 100) && looks > faults);
}

/// R2, R15
#[test]
fn r2_r15_every_failing_call_leaves_everything_as_it_was() {
    sweep_usual(1, false);
}

/// R2
#[test]
fn r2_two_failing_calls_in_a_row_lose_nothing() {
    sweep_usual(2, false);
}

/// R2: a driver may execute a call and report an error all the same.
#[test]
fn r2_every_executed_and_failing_call_corrupts_nothing() {
    sweep_usual(1, true);
}

/// R2: as above.
#[test]
fn r2_two_calls_that_are_executed_and_fail_corrupt_nothing() {
    sweep_usual(2, true);
}

/// R2
#[test]
fn r2_the_test_of_a_device_fails_at_every_call() {
    for executed in [false, true] {
        let test = Scenario {
            name: "test of the device",
            policies: world::PACKED,
            act: |w| w.alloc.test_views().map(drop),
            ..world::PLAIN
        };
        let fault = Fault {
            code: REFUSED,
            times: 1,
            executed,
        };
        let (faults, _) = sweep([test], fault, recovers);
        assert!(faults > 100, "{faults}");
    }
}

/// After a fatal code the allocator says that the context is lost, and calls nothing.
#[test]
fn fatal_codes_end_all_driver_calls() {
    // Captures of other tests make calls look at streams that are no longer watched here.
    common::alone(|| {
        for (code, executed) in [
            (sys::CUresult::CUDA_ERROR_LAUNCH_FAILED, false),
            (sys::CUresult::CUDA_ERROR_UNKNOWN, false),
            (sys::CUresult::CUDA_ERROR_UNKNOWN, true),
        ] {
            let fault = Fault {
                code,
                times: 1,
                executed,
            };
            sweep(all(), fault, |world, _, at, hit| {
                let World {
                    sim,
                    driver,
                    context,
                    alloc,
                    streams,
                    blocks,
                    ..
                } = world;
                alloc.check().unwrap_or_else(|e| panic!("{at}: {e}"));
                // A failure while something is restored is not reported: the next call
                // finds out.
                let silent = [
                    "cuCtxSetCurrent",
                    "cuCtxGetCurrent",
                    "cuThreadExchangeStreamCaptureMode",
                    "cuEventDestroy_v2",
                    "cuStreamDestroy_v2",
                    "cuMemGetInfo_v2",
                ];
                let before = sim.calls().total();
                match alloc.allocate(100, &streams[0]) {
                    Err(Error::ContextLost(error)) => assert_eq!(error.code(), code, "{at}"),
                    other => {
                        assert!(
                            hit.iter().all(|call| silent.contains(call)),
                            "{at}, {hit:?}: {other:?}"
                        );
                        return;
                    }
                }
                let lost = |result: Result<(), Error>| {
                    assert_matches!(result, Err(Error::ContextLost(_)), "{at}: {result:?}");
                };
                lost(alloc.raw_allocate(100, streams[0].raw()).map(drop));
                for block in blocks.iter().flatten() {
                    lost(alloc.raw_free(block.ptr()));
                }
                lost(alloc.trim(0).map(drop));
                lost(alloc.synchronize());
                lost(alloc.reserve(100, &streams[0]));
                lost(alloc.close());
                for block in blocks.into_iter().flatten() {
                    lost(block.record_use(&streams[0]));
                    match block.free() {
                        Err(refused) => {
                            lost(Err(refused.error));
                            drop(*refused.value);
                        }
                        Ok(()) => panic!("{at}: freed"),
                    }
                }
                alloc.check().unwrap_or_else(|e| panic!("{at}: {e}"));
                drop(alloc);
                assert_eq!(sim.calls().total(), before, "{at}: driver calls");
                drop((streams, context, driver));
            });
        }
    });
}
