//! Physical memory: what is held from the driver, and the rules for growth and release.
//!
//! Nothing here reads a clock: work is counted in handles and requests.

pub(crate) mod access;
pub(crate) mod address;
pub(crate) mod commit;
pub(crate) mod policy;

use std::collections::BTreeMap;

use crate::allocator::config::{Profile, Tuning, Waits};
use crate::allocator::extent::handle::{Handles, Holding};
use crate::allocator::extent::record::{NIL, SpaceId};
use crate::allocator::extent::space::Shard;
use crate::allocator::extent::want::Want;
use crate::allocator::report::{GrowthInfo, GrowthReason, PhysicalSegment, Regime, Scarcity};
use crate::allocator::size::{GRANULE, PHYSICAL_GRANULE};
use crate::driver::DriverError;
use crate::error::Error;

/// Slack of the soft cap over the peak of active bytes while memory is plentiful, as a share of it or as an amount,
/// whichever is more. With 4 % the recordings hold 1.021 of what they request instead of 1.018, for 1 % less driver
/// time.
const SLACK_PERCENT: u64 = 3;
const SLACK: u64 = 32 << 20;
/// The slack with several streams, whose free memory changes more between rounds. With 3 % and a marker for every MiB, the
/// first replay of a pipeline over three streams takes 1.35 times the driver time, the second 1.7 times.
const SHARED_SLACK_PERCENT: u64 = 5;
/// While memory is plentiful, the streams together leave up to this part of it without markers. With 1 MiB for each
/// stream, a pipeline over three streams records 1.7 times the markers; with a 16th, six streams hold 1.042 of what they
/// request instead of 1.030.
const UNMARKED_PART: u64 = 64;
/// The slack over the peak of live bytes while memory is scarce. With it, `profile=dense` holds 1.013 of what the
/// recordings request.
const SCARCE_SLACK_PERCENT: u64 = 1;
const SCARCE_SLACK: u64 = 16 << 20;

/// While memory is plentiful a handle is at least this part of the pool, because the driver's cost is per handle, and
/// growth is rounded up to half a handle. With a 96th random programs hold 1.12 of what they request instead of 1.10;
/// with a 256th the first replays of the recordings take 1.4 times the driver time.
const POOL_PARTS: u64 = 128;
/// Every handle for large blocks is a power of two from the granule to this.
const HANDLE_MAX: u64 = 64 << 20;

/// While memory is scarce, a handle is at least this part of its request.
const SCARCE_PARTS: u64 = 32;
/// With several streams it is twice that part, up to this many bytes: the free memory changes more between rounds, and
/// layouts recur less often.
const SHARED_PART_MAX: u64 = 16 << 20;
/// On one stream, handles grow so that the pool has about this many.
const SCARCE_HANDLES: u64 = 320;
/// With several streams the pool has about this many: with 384 a pipeline over three streams holds 1.035 of its peak.
const SHARED_SCARCE_HANDLES: u64 = 640;
const SCARCE_HANDLE_MAX: u64 = 32 << 20;
/// Handles of a growth of a graph pool are this part of it, in whole granules: few, because a capture is in progress.
const GRAPH_PARTS: u64 = 8;
const GRAPH_REQUEST_PARTS: u64 = 32;
/// A handle is at most this part of the limit in either regime (without a limit: of the device), below half of that and
/// above it: handles cannot be divided, and those made while memory is plentiful have to serve when it is scarce.
/// Without the bound below half, the smallest limit of six streams is 1.0205 of what they request instead of 1.0143.
const LIMIT_PARTS: [u64; 2] = [512, 2048];
/// Memory is scarce when less than this share of the limit is left, or when the device has less free memory than both
/// this share of it and `DEVICE_SCARCE` (on a small device, the `DEVICE_SCARCE_PART`th part of it). It is plentiful
/// again with twice as much.
const SCARCE_PERCENT: u64 = 3;
const DEVICE_SCARCE: u64 = 512 << 20;
const DEVICE_SCARCE_PART: u64 = 16;
/// Memory stays scarce for this many large requests after a refusal.
const CALM_REQUESTS: u64 = 512;

/// The users of new memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MemoryUsers {
    /// The only active stream.
    One,
    /// One stream among several.
    Several,
    /// A graph pool.
    Pool,
}

/// The initial bounds of an allocator's memory, in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    /// See [`Physical::limit`].
    pub limit: Option<u64>,
    /// See [`Physical::device`].
    pub device: u64,
    /// See [`Physical::headroom`].
    pub headroom: u64,
}

/// The physical memory of an allocator.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Physical {
    /// Number of large requests so far.
    requests: u64,
    /// Bytes that growth in progress will add.
    pub planned: u64,
    /// Maximum number of bytes held from the driver.
    pub limit: Option<u64>,
    /// Memory held from the driver, by its home address.
    pub holdings: BTreeMap<u64, Holding>,
    /// The handles of the large arena by number.
    pub handles: Handles,
    /// Records of handles that could not be unmapped yet: their memory is unusable.
    pub quarantined: Vec<u32>,
    /// Reserved address ranges: base to bytes.
    pub spans: BTreeMap<u64, u64>,
    /// Bytes of the device.
    pub device: u64,
    /// Bytes of the device that growth leaves free.
    pub headroom: u64,
    /// Bytes that the device allows the allocator to hold, by its last answer: the bytes held then plus the free bytes,
    /// less the headroom, or the bytes held when it refused memory. `None` after a release or a failed request.
    pub full_at: Option<u64>,
    /// The last growth and its reason.
    pub last_growth: Option<GrowthInfo>,
    /// Whether memory was plentiful or scarce for the last request that no ready memory could serve.
    pub regime: Regime,
    /// The configuration of regime, waits and handles.
    pub tuning: Tuning,
    /// Number of large requests when memory was last found to be scarce.
    scarce_at: u64,
}

impl Physical {
    pub(crate) fn new(bounds: Bounds, tuning: Tuning) -> Self {
        let Bounds {
            limit,
            device,
            headroom,
        } = bounds;
        let mut physical = Physical {
            holdings: BTreeMap::new(),
            handles: Handles::default(),
            quarantined: Vec::new(),
            spans: BTreeMap::new(),
            planned: 0,
            limit,
            device,
            headroom,
            full_at: None,
            last_growth: None,
            regime: Regime::Plentiful,
            tuning,
            requests: 0,
            scarce_at: 0,
        };
        physical.choose_regime(0);
        physical
    }

    /// Counts that handles, given by their homes, are mapped in one view more, or one less.
    pub(crate) fn count_views(&mut self, homes: impl IntoIterator<Item = u64>, more: bool) {
        for home in homes {
            if let Some(holding) = self.holdings.get_mut(&home) {
                holding.views = if more {
                    holding.views + 1
                } else {
                    holding.views - 1
                };
            }
        }
    }

    /// Returns the handle with this home address.
    pub(crate) fn handle_at(&self, home: u64) -> Option<u64> {
        self.holdings.get(&home)?.handle
    }

    pub(crate) fn count_request(&mut self, want: &Want) {
        self.requests += u64::from(want.space == SpaceId::Large);
    }

    pub(crate) fn home_segments(&self, ptr: u64, end: u64) -> Vec<PhysicalSegment> {
        let first = self.holdings.range(..=ptr).next_back();
        let first = first.map_or(ptr, |(base, _)| *base);
        let held = self.holdings.range(first..end);
        held.filter_map(|(base, holding)| {
            let (from, to) = (ptr.max(*base), end.min(base + holding.bytes));
            (from < to).then(|| PhysicalSegment {
                address: from,
                bytes: to - from,
                handle: holding.handle,
                offset: from - base,
                handle_bytes: holding.bytes,
            })
        })
        .collect()
    }

    /// Divides a range of address space at the borders of reservations: no handle may span two.
    pub(crate) fn stretches(&self, addr: u64, bytes: u64) -> Vec<(u64, u64)> {
        let (mut stretches, mut at) = (Vec::new(), addr);
        for (base, _) in self.spans.range(addr + 1..addr + bytes) {
            stretches.push((at, base - at));
            at = *base;
        }
        stretches.push((at, addr + bytes - at));
        stretches
    }

    /// Returns the sizes of the handles for a range.
    pub(crate) fn tiles(&self, addr: u64, bytes: u64, size: u64) -> Vec<u64> {
        let stretches = self.stretches(addr, bytes).into_iter();
        stretches.flat_map(|(_, part)| tile(part, size)).collect()
    }

    /// Returns the error for a pointer that is not a live block.
    pub(crate) fn not_live(&self, ptr: u64) -> Error {
        match self.holds(ptr) {
            true => Error::NotLive { ptr },
            false => Error::NotOurs { ptr },
        }
    }

    /// Whether an address lies in memory that the allocator holds.
    pub(crate) fn holds(&self, ptr: u64) -> bool {
        self.holdings
            .range(..=ptr)
            .next_back()
            .is_some_and(|(base, h)| ptr < base + h.bytes)
    }

    // ---- the two regimes --------------------------------------------------------------------------

    /// Decides whether memory is scarce for a growth after which this number of bytes is held. Returns the regime if it
    /// has changed.
    pub(crate) fn choose_regime(&mut self, held: u64) -> Option<Regime> {
        let calm = self.requests - self.scarce_at >= CALM_REQUESTS;
        let regime = match (self.scarcity(held, 1), self.regime) {
            (Some(cause), _) => {
                self.scarce_at = self.requests;
                Regime::Scarce(cause)
            }
            (None, Regime::Scarce(_)) if calm && self.scarcity(held, 2).is_none() => {
                Regime::Plentiful
            }
            (None, regime) => regime,
        };
        let changed = std::mem::replace(&mut self.regime, regime) != regime;
        changed.then_some(regime)
    }

    /// Returns the reason why memory is scarce with this number of bytes held, if it is, by the margins of the regime
    /// or a multiple of them.
    fn scarcity(&self, held: u64, times: u64) -> Option<Scarcity> {
        if self.tuning.profile == Profile::Dense {
            return Some(Scarcity::Profile);
        }
        let within = |bound: u64, margin: u64| bound.saturating_sub(held) < margin * times;
        let share = |bytes: u64| bytes / 100 * SCARCE_PERCENT;
        if let Some(limit) = self.limit
            && within(limit, share(limit))
        {
            return Some(Scarcity::Limit);
        }
        let least = DEVICE_SCARCE.min(self.device / DEVICE_SCARCE_PART);
        let full_at = self.full_at?;
        within(full_at, least.max(share(self.device))).then_some(match self.regime {
            Regime::Scarce(Scarcity::Refused) => Scarcity::Refused,
            _ => Scarcity::Device,
        })
    }

    /// Records that the device has this number of bytes free while this number is held.
    pub(crate) fn note_free(&mut self, free: Option<u64>, held: u64) {
        self.full_at = free.map(|free| held.saturating_add(free.saturating_sub(self.headroom)));
    }

    /// Records that the driver refused to hold more than this. Returns the regime if it has changed.
    pub(crate) fn note_refusal(&mut self, full_at: u64) -> Option<Regime> {
        self.full_at = Some(full_at);
        self.scarce_at = self.requests;
        if let Regime::Scarce(_) = self.regime {
            return None;
        }
        self.regime = Regime::Scarce(Scarcity::Refused);
        Some(self.regime)
    }

    /// Returns the bytes that growth should not exceed while another step can serve the request, for a given peak.
    pub(crate) fn soft_cap(&self, peak: u64, users: MemoryUsers) -> u64 {
        let (percent, least) = match (self.regime, users) {
            (Regime::Plentiful, MemoryUsers::Several) => (SHARED_SLACK_PERCENT, SLACK),
            (Regime::Plentiful, _) => (SLACK_PERCENT, SLACK),
            (Regime::Scarce(_), _) => (SCARCE_SLACK_PERCENT, SCARCE_SLACK),
        };
        peak.saturating_add((peak / 100 * percent).max(least))
    }

    /// Returns how many freed bytes may lack a marker with this number of bytes held. With `waits=always` other streams
    /// use them behind the marker.
    pub(crate) fn unmarked_bytes(&self, held: u64) -> u64 {
        match self.regime {
            Regime::Plentiful if self.tuning.waits != Waits::Always => held / UNMARKED_PART,
            _ => 0,
        }
    }

    /// Returns the unit of growth for a pool of this size, as far as the soft cap allows.
    pub(crate) fn growth_step(&self, reserved: u64) -> u64 {
        match self.regime {
            Regime::Plentiful => {
                let handle = self.tuning.handle.unwrap_or(pool_handle(reserved));
                (self.within_limit(handle, reserved) / 2).max(PHYSICAL_GRANULE)
            }
            Regime::Scarce(_) => PHYSICAL_GRANULE,
        }
    }

    /// Returns the size of a handle, reduced where the limit requires it with this number of bytes held.
    fn within_limit(&self, size: u64, held: u64) -> u64 {
        let most = self.limit.unwrap_or(self.device);
        let part = most / LIMIT_PARTS[usize::from(held > most / 2)];
        size.min(1 << part.max(PHYSICAL_GRANULE).ilog2())
    }

    /// Returns the maximum number of bytes held from the driver.
    fn bound(&self) -> u64 {
        let limit = self.limit.unwrap_or(u64::MAX);
        limit.min(self.full_at.unwrap_or(u64::MAX))
    }

    /// Returns the bytes that may still be obtained from the driver with this number held.
    pub(crate) fn room(&self, held: u64) -> u64 {
        self.bound().saturating_sub(held)
    }

    /// Whether this number of bytes is more than half of the maximum.
    pub(crate) fn is_near(&self, held: u64) -> bool {
        held > self.bound() / 2
    }

    /// Returns the size of the handles for a growth by `missing` bytes with this number reserved.
    pub(crate) fn handle_size(
        &self,
        want: &Want,
        missing: u64,
        reserved: u64,
        users: MemoryUsers,
    ) -> u64 {
        if want.space == SpaceId::Small {
            return PHYSICAL_GRANULE;
        }
        let request = u64::from(want.granules) * GRANULE;
        let size = match (self.tuning.handle, self.regime, users) {
            (Some(bytes), ..) => bytes,
            (None, _, MemoryUsers::Pool) => {
                let part = (request / GRAPH_REQUEST_PARTS).max(missing / GRAPH_PARTS);
                scarce_handle(reserved, SHARED_SCARCE_HANDLES).max(part)
            }
            (None, Regime::Plentiful, _) => pool_handle(reserved + missing),
            (None, Regime::Scarce(_), MemoryUsers::One) => {
                scarce_handle(reserved, SCARCE_HANDLES).max(request / SCARCE_PARTS)
            }
            (None, Regime::Scarce(_), MemoryUsers::Several) => {
                let part = request / SCARCE_PARTS;
                let shared = (2 * part).min(SHARED_PART_MAX).max(part);
                scarce_handle(reserved, SHARED_SCARCE_HANDLES).max(shared)
            }
        };
        let size = self.within_limit(size, reserved + missing);
        1 << size.clamp(PHYSICAL_GRANULE, HANDLE_MAX).ilog2()
    }
}

/// Returns the handle size for a pool of this size while memory is plentiful: a power of two.
fn pool_handle(reserved: u64) -> u64 {
    let part = (reserved / POOL_PARTS).max(PHYSICAL_GRANULE);
    part.next_power_of_two().min(HANDLE_MAX)
}

/// Returns the handle size for a pool of this size and number of handles while memory is scarce.
fn scarce_handle(reserved: u64, handles: u64) -> u64 {
    let part = reserved.div_ceil(handles).max(PHYSICAL_GRANULE);
    part.next_power_of_two().min(SCARCE_HANDLE_MAX)
}

/// A failed growth, with what could not be undone.
#[derive(Debug)]
pub(crate) struct GrowthFailure {
    pub error: DriverError,
    /// Handles that may still be mapped: (address, bytes, handle).
    pub mapped: Vec<(u64, u64, u64)>,
}

/// Results of the two calls that release a handle: the unmapping, and the release. The second is valid only if the
/// first succeeded.
pub(crate) type GivenBack = (Result<(), DriverError>, Result<(), DriverError>);

/// Memory to be created: a claimed extent, and the handles to map there.
#[derive(Debug)]
pub(crate) struct Fresh {
    pub space: SpaceId,
    pub id: u32,
    pub shards: Vec<Shard>,
    /// First byte to map.
    pub addr: u64,
    /// Sizes of the handles to create, in address order.
    pub sizes: Vec<u64>,
    /// The range, divided at borders of reservations: start and bytes.
    pub stretches: Vec<(u64, u64)>,
    /// Why memory was missing.
    pub reason: GrowthReason,
}

impl Fresh {
    /// Describes new handles outside the arenas, at addresses of one reservation.
    pub(crate) fn at(addr: u64, sizes: Vec<u64>) -> Fresh {
        Fresh {
            space: SpaceId::Large,
            id: NIL,
            shards: Vec::new(),
            addr,
            stretches: vec![(addr, sizes.iter().sum())],
            sizes,
            reason: GrowthReason::Short,
        }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.sizes.iter().sum()
    }
}

/// Memory to release.
#[derive(Debug)]
pub(crate) struct Release {
    pub space: SpaceId,
    pub id: u32,
    pub shards: Vec<Shard>,
    pub addr: u64,
    pub bytes: u64,
    pub handle: Option<u64>,
}

impl Release {
    /// Describes a handle that is mapped outside the arenas.
    pub(crate) fn of_cell(addr: u64, bytes: u64, handle: u64) -> Release {
        Release {
            space: SpaceId::Large,
            id: NIL,
            shards: Vec::new(),
            addr,
            bytes,
            handle: Some(handle),
        }
    }
}

/// Returns the sizes of the handles for `bytes`: whole ones, then halves down to the granule.
pub(crate) fn tile(bytes: u64, size: u64) -> Vec<u64> {
    let (mut sizes, mut left, mut size) = (Vec::new(), bytes, size.max(PHYSICAL_GRANULE));
    while left > 0 {
        if size <= left {
            sizes.push(size);
            left -= size;
        } else {
            size = (size / 2 / PHYSICAL_GRANULE * PHYSICAL_GRANULE).max(PHYSICAL_GRANULE);
        }
    }
    sizes
}

#[cfg(test)]
mod tests;
