//! Default streams by their special handles: always those of the allocator's context.

use crate::common::*;
use cualloc::Error;
use cualloc::allocator::{Allocator, Config, Request};
use cualloc::driver::{Context, Stream, sys};

/// The special handles.
const HANDLES: [usize; 3] = [0, 1, 2];

fn handle(value: usize) -> sys::CUstream {
    std::ptr::without_provenance_mut(value)
}

/// What a handle stands for in a context.
fn meant(context: &Context, value: usize) -> Stream {
    match value {
        2 => Stream::per_thread(context),
        _ => Stream::legacy(context),
    }
}

/// Runs a test with another context of the same device; not on a GPU, where the table cannot make one.
fn beside_another_context(test: impl Fn(&Rig, &Context)) {
    each_simulated(|rig, sim| {
        let raw = sim.create_context(0).unwrap();
        // SAFETY: it lives as long as the simulator.
        let other = unsafe { Context::from_raw(&rig.driver, raw) }.unwrap();
        test(rig, &other);
    });
}

/// Runs `act` while no context is current.
fn without_context<R>(rig: &Rig, act: impl FnOnce() -> R) -> R {
    let _back = rig.context.enter().unwrap();
    let set = rig.driver.functions().cuCtxSetCurrent.unwrap();
    // SAFETY: null stands for none.
    let code = unsafe { set(std::ptr::null_mut()) };
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
    act()
}

/// D11: the same names whichever context is current, and the same as those of `Stream`s.
#[test]
fn d11_special_handles_name_streams_of_the_allocators_context() {
    beside_another_context(|rig, other| {
        let allocator = rig.checked_with(Config::new().context_checks(false));
        let a = rig.stream();
        for value in HANDLES {
            let expected = Some(meant(&rig.context, value).id().unwrap());
            assert_ne!(expected, Some(meant(other, value).id().unwrap()));
            for bytes in [KIB, MIB, 12 * MIB] {
                let recorded = allocator.allocate(bytes, &a).unwrap();
                let name = || {
                    // SAFETY: special handles are always valid, and nothing uses the memory.
                    unsafe {
                        let ptr = allocator.allocate_raw(bytes, handle(value)).unwrap();
                        let info = allocator.block_of(ptr).unwrap();
                        allocator.free_raw(ptr).unwrap();
                        let aligned = Request::new(bytes).align(4096);
                        let with = allocator.allocate_raw_with(aligned, handle(value)).unwrap();
                        assert_eq!(allocator.block_of(with).unwrap().stream, info.stream);
                        allocator
                            .record_stream_raw(recorded.ptr(), handle(value))
                            .unwrap();
                        allocator.mark_raw(handle(value)).unwrap();
                        allocator.free_raw(with).unwrap();
                        info.stream
                    }
                };
                assert_eq!(name(), expected);
                assert_eq!(without_context(rig, name), expected);
                let current = other.enter().unwrap();
                assert_eq!(name(), expected);
                drop(current);
                // One use of one stream, however often and under whichever context it was recorded.
                let pending = allocator.block_of(recorded.ptr()).unwrap().pending;
                assert_eq!(Vec::from_iter(expected), pending);
            }
        }
    });
}

/// What is done with the stream after the frees.
#[derive(Clone, Copy, Debug)]
enum Then {
    Nothing,
    Mark,
    Retire,
}

/// D11: frees, recorded uses and markers of special handles belong to the allocator's context, too, when
/// another one is current.
#[test]
fn d11_work_of_special_handles_is_waited_for_in_the_allocators_context() {
    beside_another_context(|rig, other| {
        for value in HANDLES {
            for then in [Then::Nothing, Then::Mark, Then::Retire] {
                for (bytes, recorded) in [
                    (12 * MIB, false),
                    (12 * MIB, true),
                    (32 * KIB, false),
                    (32 * KIB, true),
                ] {
                    pass_on(rig, other, value, (bytes, recorded), then);
                }
            }
        }
    });
}

/// Memory that a default stream still uses goes to another stream, at a limit.
fn pass_on(rig: &Rig, other: &Context, value: usize, (bytes, recorded): (usize, bool), then: Then) {
    let limit = if bytes > MIB { bytes } else { 2 * MIB };
    let config = Config::new().context_checks(false);
    let allocator = rig.checked_with(config.limit(Some(limit as u64)));
    let [a, b] = rig.streams();
    let user = meant(&rig.context, value);
    let hold = rig.hold(&user);
    // SAFETY: nothing uses the blocks after their frees, and their first use on the default stream is the
    // only one so far.
    unsafe {
        let current = other.enter().unwrap();
        let owner = if recorded { a.raw() } else { handle(value) };
        let mut taken = Vec::new();
        while let Ok(ptr) = allocator.allocate_raw(bytes, owner) {
            taken.push(ptr);
        }
        assert_eq!(taken.len(), limit / bytes);
        rig.stamp(taken[0], bytes, 1, &user);
        for ptr in taken {
            if recorded {
                allocator.record_use_raw(ptr, handle(value)).unwrap();
            }
            allocator.free_raw(ptr).unwrap();
        }
        match then {
            Then::Nothing => {}
            Then::Mark => allocator.mark_raw(handle(value)).unwrap(),
            Then::Retire => allocator.retire_raw(handle(value)).unwrap(),
        }
        drop(current);
    }
    let taken: Vec<_> = (0..limit / bytes)
        .map(|_| allocator.allocate(bytes, &b).unwrap())
        .collect();
    for block in &taken {
        rig.stamp(block.ptr(), bytes, 2, &b);
    }
    hold.release();
    rig.settle(&b);
    assert_eq!(rig.mismatches(taken[0].ptr(), bytes, 2, &b), 0);
    rig.assert_clean();
}

/// Whether a call was refused because another context is current.
fn is_refused<T: std::fmt::Debug>(
    result: Result<T, Error>,
    value: usize,
    other: &Context,
    ours: &Context,
) {
    match result {
        Err(Error::WrongContext {
            stream,
            current,
            expected,
        }) => {
            assert_eq!(stream, value);
            assert_eq!(current, other.raw() as usize);
            assert_eq!(expected, ours.raw() as usize);
        }
        result => panic!("{result:?}"),
    }
}

/// A marker is recorded with the allocator's context current, whichever was; that one is current again afterwards.
#[test]
fn a_marker_leaves_the_current_context_as_it_was() {
    beside_another_context(|rig, other| {
        let (allocator, [a, b]) = rig.scene();
        drop(allocator.allocate(KIB, &b).unwrap());
        let block = allocator.allocate(12 * MIB, &a).unwrap();
        let _entered = other.enter().unwrap();
        let markers = allocator.stats().markers;
        drop(block);
        assert_eq!(allocator.stats().markers, markers + 1);
        let ask = rig.driver.functions().cuCtxGetCurrent.unwrap();
        let mut current = std::ptr::null_mut();
        // SAFETY: the pointer is to a local handle.
        let code = unsafe { ask(&mut current) };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
        assert_eq!(current, other.raw());
    });
}

/// D11: with the check, which is on in debug builds, another current context is an error that changes
/// nothing. No context, the allocator's own, and handles of other streams are not.
#[test]
fn d11_another_current_context_is_an_error_where_it_is_checked() {
    beside_another_context(|rig, other| {
        let allocator = rig.checked_with(Config::new().context_checks(true));
        let a = rig.stream();
        let foreign = Stream::new(other).unwrap();
        for bytes in [KIB, 12 * MIB] {
            let block = allocator.allocate(bytes, &a).unwrap();
            for value in HANDLES {
                let special = handle(value);
                let picture = |allocator: &Allocator| {
                    (
                        allocator.stats_and_snapshot(),
                        allocator.block_of(block.ptr()),
                    )
                };
                // SAFETY: special handles are always valid, the other streams are alive, and nothing uses
                // the memory.
                unsafe {
                    let ours = rig.context.enter().unwrap();
                    let ptr = allocator.allocate_raw(bytes, special).unwrap();
                    drop(ours);
                    let without = without_context(rig, || allocator.allocate_raw(bytes, special));
                    allocator.free_raw(without.unwrap()).unwrap();
                    let current = other.enter().unwrap();
                    let before = picture(&allocator);
                    let check = |result: Result<(), Error>| {
                        is_refused(result, value, other, &rig.context);
                    };
                    check(allocator.allocate_raw(bytes, special).map(drop));
                    let request = Request::new(bytes);
                    check(allocator.allocate_raw_with(request, special).map(drop));
                    check(allocator.record_stream_raw(block.ptr(), special));
                    check(allocator.record_use_raw(block.ptr(), special));
                    check(allocator.mark_raw(special));
                    check(allocator.retire_raw(special));
                    assert_eq!(picture(&allocator), before);
                    // A stream that is no default one says itself where it belongs.
                    let own = allocator.allocate_raw(bytes, a.raw()).unwrap();
                    allocator.free_raw(own).unwrap();
                    let own = allocator.allocate_raw(bytes, foreign.raw()).unwrap();
                    allocator.free_raw(own).unwrap();
                    // A free names no stream.
                    allocator.free_raw(ptr).unwrap();
                    drop(current);
                }
            }
        }
        // SAFETY: the stream is alive.
        unsafe { allocator.retire_raw(foreign.raw()) }.unwrap();
    });
}

/// D11: what a thread remembers of another context's default stream does not serve the handle, which it has as well.
#[test]
fn d11_a_default_stream_of_another_context_is_not_found_by_the_handle() {
    beside_another_context(|rig, other| {
        let allocator = rig.checked_with(Config::new().context_checks(false));
        let theirs = Stream::legacy(other);
        for bytes in [KIB, MIB] {
            for value in [0, 1] {
                let block = allocator.allocate(bytes, &theirs).unwrap();
                assert_eq!(
                    allocator.block_of(block.ptr()).unwrap().stream,
                    Some(theirs.id().unwrap())
                );
                drop(block);
                let own = Some(meant(&rig.context, value).id().unwrap());
                for _ in 0..2 {
                    // SAFETY: special handles are always valid, and nothing uses the memory.
                    unsafe {
                        let ptr = allocator.allocate_raw(bytes, handle(value)).unwrap();
                        assert_eq!(allocator.block_of(ptr).unwrap().stream, own);
                        allocator.free_raw(ptr).unwrap();
                    }
                }
            }
        }
    });
}

/// D11: the default streams of another context are named by a `Stream` with that context.
#[test]
fn d11_default_streams_of_another_context_are_others() {
    beside_another_context(|rig, other| {
        let allocator = rig.checked();
        for value in HANDLES {
            let theirs = meant(other, value);
            let block = allocator.allocate(12 * MIB, &theirs).unwrap();
            let info = allocator.block_of(block.ptr()).unwrap();
            assert_eq!(info.stream, Some(theirs.id().unwrap()));
            drop(block);
        }
        allocator.synchronize().unwrap();
    });
}
