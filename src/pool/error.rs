//! Errors of the pools.

use crate::allocator;
use crate::buffer::BufferError;
use crate::driver::{DriverError, LoadError, sys::CUresult};
use crate::resource::ResourceError;

/// Why a call of a pool failed. Unless a variant says otherwise nothing has changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// The allocator refused; also a driver that is not there, a lost context and want of memory.
    #[error(transparent)]
    Allocator(#[from] allocator::Error),
    /// A buffer's operation failed.
    #[error(transparent)]
    Buffer(#[from] BufferError),
    /// A device that is not there.
    #[error("there is no device {ordinal}")]
    InvalidDevice {
        /// The ordinal asked for.
        ordinal: usize,
        /// Devices that there are.
        devices: usize,
    },
    /// A request of nothing, or of more than a size can say.
    #[error("{requested} bytes is not a valid size")]
    InvalidSize {
        /// Bytes asked for.
        requested: u64,
    },
    /// Elements of more bytes together than an address space has.
    #[error("{len} elements of {element_bytes} bytes are too many")]
    TooLarge {
        /// Elements asked for.
        len: usize,
        /// Bytes of each.
        element_bytes: usize,
    },
    /// The driver or the device cannot do it.
    #[error("not supported: {what}")]
    NotSupported {
        /// The ability that is missing.
        what: &'static str,
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
    /// A value that may not be set.
    #[error("{value} is not a valid value of {what}")]
    InvalidValue {
        /// What was to be set.
        what: &'static str,
        /// The value.
        value: u64,
    },
    /// The pool cannot be destroyed: blocks of it are live, or calls of it are under way.
    #[error("{users} blocks or calls still use the pool")]
    InUse {
        /// How many.
        users: u64,
    },
    /// The pool was destroyed.
    #[error("the pool is destroyed")]
    Destroyed,
    /// All buffers that the pool may have exist and are taken.
    #[error("all {maximum} buffers are taken")]
    MaximumReached {
        /// The pool's maximum.
        maximum: usize,
    },
    /// A request above the size of a buffer, in a pool that makes none above it.
    #[error("{requested} bytes do not fit into a buffer of {capacity}")]
    Oversize {
        /// Bytes asked for.
        requested: usize,
        /// Bytes of a buffer.
        capacity: usize,
    },
    /// Something of an earlier generation: what it stood for is gone.
    #[error("generation {have} is over, the current one is {current}")]
    Stale {
        /// The generation it belongs to.
        have: u64,
        /// The generation now.
        current: u64,
    },
    /// The device may still be using the memory.
    #[error("a copy is in flight")]
    InFlight,
}

impl PoolError {
    /// Whether device memory ran out.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            PoolError::Allocator(error) => error.is_out_of_memory(),
            PoolError::Buffer(error) => error.is_out_of_memory(),
            _ => false,
        }
    }

    /// The driver's error behind this one, if there is one.
    pub fn driver_error(&self) -> Option<DriverError> {
        match self {
            PoolError::Allocator(error) => error.driver_error(),
            PoolError::Buffer(error) => error.driver_error(),
            _ => None,
        }
    }

    /// The driver's code for this error, for callers who report in its terms: the driver's own where
    /// it has spoken, else the one that fits.
    pub fn code(&self) -> CUresult {
        if let Some(error) = self.driver_error() {
            return error.code();
        }
        match self {
            PoolError::Allocator(allocator::Error::DriverUnavailable(LoadError::Init(error))) => {
                error.code()
            }
            PoolError::Allocator(allocator::Error::DriverUnavailable(_)) => {
                CUresult::CUDA_ERROR_NOT_INITIALIZED
            }
            PoolError::Allocator(allocator::Error::OutOfMemory(_)) => {
                CUresult::CUDA_ERROR_OUT_OF_MEMORY
            }
            PoolError::Allocator(allocator::Error::NotSupported { .. })
            | PoolError::NotSupported { .. } => CUresult::CUDA_ERROR_NOT_SUPPORTED,
            PoolError::InvalidDevice { .. } => CUresult::CUDA_ERROR_INVALID_DEVICE,
            PoolError::InFlight => CUresult::CUDA_ERROR_NOT_READY,
            PoolError::InUse { .. } | PoolError::Destroyed | PoolError::Stale { .. } => {
                CUresult::CUDA_ERROR_ILLEGAL_STATE
            }
            _ => CUresult::CUDA_ERROR_INVALID_VALUE,
        }
    }
}

impl From<DriverError> for PoolError {
    fn from(error: DriverError) -> PoolError {
        PoolError::Allocator(if error.is_fatal() {
            allocator::Error::ContextLost(error)
        } else {
            allocator::Error::Driver(error)
        })
    }
}

impl From<LoadError> for PoolError {
    fn from(error: LoadError) -> PoolError {
        PoolError::Allocator(allocator::Error::DriverUnavailable(error))
    }
}

impl From<PoolError> for ResourceError {
    fn from(error: PoolError) -> ResourceError {
        match error {
            PoolError::Allocator(error) | PoolError::Buffer(BufferError::Allocator(error)) => {
                ResourceError::Allocator(error)
            }
            PoolError::InvalidSize { requested } => ResourceError::InvalidSize { requested },
            other => ResourceError::Pool(Box::new(other)),
        }
    }
}

pub(super) fn zero_is_invalid(error: allocator::Error) -> PoolError {
    match error {
        allocator::Error::InvalidSize { requested } => PoolError::InvalidSize { requested },
        other => other.into(),
    }
}
