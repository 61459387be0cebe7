//! Nothing of the allocator's disturbs a capture: neither its end nor a wait for everything.
//!
//! Tests that capture are here and not beside others: calls look at more from the first capture of the
//! process on.
#![cfg(feature = "sim")]

mod common;

use common::*;
use cualloc::allocator::{Allocator, Block, Config, Error, Policy, SelfTest};
use cualloc::driver::{Stream, sys};

const MODE: sys::CUstreamCaptureMode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;

/// Runs `act` while `stream` is captured; the capture must not notice.
fn captured(rig: &Rig, stream: sys::CUstream, act: impl FnOnce()) {
    let entered = rig.context.enter().unwrap();
    // SAFETY: the caller's stream is alive.
    unsafe { entered.begin_capture(stream, MODE) }.unwrap();
    act();
    // SAFETY: as above. A capture that was spoilt ends with an error.
    drop(unsafe { entered.end_capture(stream) }.unwrap());
}

/// Both ways to wait for everything.
fn refused(allocator: &Allocator) {
    let error = allocator.synchronize().unwrap_err();
    assert!(matches!(error, Error::Capturing { .. }), "{error:?}");
    let error = allocator.close().unwrap_err();
    assert!(matches!(error, Error::Capturing { .. }), "{error:?}");
}

/// A free on a raw stream that no marker covers: closing needs the whole context.
fn leave_work(allocator: &Allocator, stream: &RawStream) {
    // SAFETY: the stream is alive, and nothing uses the block.
    unsafe {
        let ptr = allocator.allocate_raw(4 * MIB, stream.raw()).unwrap();
        allocator.free_raw(ptr).unwrap();
    }
}

/// R38: a stream that the allocator keeps alive is asked before the context is waited for.
#[test]
fn r38_no_wait_for_a_context_while_an_own_stream_captures() {
    each(|rig| {
        let allocator = rig.allocator();
        let (kept, raw) = (rig.stream(), RawStream::new(rig));
        leave_work(&allocator, &raw);
        // Too little to be worth a marker.
        drop(allocator.allocate(MIB / 2, &kept).unwrap());
        captured(rig, kept.raw(), || refused(&allocator));
        allocator.synchronize().unwrap();
        rig.close(&allocator);
        raw.destroy();
    });
}

/// R38: a capturing stream of the caller is known from the call that it refused.
#[test]
fn r38_no_wait_for_a_context_while_a_raw_stream_captures() {
    each(|rig| {
        let allocator = rig.allocator();
        let (capturing, raw) = (RawStream::new(rig), RawStream::new(rig));
        leave_work(&allocator, &capturing);
        leave_work(&allocator, &raw);
        captured(rig, capturing.raw(), || {
            // SAFETY: the stream is alive.
            let error = unsafe { allocator.allocate_raw(512, capturing.raw()) }.unwrap_err();
            assert!(matches!(error, Error::Capturing { .. }), "{error:?}");
            refused(&allocator);
        });
        // The next call that names it finds it as it is.
        leave_work(&allocator, &capturing);
        allocator.synchronize().unwrap();
        rig.close(&allocator);
        capturing.destroy();
        raw.destroy();
    });
}

/// R38: a blocking stream that the allocator never saw is found through the legacy stream.
#[test]
fn r38_no_wait_for_a_context_while_an_unknown_stream_captures() {
    each(|rig| {
        let allocator = rig.allocator();
        let raw = RawStream::new(rig);
        leave_work(&allocator, &raw);
        let entered = rig.context.enter().unwrap();
        let create = rig.driver.functions().cuStreamCreate.unwrap();
        let mut unknown: sys::CUstream = std::ptr::null_mut();
        // SAFETY: a context is current; the output is a local. 0: blocking.
        let code = unsafe { create(&mut unknown, 0) };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
        captured(rig, unknown, || refused(&allocator));
        rig.close(&allocator);
        let destroy = rig.driver.functions().cuStreamDestroy_v2.unwrap();
        // SAFETY: made above, and not used again.
        let code = unsafe { destroy(unknown) };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
        drop(entered);
        raw.destroy();
    });
}

/// R38: while something captures, a request that would need the context fails for want of memory.
#[test]
fn r38_want_of_memory_does_not_wait_for_a_capturing_context() {
    each(|rig| {
        let allocator = rig.limited(20 * MIB);
        let (kept, raw): (Stream, _) = (rig.stream(), RawStream::new(rig));
        drop(allocator.allocate(MIB, &kept).unwrap());
        let other = rig.stream();
        // SAFETY: the stream is alive, and nothing uses the block.
        unsafe {
            let ptr = allocator.allocate_raw(16 * MIB, raw.raw()).unwrap();
            allocator.record_stream_raw(ptr, other.raw()).unwrap();
            allocator.free_raw(ptr).unwrap();
        }
        captured(rig, kept.raw(), || {
            let before = rig.calls("cuCtxSynchronize");
            let _ = allocator.allocate(18 * MIB, &other);
            assert_eq!(rig.calls("cuCtxSynchronize"), before);
        });
        rig.close(&allocator);
        raw.destroy();
    });
}

#[test]
fn nothing_is_tested_while_a_stream_captures_and_nothing_stitched_untested() {
    only(Policy::Packed, |rig| {
        let allocator = rig.allocator_with(Config::new().handle(2 << 20).slack(0.0));
        let [stream, other] = rig.streams();
        drop(allocator.allocate(MIB, &other).unwrap());
        // A request that only a view, or new memory, can serve.
        let stitch = || {
            let mut kept: Vec<Block> = (0..41)
                .map(|_| allocator.allocate(2 * MIB, &stream).unwrap())
                .collect();
            (0..20).for_each(|at| drop(kept.remove(at + 1)));
            kept.push(allocator.allocate(40 * MIB, &stream).unwrap());
            (kept, allocator.stats().packing)
        };
        let mut first = None;
        captured(rig, other.raw(), || first = Some(stitch()));
        let (first, packing) = first.unwrap();
        assert_eq!((packing.self_test, packing.views), (SelfTest::NotRun, 0));
        let (second, packing) = stitch();
        assert_eq!(packing.self_test, SelfTest::Passed);
        drop((first, second));
        rig.close(&allocator);
    });
}

/// R38: a capture sees no marker of ours, and frees in it are made up for.
#[test]
fn r38_capture_leaves_no_stale_events() {
    each(|rig| {
        const BLOCK: usize = 12 * MIB;
        let allocator = rig.allocator();
        let [a, b] = rig.streams();
        let own = allocator.allocate(BLOCK, &a).unwrap();
        let recorded = allocator.allocate(BLOCK, &b).unwrap();
        recorded.record_stream(&a).unwrap();
        let (own_ptr, recorded_ptr) = (own.ptr(), recorded.ptr());
        let entered = rig.context.enter().unwrap();
        // SAFETY: the stream is alive.
        unsafe { entered.begin_capture(a.raw(), MODE) }.unwrap();
        let refused = allocator.allocate(512, &a).unwrap_err();
        assert!(matches!(refused, Error::Capturing { .. }), "{refused:?}");
        let failed = own.free().unwrap_err();
        assert!(matches!(failed.error, Error::Capturing { .. }));
        drop(failed.block);
        drop(recorded);
        assert_eq!(rig.calls("cuEventRecord") - allocator.stats().markers, 0);
        // Other streams go on.
        drop(allocator.allocate(4 * MIB, &b).unwrap());
        // SAFETY: the stream is alive.
        let graph = unsafe { entered.end_capture(a.raw()) }.unwrap();
        drop(graph);
        let blocks = [0, 1].map(|_| allocator.allocate(BLOCK, &a).unwrap());
        assert_eq!(allocator.stats().all.allocations.current, 2);
        let mut places = blocks.each_ref().map(|block| block.ptr());
        places.sort_unstable();
        let mut expected = [own_ptr, recorded_ptr];
        expected.sort_unstable();
        assert_eq!(places, expected);
        drop(blocks);
        rig.close(&allocator);
    });
}
