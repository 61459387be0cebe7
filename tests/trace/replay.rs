//! Replays and capacity searches on the simulator: what they report, and that what goes wrong is
//! seen.

use cualloc::Error;
use cualloc::allocator::Policy;
use cualloc::driver::{Driver, sys};
use cualloc::sim::{DeviceConfig, FailPlan, SimConfig, Simulator};
use cualloc::trace::{self, Options, Report, Stage, Trace};
use std::ffi::{c_uint, c_void};
use std::fmt::Write;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

const MIB: u64 = 1 << 20;

fn simulator(memory: u64) -> Arc<Simulator> {
    let device = DeviceConfig {
        memory,
        ..DeviceConfig::default()
    };
    let simulator = Simulator::new(SimConfig {
        devices: vec![device],
        ..SimConfig::default()
    });
    Arc::new(simulator.unwrap())
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

fn options(change: impl FnOnce(&mut Options)) -> Options {
    let mut options = Options::default();
    change(&mut options);
    options
}

fn run(stage: &Stage, trace: &Trace, options: &Options) -> Report {
    trace::replay(stage, trace, options, &mut |_| {}).unwrap()
}

#[test]
fn every_replay_has_its_own_figures_and_progress_ends_at_the_last_row() {
    let trace = rolling(3000);
    for policy in [Policy::Packed, Policy::Classic] {
        let stage = Stage::simulated(&simulator(1 << 30), 0, 0).unwrap();
        let options = options(|options| {
            options.repeat = 3;
            options.policy = policy;
        });
        let mut seen = Vec::new();
        let report = trace::replay(&stage, &trace, &options, &mut |rows| seen.push(rows)).unwrap();
        assert!(report.is_clean(), "{report:?}");
        assert_eq!(report.policy, policy);
        assert_eq!(report.mismatches, None);
        assert_eq!(report.replays.len(), 3);
        assert_eq!(report.reserved_peak, report.replays[0].reserved_peak);
        assert!(report.reserved_peak >= trace.requested_peak());
        assert!(report.reserved_peak_max >= report.reserved_peak);
        assert!(report.replays[0].driver_calls.total() > 0);
        assert!(report.replays[0].driver_ns > 0);
        assert!(seen.is_sorted());
        assert_eq!(seen.last(), Some(&(3 * trace.rows().len() as u64)));
    }
}

#[test]
fn verification_over_lagging_streams_finds_nothing_wrong() {
    let trace = rolling(400);
    for lag in [0, 1, 7, 100] {
        for policy in [Policy::Packed, Policy::Classic] {
            let simulator = simulator(1 << 30);
            let stage = Stage::simulated(&simulator, 0, lag).unwrap();
            let options = options(|options| {
                options.repeat = 2;
                options.policy = policy;
                options.verify = true;
            });
            let report = run(&stage, &trace, &options);
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
    let stage = Stage::new(&driver.device(0).unwrap()).unwrap();
    let trace = trace("a,0,4096,0\na,1,512,0\nf,0,0,0\nf,1,0,0\n");
    let report = run(&stage, &trace, &options(|options| options.verify = true));
    // Block 0 was never filled; at most one of its words can have had the right value by chance.
    let mismatches = report.mismatches.unwrap();
    assert!((1023..=1024).contains(&mismatches), "{mismatches}");
    assert!(report.completed() && !report.is_clean());
    assert_eq!(LAUNCHES.load(Ordering::Relaxed), 4);
}

#[test]
fn a_limit_that_is_too_small_ends_the_replay_at_its_row_with_nothing_leaked() {
    let simulator = simulator(1 << 30);
    let stage = Stage::simulated(&simulator, 0, 0).unwrap();
    let trace = trace("a,0,8388608,0\na,1,8388608,0\nf,0,0,0\na,2,67108864,0\nf,2,0,0\n");
    let report = run(
        &stage,
        &trace,
        &options(|options| {
            options.limit = Some(40 * MIB);
            options.repeat = 3;
        }),
    );
    let failure = report.failure.as_ref().unwrap();
    assert_eq!((failure.replay, failure.row), (1, 4));
    assert!(failure.is_out_of_memory());
    assert!(report.replays.is_empty() && !report.completed());
    assert!(report.reserved_peak >= 16 * MIB && report.reserved_peak <= 40 * MIB);
    assert_eq!(report.leaked_bytes, 0);
    assert_eq!(simulator.memory_in_use(0), 0);
}

#[test]
fn a_device_that_takes_no_work_is_a_failure_of_the_row() {
    let simulator = simulator(1 << 30);
    let stage = Stage::simulated(&simulator, 0, 0).unwrap();
    let code = sys::CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
    simulator.fail(FailPlan::call("cuLaunchKernel", code).unwrap().nth(3));
    let trace = trace("a,0,8388608,0\na,1,8388608,0\nf,0,0,0\nf,1,0,0\n");
    let report = run(&stage, &trace, &options(|options| options.verify = true));
    let failure = report.failure.as_ref().unwrap();
    assert_eq!((failure.replay, failure.row), (1, 3));
    assert!(matches!(&failure.source, Error::Driver(error) if error.code() == code));
    assert!(!failure.is_out_of_memory());
    assert_eq!(simulator.memory_in_use(0), 0);
}

/// R2
#[test]
fn r2_a_replay_that_cannot_begin_leaves_nothing() {
    for call in ["cuMemsetD32Async", "cuStreamCreate"] {
        let simulator = simulator(1 << 30);
        let stage = Stage::simulated(&simulator, 0, 0).unwrap();
        let code = sys::CUresult::CUDA_ERROR_NOT_PERMITTED;
        let plan = FailPlan::call(call, code).unwrap();
        // The streams of the trace come after that of the word and that of the trial of virtual memory.
        simulator.fail(plan.nth(if call == "cuStreamCreate" { 3 } else { 1 }));
        let options = options(|options| options.verify = true);
        let failed = trace::replay(&stage, &rolling(10), &options, &mut |_| {});
        assert!(failed.is_err(), "{call}");
        assert_eq!(simulator.memory_in_use(0), 0, "{call}");
        assert!(simulator.reports().is_empty());
    }
}

#[test]
fn an_empty_trace_replays() {
    let stage = Stage::simulated(&simulator(1 << 30), 0, 0).unwrap();
    let report = run(
        &stage,
        &trace(""),
        &options(|options| options.verify = true),
    );
    assert!(report.is_clean(), "{report:?}");
    assert_eq!(report.reserved_peak, 0);
    assert_eq!(report.replays[0].ns_per_row, 0.0);
}

#[test]
fn capacity_is_the_smallest_limit_that_counts() {
    let stage = Stage::simulated(&simulator(4 << 30), 0, 0).unwrap();
    let trace = rolling(200);
    let mut tried = Vec::new();
    let search = trace::capacity(&stage, &trace, &Options::default(), &mut |_, limit| {
        tried.push(limit);
    })
    .unwrap();
    assert!(search.fault.is_none());
    assert_eq!(search.probes, tried.len());
    let limit = search.capacity.unwrap().limit;
    assert!(limit >= trace.requested_peak() && limit.is_multiple_of(trace::LIMIT_STEP));
    let completes = |limit: u64| {
        let options = options(|options| {
            options.limit = Some(limit);
            options.repeat = trace::REPLAYS;
        });
        run(&stage, &trace, &options).completed()
    };
    let counts = |limit: u64| {
        completes(limit)
            && trace::MARGINS
                .iter()
                .all(|margin| completes(limit + limit / 1000 * margin))
    };
    assert!(counts(limit));
    let less = limit - trace::LIMIT_STEP;
    assert!(less < trace.requested_peak() || !counts(less));
}

#[test]
fn capacity_gives_up_on_a_device_that_is_too_small() {
    let stage = Stage::simulated(&simulator(8 * MIB), 0, 0).unwrap();
    let trace = trace("a,0,67108864,0\nf,0,0,0\n");
    let search = trace::capacity(&stage, &trace, &Options::default(), &mut |_, _| {}).unwrap();
    assert!(search.capacity.is_none() && search.fault.is_none());
    assert_eq!(search.probes, 1);
}
