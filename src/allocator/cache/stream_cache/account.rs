//! Exact sums over many stream caches, and an exact peak, without a word that they share.
//!
//! Of bytes each stream cache may have up to a limit of its own, and the limits together never pass the peak
//! so far: as long as every stream cache stays within its limit no sum can be a new peak, and nobody has to
//! look. Who needs more takes room from another stream cache, or has all of them locked, the sum taken, the
//! peak raised if it is one, and the room below the peak shared out again.
//!
//! Of all else each stream cache keeps a peak of its own. Their sum is no less than the peak of the sum, and
//! just that as long as one stream cache works alone.

/// Bytes of one stream cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub(crate) struct Account {
    /// Everything that was ever added.
    total: u64,
    /// What may still be added before the limit is reached.
    room: u64,
    /// What may be there at most.
    limit: u64,
}

impl Account {
    #[inline(always)]
    pub(crate) fn fits(&self, amount: u64) -> bool {
        amount <= self.room
    }

    /// Adds what fits.
    #[inline(always)]
    pub(crate) fn add(&mut self, amount: u64) {
        self.total += amount;
        self.room -= amount;
    }

    /// Takes away what was added.
    #[inline(always)]
    pub(crate) fn sub(&mut self, amount: u64) {
        self.room += amount;
    }

    pub(crate) fn current(&self) -> u64 {
        self.limit - self.room
    }

    /// What may still be added.
    pub(crate) fn room(&self) -> u64 {
        self.room
    }

    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// Makes room for an amount beyond the limit. The peak must be looked at before any lock that
    /// was held for this is let go.
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

    /// Moves room to another stream cache that lacks it for `amount`: what it needs, and half of the rest.
    /// False, with nothing changed, if there is not enough.
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

/// How much there is of a quantity, and its peak.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub(crate) struct Level {
    /// How far below its peak it is: what is more than that raises the peak.
    below: u64,
    peak: u64,
}

impl Level {
    #[inline(always)]
    fn add(&mut self, amount: u64) {
        let (below, passed) = self.below.overflowing_sub(amount);
        self.below = below;
        if passed {
            let level = anew(self);
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

/// Another quantity of one stream cache, with a peak of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub(crate) struct Gauge {
    /// Everything that was ever added.
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

    /// Everything that was ever added.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// The largest value since the last reset.
    pub(crate) fn peak(&self) -> u64 {
        self.level.peak
    }

    pub(crate) fn reset_peak(&mut self) {
        self.level.reset_peak();
    }
}

/// Blocks of one stream cache: a quantity of which so much may be added before somebody looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub(crate) struct Blocks {
    /// Everything that was ever added and this together are the lot: below 0 when that is used up.
    left: u64,
    level: Level,
    lot: u64,
}

impl Blocks {
    /// One more; whether the lot is used up by it.
    #[inline(always)]
    fn add(&mut self) -> bool {
        self.level.add(1);
        let (left, used_up) = self.left.overflowing_sub(1);
        self.left = left;
        used_up
    }

    pub(crate) fn current(&self) -> u64 {
        self.level.current()
    }

    /// As many as there ever were.
    pub(crate) fn total(&self) -> u64 {
        self.lot.wrapping_sub(self.left)
    }

    pub(crate) fn is_used_up(&self) -> bool {
        self.left > self.lot
    }

    /// Makes what is added from now on a new lot.
    pub(crate) fn allow(&mut self, amount: u64) {
        self.lot = self.total() + amount;
        self.left = amount;
    }

    /// The most since the last reset.
    pub(crate) fn peak(&self) -> u64 {
        self.level.peak
    }

    pub(crate) fn reset_peak(&mut self) {
        self.level.reset_peak();
    }
}

/// What is read through this is read from memory, so that what mostly happens needs no register for it; and
/// keeps what follows out of the way of that.
#[inline(always)]
pub(super) fn anew<T>(value: &mut T) -> &mut T {
    rarely();
    std::hint::black_box(value)
}

/// Marks what seldom happens.
#[cold]
#[inline]
pub(crate) fn rarely() {}

/// What a stream cache counts: bytes of blocks, bytes as asked for, and blocks. On one line with all that a pair of
/// allocation and free changes, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub(crate) struct Accounts {
    pub allocated: Account,
    pub requested: Gauge,
    pub blocks: Blocks,
}

/// How many quantities there are.
pub(crate) const QUANTITIES: usize = 3;

impl Accounts {
    /// Whether the lot of blocks is used up by this.
    #[inline(always)]
    pub(crate) fn add(&mut self, bytes: u64, requested: u64) -> bool {
        self.allocated.add(bytes);
        self.requested.add(requested);
        self.blocks.add()
    }

    #[inline(always)]
    pub(crate) fn sub(&mut self, bytes: u64, requested: u64) {
        self.allocated.sub(bytes);
        self.requested.sub(requested);
        self.blocks.level.sub(1);
    }

    /// What is there of each quantity.
    pub(crate) fn current(&self) -> [u64; QUANTITIES] {
        [
            self.allocated.current(),
            self.requested.current(),
            self.blocks.current(),
        ]
    }

    /// Everything that was ever added of each.
    pub(crate) fn totals(&self) -> [u64; QUANTITIES] {
        [
            self.allocated.total(),
            self.requested.total(),
            self.blocks.total(),
        ]
    }
}
