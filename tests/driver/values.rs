//! Handles with owners, default streams as values, and order and copies by the handles alone, on the simulator.

use cualloc::allocator::{Allocator, Config};
use cualloc::driver::{Context, Event, Stream, sys};
use cualloc::sim::{Mode, SimConfig, Simulator};
use std::ptr::null_mut;
use std::sync::Arc;

fn simulated() -> (Simulator, Context) {
    let sim = Simulator::new(SimConfig::default()).unwrap();
    let context = sim.context(0).unwrap();
    (sim, context)
}

/// The owner of a foreign stream is dropped with the last clone, also if that is an allocator's.
#[test]
fn an_owner_stays_as_long_as_the_last_clone() {
    let (sim, context) = simulated();
    let functions = sim.functions();
    let mut raw = null_mut();
    {
        let _entered = context.enter().unwrap();
        // SAFETY: a context is current; the output is a local.
        let code = unsafe { functions.cuStreamCreate.unwrap()(&mut raw, 1) };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
    }
    let (owner, other) = (Arc::new(()), Arc::new(()));
    // SAFETY: the stream is destroyed when its owner is dropped.
    let stream = unsafe { Stream::from_raw_with_owner(&context, raw, owner.clone()) }.unwrap();
    let allocator = Allocator::with_config(&context, Config::new()).unwrap();
    drop(allocator.allocate(1 << 20, &stream).unwrap());
    drop(stream);
    assert_eq!(Arc::strong_count(&owner), 2, "the allocator keeps it");
    allocator.close().unwrap();
    drop(allocator);
    assert_eq!(Arc::strong_count(&owner), 1);
    let leaks = sim.leaks();
    assert_eq!(leaks.streams, 1, "it is not destroyed here");
    // SAFETY: it is not used any more.
    let code = unsafe { functions.cuStreamDestroy_v2.unwrap()(raw) };
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);

    let driver = context.driver();
    // SAFETY: the primary context, which `context` keeps.
    let borrowed =
        unsafe { Context::from_raw_with_owner(driver, context.raw(), other.clone()) }.unwrap();
    assert_eq!(borrowed.id(), context.id());
    assert_eq!(borrowed.device(), context.device());
    let stream = Stream::new(&borrowed).unwrap();
    drop(borrowed);
    assert_eq!(Arc::strong_count(&other), 2, "the stream keeps its context");
    drop(stream);
    assert_eq!(Arc::strong_count(&other), 1);
    // SAFETY: a null handle is refused.
    let refused = unsafe { Context::from_raw_with_owner(driver, null_mut(), other.clone()) };
    refused.unwrap_err();
    assert_eq!(Arc::strong_count(&other), 1);
}

/// Default streams are made without a call, and are one stream, whichever thread creates them.
#[test]
fn default_streams_are_values() {
    let (sim, context) = simulated();
    sim.record_log(true);
    let [one, two] = [(); 2].map(|()| Stream::legacy(&context));
    let own = Stream::per_thread(&context);
    assert!(sim.take_log().is_empty());
    assert_eq!(one.id().unwrap(), two.id().unwrap());
    assert_ne!(one.id().unwrap(), own.id().unwrap());
    sim.take_log();
    one.id().unwrap();
    assert!(sim.take_log().is_empty(), "asked once");
    let driver = context.driver();
    assert_eq!(driver.device(0).unwrap(), *context.device());
    assert_eq!(driver.context(0).unwrap().id(), context.id());
    assert!(driver.context(1).is_err() && sim.context(1).is_err());
}

/// Fills, copies, waits and events by the handles alone.
#[test]
fn work_is_ordered_between_streams_and_events() {
    let (sim, context) = simulated();
    let allocator = Allocator::with_config(&context, Config::new()).unwrap();
    let [a, b] = [(); 2].map(|()| Stream::new(&context).unwrap());
    let (from, to) = (
        allocator.allocate(4096, &a).unwrap(),
        allocator.allocate(4096, &b).unwrap(),
    );
    sim.set_mode(Mode::Manual);
    let event = Event::new(&context).unwrap();
    // SAFETY: both blocks live until all work is done, and the copy is behind the fill.
    unsafe {
        a.memset(from.ptr(), 7, 4096).unwrap();
        b.wait_for(&a).unwrap();
        b.memcpy(to.ptr(), from.ptr(), 4096).unwrap();
    }
    event.record(&b).unwrap();
    assert_eq!(sim.ready_streams(), [a.id().unwrap()]);
    assert!(!event.is_complete().unwrap());
    sim.complete_all();
    assert!(event.is_complete().unwrap());
    sim.set_mode(Mode::Instant);
    event.synchronize().unwrap();
    context.synchronize().unwrap();
    assert_eq!(sim.read_memory(to.ptr(), 4096).unwrap(), [7; 4096]);
    assert!(context.mem_info().unwrap().free < context.mem_info().unwrap().total);
    assert_eq!(sim.reports(), []);
}
