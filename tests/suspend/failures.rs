//! Every call of the driver fails in turn: what was to be suspended is wholly there, or wholly away.

use super::support::*;

const CALLS: [&str; 13] = [
    "cuCtxSynchronize",
    "cuStreamCreate",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemHostAlloc",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuStreamSynchronize",
    "cuMemUnmap",
    "cuMemRelease",
    "cuMemCreate",
    "cuMemMap",
    "cuMemSetAccess",
];

/// One way to memory of both kinds, and into a graph pool.
fn world(rig: &Rig) -> (World<'_>, GraphPool, Block) {
    let world = World::of(rig, Config::new(), 3);
    world.allocator.set_limit(None);
    let pool = world.allocator.graph_pool().unwrap();
    let scope = pool.enter(Scope::Thread).unwrap();
    let block = world.allocator.allocate(4 * MIB, &world.stream).unwrap();
    drop(scope);
    rig.stamp(block.ptr(), 4 * MIB, 5, &world.stream);
    world.stream.synchronize().unwrap();
    (world, pool, block)
}

/// Fails a call in suspensions and resumes, a later one each time, a number of times in a row, executed or not; returns
/// how many of both failed.
fn fail_in_turn(call: &str, times: u64, executed: bool) -> (u32, u32) {
    let failed = std::cell::Cell::new((0, 0));
    packed(|rig| {
        let Some(sim) = rig.sim() else { return };
        let (world, _pool, block) = world(rig);
        let allocator = &world.allocator;
        let plan = |nth| {
            let plan = FailPlan::call(call, CUresult::CUDA_ERROR_NOT_PERMITTED).unwrap();
            let plan = plan.nth(nth).times(times);
            sim.fail(if executed { plan.executed() } else { plan });
        };
        // It leaves memory behind that cannot be given back.
        let loses = call
            == match executed {
                true => "cuMemCreate",
                false => "cuMemRelease",
            };
        let intact = || {
            allocator.check().unwrap();
            world.assert_intact(rig);
            assert_eq!(rig.mismatches(block.ptr(), 4 * MIB, 5, &world.stream), 0);
        };
        for nth in 1.. {
            plan(nth);
            let down = try_suspend(allocator, Select::Allocator, Contents::Pinned);
            let left = sim.clear_failures();
            if let Err(error) = &down {
                assert!(!matches!(error, Error::Suspended), "{error:?}");
                failed.update(|(down, up)| (down + 1, up));
                if times == 1 {
                    assert!(!is_suspended(allocator), "{call} {nth}: it was undone");
                }
            }
            if is_suspended(allocator) {
                let refused = allocator.allocate(512, &world.stream);
                assert_matches!(refused, Err(Error::Suspended), "{call} {nth}");
                resume(allocator);
            }
            intact();
            suspend(allocator, Contents::Pinned);
            if !loses {
                rig.assert_held(0);
            }
            plan(nth);
            let up = allocator.resume(Select::Allocator);
            let right = sim.clear_failures();
            if up.is_err() {
                failed.update(|(down, up)| (down, up + 1));
                assert!(is_suspended(allocator), "{call} {nth}: it is as it was");
                resume(allocator);
            }
            intact();
            if left > 0 && right > 0 {
                break;
            }
        }
        if loses {
            world.allocator.may_lose();
        }
    });
    failed.get()
}

#[test]
fn a_call_that_fails_is_undone() {
    if on_cuda() {
        return eprintln!("SKIPPED on cuda: no call of a real driver fails when asked to");
    }
    for call in CALLS {
        fail_in_turn(call, 1, true);
        let (down, up) = fail_in_turn(call, 1, false);
        eprintln!("{call}: {down} down, {up} up");
        match call {
            "cuMemUnmap" | "cuMemRelease" | "cuMemcpyDtoHAsync_v2" => assert!(down > 1),
            "cuMemCreate" | "cuMemMap" | "cuMemSetAccess" | "cuMemcpyHtoDAsync_v2" => {
                assert!(up > 1);
            }
            "cuStreamCreate" | "cuStreamSynchronize" => assert!(down > 0 && up > 0),
            _ => {}
        }
    }
}

#[test]
fn calls_that_fail_while_others_are_undone_lose_nothing() {
    for call in CALLS {
        for times in [2, 100] {
            fail_in_turn(call, times, false);
            fail_in_turn(call, times, true);
        }
    }
}

#[test]
fn an_end_that_fails_can_be_tried_again() {
    packed(|rig| {
        let Some(sim) = rig.sim() else { return };
        let (mut world, pool, block) = world(rig);
        suspend(&world.allocator, Contents::Drop);
        // Something is there again that cannot be taken away: it goes with the allocator.
        sim.fail(FailPlan::call("cuMemSetAccess", CUresult::CUDA_ERROR_NOT_PERMITTED).unwrap());
        let unmap = FailPlan::call("cuMemUnmap", CUresult::CUDA_ERROR_NOT_PERMITTED).unwrap();
        sim.fail(unmap.times(3));
        assert!(world.allocator.resume(Select::Allocator).is_err());
        sim.clear_failures();
        assert!(sim.memory_in_use(0) > 0 && is_suspended(&world.allocator));
        drop((block, pool));
        world.blocks.clear();
        sim.fail(FailPlan::call("cuMemUnmap", CUresult::CUDA_ERROR_NOT_PERMITTED).unwrap());
        assert!(world.allocator.close().is_err());
    });
}

/// A handle that a failed resume can neither keep nor unmap serves the next one.
#[test]
fn a_resume_after_one_that_could_not_be_undone_takes_no_memory_twice() {
    packed(|rig| {
        let Some(sim) = rig.sim() else { return };
        let (world, _pool, _block) = world(rig);
        // Free memory does not come back.
        suspend(&world.allocator, Contents::Pinned);
        resume(&world.allocator);
        let held = sim.memory_in_use(0);
        for unmaps in 1..4 {
            suspend(&world.allocator, Contents::Pinned);
            sim.fail(FailPlan::call("cuMemSetAccess", CUresult::CUDA_ERROR_NOT_PERMITTED).unwrap());
            let unmap = FailPlan::call("cuMemUnmap", CUresult::CUDA_ERROR_NOT_PERMITTED).unwrap();
            sim.fail(unmap.times(unmaps));
            assert!(world.allocator.resume(Select::Allocator).is_err());
            assert_eq!(sim.clear_failures(), 0);
            resume(&world.allocator);
            assert_eq!(sim.memory_in_use(0), held);
            world.assert_intact(rig);
        }
    });
}

/// A copy back whose end was not observed may still be running: the next attempt waits for it before it writes there.
#[test]
fn a_copy_with_unknown_end_is_waited_for() {
    packed(|rig| {
        let Some(sim) = rig.sim() else { return };
        let (world, _pool, _block) = world(rig);
        suspend(&world.allocator, Contents::Pinned);
        for (call, times) in [("cuStreamSynchronize", 2), ("cuCtxSynchronize", 1)] {
            let plan = FailPlan::call(call, CUresult::CUDA_ERROR_OUT_OF_MEMORY).unwrap();
            sim.fail(plan.times(times));
        }
        // It is retried immediately, or by the caller.
        if world.allocator.resume(Select::Allocator).is_err() {
            resume(&world.allocator);
        }
        sim.clear_failures();
        world.assert_intact(rig);
    });
}

/// Memory that is copied to the host is not used, and not given back, before the end of the copy was seen: it stays
/// suspended until a wait succeeds.
#[test]
fn a_copy_to_the_host_with_unknown_end_is_waited_for() {
    packed(|rig| {
        let Some(sim) = rig.sim() else { return };
        for times in [1, 2] {
            let (mut world, pool, block) = world(rig);
            sim.set_mode(Mode::Manual);
            let plan = |call| FailPlan::call(call, CUresult::CUDA_ERROR_NOT_PERMITTED).unwrap();
            sim.fail(plan("cuStreamSynchronize").times(2));
            // The first one comes before the copies.
            sim.fail(plan("cuCtxSynchronize").nth(2).times(times));
            let result = try_suspend(&world.allocator, Select::Allocator, Contents::Pinned);
            assert_matches!(result, Err(Error::Driver(_)));
            assert_eq!(sim.clear_failures(), 0);
            assert_eq!(is_suspended(&world.allocator), times == 2);
            if times == 2 {
                resume(&world.allocator);
            }
            drop((block, pool));
            world.blocks.clear();
            world.allocator.trim(0).unwrap();
            rig.assert_clean();
            sim.set_mode(Mode::Instant);
        }
    });
}

/// A failed wait for a copy back does not cause a wait for the context, which would invalidate a capture.
#[test]
fn a_failed_wait_for_a_copy_spoils_no_capture() {
    packed(|rig| {
        let Some(sim) = rig.sim() else { return };
        for times in [1, 2, 3] {
            let (world, _pool, _block) = world(rig);
            let other = rig.stream();
            suspend(&world.allocator, Contents::Pinned);
            let capture = Capturing::begin(&other, MODE);
            let code = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
            let plan = FailPlan::call("cuStreamSynchronize", code).unwrap();
            sim.fail(plan.times(times));
            let resumed = world.allocator.resume(Select::Allocator);
            sim.clear_failures();
            drop(capture.end().unwrap());
            if resumed.is_err() && is_suspended(&world.allocator) {
                resume(&world.allocator);
            }
            rig.assert_clean();
            world.assert_intact(rig);
        }
    });
}

#[test]
fn a_peer_whose_access_fails_can_be_added_again() {
    only_simulated_on(
        Policy::Packed,
        SimConfig::with_devices(2, 8 << 30),
        |rig, sim| {
            let (allocator, stream) = (rig.allocator(), rig.stream());
            let blocks = allocator.allocate_blocks(4, 24 * MIB, &stream);
            let peer = rig.driver.device(1).unwrap();
            let access = |at| rig.context.enter().unwrap().has_access(at, &peer).unwrap();
            for nth in 1..=2 {
                let plan = FailPlan::call("cuMemSetAccess", CUresult::CUDA_ERROR_NOT_PERMITTED);
                sim.fail(plan.unwrap().nth(nth));
                let error = allocator.add_peer(1).unwrap_err();
                assert_matches!(error, Error::Driver(_));
                // What grows now is not for the device.
                let block = allocator.allocate(40 * MIB, &stream).unwrap();
                assert!(!access(block.ptr()));
            }
            allocator.add_peer(1).unwrap();
            let grown = allocator.allocate(80 * MIB, &stream).unwrap();
            assert!(
                blocks
                    .iter()
                    .chain([&grown])
                    .all(|block| access(block.ptr()))
            );
        },
    );
}
