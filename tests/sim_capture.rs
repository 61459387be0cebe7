//! What a capture forbids, to whom, and what spoils it.

mod sim_support;
use cualloc::driver::sys::*;
use sim_support::*;
use std::ptr::null_mut;

const GLOBAL: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
const LOCAL: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
const RELAXED: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
const UNSUPPORTED: CUresult = CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
const INVALIDATED: CUresult = CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;

fn begin(bench: &Bench, mode: CUstreamCaptureMode) -> CUstream {
    let stream = bench.stream();
    assert_eq!(call!(bench, cuStreamBeginCapture_v2(stream, mode)), OK);
    stream
}

fn end(bench: &Bench, stream: CUstream) -> CUresult {
    let mut graph = null_mut();
    let code = call!(bench, cuStreamEndCapture(stream, &mut graph));
    if code == OK {
        assert_eq!(call!(bench, cuGraphDestroy(graph)), OK);
    }
    code
}

fn exchange(bench: &Bench, mode: CUstreamCaptureMode) -> CUstreamCaptureMode {
    let mut mode = mode;
    assert_eq!(
        call!(bench, cuThreadExchangeStreamCaptureMode(&mut mode)),
        OK
    );
    mode
}

#[test]
fn captured_work_is_not_executed() {
    let bench = bench();
    let memory = bench.alloc(16);
    bench.memset(memory, 1, 16, bench.stream());
    bench.sync();
    let stream = begin(&bench, GLOBAL);
    bench.memset(memory, 2, 16, stream);
    let mut status = CUstreamCaptureStatus(9);
    assert_eq!(call!(bench, cuStreamIsCapturing(stream, &mut status)), OK);
    assert_eq!(
        status,
        CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE
    );
    assert_eq!(end(&bench, stream), OK);
    assert_eq!(bench.word(memory), 0x0101_0101);
}

#[test]
fn unsafe_calls_are_refused_and_spoil_the_capture_unless_relaxed() {
    let bench = bench();
    let mut address = 0;
    let stream = begin(&bench, LOCAL);
    assert_eq!(call!(bench, cuMemAlloc_v2(&mut address, 16)), UNSUPPORTED);
    assert_eq!(end(&bench, stream), INVALIDATED);

    let stream = begin(&bench, LOCAL);
    assert_eq!(exchange(&bench, RELAXED), GLOBAL);
    assert_eq!(call!(bench, cuMemAlloc_v2(&mut address, 16)), OK);
    assert_eq!(exchange(&bench, GLOBAL), RELAXED);
    assert_eq!(end(&bench, stream), OK);
}

#[test]
fn mapping_is_legal_during_capture() {
    let bench = bench();
    let stream = begin(&bench, GLOBAL);
    let (at, handle) = bench.mapped(GRANULE);
    assert_eq!(call!(bench, cuMemUnmap(at, GRANULE)), OK);
    assert_eq!(call!(bench, cuMemRelease(handle)), OK);
    assert_eq!(end(&bench, stream), OK);
}

#[test]
fn a_global_capture_binds_other_threads_a_local_one_does_not() {
    for (mode, expected) in [(GLOBAL, UNSUPPORTED), (LOCAL, OK)] {
        let bench = bench();
        let stream = begin(&bench, mode);
        let (table, raw) = (bench.table, bench.context.raw() as usize);
        let code = std::thread::scope(|scope| {
            let other = scope.spawn(move || {
                let mut address = 0;
                // SAFETY: the context lives, the output is a local.
                unsafe {
                    assert_eq!(table.cuCtxSetCurrent.unwrap()(raw as _), OK);
                    table.cuMemAlloc_v2.unwrap()(&mut address, 16)
                }
            });
            other.join().unwrap()
        });
        assert_eq!(code, expected);
        let _ = end(&bench, stream);
    }
}

#[test]
fn waiting_for_the_context_is_refused_even_when_relaxed() {
    let bench = bench();
    let stream = begin(&bench, RELAXED);
    exchange(&bench, RELAXED);
    assert_eq!(call!(bench, cuCtxSynchronize()), UNSUPPORTED);
    assert_eq!(end(&bench, stream), INVALIDATED);
}

#[test]
fn captured_events_are_not_queried_and_do_not_leave_the_capture() {
    let bench = bench();
    let (inside, outside) = (bench.event(), bench.event());
    let other = bench.stream();
    bench.record(outside, other);
    exchange(&bench, RELAXED);
    let stream = begin(&bench, LOCAL);
    bench.record(inside, stream);
    assert_eq!(bench.query(inside), CUresult::CUDA_ERROR_CAPTURED_EVENT);
    assert_eq!(end(&bench, stream), INVALIDATED);
    let stream = begin(&bench, LOCAL);
    let code = call!(bench, cuStreamWaitEvent(stream, outside, 0));
    assert_eq!(code, CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    assert_eq!(end(&bench, stream), INVALIDATED);
}

#[test]
fn forks_must_join() {
    let bench = bench();
    let (fork, join) = (bench.event(), bench.event());
    for joined in [false, true] {
        let side = bench.stream();
        let stream = begin(&bench, LOCAL);
        bench.record(fork, stream);
        bench.wait(side, fork);
        bench.spin(1, side);
        if joined {
            bench.record(join, side);
            bench.wait(stream, join);
        }
        let expected = if joined {
            OK
        } else {
            CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED
        };
        assert_eq!(end(&bench, stream), expected);
    }
}

#[test]
fn the_legacy_stream_is_off_limits_while_a_blocking_stream_captures() {
    let bench = bench();
    let mut stream = null_mut();
    assert_eq!(call!(bench, cuStreamCreate(&mut stream, 0)), OK);
    let mut id = 0;
    assert_eq!(call!(bench, cuStreamGetId(null_mut(), &mut id)), OK);
    assert_eq!(call!(bench, cuStreamBeginCapture_v2(stream, LOCAL)), OK);
    let memory = call!(bench, cuMemsetD8Async(0, 0, 0, null_mut()));
    assert_eq!(memory, CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    assert_eq!(end(&bench, stream), OK);
}
