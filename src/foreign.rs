//! Code that is not ours: hooks, callbacks and listeners.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs code of the user's. A panic in it is logged and goes no further: the caller may be half-way
/// through a change, dropping something, or called by code that cannot unwind.
pub(crate) fn guarded<T>(what: &str, run: impl FnOnce() -> T) -> Option<T> {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(value) => Some(value),
        Err(panic) => {
            // What was thrown may panic when it is dropped, and so may a logger.
            let told = catch_unwind(AssertUnwindSafe(|| {
                drop(panic);
                log::error!("{what} panicked");
            }));
            std::mem::forget(told);
            None
        }
    }
}
