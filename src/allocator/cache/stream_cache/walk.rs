//! Walks over the runs of a stream cache: their contents, and the check of their consistency.

use super::granule::{GRANULES, Kind, NIL, Node, PageInfo, Run, Taken};
use super::runs::{LISTS, NO_QUICK, Runs};
use crate::allocator::extent::origin::{Names, Origin};
use crate::allocator::size::{GRANULE, PAGE_GRANULES};

impl Runs {
    /// Iterates over pages with their indexes in the stream cache.
    pub(crate) fn pages(&self) -> impl Iterator<Item = (u32, PageInfo)> + '_ {
        (0u32..)
            .zip(&self.pages)
            .filter(|(_, page)| page.present)
            .map(|(at, page)| (at, page.info))
    }

    /// Iterates over the runs of a page, from its first byte on.
    pub(crate) fn runs(&self, page: u32) -> impl Iterator<Item = Run> + '_ {
        let mut place = 0;
        std::iter::from_fn(move || {
            let held = self.pages.get(page as usize).filter(|p| p.present)?;
            if place >= PAGE_GRANULES {
                return None;
            }
            let granule = held.granules.get(place as usize)?;
            let node = Node::new(page, place);
            let ptr = held.info.base + u64::from(place) * GRANULE;
            // A length of zero would never end the walk; the check reports it.
            place += u32::from(granule.len).max(1);
            Some(Run {
                node,
                ptr,
                granules: u32::from(granule.len),
                kind: granule.kind(),
                live: self.live(node, ptr),
            })
        })
    }

    /// Returns the names of a live block with this generation, for modification.
    #[inline(never)]
    pub(crate) fn names_mut(&mut self, node: Node, generation: u32) -> Option<&mut Names> {
        let page = self.pages.get_mut(node.page())?;
        let none = || Box::new([Origin::default(); GRANULES]);
        let origins = page.origins.get_or_insert_with(none);
        Some(origins[node.place()].names_mut(generation))
    }

    /// Iterates over live blocks: bytes and origin of each.
    pub(crate) fn live_blocks(&self) -> impl Iterator<Item = (u64, Names)> + '_ {
        self.pages().flat_map(|(page, _)| {
            let live = self.runs(page).filter_map(|run| Some((run, run.live?)));
            live.map(|(run, live)| {
                let page = self.pages.get(run.node.page());
                let origins = page.and_then(|page| page.origins.as_ref());
                let names = origins.map(|of| of[run.node.place()].names(live.generation));
                let bytes = u64::from(run.granules) * GRANULE;
                (bytes, names.unwrap_or_default())
            })
        })
    }

    /// Returns the address of the quick run of `granules` that will be taken next.
    #[inline(always)]
    pub(crate) fn next_quick(&self, granules: u32) -> Option<u64> {
        let node = Node(self.quick.get(granules as usize)?.head);
        // No page has the index of `NIL`.
        let page = self.pages.get(node.page())?;
        Some(page.info.base + node.place() as u64 * GRANULE)
    }

    /// Takes the most recently freed quick run of exactly this length.
    #[inline(always)]
    pub(crate) fn take_quick(&mut self, granules: u32, requested: u32) -> Option<Taken> {
        let quick = &mut self.quick[granules as usize % LISTS];
        let node = Node(quick.head);
        // No page has the index of `NIL`.
        let page = self.pages.get_mut(node.page())?;
        quick.head = page.granules[node.place()].a;
        quick.left += 1;
        self.quick_room += granules;
        Some(page.hand_out(node, requested))
    }

    /// Returns the run around an address in a page.
    pub(crate) fn around(&self, page: u32, ptr: u64) -> Option<Run> {
        self.runs(page)
            .find(|run| ptr >= run.ptr && ptr < run.ptr + u64::from(run.granules) * GRANULE)
    }

    /// Whether an address of a page is free.
    pub(crate) fn is_free(&self, page: u32, ptr: u64) -> bool {
        let run = self.around(page, ptr);
        run.is_some_and(|run| matches!(run.kind, Kind::Free | Kind::Quick))
    }

    /// Returns the number of runs, including live blocks.
    pub(crate) fn count(&self) -> u64 {
        u64::from(self.count)
    }

    /// Returns the bytes of the longest free or quick run.
    pub(crate) fn largest_free(&self) -> u64 {
        let is_free =
            |length: &usize| self.filled.has(length - 1) || self.quick[length % LISTS].head != NIL;
        let longest = (1..=GRANULES).rev().find(is_free);
        longest.map_or(0, |length| length as u64 * GRANULE)
    }

    /// Returns the granules of freed blocks that other streams may still access.
    pub(crate) fn pending_granules(&self) -> u64 {
        self.pending_granules
    }

    /// Compares the lists with the contents of the pages, and returns the first inconsistency.
    pub(crate) fn check(&self) -> Result<(), &'static str> {
        let mut counts = [[0u64; GRANULES]; 2];
        let (mut whole, mut pending, mut count) = (0, 0, 0);
        for (at, page) in (0u32..).zip(&self.pages).filter(|(_, page)| page.present) {
            let mut end = 0;
            let mut before = None;
            for run in self.runs(at) {
                let (place, length) = (run.node.place() as u32, run.granules);
                if place != end || length == 0 || place + length > PAGE_GRANULES {
                    return Err("runs of a page lie side by side");
                }
                end = place + length;
                let inner = &page.granules[place as usize + 1..end as usize];
                if inner.iter().any(|granule| granule.kind() != Kind::Free) {
                    return Err("only the first granule of a run says what it is");
                }
                let last = &page.granules[end as usize - 1];
                if u32::from(last.back) != length {
                    return Err("a run's length stands at both of its ends");
                }
                count += 1;
                match run.kind {
                    Kind::Free => {
                        if before == Some(Kind::Free) {
                            return Err("free runs that touch are one");
                        }
                        counts[0][length as usize - 1] += 1;
                        whole += u32::from(length == PAGE_GRANULES);
                    }
                    Kind::Quick => counts[1][length as usize - 1] += 1,
                    Kind::Pending => pending += u64::from(length),
                    Kind::Used => {}
                }
                before = Some(run.kind);
            }
            if end != PAGE_GRANULES {
                return Err("runs fill their page");
            }
        }
        let quick: [u32; GRANULES] = std::array::from_fn(|at| self.quick[at + 1].head);
        for (lists, kind, counts) in [
            (&self.free, Kind::Free, &counts[0]),
            (&quick, Kind::Quick, &counts[1]),
        ] {
            for (length, head) in lists.iter().enumerate() {
                let (mut at, mut count) = (*head, 0);
                while at != NIL {
                    let node = Node(at);
                    let granule = self.granule(node);
                    if granule.kind() != kind || usize::from(granule.len) != length + 1 {
                        return Err("a listed run is what its list says");
                    }
                    (at, count) = (granule.a, count + 1);
                    if count > counts[length] {
                        break;
                    }
                }
                if count != counts[length] {
                    return Err("every run is in the list of its length");
                }
                if kind == Kind::Free && self.filled.has(length) != (count > 0) {
                    return Err("the bits say which lists hold runs");
                }
                let left = u64::from(self.quick[length + 1].left);
                if kind == Kind::Quick && left + count != u64::from(NO_QUICK[length + 1].left) {
                    return Err("quick runs are counted");
                }
            }
        }
        let sum = |counts: &[u64; GRANULES]| -> u64 {
            counts
                .iter()
                .zip(1u64..)
                .map(|(count, length)| count * length)
                .sum()
        };
        if sum(&counts[1]) != u64::from(self.quick_granules())
            || pending != self.pending_granules
            || count != self.count
            || whole != self.whole
        {
            return Err("granules are counted");
        }
        if self.idle > self.whole {
            return Err("pages that are one free run were idle at most");
        }
        if self.quick_room > self.cap {
            return Err("quick runs stay below their cap");
        }
        Ok(())
    }
}
