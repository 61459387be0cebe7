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
    static BY_HANDLE: [Cell<(usize, Entry)>; ENTRIES] = const { [const { Cell::new((0, None)) }; ENTRIES] };
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
    remember_handle(cache);
}

/// Where the entry of a handle is: handles are addresses of the driver's.
#[inline(always)]
fn place(raw: usize) -> usize {
    ((raw as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58) as usize % ENTRIES
}

/// The stream cache that this thread last used for a stream with this handle.
#[inline(always)]
pub(crate) fn find_handle(raw: usize) -> Entry {
    let (known, cache) = BY_HANDLE.with(|seen| seen[place(raw)].get());
    cache.filter(|_| known == raw)
}

/// The next call of this thread with the stream's handle finds its stream cache, if the handle lasts.
#[inline]
pub(crate) fn remember_handle(cache: &'static StreamCache) {
    let raw = cache.handle();
    if raw != 0 {
        BY_HANDLE.with(|seen| seen[place(raw)].set((raw, Some(cache))));
    }
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
