//! The state of the heap for another thread while a call waits for the driver.
//!
//! The heap's lock is free during driver calls, so a look at them before and after each call shows what
//! any thread can come to see.

use crate::common::prelude::*;
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};

thread_local! {
    static LOOKED_AT: RefCell<Option<Allocator>> = const { RefCell::new(None) };
    /// Calls beside which something was wrong.
    static FAILED: RefCell<String> = const { RefCell::new(String::new()) };
    static LOOKS: Cell<u64> = const { Cell::new(0) };
}

/// Calls around most others, which change nothing that a program can observe.
const ENTERS: [&str; 4] = [
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuThreadExchangeStreamCaptureMode",
    "cuStreamGetId",
];

/// A look at the heap and at what they tell of the memory.
fn look(call: &str) {
    if ENTERS.contains(&call) {
        return;
    }
    let Some(allocator) = LOOKED_AT.take() else {
        return;
    };
    // A panic must not pass through the driver's functions.
    let seen = catch_unwind(AssertUnwindSafe(|| {
        allocator.check().unwrap_or_else(|e| panic!("{e}"));
        // A snapshot empties the large-block caches: at every second look there is none.
        if LOOKS.get().is_multiple_of(2) {
            return;
        }
        for segment in allocator.snapshot().iter().filter(|s| !s.view) {
            let end = segment.blocks.iter().fold(segment.address, |at, block| {
                assert_eq!(block.address, at, "{segment:?}");
                at + block.size
            });
            assert_eq!(end, segment.address + segment.size, "{segment:?}");
        }
    }));
    LOOKS.set(LOOKS.get() + 1);
    match seen {
        Ok(()) => LOOKED_AT.set(Some(allocator)),
        Err(_) => FAILED.set(FAILED.take() + " " + call),
    }
}

/// Puts looks around the calls of a simulator.
pub fn install(sim: &Simulator) {
    sim.before(|moment| look(moment.call));
    sim.after(|moment| look(moment.call));
}

/// Runs `act` with a look at the allocator's heap beside each driver call.
pub fn looking_at<T>(allocator: &Allocator, act: impl FnOnce() -> T) -> T {
    LOOKED_AT.set(Some(allocator.clone()));
    let result = act();
    LOOKED_AT.take();
    let failed = FAILED.take();
    assert!(failed.is_empty(), "what was seen beside{failed} is above");
    result
}

/// Looks of this thread so far.
pub fn looks() -> u64 {
    LOOKS.get()
}
