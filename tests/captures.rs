//! Nothing of the allocator's disturbs a capture: neither its end nor a wait for everything.
//!
//! Tests that capture are here and not beside others: calls look at more from the first capture of the
//! process on.
#![cfg(feature = "sim")]

mod common;

use common::capturing::*;
use common::*;
use cualloc::allocator::{Allocator, Block, Config, Error, Policy, SelfTest};
use cualloc::driver::{Stream, sys};
use cualloc::sim::FailPlan;

/// Both ways to wait for everything.
fn refused(allocator: &Allocator) {
    let error = allocator.synchronize().unwrap_err();
    assert!(matches!(error, Error::Capturing { .. }), "{error:?}");
    let error = allocator.close().unwrap_err();
    assert!(matches!(error, Error::Capturing { .. }), "{error:?}");
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
        let found = || {
            // SAFETY: the stream is alive.
            let error = unsafe { allocator.allocate_raw(512, capturing.raw()) }.unwrap_err();
            assert!(matches!(error, Error::Capturing { .. }), "{error:?}");
        };
        captured(rig, capturing.raw(), || {
            // Nobody may ask the stream, so what was found is good for one refusal.
            found();
            let error = allocator.synchronize().unwrap_err();
            assert!(matches!(error, Error::Capturing { .. }), "{error:?}");
            found();
            let error = allocator.close().unwrap_err();
            assert!(matches!(error, Error::Capturing { .. }), "{error:?}");
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

/// Runs a test with each policy on a simulator with interludes.
fn each_with_interludes(test: impl Fn(&Rig)) {
    for policy in [Policy::Packed, Policy::Classic] {
        let Some(rig) = Rig::with_interludes(policy) else {
            return;
        };
        eprintln!("policy {policy:?}");
        test(&rig);
    }
}

/// What no marker covers on a raw stream is covered by the next one: all of it can be given back.
fn nothing_is_lost(allocator: &Allocator, raw: &RawStream) {
    // SAFETY: the stream is alive.
    unsafe { allocator.mark_raw(raw.raw()) }.unwrap();
    assert_eq!(allocator.trim(0).unwrap().pending, 0);
    assert_eq!(allocator.stats().all.reserved.current, 0);
}

/// D4: between the question and the record another thread begins to capture. The event is a graph's, and
/// no marker.
#[test]
fn d4_a_capture_that_begins_before_the_record_costs_that_marker() {
    each_with_interludes(|rig| {
        let allocator = rig.allocator();
        let (other, raw) = (rig.stream(), RawStream::new(rig));
        drop(allocator.allocate(70_000, &other).unwrap());
        // SAFETY: the stream is alive, and nothing uses the block.
        let ptr = unsafe { allocator.allocate_raw(4 * MIB, raw.raw()) }.unwrap();
        let before = allocator.stats();
        interlude::before("cuEventRecord", begin(rig, raw.raw()));
        // SAFETY: as above.
        unsafe { allocator.free_raw(ptr) }.unwrap();
        assert!(!interlude::is_due());
        let after = allocator.stats();
        assert_eq!(after.markers, before.markers);
        assert_eq!(after.failed_markers, before.failed_markers + 1);
        // The others go on, and do not touch the capture.
        drop(allocator.allocate(8 * MIB, &other).unwrap());
        allocator.trim(0).unwrap();
        assert_eq!(end(rig, raw.raw())(), sys::CUresult::CUDA_SUCCESS);
        drop(allocator.allocate(8 * MIB, &other).unwrap());
        nothing_is_lost(&allocator, &raw);
        allocator.synchronize().unwrap();
        rig.close(&allocator);
        raw.destroy();
        rig.assert_clean();
    });
}

/// D4: what a capture kept from its marker gets one with the next free, not with the next full batch.
#[test]
fn d4_a_batch_that_a_capture_kept_from_its_marker_gets_one_at_once() {
    each_with_interludes(|rig| {
        let allocator = rig.allocator();
        let (other, raw) = (rig.stream(), RawStream::new(rig));
        drop(allocator.allocate(70_000, &other).unwrap());
        // SAFETY: the stream is alive, and nothing uses the blocks.
        unsafe {
            let [large, little] =
                [4 * MIB, 80 * KIB].map(|bytes| allocator.allocate_raw(bytes, raw.raw()).unwrap());
            interlude::before("cuEventRecord", begin(rig, raw.raw()));
            allocator.free_raw(large).unwrap();
            assert_eq!(end(rig, raw.raw())(), sys::CUresult::CUDA_SUCCESS);
            let before = allocator.stats().markers;
            allocator.free_raw(little).unwrap();
            assert_eq!(allocator.stats().markers, before + 1);
        }
        allocator.trim(0).unwrap();
        assert_eq!(allocator.stats().all.reserved.current, 0);
        rig.close(&allocator);
        raw.destroy();
        rig.assert_clean();
    });
}

/// Whether a block lies in other memory.
fn overlap(block: &Block, ptr: u64, bytes: usize) -> bool {
    block.ptr() < ptr + bytes as u64 && ptr < block.ptr() + block.size() as u64
}

/// An allocator with a marker whose event fell into a capture that is over, of a raw stream, under
/// which lie 4 MiB.
fn captured_marker(rig: &Rig) -> (Allocator, Stream, RawStream) {
    let allocator = rig.allocator();
    let (other, raw) = (rig.stream(), RawStream::new(rig));
    drop(allocator.allocate(70_000, &other).unwrap());
    // SAFETY: the stream is alive, and nothing uses the block.
    let ptr = unsafe { allocator.allocate_raw(4 * MIB, raw.raw()) }.unwrap();
    let before = allocator.stats().markers;
    interlude::before("cuEventRecord", begin(rig, raw.raw()));
    let end = end(rig, raw.raw());
    interlude::after("cuEventRecord", move || {
        assert_eq!(end(), sys::CUresult::CUDA_SUCCESS);
    });
    // SAFETY: as above.
    unsafe { allocator.free_raw(ptr) }.unwrap();
    assert!(!interlude::is_due());
    assert_eq!(allocator.stats().markers, before + 1);
    (allocator, other, raw)
}

/// D4: a marker that fell into a capture which came and went stands for nothing: whoever asks it goes on.
#[test]
fn d4_a_captured_marker_is_dropped_by_whoever_asks_it() {
    each_with_interludes(|rig| {
        for trims in [false, true] {
            let (allocator, other, raw) = captured_marker(rig);
            let before = allocator.stats();
            if trims {
                allocator.trim(0).unwrap();
            } else {
                drop(allocator.allocate(8 * MIB, &other).unwrap());
            }
            assert_eq!(allocator.stats().failed_markers, before.failed_markers + 1);
            nothing_is_lost(&allocator, &raw);
            drop(allocator.allocate(8 * MIB, &other).unwrap());
            rig.close(&allocator);
            raw.destroy();
            rig.assert_clean();
        }
    });
}

/// D4: the same for whoever waits for it on the host.
#[test]
fn d4_a_captured_marker_is_dropped_by_whoever_waits_for_it() {
    each_with_interludes(|rig| {
        let (allocator, _other, raw) = captured_marker(rig);
        rig.close(&allocator);
        assert_eq!(allocator.stats().failed_markers, 1);
        raw.destroy();
        rig.assert_clean();
    });
}

/// D4: what a captured marker covered is not complete when a later marker of another stream is.
#[test]
fn d4_memory_under_a_captured_marker_stays_in_use_until_a_real_one() {
    only(Policy::Packed, |rig| {
        let Some(sim) = rig.sim() else {
            return;
        };
        let allocator = rig.limited(12 * MIB);
        let [a, b] = rig.streams();
        drop(allocator.allocate(70_000, &b).unwrap());
        let block = allocator.allocate(8 * MIB, &a).unwrap();
        let ptr = block.ptr();
        let hold = rig.hold(&a);
        rig.stamp(ptr, 8 * MIB, 7, &a);
        drop(block);
        let answer = sys::CUresult::CUDA_ERROR_CAPTURED_EVENT;
        sim.fail(FailPlan::call("cuEventQuery", answer).unwrap());
        sim.deny_host_waits(true);
        // All that is left is under it.
        let taken = allocator.allocate_at_hand(8 * MIB, 1, &b, &[]).unwrap();
        assert!(taken.is_none_or(|block| !overlap(&block, ptr, 8 * MIB)));
        // It has another marker, for whoever comes next.
        assert_eq!(allocator.stats().failed_markers, 1);
        sim.deny_host_waits(false);
        assert_eq!(sim.clear_failures(), 0);
        drop(hold);
        rig.settle(&a);
        let again = allocator.allocate(8 * MIB, &b).unwrap();
        assert!(overlap(&again, ptr, 8 * MIB));
        rig.stamp(again.ptr(), 8 * MIB, 8, &b);
        assert_eq!(rig.mismatches(again.ptr(), 8 * MIB, 8, &b), 0);
        drop(again);
        rig.close(&allocator);
    });
}

/// D4: every answer that speaks of a capture, at every question about a marker.
#[test]
fn d4_answers_that_speak_of_a_capture_stick_to_nothing() {
    each(|rig| {
        use sys::CUresult as Code;
        let Some(sim) = rig.sim() else {
            return;
        };
        for call in [
            "cuEventQuery",
            "cuEventSynchronize",
            "cuEventRecord",
            "cuStreamWaitEvent",
        ] {
            for code in [
                Code::CUDA_ERROR_CAPTURED_EVENT,
                Code::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
                Code::CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
                Code::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                Code::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
            ] {
                let allocator = rig.limited(24 * MIB);
                let [a, b] = rig.streams();
                drop(allocator.allocate(70_000, &b).unwrap());
                let hold = rig.busy(&a);
                let block = allocator.allocate(16 * MIB, &a).unwrap();
                sim.fail(FailPlan::call(call, code).unwrap().times(3));
                drop(block);
                // Only what `a` still uses is large enough.
                let got = allocator.allocate(16 * MIB, &b);
                let got = got.unwrap_or_else(|error| panic!("{call} {code:?}: {error:?}"));
                drop(got);
                allocator.trim(0).unwrap();
                sim.clear_failures();
                drop(hold);
                drop(allocator.allocate(20 * MIB, &a).unwrap());
                allocator.synchronize().unwrap();
                rig.close(&allocator);
            }
        }
    });
}

/// D4: a wait that may have become part of a graph is no order: what it opened is opened by the next one.
#[test]
fn d4_a_wait_that_meets_a_capture_is_no_order() {
    for refused in [true, false] {
        let Some(rig) = Rig::with_interludes(Policy::Packed) else {
            return;
        };
        let allocator = rig.limited(12 * MIB);
        let [a, b] = rig.streams();
        drop(allocator.allocate(70_000, &b).unwrap());
        let block = allocator.allocate(8 * MIB, &a).unwrap();
        let ptr = block.ptr();
        let hold = rig.hold(&a);
        rig.stamp(ptr, 8 * MIB, 7, &a);
        drop(block);
        let begin = begin(&rig, b.raw());
        if refused {
            interlude::before("cuStreamWaitEvent", begin);
        } else {
            interlude::after("cuStreamWaitEvent", begin);
        }
        let error = allocator.allocate(8 * MIB, &b).unwrap_err();
        assert!(matches!(error, Error::Capturing { .. }), "{error:?}");
        assert!(!interlude::is_due());
        assert_eq!(allocator.stats().stream_waits, 0);
        allocator.check().unwrap();
        assert_eq!(
            end(&rig, b.raw())() == sys::CUresult::CUDA_SUCCESS,
            !refused
        );
        let again = allocator.allocate(8 * MIB, &b).unwrap();
        assert!(overlap(&again, ptr, 8 * MIB));
        assert_eq!(allocator.stats().stream_waits, 1);
        rig.stamp(again.ptr(), 8 * MIB, 8, &b);
        drop(hold);
        assert_eq!(rig.mismatches(again.ptr(), 8 * MIB, 8, &b), 0);
        drop(again);
        rig.close(&allocator);
        rig.assert_clean();
    }
}

/// D4: a marker that turns out to stand for nothing at a wait does not fail the request of another
/// stream, which waits for the next one.
#[test]
fn d4_a_wait_for_a_captured_marker_fails_nobody() {
    only(Policy::Packed, |rig| {
        let Some(sim) = rig.sim() else {
            return;
        };
        let allocator = rig.limited(12 * MIB);
        let [a, b] = rig.streams();
        drop(allocator.allocate(70_000, &b).unwrap());
        let block = allocator.allocate(8 * MIB, &a).unwrap();
        let ptr = block.ptr();
        let hold = rig.hold(&a);
        rig.stamp(ptr, 8 * MIB, 7, &a);
        drop(block);
        let answer = sys::CUresult::CUDA_ERROR_CAPTURED_EVENT;
        sim.fail(FailPlan::call("cuStreamWaitEvent", answer).unwrap());
        sim.deny_host_waits(true);
        let got = allocator.allocate(8 * MIB, &b).unwrap();
        sim.deny_host_waits(false);
        assert!(overlap(&got, ptr, 8 * MIB));
        assert_eq!(sim.clear_failures(), 0);
        let stats = allocator.stats();
        assert_eq!((stats.failed_markers, stats.stream_waits), (1, 1));
        rig.stamp(got.ptr(), 8 * MIB, 8, &b);
        drop(hold);
        assert_eq!(rig.mismatches(got.ptr(), 8 * MIB, 8, &b), 0);
        drop(got);
        rig.close(&allocator);
    });
}

/// D5: a raw stream that was found capturing is not taken for one that captures once a call that asks it
/// hears otherwise.
#[test]
fn d5_a_capture_that_ended_is_no_hindrance() {
    each(|rig| {
        let allocator = rig.allocator();
        let raw = RawStream::new(rig);
        // SAFETY: the stream is alive, and nothing uses the blocks.
        let [p, q] = [MIB, 3 * MIB]
            .map(|bytes| unsafe { allocator.allocate_raw(bytes, raw.raw()) }.unwrap());
        captured(rig, raw.raw(), || {
            // SAFETY: as above.
            let error = unsafe { allocator.free_raw(p) }.unwrap_err();
            assert!(matches!(error, Error::Capturing { .. }), "{error:?}");
        });
        // SAFETY: as above.
        unsafe {
            allocator.free_raw(p).unwrap();
            allocator.free_raw(q).unwrap();
        }
        allocator.synchronize().unwrap();
        rig.close(&allocator);
        raw.destroy();
    });
}

/// D5: the same by a free alone, and by a marker alone, where the capture was ended elsewhere.
#[test]
fn d5_whatever_asks_the_stream_takes_the_finding_back() {
    each(|rig| {
        if rig.sim().is_none() {
            return;
        }
        for marks in [false, true] {
            let allocator = rig.allocator();
            let (raw, other) = (RawStream::new(rig), RawStream::new(rig));
            leave_work(&allocator, &other);
            // SAFETY: the stream is alive, and nothing uses the block.
            unsafe {
                let ptr = allocator.allocate_raw(MIB, raw.raw()).unwrap();
                if marks {
                    allocator.free_raw(ptr).unwrap();
                }
                begin(rig, raw.raw())();
                allocator.allocate_raw(MIB, raw.raw()).unwrap_err();
                assert_eq!(end(rig, raw.raw())(), sys::CUresult::CUDA_SUCCESS);
                if marks {
                    allocator.mark_raw(raw.raw()).unwrap();
                } else {
                    allocator.free_raw(ptr).unwrap();
                }
            }
            allocator.synchronize().unwrap();
            rig.close(&allocator);
            raw.destroy();
            other.destroy();
        }
    });
}

/// D5: a stream that is gone can say no more that it does not capture. It is believed to for one call.
#[test]
fn d5_a_stream_that_vanished_is_no_hindrance() {
    each(|rig| {
        if rig.sim().is_none() {
            return;
        }
        for elsewhere in [false, true] {
            let allocator = rig.allocator();
            let (raw, other) = (RawStream::new(rig), RawStream::new(rig));
            leave_work(&allocator, &raw);
            leave_work(&allocator, &other);
            let refused = || {
                // SAFETY: the stream is alive.
                let error = unsafe { allocator.allocate_raw(MIB, raw.raw()) }.unwrap_err();
                assert!(matches!(error, Error::Capturing { .. }), "{error:?}");
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
                let error = allocator.synchronize().unwrap_err();
                assert!(matches!(error, Error::Capturing { .. }), "{error:?}");
            }
            rig.close(&allocator);
            other.destroy();
        }
    });
}

/// D5: a new stream under the handle of an old one says nothing about that one's allocators later on.
#[test]
fn d5_a_finding_is_about_the_handle_as_it_is_now() {
    each(|rig| {
        if rig.sim().is_none() {
            return;
        }
        let allocator = rig.allocator();
        let old = RawStream::new(rig);
        leave_work(&allocator, &old);
        let handle = old.raw() as usize;
        old.destroy();
        let new = RawStream::new(rig);
        assert_eq!(new.raw() as usize, handle);
        begin(rig, new.raw())();
        // SAFETY: the stream is alive.
        unsafe { allocator.allocate_raw(MIB, new.raw()) }.unwrap_err();
        let error = allocator.synchronize().unwrap_err();
        assert!(matches!(error, Error::Capturing { .. }), "{error:?}");
        assert_eq!(end(rig, new.raw())(), sys::CUresult::CUDA_SUCCESS);
        // SAFETY: as above; the allocator has no memory of it.
        unsafe { allocator.record_stream_raw(0, new.raw()) }.unwrap_err();
        allocator.synchronize().unwrap();
        rig.close(&allocator);
        new.destroy();
    });
}

/// S3: the handle of the per-thread stream means the calling thread's own.
#[test]
fn s3_the_per_thread_stream_of_another_thread_cannot_be_retired() {
    each(|rig| {
        let allocator = rig.allocator();
        let own = Stream::per_thread_default(&rig.context).unwrap();
        let block = allocator.allocate(3 * MIB, &own).unwrap();
        std::thread::scope(|scope| {
            let elsewhere = scope.spawn(|| allocator.retire(&own).unwrap_err());
            let error = elsewhere.join().unwrap();
            assert!(
                matches!(error, Error::OtherThread { stream: 2 }),
                "{error:?}"
            );
        });
        drop(block);
        allocator.retire(&own).unwrap();
        let error = allocator.retire(&own).unwrap_err();
        assert!(matches!(error, Error::UnknownStream { .. }), "{error:?}");
        rig.close(&allocator);
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
        let own = Stream::per_thread_default(&rig.context).unwrap();
        let other = rig.stream();
        drop(allocator.allocate(3 * MIB, &other).unwrap());
        drop(allocator.allocate(3 * MIB, &own).unwrap());
        allocator.retire(&own).unwrap();
        rig.close(&allocator);
        rig.assert_clean();
    }
}
