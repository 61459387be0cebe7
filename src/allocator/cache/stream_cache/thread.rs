//! What a thread remembers: the stream cache that it last used for a stream, and its own number.
//!
//! An entry may be out of date in every respect. Stream caches are never freed, and each tells under its
//! lock whose it is, so a wrong entry costs a look at the heap and nothing else.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::StreamCache;

/// Numbers of streams follow each other: as many may be in use at once.
const ENTRIES: usize = 64;

type Entry = Option<&'static StreamCache>;

thread_local! {
    static SEEN: [Cell<Entry>; ENTRIES] = const { [const { Cell::new(None) }; ENTRIES] };
    static NUMBER: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// The stream cache that this thread last used for a stream with this number, or for another one in its
/// place.
#[inline(always)]
pub(crate) fn find(key: u64) -> Entry {
    SEEN.with(|seen| seen[key as usize % ENTRIES].get())
}

pub(crate) fn remember(key: u64, cache: &'static StreamCache) {
    SEEN.with(|seen| seen[key as usize % ENTRIES].set(Some(cache)));
}

/// The next allocation of this thread looks at the heap for the stream's stream caches.
pub(crate) fn forget(key: u64) {
    SEEN.with(|seen| seen[key as usize % ENTRIES].set(None));
}

/// The calling thread's number: 0, 1, ... in the order in which threads first ask.
pub(crate) fn thread_number() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    NUMBER.with(|number| {
        if number.get() == usize::MAX {
            number.set(NEXT.fetch_add(1, Ordering::Relaxed));
        }
        number.get()
    })
}
