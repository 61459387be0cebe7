//! Invalid arguments and streams.

use crate::dtype::DType;

/// Why an argument is invalid.
#[allow(missing_docs, reason = "messages name their fields")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidArgument {
    /// A request of zero bytes or of more than any device has.
    #[error("invalid size: {bytes} bytes")]
    Size { bytes: u64 },
    /// An alignment that is not a power of two, or larger than supported.
    #[error("invalid alignment: {bytes} bytes")]
    Alignment { bytes: u64 },
    /// Elements whose total size exceeds the address space.
    #[error("too large: {len} elements of {element_bytes} bytes")]
    TooLarge { len: usize, element_bytes: usize },
    /// A number of elements other than the required one.
    #[error("expected {expected} elements, found {found}")]
    Length { expected: usize, found: usize },
    /// A size that is not a multiple of the element size of the requested type.
    #[error(
        "expected a multiple of the element size of {element_bytes} bytes, found {bytes} bytes"
    )]
    Remainder { bytes: usize, element_bytes: usize },
    /// Memory that is not aligned for its element type.
    #[error("expected an address aligned to {alignment} bytes, found {ptr:#x}")]
    Misaligned { ptr: u64, alignment: usize },
    /// Memory that is too small for its contents.
    #[error("expected at least {needed} bytes, found {usable} bytes")]
    TooSmall { needed: usize, usable: usize },
    /// A range that is empty, wraps around, is misaligned, or extends beyond the block that it begins in.
    #[error("invalid range: {bytes} bytes at {ptr:#x}")]
    Range { ptr: u64, bytes: u64 },
    /// Elements accessed as another type than their own.
    #[error("expected elements of type {expected}, found {found}")]
    DType { expected: DType, found: DType },
    /// More dimensions than a tensor can have, or a number other than that of a column.
    #[error("expected at most {most} dimensions, found {found}")]
    Dimensions { found: usize, most: usize },
    /// Elements that are not contiguous where they have to be.
    #[error("expected contiguous elements")]
    Strided,
    /// A column of a table whose type is not its field's.
    #[error("column {index}: expected type {expected}, found {found}")]
    FieldType {
        index: usize,
        expected: DType,
        found: DType,
    },
    /// A table whose number of columns differs from that of its schema.
    #[error("expected {fields} columns, found {columns}")]
    Arity { columns: usize, fields: usize },
    /// A column whose number of rows differs from the table's capacity.
    #[error("column {index}: expected {capacity} rows, found {rows}")]
    ColumnRows {
        index: usize,
        rows: usize,
        capacity: usize,
    },
    /// More logical rows than the capacity of a table.
    #[error("expected at most {capacity} rows, found {rows}")]
    Rows { rows: u64, capacity: usize },
    /// The host's copy of a table's row count was already set.
    #[error("the row count is already set to {rows}")]
    RowsAlreadySet { rows: u64 },
    /// An invalid value.
    #[error("invalid value of {what}: {value}")]
    Setting { what: &'static str, value: u64 },
    /// Settings that contradict each other.
    #[error("{larger} ({value}) is above {bound} ({limit})")]
    Contradiction {
        larger: &'static str,
        value: u64,
        bound: &'static str,
        limit: u64,
    },
}

impl InvalidArgument {
    /// Returns the class of the argument for logs.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            InvalidArgument::Size { .. } | InvalidArgument::TooLarge { .. } => "invalid size",
            InvalidArgument::Alignment { .. } => "invalid alignment",
            _ => "invalid argument",
        }
    }
}

/// Why a stream, or its use, was rejected.
#[allow(missing_docs, reason = "messages name their fields")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StreamMisuse {
    /// The resource does not track uses on other streams, so it must not accept one.
    #[error("the resource does not track uses: {asked} on stream {stream} would be ignored")]
    NotTracked {
        asked: &'static str,
        /// The driver's id of the stream.
        stream: u64,
    },
    /// The stream belongs to another driver: its id and its handle are invalid here.
    #[error("the stream belongs to another driver")]
    ForeignDriver,
    /// The stream was never used with this allocator.
    #[error("stream {stream:#x} is not registered with this allocator")]
    Unknown {
        /// The stream's handle, or its id if the call took an id.
        stream: u64,
    },
    /// The stream is the per-thread default stream of another thread. This thread has no handle for it, so the
    /// operation must be made by that thread.
    #[error("the per-thread default stream belongs to another thread")]
    WrongThread,
    /// A stream argument of the exchange protocol that names no stream: 0, which would be ambiguous, or an undefined
    /// negative number.
    #[error("expected a stream, found {value}")]
    NotAStream { value: i64 },
    /// The block was freed directly, bypassing the resource that orders its uses
    /// ([`AccessOrdered`](crate::resource::AccessOrdered)) and alone knows when they are complete.
    #[error("cannot free the block: only the resource that orders its uses may free it")]
    KeptAbove,
    /// The launch recorder was called out of order.
    #[error("cannot {asked}: {because}")]
    LaunchOrder {
        asked: &'static str,
        because: &'static str,
    },
}
