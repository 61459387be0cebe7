//! Memory that may still be used is kept, in whatever order its owners act.

use super::support::*;
use std::sync::mpsc;

fn is_capturing<T: std::fmt::Debug>(result: Result<T, impl Into<Error>>) {
    let error = result.unwrap_err().into();
    assert_matches!(error, Error::Capturing { .. });
}

#[test]
fn a_capture_whose_scope_was_left_gets_no_more_memory() {
    pooled(|rig, allocator, pool, [main, side]| {
        let under_way = Capturing::begin(&main, MODE);
        let id = main.capture_id().unwrap().unwrap();
        let scope = pool.enter(Scope::Capture(id)).unwrap();
        let first = used(rig, &allocator, 4 * MIB, &main);
        side.wait_for(&main).unwrap();
        drop(used(rig, &allocator, 4 * MIB, &side));
        drop(scope);
        // Memory that the side branch uses has no mark any more, so it must not be reused here.
        let again = pool.enter(Scope::Capture(id)).unwrap();
        is_capturing(allocator.allocate(4 * MIB, &main));
        main.wait_for(&side).unwrap();
        let graph = under_way.end().unwrap();
        drop((again, first));
        let next = graph_of((rig, &allocator), &pool, 4 * MIB, &main);
        run(&graph, &main);
        run(&next, &main);
    });
}

#[test]
fn a_capture_that_only_frees_or_records_has_a_lease() {
    pooled(|rig, allocator, pool, [stream]| {
        for records in [false, true] {
            let mut output = None;
            let one = capture(&pool, &stream, || {
                output = Some(used(rig, &allocator, 2 * MIB, &stream));
            });
            let reader = rig.stream();
            let by = if records { &reader } else { &stream };
            let under_way = Capturing::begin(by, MODE);
            let block = output.take().unwrap();
            rig.stamp(block.ptr(), 2 * MIB, 1, by);
            if records {
                block.record_stream(by).unwrap();
                assert_eq!(footprint(&allocator, &pool).leases, 2);
            }
            drop(block);
            assert_eq!(footprint(&allocator, &pool).leases, 2);
            let two = under_way.end().unwrap();
            drop(one);
            await_leases(&allocator, &pool, 1);
            rig.settle(&stream);
            assert_eq!(allocator.trim(0).unwrap().released, 0);
            run(&two, by);
            drop(two);
            allocator.trim(0).unwrap();
            rig.settle(&stream);
            await_leases(&allocator, &pool, 0);
            allocator.trim(0).unwrap();
            assert_eq!(footprint(&allocator, &pool).physical, 0);
        }
    });
}

#[test]
fn work_before_a_capture_is_waited_for() {
    pooled(|rig, allocator, pool, [stream, other]| {
        let _scope = pool.enter(Scope::Thread).unwrap();
        let block = allocator.allocate(4 * MIB, &stream).unwrap();
        let at = block.ptr();
        let held = rig.hold(&stream);
        rig.stamp(at, 4 * MIB, 1, &stream);
        let under_way = Capturing::begin(&stream, MODE);
        drop(block);
        drop(under_way.end().unwrap());
        let beside = used(rig, &allocator, 4 * MIB, &other);
        assert_ne!(beside.ptr(), at, "its kernel has not begun");
        held.release();
        rig.settle(&stream);
        // Until the graph is destroyed it is unknown whether it used the memory.
        await_leases(&allocator, &pool, 0);
        let behind = used(rig, &allocator, 4 * MIB, &other);
        assert_eq!(behind.ptr(), at);
    });
}

#[test]
fn a_per_thread_default_stream_is_not_marked_from_another_thread() {
    pooled(|rig, allocator, pool, []| {
        let (to_main, blocks) = mpsc::channel::<Block>();
        let (to_thread, back) = mpsc::channel::<Block>();
        std::thread::scope(|threads| {
            let (context, allocator, pool) = (rig.context.clone(), &allocator, &pool);
            threads.spawn(move || {
                let own = Stream::per_thread(&context);
                let scope = pool.enter(Scope::Thread).unwrap();
                to_main
                    .send(allocator.allocate(2 * MIB, &own).unwrap())
                    .unwrap();
                drop(scope);
                // Here its handle means what it meant.
                back.recv().unwrap().free().unwrap();
                own.synchronize().unwrap();
            });
            let error = blocks.recv().unwrap().free().unwrap_err();
            assert_matches!(
                error.error,
                Error::Stream(cualloc::error::StreamMisuse::WrongThread)
            );
            to_thread.send(*error.value).unwrap();
        });
    });
}

#[test]
fn a_graph_that_another_thread_builds_is_not_queried() {
    pooled(|rig, allocator, pool, [stream]| {
        let graph = capture(&pool, &stream, || {
            let block = used(rig, &allocator, 2 * MIB, &stream);
            let at = block.ptr();
            let asked = rig.calls("cuGraphNodeGetDependencies_v2");
            let freed = std::thread::scope(|threads| {
                let free = threads.spawn(|| block.free());
                free.join().unwrap()
            });
            let refused = freed.unwrap_err();
            assert_matches!(refused.error, Error::Capturing { .. });
            assert_eq!(rig.calls("cuGraphNodeGetDependencies_v2"), asked);
            std::thread::scope(|threads| {
                threads.spawn(|| drop(refused.value));
            });
            // This call names the stream, so what was dropped is freed first.
            let next = used(rig, &allocator, 2 * MIB, &stream);
            assert_eq!(next.ptr(), at);
            drop(next);
        });
        run(&graph, &stream);
    });
}

#[test]
fn a_checkpoint_is_restored_behind_work_in_flight() {
    pooled(|rig, allocator, _, [stream, reader]| {
        for user in [&stream, &reader] {
            let pool = allocator.graph_pool().unwrap();
            let point = pool.checkpoint().unwrap();
            let scope = pool.enter(Scope::Thread).unwrap();
            let block = allocator.allocate(2 * MIB, &stream).unwrap();
            drop(scope);
            block.record_stream(&reader).unwrap();
            let at = block.ptr();
            let held = rig.hold(user);
            rig.stamp(at, 2 * MIB, 1, user);
            // SAFETY: blocks that cease are only freed.
            let restored = unsafe { pool.restore(&point) }.unwrap();
            assert_eq!(restored.ceased, [at]);
            std::mem::forget(block.free().unwrap_err());
            let place = || {
                let capturing = rig.stream();
                let mut at = 0;
                let graph = capture(&pool, &capturing, || {
                    at = used(rig, &allocator, 2 * MIB, &capturing).ptr();
                });
                drop(graph);
                at
            };
            assert_ne!(place(), at, "the work uses it");
            held.release();
            rig.settle(user);
            assert_eq!(place(), at);
        }
    });
}

#[test]
fn a_block_revived_behind_work_in_flight_is_reused_after_it() {
    pooled(|rig, allocator, pool, [stream, reader]| {
        let scope = pool.enter(Scope::Thread).unwrap();
        let block = allocator.allocate(2 * MIB, &stream).unwrap();
        let (at, point) = (block.ptr(), pool.checkpoint().unwrap());
        block.record_stream(&reader).unwrap();
        let held = rig.hold(&reader);
        rig.stamp(at, 2 * MIB, 1, &reader);
        drop(block);
        // SAFETY: no block ceases.
        let mut restored = unsafe { pool.restore(&point) }.unwrap();
        let revived = restored.revived.pop().unwrap();
        assert_eq!((revived.ptr(), restored.revived.len()), (at, 0));
        drop(revived);
        let next = allocator.allocate(2 * MIB, &stream).unwrap();
        assert_ne!(next.ptr(), at, "the reader uses it");
        held.release();
        rig.settle(&reader);
        let last = allocator.allocate(2 * MIB, &stream).unwrap();
        assert_eq!(last.ptr(), at);
        drop((next, last, scope));
    });
}

#[test]
fn a_checkpoint_is_not_restored_during_a_capture() {
    pooled(|rig, allocator, pool, [stream]| {
        let point = pool.checkpoint().unwrap();
        // SAFETY: blocks that cease are only freed.
        let restore = || unsafe { pool.restore(&point) };
        let scope = pool.enter(Scope::Thread).unwrap();
        let under_way = Capturing::begin(&stream, MODE);
        let blocks = [MIB; 2].map(|bytes| used(rig, &allocator, bytes, &stream));
        // The pool as a whole is refused, and not the first block.
        let bytes = 2 * MIB as u64;
        let refused = graph_pool_error(restore().unwrap_err());
        assert_eq!(refused, GraphPoolError::NotComplete { bytes });
        drop(blocks);
        drop(under_way.end().unwrap());
        drop(scope);
        assert!(restore().unwrap().ceased.is_empty());
    });
}

#[test]
fn a_filter_that_owns_a_block_is_dropped_without_a_lock() {
    pooled(|_rig, allocator, pool, [stream]| {
        let block = allocator.allocate(3 * MIB, &stream).unwrap();
        let filter = move |_| block.size() == 0;
        drop(pool.enter(Scope::When(Box::new(filter))).unwrap());
        assert_eq!(allocator.stats().all.allocated.current, 0);
    });
}

#[test]
fn a_capture_into_a_graph_with_nodes_gets_no_memory() {
    pooled(|rig, allocator, pool, [stream, other]| {
        let graph = graph_of((rig, &allocator), &pool, 2 * MIB, &stream);
        let scope = pool.enter(Scope::Thread).unwrap();
        // SAFETY: no node is named.
        unsafe { other.begin_capture_into(graph, &[], MODE) }.unwrap();
        let under_way = Capturing::begun(&other);
        let refused = allocator.allocate(2 * MIB, &other);
        assert_matches!(refused, Err(Error::NotSupported { .. }));
        let graph = under_way.end().unwrap();
        drop(scope);
        run(&graph, &stream);
    });
}

#[test]
fn debug_modes_leave_memory_of_pools_alone() {
    packed(|rig| {
        let config: Config = "debug=guard+quarantine:64M+poison+leaks".parse().unwrap();
        let allocator = rig.allocator_with(config);
        let (pool, stream) = (allocator.graph_pool().unwrap(), rig.stream());
        let scope = pool.enter(Scope::Thread).unwrap();
        let kept = [700, 3 * MIB - 20].map(|bytes| used(rig, &allocator, bytes, &stream));
        scope.leave().unwrap();
        // No more than what was asked for, rounded up.
        let rounded = |block: &Block| block.requested().next_multiple_of(512) as u64;
        let live = kept.iter().map(rounded).sum::<u64>();
        assert_eq!(footprint(&allocator, &pool).live, live);
        let graph = capture(&pool, &stream, || drop(used(rig, &allocator, MIB, &stream)));
        run(&graph, &stream);
        // A byte behind the end is a graph's business.
        // SAFETY: the pool's memory is larger.
        unsafe { stream.memset(kept[1].ptr() + 3 * MIB as u64 - 20, 7, 1) }.unwrap();
        allocator.check().unwrap();
        drop(kept);
        assert_eq!(footprint(&allocator, &pool).live, 0, "nothing is held back");
        let scope = pool.enter(Scope::Thread).unwrap();
        let again = [700, 3 * MIB - 20].map(|bytes| allocator.allocate(bytes, &stream).unwrap());
        drop((again, scope, graph, pool));
        allocator.check().unwrap();
        rig.close(&allocator);
        assert_eq!(allocator.findings(), []);
    });
}

/// Memory freed before a capture is held back while its stream captures, and released afterwards.
#[test]
fn a_capture_loses_no_block_that_a_debug_mode_holds_back() {
    packed(|rig| {
        let config: Config = "debug=quarantine:64M".parse().unwrap();
        let allocator = rig.checked_with(config.limit(Some(40 * MIB as u64)));
        let (pool, stream) = (allocator.graph_pool().unwrap(), rig.stream());
        drop(used(rig, &allocator, 8 * MIB, &stream));
        stream.synchronize().unwrap();
        let graph = capture(&pool, &stream, || {
            // Nothing is held back while another test of the process captures.
            let held_back = allocator.stats().all.allocated.current > 0;
            match allocator.allocate(36 * MIB, &stream) {
                Ok(block) => assert!(!held_back, "{block:?}"),
                Err(short) => assert!(short.is_out_of_memory(), "{short:?}"),
            }
        });
        drop(graph);
        await_leases(&allocator, &pool, 0);
        let _block = used(rig, &allocator, 36 * MIB, &stream);
        stream.synchronize().unwrap();
    });
}
