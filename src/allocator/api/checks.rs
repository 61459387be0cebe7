//! Findings of the debug modes, and the check of the allocator's own metadata.

use crate::allocator::Allocator;
use crate::allocator::debug::Debug;
use crate::allocator::extent::invariant;
use crate::allocator::inspect::check::check;
use crate::driver::process;
use crate::error::{Error, Finding};

impl Allocator {
    /// Returns the findings of the [debug modes](crate::Config::debug), oldest first, at most a thousand.
    pub fn findings(&self) -> Vec<Finding> {
        let debug = self.engine.debug.as_ref();
        debug
            .filter(|_| !process::is_forked_child())
            .map_or_else(Vec::new, Debug::findings)
    }

    /// Returns the number of freed blocks that the [debug modes](crate::Config::debug) could not check because a
    /// capture was in progress, the memory was suspended, or the driver failed. These frees are logged as well.
    pub fn unchecked_frees(&self) -> u64 {
        let debug = self.engine.debug.as_ref();
        debug.map_or(0, |debug| debug.unchecked.count())
    }

    /// Verifies the metadata of the allocator: recomputes every figure and compares it. For tests and diagnosis, since
    /// its cost grows with the number of blocks. It can be called at any time from any thread.
    ///
    /// # Errors
    /// The first inconsistency. [`Error::Misused`] if bytes past the end of a live block were written and
    /// [`Config::debug`](crate::Config::debug) guards them; then the check waits for the streams of each block. In a
    /// forked child it always fails, because the metadata cannot be read there.
    pub fn check(&self) -> Result<(), Error> {
        if let Some(debug) = &self.engine.debug {
            debug.check_guards(&self.engine)?;
        }
        match self.engine.readable() {
            Some(heap) => check(&heap),
            None => invariant::holds("the heap of a forked child", false),
        }
    }
}
