//! Imported memory goes back to its producer behind all uses.

use std::ffi::c_void;
use std::sync::atomic::AtomicU64;

use crate::common::*;
use crate::foreign::*;
use cualloc::Error;
use cualloc::allocator::{Allocator, Config};
use cualloc::driver::{Context, Driver, Stream};
use cualloc::exchange::dlpack::DLManagedTensorVersioned;
use cualloc::exchange::*;
use cualloc::sim::{Report, SimConfig, Simulator};

/// When foreign memory was released, and what was pending then.
struct Watch {
    context: Context,
    streams: Vec<Stream>,
    complete: AtomicU64,
    releases: AtomicU64,
}

extern "C" fn watched(with: *mut c_void) {
    use std::sync::atomic::Ordering::SeqCst;
    // SAFETY: leaked by the tests below.
    let watch = unsafe { &*with.cast::<Watch>() };
    let complete = watch.streams.iter().filter(|s| s.is_complete().unwrap());
    watch.complete.store(complete.count() as u64, SeqCst);
    watch.releases.fetch_add(1, SeqCst);
    let _ = &watch.context;
}

fn watch(rig: &Rig, streams: &[&Stream]) -> &'static Watch {
    Box::leak(Box::new(Watch {
        context: rig.context.clone(),
        streams: streams.iter().map(|s| (*s).clone()).collect(),
        complete: AtomicU64::new(0),
        releases: AtomicU64::new(0),
    }))
}

fn watched_import(
    other: &Other,
    watch: &'static Watch,
    ptr: u64,
    stream: &Stream,
    producer: Peer,
) -> Tensor {
    let with = (watch as *const Watch).cast_mut().cast();
    let made = other.make_versioned(&Seen::floats(ptr, 1024), watched, with);
    // SAFETY: made by the other side, taken over once.
    let tensor = unsafe { Dlpack::from_raw(made) };
    Tensor::from_dlpack(tensor.unwrap(), stream, producer).unwrap()
}

/// S5.65, S0.4: foreign memory goes back to its producer only when every stream that used it is done.
#[test]
fn s5_65_s0_4_import_is_released_after_its_uses() {
    let Some(other) = other() else { return };
    each(|rig| {
        let [home, second] = rig.streams();
        let plain = Plain::new(&rig.context, 4096);
        let watch = watch(rig, &[&home, &second]);
        let column = watched_import(other, watch, plain.ptr, &home, ordered());
        column.record_stream(&second).unwrap();
        column.record_stream(&second).unwrap();
        let (a, b) = (rig.busy(&home), rig.busy(&second));
        rig.stamp(plain.ptr, 2048, 1, &home);
        rig.stamp(plain.ptr + 2048, 2048, 2, &second);
        drop(column);
        assert_eq!(released(&watch.releases), 1);
        assert_eq!(
            released(&watch.complete),
            2,
            "both streams were done by then"
        );
        drop((a, b));
    });
}

/// S5.65: with the producer's stream known, it is waited for at import, waits at release, and the host
/// waits for nothing.
#[test]
fn s5_65_import_is_ordered_with_the_producer_stream() {
    let Some(other) = other() else { return };
    each(|rig| {
        let [home, theirs] = rig.streams();
        let plain = Plain::new(&rig.context, 4096);
        rig.stamp(plain.ptr, 4096, 0, &theirs);
        theirs.synchronize().unwrap();
        let watch = watch(rig, &[&home]);
        let hold = rig.hold(&theirs);
        rig.stamp(plain.ptr, 4096, 1, &theirs);
        let producer = Peer::on(&theirs);
        let column = watched_import(other, watch, plain.ptr, &home, producer);
        // Behind the producer's work ...
        rig.stamp(plain.ptr, 2048, 2, &home);
        assert!(!home.is_complete().unwrap());
        drop(column);
        assert_eq!(released(&watch.releases), 1);
        assert_eq!(released(&watch.complete), 0, "nothing was waited for");
        // ... and before what it does next.
        rig.stamp(plain.ptr, 1024, 3, &theirs);
        hold.release();
        assert_eq!(rig.mismatches(plain.ptr, 1024, 3, &theirs), 0);
        assert_eq!(rig.mismatches(plain.ptr + 1024, 1024, 2, &theirs), 0);
        assert_eq!(rig.mismatches(plain.ptr + 2048, 2048, 1, &theirs), 0);
    });
}

/// S5.65: our own memory that came back on a thread's own default stream is lent on by another thread behind the work
/// that the first one gave that stream, which the other thread cannot name.
#[test]
fn s5_65_work_of_another_threads_stream_precedes_the_next_consumer() {
    each_simulated(|rig, sim| {
        let allocator = rig.allocator();
        let [home, next] = rig.streams();
        let lent = Tensor::zeroed(&allocator, DType::F32, &[1024], &home).unwrap();
        home.synchronize().unwrap();
        let own = Stream::per_thread(&rig.context);
        let (back, busy) = sim.as_thread(1, || {
            let back = returned(&lent, true, &Peer::on(&own), &own);
            let busy = rig.busy(&own);
            rig.stamp(back.ptr(), 4096, 7, &own);
            (back, busy)
        });
        assert!(!sim.pending().is_empty());
        let out: Dlpack<DLManagedTensorVersioned> = back.to_dlpack(&Peer::on(&next)).unwrap();
        let is_over = || sim.as_thread(1, || own.is_complete().unwrap());
        assert!(is_over());
        rig.stamp(back.ptr(), 4096, 8, &next);
        assert_eq!(rig.mismatches(back.ptr(), 4096, 8, &next), 0);
        drop(busy);
        drop((out, lent));
        sim.as_thread(1, || drop(back));
        rig.close(&allocator);
    });
}

/// An allocator of a primary context with a stream, for tests that destroy other contexts beside it.
fn beside_others() -> (Simulator, Driver, Allocator, Stream) {
    let sim = Simulator::new(SimConfig::default()).unwrap();
    let driver = sim.driver().unwrap();
    let context = driver.context(0).unwrap();
    let allocator = Allocator::with_config(&context, Config::new()).unwrap();
    let home = Stream::new(&context).unwrap();
    (sim, driver, allocator, home)
}

fn nothing_under_a_lock(sim: &Simulator) {
    let under_a_lock = |report: &Report| matches!(report, Report::UnderLock { .. });
    let reports = sim.reports();
    assert!(!reports.iter().any(under_a_lock), "{reports:?}");
}

/// D4: memory that a stream used whose context was destroyed since goes back all the same: what was under way there
/// ended with the context.
#[test]
fn d4_memory_lent_to_a_destroyed_context_is_returned() {
    let (sim, driver, allocator, home) = beside_others();
    for (returned, owned) in [(true, false), (false, false), (true, true), (false, true)] {
        let raw = sim.create_context(0).unwrap();
        // SAFETY: calls detect that it was destroyed.
        let theirs = unsafe {
            match owned {
                true => Context::from_raw_with_owner(&driver, raw, ()),
                false => Context::from_raw(&driver, raw),
            }
        }
        .unwrap();
        let on = Stream::new(&theirs).unwrap();
        let lent = Tensor::zeroed(&allocator, DType::F32, &[1 << 18], &home).unwrap();
        let export: Dlpack<DLManagedTensorVersioned> = lent.to_dlpack(&Peer::on(&on)).unwrap();
        let kept: Box<dyn std::any::Any> = match returned {
            true => Box::new(Tensor::from_dlpack(export, &on, Peer::on(&on)).unwrap()),
            false => Box::new(export),
        };
        assert!(sim.destroy_context(raw));
        // From here on the allocator may be the last to hold their stream.
        drop((on, theirs));
        drop((kept, lent));
        drop(allocator.allocate(4096, &home).unwrap());
        let live = allocator.stats().all.allocations.current;
        assert_eq!(live, 0, "returned {returned}, owned {owned}");
        // An invalid handle does not prove that the context was destroyed.
        let waited = allocator.synchronize();
        assert_matches!(waited, Ok(()) | Err(Error::Driver(_)));
    }
    allocator.check().unwrap();
    allocator.close().unwrap();
    nothing_under_a_lock(&sim);
}

/// D4: the last that holds a stream of such a context is the allocator, which drops it without its lock.
#[test]
fn d4_streams_of_a_destroyed_context_end_without_the_lock() {
    let (sim, driver, allocator, home) = beside_others();
    let raw = sim.create_context(0).unwrap();
    // SAFETY: calls detect that it was destroyed.
    let theirs = unsafe { Context::from_raw(&driver, raw) }.unwrap();
    let on = Stream::new(&theirs).unwrap();
    let block = allocator.allocate(1 << 20, &home).unwrap();
    block.record_stream(&on).unwrap();
    drop(block);
    drop((on, theirs));
    assert!(sim.destroy_context(raw));
    allocator.synchronize().unwrap();
    nothing_under_a_lock(&sim);
    allocator.close().unwrap();
}
