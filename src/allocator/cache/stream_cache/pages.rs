//! Lookup from an address to the stream cache that owns its page, without a lock.
//!
//! A table over the address space in stretches of one GiB, with an entry per page. A stretch is created with the first
//! page in it, and stays; entries change under the lock of the stream cache that they name. Most stretches are in a
//! direct-mapped array of `PLACES` slots, so that a free by pointer with cold caches waits for two lines. A stretch
//! whose slot is taken lies in a radix table. The first stretch of all is stored in the table's first line, beside the
//! word that calls by pointer and by handle read anyway.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32 as Count, AtomicU64, Ordering};

use super::granule::{Node, PageInfo};
use super::{Life, StreamCache, thread};
use crate::allocator::extent::boxed::boxed_array;
use crate::allocator::size::{GRANULE, PAGE, PAGE_GRANULES};
use crate::locks::lock::{AtomicPtr, AtomicU32};

const PAGE_BITS: u32 = PAGE.ilog2();
/// Bits of an address within a stretch. Loom tracks each entry, so its stretches are small.
const STRETCH_BITS: u32 = if cfg!(loom) { 21 } else { 30 };
const STRETCH_PAGES: usize = 1 << (STRETCH_BITS - PAGE_BITS);
/// No device has addresses with more bits.
const ADDRESS_BITS: u32 = 49;
/// Number of slots in the direct-mapped array. Few under loom, whose stacks are small.
const PLACES: usize = if cfg!(loom) { 2 } else { 64 };
/// The two levels of the radix table of all other stretches.
const TOPS: usize = 1 << 10;
const BELOW: usize = 1 << (ADDRESS_BITS - STRETCH_BITS - TOPS.ilog2());
/// Marks numbers of small blocks; all other numbers are smaller.
pub(crate) const SMALL_ID: u32 = 1 << 31;
/// Bits of a block's number for its position in its page.
const ID_BITS: u32 = PAGE_BITS - GRANULE.ilog2();
/// Number of page numbers, after which they repeat.
const NUMBERS: u32 = SMALL_ID >> ID_BITS;

#[derive(Debug)]
struct Entry {
    cache: AtomicPtr<StreamCache>,
    /// Index of the page in the stream cache.
    page: AtomicU32,
    /// Generation from which the page continues when it comes back.
    generation: AtomicU32,
}

/// The pages of one stretch of addresses.
#[derive(Debug)]
struct Stretch {
    /// The stretch: an address without its lower bits.
    number: u64,
    entries: Box<[Entry; STRETCH_PAGES]>,
    /// Numbers of the pages; [`NUMBERS`] for a page without one. Separate from the entries, whose size is a power of
    /// two so that every free by pointer finds its entry by a shift.
    numbers: Box<[Count; STRETCH_PAGES]>,
}

impl Stretch {
    /// Out of line, because it has several callers and the value is large under loom.
    #[inline(never)]
    fn new(number: u64) -> Self {
        Stretch {
            number,
            entries: boxed_array(|| Entry {
                cache: AtomicPtr::new(std::ptr::null_mut()),
                page: AtomicU32::new(0),
                generation: AtomicU32::new(0),
            }),
            numbers: boxed_array(|| Count::new(NUMBERS)),
        }
    }
}

/// As long as the range of its masked index, so that indexing needs no bounds check.
type Slots<T, const N: usize> = Box<[OnceLock<T>; N]>;

fn slots<T, const N: usize>() -> Slots<T, N> {
    boxed_array(OnceLock::new)
}

/// The table; see the module documentation.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct PageTable {
    /// A copy of the engine's word: the allocator's id while stream caches may serve calls alone, otherwise 0.
    fast: AtomicU64,
    first: OnceLock<Stretch>,
    /// The direct-mapped slots: each holds the first stretch of those that share it, except for `first`.
    near: [OnceLock<Stretch>; PLACES],
    far: OnceLock<Slots<Slots<Stretch, BELOW>, TOPS>>,
    numbers: Count,
}

/// Returns the number of the stretch around an address.
#[inline(always)]
fn stretch_of(ptr: u64) -> u64 {
    ptr >> STRETCH_BITS
}

/// Returns the index of an address's page in its stretch.
#[inline(always)]
fn place(ptr: u64) -> usize {
    (ptr >> PAGE_BITS) as usize % STRETCH_PAGES
}

/// Returns the indexes of a stretch in the radix table.
fn far_place(number: u64) -> Option<(usize, usize)> {
    let number = usize::try_from(number).ok()?;
    let (top, below) = (number / BELOW, number % BELOW);
    (top < TOPS).then_some((top, below))
}

impl PageTable {
    /// Creates the empty table of an allocator; `fast` is its id, or 0 if its stream caches never serve calls alone.
    pub(crate) fn new(fast: u64) -> Self {
        PageTable {
            fast: AtomicU64::new(fast),
            first: OnceLock::new(),
            near: [const { OnceLock::new() }; PLACES],
            far: OnceLock::new(),
            numbers: Count::new(0),
        }
    }

    /// Returns the id of the allocator if its stream caches may serve calls alone, otherwise 0.
    #[inline(always)]
    pub(crate) fn fast_id(&self) -> u64 {
        self.fast.load(Ordering::Relaxed)
    }

    /// Stops stream caches from serving calls alone.
    pub(crate) fn stop(&self) {
        self.fast.store(0, Ordering::Relaxed);
    }

    #[inline(always)]
    fn entry(&self, ptr: u64) -> Option<&Entry> {
        let stretch = self.stretch(ptr)?;
        Some(&stretch.entries[place(ptr)])
    }

    #[inline(always)]
    fn stretch(&self, ptr: u64) -> Option<&Stretch> {
        let number = stretch_of(ptr);
        // `first` is set before any other stretch.
        let first = self.first.get()?;
        if first.number == number {
            return Some(first);
        }
        self.other_stretch(number)
    }

    #[cold]
    #[inline(never)]
    fn other_stretch(&self, number: u64) -> Option<&Stretch> {
        // If the slot is empty, no stretch was displaced to the radix table either.
        let near = self.near[number as usize % PLACES].get()?;
        if near.number == number {
            return Some(near);
        }
        self.far_stretch(number)
    }

    #[inline(never)]
    fn far_stretch(&self, number: u64) -> Option<&Stretch> {
        let (top, below) = far_place(number)?;
        self.far.get()?[top].get()?[below].get()
    }

    /// Returns the stretch around an address, and creates it if necessary; `None` for an address that no device has.
    fn made_stretch(&self, ptr: u64) -> Option<&Stretch> {
        let number = stretch_of(ptr);
        let (top, below) = far_place(number)?;
        let make = || Stretch::new(number);
        let first = self.first.get_or_init(make);
        if first.number == number {
            return Some(first);
        }
        let near = self.near[number as usize % PLACES].get_or_init(make);
        if near.number == number {
            return Some(near);
        }
        let stretches = self.far.get_or_init(slots)[top].get_or_init(slots);
        Some(stretches[below].get_or_init(make))
    }

    /// Returns the stream cache that owns the page around an address, and the page's index in it. Another thread may
    /// change both until that stream cache is locked.
    #[inline]
    pub(crate) fn find(&self, ptr: u64) -> Option<(&'static StreamCache, u32)> {
        let entry = self.entry(ptr)?;
        let cache = entry.cache.load(Ordering::Acquire);
        // SAFETY: the pointer was stored from a `&'static StreamCache`.
        let cache = unsafe { cache.cast_const().as_ref() }?;
        Some((cache, entry.page.load(Ordering::Acquire)))
    }

    /// [`find`](Self::find) for an address where a small block may begin, with its node; small blocks begin only at
    /// granules.
    #[inline(always)]
    pub(crate) fn find_node(&self, ptr: u64) -> Option<(&'static StreamCache, Node)> {
        if !ptr.is_multiple_of(GRANULE) {
            return None;
        }
        let (cache, page) = self.find(ptr)?;
        let place = (ptr / GRANULE) as u32 & (PAGE_GRANULES - 1);
        Some((cache, Node::new(page, place)))
    }

    /// Frees the small block that begins at an address, if its stream cache can do so without further checks.
    /// Otherwise returns false and changes nothing.
    #[inline(always)]
    pub(crate) fn free_quick(&self, ptr: u64) -> bool {
        thread::prefetch_for_free();
        if let Some((cache, node)) = self.find_node(ptr)
            && self.fast_id() != 0
            && cache.now().is_normal()
            && let Some(mut inner) = cache.try_lock()
        {
            // Looked up once for both calls.
            let record = inner.runs.record_at(node);
            let freed = inner.free_quick(node, Life::At(ptr)).is_some();
            if freed {
                thread::touched(record);
            }
            return freed;
        }
        false
    }

    /// Returns a page at `base` for its next stream cache, which it must not have yet. `None` for an address that no
    /// device has.
    pub(crate) fn info(&self, base: u64) -> Option<PageInfo> {
        let stretch = self.made_stretch(base)?;
        let (entry, number) = (&stretch.entries[place(base)], &stretch.numbers[place(base)]);
        if number.load(Ordering::Relaxed) == NUMBERS {
            let next = self.numbers.fetch_add(1, Ordering::Relaxed) % NUMBERS;
            number.store(next, Ordering::Relaxed);
        }
        Some(PageInfo {
            base,
            generation: entry.generation.load(Ordering::Relaxed),
        })
    }

    /// Returns the number of the live small block that begins at an address, unique among all possible ones.
    pub(crate) fn id(&self, ptr: u64) -> Option<u32> {
        let granule = (ptr / GRANULE) as u32 & ((1 << ID_BITS) - 1);
        let number = self.stretch(ptr)?.numbers[place(ptr)].load(Ordering::Relaxed);
        Some(SMALL_ID | number << ID_BITS | granule)
    }

    /// Publishes a page that a stream cache has added. The stream cache is locked.
    pub(crate) fn set(&self, base: u64, cache: &'static StreamCache, page: u32) {
        if let Some(entry) = self.entry(base) {
            entry.page.store(page, Ordering::Relaxed);
            let cache = std::ptr::from_ref(cache).cast_mut();
            entry.cache.store(cache, Ordering::Release);
        }
    }

    /// Reverts a [`set`](Self::set). The stream cache is locked.
    pub(crate) fn clear(&self, info: PageInfo) {
        if let Some(entry) = self.entry(info.base) {
            entry.generation.store(info.generation, Ordering::Relaxed);
            entry.cache.store(std::ptr::null_mut(), Ordering::Release);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn stretches_that_share_a_place_are_distinguished() {
        let table = PageTable::new(1);
        let cache = |rank| -> &'static StreamCache { Box::leak(Box::new(StreamCache::new(rank))) };
        let at = 0x20_0000_0000 + 3 * PAGE;
        let bases = [
            0,
            1,
            PLACES as u64,
            2 * PLACES as u64,
            (TOPS * BELOW) as u64 - 200,
        ]
        .map(|stretches| (at + stretches * GIB) % (1 << ADDRESS_BITS));
        assert!(bases.iter().all(|base| table.find(*base).is_none()));
        for (place, base) in (0..).zip(bases) {
            let info = table.info(base).expect("an address of a device");
            assert_eq!(info.base, base);
            table.set(base, cache(place), place + 10);
        }
        for (place, base) in (0..).zip(bases) {
            for ptr in [base, base + GRANULE, base + PAGE - 1] {
                let found = table.find(ptr).map(|(cache, page)| (cache.rank, page));
                assert_eq!(found, Some((place, place + 10)));
            }
            let id = table.id(base + 5 * GRANULE).expect("it has a number");
            assert_eq!(id, SMALL_ID | place << ID_BITS | 5);
            for other in [
                base - 1,
                base + PAGE,
                base + 3 * PLACES as u64 * GIB,
                base | 1 << ADDRESS_BITS,
            ] {
                assert!(table.find(other).is_none(), "{other:#x}");
            }
        }
        assert!(table.info(at | 1 << ADDRESS_BITS).is_none());
        // A page that comes back keeps its number, and its generations continue.
        let last = bases[2];
        let info = table.info(last).map(|info| PageInfo {
            generation: 77,
            ..info
        });
        table.clear(info.expect("an address of a device"));
        assert!(table.find(last).is_none());
        let again = table.info(last).expect("an address of a device");
        assert_eq!(again.generation, 77);
        assert_eq!(
            table.id(last),
            Some(SMALL_ID | 2 << ID_BITS | (last / GRANULE) as u32 & 127)
        );
    }
}
