//! From an address to the stream cache that owns the page around it, without a lock.
//!
//! A table over the address space by stretches of a GiB, with an entry per page in each. A stretch is made when the
//! first page in it is, and stays; entries change under the lock of the stream cache that they name. Most stretches lie
//! near: in a row that has a place for one of each so many, so that a free by pointer, which may find none of this in the
//! processor's caches, waits for two lines. Who finds his place taken lies in a radix table. The first stretch of all lies
//! in the table's first line, beside the word that calls by pointer and by handle look at anyway.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32 as Count, AtomicU64, Ordering};

use super::StreamCache;
use super::granule::{Node, PAGE_GRANULES, PageInfo, WORN};
use crate::allocator::extent::boxed::boxed_array;
use crate::allocator::size::{GRANULE, PAGE};
use crate::locks::lock::{AtomicPtr, AtomicU32};

const PAGE_BITS: u32 = PAGE.ilog2();
/// Of a stretch. Loom has to be told of each entry.
const STRETCH_BITS: u32 = if cfg!(loom) { 21 } else { 30 };
const STRETCH_PAGES: usize = 1 << (STRETCH_BITS - PAGE_BITS);
/// Above this many bits there are no addresses of devices.
const ADDRESS_BITS: u32 = 49;
/// Places for stretches that lie near. What loom looks at has a small stack.
const PLACES: usize = if cfg!(loom) { 2 } else { 64 };
/// The two levels of the table of all others.
const TOPS: usize = 1 << 10;
const BELOW: usize = 1 << (ADDRESS_BITS - STRETCH_BITS - TOPS.ilog2());
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

/// What is known of the pages of a stretch of addresses.
#[derive(Debug)]
struct Stretch {
    /// Which one: an address without its lower bits.
    number: u64,
    entries: Box<[Entry; STRETCH_PAGES]>,
    /// The pages' numbers; [`NUMBERS`] for one that has none yet. Beside the entries, whose size is a power of
    /// two so that every free by pointer finds its own by a shift.
    numbers: Box<[Count; STRETCH_PAGES]>,
}

impl Stretch {
    /// Out of line: it is made at one of several places, and is large where loom looks at it.
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

/// As long as its index has values: what is masked needs no check.
type Slots<T, const N: usize> = Box<[OnceLock<T>; N]>;

fn slots<T, const N: usize>() -> Slots<T, N> {
    boxed_array(OnceLock::new)
}

/// See the module's text.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct PageTable {
    /// A copy of the engine's word: the allocator's id as long as stream caches may serve at once, then 0.
    at_once: AtomicU64,
    first: OnceLock<Stretch>,
    /// Of the other stretches that share a place the first one that had a page.
    near: [OnceLock<Stretch>; PLACES],
    far: OnceLock<Slots<Slots<Stretch, BELOW>, TOPS>>,
    numbers: Count,
}

/// The number of the stretch around an address.
#[inline(always)]
fn stretch_of(ptr: u64) -> u64 {
    ptr >> STRETCH_BITS
}

/// The place of an address's page in its stretch.
#[inline(always)]
fn place(ptr: u64) -> usize {
    (ptr >> PAGE_BITS) as usize % STRETCH_PAGES
}

/// Where in the table of those that do not lie near a stretch is.
fn far_place(number: u64) -> Option<(usize, usize)> {
    let number = usize::try_from(number).ok()?;
    let (top, below) = (number / BELOW, number % BELOW);
    (top < TOPS).then_some((top, below))
}

impl PageTable {
    /// An empty one of the allocator whose stream caches serve at once; with 0 they do not.
    pub(crate) fn new(at_once: u64) -> Self {
        PageTable {
            at_once: AtomicU64::new(at_once),
            first: OnceLock::new(),
            near: [const { OnceLock::new() }; PLACES],
            far: OnceLock::new(),
            numbers: Count::new(0),
        }
    }

    /// The id of the allocator if its stream caches may serve at once, else 0.
    #[inline(always)]
    pub(crate) fn at_once_id(&self) -> u64 {
        self.at_once.load(Ordering::Relaxed)
    }

    /// Stream caches serve no more at once.
    pub(crate) fn stop(&self) {
        self.at_once.store(0, Ordering::Relaxed);
    }

    #[inline(always)]
    fn entry(&self, ptr: u64) -> Option<&Entry> {
        let stretch = self.stretch(ptr)?;
        Some(&stretch.entries[place(ptr)])
    }

    #[inline(always)]
    fn stretch(&self, ptr: u64) -> Option<&Stretch> {
        let number = stretch_of(ptr);
        // The first one is made before any other.
        let first = self.first.get()?;
        if first.number == number {
            return Some(first);
        }
        self.other_stretch(number)
    }

    #[cold]
    #[inline(never)]
    fn other_stretch(&self, number: u64) -> Option<&Stretch> {
        // None near: there is none that had to go further, either.
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

    /// The stretch around an address, from now on; `None` for an address that no device has.
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

    /// [`find`](Self::find) for the place where a small block may begin: none begins elsewhere.
    #[inline(always)]
    pub(crate) fn find_node(&self, ptr: u64) -> Option<(&'static StreamCache, Node)> {
        if !ptr.is_multiple_of(GRANULE) {
            return None;
        }
        let (cache, page) = self.find(ptr)?;
        let place = (ptr / GRANULE) as u32 & (PAGE_GRANULES - 1);
        Some((cache, Node::new(page, place)))
    }

    /// What a page at `base` is to its next stream cache: one that is worn has another number
    /// from here on, and begins anew. It has no stream cache now. `None` for an address that no device has.
    pub(crate) fn info(&self, base: u64) -> Option<PageInfo> {
        let stretch = self.made_stretch(base)?;
        let (entry, number) = (&stretch.entries[place(base)], &stretch.numbers[place(base)]);
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
        let number = self.stretch(ptr)?.numbers[place(ptr)].load(Ordering::Relaxed);
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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn stretches_that_share_a_place_are_told_apart() {
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
            assert_eq!((info.base, info.number), (base, place));
            table.set(base, cache(place), place + 10);
        }
        for (place, base) in (0..).zip(bases) {
            for ptr in [base, base + GRANULE, base + PAGE - 1] {
                let found = table.find(ptr).map(|(cache, page)| (cache.rank, page));
                assert_eq!(found, Some((place, place + 10)));
            }
            let id = table.id(base + 5 * GRANULE).expect("it has a number");
            assert_eq!((page_of(id), id & ((1 << ID_BITS) - 1)), (place, 5));
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
        // A page that comes back has its number, and goes on with its generations.
        let last = bases[2];
        let info = table.info(last).map(|info| PageInfo {
            generation: 77,
            ..info
        });
        table.clear(info.expect("an address of a device"));
        assert!(table.find(last).is_none());
        let again = table.info(last).expect("an address of a device");
        assert_eq!((again.number, again.generation), (2, 77));
    }
}
