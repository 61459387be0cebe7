//! Exact sums and exact peaks over many fronts, without a word that they share.
//!
//! Each front may count up to a limit of its own, and the limits together never pass the peak so
//! far: as long as every front stays within its limit no sum can be a new peak, and nobody has to
//! look. Who needs more takes room from another front, or has all of them locked, the sum taken, the
//! peak raised if it is one, and the room below the peak shared out again.

/// One quantity of one front.
///
/// What may still be added is the bound less the total: an addition touches one of the two words,
/// a removal the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Account {
    /// Everything that was ever added.
    total: u64,
    /// What the total may come to: everything that was ever taken away, and the limit.
    bound: u64,
    /// What may be there.
    limit: u64,
}

impl Account {
    #[inline(always)]
    pub(crate) fn fits(&self, amount: u64) -> bool {
        self.total + amount <= self.bound
    }

    /// Adds what fits.
    #[inline(always)]
    pub(crate) fn add(&mut self, amount: u64) {
        self.total += amount;
    }

    /// Takes away what was added.
    #[inline(always)]
    pub(crate) fn sub(&mut self, amount: u64) {
        self.bound += amount;
    }

    pub(crate) fn current(&self) -> u64 {
        self.limit - self.room()
    }

    /// What may still be added.
    fn room(&self) -> u64 {
        self.bound - self.total
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
        let more = amount.saturating_sub(self.room());
        self.bound += more;
        self.limit += more;
    }

    /// Sets the room above the present value.
    pub(crate) fn set_room(&mut self, room: u64) {
        self.limit = self.current() + room;
        self.bound = self.total + room;
    }

    /// Moves room to another front that lacks it for `amount`: what it needs, and half of the rest.
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

/// The quantities that a front counts: bytes of blocks, bytes as asked for, and blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Accounts {
    pub allocated: Account,
    pub requested: Account,
    pub blocks: Account,
}

/// How many quantities there are.
pub(crate) const QUANTITIES: usize = 3;

impl Accounts {
    #[inline(always)]
    pub(crate) fn fit(&self, bytes: u64, requested: u64) -> bool {
        self.allocated.fits(bytes) && self.requested.fits(requested) && self.blocks.fits(1)
    }

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

    pub(crate) fn extend(&mut self, bytes: u64, requested: u64) {
        self.allocated.extend(bytes);
        self.requested.extend(requested);
        self.blocks.extend(1);
    }

    /// Moves room to another front, see [`Account::lend`].
    pub(crate) fn lend(&mut self, other: &mut Accounts, bytes: u64, requested: u64) -> bool {
        let enough = |mine: &Account, theirs: &Account, amount: u64| {
            amount.saturating_sub(theirs.room()) <= mine.room()
        };
        enough(&self.allocated, &other.allocated, bytes)
            && enough(&self.requested, &other.requested, requested)
            && enough(&self.blocks, &other.blocks, 1)
            && self.allocated.lend(&mut other.allocated, bytes)
            && self.requested.lend(&mut other.requested, requested)
            && self.blocks.lend(&mut other.blocks, 1)
    }

    pub(crate) fn each(&self) -> [&Account; QUANTITIES] {
        [&self.allocated, &self.requested, &self.blocks]
    }

    pub(crate) fn each_mut(&mut self) -> [&mut Account; QUANTITIES] {
        [&mut self.allocated, &mut self.requested, &mut self.blocks]
    }
}
