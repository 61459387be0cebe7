//! Calls of the program's code: hooks, callbacks and listeners.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs the program's code. A panic in it is logged and stopped here: the caller may be in the middle of a change, in a
/// destructor, or called by code that cannot unwind.
pub(crate) fn guarded<T>(what: &str, run: impl FnOnce() -> T) -> Option<T> {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(value) => Some(value),
        Err(panic) => {
            // Dropping the payload of a panic may panic, and so may a logger.
            let told = catch_unwind(AssertUnwindSafe(|| {
                drop(panic);
                log::error!("{what} panicked");
            }));
            std::mem::forget(told);
            None
        }
    }
}
