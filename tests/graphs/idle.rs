//! Idle memory of the allocator moves into a pool that can grow no other way.

use super::support::*;

const LIMIT: usize = 64 * MIB;

/// Blocks of all sizes that were used on a stream and freed, the stream idle: this much memory is cached then, some of
/// it in hand for the next such request.
fn cached(rig: &Rig, allocator: &Allocator, stream: &Stream) -> usize {
    let blocks: Vec<Block> = [6 * MIB, 20 * MIB, 2 * MIB, 12 * MIB, 8 * MIB, 40 * KIB]
        .map(|bytes| used(rig, allocator, bytes, stream))
        .into();
    drop(blocks);
    for _ in 0..50 {
        drop(used(rig, allocator, 20 * MIB, stream));
    }
    stream.synchronize().unwrap();
    let held = reserved(allocator);
    assert!((48 * MIB..=52 * MIB).contains(&held), "{held}");
    held
}

/// Ends a pool and its graph, after which the driver holds nothing of the allocator.
fn end(rig: &Rig, allocator: &Allocator, of: (Graph, GraphPool), stream: &Stream) {
    drop(of);
    rig.settle(stream);
    assert_trimmed(rig, allocator);
    rig.close(allocator);
}

fn reserved(allocator: &Allocator) -> usize {
    allocator.stats().all.reserved.current as usize
}

/// Nothing is asked of the driver while idle memory suffices, and the graph runs with what moved.
#[test]
fn idle_memory_serves_a_capture_at_the_limit() {
    packed(|rig| {
        for others in [false, true] {
            let allocator = rig.checked_limit(LIMIT);
            let pool = allocator.graph_pool().unwrap();
            let [stream, other] = rig.streams();
            let held = cached(rig, &allocator, if others { &other } else { &stream });
            let mut output = None;
            let created = rig.calls("cuMemCreate");
            let scope = pool.enter(Scope::NextCapture).unwrap();
            let under_way = Capturing::begin(&stream, MODE);
            let first = used(rig, &allocator, 10 * MIB, &stream);
            assert_eq!(reserved(&allocator), held, "there is room below the limit");
            let second = used(rig, &allocator, 40 * MIB, &stream);
            let moved = held - reserved(&allocator);
            assert!((36 * MIB..=50 * MIB).contains(&moved), "{moved}");
            drop(first);
            output.replace(second);
            let graph = under_way.end().unwrap();
            scope.leave().unwrap();
            let physical = footprint(&allocator, &pool).physical as usize;
            assert!(physical + reserved(&allocator) <= LIMIT);
            let created = rig.calls("cuMemCreate") - created;
            assert!(created <= 8, "{created} handles for what was not cached");
            run(&graph, &stream);
            // The remaining memory serves requests outside of captures as before.
            drop(used(rig, &allocator, MIB, &stream));
            drop((output, graph, pool));
            rig.settle(&stream);
            assert_trimmed(rig, &allocator);
        }
    });
}

#[test]
fn idle_memory_serves_a_capture_that_the_driver_refuses_memory() {
    packed(|rig| {
        let Some(sim) = rig.sim() else { return };
        for says_full in [false, true] {
            let allocator = rig.allocator();
            let (pool, stream) = (allocator.graph_pool().unwrap(), rig.stream());
            cached(rig, &allocator, &stream);
            match says_full {
                true => sim.take_memory(0, (8 << 30) - sim.memory_in_use(0)),
                false => sim.fail(
                    FailPlan::call("cuMemCreate", CUresult::CUDA_ERROR_OUT_OF_MEMORY)
                        .unwrap()
                        .times(u64::MAX),
                ),
            }
            let graph = capture(&pool, &stream, || {
                for bytes in [30 * MIB, 40 * KIB] {
                    drop(used(rig, &allocator, bytes, &stream));
                }
                let before = (reserved(&allocator), footprint(&allocator, &pool));
                let refused = allocator.allocate(60 * MIB, &stream).unwrap_err();
                assert!(refused.is_out_of_memory(), "{refused:?}");
                // It would not have been enough, so nothing moved for it.
                let after = (reserved(&allocator), footprint(&allocator, &pool));
                assert_eq!(before, after);
            });
            sim.clear_failures();
            sim.take_memory(0, 0);
            run(&graph, &stream);
            end(rig, &allocator, (graph, pool), &stream);
        }
    });
}

/// A capture waits for nothing, and asks no stream: memory that work may still use stays where it is.
#[test]
fn memory_in_use_does_not_move() {
    packed(|rig| {
        let allocator = rig.limited(LIMIT);
        let pool = allocator.graph_pool().unwrap();
        let [stream, busy] = rig.streams();
        let block = used(rig, &allocator, 48 * MIB, &busy);
        let held = rig.hold(&busy);
        rig.stamp(block.ptr(), 48 * MIB, 1, &busy);
        drop(block);
        let waits = rig.calls("cuStreamSynchronize") + rig.calls("cuEventSynchronize");
        let graph = capture(&pool, &stream, || {
            let before = reserved(&allocator);
            let refused = allocator.allocate(40 * MIB, &stream).unwrap_err();
            assert!(refused.is_out_of_memory(), "{refused:?}");
            assert_eq!(reserved(&allocator), before);
            assert_eq!(footprint(&allocator, &pool).physical, 0);
            let waited = rig.calls("cuStreamSynchronize") + rig.calls("cuEventSynchronize");
            assert_eq!(waited, waits);
            held.release();
            // A GPU takes a moment to complete the work.
            wait_until("the memory moves", || {
                allocator.allocate(40 * MIB, &stream).is_ok()
            });
            drop(used(rig, &allocator, 40 * MIB, &stream));
        });
        run(&graph, &stream);
        end(rig, &allocator, (graph, pool), &stream);
    });
}

/// Handles that move show up in views of the pool, and views of the allocator that stand idle are in no one's way.
#[test]
fn handles_leave_idle_views() {
    packed(|rig| {
        let allocator = rig.limited(LIMIT);
        let (pool, stream) = (allocator.graph_pool().unwrap(), rig.stream());
        let mut kept = Vec::new();
        let mut freed = Vec::new();
        for _ in 0..6 {
            freed.push(used(rig, &allocator, 4 * MIB, &stream));
            kept.push(used(rig, &allocator, 4 * MIB, &stream));
        }
        drop(freed);
        stream.synchronize().unwrap();
        // A view over scattered memory.
        drop(used(rig, &allocator, 24 * MIB, &stream));
        assert_eq!(reserved(&allocator), 48 * MIB, "no memory was made for it");
        stream.synchronize().unwrap();
        let graph = graph_of((rig, &allocator), &pool, 36 * MIB, &stream);
        assert!(reserved(&allocator) <= 28 * MIB);
        run(&graph, &stream);
        drop(kept);
        end(rig, &allocator, (graph, pool), &stream);
    });
}

/// Every call of a move fails once: no memory is counted twice or given back under work, and none is lost but that
/// of a release that failed.
#[test]
fn a_move_that_fails_loses_only_what_cannot_be_released() {
    packed(|rig| {
        let Some(sim) = rig.sim() else { return };
        let codes = [
            CUresult::CUDA_ERROR_OUT_OF_MEMORY,
            CUresult::CUDA_ERROR_INVALID_VALUE,
        ];
        let calls = ["cuMemUnmap", "cuMemMap", "cuMemSetAccess", "cuMemRelease"];
        let mut lost = 0;
        for (call, code) in calls
            .into_iter()
            .flat_map(|call| codes.map(|code| (call, code)))
        {
            for (nth, times) in [(1, 1), (1, 2), (2, 1), (3, 1), (1, 100)] {
                let allocator = rig.limited(LIMIT);
                let (pool, stream) = (allocator.graph_pool().unwrap(), rig.stream());
                cached(rig, &allocator, &stream);
                let graph = capture(&pool, &stream, || {
                    let plan = FailPlan::call(call, code).unwrap();
                    sim.fail(plan.nth(nth).times(times));
                    if call != "cuMemRelease" {
                        let also = FailPlan::call("cuMemRelease", code).unwrap();
                        sim.fail(also.times(times - 1));
                    }
                    drop(allocator.allocate(40 * MIB, &stream));
                    sim.clear_failures();
                    allocator.check().unwrap();
                    let physical = footprint(&allocator, &pool).physical as usize;
                    let held = reserved(&allocator) + physical;
                    let unheld = sim.memory_in_use(0) - held as u64;
                    match call == "cuMemRelease" || times > 1 {
                        true => assert!(unheld >= lost, "{call} {nth} {times}"),
                        false => assert_eq!(unheld, lost, "{call} {nth} {times}"),
                    }
                    lost = unheld;
                    // The next request makes up for it.
                    drop(used(rig, &allocator, 8 * MIB, &stream));
                });
                run(&graph, &stream);
                drop((graph, pool));
                rig.settle(&stream);
                allocator.trim(0).unwrap();
                rig.end(&allocator);
                assert_eq!(sim.memory_in_use(0), lost, "{call} {nth} {times}");
            }
        }
    });
}
