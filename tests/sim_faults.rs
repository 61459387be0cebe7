//! Counting, failing and logging of calls; lost contexts, shutdown, misuse.

mod sim_support;
use cualloc::driver::sys::CUresult;
use cualloc::sim::{ConfigError, CostTable, FailPlan, Leaks, Report, SimConfig, Simulator};
use sim_support::*;

const OUT_OF_MEMORY: CUresult = CUresult::CUDA_ERROR_OUT_OF_MEMORY;

#[test]
fn plans_fail_the_nth_call_by_name_or_of_all() {
    let bench = bench();
    bench
        .sim
        .fail(FailPlan::call("cuMemCreate", OUT_OF_MEMORY).unwrap().nth(2));
    bench
        .sim
        .fail(FailPlan::any(CUresult::CUDA_ERROR_UNKNOWN).nth(4));
    let codes: Vec<_> = (0..5).map(|_| bench.create(GRANULE).0).collect();
    assert_eq!(
        codes,
        [OK, OUT_OF_MEMORY, OK, CUresult::CUDA_ERROR_UNKNOWN, OK]
    );
    assert_eq!(bench.sim.leaks().handles, 3, "failed calls do nothing");
    bench.sim.fail(FailPlan::any(OUT_OF_MEMORY).times(2));
    bench.stream_id(std::ptr::null_mut());
    assert_eq!(bench.create(GRANULE).0, OUT_OF_MEMORY);
    assert_eq!(bench.create(GRANULE).0, OUT_OF_MEMORY);
    assert_eq!(bench.sim.clear_failures(), 0);
    assert!(FailPlan::call("cuNothing", OUT_OF_MEMORY).is_err());
}

#[test]
fn calls_are_counted_and_costed() {
    let bench = bench();
    bench.sim.reset_counters();
    bench.mapped(GRANULE);
    let event = bench.event();
    assert_eq!(bench.query(event), OK);
    let counters = bench.sim.counters();
    assert_eq!(counters.get("cuMemCreate"), 1);
    assert_eq!(counters.total(), 6);
    assert_eq!(counters.nanos, 6_600 + 700 + 19_000 + 55 + 99);
    bench.sim.set_costs(CostTable::slow_queries());
    assert_eq!(bench.query(event), OK);
    assert_eq!(bench.sim.counters().nanos - counters.nanos, 1_200);
}

#[test]
fn the_log_holds_calls_in_order() {
    let bench = bench();
    bench.sim.record_log(true);
    bench.alloc(100);
    let _ = call!(bench, cuMemFree_v2(77));
    let log = bench.sim.take_log();
    assert_eq!((log[0].call, log[0].result), ("cuMemAlloc_v2", OK));
    assert!(
        log[0].arguments.ends_with("bytesize=100"),
        "{}",
        log[0].arguments
    );
    assert_eq!((log[1].arguments.as_str(), log.len()), ("dptr=77", 2));
}

#[test]
fn double_frees_are_errors_and_reported() {
    let bench = bench();
    let memory = bench.alloc(100);
    assert_eq!(call!(bench, cuMemFree_v2(memory)), OK);
    bench.silent();
    assert_eq!(
        call!(bench, cuMemFree_v2(memory)),
        CUresult::CUDA_ERROR_INVALID_VALUE
    );
    bench.reported(|report| {
        matches!(
            report,
            Report::Destroyed {
                object: "allocation",
                ..
            }
        )
    });
    let event = bench.event();
    assert_eq!(call!(bench, cuEventDestroy_v2(event)), OK);
    assert_eq!(
        call!(bench, cuEventDestroy_v2(event)),
        CUresult::CUDA_ERROR_INVALID_HANDLE
    );
    bench.reported(|report| {
        matches!(
            report,
            Report::Destroyed {
                object: "event",
                ..
            }
        )
    });
}

#[test]
fn events_stay_in_their_context_but_waits_cross() {
    let bench = with(SimConfig::with_devices(2, 1 << 30));
    let event = bench.event();
    let own = bench.stream();
    let mut second = std::ptr::null_mut();
    assert_eq!(call!(bench, cuDevicePrimaryCtxRetain(&mut second, 1)), OK);
    assert_eq!(call!(bench, cuCtxSetCurrent(second)), OK);
    let other = bench.stream();
    let code = call!(bench, cuEventRecord(event, other));
    assert_eq!(code, CUresult::CUDA_ERROR_INVALID_HANDLE);
    bench.reported(|report| {
        matches!(
            report,
            Report::WrongContext {
                call: "cuEventRecord"
            }
        )
    });
    bench.record(event, own);
    bench.wait(other, event);
    bench.silent();
}

#[test]
fn a_lost_context_stays_lost_and_others_go_on() {
    let bench = with(SimConfig::with_devices(2, 1 << 30));
    let event = bench.event();
    let code = CUresult::CUDA_ERROR_ILLEGAL_ADDRESS;
    bench.sim.lose_context(0, code);
    let mut address = 0;
    assert_eq!(call!(bench, cuMemAlloc_v2(&mut address, 16)), code);
    let mut second = std::ptr::null_mut();
    assert_eq!(call!(bench, cuCtxSetCurrent(second)), OK);
    assert_eq!(call!(bench, cuDevicePrimaryCtxRetain(&mut second, 1)), OK);
    assert_eq!(call!(bench, cuCtxSetCurrent(second)), OK);
    assert_eq!(call!(bench, cuMemAlloc_v2(&mut address, 16)), OK);
    assert_eq!(bench.query(event), code);
}

#[test]
fn after_shutdown_and_after_the_end_every_call_says_so() {
    let bench = bench();
    bench.sim.shutdown();
    let ended = CUresult::CUDA_ERROR_DEINITIALIZED;
    assert_eq!(call!(bench, cuCtxSynchronize()), ended);
    let Bench { sim, table, .. } = bench;
    drop(sim);
    // SAFETY: the call takes no arguments.
    assert_eq!(unsafe { table.cuCtxSynchronize.unwrap()() }, ended);
}

#[test]
fn no_call_works_before_start_and_none_without_devices() {
    let sim = Simulator::new(SimConfig {
        devices: vec![],
        ..SimConfig::default()
    })
    .unwrap();
    let mut count = 9;
    // SAFETY: the outputs are locals.
    unsafe {
        let table = sim.functions();
        let early = table.cuDeviceGetCount.unwrap()(&mut count);
        assert_eq!(early, CUresult::CUDA_ERROR_NOT_INITIALIZED);
        assert_eq!(table.cuInit.unwrap()(0), CUresult::CUDA_ERROR_NO_DEVICE);
    }
    assert!(sim.driver().is_err());
}

#[test]
fn missing_functions_are_not_in_the_table() {
    let config = SimConfig {
        missing: vec!["cuMemMap".into()],
        ..SimConfig::default()
    };
    let sim = Simulator::new(config).unwrap();
    assert!(sim.functions().cuMemMap.is_none());
    assert!(sim.functions().cuMemCreate.is_some());
    let wrong = SimConfig {
        missing: vec!["cuNothing".into()],
        ..SimConfig::default()
    };
    assert!(matches!(
        Simulator::new(wrong),
        Err(ConfigError::UnknownFunction { .. })
    ));
}

#[test]
fn each_driver_has_its_own_counts_and_a_closed_one_leaves_nothing() {
    let sim = Simulator::new(SimConfig::with_devices(1, 1 << 30)).unwrap();
    let (first, second) = (sim.driver().unwrap(), sim.driver().unwrap());
    let device = first.device(0).unwrap();
    let context = cualloc::driver::Context::primary(&first, device).unwrap();
    let entered = context.enter().unwrap();
    let memory = entered.mem_alloc(1000).unwrap();
    assert_eq!(first.calls().get("cuMemAlloc_v2"), 1);
    assert_eq!(second.calls().get("cuMemAlloc_v2"), 0);
    assert_eq!(
        sim.leaks(),
        Leaks {
            allocations: 1,
            bytes: 1024,
            ..Leaks::default()
        }
    );
    // SAFETY: allocated above, not used since.
    unsafe { entered.mem_free(memory) }.unwrap();
    assert!(sim.leaks().is_empty());
}

#[test]
fn more_simulators_than_places_wait_for_one() {
    let threads: Vec<_> = (0..48)
        .map(|_| {
            std::thread::spawn(|| {
                Simulator::new(SimConfig::default())
                    .unwrap()
                    .driver()
                    .is_ok()
            })
        })
        .collect();
    assert!(threads.into_iter().all(|thread| thread.join().unwrap()));
}

#[test]
fn absurd_sizes_are_errors_and_absurd_ranges_reports() {
    let bench = bench();
    bench.manual();
    let stream = bench.stream();
    let (at, _) = bench.mapped(GRANULE);
    let mut out = 0;
    for bytes in [usize::MAX, usize::MAX - 511, 1 << 63] {
        assert_eq!(call!(bench, cuMemAlloc_v2(&mut out, bytes)), OUT_OF_MEMORY);
        assert_ne!(call!(bench, cuMemAllocAsync(&mut out, bytes, stream)), OK);
        assert_ne!(
            call!(bench, cuMemAddressReserve(&mut out, bytes & !4095, 0, 0, 0)),
            OK
        );
        assert_ne!(
            call!(
                bench,
                cuMemAddressReserve(&mut out, 4096, 1 << 63, !4095, 0)
            ),
            OK
        );
        assert_ne!(bench.create(bytes & !(GRANULE - 1)).0, OK);
        assert_ne!(call!(bench, cuMemUnmap(at, bytes)), OK);
        assert_ne!(bench.access(at, bytes), OK);
        assert_ne!(call!(bench, cuMemAddressFree(at, bytes)), OK);
        assert_ne!(call!(bench, cuMemsetD32Async(at, 1, bytes, stream)), OK);
    }
    bench.sim.take_reports();
    bench.memset(at, 1, usize::MAX, stream);
    bench.spin(u64::MAX, stream);
    bench.spin(u64::MAX, stream);
    assert_eq!(call!(bench, cuMemUnmap(at, GRANULE)), OK);
    bench.reported(|report| matches!(report, Report::InUse { .. }));
    bench.sync();
    bench.reported(|report| matches!(report, Report::Unmapped { .. }));
}
