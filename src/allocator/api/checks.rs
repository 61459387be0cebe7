//! What the debug modes have found, and checks of the allocator itself.

use crate::allocator::Allocator;
use crate::allocator::engine::debug_table::Debug;
use crate::allocator::extent::invariant;
use crate::driver::process;
use crate::error::{Error, Finding};

impl Allocator {
    /// What the [debug modes](Config::debug) have found, the oldest first; the first thousand.
    pub fn findings(&self) -> Vec<Finding> {
        let debug = self.engine.debug.as_ref();
        debug
            .filter(|_| !process::is_forked_child())
            .map_or_else(Vec::new, Debug::findings)
    }

    /// Freed blocks that the [debug modes](Config::debug) could not check: because a capture was under way, the memory
    /// was suspended, or the driver failed. Such blocks are logged as well.
    pub fn unchecked_frees(&self) -> u64 {
        let debug = self.engine.debug.as_ref();
        debug.map_or(0, |debug| debug.unchecked.count())
    }

    /// Walks every structure, recomputes every number, and compares. For tests and diagnosis: its
    /// cost grows with the number of blocks. At any time and from any thread: what other threads have
    /// under way is counted as that.
    ///
    /// # Errors
    /// The first thing that does not agree. [`Error::Misused`] for a live block with bytes written behind its end, where
    /// [`Config::debug`] guards them: the streams that use each block are waited for then. In a forked child there is nothing to look at, which is one.
    pub fn check(&self) -> Result<(), Error> {
        self.engine.check_guards()?;
        match self.engine.readable() {
            Some(heap) => heap.check(),
            None => invariant::holds("the heap of a forked child", false),
        }
    }
}
