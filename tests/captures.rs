//! Nothing of the allocator's disturbs a capture: neither its end nor a wait for everything.
//!
//! Tests that capture are here and not beside others: calls look at more from the first capture of the
//! process on.
#![cfg(feature = "sim")]

mod common;

use common::*;
use cualloc::allocator::{Allocator, Block, Config, Error, Policy, SelfTest};
use cualloc::driver::{Context, Stream, sys};
use cualloc::sim::SimConfig;

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

fn is_capturing<T: std::fmt::Debug>(result: Result<T, Error>) {
    assert!(matches!(result, Err(Error::Capturing { .. })), "{result:?}");
}

/// A6: no use is recorded on a stream that captures, owned or raw: what a graph uses is used at each of its
/// launches, which come after the use that would be recorded.
#[test]
fn a6_no_use_is_recorded_on_a_stream_that_captures() {
    let ids = ["cuStreamGetId", "cuCtxGetId"].map(String::from);
    for (policy, missing) in [
        (Policy::Packed, Vec::new()),
        (Policy::Classic, Vec::new()),
        (Policy::Packed, ids.to_vec()),
        (Policy::Classic, ids.to_vec()),
    ] {
        let config = SimConfig {
            missing,
            ..SimConfig::with_devices(1, 8 << 30)
        };
        only_on(policy, config, uses_on_capturing_streams);
    }
}

fn uses_on_capturing_streams(rig: &Rig) {
    let allocator = rig.allocator();
    let owner = rig.stream();
    for bytes in [KIB, MIB, 12 * MIB] {
        let (kept, raw) = (rig.stream(), RawStream::new(rig));
        let borrowed = raw.borrowed();
        // First where the allocator does not know the streams, then where it does.
        for _ in 0..2 {
            let block = allocator.allocate(bytes, &owner).unwrap();
            let before = allocator.block_of(block.ptr());
            for stream in [&kept, &borrowed] {
                captured(rig, stream.raw(), || {
                    is_capturing(block.record_stream(stream));
                    is_capturing(block.record_use(stream));
                    // SAFETY: the stream is alive.
                    unsafe {
                        is_capturing(allocator.record_stream_raw(block.ptr(), stream.raw()));
                        is_capturing(allocator.record_use_raw(block.ptr(), stream.raw()));
                    }
                });
            }
            assert_eq!(allocator.block_of(block.ptr()), before);
            block.record_stream(&kept).unwrap();
            block.record_use(&borrowed).unwrap();
        }
        allocator.retire(&borrowed).unwrap();
        // SAFETY: the stream is alive. Where streams have no ids the handle is another name.
        match unsafe { allocator.retire_raw(raw.raw()) } {
            Ok(()) | Err(Error::UnknownStream { .. }) => {}
            Err(error) => panic!("{error}"),
        }
        raw.destroy();
    }
    rig.close(&allocator);
}

/// D11: whether a default stream suffers from a capture is asked in the stream's own context, whichever is the
/// allocator's.
#[test]
fn d11_a_default_stream_is_asked_for_captures_in_its_own_context() {
    each(|rig| {
        let Some(sim) = rig.sim() else { return };
        let raw = sim.create_context(0).unwrap();
        // SAFETY: it lives as long as the simulator.
        let other = unsafe { Context::from_raw(&rig.driver, raw) }.unwrap();
        let allocator = rig.allocator();
        let [ours, theirs] =
            [&rig.context, &other].map(|context| Stream::legacy_default(context).unwrap());
        let create = rig.driver.functions().cuStreamCreate.unwrap();
        let destroy = rig.driver.functions().cuStreamDestroy_v2.unwrap();
        for (context, suffers, free) in [(&rig.context, &ours, &theirs), (&other, &theirs, &ours)] {
            let [block, beside] =
                [suffers, free].map(|stream| allocator.allocate(12 * MIB, stream).unwrap());
            let entered = context.enter().unwrap();
            let mut blocking: sys::CUstream = std::ptr::null_mut();
            // SAFETY: a context is current; the output is a local. 0: blocking.
            let code = unsafe { create(&mut blocking, 0) };
            assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
            // SAFETY: the stream was made just now.
            unsafe { entered.begin_capture(blocking, MODE) }.unwrap();
            is_capturing(allocator.allocate(4 * MIB, suffers));
            is_capturing(beside.record_stream(suffers));
            let block = block.free().unwrap_err();
            is_capturing(Err::<(), _>(block.error));
            drop(allocator.allocate(4 * MIB, free).unwrap());
            block.block.record_stream(free).unwrap();
            beside.free().unwrap();
            // SAFETY: as above.
            drop(unsafe { entered.end_capture(blocking) }.unwrap());
            drop(block.block);
            // SAFETY: as above, and not used again.
            assert_eq!(unsafe { destroy(blocking) }, sys::CUresult::CUDA_SUCCESS);
            drop(entered);
        }
        rig.close(&allocator);
    });
}

/// D11: the calling thread's default stream, by its handle or as a stream, captures like any other.
#[test]
fn d11_a_thread_stream_that_captures_is_named_as_that() {
    each(|rig| {
        let allocator = rig.allocator();
        let owner = rig.stream();
        let handle: sys::CUstream = std::ptr::without_provenance_mut(2);
        let stream = Stream::per_thread_default(&rig.context).unwrap();
        let block = allocator.allocate(MIB, &owner).unwrap();
        captured(rig, handle, || {
            is_capturing(allocator.allocate(MIB, &stream));
            is_capturing(block.record_stream(&stream));
            // SAFETY: special handles are always valid.
            unsafe {
                is_capturing(allocator.allocate_raw(MIB, handle));
                is_capturing(allocator.record_use_raw(block.ptr(), handle));
            }
        });
        drop(block);
        rig.close(&allocator);
    });
}

/// Making an allocator, with its trial of virtual memory, disturbs no capture, whichever thread began it and
/// in whichever mode.
#[test]
fn a_trial_of_virtual_memory_disturbs_no_capture() {
    for mode in [
        sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL,
        sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
        MODE,
    ] {
        for here in [true, false] {
            only(Policy::Auto, |rig| {
                let stream = rig.stream();
                let raw = stream.raw() as usize;
                let begin = || {
                    let create = rig.driver.functions().cuCtxSetCurrent.unwrap();
                    // SAFETY: the context is alive.
                    let code = unsafe { create(rig.context.raw()) };
                    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
                    let begin = rig.driver.functions().cuStreamBeginCapture_v2.unwrap();
                    // SAFETY: the stream is alive.
                    let code = unsafe { begin(raw as sys::CUstream, mode) };
                    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
                };
                begin();
                let make = || Allocator::with_config(&rig.context, Config::new()).unwrap();
                let tried = || rig.calls("cuMemsetD8Async");
                let before = tried();
                let allocator = match here {
                    true => make(),
                    false => {
                        let (driver, context) = (rig.driver.clone(), rig.context.clone());
                        let made = std::thread::spawn(move || {
                            let _driver = driver;
                            Allocator::with_config(&context, Config::new()).unwrap()
                        });
                        made.join().unwrap()
                    }
                };
                assert_eq!(tried() - before, 1);
                let entered = rig.context.enter().unwrap();
                // SAFETY: the stream is alive. A capture that was spoilt ends with an error.
                drop(unsafe { entered.end_capture(stream.raw()) }.unwrap());
                assert_eq!(allocator.policy(), Policy::Packed);
                rig.close(&allocator);
            });
        }
    }
}
