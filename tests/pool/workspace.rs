//! Workspace leases.

use std::sync::Arc;

use cualloc::driver::sys::CUresult;
use cualloc::driver::{Driver, Stream};
use cualloc::error::InvalidArgument;
use cualloc::pool::WorkspacePool;
use cualloc::resource::{AccessOrdered, Budget, MemoryResource, Usage};
use cualloc::sim::{FailPlan, SimConfig, Simulator};
use cualloc::{Allocator, Config, DeviceBuffer, Error, Request};

use crate::common::{KIB, MIB, Rig, assert_matches, each, on_cuda};
use crate::fill;

/// How a pool is made: by classes, or exact.
type Made = fn(&Allocator) -> WorkspacePool;

fn usage(pool: &WorkspacePool) -> Usage {
    pool.usage().unwrap()
}

fn pool_of(rig: &Rig, made: Made, cap: usize) -> WorkspacePool {
    let pool = made(&rig.allocator());
    pool.set_slab_cap(cap);
    pool
}

/// S4.2, S4.3
#[test]
fn s4_2_s4_3_slabs_are_kept_up_to_the_cap() {
    each(|rig| {
        let (pool, stream) = (WorkspacePool::new(&rig.allocator()), rig.stream());
        let leases: Vec<_> = (0..6).map(|_| pool.lease(&stream, 1500).unwrap()).collect();
        drop(leases);
        assert_eq!(usage(&pool).cached_blocks, 4, "the default");
        for (cap, kept) in [(0, 1), (1, 1), (2, 2), (4, 4)] {
            let pool = pool_of(rig, WorkspacePool::new, cap);
            let stream = rig.stream();
            let leases: Vec<_> = (0..6).map(|_| pool.lease(&stream, 1500).unwrap()).collect();
            assert!(
                leases
                    .iter()
                    .all(|l| l.byte_len() == 2048 && l.id().unwrap().bytes() == 1500)
            );
            assert_eq!(usage(&pool).cached_blocks, 0);
            drop(leases);
            let stats = usage(&pool);
            assert_eq!((stats.cached_blocks, stats.blocks.current), (kept, 0));
            assert_eq!(stats.cached_bytes(), 2048 * kept);
            // What was beyond the cap is the allocator's again.
            let live = pool.allocator().stats().all.allocations.current;
            assert_eq!(live, kept);
        }
    });
}

/// S4.4, S4.5
#[test]
fn s4_4_s4_5_threads_share_a_pool_and_repeats_are_hits() {
    each(|rig| {
        let pool = pool_of(rig, WorkspacePool::new, 4);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                let pool = pool.clone();
                scope.spawn(move || {
                    let stream = rig_stream(&pool);
                    for _ in 0..100 {
                        let lease = pool.lease(&stream, 4 * MIB).unwrap();
                        fill(
                            pool.allocator().context(),
                            lease.as_device_ptr(),
                            64,
                            &stream,
                        );
                    }
                    stream.synchronize().unwrap();
                });
            }
        });
        let stats = usage(&pool);
        assert_eq!(stats.hits + stats.misses, 400);
        assert_eq!(stats.misses, 4, "one for each stream: {stats:?}");
        assert_eq!((stats.cached_blocks, stats.cached_bytes()), (4, 16 << 20));
        let stream = rig.stream();
        for bytes in [4 * MIB, 32 * MIB, 256 * MIB] {
            drop(pool.lease(&stream, bytes).unwrap());
            let before = (rig.driver.calls(), usage(&pool).hits);
            drop(pool.lease(&stream, bytes).unwrap());
            let missed = usage(&pool).hits - before.1;
            // The cap for 4 MiB is used up by the other streams.
            if bytes > 4 * MIB {
                assert_eq!(missed, 1);
                assert_eq!(rig.driver.calls().since(&before.0).total(), 0);
            }
        }
    });
}

#[test]
fn slabs_of_many_sizes_serve_again() {
    each(|rig| {
        let (pool, stream) = (pool_of(rig, WorkspacePool::exact, 4), rig.stream());
        for misses in [100, 100] {
            for size in 1..=100 {
                drop(pool.lease(&stream, size * KIB).unwrap());
            }
            let stats = usage(&pool);
            assert_eq!((stats.misses, stats.cached_blocks), (misses, 100));
        }
    });
}

fn rig_stream(pool: &WorkspacePool) -> Stream {
    Stream::new(pool.allocator().context()).unwrap()
}

/// S4.12
#[test]
fn s4_12_a_queued_kernel_keeps_its_slab() {
    each(|rig| {
        for made in [WorkspacePool::new as Made, WorkspacePool::exact] {
            let pool = pool_of(rig, made, 4);
            let [a, b] = rig.streams();
            let lease = pool.lease(&a, 3 * MIB).unwrap();
            let address = lease.as_device_ptr();
            let hold = rig.hold(&a);
            fill(&rig.context, address, 3 * MIB, &a);
            drop(lease);
            let other = pool.lease(&b, 3 * MIB).unwrap();
            fill(&rig.context, other.as_device_ptr(), 3 * MIB, &b);
            assert_ne!(other.as_device_ptr(), address);
            // On its own stream it is available immediately, behind the kernel.
            let same = pool.lease(&a, 3 * MIB).unwrap();
            assert_eq!(same.as_device_ptr(), address);
            fill(&rig.context, address, 3 * MIB, &a);
            drop((same, other));
            hold.release();
        }
    });
}

/// S4.12: other streams that were recorded.
#[test]
fn s4_12_recorded_streams_keep_their_slab() {
    each(|rig| {
        for over in [true, false] {
            let pool = pool_of(rig, WorkspacePool::new, 4);
            let [a, b] = rig.streams();
            let lease = pool.lease(&a, MIB).unwrap();
            let hold = rig.busy(&b);
            fill(&rig.context, lease.as_device_ptr(), MIB, &b);
            if over {
                lease.record_use(&b).unwrap();
            } else {
                lease.record_stream(&b).unwrap();
            }
            drop(lease);
            assert_eq!(usage(&pool).cached_blocks, 0, "the allocator has it");
            let again = pool.lease(&a, MIB).unwrap();
            fill(&rig.context, again.as_device_ptr(), MIB, &a);
            hold.release();
        }
    });
}

/// S4.12: a use by the lease's own stream does not undo that another stream uses it.
#[test]
fn s4_12_a_later_use_by_the_own_stream_keeps_the_slab_of_others() {
    each(|rig| {
        for over in [true, false] {
            for made in [WorkspacePool::new as Made, WorkspacePool::exact] {
                let pool = pool_of(rig, made, 4);
                let [a, b] = rig.streams();
                let lease = pool.lease(&a, MIB).unwrap();
                let record = |stream: &Stream| match over {
                    true => lease.record_use(stream).unwrap(),
                    false => lease.record_stream(stream).unwrap(),
                };
                let hold = rig.busy(&b);
                fill(&rig.context, lease.as_device_ptr(), MIB, &b);
                record(&b);
                record(&a);
                drop(lease);
                assert_eq!(usage(&pool).cached_blocks, 0, "the allocator has it");
                let again = pool.lease(&a, MIB).unwrap();
                fill(&rig.context, again.as_device_ptr(), MIB, &a);
                hold.release();
            }
        }
    });
}

/// S4.12: what a stream was given through a lease after it was retired keeps the slab, too, also below other
/// resources; the slab goes to the allocator then, which has it when the stream is done.
#[test]
fn s4_12_work_of_a_retired_stream_keeps_its_slab() {
    each(|rig| {
        for made in [WorkspacePool::new as Made, WorkspacePool::exact] {
            let pool = pool_of(rig, made, 4);
            let below = |pool: &WorkspacePool| -> Arc<dyn MemoryResource> {
                Arc::new(Budget::of_live(AccessOrdered::new(pool.clone()), None))
            };
            let sources: [Arc<dyn MemoryResource>; 3] = [
                Arc::new(pool.clone()),
                Arc::new(Budget::new(pool.clone(), None)),
                below(&pool),
            ];
            for source in sources {
                let [a, b] = rig.streams();
                let allocator = pool.allocator();
                // Another stream, for which memory of this one has to be complete.
                drop(allocator.allocate(MIB, &b).unwrap());
                let mut lease = DeviceBuffer::<u8>::zeroed(&source, 3 * MIB, &a).unwrap();
                allocator.retire(&a).unwrap();
                // The end of what the stream's last marker covers is seen, and not that of what comes now.
                rig.settle(&a);
                allocator.trim(0).unwrap();
                let hold = rig.hold(&a);
                lease.fill(1, &a).unwrap();
                let address = lease.as_device_ptr();
                drop(lease);
                assert_eq!(usage(&pool).cached_blocks, 0, "the allocator has it");
                // What goes to the driver here is reported if it is in use.
                allocator.trim(0).unwrap();
                let next = DeviceBuffer::filled(allocator, 4 * MIB, 2u8, &b).unwrap();
                assert_ne!(next.as_device_ptr(), address, "still being filled");
                hold.release();
                assert_eq!(next.to_vec().unwrap(), vec![2; 4 * MIB]);
            }
        }
    });
}

/// S4.13
#[test]
fn s4_13_devices_never_mix() {
    if on_cuda() {
        eprintln!("SKIPPED on cuda: needs two devices");
        return;
    }
    let sim = Simulator::new(SimConfig::with_devices(2, 1 << 30)).unwrap();
    let driver = sim.driver().unwrap();
    let context = |ordinal| driver.context(ordinal).unwrap();
    let [first, second] = [context(0), context(1)].map(|context| {
        let allocator = Allocator::with_config(&context, Config::new()).unwrap();
        WorkspacePool::new(&allocator)
    });
    let [on_first, on_second] = [rig_stream(&first), rig_stream(&second)];
    let held = first.lease(&on_first, MIB).unwrap();
    drop(first.lease(&on_first, MIB).unwrap());
    assert_matches!(
        first.lease(&on_second, MIB),
        Err(cualloc::Error::WrongDevice { .. })
    );
    let other = second.lease(&on_second, MIB).unwrap();
    assert_ne!(other.as_device_ptr(), held.as_device_ptr());
    assert_eq!(usage(&second).hits, 0);
}

/// S4.15
#[test]
fn s4_15_exact_leases_cost_the_requested_bytes() {
    each(|rig| {
        let stream = rig.stream();
        let bytes = 4 * MIB + 1;
        let exact = pool_of(rig, WorkspacePool::exact, 4);
        let lease = exact.lease(&stream, bytes).unwrap();
        assert_eq!(lease.byte_len(), 4 * MIB + 512);
        assert_eq!(usage(&exact).used.current, (4 * MIB + 512) as u64);
        assert_eq!(usage(&exact).requested.current, bytes as u64);
        let classes = pool_of(rig, WorkspacePool::new, 4);
        let class = classes.lease(&stream, bytes).unwrap();
        let stats = usage(&classes);
        assert_eq!(
            (stats.requested.current, stats.used.current),
            (bytes as u64, 8 << 20)
        );
        drop((lease, class));
        assert_eq!(usage(&classes).requested.current, 0);
    });
}

/// S4.16
#[test]
fn s4_16_sizes_above_the_last_class_are_errors() {
    each(|rig| {
        for made in [WorkspacePool::new as Made, WorkspacePool::exact] {
            let (pool, stream) = (pool_of(rig, made, 4), rig.stream());
            let before = rig.memory_calls();
            for bytes in [(1 << 63) + 1, usize::MAX, 1 << 62] {
                let error = pool.lease(&stream, bytes).unwrap_err();
                assert_matches!(error, Error::Invalid(InvalidArgument::Size { .. }));
            }
            assert_eq!(rig.memory_calls(), before);
            assert_eq!(usage(&pool).misses, 0);
        }
    });
}

/// S4.17, S4.20
#[test]
fn s4_17_s4_20_failures_are_distinguished() {
    each(|rig| {
        let Some(sim) = rig.sim() else { return };
        let allocator = rig.limited(64 * MIB);
        let pool = WorkspacePool::new(&allocator);
        let stream = rig.stream();
        let full = pool.lease(&stream, 512 * MIB).unwrap_err();
        assert!(full.is_out_of_memory());
        assert_eq!(full.code(), CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        let call = if rig.packed() {
            "cuMemCreate"
        } else {
            "cuMemAlloc_v2"
        };
        let code = CUresult::CUDA_ERROR_INVALID_CONTEXT;
        sim.fail(FailPlan::call(call, code).unwrap());
        let wrong = pool.lease(&stream, MIB).unwrap_err();
        assert!(!wrong.is_out_of_memory());
        assert_eq!(wrong.code(), code);
    });
    let Err(missing) = Driver::load() else {
        eprintln!(
            "SKIPPED in part: there is a driver, and the case without one needs a machine without it"
        );
        return;
    };
    let error = Error::from(missing);
    assert_eq!(error.code(), CUresult::CUDA_ERROR_NOT_INITIALIZED);
    assert!(std::error::Error::source(&error).is_some());
}

/// S4.18
#[test]
fn s4_18_idle_slabs_go_when_memory_is_needed() {
    each(|rig| {
        let allocator = rig.limited(128 * MIB);
        let pool = WorkspacePool::new(&allocator);
        let stream = rig.stream();
        let leases: Vec<_> = (0..3)
            .map(|_| pool.lease(&stream, 32 * MIB).unwrap())
            .collect();
        drop(leases);
        assert_eq!(usage(&pool).cached_blocks, 3);
        // Not to be had beside the slabs.
        drop(allocator.allocate(100 * MIB, &stream).unwrap());
        assert!(usage(&pool).cached_blocks < 3);
        drop(pool.lease(&stream, 100 * KIB).unwrap());
        assert!(pool.trim(0).unwrap().released > 0);
        let stats = usage(&pool);
        assert_eq!((stats.cached_blocks, stats.cached_bytes()), (0, 0));
        drop(pool);
        rig.close(&allocator);
    });
}

/// S0.1: a lease of nothing has memory all the same, by the sizing.
#[test]
fn s0_1_a_lease_of_nothing_has_the_smallest_size() {
    each(|rig| {
        for (made, size) in [
            (WorkspacePool::new as Made, 1024),
            (WorkspacePool::exact, 512),
        ] {
            let (pool, stream) = (pool_of(rig, made, 4), rig.stream());
            let lease = pool.lease(&stream, 0).unwrap();
            let requested = lease.id().unwrap().bytes();
            assert_eq!((lease.byte_len(), requested), (size, 0));
            fill(&rig.context, lease.as_device_ptr(), size, &stream);
        }
    });
}

/// S4.14, S4.11: a name of a lease says when that is over, also while the memory is on lease again.
#[test]
fn s4_14_s4_11_names_know_when_the_lease_is_over() {
    use cualloc::resource::BlockState;
    each(|rig| {
        let (pool, stream) = (pool_of(rig, WorkspacePool::new, 4), rig.stream());
        let block = pool.allocate_block(&Request::new(MIB), &stream).unwrap();
        let (name, address) = (block.id(), block.ptr());
        assert_eq!(pool.state(&name), BlockState::Live);
        pool.deallocate_block(block).unwrap();
        assert_eq!(pool.state(&name), BlockState::Free);
        let again = pool.lease(&stream, MIB).unwrap();
        assert_eq!(again.as_device_ptr(), address);
        assert_eq!(pool.state(&name), BlockState::Free);
        assert_matches!(
            pool.record_use(&name, &stream),
            Err(Error::UseAfterFree { .. })
        );
    });
}

/// S4.1, S4.16
#[test]
fn s4_1_s4_16_classes_are_powers_of_two_and_do_not_overflow() {
    let sizes = [0, 1, 1024, 1025, 4 << 20, (4 << 20) + 1, 1 << 63];
    let classes = [1024, 1024, 1024, 2048, 4 << 20, 8 << 20, 1 << 63];
    assert_eq!(sizes.map(WorkspacePool::size_class), classes.map(Some));
    let beyond = [(1 << 63) + 1, usize::MAX];
    assert_eq!(beyond.map(WorkspacePool::size_class), [None, None]);
}
