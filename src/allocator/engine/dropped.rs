//! Blocks whose owner went out of scope: freed now, or when that can be.

use std::sync::atomic::Ordering;

use crate::allocator::cache::deferred::{Deferred, User};
use crate::allocator::cache::grant::Lifetime;
use crate::allocator::engine::Engine;
use crate::error::Error;

impl Engine {
    /// Frees what was dropped when it could not be freed.
    pub(crate) fn free_deferred(&self) {
        if !self.deferred.swap(false, Ordering::Relaxed) {
            return;
        }
        let deferred = std::mem::take(&mut self.lock().deferred);
        for Deferred { block, users } in deferred {
            // One that cannot be freed yet is deferred again in there.
            self.drop_after(block, users);
        }
    }

    /// Frees a block whose owner went out of scope once these have been recorded, or waited for.
    pub(crate) fn drop_after(&self, block: Lifetime, mut users: Vec<User>) {
        // As in `drop_block`.
        if self.usable().is_err() {
            return;
        }
        let mut refused = None;
        users.retain(|user| match self.tell(&block, user) {
            Ok(()) => false,
            Err(error) => {
                refused = Some(error);
                true
            }
        });
        let Some(error) = refused else {
            return self.drop_block(block);
        };
        self.defer(block, users);
        if !matches!(error, Error::Capturing { .. })
            && let Some(count) = self.log.due()
        {
            log::warn!(
                "a dropped block is freed later, its last use could not be recorded ({count} such \
                 events): {error}"
            );
        }
    }

    pub(crate) fn tell(&self, block: &Lifetime, user: &User) -> Result<(), Error> {
        match user {
            User::Stream(stream) => self.record(block.ptr, &self.named(stream)?, false),
            User::Context(context) => {
                match context.enter().and_then(|entered| entered.synchronize()) {
                    // One that is lost runs nothing any more.
                    Err(error) if error.is_fatal() => Ok(()),
                    result => result.map_err(|error| self.error(error)),
                }
            }
        }
    }

    pub(crate) fn defer(&self, block: Lifetime, users: Vec<User>) {
        let orphaned = {
            let mut heap = self.lock();
            heap.deferred.push(Deferred { block, users });
            // Under the lock: whoever takes the last handle away sees one or the other.
            self.deferred.store(true, Ordering::Relaxed);
            heap.orphaned
        };
        if orphaned {
            self.outlive_capture();
        }
    }

    /// Frees a block whose owner went out of scope: what cannot be done now is done later.
    pub(crate) fn drop_block(&self, block: Lifetime) {
        // In a child, after a loss or at exit there is nothing to give back to, and in a child the
        // lock may be held by a thread that does not exist there.
        if self.usable().is_err() {
            return;
        }
        match self.free_block(&block) {
            Ok(()) => {}
            Err(Error::Capturing { .. }) => self.defer(block, Vec::new()),
            // In a child, after a loss or at exit there is nothing to give back to.
            Err(
                Error::ForkedChild | Error::Exiting | Error::ContextLost(_) | Error::NotLive { .. },
            ) => {}
            Err(error) => {
                self.defer(block, Vec::new());
                if let Some(count) = self.log.due() {
                    log::warn!(
                        "a dropped block is freed later, now it could not be ({count} such \
                         events): {error}"
                    );
                }
            }
        }
    }
}
