//! The calls that a capture forbids on each thread, and those that invalidate it.

use crate::support::*;
use cualloc::driver::sys::*;
use std::ptr::null_mut;

const GLOBAL: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
const LOCAL: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
const RELAXED: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
const UNSUPPORTED: CUresult = CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
const INVALIDATED: CUresult = CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;

fn begin(bench: &Bench, mode: CUstreamCaptureMode) -> CUstream {
    let stream = bench.stream();
    ok!(bench, cuStreamBeginCapture_v2(stream, mode));
    stream
}

fn end(bench: &Bench, stream: CUstream) -> CUresult {
    let mut graph = null_mut();
    let code = call!(bench, cuStreamEndCapture(stream, &mut graph));
    if code == OK {
        ok!(bench, cuGraphDestroy(graph));
    }
    code
}

fn exchange(bench: &Bench, mode: CUstreamCaptureMode) -> CUstreamCaptureMode {
    let mut mode = mode;
    ok!(bench, cuThreadExchangeStreamCaptureMode(&mut mode));
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
    ok!(bench, cuStreamIsCapturing(stream, &mut status));
    assert_eq!(
        status,
        CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE
    );
    assert_eq!(end(&bench, stream), OK);
    assert_eq!(bench.word(memory), 0x0101_0101);
}

/// The effect of a call while a stream captures.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Rule {
    /// Nothing: the call is always allowed.
    Allowed,
    /// It is refused to threads that are not relaxed, by captures that are not.
    Unsafe,
    /// It is refused always.
    Refused,
}

struct World {
    bench: Bench,
    capturing: CUstream,
    other: CUstream,
    done: CUevent,
    plain: u64,
    host: *mut std::ffi::c_void,
}

type Try = fn(&World) -> CUresult;

/// As measured: what is refused has the code 900, and the capture ends with 901.
const RULES: &[(&str, Rule, Try)] = &[
    ("map, access, unmap", Rule::Allowed, |w| {
        let (at, handle) = w.bench.mapped(GRANULE);
        ok!(w.bench, cuMemUnmap(at, GRANULE));
        ok!(w.bench, cuMemRelease(handle));
        call!(w.bench, cuMemAddressFree(at, GRANULE))
    }),
    ("event create, destroy", Rule::Allowed, |w| {
        let event = w.bench.event();
        call!(w.bench, cuEventDestroy_v2(event))
    }),
    ("event record elsewhere", Rule::Allowed, |w| {
        call!(w.bench, cuEventRecord(w.done, w.other))
    }),
    ("wait elsewhere", Rule::Allowed, |w| {
        call!(w.bench, cuStreamWaitEvent(w.other, w.done, 0))
    }),
    ("stream create, destroy", Rule::Allowed, |w| {
        let stream = w.bench.stream();
        call!(w.bench, cuStreamDestroy_v2(stream))
    }),
    ("memory info", Rule::Allowed, |w| {
        let (mut free, mut total) = (0, 0);
        call!(w.bench, cuMemGetInfo_v2(&mut free, &mut total))
    }),
    ("is capturing", Rule::Allowed, |w| {
        let mut status = CUstreamCaptureStatus(9);
        call!(w.bench, cuStreamIsCapturing(w.capturing, &mut status))
    }),
    ("fill elsewhere", Rule::Allowed, |w| {
        call!(w.bench, cuMemsetD8Async(w.plain, 0, 16, w.other))
    }),
    ("cuMemAlloc", Rule::Unsafe, |w| {
        call!(w.bench, cuMemAlloc_v2(&mut 0, 16))
    }),
    ("cuMemFree", Rule::Unsafe, |w| {
        call!(w.bench, cuMemFree_v2(w.plain))
    }),
    ("cuMemHostAlloc", Rule::Unsafe, |w| {
        call!(w.bench, cuMemHostAlloc(&mut null_mut(), 16, 0))
    }),
    ("cuMemFreeHost", Rule::Unsafe, |w| {
        call!(w.bench, cuMemFreeHost(w.host))
    }),
    ("cuMemAllocAsync elsewhere", Rule::Unsafe, |w| {
        call!(w.bench, cuMemAllocAsync(&mut 0, 16, w.other))
    }),
    ("event query", Rule::Unsafe, |w| w.bench.query(w.done)),
    ("event synchronise", Rule::Unsafe, |w| {
        call!(w.bench, cuEventSynchronize(w.done))
    }),
    ("stream query elsewhere", Rule::Unsafe, |w| {
        call!(w.bench, cuStreamQuery(w.other))
    }),
    ("stream synchronise elsewhere", Rule::Unsafe, |w| {
        call!(w.bench, cuStreamSynchronize(w.other))
    }),
    ("module load", Rule::Unsafe, |w| {
        call!(
            w.bench,
            cuModuleLoadData(&mut null_mut(), c"".as_ptr().cast())
        )
    }),
    ("module unload", Rule::Unsafe, |w| {
        call!(w.bench, cuModuleUnload(w.bench.module))
    }),
    ("id of the capturing stream", Rule::Refused, |w| {
        call!(w.bench, cuStreamGetId(w.capturing, &mut 0))
    }),
    ("query of the capturing stream", Rule::Refused, |w| {
        call!(w.bench, cuStreamQuery(w.capturing))
    }),
    ("context synchronise", Rule::Refused, |w| {
        call!(w.bench, cuCtxSynchronize())
    }),
];

#[test]
fn a_capture_forbids_the_calls_that_drivers_forbid() {
    for (name, rule, attempt) in RULES {
        for mode in [GLOBAL, LOCAL, RELAXED] {
            // The capturing thread, that in relaxed mode, and another thread in each mode.
            for (thread, own) in [
                (0, GLOBAL),
                (0, RELAXED),
                (1, GLOBAL),
                (1, LOCAL),
                (1, RELAXED),
            ] {
                let bench = bench();
                let (plain, other, done) = (bench.alloc(16), bench.stream(), bench.event());
                bench.record(done, other);
                bench.sync();
                let mut host = null_mut();
                ok!(bench, cuMemHostAlloc(&mut host, 16, 0));
                let capturing = begin(&bench, mode);
                let world = World {
                    bench,
                    capturing,
                    other,
                    done,
                    plain,
                    host,
                };
                let act = || {
                    let bench = &world.bench;
                    ok!(bench, cuCtxSetCurrent(bench.context.raw()));
                    let old = exchange(bench, own);
                    let code = attempt(&world);
                    exchange(bench, old);
                    code
                };
                let code = match thread {
                    0 => act(),
                    _ => world.bench.sim.as_thread(thread, act),
                };
                // That a thread in thread-local mode minds its own captures alone is published.
                let minds = mode != RELAXED && own != RELAXED && (thread, own) != (1, LOCAL);
                let refused = *rule == Rule::Refused || *rule == Rule::Unsafe && minds;
                let expected = if refused { UNSUPPORTED } else { OK };
                let place = format!("{name}: {mode:?}, thread {thread} in {own:?}");
                assert_eq!(code, expected, "{place}");
                let ended = if refused { INVALIDATED } else { OK };
                assert_eq!(end(&world.bench, capturing), ended, "{place}");
            }
        }
    }
}

#[test]
fn a_capture_is_ended_by_its_thread_and_by_its_stream() {
    let bench = bench();
    let stream = begin(&bench, LOCAL);
    let elsewhere = || {
        let mut graph = null_mut();
        call!(bench, cuStreamEndCapture(stream, &mut graph))
    };
    assert_eq!(
        bench.sim.as_thread(1, elsewhere),
        CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD
    );
    assert_eq!(end(&bench, stream), OK);
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
    // That of an ended capture is no event that the driver knows the state of.
    let invalid = CUresult::CUDA_ERROR_INVALID_VALUE;
    assert_eq!(bench.query(inside), invalid);
    assert_eq!(call!(bench, cuStreamWaitEvent(other, inside, 0)), invalid);
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
    ok!(bench, cuStreamCreate(&mut stream, 0));
    let mut id = 0;
    ok!(bench, cuStreamGetId(null_mut(), &mut id));
    ok!(bench, cuStreamBeginCapture_v2(stream, LOCAL));
    let memory = call!(bench, cuMemsetD8Async(0, 0, 0, null_mut()));
    assert_eq!(memory, CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    assert_eq!(end(&bench, stream), OK);
}
