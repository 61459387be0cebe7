//! When freed memory is handed out again: on its own stream at once, on others in order.
#![cfg(feature = "sim")]

mod common;

use std::sync::{Mutex, PoisonError};

use common::*;
use cualloc::allocator::{Allocator, Config, Error, Policy};
use cualloc::driver::{Context, Driver, Stream, sys};
use cualloc::sim::{Mode, SimConfig, Simulator};

const PER_THREAD: sys::CUstream = 2 as sys::CUstream;

fn waits(rig: &Rig) -> u64 {
    rig.calls("cuStreamWaitEvent")
}

/// S1.40, S1.46: what another stream may still use is not handed out.
#[test]
fn s1_40_s1_46_recorded_block_is_not_reused_while_the_stream_runs() {
    each(|rig| {
        for bytes in [4 * KIB, 4 * MIB] {
            let allocator = rig.allocator();
            let [a, b] = rig.streams();
            let block = allocator.allocate(bytes, &a).unwrap();
            let ptr = block.ptr();
            rig.stamp(ptr, bytes, 1, &a);
            a.synchronize().unwrap();
            let hold = rig.hold(&b);
            block.record_stream(&b).unwrap();
            rig.stamp(ptr, bytes, 2, &b);
            drop(block);
            let other = allocator.allocate(bytes, &a).unwrap();
            rig.stamp(other.ptr(), bytes, 3, &a);
            if other.ptr() == ptr {
                assert!(!a.is_complete().unwrap(), "the same address without a wait");
            }
            hold.release();
            assert_eq!(rig.mismatches(other.ptr(), bytes, 3, &a), 0);
            drop(other);
            // Now nobody uses it any more.
            b.synchronize().unwrap();
            allocator.synchronize().unwrap();
            let again = allocator.allocate(bytes, &a).unwrap();
            rig.stamp(again.ptr(), bytes, 4, &a);
            a.synchronize().unwrap();
            drop(again);
            rig.close(&allocator);
        }
    });
}

/// S1.37: the second allocation of a size asks nothing of the driver.
#[test]
fn s1_37_reuse_makes_no_driver_call_for_memory() {
    each(|rig| {
        let allocator = rig.allocator();
        let stream = rig.stream();
        for bytes in [100, 4 * KIB, MIB, 3 * MIB, 40 * MIB] {
            let first = allocator.allocate(bytes, &stream).unwrap();
            let ptr = first.ptr();
            drop(first);
            let before = rig.memory_calls();
            assert!(before > 0, "memory comes from the driver");
            let hits = allocator.stats().hits;
            let second = allocator.allocate(bytes, &stream).unwrap();
            assert_eq!(rig.memory_calls(), before, "{bytes}");
            assert_eq!(allocator.stats().hits, hits + 1);
            assert_eq!(second.ptr(), ptr);
        }
        rig.close(&allocator);
    });
}

/// R5: uses on a side stream do not add up to an out-of-memory.
#[test]
fn r5_side_stream_uses_never_run_out() {
    each(|rig| {
        const BLOCK: usize = 160 * MIB;
        let allocator = rig.limited(GIB);
        let [main, side] = rig.streams();
        if let Some(sim) = rig.maybe_sim() {
            sim.set_mode(Mode::Lag(9));
        }
        for round in 0..100 {
            let block = allocator.allocate(BLOCK, &main).unwrap();
            rig.stamp(block.ptr(), BLOCK, round, &main);
            let event = rig.context.enter().unwrap().create_event().unwrap();
            main.record(&event).unwrap();
            side.wait_event(&event).unwrap();
            rig.stamp(block.ptr(), BLOCK, round + 1, &side);
            block.record_stream(&side).unwrap();
            drop(block);
            if let Some(sim) = rig.maybe_sim() {
                sim.advance_row();
            }
        }
        assert_eq!(allocator.stats().ooms, 0);
        rig.close(&allocator);
    });
}

/// R6: a request that one freed block satisfies waits for the uses of that block only.
#[test]
fn r6_waits_for_one_block_not_for_all() {
    each(|rig| {
        const BLOCK: usize = 12 * MIB;
        let allocator = rig.limited(3 * BLOCK);
        let a = rig.stream();
        let users: [Stream; 3] = rig.streams();
        let blocks = users
            .each_ref()
            .map(|_| allocator.allocate(BLOCK, &a).unwrap());
        let mut holds = Vec::new();
        for (user, block) in users.iter().zip(&blocks) {
            holds.push(rig.hold(user));
            rig.stamp(block.ptr(), BLOCK, 7, user);
            block.record_stream(user).unwrap();
        }
        drop(blocks);
        let block = allocator.allocate(BLOCK, &a).unwrap();
        rig.stamp(block.ptr(), BLOCK, 8, &a);
        assert!(!a.is_complete().unwrap(), "the block needs a wait");
        holds.remove(0).release();
        rig.settle(&users[0]);
        rig.settle(&a);
        assert!(!users[1].is_complete().unwrap() && !users[2].is_complete().unwrap());
        assert_eq!(allocator.stats().rungs.host_waits, 0);
        drop(holds);
        drop(block);
        rig.close(&allocator);
    });
}

/// R21: memory that a request merged out of pending pieces keeps every piece's uses.
#[test]
fn r21_merged_memory_keeps_the_uses_of_its_parts() {
    each(|rig| {
        const BLOCK: usize = 12 * MIB;
        let allocator = rig.limited(2 * BLOCK);
        let [a, b, c] = rig.streams();
        let x = allocator.allocate(BLOCK, &a).unwrap();
        let y = allocator.allocate(BLOCK, &b).unwrap();
        let hold = rig.busy(&a);
        rig.stamp(x.ptr(), BLOCK, 1, &a);
        drop((x, y));
        // Packed: only both together hold this. Classic segments do not merge.
        let big = if rig.packed() { 2 * BLOCK } else { BLOCK };
        let merged = allocator.allocate(big, &b).unwrap();
        drop(merged);
        let mine: Vec<_> = (0..2)
            .map(|_| allocator.allocate(BLOCK, &c).unwrap())
            .collect();
        for block in &mine {
            rig.stamp(block.ptr(), BLOCK, 3, &c);
        }
        hold.release();
        a.synchronize().unwrap();
        for block in &mine {
            assert_eq!(rig.mismatches(block.ptr(), BLOCK, 3, &c), 0);
        }
        drop(mine);
        rig.close(&allocator);
    });
}

/// R22: taking over what is complete adds no wait.
#[test]
fn r22_complete_blocks_are_taken_without_a_wait() {
    each(|rig| {
        const BLOCK: usize = 12 * MIB;
        let allocator = rig.allocator();
        let [a, b] = rig.streams();
        drop(allocator.allocate(512, &a).unwrap());
        let block = allocator.allocate(BLOCK, &b).unwrap();
        let ptr = block.ptr();
        rig.stamp(ptr, BLOCK, 1, &b);
        drop(block);
        b.synchronize().unwrap();
        let before = waits(rig);
        let taken = allocator.allocate(BLOCK, &a).unwrap();
        assert_eq!(taken.ptr(), ptr);
        assert_eq!(waits(rig), before);
        assert_eq!(allocator.stats().stream_waits, 0);
        rig.stamp(ptr, BLOCK, 2, &a);
        drop(taken);
        rig.close(&allocator);
    });
}

type EventRecord = unsafe extern "C" fn(sys::CUevent, sys::CUstream) -> sys::CUresult;
type Interlude = Box<dyn FnOnce() + Send>;

/// The driver's own function, and what to do once right after a call of it.
static RECORD: Mutex<(Option<EventRecord>, Option<Interlude>)> = Mutex::new((None, None));

unsafe extern "C" fn record_then(event: sys::CUevent, stream: sys::CUstream) -> sys::CUresult {
    let (real, interlude) = {
        let mut hook = RECORD.lock().unwrap_or_else(PoisonError::into_inner);
        (hook.0.unwrap(), hook.1.take())
    };
    // SAFETY: the caller's arguments.
    let code = unsafe { real(event, stream) };
    if let Some(interlude) = interlude {
        interlude();
    }
    code
}

/// R23: a block freed while a marker is being recorded is not covered by that marker.
#[test]
fn r23_marker_covers_no_free_that_came_after_its_record() {
    if on_cuda() {
        return eprintln!("SKIPPED on cuda: needs the simulator");
    }
    const BLOCK: usize = 12 * MIB;
    for policy in [Policy::Packed, Policy::Classic] {
        let sim = Simulator::new(SimConfig::with_devices(1, 8 << 30)).unwrap();
        let mut functions = sim.functions();
        RECORD.lock().unwrap().0 = functions.cuEventRecord;
        functions.cuEventRecord = Some(record_then);
        // SAFETY: the simulator's functions, and one around one of them.
        let driver = unsafe { Driver::from_functions(functions) }.unwrap();
        let context = Context::primary(&driver, driver.device(0).unwrap()).unwrap();
        let config = Config::new().policy(policy);
        let allocator = Allocator::with_config(&context, config).unwrap();
        let [a, b] = [0, 1].map(|_| Stream::new(&context).unwrap());
        drop(allocator.allocate(512, &b).unwrap());
        let early = allocator.allocate(BLOCK, &a).unwrap();
        let late = allocator.allocate(BLOCK, &a).unwrap();
        let (early_ptr, late_ptr) = (early.ptr(), late.ptr());
        sim.set_mode(Mode::Manual);
        let (on, inside) = (a.clone(), context.clone());
        RECORD.lock().unwrap().1 = Some(Box::new(move || {
            let entered = inside.enter().unwrap();
            // SAFETY: the block is live.
            unsafe { entered.memset_d8(late.ptr(), 1, BLOCK, on.raw()) }.unwrap();
            drop(late);
        }));
        // Records a marker, during which the other block is used and freed.
        drop(early);
        assert!(RECORD.lock().unwrap().1.is_none(), "no marker was recorded");
        // The marker that was recorded first completes, the late use does not.
        assert_eq!(sim.complete_stream(a.id().unwrap(), 1), 1);
        let entered = context.enter().unwrap();
        let taken: Vec<_> = (0..2)
            .map(|_| {
                let block = allocator.allocate(BLOCK, &b).unwrap();
                // SAFETY: the block is live.
                unsafe { entered.memset_d8(block.ptr(), 2, BLOCK, b.raw()) }.unwrap();
                block
            })
            .collect();
        assert_eq!(
            taken[0].ptr(),
            early_ptr,
            "{policy:?}: covered and complete"
        );
        let reports = sim.reports();
        sim.complete_all();
        assert!(
            reports.is_empty() && sim.reports().is_empty(),
            "{:#?}",
            sim.reports()
        );
        // Either elsewhere, or behind a wait.
        assert!(taken[1].ptr() != late_ptr || driver.calls().get("cuStreamWaitEvent") > 0);
        drop(taken);
        sim.set_mode(Mode::Instant);
        allocator.close().unwrap();
    }
}

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
            let allocator = rig.limited(limit);
            let a = rig.stream();
            let gone = RawStream::new(rig);
            // SAFETY: the stream is alive, and retired before it is destroyed; or its memory is
            // what is tested.
            unsafe {
                let mut freed = Vec::new();
                while let Ok(ptr) = allocator.allocate_raw(bytes, gone.raw()) {
                    freed.push(ptr);
                }
                assert!(freed.len() == limit / bytes, "{}", freed.len());
                let borrowed = gone.borrowed();
                rig.stamp(freed[0], bytes, 1, &borrowed);
                for ptr in freed {
                    allocator.free_raw(ptr).unwrap();
                }
                if retire {
                    allocator.retire_raw(gone.raw()).unwrap();
                }
            }
            gone.destroy();
            let mut mine = Vec::new();
            for _ in 0..limit / bytes {
                let block = allocator.allocate(bytes, &a).unwrap();
                rig.stamp(block.ptr(), bytes, 2, &a);
                mine.push(block);
            }
            let stats = allocator.stats();
            assert_eq!(stats.all.reserved.peak, limit as u64);
            if retire {
                assert_eq!(stats.rungs.synchronised, 0, "a marker was there");
            }
            drop(mine);
            rig.assert_clean();
            rig.close(&allocator);
        }
    });
}

/// R25: a new stream under the handle of an old one has not its order.
#[test]
fn r25_new_stream_with_an_old_handle_is_a_new_stream() {
    each(|rig| {
        const BLOCK: usize = 12 * MIB;
        let allocator = rig.allocator();
        let old = RawStream::new(rig);
        let handle = old.raw();
        let held = old.borrowed();
        // SAFETY: alive, and retired before it is destroyed.
        let ptr = unsafe { allocator.allocate_raw(BLOCK, handle) }.unwrap();
        let hold = rig.hold(&held);
        rig.stamp(ptr, BLOCK, 1, &held);
        // SAFETY: as above; the block's only owner.
        unsafe {
            allocator.free_raw(ptr).unwrap();
            allocator.retire_raw(handle).unwrap();
        }
        drop(held);
        old.destroy();
        let new = RawStream::new(rig);
        if new.raw() != handle {
            assert!(on_cuda(), "the simulator gives handles again");
            eprintln!("SKIPPED: the driver gave another handle");
            hold.release();
        } else {
            // SAFETY: alive, and retired before it is destroyed.
            let again = unsafe { allocator.allocate_raw(BLOCK, new.raw()) }.unwrap();
            let stream = new.borrowed();
            rig.stamp(again, BLOCK, 2, &stream);
            if again == ptr {
                assert!(!stream.is_complete().unwrap());
            }
            hold.release();
            assert_eq!(rig.mismatches(again, BLOCK, 2, &stream), 0);
            // SAFETY: as above.
            unsafe {
                allocator.free_raw(again).unwrap();
                allocator.retire_raw(new.raw()).unwrap();
            }
        }
        new.destroy();
        rig.close(&allocator);
    });
}

/// R26: the per-thread default stream of two threads is two streams.
#[test]
fn r26_per_thread_streams_are_told_apart() {
    each(|rig| {
        for bytes in [4 * KIB, 12 * MIB] {
            let allocator = rig.allocator();
            let mine = Stream::per_thread_default(&rig.context).unwrap();
            // SAFETY: a special handle.
            let ptr = unsafe { allocator.allocate_raw(bytes, PER_THREAD) }.unwrap();
            let hold = rig.hold(&mine);
            rig.stamp(ptr, bytes, 1, &mine);
            // SAFETY: the block's only owner.
            unsafe { allocator.free_raw(ptr) }.unwrap();
            let (other, done) = std::thread::scope(|scope| {
                let thread = scope.spawn(|| {
                    let context = allocator.context().clone();
                    let stream = Stream::per_thread_default(&context).unwrap();
                    // SAFETY: a special handle; the block is live.
                    let ptr = unsafe { allocator.allocate_raw(bytes, PER_THREAD) }.unwrap();
                    let entered = context.enter().unwrap();
                    // SAFETY: as above.
                    unsafe { entered.memset_d32(ptr, 2, bytes / 4, PER_THREAD) }.unwrap();
                    let done = stream.is_complete().unwrap();
                    // SAFETY: as above.
                    unsafe { allocator.free_raw(ptr) }.unwrap();
                    (ptr, done)
                });
                thread.join().unwrap()
            });
            assert!(other != ptr || !done, "the same address without a wait");
            // SAFETY: a special handle.
            let again = unsafe { allocator.allocate_raw(bytes, PER_THREAD) }.unwrap();
            assert_eq!(again, ptr, "the own stream needs no wait");
            // SAFETY: the block's only owner.
            unsafe { allocator.free_raw(again) }.unwrap();
            hold.release();
            rig.close(&allocator);
        }
    });
}

/// Two devices, or a word about it.
fn two_devices(test: impl Fn(&Rig, &Context)) {
    for policy in [Policy::Packed, Policy::Classic] {
        only_on(policy, SimConfig::with_devices(2, 8 << 30), |rig| {
            if rig.driver.device_count().unwrap() < 2 {
                return eprintln!("SKIPPED: needs two devices");
            }
            let second = rig.driver.device(1).unwrap();
            test(rig, &Context::primary(&rig.driver, second).unwrap());
        });
    }
}

/// R27: markers on the per-thread default stream are of the allocator's device, whatever context
/// is current.
#[test]
fn r27_per_thread_markers_belong_to_the_right_device() {
    two_devices(|rig, second| {
        const BLOCK: usize = 12 * MIB;
        let config = Config::new().policy(rig.policy);
        let allocator = Allocator::with_config(second, config).unwrap();
        let other = Stream::new(second).unwrap();
        drop(allocator.allocate(512, &other).unwrap());
        let first = rig.context.enter().unwrap();
        let ptrs = [0, 1].map(|_| {
            // SAFETY: a special handle.
            unsafe { allocator.allocate_raw(BLOCK, PER_THREAD) }.unwrap()
        });
        for ptr in ptrs {
            // SAFETY: the block's only owner.
            unsafe { allocator.free_raw(ptr) }.unwrap();
        }
        let stats = allocator.stats();
        assert!(stats.markers > 0, "nothing was recorded");
        assert_eq!(stats.failed_markers, 0);
        let current = Context::current(&rig.driver).unwrap().unwrap();
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

/// R28: what is complete on one stream is reused although an older use of another is not.
#[test]
fn r28_slow_stream_does_not_delay_others() {
    each(|rig| {
        const BLOCK: usize = 12 * MIB;
        let allocator = rig.limited(4 * BLOCK);
        let [slow, quick, c] = rig.streams();
        let [s1, s2] = [0, 1].map(|_| allocator.allocate(BLOCK, &slow).unwrap());
        let [q1, q2] = [0, 1].map(|_| allocator.allocate(BLOCK, &quick).unwrap());
        let mut expected = [q1.ptr(), q2.ptr()];
        expected.sort_unstable();
        let hold = rig.hold(&slow);
        for block in [&s1, &s2] {
            rig.stamp(block.ptr(), BLOCK, 1, &slow);
        }
        drop((s1, s2));
        for block in [&q1, &q2] {
            rig.stamp(block.ptr(), BLOCK, 2, &quick);
        }
        drop((q1, q2));
        rig.settle(&quick);
        let before = waits(rig);
        let blocks = [0, 1].map(|_| allocator.allocate(BLOCK, &c).unwrap());
        let mut found = blocks.each_ref().map(|b| b.ptr());
        found.sort_unstable();
        assert_eq!(found, expected);
        assert_eq!(waits(rig), before);
        assert_eq!(allocator.stats().rungs.host_waits, 0);
        rig.stamp(found[0], BLOCK, 3, &c);
        rig.settle(&c);
        hold.release();
        drop(blocks);
        rig.close(&allocator);
    });
}

/// R29: a use recorded through a pointer into a block is a use of the block.
#[test]
fn r29_uses_are_recorded_through_interior_pointers() {
    each(|rig| {
        for (bytes, inside) in [(4 * KIB, 1234), (12 * MIB, 7 * MIB + 3)] {
            let allocator = rig.allocator();
            let [a, b] = rig.streams();
            let block = allocator.allocate(bytes, &a).unwrap();
            let ptr = block.ptr();
            let hold = rig.hold(&b);
            rig.stamp(ptr, bytes, 1, &b);
            // SAFETY: the stream is alive.
            unsafe { allocator.record_stream_raw(ptr + inside as u64, b.raw()) }.unwrap();
            drop(block);
            let other = allocator.allocate(bytes, &a).unwrap();
            rig.stamp(other.ptr(), bytes, 2, &a);
            if other.ptr() == ptr {
                assert!(!a.is_complete().unwrap());
            }
            hold.release();
            assert_eq!(rig.mismatches(other.ptr(), bytes, 2, &a), 0);
            drop(other);
            rig.close(&allocator);
        }
    });
}

/// R30: a precise use ends where it was recorded, not at the free; and the peak is the same each
/// time.
#[test]
fn r30_precise_use_ends_at_its_record() {
    each(|rig| {
        const BLOCK: usize = 12 * MIB;
        let mut peaks = Vec::new();
        for _ in 0..2 {
            let allocator = rig.allocator();
            let [a, b] = rig.streams();
            let mut places = Vec::new();
            for round in 0..5 {
                let block = allocator.allocate(BLOCK, &a).unwrap();
                places.push(block.ptr());
                a.synchronize().unwrap();
                rig.stamp(block.ptr(), BLOCK, round, &b);
                block.record_use(&b).unwrap();
                b.synchronize().unwrap();
                // Work of the stream that has nothing to do with the block.
                let hold = rig.hold(&b);
                drop(block);
                let before = waits(rig);
                let again = allocator.allocate(BLOCK, &a).unwrap();
                assert_eq!(again.ptr(), places[0], "round {round}");
                assert_eq!(waits(rig), before);
                rig.stamp(again.ptr(), BLOCK, 9, &a);
                rig.settle(&a);
                hold.release();
                b.synchronize().unwrap();
            }
            peaks.push((allocator.stats().all.reserved.peak, places.len()));
            rig.close(&allocator);
        }
        assert_eq!(peaks[0], peaks[1]);
        assert_eq!(peaks[0].0, BLOCK as u64);
    });
}

/// R32: in steady state no event is created.
#[test]
fn r32_steady_state_creates_no_events() {
    each(|rig| {
        let allocator = rig.limited(200 * MIB);
        let streams: [Stream; 3] = rig.streams();
        if let Some(sim) = rig.maybe_sim() {
            sim.set_mode(Mode::Lag(4));
        }
        let round = |at: usize| {
            let (own, other) = (&streams[at % 3], &streams[(at + 1) % 3]);
            for bytes in [3 * KIB, 3 * MIB, 12 * MIB] {
                let block = allocator.allocate(bytes, own).unwrap();
                block.record_stream(other).unwrap();
                drop(block);
            }
            if let Some(sim) = rig.maybe_sim() {
                sim.advance_row();
            } else {
                own.synchronize().unwrap();
            }
        };
        (0..300).for_each(round);
        let (events, markers) = (rig.calls("cuEventCreate"), allocator.stats().markers);
        (0..1000).for_each(round);
        assert!(
            allocator.stats().markers > markers + 100,
            "markers are recorded"
        );
        assert_eq!(rig.calls("cuEventCreate"), events);
        rig.close(&allocator);
    });
}

/// R33: events are reused in the context that they were made in only.
#[test]
fn r33_event_pools_are_per_context() {
    two_devices(|rig, second| {
        const BLOCK: usize = 12 * MIB;
        let allocator = rig.allocator();
        let [a, b] = rig.streams();
        let foreign = Stream::new(second).unwrap();
        for round in 0..30 {
            let block = allocator.allocate(BLOCK, &a).unwrap();
            let first = if round % 2 == 0 { &foreign } else { &b };
            block.record_use(first).unwrap();
            block.record_stream(&foreign).unwrap();
            drop(block);
        }
        let stats = allocator.stats();
        assert!(stats.markers > 30);
        assert_eq!(stats.failed_markers, 0);
        assert!(
            rig.calls("cuEventCreate") < stats.markers,
            "events are reused"
        );
        rig.close(&allocator);
    });
}

/// R35: streams that come and go leave nothing behind.
#[test]
fn r35_one_shot_streams_stay_flat() {
    only(Policy::Packed, |rig| {
        const BLOCK: usize = 2 * GIB;
        let allocator = rig.allocator();
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
        rig.close(&allocator);
    });
}

/// R37: a writer waits for both of two concurrent readers.
#[test]
fn r37_writer_waits_for_all_readers() {
    each(|rig| {
        const BLOCK: usize = 12 * MIB;
        for first in [0, 1] {
            let allocator = rig.limited(BLOCK);
            let a = rig.stream();
            let readers: [Stream; 2] = rig.streams();
            let block = allocator.allocate(BLOCK, &a).unwrap();
            let mut holds = readers.each_ref().map(|r| Some(rig.hold(r)));
            for reader in &readers {
                rig.stamp(block.ptr(), 512, 1, reader);
                // Both only "read": order among them is the test's own affair.
                if let Some(sim) = rig.maybe_sim() {
                    sim.take_reports();
                }
                block.record_stream(reader).unwrap();
            }
            drop(block);
            let writer = allocator.allocate(BLOCK, &a).unwrap();
            rig.stamp(writer.ptr(), BLOCK, 2, &a);
            assert!(!a.is_complete().unwrap());
            holds[first].take().unwrap().release();
            if rig.maybe_sim().is_some() {
                // On a GPU the second host function may hold up the first.
                rig.settle(&readers[first]);
                for id in [readers[first].id().unwrap(), a.id().unwrap()] {
                    rig.maybe_sim().unwrap().complete_stream(id, usize::MAX);
                }
            }
            assert!(!a.is_complete().unwrap(), "one reader still runs");
            drop(holds);
            assert_eq!(rig.mismatches(writer.ptr(), BLOCK, 2, &a), 0);
            if let Some(sim) = rig.maybe_sim() {
                let races = sim.take_reports();
                let writer = a.id().unwrap();
                for report in races {
                    let text = report.to_string();
                    assert!(!text.contains(&format!("stream {writer} ")), "{text}");
                }
            }
            drop(writer);
            rig.close(&allocator);
        }
    });
}

/// R38: a capture sees no marker of ours, and frees in it are made up for.
#[test]
fn r38_capture_leaves_no_stale_events() {
    each(|rig| {
        const BLOCK: usize = 12 * MIB;
        let allocator = rig.allocator();
        let [a, b] = rig.streams();
        let own = allocator.allocate(BLOCK, &a).unwrap();
        let recorded = allocator.allocate(BLOCK, &b).unwrap();
        recorded.record_stream(&a).unwrap();
        let (own_ptr, recorded_ptr) = (own.ptr(), recorded.ptr());
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        let entered = rig.context.enter().unwrap();
        // SAFETY: the stream is alive.
        unsafe { entered.begin_capture(a.raw(), mode) }.unwrap();
        let refused = allocator.allocate(512, &a).unwrap_err();
        assert!(matches!(refused, Error::Capturing { .. }), "{refused:?}");
        let failed = own.free().unwrap_err();
        assert!(matches!(failed.error, Error::Capturing { .. }));
        drop(failed.block);
        drop(recorded);
        assert_eq!(rig.calls("cuEventRecord") - allocator.stats().markers, 0);
        // Other streams go on.
        drop(allocator.allocate(4 * MIB, &b).unwrap());
        // SAFETY: the stream is alive.
        let graph = unsafe { entered.end_capture(a.raw()) }.unwrap();
        drop(graph);
        let blocks = [0, 1].map(|_| allocator.allocate(BLOCK, &a).unwrap());
        assert_eq!(allocator.stats().all.allocations.current, 2);
        let mut places = blocks.each_ref().map(|block| block.ptr());
        places.sort_unstable();
        let mut expected = [own_ptr, recorded_ptr];
        expected.sort_unstable();
        assert_eq!(places, expected);
        drop(blocks);
        rig.close(&allocator);
    });
}

/// R61: many freed blocks make room for fewer, larger ones.
#[test]
fn r61_freed_blocks_serve_larger_ones() {
    only(Policy::Packed, |rig| {
        let allocator = rig.allocator();
        let stream = rig.stream();
        let small: Vec<_> = (0..8)
            .map(|_| allocator.allocate(16 * MIB, &stream).unwrap())
            .collect();
        assert_eq!(allocator.stats().all.reserved.current, 128 * MIB as u64);
        drop(small);
        let large: Vec<_> = (0..4)
            .map(|_| allocator.allocate(32 * MIB, &stream).unwrap())
            .collect();
        assert_eq!(allocator.stats().all.reserved.peak, 128 * MIB as u64);
        drop(large);
        rig.close(&allocator);
    });
}
