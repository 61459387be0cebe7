//! Settings and attributes of the driver's own pools.

use crate::driver::sys;

use super::error::PoolError;

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
    /// [`PoolError::InvalidValue`] for a pool that may hold nothing, [`PoolError::Contradiction`].
    pub fn validate(&self) -> Result<(), PoolError> {
        // To the driver a maximum of 0 is none.
        if self.max_bytes == Some(0) {
            return Err(PoolError::InvalidValue {
                what: "max_bytes",
                value: 0,
            });
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
) -> Result<(), PoolError> {
    match max_bytes {
        Some(limit) if value > limit => Err(PoolError::Contradiction {
            larger: setting,
            value,
            bound: "max_bytes",
            limit,
        }),
        _ => Ok(()),
    }
}

/// An attribute of a [`NativePool`](super::NativePool).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PoolAttribute {
    /// 1 if memory may be reused where an event already orders the reuse.
    FollowEvents,
    /// 1 if memory may be reused when its free happens to have completed. Not to be had on drivers
    /// before CUDA 11.5, which hand out memory in use with it.
    Opportunistic,
    /// 1 if the driver may insert waits in order to reuse memory.
    InternalDependencies,
    /// Unused bytes above this go back to the driver whenever the host synchronises.
    ReleaseThreshold,
    /// Bytes held. Cannot be set.
    ReservedCurrent,
    /// The most bytes held. Can be set to 0, which means the current value.
    ReservedHigh,
    /// Bytes in live blocks. Cannot be set.
    UsedCurrent,
    /// The most bytes in live blocks. Can be set to 0, which means the current value.
    UsedHigh,
}

impl PoolAttribute {
    pub(super) fn raw(self) -> sys::CUmemPool_attribute {
        use sys::CUmemPool_attribute as A;
        match self {
            PoolAttribute::FollowEvents => A::CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES,
            PoolAttribute::Opportunistic => A::CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC,
            PoolAttribute::InternalDependencies => {
                A::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES
            }
            PoolAttribute::ReleaseThreshold => A::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
            PoolAttribute::ReservedCurrent => A::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
            PoolAttribute::ReservedHigh => A::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH,
            PoolAttribute::UsedCurrent => A::CU_MEMPOOL_ATTR_USED_MEM_CURRENT,
            PoolAttribute::UsedHigh => A::CU_MEMPOOL_ATTR_USED_MEM_HIGH,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            PoolAttribute::FollowEvents => "follow event dependencies",
            PoolAttribute::Opportunistic => "opportunistic reuse",
            PoolAttribute::InternalDependencies => "internal dependencies",
            PoolAttribute::ReleaseThreshold => "release threshold",
            PoolAttribute::ReservedCurrent => "reserved bytes",
            PoolAttribute::ReservedHigh => "most reserved bytes",
            PoolAttribute::UsedCurrent => "used bytes",
            PoolAttribute::UsedHigh => "most used bytes",
        }
    }

    pub(super) fn takes(self, value: u64) -> bool {
        match self {
            PoolAttribute::FollowEvents
            | PoolAttribute::Opportunistic
            | PoolAttribute::InternalDependencies => value <= 1,
            PoolAttribute::ReleaseThreshold => true,
            PoolAttribute::ReservedHigh | PoolAttribute::UsedHigh => value == 0,
            PoolAttribute::ReservedCurrent | PoolAttribute::UsedCurrent => false,
        }
    }
}
