//! Allocators without handles that a capture keeps from giving their memory back. Not beside other tests:
//! every allocator that is made, trimmed or dropped in the process tries to close them.
#![cfg(feature = "sim")]

mod common;

use std::sync::{Mutex, PoisonError};

use common::capturing::*;
use common::*;
use cualloc::driver::sys;
use cualloc::sim::FailPlan;

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
fn d8_a_later_allocator_gives_back_what_an_orphan_holds() {
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
