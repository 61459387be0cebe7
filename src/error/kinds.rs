//! The one error, and the one carrier of what was refused.

use std::fmt;

use crate::driver::sys::CUresult;
use crate::driver::{DriverError, LoadError};

use super::argument::{InvalidArgument, StreamMisuse};
use super::config::ConfigError;
use super::finding::Finding;
use super::graph::GraphPoolError;
use super::import::ImportFault;
use super::memory::{Bytes, OutOfMemory};

/// What fails with an [`Error`], if nothing else is said.
pub type Result<T = (), E = Error> = std::result::Result<T, E>;

/// Why a call failed. Wrong arguments are found before any driver call. Nothing is lost and nothing has changed,
/// except where a variant says otherwise.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The driver is not there or not usable.
    #[error(transparent)]
    DriverUnavailable(#[from] LoadError),
    /// A driver call failed in a way that has no variant of its own. What a copy was to write is undefined then.
    #[error(transparent)]
    Driver(DriverError),
    /// The context is lost: nothing of it can be used any more. Memory is left alone.
    #[error("the context is lost: {0}")]
    ContextLost(DriverError),
    /// The process is a forked child; its parent's driver state is not usable here.
    #[error("a forked child cannot use its parent's device memory")]
    ForkedChild,
    /// The process is exiting: the driver may have shut down, and takes the memory back itself.
    #[error("the process is exiting")]
    Exiting,
    /// The allocator or the pool was closed.
    #[error("the source of the memory is closed")]
    Closed,
    /// Settings that are unknown or contradict each other.
    #[error(transparent)]
    InvalidConfig(#[from] ConfigError),
    /// The driver or the device cannot do what is asked for.
    #[error("not supported: {what}")]
    NotSupported {
        /// The ability that is missing.
        what: &'static str,
    },
    /// The device says that it can do what the configuration asks for, and refused it when it was tried.
    #[error("refused by the device: {what}: {cause}")]
    DeviceRefused {
        /// The ability that is refused.
        what: &'static str,
        /// The call that was refused.
        cause: DriverError,
    },
    /// No memory, after everything was tried.
    #[error(transparent)]
    OutOfMemory(#[from] Box<OutOfMemory>),
    /// A budget does not have room for the request.
    #[error(
        "{owner}: cannot allocate {}: {} of {} remain, {} are used",
        Bytes(*requested), Bytes(limit.saturating_sub(*used)), Bytes(*limit), Bytes(*used)
    )]
    OverBudget {
        /// Whose budget it is.
        owner: &'static str,
        /// Bytes asked for.
        requested: u64,
        /// The budget in bytes.
        limit: u64,
        /// Bytes of it in use.
        used: u64,
    },
    /// Everything that there may be of something is taken.
    #[error("all {maximum} {what} are taken")]
    Exhausted {
        /// What there is no more of, in the plural.
        what: &'static str,
        /// The most that there may be.
        maximum: usize,
    },
    /// The host has no memory for what the call needs.
    #[error("cannot allocate {} of host memory", Bytes(*bytes as u64))]
    HostMemory {
        /// Bytes asked for.
        bytes: usize,
    },
    /// There is no cached memory that the stream may use without a wait, and the request was for that alone.
    #[error("no cached memory serves the request")]
    NotCached,
    /// An argument that cannot be.
    #[error(transparent)]
    Invalid(#[from] InvalidArgument),
    /// A stream, or a use on a stream, that the call cannot deal with.
    #[error(transparent)]
    Stream(#[from] StreamMisuse),
    /// Memory of somebody else was offered that is not what is needed.
    #[error(transparent)]
    Import(#[from] ImportFault),
    /// No device has this ordinal.
    #[error("there is no device {ordinal}; the driver has {devices}")]
    InvalidDevice {
        /// The ordinal asked for.
        ordinal: usize,
        /// Devices there are.
        devices: usize,
    },
    /// A block, stream or device of another device than the memory's.
    #[error("expected device {expected}, found device {found}")]
    WrongDevice {
        /// Ordinal of the memory's device.
        expected: usize,
        /// The ordinal found.
        found: usize,
    },
    /// A default stream was named by its handle while another context than the allocator's was
    /// current: the handle means the stream of the allocator's context. Only with
    /// [`Config::context_checks`](crate::Config::context_checks).
    #[error(
        "stream {stream:#x} is that of context {expected:#x}, and context {current:#x} is current"
    )]
    WrongContext {
        /// The special handle.
        stream: usize,
        /// Handle of the context that is current.
        current: usize,
        /// Handle of the allocator's context.
        expected: usize,
    },
    /// A stream that takes part is being captured into a graph; or one that could not be ordered when it was
    /// given work on a buffer, which is made up for by the first call after its capture.
    #[error("stream {stream:#x} is capturing")]
    Capturing {
        /// The stream's handle.
        stream: usize,
    },
    /// A pointer that this allocator never handed out.
    #[error("{ptr:#x} is not memory of this allocator")]
    NotOurs {
        /// The pointer.
        ptr: u64,
    },
    /// A pointer into the source's memory where no block is live: a double free, or a pointer
    /// that was never a block's start.
    #[error("no live block at {ptr:#x}: it was freed before, or no block ever began there")]
    NotLive {
        /// The pointer.
        ptr: u64,
    },
    /// A pointer into the middle of a live block.
    #[error("{ptr:#x} lies inside the block at {base:#x}")]
    InteriorPointer {
        /// The pointer.
        ptr: u64,
        /// Start of the block around it.
        base: u64,
    },
    /// The block of this generation is gone; its record or address may be in use again.
    #[error("the block at {ptr:#x} of generation {generation} is gone")]
    UseAfterFree {
        /// Where it was.
        ptr: u64,
        /// The generation that it was of.
        generation: u64,
    },
    /// A range that does not lie in its block or buffer, or that ends before it starts.
    #[error("the range {start}..{end} does not lie in 0..{len}")]
    OutOfBounds {
        /// The generation of the block's record, if the range is one of a block's bytes and not of elements.
        generation: Option<u64>,
        /// First byte or element of the range.
        start: usize,
        /// The one after its last.
        end: usize,
        /// Bytes or elements there are.
        len: usize,
    },
    /// Something cannot be closed or destroyed because it is used; nothing was closed.
    #[error("still in use: {}{}", Count(*count, what), if *bytes == 0 { String::new() } else { format!(" of {}", Bytes(*bytes)) })]
    InUse {
        /// What uses it, in the singular.
        what: &'static str,
        /// How many.
        count: u64,
        /// Their bytes after rounding, if they have some.
        bytes: u64,
    },
    /// The device may still be using the memory.
    #[error("a copy is in flight")]
    InFlight,
    /// Close was asked for while guards keep memory; nothing was closed.
    #[error("{} {} {} of freed blocks", Count(*guards, "guard"), if *guards == 1 { "keeps" } else { "keep" }, Bytes(*bytes))]
    Guarded {
        /// Guards that live.
        guards: u64,
        /// Bytes of freed blocks that they keep.
        bytes: u64,
    },
    /// The memory is suspended ([`Allocator::suspend`](crate::Allocator::suspend)): it is not there until it is
    /// resumed.
    #[error("the memory is suspended")]
    Suspended,
    /// Nothing of what was named is suspended.
    #[error("the memory is not suspended")]
    NotSuspended,
    /// Not everything could be given back, because work that may use it is not known to be over, or because a
    /// trim on another thread is about to give it back.
    #[error("cannot release all memory: {} are still held", Bytes(*bytes))]
    StillHeld {
        /// Bytes held from the driver, those among them that are on their way back.
        bytes: u64,
    },
    /// Something of an earlier generation: what it stood for is gone.
    #[error("stale handle: generation {have}, current {current}")]
    Stale {
        /// The generation it belongs to.
        have: u64,
        /// The generation now.
        current: u64,
    },
    /// The block was given up already.
    #[error("there is no block: it was given up")]
    Abandoned,
    /// Memory that others let us read only.
    #[error("the memory is read-only")]
    ReadOnly,
    /// A copy was started and no wait for it succeeds, though the context is not given up for lost. The
    /// caller's memory is out of the device's reach: the copy was to or from memory of ours, which is
    /// leaked. (That of unsafe asynchronous copies is not.) Device memory stays in the order of its
    /// stream.
    #[error("cannot determine whether the copy completed: {0}")]
    Unseen(DriverError),
    /// A launch names a buffer that its recorder may not accept.
    #[error(
        "buffer {index} of the launch is {}",
        if *external { "external memory" } else { "not tracked by its resource" }
    )]
    Rejected {
        /// Which one, in the order of recording.
        index: usize,
        /// Whether somebody else owns the memory; else its resource does not track uses.
        external: bool,
    },
    /// Memory that overlaps memory which is handed out or known already. The block there is untouched.
    #[error(
        "memory at {:#x}, {} bytes, overlaps that at {:#x}, {} bytes",
        new.0, new.1, old.0, old.1
    )]
    Overlap {
        /// Address and bytes of what is refused.
        new: (u64, u64),
        /// Address and bytes of what was there.
        old: (u64, u64),
    },
    /// A graph pool cannot do what was asked for.
    #[error(transparent)]
    GraphPool(#[from] GraphPoolError),
    /// The debug modes of an allocator found an error of the program.
    #[error(transparent)]
    Misused(#[from] Box<Finding>),
    /// The structures of an allocator do not agree with each other.
    #[error("inconsistent heap: {what} (expected {expected}, found {found})")]
    Inconsistent {
        /// What was compared.
        what: &'static str,
        /// What the walk says.
        expected: u64,
        /// What the heap says.
        found: u64,
    },
}

impl Error {
    /// Whether memory ran out, of a device, of the driver or of a budget.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Error::OutOfMemory(_) | Error::OverBudget { .. } => true,
            Error::Driver(error) => error.is_out_of_memory(),
            _ => false,
        }
    }

    /// The driver's error behind this one, if there is one.
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

    /// The driver's code for this error, for callers who report in its terms: the driver's own where
    /// it has spoken, else the one that fits.
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

    /// The variant in words, for logs.
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
    /// [`Error::ContextLost`] if the driver's error is fatal, else [`Error::Driver`].
    fn from(error: DriverError) -> Error {
        if error.is_fatal() {
            Error::ContextLost(error)
        } else {
            Error::Driver(error)
        }
    }
}

/// What a call took and could not use, with the reason, which its text is. It is as it was: a block is still
/// allocated.
pub struct Refused<T> {
    /// What was taken.
    pub value: Box<T>,
    /// The reason.
    pub error: Error,
}

impl<T> Refused<T> {
    /// Gives something back with a reason.
    pub fn new(value: T, error: impl Into<Error>) -> Refused<T> {
        Refused {
            value: Box::new(value),
            error: error.into(),
        }
    }

    /// The same reason with what the value is a part of.
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
    /// Drops what was taken.
    fn from(refused: Refused<T>) -> Error {
        refused.error
    }
}

/// A number of things, in words.
pub(crate) struct Count<'a>(pub u64, pub &'a str);

impl fmt::Display for Count<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = if self.0 == 1 { "" } else { "s" };
        write!(f, "{} {}{plural}", self.0, self.1)
    }
}
