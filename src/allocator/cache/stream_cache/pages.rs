//! From an address to the stream cache that owns the page around it, without a lock.
//!
//! A radix table over the address space: three levels of directories, below them leaves of 2 MiB
//! with an entry per page. Directories and leaves are made when they are first needed and stay;
//! entries change under the lock of the stream cache that they name.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32 as Count, Ordering};

use super::StreamCache;
use super::granule::PageInfo;
use super::granule::WORN;
use crate::allocator::extent::boxed::boxed_array;
use crate::allocator::size::{GRANULE, PAGE};
use crate::locks::lock::{AtomicPtr, AtomicU32};

const PAGE_BITS: u32 = PAGE.ilog2();
const LEAF_BITS: u32 = 21;
const LEAF_PAGES: usize = 1 << (LEAF_BITS - PAGE_BITS);
const BITS: [u32; 3] = [10, 9, 9];
/// Above this many bits there are no addresses of devices.
const ADDRESS_BITS: u32 = LEAF_BITS + BITS[0] + BITS[1] + BITS[2];
/// Marks numbers of small blocks; those of all others are below.
pub(crate) const SMALL_ID: u32 = 1 << 31;
/// Bits of a block's number that say where in its page it begins.
const ID_BITS: u32 = PAGE_BITS - GRANULE.ilog2();
/// Numbers of pages: with as many the first one comes again.
const NUMBERS: u32 = SMALL_ID >> ID_BITS;

/// The number of the page that a small block's number tells.
#[inline(always)]
pub(crate) fn page_of(id: u32) -> u32 {
    (id & !SMALL_ID) >> ID_BITS
}

#[derive(Debug)]
struct Entry {
    cache: AtomicPtr<StreamCache>,
    /// Place of the page in the stream cache.
    page: AtomicU32,
    /// Where the page's generations go on when it comes back.
    generation: AtomicU32,
}

#[derive(Debug)]
struct Leaf {
    entries: [Entry; LEAF_PAGES],
    /// The pages' numbers; [`NUMBERS`] for one that has none yet. Beside the entries, whose size is a power of
    /// two so that every free by pointer finds its own by a shift.
    numbers: [Count; LEAF_PAGES],
}

impl Leaf {
    fn new() -> Self {
        Leaf {
            entries: std::array::from_fn(|_| Entry {
                cache: AtomicPtr::new(std::ptr::null_mut()),
                page: AtomicU32::new(0),
                generation: AtomicU32::new(0),
            }),
            numbers: [const { Count::new(NUMBERS) }; LEAF_PAGES],
        }
    }
}

/// As long as its index has values: what is masked needs no check.
type Slots<T, const N: usize> = Box<[OnceLock<T>; N]>;
const TOPS: usize = 1 << BITS[0];
const BELOW: usize = 1 << BITS[1];
const _: () = assert!(BITS[1] == BITS[2]);

fn slots<T, const N: usize>() -> Slots<T, N> {
    boxed_array(OnceLock::new)
}

/// See the module's text.
#[derive(Debug)]
pub(crate) struct PageTable {
    top: Slots<Slots<Slots<Leaf, BELOW>, BELOW>, TOPS>,
    numbers: Count,
}

impl PageTable {
    pub(crate) fn new() -> Self {
        PageTable {
            top: slots(),
            numbers: Count::new(0),
        }
    }

    #[inline(always)]
    fn places(ptr: u64) -> [usize; 3] {
        let at = |shift: u32, bits: u32| (ptr >> shift) as usize & ((1 << bits) - 1);
        let low = LEAF_BITS + BITS[2];
        [
            at(low + BITS[1], BITS[0]),
            at(low, BITS[1]),
            at(LEAF_BITS, BITS[2]),
        ]
    }

    /// The place of an address's page in its leaf.
    #[inline(always)]
    fn place(ptr: u64) -> usize {
        (ptr >> PAGE_BITS) as usize % LEAF_PAGES
    }

    #[inline(always)]
    fn entry(&self, ptr: u64) -> Option<&Entry> {
        let leaf = self.find_leaf(ptr)?;
        Some(&leaf.entries[Self::place(ptr)])
    }

    #[inline(always)]
    fn find_leaf(&self, ptr: u64) -> Option<&Leaf> {
        if ptr >> ADDRESS_BITS != 0 {
            return None;
        }
        let [top, middle, low] = Self::places(ptr);
        let middles = self.top[top % TOPS].get()?;
        let lows = middles[middle % BELOW].get()?;
        lows[low % BELOW].get()
    }

    /// The stream cache that owns the page around an address, and the page's place in it. Another thread
    /// may change both until that stream cache is locked.
    #[inline]
    pub(crate) fn find(&self, ptr: u64) -> Option<(&'static StreamCache, u32)> {
        let entry = self.entry(ptr)?;
        let cache = entry.cache.load(Ordering::Acquire);
        // SAFETY: what stands here came from a `&'static StreamCache`.
        let cache = unsafe { cache.cast_const().as_ref() }?;
        Some((cache, entry.page.load(Ordering::Acquire)))
    }

    /// What a page at `base` is to its next stream cache: one that is worn has another number
    /// from here on, and begins anew. It has no stream cache now. `None` for an address that no device has.
    pub(crate) fn info(&self, base: u64) -> Option<PageInfo> {
        if base >> ADDRESS_BITS != 0 {
            return None;
        }
        let [top, middle, low] = Self::places(base);
        let middles = self.top[top % TOPS].get_or_init(slots);
        let lows = middles[middle % BELOW].get_or_init(slots);
        let leaf = lows[low % BELOW].get_or_init(Leaf::new);
        let place = Self::place(base);
        let (entry, number) = (&leaf.entries[place], &leaf.numbers[place]);
        let worn = entry.generation.load(Ordering::Relaxed) >= WORN;
        if worn || number.load(Ordering::Relaxed) == NUMBERS {
            let next = self.numbers.fetch_add(1, Ordering::Relaxed) % NUMBERS;
            number.store(next, Ordering::Relaxed);
            entry.generation.store(0, Ordering::Relaxed);
        }
        Some(PageInfo {
            base,
            generation: entry.generation.load(Ordering::Relaxed),
            number: number.load(Ordering::Relaxed),
        })
    }

    /// The number of the live small block that begins at an address, among all that there can be.
    pub(crate) fn id(&self, ptr: u64) -> Option<u32> {
        let granule = (ptr / GRANULE) as u32 & ((1 << ID_BITS) - 1);
        let number = self.find_leaf(ptr)?.numbers[Self::place(ptr)].load(Ordering::Relaxed);
        Some(SMALL_ID | number << ID_BITS | granule)
    }

    /// Publishes a page that a stream cache has taken in. The stream cache is locked.
    pub(crate) fn set(&self, base: u64, cache: &'static StreamCache, page: u32) {
        if let Some(entry) = self.entry(base) {
            entry.page.store(page, Ordering::Relaxed);
            let cache = std::ptr::from_ref(cache).cast_mut();
            entry.cache.store(cache, Ordering::Release);
        }
    }

    /// Takes back what [`set`](Self::set) published. The stream cache is locked.
    pub(crate) fn clear(&self, info: PageInfo) {
        if let Some(entry) = self.entry(info.base) {
            entry.generation.store(info.generation, Ordering::Relaxed);
            entry.cache.store(std::ptr::null_mut(), Ordering::Release);
        }
    }
}
