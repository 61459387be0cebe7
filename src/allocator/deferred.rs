//! Blocks that were dropped and cannot be freed yet: a later call frees them.

use std::sync::atomic::Ordering;

use crate::driver::{Context, Stream, StreamKind};

use super::engine::Engine;
use super::error::Error;
use super::grant::Lifetime;

/// A dropped block.
#[derive(Debug)]
pub(crate) struct Deferred {
    block: Lifetime,
    /// Who may use it still, as nobody could be told yet.
    users: Vec<User>,
}

/// Whose work a dropped block has to outlast, of which the allocator does not know.
#[derive(Debug)]
pub(crate) enum User {
    /// A stream that has the same name on every thread.
    Stream(Stream),
    /// Streams of a context that cannot be named.
    Context(Context),
}

impl User {
    pub(crate) fn of(stream: &Stream) -> User {
        match stream.kind() {
            // On another thread the handle means another stream.
            StreamKind::PerThreadDefault => User::Context(stream.context().clone()),
            _ => User::Stream(stream.clone()),
        }
    }
}

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

    fn tell(&self, block: &Lifetime, user: &User) -> Result<(), Error> {
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
            let mut state = self.lock();
            state.deferred.push(Deferred { block, users });
            // Under the lock: whoever takes the last handle away sees one or the other.
            self.deferred.store(true, Ordering::Relaxed);
            state.orphaned
        };
        if orphaned {
            self.outlive_capture();
        }
    }
}
