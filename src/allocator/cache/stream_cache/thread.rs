//! What a thread remembers: the stream caches that it last used, by their streams' numbers and by handles, and its own
//! number.
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

/// Of those, as many lie among the thread's own variables. What a library has of these is to be small: beyond 512 bytes
/// the loader gives one that is opened at run time a place that each use of them must look for.
const NEAR: usize = 4;

/// Bytes of a cache line.
const LINE: usize = 64;

/// In the number of a pair on the thread's line: the handle does not last. No address of a driver's object has it.
const PASSING: usize = !(usize::MAX >> 1);

type Entry = Option<&'static StreamCache>;

/// What a thread knows by a handle.
pub(crate) enum Known {
    /// The stream cache that it last used for the stream of this handle, which lasts.
    Lasting(&'static StreamCache),
    /// The one that it last used for a stream which had this handle: the driver must say which has it now.
    Passing(&'static StreamCache),
    Nothing,
}

/// A name and the stream cache that it stands for.
type Place<T> = Cell<(T, Entry)>;

/// On one cache line.
#[repr(align(16))]
struct Last(Place<u64>);

/// Those of all streams, and of all handles that last.
struct Seen {
    by_number: [Place<u64>; ENTRIES],
    by_handle: [Place<usize>; ENTRIES],
}

thread_local! {
    static LAST: [Last; NEAR] = const { [const { Last(Cell::new((0, None))) }; NEAR] };
    /// The thread's line has the handles that it used last.
    static SEEN: Box<Seen> = Box::new(Seen {
        by_number: [const { Cell::new((0, None)) }; ENTRIES],
        by_handle: [const { Cell::new((0, None)) }; ENTRIES],
    });
    /// One more than the thread's number; 0 for none yet.
    static NUMBER: Cell<usize> = const { Cell::new(0) };
}

/// For calls that are rare: has threads find what they remember by the shortest way.
pub(crate) fn prepare() {
    thread_line::learn();
}

/// The stream cache that this thread last used for a stream with this number, if it used few others since: for calls
/// that look further with [`find`] when there is none.
#[inline(always)]
pub(crate) fn find_last(key: u64) -> Entry {
    let (known, cache) = LAST.with(|last| last[key as usize % NEAR].0.get());
    cache.filter(|_| known == key)
}

/// The stream cache that this thread last used for a stream with this number.
#[inline]
pub(crate) fn find(key: u64) -> Entry {
    match find_last(key) {
        None => find_seen(key),
        last => last,
    }
}

#[inline(never)]
fn find_seen(key: u64) -> Entry {
    // A thread that ends has no table any more.
    let seen = SEEN.try_with(|seen| seen.by_number[key as usize % ENTRIES].get());
    let (_, cache) = seen.ok().filter(|(known, _)| *known == key)?;
    LAST.with(|last| last[key as usize % NEAR].0.set((key, cache)));
    cache
}

/// The stream cache that this thread last used, if that was for a stream with this handle.
#[inline(always)]
pub(crate) fn find_first(raw: usize) -> Entry {
    match thread_line::first() {
        (known, cache) if known == raw => entry(cache),
        _ => None,
    }
}

/// What this thread knows by this handle.
#[inline(always)]
pub(crate) fn find_handle(raw: usize) -> Known {
    match known(raw, thread_line::first()) {
        Some(known) => known,
        None if thread_line::has_more() => find_further(raw),
        None => Known::Nothing,
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

/// What a pair of the thread's line says, if it is about this handle.
#[inline(always)]
fn known(raw: usize, (number, cache): (usize, *const ())) -> Option<Known> {
    let cache = entry(cache)?;
    match number {
        _ if number == raw => Some(Known::Lasting(cache)),
        _ if number == raw ^ PASSING => Some(Known::Passing(cache)),
        _ => None,
    }
}

#[inline(never)]
fn find_further(raw: usize) -> Known {
    let near = || {
        let mut pairs = thread_line::pairs().into_iter();
        pairs.find_map(|pair| Some((pair.0, known(raw, pair)?)))
    };
    let of_table = || {
        let seen = SEEN.try_with(|seen| seen.by_handle[place(raw)].get());
        let (_, cache) = seen.ok().filter(|(known, _)| *known == raw)?;
        Some((raw, Known::Lasting(cache?)))
    };
    let Some((number, found)) = near().or_else(of_table) else {
        return Known::Nothing;
    };
    if let Known::Lasting(cache) | Known::Passing(cache) = found {
        bring_forward(number, cache);
    }
    found
}

/// Where the entry of a handle is: handles are addresses of the driver's.
fn place(raw: usize) -> usize {
    ((raw as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58) as usize % ENTRIES
}

/// Makes it the first pair of the thread's line. The last one goes, unless this one was there.
fn bring_forward(number: usize, cache: &'static StreamCache) {
    let mut pairs = thread_line::pairs();
    let at = pairs.iter().position(|(known, _)| *known == number);
    pairs[..=at.unwrap_or(PAIRS - 1)].rotate_right(1);
    pairs[0] = (number, ptr::from_ref(cache).cast());
    thread_line::set_pairs(pairs);
}

pub(crate) fn remember(key: u64, cache: &'static StreamCache) {
    LAST.with(|last| last[key as usize % NEAR].0.set((key, Some(cache))));
    let _ended =
        SEEN.try_with(|seen| seen.by_number[key as usize % ENTRIES].set((key, Some(cache))));
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

/// The next call of this thread with this handle, which may not last, finds the stream cache.
#[inline(always)]
pub(crate) fn remember_asked(raw: usize, cache: &'static StreamCache) {
    let first = thread_line::first();
    match cache.handle() {
        0 if first != (raw ^ PASSING, ptr::from_ref(cache).cast()) => {
            bring_passing_forward(raw, cache);
        }
        0 => {}
        _ => remember_handle(cache),
    }
}

/// [`remember_asked`], if this thread has used another stream cache for the stream since.
pub(crate) fn remember_anew(raw: usize, key: u64) {
    if let Some(cache) = find(key) {
        remember_asked(raw, cache);
    }
}

#[inline(never)]
fn bring_passing_forward(raw: usize, cache: &'static StreamCache) {
    bring_forward(raw ^ PASSING, cache);
}

#[inline(never)]
fn keep(raw: usize, cache: &'static StreamCache) {
    bring_forward(raw, cache);
    let _ended = SEEN.try_with(|seen| seen.by_handle[place(raw)].set((raw, Some(cache))));
}

/// The next allocation of this thread for the stream of a stream cache, which has this number, looks at the heap.
pub(crate) fn forget(key: u64, cache: &'static StreamCache) {
    LAST.with(|last| leave(&last[key as usize % NEAR].0, cache));
    let other = |(_, known): &(usize, *const ())| !ptr::eq(known.cast(), cache);
    let mut left = thread_line::pairs().into_iter().filter(other);
    let mut next = || left.next().unwrap_or((0, ptr::null()));
    thread_line::set_pairs([next(), next(), next()]);
    let _ended = SEEN.try_with(|seen| {
        leave(&seen.by_number[key as usize % ENTRIES], cache);
        for place in &seen.by_handle {
            leave(place, cache);
        }
    });
}

/// Empties a place that leads to a stream cache.
fn leave<T: Copy + Default>(place: &Place<T>, cache: &StreamCache) {
    if place.get().1.is_some_and(|known| ptr::eq(known, cache)) {
        place.set((T::default(), None));
    }
}

/// The calling thread's number: 0, 1, ... in the order in which threads first ask.
pub(crate) fn thread_number() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(1);
    NUMBER.with(|number| {
        if number.get() == 0 {
            number.set(NEXT.fetch_add(1, Ordering::Relaxed));
        }
        number.get() - 1
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

    fn lasting(raw: usize) -> Entry {
        match find_handle(raw) {
            Known::Lasting(cache) => Some(cache),
            _ => None,
        }
    }

    fn passing(raw: usize) -> Entry {
        match find_handle(raw) {
            Known::Passing(cache) => Some(cache),
            _ => None,
        }
    }

    /// More than the line has; the one that was used last is the first.
    #[test]
    fn each_handle_finds_what_was_used_for_it_last() {
        let known = caches::<9>();
        assert!(lasting(0x1234_0000).is_none());
        for (raw, cache) in known.iter().chain(known.iter().rev()) {
            assert!(is(lasting(*raw), cache));
            assert!(is(find_first(*raw), cache));
            assert!(find_first(*raw + 8).is_none());
        }
        let (raw, other) = (known[4].0, known[5].1);
        other.set_handle(raw);
        remember_handle(other);
        assert!(is(lasting(raw), other));
        let elsewhere = move || known.map(|(raw, _)| lasting(raw).is_none());
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
            assert!(find_first(raw).is_none() && lasting(raw).is_none());
            assert!(find(at as u64).is_none());
        }
        for at in [1, 2, 3, 5] {
            let (raw, cache) = known[at];
            assert!(is(lasting(raw), cache) && is(find(at as u64), cache));
        }
    }

    #[test]
    fn a_handle_that_may_not_last_is_never_taken_to_last() {
        let [one, other] = std::array::from_fn(|_| {
            let cache: &'static StreamCache = Box::leak(Box::new(StreamCache::new(0)));
            cache
        });
        let known = caches::<2>();
        let raw = 0x7100_0000;
        assert!(passing(raw).is_none());
        remember_asked(raw, one);
        assert!(is(passing(raw), one) && find_first(raw).is_none());
        // Behind two others, and with another stream cache in its place.
        for (raw, cache) in known {
            assert!(is(lasting(raw), cache));
        }
        assert!(is(passing(raw), one) && is(passing(raw), one));
        remember_asked(raw, other);
        assert!(is(passing(raw), other));
        // It lasts from now on, and is not known by anything else.
        other.set_handle(raw);
        remember_asked(raw, other);
        assert!(is(lasting(raw), other) && passing(raw).is_none());
        forget(7, other);
        assert!(matches!(find_handle(raw), Known::Nothing));
    }

    #[test]
    fn as_many_numbers_as_follow_each_other_are_found() {
        let known = caches::<ENTRIES>();
        for (key, (_, cache)) in (0..).zip(known) {
            // Another one has its place among the last.
            assert!(find_last(key).is_none());
            assert!(is(find(key), cache) && is(find_last(key), cache));
            assert!(find(key + ENTRIES as u64).is_none());
        }
    }
}
