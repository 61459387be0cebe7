//! Allocators that nobody can name any more, and that a capture or a refusal of the driver keeps from giving
//! their memory back.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::driver::process;
use crate::locks::held::{Locked, Mutex};

use crate::allocator::engine::{Engine, Shared};
use crate::error::Error;

/// Each is closed by a later call that may find the capture ended, or the driver willing: when a capture is
/// ended through this crate, and when any allocator of the process is made, trimmed, synchronised, closed or
/// dropped.
static ORPHANS: Mutex<Orphans> = Mutex::new(Orphans {
    waiting: Vec::new(),
    tries: 0,
    asked: 0,
});

struct Orphans {
    waiting: Vec<Shared>,
    /// Threads that try to close some, which are not among those that wait meanwhile.
    tries: usize,
    /// How often somebody asked to have it tried.
    asked: u64,
}

fn orphans() -> Locked<'static, Orphans> {
    ORPHANS.lock()
}

impl Engine {
    /// Keeps an engine that has no handle left until it can be closed. Whether it was not kept yet.
    fn wait_for_others(&self) -> bool {
        let Some(engine) = self.keep() else {
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

    /// Keeps an engine that has no handle left because its end went wrong, unless it can never go well.
    pub(crate) fn outlive_refusal(&self, error: &Error) {
        if self.usable().is_err() {
            log::warn!(
                "an allocator on device {} leaks its memory: {error}",
                self.device.ordinal()
            );
            return;
        }
        if self.wait_for_others()
            && let Some(count) = self.log.due()
        {
            log::warn!(
                "cannot close an orphaned allocator on device {}, retrying later (occurrence {count}): {error}",
                self.device.ordinal()
            );
        }
    }

    /// Keeps an engine that has no handle left until it can be closed.
    pub(crate) fn outlive_capture(&self) {
        if self.wait_for_others() && !self.waits.swap(true, Ordering::Relaxed) {
            log::warn!(
                "an orphaned allocator on device {} keeps its memory until a capture ends",
                self.device.ordinal()
            );
        }
    }

    /// Whether a later call tries again to close it.
    pub(crate) fn outlives_capture(&self) -> bool {
        let orphans = orphans();
        let mut waiting = orphans.waiting.iter();
        waiting.any(|other| std::ptr::eq(&**other, self))
    }
}

/// Tries to close them all; those that cannot be closed yet wait on.
fn close_orphans() {
    let mut heap = orphans();
    heap.asked += 1;
    // Where another thread has them in hand it sees that it is to try again.
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
