//! Graph pools by their handles, over the simulator; programs in C do the same with captures.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::channel;
use std::thread;

use super::*;
use crate::tests::world;

fn allocator() -> *mut cualloc_t {
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

fn pool_of(allocator: *mut cualloc_t) -> *mut cualloc_pool_t {
    let mut made = null_mut();
    // SAFETY: the pointer is to a local.
    let code = unsafe { cualloc_pool_create(allocator, &mut made) };
    assert_eq!(code, CUALLOC_OK);
    made
}

/// What a predicate of the tests looks at.
#[derive(Default)]
struct Asked {
    times: AtomicU32,
    answer: AtomicBool,
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

fn scope(kind: i32, asked: &Asked) -> cualloc_scope_t {
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

fn enter(pool: *mut cualloc_pool_t, which: &cualloc_scope_t) -> (i32, u64) {
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
    // SAFETY: nobody uses it.
    assert_eq!(unsafe { cualloc_free(allocator, out) }, CUALLOC_OK);
    out
}

#[test]
fn numbers_of_scopes_are_never_used_again_and_are_of_one_pool() {
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
    // Where it is not entered nobody is told of an end.
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

#[test]
fn leaving_a_scope_waits_for_who_is_in_its_predicate() {
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
        let over = &looked_at.over;
        threads.spawn(move || {
            let code = cualloc_pool_leave(pool_too as *mut cualloc_pool_t, number);
            left.send((code, over.load(Ordering::Relaxed))).unwrap();
        });
        let early = (0..10_000).find_map(|_| {
            thread::yield_now();
            has_left.try_recv().ok()
        });
        go_on.send(()).unwrap();
        assert_eq!(early, None, "a thread is in the predicate");
        assert_eq!(has_left.recv().unwrap(), (CUALLOC_OK, true));
    });
    looked_at.asked.store(false, Ordering::Relaxed);
    request(allocator);
    assert!(
        !looked_at.asked.load(Ordering::Relaxed),
        "nobody asks it any more"
    );
    assert_eq!(cualloc_destroy(allocator), CUALLOC_OK);
}

fn torch_footprint(id: cualloc_torch_pool_id_t) -> Option<cualloc_footprint_t> {
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
fn pools_of_pytorch_go_with_their_last_release_and_failed_captures_with_their_abandonment() {
    let _one = world();
    let options = cualloc_options_new();
    // SAFETY: texts end with a zero.
    let set = unsafe { cualloc_options_set(options, c"device".as_ptr(), c"sim".as_ptr()) };
    assert_eq!(
        (set, cualloc_shared_options(options)),
        (CUALLOC_OK, CUALLOC_OK)
    );
    cualloc_options_free(options);
    let asked = Asked::default();
    let data = std::ptr::from_ref(&asked).cast_mut().cast();
    let begin = |id| {
        // SAFETY: what the predicate looks at outlives the scopes.
        let code = unsafe { cualloc_torch_pool_begin(0, id, Some(asks), Some(ends), data) };
        assert_eq!(code, CUALLOC_OK);
    };
    let open = || cualloc_torch_pool_abandon(u64::MAX);
    let id = |second| cualloc_torch_pool_id_t { first: 0, second };
    let (shared, own) = (id(1), id(2));
    asked.answer.store(true, Ordering::Relaxed);
    for _ in 0..2 {
        begin(shared);
        assert_eq!(open(), 1);
        assert_eq!(torch_block(), CUALLOC_OK, "the shared allocator lives");
        assert_eq!(torch_footprint(shared).map(|now| now.peak), Some(1 << 20));
        assert_eq!(cualloc_torch_pool_end(0, shared), CUALLOC_OK);
        assert_eq!(open(), 0);
    }
    assert_eq!(asked.ended.load(Ordering::Relaxed), 2);
    assert_eq!(cualloc_torch_pool_release(0, shared), CUALLOC_OK);
    assert!(torch_footprint(shared).is_some(), "a second graph has it");
    // One inside another; both fail, the inner one first.
    begin(shared);
    begin(own);
    // Another thread has begun nothing.
    let theirs = thread::spawn(|| cualloc_torch_pool_abandon(0))
        .join()
        .unwrap();
    assert_eq!((theirs, open()), (0, 2));
    assert_eq!(cualloc_torch_pool_abandon(1), 1);
    assert!(torch_footprint(own).is_none() && torch_footprint(shared).is_some());
    assert_eq!(asked.ended.load(Ordering::Relaxed), 3);
    assert_eq!(cualloc_torch_pool_abandon(0), 0);
    assert!(torch_footprint(shared).is_some(), "as before they began");
    assert_eq!(cualloc_torch_pool_release(0, shared), CUALLOC_OK);
    assert!(torch_footprint(shared).is_none());
    assert_eq!(cualloc_torch_pool_end(0, shared), CUALLOC_OK);
    assert_eq!(cualloc_torch_pool_release(0, shared), CUALLOC_OK);
    assert_eq!(asked.ended.load(Ordering::Relaxed), 4);
}

/// A block of PyTorch's that comes and goes; the code of a failure.
fn torch_block() -> i32 {
    // SAFETY: nobody uses it.
    unsafe {
        let made = cualloc_torch_alloc(1 << 20, 0, null_mut());
        if made.is_null() {
            return cualloc_last_code();
        }
        cualloc_torch_free(made, 1 << 20, 0, null_mut());
    }
    CUALLOC_OK
}
