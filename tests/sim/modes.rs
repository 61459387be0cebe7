//! When work completes: immediately, by rows, or when the test completes it; and what a wait for it does.

use crate::support::*;
use cualloc::driver::sys::CUresult;
use cualloc::sim::{Mode, Report, SimConfig};
use std::ptr::null_mut;

const NOT_READY: CUresult = CUresult::CUDA_ERROR_NOT_READY;

#[test]
fn lagging_work_and_markers_complete_the_given_rows_later() {
    let bench = bench();
    bench.sim.set_mode(Mode::Lag(2));
    let stream = bench.stream();
    let (event, idle) = (bench.event(), bench.event());
    bench.spin(10, stream);
    bench.record(event, stream);
    bench.record(idle, bench.stream());
    assert_eq!(bench.query(idle), OK, "nothing before it");
    bench.sim.advance_row();
    assert_eq!(bench.query(event), NOT_READY);
    bench.sim.advance_row();
    assert_eq!(bench.query(event), OK);
}

#[test]
fn lagging_work_completes_after_its_dependencies() {
    let bench = bench();
    bench.sim.set_mode(Mode::Lag(3));
    let (a, b) = (bench.stream(), bench.stream());
    let (first, second) = (bench.event(), bench.event());
    bench.sim.advance_row();
    bench.spin(1, a);
    bench.record(first, a);
    bench.wait(b, first);
    bench.record(second, b);
    bench.sim.advance_row();
    bench.sim.advance_row();
    assert_eq!(bench.query(second), NOT_READY);
    bench.sim.advance_row();
    assert_eq!(bench.query(second), OK);
}

#[test]
fn a_host_wait_completes_only_what_it_must() {
    let bench = bench();
    bench.manual();
    let (a, b, c) = (bench.stream(), bench.stream(), bench.stream());
    let (first, second) = (bench.event(), bench.event());
    bench.spin(100, a);
    bench.record(first, a);
    bench.spin(1000, a);
    bench.wait(b, first);
    bench.spin(10, b);
    bench.record(second, b);
    bench.spin(1, c);
    let before = bench.sim.calls().nanos();
    ok!(bench, cuEventSynchronize(second));
    assert_eq!(bench.sim.calls().nanos() - before, 110);
    let left: Vec<_> = bench
        .sim
        .pending()
        .iter()
        .map(|op| (op.stream, op.kind))
        .collect();
    assert_eq!(
        left,
        [
            (bench.stream_id(a), "cualloc_spin"),
            (bench.stream_id(c), "cualloc_spin")
        ]
    );
}

#[test]
fn the_test_chooses_among_legal_orders_only() {
    let bench = bench();
    bench.manual();
    let (a, b) = (bench.stream(), bench.stream());
    let event = bench.event();
    bench.spin(1, a);
    bench.record(event, a);
    bench.wait(b, event);
    bench.spin(2, b);
    let kinds: Vec<_> = bench
        .sim
        .pending()
        .iter()
        .map(|op| (op.kind, op.ready))
        .collect();
    assert_eq!(
        kinds,
        [
            ("cualloc_spin", true),
            ("cuEventRecord", false),
            ("cuStreamWaitEvent", false),
            ("cualloc_spin", false)
        ]
    );
    assert!(!bench.sim.complete(2));
    assert!(!bench.sim.complete(9));
    assert_eq!(bench.sim.complete_stream(bench.stream_id(b), 5), 0);
    assert!(bench.sim.complete(0));
    assert_eq!(bench.query(event), NOT_READY);
    assert_eq!(bench.sim.complete_stream(bench.stream_id(a), 5), 1);
    assert_eq!(bench.query(event), OK);
    assert_eq!(bench.sim.complete_stream(bench.stream_id(b), 5), 2);
    assert!(bench.sim.pending().is_empty());
}

#[test]
fn free_waits_for_running_work_if_configured_and_unmap_does_not() {
    let bench = with(SimConfig {
        strict_free: false,
        ..SimConfig::with_devices(1, 1 << 30)
    });
    bench.manual();
    let stream = bench.stream();
    let memory = bench.alloc(4096);
    let (at, handle) = bench.mapped(GRANULE);
    bench.spin(20_000_000, stream);
    ok!(bench, cuMemUnmap(at, GRANULE));
    ok!(bench, cuMemRelease(handle));
    assert_eq!((bench.sim.waits().0, bench.sim.pending().len()), (0, 1));
    let before = bench.sim.calls().nanos();
    ok!(bench, cuMemFree_v2(memory));
    assert_eq!(bench.sim.waits(), (1, 1));
    assert_eq!(bench.sim.calls().nanos() - before, 20_000_000 + 37_500);
    assert!(bench.sim.pending().is_empty());
    bench.silent();
}

/// Freeing memory proves nothing about other work: that is still in progress, and unordered with work submitted next.
#[test]
fn s1_frees_wait_for_nothing_and_order_nothing() {
    let bench = bench();
    let (kept, freed) = (bench.alloc(4096), bench.alloc(4096));
    let (a, b) = (bench.stream(), bench.stream());
    let mut host = null_mut();
    ok!(bench, cuMemHostAlloc(&mut host, 16, 0));
    bench.manual();
    bench.memset(kept, 1, 16, a);
    ok!(bench, cuMemFree_v2(freed));
    ok!(bench, cuMemFreeHost(host));
    assert_eq!((bench.sim.waits().0, bench.sim.pending().len()), (2, 1));
    bench.silent();
    bench.sim.complete_all();
    bench.sim.set_mode(Mode::Instant);
    let (freed, mut host) = (bench.alloc(4096), null_mut());
    ok!(bench, cuMemHostAlloc(&mut host, 16, 0));
    ok!(bench, cuMemFree_v2(freed));
    ok!(bench, cuMemFreeHost(host));
    bench.memset(kept, 2, 16, b);
    reported!(bench, Report::Race { .. });
}

#[test]
fn s1_frees_of_memory_not_known_idle_are_reported() {
    let bench = bench();
    let memory = bench.alloc(4096);
    bench.memset(memory, 1, 16, bench.stream());
    ok!(bench, cuMemFree_v2(memory));
    bench.in_use("cuMemFree_v2");
}

#[test]
fn denied_host_waits_fail_and_are_reported() {
    let bench = bench();
    bench.sim.deny_host_waits(true);
    assert_eq!(
        call!(bench, cuCtxSynchronize()),
        CUresult::CUDA_ERROR_UNKNOWN
    );
    reported!(
        bench,
        Report::DeniedWait {
            call: "cuCtxSynchronize"
        }
    );
    bench.sim.deny_host_waits(false);
    ok!(bench, cuCtxSynchronize());
}

#[test]
fn work_continues_after_its_stream_is_destroyed() {
    let bench = bench();
    bench.manual();
    let stream = bench.stream();
    let event = bench.event();
    let memory = bench.alloc(16);
    bench.memset(memory, 9, 16, stream);
    bench.record(event, stream);
    ok!(bench, cuStreamDestroy_v2(stream));
    assert_eq!(
        call!(bench, cuStreamQuery(stream)),
        CUresult::CUDA_ERROR_INVALID_HANDLE
    );
    bench.destroyed("stream");
    ok!(bench, cuEventSynchronize(event));
    assert_eq!(bench.word(memory), 0x0909_0909);
}

#[test]
fn per_thread_streams_differ_by_thread_and_the_legacy_one_does_not() {
    let bench = bench();
    let ids = |bench: &Bench| {
        let mut ids = [0; 3];
        for (handle, id) in ids.iter_mut().enumerate() {
            ok!(bench, cuStreamGetId(handle as _, id));
        }
        ids
    };
    let mine = ids(&bench);
    assert_eq!(mine[0], mine[1]);
    let raw = bench.context.raw() as usize;
    let (table, theirs) = (bench.table, std::sync::Mutex::new([0; 3]));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut got = [0; 3];
            // SAFETY: the context lives, the outputs are locals.
            unsafe {
                assert_eq!(table.cuCtxSetCurrent.unwrap()(raw as _), OK);
                for (handle, id) in got.iter_mut().enumerate() {
                    assert_eq!(table.cuStreamGetId.unwrap()(handle as _, id), OK);
                }
            }
            *theirs.lock().unwrap() = got;
        });
    });
    let theirs = theirs.into_inner().unwrap();
    assert_eq!((theirs[0], theirs[1]), (mine[0], mine[1]));
    assert_ne!(theirs[2], mine[2]);
    ok!(bench, cuCtxSetCurrent(null_mut()));
    let mut id = 0;
    let none = call!(bench, cuStreamGetId(null_mut(), &mut id));
    assert_eq!(none, CUresult::CUDA_ERROR_INVALID_CONTEXT);
}

#[test]
fn copies_move_bytes_when_they_complete() {
    let bench = bench();
    bench.manual();
    let stream = bench.stream();
    let memory = bench.alloc(4096);
    let mut source: Vec<u8> = (0..=255).collect();
    let mut back = vec![0u8; 256];
    let (from, to) = (source.as_ptr().cast(), back.as_mut_ptr().cast());
    ok!(bench, cuMemcpyHtoDAsync_v2(memory + 3, from, 256, stream));
    ok!(
        bench,
        cuMemcpyDtoDAsync_v2(memory + 1024, memory + 3, 256, stream)
    );
    ok!(bench, cuMemcpyDtoHAsync_v2(to, memory + 1024, 256, stream));
    source[7] = 99;
    ok!(bench, cuStreamSynchronize(stream));
    assert_eq!(back, source);
    let both = call!(
        bench,
        cuMemcpyAsync(memory, source.as_ptr() as u64, 256, stream)
    );
    assert_eq!(both, OK);
    ok!(
        bench,
        cuMemcpyAsync(back.as_mut_ptr() as u64, memory, 256, stream)
    );
    back[7] = 0;
    bench.sync();
    assert_eq!(back, source);
    bench.silent();
}

#[test]
fn checks_count_wrong_words_of_large_ranges() {
    let bench = with(SimConfig::with_devices(1, 64 << 30));
    let stream = bench.stream();
    let (memory, bad) = (bench.alloc(16 << 30), bench.alloc(4));
    let words = 4u64 << 30;
    bench.memset(bad, 0, 4, stream);
    bench.fill(memory, words, u32::MAX - 5, stream);
    bench.check(memory, words, u32::MAX - 5, bad, stream);
    assert_eq!(bench.word(bad), 0);
    bench.memset(memory + 4001, 0xee, 6, stream);
    bench.check(memory, words, u32::MAX - 5, bad, stream);
    assert_eq!(bench.word(bad), 2);
    bench.check(memory + 8192, 10, 0, bad, stream);
    assert_eq!(bench.word(bad), 12);
    bench.silent();
}

#[test]
fn undefined_reads_are_reported_on_demand() {
    let config = SimConfig {
        strict_undefined: true,
        ..SimConfig::with_devices(1, 1 << 30)
    };
    let bench = with(config);
    let stream = bench.stream();
    let memory = bench.alloc(512);
    bench.memset(memory, 0, 100, stream);
    let mut back = [0u8; 512];
    let to = back.as_mut_ptr().cast();
    ok!(bench, cuMemcpyDtoHAsync_v2(to, memory, 100, stream));
    bench.silent();
    ok!(bench, cuMemcpyDtoHAsync_v2(to, memory, 512, stream));
    reported!(bench, Report::Undefined { site } if site.bytes == 412);
}

#[test]
fn host_functions_run_outside_the_lock_when_their_turn_comes() {
    unsafe extern "C" fn note(data: *mut std::ffi::c_void) {
        // SAFETY: the test passes a pointer to an atomic that outlives the call.
        let flag = unsafe { &*data.cast::<std::sync::atomic::AtomicU32>() };
        flag.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    }
    let bench = bench();
    bench.manual();
    let stream = bench.stream();
    let flag = std::sync::atomic::AtomicU32::new(0);
    let data = std::ptr::addr_of!(flag).cast_mut().cast();
    ok!(bench, cuLaunchHostFunc(stream, Some(note), data));
    assert_eq!(flag.load(std::sync::atomic::Ordering::Relaxed), 0);
    bench.sync();
    assert_eq!(flag.load(std::sync::atomic::Ordering::Relaxed), 1);
}
