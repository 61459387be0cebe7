//! Foreign memory that cannot be imported.

/// Why a tensor or array was rejected for import.
#[allow(missing_docs, reason = "messages name their fields")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ImportFault {
    /// A null pointer in place of a structure.
    #[error("expected a tensor or an array, found a null pointer")]
    Null,
    /// A structure that was released or moved away from.
    #[error("the array was released")]
    Released,
    /// A layout of another major version, whose other fields cannot be read.
    #[error("unsupported layout version {major}.{minor}")]
    Version { major: u32, minor: u32 },
    /// Memory that is neither a CUDA device's nor page-locked for one.
    #[error("expected CUDA memory, found device type {device_type}")]
    DeviceType { device_type: i32 },
    /// Memory of another device.
    #[error("expected device {expected}, found device {actual}")]
    Device {
        /// Ordinal of the stream's device.
        expected: usize,
        /// Ordinal that the structure names.
        actual: i64,
    },
    /// A negative number of dimensions, or more than 32.
    #[error("expected 0 to 32 dimensions, found {ndim}")]
    Dimensions { ndim: i32 },
    /// A tensor with dimensions but without a shape.
    #[error("expected a shape, found a null pointer")]
    NoShape,
    /// A dimension with a negative length, or one for which the size of the elements overflows.
    #[error("invalid length: {length} elements")]
    Length { length: i64 },
    /// A stride that leads out of the address space.
    #[error("invalid stride: {stride} elements")]
    Stride { stride: i64 },
    /// An element type that tensors do not have.
    #[error("unsupported element type: DLPack code {code}, {bits} bits, {lanes} lanes")]
    DType { code: u8, bits: u8, lanes: u16 },
    /// An offset that is negative, not a multiple of the element size, or overflows.
    #[error("invalid offset: {offset}")]
    Offset {
        /// The offset: bytes in a tensor, elements in an array.
        offset: u64,
    },
    /// An address that is not a multiple of the element size.
    #[error("expected an address aligned to {alignment} bytes, found {address:#x}")]
    Alignment { address: u64, alignment: usize },
    /// An address range that wraps.
    #[error("{bytes} bytes at {address:#x} exceed the address space")]
    Overflow { address: u64, bytes: usize },
    /// A range beyond our own memory that it comes from.
    #[error("{bytes} bytes at {address:#x} do not lie in the exported memory of {memory} bytes")]
    Beyond {
        address: u64,
        bytes: usize,
        memory: usize,
    },
    /// Elements without memory.
    #[error("expected memory for {elements} elements, found a null pointer")]
    NoData { elements: usize },
    /// A number of buffers other than the two of a primitive array.
    #[error("expected 2 buffers, found {buffers}")]
    Buffers { buffers: i64 },
    /// Children or a dictionary, which a primitive array does not have.
    #[error("expected a primitive array, found children or a dictionary")]
    Nested,
    /// Elements that are null, or that may be.
    #[error("expected no nulls, found {nulls} (-1 is an unknown number)")]
    Nulls { nulls: i64 },
    /// A column whose length differs from that of the first column.
    #[error("expected {expected} rows as in the first column, found {actual}")]
    UnequalRows { expected: usize, actual: usize },
}
