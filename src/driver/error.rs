//! Errors of the driver, and of loading it.

use super::sys::CUresult;
use std::error::Error;
use std::fmt;

/// A failed driver call: the function and the driver's error code.
///
/// `Send`, `Sync` and `Copy`; equal if function and code are equal.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct DriverError {
    call: &'static str,
    code: CUresult,
}

impl DriverError {
    /// Creates the error of a function `call` (an exported name such as `cuMemCreate`) that returned `code`.
    pub const fn new(call: &'static str, code: CUresult) -> DriverError {
        DriverError { call, code }
    }

    /// Returns the driver's code.
    pub const fn code(&self) -> CUresult {
        self.code
    }

    /// Returns the exported name of the driver function that failed.
    pub const fn call(&self) -> &'static str {
        self.call
    }

    /// Returns the code's name, such as `CUDA_ERROR_OUT_OF_MEMORY`; `unrecognized error` for a code unknown to this
    /// crate.
    pub fn name(&self) -> &'static str {
        name(self.code)
    }

    /// Whether the context (or the whole driver) is lost, so that no later call on it can succeed.
    pub fn is_fatal(&self) -> bool {
        matches!(
            self.code,
            CUresult::CUDA_ERROR_DEINITIALIZED
                | CUresult::CUDA_ERROR_ECC_UNCORRECTABLE
                | CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE
                | CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
                | CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
                | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED
                | CUresult::CUDA_ERROR_ASSERT
                | CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR
                | CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
                | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
                | CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE
                | CUresult::CUDA_ERROR_INVALID_PC
                | CUresult::CUDA_ERROR_LAUNCH_FAILED
                | CUresult::CUDA_ERROR_UNKNOWN
        )
    }

    /// Whether every context of the driver must be considered lost. The error of a destroyed context is fatal, but says
    /// nothing about other contexts.
    pub(super) fn loses_driver(&self) -> bool {
        self.is_fatal() && self.code != CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED
    }

    /// Whether only the arguments or the time of the call were wrong.
    pub fn is_usage(&self) -> bool {
        matches!(
            self.code,
            CUresult::CUDA_ERROR_INVALID_VALUE
                | CUresult::CUDA_ERROR_INVALID_DEVICE
                | CUresult::CUDA_ERROR_INVALID_IMAGE
                | CUresult::CUDA_ERROR_INVALID_CONTEXT
                | CUresult::CUDA_ERROR_ALREADY_MAPPED
                | CUresult::CUDA_ERROR_NOT_MAPPED
                | CUresult::CUDA_ERROR_INVALID_PTX
                | CUresult::CUDA_ERROR_INVALID_HANDLE
                | CUresult::CUDA_ERROR_ILLEGAL_STATE
                | CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
                | CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
                | CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
                | CUresult::CUDA_ERROR_STREAM_CAPTURE_MERGE
                | CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED
                | CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED
                | CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION
                | CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
                | CUresult::CUDA_ERROR_CAPTURED_EVENT
                | CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD
        )
    }

    /// Whether this is `CUDA_ERROR_OUT_OF_MEMORY`.
    pub fn is_out_of_memory(&self) -> bool {
        self.code == CUresult::CUDA_ERROR_OUT_OF_MEMORY
    }

    /// Whether this is `CUDA_ERROR_NOT_READY`: the queried work has not completed yet.
    pub fn is_not_ready(&self) -> bool {
        self.code == CUresult::CUDA_ERROR_NOT_READY
    }

    /// Whether the driver or the device does not support the operation: `CUDA_ERROR_NOT_SUPPORTED`,
    /// `CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER`, or a function that the driver does not export (`CUDA_ERROR_NOT_FOUND`).
    pub fn is_not_supported(&self) -> bool {
        matches!(
            self.code,
            CUresult::CUDA_ERROR_NOT_SUPPORTED
                | CUresult::CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER
                | CUresult::CUDA_ERROR_NOT_FOUND
        )
    }
}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} failed: {} ({})", self.call, self.name(), self.code.0)
    }
}

impl fmt::Debug for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DriverError({self})")
    }
}

impl Error for DriverError {}

macro_rules! names {
    ($($code:ident)*) => {
        fn name(code: CUresult) -> &'static str {
            match code {
                $(CUresult::$code => stringify!($code),)*
                _ => "unrecognized error",
            }
        }
        #[cfg(test)]
        pub(super) const NAMED: &[(&str, CUresult)] = &[$((stringify!($code), CUresult::$code),)*];
    };
}

names! {
    CUDA_SUCCESS CUDA_ERROR_INVALID_VALUE CUDA_ERROR_OUT_OF_MEMORY CUDA_ERROR_NOT_INITIALIZED
    CUDA_ERROR_DEINITIALIZED CUDA_ERROR_STUB_LIBRARY CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER
    CUDA_ERROR_DEVICE_UNAVAILABLE CUDA_ERROR_NO_DEVICE CUDA_ERROR_INVALID_DEVICE
    CUDA_ERROR_INVALID_IMAGE CUDA_ERROR_INVALID_CONTEXT CUDA_ERROR_MAP_FAILED
    CUDA_ERROR_UNMAP_FAILED CUDA_ERROR_ALREADY_MAPPED CUDA_ERROR_NOT_MAPPED
    CUDA_ERROR_ECC_UNCORRECTABLE CUDA_ERROR_PEER_ACCESS_UNSUPPORTED CUDA_ERROR_INVALID_PTX
    CUDA_ERROR_NVLINK_UNCORRECTABLE CUDA_ERROR_INVALID_HANDLE CUDA_ERROR_ILLEGAL_STATE
    CUDA_ERROR_LOSSY_QUERY
    CUDA_ERROR_NOT_FOUND CUDA_ERROR_NOT_READY CUDA_ERROR_ILLEGAL_ADDRESS
    CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES CUDA_ERROR_LAUNCH_TIMEOUT
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE
    CUDA_ERROR_CONTEXT_IS_DESTROYED CUDA_ERROR_ASSERT CUDA_ERROR_HARDWARE_STACK_ERROR
    CUDA_ERROR_ILLEGAL_INSTRUCTION CUDA_ERROR_MISALIGNED_ADDRESS CUDA_ERROR_INVALID_ADDRESS_SPACE
    CUDA_ERROR_INVALID_PC CUDA_ERROR_LAUNCH_FAILED CUDA_ERROR_NOT_PERMITTED
    CUDA_ERROR_NOT_SUPPORTED CUDA_ERROR_SYSTEM_NOT_READY CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    CUDA_ERROR_STREAM_CAPTURE_MERGE CUDA_ERROR_STREAM_CAPTURE_UNMATCHED
    CUDA_ERROR_STREAM_CAPTURE_UNJOINED CUDA_ERROR_STREAM_CAPTURE_ISOLATION
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT CUDA_ERROR_CAPTURED_EVENT
    CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD CUDA_ERROR_TIMEOUT
    CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE CUDA_ERROR_EXTERNAL_DEVICE
    CUDA_ERROR_UNKNOWN
}

/// A library that could not be opened; its source chain ends with the loader's own message.
#[derive(Debug, thiserror::Error)]
#[error("cannot open `{name}`")]
pub(super) struct OpenFailure {
    pub(super) name: String,
    pub(super) source: libloading::Error,
}

/// Why no driver is available.
///
/// The chain of [`Error::source`] ends with the message of the system's loader or with the driver's code.
#[allow(missing_docs, reason = "messages name their fields")]
#[derive(Debug)]
#[non_exhaustive]
pub enum LoadError {
    /// CUDA has no driver for this operating system.
    UnsupportedPlatform,
    /// No library could be opened. The source is the error of the last one; the message lists all of them with their
    /// reasons.
    NotFound {
        /// The names passed to the system's loader, in order, each with the loader's error; never empty.
        tried: Vec<(String, Box<dyn Error + Send + Sync>)>,
    },
    /// The library lacks a function that this crate requires.
    SymbolMissing {
        name: &'static str,
        /// The library, or `functions of this process`.
        library: String,
        /// The loader's error; none for a table made of functions of this process.
        source: Option<libloading::Error>,
    },
    /// The library is the toolkit's link-time stub, not a driver.
    StubLibrary { library: String },
    /// The driver is older than the oldest one supported.
    TooOld {
        /// The version of the CUDA API that the driver supports: 1000 x major + 10 x minor.
        have: u32,
        /// The oldest version supported, in the same form.
        need: u32,
    },
    /// The driver could not be initialised: no device, no permission, a forked child. Not cached: the next attempt asks
    /// the driver again.
    Init(DriverError),
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LoadError::UnsupportedPlatform => {
                write!(f, "there is no CUDA driver on this platform")
            }
            LoadError::NotFound { tried } => {
                write!(f, "no CUDA driver library found")?;
                for (index, (name, error)) in tried.iter().enumerate() {
                    let separator = if index == 0 { ": tried " } else { ", " };
                    let mut last: &dyn Error = &**error;
                    while let Some(source) = last.source() {
                        last = source;
                    }
                    write!(f, "{separator}`{name}` ({last})")?;
                }
                Ok(())
            }
            LoadError::SymbolMissing { name, library, .. } => {
                write!(f, "the CUDA driver `{library}` does not export `{name}`")
            }
            LoadError::StubLibrary { library } => write!(
                f,
                "`{library}` is a stub library for linking, not a CUDA driver"
            ),
            LoadError::TooOld { have, need } => write!(
                f,
                "the CUDA driver supports CUDA {}.{}, but at least {}.{} is needed",
                have / 1000,
                have % 1000 / 10,
                need / 1000,
                need % 1000 / 10
            ),
            LoadError::Init(_) => write!(f, "the CUDA driver cannot be initialised"),
        }
    }
}

impl Error for LoadError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            LoadError::NotFound { tried } => tried.last().map(|(_, error)| &**error as _),
            LoadError::SymbolMissing { source, .. } => source.as_ref().map(|error| error as _),
            LoadError::Init(error) => Some(error),
            LoadError::UnsupportedPlatform
            | LoadError::StubLibrary { .. }
            | LoadError::TooOld { .. } => None,
        }
    }
}
