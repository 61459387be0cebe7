//! Errors of resources.

use std::error::Error;

use crate::allocator;
use crate::driver::{DriverError, LoadError, sys};

use super::key::BlockKey;

/// Why a call of a resource failed. Nothing is lost and nothing has changed, except where a variant
/// says otherwise.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResourceError {
    /// A budget does not have room for the request.
    #[error(
        "{context}: {requested} bytes asked for, {remaining} of {limit} remaining ({used} used)"
    )]
    OutOfBudget {
        /// Whose budget it is.
        context: &'static str,
        /// Bytes asked for.
        requested: u64,
        /// The budget in bytes.
        limit: u64,
        /// Bytes of it in use.
        used: u64,
        /// Bytes of it not in use.
        remaining: u64,
    },
    /// The allocator's error.
    #[error("the allocator refused: {0}")]
    Allocator(#[from] allocator::Error),
    /// An error of a pool, or of another source of memory, that is none of the others: of
    /// [`PoolError`](crate::pool::PoolError), for the pools here.
    #[error("the pool refused: {0}")]
    Pool(#[source] Box<dyn Error + Send + Sync>),
    /// A driver call failed.
    #[error("a driver call failed: {0}")]
    Driver(#[from] DriverError),
    /// The driver is not there or not usable.
    #[error("the CUDA driver is unavailable: {0}")]
    DriverUnavailable(#[from] LoadError),
    /// A stream, or a use on a stream, that the resource cannot deal with.
    #[error("{0}")]
    StreamMisuse(StreamMisuse),
    /// The block of this identity is gone; its record or address may be in use again.
    #[error("the block at {ptr:#x} of generation {} is gone", key.generation)]
    UseAfterFree {
        /// Where it was.
        ptr: sys::CUdeviceptr,
        /// Who it was.
        key: BlockKey,
    },
    /// A range that does not lie inside its block.
    #[error("{bytes} bytes at {offset} are outside the block of {size} bytes")]
    OutOfBounds {
        /// The generation of the block's record.
        generation: u64,
        /// First byte of the range.
        offset: usize,
        /// Bytes of the range.
        bytes: usize,
        /// Bytes of the block.
        size: usize,
    },
    /// Zero bytes, or more than there can be.
    #[error("{requested} bytes is not a valid size")]
    InvalidSize {
        /// Bytes asked for.
        requested: u64,
    },
    /// The size of this many elements of this size is no number of bytes.
    #[error("{count} elements of {size} bytes are too many")]
    SizeOverflow {
        /// Elements.
        count: usize,
        /// Bytes of each.
        size: usize,
    },
    /// An alignment that the resource cannot give.
    #[error("{alignment} is not a valid alignment")]
    InvalidAlignment {
        /// Bytes asked for.
        alignment: usize,
    },
    /// A block, stream or device of another device than the resource's.
    #[error("device {found} where device {expected} is meant")]
    WrongDevice {
        /// The resource's device ordinal.
        expected: usize,
        /// The ordinal found.
        found: usize,
    },
    /// No device has this ordinal.
    #[error("there is no device {ordinal}; the driver has {count}")]
    InvalidDevice {
        /// The ordinal asked for.
        ordinal: usize,
        /// Devices there are.
        count: usize,
    },
    /// Memory came from below at an address that is already handed out. The block there is
    /// untouched.
    #[error("memory at {ptr:#x} was handed out twice")]
    Collision {
        /// The address.
        ptr: sys::CUdeviceptr,
    },
    /// Memory came from below that overlaps memory already handed out.
    #[error(
        "memory at {new_ptr:#x}, {new_bytes} bytes, overlaps that at {old_ptr:#x}, {old_bytes} bytes"
    )]
    Overlap {
        /// First byte of the new block.
        new_ptr: sys::CUdeviceptr,
        /// Its bytes.
        new_bytes: u64,
        /// First byte of the live block.
        old_ptr: sys::CUdeviceptr,
        /// Its bytes.
        old_bytes: u64,
    },
    /// The pool of streams is at its capacity.
    #[error("all {capacity} streams of the pool are taken")]
    NoStreamLeft {
        /// How many streams the pool may make.
        capacity: usize,
    },
    /// The manager has no runtime to allocate from.
    #[error("the manager of device {device} has no runtime")]
    NoRuntime {
        /// The manager's device ordinal.
        device: usize,
    },
    /// A launch names a buffer that its recorder may not accept.
    #[error("buffer {index} of the launch is {kind}")]
    RejectedBuffer {
        /// Which one, in the order of recording.
        index: usize,
        /// What is wrong with it.
        kind: RejectedKind,
    },
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
    /// The stream belongs to another driver.
    #[error("the stream belongs to another driver")]
    ForeignDriver,
    /// A block was to go back past the resource that keeps the order of its uses
    /// ([`AsyncResource`](super::AsyncResource)), which alone knows when they are over.
    #[error("the block goes back through the resource that keeps the order of its uses")]
    KeptAbove,
    /// The launch recorder was asked for a step out of its order.
    #[error("{asked} is not possible: {because}")]
    RecorderOrder {
        /// What was asked for.
        asked: &'static str,
        /// What is in its way.
        because: &'static str,
    },
    /// A stream id that the pool never gave.
    #[error("stream id {0} is not known")]
    UnknownId(u64),
    /// The stream is being captured into a graph.
    #[error("the stream with id {0} is being captured")]
    Capturing(u64),
}

/// What is wrong with a buffer of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RejectedKind {
    /// Memory of a resource that does not track uses.
    #[error("not tracked by its resource")]
    Untracked,
    /// Memory that somebody else owns.
    #[error("external memory")]
    External,
}

impl ResourceError {
    /// Whether memory ran out, of a device or of a budget.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            ResourceError::OutOfBudget { .. } => true,
            ResourceError::Allocator(error) => error.is_out_of_memory(),
            ResourceError::Driver(error) => error.is_out_of_memory(),
            _ => false,
        }
    }

    /// The driver's error behind this one, if there is one.
    pub fn driver_error(&self) -> Option<DriverError> {
        match self {
            ResourceError::Driver(error) => Some(*error),
            ResourceError::Allocator(error) => error.driver_error(),
            ResourceError::Pool(error) => {
                let mut source = error.source();
                while let Some(error) = source {
                    if let Some(error) = error.downcast_ref() {
                        return Some(*error);
                    }
                    source = error.source();
                }
                None
            }
            _ => None,
        }
    }

    /// A short name of the variant, for logs.
    pub fn kind(&self) -> &'static str {
        match self {
            ResourceError::OutOfBudget { .. } => "out of budget",
            ResourceError::Allocator(error) if error.is_out_of_memory() => "out of memory",
            ResourceError::Allocator(_) => "allocator",
            ResourceError::Pool(_) => "pool",
            ResourceError::Driver(_) => "driver",
            ResourceError::DriverUnavailable(_) => "driver unavailable",
            ResourceError::StreamMisuse(_) => "stream misuse",
            ResourceError::UseAfterFree { .. } => "use after free",
            ResourceError::OutOfBounds { .. } => "out of bounds",
            ResourceError::InvalidSize { .. } | ResourceError::SizeOverflow { .. } => {
                "invalid size"
            }
            ResourceError::InvalidAlignment { .. } => "invalid alignment",
            ResourceError::WrongDevice { .. } => "wrong device",
            ResourceError::InvalidDevice { .. } => "invalid device",
            ResourceError::Collision { .. } => "collision",
            ResourceError::Overlap { .. } => "overlap",
            ResourceError::NoStreamLeft { .. } => "no stream left",
            ResourceError::NoRuntime { .. } => "no runtime",
            ResourceError::RejectedBuffer { .. } => "rejected buffer",
        }
    }
}

/// What a call took and could not use, with the reason. It is as it was: a block is still allocated.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct Refused<T> {
    /// What was taken.
    pub value: Box<T>,
    /// The reason.
    #[source]
    pub error: ResourceError,
}

impl<T> Refused<T> {
    /// Gives something back with a reason.
    pub fn new(value: T, error: impl Into<ResourceError>) -> Refused<T> {
        Refused {
            value: Box::new(value),
            error: error.into(),
        }
    }
}

impl From<StreamMisuse> for ResourceError {
    fn from(misuse: StreamMisuse) -> ResourceError {
        ResourceError::StreamMisuse(misuse)
    }
}
