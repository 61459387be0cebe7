//! The first capture of a process: until then captures are not watched. So this test is alone in its program, and the
//! other test runs it in a new process.

use std::cell::Cell;

use crate::common::capturing::{MODE, begin, end};
use crate::common::prelude::*;
use cualloc::allocator::SelfTest;

const BLOCK: usize = 12 * MIB;

/// Where a block of `BLOCK` bytes was that one of two known streams has freed, and no marker covers.
fn left_unmarked(allocator: &Allocator, stream: &Stream, other: &Stream) -> u64 {
    drop(allocator.allocate(512, other).unwrap());
    let block = allocator.allocate(BLOCK, stream).unwrap();
    // From here on full batches wait until another request needs the memory.
    for at in 0..600 {
        drop(allocator.allocate((1 + at % 3) * MIB, stream).unwrap());
    }
    block.ptr()
}

/// R38: a capturing stream is neither asked nor marked when another one wants what was freed on it, and
/// what was freed on it is not forgotten.
#[test]
fn r38_a_capturing_stream_is_not_queried_for_its_memory() {
    only(Policy::Packed, |rig| {
        let (allocator, [a, b]) = rig.scene();
        let ptr = left_unmarked(&allocator, &a, &b);
        let calls = || rig.calls("cuEventRecord") + rig.calls("cuStreamQuery");
        let before = calls();
        a.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED)
            .unwrap();
        let elsewhere = allocator.allocate(BLOCK, &b).unwrap();
        assert_eq!(calls(), before);
        assert_ne!(elsewhere.ptr(), ptr);
        // A capture that was spoilt ends with an error.
        drop(a.end_capture().unwrap());
        // Once the capture is over it is there, without a wait for the context.
        let mut taken = allocator.allocate(BLOCK, &b).unwrap();
        if taken.ptr() != ptr {
            // On a GPU a marker takes its time.
            a.synchronize().unwrap();
            drop(taken);
            taken = allocator.allocate(BLOCK, &b).unwrap();
        }
        assert_eq!(taken.ptr(), ptr);
        assert_eq!(allocator.stats().reclaim.synchronised, 0);
    });
}

/// The watch for captures ends with them: from then on pairs make no query. Beside one each call
/// asks its own stream and nothing else, and the capture does not notice. In a process of its own.
#[test]
fn the_watch_for_captures_ends_with_them() {
    alone(|| {
        only(Policy::Packed, |rig| {
            let Some(sim) = rig.sim() else { return };
            let allocator = rig.allocator();
            let [a, b] = rig.streams();
            let foreign = RawStream::new(rig);
            let pairs = |count: usize| {
                calls_of(sim, || {
                    (0..count).for_each(|_| drop(allocator.allocate(4096, &a).unwrap()));
                })
            };
            drop(allocator.allocate(4096, &b).unwrap());
            pairs(2);
            assert_eq!(pairs(100), 0);
            let held = allocator.allocate(4096, &b).unwrap();
            let ptr = held.ptr();
            // Through the crate.
            b.begin_capture(MODE).unwrap();
            let beside = pairs(100);
            assert!((200..=210).contains(&beside), "{beside} calls");
            let refused = allocator.allocate(4096, &b);
            assert_matches!(refused, Err(Error::Capturing { .. }));
            drop(held);
            assert!(allocator.owns(ptr));
            // A capture that was spoilt ends with an error.
            drop(b.end_capture().unwrap());
            allocator.trim(u64::MAX).unwrap();
            assert!(!allocator.owns(ptr));
            // A trim takes the free pages out of the stream caches, and a stream that finds none in its cache is asked.
            assert_eq!(pairs(1), 1);
            assert_eq!(pairs(100), 0);
            // One that was refused.
            let code = sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY;
            sim.fail(FailPlan::call("cuStreamBeginCapture_v2", code).unwrap());
            b.begin_capture(MODE).unwrap_err();
            assert_eq!(pairs(100), 0);
            // Behind its back: of a stream that the crate may ask, and of one that it may not.
            for (stream, most) in [(b.raw(), 64), (foreign.raw(), 64 * 64)] {
                begin(rig, stream)();
                let refused = allocator.raw_allocate(MIB, stream);
                assert_matches!(refused, Err(Error::Capturing { .. }));
                assert!(pairs(8) >= 16);
                assert_eq!(end(rig, stream)(), sys::CUresult::CUDA_SUCCESS);
                pairs(most);
                assert_eq!(pairs(100), 0);
            }
            rig.close(&allocator);
            foreign.destroy();
        });
    });
}

/// D4: the first capture of the process begins between two queries of its stream: it is invalidated, as documented, but
/// the request of the other stream and all later calls succeed. In a process of its own.
#[test]
fn d4_a_capture_invalidated_by_a_query_affects_no_other() {
    alone(|| {
        let Some(rig) = Rig::with_interludes(Policy::Packed) else {
            return;
        };
        let (allocator, [a, b]) = rig.scene();
        let ptr = left_unmarked(&allocator, &a, &b);
        interlude::before("cuStreamQuery", begin(&rig, a.raw()));
        let elsewhere = allocator.allocate(BLOCK, &b).unwrap();
        assert!(!interlude::is_due());
        assert_ne!(elsewhere.ptr(), ptr);
        let spoilt = sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        assert_eq!(end(&rig, a.raw())(), spoilt);
        let taken = allocator.allocate(BLOCK, &b).unwrap();
        assert_eq!(taken.ptr(), ptr);
        assert_eq!(allocator.stats().reclaim.synchronised, 0);
    });
}

/// A request that only a view can serve within its means; the test of the device comes before it. Whether it passed,
/// and how many streams were queried meanwhile.
fn first_view(rig: &Rig, config: Config) -> (SelfTest, u64) {
    let allocator = rig.allocator_with(config);
    let [stream, other] = rig.streams();
    drop(allocator.allocate(MIB, &other).unwrap());
    let mut kept: Vec<Block> = allocator.allocate_blocks(41, 2 * MIB, &stream);
    (0..20).for_each(|at| drop(kept.remove(at + 1)));
    allocator.synchronize().unwrap();
    let queries = rig.calls("cuStreamQuery");
    kept.push(allocator.allocate(40 * MIB, &stream).unwrap());
    let packing = allocator.stats().packing;
    assert_eq!(packing.views, 1);
    drop(kept);
    let queries = rig.calls("cuStreamQuery") - queries;
    rig.close(&allocator);
    (packing.self_test, queries)
}

/// The test of a device queries the streams of others only as long as none of them may be captured: a query would
/// invalidate a capture that begins in that moment. In a process of its own.
#[test]
fn the_test_of_a_device_queries_no_stream_that_may_be_captured() {
    alone(|| {
        // The device is tested once for each driver.
        let view = |config: Config, before: &dyn Fn(&Rig)| {
            let found = Cell::new(None);
            only(Policy::Packed, |rig| {
                before(rig);
                found.set(Some(first_view(rig, config.clone())));
                if let Some(sim) = rig.maybe_sim() {
                    assert_eq!(sim.clear_failures(), 0);
                }
            });
            found.take().unwrap()
        };
        let (passed, queries) = view(Config::new(), &|_| ());
        assert!(passed == SelfTest::Passed && queries > 0);
        let checked = Config::new().capture_checks(true);
        assert_eq!(view(checked, &|_| ()), (SelfTest::Passed, 0));
        // D4: a stream that begins to be captured in that moment counts as one that works.
        let meets = |rig: &Rig| {
            let code = sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
            if let Some(sim) = rig.maybe_sim() {
                sim.fail(FailPlan::call("cuStreamQuery", code).unwrap());
            }
        };
        assert_eq!(view(Config::new(), &meets).0, SelfTest::Passed);
        let captures = |rig: &Rig| {
            let stream = rig.stream();
            stream.begin_capture(MODE).unwrap();
            drop(stream.end_capture().unwrap());
        };
        assert_eq!(view(Config::new(), &captures), (SelfTest::Passed, 0));
    });
}
