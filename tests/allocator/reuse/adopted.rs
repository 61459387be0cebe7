//! Streams of others that are adopted: kept on the caller's word that their handles live until they are retired.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::common::*;
use cualloc::Error;
use cualloc::allocator::{Allocator, Config, Policy};
use cualloc::driver::{Context, Stream, sys};
use cualloc::error::StreamMisuse;
use cualloc::sim::{Mode, Simulator};

/// Allocates so many bytes by the handle and frees them at once, so many times.
fn pairs(bytes: usize, allocator: &Allocator, stream: sys::CUstream, count: usize) {
    for _ in 0..count {
        // SAFETY: the callers' streams are alive, and nothing uses the memory.
        unsafe {
            let ptr = allocator.allocate_raw(bytes, stream).unwrap();
            allocator.free_raw(ptr).unwrap();
        }
    }
}

/// Calls of the driver in `act`, questions that nobody else counts among them.
fn calls_of(sim: &Simulator, act: impl FnOnce()) -> u64 {
    let calls = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&calls);
    sim.before(move |_| {
        counter.fetch_add(1, Ordering::Relaxed);
    });
    act();
    sim.clear_hooks();
    calls.load(Ordering::Relaxed)
}

/// Calls by an adopted handle ask nobody which stream it is, on each thread from its first one on; those by
/// the handle of the next stream do, whatever its value.
#[test]
fn r25_an_adopted_handle_is_not_asked_for_until_it_is_retired() {
    for bytes in [4 * KIB, 4 * MIB] {
        only_simulated(Policy::Packed, |rig, sim| {
            let allocator = rig.checked();
            let stream = RawStream::new(rig);
            let raw = stream.raw();
            let id = stream.borrowed().id().unwrap();
            pairs(bytes, &allocator, raw, 2);
            let here = || pairs(bytes, &allocator, raw, 8);
            assert!(calls_of(sim, here) > 0);
            // SAFETY: it is alive until it is retired.
            unsafe { allocator.adopt_raw(raw) }.unwrap();
            pairs(bytes, &allocator, raw, 1);
            let handle = raw as usize;
            let there = || {
                pairs(
                    bytes,
                    &allocator,
                    std::ptr::without_provenance_mut(handle),
                    1,
                );
                calls_of(sim, || {
                    pairs(
                        bytes,
                        &allocator,
                        std::ptr::without_provenance_mut(handle),
                        8,
                    );
                })
            };
            let there = std::thread::scope(|scope| scope.spawn(there).join().unwrap());
            // A capture of another test in this process may be looked out for.
            let asks = [calls_of(sim, here), there];
            assert!(asks.iter().all(|calls| *calls <= 16), "{asks:?}");
            // Its stream cache stays with it.
            // SAFETY: the stream is alive, and nothing uses the memory.
            let kept = unsafe { allocator.allocate_raw(4 * KIB, raw) }.unwrap();
            // SAFETY: as above, and nobody uses it any more.
            unsafe { allocator.retire_raw(raw) }.unwrap();
            // What the thread remembers by the first one's handle may serve this one now.
            let second = RawStream::new(rig);
            // SAFETY: as above.
            unsafe { allocator.adopt_raw(second.raw()) }.unwrap();
            pairs(bytes, &allocator, second.raw(), 2);
            stream.destroy();
            let others: Vec<RawStream> = (0..8).map(|_| RawStream::new(rig)).collect();
            for other in &others {
                // SAFETY: the stream is alive, and nothing uses the memory.
                unsafe {
                    let ptr = allocator.allocate_raw(bytes, other.raw()).unwrap();
                    let owner = allocator.block_of(ptr).unwrap().stream;
                    assert_eq!(owner, Some(other.borrowed().id().unwrap()));
                    assert_ne!(owner, Some(id));
                    allocator.free_raw(ptr).unwrap();
                    allocator.retire_raw(other.raw()).unwrap();
                }
            }
            // SAFETY: as above.
            unsafe {
                allocator.free_raw(kept).unwrap();
                allocator.retire_raw(second.raw()).unwrap();
            }
            others
                .into_iter()
                .chain([second])
                .for_each(RawStream::destroy);
        });
    }
}

/// What was freed on an adopted stream gets its marker in calls that do not name it. It is asked whether it is
/// idle only where the program promises that nothing is captured.
#[test]
fn r25_a_handle_does_not_find_the_stream_cache_that_serves_another_stream_by_now() {
    only_simulated(Policy::Packed, |rig, _| {
        let allocator = rig.checked();
        let [first, second] = [(); 2].map(|()| RawStream::new(rig));
        let handle = first.raw() as usize;
        // SAFETY: the streams are alive until they are retired.
        unsafe {
            allocator.adopt_raw(first.raw()).unwrap();
            pairs(4 * KIB, &allocator, first.raw(), 2);
            allocator.retire_raw(first.raw()).unwrap();
            allocator.empty_cache().unwrap();
            allocator.adopt_raw(second.raw()).unwrap();
        }
        // It has the first one's stream cache, if no other test took that.
        pairs(4 * KIB, &allocator, second.raw(), 2);
        first.destroy();
        let third = RawStream::new(rig);
        assert_eq!(third.raw() as usize, handle, "handles are used again");
        // SAFETY: the stream is alive, and nothing uses the memory.
        unsafe {
            let ptr = allocator.allocate_raw(4 * KIB, third.raw()).unwrap();
            let owner = allocator.block_of(ptr).unwrap().stream;
            assert_eq!(owner, Some(third.borrowed().id().unwrap()));
            allocator.free_raw(ptr).unwrap();
            allocator.retire_raw(third.raw()).unwrap();
            allocator.retire_raw(second.raw()).unwrap();
        }
        [third, second].into_iter().for_each(RawStream::destroy);
    });
}

#[test]
fn an_adopted_stream_is_marked_when_somebody_asks_for_its_memory() {
    for (adopted, captures) in [(false, true), (true, true), (true, false)] {
        only(Policy::Packed, |rig| {
            let allocator = rig.checked_with(Config::new().captures(captures));
            let (stream, other) = (RawStream::new(rig), rig.stream());
            drop(allocator.allocate(KIB, &other).unwrap());
            // SAFETY: the stream is alive until it is retired.
            let ptr = unsafe {
                let ptr = allocator.allocate_raw(512 * KIB, stream.raw()).unwrap();
                if adopted {
                    allocator.adopt_raw(stream.raw()).unwrap();
                    allocator.adopt_raw(stream.raw()).unwrap();
                }
                ptr
            };
            // The other stream is asked here, or marked, and no more from then on.
            allocator.trim(0).unwrap();
            let asked = rig.calls("cuStreamQuery");
            // SAFETY: nothing uses the memory.
            unsafe { allocator.free_raw(ptr) }.unwrap();
            allocator.trim(0).unwrap();
            let trimmed = allocator.trim(0).unwrap();
            assert_eq!(trimmed.pending == 0, adopted);
            assert_eq!(rig.calls("cuStreamQuery") > asked, adopted && !captures);
            // SAFETY: as above.
            unsafe { allocator.retire_raw(stream.raw()) }.unwrap();
            stream.destroy();
        });
    }
}

/// Memory of an adopted stream goes to another one only behind its work.
#[test]
fn r34_memory_of_an_adopted_stream_waits_for_its_work() {
    each_simulated(|rig, sim| {
        for bytes in [32 * KIB, 12 * MIB] {
            let allocator = rig.checked_limit(16 * MIB as u64 as usize);
            let (stream, other) = (RawStream::new(rig), rig.stream());
            // SAFETY: the stream is alive until it is retired.
            unsafe { allocator.adopt_raw(stream.raw()) }.unwrap();
            sim.set_mode(Mode::Manual);
            // SAFETY: as above; what uses the memory was submitted before its free.
            unsafe {
                let ptr = allocator.allocate_raw(bytes, stream.raw()).unwrap();
                rig.stamp(ptr, bytes, 1, &stream.borrowed());
                allocator.free_raw(ptr).unwrap();
            }
            let block = allocator.allocate(12 * MIB, &other).unwrap();
            rig.stamp(block.ptr(), 12 * MIB, 2, &other);
            sim.complete_all();
            sim.set_mode(Mode::Instant);
            rig.assert_clean();
            drop(block);
            // SAFETY: as above.
            unsafe { allocator.retire_raw(stream.raw()) }.unwrap();
            stream.destroy();
        }
    });
}

/// What can be adopted: streams of the allocator's own context that are the same on each thread.
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
        // SAFETY: all are alive.
        unsafe {
            for stream in [special(0), special(1), own.raw()] {
                allocator.adopt_raw(stream).unwrap();
            }
            let refused = allocator.adopt_raw(special(2));
            assert_matches!(refused, Err(Error::NotSupported { .. }));
            let refused = allocator.adopt_raw(theirs.raw());
            assert_matches!(refused, Err(Error::WrongContext { current, .. }) if current == raw as usize);
        }
        assert_matches!(
            allocator.retire(&theirs),
            Err(Error::Stream(StreamMisuse::Unknown { .. }))
        );
    });
}
