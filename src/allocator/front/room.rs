//! Room below the peak, as fronts get it from each other without a look at the books.
//!
//! What fronts may count to together stays the same in all of this, so no peak can be passed.

use std::sync::Arc;

use super::{CLOSED, Front, Held, Inner, Others};

/// Fronts that are asked for room before all of them are locked.
const ASKED: usize = 6;
/// Spreads the fronts that are asked first: 2^32 over the golden ratio.
const SPREAD: u32 = 0x9e37_79b9;

impl<E> Inner<E> {
    /// Room for `bytes` more from one of a few other fronts at which nobody is. True if there is
    /// enough now.
    pub(crate) fn borrow_room(&mut self, bytes: u64) -> bool {
        let Some(others) = &self.others else {
            return false;
        };
        self.turn = self.turn.wrapping_add(SPREAD);
        let start = ((u64::from(self.turn) * others.len() as u64) >> 32) as usize;
        let row = others[start..].iter().chain(&others[..start]);
        for other in row.take(ASKED) {
            // It is never waited for, so the order of locks does not matter; and this front, which is
            // in the row, too, is not free.
            let Some(mut theirs) = other.try_lock() else {
                continue;
            };
            let same = theirs.open == self.open;
            let (from, to) = (&mut theirs.accounts.allocated, &mut self.accounts.allocated);
            if same && from.lend(to, bytes) {
                return true;
            }
        }
        false
    }

    /// Who was busy when room was shared out.
    pub(crate) fn set_others(&mut self, row: &Others<E>) {
        let known = self.others.as_ref().is_some_and(|others| {
            let mut pairs = others.iter().zip(row.iter());
            others.len() == row.len() && pairs.all(|(one, other)| std::ptr::eq(*one, *other))
        });
        if !known {
            self.others = Some(Arc::clone(row));
        }
    }
}

impl<E> Front<E> {
    /// Room for `bytes` more from all other fronts that are known here, of which each then has as
    /// much. True if there was enough.
    pub(crate) fn pool_room(&self, bytes: u64) -> bool {
        let (open, others) = {
            let inner = self.lock();
            (inner.open, inner.others.clone())
        };
        let Some(others) = others.filter(|_| open != CLOSED) else {
            return false;
        };
        let mut locked: Vec<(bool, Held<'_, Inner<E>>)> = others
            .iter()
            .map(|front| (std::ptr::eq(*front, self), front.lock()))
            .filter(|(_, inner)| inner.open == open)
            .collect();
        let rooms = locked.iter().map(|(_, i)| i.accounts.allocated.room());
        let (room, count) = (rooms.sum::<u64>(), locked.len() as u64);
        if room < bytes || !locked.iter().any(|(own, _)| *own) {
            return false;
        }
        let each = (room - bytes) / count;
        for (own, inner) in &mut locked {
            let rest = room - each * (count - 1);
            let room = if *own { rest } else { each };
            inner.accounts.allocated.set_room(room);
        }
        true
    }
}
