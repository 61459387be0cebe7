//! Exact sums over many stream caches, with an exact peak, without a shared word.
//!
//! For bytes, each stream cache has a limit of its own, and the sum of the limits never exceeds the peak so far. As
//! long as every stream cache stays within its limit, no sum can be a new peak, and no check is needed. A stream cache
//! that needs more takes room from another one. Failing that, all of them are locked, the sum is computed, the peak is
//! raised if the sum exceeds it, and the room below the peak is divided again.
//!
//! For all other quantities, each stream cache keeps a peak of its own. The sum of these peaks is an upper bound of the
//! peak of the sum, and equals it as long as only one stream cache is in use.

/// Bytes of one stream cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub(crate) struct Account {
    /// Sum of all additions.
    total: u64,
    /// Amount that may be added before the limit is reached.
    room: u64,
    /// The limit.
    limit: u64,
}

impl Account {
    #[inline(always)]
    pub(crate) fn fits(&self, amount: u64) -> bool {
        amount <= self.room
    }

    /// Adds an amount that fits.
    #[inline(always)]
    pub(crate) fn add(&mut self, amount: u64) {
        self.total += amount;
        self.room -= amount;
    }

    /// Subtracts an amount that was added.
    #[inline(always)]
    pub(crate) fn sub(&mut self, amount: u64) {
        self.room += amount;
    }

    pub(crate) fn current(&self) -> u64 {
        self.limit - self.room
    }

    /// Returns the amount that may still be added.
    pub(crate) fn room(&self) -> u64 {
        self.room
    }

    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// Raises the limit for an amount. The peak must be checked before any lock held for this is released.
    pub(crate) fn extend(&mut self, amount: u64) {
        let more = amount.saturating_sub(self.room);
        self.room += more;
        self.limit += more;
    }

    /// Sets the room above the present value.
    pub(crate) fn set_room(&mut self, room: u64) {
        self.limit = self.current() + room;
        self.room = room;
    }

    /// Moves room to another stream cache that lacks it for `amount`: the missing amount, and half of the rest. Returns
    /// false and changes nothing if there is not enough.
    pub(crate) fn lend(&mut self, other: &mut Account, amount: u64) -> bool {
        let (needed, room) = (amount.saturating_sub(other.room()), self.room());
        if needed > room {
            return false;
        }
        let given = if needed == 0 {
            0
        } else {
            needed + (room - needed) / 2
        };
        self.set_room(room - given);
        other.set_room(other.room() + given);
        true
    }
}

/// The value of a quantity, and its peak.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub(crate) struct Level {
    /// Distance to the peak: a larger addition raises the peak.
    below: u64,
    peak: u64,
}

impl Level {
    #[inline(always)]
    fn add(&mut self, amount: u64) {
        let (below, passed) = self.below.overflowing_sub(amount);
        self.below = below;
        if passed {
            let level = reload(self);
            level.peak = level.peak.wrapping_sub(level.below);
            level.below = 0;
        }
    }

    #[inline(always)]
    fn sub(&mut self, amount: u64) {
        self.below += amount;
    }

    fn current(&self) -> u64 {
        self.peak - self.below
    }

    fn reset_peak(&mut self) {
        self.peak = self.current();
        self.below = 0;
    }
}

/// Any other quantity of one stream cache, with its own peak.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub(crate) struct Gauge {
    /// Sum of all additions.
    total: u64,
    level: Level,
}

impl Gauge {
    #[inline(always)]
    pub(crate) fn add(&mut self, amount: u64) {
        self.level.add(amount);
        self.total += amount;
    }

    #[inline(always)]
    pub(crate) fn sub(&mut self, amount: u64) {
        self.level.sub(amount);
    }

    pub(crate) fn current(&self) -> u64 {
        self.level.current()
    }

    /// Returns the sum of all additions.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// Returns the largest value since the last reset.
    pub(crate) fn peak(&self) -> u64 {
        self.level.peak
    }

    pub(crate) fn reset_peak(&mut self) {
        self.level.reset_peak();
    }
}

/// Makes the compiler read the value from memory, so that the common path needs no register for it, and keeps later
/// code out of that path.
#[inline(always)]
pub(super) fn reload<T>(value: &mut T) -> &mut T {
    cold_path();
    std::hint::black_box(value)
}

/// Marks a rare branch.
#[cold]
#[inline]
pub(crate) fn cold_path() {}

/// The counters of a stream cache: bytes of blocks, requested bytes, and blocks. The order of the fields places them on
/// one line with everything else that a pair of allocation and free changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub(crate) struct Accounts {
    pub allocated: Account,
    pub requested: Gauge,
    pub blocks: Gauge,
}

/// Number of quantities.
pub(crate) const QUANTITIES: usize = 3;

impl Accounts {
    /// Adds a block.
    #[inline(always)]
    pub(crate) fn add(&mut self, bytes: u64, requested: u64) {
        self.allocated.add(bytes);
        self.requested.add(requested);
        self.blocks.add(1);
    }

    #[inline(always)]
    pub(crate) fn sub(&mut self, bytes: u64, requested: u64) {
        self.allocated.sub(bytes);
        self.requested.sub(requested);
        self.blocks.sub(1);
    }

    /// Returns the current value of each quantity.
    pub(crate) fn current(&self) -> [u64; QUANTITIES] {
        [
            self.allocated.current(),
            self.requested.current(),
            self.blocks.current(),
        ]
    }

    /// Returns the sum of all additions to each quantity.
    pub(crate) fn totals(&self) -> [u64; QUANTITIES] {
        [
            self.allocated.total(),
            self.requested.total(),
            self.blocks.total(),
        ]
    }
}
