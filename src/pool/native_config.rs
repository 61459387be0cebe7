//! Settings and attributes of the driver's own pools.

#![forbid(unsafe_code)]

use crate::driver::sys::CUmemPool_attribute as A;

use crate::error::{Error, InvalidArgument};

/// Settings of a [`NativePool`](super::NativePool), final but for the threshold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct NativeConfig {
    /// The device. 0 by default.
    pub ordinal: usize,
    /// The most bytes that the pool may hold; `None`, the default, for any number.
    pub max_bytes: Option<u64>,
    /// Bytes to take from the driver at once.
    pub initial_bytes: u64,
    /// Unused bytes above this go back to the driver whenever the host synchronises. `None`, the
    /// default, keeps all.
    pub release_threshold: Option<u64>,
    /// Whether other processes may get access by a file descriptor.
    pub exportable: bool,
}

impl NativeConfig {
    /// The default settings for a device.
    pub fn on(ordinal: usize) -> Self {
        NativeConfig {
            ordinal,
            ..Self::default()
        }
    }

    /// Bounds the bytes held, by at least 1; `None` lifts the bound.
    pub fn max_bytes(mut self, bytes: Option<u64>) -> Self {
        self.max_bytes = bytes;
        self
    }

    /// Sets the bytes to take from the driver at once.
    pub fn initial_bytes(mut self, bytes: u64) -> Self {
        self.initial_bytes = bytes;
        self
    }

    /// Sets the release threshold.
    pub fn release_threshold(mut self, bytes: Option<u64>) -> Self {
        self.release_threshold = bytes;
        self
    }

    /// Makes the pool exportable.
    pub fn exportable(mut self, on: bool) -> Self {
        self.exportable = on;
        self
    }

    /// Checks the settings against each other. Needs no driver.
    ///
    /// # Errors
    /// [`InvalidArgument::Setting`] for a pool that may hold nothing, [`InvalidArgument::Contradiction`].
    pub fn validate(&self) -> Result<(), Error> {
        // To the driver a maximum of 0 is none.
        if self.max_bytes == Some(0) {
            return Err(Error::Invalid(InvalidArgument::Setting {
                what: "max_bytes",
                value: 0,
            }));
        }
        within("initial_bytes", self.initial_bytes, self.max_bytes)?;
        let threshold = self.release_threshold.unwrap_or(0);
        within("release_threshold", threshold, self.max_bytes)
    }
}

/// Checks a setting against the most bytes that a pool may hold.
pub(super) fn within(
    setting: &'static str,
    value: u64,
    max_bytes: Option<u64>,
) -> Result<(), Error> {
    match max_bytes {
        Some(limit) if value > limit => Err(Error::Invalid(InvalidArgument::Contradiction {
            larger: setting,
            value,
            bound: "max_bytes",
            limit,
        })),
        _ => Ok(()),
    }
}

/// Whether an attribute of a pool takes a value.
pub(super) fn takes(attribute: A, value: u64) -> bool {
    match attribute {
        FOLLOW_EVENTS | OPPORTUNISTIC | INTERNAL_DEPENDENCIES => value <= 1,
        RESERVED_HIGH | USED_HIGH => value == 0,
        RESERVED_CURRENT | USED_CURRENT => false,
        _ => true,
    }
}

const FOLLOW_EVENTS: A = A::CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES;
pub(super) const OPPORTUNISTIC: A = A::CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC;
const INTERNAL_DEPENDENCIES: A = A::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES;
pub(super) const RELEASE_THRESHOLD: A = A::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
pub(super) const RESERVED_CURRENT: A = A::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT;
pub(super) const RESERVED_HIGH: A = A::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH;
pub(super) const USED_CURRENT: A = A::CU_MEMPOOL_ATTR_USED_MEM_CURRENT;
pub(super) const USED_HIGH: A = A::CU_MEMPOOL_ATTR_USED_MEM_HIGH;
