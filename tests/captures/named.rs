//! Captures of streams that are named by their handles, and of default streams.

use cualloc::Error;
use cualloc::allocator::{Allocator, Config, Policy};
use cualloc::driver::{Context, Stream, sys};
use cualloc::error::StreamMisuse;
use cualloc::sim::SimConfig;

use super::common::capturing::*;
use super::common::*;

fn is_capturing<T: std::fmt::Debug>(result: Result<T, Error>) {
    assert_matches!(result, Err(Error::Capturing { .. }));
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
    let (allocator, [owner]) = rig.scene();
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
            Ok(()) | Err(Error::Stream(StreamMisuse::Unknown { .. })) => {}
            Err(error) => panic!("{error}"),
        }
        raw.destroy();
    }
}

/// D11: whether a default stream suffers from a capture is asked in the stream's own context, whichever is the
/// allocator's.
#[test]
fn d11_a_default_stream_is_asked_for_captures_in_its_own_context() {
    each_simulated(|rig, sim| {
        let raw = sim.create_context(0).unwrap();
        // SAFETY: it lives as long as the simulator.
        let other = unsafe { Context::from_raw(&rig.driver, raw) }.unwrap();
        let allocator = rig.checked();
        let [ours, theirs] = [&rig.context, &other].map(Stream::legacy);
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
            let captured = unsafe { Stream::from_raw(context, blocking) }.unwrap();
            let under_way = Capturing::begin(&captured, MODE);
            is_capturing(allocator.allocate(4 * MIB, suffers));
            is_capturing(beside.record_stream(suffers));
            let block = block.free().unwrap_err();
            is_capturing(Err::<(), _>(block.error));
            drop(allocator.allocate(4 * MIB, free).unwrap());
            block.value.record_stream(free).unwrap();
            beside.free().unwrap();
            drop(under_way.end().unwrap());
            drop(*block.value);
            // SAFETY: as above, and not used again.
            assert_eq!(unsafe { destroy(blocking) }, sys::CUresult::CUDA_SUCCESS);
            drop(entered);
        }
    });
}

/// D11: the calling thread's default stream, by its handle or as a stream, captures like any other.
#[test]
fn d11_a_thread_stream_that_captures_is_named_as_that() {
    each(|rig| {
        let (allocator, [owner]) = rig.scene();
        let handle: sys::CUstream = std::ptr::without_provenance_mut(2);
        let stream = Stream::per_thread(&rig.context);
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
                // A capture that was spoilt ends with an error.
                drop(stream.end_capture().unwrap());
                assert_eq!(allocator.policy(), Policy::Packed);
                rig.close(&allocator);
            });
        }
    }
}
