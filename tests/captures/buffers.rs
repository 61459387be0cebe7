//! D4: captures that meet buffers and columns, which cost the calls that meet them, and nothing behind their
//! ends.

use cualloc::allocator::Allocator;
use cualloc::driver::{Stream, sys};
use cualloc::exchange::dlpack::DLManagedTensorVersioned;
use cualloc::exchange::{DType, Dlpack, Peer, Tensor};
use cualloc::pool::WorkspacePool;
use cualloc::resource::{Access, CudaMemory, MemoryResource};
use cualloc::sim::Mode;
use cualloc::{DeviceBuffer, Error, Request};

use crate::common::capturing::*;
use crate::common::*;

fn capturing(result: Result<(), Error>, stream: &Stream) {
    match result {
        Err(Error::Capturing { stream: named }) => assert_eq!(named, stream.raw() as usize),
        other => panic!("{other:?}"),
    }
}

fn one_block_is_live(allocator: &Allocator) {
    let error = allocator.close().unwrap_err();
    assert_matches!(error, Error::InUse { count: 1, .. });
}

/// D4: an operation is under way, and its stream captures before the home can wait for it. What comes next
/// comes after it, or is refused.
#[test]
fn d4_an_operation_whose_stream_captures_behind_it_is_made_up_for() {
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

/// While a capture is known, a stream that captures gets no lease, of an idle slab neither.
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

/// D4: dropped instead, the memory is nobody's before the operation is over, and is not lost.
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

/// Something whose home was retired is dropped while that captures: it is freed when the capture has ended.
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
    // Nobody is left who could close it.
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
    for bytes in [1000, 4 << 20] {
        each(|rig| {
            freed_behind_the_capture(rig, |allocator, home| {
                DeviceBuffer::<u8>::zeroed(allocator, bytes, home).unwrap()
            });
        });
    }
}

/// D4
#[test]
fn d4_a_column_of_a_retired_stream_dropped_in_its_capture_is_freed() {
    each(|rig| {
        freed_behind_the_capture(rig, |allocator, home| {
            Tensor::zeroed(allocator, DType::F32, &[1 << 18], home).unwrap()
        });
    });
}

/// D4: what ends with a wait for a whole context does without it while a stream of this crate's captures there, whose
/// capture it would spoil: a block is freed behind that, and what cannot be put off is refused.
#[test]
fn d4_no_end_of_a_memory_spoils_a_capture_of_another_stream() {
    each(|rig| {
        let (allocator, [home, other]) = rig.scene();
        let plain = CudaMemory::new(&rig.context);
        let block = plain.allocate_block(&Request::new(4096), &home).unwrap();
        let lent = Tensor::zeroed(&*allocator, DType::F32, &[1 << 18], &home).unwrap();
        // SAFETY: the consumer does nothing with it.
        let unknown = unsafe { Peer::ordered() };
        let export: Dlpack<DLManagedTensorVersioned> = lent.to_dlpack(&unknown).unwrap();
        drop(lent);
        let capture = Capturing::begin(&other, MODE);
        // The last release waits for all work of the context.
        drop(export);
        let refused = plain.deallocate_block(block).unwrap_err();
        // A later call tries again.
        drop(allocator.allocate(MIB, &home).unwrap());
        assert_eq!(allocator.stats().all.allocations.current, 1);
        // A capture that was spoilt ends with an error.
        drop(capture.end().unwrap());
        plain.deallocate_block(*refused.value).unwrap();
        drop(allocator.allocate(MIB, &home).unwrap());
        assert_eq!(allocator.stats().all.allocations.current, 0);
    });
}

/// D4: nor that of a thread's own default stream, or of another blocking stream that nobody of this crate's knows.
#[test]
fn d4_no_end_of_a_memory_spoils_a_capture_of_a_blocking_stream() {
    each(|rig| {
        let allocator = rig.allocator();
        let home = rig.stream();
        let raw = RawStream::blocking(rig);
        let plain = CudaMemory::new(&rig.context);
        for own in [true, false] {
            let block = plain.allocate_block(&Request::new(4096), &home).unwrap();
            let lent = Tensor::zeroed(&allocator, DType::F32, &[1 << 18], &home).unwrap();
            // SAFETY: the consumer does nothing with it.
            let unknown = unsafe { Peer::ordered() };
            let export: Dlpack<DLManagedTensorVersioned> = lent.to_dlpack(&unknown).unwrap();
            drop(lent);
            let stream = match own {
                true => Stream::per_thread(&rig.context),
                false => raw.borrowed(),
            };
            let capture = Capturing::begin(&stream, MODE);
            // On another thread nobody can ask a thread's own stream.
            let refused = std::thread::scope(|scope| {
                let there = scope.spawn(|| {
                    drop(export);
                    plain.deallocate_block(block).unwrap_err()
                });
                there.join().unwrap()
            });
            let live = allocator.stats().all.allocations.current;
            let graph = capture.end();
            assert!(graph.is_ok(), "own {own}: {graph:?}");
            assert_eq!(live, 1);
            plain.deallocate_block(*refused.value).unwrap();
            drop(allocator.allocate(MIB, &home).unwrap());
            assert_eq!(allocator.stats().all.allocations.current, 0);
        }
        rig.close(&allocator);
        raw.destroy();
    });
}
