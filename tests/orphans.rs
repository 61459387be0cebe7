//! Allocators without handles, and dropped blocks of the driver's pools, that a capture keeps from giving their
//! memory back. Not beside other tests: every allocator that is made, trimmed or dropped in the process tries to
//! close and free them.
#![cfg(feature = "sim")]

mod common;

use std::sync::{Mutex, PoisonError};

use common::capturing::*;
use common::*;
use cualloc::driver::{Stream, sys};
use cualloc::pool::{DriverPool, DriverPoolConfig};
use cualloc::resource::{MemoryResource, Usage};
use cualloc::sim::{FailPlan, Mode, Simulator};
use cualloc::{DeviceBuffer, Error, Policy, Request};

/// One test after the other.
static ALONE: Mutex<()> = Mutex::new(());

fn each_alone(test: impl Fn(&Rig)) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    each(test);
}

/// D8: the last block of an allocator without handles is freed when the capture of its stream has ended.
#[test]
fn d8_the_last_block_dropped_in_a_capture_leaks_nothing() {
    each_alone(|rig| {
        for bytes in [1000, 3 * MIB] {
            let allocator = rig.allocator();
            let stream = allocator.create_stream().unwrap();
            let block = allocator.allocate(bytes, &stream).unwrap();
            drop(allocator);
            captured(rig, stream.raw(), || drop(block));
            drop(stream);
            if let Some(sim) = rig.sim() {
                assert_eq!((sim.memory_in_use(0), sim.leaks().streams), (0, 0));
            }
        }
    });
}

/// D8: a capture that is ended elsewhere is noticed by any other allocator.
#[test]
fn d8_a_later_allocator_releases_the_memory_of_an_orphan() {
    each_alone(|rig| {
        let Some(sim) = rig.sim() else {
            return;
        };
        for (at, bytes) in [1000, 3 * MIB, 1000, 3 * MIB].into_iter().enumerate() {
            let beside = rig.allocator();
            let allocator = rig.allocator();
            let stream = allocator.create_stream().unwrap();
            let block = allocator.allocate(bytes, &stream).unwrap();
            let handle = (at > 1).then(|| allocator.clone());
            drop(allocator);
            begin(rig, stream.raw())();
            if at % 2 == 1 {
                // The capture is known, so that the free asks about it, and is put off.
                assert!(stream.is_capturing().unwrap());
            }
            drop(block);
            // The handle may also go after the block.
            drop(handle);
            beside.trim(0).unwrap();
            assert!(sim.memory_in_use(0) > 0);
            assert_eq!(end(rig, stream.raw())(), sys::CUresult::CUDA_SUCCESS);
            match at % 3 {
                0 => drop(rig.allocator()),
                1 => drop(beside.trim(0).unwrap()),
                _ => beside.synchronize().unwrap(),
            }
            drop(stream);
            assert_eq!((sim.memory_in_use(0), sim.leaks().streams), (0, 0));
        }
    });
}

/// D8: an orphan whose context may not be waited for while something captures there.
#[test]
fn d8_an_orphan_that_cannot_wait_for_its_context_waits_for_the_capture() {
    each_alone(|rig| {
        let Some(sim) = rig.sim() else {
            return;
        };
        let allocator = rig.allocator();
        let (raw, kept) = (RawStream::new(rig), rig.stream());
        leave_work(&allocator, &raw);
        drop(allocator.allocate(MIB / 2, &kept).unwrap());
        captured(rig, kept.raw(), || {
            drop(allocator);
            assert!(sim.memory_in_use(0) > 0);
        });
        assert_eq!(sim.memory_in_use(0), 0);
        raw.destroy();
    });
}

/// D8: an orphan whose end the driver refused is not given up: the next call of another allocator tries again.
#[test]
fn d8_an_orphan_that_the_driver_refused_to_close_is_closed_later() {
    each_alone(|rig| {
        let Some(sim) = rig.sim() else {
            return;
        };
        let calls = [
            "cuThreadExchangeStreamCaptureMode",
            "cuCtxSetCurrent",
            "cuEventSynchronize",
            "cuMemUnmap",
            "cuMemFree_v2",
        ];
        for (at, call) in calls.into_iter().enumerate() {
            let beside = rig.allocator();
            let allocator = rig.allocator();
            let stream = allocator.create_stream().unwrap();
            let block = allocator.allocate(3 * MIB, &stream).unwrap();
            let handle = (at % 2 > 0).then(|| allocator.clone());
            drop(allocator);
            let code = sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY;
            sim.fail(FailPlan::call(call, code).unwrap().times(u64::MAX));
            drop(block);
            drop(handle);
            drop(stream);
            sim.clear_failures();
            beside.trim(0).unwrap();
            let leaks = sim.leaks();
            assert_eq!(
                (sim.memory_in_use(0), leaks.streams, leaks.events),
                (0, 0, 0),
                "{call}"
            );
            drop(beside);
        }
    });
}

/// With a pool of the driver, on the simulator.
fn with_pool(test: impl Fn(&Rig, &Simulator, &DriverPool)) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    only(Policy::Packed, |rig| {
        if let Some(sim) = rig.sim() {
            let pool = DriverPool::new(&rig.context, DriverPoolConfig::new()).unwrap();
            test(rig, sim, &pool);
            assert_eq!(live(&pool), (0, 0));
            drop(pool);
            let leaks = sim.leaks();
            assert_eq!(
                (leaks.pool_allocations, leaks.pools, leaks.events),
                (0, 0, 0)
            );
        }
    });
}

/// Blocks that are live, and their bytes, of a pool that may be destroyed.
fn live(pool: &DriverPool) -> (u64, u64) {
    let counts = |usage: Usage| (usage.blocks.current, usage.requested.current);
    pool.usage().map_or((0, 0), counts)
}

type Later = fn(&Rig, &DriverPool, &Stream);

/// The calls that free a dropped block of a pool as soon as possible.
const LATER: [Later; 7] = [
    |_, pool, stream| drop(DeviceBuffer::<u8>::uninit(pool, MIB, stream).unwrap()),
    |_, pool, _| assert!(pool.trim(0).is_ok()),
    |_, pool, _| drop(pool.clone()),
    |_, pool, _| pool.destroy().unwrap(),
    |rig, _, _| drop(rig.allocator()),
    |rig, _, stream| captured(rig, stream.raw(), || {}),
    |rig, _, _| drop(rig.allocator().synchronize()),
];

/// D8: a block of a driver's pool that is dropped while its stream captures is freed after that.
#[test]
fn d8_a_native_block_dropped_in_a_capture_is_freed_later() {
    for later in LATER {
        with_pool(|rig, _, pool| {
            let stream = rig.stream();
            let block = DeviceBuffer::<u8>::uninit(pool, MIB, &stream).unwrap();
            begin(rig, stream.raw())();
            drop(block);
            pool.trim(0).unwrap();
            assert_eq!(live(pool), (1, MIB as u64));
            assert_eq!(end(rig, stream.raw())(), sys::CUresult::CUDA_SUCCESS);
            later(rig, pool, &stream);
            assert_eq!(live(pool).0, 0);
        });
    }
    with_pool(|rig, _, pool| {
        let stream = rig.stream();
        let block = DeviceBuffer::<u8>::uninit(pool, MIB, &stream).unwrap();
        captured(rig, stream.raw(), || drop(block));
        assert_eq!(live(pool).0, 0);
    });
}

/// The driver's errors for calls that a capture forbids.
const CAPTURING: sys::CUresult = sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;

/// D8: one that the driver refuses to free is freed when it is willing, also after its pool's last handle.
#[test]
fn d8_a_native_block_that_the_driver_refused_is_freed_later() {
    let out_of_memory = sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY;
    for (call, code) in [
        ("cuMemFreeAsync", CAPTURING),
        ("cuCtxSetCurrent", out_of_memory),
        ("cuStreamWaitEvent", out_of_memory),
    ] {
        for later in LATER.into_iter().map(Some).chain([None]) {
            with_pool(|rig, sim, pool| {
                let [home, other] = rig.streams();
                let block = DeviceBuffer::<u8>::uninit(pool, MIB, &home).unwrap();
                block.record_stream(&other).unwrap();
                let own = later.is_none().then(|| {
                    let own = DriverPool::new(&rig.context, DriverPoolConfig::new());
                    let own = own.unwrap();
                    let block = DeviceBuffer::<u8>::uninit(&own, MIB, &home).unwrap();
                    block.record_stream(&other).unwrap();
                    (own, block)
                });
                sim.fail(FailPlan::call(call, code).unwrap().times(u64::MAX));
                drop(block);
                if let Some((own, block)) = own {
                    drop(own);
                    drop(block);
                }
                assert_eq!(live(pool).0, 1, "{call}");
                sim.clear_failures();
                match later {
                    Some(later) => later(rig, pool, &home),
                    None => drop(rig.allocator()),
                }
                assert_eq!(live(pool).0, 0, "{call}");
            });
        }
    }
}

/// D8 D2: until a dropped block is freed it keeps its recorded uses.
#[test]
fn d8_a_native_block_that_is_freed_later_keeps_its_uses() {
    with_pool(|rig, sim, pool| {
        sim.set_mode(Mode::Manual);
        let [home, other] = rig.streams();
        let block = DeviceBuffer::<u8>::uninit(pool, MIB, &home).unwrap();
        home.synchronize().unwrap();
        block.record_stream(&other).unwrap();
        let ptr = block.as_device_ptr();
        let plan = FailPlan::call("cuMemFreeAsync", CAPTURING).unwrap();
        sim.fail(plan.times(u64::MAX));
        drop(block);
        sim.clear_failures();
        rig.stamp(ptr, MIB, 1, &other);
        let next = DeviceBuffer::<u8>::uninit(pool, MIB, &home).unwrap();
        assert_eq!(live(pool).0, 1);
        rig.stamp(next.as_device_ptr(), MIB, 2, &home);
        drop(next);
        sim.complete_all();
        rig.assert_clean();
        sim.set_mode(Mode::Instant);
    });
}

/// D8: a block that was given back by hand stays its owner's until it can go.
#[test]
fn d8_a_native_block_deallocated_in_a_capture_is_freed_later() {
    with_pool(|rig, _, pool| {
        let stream = rig.stream();
        let block = pool.allocate_block(&Request::new(MIB), &stream).unwrap();
        let mut kept = None;
        captured(rig, stream.raw(), || {
            let refused = pool.deallocate_block(block).unwrap_err();
            assert!(matches!(refused.error, Error::Capturing { .. }));
            assert_eq!(live(pool).0, 1);
            kept = Some(*refused.value);
        });
        pool.deallocate_block(kept.unwrap()).unwrap();
        assert_eq!(live(pool).0, 0);
    });
}

/// D4 D8: memory allocated while a capture of its stream began has no owner, and is freed after the capture.
#[test]
fn d8_native_memory_that_a_capture_came_between_is_freed_later() {
    with_pool(|rig, sim, pool| {
        let stream = rig.stream();
        let start = Mutex::new(Some(begin(rig, stream.raw())));
        sim.after(move |moment| {
            if moment.call == "cuMemAllocFromPoolAsync"
                && let Some(start) = start.lock().unwrap().take()
            {
                start();
            }
        });
        let refused = DeviceBuffer::<u8>::uninit(pool, MIB, &stream);
        sim.clear_hooks();
        assert!(matches!(refused.map(drop), Err(Error::Capturing { .. })));
        assert_eq!(end(rig, stream.raw())(), sys::CUresult::CUDA_SUCCESS);
        assert_eq!(live(pool).0, 1);
        pool.trim(0).unwrap();
    });
}

/// D2 D8: a block of another thread's own stream is freed behind a wait for its context, which no capture there
/// suffers from.
#[test]
fn d8_a_native_block_of_another_threads_stream_waits_for_captures() {
    with_pool(|rig, _, pool| {
        let context = &rig.context;
        let allocate = || {
            let own = Stream::per_thread(context);
            let _entered = context.enter().unwrap();
            DeviceBuffer::<u8>::uninit(pool, MIB, &own).unwrap()
        };
        let block = std::thread::scope(|scope| scope.spawn(allocate).join().unwrap());
        let stream = rig.stream();
        captured(rig, stream.raw(), || {
            // Another request needs the memory.
            assert!(stream.is_capturing().unwrap());
            drop(block);
            pool.trim(0).unwrap();
            assert_eq!(live(pool).0, 1);
        });
        assert!(!stream.is_capturing().unwrap());
        pool.trim(0).unwrap();
        assert_eq!(live(pool).0, 0);
        // On a stream that was not queried, but that the legacy stream is ordered with.
        let raw = RawStream::blocking(rig);
        let block = std::thread::scope(|scope| scope.spawn(allocate).join().unwrap());
        captured(rig, raw.raw(), || {
            drop(block);
            assert_eq!(live(pool).0, 1);
        });
        assert_eq!(live(pool).0, 0);
        raw.destroy();
    });
}
