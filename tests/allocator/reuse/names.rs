//! Default streams by their special handles: always those of the allocator's context.

use crate::common::prelude::*;

/// The special handles.
const HANDLES: [usize; 3] = [0, 1, 2];

fn handle(value: usize) -> sys::CUstream {
    std::ptr::without_provenance_mut(value)
}

/// The stream that a handle means in a context.
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
        let (allocator, [a]) = rig.scene_with(Config::new().context_checks(false));
        for value in HANDLES {
            let expected = Some(meant(&rig.context, value).id().unwrap());
            assert_ne!(expected, Some(meant(other, value).id().unwrap()));
            for bytes in [KIB, MIB, 12 * MIB] {
                let recorded = allocator.allocate(bytes, &a).unwrap();
                let name = || {
                    let ptr = allocator.raw_allocate(bytes, handle(value)).unwrap();
                    let info = allocator.block_of(ptr).unwrap();
                    allocator.raw_free(ptr).unwrap();
                    let aligned = Request::new(bytes).align(4096);
                    let with = allocator.raw_allocate_with(aligned, handle(value)).unwrap();
                    assert_eq!(allocator.block_of(with).unwrap().stream, info.stream);
                    allocator
                        .raw_record_stream(recorded.ptr(), handle(value))
                        .unwrap();
                    allocator.raw_mark(handle(value)).unwrap();
                    allocator.raw_free(with).unwrap();
                    info.stream
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

/// The action on the stream after the frees.
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
                for bytes in [12 * MIB, 32 * KIB] {
                    pass_on(rig, other, value, (bytes, false), then);
                    pass_on(rig, other, value, (bytes, true), then);
                }
            }
        }
    });
}

/// Memory that a default stream still uses goes to another stream, at a limit.
fn pass_on(rig: &Rig, other: &Context, value: usize, (bytes, recorded): (usize, bool), then: Then) {
    let limit = if bytes > MIB { bytes } else { 2 * MIB };
    let config = Config::new().context_checks(false);
    let (allocator, [a, b]) = rig.scene_with(config.limit(Some(limit as u64)));
    let user = meant(&rig.context, value);
    let hold = rig.hold(&user);
    {
        let current = other.enter().unwrap();
        let owner = if recorded { a.raw() } else { handle(value) };
        let mut taken = Vec::new();
        while let Ok(ptr) = allocator.raw_allocate(bytes, owner) {
            taken.push(ptr);
        }
        assert_eq!(taken.len(), limit / bytes);
        rig.stamp(taken[0], bytes, 1, &user);
        for ptr in taken {
            if recorded {
                allocator.raw_record_use(ptr, handle(value)).unwrap();
            }
            allocator.raw_free(ptr).unwrap();
        }
        match then {
            Then::Nothing => {}
            Then::Mark => allocator.raw_mark(handle(value)).unwrap(),
            Then::Retire => allocator.raw_retire(handle(value)).unwrap(),
        }
        drop(current);
    }
    let taken = allocator.allocate_blocks(limit / bytes, bytes, &b);
    for block in &taken {
        rig.stamp(block.ptr(), bytes, 2, &b);
    }
    hold.release();
    rig.settle(&b);
    assert_eq!(rig.mismatches(taken[0].ptr(), bytes, 2, &b), 0);
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
        let (allocator, [a]) = rig.scene_with(Config::new().context_checks(true));
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
                {
                    let ours = rig.context.enter().unwrap();
                    let ptr = allocator.raw_allocate(bytes, special).unwrap();
                    drop(ours);
                    let without = without_context(rig, || allocator.raw_allocate(bytes, special));
                    allocator.raw_free(without.unwrap()).unwrap();
                    let current = other.enter().unwrap();
                    let before = picture(&allocator);
                    let expected = rig.context.raw() as usize;
                    let check = |result: Result<(), Error>| {
                        let named = (value, other.raw() as usize, expected);
                        assert_matches!(result, Err(Error::WrongContext { stream, current, expected })
                            if (stream, current, expected) == named);
                    };
                    check(allocator.raw_allocate(bytes, special).map(drop));
                    let request = Request::new(bytes);
                    check(allocator.raw_allocate_with(request, special).map(drop));
                    check(allocator.raw_record_stream(block.ptr(), special));
                    check(allocator.raw_record_use(block.ptr(), special));
                    check(allocator.raw_mark(special));
                    check(allocator.raw_retire(special));
                    assert_eq!(picture(&allocator), before);
                    // A stream that is no default one says itself where it belongs.
                    let own = allocator.raw_allocate(bytes, a.raw()).unwrap();
                    allocator.raw_free(own).unwrap();
                    let own = allocator.raw_allocate(bytes, foreign.raw()).unwrap();
                    allocator.raw_free(own).unwrap();
                    // A free names no stream.
                    allocator.raw_free(ptr).unwrap();
                    drop(current);
                }
            }
        }
        allocator.raw_retire(foreign.raw()).unwrap();
    });
}

/// D11: a thread's cached entry for another context's default stream does not serve the special handle, although both
/// have the same value.
#[test]
fn d11_a_default_stream_of_another_context_is_not_found_by_the_handle() {
    beside_another_context(|rig, other| {
        let allocator = rig.checked_with(Config::new().context_checks(false));
        for bytes in [KIB, MIB] {
            for value in HANDLES {
                let theirs = meant(other, value);
                let block = allocator.allocate(bytes, &theirs).unwrap();
                assert_eq!(
                    allocator.block_of(block.ptr()).unwrap().stream,
                    Some(theirs.id().unwrap())
                );
                drop(block);
                let own = Some(meant(&rig.context, value).id().unwrap());
                for _ in 0..2 {
                    let ptr = allocator.raw_allocate(bytes, handle(value)).unwrap();
                    assert_eq!(allocator.block_of(ptr).unwrap().stream, own);
                    allocator.raw_free(ptr).unwrap();
                }
            }
        }
    });
}
