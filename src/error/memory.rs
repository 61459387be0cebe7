//! The picture at the moment when memory ran out.

use std::fmt;

use crate::driver::DriverError;

/// Free memory that waits for one stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct StreamBytes {
    /// The driver's id of the stream.
    pub stream_id: u64,
    /// Free bytes that no other stream can have, and the driver neither, before this stream is done with them.
    pub bytes: u64,
    /// Those of them that no marker covers: only a synchronised context tells that they are complete.
    pub unmarked: u64,
}

/// Memory that cannot be given back because few live blocks lie in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PinnedSegment {
    /// First byte of the segment or handle.
    pub address: u64,
    /// Bytes of it.
    pub bytes: u64,
    /// Bytes of live blocks in it.
    pub live: u64,
    /// The first live block in it.
    pub block: u64,
}

/// Adjacent free memory, and the live blocks beside it.
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

/// The whole picture at the moment when memory ran out. All figures in bytes.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct OutOfMemory {
    /// Device ordinal.
    pub device: usize,
    /// Bytes asked for.
    pub requested: u64,
    /// The allocator's limit on memory held from the driver, if one is set.
    pub limit: Option<u64>,
    /// Held from the driver.
    pub reserved: u64,
    /// In live blocks, after rounding.
    pub allocated: u64,
    /// Held and not in live blocks.
    pub cached: u64,
    /// The largest free extent, whatever it is pending on.
    pub largest_free: u64,
    /// The largest run of adjacent free extents, whatever they are pending on.
    pub largest_run: u64,
    /// In live blocks that lie in views; part of `allocated`.
    pub in_views: u64,
    /// In freed blocks that guards keep.
    pub guarded: u64,
    /// Held from the driver by graph pools of the allocator; not part of `reserved`. The limit counts it.
    pub graph_pools: u64,
    /// Free memory that waits for streams, most first.
    pub pending: Vec<StreamBytes>,
    /// The longest runs of adjacent free memory, longest first; a few.
    pub holes: Vec<Hole>,
    /// Whether memory is made of handles that are mapped: the packed policy.
    pub mapped: bool,
    /// Whether scattered handles may be joined in views.
    pub views: bool,
    /// Where live blocks pin the most free memory, most first; a few.
    pub pinned: Vec<PinnedSegment>,
    /// Free on the device by the driver's account, if it could be asked.
    pub driver_free: Option<u64>,
    /// Total of the device by the driver's account, if it could be asked.
    pub driver_total: Option<u64>,
    /// The driver's refusal of memory; else an earlier failure of the driver, after which the request was tried by
    /// other steps; none if there was neither.
    pub driver: Option<DriverError>,
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "out of memory on device {}: asked for {}, held {} ({} live, {} cached, largest free extent {})",
            self.device,
            Bytes(self.requested),
            Bytes(self.reserved),
            Bytes(self.allocated),
            Bytes(self.cached),
            Bytes(self.largest_free),
        )?;
        if let Some(limit) = self.limit {
            write!(f, ", limit {}", Bytes(limit))?;
        }
        if let (Some(free), Some(total)) = (self.driver_free, self.driver_total) {
            write!(f, ", device {} free of {}", Bytes(free), Bytes(total))?;
        }
        if self.graph_pools > 0 {
            write!(f, ", graph pools hold {}", Bytes(self.graph_pools))?;
        }
        if let Some(others) = self.much_of_others() {
            write!(f, ", others hold {}", Bytes(others))?;
        }
        for pending in &self.pending {
            write!(
                f,
                ", {} pending on stream {}",
                Bytes(pending.bytes),
                pending.stream_id
            )?;
        }
        for pinned in &self.pinned {
            write!(
                f,
                ", {} live of {} at {:#x} pinned by the block at {:#x}",
                Bytes(pinned.live),
                Bytes(pinned.bytes),
                pinned.address,
                pinned.block
            )?;
        }
        match self.driver {
            Some(cause) => write!(f, ", {cause}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for OutOfMemory {}

/// Bytes with a binary unit, for people.
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
