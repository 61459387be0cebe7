//! Tests of the state of a stream's slot: its tickets, its markers, its order, and its name.

use std::sync::{Arc, mpsc};

use super::{KIB, MIB, Outcome, PAGE, Rig, cached};
use crate::Block;
use crate::allocator::engine::leaving::Leaving;
use crate::allocator::extent::uses::Use;
use crate::allocator::stream::Streams;
use crate::allocator::stream::slot::{Holder, PendingWait, StreamKey};
use crate::allocator::{Config, Policy};
use crate::driver::sys::CUresult;
use crate::driver::{Context, Event, Stream};
use crate::error::Error;
use crate::locks::held::Mutex;
use crate::sim::Mode;

fn packed() -> Config {
    Config::new().policy(Policy::Packed).views(false)
}

/// Registers streams without work.
fn known<const N: usize>(rig: &Rig) -> (Streams, [u32; N]) {
    let mut streams = Streams::default();
    let slots = std::array::from_fn(|at| {
        let key = StreamKey::Id(100 + at as u64);
        streams.add(key, at + 1, rig.context.clone(), Holder::foreign())
    });
    (streams, slots)
}

fn event(context: &Context) -> Result<Arc<Event>, Box<dyn std::error::Error>> {
    Ok(Arc::new(context.enter()?.create_event()?))
}

fn slot_of(rig: &Rig, stream: &Stream) -> Result<(u32, StreamKey), Box<dyn std::error::Error>> {
    let key = StreamKey::Id(stream.id()?);
    let slot = rig.allocator.engine().lock().streams.find(key);
    Ok((slot.ok_or("no slot")?, key))
}

/// With many streams each call looks at the next of them, and all of them in turn.
#[test]
fn many_streams_are_visited_in_turn() -> Outcome {
    let rig = Rig::new(packed())?;
    let (mut streams, _) = known::<150>(&rig);
    let visits = [(); 4].map(|()| streams.next_slots());
    assert_eq!(visits, [0..64, 64..128, 128..150, 0..64]);
    rig.end()
}

/// Knowledge about an old ticket does not apply to a later stream in the same slot.
#[test]
fn tickets_of_a_slot_only_rise() -> Outcome {
    let rig = Rig::new(packed())?;
    let (mut streams, [a, b]) = known(&rig);
    let bound = streams.close_batch(a).bound;
    streams.record_order(b, a, bound, &[]);
    streams.mark_complete(a, bound, &[]);
    streams[a].holder = Holder::Retired;
    assert!(streams.recycle(a));
    let holder = Holder::foreign();
    let again = streams.add(StreamKey::Id(7), 7, rig.context.clone(), holder);
    assert_eq!(again, a);
    let free = Use {
        stream: a,
        ticket: streams[a].open,
    };
    assert!(!streams.is_complete(&free) && !streams.ready(b, &free));
    rig.end()
}

/// The last reference to a context may be that of a reused slot. The end of a context can call the driver, so the
/// slot's context is set aside for a thread that no longer holds the heap's lock.
#[test]
fn a_reused_slot_sets_its_context_aside() -> Outcome {
    let rig = Rig::new(packed())?;
    let (mut streams, [a, _]) = known(&rig);
    streams[a].holder = Holder::Retired;
    assert!(streams.recycle(a));
    assert!(streams.former.is_empty());
    streams.add(StreamKey::Id(7), 7, rig.context.clone(), Holder::foreign());
    assert_eq!(streams.former.len(), 1);
    rig.end()
}

/// Makes large requests that the heap serves.
fn large_requests(rig: &Rig, stream: &Stream, count: usize) -> Outcome {
    for at in 0..count {
        let a = rig.allocator.allocate((1 + at % 3) * MIB, stream)?;
        let b = rig.allocator.allocate((1 + at % 5) * MIB, stream)?;
        drop((a, b));
    }
    Ok(())
}

/// A stream that is idle for long, with all work complete, is inactive: the other stream is served as if it had always
/// been alone, until the stream is named again or memory of it is freed.
#[test]
fn an_idle_stream_is_inactive_until_a_call_names_it() -> Outcome {
    for frees in [false, true] {
        let rig = Rig::new(packed())?;
        let [a, b] = rig.streams()?;
        let kept = rig.allocator.allocate(3 * MIB, &b)?;
        drop(rig.allocator.allocate(MIB, &b)?);
        large_requests(&rig, &a, 64)?;
        let several = || rig.allocator.engine().lock().streams.several();
        assert!(several());
        large_requests(&rig, &a, 1024)?;
        assert!(!several());
        rig.allocator.check()?;
        let queries = rig.allocator.driver_calls().get("cuEventQuery");
        let markers = rig.allocator.stats().markers;
        large_requests(&rig, &a, 100)?;
        assert_eq!(rig.allocator.stats().markers, markers);
        assert_eq!(rig.allocator.driver_calls().get("cuEventQuery"), queries);
        rig.sim.set_mode(Mode::Manual);
        let last = rig.allocator.allocate(8 * MIB, &a)?;
        rig.write(last.ptr(), 8 * MIB, &a)?;
        drop(last);
        if frees {
            rig.write(kept.ptr(), 3 * MIB, &b)?;
            drop(kept);
            assert!(several());
            large_requests(&rig, &a, 4)?;
        } else {
            // Memory that the first stream still uses is not reused by this one without a wait.
            let block = rig.allocator.allocate(8 * MIB, &b)?;
            assert!(several());
            rig.write(block.ptr(), 8 * MIB, &b)?;
            drop((block, kept));
        }
        let block = rig.allocator.allocate(12 * MIB, &a)?;
        rig.write(block.ptr(), 12 * MIB, &a)?;
        drop(block);
        rig.allocator.check()?;
        rig.sim.complete_all();
        rig.sim.set_mode(Mode::Instant);
        rig.end()?;
    }
    Ok(())
}

/// A stream with a live block is retired while it is inactive: its memory serves others once its last marker is
/// complete.
#[test]
fn retiring_an_inactive_stream_records_its_last_marker() -> Outcome {
    let rig = Rig::new(packed())?;
    let [a, b] = rig.streams()?;
    let kept = rig.allocator.allocate(24 * MIB, &b)?;
    let at = kept.ptr();
    large_requests(&rig, &a, 1200)?;
    let (slot, _) = slot_of(&rig, &b)?;
    assert!(rig.allocator.engine().lock().streams.is_inactive(slot));
    rig.sim.set_mode(Mode::Manual);
    rig.write(at, 24 * MIB, &b)?;
    rig.allocator.retire(&b)?;
    drop(kept);
    rig.sim.complete_all();
    let block = rig.allocator.allocate(24 * MIB, &a)?;
    assert_eq!(block.ptr(), at);
    drop(block);
    rig.end()
}

/// An idle stream's open batch is completed without a request of that stream, and its pieces become available to all
/// streams.
#[test]
fn work_of_an_idle_stream_becomes_available_to_all() -> Outcome {
    let rig = Rig::new(packed())?;
    let [a, b] = rig.streams()?;
    drop(rig.allocator.allocate(512 * KIB, &b)?);
    let (slot, _) = slot_of(&rig, &b)?;
    let covered = || rig.allocator.engine().lock().streams[slot].covered();
    // A call for the requesting stream does not count as one for another.
    large_requests(&rig, &a, 128)?;
    assert!(!covered());
    large_requests(&rig, &a, 256)?;
    assert!(covered());
    let heap = rig.allocator.engine().lock();
    assert!(heap.streams.several() && !heap.streams.is_inactive(slot));
    let large = heap.extents.large.index(slot);
    assert!(large.is_none_or(|pieces| pieces.is_empty()));
    drop(heap);
    rig.allocator.check()?;
    rig.end()
}

/// A stream with work that was not observed complete does not rest.
#[test]
fn r34_a_stream_that_is_waited_for_stays_active() -> Outcome {
    let rig = Rig::new(packed())?;
    let (mut streams, [a, b]) = known(&rig);
    assert!(!streams.count_use(b, 1));
    assert!(!streams.deactivate(b) && streams.several());
    let batch = streams.close_batch(b);
    assert!(!streams.deactivate(b));
    streams.mark_batch_complete(&batch);
    assert!(streams.deactivate(b) && !streams.several() && streams.is_inactive(b));
    assert!(!streams.deactivate(b));
    streams.note_call(a);
    assert!(!streams.several() && !streams.reactivated);
    streams.note_call(b);
    assert!(streams.several() && streams.reactivated);
    assert!(streams.deactivate(b));
    streams[b].holder = Holder::Retired;
    assert!(streams.recycle(b));
    assert_eq!((streams.len(), streams.several()), (1, false));
    rig.end()
}

/// A marker covers what was freed before its batch was closed, and no later free.
#[test]
fn a_marker_covers_no_later_free() -> Outcome {
    let rig = Rig::new(packed())?;
    let (mut streams, [a, b]) = known(&rig);
    let earlier = Use {
        stream: a,
        ticket: streams[a].open,
    };
    let batch = streams.close_batch(a);
    let later = Use {
        stream: a,
        ticket: streams[a].open,
    };
    assert!(streams.publish(batch, event(&rig.context)?).is_none());
    assert!(streams.is_covered(&earlier) && !streams.is_covered(&later));
    let marker = streams.marker(&earlier).ok_or("no marker")?;
    let (bound, row) = (marker.bound, Arc::clone(&marker.row));
    streams.record_order(b, a, bound, &row);
    assert!(streams.ready(b, &earlier) && !streams.ready(b, &later));
    streams.mark_complete(a, bound, &row);
    assert!(streams.is_complete(&earlier) && !streams.is_complete(&later));
    rig.end()
}

/// The event that replaces all markers of a stream covers what the last of them did.
#[test]
fn d6_the_event_that_replaces_all_markers_covers_their_frees() -> Outcome {
    let rig = Rig::new(packed())?;
    let (mut streams, [a, b]) = known(&rig);
    streams.record_order(a, b, 3, &[]);
    for _ in 0..2 {
        let batch = streams.close_batch(a);
        assert!(streams.publish(batch, event(&rig.context)?).is_none());
    }
    let last = Use {
        stream: a,
        ticket: streams[a].open - 1,
    };
    let gone = streams.replace_markers(a, event(&rig.context)?);
    assert_eq!((gone.len(), streams[a].markers.len()), (2, 1));
    assert!(streams[a].covered() && streams.is_covered(&last));
    assert_eq!(streams[a].markers[0].row[..], [0, 3]);
    streams.mark_complete(a, last.ticket, &[]);
    assert!(streams.has_no_markers());
    rig.end()
}

/// A stream that waits for a marker is ordered behind everything that the marker's stream was ordered behind, and needs
/// no wait for that.
#[test]
fn a_wait_covers_the_streams_that_its_marker_follows() -> Outcome {
    let rig = Rig::new(packed())?;
    let streams = rig.streams::<3>()?;
    for stream in &streams {
        drop(rig.allocator.allocate(KIB, stream)?);
    }
    let [(a, _), (b, _), (c, _)] = [
        slot_of(&rig, &streams[0])?,
        slot_of(&rig, &streams[1])?,
        slot_of(&rig, &streams[2])?,
    ];
    let mut row = vec![0; 3];
    row[a as usize] = 9;
    let event = event(&rig.context)?;
    event.record(&streams[1])?;
    let wait = PendingWait {
        stream: b,
        bound: 4,
        event,
        row: row.into(),
    };
    rig.allocator.engine().queue_waits(c, &[wait])?;
    let heap = rig.allocator.engine().lock();
    let ready = |stream, ticket| heap.streams.ready(c, &Use { stream, ticket });
    assert!(ready(b, 4) && !ready(b, 5));
    assert!(ready(a, 9) && !ready(a, 10));
    drop(heap);
    rig.end()
}

/// A page that is returned after a batch was closed gets the ticket opened then.
#[test]
fn a_page_freed_behind_a_marker_is_not_covered_by_it() -> Outcome {
    let rig = Rig::new(packed())?;
    let allocator = &rig.allocator;
    let [a, b] = rig.streams()?;
    drop(allocator.allocate(KIB, &b)?);
    let page = allocator.allocate(PAGE, &a)?;
    let others: Result<Vec<Block>, _> = (1..2 * MIB / PAGE)
        .map(|_| allocator.allocate(PAGE, &b))
        .collect();
    let others = others?;
    let (slot, key) = slot_of(&rig, &a)?;
    drop(allocator.allocate(MIB, &a)?);
    allocator.engine().mark(slot, key)?;
    rig.sim.set_mode(Mode::Manual);
    rig.write(page.ptr(), PAGE, &a)?;
    drop(page);
    allocator.trim(u64::MAX)?;
    assert!(matches!(cached(allocator, PAGE, &b), Err(Error::NotCached)));
    rig.sim.complete_all();
    drop(others);
    rig.end()
}

/// A slot whose last marker is being recorded is not reused, and returns to its stream if that fails; the slot of a
/// stream that no call names and nothing refers to can be reused.
#[test]
fn d3_a_slot_that_is_left_is_freed_once() -> Outcome {
    let rig = Rig::new(packed())?;
    let engine = rig.allocator.engine();
    let key = StreamKey::Id(900);
    let mut heap = engine.lock();
    let slot = heap.register(key, 900, rig.context.clone(), Holder::foreign());
    let leaving = Leaving::begin(engine, &mut heap, slot);
    heap.recycle(slot);
    let stays = heap.streams[slot].in_use;
    drop(heap);
    drop(leaving);
    assert!(stays);
    let mut heap = engine.lock();
    assert_eq!(heap.streams.find(key), Some(slot));
    heap.recycle(slot);
    assert!(heap.streams[slot].in_use);
    heap.streams.forget_key(slot);
    heap.recycle(slot);
    assert!(!heap.streams[slot].in_use);
    assert_eq!(heap.streams.len(), 0);
    drop(heap);
    rig.end()
}

/// Two threads retire a stream: until both have finished, its slot is not reused even by the same stream.
#[test]
fn a_slot_is_not_reused_while_a_second_retirement_runs() -> Outcome {
    let rig = Rig::new(packed())?;
    let engine = rig.allocator.engine();
    let [a] = rig.streams()?;
    drop(rig.allocator.allocate(KIB, &a)?);
    let (slot, _) = slot_of(&rig, &a)?;
    let other = Leaving::begin(engine, &mut engine.lock(), slot);
    rig.allocator.retire(&a)?;
    rig.sim.complete_all();
    rig.allocator.trim(u64::MAX)?;
    let block = rig.allocator.allocate(KIB, &a)?;
    let (again, _) = slot_of(&rig, &a)?;
    assert_ne!(again, slot);
    drop(other);
    let heap = engine.lock();
    let (in_use, named) = (heap.streams[slot].in_use, heap.streams[again].named);
    drop(heap);
    assert!(!in_use && named);
    drop(block);
    rig.end()
}

/// A wait queued behind the last marker of a stream: the marker completes without it.
#[test]
fn a_wait_after_the_last_marker_does_not_count_for_it() -> Outcome {
    let rig = Rig::new(packed())?;
    let engine = rig.allocator.engine();
    let [a, b] = rig.streams()?;
    for stream in [&a, &b] {
        drop(rig.allocator.allocate(KIB, stream)?);
    }
    let [(slot_a, _), (slot_b, _)] = [slot_of(&rig, &a)?, slot_of(&rig, &b)?];
    let mut heap = engine.lock();
    let leaving = Leaving::begin(engine, &mut heap, slot_a);
    heap.streams.record_order(slot_a, slot_b, 7, &[]);
    let follows_none = heap.streams[slot_a].row.is_empty();
    drop(heap);
    drop(leaving);
    assert!(follows_none);
    engine.lock().streams.record_order(slot_a, slot_b, 7, &[]);
    assert_eq!(engine.lock().streams[slot_a].row[slot_b as usize], 7);
    rig.end()
}

/// While its last marker is being recorded, the stream caches of a stream stay closed.
#[test]
fn d3_caches_of_a_leaving_stream_stay_closed() -> Outcome {
    let rig = Rig::new(packed())?;
    let engine = rig.allocator.engine();
    let [a] = rig.streams()?;
    drop(rig.allocator.allocate(KIB, &a)?);
    let (slot, _) = slot_of(&rig, &a)?;
    let mut heap = engine.lock();
    let cache = heap.caches.of(slot)[0];
    assert!(cache.lock().is_fast());
    let leaving = Leaving::begin(engine, &mut heap, slot);
    heap.open_caches();
    let opened = cache.lock().is_fast();
    drop(heap);
    drop(leaving);
    assert!(!opened);
    assert!(cache.lock().is_fast());
    rig.end()
}

/// The pages of a retiring stream are released when its last marker is recorded, not when it completes.
#[test]
fn d3_pages_of_a_leaving_stream_are_freed_with_its_last_marker() -> Outcome {
    let rig = Rig::new(packed())?;
    let [a, b] = rig.streams()?;
    drop(rig.allocator.allocate(KIB, &b)?);
    let page = rig.allocator.allocate(PAGE, &a)?;
    let (slot, _) = slot_of(&rig, &a)?;
    rig.sim.set_mode(Mode::Manual);
    rig.write(page.ptr(), PAGE, &a)?;
    drop(page);
    rig.allocator.retire(&a)?;
    let heap = rig.allocator.engine().lock();
    assert!(heap.streams[slot].in_use, "its work is under way");
    assert_eq!(heap.caches.pages_of(slot), 0);
    drop(heap);
    rig.end()
}

/// A marker that another thread records during a retirement, and publishes after it, is discarded: its event belongs to
/// a context that may have been destroyed by then.
#[test]
fn d6_a_marker_beside_a_retirement_does_not_outlive_it() -> Outcome {
    let rig = Rig::new(packed())?;
    let allocator = &rig.allocator;
    let [own] = rig.streams()?;
    drop(allocator.allocate(KIB, &own)?);
    let raw = rig.sim.create_context(0).ok_or("no context")?;
    // SAFETY: the context was just created, and is destroyed after its last use.
    let there = unsafe { Context::from_raw(rig.context.driver(), raw) }?;
    let mut stream = std::ptr::null_mut();
    let create = rig.context.driver().functions().cuStreamCreate;
    let create = create.ok_or("no function")?;
    let entered = there.enter()?;
    // SAFETY: a context is current; the output is a local. 1: non-blocking.
    let code = unsafe { create(&mut stream, 1) };
    drop(entered);
    assert_eq!(code, CUresult::CUDA_SUCCESS);
    // SAFETY: the stream is alive until it is retired.
    let kept = unsafe { allocator.allocate_raw(4 * MIB, stream) }?;
    // SAFETY: as above.
    unsafe { allocator.free_raw(allocator.allocate_raw(100 * KIB, stream)?) }?;
    let slots = allocator.engine().lock();
    let found = slots.streams.iter().find(|(_, s)| s.raw == stream as usize);
    let (slot, key) = found.map(|(at, s)| (at, s.key)).ok_or("no slot")?;
    drop(slots);
    rig.sim.set_mode(Mode::Manual);
    rig.sim
        .busy(stream, 1)
        .map_err(|code| format!("{code:?}"))?;
    let (recorded, goes_on) = mpsc::channel();
    let marks = Mutex::new(Some(recorded));
    let beside = allocator.clone();
    rig.sim.after(move |moment| {
        // Only the first record, which is that of the other thread, is held up here.
        let first = (moment.call == "cuEventRecord").then(|| marks.lock().take());
        if let Some(Some(recorded)) = first {
            let _ = recorded.send(());
            let retired = || {
                let heap = beside.engine().lock();
                matches!(heap.streams[slot].holder, Holder::Retired)
            };
            (0..10_000_000).find(|_| {
                std::thread::yield_now();
                retired()
            });
        }
    });
    std::thread::scope(|scope| -> Outcome {
        let marking = scope.spawn(|| allocator.engine().mark(slot, key));
        goes_on.recv()?;
        // SAFETY: the stream is alive and gets no more work.
        unsafe { allocator.retire_raw(stream) }?;
        marking.join().map_err(|_| "the other thread panicked")??;
        Ok(())
    })?;
    rig.sim.clear_hooks();
    rig.sim.complete_all();
    drop(there);
    assert!(rig.sim.destroy_context(raw));
    // SAFETY: nothing uses the block any more.
    unsafe { allocator.free_raw(kept) }?;
    allocator.trim(0)?;
    rig.end()
}

/// Memory that the streams of a destroyed context used, in pages and outside, is complete after a wait for everything.
#[test]
fn d6_memory_of_a_destroyed_context_is_not_lost() -> Outcome {
    let rig = Rig::new(packed())?;
    let allocator = &rig.allocator;
    // On a failure, closing the allocator would wait for work that never completes.
    let _open = std::mem::ManuallyDrop::new(allocator.clone());
    let [a] = rig.streams()?;
    drop(allocator.allocate(KIB, &a)?);
    let raw = rig.sim.create_context(0).ok_or("no context")?;
    // SAFETY: the context was just created, and outlives the test.
    let there = unsafe { Context::from_raw(rig.context.driver(), raw) }?;
    let b = Stream::new(&there)?;
    let small = allocator.allocate(PAGE, &b)?;
    let large = allocator.allocate(4 * MIB, &b)?;
    let (slot, _) = slot_of(&rig, &b)?;
    drop((small, large));
    allocator.engine().end_context(&there);
    {
        let heap = allocator.engine().lock();
        assert_eq!(heap.caches.pages_of(slot), 0);
        let free = heap.streams.use_of_free(slot, None);
        assert!(!heap.streams.is_complete(&free));
    }
    assert_eq!(allocator.trim(0)?.pending, 6 << 20);
    allocator.synchronize()?;
    assert_eq!(allocator.trim(0)?.pending, 0);
    assert_eq!(allocator.stats().all.reserved.current, 0);
    assert_eq!(allocator.stats().streams, 1);
    rig.end()
}
