//! The thread-local memory of recently used stream caches, by the numbers and by the handles of their streams.
//!
//! An entry may be outdated in every respect. Stream caches are never freed, and each stores its owner under its lock,
//! so a wrong entry costs a slow path through the heap and nothing else.

use std::cell::Cell;
use std::ptr;

use super::StreamCache;
use crate::locks::prefetch::prefetch;

/// Numbers of streams are consecutive: this many streams may be in use concurrently without sharing an entry.
const ENTRIES: usize = 64;

/// Number of handles that are searched before the table of handles.
const RECENT: usize = 3;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Set in the number of a recent entry whose handle may be reused. No address of a driver's object has this bit.
const PASSING: usize = !(usize::MAX >> 1);

type Entry = Option<&'static StreamCache>;

/// What a thread knows about a handle.
pub(crate) enum Known {
    /// The stream cache last used for the stream with this handle, which stays valid.
    Lasting(&'static StreamCache),
    /// The stream cache last used for a stream that had this handle: the driver must report which stream has it now.
    Passing(&'static StreamCache),
    Nothing,
}

/// A name and its stream cache.
type Place<T> = Cell<(T, Entry)>;

/// The memory of a thread. It has no destructor, so that a call from the destructor of another variable finds it.
#[repr(C, align(64))]
struct Memory {
    /// The handles used last, the latest first. They share one cache line with the next two fields, so that a call by
    /// handle needs no other line of this structure.
    recent: [Place<usize>; RECENT],
    /// The record of the block freed last; null at first. Used only for prefetching.
    touched: Cell<*const ()>,
    caller: Cell<*const ()>,
    by_number: [Place<u64>; ENTRIES],
    /// Handles that stay valid.
    by_handle: [Place<usize>; ENTRIES],
}

thread_local! {
    static MEMORY: Memory = const {
        Memory {
            recent: [const { Cell::new((0, None)) }; RECENT],
            touched: Cell::new(ptr::null()),
            caller: Cell::new(ptr::null()),
            by_number: [const { Cell::new((0, None)) }; ENTRIES],
            by_handle: [const { Cell::new((0, None)) }; ENTRIES],
        }
    };
}

/// Returns the pointer that the C library stores for the calling thread; null at first. In a shared library each
/// thread-local variable costs a call of the loader, so that library has only this one.
#[inline(always)]
pub fn of_caller() -> *const () {
    MEMORY.with(|memory| memory.caller.get())
}

/// Sets the pointer that [`of_caller`] returns.
#[inline(always)]
pub fn set_of_caller(pointer: *const ()) {
    MEMORY.with(|memory| memory.caller.set(pointer));
}

/// Returns the stream cache that this thread last used for a stream with this number.
#[inline(always)]
pub(crate) fn find(key: u64) -> Entry {
    match MEMORY.with(|memory| memory.by_number[key as usize % ENTRIES].get()) {
        (known, cache) if known == key => cache,
        _ => None,
    }
}

/// Returns the stream cache that this thread used last, if that was for a stream with this handle.
#[inline(always)]
pub(crate) fn find_first(raw: usize) -> Entry {
    match MEMORY.with(|memory| memory.recent[0].get()) {
        (known, cache) if known == raw => cache,
        _ => None,
    }
}

/// Returns what this thread knows about this handle.
#[inline(always)]
pub(crate) fn find_handle(raw: usize) -> Known {
    MEMORY.with(|memory| match known(raw, memory.recent[0].get()) {
        Some(known) => known,
        None if memory.recent[1].get().1.is_some() => find_further(memory, raw),
        None => Known::Nothing,
    })
}

/// Returns the number of an allocator's stream by its handle, if the handle stays valid and this thread knows it.
pub(crate) fn key_of_handle(allocator: u64, raw: usize) -> Option<u64> {
    let Known::Lasting(cache) = find_handle(raw) else {
        return None;
    };
    cache.lock().key_in(allocator, raw)
}

/// Prefetches the cache lines that a free by this thread will touch, if its block belongs to the stream cache that the
/// thread used last and lies near the block freed last: they arrive while the tables are read.
#[inline(always)]
pub(crate) fn prefetch_for_free() {
    MEMORY.with(|memory| {
        let (_, cache) = memory.recent[0].get();
        let cache = cache.map_or(ptr::null(), ptr::from_ref).cast::<()>();
        prefetch(cache);
        prefetch(cache.wrapping_byte_add(LINE));
        prefetch(memory.touched.get());
    });
}

/// Prefetches the cache lines of an allocation from a stream cache, except for its first line, which is needed
/// immediately.
#[inline(always)]
pub(crate) fn prefetch_for(cache: &StreamCache, granules: u32) {
    let cache = ptr::from_ref(cache).cast::<()>();
    prefetch(cache.wrapping_byte_add(LINE));
    #[cfg(not(loom))]
    prefetch(cache.wrapping_byte_add(StreamCache::quick_at(granules)));
    #[cfg(loom)]
    let _ = granules;
    MEMORY.with(|memory| prefetch(memory.touched.get()));
}

/// Stores the record of a freed block for prefetching. The next allocation usually gets that block, and the next free
/// is often near it.
#[inline(always)]
pub(crate) fn touched(record: *const ()) {
    MEMORY.with(|memory| memory.touched.set(record));
}

/// Returns what a recent entry says, if it is about this handle.
#[inline(always)]
fn known(raw: usize, (number, cache): (usize, Entry)) -> Option<Known> {
    let cache = cache?;
    match number {
        _ if number == raw => Some(Known::Lasting(cache)),
        _ if number == raw ^ PASSING => Some(Known::Passing(cache)),
        _ => None,
    }
}

#[inline(never)]
fn find_further(memory: &Memory, raw: usize) -> Known {
    let recent = || {
        let mut recent = memory.recent.iter().map(Cell::get);
        recent.find_map(|entry| Some((entry.0, known(raw, entry)?)))
    };
    let of_table = || match memory.by_handle[place(raw)].get() {
        (known, Some(cache)) if known == raw => Some((raw, Known::Lasting(cache))),
        _ => None,
    };
    let Some((number, found)) = recent().or_else(of_table) else {
        return Known::Nothing;
    };
    if let Known::Lasting(cache) | Known::Passing(cache) = found {
        memory.move_to_front(number, cache);
    }
    found
}

/// Index of the entry of a handle; handles are addresses of the driver's objects.
fn place(raw: usize) -> usize {
    ((raw as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58) as usize % ENTRIES
}

impl Memory {
    /// Makes it the first recent entry. The last entry is dropped, unless this one was among them.
    fn move_to_front(&self, number: usize, cache: &'static StreamCache) {
        let mut entry = (number, Some(cache));
        for place in &self.recent {
            entry = place.replace(entry);
            if entry.0 == number {
                break;
            }
        }
    }
}

pub(crate) fn remember(key: u64, cache: &'static StreamCache) {
    MEMORY.with(|memory| memory.by_number[key as usize % ENTRIES].set((key, Some(cache))));
    remember_handle(cache);
}

/// Lets the next call of this thread with the stream's handle find its stream cache, if the handle stays valid.
#[inline(always)]
pub(crate) fn remember_handle(cache: &'static StreamCache) {
    let raw = cache.handle();
    if raw != 0 && !is_first(raw, cache) {
        keep(raw, cache);
    }
}

/// Lets the next call of this thread with this handle, which may be reused, find the stream cache.
#[inline(always)]
pub(crate) fn remember_reusable(raw: usize, cache: &'static StreamCache) {
    match cache.handle() {
        0 if !is_first(raw ^ PASSING, cache) => move_reusable_to_front(raw, cache),
        0 => {}
        _ => remember_handle(cache),
    }
}

/// Whether the first recent entry is this one.
#[inline(always)]
fn is_first(number: usize, cache: &StreamCache) -> bool {
    let (known, first) = MEMORY.with(|memory| memory.recent[0].get());
    known == number && first.is_some_and(|first| ptr::eq(first, cache))
}

/// [`remember_reusable`], if this thread has used another stream cache for the stream since.
pub(crate) fn refresh_reusable(raw: usize, key: u64) {
    if let Some(cache) = find(key) {
        remember_reusable(raw, cache);
    }
}

#[inline(never)]
fn move_reusable_to_front(raw: usize, cache: &'static StreamCache) {
    MEMORY.with(|memory| memory.move_to_front(raw ^ PASSING, cache));
}

#[inline(never)]
fn keep(raw: usize, cache: &'static StreamCache) {
    MEMORY.with(|memory| {
        memory.move_to_front(raw, cache);
        memory.by_handle[place(raw)].set((raw, Some(cache)));
    });
}

/// Makes the next allocation of this thread for the stream with this number use the heap.
pub(crate) fn forget(key: u64, cache: &'static StreamCache) {
    let is_it = |entry: Entry| entry.is_some_and(|known| ptr::eq(known, cache));
    MEMORY.with(|memory| {
        let left = memory.recent.iter().map(Cell::get);
        let mut left = left.filter(|(_, known)| !is_it(*known));
        let recent = std::array::from_fn::<_, RECENT, _>(|_| left.next().unwrap_or_default());
        for (place, entry) in memory.recent.iter().zip(recent) {
            place.set(entry);
        }
        let number = &memory.by_number[key as usize % ENTRIES];
        if is_it(number.get().1) {
            number.take();
        }
        for handle in &memory.by_handle {
            if is_it(handle.get().1) {
                handle.take();
            }
        }
    });
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Stream caches of streams whose handles stay valid.
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

    /// There are more handles than recent entries; the handle used last is the first.
    #[test]
    fn each_handle_finds_its_last_line() {
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
    fn requested_lines_are_those_of_the_lists() {
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
    fn forgotten_lines_are_not_found() {
        let known = caches::<6>();
        // One handle with a recent entry, and one without.
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
    fn a_handle_that_may_be_reused_is_never_treated_as_lasting() {
        let [one, other] = std::array::from_fn(|_| {
            let cache: &'static StreamCache = Box::leak(Box::new(StreamCache::new(0)));
            cache
        });
        let known = caches::<2>();
        let raw = 0x7100_0000;
        assert!(passing(raw).is_none());
        remember_reusable(raw, one);
        assert!(is(passing(raw), one) && find_first(raw).is_none());
        // It is found after calls with two other handles, and after another stream cache has taken the place of its
        // own.
        for (raw, cache) in known {
            assert!(is(lasting(raw), cache));
        }
        assert!(is(passing(raw), one) && is(passing(raw), one));
        remember_reusable(raw, other);
        assert!(is(passing(raw), other));
        // From now on the handle stays valid, and is no longer known as one that may be reused.
        other.set_handle(raw);
        remember_reusable(raw, other);
        assert!(is(lasting(raw), other) && passing(raw).is_none());
        forget(7, other);
        assert!(matches!(find_handle(raw), Known::Nothing));
    }

    #[test]
    fn consecutive_numbers_are_counted() {
        let known = caches::<ENTRIES>();
        for (key, (_, cache)) in (0..).zip(known) {
            assert!(is(find(key), cache));
            assert!(find(key + ENTRIES as u64).is_none());
        }
    }
}
