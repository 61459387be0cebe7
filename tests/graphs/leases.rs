//! How long a pool's addresses live.

use super::support::*;
use cualloc::driver::UserObject;
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
    packed(|rig| {
        let allocator = rig.allocator();
        let (pool, stream) = (allocator.graph_pool().unwrap(), rig.stream());
        let graph = capture(&pool, &stream, || {
            drop(used(rig, &allocator, 6 * MIB, &stream));
        });
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
        rig.close(&allocator);
    });
}

/// Whoever has destroyed a graph may close its allocator at once, although the driver says later that it is gone.
#[test]
fn a_close_waits_for_the_end_of_a_graph_to_be_told() {
    packed(|rig| {
        for _ in 0..20 {
            let allocator = rig.allocator();
            let (pool, stream) = (allocator.graph_pool().unwrap(), rig.stream());
            let graph = capture(&pool, &stream, || {
                drop(used(rig, &allocator, 2 * MIB, &stream));
            });
            drop(graph);
            rig.close(&allocator);
        }
    });
}

#[test]
fn a_close_waits_for_graphs_also_where_blocks_are_held_back() {
    packed(|rig| {
        for _ in 0..20 {
            let config: Config = "debug=quarantine:64M".parse().unwrap();
            let allocator = rig.allocator_with(config);
            let (pool, stream) = (allocator.graph_pool().unwrap(), rig.stream());
            let graph = capture(&pool, &stream, || {
                drop(used(rig, &allocator, 2 * MIB, &stream));
            });
            drop(used(rig, &allocator, MIB, &stream));
            stream.synchronize().unwrap();
            tell_late(rig, Duration::from_millis(10));
            drop(graph);
            rig.close(&allocator);
        }
    });
}

/// The same for unused memory, where nobody captures with the pool any more.
#[test]
fn memory_of_a_pool_that_was_released_goes_with_its_last_graph() {
    packed(|rig| {
        let allocator = rig.allocator();
        let goes_at_once = || {
            let (pool, stream) = (allocator.graph_pool().unwrap(), rig.stream());
            let graph = capture(&pool, &stream, || {
                drop(used(rig, &allocator, 2 * MIB, &stream));
            });
            drop(pool);
            tell_late(rig, Duration::from_millis(1));
            drop(graph);
            let gone = || {
                allocator.empty_cache().unwrap();
                rig.driver_held().is_none_or(|held| held == 0)
            };
            let at_once = gone();
            wait_until("nobody has it", gone);
            at_once
        };
        // The driver may need longer than anybody waits, where the machine has much else to do.
        let at_once = (0..20).filter(|_| goes_at_once()).count();
        assert!(at_once > 10, "{at_once} of 20 went at once");
        rig.close(&allocator);
    });
}

#[test]
fn nobody_has_to_release_a_pool() {
    packed(|rig| {
        let allocator = rig.allocator();
        let (pool, stream) = (allocator.graph_pool().unwrap(), rig.stream());
        let graph = capture(&pool, &stream, || {
            drop(used(rig, &allocator, 6 * MIB, &stream));
        });
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
        let graph = capture(&pool, &stream, || {
            drop(used(rig, &allocator, MIB, &stream));
        });
        drop((graph, pool));
        rig.close(&allocator);
    });
}

#[test]
fn a_block_keeps_the_memory_of_a_pool_that_was_released() {
    packed(|rig| {
        let allocator = rig.allocator();
        let (pool, stream) = (allocator.graph_pool().unwrap(), rig.stream());
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
        rig.close(&allocator);
    });
}

#[test]
fn an_allocator_without_handles_goes_with_the_last_graph() {
    packed(|rig| {
        let allocator = rig.allocator();
        let (pool, stream) = (allocator.graph_pool().unwrap(), rig.stream());
        let graph = capture(&pool, &stream, || {
            drop(used(rig, &allocator, 2 * MIB, &stream));
        });
        drop((pool, allocator));
        assert_held(rig, 2 * MIB, "a graph has it");
        drop(graph);
        // Any later call of any allocator looks.
        wait_until("nobody has it", || {
            drop(rig.allocator());
            rig.driver_held().is_none_or(|held| held == 0)
        });
    });
}

/// G17: nothing is left of what came and went.
#[test]
fn a_thousand_captures_leave_nothing_behind() {
    packed(|rig| {
        let allocator = rig.allocator();
        let stream = rig.stream();
        let mut reserved = 0;
        for turn in 0..1000usize {
            let pool = allocator.graph_pool().unwrap();
            let graph = capture(&pool, &stream, || {
                let first = used(rig, &allocator, (turn % 9 + 1) * MIB, &stream);
                drop(used(rig, &allocator, (turn % 5 + 1) * MIB, &stream));
                drop(first);
                drop(used(rig, &allocator, 12 * MIB, &stream));
            });
            drop(graph);
            drop(pool);
            allocator.empty_cache().unwrap();
            if turn == 10 {
                reserved = rig.calls("cuMemAddressReserve");
            }
        }
        assert_trimmed(rig, &allocator);
        assert_eq!(
            rig.calls("cuMemAddressReserve"),
            reserved,
            "addresses are used again"
        );
        rig.close(&allocator);
    });
}

#[test]
fn a_request_that_is_short_of_memory_gets_that_of_idle_pools() {
    packed(|rig| {
        let allocator = rig.limited(40 * MIB);
        let (pool, stream) = (allocator.graph_pool().unwrap(), rig.stream());
        let graph = capture(&pool, &stream, || {
            drop(used(rig, &allocator, 24 * MIB, &stream));
        });
        let error = allocator.allocate(32 * MIB, &stream).unwrap_err();
        assert!(
            error.is_out_of_memory(),
            "the graph has its memory: {error:?}"
        );
        drop(graph);
        // The request waits a little for the driver's word, which may come later where the machine is busy.
        let mut served = 0;
        let mut get = || match allocator.allocate(32 * MIB, &stream) {
            Ok(block) => {
                served += 1;
                block
            }
            Err(error) => {
                assert!(error.is_out_of_memory(), "{error:?}");
                await_leases(&allocator, &pool, 0);
                allocator.allocate(32 * MIB, &stream).unwrap()
            }
        };
        let block = get();
        assert_eq!(footprint(&allocator, &pool).physical, 0);
        drop(block);
        allocator.empty_cache().unwrap();
        for _ in 0..20 {
            drop(capture(&pool, &stream, || {
                drop(used(rig, &allocator, 24 * MIB, &stream));
            }));
            drop(get());
            allocator.empty_cache().unwrap();
        }
        assert!(served > 14, "{served} of 21 requests waited");
        drop(pool);
        rig.close(&allocator);
    });
}

/// What a stream used of a pool is waited for after the stream has gone.
#[test]
fn a_stream_that_used_a_block_of_a_pool_may_be_retired() {
    packed(|rig| {
        let allocator = rig.allocator();
        let (pool, stream) = (allocator.graph_pool().unwrap(), rig.stream());
        let reader = RawStream::new(rig);
        let mut output = None;
        let graph = capture(&pool, &stream, || {
            output = Some(used(rig, &allocator, 2 * MIB, &stream));
        });
        run(&graph, &stream);
        let block = output.take().unwrap();
        // SAFETY: the stream is alive, and gets nothing after it is retired.
        unsafe {
            allocator
                .record_stream_raw(block.ptr(), reader.raw())
                .unwrap();
            rig.stamp(block.ptr(), 2 * MIB, 3, &reader.borrowed());
            allocator.retire_raw(reader.raw()).unwrap();
        }
        reader.destroy();
        drop(block);
        rig.settle(&stream);
        drop((graph, pool));
        rig.close(&allocator);
    });
}
