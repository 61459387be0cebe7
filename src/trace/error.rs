//! Why a trace or a log cannot be read.

use std::error::Error;
use std::{fmt, io};

/// The first line of every trace.
pub(super) const HEADER: &str = "op,id,bytes,stream";

/// The maximum length of a line; the longest valid one is far shorter. It prevents a file of another kind from being
/// read into memory as one line.
pub(super) const LINE_LIMIT: u64 = 1024;

/// Stream numbers are below this.
pub(super) const STREAM_LIMIT: u64 = 1 << 32;

/// A trace or a log could not be read: the line and its fault.
#[derive(Debug)]
pub struct TraceError {
    line: u64,
    fault: TraceFault,
}

/// The fault of a line of a trace or a log.
#[allow(missing_docs, reason = "messages name their fields")]
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceFault {
    /// Reading the file failed.
    #[error("cannot be read")]
    Read { source: io::Error },
    /// The first line is not the header.
    #[error("expected the header `{HEADER}`, found `{found}`")]
    Header { found: String },
    /// The line is longer than any row can be.
    #[error("longer than {LINE_LIMIT} bytes")]
    LineTooLong,
    /// The first field is none of `a`, `f`, `c` and `oom`.
    #[error("unknown op `{found}`")]
    UnknownOp { found: String },
    /// The row ends too early.
    #[error("the field `{field}` is missing")]
    FieldMissing { field: &'static str },
    /// The row has more fields than there are columns.
    #[error("more fields than columns")]
    FieldsLeftOver,
    /// A field is not an unsigned decimal integer of at most 64 bits.
    #[error("`{field}`: expected a whole number from 0 to {max}, found `{found}`", max = u64::MAX)]
    NotANumber { field: &'static str, found: String },
    /// A field of a log is not of the kind that its column requires.
    #[error("`{field}`: expected {expected}, found `{found}`")]
    Field {
        field: &'static str,
        expected: &'static str,
        found: String,
    },
    /// A new block's id does not follow the last one.
    #[error("expected {expected} as the next new id, found {found}")]
    IdOutOfOrder { expected: u64, found: u64 },
    /// A block of 0 bytes is requested.
    #[error("expected a request of at least 1 byte, found 0 bytes")]
    ZeroBytes,
    /// A block that was not allocated is freed or completed.
    #[error("block {id} has not been allocated")]
    UnknownId { id: u64 },
    /// A block is freed again.
    #[error("block {id} is freed a second time")]
    FreedTwice { id: u64 },
    /// A block completes before it was freed.
    #[error("block {id} completes before it is freed")]
    CompletedBeforeFreed { id: u64 },
    /// A block completes again.
    #[error("block {id} completes a second time")]
    CompletedTwice { id: u64 },
    /// A stream number has more than 32 bits.
    #[error("expected a stream below {STREAM_LIMIT}, found {found}")]
    StreamTooLarge { found: u64 },
    /// A block is freed or completed on a stream other than its own.
    #[error("block {id}: expected stream {expected}, found {found}")]
    StreamChanged { id: u64, expected: u32, found: u32 },
    /// The total size of the blocks live at the same time exceeds 2^64 bytes.
    #[error("the live blocks have more bytes than 64 bits can count")]
    LiveBytesOverflow,
}

impl TraceFault {
    pub(super) fn at(self, line: u64) -> TraceError {
        TraceError { line, fault: self }
    }
}

impl TraceError {
    /// The line of the file, counted from 1; the header is line 1.
    pub fn line(&self) -> u64 {
        self.line
    }

    /// The fault.
    pub fn fault(&self) -> &TraceFault {
        &self.fault
    }
}

impl fmt::Display for TraceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.fault)
    }
}

impl Error for TraceError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.fault.source()
    }
}
