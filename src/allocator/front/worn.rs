//! Pages that have no generation left for another block.
//!
//! A small block is told apart from all others by its page's number, its place in the page and its
//! generation, of which a page has 2^31. Past the last one the page's runs are of no use as they become
//! free, and when none of them is in use it goes back to the books: it comes again with another number.

use super::Heap;
use super::grain::{Kind, Node, PageInfo, Run};

impl Heap {
    /// A page has no generation left for a run that was asked for.
    #[cold]
    #[inline(never)]
    pub(super) fn wear_out(&mut self, page: usize) {
        let at = page as u32;
        if !self.worn.contains(&at) {
            self.worn.push(at);
        }
        self.spend(at);
    }

    /// Takes everything in a worn page that is free out of the lists. Whether nothing in it is in use.
    fn spend(&mut self, at: u32) -> bool {
        let runs: Vec<Run> = self.runs(at).collect();
        for run in &runs {
            match run.kind {
                Kind::Free => self.unlist(run.node, run.granules),
                Kind::Quick => self.unquick(run.node, run.granules),
                Kind::Used | Kind::Pending | Kind::Spent => continue,
            }
            let page = &mut self.pages[at as usize];
            // What was kept as it was counts as freed now.
            page.ticket = self.ticket;
            page.grains[run.node.place()].set_spent();
        }
        let idle = |run: &Run| !matches!(run.kind, Kind::Used | Kind::Pending);
        runs.iter().all(idle)
    }

    /// Takes out a worn page of which nothing is in use, with the ticket of the newest free in it.
    pub(super) fn remove_worn(&mut self) -> Option<(PageInfo, u64)> {
        let at = (0..self.worn.len()).find(|at| self.spend(self.worn[*at]))?;
        let at = self.worn.swap_remove(at);
        let page = &mut self.pages[at as usize];
        page.present = false;
        let gone = (page.info, page.ticket);
        self.vacant.push(at);
        self.set_cap();
        Some(gone)
    }

    /// Whether any page has no generation left.
    pub(crate) fn is_worn(&self) -> bool {
        !self.worn.is_empty()
    }

    /// Whether the page around a run has the number that a block's number tells.
    #[inline(always)]
    pub(crate) fn is_numbered(&self, node: Node, number: u32) -> bool {
        let page = self.pages.get(node.page());
        page.is_some_and(|page| page.info.number == number)
    }

    /// Lets the pages have given out so many generations.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn age(&mut self, generation: u32) {
        for page in &mut self.pages {
            page.info.generation = generation;
        }
    }
}
