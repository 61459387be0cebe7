//! D4: captures that overlap operations on buffers and columns: these operations fail, and later ones do not.

use cualloc::exchange::dlpack::DLManagedTensorVersioned;
use cualloc::exchange::{DType, Dlpack, Tensor};
use cualloc::pool::WorkspacePool;
use cualloc::resource::{Access, CudaMemory, MemoryResource};

use crate::common::capturing::*;
use crate::common::prelude::*;

fn capturing(result: Result<(), Error>, stream: &Stream) {
    match result {
        Err(Error::Capturing { stream: named }) => assert_eq!(named, stream.raw() as usize),
        other => panic!("{other:?}"),
    }
}

fn one_block_is_live(allocator: &Allocator) {
    assert_matches!(allocator.close(), Err(Error::InUse { count: 1, .. }));
}

/// D4: while an operation is in progress, its stream begins to capture before the home can wait for it. The next
/// operation comes after it, or is refused.
#[test]
fn d4_an_operation_whose_stream_captures_after_it_is_ordered_again() {
    each_with_interludes(|rig, sim| {
        let (allocator, [home, other, third]) = rig.scene();
        let mut buffer = DeviceBuffer::<u32>::filled(&*allocator, 1 << 18, 3, &home).unwrap();
        home.synchronize().unwrap();
        for next in [&third, &home, &other] {
            sim.set_mode(Mode::Manual);
            interlude::after("cuMemsetD32Async", begin(rig, other.raw()));
            buffer.fill(5, &other).unwrap_err();
            assert!(!interlude::is_due());
            capturing(buffer.fill(6, next), &other);
            capturing(buffer.prepare_use(&home, Access::ReadWrite), &other);
            let failed = buffer.free().unwrap_err();
            buffer = *failed.value;
            capturing(Err(failed.error), &other);
            assert_eq!(end(rig, other.raw())(), sys::CUresult::CUDA_SUCCESS);
            buffer.fill(6, next).unwrap();
            sim.complete_all();
            sim.set_mode(Mode::Instant);
            assert_eq!(sim.take_reports(), []);
            assert_eq!(buffer.to_vec().unwrap()[7], 6);
        }
        buffer.free().unwrap();
    });
}

/// While a capture is known, a capturing stream gets no lease, not even of an idle slab.
#[test]
fn a_stream_that_captures_leases_nothing() {
    each(|rig| {
        let (allocator, [stream]) = rig.scene();
        let pool = WorkspacePool::new(&allocator);
        let slab = pool.lease(&stream, 4096).unwrap().as_device_ptr();
        let under_way = Capturing::begin(&stream, MODE);
        capturing(pool.lease(&stream, 4096).map(drop), &stream);
        drop(under_way.end().unwrap());
        assert_eq!(pool.lease(&stream, 4096).unwrap().as_device_ptr(), slab);
    });
}

/// D4: if the buffer is dropped instead, the memory serves no request until the operation is complete, and is not lost.
#[test]
fn d4_a_buffer_dropped_behind_an_operation_that_met_a_capture_is_freed() {
    each_with_interludes(|rig, sim| {
        let (allocator, [home, other]) = rig.scene();
        for words in [100, 1 << 18] {
            let mut buffer = DeviceBuffer::<u32>::filled(&*allocator, words, 3, &home).unwrap();
            home.synchronize().unwrap();
            sim.set_mode(Mode::Manual);
            interlude::after("cuMemsetD32Async", begin(rig, other.raw()));
            buffer.fill(5, &other).unwrap_err();
            drop(buffer);
            one_block_is_live(&allocator);
            assert_eq!(end(rig, other.raw())(), sys::CUresult::CUDA_SUCCESS);
            allocator.trim(0).unwrap();
            assert_eq!(allocator.stats().all.allocations.current, 0);
            let next = DeviceBuffer::<u32>::filled(&*allocator, words, 4, &home).unwrap();
            sim.complete_all();
            assert_eq!(sim.take_reports(), []);
            sim.set_mode(Mode::Instant);
            drop(next);
        }
    });
}

/// Memory whose home was retired is dropped while the home captures: it is freed when the capture has ended.
fn freed_behind_the_capture<T>(rig: &Rig, make: impl Fn(&Allocator, &Stream) -> T) {
    let allocator = rig.allocator();
    let home = rig.stream();
    let made = make(&allocator, &home);
    allocator.retire(&home).unwrap();
    captured(rig, home.raw(), || {
        drop(made);
        one_block_is_live(&allocator);
    });
    rig.close(&allocator);
    // No handle is left that could close it.
    let allocator = rig.allocator();
    let made = make(&allocator, &home);
    allocator.retire(&home).unwrap();
    captured(rig, home.raw(), || {
        drop(allocator);
        drop(made);
        assert!(rig.driver_held() != Some(0));
    });
    assert!(rig.all_given_back());
}

/// D4
#[test]
fn d4_a_buffer_of_a_retired_stream_dropped_in_its_capture_is_freed() {
    each(|rig| {
        for bytes in [1000, 4 << 20] {
            freed_behind_the_capture(rig, |allocator, home| {
                DeviceBuffer::<u8>::zeroed(allocator, bytes, home).unwrap()
            });
        }
        freed_behind_the_capture(rig, |allocator, home| {
            Tensor::zeroed(allocator, DType::F32, &[1 << 18], home).unwrap()
        });
    });
}

/// D4: no wait for a whole context is made while a stream captures there, because the wait would invalidate the
/// capture: a block is freed after the capture, and operations that cannot be deferred are refused. The stream may be
/// one of this crate's, a thread's own default stream, or another blocking stream that the allocator does not know.
#[test]
fn d4_freeing_memory_invalidates_no_capture_of_another_stream() {
    each(|rig| {
        let raw = RawStream::blocking(rig);
        let (allocator, [home, other]) = rig.scene();
        let plain = CudaMemory::new(&rig.context);
        // A thread's own stream cannot be queried on another thread.
        for (stream, elsewhere) in [
            (other, false),
            (Stream::per_thread(&rig.context), true),
            (raw.borrowed(), true),
        ] {
            let block = plain.allocate_block(&Request::new(4096), &home).unwrap();
            let lent = Tensor::zeroed(&*allocator, DType::F32, &[1 << 18], &home).unwrap();
            let export: Dlpack<DLManagedTensorVersioned> = lent.to_dlpack(&ordered()).unwrap();
            drop(lent);
            let capture = Capturing::begin(&stream, MODE);
            let ends = || {
                // The last release waits for all work of the context.
                drop(export);
                plain.deallocate_block(block).unwrap_err()
            };
            let refused = match elsewhere {
                true => std::thread::scope(|scope| scope.spawn(ends).join().unwrap()),
                false => ends(),
            };
            assert_eq!(allocator.stats().all.allocations.current, 1);
            // A capture that was spoilt ends with an error.
            drop(capture.end().unwrap());
            plain.deallocate_block(*refused.value).unwrap();
            // A later call tries again.
            drop(allocator.allocate(MIB, &home).unwrap());
            assert_eq!(allocator.stats().all.allocations.current, 0);
        }
    });
}
