//! Worn pages, whose generations are used up.
//!
//! A small block is identified by its page's number, its position in the page and its generation; a page has
//! 2^31. Allocations do not check whether generations are left. Instead, after a fixed number of blocks of a stream
//! cache its next request comes here, and pages with fewer than twice that number left are worn. Runs of a worn page
//! become unusable when they are freed. Once no run is in use, the page returns to the heap, and comes back with
//! another number.

use super::granule::{Kind, LIVES, Node, PageInfo, Run, Using, WORN};
use super::{Inner, Runs};

impl Inner {
    /// Searches for worn pages if the allowance of blocks is used up.
    #[inline]
    pub(crate) fn look_for_worn(&mut self) {
        if self.runs.accounts.blocks.is_used_up() {
            self.wear_out();
        }
    }

    #[cold]
    #[inline(never)]
    fn wear_out(&mut self) {
        self.runs.wear_out();
        self.runs.accounts.blocks.allow(LIVES);
        if self.is_fast() {
            self.open = self.allocator;
        }
    }
}

impl Runs {
    /// Removes all free runs of worn pages from the lists, and prevents live blocks from returning to a list.
    pub(super) fn wear_out(&mut self) {
        for (at, page) in (0u32..).zip(&self.pages) {
            if page.present && page.info.generation >= WORN && !self.worn.contains(&at) {
                self.worn.push(at);
            }
        }
        for at in self.worn.clone() {
            self.spend(at);
        }
    }

    fn spend(&mut self, at: u32) {
        let runs: Vec<Run> = self.runs(at).collect();
        for run in runs {
            match run.kind {
                Kind::Free => self.unlist(run.node, run.granules),
                Kind::Quick => self.unquick(run.node, run.granules),
                Kind::Used => {
                    // Its free enters the heap, and from there `let_go`.
                    let live = run.live.filter(|live| live.using == Using::NONE);
                    if live.is_some() {
                        self.set_using(run.node, Using::MANY);
                    }
                    continue;
                }
                Kind::Pending | Kind::Spent => continue,
            }
            // A quick run counts as freed now.
            self.pages[at as usize].ticket = self.ticket;
            self.spend_run(run.node);
        }
    }

    /// Makes a run of a worn page unusable.
    pub(super) fn spend_run(&mut self, node: Node) {
        self.granule_mut(node).set_spent();
    }

    /// Whether the page around a run is worn.
    pub(super) fn is_worn_at(&self, node: Node) -> bool {
        self.worn.contains(&(node.page() as u32))
    }

    /// Removes a worn page without a run in use, with the ticket of the newest free in it.
    pub(super) fn remove_worn(&mut self) -> Option<(PageInfo, u64)> {
        let in_use = |run: Run| matches!(run.kind, Kind::Used | Kind::Pending);
        let at = (0..self.worn.len()).find(|at| !self.runs(self.worn[*at]).any(in_use))?;
        let at = self.worn.swap_remove(at);
        self.count -= self.runs(at).count() as u32;
        let page = &mut self.pages[at as usize];
        page.present = false;
        let gone = (page.info, page.ticket);
        self.vacant.push(at);
        self.set_cap();
        Some(gone)
    }

    /// Whether any page is worn.
    pub(crate) fn is_worn(&self) -> bool {
        !self.worn.is_empty()
    }

    /// Whether the page around a run still has the number in a block's number.
    #[inline(always)]
    pub(crate) fn is_numbered(&self, node: Node, number: u32) -> bool {
        let page = self.pages.get(node.page());
        page.is_some_and(|page| page.info.number == number)
    }

    /// Sets the generation of all pages.
    #[cfg(all(test, not(loom)))]
    pub(super) fn age(&mut self, generation: u32) {
        for page in &mut self.pages {
            page.info.generation = generation;
        }
    }
}

#[cfg(all(test, not(loom)))]
impl Inner {
    /// Sets the generation of all pages, and the number of blocks until the stream cache searches for worn pages.
    pub(crate) fn age(&mut self, generation: u32, blocks: u64) {
        self.runs.age(generation);
        self.runs.accounts.blocks.allow(blocks);
    }
}
