//! Contexts other than the allocator's: retirement of their streams, their destruction, and errors about invalid
//! handles.

use std::cell::RefCell;
use std::mem::ManuallyDrop;
use std::rc::Rc;
use std::sync::mpsc;

use super::leaving::{BLOCK, use_elsewhere};
use crate::common::prelude::*;
use cualloc::sim::Report;

const INVALID: sys::CUresult = sys::CUresult::CUDA_ERROR_INVALID_HANDLE;

/// A context beside the primary one, with a stream of its own.
struct Elsewhere {
    context: sys::CUcontext,
    stream: sys::CUstream,
}

impl Elsewhere {
    /// Another stream of the context.
    fn beside(&self, rig: &Rig) -> Elsewhere {
        stream_in(rig, self.context)
    }

    /// Gives the stream a write to a block.
    fn write(&self, rig: &Rig, ptr: u64) {
        // SAFETY: the context and its stream are alive.
        let (context, stream) = unsafe {
            let context = Context::from_raw(&rig.driver, self.context).unwrap();
            let stream = Stream::from_raw(&context, self.stream).unwrap();
            (context, stream)
        };
        rig.stamp_in(&context, ptr, BLOCK, 1, &stream);
    }
}

fn elsewhere(rig: &Rig, sim: &Simulator) -> Elsewhere {
    stream_in(rig, sim.create_context(0).unwrap())
}

fn stream_in(rig: &Rig, context: sys::CUcontext) -> Elsewhere {
    // SAFETY: the context is not destroyed as long as this is in use.
    let foreign = unsafe { Context::from_raw(&rig.driver, context) }.unwrap();
    // It goes with the context.
    let stream = ManuallyDrop::new(RawStream::in_context(rig, &foreign, 1)).raw();
    Elsewhere { context, stream }
}

/// Ends the allocator's use of its stream.
fn retired(allocator: &Allocator, there: &Elsewhere) {
    allocator.raw_retire(there.stream).unwrap();
}

/// All memory is complete after a wait, and can be released.
fn nothing_is_pending(allocator: &Allocator) {
    allocator.trim(0).unwrap();
    allocator.synchronize().unwrap();
    assert_eq!(allocator.trim(0).unwrap().pending, 0);
}

/// Memory of a context's stream, and of ours that it used, is freed.
fn used_by(allocator: &Allocator, own: &Stream, there: &Elsewhere, bytes: usize) {
    let ptr = allocator.raw_allocate(bytes, there.stream).unwrap();
    allocator.raw_free(ptr).unwrap();
    let block = allocator.allocate(bytes, own).unwrap();
    allocator.raw_record_use(block.ptr(), there.stream).unwrap();
}

/// The same while another thread waits for all contexts: the retirement returns after that wait.
#[test]
fn d6_a_context_may_be_destroyed_while_a_thread_synchronises() {
    each_simulated(|rig, sim| {
        let (allocator, [own]) = rig.scene();
        let there = elsewhere(rig, sim);
        let _kept = allocator.allocate(70_000, &own).unwrap();
        used_by(&allocator, &own, &there, 4 * MIB);
        let other = allocator.clone();
        let stream = there.stream as usize;
        let retire = Mutex::new(Some(move || {
            other.raw_retire(stream as sys::CUstream).is_ok()
        }));
        let (hand, owner) = mpsc::channel();
        sim.after(move |moment| {
            if moment.call != "cuStreamIsCapturing" {
                return;
            }
            let Some(retire) = retire.lock().unwrap().take() else {
                return;
            };
            let thread = std::thread::spawn(retire);
            // It has every chance to end.
            for _ in 0..5_000 {
                std::thread::yield_now();
            }
            hand.send((thread.is_finished(), thread)).unwrap();
        });
        allocator.synchronize().unwrap();
        let (ended, thread) = owner.recv().expect("a stream is asked whether it captures");
        sim.clear_hooks();
        assert!(!ended, "the context could be destroyed under the wait");
        assert!(thread.join().unwrap(), "the retirement went well");
        assert!(sim.destroy_context(there.context));
    });
}

/// Once its streams are retired, a context may be destroyed: none of its objects is queried any more, and the events of
/// markers and the spare ones were destroyed before.
#[test]
fn d6_a_context_may_be_destroyed_once_its_streams_are_retired() {
    for (bytes, seen) in [(KIB, false), (4 * MIB, false), (4 * MIB, true)] {
        each_simulated(|rig, sim| {
            let (allocator, [own]) = rig.scene();
            sim.set_mode(Mode::Manual);
            let there = elsewhere(rig, sim);
            let kept = allocator.allocate(70_000, &own).unwrap();
            for _ in 0..3 {
                used_by(&allocator, &own, &there, bytes);
                sim.busy(there.stream, 1).unwrap();
            }
            retired(&allocator, &there);
            sim.complete_all();
            if seen {
                allocator.trim(u64::MAX).unwrap();
            }
            let events = sim.leaks().events;
            assert!(sim.destroy_context(there.context));
            assert_eq!(sim.leaks().events, events, "some went with the context");
            drop(allocator.allocate(2 * bytes, &own).unwrap());
            nothing_is_pending(&allocator);
            drop(kept);
            sim.set_mode(Mode::Instant);
        });
    }
}

/// Unfinished work of a retired stream of another context precedes the memory's next user.
#[test]
fn d6_memory_of_a_retired_stream_elsewhere_is_waited_for() {
    each_simulated(|rig, sim| {
        let (allocator, [own]) = rig.scene_limit(BLOCK);
        sim.set_mode(Mode::Manual);
        let there = elsewhere(rig, sim);
        let block = allocator.allocate(BLOCK, &own).unwrap();
        own.synchronize().unwrap();
        there.write(rig, block.ptr());
        allocator.raw_record_use(block.ptr(), there.stream).unwrap();
        drop(block);
        retired(&allocator, &there);
        use_elsewhere(rig, &allocator, BLOCK, &own);
        assert!(sim.destroy_context(there.context));
    });
}

/// A context is destroyed without a retirement of its stream. The wait for everything detects that: what the stream
/// used is complete then, and frees do not query it any more.
#[test]
fn a_context_found_destroyed_does_not_lose_our_own() {
    for checks in [false, true] {
        each_simulated(|rig, sim| {
            let (allocator, [own]) = rig.scene_with(Config::new().capture_checks(checks));
            let there = elsewhere(rig, sim);
            let live = live_blocks(&allocator, &own, &there);
            used_by(&allocator, &own, &there, KIB);
            used_by(&allocator, &own, &there, 4 * MIB);
            assert!(sim.destroy_context(there.context));
            allocator.synchronize().unwrap();
            // It was asked once, and nothing else was wrong.
            let gone = |report: &Report| matches!(report, Report::Destroyed { .. });
            assert!(sim.take_reports().iter().all(gone));
            free(&allocator, live);
            nothing_is_pending(&allocator);
        });
    }
}

/// Live blocks of a stream elsewhere, small and large, and one of an own stream that it uses.
fn live_blocks(allocator: &Allocator, own: &Stream, there: &Elsewhere) -> [u64; 3] {
    let small = allocator.raw_allocate(KIB, there.stream).unwrap();
    let large = allocator.raw_allocate(3 * MIB, there.stream).unwrap();
    let lent = allocator.raw_allocate(2 * MIB, own.raw()).unwrap();
    allocator.raw_record_stream(lent, there.stream).unwrap();
    [small, large, lent]
}

fn free(allocator: &Allocator, live: [u64; 3]) {
    live.into_iter()
        .for_each(|ptr| allocator.raw_free(ptr).unwrap());
}

/// The driver call that finds a handle invalid, and what makes it.
type Find = (&'static str, u64, fn(&Allocator, &Elsewhere));

/// Each kind of call on something of another context.
const FINDS: &[Find] = &[
    ("cuEventQuery", 1, |allocator, _| {
        allocator.trim(u64::MAX).unwrap();
    }),
    ("cuEventSynchronize", 1, |allocator, _| {
        allocator.empty_cache().unwrap();
    }),
    // The one before is of the allocator's own context.
    ("cuCtxSynchronize", 2, |allocator, _| {
        assert!(is_invalid(allocator.synchronize()));
    }),
    ("cuCtxSetCurrent", 1, |allocator, _| {
        assert!(is_invalid(allocator.synchronize()));
    }),
    ("cuEventRecord", 1, |allocator, there| {
        let ptr = allocator.raw_allocate(MIB, there.stream).unwrap();
        allocator.raw_free(ptr).unwrap();
        // Unless the free has recorded a marker.
        drop(allocator.raw_mark(there.stream));
    }),
    ("cuStreamIsCapturing", 1, |allocator, there| {
        let asked = allocator.raw_allocate(KIB, there.stream);
        assert!(is_invalid(asked.map(drop)));
    }),
];

fn is_invalid(result: Result<(), Error>) -> bool {
    matches!(result, Err(Error::Driver(error)) if error.code() == INVALID)
}

/// The driver finds a handle invalid in the next such call.
fn invalidate(sim: &Simulator, allocator: &Allocator, there: &Elsewhere, find: &Find) {
    let (call, nth, act) = find;
    sim.fail(FailPlan::call(call, INVALID).unwrap().nth(*nth));
    act(allocator, there);
    assert_eq!(sim.clear_failures(), 0, "{call} was not made");
}

/// After one invalid handle no object of the context is used any more, so it may be destroyed without any retirement,
/// and none of its work counts as complete before the allocator is closed.
#[test]
fn nothing_of_a_context_is_used_after_an_invalid_handle() {
    for find in FINDS {
        for large in [false, true] {
            each_simulated(|rig, sim| {
                let _entered = rig.context.enter().unwrap();
                let allocator = rig.allocator_with(Config::new().capture_checks(true));
                let own = rig.stream();
                sim.set_mode(Mode::Manual);
                let there = elsewhere(rig, sim);
                // Its stream comes first.
                let live = live_blocks(&allocator, &own, &there);
                let kept = allocator.allocate(70_000, &own).unwrap();
                sim.busy(there.stream, 1).unwrap();
                used_by(&allocator, &own, &there, if large { 4 * MIB } else { KIB });
                invalidate(sim, &allocator, &there, find);
                sim.complete_all();
                assert!(sim.destroy_context(there.context));
                sim.set_mode(Mode::Instant);
                drop(allocator.allocate(8 * MIB, &own).unwrap());
                free(&allocator, live);
                for _ in 0..80 {
                    drop(allocator.allocate(MIB, &own).unwrap());
                }
                allocator.empty_cache().unwrap();
                assert!(is_invalid(allocator.synchronize()));
                assert_ne!(allocator.trim(0).unwrap().pending, 0);
                drop(kept);
                rig.assert_clean();
                rig.close(&allocator);
                sim.take_reports();
            });
        }
    }
}

/// An invalid handle does not make memory that a stream of a live context uses available to other streams, neither
/// immediately nor when the work is complete, but only once the stream is retired.
#[test]
fn memory_of_a_living_context_is_kept_until_its_stream_is_retired() {
    // There is no room for another block.
    for find in FINDS.iter().filter(|find| find.0 != "cuEventRecord") {
        each_simulated(|rig, sim| {
            let _entered = rig.context.enter().unwrap();
            let (allocator, [own]) = rig.scene_limit(BLOCK);
            sim.set_mode(Mode::Manual);
            let there = elsewhere(rig, sim);
            writes_and_leaves(rig, &allocator, &there);
            invalidate(sim, &allocator, &there, find);
            for _ in 0..2 {
                let refused = allocator.allocate(BLOCK, &own);
                assert_matches!(refused, Err(Error::OutOfMemory(_)));
                allocator.empty_cache().unwrap();
                assert!(is_invalid(allocator.synchronize()));
                assert_eq!(allocator.stats().all.reserved.current, BLOCK as u64);
                // So it is once all work is complete.
                sim.complete_all();
            }
            retired(&allocator, &there);
            use_elsewhere(rig, &allocator, BLOCK, &own);
            assert!(sim.destroy_context(there.context));
        });
    }
}

/// The stream elsewhere gets a block, writes to it, and frees it.
fn writes_and_leaves(rig: &Rig, allocator: &Allocator, there: &Elsewhere) {
    let ptr = allocator.raw_allocate(BLOCK, there.stream).unwrap();
    there.write(rig, ptr);
    allocator.raw_free(ptr).unwrap();
    allocator.raw_mark(there.stream).unwrap();
}

/// The first stream of a context that is retired gives its own memory back, the last one ends the distrust.
#[test]
fn the_distrust_of_a_context_ends_with_its_last_stream() {
    each_simulated(|rig, sim| {
        let (allocator, [own]) = rig.scene();
        let there = elsewhere(rig, sim);
        let beside = there.beside(rig);
        let streams = [there.stream, beside.stream];
        let blocks = streams.map(|s| allocator.raw_allocate(BLOCK, s).unwrap());
        blocks
            .iter()
            .for_each(|ptr| allocator.raw_free(*ptr).unwrap());
        invalidate(sim, &allocator, &there, &FINDS[0]);
        let pending = allocator.trim(0).unwrap().pending;
        retired(&allocator, &there);
        let left = allocator.trim(0).unwrap().pending;
        assert!(0 < left && left < pending, "{left} of {pending}");
        // A stream that comes now is of a context that is distrusted.
        let late = there.beside(rig);
        used_by(&allocator, &own, &late, 4 * MIB);
        let markers = allocator.stats().markers;
        allocator.raw_mark(late.stream).unwrap();
        assert_eq!(allocator.stats().markers, markers);
        retired(&allocator, &beside);
        retired(&allocator, &late);
        nothing_is_pending(&allocator);
        let again = there.beside(rig);
        used_by(&allocator, &own, &again, 4 * MIB);
        allocator.raw_mark(again.stream).unwrap();
        assert_eq!(allocator.trim(0).unwrap().pending, 0);
        retired(&allocator, &again);
        assert!(sim.destroy_context(there.context));
    });
}

/// Once a call reports that a distrusted context was destroyed, the memory that it used is complete, and the allocator
/// continues to work.
#[test]
fn the_distrust_of_a_context_ends_with_its_known_destruction() {
    use sys::CUresult as Code;
    for gone in [
        Code::CUDA_ERROR_CONTEXT_IS_DESTROYED,
        Code::CUDA_ERROR_INVALID_CONTEXT,
    ] {
        each_simulated(|rig, sim| {
            let (allocator, [own]) = rig.scene();
            let there = elsewhere(rig, sim);
            used_by(&allocator, &own, &there, 4 * MIB);
            invalidate(sim, &allocator, &there, &FINDS[0]);
            sim.fail(FailPlan::call("cuStreamGetId", gone).unwrap());
            let named = allocator.raw_allocate(KIB, there.stream);
            assert_matches!(named, Err(Error::Driver(error)) if error.code() == gone);
            assert_eq!(sim.clear_failures(), 0);
            assert!(sim.destroy_context(there.context));
            nothing_is_pending(&allocator);
        });
    }
}

/// A close queries the context again, waits for it if it is alive, and changes nothing if that fails.
#[test]
fn a_close_waits_for_a_distrusted_context() {
    each_simulated(|rig, sim| {
        let allocator = rig.limited(BLOCK);
        let own = rig.stream();
        sim.set_mode(Mode::Manual);
        let there = elsewhere(rig, sim);
        writes_and_leaves(rig, &allocator, &there);
        invalidate(sim, &allocator, &there, &FINDS[0]);
        sim.fail(FailPlan::call("cuCtxSynchronize", INVALID).unwrap().nth(2));
        assert!(is_invalid(allocator.close()));
        assert_eq!(sim.clear_failures(), 0);
        let refused = allocator.allocate(BLOCK, &own);
        assert_matches!(refused, Err(Error::OutOfMemory(_)));
        rig.close(&allocator);
        assert!(sim.destroy_context(there.context));
    });
}

/// A retired stream of a distrusted context may be destroyed: no free queries it.
#[test]
fn a_retired_stream_of_a_distrusted_context_is_not_queried() {
    for find in FINDS {
        each_simulated(|rig, sim| {
            let _entered = rig.context.enter().unwrap();
            let (allocator, [own]) = rig.scene_with(Config::new().capture_checks(true));
            sim.set_mode(Mode::Manual);
            let there = elsewhere(rig, sim);
            let live = live_blocks(&allocator, &own, &there);
            used_by(&allocator, &own, &there, 4 * MIB);
            sim.busy(there.stream, 1).unwrap();
            invalidate(sim, &allocator, &there, find);
            retired(&allocator, &there);
            sim.complete_all();
            assert!(sim.destroy_context(there.context));
            free(&allocator, live);
            nothing_is_pending(&allocator);
            rig.assert_clean();
            sim.set_mode(Mode::Instant);
        });
    }
}

/// A retirement that always fails leaves no additional markers or events with each attempt.
#[test]
fn retirements_that_fail_leave_a_bounded_number_of_events() {
    use sys::CUresult as Code;
    // The last marker cannot be recorded, or cannot be brought to the allocator's context.
    let plans = [
        ("cuEventRecord", Code::CUDA_ERROR_OUT_OF_MEMORY, 0),
        ("cuEventRecord", INVALID, 0),
        ("cuEventRecord", Code::CUDA_ERROR_OUT_OF_MEMORY, 1),
        ("cuStreamWaitEvent", Code::CUDA_ERROR_OUT_OF_MEMORY, 0),
        ("cuStreamWaitEvent", INVALID, 0),
        ("cuStreamCreate", Code::CUDA_ERROR_OUT_OF_MEMORY, 0),
    ];
    for (call, code, skip) in plans {
        each_simulated(|rig, sim| {
            let (allocator, [own]) = rig.scene();
            sim.set_mode(Mode::Manual);
            let there = elsewhere(rig, sim);
            let live = live_blocks(&allocator, &own, &there);
            sim.busy(there.stream, 1).unwrap();
            let tries = |count: u64| {
                for _ in 0..count {
                    sim.fail(FailPlan::call(call, code).unwrap().nth(skip + 1));
                    allocator.raw_retire(there.stream).unwrap_err();
                    assert_eq!(sim.clear_failures(), 0, "{call} was not made");
                }
                sim.leaks().events
            };
            let few = tries(3);
            assert_eq!(tries(200), few, "events after {call}");
            retired(&allocator, &there);
            sim.complete_all();
            assert!(sim.destroy_context(there.context));
            free(&allocator, live);
            nothing_is_pending(&allocator);
        });
    }
}

/// The same holds for a retirement that fails because other threads keep freeing.
#[test]
fn a_retirement_beside_frees_leaves_one_marker() {
    each_with_interludes(|rig, sim| {
        // A free asks the driver then, and comes to the heap.
        let (allocator, [a, b]) = rig.scene_with(Config::new().capture_checks(true));
        drop(allocator.allocate(KIB, &b).unwrap());
        sim.set_mode(Mode::Manual);
        sim.busy(a.raw(), 1).unwrap();
        let blocks = (0..200).map(|_| allocator.allocate(100 * KIB, &a).unwrap());
        let blocks = Rc::new(RefCell::new(blocks.collect()));
        free_beside_markers(Rc::clone(&blocks));
        let tries = [(); 3].map(|()| {
            assert_matches!(allocator.retire(&a), Err(Error::Capturing { .. }));
            sim.leaks().events
        });
        assert_eq!(tries[0], tries[2]);
        interlude::clear();
        drop(blocks);
        sim.complete_all();
        allocator.retire(&a).unwrap();
        sim.set_mode(Mode::Instant);
    });
}

/// Frees a block behind each marker.
fn free_beside_markers(blocks: Rc<RefCell<Vec<Block>>>) {
    interlude::after("cuEventRecord", move || {
        let block = blocks.borrow_mut().pop();
        drop(block);
        free_beside_markers(blocks);
    });
}
