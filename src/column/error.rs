//! Errors of columns, tables and their exchange.

use std::fmt;

use crate::allocator;
use crate::buffer::BufferError;
use crate::driver::DriverError;
use crate::resource::ResourceError;

use super::element::ElementType;

/// Why a call on a column or table failed. Nothing has changed then, unless a variant says so.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ColumnError {
    /// The allocator refused.
    #[error(transparent)]
    Allocator(#[from] allocator::Error),
    /// The resource refused.
    #[error(transparent)]
    Resource(#[from] ResourceError),
    /// An owned block that was given up already.
    #[error("there is no block")]
    NoBlock,
    /// A copy from or to the host failed. What it was to write is undefined then.
    #[error(transparent)]
    Buffer(#[from] BufferError),
    /// A driver call failed. What a copy was to write is undefined then.
    #[error("a driver call failed")]
    Driver(#[from] DriverError),
    /// More bytes than an address space has.
    #[error("{rows} rows of {element} are too many")]
    TooLarge {
        /// Rows asked for.
        rows: usize,
        /// Their type.
        element: ElementType,
    },
    /// Elements seen as another type than theirs.
    #[error("elements of type {actual}, not {expected}")]
    WrongType {
        /// The type asked for.
        expected: ElementType,
        /// The column's.
        actual: ElementType,
    },
    /// Host memory of another length than the column's.
    #[error("{actual} rows where {expected} are needed")]
    WrongLength {
        /// The column's rows.
        expected: usize,
        /// Rows given.
        actual: usize,
    },
    /// A block that is smaller than the column it was to become.
    #[error("{needed} bytes do not fit into a block of {usable}")]
    BlockTooSmall {
        /// Bytes of the rows.
        needed: usize,
        /// Usable bytes of the block.
        usable: u64,
    },
    /// A column that others let us read only.
    #[error("the column is read-only")]
    ReadOnly,
    /// A stream that takes part is being captured into a graph.
    #[error("stream {stream:#x} is capturing")]
    Capturing {
        /// The stream's handle.
        stream: usize,
    },
    /// 0 as a stream in the exchange protocol, where it could mean two streams, or a negative number
    /// without a meaning.
    #[error("{value} does not name a stream")]
    InvalidStream {
        /// What was given.
        value: i64,
    },
    /// Memory of somebody else was offered that is not what a column needs.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// A table whose number of columns is not its schema's.
    #[error("{columns} columns for a schema of {fields}")]
    Arity {
        /// Columns given.
        columns: usize,
        /// Fields of the schema.
        fields: usize,
    },
    /// A column of a table whose type is not its field's.
    #[error("column {index} is {actual}, its field {expected}")]
    FieldType {
        /// Position of the column.
        index: usize,
        /// The field's type.
        expected: ElementType,
        /// The column's.
        actual: ElementType,
    },
    /// A column of a table that has not as many rows as the table has capacity.
    #[error("column {index} has {rows} rows, the table's capacity is {capacity}")]
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
    OverCapacity {
        /// Logical rows.
        rows: u64,
        /// Rows there is room for.
        capacity: usize,
    },
    /// The host's copy of a table's row count is set already.
    #[error("the row count is known already: {rows}")]
    RowsAlreadySet {
        /// The count that is kept.
        rows: u64,
    },
}

impl ColumnError {
    /// The driver's error behind this one, if there is one.
    pub fn driver_error(&self) -> Option<DriverError> {
        match self {
            ColumnError::Allocator(error) => error.driver_error(),
            ColumnError::Driver(error) => Some(*error),
            ColumnError::Buffer(error) => error.driver_error(),
            ColumnError::Resource(error) => error.driver_error(),
            _ => None,
        }
    }
}

/// What is wrong with a tensor or array that was offered for import.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Invalid {
    /// A null pointer instead of a structure.
    #[error("no tensor: the pointer is null")]
    Null,
    /// A structure that was released or moved away from.
    #[error("the array was released")]
    Released,
    /// A layout of another major version: nothing else in it could be read.
    #[error("layout version {major}.{minor} is not known")]
    Version {
        /// Major version.
        major: u32,
        /// Minor version.
        minor: u32,
    },
    /// Memory that is no CUDA device memory.
    #[error("the memory is of device type {device_type}, not CUDA")]
    DeviceType {
        /// The type's number.
        device_type: i32,
    },
    /// Memory of another device.
    #[error("the memory is on device {actual}, not {expected}")]
    Device {
        /// Ordinal of the stream's device.
        expected: usize,
        /// Ordinal that the structure names.
        actual: i64,
    },
    /// Not one dimension.
    #[error("{ndim} dimensions, not 1")]
    Dimensions {
        /// Dimensions.
        ndim: i32,
    },
    /// A tensor with a dimension but without a shape.
    #[error("no shape")]
    NoShape,
    /// A negative number of rows, or so many that their bytes overflow.
    #[error("{rows} is not a valid number of rows")]
    Rows {
        /// Rows.
        rows: i64,
    },
    /// Elements that do not follow each other.
    #[error("a stride of {stride} elements, not 1")]
    Stride {
        /// Elements.
        stride: i64,
    },
    /// An element type that columns do not have.
    #[error("element type with code {code}, {bits} bits, {lanes} lanes")]
    ElementType {
        /// DLPack's code.
        code: u8,
        /// Bits of a lane.
        bits: u8,
        /// Lanes.
        lanes: u16,
    },
    /// An offset that is no multiple of the element's size, negative, or overflows.
    #[error("an offset of {offset} is not valid")]
    Offset {
        /// The offset: bytes in a tensor, elements in an array.
        offset: u64,
    },
    /// An address that is no multiple of the element's size.
    #[error("{address:#x} is not aligned to {alignment} bytes")]
    Alignment {
        /// The first element's address.
        address: u64,
        /// Bytes.
        alignment: usize,
    },
    /// An address range that wraps.
    #[error("{bytes} bytes at {address:#x} overflow")]
    Overflow {
        /// The first element's address.
        address: u64,
        /// Bytes.
        bytes: usize,
    },
    /// More than the memory of ours that comes back.
    #[error(
        "{bytes} bytes at {address:#x} do not lie in the {memory} bytes of the memory that comes back"
    )]
    Beyond {
        /// The first element's address.
        address: u64,
        /// Bytes of the elements.
        bytes: usize,
        /// Bytes of the memory.
        memory: usize,
    },
    /// No memory, though there are rows.
    #[error("{rows} rows without memory")]
    NoData {
        /// Rows.
        rows: usize,
    },
    /// Another number of buffers than the two of a primitive array.
    #[error("{buffers} buffers, not 2")]
    Buffers {
        /// Buffers.
        buffers: i64,
    },
    /// Children or a dictionary, which a primitive array has not.
    #[error("children or a dictionary")]
    Nested,
    /// Elements that are null, or that may be.
    #[error("nulls ({nulls}, -1 for an unknown number)")]
    Nulls {
        /// Their number.
        nulls: i64,
    },
    /// A column of another length than the ones before it.
    #[error("{actual} rows, not {expected} as in the first column")]
    UnequalRows {
        /// Rows of the first column.
        expected: usize,
        /// Rows of this one.
        actual: usize,
    },
}

/// What could not become a column, given back as it was, and why.
#[derive(thiserror::Error)]
#[error("not a column")]
pub struct ImportError<T> {
    /// What was offered: still owned, so that dropping it releases it.
    pub offered: Box<T>,
    /// The reason.
    #[source]
    pub error: ColumnError,
}

// By hand: a derived one would ask for `T: Debug`.
impl<T> fmt::Debug for ImportError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ImportError")
            .field("error", &self.error)
            .finish_non_exhaustive()
    }
}

impl<T> From<ImportError<T>> for ColumnError {
    /// Releases what was offered.
    fn from(refused: ImportError<T>) -> ColumnError {
        refused.error
    }
}
