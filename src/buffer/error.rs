//! Errors of typed buffers.

use crate::allocator;
use crate::driver::DriverError;

/// Why a call on a buffer failed. Wrong arguments are found before any driver call, and nothing has
/// changed then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BufferError {
    /// The allocator refused.
    #[error(transparent)]
    Allocator(#[from] allocator::Error),
    /// A driver call failed. What the operation was to write is undefined then.
    #[error("a driver call failed")]
    Driver(#[from] DriverError),
    /// More bytes than an address space has.
    #[error("{len} elements of {element_bytes} bytes are too many")]
    TooLarge {
        /// Elements asked for.
        len: usize,
        /// Bytes of each.
        element_bytes: usize,
    },
    /// A range that does not lie in the buffer, or that ends before it starts.
    #[error("the range {start}..{end} does not lie in 0..{len}")]
    OutOfRange {
        /// First element of the range.
        start: usize,
        /// The element after its last.
        end: usize,
        /// Elements there are.
        len: usize,
    },
    /// A copy between ranges of different length.
    #[error("cannot copy {source_len} elements to {target_len}")]
    LengthMismatch {
        /// Elements of the target.
        target_len: usize,
        /// Elements of the source.
        source_len: usize,
    },
    /// Bytes that are no whole number of elements, seen as another type.
    #[error("{bytes} bytes are no whole number of elements of {element_bytes} bytes")]
    SizeMismatch {
        /// Bytes there are.
        bytes: usize,
        /// Bytes of an element.
        element_bytes: usize,
    },
    /// Memory that is not aligned for its element type.
    #[error("{ptr:#x} is not a multiple of {alignment}")]
    Misaligned {
        /// The address.
        ptr: u64,
        /// Bytes.
        alignment: usize,
    },
    /// A block that is smaller than the buffer it was to become.
    #[error("{needed} bytes do not fit into a block of {usable}")]
    BlockTooSmall {
        /// Bytes of the elements.
        needed: usize,
        /// Usable bytes of the block.
        usable: u64,
    },
    /// A stream of a device that has no part in the operation.
    #[error("the stream is on device {stream_device}, the memory on device {device}")]
    WrongDevice {
        /// Ordinal of the memory's device.
        device: usize,
        /// Ordinal of the stream's device.
        stream_device: usize,
    },
    /// The buffer's stream is the default stream of another thread, which this one cannot name.
    #[error("the buffer belongs to the default stream of another thread")]
    WrongThread,
    /// A stream that takes part is being captured into a graph; or one that could not be ordered when it was
    /// given work on the buffer, which is made up for by the first call after its capture.
    #[error("stream {stream:#x} is capturing")]
    Capturing {
        /// The stream's handle.
        stream: usize,
    },
    /// A copy was started and no wait for it succeeds, though the context is not given up for lost. The
    /// caller's memory is out of the device's reach: the copy was to or from memory of ours, which is
    /// leaked. (That of unsafe asynchronous copies is not.) Device memory stays in the order of its
    /// stream.
    #[error("the end of a copy cannot be seen")]
    Unseen(#[source] DriverError),
    /// The host has no memory for the copy.
    #[error("the host has no memory for {bytes} bytes")]
    HostMemory {
        /// Bytes asked for.
        bytes: usize,
    },
}

impl BufferError {
    /// Whether device memory ran out.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            BufferError::Allocator(error) => error.is_out_of_memory(),
            _ => false,
        }
    }

    /// The driver's error behind this one, if there is one.
    pub fn driver_error(&self) -> Option<DriverError> {
        match self {
            BufferError::Allocator(error) => error.driver_error(),
            BufferError::Driver(error) | BufferError::Unseen(error) => Some(*error),
            _ => None,
        }
    }
}
