//! Arguments and streams that a call cannot take.

use crate::dtype::DType;

/// Why an argument cannot be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidArgument {
    /// A request of zero bytes or of more than any device has.
    #[error("{bytes} bytes is not a valid size")]
    Size {
        /// Bytes asked for.
        bytes: u64,
    },
    /// An alignment that is no power of two, or above what can be given.
    #[error("{bytes} is not a valid alignment")]
    Alignment {
        /// Bytes asked for.
        bytes: u64,
    },
    /// Elements of more bytes together than an address space has.
    #[error("{len} elements of {element_bytes} bytes are too many")]
    TooLarge {
        /// Elements asked for.
        len: usize,
        /// Bytes of each.
        element_bytes: usize,
    },
    /// Another number of elements than is needed.
    #[error("expected {expected} elements, found {found}")]
    Length {
        /// Elements that are needed.
        expected: usize,
        /// Elements given.
        found: usize,
    },
    /// Bytes that are no whole number of elements, seen as another type.
    #[error("{bytes} bytes are not a multiple of the element size of {element_bytes} bytes")]
    Remainder {
        /// Bytes there are.
        bytes: usize,
        /// Bytes of an element.
        element_bytes: usize,
    },
    /// Memory that is not aligned for its element type.
    #[error("{ptr:#x} is not aligned to {alignment} bytes")]
    Misaligned {
        /// The address.
        ptr: u64,
        /// Bytes.
        alignment: usize,
    },
    /// More bytes than the memory has that they are to lie in.
    #[error("{needed} bytes do not fit into {usable} bytes")]
    TooSmall {
        /// Bytes that are needed.
        needed: usize,
        /// Usable bytes of the memory.
        usable: usize,
    },
    /// A range that is empty, wraps around, is not aligned as it has to be, or reaches beyond the block that it
    /// begins in.
    #[error("{bytes} bytes at {ptr:#x} are not a valid range")]
    Range {
        /// First byte.
        ptr: u64,
        /// Bytes.
        bytes: u64,
    },
    /// Elements seen as another type than theirs.
    #[error("expected elements of type {expected}, found {found}")]
    DType {
        /// The type asked for.
        expected: DType,
        /// The type they are of.
        found: DType,
    },
    /// More dimensions than a tensor can have, or another number than the one of a column.
    #[error("expected at most {most} dimensions, found {found}")]
    Dimensions {
        /// Dimensions given.
        found: usize,
        /// Dimensions that are possible.
        most: usize,
    },
    /// Elements that do not follow each other, where they have to.
    #[error("expected contiguous elements")]
    Strided,
    /// A column of a table whose type is not its field's.
    #[error("column {index}: expected type {expected}, found {found}")]
    FieldType {
        /// Position of the column.
        index: usize,
        /// The field's type.
        expected: DType,
        /// The column's.
        found: DType,
    },
    /// A table whose number of columns is not its schema's.
    #[error("expected {fields} columns, found {columns}")]
    Arity {
        /// Columns given.
        columns: usize,
        /// Fields of the schema.
        fields: usize,
    },
    /// A column of a table that has not as many rows as the table has capacity.
    #[error("column {index}: expected {capacity} rows, found {rows}")]
    ColumnRows {
        /// Position of the column.
        index: usize,
        /// Its rows.
        rows: usize,
        /// Rows of the table.
        capacity: usize,
    },
    /// More logical rows than a table has room for.
    #[error("{rows} rows exceed the capacity of {capacity}")]
    Rows {
        /// Logical rows.
        rows: u64,
        /// Rows there is room for.
        capacity: usize,
    },
    /// The host's copy of a table's row count is set already.
    #[error("the row count is already set to {rows}")]
    RowsAlreadySet {
        /// The count that is kept.
        rows: u64,
    },
    /// A value that may not be set.
    #[error("{value} is not a valid value of {what}")]
    Setting {
        /// What was to be set.
        what: &'static str,
        /// The value.
        value: u64,
    },
    /// Settings that contradict each other.
    #[error("{larger} ({value}) is above {bound} ({limit})")]
    Contradiction {
        /// The setting that is too large.
        larger: &'static str,
        /// Its value.
        value: u64,
        /// The setting that bounds it.
        bound: &'static str,
        /// The bound.
        limit: u64,
    },
}

impl InvalidArgument {
    /// The class of the argument in words, for logs.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            InvalidArgument::Size { .. } | InvalidArgument::TooLarge { .. } => "invalid size",
            InvalidArgument::Alignment { .. } => "invalid alignment",
            _ => "invalid argument",
        }
    }
}

/// Why a stream, or a use on it, was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StreamMisuse {
    /// The resource does not track uses on other streams, so it must not accept one.
    #[error("the resource does not track uses: {asked} on stream {stream} would be ignored")]
    NotTracked {
        /// What was asked for.
        asked: &'static str,
        /// The driver's id of the stream.
        stream: u64,
    },
    /// The stream belongs to another driver: its id and its handle mean nothing here.
    #[error("the stream belongs to another driver")]
    ForeignDriver,
    /// The stream was never seen here.
    #[error("stream {stream:#x} is not registered with this allocator")]
    Unknown {
        /// The stream's handle, or its id if ids were asked for.
        stream: u64,
    },
    /// The stream is the per-thread default stream of another thread, which this one cannot name: what concerns
    /// that one is for its thread to ask.
    #[error("the per-thread default stream belongs to another thread")]
    WrongThread,
    /// 0 as a stream in the exchange protocol, where it could mean two streams, or a negative number
    /// without a meaning.
    #[error("{value} does not name a stream")]
    NotAStream {
        /// What was given.
        value: i64,
    },
    /// A block was to go back past the resource that keeps the order of its uses
    /// ([`AccessOrdered`](crate::resource::AccessOrdered)), which alone knows when they are over.
    #[error("the block goes back through the resource that keeps the order of its uses")]
    KeptAbove,
    /// The launch recorder was asked for a step out of its order.
    #[error("cannot {asked}: {because}")]
    LaunchOrder {
        /// What was asked for.
        asked: &'static str,
        /// What is in its way.
        because: &'static str,
    },
}
