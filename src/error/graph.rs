//! What graph pools refuse.

/// Why a call about a graph pool was refused. Nothing has changed, and no capture is spoilt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GraphPoolError {
    /// The pool was released, or its allocator closed.
    #[error("the graph pool was released")]
    Released,
    /// No such scope is open: it was left before.
    #[error("the scope of a graph pool was left before")]
    NotEntered,
    /// Memory of the pool is in use outside of captures, or by a capture under way.
    #[error("{bytes} bytes of the graph pool are still in use")]
    NotComplete {
        /// Bytes of memory that may be in use.
        bytes: u64,
    },
    /// Blocks that would be live again lie in memory that blocks of other pools of the family have by now.
    #[error("{bytes} bytes of the graph pool are in blocks of others of its family")]
    Taken {
        /// Bytes that both would have.
        bytes: u64,
    },
    /// No pool has this tag.
    #[error("no graph pool has the tag {tag:?}")]
    UnknownTag {
        /// The tag.
        tag: &'static str,
    },
    /// The checkpoint is another pool's, or the pool gave its addresses back since.
    #[error("the checkpoint is not of the graph pool's present addresses")]
    ForeignCheckpoint,
    /// The pool is another allocator's.
    #[error("the graph pool is of another allocator")]
    ForeignPool,
}
