//! Graph pools by their handles, over the simulator; programs in C do the same with captures.

use std::ffi::c_void;
use std::path::Path;
use std::ptr::null_mut;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use std::sync::mpsc::channel;
use std::thread;

use super::*;
use crate::tests::world;

pub(crate) fn allocator() -> *mut cualloc_t {
    let (options, mut made) = (cualloc_options_new(), null_mut());
    // SAFETY: texts end with a zero, and the pointer is to a local.
    unsafe {
        let set = cualloc_options_set(options, c"device".as_ptr(), c"sim".as_ptr());
        assert_eq!(set, CUALLOC_OK);
        assert_eq!(cualloc_create(0, options, &mut made), CUALLOC_OK);
    }
    cualloc_options_free(options);
    made
}

pub(crate) fn pool_of(allocator: *mut cualloc_t) -> *mut cualloc_pool_t {
    let mut made = null_mut();
    // SAFETY: the pointer is to a local.
    let code = unsafe { cualloc_pool_create(allocator, &mut made) };
    assert_eq!(code, CUALLOC_OK);
    made
}

/// What a predicate of the tests looks at.
#[derive(Default)]
pub(crate) struct Asked {
    times: AtomicU32,
    pub(crate) answer: AtomicBool,
    ended: AtomicU32,
}

unsafe extern "C" fn asks(data: *mut c_void, _: *mut c_void) -> bool {
    // SAFETY: the tests give what lives as long as the scope.
    let asked = unsafe { &*data.cast::<Asked>() };
    asked.times.fetch_add(1, Ordering::Relaxed);
    asked.answer.load(Ordering::Relaxed)
}

unsafe extern "C" fn ends(data: *mut c_void) {
    // SAFETY: as above.
    let asked = unsafe { &*data.cast::<Asked>() };
    asked.ended.fetch_add(1, Ordering::Relaxed);
}

pub(crate) fn scope(kind: i32, asked: &Asked) -> cualloc_scope_t {
    cualloc_scope_t {
        struct_size: size_of::<cualloc_scope_t>(),
        kind,
        capture: 0,
        stream: null_mut(),
        when: Some(asks),
        done: Some(ends),
        data: std::ptr::from_ref(asked).cast_mut().cast(),
    }
}

pub(crate) fn enter(pool: *mut cualloc_pool_t, which: &cualloc_scope_t) -> (i32, u64) {
    let mut number = 1;
    // SAFETY: the pointers are to locals, and what a predicate looks at outlives the scope.
    let code = unsafe { cualloc_pool_enter(pool, which, &mut number) };
    (code, number)
}

fn request(allocator: *mut cualloc_t) -> u64 {
    let mut out = 0;
    // SAFETY: the pointer is to a local.
    let code = unsafe { cualloc_alloc(allocator, 1 << 20, null_mut(), &mut out) };
    assert_eq!(code, CUALLOC_OK);
    // SAFETY: nothing uses it.
    assert_eq!(unsafe { cualloc_free(allocator, out) }, CUALLOC_OK);
    out
}

#[test]
fn scope_numbers_are_unique_and_belong_to_one_pool() {
    let _one = world();
    let (allocator, asked) = (allocator(), Asked::default());
    let (pool, other) = (pool_of(allocator), pool_of(allocator));
    let which = scope(CUALLOC_SCOPE_THREAD, &asked);
    let mut known = Vec::new();
    for turn in 0..10 {
        let (code, number) = enter(if turn % 2 == 0 { pool } else { other }, &which);
        assert_eq!(code, CUALLOC_OK);
        assert!(!known.contains(&number), "{number} of {known:?}");
        known.push(number);
        let (own, foreign) = if turn % 2 == 0 {
            (pool, other)
        } else {
            (other, pool)
        };
        assert_eq!(
            cualloc_pool_leave(foreign, number),
            CUALLOC_INVALID_ARGUMENT
        );
        assert_eq!(cualloc_pool_leave(own, number), CUALLOC_OK);
        for stale in &known {
            assert_eq!(cualloc_pool_leave(own, *stale), CUALLOC_INVALID_ARGUMENT);
        }
    }
    assert_eq!(cualloc_pool_release(other), CUALLOC_OK);
    let again = pool_of(allocator);
    assert!(
        again != other && again != pool,
        "a handle is never used again"
    );
    assert_eq!(cualloc_pool_release(other), CUALLOC_CLOSED);
    assert_eq!(cualloc_destroy(allocator), CUALLOC_OK);
    assert_eq!(cualloc_pool_release(pool), CUALLOC_CLOSED);
}

#[test]
fn a_predicate_ends_with_its_scope_its_pool_or_its_allocator() {
    let _one = world();
    let allocator = allocator();
    let asked: [Asked; 4] = Default::default();
    let pools = [pool_of(allocator), pool_of(allocator)];
    let entered: Vec<u64> = asked[..3]
        .iter()
        .zip([pools[0], pools[0], pools[1]])
        .map(|(asked, pool)| enter(pool, &scope(CUALLOC_SCOPE_WHEN, asked)).1)
        .collect();
    let ended = || {
        asked
            .each_ref()
            .map(|asked| asked.ended.load(Ordering::Relaxed))
    };
    request(allocator);
    assert!(
        asked[..3]
            .iter()
            .all(|asked| asked.times.load(Ordering::Relaxed) > 0)
    );
    assert_eq!(ended(), [0; 4]);
    assert_eq!(cualloc_pool_leave(pools[0], entered[0]), CUALLOC_OK);
    assert_eq!(ended(), [1, 0, 0, 0]);
    assert_eq!(cualloc_pool_release(pools[0]), CUALLOC_OK);
    assert_eq!(ended(), [1, 1, 0, 0]);
    // If the scope was not entered, no end is reported.
    let refused = enter(pools[0], &scope(CUALLOC_SCOPE_WHEN, &asked[3]));
    assert_eq!((refused, ended()), ((CUALLOC_CLOSED, 0), [1, 1, 0, 0]));
    assert_eq!(cualloc_destroy(allocator), CUALLOC_OK);
    assert_eq!(ended(), [1, 1, 1, 0]);
}

/// A predicate that says when it is in for the first time, and waits until it may go on.
struct Slow {
    asked: AtomicBool,
    begun: std::sync::mpsc::Sender<()>,
    go_on: std::sync::Mutex<std::sync::mpsc::Receiver<()>>,
    over: AtomicBool,
}

unsafe extern "C" fn slow(data: *mut c_void, _: *mut c_void) -> bool {
    // SAFETY: it lives as long as the scope.
    let slow = unsafe { &*data.cast::<Slow>() };
    if !slow.asked.swap(true, Ordering::Relaxed) {
        slow.begun.send(()).unwrap();
        slow.go_on.lock().unwrap().recv().unwrap();
        slow.over.store(true, Ordering::Relaxed);
    }
    false
}

/// Whether a thread, by its place below `/proc`, does not run because it waits for something.
fn is_asleep(thread: &Path) -> bool {
    let stat = std::fs::read_to_string(Path::new("/proc").join(thread).join("stat"));
    let state = stat.as_deref().unwrap_or("").rsplit(')').next();
    state.is_some_and(|state| state.trim_start().starts_with('S'))
}

#[test]
fn leaving_a_scope_waits_for_threads_in_its_predicate() {
    let _one = world();
    let (allocator, nothing) = (allocator(), Asked::default());
    let pool = pool_of(allocator);
    let ((begun, has_begun), (go_on, may_go_on)) = (channel(), channel());
    let looked_at = Slow {
        asked: AtomicBool::new(false),
        begun,
        go_on: may_go_on.into(),
        over: AtomicBool::new(false),
    };
    let mut which = scope(CUALLOC_SCOPE_WHEN, &nothing);
    which.when = Some(slow);
    which.done = None;
    which.data = std::ptr::from_ref(&looked_at).cast_mut().cast();
    let (code, number) = enter(pool, &which);
    assert_eq!(code, CUALLOC_OK);
    let (allocator_too, pool_too) = (allocator as usize, pool as usize);
    thread::scope(|threads| {
        threads.spawn(move || request(allocator_too as *mut cualloc_t));
        has_begun.recv().unwrap();
        let (left, has_left) = channel();
        let (started, has_started) = channel();
        let over = &looked_at.over;
        threads.spawn(move || {
            started
                .send(std::fs::read_link("/proc/thread-self"))
                .unwrap();
            let code = cualloc_pool_leave(pool_too as *mut cualloc_pool_t, number);
            left.send((code, over.load(Ordering::Relaxed))).unwrap();
        });
        let thread = has_started.recv().unwrap();
        // Until it waits, or as long as it takes elsewhere.
        let waits = || match &thread {
            Ok(thread) => is_asleep(thread),
            Err(_) => false,
        };
        let rounds = if thread.is_ok() { 10_000_000 } else { 10_000 };
        let early = (0..rounds)
            .map(|_| {
                thread::yield_now();
                has_left.try_recv().ok()
            })
            .take_while(|early| early.is_some() || !waits())
            .find_map(|early| early);
        go_on.send(()).unwrap();
        assert_eq!(early, None, "a thread is in the predicate");
        assert_eq!(has_left.recv().unwrap(), (CUALLOC_OK, true));
    });
    looked_at.asked.store(false, Ordering::Relaxed);
    request(allocator);
    assert!(
        !looked_at.asked.load(Ordering::Relaxed),
        "the filter is not called any more"
    );
    assert_eq!(cualloc_destroy(allocator), CUALLOC_OK);
}

/// A stream that predicates of the tests do not look at.
const A_STREAM: usize = 64;

fn abandon(number: u64, stream: usize) -> i32 {
    // SAFETY: no call uses the stream.
    unsafe { cualloc_torch_pool_abandon(number, stream as *mut c_void) }
}

pub(crate) fn shared_is_simulated() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let options = cualloc_options_new();
        // SAFETY: texts end with a zero.
        let set = unsafe { cualloc_options_set(options, c"device".as_ptr(), c"sim".as_ptr()) };
        assert_eq!(
            (set, cualloc_shared_options(options)),
            (CUALLOC_OK, CUALLOC_OK)
        );
        cualloc_options_free(options);
    });
}

pub(crate) fn torch_id(second: u64) -> cualloc_torch_pool_id_t {
    cualloc_torch_pool_id_t { first: 0, second }
}

/// What the thread has begun, by its number.
pub(crate) fn torch_begin(id: cualloc_torch_pool_id_t, asked: &Asked) -> u64 {
    let data = std::ptr::from_ref(asked).cast_mut().cast();
    // SAFETY: what the predicate looks at outlives the scopes.
    let code = unsafe { cualloc_torch_pool_begin(0, id, Some(asks), Some(ends), data) };
    assert_eq!(code, CUALLOC_OK);
    cualloc_torch_pool_newest()
}

fn state(number: u64, stream: usize) -> i32 {
    // SAFETY: no call uses the stream.
    unsafe { cualloc_torch_pool_state(number, stream as *mut c_void) }
}

/// The pool that something was begun in.
fn torch_name(number: u64) -> Result<(i32, cualloc_torch_pool_id_t), i32> {
    let (mut device, mut id) = (7, torch_id(7));
    // SAFETY: both are locals.
    match unsafe { cualloc_torch_pool_name(number, &mut device, &mut id) } {
        CUALLOC_OK => Ok((device, id)),
        code => {
            assert_eq!((device, id), Default::default());
            Err(code)
        }
    }
}

pub(crate) fn torch_footprint(id: cualloc_torch_pool_id_t) -> Option<cualloc_footprint_t> {
    let pool = cualloc_torch_pool(0, id);
    let mut out = cualloc_footprint_t {
        struct_size: size_of::<cualloc_footprint_t>(),
        ..cualloc_footprint_t::default()
    };
    // SAFETY: the structure has its size.
    let code = unsafe { cualloc_pool_footprint(pool, &mut out) };
    assert_eq!(code == CUALLOC_OK, !pool.is_null());
    (code == CUALLOC_OK).then_some(out)
}

#[test]
fn a_layer_above_learns_what_pytorch_does_for_a_capture_that_fails() {
    let _one = world();
    shared_is_simulated();
    let asked = Asked::default();
    asked.answer.store(true, Ordering::Relaxed);
    let id = torch_id(3);
    let number = torch_begin(id, &asked);
    assert_eq!(torch_name(number), Ok((0, id)));
    // SAFETY: nothing is written.
    let code = unsafe { cualloc_torch_pool_name(number, null_mut(), null_mut()) };
    assert_eq!(code, CUALLOC_OK);
    assert_eq!(state(number, A_STREAM), CUALLOC_TORCH_POOL_GOES_ON);
    assert_eq!(state(number, 0), CUALLOC_TORCH_POOL_OPEN);
    asked.answer.store(false, Ordering::Relaxed);
    assert_eq!(state(number, A_STREAM), CUALLOC_TORCH_POOL_OPEN);
    assert_eq!(cualloc_torch_pool_end(0, id), CUALLOC_OK);
    asked.answer.store(true, Ordering::Relaxed);
    for number in [number, 0, u64::MAX] {
        assert_eq!(torch_name(number), Err(CUALLOC_NOT_LIVE));
        assert_eq!(state(number, A_STREAM), CUALLOC_TORCH_POOL_ENDED);
    }
    // Each thread counts its own releases, those of no pool among them.
    let before = cualloc_torch_pool_releases();
    let release = move || {
        assert_eq!(cualloc_torch_pool_release(0, id), CUALLOC_OK);
        cualloc_torch_pool_releases()
    };
    assert_eq!(thread::spawn(release).join().unwrap(), 1);
    assert!(torch_footprint(id).is_none());
    assert_eq!(cualloc_torch_pool_releases(), before);
    assert_eq!(release(), before + 1);
}

#[test]
fn pytorch_pools_end_with_their_last_release_and_failed_captures_when_abandoned() {
    let _one = world();
    shared_is_simulated();
    let asked = Asked::default();
    let begin = |id| torch_begin(id, &asked);
    let (shared, own) = (torch_id(1), torch_id(2));
    asked.answer.store(true, Ordering::Relaxed);
    let mut last = 0;
    for _ in 0..2 {
        let number = begin(shared);
        assert!(number > last, "{number} after {last}");
        last = number;
        assert_eq!(torch_block(), CUALLOC_OK, "the shared allocator lives");
        assert_eq!(torch_footprint(shared).map(|now| now.peak), Some(1 << 20));
        assert_eq!(cualloc_torch_pool_end(0, shared), CUALLOC_OK);
        assert_eq!(cualloc_torch_pool_newest(), 0);
    }
    assert_eq!(asked.ended.load(Ordering::Relaxed), 2);
    assert_eq!(cualloc_torch_pool_release(0, shared), CUALLOC_OK);
    assert!(torch_footprint(shared).is_some(), "a second graph has it");
    // Two beside each other. Another thread has begun nothing.
    let (first, second) = (begin(shared), begin(own));
    let theirs = thread::spawn(|| cualloc_torch_pool_newest());
    assert_eq!(theirs.join().unwrap(), 0);
    // Ending the second one has failed, so it is still open.
    assert_eq!(abandon(second, A_STREAM), CUALLOC_OK);
    assert_eq!(cualloc_torch_pool_newest(), second);
    assert!(torch_footprint(own).is_some());
    // The first one fails on another thread, and is over.
    asked.answer.store(false, Ordering::Relaxed);
    let ended = thread::spawn(move || abandon(first, A_STREAM));
    assert_eq!(ended.join().unwrap(), CUALLOC_OK);
    assert_eq!(cualloc_torch_pool_newest(), second);
    assert_eq!(asked.ended.load(Ordering::Relaxed), 3);
    assert!(torch_footprint(own).is_some(), "the second one goes on");
    assert!(torch_footprint(shared).is_some(), "as before it began");
    // The second one is never ended.
    asked.answer.store(true, Ordering::Relaxed);
    assert_eq!(abandon(second, 0), CUALLOC_OK);
    assert!(torch_footprint(own).is_none() && torch_footprint(shared).is_some());
    assert_eq!(cualloc_torch_pool_newest(), 0);
    for number in [0, first, second, u64::MAX] {
        assert_eq!(abandon(number, 0), CUALLOC_OK);
        assert_eq!(abandon(number, A_STREAM), CUALLOC_OK);
    }
    assert_eq!(cualloc_torch_pool_release(0, shared), CUALLOC_OK);
    assert!(torch_footprint(shared).is_none());
    assert_eq!(cualloc_torch_pool_end(0, shared), CUALLOC_OK);
    assert_eq!(cualloc_torch_pool_release(0, shared), CUALLOC_OK);
    assert_eq!(asked.ended.load(Ordering::Relaxed), 4);
}

/// A block of PyTorch's that comes and goes; the code of a failure.
fn torch_block() -> i32 {
    // SAFETY: nothing uses it.
    unsafe {
        let made = cualloc_torch_alloc(1 << 20, 0, null_mut());
        if made.is_null() {
            return cualloc_last_code();
        }
        cualloc_torch_free(made, 1 << 20, 0, null_mut());
    }
    CUALLOC_OK
}

#[test]
fn a_free_that_another_thread_cannot_make_is_made_by_a_later_call() {
    let _one = world();
    shared_is_simulated();
    let (asked, id) = (Asked::default(), torch_id(3));
    asked.answer.store(true, Ordering::Relaxed);
    torch_begin(id, &asked);
    let per_thread = 2 as *mut c_void;
    // SAFETY: the stream is the thread's own.
    let block = unsafe { cualloc_torch_alloc(1 << 20, 0, per_thread) };
    assert!(!block.is_null());
    assert_eq!(cualloc_torch_pool_end(0, id), CUALLOC_OK);
    let blocks = || torch_footprint(id).map(|now| now.blocks);
    let address = block as usize;
    let freed = thread::spawn(move || {
        // SAFETY: nothing uses it.
        unsafe { cualloc_torch_free(address as *mut c_void, 1 << 20, 0, 2 as *mut c_void) };
    });
    freed.join().unwrap();
    assert_eq!(blocks(), Some(1), "its stream means another one there");
    assert_eq!(torch_block(), CUALLOC_OK);
    assert_eq!(blocks(), Some(0));
    assert_eq!(cualloc_torch_pool_release(0, id), CUALLOC_OK);
    assert_eq!(blocks(), None);
}

/// What asks for memory when its scope ends, and what comes of it.
struct Requests {
    allocator: *mut cualloc_t,
    code: AtomicI32,
}

unsafe extern "C" fn requests(data: *mut c_void) {
    // SAFETY: it outlives the scope.
    let requests = unsafe { &*data.cast::<Requests>() };
    let mut out = 0;
    // SAFETY: the pointer is to a local, and no work uses the block.
    unsafe {
        let code = cualloc_alloc(requests.allocator, 1 << 20, null_mut(), &mut out);
        requests.code.store(code, Ordering::Relaxed);
        cualloc_free(requests.allocator, out);
    }
}

unsafe extern "C" fn never(_: *mut c_void, _: *mut c_void) -> bool {
    false
}

#[test]
fn requests_continue_while_a_pool_is_released() {
    let _one = world();
    let (allocator, asked) = (allocator(), Asked::default());
    let pool = pool_of(allocator);
    let found = Requests {
        allocator,
        code: AtomicI32::new(-1),
    };
    let mut first = scope(CUALLOC_SCOPE_WHEN, &asked);
    first.when = Some(never);
    first.done = Some(requests);
    first.data = std::ptr::from_ref(&found).cast_mut().cast();
    assert_eq!(enter(pool, &first).0, CUALLOC_OK);
    // The one that ends last.
    let second = enter(pool, &scope(CUALLOC_SCOPE_THREAD, &asked));
    assert_eq!(second.0, CUALLOC_OK);
    assert_eq!(cualloc_pool_release(pool), CUALLOC_OK);
    assert_eq!(found.code.load(Ordering::Relaxed), CUALLOC_OK);
    assert_eq!(cualloc_destroy(allocator), CUALLOC_OK);
}

#[test]
fn a_pool_is_suspended_by_its_handle() {
    let _one = world();
    let (own, other, asked) = (allocator(), allocator(), Asked::default());
    let (pool, theirs) = (pool_of(own), pool_of(other));
    let (code, number) = enter(pool, &scope(CUALLOC_SCOPE_THREAD, &asked));
    assert_eq!(code, CUALLOC_OK);
    let select = CUALLOC_SELECT_POOL;
    let alloc = |bytes| {
        let mut out = 1;
        // SAFETY: the pointer is to a local.
        let code = unsafe { cualloc_alloc(own, bytes, null_mut(), &mut out) };
        (code, out)
    };
    let suspend = |pool: *mut cualloc_pool_t| {
        let mut bytes = 1;
        let how = CUALLOC_CONTENTS_DROP;
        // SAFETY: nothing uses the memory, and the pointer is to a local.
        let code = unsafe { cualloc_suspend(own, select, pool.cast(), how, &mut bytes) };
        (code, bytes)
    };
    let resume = |pool: *mut cualloc_pool_t| {
        let mut bytes = 1;
        // SAFETY: the pointer is to a local.
        let code = unsafe { cualloc_resume(own, select, pool.cast(), &mut bytes) };
        (code, bytes)
    };
    let (code, block) = alloc(5 << 20);
    assert_eq!(code, CUALLOC_OK);
    assert_eq!(resume(pool), (CUALLOC_SUSPENDED, 0));
    let (code, bytes) = suspend(pool);
    assert_eq!(code, CUALLOC_OK);
    assert!(bytes >= 5 << 20, "{bytes}");
    assert_eq!(suspend(pool), (CUALLOC_SUSPENDED, 0));
    assert_eq!(alloc(512), (CUALLOC_SUSPENDED, 0));
    assert_eq!(resume(pool), (CUALLOC_OK, bytes));
    for (wrong, code) in [
        (theirs, CUALLOC_INVALID_ARGUMENT),
        (null_mut(), CUALLOC_INVALID_ARGUMENT),
        (own.cast(), CUALLOC_CLOSED),
    ] {
        assert_eq!((suspend(wrong), resume(wrong)), ((code, 0), (code, 0)));
    }
    // SAFETY: nothing uses it.
    assert_eq!(unsafe { cualloc_free(own, block) }, CUALLOC_OK);
    assert_eq!(cualloc_pool_leave(pool, number), CUALLOC_OK);
    assert_eq!(cualloc_destroy(own), CUALLOC_OK);
    assert_eq!(cualloc_destroy(other), CUALLOC_OK);
}

#[test]
fn a_tag_selects_its_pools() {
    let _one = world();
    let (own, asked) = (allocator(), Asked::default());
    let tagged = |tag: &std::ffi::CStr| {
        let mut made = null_mut();
        // SAFETY: the text ends with a zero, and the pointer is to a local.
        let code = unsafe { cualloc_pool_create_tagged(own, tag.as_ptr(), &mut made) };
        assert_eq!(code, CUALLOC_OK);
        made
    };
    let blocks = [c"some weights", c"a cache", c"a cache"].map(|tag| {
        let pool = tagged(tag);
        let (code, number) = enter(pool, &scope(CUALLOC_SCOPE_THREAD, &asked));
        assert_eq!(code, CUALLOC_OK);
        let mut out = 0;
        // SAFETY: the pointer is to a local.
        let code = unsafe { cualloc_alloc(own, 5 << 20, null_mut(), &mut out) };
        assert_eq!(code, CUALLOC_OK);
        assert_eq!(cualloc_pool_leave(pool, number), CUALLOC_OK);
        out
    });
    let suspend = |tag: *const std::ffi::c_char, how| {
        let (mut bytes, which) = (1, tag.cast_mut().cast());
        // SAFETY: nothing uses the memory, texts end with a zero, and the pointer is to a local.
        let code = unsafe { cualloc_suspend(own, CUALLOC_SELECT_TAG, which, how, &mut bytes) };
        (code, bytes)
    };
    let resume = |tag: *const std::ffi::c_char| {
        let (mut bytes, which) = (1, tag.cast_mut().cast());
        // SAFETY: as above.
        let code = unsafe { cualloc_resume(own, CUALLOC_SELECT_TAG, which, &mut bytes) };
        (code, bytes)
    };
    let (weights, cache) = (c"some weights".as_ptr(), c"a cache".as_ptr());
    let (code, kept) = suspend(weights, CUALLOC_CONTENTS_PINNED);
    assert_eq!(code, CUALLOC_OK);
    // Two pools have the other one.
    assert_eq!(
        suspend(cache, CUALLOC_CONTENTS_DROP),
        (CUALLOC_OK, 2 * kept)
    );
    assert_eq!(
        suspend(cache, CUALLOC_CONTENTS_DROP),
        (CUALLOC_SUSPENDED, 0)
    );
    assert_eq!(resume(weights), (CUALLOC_OK, kept));
    assert_eq!(resume(weights), (CUALLOC_SUSPENDED, 0));
    assert_eq!(resume(cache), (CUALLOC_OK, 2 * kept));
    for wrong in [c"unknown".as_ptr(), c"\xff".as_ptr(), std::ptr::null()] {
        let refused = (CUALLOC_INVALID_ARGUMENT, 0);
        assert_eq!((suspend(wrong, 0), resume(wrong)), (refused, refused));
    }
    let mut made = own.cast();
    // SAFETY: the pointer is to a local.
    let code = unsafe { cualloc_pool_create_tagged(own, std::ptr::null(), &mut made) };
    assert_eq!((code, made), (CUALLOC_INVALID_ARGUMENT, null_mut()));
    for block in blocks {
        // SAFETY: nothing uses it.
        assert_eq!(unsafe { cualloc_free(own, block) }, CUALLOC_OK);
    }
    assert_eq!(cualloc_destroy(own), CUALLOC_OK);
}
