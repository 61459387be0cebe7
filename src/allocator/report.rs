//! Figures and reports as values.

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

/// Why memory was added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum GrowthReason {
    /// All free memory together was less than the request.
    Short,
    /// There was enough free memory, but in pieces that were too small.
    Fragmented,
    /// There was a place, which other streams may still use.
    Pending,
}

impl GrowthReason {
    /// One word for people and machines.
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

/// One growth of the memory that is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct GrowthInfo {
    /// Why it was needed.
    pub reason: GrowthReason,
    /// Bytes of the request that needed it.
    pub requested: u64,
    /// Bytes that were added.
    pub added: u64,
    /// Whether more was held then than the soft cap allows.
    pub beyond_cap: bool,
}

/// Whether the device was seen to keep memory the same through two addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum SelfTest {
    /// No view was needed yet, or none may be built: nothing was tested.
    #[default]
    NotRun,
    /// Switched off: views are used untested.
    Off,
    /// What was written through one address was read through the other.
    Passed,
    /// It was not: no views are used.
    Failed,
}

impl SelfTest {
    /// A few words for people and machines.
    pub fn name(self) -> &'static str {
        match self {
            SelfTest::NotRun => "not run",
            SelfTest::Off => "off",
            SelfTest::Passed => "passed",
            SelfTest::Failed => "failed",
        }
    }
}

/// Whether the packed policy saves driver calls and waits, or bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Regime {
    /// Memory grows in few and large handles, up to 3 % above the peak of active bytes, before free memory is stitched.
    /// Requests wait for other streams only with [`Waits::Always`](crate::allocator::Waits::Always).
    #[default]
    Plentiful,
    /// Memory grows in small handles, up to 1 % above the peak of live bytes, before free memory is stitched.
    Scarce(Scarcity),
}

/// Why memory is scarce.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Scarcity {
    /// [`Profile::Dense`](crate::allocator::Profile::Dense) says so.
    Profile,
    /// A growth would have left less than 3 % of the limit. It holds until 6 % is left and 512 large requests have passed.
    Limit,
    /// A growth would have left less free memory on the device, beside the headroom, than 512 MiB (on devices below 8 GiB a
    /// 16th) and 3 % of the device. It holds until there is twice as much and 512 large requests have passed.
    Device,
    /// The driver refused memory.
    Refused,
}

impl Regime {
    /// All regimes. The number of a regime in recordings is its place here.
    const ALL: [Regime; 5] = [
        Regime::Plentiful,
        Regime::Scarce(Scarcity::Profile),
        Regime::Scarce(Scarcity::Limit),
        Regime::Scarce(Scarcity::Device),
        Regime::Scarce(Scarcity::Refused),
    ];

    /// The regime's number in recordings.
    pub(crate) fn number(self) -> u64 {
        let place = Regime::ALL.iter().position(|regime| *regime == self);
        place.map_or(0, |place| place as u64)
    }

    /// The regime with a number in recordings.
    pub(crate) fn from_number(number: u64) -> Option<Regime> {
        Regime::ALL.get(usize::try_from(number).ok()?).copied()
    }

    /// A few words for people and machines.
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

/// How the packed policy stands; of the classic one only what is said there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Packing {
    /// Bytes that growth does not pass while anything else helps. 0 under the classic policy, and
    /// before the first request.
    pub soft_cap: u64,
    /// Whether memory was plentiful or scarce for the last request that found nothing ready.
    pub regime: Regime,
    /// Views (a number).
    pub views: u64,
    /// Handles mapped in them (a number; one that lies in two views counts twice).
    pub view_maps: u64,
    /// Bytes mapped in them.
    pub view_bytes: u64,
    /// Bytes of live blocks in them.
    pub view_live: u64,
    /// Bytes of freed blocks that guards keep.
    pub guarded: u64,
    /// Why memory was last added; both policies.
    pub last_growth: Option<GrowthInfo>,
    /// Whether views were tested, and how that ended.
    pub self_test: SelfTest,
}

/// External fragmentation: free memory, and how far it can serve.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Fragmentation {
    /// Free bytes, whatever they are pending on.
    pub free: u64,
    /// Bytes of the largest run of adjacent free memory, whatever it is pending on.
    pub largest: u64,
    /// What each stream keeps from the others, most first: memory that it may still use, and the free part of
    /// the pages that it owns.
    pub stranded: Vec<StreamBytes>,
    /// Bytes of live blocks that lie in views: scattered memory put to use.
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

/// What a trim did.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Trimmed {
    /// Bytes given back to the driver.
    pub released: u64,
    /// Bytes that could go once work that is still pending has completed.
    pub pending: u64,
    /// The streams for which free memory waits, most first; none if nothing is pending.
    pub streams: Vec<StreamBytes>,
}

/// A part of a block that lies in one piece of memory from the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct PhysicalSegment {
    /// Address of its first byte, within the block.
    pub address: sys::CUdeviceptr,
    /// Bytes.
    pub bytes: u64,
    /// The physical handle, as `cuMemCreate` gave it; `None` under the classic policy, where the
    /// memory is a segment of `cuMemAlloc`.
    pub handle: Option<sys::CUmemGenericAllocationHandle>,
    /// Where it begins in the handle or segment, in bytes.
    pub offset: u64,
    /// Bytes of the whole handle or segment: exporting or registering shows all of them.
    pub handle_bytes: u64,
}

/// One block, live or free.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct BlockInfo {
    /// Ordinal of the device; `None` from a [`Carver`](super::Carver), which knows of none.
    pub device: Option<usize>,
    /// First byte.
    pub address: u64,
    /// Bytes.
    pub size: u64,
    /// Bytes as asked for; 0 unless live.
    pub requested: u64,
    /// What it is.
    pub state: BlockState,
    /// The driver's id of the stream that owns the block or last did. `None` if no stream is known
    /// to have touched the memory.
    pub stream: Option<u64>,
    /// Ids of the streams that may still touch it: recorded ones while it is live, unfinished ones
    /// when it is free.
    pub pending: Vec<u64>,
    /// Whether it is of the small pool.
    pub small: bool,
    /// Whether it is a part of something larger: has a neighbour in its segment.
    pub is_split: bool,
}

/// Memory from the driver with what stands in it: a segment, or an unbroken run of mapped handles.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SegmentInfo {
    /// First byte.
    pub address: u64,
    /// Bytes.
    pub size: u64,
    /// Whether it is of the small pool.
    pub small: bool,
    /// Whether it is made of handles mapped into an arena.
    pub mapped: bool,
    /// Whether it is a view: a second layout of bytes that are held elsewhere. Its size is not
    /// held memory of its own.
    pub view: bool,
    /// What stands in it, by address and without gaps; of a view the live blocks alone.
    pub blocks: Vec<BlockInfo>,
}
