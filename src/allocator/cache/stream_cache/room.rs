//! Room below the peak, as stream caches get it from each other without a look at the heap.
//!
//! What stream caches may count to together stays the same in all of this, so no peak can be passed.

use std::sync::Arc;

use super::{CLOSED, Held, Inner, Others, StreamCache};

/// Stream caches that are asked for room before all of them are locked.
const ASKED: usize = 4;
/// Spreads the stream caches that are asked: 2^32 over the golden ratio.
const SPREAD: u32 = 0x9e37_79b9;

impl Inner {
    /// Whom to ask for room next.
    fn next_lender(&mut self, own: &StreamCache) -> Option<&'static StreamCache> {
        let others = self.others.as_ref()?;
        self.turn = self.turn.wrapping_add(SPREAD);
        let at = ((u64::from(self.turn) * others.len() as u64) >> 32) as usize;
        let mut row = others[at..].iter().chain(&others[..at]);
        row.find(|cache| !std::ptr::eq(**cache, own)).copied()
    }

    /// Who was busy when room was shared out; none for a stream cache that was not, which asks the heap first.
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
    /// Room for `bytes` more from one of a few other stream caches. The lock is let go where the order of
    /// locks asks for it. True if there is enough now.
    pub(crate) fn borrow_room<'a>(
        &'a self,
        mut inner: Held<'a, Inner>,
        bytes: u64,
    ) -> (Held<'a, Inner>, bool) {
        for _ in 0..ASKED {
            let Some(lender) = inner.next_lender(self) else {
                break;
            };
            // A thread holds the lock of a `StreamCache` for a moment: to wait for it costs less than to take room
            // from more of them.
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

    /// Room for `bytes` more from all other stream caches that are known here, of which each then has as
    /// much. True if there was enough.
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
