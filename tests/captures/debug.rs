//! Debug modes during captures: no capture is invalidated, and no false finding is reported.

use super::*;
use cualloc::allocator::Scope;
use cualloc::error::{Finding, Misuse};

const ALL: &str = "debug=guard+quarantine:1M+poison+leaks";

fn debugging(rig: &Rig) -> Allocator {
    rig.allocator_with(ALL.parse::<Config>().unwrap())
}

fn write(at: u64, bytes: usize, stream: &Stream) {
    // SAFETY: the allocator holds the memory, and errors are what the tests plant.
    unsafe { stream.memset(at, 7, bytes) }.unwrap();
    stream.synchronize().unwrap();
}

fn only_finding(allocator: &Allocator) -> Finding {
    let mut found = allocator.findings();
    assert_eq!(found.len(), 1, "{found:?}");
    found.remove(0)
}

#[test]
fn debug_modes_pause_during_a_capture() {
    alone(|| {
        each(|rig| {
            let allocator = debugging(rig);
            let (stream, capturing) = (rig.stream(), rig.stream());
            let overrun = allocator.allocate(63, &stream).unwrap();
            write(overrun.ptr(), 64, &stream);
            let held_back = allocator.allocate(5000, &stream).unwrap();
            let freed_at = held_back.ptr();
            drop(held_back);
            let under_way = Capturing::begin(&capturing, MODE);
            let refused = allocator.allocate(512, &capturing);
            assert_matches!(refused, Err(Error::Capturing { .. }));
            // A block that is allocated now has no guard, since nothing is filled: it cannot be checked later either.
            let born = allocator.allocate(1000, &stream).unwrap();
            write(born.ptr(), 1001, &stream);
            write(freed_at, 1, &stream);
            allocator.check().unwrap();
            drop(overrun);
            drop(allocator.allocate(2 * MIB, &stream).unwrap());
            assert_eq!(allocator.unchecked_frees(), 2);
            allocator.check().unwrap();
            assert_eq!(
                allocator.findings(),
                [],
                "nothing is read while one captures"
            );
            drop(under_way.end().unwrap());
            allocator.check().unwrap();
            drop(born);
            assert_eq!(allocator.findings(), []);
            // The quarantine continues as before.
            drop(allocator.allocate(2 * MIB, &stream).unwrap());
            let found = only_finding(&allocator);
            assert_eq!(
                (found.misuse, found.address),
                (Misuse::UseAfterFree, freed_at)
            );
            // Guards are read again.
            let next = allocator.allocate(63, &stream).unwrap();
            write(next.ptr(), 64, &stream);
            drop(next);
            assert_eq!(allocator.findings().len(), 2);
            assert_eq!(allocator.unchecked_frees(), 2);
            rig.close(&allocator);
        });
    });
}

/// A capture begins when a free has filled its block, just before another block would be read and leave the
/// quarantine: that one stays, and what was written into it is found later.
#[test]
fn a_block_that_cannot_be_read_stays_in_quarantine() {
    alone(|| {
        each_with_interludes(|rig, _| {
            let (allocator, [stream, capturing]) =
                rig.scene_with("debug=quarantine:1M".parse().unwrap());
            let [first, second] =
                [5000, 2 * MIB].map(|size| allocator.allocate(size, &stream).unwrap());
            let freed_at = first.ptr();
            drop(first);
            write(freed_at, 1, &stream);
            let begun = std::rc::Rc::new(std::cell::Cell::new(None));
            let begins = std::rc::Rc::clone(&begun);
            // The first is the wait for the block's stream, the second that for its fill.
            interlude::after("cuStreamSynchronize", move || {
                interlude::after("cuStreamSynchronize", move || {
                    begins.set(Some(Capturing::begin(&capturing, MODE)));
                });
            });
            drop(second);
            let under_way = begun.take().expect("a capture");
            assert!(allocator.owns(freed_at), "it is held back");
            assert_eq!(allocator.findings(), []);
            drop(under_way.end().unwrap());
            drop(allocator.allocate(2 * MIB, &stream).unwrap());
            let found = only_finding(&allocator);
            assert_eq!(
                (found.misuse, found.address),
                (Misuse::UseAfterFree, freed_at)
            );
            assert_eq!(allocator.unchecked_frees(), 0);
        });
    });
}

/// Blocks that must leave the quarantine while nothing may be read are counted as unchecked.
#[test]
fn a_block_that_leaves_the_quarantine_unread_is_counted() {
    alone(|| {
        each(|rig| {
            let config: Config = "debug=quarantine:1G".parse().unwrap();
            let (allocator, [stream, capturing]) =
                rig.scene_with(config.limit(Some(24 * MIB as u64)));
            drop(allocator.allocate(20 * MIB, &stream).unwrap());
            let under_way = Capturing::begin(&capturing, MODE);
            let next = allocator.allocate(20 * MIB, &stream).unwrap();
            assert_eq!(allocator.unchecked_frees(), 1);
            drop(next);
            assert_eq!(
                allocator.unchecked_frees(),
                2,
                "and so is a free in a capture"
            );
            drop(under_way.end().unwrap());
            assert_eq!(allocator.findings(), []);
        });
    });
}

#[test]
fn memory_of_a_graph_is_neither_filled_nor_called_a_leak() {
    only(Policy::Packed, |rig| {
        let allocator = debugging(rig);
        let stream = rig.stream();
        let pool = allocator.graph_pool().unwrap();
        let scope = pool.enter(Scope::NextCapture).unwrap();
        let under_way = Capturing::begin(&stream, MODE);
        let kept = allocator.allocate(1000, &stream).unwrap();
        let freed = allocator.allocate(2 * MIB, &stream).unwrap();
        for (block, bytes) in [(&kept, 1000), (&freed, 2 * MIB)] {
            // SAFETY: the block has this many bytes, and only the graph uses them.
            unsafe { stream.memset(block.ptr(), 7, bytes) }.unwrap();
        }
        drop(freed);
        let graph = under_way.end().unwrap();
        scope.leave().unwrap();
        let mut exec = graph.instantiate().unwrap();
        for _ in 0..2 {
            // SAFETY: the pool keeps what the graph uses.
            unsafe { exec.launch(&stream) }.unwrap();
            drop(allocator.allocate(3 * MIB, &stream).unwrap());
        }
        stream.synchronize().unwrap();
        let wrong = rig.mismatches(kept.ptr(), 1000, 0x0707_0707, &stream);
        assert_eq!(wrong, 0, "a graph's bytes are its own");
        allocator.check().unwrap();
        drop((kept, exec, graph));
        pool.release().unwrap();
        assert_eq!(allocator.findings(), []);
        rig.close(&allocator);
        assert_eq!(allocator.findings(), []);
    });
}

/// Captures by other code, which are not announced.
#[test]
fn debug_modes_invalidate_no_unknown_capture() {
    each_simulated(|rig, _| {
        let modes = [
            sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL,
            sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
            sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED,
        ];
        for mode in modes {
            let allocator = debugging(rig);
            let (stream, foreign) = (rig.stream(), RawStream::new(rig));
            let before = allocator.allocate(100, &stream).unwrap();
            capturing::begin_in(rig, foreign.raw(), mode)();
            let born = allocator.allocate(2 * MIB, &stream).unwrap();
            drop(before);
            drop(born);
            allocator.check().unwrap();
            let ended = capturing::end(rig, foreign.raw())();
            assert_eq!(ended, sys::CUresult::CUDA_SUCCESS, "{mode:?}");
            assert_eq!(allocator.findings(), []);
            rig.close(&allocator);
        }
    });
}
