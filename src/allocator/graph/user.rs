//! Streams that use memory of graph pools, in captures and outside of them.

use std::sync::Arc;
use std::thread::{self, ThreadId};

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
    /// The capture in which it became a user; none if it was outside of captures.
    pub since: Option<u64>,
    /// The thread that named it.
    pub thread: ThreadId,
    /// Who touches the handle beside the heap's lock holds a copy meanwhile: a stream that is retired leaves after
    /// that.
    pub token: Arc<()>,
}

impl User {
    pub(crate) fn new(key: StreamKey, raw: usize, stream: Option<Stream>) -> User {
        User {
            key,
            raw,
            stream,
            since: None,
            thread: thread::current().id(),
            token: Arc::default(),
        }
    }

    /// The same user with a token of its own, for lists that nobody asks the driver about.
    pub(crate) fn listed(&self) -> User {
        User {
            token: Arc::default(),
            ..self.clone()
        }
    }

    /// What tells the stream from others, without keeping it alive.
    pub(crate) fn name(&self) -> User {
        User {
            stream: None,
            ..self.listed()
        }
    }

    /// Whether both are one stream, as far as that is known.
    pub(crate) fn is(&self, other: &User) -> bool {
        let by_handle = |key| matches!(key, StreamKey::Handle(_));
        self.key == other.key
            || (self.raw == other.raw && (by_handle(self.key) || by_handle(other.key)))
    }
}
