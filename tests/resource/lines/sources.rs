//! The direct and the async resource, and what runtimes are made of.

use cualloc::Policy;
use cualloc::driver::{Stream, sys};
use cualloc::error::{InvalidArgument, StreamMisuse};
use cualloc::resource::*;
use cualloc::sim::{FailPlan, SimConfig};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::*;
use crate::common::*;
use crate::held;

/// S5.19, S5.61, S5.62: synchronous, whatever the stream does.
#[test]
fn s5_19_s5_61_s5_62_direct_resource_waits_for_the_device() {
    packed(|rig| {
        let stream = rig.stream();
        let direct = CudaMemory::new(&rig.context);
        let calls = rig.calls("cuMemAlloc_v2");
        let zero = ask(&direct, 0, &stream);
        assert_matches!(
            zero,
            Err(Error::Invalid(InvalidArgument::Size { bytes: 0 }))
        );
        assert_eq!(rig.calls("cuMemAlloc_v2"), calls);
        let block = take(&direct, 4096, &stream);
        let id = block.id();
        let busy = rig.busy(&stream);
        rig.stamp(block.ptr(), 4096, 9, &stream);
        // The driver does not promise that its free waits: this is asked for.
        let waits = rig.calls("cuCtxSynchronize");
        direct.deallocate_block(block).unwrap();
        assert_eq!(rig.calls("cuCtxSynchronize"), waits + 1);
        assert!(stream.is_complete().unwrap(), "the work is done");
        assert_eq!(held(&direct), (0, 0));
        assert_eq!(direct.state(&id), BlockState::Free);
        busy.release();
    });
}

/// S5.20: what is refused is refused before any change.
#[test]
fn s5_20_foreign_streams_and_collisions_change_nothing() {
    only_on(
        Policy::Packed,
        SimConfig::with_devices(2, GIB as u64),
        |rig| {
            if rig.driver.device_count().unwrap() < 2 {
                eprintln!("SKIPPED: needs two devices");
                return;
            }
            let resource = asynchronous(rig);
            let second = rig.driver.context(1).unwrap();
            let elsewhere = Stream::new(&second).unwrap();
            let calls = rig.memory_calls();
            let wrong = ask(&resource, 64, &elsewhere);
            assert_matches!(
                wrong,
                Err(Error::WrongDevice {
                    expected: 0,
                    found: 1
                })
            );
            let Some(_) = rig.sim() else { return };
            let sim = cualloc::sim::Simulator::new(SimConfig::with_devices(1, 1 << 30)).unwrap();
            let driver = sim.driver().unwrap();
            let context = driver.context(0).unwrap();
            let foreign = Stream::new(&context).unwrap();
            let refused = ask(&resource, 64, &foreign);
            assert_matches!(refused, Err(Error::Stream(StreamMisuse::ForeignDriver)));
            assert_eq!(rig.memory_calls(), calls);
            // A source that hands the same memory out twice.
            let same = AccessOrdered::new(Twice(rig.allocator(), Mutex::default()));
            let stream = rig.stream();
            let block = take(&same, 64, &stream);
            let collision = ask(&same, 64, &stream);
            assert_matches!(collision, Err(Error::Overlap { new, old }) if new == old);
            assert_eq!(same.state(&block.id()), BlockState::Live);
            assert_eq!(same.usage().unwrap().requested.current, 64);
            same.prepare_use(&block.id(), &stream, Access::Read)
                .unwrap();
            same.deallocate_block(block).unwrap();
            assert_eq!(same.reap().unwrap(), 64);
        },
    );
}

/// S5.34: bounded, numbered, and never a stream that was not asked for.
#[test]
fn s5_34_stream_pool_is_bounded() {
    packed(|rig| {
        let pool = StreamPool::new(&rig.context);
        let ids: Vec<u64> = (0..16).map(|_| pool.acquire().unwrap().0).collect();
        assert_eq!(ids, (1..=16).collect::<Vec<u64>>());
        let full = pool.acquire();
        assert_matches!(full, Err(Error::Exhausted { maximum: 16, .. }));
        assert!(pool.get(17).is_none());
        assert!(pool.get(16).is_some());
        let one = StreamPool::with_capacity(&rig.context, 0);
        if fail(rig, "cuStreamCreate") {
            assert!(one.acquire().is_err());
            assert_eq!(one.acquire().unwrap().0, 1, "a failure takes no place");
        } else {
            one.acquire().unwrap();
        }
        assert!(one.acquire().is_err(), "0 is raised to 1");
    });
}

/// S5.35: one per device, built once, failed builds tried again.
#[test]
fn s5_35_runtimes_are_built_once() {
    only_on(
        Policy::Packed,
        SimConfig::with_devices(2, GIB as u64),
        |rig| {
            let builds = Arc::new(AtomicU64::new(0));
            let counted = Arc::clone(&builds);
            let driver = rig.driver.clone();
            let runtimes = PerDevice::new(move |ordinal| {
                if counted.fetch_add(1, Ordering::SeqCst) == 0 {
                    return Err(Error::Closed);
                }
                standard(&driver.context(ordinal)?)
            });
            assert!(runtimes.get(0).is_err());
            let all: Vec<Arc<dyn MemoryResource>> = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| runtimes.get(0))).collect();
                threads
                    .into_iter()
                    .map(|t| t.join().unwrap().unwrap())
                    .collect()
            });
            assert!(all.iter().all(|stack| Arc::ptr_eq(stack, &all[0])));
            assert_eq!(builds.load(Ordering::SeqCst), 2);
            let count = rig.driver.device_count().unwrap();
            let beyond = runtimes.get(count).map(drop).unwrap_err().code();
            assert_eq!(beyond, sys::CUresult::CUDA_ERROR_INVALID_DEVICE);
            assert_eq!(all[0].ordinal(), 0);
        },
    );
}

/// The code that is fatal is not used here, where drivers must go on.
#[test]
fn lost_context_is_an_error() {
    packed(|rig| {
        let Some(sim) = rig.sim() else { return };
        let resource = asynchronous(rig);
        let stream = rig.stream();
        let block = take(&resource, 64, &stream);
        sim.fail(FailPlan::call("cuEventRecord", sys::CUresult::CUDA_ERROR_LAUNCH_FAILED).unwrap());
        let failure = resource.deallocate_block(block).unwrap_err();
        assert!(failure.error.driver_error().is_some_and(|e| e.is_fatal()));
        std::mem::forget(failure);
    });
}
