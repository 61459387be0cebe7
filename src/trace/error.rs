//! Why a trace or a log cannot be read.

use std::io;

/// The first line of every trace.
pub(super) const HEADER: &str = "op,id,bytes,stream";

/// The longest line that a file may have; the longest valid one is far shorter. It keeps a file of another kind from being
/// read into memory as one line.
pub(super) const LINE_LIMIT: u64 = 1024;

/// Stream numbers are below this.
pub(super) const STREAM_LIMIT: u64 = 1 << 32;

/// A trace could not be read: the line, and what is wrong with it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The file could not be read on.
    #[error("line {line}: cannot be read")]
    Read {
        /// The line of the file, counted from 1; the header is line 1.
        line: u64,
        /// What the reader said.
        source: io::Error,
    },
    /// The first line is not the header.
    #[error("line {line}: the first line must be `{HEADER}`, not `{found}`")]
    Header {
        /// The line of the file, counted from 1; the header is line 1.
        line: u64,
        /// The first line.
        found: String,
    },
    /// The line is longer than any row can be.
    #[error("line {line}: longer than {LINE_LIMIT} bytes")]
    LineTooLong {
        /// The line of the file, counted from 1; the header is line 1.
        line: u64,
    },
    /// The first field is none of `a`, `f`, `c` and `oom`.
    #[error("line {line}: unknown op `{found}`")]
    UnknownOp {
        /// The line of the file, counted from 1; the header is line 1.
        line: u64,
        /// The field.
        found: String,
    },
    /// The row ends too early.
    #[error("line {line}: the field `{field}` is missing")]
    FieldMissing {
        /// The line of the file, counted from 1; the header is line 1.
        line: u64,
        /// The name of the first missing field.
        field: &'static str,
    },
    /// The row has more fields than there are columns.
    #[error("line {line}: more fields than columns")]
    FieldsLeftOver {
        /// The line of the file, counted from 1; the header is line 1.
        line: u64,
    },
    /// A field is not an unsigned decimal integer of at most 64 bits.
    #[error("line {line}: `{field}` must be a whole number from 0 to {max}, not `{found}`", max = u64::MAX)]
    NotANumber {
        /// The line of the file, counted from 1; the header is line 1.
        line: u64,
        /// The name of the field.
        field: &'static str,
        /// The field.
        found: String,
    },
    /// A field of a log is not what its column has.
    #[error("line {line}: `{field}`: expected {expected}, found `{found}`")]
    Field {
        /// The line of the file, counted from 1; the header is line 1.
        line: u64,
        /// The name of the column.
        field: &'static str,
        /// What the column has.
        expected: &'static str,
        /// The field.
        found: String,
    },
    /// A new block's id does not follow the last one.
    #[error("line {line}: the next new id is {expected}, not {found}")]
    IdOutOfOrder {
        /// The line of the file, counted from 1; the header is line 1.
        line: u64,
        /// The id a new block has here.
        expected: u64,
        /// The id of the row.
        found: u64,
    },
    /// A block of no bytes is requested.
    #[error("line {line}: expected a request of at least 1 byte, found 0 bytes")]
    ZeroBytes {
        /// The line of the file, counted from 1; the header is line 1.
        line: u64,
    },
    /// A block is freed or completed that has not been allocated.
    #[error("line {line}: block {id} has not been allocated")]
    UnknownId {
        /// The line of the file, counted from 1; the header is line 1.
        line: u64,
        /// The block.
        id: u64,
    },
    /// A block is freed again.
    #[error("line {line}: block {id} is freed a second time")]
    FreedTwice {
        /// The line of the file, counted from 1; the header is line 1.
        line: u64,
        /// The block.
        id: u64,
    },
    /// A block completes that its owner has not given up.
    #[error("line {line}: block {id} completes before it is freed")]
    CompletedBeforeFreed {
        /// The line of the file, counted from 1; the header is line 1.
        line: u64,
        /// The block.
        id: u64,
    },
    /// A block completes again.
    #[error("line {line}: block {id} completes a second time")]
    CompletedTwice {
        /// The line of the file, counted from 1; the header is line 1.
        line: u64,
        /// The block.
        id: u64,
    },
    /// A stream number has more than 32 bits.
    #[error("line {line}: stream {found} is not below {STREAM_LIMIT}")]
    StreamTooLarge {
        /// The line of the file, counted from 1; the header is line 1.
        line: u64,
        /// The number.
        found: u64,
    },
    /// A block is freed or completed on another stream than its own.
    #[error("line {line}: block {id} belongs to stream {expected}, not {found}")]
    StreamChanged {
        /// The line of the file, counted from 1; the header is line 1.
        line: u64,
        /// The block.
        id: u64,
        /// The stream it was allocated on.
        expected: u32,
        /// The stream of the row.
        found: u32,
    },
    /// The blocks live at the same time have more than 2^64 bytes.
    #[error("line {line}: the live blocks have more bytes than 64 bits can count")]
    LiveBytesOverflow {
        /// The line of the file, counted from 1; the header is line 1.
        line: u64,
    },
}

impl TraceError {
    /// The line of the file, counted from 1; the header is line 1.
    pub fn line(&self) -> u64 {
        match self {
            TraceError::Read { line, .. }
            | TraceError::Header { line, .. }
            | TraceError::LineTooLong { line, .. }
            | TraceError::UnknownOp { line, .. }
            | TraceError::FieldMissing { line, .. }
            | TraceError::FieldsLeftOver { line, .. }
            | TraceError::NotANumber { line, .. }
            | TraceError::Field { line, .. }
            | TraceError::IdOutOfOrder { line, .. }
            | TraceError::ZeroBytes { line }
            | TraceError::UnknownId { line, .. }
            | TraceError::FreedTwice { line, .. }
            | TraceError::CompletedBeforeFreed { line, .. }
            | TraceError::CompletedTwice { line, .. }
            | TraceError::StreamTooLarge { line, .. }
            | TraceError::StreamChanged { line, .. }
            | TraceError::LiveBytesOverflow { line, .. } => *line,
        }
    }
}
