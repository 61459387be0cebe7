//! Adopted streams: the caller promises that their handles live until they are retired.

use crate::common::prelude::*;
use cualloc::error::StreamMisuse;

/// Allocates a number of bytes by the handle and frees them, a number of times.
fn pairs(bytes: usize, allocator: &Allocator, stream: sys::CUstream, count: usize) {
    for _ in 0..count {
        let ptr = allocator.raw_allocate(bytes, stream).unwrap();
        allocator.raw_free(ptr).unwrap();
    }
}

/// Calls by an adopted handle do not query which stream it is, on each thread from its first one on; those by
/// the handle of the next stream do, whatever its value.
#[test]
fn r25_an_adopted_handle_is_not_queried_until_it_is_retired() {
    for bytes in [4 * KIB, 4 * MIB] {
        only_simulated(Policy::Packed, |rig, sim| {
            let allocator = rig.checked();
            let stream = RawStream::new(rig);
            let raw = stream.raw();
            let id = stream.borrowed().id().unwrap();
            pairs(bytes, &allocator, raw, 2);
            let here = || pairs(bytes, &allocator, raw, 8);
            assert!(calls_of(sim, here) > 0);
            allocator.raw_adopt(raw).unwrap();
            pairs(bytes, &allocator, raw, 1);
            let handle = raw as usize;
            let there = || {
                let pairs = |count| pairs(bytes, &allocator, handle as sys::CUstream, count);
                pairs(1);
                calls_of(sim, || pairs(8))
            };
            let there = std::thread::scope(|scope| scope.spawn(there).join().unwrap());
            // A capture of another test in this process may be looked out for.
            let asks = [calls_of(sim, here), there];
            assert!(asks.iter().all(|calls| *calls <= 16), "{asks:?}");
            // Its stream cache stays with it.
            let kept = allocator.raw_allocate(4 * KIB, raw).unwrap();
            allocator.raw_retire(raw).unwrap();
            // What the thread remembers by the first one's handle may serve this one now.
            let second = RawStream::new(rig);
            allocator.raw_adopt(second.raw()).unwrap();
            pairs(bytes, &allocator, second.raw(), 2);
            stream.destroy();
            let others: Vec<RawStream> = (0..8).map(|_| RawStream::new(rig)).collect();
            for other in others {
                let ptr = allocator.raw_allocate(bytes, other.raw()).unwrap();
                let owner = allocator.block_of(ptr).unwrap().stream;
                assert_eq!(owner, Some(other.borrowed().id().unwrap()));
                assert_ne!(owner, Some(id));
                allocator.raw_free(ptr).unwrap();
                other.retire(&allocator);
            }
            allocator.raw_free(kept).unwrap();
            second.retire(&allocator);
        });
    }
}

/// Frees on an adopted stream get their marker in calls that do not name the stream. The stream's idleness is queried
/// only if the program promises that nothing is captured.
#[test]
fn r25_a_handle_does_not_find_the_stream_cache_that_serves_another_stream_by_now() {
    only_simulated(Policy::Packed, |rig, _| {
        let allocator = rig.checked();
        let [first, second] = [(); 2].map(|()| RawStream::new(rig));
        let handle = first.raw() as usize;
        allocator.raw_adopt(first.raw()).unwrap();
        pairs(4 * KIB, &allocator, first.raw(), 2);
        allocator.raw_retire(first.raw()).unwrap();
        allocator.empty_cache().unwrap();
        allocator.raw_adopt(second.raw()).unwrap();
        // It has the first one's stream cache, if no other test took that.
        pairs(4 * KIB, &allocator, second.raw(), 2);
        first.destroy();
        let third = RawStream::new(rig);
        assert_eq!(third.raw() as usize, handle, "handles are used again");
        let ptr = allocator.raw_allocate(4 * KIB, third.raw()).unwrap();
        let owner = allocator.block_of(ptr).unwrap().stream;
        assert_eq!(owner, Some(third.borrowed().id().unwrap()));
        allocator.raw_free(ptr).unwrap();
        third.retire(&allocator);
        second.retire(&allocator);
    });
}

#[test]
fn an_adopted_stream_is_marked_when_its_memory_is_requested() {
    for (adopted, captures) in [(false, true), (true, true), (true, false)] {
        only(Policy::Packed, |rig| {
            let allocator = rig.checked_with(Config::new().captures(captures));
            let (stream, other) = (RawStream::new(rig), rig.stream());
            drop(allocator.allocate(KIB, &other).unwrap());
            let ptr = allocator.raw_allocate(512 * KIB, stream.raw()).unwrap();
            if adopted {
                allocator.raw_adopt(stream.raw()).unwrap();
                allocator.raw_adopt(stream.raw()).unwrap();
            }
            // The other stream is queried or marked here, and not from then on.
            allocator.trim(0).unwrap();
            let asked = rig.calls("cuStreamQuery");
            allocator.raw_free(ptr).unwrap();
            allocator.trim(0).unwrap();
            let trimmed = allocator.trim(0).unwrap();
            assert_eq!(trimmed.pending == 0, adopted);
            assert_eq!(rig.calls("cuStreamQuery") > asked, adopted && !captures);
            stream.retire(&allocator);
        });
    }
}

/// Memory of an adopted stream goes to another one only behind its work.
#[test]
fn r34_memory_of_an_adopted_stream_waits_for_its_work() {
    each_simulated(|rig, sim| {
        for bytes in [32 * KIB, 12 * MIB] {
            let allocator = rig.checked_limit(16 * MIB);
            let (stream, other) = (RawStream::new(rig), rig.stream());
            allocator.raw_adopt(stream.raw()).unwrap();
            sim.set_mode(Mode::Manual);
            let ptr = allocator.raw_allocate(bytes, stream.raw()).unwrap();
            rig.stamp(ptr, bytes, 1, &stream.borrowed());
            allocator.raw_free(ptr).unwrap();
            let block = allocator.allocate(12 * MIB, &other).unwrap();
            rig.stamp(block.ptr(), 12 * MIB, 2, &other);
            sim.complete_all();
            sim.set_mode(Mode::Instant);
            drop(block);
            stream.retire(&allocator);
        }
    });
}

/// A close waits for what was freed on an adopted stream, not for the whole context.
#[test]
fn a_close_waits_for_adopted_streams_alone() {
    each_simulated(|rig, sim| {
        let allocator = rig.allocator();
        let stream = RawStream::new(rig);
        allocator.raw_adopt(stream.raw()).unwrap();
        sim.set_mode(Mode::Manual);
        let ptr = allocator.raw_allocate(2 * MIB, stream.raw()).unwrap();
        rig.stamp(ptr, 2 * MIB, 1, &stream.borrowed());
        allocator.raw_free(ptr).unwrap();
        let waits = rig.calls("cuCtxSynchronize");
        rig.close(&allocator);
        assert_eq!(rig.calls("cuCtxSynchronize"), waits);
        sim.set_mode(Mode::Instant);
    });
}

/// Streams that can be adopted: those of the allocator's own context that are the same on each thread.
#[test]
fn streams_that_cannot_be_adopted_are_refused() {
    each_simulated(|rig, sim| {
        let allocator = rig.checked_with(Config::new().context_checks(false));
        let raw = sim.create_context(0).unwrap();
        // SAFETY: it lives as long as the simulator.
        let other = unsafe { Context::from_raw(&rig.driver, raw) }.unwrap();
        let theirs = Stream::new(&other).unwrap();
        let own = rig.stream();
        let special = std::ptr::without_provenance_mut;
        for stream in [special(0), special(1), own.raw()] {
            allocator.raw_adopt(stream).unwrap();
        }
        let refused = allocator.raw_adopt(special(2));
        assert_matches!(refused, Err(Error::NotSupported { .. }));
        let refused = allocator.raw_adopt(theirs.raw());
        assert_matches!(refused, Err(Error::WrongContext { current, .. }) if current == raw as usize);
        let refused = allocator.retire(&theirs);
        assert_matches!(refused, Err(Error::Stream(StreamMisuse::Unknown { .. })));
    });
}
