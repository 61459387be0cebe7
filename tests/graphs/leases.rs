//! How long a pool's addresses live.

use super::support::*;
use cualloc::driver::UserObject;
use std::sync::{Barrier, mpsc};
use std::thread;
use std::time::{Duration, Instant};

/// The driver's thread that tells of the next graph's end has something else to do before that.
fn tell_late(rig: &Rig, by: Duration) {
    let busy = UserObject::new(&rig.context, move || {
        let begun = Instant::now();
        while begun.elapsed() < by {}
    });
    drop(busy.unwrap());
}

/// G12: the graph goes, its executable stays; then that goes, and its launch runs on.
#[test]
fn addresses_live_as_long_as_a_launch_may_use_them() {
    pooled(|rig, allocator, pool, [stream]| {
        let graph = graph_of((rig, &allocator), &pool, 6 * MIB, &stream);
        let mut exec = graph.instantiate().unwrap();
        drop(graph);
        pool.release().unwrap();
        drop(pool);
        allocator.trim(0).unwrap();
        assert_held(rig, 6 * MIB, "the executable has it");
        let held = rig.hold(&stream);
        launch(&mut exec, &stream);
        drop(exec);
        allocator.trim(0).unwrap();
        assert_held(rig, 6 * MIB, "the launch has it");
        held.release();
        rig.settle(&stream);
        assert_trimmed(rig, &allocator);
    });
}

/// A close is refused as long as the driver has not reported the end of a graph, without a wait. On the simulator: a
/// GPU's driver may need its own thread, which is busy here until the close has returned, for the close.
#[test]
fn a_close_is_refused_until_the_end_of_a_graph_is_reported() {
    packed(|rig| {
        if rig.sim().is_none() {
            return;
        }
        let allocator = rig.checked();
        let (pool, stream) = (allocator.graph_pool().unwrap(), rig.stream());
        let graph = graph_of((rig, &allocator), &pool, 2 * MIB, &stream);
        let (report, reported) = mpsc::channel();
        // The driver's thread has something else to do first.
        let busy = UserObject::new(&rig.context, move || reported.recv().unwrap());
        drop((busy.unwrap(), graph));
        for _ in 0..2 {
            let refused = allocator.close();
            assert!(
                matches!(
                    refused,
                    Err(Error::InUse {
                        what: "graph",
                        count: 1,
                        ..
                    })
                ),
                "{refused:?}"
            );
        }
        report.send(()).unwrap();
    });
}

/// Live blocks of graph pools count at a close like others.
#[test]
fn a_close_is_refused_while_blocks_of_pools_are_live() {
    packed(|rig| {
        let (allocator, stream) = (rig.checked(), rig.stream());
        let pools = [(); 2].map(|()| allocator.graph_pool().unwrap());
        let mut blocks = vec![allocator.allocate(4 * MIB, &stream).unwrap()];
        for (pool, bytes) in pools.iter().zip([2 * MIB, 6 * MIB]) {
            let _scope = pool.enter(Scope::Thread).unwrap();
            blocks.push(allocator.allocate(bytes, &stream).unwrap());
        }
        let bytes = 12 * MIB as u64;
        assert_matches!(
            allocator.close(),
            Err(Error::InUse { what: "block", count: 3, bytes: found }) if found == bytes
        );
        drop(blocks);
    });
}

/// A close that finds graphs looks again if one of them ended meanwhile: here at least one does in each look.
#[test]
fn a_close_looks_again_while_graphs_end() {
    only_simulated_on(
        Policy::Packed,
        SimConfig::with_devices(1, 8 << 30),
        |rig, sim| {
            let allocator = rig.allocator();
            let (pool, stream, other) =
                (allocator.graph_pool().unwrap(), rig.stream(), rig.stream());
            let graph = |_| graph_of((rig, &allocator), &pool, 2 * MIB, &stream);
            let graphs: Vec<Graph> = (0..3).map(graph).collect();
            // Each look begins with another try to free this block, and so with a question to its stream.
            let block = allocator.allocate(4 * MIB, &other).unwrap();
            let under_way = Capturing::begin(&other, MODE);
            drop(block);
            let left = Arc::new(Mutex::new((graphs, Some(under_way))));
            let ends = Arc::downgrade(&left);
            sim.before(move |moment| {
                if moment.call == "cuStreamIsCapturing"
                    && let Some(left) = ends.upgrade()
                {
                    let (graphs, under_way) = &mut *left.lock().unwrap();
                    drop(graphs.pop());
                    if graphs.is_empty() {
                        drop(under_way.take().map(|capture| capture.end().unwrap()));
                    }
                }
            });
            allocator.close().unwrap();
            sim.clear_hooks();
        },
    );
}

/// The same for unused memory, when no capture uses the pool any more.
#[test]
fn memory_of_a_released_pool_is_released_with_its_last_graph() {
    packed(|rig| {
        let allocator = rig.checked();
        let goes_at_once = || {
            let (pool, stream) = (allocator.graph_pool().unwrap(), rig.stream());
            let graph = graph_of((rig, &allocator), &pool, 2 * MIB, &stream);
            drop(pool);
            tell_late(rig, Duration::from_millis(1));
            drop(graph);
            let gone = || {
                allocator.empty_cache().unwrap();
                rig.driver_held().is_none_or(|held| held == 0)
            };
            let at_once = gone();
            wait_until("no graph has it", gone);
            at_once
        };
        // The driver may need longer than the allocator waits, where the machine is busy.
        assert!(
            (0..200).any(|_| goes_at_once()),
            "the allocator does not wait"
        );
    });
}

#[test]
fn a_pool_need_not_be_released() {
    pooled(|rig, allocator, pool, [stream]| {
        let graph = graph_of((rig, &allocator), &pool, 6 * MIB, &stream);
        assert_eq!(footprint(&allocator, &pool).leases, 1);
        assert_eq!(allocator.trim(0).unwrap().released, 0);
        let error = allocator.close().unwrap_err();
        assert!(
            matches!(
                error,
                Error::InUse {
                    what: "graph",
                    count: 1,
                    ..
                }
            ),
            "{error:?}"
        );
        drop(graph);
        await_leases(&allocator, &pool, 0);
        assert_eq!(allocator.trim(0).unwrap().released, 6 * MIB as u64);
        // It is as good as a new one.
        let _graph = graph_of((rig, &allocator), &pool, MIB, &stream);
    });
}

#[test]
fn a_block_keeps_the_memory_of_a_pool_that_was_released() {
    pooled(|rig, allocator, pool, [stream]| {
        let mut output = None;
        let graph = capture(&pool, &stream, || {
            output = Some(used(rig, &allocator, 2 * MIB, &stream));
        });
        drop((graph, pool));
        allocator.trim(0).unwrap();
        assert_held(rig, 2 * MIB, "a block has it");
        drop(output);
        rig.settle(&stream);
        assert_trimmed(rig, &allocator);
    });
}

#[test]
fn an_allocator_without_handles_ends_with_the_last_graph() {
    packed(|rig| {
        let allocator = rig.allocator();
        let (pool, stream) = (allocator.graph_pool().unwrap(), rig.stream());
        let graph = graph_of((rig, &allocator), &pool, 2 * MIB, &stream);
        drop((pool, allocator));
        assert_held(rig, 2 * MIB, "a graph has it");
        drop(graph);
        // Any later call of any allocator looks.
        wait_until("no graph has it", || {
            drop(rig.allocator());
            rig.driver_held().is_none_or(|held| held == 0)
        });
    });
}

/// The last graph ends while the last handle is dropped, on another thread.
#[test]
fn an_allocator_that_ends_beside_its_last_graph_leaves_nothing() {
    packed(|rig| {
        let stream = rig.stream();
        for turn in 0..400 {
            let allocator = rig.allocator();
            let pool = allocator.graph_pool().unwrap();
            let graph = graph_of((rig, &allocator), &pool, 2 * MIB, &stream);
            drop(pool);
            // The driver reports the end of the graph sooner or later after its destruction.
            tell_late(rig, Duration::from_nanos(turn * 100));
            let start = Barrier::new(2);
            thread::scope(|scope| {
                scope.spawn(|| {
                    start.wait();
                    drop(graph);
                });
                start.wait();
                drop(allocator);
            });
            wait_until("the allocator is closed", || {
                drop(rig.allocator());
                rig.driver_held().is_none_or(|held| held == 0)
            });
        }
    });
}

/// G17: nothing is left of what came and went.
#[test]
fn a_thousand_captures_leave_nothing_behind() {
    packed(|rig| {
        let (allocator, [stream]) = rig.scene();
        let mut reserved = 0;
        for turn in 0..1000usize {
            let pool = allocator.graph_pool().unwrap();
            let graph = capture(&pool, &stream, || {
                let first = used(rig, &allocator, (turn % 9 + 1) * MIB, &stream);
                drop(used(rig, &allocator, (turn % 5 + 1) * MIB, &stream));
                drop(first);
                drop(used(rig, &allocator, 12 * MIB, &stream));
            });
            drop((graph, pool));
            assert_trimmed(rig, &allocator);
            if turn == 10 {
                reserved = rig.calls("cuMemAddressReserve");
            }
        }
        assert_eq!(
            rig.calls("cuMemAddressReserve"),
            reserved,
            "addresses are used again"
        );
    });
}

#[test]
fn a_request_that_is_short_of_memory_gets_that_of_idle_pools() {
    packed(|rig| {
        let allocator = rig.checked_limit(40 * MIB);
        let (pool, stream) = (allocator.graph_pool().unwrap(), rig.stream());
        let graph = graph_of((rig, &allocator), &pool, 24 * MIB, &stream);
        let error = allocator.allocate(32 * MIB, &stream).unwrap_err();
        assert!(
            error.is_out_of_memory(),
            "the graph has its memory: {error:?}"
        );
        drop(graph);
        // The request waits a little for the driver's word, which may come later where the machine is busy.
        let get = || match allocator.allocate(32 * MIB, &stream) {
            Ok(block) => (block, true),
            Err(error) => {
                assert!(error.is_out_of_memory(), "{error:?}");
                await_leases(&allocator, &pool, 0);
                (allocator.allocate(32 * MIB, &stream).unwrap(), false)
            }
        };
        let (block, _) = get();
        assert_eq!(footprint(&allocator, &pool).physical, 0);
        drop(block);
        allocator.empty_cache().unwrap();
        let mut served = false;
        for _ in 0..20 {
            let graph = graph_of((rig, &allocator), &pool, 24 * MIB, &stream);
            tell_late(rig, Duration::from_millis(2));
            drop(graph);
            let (block, waited) = get();
            drop(block);
            allocator.empty_cache().unwrap();
            served |= waited;
        }
        assert!(served, "no request waited");
    });
}

/// Uses of a pool by a stream are waited for after the stream was destroyed.
#[test]
fn a_stream_that_used_a_block_of_a_pool_may_be_retired() {
    pooled(|rig, allocator, pool, [stream]| {
        let reader = RawStream::new(rig);
        let (graph, block) =
            capture_output(&pool, &stream, || used(rig, &allocator, 2 * MIB, &stream));
        run(&graph, &stream);
        allocator
            .raw_record_stream(block.ptr(), reader.raw())
            .unwrap();
        rig.stamp(block.ptr(), 2 * MIB, 3, &reader.borrowed());
        reader.retire(&allocator);
    });
}

/// A stream of another context that used blocks of a pool, which are live, or were used by it until now, or freed: the
/// context may be destroyed once the stream is retired, and what waited for the stream waits for its work alone.
#[test]
fn a_context_may_be_destroyed_once_its_stream_that_used_a_pool_is_retired() {
    packed(|rig| {
        let Some(sim) = rig.maybe_sim() else { return };
        let allocator = rig.checked();
        let (pool, stream) = (allocator.graph_pool().unwrap(), rig.stream());
        let raw = sim.create_context(0).unwrap();
        // SAFETY: the context is destroyed after its last use.
        let there = unsafe { Context::from_raw(&rig.driver, raw) }.unwrap();
        let stream_there = RawStream::in_context(rig, &there, 1);
        let reader = stream_there.raw();
        let scope = pool.enter(Scope::Stream(&stream)).unwrap();
        let [live, over, freed] = [(); 3].map(|()| allocator.allocate(2 * MIB, &stream).unwrap());
        scope.leave().unwrap();
        stream.synchronize().unwrap();
        sim.set_mode(Mode::Manual);
        allocator.raw_record_stream(live.ptr(), reader).unwrap();
        allocator.raw_record_stream(freed.ptr(), reader).unwrap();
        for block in [&live, &over, &freed] {
            rig.stamp_in(&there, block.ptr(), 2 * MIB, 1, &stream_there.borrowed());
        }
        allocator.raw_record_use(over.ptr(), reader).unwrap();
        drop(freed);
        allocator.raw_retire(reader).unwrap();
        drop((live, over));
        allocator.trim(0).unwrap();
        assert_held(rig, 6 * MIB, "the stream's work is under way");
        sim.complete_all();
        drop((stream_there, there));
        assert!(sim.destroy_context(raw));
        allocator.trim(0).unwrap();
        assert_held(rig, 0, "nothing uses it");
        sim.set_mode(Mode::Instant);
    });
}
