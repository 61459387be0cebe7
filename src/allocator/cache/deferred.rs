//! Blocks that were dropped and cannot be freed yet: a later call frees them.

use crate::driver::{Context, Stream, StreamKind};

use crate::allocator::cache::grant::Lifetime;

/// A dropped block.
#[derive(Debug)]
pub(crate) struct Deferred {
    pub block: Lifetime,
    /// Who may use it still, as nobody could be told yet.
    pub users: Vec<User>,
}

/// Whose work a dropped block has to outlast, of which the allocator does not know.
#[derive(Debug)]
pub(crate) enum User {
    /// A stream that has the same name on every thread, as long as it is kept here.
    Stream(Stream),
    /// Streams of a context that cannot be named.
    Context(Context),
}

impl User {
    pub(crate) fn of(stream: &Stream) -> User {
        match stream.kind() {
            StreamKind::Owned | StreamKind::LegacyDefault => User::Stream(stream.clone()),
            // Its owner may destroy it once it was retired, or another thread's handle means another stream.
            StreamKind::Borrowed | StreamKind::PerThreadDefault => {
                User::Context(stream.context().clone())
            }
        }
    }
}
