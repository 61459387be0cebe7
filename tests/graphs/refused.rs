//! Refused calls: they return a typed error, change nothing and invalidate no capture.

use super::support::*;
use cualloc::error::Cause;

#[test]
fn a_pool_that_was_released_is_refused() {
    pooled(|_rig, allocator, pool, [stream]| {
        let _scope = pool.enter(Scope::NextCapture).unwrap();
        let under_way = Capturing::begin(&stream, MODE);
        drop(allocator.allocate(MIB, &stream).unwrap());
        pool.release().unwrap();
        let released = |error| assert_eq!(graph_pool_error(error), GraphPoolError::Released);
        released(allocator.allocate(MIB, &stream).unwrap_err());
        drop(under_way.end().unwrap());
        released(pool.release().unwrap_err());
        released(pool.enter(Scope::Thread).unwrap_err());
        released(pool.footprint().unwrap_err());
        released(pool.checkpoint().unwrap_err());
    });
}

#[test]
fn a_capture_that_failed_leaves_its_memory() {
    pooled(|rig, allocator, pool, [stream, side]| {
        let scope = pool.enter(Scope::NextCapture).unwrap();
        let under_way = Capturing::begin(&stream, MODE);
        drop(used(rig, &allocator, 2 * MIB, &stream));
        let live = used(rig, &allocator, MIB, &stream);
        side.wait_for(&stream).unwrap();
        rig.stamp(live.ptr(), MIB, 1, &side);
        // The side stream was never joined.
        assert!(under_way.end().is_err());
        scope.leave().unwrap();
        assert_eq!(footprint(&allocator, &pool).live, MIB as u64);
        let graph = graph_of((rig, &allocator), &pool, 2 * MIB, &stream);
        assert_eq!(footprint(&allocator, &pool).physical, 4 * MIB as u64);
        run(&graph, &stream);
    });
}

/// G8: every driver call inside requests fails in turn, executed or not; the capture continues, and ends without an
/// error.
#[test]
fn a_request_that_fails_spoils_no_capture_and_changes_nothing() {
    packed(|rig| {
        let Some(sim) = rig.sim() else { return };
        let calls = [
            "cuMemCreate",
            "cuMemMap",
            "cuMemSetAccess",
            "cuUserObjectCreate",
            "cuGraphRetainUserObject",
            "cuStreamGetCaptureInfo_v3",
            "cuGraphNodeGetDependencies_v2",
        ];
        let codes = [
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY,
            sys::CUresult::CUDA_ERROR_INVALID_VALUE,
        ];
        for (call, code) in calls
            .into_iter()
            .flat_map(|call| codes.map(|code| (call, code)))
        {
            for (nth, executed) in (1..=3).flat_map(|nth| [(nth, false), (nth, true)]) {
                let allocator = rig.allocator();
                let (pool, stream) = (allocator.graph_pool().unwrap(), rig.stream());
                let held = sim.memory_in_use(0);
                let graph = capture(&pool, &stream, || {
                    let plan = FailPlan::call(call, code).unwrap().nth(nth);
                    sim.fail(if executed { plan.executed() } else { plan });
                    // Room for the later one needs a view of what is left, and new memory.
                    let mut failures = 0;
                    let mut blocks = Vec::new();
                    for bytes in [3 * MIB, 9 * MIB] {
                        let before = footprint(&allocator, &pool);
                        match allocator.allocate(bytes, &stream) {
                            Ok(block) => {
                                rig.stamp(block.ptr(), bytes, 1, &stream);
                                blocks.push(block);
                            }
                            Err(_) => {
                                failures += 1;
                                // Every byte is where it was.
                                let after = footprint(&allocator, &pool);
                                let figures = |of: Footprint| (of.live, of.free, of.physical);
                                assert_eq!(figures(after), figures(before), "{call} {nth}");
                            }
                        }
                    }
                    let fired = sim.clear_failures() == 0;
                    assert!(fired || nth > 1, "{call} was not made");
                    // Failed steps are repeated where that can help.
                    let retried = code == codes[0];
                    assert_eq!(
                        failures == 1,
                        fired && (!retried || failures > 0),
                        "{call} {nth}"
                    );
                    drop(blocks);
                    drop(used(rig, &allocator, MIB, &stream));
                });
                run(&graph, &stream);
                drop((graph, pool));
                rig.end(&allocator);
                // Memory that exists although the driver reported an error is lost.
                let lost = sim.memory_in_use(0) - held;
                assert!(
                    lost == 0 || executed && call == "cuMemCreate",
                    "{call} {nth}"
                );
                assert_eq!(sim.leaks().mappings, 0, "{call} {nth}");
            }
        }
    });
}

/// The same for what frees, questions and the way back to the driver call.
#[test]
fn failed_frees_outside_captures_are_repeated() {
    packed(|rig| {
        let Some(sim) = rig.sim() else { return };
        let code = sys::CUresult::CUDA_ERROR_INVALID_VALUE;
        let calls = [
            "cuEventRecord",
            "cuEventQuery",
            "cuMemUnmap",
            "cuMemRelease",
        ];
        for call in calls {
            let allocator = rig.allocator();
            let pool = allocator.graph_pool().unwrap();
            let [stream, other] = rig.streams();
            let mut output = None;
            let graph = capture(&pool, &stream, || {
                // The second lies in a view.
                let first = used(rig, &allocator, 2 * MIB, &stream);
                let beside = used(rig, &allocator, 2 * MIB, &stream);
                let last = used(rig, &allocator, 2 * MIB, &stream);
                drop((first, last));
                output = Some(used(rig, &allocator, 4 * MIB, &stream));
                drop(beside);
            });
            run(&graph, &stream);
            let mut block = output.take().unwrap();
            if call == "cuEventRecord" {
                sim.fail(FailPlan::call(call, code).unwrap());
                let refused = block.free().unwrap_err();
                assert_eq!(sim.clear_failures(), 0);
                allocator.check().unwrap();
                block = *refused.value;
            }
            let held = rig.hold(&stream);
            rig.stamp(block.ptr(), MIB, 1, &stream);
            drop(block);
            drop(graph);
            if call == "cuEventQuery" {
                sim.fail(FailPlan::call(call, code).unwrap());
                allocator.trim(0).unwrap_err();
                assert_eq!(sim.clear_failures(), 0);
            }
            assert_eq!(footprint(&allocator, &pool).physical, 6 * MIB as u64);
            held.release();
            rig.settle(&stream);
            await_leases(&allocator, &pool, 0);
            if call.starts_with("cuMem") {
                sim.fail(FailPlan::call(call, code).unwrap());
                allocator.trim(0).unwrap_err();
                assert_eq!(sim.clear_failures(), 0);
                // The pool serves, whatever is stuck.
                let graph = graph_of((rig, &allocator), &pool, 2 * MIB, &other);
                run(&graph, &other);
                allocator.check().unwrap();
            }
            await_leases(&allocator, &pool, 0);
            allocator.trim(0).unwrap();
            assert_eq!(footprint(&allocator, &pool).physical, 0, "{call}");
            drop(pool);
            // Memory that could not be released is lost.
            match call {
                "cuMemRelease" => rig.end(&allocator),
                _ => rig.close(&allocator),
            }
        }
    });
}

#[test]
fn a_block_in_a_single_handle_is_refused_by_a_pool_and_served_beside_it() {
    pooled(|rig, allocator, pool, [stream]| {
        let request = Request::new(5 * MIB).single_handle();
        let refused = || {
            let refused = allocator.allocate_with(request, &stream);
            assert_matches!(refused, Err(Error::NotSupported { .. }));
        };
        let graph = capture(&pool, &stream, || {
            refused();
            // Neither where the last one went.
            let [first, second] = [(); 2].map(|()| used(rig, &allocator, 3 * MIB, &stream));
            drop((first, second));
            refused();
            drop(used(rig, &allocator, 5 * MIB, &stream));
        });
        run(&graph, &stream);
        let scope = pool.enter(Scope::Stream(&stream)).unwrap();
        refused();
        drop(scope);
        drop(allocator.allocate_with(request, &stream).unwrap());
    });
}

/// The driver grants a pool no more addresses.
fn with_512_mib_of_addresses(test: impl Fn(&Rig)) {
    let short = SimConfig {
        address_space: 512 << 20,
        ..SimConfig::with_devices(1, 24 << 30)
    };
    only_on(Policy::Packed, short, |rig| {
        if rig.sim().is_some() {
            test(rig);
        }
    });
}

#[test]
fn a_pool_without_addresses_reports_that() {
    with_512_mib_of_addresses(|rig| {
        let allocator = rig.checked();
        let (pool, stream) = (allocator.graph_pool().unwrap(), rig.stream());
        let graph = capture(&pool, &stream, || {
            let picture = out_of_memory(allocator.allocate(600 * MIB, &stream).unwrap_err());
            assert_eq!(picture.cause(), Cause::Refused, "{picture}");
            let driver = picture.driver.unwrap();
            assert_eq!(driver.call(), "cuMemAddressReserve");
            drop(used(rig, &allocator, 60 * MIB, &stream));
        });
        run(&graph, &stream);
        drop((graph, pool));
        rig.settle(&stream);
        assert_trimmed(rig, &allocator);
    });
}

/// Two handles of 16 MiB would make a view of 32 MiB. There are addresses for 30 MiB, which the request has.
#[test]
fn a_pool_grows_if_a_view_has_no_addresses() {
    with_512_mib_of_addresses(|rig| {
        let allocator = rig.checked_with("tune.handle=16M".parse().unwrap());
        let (pool, stream) = (allocator.graph_pool().unwrap(), rig.stream());
        let scope = pool.enter(Scope::Thread).unwrap();
        let mut blocks: Vec<Block> = [16, 16, 16, 16, 16, 512 - 80 - 30]
            .map(|mib| used(rig, &allocator, mib * MIB, &stream))
            .into();
        blocks.remove(3);
        blocks.remove(1);
        rig.settle(&stream);
        let before = footprint(&allocator, &pool);
        assert_eq!((before.free, before.physical), (32 << 20, 482 << 20));
        let block = used(rig, &allocator, 30 * MIB, &stream);
        let after = footprint(&allocator, &pool);
        assert_eq!((after.free, after.physical), (32 << 20, 512 << 20));
        drop((block, blocks, scope, pool));
        rig.settle(&stream);
        assert_trimmed(rig, &allocator);
    });
}

/// A pool that grows inside a capture leaves the headroom of the device free, too.
#[test]
fn a_pool_grows_up_to_the_headroom() {
    packed(|rig| {
        let free = || rig.context.mem_info().unwrap().free as usize;
        let headroom = free() - 100 * MIB;
        let allocator = rig.checked_with(Config::new().headroom(headroom as u64 / 2));
        assert_eq!(allocator.stats().headroom, headroom as u64 / 2);
        let taken = allocator.allocate(headroom - headroom / 2, &rig.stream());
        let (pool, stream) = (allocator.graph_pool().unwrap(), rig.stream());
        let graph = capture(&pool, &stream, || {
            drop(used(rig, &allocator, 60 * MIB, &stream));
            let picture = out_of_memory(allocator.allocate(120 * MIB, &stream).unwrap_err());
            assert_eq!(picture.headroom, headroom as u64 / 2);
            assert!(matches!(picture.cause(), Cause::Device | Cause::Pools));
        });
        assert!(free() >= headroom / 2);
        drop((graph, pool, taken));
        rig.settle(&stream);
    });
}
