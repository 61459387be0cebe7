//! Memory that no other stream requests gets no marker, and a stream that is idle at the request needs
//! none.

use cualloc::allocator::Waits;

use super::late::{BLOCK, covers_no_later_free};
use super::waits;
use crate::common::prelude::*;

/// More than get a marker immediately.
const BATCHES: u64 = 600;

fn records(rig: &Rig) -> u64 {
    rig.calls("cuEventRecord")
}

/// Frees enough blocks on a stream, which is not the only one, that its full batches wait from then on until another
/// stream requests memory.
fn unasked(allocator: &Allocator, stream: &Stream, other: &Stream) {
    drop(allocator.allocate(512, other).unwrap());
    let markers = allocator.stats().markers;
    // More than the share of the memory that may lack a marker.
    let share = allocator.stats().all.reserved.current as usize / 32;
    for at in 0..BATCHES as usize {
        let bytes = share + (1 + at % 3) * MIB;
        drop(allocator.allocate(bytes, stream).unwrap());
    }
    let marked = allocator.stats().markers - markers;
    assert!((400..BATCHES).contains(&marked), "{marked} markers");
}

#[test]
fn batches_that_no_request_needs_get_no_marker() {
    each(|rig| {
        let (allocator, [a, b]) = rig.scene_limit(2 * BLOCK);
        let block = allocator.allocate(BLOCK, &a).unwrap();
        let ptr = block.ptr();
        drop(block);
        unasked(&allocator, &a, &b);
        let before = (records(rig), waits(rig), rig.memory_calls());
        for at in 0..100 {
            drop(allocator.allocate((1 + at % 3) * MIB, &a).unwrap());
        }
        assert_eq!(records(rig), before.0);
        // The other stream gets all of it without a marker and without a wait.
        let queries = rig.calls("cuStreamQuery");
        let taken = allocator.allocate(BLOCK, &b).unwrap();
        assert_eq!(taken.ptr(), ptr);
        assert_eq!(rig.calls("cuStreamQuery"), queries + 1);
        assert_eq!((records(rig), waits(rig), rig.memory_calls()), before);
    });
}

/// Frees get a marker once they exceed a share of the memory, or when a request of another stream needs them.
#[test]
fn frees_below_a_share_of_the_memory_get_no_marker() {
    only(Policy::Packed, |rig| {
        let config = Config::new().limit(Some(704 * MIB as u64));
        let (allocator, [a, b]) = rig.scene_with(config.waits(Waits::Never));
        let _kept = allocator.allocate(640 * MIB, &b).unwrap();
        drop(allocator.allocate(5 * MIB, &a).unwrap());
        let markers = allocator.stats().markers;
        // The share is 5 MiB: a 64th of 640 MiB, divided by two streams. Two of three frees exceed it.
        for at in 0..90 {
            let bytes = 4 * MIB + at % 3 * 512 * KIB;
            drop(allocator.allocate(bytes, &a).unwrap());
        }
        assert_eq!(allocator.stats().markers - markers, 60);
        drop(allocator.allocate(8 * MIB, &a).unwrap());
        let _all = allocator.allocate(60 * MIB, &b).unwrap();
    });
}

/// With more than eight incomplete markers the share is twice as large.
#[test]
fn a_stream_with_a_backlog_gets_fewer_markers() {
    only(Policy::Packed, |rig| {
        let (allocator, [a, b]) = rig.scene_with(Config::new().waits(Waits::Never));
        let _kept = allocator.allocate(640 * MIB, &b).unwrap();
        drop(allocator.allocate(6 * MIB, &a).unwrap());
        let _busy = rig.busy(&a);
        let markers = allocator.stats().markers;
        for at in 0..29 {
            let bytes = 6 * MIB + at % 3 * 512 * KIB;
            drop(allocator.allocate(bytes, &a).unwrap());
        }
        // Each free exceeds the share of 5 MiB, and two exceed twice the share.
        assert_eq!(allocator.stats().markers - markers, 9 + 10);
    });
}

/// Near the limit a stream is queried for its own memory, too: complete memory fits in more ways.
#[test]
fn near_the_limit_the_stream_itself_is_queried() {
    for near in [false, true] {
        only(Policy::Packed, |rig| {
            let limit = if near { BLOCK } else { 3 * BLOCK };
            let (allocator, [a, b]) = rig.scene_limit(limit);
            drop(allocator.allocate(BLOCK, &a).unwrap());
            unasked(&allocator, &a, &b);
            let queries = rig.calls("cuStreamQuery");
            for bytes in [MIB, 2 * MIB, 3 * MIB] {
                drop(allocator.allocate(bytes, &a).unwrap());
            }
            let asked = rig.calls("cuStreamQuery") - queries;
            assert_eq!(asked > 0, near, "{asked} questions");
        });
    }
}

/// Memory that a lone stream freed is available to the next stream, also from a later slot.
#[test]
fn memory_freed_by_a_lone_stream_is_queried() {
    each(|rig| {
        for later in [false, true] {
            let (allocator, [first, a, b]) = rig.scene_limit(2 * BLOCK);
            if later {
                for stream in [&first, &a] {
                    drop(allocator.allocate(2 * MIB, stream).unwrap());
                }
                allocator.retire(&first).unwrap();
                allocator.trim(0).unwrap();
                assert_eq!(allocator.stats().streams, 1);
            }
            let block = allocator.allocate(20 * MIB, &a).unwrap();
            let ptr = block.ptr();
            rig.stamp(ptr, BLOCK, 1, &a);
            drop(block);
            a.synchronize().unwrap();
            let before = (records(rig), waits(rig), rig.memory_calls());
            let taken = allocator.allocate(BLOCK, &b).unwrap();
            assert_eq!(taken.ptr(), ptr);
            assert_eq!((records(rig), waits(rig), rig.memory_calls()), before);
            let reclaim = allocator.stats().reclaim;
            assert_eq!((reclaim.synchronised, reclaim.host_waits), (0, 0));
        }
    });
}

/// A request that fails may have found its stream idle: then memory that was freed there is available to all streams.
#[test]
fn a_failed_request_still_frees_complete_memory() {
    each(|rig| {
        let (allocator, [a, b]) = rig.scene_limit(512 * MIB);
        let small = 768 * KIB;
        let _kept = [512, 384 * MIB].map(|bytes| allocator.allocate(bytes, &b).unwrap());
        let block = allocator.allocate(small, &a).unwrap();
        let ptr = block.ptr();
        unasked(&allocator, &a, &b);
        allocator.trim(0).unwrap();
        // Too little to wait for a request.
        drop(block);
        assert!(
            allocator
                .allocate(256 * MIB, &a)
                .unwrap_err()
                .is_out_of_memory()
        );
        allocator.check().unwrap();
        let calls = rig.memory_calls();
        let taken = allocator.allocate(small, &b).unwrap();
        assert_eq!(taken.ptr(), ptr);
        assert_eq!(rig.memory_calls(), calls);
    });
}

/// A query of a stream may report that its context is lost.
#[test]
fn a_query_that_finds_the_context_lost_reports_that() {
    each_simulated(|rig, sim| {
        let allocator = rig.allocator();
        let [a, b] = rig.streams();
        let block = allocator.allocate(BLOCK, &a).unwrap();
        unasked(&allocator, &a, &b);
        drop(block);
        sim.fail(FailPlan::call("cuStreamQuery", CUresult::CUDA_ERROR_ILLEGAL_ADDRESS).unwrap());
        assert_matches!(allocator.allocate(BLOCK, &b), Err(Error::ContextLost(_)));
        sim.clear_failures();
    });
}

/// A stream that is busy when its memory is requested gets its marker then, and its next ones immediately.
#[test]
fn a_busy_stream_is_marked_when_its_memory_is_requested() {
    each(|rig| {
        let (allocator, [a, b]) = rig.scene_limit(4 * BLOCK);
        let early = allocator.allocate(BLOCK, &a).unwrap();
        let ptr = early.ptr();
        unasked(&allocator, &a, &b);
        let hold = rig.hold(&a);
        rig.stamp(ptr, BLOCK, 1, &a);
        let before = (records(rig), waits(rig));
        drop(early);
        assert_eq!(records(rig), before.0, "no request needed it");
        let elsewhere = allocator.allocate(BLOCK, &b).unwrap();
        assert_ne!(elsewhere.ptr(), ptr);
        assert_eq!(records(rig), before.0 + 1);
        drop(allocator.allocate(2 * MIB, &a).unwrap());
        assert_eq!(
            records(rig),
            before.0 + 2,
            "the next batch is marked at once"
        );
        assert_eq!(waits(rig), before.1);
        hold.release();
        a.synchronize().unwrap();
        drop(elsewhere);
        allocator.trim(0).unwrap();
        assert_eq!(allocator.stats().all.reserved.current, 0);
    });
}

/// Work that completes late is marked as soon as it is submitted, however much of it there is.
#[test]
fn streams_that_are_behind_are_marked_immediately() {
    each(|rig| {
        let (allocator, [a, b]) = rig.scene_limit(4 * BLOCK);
        drop(allocator.allocate(512, &b).unwrap());
        let hold = rig.hold(&a);
        // More than get a marker immediately, and fewer than make the other stream inactive.
        for at in 0..BATCHES as usize + 256 {
            drop(allocator.allocate((1 + at % 3) * MIB, &a).unwrap());
        }
        let before = records(rig);
        for at in 0..100 {
            drop(allocator.allocate((1 + at % 3) * MIB, &a).unwrap());
        }
        assert_eq!(records(rig), before + 100);
        hold.release();
        a.synchronize().unwrap();
    });
}

/// Memory freed on an idle stream is released to the driver immediately, marked or not.
#[test]
fn idle_streams_are_trimmed_without_a_marker() {
    each(|rig| {
        let (allocator, [a, b]) = rig.scene();
        unasked(&allocator, &a, &b);
        drop(allocator.allocate(BLOCK, &a).unwrap());
        let before = records(rig);
        let trimmed = allocator.trim(0).unwrap();
        assert_eq!(trimmed.pending, 0, "{trimmed:?}");
        assert_eq!(records(rig), before);
        assert_eq!(allocator.stats().all.reserved.current, 0);
    });
}

/// R23: that a stream was idle proves nothing about a block that was used and freed since.
#[test]
fn r23_an_idle_stream_covers_no_free_that_came_after_the_query() {
    covers_no_later_free(
        "cuStreamQuery",
        |allocator, [a, b]| unasked(allocator, a, b),
        // The stream is asked by the first request of the other one.
        |_, _| assert!(interlude::is_due(), "asked too early"),
    );
}
