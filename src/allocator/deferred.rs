//! Blocks that were dropped and cannot be freed yet: a later call frees them.

use crate::driver::{Context, Stream, StreamKind};

use super::grant::Lifetime;

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
