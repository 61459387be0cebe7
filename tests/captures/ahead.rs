//! Memory that is made ahead of requests, beside captures: nothing is made while one is known.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cualloc::allocator::{Allocator, Config, Policy};
use cualloc::driver::Stream;

use crate::common::capturing::*;
use crate::common::*;

fn ahead(rig: &Rig) -> Allocator {
    rig.allocator_with("policy=packed,ahead=on".parse::<Config>().unwrap())
}

fn is_ahead() -> bool {
    std::thread::current().name() == Some("cualloc-ahead")
}

/// Calls that make memory, of threads that make it ahead.
fn count(rig: &Rig) -> Arc<AtomicU64> {
    let count = Arc::<AtomicU64>::default();
    let counted = Arc::clone(&count);
    if let Some(sim) = rig.sim() {
        sim.before(move |moment| {
            if is_ahead() && moment.call != "cuCtxGetCurrent" {
                counted.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    count
}

/// Grows until something was made ahead: other tests of the process may be capturing.
fn grow(allocator: &Allocator, stream: &Stream) {
    let (before, mut live) = (allocator.stats().packing.ahead.bytes, Vec::new());
    while allocator.stats().packing.ahead.bytes == before {
        live.push(allocator.allocate(20 * MIB, stream).unwrap());
        allocator.await_ahead();
        if live.len() == 50 {
            live.clear();
            allocator.synchronize().ok();
            allocator.trim(0).unwrap();
        }
    }
}

#[test]
fn a_growth_beside_a_capture_is_followed_by_no_call() {
    only(Policy::Packed, |rig| {
        let (allocator, stream, capturing) = (ahead(rig), rig.stream(), rig.stream());
        let calls = count(rig);
        let under_way = Capturing::begin(&capturing, MODE);
        let live: Vec<_> = (0..4)
            .map(|_| allocator.allocate(20 * MIB, &stream).unwrap())
            .collect();
        allocator.await_ahead();
        assert_eq!(calls.load(Ordering::Relaxed), 0);
        assert_eq!(allocator.stats().packing.ahead.handles, 0);
        drop(under_way.end().unwrap());
        grow(&allocator, &stream);
        drop(live);
        rig.settle(&stream);
        if let Some(sim) = rig.sim() {
            sim.clear_hooks();
        }
        rig.close(&allocator);
    });
}

#[test]
fn a_capture_that_begins_between_two_steps_ends_them() {
    only(Policy::Packed, |rig| {
        let Some(sim) = rig.sim() else {
            return;
        };
        let (allocator, stream, capturing) = (ahead(rig), rig.stream(), rig.stream());
        let (begun, calls) = (capturing.clone(), Arc::<AtomicU64>::default());
        let counted = Arc::clone(&calls);
        // A step ends with the access to its memory.
        sim.after(move |moment| {
            if !is_ahead() {
                return;
            }
            if counted.load(Ordering::Relaxed) == 0 && moment.call == "cuMemSetAccess" {
                begun.begin_capture(MODE).unwrap();
                counted.store(1, Ordering::Relaxed);
            } else if moment.call == "cuMemCreate" && counted.load(Ordering::Relaxed) > 0 {
                counted.fetch_add(1, Ordering::Relaxed);
            }
        });
        grow(&allocator, &stream);
        let under_way = Capturing::begun(&capturing);
        sim.clear_hooks();
        assert_eq!(calls.load(Ordering::Relaxed), 1, "a step beside a capture");
        drop(under_way.end().unwrap());
        rig.settle(&stream);
        rig.close(&allocator);
    });
}
