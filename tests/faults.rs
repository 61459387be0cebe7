//! Every driver call of every path fails in turn, alone and together with the next one.
//!
//! A scenario is prepared, its act is run with the k-th driver call failing, for each k that the act
//! reaches: so the call sites come from the runs themselves, and a new one is tested as soon as it
//! exists. After each failure the books agree, nothing is lost, and the act goes through once the
//! fault is gone. After a fatal code nothing touches the driver again.

use cualloc::driver::{Context, Driver, Stream, sys};
use cualloc::sim::{FailPlan, Mode, SimConfig, Simulator};
use cualloc::{Allocator, Block, Config, Error, Policy};

const MIB: usize = 1 << 20;

struct World {
    // Dropped in this order.
    blocks: Vec<Option<Block>>,
    streams: Vec<Stream>,
    alloc: Allocator,
    context: Context,
    driver: Driver,
    sim: Simulator,
}

type Act = fn(&mut World) -> Result<(), Error>;

/// A path through the allocator.
struct Scenario {
    name: &'static str,
    policies: &'static [Policy],
    memory: u64,
    limit: Option<u64>,
    mode: Mode,
    prepare: fn(&mut World),
    act: Act,
    /// The act runs out of memory by itself.
    hopeless: bool,
}

const BOTH: &[Policy] = &[Policy::Packed, Policy::Classic];
const PACKED: &[Policy] = &[Policy::Packed];
const CLASSIC: &[Policy] = &[Policy::Classic];

const PLAIN: Scenario = Scenario {
    name: "",
    policies: BOTH,
    memory: 8 << 30,
    limit: None,
    mode: Mode::Manual,
    prepare: |_| {},
    act: |_| Ok(()),
    hopeless: false,
};

impl World {
    fn new(scenario: &Scenario, policy: Policy) -> World {
        let mut config = SimConfig::with_devices(2, scenario.memory);
        config.mode = scenario.mode;
        let sim = Simulator::new(config).unwrap();
        let driver = sim.driver().unwrap();
        let context = Context::primary(&driver, driver.device(0).unwrap()).unwrap();
        let config = Config::new().policy(policy).limit(scenario.limit);
        let alloc = Allocator::with_config(&context, config).unwrap();
        let mut world = World {
            blocks: Vec::new(),
            streams: Vec::new(),
            alloc,
            context,
            driver,
            sim,
        };
        world.stream();
        (scenario.prepare)(&mut world);
        world
    }

    fn stream(&mut self) {
        self.streams.push(Stream::new(&self.context).unwrap());
    }

    fn take(&mut self, bytes: usize, stream: usize) -> Result<(), Error> {
        let block = self.alloc.allocate(bytes, &self.streams[stream])?;
        self.blocks.push(Some(block));
        Ok(())
    }

    /// Allocates and submits work that uses the block.
    fn put(&mut self, bytes: usize, stream: usize) {
        self.take(bytes, stream).unwrap();
        self.work(self.blocks.len() - 1, stream);
    }

    fn work(&self, block: usize, stream: usize) {
        let block = self.blocks[block].as_ref().unwrap();
        let entered = self.context.enter().unwrap();
        let stream = self.streams[stream].raw();
        // SAFETY: the block and the stream are alive.
        unsafe { entered.memset_d8(block.ptr(), 1, block.requested(), stream) }.unwrap();
    }

    fn free(&mut self, block: usize) -> Result<(), Error> {
        let Some(held) = self.blocks[block].take() else {
            return Ok(());
        };
        held.free().map_err(|refused| {
            self.blocks[block] = Some(refused.block);
            refused.error
        })
    }

    /// What was dropped and could not be freed is freed by the next call that may.
    fn freed_late(&self) -> Result<(), Error> {
        if self.alloc.stats().all.allocations.current > self.held().0 {
            self.sim.clear_failures();
            self.alloc.trim(u64::MAX)?;
        }
        Ok(())
    }

    /// Live blocks and their bytes.
    fn held(&self) -> (u64, u64) {
        let held = self.blocks.iter().flatten();
        held.fold((0, 0), |(n, bytes), b| {
            (n + 1, bytes + b.requested() as u64)
        })
    }

    /// What holds after every call, failed or not.
    fn judge(&self, at: &str) {
        self.alloc.check().unwrap_or_else(|e| panic!("{at}: {e}"));
        let all = self.alloc.stats().all;
        let figures = (all.allocations.current, all.requested.current);
        assert_eq!(
            self.held(),
            figures,
            "{at}: live blocks and requested bytes"
        );
        assert_eq!(
            self.sim.memory_in_use(0),
            all.reserved.current,
            "{at}: reserved bytes"
        );
        let reports = self.sim.reports();
        assert!(reports.is_empty(), "{at}: {}", reports[0]);
    }

    /// Frees everything, closes, and finds nothing left behind.
    fn end(mut self, at: &str, events_may_leak: bool) {
        self.blocks.clear();
        self.judge(&format!("{at}, all freed"));
        match self.alloc.close() {
            Ok(()) | Err(Error::Closed) => {}
            Err(error) => panic!("{at}: close: {error:?}"),
        }
        self.judge(&format!("{at}, closed"));
        // The last is dropped first: the simulator goes after all that uses it.
        let World {
            sim,
            driver,
            context,
            alloc,
            streams,
            blocks,
        } = self;
        sim.complete_all();
        drop((blocks, streams, alloc, context, driver));
        let mut leaks = sim.leaks();
        if events_may_leak {
            // The call that failed was the one that destroys them.
            (leaks.events, leaks.streams) = (0, 0);
        }
        assert!(leaks.is_empty(), "{at}: {leaks:?}");
    }
}

// ---- scenarios ---------------------------------------------------------------------------------

/// A hole between live blocks.
fn hole(w: &mut World) {
    (0..3).for_each(|_| w.put(12 * MIB, 0));
    w.free(1).unwrap();
    w.alloc.synchronize().unwrap();
    w.alloc.empty_cache().unwrap();
}

/// Two streams; memory of the second between live blocks, its work unfinished.
fn pending_elsewhere(w: &mut World) {
    w.stream();
    for stream in [0, 1, 0, 1, 0] {
        w.put(10 * MIB, stream);
    }
    w.free(1).unwrap();
    w.free(3).unwrap();
}

fn scenarios() -> Vec<Scenario> {
    vec![
        Scenario {
            name: "first small",
            act: |w| w.take(100, 0),
            ..PLAIN
        },
        Scenario {
            name: "first large",
            act: |w| w.take(12 * MIB, 0),
            ..PLAIN
        },
        Scenario {
            name: "first aligned",
            act: |w| {
                let block = w.alloc.allocate_aligned(5000, 2 * MIB, &w.streams[0])?;
                w.blocks.push(Some(block));
                Ok(())
            },
            ..PLAIN
        },
        Scenario {
            name: "growth behind free memory",
            policies: PACKED,
            prepare: |w| {
                w.put(3 * MIB, 0);
                w.put(3 * MIB, 0);
                w.free(1).unwrap();
            },
            act: |w| w.take(11 * MIB, 0),
            ..PLAIN
        },
        Scenario {
            name: "growth into a hole",
            policies: PACKED,
            prepare: hole,
            act: |w| w.take(12 * MIB, 0),
            ..PLAIN
        },
        Scenario {
            name: "reservation of another span",
            policies: PACKED,
            memory: 64 << 20,
            prepare: |w| {
                w.put(30 * MIB, 0);
                w.put(30 * MIB, 0);
                w.free(0).unwrap();
                w.alloc.synchronize().unwrap();
                w.alloc.empty_cache().unwrap();
            },
            act: |w| w.take(33 * MIB, 0),
            ..PLAIN
        },
        Scenario {
            name: "wait across streams",
            limit: Some(32 << 20),
            prepare: |w| {
                w.stream();
                w.put(30 * MIB, 1);
                w.free(0).unwrap();
            },
            act: |w| w.take(30 * MIB, 0),
            ..PLAIN
        },
        Scenario {
            name: "growth behind memory that needs a wait",
            policies: PACKED,
            limit: Some(32 << 20),
            prepare: |w| {
                w.stream();
                w.put(20 * MIB, 1);
                w.free(0).unwrap();
            },
            act: |w| w.take(30 * MIB, 0),
            ..PLAIN
        },
        Scenario {
            name: "poll with finished work",
            prepare: |w| {
                pending_elsewhere(w);
                w.sim.complete_all();
            },
            act: |w| w.take(10 * MIB, 0),
            ..PLAIN
        },
        Scenario {
            name: "host wait under a limit",
            limit: Some(50 << 20),
            prepare: pending_elsewhere,
            act: |w| w.take(20 * MIB, 0),
            ..PLAIN
        },
        Scenario {
            name: "release under a limit",
            limit: Some(50 << 20),
            prepare: |w| {
                pending_elsewhere(w);
                w.sim.complete_all();
                w.alloc.synchronize().unwrap();
            },
            act: |w| w.take(20 * MIB, 0),
            ..PLAIN
        },
        Scenario {
            name: "release for a full device",
            memory: 50 << 20,
            prepare: pending_elsewhere,
            act: |w| w.take(20 * MIB, 0),
            ..PLAIN
        },
        Scenario {
            name: "no memory left",
            memory: 64 << 20,
            prepare: |w| w.put(40 * MIB, 0),
            act: |w| w.take(40 * MIB, 0),
            hopeless: true,
            ..PLAIN
        },
        Scenario {
            name: "no memory below the limit",
            limit: Some(40 << 20),
            prepare: |w| {
                w.stream();
                w.put(20 * MIB, 0);
                w.put(20 * MIB, 1);
                w.free(1).unwrap();
            },
            act: |w| w.take(40 * MIB, 0),
            hopeless: true,
            ..PLAIN
        },
        Scenario {
            name: "hooks, then the whole context",
            limit: Some(20 << 20),
            prepare: |w| {
                w.put(16 * MIB, 0);
                w.free(0).unwrap();
                w.stream();
                w.alloc.add_relief_hook("none", |_| 0);
            },
            act: |w| {
                // SAFETY: the stream outlives the allocator's use of it.
                let ptr = unsafe { w.alloc.allocate_raw(12 * MIB, w.streams[1].raw()) }?;
                // SAFETY: just allocated; nobody uses it.
                unsafe { w.alloc.free_raw(ptr) }.ok();
                if w.alloc.owns(ptr) {
                    w.sim.clear_failures();
                    // SAFETY: as above; the fault kept it from being freed.
                    unsafe { w.alloc.free_raw(ptr) }?;
                }
                Ok(())
            },
            ..PLAIN
        },
        Scenario {
            name: "record a use",
            prepare: |w| {
                w.stream();
                w.put(MIB, 0);
            },
            act: |w| w.blocks[0].as_ref().unwrap().record_use(&w.streams[1]),
            ..PLAIN
        },
        Scenario {
            name: "record a stream",
            prepare: |w| {
                w.stream();
                w.put(MIB, 0);
            },
            act: |w| w.blocks[0].as_ref().unwrap().record_stream(&w.streams[1]),
            ..PLAIN
        },
        Scenario {
            name: "record a stream of another device",
            prepare: |w| {
                let device = w.driver.device(1).unwrap();
                let other = Context::primary(&w.driver, device).unwrap();
                w.streams.push(Stream::new(&other).unwrap());
                w.put(MIB, 0);
            },
            act: |w| {
                w.blocks[0].as_ref().unwrap().record_use(&w.streams[1])?;
                w.free(0)
            },
            ..PLAIN
        },
        Scenario {
            name: "free with markers",
            prepare: |w| {
                w.stream();
                w.put(4 * MIB, 0);
                w.blocks[0]
                    .as_ref()
                    .unwrap()
                    .record_stream(&w.streams[1])
                    .unwrap();
                w.take(100, 1).unwrap();
            },
            act: |w| w.free(0),
            ..PLAIN
        },
        Scenario {
            name: "drop with markers",
            prepare: |w| {
                w.stream();
                w.put(4 * MIB, 0);
                w.take(100, 1).unwrap();
            },
            act: |w| {
                w.blocks[0] = None;
                w.freed_late()
            },
            ..PLAIN
        },
        Scenario {
            name: "trim with finished work",
            prepare: |w| {
                pending_elsewhere(w);
                w.put(100, 0);
                w.put(100, 1);
                w.free(5).unwrap();
                w.free(6).unwrap();
                w.sim.complete_all();
            },
            act: |w| w.alloc.trim(20 << 20).map(drop),
            ..PLAIN
        },
        Scenario {
            name: "empty the cache with unfinished work",
            prepare: pending_elsewhere,
            act: |w| w.alloc.empty_cache().map(drop),
            ..PLAIN
        },
        Scenario {
            name: "empty the cache of all",
            prepare: |w| {
                pending_elsewhere(w);
                w.blocks.clear();
                w.alloc.synchronize().unwrap();
            },
            act: |w| w.alloc.empty_cache().map(drop),
            ..PLAIN
        },
        Scenario {
            name: "retire",
            prepare: |w| {
                pending_elsewhere(w);
                w.put(100, 1);
                w.put(100, 1);
                w.free(5).unwrap();
            },
            act: |w| match w.alloc.retire(&w.streams[1]) {
                Err(Error::UnknownStream { .. }) => Ok(()),
                result => result,
            },
            ..PLAIN
        },
        Scenario {
            name: "a new stream while another one was left",
            prepare: |w| {
                pending_elsewhere(w);
                w.streams.pop();
                w.stream();
            },
            act: |w| w.take(100, 1),
            ..PLAIN
        },
        Scenario {
            name: "reserve",
            act: |w| {
                w.alloc.reserve(12 * MIB, &w.streams[0])?;
                w.freed_late()
            },
            ..PLAIN
        },
        Scenario {
            name: "mark",
            prepare: pending_elsewhere,
            // SAFETY: a live stream.
            act: |w| unsafe { w.alloc.mark_raw(w.streams[0].raw()) },
            ..PLAIN
        },
        Scenario {
            name: "synchronise",
            prepare: pending_elsewhere,
            act: |w| w.alloc.synchronize(),
            ..PLAIN
        },
        Scenario {
            name: "default streams",
            act: |w| {
                let stream = Stream::per_thread_default(&w.context)?;
                let block = w.alloc.allocate(3 * MIB, &stream)?;
                w.blocks.push(Some(block));
                // SAFETY: the handle of the legacy default stream is always valid.
                let ptr = unsafe { w.alloc.allocate_raw(100, std::ptr::null_mut()) };
                w.sim.clear_failures();
                // SAFETY: just allocated; nobody uses it.
                ptr.and_then(|ptr| unsafe { w.alloc.free_raw(ptr) })
            },
            ..PLAIN
        },
        Scenario {
            name: "close",
            prepare: |w| {
                pending_elsewhere(w);
                w.put(100, 0);
                w.blocks.clear();
            },
            act: |w| match w.alloc.close() {
                Err(Error::Closed) => Ok(()),
                result => result,
            },
            ..PLAIN
        },
        Scenario {
            name: "close after raw streams",
            prepare: |w| {
                // SAFETY: the stream outlives the allocator's use of it.
                let ptr = unsafe { w.alloc.allocate_raw(100, w.streams[0].raw()) }.unwrap();
                // SAFETY: just allocated; nobody uses it.
                unsafe { w.alloc.free_raw(ptr) }.unwrap();
            },
            act: |w| match w.alloc.close() {
                Err(Error::Closed) => Ok(()),
                result => result,
            },
            ..PLAIN
        },
        Scenario {
            name: "a segment freed and made again",
            policies: CLASSIC,
            limit: Some(24 << 20),
            prepare: |w| {
                w.put(12 * MIB, 0);
                w.free(0).unwrap();
            },
            act: |w| w.take(14 * MIB, 0),
            ..PLAIN
        },
    ]
}

// ---- faults ------------------------------------------------------------------------------------

/// Queries that counts leave out, and which a plan for "any call" leaves alone.
const UNCOUNTED: [&str; 3] = ["cuStreamGetId", "cuStreamIsCapturing", "cuCtxGetCurrent"];

fn plan(name: Option<&str>, code: sys::CUresult) -> FailPlan {
    match name {
        None => FailPlan::any(code),
        Some(name) => FailPlan::call(name, code).unwrap(),
    }
}

/// Runs every scenario with every call failing; returns how many faults were placed.
fn sweep(
    code: sys::CUresult,
    times: u64,
    check: impl Fn(World, Option<Act>, &str, &[&str]),
) -> u64 {
    let mut faults = 0;
    for scenario in scenarios() {
        for policy in scenario.policies {
            for name in std::iter::once(None).chain(UNCOUNTED.into_iter().map(Some)) {
                for nth in 1.. {
                    let world = World::new(&scenario, *policy);
                    let at = format!(
                        "{} ({policy:?}), call {nth} of {} fails {times} times with {}",
                        scenario.name,
                        name.unwrap_or("any"),
                        code.0
                    );
                    world.sim.record_log(true);
                    world.sim.fail(plan(name, code).nth(nth).times(times));
                    let mut world = world;
                    let result = (scenario.act)(&mut world);
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
                        world.judge(&at);
                        world.end(&at, false);
                        break;
                    }
                    faults += 1;
                    if let Err(error) = &result {
                        let explained = match error {
                            Error::Driver(e) => e.code() == code,
                            Error::ContextLost(e) => e.code() == code && e.is_fatal(),
                            Error::OutOfMemory(_) => {
                                scenario.hopeless || code == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY
                            }
                            _ => false,
                        };
                        assert!(explained, "{at} ({hit:?}): {error:?}");
                    }
                    let again = result.is_err().then_some(scenario.act);
                    let at = format!("{at} ({})", hit.join(", "));
                    check(world, again, &at, &hit);
                }
            }
        }
    }
    faults
}

/// What holds after a fault that is over: nothing is lost, and the same request goes through.
fn recovers(mut world: World, again: Option<Act>, at: &str, hit: &[&str]) {
    world.judge(at);
    match again.map(|act| act(&mut world)) {
        None | Some(Ok(())) => {}
        Some(Err(Error::OutOfMemory(_))) if at.starts_with("no memory") => {}
        Some(Err(error)) => panic!("{at}: again: {error:?}"),
    }
    world.judge(&format!("{at}, again"));
    let leaking = ["cuEventDestroy_v2", "cuStreamDestroy_v2", "cuCtxSetCurrent"];
    let leaking = hit.iter().any(|call| {
        leaking.contains(call)
            || *call == "cuThreadExchangeStreamCaptureMode"
            || *call == "cuCtxGetCurrent"
    });
    world.end(at, leaking);
}

fn sweep_usual(times: u64) {
    let mut faults = 0;
    for code in [
        sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY,
        sys::CUresult::CUDA_ERROR_INVALID_VALUE,
        sys::CUresult::CUDA_ERROR_NOT_PERMITTED,
    ] {
        faults += sweep(code, times, recovers);
    }
    eprintln!("{faults} faults");
    assert!(faults > 1000);
}

/// R2, R15
#[test]
fn r2_r15_every_failing_call_leaves_everything_as_it_was() {
    sweep_usual(1);
}

/// R2
#[test]
fn r2_two_failing_calls_in_a_row_lose_nothing() {
    sweep_usual(2);
}

/// After a fatal code the allocator says that the context is lost, and calls nothing.
#[test]
fn fatal_codes_end_all_driver_calls() {
    for code in [
        sys::CUresult::CUDA_ERROR_LAUNCH_FAILED,
        sys::CUresult::CUDA_ERROR_UNKNOWN,
    ] {
        sweep(code, 1, |world, _, at, hit| {
            let World {
                sim,
                driver,
                context,
                alloc,
                streams,
                blocks,
            } = world;
            alloc.check().unwrap_or_else(|e| panic!("{at}: {e}"));
            // A failure while something is put back as it was is told to nobody: the next call
            // finds out.
            let silent = [
                "cuCtxSetCurrent",
                "cuCtxGetCurrent",
                "cuThreadExchangeStreamCaptureMode",
                "cuEventDestroy_v2",
                "cuStreamDestroy_v2",
                "cuMemGetInfo_v2",
            ];
            let before = sim.counters().total();
            match alloc.allocate(100, &streams[0]) {
                Err(Error::ContextLost(error)) => assert_eq!(error.code(), code, "{at}"),
                other => {
                    assert!(
                        hit.iter().all(|call| silent.contains(call)),
                        "{at}: {other:?}"
                    );
                    return;
                }
            }
            let lost = |result: Result<(), Error>| {
                assert!(
                    matches!(result, Err(Error::ContextLost(_))),
                    "{at}: {result:?}"
                );
            };
            lost(alloc.trim(0).map(drop));
            lost(alloc.synchronize());
            lost(alloc.reserve(100, &streams[0]));
            lost(alloc.close());
            for block in blocks.into_iter().flatten() {
                lost(block.record_use(&streams[0]));
                match block.free() {
                    Err(refused) => {
                        lost(Err(refused.error));
                        drop(refused.block);
                    }
                    Ok(()) => panic!("{at}: freed"),
                }
            }
            alloc.check().unwrap_or_else(|e| panic!("{at}: {e}"));
            drop(alloc);
            assert_eq!(sim.counters().total(), before, "{at}: driver calls");
            drop((streams, context, driver));
        });
    }
}
