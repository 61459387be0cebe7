//! Streams that are created and destroyed, and handles that do not identify a stream.

use std::sync::mpsc;

use super::two_devices;
use crate::common::prelude::*;

const PER_THREAD: sys::CUstream = 2 as sys::CUstream;

/// R24: a stream that is destroyed after frees on it leaves memory for others, and its handle is
/// not used again.
#[test]
fn r24_destroyed_streams_leave_their_memory() {
    each(|rig| {
        for (bytes, retire) in [
            (12 * MIB, true),
            (12 * MIB, false),
            (KIB, true),
            (KIB, false),
        ] {
            // Classic: one segment. Packed: as much.
            let limit = if bytes > MIB { bytes } else { 2 * MIB };
            let (allocator, [a]) = rig.scene_limit(limit);
            let gone = RawStream::new(rig);
            let mut freed = Vec::new();
            while let Ok(ptr) = allocator.raw_allocate(bytes, gone.raw()) {
                freed.push(ptr);
            }
            assert!(freed.len() == limit / bytes, "{}", freed.len());
            let borrowed = gone.borrowed();
            rig.stamp(freed[0], bytes, 1, &borrowed);
            for ptr in freed {
                allocator.raw_free(ptr).unwrap();
            }
            if retire {
                allocator.raw_retire(gone.raw()).unwrap();
            }
            gone.destroy();
            let mine = allocator.allocate_blocks(limit / bytes, bytes, &a);
            for block in &mine {
                rig.stamp(block.ptr(), bytes, 2, &a);
            }
            let stats = allocator.stats();
            assert_eq!(stats.all.reserved.peak, limit as u64);
            if retire {
                assert_eq!(stats.reclaim.synchronised, 0, "a marker was there");
            }
        }
    });
}

/// Streams that the program has dropped are retired when others come.
#[test]
fn r24_dropped_streams_are_forgotten() {
    each(|rig| {
        let (allocator, [_a]) = rig.scene();
        let held = rig.maybe_sim().map(|sim| sim.leaks().streams);
        for bytes in [KIB, 12 * MIB] {
            for _ in 0..50 {
                drop(allocator.allocate(bytes, &rig.stream()).unwrap());
            }
        }
        let known = allocator.stats().streams;
        assert!(known <= 8, "{known} streams are known");
        let kept = rig.maybe_sim().map(|sim| sim.leaks().streams);
        assert!(kept.zip(held).is_none_or(|(kept, held)| kept <= held + 8));
    });
}

/// R24: the last marker of a stream covers no work that the stream gets after it.
#[test]
fn r24_a_retired_stream_that_is_used_again_is_a_new_one() {
    each(|rig| {
        for bytes in [4 * KIB, 12 * MIB] {
            let (allocator, [a, b]) = rig.scene();
            // Memory stays with the retired stream because of this one.
            let kept = allocator.allocate(bytes, &a).unwrap();
            drop(allocator.allocate(bytes, &a).unwrap());
            allocator.retire(&a).unwrap();
            a.synchronize().unwrap();
            let hold = rig.hold(&a);
            let late = allocator.allocate(bytes, &a).unwrap();
            let (start, end) = (late.ptr(), late.ptr() + late.size());
            rig.stamp(start, bytes, 1, &a);
            drop((late, kept));
            let other = allocator.allocate(2 * bytes, &b).unwrap();
            rig.stamp(other.ptr(), 2 * bytes, 2, &b);
            if other.ptr() < end && start < other.ptr() + other.size() {
                assert!(!b.is_complete().unwrap(), "the same memory without a wait");
            }
            hold.release();
            assert_eq!(rig.mismatches(other.ptr(), 2 * bytes, 2, &b), 0);
        }
    });
}

/// R25: a new stream with the handle of an old one does not inherit its order.
#[test]
fn r25_new_stream_with_an_old_handle_is_a_new_stream() {
    each(|rig| {
        const BLOCK: usize = 12 * MIB;
        let allocator = rig.checked();
        let old = RawStream::new(rig);
        let handle = old.raw();
        let held = old.borrowed();
        let ptr = allocator.raw_allocate(BLOCK, handle).unwrap();
        let hold = rig.hold(&held);
        rig.stamp(ptr, BLOCK, 1, &held);
        allocator.raw_free(ptr).unwrap();
        allocator.raw_retire(handle).unwrap();
        drop(held);
        old.destroy();
        let new = RawStream::new(rig);
        if new.raw() != handle {
            assert!(on_cuda(), "the simulator gives handles again");
            eprintln!("SKIPPED: the driver gave another handle");
            hold.release();
        } else {
            let again = allocator.raw_allocate(BLOCK, new.raw()).unwrap();
            let stream = new.borrowed();
            rig.stamp(again, BLOCK, 2, &stream);
            if again == ptr {
                assert!(!stream.is_complete().unwrap());
            }
            hold.release();
            assert_eq!(rig.mismatches(again, BLOCK, 2, &stream), 0);
            allocator.raw_free(again).unwrap();
            allocator.raw_retire(new.raw()).unwrap();
        }
        new.destroy();
    });
}

/// R26: the per-thread default streams of two threads are two streams.
#[test]
fn r26_per_thread_streams_are_distinguished() {
    each(|rig| {
        for bytes in [4 * KIB, 12 * MIB] {
            let allocator = rig.checked();
            let mine = Stream::per_thread(&rig.context);
            let ptr = allocator.raw_allocate(bytes, PER_THREAD).unwrap();
            let hold = rig.hold(&mine);
            rig.stamp(ptr, bytes, 1, &mine);
            allocator.raw_free(ptr).unwrap();
            let (other, done) = std::thread::scope(|scope| {
                let thread = scope.spawn(|| {
                    let context = allocator.context().clone();
                    let stream = Stream::per_thread(&context);
                    let ptr = allocator.raw_allocate(bytes, PER_THREAD).unwrap();
                    let entered = context.enter().unwrap();
                    // SAFETY: as above.
                    unsafe { entered.memset_d32(ptr, 2, bytes / 4, PER_THREAD) }.unwrap();
                    let done = stream.is_complete().unwrap();
                    allocator.raw_free(ptr).unwrap();
                    (ptr, done)
                });
                thread.join().unwrap()
            });
            assert!(other != ptr || !done, "the same address without a wait");
            let waits = allocator.stats().stream_waits;
            let again = allocator.raw_allocate(bytes, PER_THREAD).unwrap();
            // Memory used by the other thread may be complete now, and at a lower address.
            assert!(again == ptr || again == other, "{bytes}: new memory");
            let stats = allocator.stats();
            assert_eq!(stats.stream_waits, waits, "the own stream needs no wait");
            allocator.raw_free(again).unwrap();
            hold.release();
        }
    });
}

/// R27: markers on the per-thread default stream are of the allocator's device, whatever context
/// is current.
#[test]
fn r27_per_thread_markers_belong_to_the_right_device() {
    two_devices(|rig, second| {
        const BLOCK: usize = 12 * MIB;
        let config = Config::new().policy(rig.policy).context_checks(false);
        let allocator = Allocator::with_config(second, config).unwrap();
        let other = Stream::new(second).unwrap();
        drop(allocator.allocate(512, &other).unwrap());
        let first = rig.context.enter().unwrap();
        let ptrs = [0, 1].map(|_| allocator.raw_allocate(BLOCK, PER_THREAD).unwrap());
        for ptr in ptrs {
            allocator.raw_free(ptr).unwrap();
        }
        let stats = allocator.stats();
        assert!(stats.markers > 0, "nothing was recorded");
        assert_eq!(stats.failed_markers, 0);
        // SAFETY: its owner keeps it meanwhile.
        let current = unsafe { Context::current(&rig.driver) }.unwrap().unwrap();
        assert_eq!(
            current.raw(),
            rig.context.raw(),
            "the caller's context stays"
        );
        drop(first);
        let taken = allocator.allocate(BLOCK, &other).unwrap();
        drop(taken);
        allocator.close().unwrap();
    });
}

/// R35: streams that are created and destroyed leave nothing behind.
#[test]
fn r35_one_shot_streams_stay_flat() {
    only(Policy::Packed, |rig| {
        const BLOCK: usize = 2 * GIB;
        let allocator = rig.checked();
        for round in 0..60 {
            let stream = rig.stream();
            let block = allocator.allocate(BLOCK, &stream).unwrap();
            let small = allocator.allocate(KIB, &stream).unwrap();
            rig.stamp(block.ptr(), MIB, round, &stream);
            drop((block, small));
            stream.synchronize().unwrap();
        }
        let stats = allocator.stats();
        assert_eq!(stats.large.reserved.peak, BLOCK as u64);
        // A page a stream at most, until the stream is forgotten.
        assert!(stats.small.reserved.peak <= 4 * MIB as u64);
        assert!(stats.streams < 5, "{} streams are known", stats.streams);
    });
}

/// Ends the allocator's use of a foreign owner's stream on another thread while this one, in the free of a
/// block of it, is in the driver's `call`; the stream may be destroyed when the end has returned.
fn ends_behind_the_free(
    call: &'static str,
    config: Config,
    end: fn(&Allocator, &Stream) -> Result<(), Error>,
) {
    let Some(rig) = Rig::with_interludes(Policy::Packed) else {
        return;
    };
    let allocator = rig.allocator_with(config);
    // With a second stream, a free gets a marker immediately.
    let second = rig.stream();
    drop(allocator.allocate(KIB, &second).unwrap());
    let foreign = RawStream::new(&rig);
    let block = allocator.allocate(4 * MIB, &foreign.borrowed()).unwrap();
    let ended = Arc::new(AtomicBool::new(false));
    let ending = Arc::new(Mutex::new(None));
    let (other, stream) = (allocator.clone(), foreign.borrowed());
    let (flag, thread) = (Arc::clone(&ended), Arc::clone(&ending));
    let too_early = Arc::new(AtomicBool::new(false));
    let early = Arc::clone(&too_early);
    interlude::after(call, move || {
        let (begun, begins) = mpsc::channel();
        let done = Arc::clone(&flag);
        *thread.lock().unwrap() = Some(std::thread::spawn(move || {
            begun.send(()).unwrap();
            end(&other, &stream).unwrap();
            done.store(true, Ordering::SeqCst);
        }));
        begins.recv().unwrap();
        // Its work takes moments, unless it waits for this thread.
        for _ in 0..20_000 {
            std::thread::yield_now();
        }
        early.store(flag.load(Ordering::SeqCst), Ordering::SeqCst);
    });
    drop(block);
    assert!(!interlude::is_due(), "{call} was not called");
    let ending = ending.lock().unwrap().take().unwrap();
    ending.join().unwrap();
    assert!(ended.load(Ordering::SeqCst));
    assert!(!too_early.load(Ordering::SeqCst), "the stream was in use");
    foreign.destroy();
    drop(allocator);
    rig.assert_clean();
}

/// The driver calls of a free on its stream: under a debug mode a capture query and a wait.
#[test]
fn r24_a_retirement_waits_for_a_free_that_uses_the_stream() {
    let close = |allocator: &Allocator, _: &Stream| allocator.close();
    ends_behind_the_free("cuEventRecord", Config::new(), close);
    ends_behind_the_free("cuEventRecord", Config::new(), Allocator::retire);
    let checked = Config::new().capture_checks(true);
    ends_behind_the_free("cuStreamIsCapturing", checked, Allocator::retire);
    for modes in ["guard", "poison", "quarantine:1M", "leaks"] {
        for call in ["cuStreamIsCapturing", "cuStreamSynchronize"] {
            let config = format!("debug={modes}").parse().unwrap();
            ends_behind_the_free(call, config, Allocator::retire);
        }
    }
}
