//! Blocks of dropped resources are freed later if they cannot be freed immediately.

use crate::common::capturing::*;
use crate::common::prelude::*;
use cualloc::exchange::dlpack::DLManagedTensor;
use cualloc::exchange::{DType, Peer, Tensor};
use cualloc::resource::{AccessOrdered, Budget, CudaMemory, MemoryResource};

fn live(allocator: &Allocator) -> u64 {
    allocator.stats().all.allocations.current
}

/// If the resource cannot record a ready event for a new block, it frees the block, even if further calls are refused.
#[test]
fn a_block_that_could_not_be_handed_out_is_freed() {
    each_simulated(|rig, sim| {
        for bytes in [1000, 3 * MIB] {
            // Every free asks the stream.
            let (allocator, [stream]) = rig.scene_with(Config::new().capture_checks(true));
            let resource = AccessOrdered::new(allocator.clone());
            let mut refused = 0;
            for first in 1..10 {
                let code = CUresult::CUDA_ERROR_INVALID_VALUE;
                let fail = |name| FailPlan::call(name, code).unwrap();
                sim.fail(fail("cuEventRecord").times(100));
                sim.fail(fail("cuStreamIsCapturing").nth(first).times(100));
                let made = resource.allocate_block(&Request::new(bytes).tag("never"), &stream);
                assert!(made.is_err(), "no ready point");
                refused += live(&allocator);
                sim.clear_failures();
                allocator.trim(0).unwrap();
                assert_eq!(live(&allocator), 0, "from question {first} on");
            }
            assert!(refused > 0, "no free was refused");
        }
    });
}

/// A buffer that is dropped while its stream captures is freed when the capture has ended.
#[test]
fn a_block_of_a_resource_dropped_in_a_capture_is_freed() {
    // A capture that ends on another thread frees what is kept, too.
    alone(|| {
        each(|rig| {
            for (bytes, at) in [(1000, 0), (3 * MIB, 1), (1000, 2), (3 * MIB, 3)] {
                let allocator = rig.checked();
                let (stream, other) = (rig.stream(), rig.stream());
                let resource = Arc::new(AccessOrdered::new(allocator.clone()));
                let plain = Arc::new(Budget::of_live(allocator.clone(), None));
                let plain = DeviceBuffer::<u8>::uninit(&plain, bytes, &stream).unwrap();
                let ordered = DeviceBuffer::<u8>::uninit(&resource, bytes, &stream).unwrap();
                captured(rig, stream.raw(), || {
                    drop(plain);
                    drop(ordered);
                    assert_eq!(live(&allocator), 2);
                });
                match at {
                    0 => drop(resource.reap().unwrap()),
                    1 => drop(resource.trim(0).unwrap()),
                    2 => {
                        let block = resource
                            .allocate_block(&Request::new(bytes).tag("next"), &other)
                            .unwrap();
                        resource.deallocate_block(block).unwrap();
                    }
                    _ => {}
                }
                let left = resource.usage().unwrap().requested.current;
                assert!(at == 3 || left == 0, "{left}");
                drop(resource);
                allocator.trim(0).unwrap();
                assert_eq!(live(&allocator), 0, "{at}");
            }
        });
    });
}

/// R2: a resource that does not keep dropped blocks is called a second time.
#[test]
fn r2_a_dropped_block_of_a_direct_resource_is_tried_again() {
    only_simulated(Policy::Packed, |rig, sim| {
        let stream = rig.stream();
        for call in ["cuCtxSynchronize", "cuMemFree_v2"] {
            let direct = Arc::new(CudaMemory::new(&rig.context));
            let block = DeviceBuffer::<u8>::uninit(&direct, MIB, &stream).unwrap();
            sim.fail(FailPlan::call(call, CUresult::CUDA_ERROR_NOT_PERMITTED).unwrap());
            drop(block);
            assert_eq!(direct.usage().unwrap().requested.current, 0, "{call}");
        }
        assert_eq!(sim.memory_in_use(0), 0);
    });
}

/// R2: reimported memory of our own that was exported again and cannot be waited for when it is dropped is freed by a
/// later call, after its last user.
#[test]
fn r2_returned_memory_is_freed_when_it_can_be_waited_for() {
    each_simulated(|rig, sim| {
        for call in ["cuCtxSynchronize", "cuCtxSetCurrent"] {
            let (allocator, [home, other]) = rig.scene();
            let column = Tensor::zeroed(&*allocator, DType::F32, &[1 << 20], &home).unwrap();
            let ptr = column.ptr();
            let out = column
                .to_dlpack::<DLManagedTensor>(&Peer::on(&home))
                .unwrap();
            drop(column);
            let column = Tensor::from_dlpack(out, &home, ordered()).unwrap();
            let out = column.to_dlpack::<DLManagedTensor>(&Peer::starting_on(&other));
            let out = out.unwrap();
            drop(column);
            sim.set_mode(Mode::Manual);
            rig.stamp(ptr, 4 * MIB, 1, &other);
            let code = CUresult::CUDA_ERROR_NOT_PERMITTED;
            sim.fail(FailPlan::call(call, code).unwrap().times(u64::MAX));
            drop(out);
            sim.clear_failures();
            assert!(live(&allocator) > 0, "{call}");
            let next = allocator.allocate(4 * MIB, &home).unwrap();
            rig.stamp(next.ptr(), 4 * MIB, 2, &home);
            drop(next);
            sim.complete_all();
            sim.set_mode(Mode::Instant);
            allocator.trim(0).unwrap();
            assert_eq!(live(&allocator), 0, "{call}");
        }
    });
}

/// A full batch whose marker a capture kept away gets one when the capture is over and another stream asks for memory,
/// without a call that names the stream, or another free on it.
#[test]
fn a_batch_without_marker_due_to_a_capture_gets_it_after_the_capture() {
    each_simulated(|rig, _| {
        let (allocator, [own, user]) = rig.scene();
        let block = allocator.allocate(20 * MIB, &own).unwrap();
        block.record_stream(&user).unwrap();
        let at = block.ptr();
        begin(rig, user.raw())();
        let before = allocator.stats();
        drop(block);
        let freed = allocator.stats();
        assert_eq!(
            freed.failed_markers, before.failed_markers,
            "it was asked first"
        );
        assert_eq!(end(rig, user.raw())(), CUresult::CUDA_SUCCESS);
        let next = allocator.allocate(20 * MIB, &own).unwrap();
        assert_eq!(next.ptr(), at, "its last user has a marker");
    });
}

/// An event that was recorded within a capture is not a marker. The next marker is recorded with it, and waits for the
/// work that it then stands for alone.
#[test]
fn an_event_of_a_capture_is_used_for_the_next_marker() {
    each_with_interludes(|rig, sim| {
        let (allocator, [own, user]) = rig.scene();
        let block = allocator.allocate(20 * MIB, &own).unwrap();
        block.record_stream(&user).unwrap();
        let (at, raw) = (block.ptr(), user.raw());
        sim.set_mode(Mode::Manual);
        rig.stamp(at, 20 * MIB, 1, &user);
        // Between the question whether the stream captures and the record, which comes after that on the block's own.
        let begins = begin(rig, raw);
        interlude::after("cuEventRecord", || {
            interlude::before("cuEventRecord", begins)
        });
        let failed = allocator.stats().failed_markers;
        drop(block);
        assert!(!interlude::is_due());
        assert_eq!(allocator.stats().failed_markers, failed + 1);
        assert_eq!(end(rig, raw)(), CUresult::CUDA_SUCCESS);
        let (events, markers) = (rig.calls("cuEventCreate"), allocator.stats().markers);
        allocator.raw_mark(raw).unwrap();
        assert_eq!(allocator.stats().markers, markers + 1);
        assert_eq!(rig.calls("cuEventCreate"), events, "the event was kept");
        let next = allocator.allocate(20 * MIB, &own).unwrap();
        rig.stamp(next.ptr(), 20 * MIB, 2, &own);
        sim.complete_all();
        drop(next);
        drop(allocator.allocate(20 * MIB, &own).unwrap());
        sim.set_mode(Mode::Instant);
        sim.complete_all();
    });
}
