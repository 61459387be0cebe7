//! The driver's own pools.

use cualloc::driver::sys::{CUmemPool_attribute as Attribute, CUresult};
use cualloc::error::InvalidArgument;
use cualloc::pool::{DriverPool, DriverPoolConfig, TypedPool};
use cualloc::resource::{BlockState, MemoryResource};
use cualloc::sim::{FailPlan, Mode, SimConfig};
use cualloc::{DeviceBuffer, Error, Policy, Request};

use crate::common::{MIB, Rig, assert_matches, only, only_on};
use crate::fill;

const FOLLOW_EVENTS: Attribute = Attribute::CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES;
const OPPORTUNISTIC: Attribute = Attribute::CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC;
const INTERNAL_DEPENDENCIES: Attribute =
    Attribute::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES;
const RELEASE_THRESHOLD: Attribute = Attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
const RESERVED_CURRENT: Attribute = Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT;
const RESERVED_HIGH: Attribute = Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH;
const USED_CURRENT: Attribute = Attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT;
/// The driver's errors for calls that a capture forbids.
const CAPTURING: CUresult = CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
const USED_HIGH: Attribute = Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH;

fn with_pool(config: DriverPoolConfig, test: impl Fn(&Rig, &DriverPool)) {
    only(Policy::Packed, |rig| {
        test(rig, &DriverPool::new(&rig.context, config).unwrap());
    });
}

/// Blocks that are live, of a pool that may be destroyed.
fn live(pool: &DriverPool) -> u64 {
    pool.usage().map_or(0, |usage| usage.blocks.current)
}

/// S3.8
#[test]
fn s3_8_pools_are_made_and_destroyed() {
    with_pool(DriverPoolConfig::new(), |rig, pool| {
        assert_eq!(MemoryResource::ordinal(pool), 0);
        assert!(!pool.raw().is_null());
        let stream = rig.stream();
        let block = DeviceBuffer::<u8>::uninit(pool, 1000, &stream).unwrap();
        fill(&rig.context, block.as_device_ptr(), 1000, &stream);
        block.free().unwrap();
        pool.destroy().unwrap();
        pool.destroy().unwrap();
        assert_matches!(
            DeviceBuffer::<u8>::uninit(pool, 1, &stream),
            Err(Error::Closed)
        );
        assert_matches!(pool.usage(), Err(Error::Closed));
        assert_eq!(rig.calls("cuMemPoolDestroy"), 1);
        // A drop destroys too, and keeps its troubles to itself.
        drop(DriverPool::new(&rig.context, DriverPoolConfig::new()).unwrap());
        assert_eq!(rig.calls("cuMemPoolDestroy"), 2);
    });
}

/// S3.8: a block is freed by its address on the stream that is named.
#[test]
fn s3_8_memory_is_freed_by_its_address_on_a_stream() {
    with_pool(DriverPoolConfig::new(), |rig, pool| {
        let [home, other] = rig.streams();
        let block = pool.allocate_block(&Request::new(MIB), &home).unwrap();
        let (address, id) = (block.ptr(), block.id());
        home.synchronize().unwrap();
        let hold = rig.busy(&other);
        fill(&rig.context, address, MIB, &other);
        // SAFETY: the allocation is complete, and the other stream alone uses it.
        unsafe { pool.free_raw_on(address, &other) }.unwrap();
        // Who brings the block back comes too late.
        assert_eq!((live(pool), pool.state(&id)), (0, BlockState::Free));
        let late = pool.deallocate_block(block).unwrap_err();
        assert!(matches!(late.error, Error::UseAfterFree { .. }), "{late:?}");
        // The home stream does not get it before the other one is done.
        let next = DeviceBuffer::<u8>::uninit(pool, MIB, &home).unwrap();
        fill(&rig.context, next.as_device_ptr(), MIB, &home);
        hold.release();
        next.free().unwrap();
        other.synchronize().unwrap();
        home.synchronize().unwrap();
        assert_eq!(pool.usage().unwrap().used.current, 0);
        pool.destroy().unwrap();
        // SAFETY: a destroyed pool frees nothing.
        let refused = unsafe { pool.free_raw_on(address, &other) };
        assert_matches!(refused, Err(Error::Closed));
    });
}

/// S3.8: a pool holds no more than its maximum, and anything if it has none.
#[test]
fn s3_8_a_maximum_is_kept() {
    let bounded = DriverPoolConfig::new().maximum(Some(64 << 20));
    with_pool(bounded, |rig, pool| {
        let stream = rig.stream();
        let half = DeviceBuffer::<u8>::uninit(pool, 32 * MIB, &stream).unwrap();
        let error = DeviceBuffer::<u8>::uninit(pool, 64 * MIB, &stream).unwrap_err();
        assert!(error.is_out_of_memory(), "{error:?}");
        let cualloc::Error::OutOfMemory(picture) = error else {
            panic!("{error:?}");
        };
        assert_eq!(picture.limit, Some(64 << 20));
        assert_eq!(picture.requested, 64 << 20);
        half.free().unwrap();
        stream.synchronize().unwrap();
        DeviceBuffer::<u8>::uninit(pool, 64 * MIB, &stream)
            .unwrap()
            .free()
            .unwrap();
        let free = DriverPool::new(&rig.context, DriverPoolConfig::new()).unwrap();
        DeviceBuffer::<u8>::uninit(&free, 128 * MIB, &stream)
            .unwrap()
            .free()
            .unwrap();
    });
}

/// S3.8: a destroy that fails says so, and is not repeated: the driver may have destroyed the pool.
#[test]
fn s3_8_a_failed_destroy_is_an_error() {
    with_pool(DriverPoolConfig::new(), |rig, pool| {
        let Some(sim) = rig.sim() else { return };
        let code = CUresult::CUDA_ERROR_SYSTEM_NOT_READY;
        sim.fail(FailPlan::call("cuMemPoolDestroy", code).unwrap());
        assert_eq!(pool.destroy().unwrap_err().code(), code);
        let refused = DeviceBuffer::<u8>::uninit(pool, 1, &rig.stream()).map(drop);
        assert_matches!(refused, Err(Error::Closed));
        pool.destroy().unwrap();
        assert_eq!(rig.calls("cuMemPoolDestroy"), 1);
    });
}

/// S3.9
#[test]
fn s3_9_zero_and_absent_are_errors_of_their_own() {
    with_pool(DriverPoolConfig::new(), |rig, pool| {
        let none = pool.allocate_block(&Request::new(0), &rig.stream());
        let error = none.map(drop).unwrap_err();
        assert_matches!(error, Error::Invalid(InvalidArgument::Size { bytes: 0 }));
        assert_eq!(error.code(), CUresult::CUDA_ERROR_INVALID_VALUE);
    });
    if crate::common::on_cuda() {
        eprintln!("SKIPPED on cuda: needs a driver without pools");
        return;
    }
    let missing = SimConfig {
        missing: vec!["cuMemPoolCreate".into()],
        ..SimConfig::default()
    };
    let mut unable = SimConfig::default();
    unable.devices[0].pools = false;
    for config in [missing, unable] {
        only_on(Policy::Packed, config, |rig| {
            let made = DriverPool::new(&rig.context, DriverPoolConfig::new());
            let error = made.unwrap_err();
            assert_matches!(error, Error::NotSupported { .. });
            assert_eq!(error.code(), CUresult::CUDA_ERROR_NOT_SUPPORTED);
            assert!(DriverPool::default_of(&rig.context).is_err());
        });
    }
}

/// S3.10
#[test]
fn s3_10_attributes_are_read_and_set() {
    with_pool(DriverPoolConfig::new(), |rig, pool| {
        for rule in [FOLLOW_EVENTS, OPPORTUNISTIC, INTERNAL_DEPENDENCIES] {
            assert_eq!(pool.get(rule).unwrap(), 1, "{rule:?}");
            for value in [0, 1] {
                pool.set(rule, value).unwrap();
                assert_eq!(pool.get(rule).unwrap(), value);
            }
            assert!(pool.set(rule, 2).is_err());
        }
        // Not the driver's default, which keeps nothing.
        assert_eq!(pool.get(RELEASE_THRESHOLD).unwrap(), u64::MAX);
        pool.set(RELEASE_THRESHOLD, 5 << 20).unwrap();
        assert_eq!(pool.get(RELEASE_THRESHOLD).unwrap(), 5 << 20);
        let stream = rig.stream();
        drop(DeviceBuffer::<u8>::uninit(pool, MIB, &stream).unwrap());
        assert!(pool.get(RESERVED_HIGH).unwrap() >= MIB as u64);
        assert!(pool.get(USED_HIGH).unwrap() >= MIB as u64);
        for (attribute, value) in [
            (RESERVED_CURRENT, 0),
            (USED_CURRENT, 0),
            (USED_HIGH, 1),
            (RESERVED_HIGH, 7),
        ] {
            let error = pool.set(attribute, value).unwrap_err();
            assert_matches!(error, Error::Invalid(InvalidArgument::Setting { .. }));
        }
        pool.set(USED_HIGH, 0).unwrap();
        assert_eq!(pool.get(USED_HIGH).unwrap(), 0);
        let own = rig.context.device();
        assert!(pool.has_access(own).unwrap());
        let default = DriverPool::default_of(&rig.context).unwrap();
        assert_ne!(default.raw(), pool.raw());
        // The device's own pool is not destroyed.
        default.destroy().unwrap();
        assert_eq!(rig.calls("cuMemPoolDestroy"), 0);
    });
}

/// S3.10: peers.
#[test]
fn s3_10_access_of_peers_is_given_and_taken() {
    if crate::common::on_cuda() {
        eprintln!("SKIPPED on cuda: needs two devices");
        return;
    }
    only_on(Policy::Packed, SimConfig::with_devices(2, 1 << 30), |rig| {
        let pool = DriverPool::new(&rig.context, DriverPoolConfig::new()).unwrap();
        let peer = rig.driver.device(1).unwrap();
        for on in [true, false] {
            pool.set_access(&peer, on).unwrap();
            assert_eq!(pool.has_access(&peer).unwrap(), on);
        }
        assert!(pool.set_access(rig.context.device(), false).is_err());
    });
}

/// S3.10: export.
#[cfg(unix)]
#[test]
fn s3_10_only_an_exportable_pool_has_a_descriptor() {
    with_pool(DriverPoolConfig::new(), |rig, pool| {
        assert!(pool.export().is_err());
        let shared = DriverPoolConfig::new().exportable(true);
        let shared = DriverPool::new(&rig.context, shared).unwrap();
        let descriptor = shared.export().unwrap();
        let stream = rig.stream();
        let blocks = [(); 2].map(|()| DeviceBuffer::<u8>::uninit(&shared, 1000, &stream).unwrap());
        let [one, other] = blocks.each_ref().map(|block| {
            let data = shared.export_block(block.as_device_ptr());
            data.unwrap().reserved
        });
        assert_ne!(one, other, "the data names the block");
        if rig.maybe_sim().is_some() {
            // The simulator's descriptors are numbers, not files.
            std::mem::forget(descriptor);
        }
    });
    if crate::common::on_cuda() {
        eprintln!("SKIPPED in part on cuda: needs a driver without export");
        return;
    }
    let config = SimConfig {
        missing: vec!["cuMemPoolExportToShareableHandle".into()],
        ..SimConfig::default()
    };
    only_on(Policy::Packed, config, |rig| {
        let config = DriverPoolConfig::new().exportable(true);
        let error = DriverPool::new(&rig.context, config).unwrap_err();
        assert_matches!(error, Error::NotSupported { .. });
    });
}

/// S3.11
#[test]
fn s3_11_usage_and_settings() {
    let bad = [
        DriverPoolConfig::new().maximum(Some(0)),
        DriverPoolConfig::new().maximum(Some(10)).initial(11),
        DriverPoolConfig::new()
            .maximum(Some(10))
            .release_threshold(Some(11)),
    ];
    for config in bad {
        assert!(config.validate().is_err(), "{config:?}");
    }
    only(Policy::Packed, |rig| {
        for config in bad {
            assert!(DriverPool::new(&rig.context, config).is_err());
        }
    });
    DriverPoolConfig::new()
        .initial(11)
        .release_threshold(Some(12))
        .validate()
        .unwrap();
    let config = DriverPoolConfig::new()
        .maximum(Some(64 << 20))
        .initial(32 << 20);
    with_pool(config, |rig, pool| {
        let usage = pool.usage().unwrap();
        assert!(usage.reserved.current >= 32 << 20, "{usage:?}");
        assert_eq!(usage.used.current, 0);
        let block = DeviceBuffer::<u8>::uninit(pool, 8 * MIB, &rig.stream()).unwrap();
        let usage = pool.usage().unwrap();
        assert_eq!(usage.used.current, 8 << 20);
        assert!(usage.used.peak >= 8 << 20 && usage.reserved.peak >= 32 << 20);
        assert_matches!(
            pool.set(RELEASE_THRESHOLD, 65 << 20),
            Err(Error::Invalid(InvalidArgument::Contradiction { .. }))
        );
        drop(block);
    });
}

/// S3.40
#[test]
fn s3_40_live_blocks_keep_a_pool() {
    with_pool(DriverPoolConfig::new(), |rig, pool| {
        let stream = rig.stream();
        let block = DeviceBuffer::<u8>::uninit(pool, MIB, &stream).unwrap();
        let error = pool.destroy().unwrap_err();
        assert_matches!(
            error,
            Error::InUse {
                what: "user",
                bytes: 0,
                count: 1
            }
        );
        let hold = rig.busy(&stream);
        fill(&rig.context, block.as_device_ptr(), MIB, &stream);
        block.free().unwrap();
        assert_eq!(live(pool), 0);
        // Work in flight is no obstacle.
        pool.destroy().unwrap();
        hold.release();
        stream.synchronize().unwrap();
    });
}

/// A free that a capture forbids gives the block back.
#[test]
fn a_refused_free_gives_the_block_back() {
    with_pool(DriverPoolConfig::new(), |rig, pool| {
        let Some(sim) = rig.sim() else { return };
        let block = DeviceBuffer::<u8>::uninit(pool, MIB, &rig.stream()).unwrap();
        sim.fail(FailPlan::call("cuMemFreeAsync", CAPTURING).unwrap());
        let failed = block.free().unwrap_err();
        assert_eq!(failed.error.code(), CAPTURING);
        assert_eq!(live(pool), 1);
        failed.value.free().unwrap();
        assert_eq!(live(pool), 0);
    });
}

/// After any other error the driver may have freed the memory, and given its address to others: it is freed once.
#[test]
fn r2_a_free_that_fails_is_not_repeated() {
    for executed in [false, true] {
        with_pool(DriverPoolConfig::new(), |rig, pool| {
            let Some(sim) = rig.sim() else { return };
            let stream = rig.stream();
            let block = DeviceBuffer::<u8>::uninit(pool, MIB, &stream).unwrap();
            let ptr = block.as_device_ptr();
            let fail = || {
                let code = CUresult::CUDA_ERROR_SYSTEM_NOT_READY;
                let plan = FailPlan::call("cuMemFreeAsync", code).unwrap();
                sim.fail(if executed { plan.executed() } else { plan });
            };
            fail();
            block.free().unwrap();
            assert_eq!(live(pool), 0);
            let next = DeviceBuffer::<u8>::uninit(pool, MIB, &stream).unwrap();
            assert_eq!(next.as_device_ptr() == ptr, executed);
            fail();
            drop(next);
            pool.trim(0).unwrap();
            assert_eq!(rig.calls("cuMemFreeAsync"), 2);
            let lost = if executed { 0 } else { 2 };
            assert_eq!(sim.leaks().pool_allocations, lost);
            assert_eq!(sim.reports(), []);
        });
    }
}

/// R2: a stream that uses the block until it is freed uses it on after a free that failed.
#[test]
fn r2_a_failed_free_forgets_no_lasting_use() {
    for (call, code) in [
        ("cuStreamWaitEvent", CUresult::CUDA_ERROR_NOT_PERMITTED),
        ("cuMemFreeAsync", CAPTURING),
    ] {
        with_pool(DriverPoolConfig::new(), |rig, pool| {
            let Some(sim) = rig.sim() else { return };
            sim.set_mode(Mode::Manual);
            let [home, other] = rig.streams();
            let block = DeviceBuffer::<u8>::uninit(pool, MIB, &home).unwrap();
            home.synchronize().unwrap();
            block.record_stream(&other).unwrap();
            fill(&rig.context, block.as_device_ptr(), MIB, &other);
            sim.fail(FailPlan::call(call, code).unwrap());
            let failed = block.free().unwrap_err();
            assert_eq!(failed.error.code(), code);
            fill(&rig.context, failed.value.as_device_ptr(), MIB, &other);
            failed.value.free().unwrap();
            let next = DeviceBuffer::<u8>::uninit(pool, MIB, &home).unwrap();
            fill(&rig.context, next.as_device_ptr(), MIB, &home);
            next.free().unwrap();
            sim.complete_all();
            assert_eq!(sim.reports(), []);
            sim.set_mode(Mode::Instant);
        });
    }
}

/// Marks of lasting uses take events that are there.
#[test]
fn lasting_uses_create_no_event_each_time() {
    with_pool(DriverPoolConfig::new(), |rig, pool| {
        let [home, other] = rig.streams();
        let cycle = || {
            let block = DeviceBuffer::<u8>::uninit(pool, 1000, &home).unwrap();
            block.record_stream(&other).unwrap();
            block.free().unwrap();
        };
        cycle();
        let created = rig.calls("cuEventCreate");
        (0..10).for_each(|_| cycle());
        assert_eq!(rig.calls("cuEventCreate"), created);
    });
}

/// R39
#[test]
fn r39_old_drivers_do_not_reuse_opportunistically() {
    if crate::common::on_cuda() {
        eprintln!("SKIPPED on cuda: needs an old driver");
        return;
    }
    for (version, on) in [(11_040, 0), (11_050, 1)] {
        let config = SimConfig {
            driver_version: version,
            ..SimConfig::default()
        };
        only_on(Policy::Packed, config, |rig| {
            let pool = DriverPool::new(&rig.context, DriverPoolConfig::new()).unwrap();
            assert_eq!(pool.get(OPPORTUNISTIC).unwrap(), on);
            let set = pool.set(OPPORTUNISTIC, 1);
            assert_eq!(set.is_ok(), on == 1);
        });
    }
}

/// No pool but the driver's uses its calls, and a typed pool runs beside it.
#[test]
fn pools_run_side_by_side() {
    with_pool(DriverPoolConfig::new(), |rig, pool| {
        let typed = TypedPool::new(&rig.allocator());
        let stream = rig.stream();
        let native = DeviceBuffer::<u8>::uninit(pool, MIB, &stream).unwrap();
        let calls = rig.calls("cuMemAllocFromPoolAsync");
        let ours = DeviceBuffer::<u8>::uninit(&typed, MIB, &stream).unwrap();
        assert_eq!(rig.calls("cuMemAllocFromPoolAsync"), calls);
        fill(&rig.context, native.as_device_ptr(), MIB, &stream);
        fill(&rig.context, ours.as_device_ptr(), MIB, &stream);
    });
}
