//! The state of memory when a request failed.

use std::fmt;

use crate::driver::DriverError;

/// Free memory pending on one stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct StreamBytes {
    /// The driver's id of the stream.
    pub stream_id: u64,
    /// Free bytes that neither other streams nor the driver can have before this stream has finished with them.
    pub bytes: u64,
    /// The part of them that no marker covers: only synchronising the context shows that they are complete.
    pub unmarked: u64,
}

/// Memory that cannot be released because a few live blocks lie in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PinnedSegment {
    /// First byte of the segment or handle.
    pub address: u64,
    /// Its size in bytes.
    pub bytes: u64,
    /// Bytes of live blocks in it.
    pub live: u64,
    /// The first live block in it.
    pub block: u64,
}

/// Adjacent free memory, and the live blocks next to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Hole {
    /// First byte.
    pub address: u64,
    /// Bytes.
    pub bytes: u64,
    /// First byte of the large live block that ends where the hole begins, if one does.
    pub before: Option<u64>,
    /// First byte of the large live block that begins where the hole ends, if one does.
    pub after: Option<u64>,
}

impl Hole {
    pub(crate) fn new(
        (address, bytes): (u64, u64),
        before: Option<u64>,
        after: Option<u64>,
    ) -> Hole {
        Hole {
            address,
            bytes,
            before,
            after,
        }
    }
}

/// The property that a group of live blocks in the list of the largest holders has in common.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum HeldBy {
    /// The tag of their graph pool, or the label of their requests.
    Tag(String),
    /// The context in which a recording saw them allocated.
    Context(String),
    /// The size range and the stream, for blocks without tag, label and context.
    Size {
        /// The minimum size of each block in bytes.
        least: u64,
        /// The upper bound of their sizes in bytes, exclusive: twice the minimum.
        below: u64,
        /// The driver's id of the stream that they were allocated on.
        stream: u64,
    },
}

/// A group of live blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holder {
    /// The property in common.
    pub by: HeldBy,
    /// Bytes of them, after rounding.
    pub bytes: u64,
    /// Number of them.
    pub blocks: u64,
}

impl Holder {
    pub(crate) fn new(by: HeldBy, (bytes, blocks): (u64, u64)) -> Holder {
        Holder { by, bytes, blocks }
    }
}

/// What the request lacked, as seen by the heap: together with the driver's answers this determines the cause. All
/// figures in bytes.
#[derive(Debug, Clone, Default)]
pub(crate) struct Shortage {
    /// Handles or segments that the request takes if no existing memory is used.
    pub growth: u64,
    /// What the driver must provide after all idle memory was released. At most `growth`.
    pub needed: u64,
    /// Free memory of the request's arena that its stream may use now.
    pub ready: u64,
    /// Handles and segments that would be idle if no work were pending.
    pub waiting: u64,
    /// Whether a run of free memory would hold the request if no work were pending.
    pub fits_pending: bool,
    /// Freed memory that guards and graph pools keep, suspended memory that counts against the limit, and memory that a
    /// resume in progress will take.
    pub kept: u64,
    /// Bytes that count against the limit, without the request.
    pub counted: u64,
    /// Whether a run of free memory would hold the request without guards.
    pub fits_guarded: bool,
    /// Memory that a resume in progress will take.
    pub coming: u64,
}

/// The complete state of memory when a request failed for lack of it. All figures in bytes.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct OutOfMemory {
    /// Device ordinal.
    pub device: usize,
    /// Requested bytes.
    pub requested: u64,
    /// The allocator's limit on reserved memory, if one is set.
    pub limit: Option<u64>,
    /// Reserved from the driver, including suspended memory but not graph pools.
    pub reserved: u64,
    /// In live blocks, after rounding; graph pools are not included.
    pub allocated: u64,
    /// Reserved and not in live blocks.
    pub cached: u64,
    /// The largest free extent, whatever it is pending on.
    pub largest_free: u64,
    /// The largest run of adjacent free extents, whatever they are pending on.
    pub largest_run: u64,
    /// In live blocks that lie in views; part of `allocated`.
    pub in_views: u64,
    /// In freed blocks that guards keep.
    pub guarded: u64,
    /// Suspended, and part of `reserved`.
    pub suspended: u64,
    /// Reserved from the driver by graph pools of the allocator; not part of `reserved`, but counted against the limit.
    pub graph_pools: u64,
    /// In live blocks of graph pools; part of `graph_pools`.
    pub in_graph_pools: u64,
    /// Held by growable ranges; not part of `reserved`, but counted against the limit.
    pub ranges: u64,
    /// Decommitted and not yet unmapped; part of `ranges`.
    pub ranges_leaving: u64,
    /// The groups of live blocks, and of committed memory of ranges, that hold the most memory, largest first; at most
    /// five.
    pub holders: Vec<Holder>,
    /// Free memory pending on streams, most first.
    pub pending: Vec<StreamBytes>,
    /// The longest runs of adjacent free memory, longest first; only a few.
    pub holes: Vec<Hole>,
    /// Whether memory consists of mapped handles: the packed policy.
    pub mapped: bool,
    /// Whether scattered handles may be joined in views.
    pub views: bool,
    /// The places where live blocks pin the most free memory, most first; only a few.
    pub pinned: Vec<PinnedSegment>,
    /// Free on the device according to the driver, if it could be asked.
    pub driver_free: Option<u64>,
    /// Total of the device according to the driver, if it could be asked.
    pub driver_total: Option<u64>,
    /// Bytes of the device that the allocator leaves free.
    pub headroom: u64,
    /// The name of the memory regime ([`Regime`](crate::allocator::Regime)) under the packed policy.
    pub regime: Option<&'static str>,
    /// The driver's refusal of memory, or an earlier driver failure after which the request was retried by other means;
    /// none if there was neither.
    pub driver: Option<DriverError>,
    pub(crate) shortage: Shortage,
}

impl std::error::Error for OutOfMemory {}

/// Formats bytes with a binary unit.
pub(crate) struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut value = self.0 as f64;
        for unit in ["B", "KiB", "MiB"] {
            if value < 1024.0 {
                return write!(f, "{:.*} {unit}", if unit == "B" { 0 } else { 2 }, value);
            }
            value /= 1024.0;
        }
        write!(f, "{value:.2} GiB")
    }
}

/// Formats bytes with a binary unit, rounded up: for amounts that have to be provided.
pub(crate) struct AtLeast(pub u64);

impl fmt::Display for AtLeast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Units are shown with two decimals.
        let unit = match self.0 {
            0..0x400 => 1,
            0x400..0x10_0000 => 1 << 10,
            0x10_0000..0x4000_0000 => 1 << 20,
            _ => 1 << 30,
        };
        let hundredths = (u128::from(self.0) * 100).div_ceil(unit);
        let shown = (hundredths * unit).div_ceil(100);
        Bytes(u64::try_from(shown).unwrap_or(u64::MAX)).fmt(f)
    }
}
