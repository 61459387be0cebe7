//! Replays and capacity searches on the simulator: what they report, and that what goes wrong is
//! seen.

use cualloc::Error;
use cualloc::allocator::{Config, Policy};
use cualloc::driver::{Context, Driver, sys};
use cualloc::sim::{FailPlan, Mode, SimConfig, SimDevice, Simulator};
use cualloc::trace::{Capacity, Replay, ReplayReport, Trace};
use std::ffi::{c_uint, c_void};
use std::fmt::Write;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

const MIB: u64 = 1 << 20;

fn simulator(memory: u64) -> Simulator {
    let device = SimDevice {
        memory,
        ..SimDevice::default()
    };
    let simulator = Simulator::new(SimConfig {
        devices: vec![device],
        ..SimConfig::default()
    });
    simulator.unwrap()
}

fn trace(rows: &str) -> Trace {
    let text = format!("op,id,bytes,stream\n{rows}");
    Trace::read("test", text.as_bytes()).unwrap()
}

/// Blocks of different sizes on two streams, each freed four allocations later; the last ones live
/// to the end.
fn rolling(blocks: usize) -> Trace {
    let mut rows = String::new();
    for id in 0..blocks {
        let bytes = (id as u64 % 7 + 1) * 3 * MIB + 12;
        writeln!(rows, "a,{id},{bytes},{}", id % 2).unwrap();
        if let Some(old) = id.checked_sub(4) {
            writeln!(rows, "f,{old},0,{}", old % 2).unwrap();
        }
    }
    trace(&rows)
}

/// The first device, whose work completes this number of rows after it was submitted.
fn device(simulator: &Simulator, lag: u64) -> Context {
    simulator.set_mode(match lag {
        0 => Mode::Instant,
        rows => Mode::Lag(rows),
    });
    simulator.context(0).unwrap()
}

fn run(replay: Replay<'_>, context: &Context) -> ReplayReport {
    replay.run(context).unwrap()
}

fn of(policy: Policy) -> Config {
    Config::new().policy(policy)
}

/// A replay requests again what the program got, and not what it did not get.
#[test]
fn failed_requests_are_not_repeated() {
    let blocks = "oom,0,1000000000000,5\na,0,4096,0\noom,0,1000000000000,0\nf,0,0,0\noom,0,1,0\n";
    // A program may fail at its first request, and hold blocks at its end.
    let cases = [
        (blocks, 1),
        ("oom,0,1000000000000,5\na,0,4096,0\n", 1),
        ("oom,0,1000000000000,5\noom,3,1,5\n", 0),
    ];
    for (rows, peak) in cases {
        let trace = trace(rows);
        let simulator = simulator(1 << 30);
        let report = run(Replay::new(&trace).verify(true), &device(&simulator, 0));
        assert!(report.is_clean(), "{report:?}");
        assert_eq!(report.stats.all.allocations.peak, peak, "{rows}");
    }
}

/// A replay that serves the requests that failed has room for each beside what was live, and says where it has not.
#[test]
fn failed_requests_are_served_if_requested() {
    let rows = "a,0,20971520,0\noom,0,41943040,7\nf,0,0,0\na,1,1048576,0\noom,0,10485760,0\n";
    let trace = trace(rows);
    assert_eq!(trace.streams(), [0]);
    assert_eq!(
        (trace.requested_peak(), trace.required_peak()),
        (20 << 20, 60 << 20)
    );
    let failed: Vec<_> = trace.failed_requests().collect();
    assert_eq!(failed, [(1, 40 << 20), (4, 10 << 20)]);
    for policy in [Policy::Packed, Policy::Classic] {
        let simulator = simulator(1 << 30);
        let serve = |limit: u64| {
            let config = of(policy).limit(Some(limit << 20));
            run(
                Replay::new(&trace).config(config).serve_failed(true),
                &device(&simulator, 0),
            )
        };
        let report = serve(100);
        assert!(report.is_clean(), "{report:?}");
        assert_eq!(report.stats.all.allocations.total_allocated, 4);
        let report = serve(58);
        assert_eq!(report.failed, Some((1, 2)), "{report:?}");
        let capacity = |on: bool| {
            let replay = Replay::new(&trace).config(of(policy)).serve_failed(on);
            replay
                .capacity(&device(&simulator, 0))
                .unwrap()
                .limit
                .unwrap()
        };
        assert!(capacity(false) < 40 << 20);
        assert!((60 << 20..80 << 20).contains(&capacity(true)));
    }
}

#[test]
fn every_replay_has_its_own_figures_and_progress_ends_at_the_last_row() {
    let trace = rolling(3000);
    for policy in [Policy::Packed, Policy::Classic] {
        let simulator = simulator(1 << 30);
        let mut seen = Vec::new();
        let replay = Replay::new(&trace).repeat(3).config(of(policy));
        let replay = replay.on_progress(|rows| seen.push(rows));
        let report = run(replay, &device(&simulator, 0));
        assert!(report.is_clean(), "{report:?}");
        assert_eq!(report.policy, policy);
        assert_eq!(report.mismatches, None);
        assert_eq!(report.passes.len(), 3);
        assert_eq!(report.reserved_peak, report.passes[0].reserved_peak);
        assert!(report.reserved_peak >= trace.requested_peak());
        assert!(report.reserved_peak_max() >= report.reserved_peak);
        assert!(report.passes[0].calls.total() > 0);
        assert!(report.passes[0].calls.nanos() > 0);
        assert!(seen.is_sorted());
        assert_eq!(seen.last(), Some(&(3 * trace.rows().len() as u64)));
    }
}

#[test]
fn a_report_may_have_the_first_and_the_last_pass_alone() {
    let trace = rolling(3000);
    let passes = |keep_all| {
        let simulator = simulator(1 << 30);
        let report = Replay::new(&trace)
            .repeat(5)
            .keep_all(keep_all)
            .run(&simulator.context(0).unwrap())
            .unwrap();
        assert!(report.is_clean(), "{report:?}");
        let passes = report.passes.iter();
        let figures: Vec<_> = passes.map(|p| (p.reserved_peak, p.calls.total())).collect();
        (figures, report.reserved_peak_max())
    };
    let ((all, most), (ends, most_of_ends)) = (passes(true), passes(false));
    assert_eq!(ends, [all[0], all[4]]);
    assert_eq!(most_of_ends, most);
    assert_eq!(all.iter().map(|(peak, _)| *peak).max(), Some(most));
}

#[test]
fn verification_over_lagging_streams_finds_nothing_wrong() {
    let trace = rolling(400);
    for lag in [0, 1, 7, 100] {
        for policy in [Policy::Packed, Policy::Classic] {
            let simulator = simulator(1 << 30);
            let replay = Replay::new(&trace)
                .repeat(2)
                .config(of(policy))
                .verify(true);
            let report = run(replay, &device(&simulator, lag));
            assert!(report.is_clean(), "lag {lag}: {report:?}");
            assert_eq!(report.mismatches, Some(0));
            assert_eq!(simulator.memory_in_use(0), 0);
        }
    }
}

static LAUNCH: OnceLock<Launch> = OnceLock::new();
static LAUNCHES: AtomicUsize = AtomicUsize::new(0);

type Launch = unsafe extern "C" fn(
    sys::CUfunction,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    sys::CUstream,
    *mut *mut c_void,
    *mut *mut c_void,
) -> sys::CUresult;

/// Loses the very first launch and passes all others on.
unsafe extern "C" fn lose_the_first_launch(
    function: sys::CUfunction,
    gx: c_uint,
    gy: c_uint,
    gz: c_uint,
    bx: c_uint,
    by: c_uint,
    bz: c_uint,
    shared: c_uint,
    stream: sys::CUstream,
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> sys::CUresult {
    if LAUNCHES.fetch_add(1, Ordering::Relaxed) == 0 {
        return sys::CUresult::CUDA_SUCCESS;
    }
    let launch = LAUNCH.get().unwrap();
    // SAFETY: the arguments are the caller's own.
    unsafe {
        launch(
            function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra,
        )
    }
}

#[test]
fn words_that_are_not_the_blocks_own_are_counted() {
    let simulator = simulator(1 << 30);
    let mut functions = *simulator.driver().unwrap().functions();
    LAUNCH.set(functions.cuLaunchKernel.unwrap()).unwrap();
    functions.cuLaunchKernel = Some(lose_the_first_launch);
    // SAFETY: the simulator's functions, one of them wrapped; the simulator outlives the driver.
    let driver = unsafe { Driver::from_functions(functions) }.unwrap();
    let trace = trace("a,0,4096,0\na,1,512,0\nf,0,0,0\nf,1,0,0\n");
    let context = driver.context(0).unwrap();
    let report = run(Replay::new(&trace).verify(true), &context);
    // Block 0 was never filled; at most one of its words can have had the right value by chance.
    let mismatches = report.mismatches.unwrap();
    assert!((1023..=1024).contains(&mismatches), "{mismatches}");
    assert!(report.failed.is_none() && !report.is_clean());
    assert_eq!(LAUNCHES.load(Ordering::Relaxed), 4);
}

#[test]
fn a_limit_that_is_too_small_ends_the_replay_at_its_row_with_nothing_leaked() {
    let simulator = simulator(1 << 30);
    let trace = trace("a,0,8388608,0\na,1,8388608,0\nf,0,0,0\na,2,67108864,0\nf,2,0,0\n");
    let config = Config::new().limit(Some(40 * MIB));
    let replay = Replay::new(&trace).repeat(3).config(config);
    let report = run(replay, &device(&simulator, 0));
    assert_eq!(report.failed, Some((1, 4)));
    assert!(report.error.as_ref().unwrap().is_out_of_memory());
    assert!(report.passes.is_empty());
    assert!(report.reserved_peak >= 16 * MIB && report.reserved_peak <= 40 * MIB);
    assert_eq!(report.leaked_bytes, 0);
    assert_eq!(simulator.memory_in_use(0), 0);
}

#[test]
fn each_row_is_reported_with_its_block_or_its_error() {
    let simulator = simulator(1 << 30);
    let trace = trace("a,0,8388608,0\na,1,8388608,0\nf,0,0,0\na,2,67108864,0\nf,2,0,0\n");
    let mut told = Vec::new();
    let replay = Replay::new(&trace).config(Config::new().limit(Some(40 * MIB)));
    let replay = replay.watch(|seen| {
        let live = seen.allocator.stats().all.requested.current;
        let block = seen.block.map(|block| block.requested());
        let failed = seen.error.is_some_and(Error::is_out_of_memory);
        told.push((seen.row, block, live, failed));
    });
    assert!(run(replay, &device(&simulator, 0)).failed.is_some());
    let eight = Some(8 << 20);
    let expected = [
        (0, eight, 8 * MIB, false),
        (1, eight, 16 * MIB, false),
        (2, None, 8 * MIB, false),
        (3, None, 8 * MIB, true),
    ];
    assert_eq!(told, expected);
}

#[test]
fn a_device_that_takes_no_work_is_a_failure_of_the_row() {
    let simulator = simulator(1 << 30);
    let context = device(&simulator, 0);
    let code = sys::CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
    simulator.fail(FailPlan::call("cuLaunchKernel", code).unwrap().nth(3));
    let trace = trace("a,0,8388608,0\na,1,8388608,0\nf,0,0,0\nf,1,0,0\n");
    let report = run(Replay::new(&trace).verify(true), &context);
    assert_eq!(report.failed, Some((1, 3)));
    assert!(matches!(&report.error, Some(Error::Driver(error)) if error.code() == code));
    assert_eq!(simulator.memory_in_use(0), 0);
}

/// R2
#[test]
fn r2_a_replay_that_cannot_begin_leaves_nothing() {
    for call in ["cuMemsetD32Async", "cuStreamCreate"] {
        let simulator = simulator(1 << 30);
        let context = device(&simulator, 0);
        let code = sys::CUresult::CUDA_ERROR_NOT_PERMITTED;
        let plan = FailPlan::call(call, code).unwrap();
        // The streams of the trace come after that of the word and that of the trial of virtual memory.
        simulator.fail(plan.nth(if call == "cuStreamCreate" { 3 } else { 1 }));
        let failed = Replay::new(&rolling(10)).verify(true).run(&context);
        assert!(failed.is_err(), "{call}");
        assert_eq!(simulator.memory_in_use(0), 0, "{call}");
        assert!(simulator.reports().is_empty());
    }
}

#[test]
fn an_empty_trace_replays() {
    let simulator = simulator(1 << 30);
    let trace = trace("");
    let report = run(Replay::new(&trace).verify(true), &device(&simulator, 0));
    assert!(report.is_clean(), "{report:?}");
    assert_eq!(report.reserved_peak, 0);
    assert_eq!(report.passes[0].nanos_per_row, 0.0);
}

#[test]
fn capacity_is_the_smallest_limit_that_counts() {
    let simulator = simulator(4 << 30);
    let context = device(&simulator, 0);
    let trace = rolling(200);
    let mut tried = Vec::new();
    let replay = Replay::new(&trace).on_progress(|limit| tried.push(limit));
    let search = replay.capacity(&context).unwrap();
    assert!(search.fault.is_none());
    assert_eq!(search.probes, tried.len());
    let limit = search.limit.unwrap();
    assert!(limit >= trace.requested_peak() && limit.is_multiple_of(Capacity::STEP));
    let completes = |limit: u64| {
        let config = Config::new().limit(Some(limit));
        let replay = Replay::new(&trace).repeat(Capacity::REPLAYS).config(config);
        run(replay, &context).failed.is_none()
    };
    let counts = |limit: u64| {
        completes(limit)
            && Capacity::MARGINS
                .iter()
                .all(|margin| completes(limit + limit / 1000 * margin))
    };
    assert!(counts(limit));
    let less = limit - Capacity::STEP;
    assert!(less < trace.requested_peak() || !counts(less));
}

#[test]
fn capacity_gives_up_on_a_device_that_is_too_small() {
    let simulator = simulator(8 * MIB);
    let trace = trace("a,0,67108864,0\nf,0,0,0\n");
    let search = Replay::new(&trace)
        .capacity(&device(&simulator, 0))
        .unwrap();
    assert!(search.limit.is_none() && search.fault.is_none());
    assert_eq!(search.probes, 1);
}
