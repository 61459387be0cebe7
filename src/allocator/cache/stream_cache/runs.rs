//! The small blocks of one stream cache: runs of granules in pages, and recently freed quick runs.
//!
//! Pure bookkeeping in safe code, under the stream cache's lock. A page is 128 granules; its runs lie without gaps. A
//! free run is in the list of its exact length; one bit per length tells which lists are not empty, so that the best
//! fit is found by counting zeros. Neighbours merge immediately, except for the *quick* runs: the most recently freed
//! ones, kept apart by length and allocated again unchanged, the latest first.

use super::account::{Accounts, cold_path};
use super::granule::{
    Bits, FREE, GRANULES, Granule, Kind, LIVE, Live, NIL, Node, Page, PageInfo, Taken, Using,
};
use crate::allocator::size::{GRANULE, PAGE_GRANULES};
use std::ptr;

/// Quick runs together take at most the granules of all pages divided by this, or a minimum number of granules.
const MAX_QUICK_DIVISOR: u32 = 8;
const QUICK_LEAST: u32 = 4 * PAGE_GRANULES;
/// Maximum number of granules in quick runs of one length.
const QUICK_GRANULES: u32 = 512;
/// Quick runs are many if they take more than the granules of all pages divided by this.
const FLUSH_DIVISOR: u64 = 16;
/// Initial capacity of a stream cache's list of pages.
const PAGES: usize = 32;

/// The quick runs of one length.
#[derive(Debug, Clone, Copy)]
pub(super) struct Quick {
    pub head: u32,
    /// Number of runs that the list may still take.
    pub left: u32,
}

/// A run that is no longer free, and not yet a live block.
#[derive(Debug, Clone, Copy)]
struct Cut {
    node: Node,
    bytes: u64,
}

impl Cut {
    #[inline(always)]
    fn new(node: Node, granules: u32) -> Self {
        let bytes = u64::from(granules) * GRANULE;
        Cut { node, bytes }
    }
}

/// Lists of quick runs by length: as many as a byte has values, so that indexing by length needs no check.
pub(super) const LISTS: usize = 1 << 8;

/// No quick runs.
pub(super) const NO_QUICK: [Quick; LISTS] = {
    let mut lists = [Quick { head: NIL, left: 0 }; LISTS];
    let mut length = 1;
    while length <= PAGE_GRANULES {
        lists[length as usize].left = QUICK_GRANULES / length;
        length += 1;
    }
    lists
};

/// The runs of a stream cache; see the module documentation.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Runs {
    #[expect(
        clippy::vec_box,
        reason = "pages are large, and stay where they are when there are more"
    )]
    pub(super) pages: Vec<Box<Page>>,
    /// Granules that quick runs may still take.
    pub(super) quick_room: u32,
    /// Granules that quick runs may take in total.
    pub(super) cap: u32,
    /// Counters of the blocks, placed here because a pair of allocation and free touches them together with the fields
    /// above.
    pub accounts: Accounts,
    /// Whether no quick runs are kept.
    merges_all: bool,
    /// Number of pages that are one free run.
    pub(super) whole: u32,
    /// Minimum of that number since the last query.
    pub(super) idle: u32,
    /// The stream's ticket for later frees.
    pub(super) ticket: u64,
    pub(super) pending_granules: u64,
    /// Number of runs in all pages, of any kind.
    pub(super) count: u32,
    /// Bit `length - 1` is set if the list of free runs of that length is not empty.
    pub(super) filled: Bits,
    /// Heads of the lists of free runs, at `length - 1`.
    pub(super) free: [u32; GRANULES],
    pub(super) quick: [Quick; LISTS],
    pub(super) vacant: Vec<u32>,
}

impl Default for Runs {
    fn default() -> Self {
        Runs {
            pages: Vec::new(),
            quick_room: 0,
            cap: 0,
            accounts: Accounts::default(),
            merges_all: false,
            whole: 0,
            idle: 0,
            ticket: 0,
            pending_granules: 0,
            count: 0,
            filled: Bits::default(),
            free: [NIL; GRANULES],
            quick: NO_QUICK,
            vacant: Vec::new(),
        }
    }
}

impl Runs {
    #[inline(always)]
    pub(super) fn granule(&self, node: Node) -> &Granule {
        &self.pages[node.page()].granules[node.place()]
    }

    #[inline(always)]
    pub(super) fn granule_mut(&mut self, node: Node) -> &mut Granule {
        &mut self.pages[node.page()].granules[node.place()]
    }

    /// Index of the list of quick runs of this length.
    #[inline(always)]
    pub(super) const fn quick_at(granules: u32) -> usize {
        std::mem::offset_of!(Runs, quick) + (granules as usize % LISTS) * size_of::<Quick>()
    }

    /// Returns the address of a run's record for prefetching; null if there is none.
    #[inline(always)]
    pub(crate) fn record_at(&self, node: Node) -> *const () {
        let page = self.pages.get(node.page());
        let record = page.map(|page| ptr::from_ref(&page.granules[node.place()]));
        record.map_or(ptr::null(), <*const Granule>::cast)
    }

    // ---- blocks ----------------------------------------------------------------------------

    /// Takes a run of `granules` (1 to 128) at a multiple of `align` granules.
    pub(crate) fn take(&mut self, granules: u32, align: u32, requested: u32) -> Option<Taken> {
        if align > 1 {
            return self.take_aligned(granules, align, requested);
        }
        let taken = self.take_anywhere(granules, requested);
        taken.map(|(taken, _)| taken)
    }

    /// Takes a run of `granules`: a quick run of exactly this length, or else the low end of the shortest free run that
    /// is long enough. Also returns its bytes, so that the caller need not keep them.
    #[inline(always)]
    pub(crate) fn take_anywhere(&mut self, granules: u32, requested: u32) -> Option<(Taken, u64)> {
        let quick = &mut self.quick[granules as usize % LISTS];
        let node = Node(quick.head);
        // No page has the index of `NIL`.
        let (page, cut) = if let Some(page) = self.pages.get_mut(node.page()) {
            let page = &mut **page;
            quick.head = page.granules[node.place()].a;
            quick.left += 1;
            self.quick_room += granules;
            (page, Cut::new(node, granules))
        } else {
            cold_path();
            let found = self.filled.first_from(granules as usize - 1)?;
            let cut = self.carve(found, granules);
            (&mut *self.pages[cut.node.page()], cut)
        };
        Some((page.hand_out(cut.node, requested), cut.bytes))
    }

    fn take_aligned(&mut self, granules: u32, align: u32, requested: u32) -> Option<Taken> {
        let mut list = granules as usize - 1;
        while let Some(found) = self.filled.first_from(list) {
            let length = found as u32 + 1;
            let mut at = self.free[found % GRANULES];
            while at != NIL {
                let node = Node(at);
                let place = self.address(node) / GRANULE;
                let skip = (place.next_multiple_of(u64::from(align)) - place) as u32;
                if skip + granules <= length {
                    self.cut(node, skip, granules);
                    return Some(self.hand_out(Node(at + skip), requested));
                }
                at = self.granule(node).a;
            }
            list = found + 1;
            if list >= GRANULES {
                break;
            }
        }
        None
    }

    /// Takes a run that begins at an address in a page, if enough is free from there on.
    pub(crate) fn take_at(
        &mut self,
        page: u32,
        ptr: u64,
        granules: u32,
        requested: u32,
    ) -> Option<Taken> {
        let run = self.around(page, ptr)?;
        let skip = ((ptr - run.ptr) / GRANULE) as u32;
        match run.kind {
            Kind::Quick if skip == 0 && run.granules == granules => {
                self.unquick(run.node, granules)
            }
            Kind::Free if skip + granules <= run.granules => self.cut(run.node, skip, granules),
            _ => return None,
        }
        Some(self.hand_out(Node(run.node.0 + skip), requested))
    }

    /// Removes a run from the quick runs.
    pub(super) fn unquick(&mut self, node: Node, granules: u32) {
        let length = granules as usize % LISTS;
        let next = self.granule(node).a;
        let mut at = self.quick[length].head;
        if at == node.0 {
            self.quick[length].head = next;
        } else {
            // The list is short, because its granules are bounded.
            while at != NIL {
                let granule = self.granule_mut(Node(at));
                at = granule.a;
                if at == node.0 {
                    granule.a = next;
                    break;
                }
            }
        }
        self.quick[length].left += 1;
        self.quick_room += granules;
    }

    pub(super) fn address(&self, node: Node) -> u64 {
        self.pages[node.page()].info.base + node.place() as u64 * GRANULE
    }

    /// Makes a cut run a live block.
    fn hand_out(&mut self, node: Node, requested: u32) -> Taken {
        self.pages[node.page()].hand_out(node, requested)
    }

    /// Returns the live block at a node, if its first byte is at `ptr`.
    #[inline(always)]
    pub(crate) fn live(&self, node: Node, ptr: u64) -> Option<Live> {
        let page = self.pages.get(node.page())?;
        let at = page.info.base + node.place() as u64 * GRANULE;
        page.granules[node.place()].live().filter(|_| at == ptr)
    }

    /// Returns the live block at a node, if it has this generation.
    #[inline(always)]
    pub(crate) fn live_as(&self, node: Node, generation: u32) -> Option<Live> {
        let page = self.pages.get(node.page())?;
        let granule = &page.granules[node.place()];
        debug_assert!(generation & LIVE != 0, "no link looks like it");
        (granule.a == generation).then(|| granule.as_live())
    }

    /// Sets which other streams use a live block.
    pub(crate) fn set_using(&mut self, node: Node, using: Using) {
        self.granule_mut(node).set_using(using);
    }

    /// Frees a live block of `granules` that no other stream uses: kept as a quick run if there is room, otherwise
    /// merged with its free neighbours.
    pub(crate) fn put(&mut self, node: Node, granules: u32) {
        if !self.put_quick(node, granules) {
            self.put_merged(node);
        }
    }

    /// Frees a live block into the quick runs; returns false, and the block stays live, if there is no room.
    #[inline(always)]
    pub(crate) fn put_quick(&mut self, node: Node, granules: u32) -> bool {
        let quick = &mut self.quick[granules as usize % LISTS];
        let (Some(page), Some(room)) = (
            self.pages.get_mut(node.page()),
            // In the width of the index, so that compilers keep the length in one register.
            (self.quick_room as usize).checked_sub(granules as usize),
        ) else {
            return false;
        };
        // Counted before it is certain, because there usually is room.
        let (left, none) = quick.left.overflowing_sub(1);
        quick.left = left;
        if none {
            cold_path();
            quick.left = 0;
            return false;
        }
        page.granules[node.place()].a = quick.head;
        quick.head = node.0;
        self.quick_room = room as u32;
        true
    }

    // ---- runs ------------------------------------------------------------------------------

    /// Cuts the low end off the latest run of a list of free ones.
    #[inline(never)]
    fn carve(&mut self, found: usize, granules: u32) -> Cut {
        let node = Node(self.free[found % GRANULES]);
        let page = &mut *self.pages[node.page()];
        let next = page.granules[node.place()].a;
        page.shape(node, granules);
        self.free[found % GRANULES] = next;
        match self.find(Node(next)) {
            Some(next) => next.b = NIL,
            None => self.filled.clear(found),
        }
        let length = found as u32 + 1;
        self.count_removed(length);
        if length > granules {
            self.count += 1;
            self.list(Node(node.0 + granules), length - granules);
        }
        Cut::new(node, granules)
    }

    /// Takes `granules` out of a free run; the rest on either side stays free.
    fn cut(&mut self, node: Node, skip: u32, granules: u32) {
        let length = u32::from(self.granule(node).len);
        self.unlist(node, length);
        if skip > 0 {
            self.count += 1;
            self.list(node, skip);
        }
        let rest = length - skip - granules;
        if rest > 0 {
            self.count += 1;
            self.list(Node(node.0 + skip + granules), rest);
        }
        let node = Node(node.0 + skip);
        self.pages[node.page()].shape(node, granules);
    }

    /// Makes a range a free run of its list.
    #[inline(always)]
    fn list(&mut self, node: Node, granules: u32) {
        let length = granules as usize - 1;
        let head = std::mem::replace(&mut self.free[length % GRANULES], node.0);
        let page = &mut *self.pages[node.page()];
        page.granules[(node.place() + length) % GRANULES].back = granules as u8;
        let granule = &mut page.granules[node.place()];
        (granule.len, granule.c) = (granules as u8, FREE);
        (granule.a, granule.b) = (head, NIL);
        match self.find(Node(head)) {
            Some(next) => next.b = node.0,
            None => self.filled.set(length),
        }
        self.whole += u32::from(granules == PAGE_GRANULES);
    }

    #[inline]
    pub(super) fn unlist(&mut self, node: Node, granules: u32) {
        let granule = self.granule(node);
        let (next, before) = (granule.a, granule.b);
        let last = match self.find(Node(next)) {
            Some(next) => {
                next.b = before;
                false
            }
            None => true,
        };
        match self.find(Node(before)) {
            Some(before) => before.a = next,
            None => {
                let length = granules as usize - 1;
                self.free[length % GRANULES] = next;
                if last {
                    self.filled.clear(length);
                }
            }
        }
        self.count_removed(granules);
    }

    /// Returns the run of a link, unless that is `NIL`, for which there is no page.
    #[inline(always)]
    fn find(&mut self, node: Node) -> Option<&mut Granule> {
        let page = self.pages.get_mut(node.page())?;
        Some(&mut page.granules[node.place()])
    }

    /// Removes a run of `granules` from the counts of its list.
    #[inline]
    fn count_removed(&mut self, granules: u32) {
        if granules == PAGE_GRANULES {
            self.whole -= 1;
            self.idle = self.idle.min(self.whole);
        }
    }

    /// Frees a live block and merges it with its free neighbours.
    #[inline(never)]
    pub(crate) fn put_merged(&mut self, node: Node) {
        self.merge(node, Some(self.ticket));
    }

    /// Makes a run free, and merges it with its free neighbours; `ticket` is that of its free, if it is newer than all
    /// others in the page.
    #[inline(always)]
    pub(super) fn merge(&mut self, node: Node, ticket: Option<u64>) {
        let page = &mut *self.pages[node.page()];
        if let Some(ticket) = ticket {
            page.ticket = ticket;
        }
        let place = node.place();
        let granule = &mut page.granules[place];
        let (mut start, mut length) = (node, u32::from(granule.len));
        // Only the first granule of a run may differ from a free one, so that a stale pointer into the middle of a free
        // run finds no live block.
        granule.set_free();
        let end = place + length as usize;
        let right = page.granules.get(end).filter(|granule| granule.is_free());
        let right = right.map(|granule| (Node(node.0 + length), u32::from(granule.len)));
        let left = place.checked_sub(1).map(|last| page.granules[last].back);
        let left = left.map(u32::from).filter(|more| {
            let place = place - *more as usize;
            page.granules[place % GRANULES].is_free()
        });
        self.count -= u32::from(right.is_some()) + u32::from(left.is_some());
        if let Some((right, more)) = right {
            self.unlist(right, more);
            length += more;
        }
        if let Some(more) = left {
            start = Node(node.0 - more);
            self.unlist(start, more);
            length += more;
        }
        self.list(start, length);
    }

    /// Merges quick runs, the longest first, until one of `granules` is free, if they take a substantial part of the
    /// pages; true if one is. Otherwise another page is better: quick runs serve later requests at a fraction of the
    /// cost.
    pub(crate) fn flush_for(&mut self, granules: u32) -> bool {
        let many = u64::from(self.quick_granules()) * FLUSH_DIVISOR
            > self.page_count() as u64 * u64::from(PAGE_GRANULES);
        let wanted = granules as usize - 1;
        many && (1..=PAGE_GRANULES).rev().any(|length| {
            self.flush_list(length);
            self.filled.first_from(wanted).is_some()
        })
    }

    /// Merges all quick runs; true if there were any.
    pub(crate) fn flush_quick(&mut self) -> bool {
        let any = self.quick_granules() > 0;
        if any {
            (1..=PAGE_GRANULES).for_each(|length| self.flush_list(length));
        }
        any
    }

    /// Merges the quick runs of one length.
    fn flush_list(&mut self, length: u32) {
        let at = length as usize % LISTS;
        let none = NO_QUICK[at];
        let quick = std::mem::replace(&mut self.quick[at], none);
        self.quick_room += (none.left - quick.left) * length;
        let mut at = quick.head;
        while at != NIL {
            let node = Node(at);
            at = self.granule(node).a;
            self.put_merged(node);
        }
    }

    // ---- pages -----------------------------------------------------------------------------

    /// Adds a page as one free run. Returns its index in the stream cache.
    pub(crate) fn add_page(&mut self, info: PageInfo) -> u32 {
        // It gets the current ticket: the stream may still be using the page, or be ordered behind its users.
        let page = Page::new(info, self.ticket);
        let at = match self.vacant.pop() {
            Some(at) => {
                *self.pages[at as usize] = page;
                at
            }
            None => {
                if self.pages.capacity() == 0 {
                    // This array is read all the time. Reserving it this large means that only its first and last cache
                    // lines can be shared with data that others write (false sharing).
                    self.pages.reserve(PAGES);
                }
                self.pages.push(Box::new(page));
                self.pages.len() as u32 - 1
            }
        };
        self.count += 1;
        self.list(Node::new(at, 0), PAGE_GRANULES);
        self.set_cap();
        at
    }

    /// Removes a page that is one free run, if more than `keep` are, with the ticket of the newest free in it.
    pub(crate) fn remove_page(&mut self, keep: u32) -> Option<(PageInfo, u64)> {
        if self.whole <= keep {
            return None;
        }
        let node = Node(self.free[GRANULES - 1]);
        self.unlist(node, PAGE_GRANULES);
        self.count -= 1;
        let page = &mut self.pages[node.page()];
        page.present = false;
        let gone = (page.info, page.ticket);
        self.vacant.push(node.page() as u32);
        self.set_cap();
        Some(gone)
    }

    /// Whether a run begins at an address: another page may have taken the place of the address's page.
    #[inline(always)]
    pub(crate) fn is_at(&self, node: Node, ptr: u64) -> bool {
        let page = self.pages.get(node.page());
        page.is_some_and(|page| page.info.base + node.place() as u64 * GRANULE == ptr)
    }

    /// Sets the generation of all pages.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn age(&mut self, generation: u32) {
        for page in &mut self.pages {
            page.info.generation = generation;
        }
    }

    /// Sets the ticket of later frees.
    pub(crate) fn set_ticket(&mut self, ticket: u64) {
        self.ticket = ticket;
    }

    /// Returns the number of pages that are one free run.
    pub(crate) fn whole_pages(&self) -> u32 {
        self.whole
    }

    /// Returns the number of wholly free pages that were used in the meantime, since the last call.
    pub(crate) fn take_needed_pages(&mut self) -> u32 {
        self.whole - std::mem::replace(&mut self.idle, self.whole)
    }

    /// Returns the number of pages.
    pub(crate) fn page_count(&self) -> usize {
        self.pages.len() - self.vacant.len()
    }

    /// Updates the bound of the granules in quick runs, after pages were added or removed.
    pub(super) fn set_cap(&mut self) {
        let granules = self.page_count() as u32 * PAGE_GRANULES;
        let cap = match self.merges_all {
            true => 0,
            false => (granules / MAX_QUICK_DIVISOR).max(QUICK_LEAST),
        };
        if self.quick_granules() > cap {
            self.flush_quick();
        }
        self.quick_room = cap - self.quick_granules();
        self.cap = cap;
    }

    /// Sets whether quick runs are kept; if not, [`put_quick`](Self::put_quick) frees no live block.
    pub(crate) fn keep_quick(&mut self, keep: bool) {
        if self.merges_all == keep {
            self.merges_all = !keep;
            self.set_cap();
        }
    }

    /// Returns the granules in quick runs.
    pub(crate) fn quick_granules(&self) -> u32 {
        self.cap - self.quick_room
    }
}
