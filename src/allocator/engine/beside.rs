//! Notes that others keep beside fronts.
//!
//! A cache in front of the allocator has something to note about each small block. Under a lock of
//! its own that would cost as much as the block does; here it is noted under the lock of the front
//! that the block comes from and goes to, which is taken anyway.

use std::cell::UnsafeCell;
use std::sync::OnceLock;

use crate::allocator::cache::front::Front;
use crate::allocator::cache::front::{Held, Inner, cache};
use crate::allocator::cache::grant::Grant;
use crate::allocator::engine::Engine;
use crate::allocator::engine::small::unaligned;
use crate::allocator::error::Error;
use crate::allocator::heap::request::Checked;
use crate::driver::Stream;

/// Notes under the lock of one front.
pub(crate) struct Beside<N> {
    front: &'static Front,
    notes: UnsafeCell<N>,
}

// SAFETY: the notes are reached through a `Both` alone, of which there is one at a time.
unsafe impl<N: Send> Sync for Beside<N> {}

/// A front and the notes beside it, while they are this thread's.
pub(crate) struct Both<'a, N> {
    pub(crate) inner: Held<'a, Inner>,
    notes: &'a UnsafeCell<N>,
}

impl<N> Both<'_, N> {
    #[inline(always)]
    pub(crate) fn notes(&mut self) -> &mut N {
        // SAFETY: the front is locked, which makes this the only `Both`, and it is borrowed
        // exclusively.
        unsafe { &mut *self.notes.get() }
    }
}

impl<N> Beside<N> {
    #[inline(always)]
    pub(crate) fn lock(&self) -> Both<'_, N> {
        Both {
            inner: self.front.lock(),
            notes: &self.notes,
        }
    }

    /// Reads or writes the notes. Under the lock: nothing that calls the driver, or locks.
    #[inline]
    pub(crate) fn with<R>(&self, run: impl FnOnce(&mut N) -> R) -> R {
        run(self.lock().notes())
    }

    #[inline]
    pub(crate) fn is_beside(&self, front: &'static Front) -> bool {
        std::ptr::eq(self.front, front)
    }
}

/// Fronts in the first row; each row has twice as many as the one before.
const FIRST: usize = 8;
/// Enough for all ranks.
const ROWS: usize = 30;

type Row<N> = OnceLock<Box<[OnceLock<Beside<N>>]>>;

/// Notes beside all fronts that were met. Only ever added to, so that they are found without a lock.
pub(crate) struct Sides<N> {
    rows: [Row<N>; ROWS],
}

impl<N> Default for Sides<N> {
    fn default() -> Self {
        Sides {
            rows: [const { OnceLock::new() }; ROWS],
        }
    }
}

/// Row and column.
#[inline]
fn place(rank: u32) -> (usize, usize) {
    let number = rank as usize + FIRST;
    let row = (number / FIRST).ilog2() as usize;
    (row, number - (FIRST << row))
}

impl<N: Default> Sides<N> {
    /// What is noted beside a front, if anything ever was.
    #[inline(always)]
    pub(crate) fn find(&self, front: &'static Front) -> Option<&Beside<N>> {
        let (row, column) = place(front.rank);
        self.rows.get(row)?.get()?.get(column)?.get()
    }

    /// Notes beside a front, made if there are none yet.
    pub(crate) fn of(&self, front: &'static Front) -> &Beside<N> {
        let (row, column) = place(front.rank);
        let columns =
            self.rows[row].get_or_init(|| (0..FIRST << row).map(|_| OnceLock::new()).collect());
        columns[column].get_or_init(|| Beside {
            front,
            notes: UnsafeCell::default(),
        })
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Beside<N>> {
        let columns = self.rows.iter().filter_map(OnceLock::get).flatten();
        columns.filter_map(OnceLock::get)
    }
}

impl Engine {
    /// Allocates as [`hit`](Self::hit), and notes it beside the front.
    ///
    /// First `latest` says at which address the block must lie, 0 being anywhere, and the front is asked
    /// whether it would give that out next. Then `note` is told of the block. `None`, with nothing
    /// noted, if one of the two says no, or somebody must look at the books.
    #[inline(always)]
    pub(crate) fn take_beside<'a, N: Default, R>(
        &self,
        sides: &'a Sides<N>,
        (key, bytes): (u64, usize),
        latest: impl FnOnce(&mut N) -> Option<u64>,
        note: impl FnOnce(&mut N, u64) -> R,
    ) -> Option<(&'a Beside<N>, Grant, R)> {
        let request = unaligned(bytes).filter(|_| self.unwatched())?;
        let front = cache::find(key)?;
        let side = sides.find(front)?;
        let mut both = side.lock();
        let ptr = latest(both.notes())?;
        let taken = both.inner.take_again(self.owner(key), request, ptr)?;
        let grant = Grant::small(front, taken, request.granules);
        let noted = note(both.notes(), grant.ptr());
        if both.inner.contended && both.inner.crowded() {
            drop(both);
            self.crowded(key, front);
        }
        Some((side, grant, noted))
    }

    /// The front that the calling thread should use for a stream. `None` if small blocks do not come
    /// from fronts.
    pub(crate) fn front_for(&self, stream: &Stream) -> Result<Option<&'static Front>, Error> {
        if !self.rules.caches() {
            return Ok(None);
        }
        let key = stream.known_id();
        if let Some(key) = key
            && let Some(front) = cache::find(key)
            && front.lock().serves(self.owner(key))
        {
            return Ok(Some(front));
        }
        let named = self.named(stream)?;
        self.refuse_capture(&named)?;
        let front = self.on_stream(&named, |heap, slot| {
            self.same_device(heap, slot)?;
            Ok(heap.front_of(slot, cache::thread_number()))
        })?;
        if let Some(key) = key {
            cache::remember(key, front);
        }
        Ok(Some(front))
    }

    /// Whether fronts serve requests of this size.
    pub(crate) fn is_small(&self, bytes: usize, alignment: usize) -> bool {
        let request = Checked::new(bytes, alignment);
        request.is_ok_and(|request| self.small_request(&request).is_some())
    }

    /// The front that a small block at an address comes from.
    pub(crate) fn front_at(&self, ptr: u64) -> Option<&'static Front> {
        self.small_at(ptr).map(|(front, _)| front)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_has_a_place_of_its_own() {
        let mut before = None;
        for rank in (0..100).chain([u32::MAX - 1, u32::MAX]) {
            let (row, column) = place(rank);
            assert!(row < ROWS && column < FIRST << row, "{rank}");
            let number = (FIRST << row) + column;
            assert_eq!(number, rank as usize + FIRST);
            assert!(before < Some((row, column)));
            before = Some((row, column));
        }
    }
}
