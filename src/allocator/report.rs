//! Statistics and reports as values.

pub use crate::block::BlockState;
use crate::driver::sys;
use crate::error::StreamBytes;
use crate::error::memory::Bytes;
use std::fmt;

/// The limit of an allocator, for logs.
pub(crate) struct LimitText(pub Option<u64>);

impl fmt::Display for LimitText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(bytes) => write!(f, "limit {}", Bytes(bytes)),
            None => f.write_str("no limit"),
        }
    }
}

/// Why memory was obtained from the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum GrowthReason {
    /// All free memory together was smaller than the request.
    Short,
    /// There was enough free memory, but in pieces that were too small.
    Fragmented,
    /// A fitting piece was free, but other streams may still access it.
    Pending,
}

impl GrowthReason {
    /// Returns the reason as one word, for output and machine-readable files.
    pub fn name(self) -> &'static str {
        match self {
            GrowthReason::Short => "short",
            GrowthReason::Fragmented => "fragmented",
            GrowthReason::Pending => "pending",
        }
    }

    /// The reason as a clause, for logs.
    pub(crate) fn clause(self) -> &'static str {
        match self {
            GrowthReason::Short => "all free memory together is less than that",
            GrowthReason::Fragmented => "no free piece is as large",
            GrowthReason::Pending => "the free memory that fits is pending on other streams",
        }
    }
}

/// Serialises types by their names.
#[cfg(feature = "serde")]
macro_rules! serialize_names {
    ($($named:ty),*) => {$(
        impl serde::Serialize for $named {
            fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                to.serialize_str(self.name())
            }
        }
    )*};
}
#[cfg(feature = "serde")]
serialize_names!(GrowthReason, SelfTest, Regime);

/// A growth of reserved memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct GrowthInfo {
    /// Why the growth was necessary.
    pub reason: GrowthReason,
    /// Bytes of the request that caused the growth.
    pub requested: u64,
    /// Bytes obtained from the driver.
    pub added: u64,
    /// Whether the growth exceeded the soft cap.
    pub beyond_cap: bool,
}

/// Result of the test that a write through one mapping is visible through another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum SelfTest {
    /// Not tested: no view has been needed yet, or views are disabled.
    #[default]
    NotRun,
    /// The test is disabled: views are used untested.
    Off,
    /// Passed: data written through one mapping was read through the other.
    Passed,
    /// Failed: no views are used.
    Failed,
}

impl SelfTest {
    /// Returns the result as a short text, for output and machine-readable files.
    pub fn name(self) -> &'static str {
        match self {
            SelfTest::NotRun => "not run",
            SelfTest::Off => "off",
            SelfTest::Passed => "passed",
            SelfTest::Failed => "failed",
        }
    }
}

/// Whether the packed policy saves driver calls and waits (plentiful), or bytes (scarce).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Regime {
    /// Memory grows in few and large handles, up to 3 % (with several streams 5 %) above the peak of active bytes,
    /// before free memory is stitched. Requests wait for other streams only with
    /// [`Waits::Always`](crate::allocator::Waits::Always).
    #[default]
    Plentiful,
    /// Memory grows in small handles, up to 1 % above the peak of live bytes, before free memory is stitched.
    Scarce(Scarcity),
}

/// Why memory is scarce.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Scarcity {
    /// [`Profile::Dense`](crate::allocator::Profile::Dense) is set.
    Profile,
    /// A growth would have left less than 3 % of the limit. The regime ends when 6 % is left and 512 large requests
    /// have passed.
    Limit,
    /// A growth would have left less free memory on the device, beyond the headroom, than 512 MiB (on devices below 8
    /// GiB a 16th) and 3 % of the device. The regime ends when twice that is free and 512 large requests have passed.
    Device,
    /// The driver refused a request for memory.
    Refused,
}

impl Regime {
    /// All regimes. A regime's index here is its number in recordings.
    const ALL: [Regime; 5] = [
        Regime::Plentiful,
        Regime::Scarce(Scarcity::Profile),
        Regime::Scarce(Scarcity::Limit),
        Regime::Scarce(Scarcity::Device),
        Regime::Scarce(Scarcity::Refused),
    ];

    /// Returns the regime's number in recordings.
    pub(crate) fn number(self) -> u64 {
        let place = Regime::ALL.iter().position(|regime| *regime == self);
        place.map_or(0, |place| place as u64)
    }

    /// Returns the regime with a number in recordings.
    pub(crate) fn from_number(number: u64) -> Option<Regime> {
        Regime::ALL.get(usize::try_from(number).ok()?).copied()
    }

    /// Returns the regime as a short text, for output and machine-readable files.
    pub fn name(self) -> &'static str {
        match self {
            Regime::Plentiful => "plentiful",
            Regime::Scarce(Scarcity::Profile) => "scarce (profile)",
            Regime::Scarce(Scarcity::Limit) => "scarce (limit)",
            Regime::Scarce(Scarcity::Device) => "scarce (device)",
            Regime::Scarce(Scarcity::Refused) => "scarce (refused)",
        }
    }
}

/// State of the packed policy. Under the classic policy, only the fields that say so are set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Packing {
    /// Reserved bytes that growth does not exceed while another step can serve the request. 0 under the classic policy,
    /// and before the first request.
    pub soft_cap: u64,
    /// The regime of the last request that no ready memory could serve.
    pub regime: Regime,
    /// Number of views.
    pub views: u64,
    /// Number of handle mappings in views; a handle in two views counts twice.
    pub view_maps: u64,
    /// Bytes mapped in views.
    pub view_bytes: u64,
    /// Bytes of live blocks in views.
    pub view_live: u64,
    /// Bytes of freed blocks that guards keep reserved.
    pub guarded: u64,
    /// The last growth and its reason; set under both policies.
    pub last_growth: Option<GrowthInfo>,
    /// Result of the self-test of views.
    pub self_test: SelfTest,
}

/// External fragmentation of the free memory.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Fragmentation {
    /// Free bytes, including pending ones.
    pub free: u64,
    /// Bytes of the largest contiguous run of free memory, pending memory included.
    pub largest: u64,
    /// Bytes that each stream keeps from the others, in descending order: memory that it may still access, and the free
    /// part of its pages.
    pub stranded: Vec<StreamBytes>,
    /// Bytes of live blocks in views, that is, of scattered memory in use.
    pub view_live: u64,
}

impl Fragmentation {
    /// The share of the free memory that lies outside its largest run, from 0 (all free memory is
    /// one run) to 1.
    pub fn ratio(&self) -> f64 {
        match self.free {
            0 => 0.0,
            free => 1.0 - self.largest as f64 / free as f64,
        }
    }
}

/// Result of a trim.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Trimmed {
    /// Bytes released to the driver.
    pub released: u64,
    /// Bytes that can be released once pending work has completed.
    pub pending: u64,
    /// Streams on which free memory is pending, in descending order of bytes; empty if nothing is pending.
    pub streams: Vec<StreamBytes>,
}

/// The part of a block that lies in one handle or segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct PhysicalSegment {
    /// Address of its first byte, within the block.
    pub address: sys::CUdeviceptr,
    /// Bytes.
    pub bytes: u64,
    /// The physical handle returned by `cuMemCreate`; `None` under the classic policy, where the memory is a segment of
    /// `cuMemAlloc`.
    pub handle: Option<sys::CUmemGenericAllocationHandle>,
    /// Offset of the part in the handle or segment, in bytes.
    pub offset: u64,
    /// Bytes of the whole handle or segment, all of which an export or registration exposes.
    pub handle_bytes: u64,
}

/// One block, live or free.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct BlockInfo {
    /// Ordinal of the device; `None` from a [`Carver`](super::Carver), which has no device.
    pub device: Option<usize>,
    /// First byte.
    pub address: u64,
    /// Bytes.
    pub size: u64,
    /// Requested bytes; 0 unless live.
    pub requested: u64,
    /// State of the block.
    pub state: BlockState,
    /// Driver id of the stream that owns the block or owned it last. `None` if no stream is known to have accessed the
    /// memory.
    pub stream: Option<u64>,
    /// Ids of the streams that may still access it: for a live block the recorded streams, for a free one the streams
    /// with unfinished work.
    pub pending: Vec<u64>,
    /// Whether the block belongs to the small pool.
    pub small: bool,
    /// Whether the block is part of a larger piece: it has a neighbour in its segment.
    pub is_split: bool,
    /// Id of the graph pool that the block belongs to ([`GraphPool::id`](crate::allocator::GraphPool::id)).
    pub pool: Option<u64>,
}

/// Memory from the driver and its blocks: a segment, or a contiguous run of mapped handles.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct SegmentInfo {
    /// First byte.
    pub address: u64,
    /// Bytes.
    pub size: u64,
    /// Whether the segment belongs to the small pool.
    pub small: bool,
    /// Whether the segment consists of handles mapped into an arena.
    pub mapped: bool,
    /// Whether the segment is a view: a second mapping of bytes that are reserved elsewhere. Its size does not count as
    /// reserved.
    pub view: bool,
    /// Blocks by address, without gaps; for a view only the live blocks.
    pub blocks: Vec<BlockInfo>,
}
