//! Streams that use memory of graph pools, in captures and outside of them.

use crate::allocator::stream::slot::StreamKey;
use crate::driver::Stream;

/// A stream as it was named when it began to use a block.
#[derive(Debug, Clone)]
pub(crate) struct User {
    /// By its handle alone where it was captured then and has no name of its own: nobody may ask for that.
    pub key: StreamKey,
    pub raw: usize,
    /// Keeps the stream alive, where that can be had.
    pub stream: Option<Stream>,
}

impl User {
    /// What tells the stream from others, without keeping it alive.
    pub(crate) fn name(&self) -> User {
        User {
            stream: None,
            ..*self
        }
    }

    /// Whether both are one stream, as far as that is known.
    pub(crate) fn is(&self, other: &User) -> bool {
        let by_handle = |key| matches!(key, StreamKey::Handle(_));
        self.key == other.key
            || (self.raw == other.raw && (by_handle(self.key) || by_handle(other.key)))
    }
}
