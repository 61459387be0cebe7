//! Settings and attributes of the driver's own pools.

#![forbid(unsafe_code)]

use crate::driver::sys::CUmemPool_attribute as A;
use crate::error::{Error, InvalidArgument};

/// Settings of a [`DriverPool`](super::DriverPool), final but for the threshold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DriverPoolConfig {
    pub(super) maximum: Option<u64>,
    pub(super) initial: u64,
    pub(super) release_threshold: Option<u64>,
    pub(super) exportable: bool,
}

impl DriverPoolConfig {
    /// No maximum, no initial memory, all unused memory kept, not exportable.
    pub const fn new() -> Self {
        DriverPoolConfig {
            maximum: None,
            initial: 0,
            release_threshold: None,
            exportable: false,
        }
    }

    /// Bounds the bytes that the pool may hold, by at least 1; `None` lifts the bound.
    pub const fn maximum(mut self, bytes: Option<u64>) -> Self {
        self.maximum = bytes;
        self
    }

    /// Sets the bytes to take from the driver when the pool is made.
    pub const fn initial(mut self, bytes: u64) -> Self {
        self.initial = bytes;
        self
    }

    /// Sets the unused bytes above which memory goes back to the driver whenever the host synchronises; `None`
    /// keeps all.
    pub const fn release_threshold(mut self, bytes: Option<u64>) -> Self {
        self.release_threshold = bytes;
        self
    }

    /// Sets whether other processes may get access by a file descriptor.
    pub const fn exportable(mut self, on: bool) -> Self {
        self.exportable = on;
        self
    }

    /// Checks the settings against each other. Needs no driver.
    ///
    /// # Errors
    /// [`InvalidArgument::Setting`] for a pool that may hold nothing, [`InvalidArgument::Contradiction`].
    pub fn validate(&self) -> Result<(), Error> {
        // To the driver a maximum of 0 is none.
        if self.maximum == Some(0) {
            let (what, value) = ("maximum", 0);
            return Err(InvalidArgument::Setting { what, value }.into());
        }
        within("initial", self.initial, self.maximum)?;
        let threshold = self.release_threshold.unwrap_or(0);
        within("release_threshold", threshold, self.maximum)
    }
}

/// Checks a setting against the most bytes that a pool may hold.
pub(super) fn within(setting: &'static str, value: u64, maximum: Option<u64>) -> Result<(), Error> {
    match maximum {
        Some(limit) if value > limit => Err(InvalidArgument::Contradiction {
            larger: setting,
            value,
            bound: "maximum",
            limit,
        }
        .into()),
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
