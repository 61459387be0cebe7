//! Counting, failing and logging of calls; lost contexts, shutdown, misuse.

use crate::common::assert_matches;
use crate::support::*;
use cualloc::driver::sys::CUresult;
use cualloc::error::ConfigError;
use cualloc::sim::{FailPlan, Leaks, Mode, Report, SimConfig, Simulator};

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
    let before = bench.sim.calls();
    bench.mapped(GRANULE);
    let event = bench.event();
    assert_eq!(bench.query(event), OK);
    let calls = bench.sim.calls().since(&before);
    assert_eq!(calls.get("cuMemCreate"), 1);
    assert_eq!(calls.total(), 6);
    assert_eq!(calls.nanos(), 6_600 + 700 + 19_000 + 55 + 99);
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
    ok!(bench, cuMemFree_v2(memory));
    bench.silent();
    assert_eq!(
        call!(bench, cuMemFree_v2(memory)),
        CUresult::CUDA_ERROR_INVALID_VALUE
    );
    bench.destroyed("allocation");
    let event = bench.event();
    ok!(bench, cuEventDestroy_v2(event));
    assert_eq!(
        call!(bench, cuEventDestroy_v2(event)),
        CUresult::CUDA_ERROR_INVALID_HANDLE
    );
    bench.destroyed("event");
}

#[test]
fn events_stay_in_their_context_but_waits_cross() {
    let bench = with(SimConfig::with_devices(2, 1 << 30));
    let event = bench.event();
    let own = bench.stream();
    let mut second = std::ptr::null_mut();
    ok!(bench, cuDevicePrimaryCtxRetain(&mut second, 1));
    ok!(bench, cuCtxSetCurrent(second));
    let other = bench.stream();
    let code = call!(bench, cuEventRecord(event, other));
    assert_eq!(code, CUresult::CUDA_ERROR_INVALID_HANDLE);
    reported!(
        bench,
        Report::WrongContext {
            call: "cuEventRecord"
        }
    );
    bench.record(event, own);
    bench.wait(other, event);
    bench.silent();
}

#[test]
fn a_lost_context_stays_lost_and_others_keep_working() {
    let bench = with(SimConfig::with_devices(2, 1 << 30));
    let event = bench.event();
    let code = CUresult::CUDA_ERROR_ILLEGAL_ADDRESS;
    bench.sim.lose_context(0, code);
    let mut address = 0;
    assert_eq!(call!(bench, cuMemAlloc_v2(&mut address, 16)), code);
    let mut second = std::ptr::null_mut();
    ok!(bench, cuCtxSetCurrent(second));
    ok!(bench, cuDevicePrimaryCtxRetain(&mut second, 1));
    ok!(bench, cuCtxSetCurrent(second));
    ok!(bench, cuMemAlloc_v2(&mut address, 16));
    assert_eq!(bench.query(event), code);
}

#[test]
fn after_shutdown_every_call_returns_an_error() {
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
    assert_matches!(
        Simulator::new(wrong),
        Err(ConfigError::UnknownFunction { .. })
    );
}

#[test]
fn each_driver_has_its_own_counts_and_a_closed_one_leaves_nothing() {
    let sim = Simulator::new(SimConfig::with_devices(1, 1 << 30)).unwrap();
    let (first, second) = (sim.driver().unwrap(), sim.driver().unwrap());
    let device = first.device(0).unwrap();
    let context = cualloc::driver::Context::primary(&device).unwrap();
    let entered = context.enter().unwrap();
    let memory = entered.mem_alloc(1000).unwrap();
    assert_eq!(first.calls().get("cuMemAlloc_v2"), 1);
    assert_eq!(second.calls().get("cuMemAlloc_v2"), 0);
    assert_eq!(
        sim.leaks(),
        Leaks {
            allocations: 1,
            bytes: 2 << 20,
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
    ok!(bench, cuMemUnmap(at, GRANULE));
    reported!(bench, Report::InUse { .. });
    bench.sync();
    reported!(bench, Report::Unmapped { .. });
}

const ILLEGAL: CUresult = CUresult::CUDA_ERROR_ILLEGAL_ADDRESS;

/// An error of work is returned by the first call after it, and by all later ones.
#[test]
fn an_illegal_access_breaks_its_context_for_good() {
    let bench = bench();
    let (memory, stream, event) = (bench.alloc(64), bench.stream(), bench.event());
    let (at, handle) = bench.mapped(GRANULE);
    bench.manual();
    bench.memset(at + GRANULE as u64, 1, 16, stream);
    bench.memset(memory, 1, 16, stream);
    let (mut free, mut total) = (0, 0);
    let info = || call!(bench, cuMemGetInfo_v2(&mut free, &mut total));
    let mut info = info;
    assert_eq!(info(), OK, "under way");
    bench.sim.complete_all();
    reported!(bench, Report::Unmapped { .. });
    assert_ne!(bench.word(memory), 0x0101_0101, "later work does nothing");
    assert_eq!(info(), ILLEGAL, "an unrelated call");
    assert_eq!(bench.query(event), ILLEGAL);
    assert_eq!(call!(bench, cuMemFree_v2(memory)), ILLEGAL);
    assert_eq!(call!(bench, cuMemUnmap(at, GRANULE)), ILLEGAL);
    assert_eq!(call!(bench, cuMemRelease(handle)), ILLEGAL);
    assert_eq!(call!(bench, cuEventDestroy_v2(event)), ILLEGAL);
    assert_eq!(call!(bench, cuStreamDestroy_v2(stream)), ILLEGAL);
    bench.silent();
}

#[test]
fn a_failure_may_be_one_that_stays() {
    let bench = bench();
    let code = CUresult::CUDA_ERROR_LAUNCH_FAILED;
    let plan = FailPlan::call("cuMemCreate", code).unwrap();
    bench.sim.fail(plan.clone());
    assert_eq!(bench.create(GRANULE).0, code);
    let (first, handle) = bench.create(GRANULE);
    assert_eq!(first, OK, "once");
    bench.sim.fail(plan.sticky());
    assert_eq!(bench.create(GRANULE).0, code);
    assert_eq!(bench.create(GRANULE).0, code);
    assert_eq!(call!(bench, cuMemRelease(handle)), code);
}

/// The value of the handle destroyed last is reused first, for every kind of handle.
#[test]
fn a_call_may_be_executed_and_report_an_error() {
    let bench = bench();
    let code = CUresult::CUDA_ERROR_NOT_PERMITTED;
    let executed = |call| FailPlan::call(call, code).unwrap().executed();
    let leaks = || bench.sim.leaks();
    // Objects it creates exist, objects it destroys do not.
    bench.sim.fail(executed("cuMemCreate"));
    let (failed, handle) = bench.create(GRANULE);
    assert_eq!((failed, leaks().handles), (code, 1));
    bench.sim.fail(executed("cuMemRelease"));
    assert_eq!(call!(bench, cuMemRelease(handle)), code);
    assert_eq!(leaks().handles, 0);
    let (memory, _) = bench.mapped(GRANULE);
    bench.sim.fail(executed("cuMemUnmap"));
    assert_eq!(call!(bench, cuMemUnmap(memory, GRANULE)), code);
    assert_eq!(
        (leaks().mappings, bench.sim.read_memory(memory, 1)),
        (0, None)
    );
    // Submitted work is queued. A wait waits, but the host observes nothing by it.
    bench.sim.set_mode(Mode::Manual);
    let (stream, memory) = (bench.stream(), bench.alloc(100));
    bench.sim.fail(executed("cuMemsetD8Async"));
    assert_eq!(call!(bench, cuMemsetD8Async(memory, 7, 100, stream)), code);
    assert_eq!(bench.sim.pending().len(), 1);
    for wait in ["cuStreamSynchronize", "cuStreamQuery"] {
        bench.sim.fail(executed(wait));
    }
    assert_eq!(call!(bench, cuStreamSynchronize(stream)), code);
    assert_eq!(bench.sim.read_memory(memory, 1), Some(vec![7]));
    assert_eq!(call!(bench, cuStreamQuery(stream)), code);
    bench.silent();
    ok!(bench, cuMemFree_v2(memory));
    reported!(bench, Report::InUse { .. });
    // A failure that stays begins behind it.
    bench.sim.fail(executed("cuStreamDestroy_v2").sticky());
    assert_eq!(call!(bench, cuStreamDestroy_v2(stream)), code);
    assert_eq!(leaks().streams, 0);
    assert_eq!(call!(bench, cuCtxSynchronize()), code);
}

#[test]
fn handle_values_are_reused() {
    let bench = bench();
    let (first, second) = (bench.create(GRANULE).1, bench.create(GRANULE).1);
    for handle in [first, second] {
        ok!(bench, cuMemRelease(handle));
    }
    bench
        .sim
        .fail(FailPlan::call("cuMemCreate", OUT_OF_MEMORY).unwrap());
    assert_eq!(bench.create(GRANULE).0, OUT_OF_MEMORY);
    assert_eq!(bench.create(GRANULE).1, second);
    assert_eq!(bench.create(GRANULE).1, first);

    let module = || {
        let mut module = std::ptr::null_mut();
        let code = call!(bench, cuModuleLoadData(&mut module, c"".as_ptr().cast()));
        assert_eq!(code, OK);
        module
    };
    let old = module();
    ok!(bench, cuModuleUnload(old));
    assert_eq!(module(), old);

    let id = |context| {
        let mut id = 0;
        ok!(bench, cuCtxGetId(context, &mut id));
        id
    };
    let context = bench.sim.create_context(0).unwrap();
    let before = id(context);
    assert!(bench.sim.destroy_context(context));
    assert_eq!(bench.sim.create_context(0), Some(context));
    assert_ne!(id(context), before, "another one");
    bench.silent();
}

#[test]
fn a_context_that_ends_under_its_work_is_reported() {
    let bench = bench();
    let (stream, memory) = (bench.stream(), bench.alloc(64));
    bench.manual();
    bench.memset(memory, 1, 16, stream);
    assert!(bench.sim.reset_primary(0));
    reported!(bench, Report::Misuse { rule, .. } if rule.contains("context"));
    let code = call!(bench, cuStreamDestroy_v2(stream));
    assert_eq!(code, CUresult::CUDA_ERROR_INVALID_HANDLE);
    assert_eq!(
        call!(bench, cuCtxSetCurrent(bench.context.raw())),
        CUresult::CUDA_ERROR_INVALID_CONTEXT
    );
    assert!(!bench.sim.reset_primary(0), "it is gone");
    assert_eq!(bench.sim.memory_in_use(0), 0);
}

/// Two mebibytes are the least that the device gives; small allocations share them.
#[test]
fn plain_memory_is_taken_in_units() {
    let bench = bench();
    let unit = 2 << 20;
    let small = [0; 3].map(|_| bench.alloc(600 << 10));
    assert_eq!(bench.sim.memory_in_use(0), unit);
    assert_eq!(small[0] / unit, small[2] / unit);
    let more = bench.alloc(600 << 10);
    assert_eq!(bench.sim.memory_in_use(0), 2 * unit);
    let large = bench.alloc((2 << 20) + 1);
    assert_eq!(bench.sim.memory_in_use(0), 4 * unit);
    let (free, total) = {
        let info = bench.entered().mem_info().unwrap();
        (info.free, info.total)
    };
    assert_eq!(total - free, 4 * unit);
    ok!(bench, cuMemFree_v2(small[1]));
    assert_eq!(bench.sim.memory_in_use(0), 4 * unit);
    assert_eq!(bench.alloc(600 << 10), small[1], "room in a unit is used");
    for address in [small[0], small[1], small[2], more, large] {
        ok!(bench, cuMemFree_v2(address));
    }
    assert_eq!(bench.sim.memory_in_use(0), 0);
    bench.silent();
}

/// Page-locked memory that goes before a copy is done with it.
#[test]
fn host_memory_lives_until_the_copy_is_complete() {
    for registered in [false, true] {
        let bench = bench();
        let (stream, memory) = (bench.stream(), bench.alloc(64));
        let mut own = vec![1u8; 64];
        let mut host = own.as_mut_ptr().cast();
        if registered {
            ok!(bench, cuMemHostRegister_v2(host, 64, 0));
        } else {
            ok!(bench, cuMemHostAlloc(&mut host, 64, 0));
        }
        bench.manual();
        let copy = call!(bench, cuMemcpyHtoDAsync_v2(memory, host.cast(), 64, stream));
        assert_eq!(copy, OK);
        let code = match registered {
            true => call!(bench, cuMemHostUnregister(host)),
            false => call!(bench, cuMemFreeHost(host)),
        };
        assert_eq!(code, OK);
        reported!(bench, Report::InUse { .. });
        bench.sim.complete_all();
        reported!(bench, Report::HostGone { .. });
        assert_eq!(call!(bench, cuStreamQuery(stream)), ILLEGAL);
    }
}

/// Two copies to the same page-locked bytes that nothing orders.
#[test]
fn page_locked_memory_has_races_of_its_own() {
    let bench = bench();
    let (a, b, event) = (bench.stream(), bench.stream(), bench.event());
    let memory = bench.alloc(64);
    let mut host = std::ptr::null_mut();
    ok!(bench, cuMemHostAlloc(&mut host, 64, 0));
    bench.memset(memory, 1, 64, a);
    bench.sync();
    let download = |stream| call!(bench, cuMemcpyDtoHAsync_v2(host, memory, 64, stream));
    assert_eq!(download(a), OK);
    bench.record(event, a);
    bench.wait(b, event);
    assert_eq!(download(b), OK);
    bench.silent();
    assert_eq!(download(a), OK);
    reported!(bench, Report::Race { .. });
    bench.sync();
    ok!(bench, cuMemFreeHost(host));
    bench.silent();
}
