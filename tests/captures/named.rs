//! Captures of streams that are named by their handles, and of default streams.

use cualloc::error::StreamMisuse;

use super::common::capturing::*;
use super::common::prelude::*;

fn is_capturing<T: std::fmt::Debug>(result: Result<T, Error>) {
    assert_matches!(result, Err(Error::Capturing { .. }));
}

/// A6: no use is recorded on a capturing stream, owned or raw: a graph uses the memory at each of its launches, which
/// come after the use that would be recorded.
#[test]
fn a6_no_use_is_recorded_on_a_capturing_stream() {
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
                    is_capturing(allocator.raw_record_stream(block.ptr(), stream.raw()));
                    is_capturing(allocator.raw_record_use(block.ptr(), stream.raw()));
                });
            }
            assert_eq!(allocator.block_of(block.ptr()), before);
            block.record_stream(&kept).unwrap();
            block.record_use(&borrowed).unwrap();
        }
        allocator.retire(&borrowed).unwrap();
        match allocator.raw_retire(raw.raw()) {
            Ok(()) | Err(Error::Stream(StreamMisuse::Unknown { .. })) => {}
            Err(error) => panic!("{error}"),
        }
        raw.destroy();
    }
}

/// D11: whether a capture concerns a default stream is queried in the stream's own context, whichever is the
/// allocator's.
#[test]
fn d11_a_default_stream_is_queried_in_its_own_context() {
    each_simulated(|rig, sim| {
        let raw = sim.create_context(0).unwrap();
        // SAFETY: it lives as long as the simulator.
        let other = unsafe { Context::from_raw(&rig.driver, raw) }.unwrap();
        let allocator = rig.checked();
        let [ours, theirs] = [&rig.context, &other].map(Stream::legacy);
        for (context, suffers, free) in [(&rig.context, &ours, &theirs), (&other, &theirs, &ours)] {
            let [block, beside] =
                [suffers, free].map(|stream| allocator.allocate(12 * MIB, stream).unwrap());
            let _entered = context.enter().unwrap();
            let blocking = RawStream::in_context(rig, context, 0);
            let under_way = Capturing::begin(&blocking.borrowed(), MODE);
            is_capturing(allocator.allocate(4 * MIB, suffers));
            is_capturing(beside.record_stream(suffers));
            let block = block.free().unwrap_err();
            is_capturing(Err::<(), _>(block.error));
            drop(allocator.allocate(4 * MIB, free).unwrap());
            block.value.record_stream(free).unwrap();
            beside.free().unwrap();
            drop(under_way.end().unwrap());
            drop(*block.value);
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
            let refused = [
                allocator.allocate(MIB, &stream).map(drop),
                allocator.raw_allocate(MIB, handle).map(drop),
            ];
            for result in refused {
                assert_matches!(result, Err(Error::Capturing { stream: 2 }));
            }
            is_capturing(block.record_stream(&stream));
            is_capturing(allocator.raw_record_use(block.ptr(), handle));
        });
    });
}

/// The creation of an allocator, with its trial of virtual memory, disturbs no capture, whichever thread began it and
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
                let under_way = Capturing::begin(&stream, mode);
                let make = || Allocator::with_config(&rig.context, Config::new()).unwrap();
                let tried = || rig.calls("cuMemsetD8Async");
                let before = tried();
                let allocator = match here {
                    true => make(),
                    false => std::thread::scope(|scope| scope.spawn(make).join().unwrap()),
                };
                assert_eq!(tried() - before, 1);
                // A capture that was spoilt ends with an error.
                drop(under_way.end().unwrap());
                assert_eq!(allocator.policy(), Policy::Packed);
                rig.close(&allocator);
            });
        }
    }
}
