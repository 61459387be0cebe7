//! Orphaned allocators: no handle is left, but a capture or a driver error prevents the release of their memory.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::driver::process;
use crate::locks::held::{Locked, Mutex};

use crate::allocator::engine::{Engine, Shared};
use crate::error::Error;

/// Orphans are closed by a later call that may find the capture ended or the driver willing: when a capture is ended
/// through this crate, and when any allocator of the process is created, trimmed, synchronised, closed or dropped.
static ORPHANS: Mutex<Orphans> = Mutex::new(Orphans {
    waiting: Vec::new(),
    tries: 0,
    asked: 0,
});

struct Orphans {
    waiting: Vec<Shared>,
    /// Number of threads that are closing orphans, which are not in `waiting` meanwhile.
    tries: usize,
    /// Number of calls that requested an attempt.
    asked: u64,
}

fn orphans() -> Locked<'static, Orphans> {
    ORPHANS.lock()
}

/// Registers an engine without handles until it can be closed. Returns whether it was not registered yet.
fn wait_for_others(engine: &Engine) -> bool {
    let Some(engine) = engine.keep() else {
        return false;
    };
    let mut orphans = orphans();
    let mut waiting = orphans.waiting.iter();
    if waiting.any(|other| Arc::ptr_eq(other, &engine)) {
        return false;
    }
    orphans.waiting.push(engine);
    process::ALLOCATORS.postpone(close_orphans);
    true
}

/// Registers an engine without handles whose close failed, unless it can never succeed.
pub(crate) fn outlive_refusal(engine: &Engine, error: &Error) {
    if engine.usable().is_err() {
        log::warn!(
            "an allocator on device {} leaks its memory: {error}",
            engine.device.ordinal()
        );
        return;
    }
    if wait_for_others(engine)
        && let Some(count) = engine.log.due()
    {
        log::warn!(
            "cannot close an orphaned allocator on device {}, retrying later (occurrence {count}): {error}",
            engine.device.ordinal()
        );
    }
}

/// Registers an engine without handles until the captures that keep it open have ended.
pub(crate) fn outlive_capture(engine: &Engine) {
    if wait_for_others(engine) && !engine.orphan_logged.swap(true, Ordering::Relaxed) {
        log::warn!(
            "an orphaned allocator on device {} keeps its memory until a capture ends",
            engine.device.ordinal()
        );
    }
}

/// Whether a later call tries again to close the engine.
pub(crate) fn may_close_later(engine: &Engine) -> bool {
    let orphans = orphans();
    let mut waiting = orphans.waiting.iter();
    waiting.any(|other| std::ptr::eq(&**other, engine))
}

/// Tries to close all orphans; those that cannot be closed yet are registered again.
fn close_orphans() {
    let mut heap = orphans();
    heap.asked += 1;
    // If another thread is closing the orphans, `asked` makes it try again.
    while !heap.waiting.is_empty() {
        let asked = heap.asked;
        let tried = std::mem::take(&mut heap.waiting);
        heap.tries += 1;
        drop(heap);
        for engine in tried {
            engine.abandon();
        }
        heap = orphans();
        heap.tries -= 1;
        if heap.asked == asked {
            break;
        }
    }
    if heap.waiting.is_empty() && heap.tries == 0 {
        process::ALLOCATORS.nothing_waits();
    }
}
