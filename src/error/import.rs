//! Foreign memory that cannot be imported.

/// Why a tensor or array was rejected for import.
#[allow(missing_docs, reason = "messages name their fields")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ImportFault {
    /// A null pointer in place of a structure.
    #[error("no tensor: the pointer is null")]
    Null,
    /// A structure that was released or moved away from.
    #[error("the array was released")]
    Released,
    /// A layout of another major version, whose other fields cannot be read.
    #[error("layout version {major}.{minor} is not known")]
    Version { major: u32, minor: u32 },
    /// Memory that is neither a CUDA device's nor page-locked for one.
    #[error("the memory is of device type {device_type}, not CUDA")]
    DeviceType { device_type: i32 },
    /// Memory of another device.
    #[error("the memory is on device {actual}, not {expected}")]
    Device {
        /// Ordinal of the stream's device.
        expected: usize,
        /// Ordinal that the structure names.
        actual: i64,
    },
    /// A negative number of dimensions, or more than 32.
    #[error("{ndim} dimensions")]
    Dimensions { ndim: i32 },
    /// A tensor with dimensions but without a shape.
    #[error("no shape")]
    NoShape,
    /// A dimension with a negative length, or one for which the size of the elements overflows.
    #[error("{length} is not a valid length")]
    Length { length: i64 },
    /// A stride that leads out of the address space.
    #[error("a stride of {stride} elements is not valid")]
    Stride { stride: i64 },
    /// An element type that tensors do not have.
    #[error("unsupported element type: DLPack code {code}, {bits} bits, {lanes} lanes")]
    DType { code: u8, bits: u8, lanes: u16 },
    /// An offset that is negative, not a multiple of the element size, or overflows.
    #[error("an offset of {offset} is not valid")]
    Offset {
        /// The offset: bytes in a tensor, elements in an array.
        offset: u64,
    },
    /// An address that is not a multiple of the element size.
    #[error("{address:#x} is not aligned to {alignment} bytes")]
    Alignment { address: u64, alignment: usize },
    /// An address range that wraps.
    #[error("{bytes} bytes at {address:#x} overflow")]
    Overflow { address: u64, bytes: usize },
    /// A range beyond our own memory that it comes from.
    #[error(
        "{bytes} bytes at {address:#x} do not lie in the {memory} bytes of the memory that comes back"
    )]
    Beyond {
        address: u64,
        bytes: usize,
        memory: usize,
    },
    /// Elements without memory.
    #[error("{elements} elements without memory")]
    NoData { elements: usize },
    /// A number of buffers other than the two of a primitive array.
    #[error("{buffers} buffers, not 2")]
    Buffers { buffers: i64 },
    /// Children or a dictionary, which a primitive array does not have.
    #[error("children or a dictionary")]
    Nested,
    /// Elements that are null, or that may be.
    #[error("nulls ({nulls}, -1 for an unknown number)")]
    Nulls { nulls: i64 },
    /// A column whose length differs from that of the first column.
    #[error("{actual} rows, not {expected} as in the first column")]
    UnequalRows { expected: usize, actual: usize },
}
