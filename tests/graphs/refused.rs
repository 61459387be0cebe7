//! What cannot be: errors with a type, nothing changed, and no capture spoilt.

use super::support::*;
use cualloc::driver::sys;
use cualloc::sim::FailPlan;

#[test]
fn a_pool_that_was_released_is_refused() {
    packed(|rig| {
        let allocator = rig.allocator();
        let (pool, stream) = (allocator.graph_pool().unwrap(), rig.stream());
        let scope = pool.enter(Scope::NextCapture).unwrap();
        stream.begin_capture(MODE).unwrap();
        drop(allocator.allocate(MIB, &stream).unwrap());
        pool.release().unwrap();
        let released = |error| assert_eq!(graph_pool_error(error), GraphPoolError::Released);
        released(allocator.allocate(MIB, &stream).unwrap_err());
        drop(stream.end_capture().unwrap());
        released(pool.release().unwrap_err());
        released(pool.enter(Scope::Thread).unwrap_err());
        released(pool.footprint().unwrap_err());
        released(pool.checkpoint().unwrap_err());
        drop(scope);
        drop(pool);
        rig.close(&allocator);
    });
}

#[test]
fn a_checkpoint_is_not_restored_while_memory_is_in_use() {
    packed(|rig| {
        let allocator = rig.allocator();
        let (pool, stream) = (allocator.graph_pool().unwrap(), rig.stream());
        let mut output = None;
        let graph = capture(&pool, &stream, || {
            output = Some(used(rig, &allocator, 2 * MIB, &stream));
        });
        let point = pool.checkpoint().unwrap();
        let held = rig.hold(&stream);
        rig.stamp(output.as_ref().unwrap().ptr(), MIB, 1, &stream);
        drop(output);
        // SAFETY: no block has come since.
        let restore = || unsafe { pool.restore(&point) };
        let error = graph_pool_error(restore().unwrap_err());
        let bytes = 2 * MIB as u64;
        assert_eq!(error, GraphPoolError::NotComplete { bytes });
        held.release();
        rig.settle(&stream);
        assert_eq!(restore().unwrap().revived.len(), 1);
        drop((graph, pool));
        rig.settle(&stream);
        rig.close(&allocator);
    });
}

#[test]
fn a_capture_that_failed_leaves_its_memory() {
    packed(|rig| {
        let allocator = rig.allocator();
        let pool = allocator.graph_pool().unwrap();
        let [stream, side] = rig.streams();
        let scope = pool.enter(Scope::NextCapture).unwrap();
        stream.begin_capture(MODE).unwrap();
        drop(used(rig, &allocator, 2 * MIB, &stream));
        let live = used(rig, &allocator, MIB, &stream);
        side.wait_for(&stream).unwrap();
        rig.stamp(live.ptr(), MIB, 1, &side);
        // The side stream was never joined.
        assert!(stream.end_capture().is_err());
        scope.leave().unwrap();
        assert_eq!(footprint(&allocator, &pool).live, MIB as u64);
        let graph = capture(&pool, &stream, || {
            drop(used(rig, &allocator, 2 * MIB, &stream));
        });
        assert_eq!(footprint(&allocator, &pool).physical, 4 * MIB as u64);
        run(&graph, &stream);
        drop((live, graph, pool));
        rig.settle(&stream);
        rig.close(&allocator);
    });
}

/// G8: every driver call inside a request fails in turn; the capture goes on, and ends well.
#[test]
fn a_request_that_fails_spoils_no_capture_and_changes_nothing() {
    packed(|rig| {
        let Some(sim) = rig.sim() else { return };
        let calls = [
            "cuMemAddressReserve",
            "cuMemCreate",
            "cuMemMap",
            "cuMemSetAccess",
            "cuUserObjectCreate",
            "cuGraphRetainUserObject",
            "cuStreamGetCaptureInfo_v3",
            "cuGraphNodeGetDependencies_v2",
        ];
        let code = sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY;
        for call in calls {
            for nth in 1..=3 {
                let allocator = rig.allocator();
                let (pool, stream) = (allocator.graph_pool().unwrap(), rig.stream());
                let graph = capture(&pool, &stream, || {
                    let first = allocator.allocate(3 * MIB, &stream);
                    let before = footprint(&allocator, &pool);
                    sim.fail(FailPlan::call(call, code).unwrap().nth(nth));
                    // Room for it needs a view of what is left, and new memory.
                    let failed = allocator.allocate(9 * MIB, &stream);
                    sim.clear_failures();
                    // Every byte is somewhere, whether it was made up for or not.
                    let after = footprint(&allocator, &pool);
                    if failed.is_err() {
                        assert_eq!(
                            (after.live, after.free),
                            (before.live, before.free),
                            "{call}"
                        );
                        assert_eq!(after.physical, before.physical, "{call} {nth}");
                    }
                    drop((failed, first));
                    drop(used(rig, &allocator, MIB, &stream));
                });
                run(&graph, &stream);
                drop((graph, pool));
                rig.close(&allocator);
            }
        }
    });
}
