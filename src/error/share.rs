//! Memory of another process.

use std::io;

use super::memory::Bytes;

/// Why a block cannot be shared with, or opened from, another process.
#[allow(missing_docs, reason = "messages name their fields")]
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ShareError {
    /// A text that is not a token of this version.
    #[error("expected a token of a shared block, found {found:?}")]
    Token { found: String },
    /// An export that must not expose bytes of other blocks.
    #[error("the export would expose {} outside the block", Bytes(*bytes))]
    ForeignBytes { bytes: u64 },
    /// The block of the token was freed; its address may be in use again.
    #[error("the shared block was freed")]
    Freed,
    /// The process that shares the block has ended.
    #[error("process {pid}, which shares the block, has ended")]
    Ended { pid: u32 },
    /// There is no way to the process that shares the block.
    #[error(
        "cannot reach process {pid}: its socket: {socket}; its descriptor: {descriptor}; run both processes in one \
         network namespace, or permit this one to trace the other"
    )]
    Unreachable {
        pid: u32,
        /// Why its socket cannot be used.
        socket: io::Error,
        /// Why its descriptor cannot be duplicated.
        descriptor: io::Error,
    },
    /// The process that shares the block refused the request.
    #[error("process {pid} refused the request: {reason}")]
    Refused { pid: u32, reason: String },
    /// The device of the memory is not visible in this process.
    #[error("the memory is on a device that this process does not see")]
    NoSuchDevice,
    /// A call of the operating system failed.
    #[error("cannot {what}: {cause}")]
    System {
        what: &'static str,
        cause: io::Error,
    },
}
