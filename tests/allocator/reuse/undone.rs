//! Steps that fail after they began: memory is available to the same streams as before.

use std::cell::Cell;

use crate::common::prelude::*;

/// Where the block of the test lies before an aligned one.
const HEAD: usize = 100 * KIB;
/// Memory that a stream uses, from [`HEAD`] on.
const USED: usize = 16 * MIB - HEAD;
const ALIGNED: usize = 24 * MIB;

/// An allocator in which [`USED`] bytes are free that `a` uses without end, the address of these, and the
/// live block before them. The second stream is known.
fn beside_pending<'a>(rig: &'a Rig, [a, b]: [&Stream; 2]) -> (Allocator, u64, Block, Hold<'a>) {
    let config = Config::new().limit(Some(32 << 20)).views(false);
    let allocator = rig.allocator_with(config.policy(Policy::Packed));
    let wall = allocator.allocate(HEAD, a).unwrap();
    let used = allocator.allocate(USED, a).unwrap();
    drop(allocator.allocate(66 * KIB, b).unwrap());
    let hold = rig.hold(a);
    rig.stamp(used.ptr(), USED, 1, a);
    let at = used.ptr();
    drop(used);
    (allocator, at, wall, hold)
}

/// Whether memory that a stream may use without a wait lies within the memory in use.
fn hands_out(allocator: &Allocator, stream: &Stream, at: u64) -> bool {
    let got = allocator.allocate_with(Request::new(MIB).cached_only(), stream);
    assert_matches!(got, Ok(_) | Err(Error::NotCached));
    got.is_ok_and(|block| (at..at + USED as u64).contains(&block.ptr()))
}

/// D1: an aligned growth beside memory that another stream uses, of which any call fails. The gap before the block was
/// treated as the requesting stream's own.
#[test]
fn d1_a_failed_growth_keeps_the_uses_of_adjacent_memory() {
    let code = sys::CUresult::CUDA_ERROR_NOT_PERMITTED;
    for name in ["cuStreamWaitEvent", "cuCtxGetCurrent", "cuCtxSetCurrent"] {
        let (over, failed) = (Cell::new(false), Cell::new(0));
        for nth in 1.. {
            only(Policy::Packed, |rig| {
                let Some(sim) = rig.sim() else {
                    return over.set(true);
                };
                let [a, b, c] = rig.streams();
                let (allocator, at, wall, hold) = beside_pending(rig, [&a, &b]);
                sim.fail(FailPlan::call(name, code).unwrap().nth(nth));
                let result = allocator.allocate_with(Request::new(ALIGNED).align(2 * MIB), &b);
                over.set(sim.clear_failures() > 0);
                if let Err(error) = &result {
                    assert_matches!(error, Error::Driver(_));
                    failed.set(failed.get() + 1);
                    allocator.check().unwrap();
                    for stream in [&b, &c] {
                        assert!(!hands_out(&allocator, stream, at), "{name} {nth}");
                    }
                }
                drop((result, hold, wall));
                rig.close(&allocator);
            });
            if over.get() {
                break;
            }
        }
        assert!(on_cuda() || failed.get() > 0, "{name} is not called");
    }
}

/// D1: the gap before the aligned block of a growth belongs to the requesting stream, behind its wait: no third stream
/// gets it without a wait.
#[test]
fn d1_the_gap_before_a_grown_block_follows_its_stream() {
    only(Policy::Packed, |rig| {
        let [a, b, c] = rig.streams();
        let (allocator, at, wall, hold) = beside_pending(rig, [&a, &b]);
        let waits = rig.calls("cuStreamWaitEvent");
        let request = Request::new(ALIGNED).align(2 * MIB);
        let block = allocator.allocate_with(request, &b).unwrap();
        assert_eq!(rig.calls("cuStreamWaitEvent"), waits + 1);
        assert!(block.ptr() > at && block.ptr() < at + USED as u64);
        assert!(!hands_out(&allocator, &c, at), "two streams use it");
        assert!(hands_out(&allocator, &b, at), "behind its own wait");
        rig.stamp(block.ptr(), ALIGNED, 2, &b);
        drop(hold);
        drop((block, wall));
        rig.close(&allocator);
    });
}

/// D7: a use whose recording failed does not count: the caller never marks its stream.
#[test]
fn d7_a_use_that_cannot_be_marked_is_not_recorded() {
    let code = sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY;
    for bytes in [KIB, 3 * MIB] {
        for call in ["cuEventCreate", "cuEventRecord"] {
            each_simulated(|rig, sim| {
                let (allocator, [home]) = rig.scene();
                let other = RawStream::new(rig);
                let block = allocator.allocate(bytes, &home).unwrap();
                sim.fail(FailPlan::call(call, code).unwrap());
                assert!(block.record_use(&other.borrowed()).is_err());
                assert_eq!(sim.clear_failures(), 0);
                drop(block);
                assert_eq!(allocator.trim(0).unwrap().pending, 0, "{call}, {bytes}");
                other.destroy();
            });
        }
    }
}

/// D8: objects that a drop could not destroy because it could not call the driver are destroyed by a later call in the
/// same context.
#[test]
fn d8_memory_that_a_drop_could_not_free_is_freed_later() {
    let code = sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY;
    for name in [
        "cuThreadExchangeStreamCaptureMode",
        "cuCtxGetCurrent",
        "cuCtxSetCurrent",
    ] {
        only_simulated(Policy::Packed, |rig, sim| {
            let before = (sim.leaks().streams, sim.leaks().events);
            let stream = rig.stream();
            let event = rig.context.enter().unwrap().create_event().unwrap();
            sim.fail(FailPlan::call(name, code).unwrap().times(1000));
            drop((stream, event));
            assert!(sim.clear_failures() > 0);
            assert!(sim.leaks().streams > before.0 && sim.leaks().events > before.1);
            let another = rig.stream();
            assert_eq!(sim.leaks().events, before.1, "{name}");
            assert_eq!(sim.leaks().streams, before.0 + 1, "{name}");
            drop(another);
            assert_eq!(sim.leaks().streams, before.0, "{name}");
        });
    }
}

/// D8: the memory of a test of views that could not be waited for is released when its work is complete.
#[test]
fn d8_a_test_of_views_that_cannot_be_waited_for_is_finished_later() {
    let code = sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY;
    for trims in [true, false] {
        only_simulated(Policy::Packed, |rig, sim| {
            let before = sim.leaks();
            let allocator = rig.allocator();
            sim.fail(
                FailPlan::call("cuStreamSynchronize", code)
                    .unwrap()
                    .times(1000),
            );
            assert!(allocator.test_views().is_err());
            sim.clear_failures();
            assert!(allocator.stats().all.reserved.current > 0);
            if trims {
                assert!(allocator.trim(0).unwrap().released > 0);
                assert_eq!(allocator.stats().all.reserved.current, 0);
            }
            rig.close(&allocator);
            assert_eq!(sim.leaks().streams, before.streams);
        });
    }
}
