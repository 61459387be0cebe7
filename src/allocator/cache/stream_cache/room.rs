//! Room below the peak, which stream caches move between each other without the heap.
//!
//! The sum of the limits of all stream caches does not change here, so no peak can be exceeded.

use std::sync::Arc;

use super::{CLOSED, Held, Inner, Others, StreamCache};

/// Number of stream caches to ask for room before all of them are locked.
const ASKED: usize = 4;
/// Spreads the order in which stream caches are asked: 2^32 divided by the golden ratio.
const SPREAD: u32 = 0x9e37_79b9;

impl Inner {
    /// Returns the stream cache to ask for room next.
    fn next_lender(&mut self, own: &StreamCache) -> Option<&'static StreamCache> {
        let others = self.others.as_ref()?;
        self.turn = self.turn.wrapping_add(SPREAD);
        let at = ((u64::from(self.turn) * others.len() as u64) >> 32) as usize;
        let mut row = others[at..].iter().chain(&others[..at]);
        row.find(|cache| !std::ptr::eq(**cache, own)).copied()
    }

    /// Sets the stream caches that were busy when room was divided; `None` for one that was not busy, which asks the
    /// heap first.
    pub(crate) fn set_others(&mut self, row: Option<&Others>) {
        let Some(row) = row else {
            self.others = None;
            return;
        };
        let known = self.others.as_ref().is_some_and(|others| {
            let mut pairs = others.iter().zip(row.iter());
            others.len() == row.len() && pairs.all(|(one, other)| std::ptr::eq(*one, *other))
        });
        if !known {
            self.others = Some(Arc::clone(row));
        }
    }
}

impl StreamCache {
    /// Borrows room for `bytes` from one of a few other stream caches. The lock is released where the lock order
    /// requires it. True if there is enough now.
    pub(crate) fn borrow_room<'a>(
        &'a self,
        mut inner: Held<'a, Inner>,
        bytes: u64,
    ) -> (Held<'a, Inner>, bool) {
        for _ in 0..ASKED {
            let Some(lender) = inner.next_lender(self) else {
                break;
            };
            // The lock of a `StreamCache` is held briefly, so waiting for it is cheaper than taking room from more of
            // them.
            let mut theirs = match lender.try_lock() {
                Some(theirs) => theirs,
                None if lender.rank > self.rank => lender.lock(),
                None => {
                    drop(inner);
                    let theirs = lender.lock();
                    inner = self.lock();
                    theirs
                }
            };
            let same = inner.open != CLOSED && theirs.open == inner.open;
            let (from, to) = (
                &mut theirs.runs.accounts.allocated,
                &mut inner.runs.accounts.allocated,
            );
            if same && from.lend(to, bytes) {
                return (inner, true);
            }
        }
        (inner, false)
    }

    /// Pools the room of all other known stream caches for `bytes`, and divides the rest equally. True if there was
    /// enough.
    pub(crate) fn pool_room(&self, bytes: u64) -> bool {
        let (open, others) = {
            let inner = self.lock();
            (inner.open, inner.others.clone())
        };
        let Some(others) = others.filter(|_| open != CLOSED) else {
            return false;
        };
        let mut locked: Vec<(bool, Held<'_, Inner>)> = others
            .iter()
            .map(|cache| (std::ptr::eq(*cache, self), cache.lock()))
            .filter(|(_, inner)| inner.open == open)
            .collect();
        let rooms = locked.iter().map(|(_, i)| i.runs.accounts.allocated.room());
        let (room, count) = (rooms.sum::<u64>(), locked.len() as u64);
        if room < bytes || !locked.iter().any(|(own, _)| *own) {
            return false;
        }
        let each = (room - bytes) / count;
        for (own, inner) in &mut locked {
            let rest = room - each * (count - 1);
            let room = if *own { rest } else { each };
            inner.runs.accounts.allocated.set_room(room);
        }
        true
    }
}
