//! The error type, and the type that returns a rejected value with its error.

use std::fmt;

use crate::driver::sys::CUresult;
use crate::driver::{DriverError, LoadError};

use super::argument::{InvalidArgument, StreamMisuse};
use super::config::ConfigError;
use super::finding::Finding;
use super::graph::GraphPoolError;
use super::import::ImportFault;
use super::memory::{Bytes, OutOfMemory};
use super::share::ShareError;

/// The result of calls that fail with an [`Error`] unless documented otherwise.
pub type Result<T = (), E = Error> = std::result::Result<T, E>;

/// Why a call failed. Wrong arguments are detected before any driver call. After an error nothing is lost and nothing
/// has changed, except where a variant documents otherwise.
#[allow(missing_docs, reason = "messages name their fields")]
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The driver is missing or unusable.
    #[error(transparent)]
    DriverUnavailable(#[from] LoadError),
    /// A driver call failed in a way that has no variant of its own. The target of a failed copy is undefined.
    #[error(transparent)]
    Driver(DriverError),
    /// The context is lost and cannot be used any more. Memory is left alone.
    #[error("the context is lost: {0}")]
    ContextLost(DriverError),
    /// The process is a forked child; its parent's driver state is not usable here.
    #[error("a forked child cannot use its parent's device memory")]
    ForkedChild,
    /// The process is exiting: the driver may have shut down already, and releases the memory itself.
    #[error("the process is exiting")]
    Exiting,
    /// The allocator or the pool was closed.
    #[error("the source of the memory is closed")]
    Closed,
    /// Settings that are unknown or contradict each other.
    #[error(transparent)]
    InvalidConfig(#[from] ConfigError),
    /// The driver or the device does not support the operation.
    #[error("not supported: {what}")]
    NotSupported { what: &'static str },
    /// The device reports an ability that the configuration requires, but refused it when tried.
    #[error("refused by the device: {what}: {cause}")]
    DeviceRefused {
        what: &'static str,
        cause: DriverError,
    },
    /// Out of memory: every way to obtain more was tried.
    #[error(transparent)]
    OutOfMemory(#[from] Box<OutOfMemory>),
    /// A budget has no room for the request.
    #[error(
        "{owner}: cannot allocate {}: {} of {} remain, {} are used",
        Bytes(*requested), Bytes(limit.saturating_sub(*used)), Bytes(*limit), Bytes(*used)
    )]
    OverBudget {
        owner: &'static str,
        requested: u64,
        limit: u64,
        used: u64,
    },
    /// The maximum number of objects of a kind exists already.
    #[error("all {maximum} {what} are taken")]
    Exhausted { what: &'static str, maximum: usize },
    /// The host lacks memory for the call.
    #[error("cannot allocate {} of host memory", Bytes(*bytes as u64))]
    HostMemory { bytes: usize },
    /// The request was restricted to cached memory, and there is none that the stream may use without a wait.
    #[error("no cached memory fits the request")]
    NotCached,
    /// An invalid argument.
    #[error(transparent)]
    Invalid(#[from] InvalidArgument),
    /// A stream, or a use of a stream, that the call does not support.
    #[error(transparent)]
    Stream(#[from] StreamMisuse),
    /// Foreign memory that is not suitable for import.
    #[error(transparent)]
    Import(#[from] ImportFault),
    /// A block that cannot be shared with, or opened from, another process.
    #[error(transparent)]
    Share(#[from] ShareError),
    /// No device has this ordinal.
    #[error("there is no device {ordinal}; the driver has {devices}")]
    InvalidDevice { ordinal: usize, devices: usize },
    /// A block, stream or device that belongs to another device than the memory.
    #[error("expected device {expected}, found device {found}")]
    WrongDevice { expected: usize, found: usize },
    /// A default stream was passed by its handle while a context other than the allocator's was current: the handle
    /// means the stream of the allocator's context. Only with
    /// [`Config::context_checks`](crate::Config::context_checks).
    #[error(
        "stream {stream:#x} is that of context {expected:#x}, and context {current:#x} is current"
    )]
    WrongContext {
        /// The special handle.
        stream: usize,
        current: usize,
        expected: usize,
    },
    /// A stream involved is being captured into a graph, and no memory of a graph pool serves the call, or the call
    /// waits; or a stream could not be ordered after it used a buffer, and the first call after its capture will do so.
    #[error(
        "stream {stream:#x} is being captured: captured work needs memory of a graph pool (`GraphPool::enter`), and \
         waits have to come after the capture"
    )]
    Capturing { stream: usize },
    /// A pointer that was not allocated by this allocator.
    #[error("{ptr:#x} is not memory of this allocator")]
    NotOurs { ptr: u64 },
    /// A pointer into this allocator's memory where no live block begins: a double free, or a pointer that was never
    /// the start of a block.
    #[error("no live block at {ptr:#x}: it was freed before, or no block ever began there")]
    NotLive { ptr: u64 },
    /// A pointer into the middle of a live block.
    #[error("{ptr:#x} lies inside the block at {base:#x}")]
    InteriorPointer { ptr: u64, base: u64 },
    /// The block of this generation no longer exists; its record or address may be in use again.
    #[error("the block at {ptr:#x} of generation {generation} was freed")]
    UseAfterFree { ptr: u64, generation: u64 },
    /// A range that is not inside its block or buffer, or that ends before it starts.
    #[error("the range {start}..{end} does not lie in 0..{len}")]
    OutOfBounds {
        /// The generation of the block's record, if the range is one of a block's bytes rather than of elements.
        generation: Option<u64>,
        start: usize,
        end: usize,
        len: usize,
    },
    /// An object cannot be closed or destroyed because it is in use; nothing was closed.
    #[error("still in use: {}{}", Count(*count, what), if *bytes == 0 { String::new() } else { format!(" of {}", Bytes(*bytes)) })]
    InUse {
        what: &'static str,
        count: u64,
        /// Their bytes after rounding, if they have memory.
        bytes: u64,
    },
    /// The device may still be using the memory.
    #[error("a copy is in flight")]
    InFlight,
    /// An allocator cannot be closed while guards keep memory; nothing was closed.
    #[error("{} {} {} of freed blocks", Count(*guards, "guard"), if *guards == 1 { "keeps" } else { "keep" }, Bytes(*bytes))]
    Guarded { guards: u64, bytes: u64 },
    /// The memory is suspended ([`Allocator::suspend`](crate::Allocator::suspend)) and unavailable until it is resumed.
    #[error("the memory is suspended")]
    Suspended,
    /// None of the selected memory is suspended.
    #[error("the memory is not suspended")]
    NotSuspended,
    /// Not all memory could be released, because work that may use it is not known to be complete, or because a trim on
    /// another thread is about to release it.
    #[error("cannot release all memory: {} are still held", Bytes(*bytes))]
    StillHeld {
        /// Bytes reserved from the driver, including those about to be released.
        bytes: u64,
    },
    /// An object of an earlier generation, whose target no longer exists.
    #[error("stale handle: generation {have}, current {current}")]
    Stale { have: u64, current: u64 },
    /// The block was already given up.
    #[error("the block was already given up")]
    Abandoned,
    /// Foreign memory that is read-only.
    #[error("the memory is read-only")]
    ReadOnly,
    /// A copy was started, and no wait for it succeeds although the context is not lost. The device does not access the
    /// caller's memory, because the copy used staging memory of this crate, which is leaked. (This does not hold for
    /// unsafe asynchronous copies.) Device memory stays ordered by its stream.
    #[error("cannot determine whether the copy completed: {0}")]
    Unseen(DriverError),
    /// A launch uses a buffer that its recorder must not accept.
    #[error(
        "buffer {index} of the launch is {}",
        if *external { "external memory" } else { "not tracked by its resource" }
    )]
    Rejected {
        index: usize,
        /// Whether the memory is foreign; otherwise its resource does not track uses.
        external: bool,
    },
    /// Memory that overlaps memory which is already allocated or known. The existing block is not affected.
    #[error(
        "{} bytes at {:#x} overlap the {} bytes at {:#x} that are in use",
        new.1, new.0, old.1, old.0
    )]
    Overlap {
        /// Address and bytes of the rejected memory.
        new: (u64, u64),
        /// Address and bytes of the existing memory.
        old: (u64, u64),
    },
    /// A graph pool cannot perform the operation.
    #[error(transparent)]
    GraphPool(#[from] GraphPoolError),
    /// A debug mode of an allocator found an error of the program.
    #[error(transparent)]
    Misused(#[from] Box<Finding>),
    /// The data structures of an allocator are inconsistent.
    #[error("inconsistent heap: {what} (expected {expected}, found {found})")]
    Inconsistent {
        what: &'static str,
        /// The value computed by the walk.
        expected: u64,
        /// The value stored in the heap.
        found: u64,
    },
}

impl Error {
    /// Whether the cause is lack of memory: of a device, of the driver or of a budget.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Error::OutOfMemory(_) | Error::OverBudget { .. } => true,
            Error::Driver(error) => error.is_out_of_memory(),
            _ => false,
        }
    }

    /// Returns the underlying driver error, if there is one.
    pub fn driver_error(&self) -> Option<DriverError> {
        match self {
            Error::Driver(error)
            | Error::ContextLost(error)
            | Error::Unseen(error)
            | Error::DriverUnavailable(LoadError::Init(error))
            | Error::DeviceRefused { cause: error, .. } => Some(*error),
            Error::OutOfMemory(oom) => oom.driver,
            _ => None,
        }
    }

    /// Returns the driver's code for this error, for callers that report in driver codes: the driver's own if there is
    /// one, otherwise the closest one.
    pub fn code(&self) -> CUresult {
        if let Some(error) = self.driver_error() {
            return error.code();
        }
        match self {
            Error::DriverUnavailable(_) | Error::ForkedChild => {
                CUresult::CUDA_ERROR_NOT_INITIALIZED
            }
            Error::Exiting => CUresult::CUDA_ERROR_DEINITIALIZED,
            Error::OutOfMemory(_) | Error::OverBudget { .. } | Error::HostMemory { .. } => {
                CUresult::CUDA_ERROR_OUT_OF_MEMORY
            }
            Error::NotSupported { .. } => CUresult::CUDA_ERROR_NOT_SUPPORTED,
            Error::InvalidDevice { .. } | Error::WrongDevice { .. } => {
                CUresult::CUDA_ERROR_INVALID_DEVICE
            }
            Error::WrongContext { .. } => CUresult::CUDA_ERROR_INVALID_CONTEXT,
            Error::Capturing { .. } => CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
            Error::InFlight | Error::NotCached => CUresult::CUDA_ERROR_NOT_READY,
            Error::InUse { .. }
            | Error::Guarded { .. }
            | Error::StillHeld { .. }
            | Error::Stale { .. }
            | Error::Suspended
            | Error::NotSuspended
            | Error::GraphPool(_)
            | Error::Closed => CUresult::CUDA_ERROR_ILLEGAL_STATE,
            _ => CUresult::CUDA_ERROR_INVALID_VALUE,
        }
    }

    /// Returns the name of the variant for logs.
    pub fn kind(&self) -> &'static str {
        match self {
            Error::DriverUnavailable(_) => "driver unavailable",
            Error::Driver(_) => "driver",
            Error::ContextLost(_) => "context lost",
            Error::ForkedChild => "forked child",
            Error::Exiting => "exiting",
            Error::Closed => "closed",
            Error::GraphPool(_) => "graph pool",
            Error::InvalidConfig(_) => "invalid config",
            Error::NotSupported { .. } => "not supported",
            Error::DeviceRefused { .. } => "refused by the device",
            Error::OutOfMemory(_) => "out of memory",
            Error::OverBudget { .. } => "out of budget",
            Error::Exhausted { .. } => "exhausted",
            Error::HostMemory { .. } => "out of host memory",
            Error::NotCached => "not cached",
            Error::Invalid(argument) => argument.kind(),
            Error::Stream(_) => "stream misuse",
            Error::Import(_) => "invalid import",
            Error::Share(_) => "share",
            Error::InvalidDevice { .. } => "invalid device",
            Error::WrongDevice { .. } => "wrong device",
            Error::WrongContext { .. } => "wrong context",
            Error::Capturing { .. } => "capturing",
            Error::NotOurs { .. } => "not ours",
            Error::NotLive { .. } => "not live",
            Error::InteriorPointer { .. } => "interior pointer",
            Error::UseAfterFree { .. } => "use after free",
            Error::OutOfBounds { .. } => "out of bounds",
            Error::InUse { .. } => "in use",
            Error::InFlight => "in flight",
            Error::Guarded { .. } => "guarded",
            Error::StillHeld { .. } => "still held",
            Error::Suspended => "suspended",
            Error::NotSuspended => "not suspended",
            Error::Stale { .. } => "stale",
            Error::Abandoned => "abandoned",
            Error::ReadOnly => "read-only",
            Error::Unseen(_) => "unseen",
            Error::Rejected { .. } => "rejected buffer",
            Error::Overlap { .. } => "overlap",
            Error::Misused(_) => "misused",
            Error::Inconsistent { .. } => "inconsistent",
        }
    }
}

impl From<DriverError> for Error {
    /// Converts a driver error: [`Error::ContextLost`] if it is fatal, otherwise [`Error::Driver`].
    fn from(error: DriverError) -> Error {
        if error.is_fatal() {
            Error::ContextLost(error)
        } else {
            Error::Driver(error)
        }
    }
}

/// A value that a call took and could not use, with the reason, which is also its text. The value is unchanged: a block
/// is still allocated.
pub struct Refused<T> {
    /// The rejected value.
    pub value: Box<T>,
    /// The reason.
    pub error: Error,
}

impl<T> Refused<T> {
    /// Returns a value with a reason.
    pub fn new(value: T, error: impl Into<Error>) -> Refused<T> {
        Refused {
            value: Box::new(value),
            error: error.into(),
        }
    }

    /// Replaces the value by one that contains it, with the same reason.
    pub(crate) fn map<U>(self, whole: impl FnOnce(T) -> U) -> Refused<U> {
        Refused::new(whole(*self.value), self.error)
    }
}

debug_fields!([T] Refused<T>, self => error: self.error);

impl<T> fmt::Display for Refused<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<T> std::error::Error for Refused<T> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        std::error::Error::source(&self.error)
    }
}

impl<T> From<Refused<T>> for Error {
    /// Drops the value.
    fn from(refused: Refused<T>) -> Error {
        refused.error
    }
}

/// A count with its noun.
pub(crate) struct Count<'a>(pub u64, pub &'a str);

impl fmt::Display for Count<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = if self.0 == 1 { "" } else { "s" };
        write!(f, "{} {}{plural}", self.0, self.1)
    }
}
