//! What programs in C cannot do: contexts that die, streams of the simulator, panics.

use std::ffi::{CStr, c_void};
use std::ptr::{self, null, null_mut};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cualloc::driver::sys::{CUcontext, CUresult, CUstream, CUstreamCaptureMode};
use cualloc::driver::{Context, Driver, Stream};
use cualloc::sim::Simulator;

use super::*;
use crate::device::{Source, simulator};
use crate::entry::call;

/// The simulator's reports are those of all tests.
pub(crate) fn world() -> (MutexGuard<'static, ()>, &'static Simulator, Driver) {
    static ONE: Mutex<()> = Mutex::new(());
    let one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let simulator = simulator::shared().unwrap();
    simulator.take_reports();
    (one, simulator, Source::Simulated.driver().unwrap())
}

fn options(settings: &[(&CStr, &CStr)]) -> *mut cualloc_options_t {
    let options = cualloc_options_new();
    let device: (&CStr, &CStr) = (c"device", c"sim");
    for (key, value) in [device].iter().chain(settings) {
        // SAFETY: both end with a zero.
        let set = unsafe { cualloc_options_set(options, key.as_ptr(), value.as_ptr()) };
        assert_eq!(set, CUALLOC_OK);
    }
    options
}

fn create_in(context: CUcontext) -> (i32, *mut cualloc_t) {
    let mut made = ptr::dangling_mut();
    let options = options(&[]);
    // SAFETY: the tests destroy contexts only where that is what they are about; the pointer is to a local.
    let code = unsafe { cualloc_create_in(context.cast(), options, &mut made) };
    cualloc_options_free(options);
    (code, made)
}

/// A context of the caller's, and an allocator there.
fn in_own_context(simulator: &Simulator) -> (CUcontext, *mut cualloc_t) {
    let raw = simulator.create_context(0).unwrap();
    let (code, allocator) = create_in(raw);
    assert_eq!(code, CUALLOC_OK, "{}", text());
    (raw, allocator)
}

fn text() -> &'static str {
    // SAFETY: the text ends with a zero, and is read before the next failure.
    unsafe { CStr::from_ptr(cualloc_last_error()) }
        .to_str()
        .unwrap()
}

fn alloc(allocator: *mut cualloc_t, bytes: usize, stream: CUstream) -> (i32, u64) {
    let mut out = 1;
    // SAFETY: the tests' streams are alive, and the pointer is to a local.
    let code = unsafe { cualloc_alloc(allocator, bytes, stream.cast::<c_void>(), &mut out) };
    (code, out)
}

fn free(allocator: *mut cualloc_t, ptr: u64) -> i32 {
    // SAFETY: no test's work uses the block later.
    unsafe { cualloc_free(allocator, ptr) }
}

#[test]
fn a_context_of_the_callers_outlives_the_allocator() {
    let (_one, simulator, driver) = world();
    let (raw, allocator) = in_own_context(simulator);
    assert_eq!(driver.device_count(), Ok(1));
    let (code, small) = alloc(allocator, 4096, null_mut());
    assert_eq!(code, CUALLOC_OK);
    let (code, large) = alloc(allocator, 8 << 20, null_mut());
    assert_eq!(code, CUALLOC_OK);
    assert_eq!(cualloc_destroy(allocator), CUALLOC_BUSY);
    assert_eq!(
        (free(allocator, small), free(allocator, large)),
        (CUALLOC_OK, CUALLOC_OK)
    );
    assert_eq!(cualloc_destroy(allocator), CUALLOC_OK);
    assert!(simulator.destroy_context(raw), "it is the caller's still");
    assert_eq!(simulator.take_reports(), []);
}

#[test]
fn the_current_context_is_the_one_of_null() {
    let (_one, simulator, driver) = world();
    let (code, made) = create_in(null_mut());
    assert_eq!((code, made), (CUALLOC_INVALID_ARGUMENT, null_mut()));
    assert!(text().contains("no context is current"), "{}", text());
    let raw = simulator.create_context(0).unwrap();
    // SAFETY: it lives until the end of the test.
    let context = unsafe { Context::from_raw(&driver, raw) }.unwrap();
    let entered = context.enter().unwrap();
    let (code, allocator) = create_in(null_mut());
    assert_eq!(code, CUALLOC_OK, "{}", text());
    drop(entered);
    // The default stream is one of that context, with none current.
    let (code, ptr) = alloc(allocator, 4096, null_mut());
    assert_eq!((code, free(allocator, ptr)), (CUALLOC_OK, CUALLOC_OK));
    assert_eq!(cualloc_destroy(allocator), CUALLOC_OK);
    drop(context);
    assert!(simulator.destroy_context(raw));
    let (code, made) = create_in(raw);
    assert_eq!((code, made), (CUALLOC_INVALID_ARGUMENT, null_mut()));
    simulator.take_reports();
}

/// The driver reuses the handle of a destroyed context for a new one, which must not matter here.
#[test]
fn a_context_with_the_handle_of_a_dead_one_is_left_alone() {
    let (_one, simulator, driver) = world();
    let (raw, allocator) = in_own_context(simulator);
    let (_, ptr) = alloc(allocator, 8 << 20, null_mut());
    assert!(simulator.destroy_context(raw));
    assert_eq!(simulator.create_context(0), Some(raw));
    let before = driver.calls();
    let (code, none) = alloc(allocator, 64 << 20, null_mut());
    assert_eq!((code, none), (CUALLOC_CONTEXT_LOST, 0), "{}", text());
    assert_eq!(free(allocator, ptr), CUALLOC_CONTEXT_LOST);
    assert_eq!(cualloc_destroy(allocator), CUALLOC_CONTEXT_LOST);
    let since = driver.calls().since(&before);
    assert_eq!(since.get("cuCtxSetCurrent"), 0);
    assert!(simulator.reports().is_empty(), "{:?}", simulator.reports());
    assert!(simulator.destroy_context(raw));
    simulator.take_reports();
}

#[test]
fn a_context_destroyed_first_is_lost_and_not_used() {
    let (_one, simulator, driver) = world();
    let (raw, allocator) = in_own_context(simulator);
    let (_, ptr) = alloc(allocator, 8 << 20, null_mut());
    assert!(simulator.destroy_context(raw));
    // It is found out by the first call that needs the context.
    let (code, none) = alloc(allocator, 64 << 20, null_mut());
    assert_eq!((code, none), (CUALLOC_CONTEXT_LOST, 0), "{}", text());
    assert!(text().contains("the context is lost"), "{}", text());
    simulator.take_reports();
    let before = driver.calls();
    let (code, none) = alloc(allocator, 4096, null_mut());
    assert_eq!((code, none), (CUALLOC_CONTEXT_LOST, 0));
    assert_eq!(free(allocator, ptr), CUALLOC_CONTEXT_LOST);
    let mut out = 1;
    // SAFETY: the pointers are null or to a local.
    unsafe {
        assert_eq!(
            cualloc_trim(allocator, 0, null_mut(), null_mut()),
            CUALLOC_CONTEXT_LOST
        );
        assert_eq!(
            cualloc_empty_cache(allocator, &mut out, null_mut()),
            CUALLOC_CONTEXT_LOST
        );
        assert_eq!(
            cualloc_usable_size(allocator, ptr, &mut out),
            CUALLOC_CONTEXT_LOST
        );
        assert_eq!(
            cualloc_record_stream(allocator, ptr, null_mut()),
            CUALLOC_CONTEXT_LOST
        );
    }
    assert_eq!(out, 0);
    // The handle goes all the same.
    assert_eq!(cualloc_destroy(allocator), CUALLOC_CONTEXT_LOST);
    assert_eq!(cualloc_destroy(allocator), CUALLOC_CLOSED);
    assert_eq!(
        driver.calls().since(&before).total(),
        0,
        "nothing is called on it"
    );
    assert_eq!(simulator.take_reports(), []);
}

#[test]
fn a_stream_is_waited_for_where_no_context_is_current() {
    let (_one, _simulator, driver) = world();
    let context = driver.context(0).unwrap();
    let (code, allocator) = create_in(context.raw());
    assert_eq!(code, CUALLOC_OK);
    let mut raw = null_mut();
    {
        let entered = context.enter().unwrap();
        let create = entered.driver().functions().cuStreamCreate.unwrap();
        // SAFETY: the pointer is to a local. Without a flag it waits for the legacy stream, which waits for it.
        assert_eq!(unsafe { create(&mut raw, 0) }, CUresult::CUDA_SUCCESS);
    }
    // SAFETY: it is alive to the end.
    let waited_for = unsafe { Stream::from_raw(&context, raw) }.unwrap();
    let streams = [waited_for, Stream::legacy(&context)];
    let wait = |of: CUstream| {
        // SAFETY: the streams are alive.
        unsafe { cualloc_stream_synchronize(allocator, of.cast()) }
    };
    // SAFETY: contexts of this test stay alive.
    let current = || unsafe { Context::current(&driver) }.unwrap();
    assert!(current().is_none());
    for stream in &streams {
        let (code, ptr) = alloc(allocator, 4096, stream.raw());
        assert_eq!(code, CUALLOC_OK);
        // SAFETY: the block is as large.
        unsafe { stream.memset(ptr, 1, 4096) }.unwrap();
        assert_eq!(wait(stream.raw()), CUALLOC_OK, "{}", text());
        assert_eq!(stream.is_complete(), Ok(true));
        assert_eq!(free(allocator, ptr), CUALLOC_OK);
    }
    assert!(current().is_none(), "it stays as it was");

    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    streams[0].begin_capture(mode).unwrap();
    assert_eq!(wait(streams[0].raw()), CUALLOC_CAPTURING);
    // The legacy stream waits for that one.
    assert_eq!(wait(null_mut()), CUALLOC_CAPTURING);
    drop(streams[0].end_capture().unwrap());
    assert_eq!(wait(null_mut()), CUALLOC_OK);
    // The stream is queried again, so it is known that its capture has ended.
    assert_eq!(wait(raw), CUALLOC_OK);
    assert_eq!(cualloc_destroy(allocator), CUALLOC_OK, "{}", text());
}

#[test]
fn a_thread_without_a_context_gets_the_allocators() {
    let (_one, simulator, driver) = world();
    let context = driver.context(0).unwrap();
    let (code, allocator) = create_in(context.raw());
    assert_eq!(code, CUALLOC_OK);
    let handle = allocator as usize;
    let enter = || cualloc_make_current(handle as *mut cualloc_t);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // SAFETY: contexts of this test stay alive.
            let current = || unsafe { Context::current(&driver) }.unwrap();
            assert!(current().is_none());
            assert_eq!(enter(), CUALLOC_OK);
            assert_eq!(current().unwrap().id(), context.id());
            assert_eq!(enter(), CUALLOC_OK);
            assert_eq!(current().unwrap().id(), context.id());
        });
        scope.spawn(|| {
            // SAFETY: as above.
            let current = || unsafe { Context::current(&driver) }.unwrap();
            let other = simulator.create_context(0).unwrap();
            // SAFETY: the context is destroyed at the end.
            let set = unsafe { driver.functions().cuCtxSetCurrent.unwrap()(other) };
            assert_eq!(set, CUresult::CUDA_SUCCESS);
            assert_eq!(enter(), CUALLOC_OK);
            assert_eq!(current().unwrap().raw(), other, "what is current stays");
            assert!(simulator.destroy_context(other));
        });
    });
    assert_eq!(cualloc_destroy(allocator), CUALLOC_OK);
    assert_eq!(enter(), CUALLOC_CLOSED);
    assert_eq!(cualloc_make_current(null_mut()), CUALLOC_INVALID_ARGUMENT);
}

#[test]
fn streams_are_adopted_captured_and_retired() {
    let (_one, simulator, driver) = world();
    let context = Context::primary(&driver.device(0).unwrap()).unwrap();
    let (first, second) = (
        Stream::new(&context).unwrap(),
        Stream::new(&context).unwrap(),
    );
    let mut allocator = null_mut();
    // SAFETY: the pointer is to a local, the streams live until the end of the test.
    unsafe {
        let options = options(&[(c"tune.capture_checks", c"on")]);
        assert_eq!(cualloc_create(0, options, &mut allocator), CUALLOC_OK);
        cualloc_options_free(options);
        let handle = |stream: &Stream| stream.raw().cast::<c_void>();
        assert_eq!(
            cualloc_retire_stream(allocator, handle(&first)),
            CUALLOC_OK,
            "the pointer is unknown"
        );
        assert_eq!(cualloc_adopt_stream(allocator, handle(&first)), CUALLOC_OK);
        let (code, ptr) = alloc(allocator, 1 << 20, first.raw());
        assert_eq!(code, CUALLOC_OK);
        assert_eq!(
            cualloc_record_stream(allocator, ptr + 17, handle(&second)),
            CUALLOC_OK
        );

        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        first.begin_capture(mode).unwrap();
        assert_eq!(alloc(allocator, 4096, first.raw()), (CUALLOC_CAPTURING, 0));
        assert_eq!(free(allocator, ptr), CUALLOC_CAPTURING);
        assert_eq!(
            cualloc_free_on(allocator, ptr, handle(&first)),
            CUALLOC_CAPTURING
        );
        assert_eq!(
            cualloc_record_stream(allocator, ptr, handle(&first)),
            CUALLOC_CAPTURING
        );
        assert_eq!(
            cualloc_adopt_stream(allocator, handle(&first)),
            CUALLOC_CAPTURING
        );
        assert_eq!(
            cualloc_retire_stream(allocator, handle(&first)),
            CUALLOC_CAPTURING
        );
        assert_eq!(
            cualloc_empty_cache(allocator, null_mut(), null_mut()),
            CUALLOC_OK
        );
        drop(first.end_capture().unwrap());

        assert_eq!(cualloc_free_on(allocator, ptr, handle(&second)), CUALLOC_OK);
        assert_eq!(cualloc_retire_stream(allocator, handle(&first)), CUALLOC_OK);
        assert_eq!(
            cualloc_retire_stream(allocator, handle(&second)),
            CUALLOC_OK
        );
        assert_eq!(cualloc_check(allocator), CUALLOC_OK);
        assert_eq!(cualloc_destroy(allocator), CUALLOC_OK);
    }
    assert_eq!(simulator.take_reports(), []);
}

#[test]
fn a_panic_becomes_a_code() {
    assert_eq!(call(|| panic!("so it {}", "goes")), CUALLOC_PANIC);
    assert!(text().ends_with("it panicked: so it goes"), "{}", text());
    assert_eq!(call(|| panic!("plain")), CUALLOC_PANIC);
    assert!(text().ends_with("plain"), "{}", text());
    assert_eq!(call(|| std::panic::panic_any(Grudge)), CUALLOC_PANIC);
    assert!(text().ends_with("it panicked: "), "{}", text());
}

/// What was thrown and panics once more when it is dropped.
struct Grudge;

impl Drop for Grudge {
    fn drop(&mut self) {
        panic!("again");
    }
}

#[test]
fn a_panic_in_a_call_ends_its_announcement() {
    let (_one, _, _) = world();
    let mut allocator = null_mut();
    let options = options(&[]);
    // SAFETY: the pointer is to a local.
    let created = unsafe { cualloc_create(0, options, &mut allocator) };
    assert_eq!(created, CUALLOC_OK);
    cualloc_options_free(options);
    let stopped = call(|| handles::with(allocator, |_| panic!("half-way")));
    assert_eq!(stopped, CUALLOC_PANIC);
    // It would wait for the call for ever.
    assert_eq!(cualloc_destroy(allocator), CUALLOC_OK);
}

#[test]
fn a_destroy_inside_a_call_is_refused() {
    let (_one, _, _) = world();
    let (mut allocator, mut other) = (null_mut(), null_mut());
    let options = options(&[]);
    // SAFETY: the pointers are to locals.
    unsafe {
        assert_eq!(cualloc_create(0, options, &mut allocator), CUALLOC_OK);
        assert_eq!(cualloc_create(0, options, &mut other), CUALLOC_OK);
    }
    cualloc_options_free(options);
    let inside = call(|| {
        handles::with(allocator, |_| {
            assert_eq!(cualloc_destroy(allocator), CUALLOC_BUSY);
            // As a logger might. Other calls are served.
            assert_eq!(cualloc_check(other), CUALLOC_OK);
            assert_eq!(cualloc_check(allocator), CUALLOC_OK);
            Ok(())
        })
    });
    assert_eq!(inside, CUALLOC_OK);
    assert_eq!(
        (cualloc_destroy(allocator), cualloc_destroy(other)),
        (CUALLOC_OK, CUALLOC_OK)
    );
}

#[test]
fn a_destroyed_allocators_place_gets_another_handle() {
    let (_one, _, _) = world();
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..200 {
        let mut allocator = null_mut();
        let options = options(&[]);
        // SAFETY: the pointer is to a local.
        let created = unsafe { cualloc_create(0, options, &mut allocator) };
        assert_eq!(created, CUALLOC_OK);
        cualloc_options_free(options);
        assert!(seen.insert(allocator as u64), "a handle came twice");
        assert_eq!(cualloc_destroy(allocator), CUALLOC_OK);
    }
    let places: std::collections::BTreeSet<u64> =
        seen.iter().map(|handle| handle & 0xffff).collect();
    assert!(places.len() < 20, "places are used again");
    // SAFETY: looked up, and not found; null options are the defaults.
    assert_ne!(unsafe { cualloc_create(0, null(), null_mut()) }, CUALLOC_OK);
}

unsafe extern "C" fn never(_: *mut c_void, _: *mut c_void) -> bool {
    false
}

unsafe extern "C" fn count(data: *mut c_void) {
    // SAFETY: the tests give a counter that lives as long as the scope.
    unsafe { *data.cast::<u32>() += 1 };
}

fn footprint(pool: *mut cualloc_pool_t) -> (i32, cualloc_footprint_t) {
    let mut out = cualloc_footprint_t {
        struct_size: size_of::<cualloc_footprint_t>(),
        ..cualloc_footprint_t::default()
    };
    // SAFETY: the structure has its size.
    let code = unsafe { cualloc_pool_footprint(pool, &mut out) };
    (code, out)
}

#[test]
fn pools_of_a_context_destroyed_first_are_not_used() {
    let (_one, simulator, driver) = world();
    let (raw, allocator) = in_own_context(simulator);
    let (mut pool, mut scope, mut told) = (null_mut(), 0, 0_u32);
    let mut which = cualloc_scope_t {
        struct_size: size_of::<cualloc_scope_t>(),
        kind: CUALLOC_SCOPE_WHEN,
        capture: 0,
        stream: null_mut(),
        when: Some(never),
        done: Some(count),
        data: (&raw mut told).cast(),
    };
    // SAFETY: the pointers are to locals.
    unsafe {
        assert_eq!(cualloc_pool_create(allocator, &mut pool), CUALLOC_OK);
        assert_eq!(cualloc_pool_enter(pool, &which, &mut scope), CUALLOC_OK);
        which.kind = CUALLOC_SCOPE_THREAD;
        assert_eq!(cualloc_pool_enter(pool, &which, &mut scope), CUALLOC_OK);
    }
    let (code, block) = alloc(allocator, 8 << 20, null_mut());
    assert_eq!((code, footprint(pool).1.blocks), (CUALLOC_OK, 1));
    assert_ne!(block, 0);
    assert!(simulator.destroy_context(raw));
    let (code, none) = alloc(allocator, 64 << 20, null_mut());
    assert_eq!((code, none), (CUALLOC_CONTEXT_LOST, 0), "{}", text());
    simulator.take_reports();
    let before = driver.calls();
    assert_eq!(footprint(pool).0, CUALLOC_CONTEXT_LOST, "{}", text());
    which.kind = CUALLOC_SCOPE_WHEN;
    let mut none = 1;
    // SAFETY: the pointers are to locals.
    let refused = unsafe { cualloc_pool_enter(pool, &which, &mut none) };
    assert_eq!((refused, none), (CUALLOC_CONTEXT_LOST, 0), "{}", text());
    assert_eq!(told, 0, "what was not entered has no end");
    assert_eq!(cualloc_pool_leave(pool, scope), CUALLOC_OK, "{}", text());
    assert_eq!(cualloc_destroy(allocator), CUALLOC_CONTEXT_LOST);
    assert_eq!(told, 1, "the other scope ended with the allocator");
    assert_eq!(footprint(pool).0, CUALLOC_CLOSED);
    assert_eq!(simulator.take_reports(), []);
    assert_eq!(
        driver.calls().since(&before).total(),
        0,
        "nothing is called on it"
    );
}

#[test]
fn memory_is_suspended_by_number() {
    let (_one, simulator, _driver) = world();
    let (raw, allocator) = in_own_context(simulator);
    let (code, block) = alloc(allocator, 5 << 20, null_mut());
    assert_eq!(code, CUALLOC_OK, "{}", text());
    // SAFETY: nothing uses the memory, and the pointers are to locals.
    let suspend = |select, contents| unsafe {
        let mut bytes = 1;
        let code = cualloc_suspend(allocator, select, null_mut(), contents, &mut bytes);
        (code, bytes)
    };
    // SAFETY: as above.
    let resume = |select| unsafe {
        let mut bytes = 1;
        let code = cualloc_resume(allocator, select, null_mut(), &mut bytes);
        (code, bytes)
    };
    assert_eq!(resume(CUALLOC_SELECT_ALL), (CUALLOC_SUSPENDED, 0));
    let (code, bytes) = suspend(CUALLOC_SELECT_ALL, CUALLOC_CONTENTS_PINNED);
    assert_eq!((code, bytes), (CUALLOC_OK, 6 << 20), "{}", text());
    assert_eq!(
        suspend(CUALLOC_SELECT_ALL, CUALLOC_CONTENTS_DROP),
        (CUALLOC_SUSPENDED, 0)
    );
    assert_eq!(alloc(allocator, 512, null_mut()), (CUALLOC_SUSPENDED, 0));
    assert_eq!(
        resume(CUALLOC_SELECT_ALL),
        (CUALLOC_OK, 6 << 20),
        "{}",
        text()
    );
    assert_eq!(
        suspend(4, CUALLOC_CONTENTS_DROP),
        (CUALLOC_INVALID_ARGUMENT, 0)
    );
    assert_eq!(
        suspend(CUALLOC_SELECT_ALL, 3),
        (CUALLOC_INVALID_ARGUMENT, 0)
    );
    assert_eq!(resume(-1), (CUALLOC_INVALID_ARGUMENT, 0));
    // SAFETY: refused.
    let null = unsafe { cualloc_suspend(allocator, 0, null_mut(), 0, null_mut()) };
    assert_eq!(null, CUALLOC_INVALID_ARGUMENT);
    assert_eq!(
        suspend(CUALLOC_SELECT_ALL, CUALLOC_CONTENTS_HOST).0,
        CUALLOC_OK
    );
    assert_eq!(free(allocator, block), CUALLOC_OK);
    assert_eq!(cualloc_destroy(allocator), CUALLOC_OK, "{}", text());
    assert!(simulator.take_reports().is_empty());
    assert!(simulator.destroy_context(raw));
}
