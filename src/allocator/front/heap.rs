//! The small blocks of one front: runs of granules in pages, and recently freed runs at hand.
//!
//! Pure bookkeeping, in safe code, under the front's lock. A page is 128 granules; its runs lie
//! without gaps. A free run is in the list of its exact length; one bit per length tells which lists
//! hold anything, so that the best fit is found by counting zeros. Neighbours merge at once, except
//! for the *quick* runs: the last ones that were freed, kept apart by length and handed out again as
//! they are, the latest first.

use super::super::size::GRANULE;
use super::grain::{
    Bits, GRAINS, Grain, Kind, Live, NIL, Node, PAGE_GRAINS, PLACE_MASK, Page, PageInfo, Taken,
    Using, before, set_before,
};

/// Quick runs together are at most this part of the pages, but at least one page's worth.
const QUICK_SHARE: u32 = 8;
/// Quick runs of one length are kept up to this many granules together, but at least one.
const QUICK_GRAINS: usize = 64;
/// That in runs, by length less one.
const QUICK_RUNS: [u8; GRAINS] = {
    let (mut runs, mut length) = ([1; GRAINS], 1);
    while length < QUICK_GRAINS {
        runs[length - 1] = (QUICK_GRAINS / length) as u8;
        length += 1;
    }
    runs
};
/// They are many if they are more than this part of all pages.
const QUICK_PART: u64 = 16;

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Heap {
    pub(super) pages: Vec<Page>,
    /// All granules of all pages, by node.
    pub(super) grains: Vec<Grain>,
    pub(super) vacant: Vec<u32>,
    /// Lists of free runs by length less one, and a bit for each that is not empty.
    pub(super) free: [u32; GRAINS],
    pub(super) filled: Bits,
    pub(super) quick: [u32; GRAINS],
    pub(super) quick_filled: Bits,
    pub(super) quick_runs: [u8; GRAINS],
    pub(super) quick_grains: u32,
    /// Granules that quick runs may hold together.
    pub(super) cap: u32,
    /// Pages that are one free run.
    pub(super) whole: u32,
    pub(super) free_grains: u64,
    pub(super) pending_grains: u64,
    /// The stream's ticket for frees from now on.
    pub(super) ticket: u64,
}

impl Default for Heap {
    fn default() -> Self {
        Heap {
            pages: Vec::new(),
            grains: Vec::new(),
            vacant: Vec::new(),
            free: [NIL; GRAINS],
            filled: Bits::default(),
            quick: [NIL; GRAINS],
            quick_filled: Bits::default(),
            quick_runs: [0; GRAINS],
            quick_grains: 0,
            cap: 0,
            whole: 0,
            free_grains: 0,
            pending_grains: 0,
            ticket: 0,
        }
    }
}

impl Heap {
    // ---- blocks ----------------------------------------------------------------------------

    /// Takes a run of `granules` (1 to 128) for a block that leaves `slack` bytes of it unused.
    #[inline(always)]
    pub(crate) fn take(&mut self, granules: u32, slack: u16) -> Option<Taken> {
        let length = granules as usize - 1;
        let node = Node(self.quick[length % GRAINS]);
        if node.0 == NIL {
            let node = self.carve(granules)?;
            return Some(self.hand_out(node, slack));
        }
        self.quick[length % GRAINS] = self.grains[node.at()].a;
        self.quick_runs[length % GRAINS] -= 1;
        self.quick_grains -= granules;
        Some(self.hand_out(node, slack))
    }

    /// [`take`](Self::take) at a multiple of `align` granules.
    pub(crate) fn take_aligned(&mut self, granules: u32, align: u32, slack: u16) -> Option<Taken> {
        if align <= 1 {
            return self.take(granules, slack);
        }
        let mut list = granules as usize - 1;
        while let Some(found) = self.filled.first_from(list) {
            let length = found as u32 + 1;
            let mut at = self.free[found % GRAINS];
            while at != NIL {
                let node = Node(at);
                let page = &self.pages[node.page()];
                let place = page.info.base / GRANULE + node.place() as u64;
                let skip = (place.next_multiple_of(u64::from(align)) - place) as u32;
                if skip + granules <= length {
                    self.cut(node, skip, granules);
                    return Some(self.hand_out(Node(at + skip), slack));
                }
                at = self.grains[node.at()].a;
            }
            list = found + 1;
            if list >= GRAINS {
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
        slack: u16,
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
        Some(self.hand_out(Node(run.node.0 + skip), slack))
    }

    /// Takes a run out of the quick ones.
    fn unquick(&mut self, node: Node, granules: u32) {
        let length = granules as usize - 1;
        let next = self.grains[node.at()].a;
        let mut at = self.quick[length];
        if at == node.0 {
            self.quick[length] = next;
        } else {
            // Not many: a list is bounded in granules.
            while at != NIL {
                let before = Node(at);
                let grain = &mut self.grains[before.at()];
                at = grain.a;
                if at == node.0 {
                    grain.a = next;
                    break;
                }
            }
        }
        self.quick_runs[length] -= 1;
        self.quick_grains -= granules;
    }

    /// Whether an address of a page is free.
    pub(crate) fn is_free(&self, page: u32, ptr: u64) -> bool {
        let run = self.around(page, ptr);
        run.is_some_and(|run| matches!(run.kind, Kind::Free | Kind::Quick))
    }

    #[inline(always)]
    fn hand_out(&mut self, node: Node, slack: u16) -> Taken {
        let grain = &mut self.grains[node.at()];
        let page = &mut self.pages[node.page()];
        let generation = page.info.generation.wrapping_add(2);
        page.info.generation = generation;
        grain.kind = Kind::Used;
        grain.a = generation;
        grain.b = slack;
        grain.c = Using::NONE.0;
        let place = node.0 & PLACE_MASK;
        Taken {
            node,
            ptr: page.info.base + u64::from(place) * GRANULE,
            id: page.info.first_id + place,
            generation,
        }
    }

    /// The live block at a node, if its first byte is at `ptr`.
    #[inline(always)]
    pub(crate) fn live(&self, node: Node, ptr: u64) -> Option<Live> {
        let page = self.pages.get(node.page())?;
        let at = page.info.base + node.place() as u64 * GRANULE;
        self.live_at(node).filter(|_| at == ptr)
    }

    /// The live block at a node.
    #[inline(always)]
    pub(crate) fn live_at(&self, node: Node) -> Option<Live> {
        let grain = self.grains.get(node.at())?;
        (grain.kind == Kind::Used).then_some(Live {
            granules: u32::from(grain.len),
            generation: grain.a,
            slack: grain.b,
            using: Using(grain.c),
        })
    }

    /// Says which other streams use a live block.
    pub(crate) fn set_using(&mut self, node: Node, using: Using) {
        self.grains[node.at()].c = using.0;
    }

    /// Takes back a live block of `granules` that nobody else uses: kept as it is if there is room
    /// for it at hand, else merged with what is free beside it.
    pub(crate) fn put(&mut self, node: Node, granules: u32) {
        if !self.put_quick(node, granules) {
            self.put_merged(node);
        }
    }

    /// Takes back a live block and keeps it as it is; false, and it is still live, if that would be
    /// too much.
    #[inline(always)]
    pub(crate) fn put_quick(&mut self, node: Node, granules: u32) -> bool {
        let length = granules as usize - 1;
        if granules + self.quick_grains > self.cap {
            return false;
        }
        let runs = &mut self.quick_runs[length % GRAINS];
        if *runs >= QUICK_RUNS[length % GRAINS] {
            return false;
        }
        *runs += 1;
        self.quick_grains += granules;
        let grain = &mut self.grains[node.at()];
        grain.kind = Kind::Quick;
        grain.a = std::mem::replace(&mut self.quick[length % GRAINS], node.0);
        // Stays set when the list runs empty, until the next flush: that costs less.
        self.quick_filled.set(length);
        true
    }

    /// Takes back a live block that other streams may still use.
    pub(crate) fn hold_back(&mut self, node: Node) {
        self.pages[node.page()].ticket = self.ticket;
        let grain = &mut self.grains[node.at()];
        grain.kind = Kind::Pending;
        self.pending_grains += u64::from(grain.len);
    }

    /// The other streams are done with a block that was held back; or, not `over` yet, its own
    /// stream has come to follow them.
    pub(crate) fn let_go(&mut self, node: Node, over: bool) {
        if !over {
            self.pages[node.page()].ticket = self.ticket;
        }
        let grain = &self.grains[node.at()];
        self.pending_grains -= u64::from(grain.len);
        self.merge(node);
    }

    // ---- runs ------------------------------------------------------------------------------

    /// Takes the shortest free run that is long enough, from its low end.
    #[inline(never)]
    fn carve(&mut self, granules: u32) -> Option<Node> {
        let found = self.filled.first_from(granules as usize - 1)?;
        let node = Node(self.free[found % GRAINS]);
        let length = found as u32 + 1;
        self.unlist(node, length);
        if length > granules {
            self.shape(node, granules);
            self.list(Node(node.0 + granules), length - granules);
        }
        Some(node)
    }

    /// Takes `granules` out of a free run; what is left on either side stays free.
    fn cut(&mut self, node: Node, skip: u32, granules: u32) {
        let length = u32::from(self.grains[node.at()].len);
        self.unlist(node, length);
        if skip > 0 {
            self.list(node, skip);
        }
        let rest = length - skip - granules;
        if rest > 0 {
            self.list(Node(node.0 + skip + granules), rest);
        }
        self.shape(Node(node.0 + skip), granules);
    }

    /// Writes a run's length where it begins and where it ends.
    #[inline]
    fn shape(&mut self, node: Node, granules: u32) {
        self.grains[node.at()].len = granules as u8;
        self.grains[node.at() + granules as usize - 1].back = granules as u8;
    }

    /// Makes a range a free run of its list.
    fn list(&mut self, node: Node, granules: u32) {
        let length = granules as usize - 1;
        let head = std::mem::replace(&mut self.free[length % GRAINS], node.0);
        self.grains[node.at() + length].back = granules as u8;
        let grain = &mut self.grains[node.at()];
        grain.len = granules as u8;
        grain.kind = Kind::Free;
        grain.a = head;
        set_before(grain, NIL);
        if head != NIL {
            let next = Node(head);
            set_before(&mut self.grains[next.at()], node.0);
        }
        self.filled.set(length);
        self.free_grains += u64::from(granules);
        self.whole += u32::from(granules == PAGE_GRAINS);
    }

    fn unlist(&mut self, node: Node, granules: u32) {
        let grain = self.grains[node.at()];
        let (next, before) = (grain.a, before(&grain));
        if before == NIL {
            let length = granules as usize - 1;
            self.free[length % GRAINS] = next;
            if next == NIL {
                self.filled.clear(length);
            }
        } else {
            self.grains[before as usize].a = next;
        }
        if next != NIL {
            set_before(&mut self.grains[next as usize], before);
        }
        self.free_grains -= u64::from(granules);
        self.whole -= u32::from(granules == PAGE_GRAINS);
    }

    /// Takes back a live block together with the free runs beside it.
    #[inline(never)]
    pub(crate) fn put_merged(&mut self, node: Node) {
        self.pages[node.page()].ticket = self.ticket;
        self.merge(node);
    }

    /// Makes a run free, together with the free runs beside it.
    fn merge(&mut self, node: Node) {
        let (at, place) = (node.at(), node.place());
        let (mut start, mut length) = (node, u32::from(self.grains[at].len));
        // Only where a run begins may a granule look like anything but free: an old pointer to the
        // middle of a free run finds nothing live.
        self.grains[at].kind = Kind::Free;
        let end = place + length as usize;
        let right = (end < GRAINS)
            .then(|| (Node(node.0 + length), self.grains[at + length as usize]))
            .filter(|(_, grain)| grain.kind == Kind::Free)
            .map(|(node, grain)| (node, u32::from(grain.len)));
        let left = (place > 0).then(|| u32::from(self.grains[at - 1].back));
        let left = left
            .map(|length| (Node(node.0 - length), length))
            .filter(|(left, _)| self.grains[left.at()].kind == Kind::Free);
        if let Some((right, more)) = right {
            self.unlist(right, more);
            length += more;
        }
        if let Some((left, more)) = left {
            self.unlist(left, more);
            start = left;
            length += more;
        }
        self.list(start, length);
    }

    /// Merges the quick runs if they are a good part of the pages, so that a request which found no
    /// run may find one; true if that was done. Else another page is worth more: kept apart they
    /// serve the requests to come at a fraction of the cost.
    pub(crate) fn flush_if_many(&mut self) -> bool {
        let many = u64::from(self.quick_grains) * QUICK_PART
            > self.page_count() as u64 * u64::from(PAGE_GRAINS);
        many && self.flush_quick()
    }

    /// Merges all quick runs; true if there were any.
    pub(crate) fn flush_quick(&mut self) -> bool {
        let any = self.quick_grains > 0;
        while let Some(length) = self.quick_filled.first_from(0) {
            self.quick_filled.clear(length);
            self.quick_runs[length % GRAINS] = 0;
            let mut at = std::mem::replace(&mut self.quick[length % GRAINS], NIL);
            while at != NIL {
                let node = Node(at);
                at = self.grains[node.at()].a;
                self.put_merged(node);
            }
        }
        self.quick_grains = 0;
        any
    }

    // ---- pages -----------------------------------------------------------------------------

    /// Adds a page as one free run. Returns its place in the heap.
    pub(crate) fn add_page(&mut self, info: PageInfo) -> u32 {
        let page = Page {
            info,
            present: true,
            // The stream may be using it still, or follow who is.
            ticket: self.ticket,
        };
        let at = match self.vacant.pop() {
            Some(at) => {
                self.pages[at as usize] = page;
                at
            }
            None => {
                self.pages.push(page);
                self.grains
                    .resize(self.pages.len() * GRAINS, Grain::default());
                self.pages.len() as u32 - 1
            }
        };
        self.list(Node::new(at, 0), PAGE_GRAINS);
        self.set_cap();
        at
    }

    /// Takes out a page that is one free run, if more than `keep` are, with the ticket of the newest
    /// free in it.
    pub(crate) fn remove_page(&mut self, keep: u32) -> Option<(PageInfo, u64)> {
        if self.whole <= keep {
            return None;
        }
        let node = Node(self.free[GRAINS - 1]);
        self.unlist(node, PAGE_GRAINS);
        let page = &mut self.pages[node.page()];
        page.present = false;
        let gone = (page.info, page.ticket);
        self.vacant.push(node.page() as u32);
        self.set_cap();
        Some(gone)
    }

    /// Frees from now on get this ticket.
    pub(crate) fn set_ticket(&mut self, ticket: u64) {
        self.ticket = ticket;
    }

    /// Pages that are one free run.
    pub(crate) fn whole_pages(&self) -> u32 {
        self.whole
    }

    /// Pages in all.
    pub(crate) fn page_count(&self) -> usize {
        self.pages.len() - self.vacant.len()
    }

    /// Bounds what quick runs may hold together, after pages came or went.
    fn set_cap(&mut self) {
        let granules = self.page_count() as u32 * PAGE_GRAINS;
        self.cap = (granules / QUICK_SHARE).max(PAGE_GRAINS);
        if self.quick_grains > self.cap {
            self.flush_quick();
        }
    }

    /// Granules in quick runs.
    pub(crate) fn quick_granules(&self) -> u32 {
        self.quick_grains
    }

    /// Granules that are free, quick runs included.
    pub(crate) fn free_granules(&self) -> u64 {
        self.free_grains + u64::from(self.quick_grains)
    }

    /// Granules of freed blocks that other streams may still use.
    pub(crate) fn pending_granules(&self) -> u64 {
        self.pending_grains
    }
}
