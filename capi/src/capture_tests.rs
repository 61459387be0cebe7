//! Blocks from outside of a graph pool that a capture uses which the pool serves.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::Ordering;

use cualloc::driver::sys::CUstreamCaptureMode;
use cualloc::driver::{Context, Stream};

use super::*;
use crate::pool_tests::{
    Asked, allocator, enter, pool_of, scope, shared_is_simulated, torch_begin, torch_id,
};
use crate::tests::world;

const BYTES: usize = 3 << 20;
const MODE: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;

fn streams(driver: &cualloc::driver::Driver) -> [Stream; 2] {
    let context = Context::primary(&driver.device(0).unwrap()).unwrap();
    [(); 2].map(|()| Stream::new(&context).unwrap())
}

fn raw(stream: &Stream) -> *mut c_void {
    stream.raw().cast()
}

#[test]
fn a_use_in_a_capture_that_a_pool_serves_counts_from_its_end() {
    let (_one, simulator, driver) = world();
    let [owner, capturing] = streams(&driver);
    let (allocator, asked) = (allocator(), Asked::default());
    let pool = pool_of(allocator);
    let get = || {
        let mut out = 0;
        // SAFETY: the pointer is to a local, and the stream lives.
        let code = unsafe { cualloc_alloc(allocator, BYTES, raw(&owner), &mut out) };
        assert_eq!(code, CUALLOC_OK);
        out
    };
    // SAFETY: nothing uses the blocks that are freed, and the streams live.
    unsafe {
        let (recorded, freed_on) = (get(), get());
        let (code, number) = enter(pool, &scope(CUALLOC_SCOPE_NEXT_CAPTURE, &asked));
        assert_eq!(code, CUALLOC_OK);
        capturing.begin_capture(MODE).unwrap();
        let code = cualloc_record_stream(allocator, recorded + 512, raw(&capturing));
        assert_eq!(code, CUALLOC_OK);
        assert_eq!(cualloc_free(allocator, recorded), CUALLOC_OK);
        let code = cualloc_free_on(allocator, freed_on, raw(&capturing));
        assert_eq!(code, CUALLOC_OK);
        let between = get();
        assert!(between != recorded && between != freed_on);
        assert_eq!(cualloc_free(allocator, between), CUALLOC_OK);
        drop(capturing.end_capture().unwrap());
        assert_eq!(cualloc_pool_leave(pool, number), CUALLOC_OK);
        // Outside of the scope a capture is refused as ever.
        let block = get();
        capturing.begin_capture(MODE).unwrap();
        let code = cualloc_record_stream(allocator, block, raw(&capturing));
        assert_eq!(code, CUALLOC_CAPTURING);
        // A wait neither joins the capture nor leaves it.
        for [stream, other] in [[&owner, &capturing], [&capturing, &owner]] {
            let code = cualloc_stream_wait(allocator, raw(stream), raw(other));
            assert_eq!(code, CUALLOC_CAPTURING);
        }
        // Within a capture it is a dependency.
        owner.wait_for(&capturing).unwrap();
        for [stream, other] in [[&owner, &owner], [&owner, &capturing], [&capturing, &owner]] {
            let code = cualloc_stream_wait(allocator, raw(stream), raw(other));
            assert_eq!(code, CUALLOC_OK);
        }
        drop(capturing.end_capture().unwrap());
        assert_eq!(cualloc_free(allocator, block), CUALLOC_OK);
        for stream in [&owner, &capturing] {
            let code = cualloc_retire_stream(allocator, raw(stream));
            assert_eq!(code, CUALLOC_OK);
        }
        assert_eq!(cualloc_check(allocator), CUALLOC_OK);
    }
    assert_eq!(cualloc_destroy(allocator), CUALLOC_OK);
    assert_eq!(simulator.take_reports(), []);
}

#[test]
fn tensors_from_before_a_capture_of_pytorch_are_recorded_inside() {
    let (_one, simulator, driver) = world();
    shared_is_simulated();
    let [owner, capturing] = streams(&driver);
    let (asked, id) = (Asked::default(), torch_id(40));
    asked.answer.store(true, Ordering::Relaxed);
    // SAFETY: nothing uses the blocks that are freed, and the streams live.
    unsafe {
        let get = || cualloc_torch_alloc(BYTES, 0, raw(&owner));
        let [tensor, kept] = [get(), get()];
        torch_begin(id, &asked);
        capturing.begin_capture(MODE).unwrap();
        for block in [tensor, kept] {
            let code = cualloc_torch_record_stream(block, raw(&capturing));
            assert_eq!(code, CUALLOC_OK);
        }
        cualloc_torch_free(tensor, BYTES, 0, raw(&owner));
        drop(capturing.end_capture().unwrap());
        assert_eq!(cualloc_torch_pool_end(0, id), CUALLOC_OK);
        cualloc_torch_free(kept, BYTES, 0, raw(&owner));
        let used = [get(), get()];
        assert!(!used.contains(&null_mut()));
        for block in used {
            cualloc_torch_free(block, BYTES, 0, raw(&owner));
        }
        assert_eq!(cualloc_torch_pool_release(0, id), CUALLOC_OK);
        cualloc_torch_reset();
    }
    assert_eq!(simulator.take_reports(), []);
}

/// PyTorch ends a pool by its id: each thread ends what it began itself, if anything.
#[test]
fn a_thread_ends_what_it_began_in_a_pool_of_several() {
    let _one = world();
    shared_is_simulated();
    let (asked, id) = (Asked::default(), torch_id(41));
    let own = torch_begin(id, &asked);
    let other = std::thread::scope(|threads| {
        let begin = || torch_begin(id, &asked);
        threads.spawn(begin).join().unwrap()
    });
    // SAFETY: the stream is null.
    let state = |number| unsafe { cualloc_torch_pool_state(number, null_mut()) };
    assert_eq!([own, other].map(state), [CUALLOC_TORCH_POOL_OPEN; 2]);
    assert_eq!(cualloc_torch_pool_end(0, id), CUALLOC_OK);
    assert_eq!(state(own), CUALLOC_TORCH_POOL_ENDED);
    assert_eq!(state(other), CUALLOC_TORCH_POOL_OPEN);
    assert_eq!(cualloc_torch_pool_end(0, id), CUALLOC_OK);
    assert_eq!(state(other), CUALLOC_TORCH_POOL_ENDED);
    assert_eq!(cualloc_torch_pool_release(0, id), CUALLOC_OK);
}
