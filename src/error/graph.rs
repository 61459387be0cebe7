//! Errors of graph pools.

use super::memory::Bytes;

/// Why a call about a graph pool failed. Nothing has changed, and no capture was invalidated.
#[allow(missing_docs, reason = "messages name their fields")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GraphPoolError {
    /// The pool was released, or its allocator closed.
    #[error("the graph pool was released")]
    Released,
    /// The scope is not open: it was left before.
    #[error("the scope of the graph pool has already been left")]
    NotEntered,
    /// A capture in progress, or another call, uses the pool: its checkpoint cannot be restored now.
    #[error("cannot restore the checkpoint: a capture or another call uses the graph pool ({} in use)", Bytes(*bytes))]
    NotComplete { bytes: u64 },
    /// No pool has this tag.
    #[error("no graph pool has the tag `{tag}`")]
    UnknownTag { tag: &'static str },
    /// The checkpoint belongs to another pool, or the pool has released its addresses since.
    #[error(
        "expected a checkpoint of the current addresses of the graph pool, found one of other addresses"
    )]
    ForeignCheckpoint,
    /// A predicate of a scope allocated from an allocator that has open scopes, or recorded a capturing stream.
    #[error(
        "cannot choose a graph pool in a predicate of a scope: the predicate would be asked about its own request; \
         allocate and record what it needs before the scope is entered"
    )]
    InPredicate,
    /// The source of the pool's segments returned an unusable address.
    #[error("expected a segment at a multiple of 512 bytes, found {address:#x}")]
    Misaligned { address: u64 },
    /// The pool belongs to another allocator.
    #[error("the graph pool belongs to another allocator")]
    ForeignPool,
}
