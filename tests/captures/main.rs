//! The allocator does not disturb captures, neither by its end nor by a wait for everything.
//!
//! Tests that capture are here, separate from others, because calls check more from the first capture of the process
//! on.
#![cfg(feature = "sim")]

mod buffers;
#[path = "../common/mod.rs"]
mod common;
mod debug;
mod given_back;
mod named;
mod owned;
mod races;

use std::sync::Barrier;

use common::capturing::*;
use common::prelude::*;
use cualloc::allocator::SelfTest;
use cualloc::driver::HostMemory;
use cualloc::error::StreamMisuse;
use cualloc::exchange::{DType, Tensor};

/// Both ways to wait for everything.
fn refused(allocator: &Allocator) {
    assert_matches!(allocator.synchronize(), Err(Error::Capturing { .. }));
    assert_matches!(allocator.close(), Err(Error::Capturing { .. }));
}

/// R38: a stream that the allocator keeps alive is queried before a wait for the context.
#[test]
fn r38_no_wait_for_a_context_while_an_own_stream_captures() {
    each(|rig| {
        let (kept, raw) = (rig.stream(), RawStream::new(rig));
        let allocator = rig.checked();
        leave_work(&allocator, &raw);
        // Too little to be worth a marker.
        drop(allocator.allocate(MIB / 2, &kept).unwrap());
        captured(rig, kept.raw(), || refused(&allocator));
        allocator.synchronize().unwrap();
    });
}

/// R38: so is a stream of this crate whose capture was begun through it, though the allocator never saw it.
#[test]
fn r38_no_wait_for_a_context_while_an_unnamed_own_stream_captures() {
    each(|rig| {
        let (stranger, raw, other) = (rig.stream(), RawStream::new(rig), rig.stream());
        let allocator = rig.checked_limit(20 * MIB);
        leave_work(&allocator, &raw);
        captured(rig, stranger.raw(), || {
            refused(&allocator);
            allocator.empty_cache().unwrap();
            let want = allocator.allocate(30 * MIB, &other).unwrap_err();
            assert!(want.is_out_of_memory());
            let _ = allocator.allocate(20 * MIB, &other);
            let calls = rig.calls("cuCtxSynchronize");
            refused(&allocator);
            assert_eq!(rig.calls("cuCtxSynchronize"), calls);
        });
        allocator.synchronize().unwrap();
    });
}

/// R38: a capturing stream of the caller is known from the call that it refused.
#[test]
fn r38_no_wait_for_a_context_while_a_raw_stream_captures() {
    each(|rig| {
        let (capturing, raw) = (RawStream::new(rig), RawStream::new(rig));
        let allocator = rig.checked();
        leave_work(&allocator, &capturing);
        leave_work(&allocator, &raw);
        let found = || {
            let refused = allocator.raw_allocate(512, capturing.raw());
            assert_matches!(refused, Err(Error::Capturing { .. }));
        };
        captured(rig, capturing.raw(), || {
            // The stream must not be queried, so the finding is good for one refusal.
            found();
            assert_matches!(allocator.synchronize(), Err(Error::Capturing { .. }));
            found();
            assert_matches!(allocator.close(), Err(Error::Capturing { .. }));
        });
        // The next call that names it finds it as it is.
        leave_work(&allocator, &capturing);
        allocator.synchronize().unwrap();
    });
}

/// R38: a blocking stream that the allocator never saw is found through the legacy stream.
#[test]
fn r38_no_wait_for_a_context_while_an_unknown_stream_captures() {
    each(|rig| {
        let allocator = rig.allocator();
        let raw = RawStream::new(rig);
        leave_work(&allocator, &raw);
        let unknown = RawStream::blocking(rig);
        captured(rig, unknown.raw(), || refused(&allocator));
        rig.close(&allocator);
    });
}

/// R38: during a capture, a request that would need a wait for the context fails for lack of memory.
#[test]
fn r38_a_shortage_of_memory_does_not_wait_for_a_capturing_context() {
    each(|rig| {
        let (kept, raw): (Stream, _) = (rig.stream(), RawStream::new(rig));
        let allocator = rig.checked_limit(20 * MIB);
        drop(allocator.allocate(MIB, &kept).unwrap());
        let other = rig.stream();
        let ptr = allocator.raw_allocate(16 * MIB, raw.raw()).unwrap();
        allocator.raw_record_stream(ptr, other.raw()).unwrap();
        allocator.raw_free(ptr).unwrap();
        captured(rig, kept.raw(), || {
            let before = rig.calls("cuCtxSynchronize");
            let _ = allocator.allocate(18 * MIB, &other);
            assert_eq!(rig.calls("cuCtxSynchronize"), before);
        });
    });
}

#[test]
fn nothing_is_tested_while_a_stream_captures_and_nothing_stitched_untested() {
    only(Policy::Packed, |rig| {
        let (allocator, [stream, other]) = rig.scene_with(dense().handle(2 << 20));
        drop(allocator.allocate(MIB, &other).unwrap());
        // A request that only a view, or new memory, can serve.
        let stitch = || {
            let mut kept: Vec<Block> = allocator.allocate_blocks(41, 2 * MIB, &stream);
            (0..20).for_each(|at| drop(kept.remove(at + 1)));
            kept.push(allocator.allocate(40 * MIB, &stream).unwrap());
            (kept, allocator.stats().packing)
        };
        let mut first = None;
        captured(rig, other.raw(), || first = Some(stitch()));
        let (_first, packing) = first.unwrap();
        assert_eq!((packing.self_test, packing.views), (SelfTest::NotRun, 0));
        let (_second, packing) = stitch();
        assert_eq!(packing.self_test, SelfTest::Passed);
    });
}

/// R38: no marker is recorded in a capture, and frees in it get one afterwards.
#[test]
fn r38_capture_leaves_no_stale_events() {
    each(|rig| {
        const BLOCK: usize = 12 * MIB;
        let (allocator, [a, b]) = rig.scene();
        let own = allocator.allocate(BLOCK, &a).unwrap();
        let recorded = allocator.allocate(BLOCK, &b).unwrap();
        recorded.record_stream(&a).unwrap();
        let (own_ptr, recorded_ptr) = (own.ptr(), recorded.ptr());
        let under_way = Capturing::begin(&a, MODE);
        assert_matches!(allocator.allocate(512, &a), Err(Error::Capturing { .. }));
        let failed = own.free().unwrap_err();
        assert_matches!(failed.error, Error::Capturing { .. });
        drop(*failed.value);
        drop(recorded);
        assert_eq!(rig.calls("cuEventRecord") - allocator.stats().markers, 0);
        // Other streams go on.
        drop(allocator.allocate(4 * MIB, &b).unwrap());
        let graph = under_way.end().unwrap();
        drop(graph);
        let blocks = [0, 1].map(|_| allocator.allocate(BLOCK, &a).unwrap());
        assert_eq!(allocator.stats().all.allocations.current, 2);
        let mut places = blocks.each_ref().map(|block| block.ptr());
        places.sort_unstable();
        let mut expected = [own_ptr, recorded_ptr];
        expected.sort_unstable();
        assert_eq!(places, expected);
    });
}

/// D5: a raw stream that was found capturing does not count as capturing any more once a free, or a marker, finds that
/// it is not.
#[test]
fn d5_any_query_of_the_stream_revokes_the_finding() {
    each_simulated(|rig, _| {
        for marks in [false, true] {
            let (raw, other) = (RawStream::new(rig), RawStream::new(rig));
            let allocator = rig.checked();
            leave_work(&allocator, &other);
            let ptr = allocator.raw_allocate(MIB, raw.raw()).unwrap();
            if marks {
                allocator.raw_free(ptr).unwrap();
            }
            begin(rig, raw.raw())();
            allocator.raw_allocate(MIB, raw.raw()).unwrap_err();
            assert_eq!(end(rig, raw.raw())(), sys::CUresult::CUDA_SUCCESS);
            if marks {
                allocator.raw_mark(raw.raw()).unwrap();
            } else {
                allocator.raw_free(ptr).unwrap();
            }
            allocator.synchronize().unwrap();
        }
    });
}

/// D5: a destroyed stream cannot be queried to learn that its capture has ended. It counts as capturing for one call.
#[test]
fn d5_a_destroyed_stream_blocks_no_call() {
    each_simulated(|rig, _| {
        for elsewhere in [false, true] {
            let (raw, other) = (RawStream::new(rig), RawStream::new(rig));
            let allocator = rig.checked();
            leave_work(&allocator, &raw);
            leave_work(&allocator, &other);
            let refused = || {
                let refused = allocator.raw_allocate(MIB, raw.raw());
                assert_matches!(refused, Err(Error::Capturing { .. }));
            };
            if elsewhere {
                begin(rig, raw.raw())();
                refused();
                assert_eq!(end(rig, raw.raw())(), sys::CUresult::CUDA_SUCCESS);
            } else {
                captured(rig, raw.raw(), refused);
            }
            raw.destroy();
            if elsewhere {
                assert_matches!(allocator.synchronize(), Err(Error::Capturing { .. }));
            }
        }
    });
}

/// D5: an address without a live block is refused for that reason, even if the query for a capture fails.
#[test]
fn d5_a_second_free_is_refused_while_captures_are_queried() {
    each_simulated(|rig, sim| {
        let (raw, capturing) = (RawStream::new(rig), RawStream::new(rig));
        let allocator = rig.checked();
        captured(rig, capturing.raw(), || {
            for bytes in [512, 8 * MIB] {
                let ptr = allocator.raw_allocate(bytes, raw.raw()).unwrap();
                let refused = allocator.raw_allocate(bytes, capturing.raw());
                assert_matches!(refused, Err(Error::Capturing { .. }));
                allocator.raw_free(ptr).unwrap();
                let code = sys::CUresult::CUDA_ERROR_NOT_PERMITTED;
                sim.fail(FailPlan::call("cuStreamIsCapturing", code).unwrap());
                assert_matches!(allocator.raw_free(ptr), Err(Error::NotLive { .. }));
                sim.clear_failures();
            }
        });
        allocator.synchronize().unwrap();
    });
}

/// If captures are queried, an allocation from a stream cache makes one query, without the cache's lock.
#[test]
fn a_hit_queries_captures_without_a_locked_cache() {
    only_simulated(Policy::Packed, |rig, sim| {
        let (allocator, [stream]) = rig.scene_with(Config::new().capture_checks(true));
        let block = allocator.allocate(4096, &stream).unwrap();
        let ptr = block.ptr();
        drop(block);
        let mut again = None;
        let asked = calls_of(sim, || again = allocator.allocate(4096, &stream).ok());
        assert_eq!((again.map(|block| block.ptr()), asked), (Some(ptr), 1));
    });
}

/// D5: a request that lacks memory does not consume a finding, and a wait for the context refutes it.
#[test]
fn d5_a_shortage_of_memory_keeps_a_finding() {
    // Classic segments go without a wait.
    only_simulated(Policy::Packed, |rig, sim| {
        let allocator = rig.limited(20 * MIB);
        let kept = rig.stream();
        drop(allocator.allocate(MIB / 2, &kept).unwrap());
        let (raw, other) = (RawStream::new(rig), RawStream::new(rig));
        // Without a marker.
        let leave = |bytes| {
            let ptr = allocator.raw_allocate(bytes, other.raw()).unwrap();
            sim.fail(FailPlan::call("cuEventRecord", CUresult::CUDA_ERROR_OUT_OF_MEMORY).unwrap());
            allocator.raw_free(ptr).unwrap();
            assert_eq!(sim.clear_failures(), 0);
        };
        leave_work(&allocator, &raw);
        allocator.synchronize().unwrap();
        begin(rig, raw.raw())();
        allocator.raw_allocate(MIB, raw.raw()).unwrap_err();
        leave(16 * MIB);
        let before = rig.calls("cuCtxSynchronize");
        for _ in 0..2 {
            allocator.allocate(18 * MIB, &kept).unwrap_err();
        }
        allocator.synchronize().unwrap_err();
        allocator.allocate(18 * MIB, &kept).unwrap_err();
        assert_eq!(rig.calls("cuCtxSynchronize"), before);
        assert_eq!(end(rig, raw.raw())(), sys::CUresult::CUDA_SUCCESS);
        raw.destroy();
        allocator.synchronize().unwrap();
        leave(15 * MIB);
        drop(allocator.allocate(18 * MIB, &kept).unwrap());
        assert!(rig.calls("cuCtxSynchronize") > before + 1);
        rig.close(&allocator);
        other.destroy();
    });
}

/// D5: a finding about a new stream does not apply to an old stream that had the same handle.
#[test]
fn d5_a_finding_applies_to_the_present_stream_of_a_handle() {
    each_simulated(|rig, _| {
        let allocator = rig.allocator();
        let old = RawStream::new(rig);
        leave_work(&allocator, &old);
        let handle = old.raw() as usize;
        old.destroy();
        let new = RawStream::new(rig);
        assert_eq!(new.raw() as usize, handle);
        begin(rig, new.raw())();
        allocator.raw_allocate(MIB, new.raw()).unwrap_err();
        assert_matches!(allocator.synchronize(), Err(Error::Capturing { .. }));
        assert_eq!(end(rig, new.raw())(), sys::CUresult::CUDA_SUCCESS);
        allocator.raw_record_stream(0, new.raw()).unwrap_err();
        allocator.synchronize().unwrap();
        rig.close(&allocator);
        new.destroy();
    });
}

/// S3: the handle of the per-thread stream means the calling thread's own.
#[test]
fn s3_the_per_thread_stream_of_another_thread_cannot_be_retired() {
    each(|rig| {
        let allocator = rig.checked();
        let own = Stream::per_thread(&rig.context);
        let block = allocator.allocate(3 * MIB, &own).unwrap();
        std::thread::scope(|scope| {
            let elsewhere = scope.spawn(|| allocator.retire(&own).unwrap_err());
            let error = elsewhere.join().unwrap();
            assert_matches!(error, Error::Stream(StreamMisuse::WrongThread));
        });
        drop(block);
        allocator.retire(&own).unwrap();
        let refused = allocator.retire(&own);
        assert_matches!(refused, Err(Error::Stream(StreamMisuse::Unknown { .. })));
    });
}

/// S3: also with a driver that has no ids its own thread may retire it.
#[test]
fn s3_a_per_thread_stream_without_an_id_is_retired_on_its_thread() {
    let without_ids = |functions| sys::CuFunctions {
        cuStreamGetId: None,
        ..functions
    };
    for policy in [Policy::Packed, Policy::Classic] {
        let Some(rig) = Rig::behind(policy, without_ids) else {
            return;
        };
        let allocator = rig.allocator();
        let own = Stream::per_thread(&rig.context);
        let other = rig.stream();
        drop(allocator.allocate(3 * MIB, &other).unwrap());
        // Too little to be worth a marker before.
        drop(allocator.allocate(80 * KIB, &own).unwrap());
        let before = rig.calls("cuEventRecord");
        allocator.retire(&own).unwrap();
        assert_eq!(rig.calls("cuEventRecord"), before + 1, "{policy:?}");
        rig.close(&allocator);
        rig.assert_clean();
    }
}

/// Kinds of captures that forbid other streams' calls to threads that are not relaxed.
const STRICT: [sys::CUstreamCaptureMode; 2] = [
    sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL,
    sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
];

/// All calls for a stream other than the capturing one.
fn work_beside(rig: &Rig, allocator: &Allocator, stream: &Stream) {
    let other = rig.stream();
    let block = allocator.allocate(8 * MIB, stream).unwrap();
    block.record_stream(&other).unwrap();
    drop(block);
    let mut buffer = DeviceBuffer::<u32>::filled(allocator, 1 << 18, 3, stream).unwrap();
    buffer.fill(5, stream).unwrap();
    assert_eq!(buffer.to_vec().unwrap()[7], 5);
    drop(buffer);
    drop(allocator.allocate(MIB, &other).unwrap());
    let column = Tensor::zeroed(allocator, DType::F32, &[1000], stream).unwrap();
    assert_eq!(values::<f32>(&column).unwrap()[999], 0.0);
    drop(column);
    allocator.trim(0).unwrap();
    allocator.retire(&other).unwrap();
    let entered = rig.context.enter().unwrap();
    drop(
        entered
            .host_allocation(4096, HostMemory::default())
            .unwrap(),
    );
    drop(entered);
    rig.allocator().close().unwrap();
}

/// G3: calls for other streams do not affect a capture, whichever thread makes them and whatever its mode.
#[test]
fn g3_work_on_other_streams_leaves_a_strict_capture_alone() {
    for (mode, elsewhere) in STRICT.into_iter().flat_map(|m| [(m, false), (m, true)]) {
        each(|rig| {
            let (allocator, [stream, capturing]) = rig.scene();
            let capture = |work: &dyn Fn()| {
                let under_way = Capturing::begin(&capturing, mode);
                work();
                // A capture that was spoilt ends with an error.
                drop(under_way.end().unwrap());
            };
            if elsewhere {
                let [begun, done] = [(); 2].map(|()| Barrier::new(2));
                std::thread::scope(|scope| {
                    scope.spawn(|| {
                        capture(&|| {
                            begun.wait();
                            done.wait();
                        });
                    });
                    begun.wait();
                    work_beside(rig, &allocator, &stream);
                    done.wait();
                });
            } else {
                capture(&|| work_beside(rig, &allocator, &stream));
            }
        });
    }
}
