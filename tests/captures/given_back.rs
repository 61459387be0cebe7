//! Which memory is released to the driver immediately, which after a wait, and which a capture keeps.

use cualloc::allocator::{Scope, Trimmed};

use crate::common::capturing::*;
use crate::common::prelude::*;

const BLOCK: usize = 24 * MIB;
const NANOS: u64 = 1_000_000;

/// Frees memory that a stream still uses, and that can be released when the stream is idle.
fn freed_in_use(rig: &Rig, allocator: &Allocator, stream: &Stream) {
    let block = allocator.allocate(BLOCK, stream).unwrap();
    rig.stamp(block.ptr(), BLOCK, 1, stream);
}

/// Bytes that are pending, on which streams, and how much of them no marker covers.
fn pending(trimmed: &Trimmed) -> (u64, Vec<(u64, u64, u64)>) {
    let streams = trimmed.streams.iter();
    let streams = streams.map(|s| (s.stream_id, s.bytes, s.unmarked));
    (trimmed.pending, streams.collect())
}

/// Waits of the host so far: for markers, and for contexts.
fn host_waits(rig: &Rig) -> (u64, u64) {
    (
        rig.calls("cuEventSynchronize"),
        rig.calls("cuCtxSynchronize"),
    )
}

#[test]
fn a_trim_names_the_streams_that_memory_waits_for() {
    each(|rig| {
        let (allocator, [stream]) = rig.scene();
        let hold = rig.hold(&stream);
        freed_in_use(rig, &allocator, &stream);
        let before = host_waits(rig);
        let trimmed = allocator.trim(0).unwrap();
        let bytes = BLOCK as u64;
        // The stream is kept alive, so the trim itself marked it.
        let expected = (bytes, vec![(stream.id().unwrap(), bytes, 0)]);
        assert_eq!(pending(&trimmed), expected);
        assert_eq!(host_waits(rig), before);
        hold.release();
        allocator.synchronize().unwrap();
        let trimmed = allocator.trim(0).unwrap();
        assert_eq!((trimmed.released, pending(&trimmed)), (bytes, (0, vec![])));
    });
}

#[test]
fn an_emptied_cache_waits_for_markers_before_contexts() {
    each(|rig| {
        let (allocator, [stream]) = rig.scene();
        let hold = rig.busy_for(&stream, NANOS);
        freed_in_use(rig, &allocator, &stream);
        let (_, contexts) = host_waits(rig);
        let emptied = allocator.empty_cache().unwrap();
        assert_eq!(emptied.released, BLOCK as u64);
        assert_eq!(pending(&emptied), (0, vec![]));
        assert_eq!(host_waits(rig).1, contexts);
        hold.release();
    });
}

#[test]
fn an_emptied_cache_waits_for_the_context_where_no_marker_is() {
    each(|rig| {
        let allocator = rig.checked();
        let raw = RawStream::new(rig);
        leave_work(&allocator, &raw);
        let held = allocator.stats().all.reserved.current;
        assert!(allocator.trim(0).unwrap().pending > 0);
        let (_, contexts) = host_waits(rig);
        let emptied = allocator.empty_cache().unwrap();
        assert_eq!((emptied.released, emptied.pending), (held, 0));
        assert_eq!(host_waits(rig).1, contexts + 1);
        raw.retire(&allocator);
    });
}

/// A capture of a stream unknown to the allocator, in the mode in which unsafe calls of any thread invalidate it.
#[test]
fn emptying_a_cache_invalidates_no_unknown_capture() {
    each_with_interludes(|rig, _| {
        let [short, long] = [rig.stream(), rig.stream()];
        let foreign = RawStream::new(rig);
        let allocator = rig.checked();
        let late = allocator.allocate(BLOCK, &long).unwrap();
        rig.stamp(late.ptr(), BLOCK, 2, &long);
        // One is at work twice as long.
        let streams = [&short, &long, &long];
        let holds = streams.map(|stream| rig.busy_for(stream, NANOS));
        freed_in_use(rig, &allocator, &short);
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        begin_in(rig, foreign.raw(), mode)();
        // Another thread frees it when all that was freed before has its marker.
        interlude::after("cuEventQuery", move || drop(late));
        let (_, contexts) = host_waits(rig);
        let emptied = allocator.empty_cache().unwrap();
        assert!(!interlude::is_due());
        assert_eq!(pending(&emptied), (0, vec![]));
        assert_eq!(emptied.released, 2 * BLOCK as u64);
        assert_eq!(host_waits(rig).1, contexts);
        drop(allocator.trim(0).unwrap());
        assert_eq!(end(rig, foreign.raw())(), sys::CUresult::CUDA_SUCCESS);
        holds.into_iter().for_each(Hold::release);
    });
}

/// Between the opening of a scope and the first request of its capture, the allocator cannot know of the capture.
#[test]
fn an_emptied_cache_waits_for_no_context_while_a_scope_waits_for_captures() {
    only(Policy::Packed, |rig| {
        let allocator = rig.checked();
        let pool = allocator.graph_pool().unwrap();
        let (captures, raw) = (RawStream::new(rig), RawStream::new(rig));
        leave_work(&allocator, &raw);
        let all = Scope::When(Box::new(|_| true));
        for (scope, waits) in [(Scope::Thread, 1), (Scope::NextCapture, 0), (all, 0)] {
            let scope = pool.enter(scope).unwrap();
            let (_, contexts) = host_waits(rig);
            if waits == 0 && rig.sim().is_some() {
                begin(rig, captures.raw())();
            }
            let emptied = allocator.empty_cache().unwrap();
            assert_eq!(host_waits(rig).1, contexts + waits);
            assert_eq!(emptied.pending > 0, waits == 0);
            if waits == 0 && rig.sim().is_some() {
                let ended = end(rig, captures.raw())();
                assert_eq!(ended, sys::CUresult::CUDA_SUCCESS);
            }
            drop(scope);
            drop(allocator.empty_cache().unwrap());
            leave_work(&allocator, &raw);
        }
        raw.retire(&allocator);
        captures.destroy();
    });
}

#[test]
fn emptying_a_cache_keeps_memory_that_a_capture_prevents_waiting_for() {
    each(|rig| {
        let allocator = rig.checked();
        let (captures, raw) = (rig.stream(), RawStream::new(rig));
        // While the raw stream is alone nothing marks it.
        leave_work(&allocator, &raw);
        drop(allocator.allocate(512, &captures).unwrap());
        captured(rig, captures.raw(), || {
            let before = host_waits(rig);
            let emptied = allocator.empty_cache().unwrap();
            assert!(emptied.pending > 0);
            let of_no_marker = emptied.streams.iter().find(|s| s.unmarked > 0);
            assert!(of_no_marker.is_some_and(|s| s.bytes >= 4 * MIB as u64));
            assert_eq!(host_waits(rig).1, before.1);
        });
        assert_eq!(allocator.empty_cache().unwrap().pending, 0);
        raw.retire(&allocator);
    });
}

#[test]
fn an_emptied_cache_does_not_wait_for_a_stream_that_captures() {
    each(|rig| {
        let (allocator, [stream]) = rig.scene();
        let hold = rig.busy_for(&stream, NANOS);
        freed_in_use(rig, &allocator, &stream);
        // The marker comes before the capture.
        drop(allocator.trim(0).unwrap());
        captured(rig, stream.raw(), || {
            let before = host_waits(rig);
            let emptied = allocator.empty_cache().unwrap();
            if rig.sim().is_some() {
                assert_eq!(emptied.pending, BLOCK as u64);
                assert_eq!(pending(&emptied).1.len(), 1);
            }
            assert_eq!(host_waits(rig), before);
        });
        assert_eq!(allocator.empty_cache().unwrap().pending, 0);
        hold.release();
    });
}

/// An adopted stream may be queried at any time, so a wait for everything detects that its capture has ended.
#[test]
fn the_next_wait_detects_the_end_of_an_adopted_streams_capture() {
    each_simulated(|rig, _| {
        let allocator = rig.checked();
        let stream = RawStream::new(rig);
        allocator.raw_adopt(stream.raw()).unwrap();
        begin(rig, stream.raw())();
        let refused = allocator.raw_allocate(4 * MIB, stream.raw());
        assert_matches!(refused, Err(Error::Capturing { .. }));
        let refused = allocator.synchronize();
        assert_matches!(refused, Err(Error::Capturing { .. }));
        assert_eq!(end(rig, stream.raw())(), sys::CUresult::CUDA_SUCCESS);
        allocator.synchronize().unwrap();
        begin(rig, stream.raw())();
        let refused = allocator.raw_allocate(4 * MIB, stream.raw());
        assert_matches!(refused, Err(Error::Capturing { .. }));
        assert_eq!(end(rig, stream.raw())(), sys::CUresult::CUDA_SUCCESS);
        // No call has reported it so far, and none does.
        allocator.synchronize().unwrap();
        allocator.raw_retire(stream.raw()).unwrap();
    });
}
