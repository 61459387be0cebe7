//! Rejected settings.

/// Why settings were rejected.
#[allow(missing_docs, reason = "messages name their fields")]
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A part of the string that is not `key=value`.
    #[error("`{0}` is not of the form key=value")]
    NotAPair(String),
    /// A key that does not exist.
    #[error("unknown setting `{0}`")]
    UnknownKey(String),
    /// A key or a value of an earlier version.
    #[error("setting `{key}` was removed: use `{instead}`")]
    Removed { key: String, instead: &'static str },
    /// A key that occurs twice.
    #[error("setting `{0}` is given twice")]
    Repeated(String),
    /// A value that the key does not accept.
    #[error("`{value}` is not a valid value of `{key}`")]
    InvalidValue { key: String, value: String },
    /// Settings that exclude each other.
    #[error("`{first}` and `{second}` exclude each other")]
    Contradiction {
        first: &'static str,
        second: &'static str,
    },
    /// The environment variable is not Unicode.
    #[error("the environment variable CUALLOC_CONFIG is not Unicode")]
    NotUnicode,
    /// More devices of a simulator than the 64 that are possible.
    #[error("expected at most 64 devices, found {count}")]
    TooManyDevices { count: usize },
    /// The granularity of a simulated device is not a power of two, or below 4 KiB.
    #[error("granularity {granularity} of device {device} is not a power of two of at least 4096")]
    Granularity { device: usize, granularity: u64 },
    /// A driver function that the simulator does not implement.
    #[error("no driver function is named {name}")]
    UnknownFunction { name: String },
}
