//! D4: captures that begin between a query of the allocator and the call that depends on it.

use crate::common::capturing::*;
use crate::common::prelude::*;

/// An allocator that knows two streams, so that what is freed on the raw one is marked.
fn with_a_raw_stream(rig: &Rig) -> (Allocator, Stream, RawStream) {
    let allocator = rig.allocator();
    let (other, raw) = (rig.stream(), RawStream::new(rig));
    drop(allocator.allocate(70_000, &other).unwrap());
    (allocator, other, raw)
}

/// Memory of a raw stream.
fn allocated<const N: usize>(
    allocator: &Allocator,
    raw: &RawStream,
    bytes: [usize; N],
) -> [u64; N] {
    bytes.map(|bytes| allocator.raw_allocate(bytes, raw.raw()).unwrap())
}

/// The next marker's event is recorded in a capture that begins just before, and ends just after.
fn capture_the_next_marker(rig: &Rig, raw: &RawStream) {
    interlude::before("cuEventRecord", begin(rig, raw.raw()));
    let end = end(rig, raw.raw());
    interlude::after("cuEventRecord", move || {
        assert_eq!(end(), sys::CUresult::CUDA_SUCCESS);
    });
}

/// The next marker of a raw stream covers frees that had none: all memory can be released.
fn nothing_is_lost(allocator: &Allocator, raw: &RawStream) {
    allocator.raw_mark(raw.raw()).unwrap();
    assert_eq!(allocator.trim(0).unwrap().pending, 0);
    assert_eq!(allocator.stats().all.reserved.current, 0);
}

/// D4: between the query and the record another thread begins to capture. The event belongs to a graph, and is not a
/// marker.
#[test]
fn d4_a_capture_that_begins_before_the_record_costs_that_marker() {
    each_with_interludes(|rig, _| {
        let (allocator, other, raw) = with_a_raw_stream(rig);
        let [ptr] = allocated(&allocator, &raw, [4 * MIB]);
        let before = allocator.stats();
        interlude::before("cuEventRecord", begin(rig, raw.raw()));
        allocator.raw_free(ptr).unwrap();
        assert!(!interlude::is_due());
        let after = allocator.stats();
        assert_eq!(after.markers, before.markers);
        assert_eq!(after.failed_markers, before.failed_markers + 1);
        // The others go on, and do not touch the capture.
        drop(allocator.allocate(8 * MIB, &other).unwrap());
        allocator.trim(0).unwrap();
        assert_eq!(end(rig, raw.raw())(), sys::CUresult::CUDA_SUCCESS);
        drop(allocator.allocate(8 * MIB, &other).unwrap());
        nothing_is_lost(&allocator, &raw);
        allocator.synchronize().unwrap();
        rig.close(&allocator);
        raw.destroy();
    });
}

/// D4: frees whose marker a capture prevented get one with the next free, not with the next full batch.
#[test]
fn d4_a_batch_without_marker_due_to_a_capture_gets_one_afterwards() {
    each_with_interludes(|rig, _| {
        let (allocator, _other, raw) = with_a_raw_stream(rig);
        let [large, little] = allocated(&allocator, &raw, [4 * MIB, 80 * KIB]);
        interlude::before("cuEventRecord", begin(rig, raw.raw()));
        allocator.raw_free(large).unwrap();
        assert_eq!(end(rig, raw.raw())(), sys::CUresult::CUDA_SUCCESS);
        let before = allocator.stats().markers;
        allocator.raw_free(little).unwrap();
        assert_eq!(allocator.stats().markers, before + 1);
        allocator.trim(0).unwrap();
        assert_eq!(allocator.stats().all.reserved.current, 0);
        rig.close(&allocator);
        raw.destroy();
    });
}

/// An allocator with a marker whose event fell into a capture that is over, of a raw stream, under
/// which lie 4 MiB.
fn captured_marker(rig: &Rig) -> (Allocator, Stream, RawStream) {
    let (allocator, other, raw) = with_a_raw_stream(rig);
    let [ptr] = allocated(&allocator, &raw, [4 * MIB]);
    let before = allocator.stats().markers;
    capture_the_next_marker(rig, &raw);
    allocator.raw_free(ptr).unwrap();
    assert!(!interlude::is_due());
    assert_eq!(allocator.stats().markers, before + 1);
    (allocator, other, raw)
}

/// D4: a marker that fell into a capture which has ended proves nothing: a call that queries it continues.
#[test]
fn d4_a_captured_marker_is_dropped_when_it_is_queried() {
    each_with_interludes(|rig, _| {
        let asks: [fn(&Rig, &Allocator, &Stream); 3] = [
            |_, allocator, _| drop(allocator.trim(0).unwrap()),
            |_, allocator, other| drop(allocator.allocate(8 * MIB, other).unwrap()),
            // It is waited for on the host.
            |rig, allocator, _| rig.close(allocator),
        ];
        for (at, ask) in asks.into_iter().enumerate() {
            let (allocator, other, raw) = captured_marker(rig);
            ask(rig, &allocator, &other);
            assert_eq!(allocator.stats().failed_markers, 1);
            if at < 2 {
                nothing_is_lost(&allocator, &raw);
                drop(allocator.allocate(8 * MIB, &other).unwrap());
                rig.close(&allocator);
            }
        }
    });
}

/// A block that was freed while its stream, which is held up, writes to it, and another stream that the
/// allocator knows. There is no room for a second block.
struct InUse<'a> {
    allocator: Allocator,
    streams: [Stream; 2],
    ptr: u64,
    hold: Option<Hold<'a>>,
}

const BLOCK: usize = 8 * MIB;

impl InUse<'_> {
    fn new(rig: &Rig) -> InUse<'_> {
        let allocator = rig.limited(12 * MIB);
        let streams = rig.streams();
        drop(allocator.allocate(70_000, &streams[1]).unwrap());
        let block = allocator.allocate(BLOCK, &streams[0]).unwrap();
        let ptr = block.ptr();
        let hold = rig.hold(&streams[0]);
        rig.stamp(ptr, BLOCK, 7, &streams[0]);
        drop(block);
        InUse {
            allocator,
            streams,
            ptr,
            hold: Some(hold),
        }
    }

    /// Whether a block lies in the memory.
    fn is_in(&self, block: &Block) -> bool {
        block.ptr() < self.ptr + BLOCK as u64 && self.ptr < block.ptr() + block.size()
    }

    /// The block, which lies there now, is written to by the other stream, and after the first.
    fn end(self, rig: &Rig, block: Block) {
        assert!(self.is_in(&block));
        rig.stamp(block.ptr(), BLOCK, 8, &self.streams[1]);
        drop(self.hold);
        assert_eq!(rig.mismatches(block.ptr(), BLOCK, 8, &self.streams[1]), 0);
        drop(block);
        rig.close(&self.allocator);
    }
}

/// D4: what a captured marker covered is not complete when a later marker of another stream is.
#[test]
fn d4_memory_under_a_captured_marker_stays_in_use_until_a_real_one() {
    only_simulated(Policy::Packed, |rig, sim| {
        let mut used = InUse::new(rig);
        let (allocator, [a, b]) = (used.allocator.clone(), used.streams.clone());
        sim.fail(FailPlan::call("cuEventQuery", CUresult::CUDA_ERROR_CAPTURED_EVENT).unwrap());
        sim.deny_host_waits(true);
        // All that is left is under it.
        let taken = allocator.allocate_with(Request::new(BLOCK).cached_only(), &b);
        match taken {
            Ok(block) => assert!(!used.is_in(&block)),
            Err(error) => assert_matches!(error, Error::NotCached),
        }
        // It gets another marker for the next request.
        assert_eq!(allocator.stats().failed_markers, 1);
        sim.deny_host_waits(false);
        assert_eq!(sim.clear_failures(), 0);
        used.hold = None;
        rig.settle(&a);
        let again = allocator.allocate(BLOCK, &b).unwrap();
        used.end(rig, again);
    });
}

/// D4: every error about a capture, at every query of a marker.
#[test]
fn d4_answers_about_a_capture_are_not_cached() {
    each_simulated(|rig, sim| {
        use sys::CUresult as Code;
        for call in [
            "cuEventQuery",
            "cuEventSynchronize",
            "cuEventRecord",
            "cuStreamWaitEvent",
        ] {
            for code in [
                Code::CUDA_ERROR_CAPTURED_EVENT,
                Code::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
                Code::CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
                Code::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                Code::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
                // What drivers say of an event whose capture has ended.
                Code::CUDA_ERROR_INVALID_VALUE,
            ] {
                if call == "cuEventRecord" && code == Code::CUDA_ERROR_INVALID_VALUE {
                    continue;
                }
                let (allocator, [a, b]) = rig.scene_limit(24 * MIB);
                drop(allocator.allocate(70_000, &b).unwrap());
                let hold = rig.busy(&a);
                let block = allocator.allocate(16 * MIB, &a).unwrap();
                sim.fail(FailPlan::call(call, code).unwrap().times(3));
                drop(block);
                // Only what `a` still uses is large enough.
                let got = allocator.allocate(16 * MIB, &b);
                let got = got.unwrap_or_else(|error| panic!("{call} {code:?}: {error:?}"));
                drop(got);
                allocator.trim(0).unwrap();
                sim.clear_failures();
                drop(hold);
                drop(allocator.allocate(20 * MIB, &a).unwrap());
                allocator.synchronize().unwrap();
            }
        }
    });
}

/// D4: a request whose every wait on the host finds an invalid event ends with the driver's error. The freed blocks
/// fill a batch of the requesting stream, so each attempt records a new marker.
#[test]
fn d4_a_request_ends_although_every_marker_is_invalid() {
    each_simulated(|rig, sim| {
        let config = Config::new().limit(Some(24 * MIB as u64)).views(false);
        let (allocator, [stream]) = rig.scene_with(config);
        for code in [
            sys::CUresult::CUDA_ERROR_CAPTURED_EVENT,
            sys::CUresult::CUDA_ERROR_INVALID_VALUE,
        ] {
            let hold = rig.busy(&stream);
            let mut blocks: Vec<_> = (0..24)
                .map(|_| allocator.allocate(MIB, &stream).unwrap())
                .collect();
            // Idle runs of 2 MiB, which only serve a larger request once they are complete and released.
            for at in (0..24).rev().filter(|at| at % 4 < 2) {
                blocks.swap_remove(at);
            }
            let plan = FailPlan::call("cuEventSynchronize", code).unwrap();
            sim.fail(plan.times(u64::MAX));
            let error = allocator.allocate(8 * MIB, &stream).unwrap_err();
            assert_matches!(error, Error::Driver(_));
            sim.clear_failures();
            drop((hold, blocks));
            drop(allocator.allocate(20 * MIB, &stream).unwrap());
        }
    });
}

/// D4: a wait that may have become part of a graph orders nothing: the next wait makes the memory available.
#[test]
fn d4_a_wait_that_meets_a_capture_orders_nothing() {
    for refused in [true, false] {
        let Some(rig) = Rig::with_interludes(Policy::Packed) else {
            return;
        };
        let used = InUse::new(&rig);
        let (allocator, [_, b]) = (used.allocator.clone(), used.streams.clone());
        let begin = begin(&rig, b.raw());
        if refused {
            interlude::before("cuStreamWaitEvent", begin);
        } else {
            interlude::after("cuStreamWaitEvent", begin);
        }
        assert_matches!(allocator.allocate(BLOCK, &b), Err(Error::Capturing { .. }));
        assert!(!interlude::is_due());
        assert_eq!(allocator.stats().stream_waits, 0);
        allocator.check().unwrap();
        assert_eq!(
            end(&rig, b.raw())() == sys::CUresult::CUDA_SUCCESS,
            !refused
        );
        let again = allocator.allocate(BLOCK, &b).unwrap();
        assert_eq!(allocator.stats().stream_waits, 1);
        used.end(&rig, again);
        rig.assert_clean();
    }
}

/// D4: a marker that a wait finds invalid does not fail the request of another stream, which waits for the next marker.
#[test]
fn d4_a_wait_for_a_captured_marker_fails_no_request() {
    only_simulated(Policy::Packed, |rig, sim| {
        let used = InUse::new(rig);
        sim.fail(FailPlan::call("cuStreamWaitEvent", CUresult::CUDA_ERROR_CAPTURED_EVENT).unwrap());
        sim.deny_host_waits(true);
        let got = used.allocator.allocate(BLOCK, &used.streams[1]).unwrap();
        sim.deny_host_waits(false);
        assert_eq!(sim.clear_failures(), 0);
        let stats = used.allocator.stats();
        assert_eq!((stats.failed_markers, stats.stream_waits), (1, 1));
        used.end(rig, got);
    });
}

/// D4: markers after an invalid one are queried in the same call.
#[test]
fn d4_markers_behind_a_captured_one_are_queried_in_the_same_call() {
    each_with_interludes(|rig, _| {
        let (allocator, _other, raw) = with_a_raw_stream(rig);
        let [large, little] = allocated(&allocator, &raw, [4 * MIB, 80 * KIB]);
        capture_the_next_marker(rig, &raw);
        allocator.raw_free(large).unwrap();
        allocator.raw_free(little).unwrap();
        allocator.raw_mark(raw.raw()).unwrap();
        assert_eq!(allocator.stats().failed_markers, 0);
        assert_eq!(allocator.trim(0).unwrap().pending, 0);
        assert_eq!(allocator.stats().failed_markers, 1);
        assert_eq!(allocator.stats().all.reserved.current, 0);
        rig.close(&allocator);
        raw.destroy();
    });
}

/// D4: no stream waits for an event that was recorded in a capture, because it would join the capture.
#[test]
fn d4_a_capture_that_begins_at_an_exchange_of_streams_captures_no_others() {
    each_with_interludes(|rig, _| {
        let (allocator, [home, other]) = rig.scene();
        let mut buffer = DeviceBuffer::<u32>::filled(&*allocator, 1 << 18, 3, &home).unwrap();
        interlude::before("cuEventRecord", begin(rig, home.raw()));
        buffer.fill(5, &other).unwrap_err();
        assert!(!interlude::is_due());
        assert!(!other.is_capturing().unwrap());
        assert_eq!(end(rig, home.raw())(), sys::CUresult::CUDA_SUCCESS);
        buffer.fill(5, &other).unwrap();
        assert_eq!(buffer.to_vec().unwrap()[7], 5);
    });
}

/// D4: work that fell into a capture was not executed, and its caller gets an error.
#[test]
fn d4_work_that_falls_into_a_capture_is_reported() {
    each_with_interludes(|rig, _| {
        let (allocator, [home]) = rig.scene();
        let mut buffer = DeviceBuffer::<u32>::filled(&*allocator, 1 << 18, 3, &home).unwrap();
        interlude::before("cuMemsetD32Async", begin(rig, home.raw()));
        assert_matches!(buffer.fill(5, &home), Err(Error::Capturing { .. }));
        assert!(!interlude::is_due());
        assert_eq!(end(rig, home.raw())(), sys::CUresult::CUDA_SUCCESS);
        assert_eq!(buffer.to_vec().unwrap()[7], 3);
    });
}

/// D7: a retired stream has only its last marker. A query of it that fails with an error about captures does not remove
/// it.
#[test]
fn d7_the_last_marker_of_a_stream_outlives_a_failed_query() {
    let code = sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    each_simulated(|rig, sim| {
        let (allocator, [a, b]) = rig.scene();
        drop(allocator.allocate(KIB, &b).unwrap());
        let hold = rig.hold(&a);
        drop(allocator.allocate(3 * MIB, &a).unwrap());
        allocator.retire(&a).unwrap();
        sim.fail(FailPlan::call("cuEventQuery", code).unwrap());
        assert!(allocator.trim(0).unwrap().pending > 0);
        assert_eq!(sim.clear_failures(), 0);
        // No call waits for it until it is answered.
        drop(allocator.allocate(3 * MIB, &b).unwrap());
        drop(hold);
        rig.settle(&a);
        assert_eq!(allocator.trim(0).unwrap().pending, 0);
    });
    each_simulated(|rig, sim| {
        let allocator = rig.allocator();
        let a = rig.stream();
        drop(allocator.allocate(3 * MIB, &a).unwrap());
        allocator.retire(&a).unwrap();
        // The wait at the end is for everything then.
        for call in ["cuEventQuery", "cuEventSynchronize"] {
            sim.fail(FailPlan::call(call, code).unwrap().times(1000));
        }
        allocator.close().unwrap();
        assert_eq!(
            sim.clear_failures(),
            2,
            "the query is not repeated without end"
        );
    });
}

/// A capture that begins directly after a query of its stream is still noticed, even if the answer is recorded after
/// the beginning.
#[test]
fn d4_a_capture_that_begins_during_a_query_is_watched() {
    for late in [false, true] {
        only_simulated(Policy::Packed, |rig, sim| {
            let (allocator, waits) = (rig.allocator(), rig.allocator());
            let (stream, other) = (rig.stream(), rig.stream());
            let warm = [0; 4].map(|_| allocator.allocate(512, &stream).unwrap());
            drop(warm);
            drop(waits.allocate(512, &other).unwrap());
            let once = AtomicBool::new(false);
            let first = move || !once.swap(true, Ordering::SeqCst);
            if late {
                let own = stream.clone();
                sim.after(move |moment| {
                    if moment.call == "cuStreamIsCapturing" && first() {
                        let begin = || own.begin_capture(MODE).unwrap();
                        std::thread::scope(|scope| scope.spawn(begin).join().unwrap());
                    }
                });
                assert!(!stream.is_capturing().unwrap(), "it was asked before");
            } else {
                let waits = waits.clone();
                sim.before(move |moment| {
                    if moment.call.starts_with("cuStreamBeginCapture") && first() {
                        let wait = || waits.synchronize().unwrap();
                        std::thread::scope(|scope| scope.spawn(wait).join().unwrap());
                    }
                });
                stream.begin_capture(MODE).unwrap();
            }
            sim.clear_hooks();
            let capturing = Capturing::begun(&stream);
            let refused = allocator.allocate(512, &stream);
            assert_matches!(refused, Err(Error::Capturing { .. }));
            drop(capturing.end().unwrap());
            drop(allocator.allocate(512, &stream).unwrap());
            waits.close().unwrap();
            rig.close(&allocator);
        });
    }
}
