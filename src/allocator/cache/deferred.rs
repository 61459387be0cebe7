//! Dropped blocks that could not be freed immediately: a later call frees them.

use crate::driver::{Context, Stream, StreamKind};

use crate::allocator::cache::grant::Lifetime;

/// A dropped block.
#[derive(Debug)]
pub(crate) struct Deferred {
    pub block: Lifetime,
    /// Users that may still access it, because their uses could not be recorded yet.
    pub users: Vec<User>,
}

/// Work that must complete before a dropped block is freed, and that the allocator does not know about.
#[derive(Debug)]
pub(crate) enum User {
    /// A stream with the same handle on every thread, kept alive here.
    Stream(Stream),
    /// Streams of a context that cannot be named.
    Context(Context),
}

impl User {
    pub(crate) fn of(stream: &Stream) -> User {
        match stream.kind() {
            StreamKind::Owned | StreamKind::LegacyDefault => User::Stream(stream.clone()),
            // A borrowed stream may be destroyed after its retirement, and the handle of a per-thread default stream
            // means another stream on another thread.
            StreamKind::Borrowed | StreamKind::PerThreadDefault => {
                User::Context(stream.context().clone())
            }
        }
    }
}
