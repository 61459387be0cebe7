//! Result codes, and the conversion of errors to them.

use std::fmt;

use cualloc::Error;
use cualloc::driver::{DriverError, LoadError};
use cualloc::error::{ConfigError, GraphPoolError, OutOfMemory, ShareError};

use crate::torch_text;

/// The call succeeded.
pub const CUALLOC_OK: i32 = 0;
/// Out of memory: every way to obtain more was tried.
pub const CUALLOC_OUT_OF_MEMORY: i32 = 1;
/// An argument is null, 0, too large or an invalid setting. Nothing was done.
pub const CUALLOC_INVALID_ARGUMENT: i32 = 2;
/// The address does not belong to this allocator. Nothing was done.
pub const CUALLOC_NOT_OURS: i32 = 3;
/// The address belongs to this allocator, but no live block begins there: the block was freed before, or the address is
/// inside a block where its first byte is required. Nothing was done.
pub const CUALLOC_NOT_LIVE: i32 = 4;
/// The stream, or a stream that the call would have to wait for, is being captured into a graph, and no scope of a
/// graph pool matches. Nothing was done.
pub const CUALLOC_CAPTURING: i32 = 5;
/// The handle does not belong to a live allocator (or live options, or a live graph pool): it was destroyed or never
/// existed. Or the process that shares a block has ended.
pub const CUALLOC_CLOSED: i32 = 6;
/// There is no usable CUDA driver.
pub const CUALLOC_NO_DRIVER: i32 = 7;
/// A CUDA driver call failed; the text names it.
pub const CUALLOC_DRIVER: i32 = 8;
/// The context is gone or broken, the process is a forked child of the one that created the allocator, or the process
/// is exiting. Device memory is left alone.
pub const CUALLOC_CONTEXT_LOST: i32 = 9;
/// The device, or this build of the library, does not support the request.
pub const CUALLOC_UNSUPPORTED: i32 = 10;
/// A bug in the library: the call stopped half-way. The allocator should not be used any more.
pub const CUALLOC_PANIC: i32 = 11;
/// Blocks, guards or a call on another thread prevent the call, or the thread is in a predicate of a scope. Nothing was
/// done.
pub const CUALLOC_BUSY: i32 = 12;
/// The memory is suspended, or, for a resume, is not. Nothing was done.
pub const CUALLOC_SUSPENDED: i32 = 13;
/// A file could not be created or written, or another process not be reached; the text says why.
pub const CUALLOC_IO: i32 = 14;

/// Why a call failed. Owns no text, so that a rejected call allocates no host memory.
#[derive(Debug)]
pub(crate) enum Failure {
    /// A code with its reason.
    Reason(i32, &'static str),
    /// A device number that does not exist, and the number of devices.
    NoSuchDevice {
        device: i32,
        count: usize,
    },
    Library(Error),
    /// An out-of-memory error of the library, in the wording that PyTorch users know.
    Torch(Box<OutOfMemory>),
    /// An error of the file system.
    Io(std::io::Error),
}

impl Failure {
    pub(crate) fn code(&self) -> i32 {
        match self {
            Failure::Reason(code, _) => *code,
            Failure::NoSuchDevice { .. } => CUALLOC_INVALID_ARGUMENT,
            Failure::Library(error) => code_of(error),
            Failure::Torch(_) => CUALLOC_OUT_OF_MEMORY,
            Failure::Io(_) => CUALLOC_IO,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Reason(_, why) => f.write_str(why),
            Failure::NoSuchDevice { device, count } => {
                write!(f, "there is no device {device}: the driver has {count}")
            }
            Failure::Library(Error::OutOfMemory(error)) => f.write_str(&error.report()),
            Failure::Library(error) => error.fmt(f),
            Failure::Torch(error) => torch_text::write(error, f),
            Failure::Io(error) => write!(f, "cannot write the recording: {error}"),
        }
    }
}

macro_rules! of_the_library {
    ($($error:ty)*) => {$(
        impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                Failure::Library(error.into())
            }
        }
    )*};
}
of_the_library!(Error DriverError LoadError ConfigError);

/// The argument is null.
pub(crate) const NULL: Failure = Failure::Reason(CUALLOC_INVALID_ARGUMENT, "an argument is null");

fn code_of(error: &Error) -> i32 {
    match error {
        Error::OutOfMemory(_) | Error::OverBudget { .. } | Error::NotCached => {
            CUALLOC_OUT_OF_MEMORY
        }
        Error::NotOurs { .. } => CUALLOC_NOT_OURS,
        Error::NotLive { .. } | Error::InteriorPointer { .. } => CUALLOC_NOT_LIVE,
        Error::Capturing { .. } => CUALLOC_CAPTURING,
        Error::Closed | Error::GraphPool(GraphPoolError::Released) => CUALLOC_CLOSED,
        Error::GraphPool(GraphPoolError::NotComplete { .. } | GraphPoolError::InPredicate) => {
            CUALLOC_BUSY
        }
        Error::DriverUnavailable(_) => CUALLOC_NO_DRIVER,
        Error::ContextLost(_) | Error::ForkedChild | Error::Exiting => CUALLOC_CONTEXT_LOST,
        Error::NotSupported { .. } | Error::DeviceRefused { .. } => CUALLOC_UNSUPPORTED,
        Error::InUse { .. } | Error::Guarded { .. } | Error::StillHeld { .. } => CUALLOC_BUSY,
        Error::Suspended | Error::NotSuspended => CUALLOC_SUSPENDED,
        Error::Inconsistent { .. } => CUALLOC_PANIC,
        Error::Share(error) => match error {
            ShareError::Freed => CUALLOC_NOT_LIVE,
            ShareError::Ended { .. } => CUALLOC_CLOSED,
            ShareError::Unreachable { .. } | ShareError::System { .. } => CUALLOC_IO,
            ShareError::Token { .. } | ShareError::ForeignBytes { .. } => CUALLOC_INVALID_ARGUMENT,
            _ => CUALLOC_UNSUPPORTED,
        },
        Error::Misused(_) => CUALLOC_INVALID_ARGUMENT,
        Error::Invalid(_)
        | Error::InvalidConfig(_)
        | Error::InvalidDevice { .. }
        | Error::GraphPool(_)
        | Error::Stream(_)
        | Error::WrongDevice { .. }
        | Error::WrongContext { .. } => CUALLOC_INVALID_ARGUMENT,
        _ => CUALLOC_DRIVER,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    #[test]
    fn inconsistency_and_misuse_have_their_codes() {
        let inconsistent = Error::Inconsistent {
            what: "pages known",
            expected: 1,
            found: 2,
        };
        assert_eq!(code_of(&inconsistent), CUALLOC_PANIC);
        let unavailable = Error::DriverUnavailable(LoadError::UnsupportedPlatform);
        assert_eq!(code_of(&unavailable), CUALLOC_NO_DRIVER);
    }

    #[test]
    fn each_failure_of_sharing_has_its_code() {
        let system = || io::Error::from(io::ErrorKind::PermissionDenied);
        let unreachable = ShareError::Unreachable {
            pid: 1,
            socket: system(),
            descriptor: system(),
        };
        let refused = ShareError::System {
            what: "bind a socket",
            cause: system(),
        };
        for (error, code) in [
            (unreachable, CUALLOC_IO),
            (refused, CUALLOC_IO),
            (ShareError::Ended { pid: 1 }, CUALLOC_CLOSED),
            (ShareError::Freed, CUALLOC_NOT_LIVE),
            (ShareError::NoSuchDevice, CUALLOC_UNSUPPORTED),
            (
                ShareError::ForeignBytes { bytes: 1 },
                CUALLOC_INVALID_ARGUMENT,
            ),
        ] {
            assert_eq!(code_of(&Error::Share(error)), code);
        }
    }
}
