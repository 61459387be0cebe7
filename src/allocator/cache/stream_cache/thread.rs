//! What a thread remembers: the stream caches that it last used, by their streams' numbers and by handles that last, and
//! its own number.
//!
//! An entry may be out of date in every respect. Stream caches are never freed, and each tells under its
//! lock whose it is, so a wrong entry costs a look at the heap and nothing else.

use std::cell::Cell;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::StreamCache;
use crate::locks::prefetch::prefetch;
use crate::locks::thread_line::{self, PAIRS};

/// Numbers of streams follow each other: as many may be in use at once.
const ENTRIES: usize = 64;

/// Bytes of a cache line.
const LINE: usize = 64;

type Entry = Option<&'static StreamCache>;

thread_local! {
    static SEEN: [Cell<Entry>; ENTRIES] = const { [const { Cell::new(None) }; ENTRIES] };
    /// Those of all handles that last; the thread's line has the ones that it used last.
    static BY_HANDLE: Box<[Cell<(usize, Entry)>; ENTRIES]> = Box::new([const { Cell::new((0, None)) }; ENTRIES]);
    static NUMBER: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// The stream cache that this thread last used for a stream with this number, or for another one in its
/// place.
#[inline(always)]
pub(crate) fn find(key: u64) -> Entry {
    SEEN.with(|seen| seen[key as usize % ENTRIES].get())
}

/// The stream cache that this thread last used, if that was for a stream with this handle.
#[inline(always)]
pub(crate) fn find_first(raw: usize) -> Entry {
    match thread_line::first() {
        (known, cache) if known == raw => entry(cache),
        _ => None,
    }
}

/// The stream cache that this thread last used for a stream with this handle.
#[inline(always)]
pub(crate) fn find_handle(raw: usize) -> Entry {
    match find_first(raw) {
        None if thread_line::has_more() => find_further(raw),
        first => first,
    }
}

/// Asks for the cache lines that a free by this thread meets, if its block is of the stream cache that the thread used
/// last, and near the one that was freed last: by the time that the tables have told, they are there.
#[inline(always)]
pub(crate) fn prefetch_for_free() {
    let (_, cache) = thread_line::first();
    prefetch(cache);
    prefetch(cache.wrapping_byte_add(LINE));
    prefetch(thread_line::touched());
}

/// Asks for those of an allocation from a stream cache, whose own first line is needed at once.
#[inline(always)]
pub(crate) fn prefetch_for(cache: &StreamCache, granules: u32) {
    let cache = ptr::from_ref(cache).cast::<()>();
    prefetch(cache.wrapping_byte_add(LINE));
    #[cfg(not(loom))]
    prefetch(cache.wrapping_byte_add(StreamCache::quick_at(granules)));
    #[cfg(loom)]
    let _ = granules;
    prefetch(thread_line::touched());
}

/// A block was freed whose record is there. The next one to be allocated is mostly that, the next to be freed often
/// near it.
#[inline(always)]
pub(crate) fn touched(record: *const ()) {
    thread_line::set_touched(record);
}

/// What stands on the thread's line.
#[inline(always)]
fn entry(cache: *const ()) -> Entry {
    // SAFETY: on the line are null and what `bring_forward` has put there: references that last for ever.
    unsafe { cache.cast::<StreamCache>().as_ref() }
}

#[inline(never)]
fn find_further(raw: usize) -> Entry {
    let near = thread_line::pairs()
        .into_iter()
        .find(|(known, _)| *known == raw);
    let found = match near {
        Some((_, cache)) => entry(cache),
        None => {
            let (known, cache) = BY_HANDLE.try_with(|seen| seen[place(raw)].get()).ok()?;
            cache.filter(|_| known == raw)
        }
    };
    bring_forward(raw, found?);
    found
}

/// Where the entry of a handle is: handles are addresses of the driver's.
fn place(raw: usize) -> usize {
    ((raw as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58) as usize % ENTRIES
}

/// Makes it the first pair of the thread's line. The last one goes, unless this one was there.
fn bring_forward(raw: usize, cache: &'static StreamCache) {
    let mut pairs = thread_line::pairs();
    let at = pairs.iter().position(|(known, _)| *known == raw);
    pairs[..=at.unwrap_or(PAIRS - 1)].rotate_right(1);
    pairs[0] = (raw, ptr::from_ref(cache).cast());
    thread_line::set_pairs(pairs);
}

pub(crate) fn remember(key: u64, cache: &'static StreamCache) {
    SEEN.with(|seen| seen[key as usize % ENTRIES].set(Some(cache)));
    remember_handle(cache);
}

/// The next call of this thread with the stream's handle finds its stream cache, if the handle lasts.
#[inline(always)]
pub(crate) fn remember_handle(cache: &'static StreamCache) {
    let raw = cache.handle();
    if raw != 0 && thread_line::first() != (raw, ptr::from_ref(cache).cast()) {
        keep(raw, cache);
    }
}

#[inline(never)]
fn keep(raw: usize, cache: &'static StreamCache) {
    bring_forward(raw, cache);
    // A thread that ends has no table any more.
    let _ended = BY_HANDLE.try_with(|seen| seen[place(raw)].set((raw, Some(cache))));
}

/// The next allocation of this thread for the stream of a stream cache, which has this number, looks at the heap.
pub(crate) fn forget(key: u64, cache: &'static StreamCache) {
    SEEN.with(|seen| seen[key as usize % ENTRIES].set(None));
    let other = |(_, known): &(usize, *const ())| !ptr::eq(known.cast(), cache);
    let mut left = thread_line::pairs().into_iter().filter(other);
    let mut next = || left.next().unwrap_or((0, ptr::null()));
    thread_line::set_pairs([next(), next(), next()]);
    let _ended = BY_HANDLE.try_with(|seen| {
        let is_it = |known: &&Cell<(usize, Entry)>| {
            known.get().1.is_some_and(|known| ptr::eq(known, cache))
        };
        seen.iter()
            .filter(is_it)
            .for_each(|known| known.set((0, None)));
    });
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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Stream caches of streams whose handles last.
    fn caches<const N: usize>() -> [(usize, &'static StreamCache); N] {
        std::array::from_fn(|at| {
            let cache: &'static StreamCache = Box::leak(Box::new(StreamCache::new(0)));
            let raw = 0x7000_0000 + at * 0x1000;
            cache.set_handle(raw);
            remember(at as u64, cache);
            (raw, cache)
        })
    }

    fn is(found: Entry, cache: &StreamCache) -> bool {
        found.is_some_and(|found| ptr::eq(found, cache))
    }

    /// More than the line has; the one that was used last is the first.
    #[test]
    fn each_handle_finds_what_was_used_for_it_last() {
        let known = caches::<9>();
        assert!(find_handle(0x1234_0000).is_none());
        for (raw, cache) in known.iter().chain(known.iter().rev()) {
            assert!(is(find_handle(*raw), cache));
            assert!(is(find_first(*raw), cache));
            assert!(find_first(*raw + 8).is_none());
        }
        let (raw, other) = (known[4].0, known[5].1);
        other.set_handle(raw);
        remember_handle(other);
        assert!(is(find_handle(raw), other));
        let elsewhere = move || known.map(|(raw, _)| find_handle(raw).is_none());
        assert_eq!(std::thread::spawn(elsewhere).join().unwrap(), [true; 9]);
    }

    #[test]
    fn lines_that_are_asked_for_are_those_of_the_lists() {
        let [(_, cache)] = caches();
        let inner = cache.lock();
        for granules in [1, 8, 128] {
            let list = ptr::from_ref(&inner.runs.quick[granules as usize]).addr();
            assert_eq!(
                list - ptr::from_ref(cache).addr(),
                StreamCache::quick_at(granules)
            );
        }
    }

    #[test]
    fn what_is_forgotten_is_found_by_no_name() {
        let known = caches::<6>();
        // One that the line has, and one that it has no more.
        for at in [4, 0] {
            let (raw, cache) = known[at];
            forget(at as u64, cache);
            assert!(find_first(raw).is_none() && find_handle(raw).is_none());
            assert!(find(at as u64).is_none());
        }
        for at in [1, 2, 3, 5] {
            let (raw, cache) = known[at];
            assert!(is(find_handle(raw), cache) && is(find(at as u64), cache));
        }
    }
}
