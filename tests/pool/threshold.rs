//! The pool with a release threshold.

use std::sync::Mutex;

use cualloc::driver::{Context, sys};
use cualloc::error::InvalidArgument;
use cualloc::pool::ThresholdPool;
use cualloc::resource::{MemoryResource, Usage};
use cualloc::sim::{FailPlan, SimConfig};
use cualloc::{Config, DeviceBuffer, Error, Policy};

use crate::common::{MIB, Rig, assert_matches, each, only_on};
use crate::fill;

fn usage(pool: &ThresholdPool) -> Usage {
    pool.usage().unwrap()
}

fn pool_of(rig: &Rig) -> ThresholdPool {
    ThresholdPool::on_driver(&rig.driver, 0, Config::new().policy(rig.policy))
}

/// S3.1, S0.3
#[test]
fn s3_1_s0_3_creation_needs_no_driver_and_ordinals_are_checked() {
    assert_eq!(ThresholdPool::new(7).ordinal(), 7);
    each(|rig| {
        let before = rig.driver.calls();
        let pool = ThresholdPool::on_driver(&rig.driver, 500, Config::new());
        assert_eq!(pool.ordinal(), 500);
        assert_eq!(rig.driver.calls().since(&before).total(), 0);
        let error = pool.uninit::<u8>(1, &rig.stream()).unwrap_err();
        assert_matches!(
            error,
            Error::InvalidDevice {
                ordinal: 500,
                devices: 1..
            }
        );
        assert_eq!(error.code(), sys::CUresult::CUDA_ERROR_INVALID_DEVICE);
    });
}

/// S3.2
#[test]
fn s3_2_typed_buffers_have_at_least_one_element_and_no_overflow() {
    each(|rig| {
        let (pool, stream) = (pool_of(rig), rig.stream());
        assert_matches!(
            pool.uninit::<u32>(0, &stream),
            Err(Error::Invalid(InvalidArgument::Size { bytes: 0 }))
        );
        // The first request makes the allocator, which tries the device's memory.
        drop(pool.uninit::<u32>(1, &stream).unwrap());
        let before = rig.memory_calls();
        for len in [usize::MAX, usize::MAX / 4 + 1, usize::MAX / 8] {
            let error = pool.uninit::<u64>(len, &stream).unwrap_err();
            assert_matches!(error, Error::Invalid(InvalidArgument::TooLarge { .. }));
            assert_eq!(error.code(), sys::CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        assert_eq!(rig.memory_calls(), before);
        let mut buffer = DeviceBuffer::<u32>::zeroed(&pool, 1000, &stream).unwrap();
        assert_eq!((buffer.len(), buffer.is_empty()), (1000, false));
        assert_eq!(buffer.byte_len(), 4000);
        assert_ne!(buffer.as_device_ptr(), 0);
        buffer.as_mut_slice().fill(7, &stream).unwrap();
        assert_eq!(buffer.to_vec().unwrap(), vec![7; 1000]);
        buffer.free().unwrap();
    });
}

/// S3.4, S3.38
#[test]
fn s3_4_s3_38_figures_are_those_of_the_allocator() {
    each(|rig| {
        let (pool, stream) = (pool_of(rig), rig.stream());
        assert_eq!(usage(&pool).reserved.current, 0);
        let first = pool.uninit::<u8>(4 * MIB, &stream).unwrap();
        let second = pool.uninit::<u8>(2 * MIB, &stream).unwrap();
        drop(first);
        let stats = usage(&pool);
        assert_eq!(
            (stats.blocks.total_allocated, stats.blocks.total_freed),
            (2, 1)
        );
        let (used, held) =
            pool.allocator()
                .unwrap()
                .snapshot()
                .iter()
                .fold((0, 0), |(used, held), segment| {
                    let live = segment.blocks.iter().filter(|b| b.requested > 0);
                    (
                        used + live.map(|b| b.size).sum::<u64>(),
                        held + segment.size,
                    )
                });
        assert_eq!((stats.used.current, stats.reserved.current), (used, held));
        assert_eq!(stats.cached_bytes(), held - used);
        assert!(stats.used.peak >= (6 * MIB) as u64);
        stream.synchronize().unwrap();
        pool.trim(0).unwrap();
        assert_eq!(
            usage(&pool).used.current,
            used,
            "a trim leaves live bytes alone"
        );
        drop(second);
        pool.allocator().unwrap().check().unwrap();
    });
}

/// S3.5, S3.6
#[test]
fn s3_5_s3_6_threshold_and_trim_bound_cached_bytes() {
    each(|rig| {
        let (pool, stream) = (pool_of(rig), rig.stream());
        let buffers: Vec<_> = (0..8)
            .map(|_| pool.uninit::<u8>(32 * MIB, &stream).unwrap())
            .collect();
        drop(buffers);
        assert!(usage(&pool).cached_bytes() >= (256 * MIB) as u64);
        pool.allocator().unwrap().synchronize().unwrap();
        let done = pool.trim((96 * MIB) as u64).unwrap();
        assert!(done.released > 0);
        assert!(usage(&pool).cached_bytes() <= (96 * MIB) as u64);
        // Lowering the threshold trims immediately.
        pool.set_release_threshold(Some((32 * MIB) as u64)).unwrap();
        assert!(usage(&pool).cached_bytes() <= (32 * MIB) as u64);
        // And from then on it is honoured.
        for _ in 0..3 {
            let buffers: Vec<_> = (0..4)
                .map(|_| pool.uninit::<u8>(32 * MIB, &stream).unwrap())
                .collect();
            stream.synchronize().unwrap();
            drop(buffers);
            pool.allocator().unwrap().synchronize().unwrap();
            drop(pool.uninit::<u8>(MIB, &stream).unwrap());
        }
        pool.allocator().unwrap().synchronize().unwrap();
        drop(pool.uninit::<u8>(MIB, &stream).unwrap());
        assert!(usage(&pool).cached_bytes() <= (32 * MIB) as u64);
        assert_eq!(pool.release_threshold(), Some((32 * MIB) as u64));
        // Without one everything is kept.
        pool.set_release_threshold(None).unwrap();
        drop(pool.uninit::<u8>(96 * MIB, &stream).unwrap());
        assert!(usage(&pool).cached_bytes() >= (96 * MIB) as u64);
    });
}

/// S3.6: work in flight keeps its memory, whatever is asked.
#[test]
fn s3_6_work_in_flight_is_not_trimmed() {
    each(|rig| {
        let (pool, stream) = (pool_of(rig), rig.stream());
        let buffer = pool.uninit::<u8>(8 * MIB, &stream).unwrap();
        let hold = rig.busy(&stream);
        fill(&rig.context, buffer.as_device_ptr(), 8 * MIB, &stream);
        drop(buffer);
        if rig.policy == Policy::Packed {
            let done = pool.trim(0).unwrap();
            assert_eq!(done.released, 0, "the kernel is not done");
            assert!(done.pending > 0);
        }
        hold.release();
        stream.synchronize().unwrap();
        assert!(pool.trim(0).unwrap().released > 0);
        assert_eq!(usage(&pool).cached_bytes(), 0);
    });
}

/// S3.26, S3.3
#[test]
fn s3_26_s3_3_the_default_caches() {
    each(|rig| {
        let (pool, stream) = (pool_of(rig), rig.stream());
        drop(pool.uninit::<u8>(3 * MIB, &stream).unwrap());
        let before = (rig.memory_calls(), usage(&pool).reserved.current);
        for _ in 0..1000 {
            drop(pool.uninit::<u8>(3 * MIB, &stream).unwrap());
        }
        assert_eq!((rig.memory_calls(), usage(&pool).reserved.current), before);
        assert_eq!(usage(&pool).blocks.total_freed, 1001);
    });
}

/// S3.27
#[test]
fn s3_27_no_context_need_be_current() {
    each(|rig| {
        let (pool, stream) = (pool_of(rig), rig.stream());
        let driver = &rig.driver;
        std::thread::scope(|scope| {
            let work = || {
                // SAFETY: its owner keeps it meanwhile.
                assert!(unsafe { Context::current(driver) }.unwrap().is_none());
                let buffer = DeviceBuffer::<u8>::zeroed(&pool, MIB, &stream).unwrap();
                drop(buffer);
                stream.synchronize().unwrap();
                pool.trim(0).unwrap();
                // SAFETY: its owner keeps it meanwhile.
                assert!(unsafe { Context::current(driver) }.unwrap().is_none());
            };
            scope.spawn(work).join().unwrap();
        });
    });
}

/// S3.28
#[test]
fn s3_28_a_larger_free_block_serves() {
    each(|rig| {
        let (pool, stream) = (pool_of(rig), rig.stream());
        drop(pool.uninit::<u8>(1024, &stream).unwrap());
        let before = rig.memory_calls();
        drop(pool.uninit::<u8>(1000, &stream).unwrap());
        assert_eq!(rig.memory_calls(), before);
    });
}

/// S3.29
#[test]
fn s3_29_the_longest_idle_memory_is_released_first() {
    each(|rig| {
        let mut orders = Vec::new();
        for _ in 0..2 {
            let (pool, stream) = (pool_of(rig), rig.stream());
            let mut blocks = Vec::new();
            for _ in 0..4 {
                blocks.push(Some(pool.uninit::<u8>(64 * MIB, &stream).unwrap()));
                // Keeps its neighbours apart.
                blocks.push(Some(pool.uninit::<u8>(2 * MIB, &stream).unwrap()));
            }
            let mut freed = Vec::new();
            for at in [4, 0, 6, 2] {
                let buffer = blocks[at].take().unwrap();
                freed.push(buffer.as_device_ptr());
                drop(buffer);
            }
            pool.allocator().unwrap().synchronize().unwrap();
            let mut gone: Vec<usize> = Vec::new();
            while pool
                .trim(usage(&pool).cached_bytes().saturating_sub(1))
                .unwrap()
                .released
                > 0
            {
                let held = pool.allocator().unwrap().snapshot();
                // A whole handle lies around the middle.
                let inside = |at: &usize| {
                    let middle = freed[*at] + 32 * MIB as u64;
                    held.iter()
                        .any(|s| s.address <= middle && middle < s.address + s.size)
                };
                let now: Vec<usize> = (0..4)
                    .filter(|at| !gone.contains(at) && !inside(at))
                    .collect();
                gone.extend(now);
            }
            assert_eq!(gone, [0, 1, 2, 3], "in the order of the frees");
            orders.push(gone);
        }
        assert_eq!(orders[0], orders[1]);
    });
}

/// S3.30
#[test]
fn s3_30_a_failed_release_keeps_block_and_figures() {
    each(|rig| {
        let Some(sim) = rig.sim() else { return };
        let (pool, stream) = (pool_of(rig), rig.stream());
        drop(pool.uninit::<u8>(32 * MIB, &stream).unwrap());
        pool.allocator().unwrap().synchronize().unwrap();
        let before = usage(&pool);
        let call = if rig.packed() {
            "cuMemUnmap"
        } else {
            "cuMemFree_v2"
        };
        sim.fail(FailPlan::call(call, sys::CUresult::CUDA_ERROR_INVALID_VALUE).unwrap());
        assert!(pool.trim(0).is_err());
        let kept = usage(&pool).reserved.current;
        assert!(kept > 0 && kept <= before.reserved.current);
        assert_eq!(rig.driver_held(), Some(kept));
        pool.allocator().unwrap().check().unwrap();
        pool.trim(0).unwrap();
        assert_eq!(
            (usage(&pool).reserved.current, rig.driver_held()),
            (0, Some(0))
        );
    });
}

/// S3.31
#[test]
fn s3_31_a_panic_in_a_hook_poisons_nothing() {
    each(|rig| {
        let (pool, stream) = (pool_of(rig), rig.stream());
        let allocator = pool.allocator().unwrap();
        allocator.set_limit(Some((64 * MIB) as u64));
        allocator.add_relief_hook(cualloc::allocator::ReliefHook::new("panics", |_| {
            panic!("on purpose")
        }));
        let asked = pool.uninit::<u8>(128 * MIB, &stream).map(drop);
        assert!(asked.is_err_and(|error| error.is_out_of_memory()));
        assert_eq!(allocator.stats().reclaim.hooks, 1);
        allocator.remove_relief_hook("panics");
        drop(pool.uninit::<u8>(MIB, &stream).unwrap());
        allocator.check().unwrap();
        assert_eq!(usage(&pool).blocks.total_allocated, 1);
        allocator.close().unwrap();
    });
}

/// S3.33
#[test]
fn s3_33_same_stream_reuse_makes_no_driver_call() {
    each(|rig| {
        let (pool, stream) = (pool_of(rig), rig.stream());
        drop(pool.uninit::<u8>(MIB, &stream).unwrap());
        let hold = rig.busy(&stream);
        let before = rig.driver.calls();
        for _ in 0..10 {
            drop(pool.uninit::<u8>(MIB, &stream).unwrap());
        }
        assert_eq!(rig.driver.calls().since(&before).total(), 0);
        hold.release();
    });
}

/// S3.39
#[test]
fn s3_39_a_fatal_query_surfaces_and_nothing_is_recycled() {
    each(|rig| {
        let Some(sim) = rig.sim() else { return };
        let (pool, [a, b]) = (pool_of(rig), rig.streams());
        drop(pool.uninit::<u8>(MIB, &b).unwrap());
        let buffer = pool.uninit::<u8>(8 * MIB, &a).unwrap();
        let hold = rig.hold(&a);
        fill(&rig.context, buffer.as_device_ptr(), 8 * MIB, &a);
        let address = buffer.as_device_ptr();
        drop(buffer);
        let held = usage(&pool).reserved.current;
        sim.fail(
            FailPlan::call("cuEventQuery", sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS).unwrap(),
        );
        let refused = pool.uninit::<u8>(8 * MIB, &b);
        let error = refused.expect_err("the query failed");
        assert!(error.driver_error().unwrap().is_fatal(), "{error:?}");
        assert!(pool.uninit::<u8>(1, &a).is_err(), "the context is lost");
        assert_eq!(
            usage(&pool).reserved.current,
            held,
            "{address:#x} is still in the heap"
        );
        hold.release();
    });
}

/// S3.37, S3.9
#[test]
fn s3_37_s3_9_without_a_driver_there_is_no_address() {
    if crate::common::on_cuda() || cualloc::driver::Driver::load().is_ok() {
        eprintln!("SKIPPED: there is a driver");
        return;
    }
    let error = cualloc::Error::from(cualloc::driver::Driver::load().unwrap_err());
    assert_matches!(error, cualloc::Error::DriverUnavailable(_));
    assert_eq!(error.code(), sys::CUresult::CUDA_ERROR_NOT_INITIALIZED);
    let pool = ThresholdPool::new(0);
    assert!(pool.allocator().is_err() && pool.allocator().is_err());
    assert_matches!(
        cualloc::pool::TypedPool::global().get(0),
        Err(cualloc::Error::DriverUnavailable(_))
    );
}

/// S3.35, through a pool: a failure to open is not remembered.
#[test]
fn s3_35_a_failure_to_open_is_not_remembered() {
    only_on(Policy::Packed, SimConfig::with_devices(1, 1 << 30), |rig| {
        let Some(sim) = rig.sim() else { return };
        let (pool, stream) = (pool_of(rig), rig.stream());
        sim.fail(
            FailPlan::call(
                "cuDeviceTotalMem_v2",
                sys::CUresult::CUDA_ERROR_SYSTEM_NOT_READY,
            )
            .unwrap(),
        );
        assert!(pool.uninit::<u8>(1, &stream).is_err());
        drop(pool.uninit::<u8>(1, &stream).unwrap());
    });
}

/// S2.19: a shortage elsewhere drains the cache.
#[test]
fn s2_19_relief_of_other_allocators() {
    each(|rig| {
        let Some(sim) = rig.maybe_sim() else {
            eprintln!("SKIPPED on cuda: needs a small device");
            return;
        };
        sim.take_memory(0, 6 << 30);
        let (pool, stream) = (pool_of(rig), rig.stream());
        drop(pool.uninit::<u8>(1 << 30, &stream).unwrap());
        pool.allocator().unwrap().synchronize().unwrap();
        let other = rig.allocator();
        let keeper = pool.clone();
        let relief = move |missing| {
            let keep = usage(&keeper).cached_bytes().saturating_sub(missing);
            keeper.trim(keep).map_or(0, |done| done.released)
        };
        other.add_relief_hook(cualloc::allocator::ReliefHook::new("pool", relief));
        let seen = Mutex::new(usage(&pool).cached_bytes());
        let block = other.allocate(3 << 29, &stream).unwrap();
        assert!(usage(&pool).cached_bytes() < *seen.lock().unwrap());
        drop(block);
    });
}
