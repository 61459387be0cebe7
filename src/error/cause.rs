//! The cause of an out-of-memory error, and the number of bytes that were missing.

use crate::error::memory::OutOfMemory;

/// Why a request failed for lack of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Cause {
    /// The allocator's limit leaves too little room.
    Limit,
    /// The device has enough memory, but other processes, other allocators or the program itself hold too much of it.
    Others,
    /// The request and the memory that the allocator holds exceed the device's memory.
    Device,
    /// The driver refuses memory or addresses although it reports enough free memory and the limit leaves room.
    Refused,
    /// Enough freed memory exists, but unfinished work on a stream may still access it.
    Pending,
    /// Enough freed memory exists, but guards or graph pools keep it, or a resume in progress takes it.
    Pools,
    /// Enough free memory exists, but in pieces between live blocks that no view joins.
    Fragmented,
}

/// Memory that CUDA itself (contexts, modules, libraries) takes counts as the device's own up to this fraction of the
/// device and this many bytes: no user can free it.
const OWN_PART: u64 = 16;
const OWN_BYTES: u64 = 1 << 30;

/// If more than this fraction of the bound is live, the memory is simply full: dense memory always has some free memory
/// in pieces.
const FULL_PERCENT: u128 = 90;

impl Cause {
    /// All causes. The number of a cause in recordings is its index here plus 1.
    const ALL: [Cause; 7] = [
        Cause::Limit,
        Cause::Others,
        Cause::Device,
        Cause::Refused,
        Cause::Pending,
        Cause::Pools,
        Cause::Fragmented,
    ];

    /// Returns the name, for people and machines.
    pub fn name(self) -> &'static str {
        match self {
            Cause::Limit => "limit",
            Cause::Others => "others",
            Cause::Device => "device",
            Cause::Refused => "refused",
            Cause::Pending => "pending",
            Cause::Pools => "pools",
            Cause::Fragmented => "fragmented",
        }
    }

    pub(crate) fn number(self) -> u64 {
        let place = Cause::ALL.iter().position(|cause| *cause == self);
        place.map_or(0, |place| place as u64 + 1)
    }

    pub(crate) fn from_number(number: u64) -> Option<Cause> {
        let place = usize::try_from(number).ok()?.checked_sub(1)?;
        Cause::ALL.get(place).copied()
    }
}

impl OutOfMemory {
    /// Returns the bytes in live blocks, including those of graph pools, and in committed memory of ranges.
    pub fn live(&self) -> u64 {
        let ranges = self.ranges.saturating_sub(self.ranges_leaving);
        let blocks = self.allocated.saturating_add(self.in_graph_pools);
        blocks.saturating_add(ranges)
    }

    /// Returns the bytes that the allocator reserves from the driver.
    pub(crate) fn held(&self) -> u64 {
        let present = self.reserved.saturating_sub(self.suspended);
        let outside = self.graph_pools.saturating_add(self.ranges);
        present.saturating_add(outside)
    }

    /// Returns the bytes of the device that are neither free nor held by this allocator: those of other processes, of
    /// other allocators, and of the driver itself. None if the driver could not be asked.
    pub fn others(&self) -> Option<u64> {
        let (free, total) = (self.driver_free?, self.driver_total?);
        Some(total.saturating_sub(free).saturating_sub(self.held()))
    }

    /// Returns the bytes that the driver must provide for the request.
    pub(crate) fn needed(&self) -> u64 {
        match self.shortage.growth {
            0 => self.requested,
            _ => self.shortage.needed,
        }
    }

    /// Returns the bytes by which the limit is too low.
    pub(crate) fn lacking_below_limit(&self) -> u64 {
        let counted = match self.shortage.growth {
            0 => self.held(),
            _ => self.shortage.counted,
        };
        let wanted = counted.saturating_add(self.needed());
        self.limit.map_or(0, |limit| wanted.saturating_sub(limit))
    }

    /// Returns the bytes that the device has for the allocator: its free bytes minus the headroom. None if the driver
    /// could not be asked.
    pub(crate) fn available(&self) -> Option<u64> {
        let free = self.driver_free?;
        Some(free.saturating_sub(self.headroom))
    }

    /// Returns the bytes that the device lacks, as far as the driver could be asked.
    pub(crate) fn lacking_on_device(&self) -> u64 {
        self.available()
            .map_or(0, |free| self.needed().saturating_sub(free))
    }

    /// Whether the device would lack memory even if no other process used it.
    fn exceeds_device(&self) -> bool {
        let (Some(total), Some(others)) = (self.driver_total, self.others()) else {
            return false;
        };
        let own = others.min(total / OWN_PART).min(OWN_BYTES);
        let wanted = self.held().saturating_add(self.needed());
        wanted.saturating_add(self.headroom) > total - own
    }

    /// Returns the most bytes that the allocator can hold: its limit, or what the device leaves it, whichever is less.
    /// Without a limit, none if the driver could not be asked.
    pub fn bound(&self) -> Option<u64> {
        let device = self
            .available()
            .map(|free| self.held().saturating_add(free));
        self.limit.into_iter().chain(device).min()
    }

    pub(crate) fn refused_addresses(&self) -> bool {
        let call = self.driver.map(|error| error.call());
        call == Some("cuMemAddressReserve")
    }

    /// Whether the ready memory would serve the request in one piece and exceeds the free pieces of any dense memory.
    /// Views cannot join it: otherwise the request would have succeeded.
    fn is_fragmented(&self) -> bool {
        let ready = self.shortage.ready;
        if ready == 0 || ready < self.shortage.growth {
            return false;
        }
        let bound = self.bound().unwrap_or(self.held());
        u128::from(self.live()) * 100 <= u128::from(bound) * FULL_PERCENT
    }

    /// Returns the cause. What would have served the request decides, in this order: pending work, memory kept by
    /// guards or pools, free memory in one piece, free memory reported by the driver; otherwise the bound of the
    /// allocator.
    pub fn cause(&self) -> Cause {
        let shortage = &self.shortage;
        let (below_limit, on_device) = (self.lacking_below_limit(), self.lacking_on_device());
        let short = match below_limit.max(on_device) {
            // The driver refuses the memory that it reports as free.
            0 if self.driver.is_some() => self.needed(),
            short => short,
        };
        let pending = shortage.waiting >= short || shortage.fits_pending;
        let pools = shortage.kept >= short || shortage.fits_guarded;
        let both = shortage.waiting.saturating_add(shortage.kept) >= short;
        match short > 0 {
            true if pending => return Cause::Pending,
            true if pools => return Cause::Pools,
            true if both && shortage.waiting >= shortage.kept => return Cause::Pending,
            true if both => return Cause::Pools,
            _ => {}
        }
        if self.is_fragmented() {
            return match self.refused_addresses() {
                // The memory needed for a view, which would have joined it.
                true => Cause::Refused,
                false => Cause::Fragmented,
            };
        }
        match (below_limit > 0, on_device > 0) {
            (false, false) => Cause::Refused,
            _ if self.exceeds_device() => Cause::Device,
            (true, _) => Cause::Limit,
            (false, true) => Cause::Others,
        }
    }

    /// Returns the number of missing bytes. If the cause is the limit, the request succeeds once the limit is raised by
    /// that number; if it is the device or its other users, once that many more bytes are free there.
    pub fn missing(&self) -> u64 {
        let (below_limit, on_device) = (self.lacking_below_limit(), self.lacking_on_device());
        match self.cause() {
            Cause::Limit => below_limit,
            Cause::Others | Cause::Device => on_device,
            Cause::Refused => self.needed(),
            Cause::Pending | Cause::Pools | Cause::Fragmented => match below_limit.max(on_device) {
                0 => self.needed(),
                short => short,
            },
        }
    }
}
