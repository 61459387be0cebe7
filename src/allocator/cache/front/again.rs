//! The run that was freed last, for those who want just that.

use super::grain::{NIL, Node, Taken};
use super::runs::LISTS;
use super::{Inner, Owner, Runs, Small};
use crate::allocator::size::GRANULE;

impl Runs {
    /// Where the run of a length begins that was freed last, if it is kept as it is.
    #[inline(always)]
    fn latest(&self, granules: u32) -> Option<u64> {
        let node = Node(self.quick[granules as usize % LISTS].head);
        if node.0 == NIL {
            return None;
        }
        let page = self.pages.get(node.page())?;
        Some(page.info.base + node.place() as u64 * GRANULE)
    }
}

impl Inner {
    /// [`take_at_once`](Self::take_at_once), if that gives the run at `ptr`; 0 is any run.
    #[inline(always)]
    pub(crate) fn take_again(&mut self, owner: Owner, request: Small, ptr: u64) -> Option<Taken> {
        if ptr != 0 && self.runs.latest(request.granules) != Some(ptr) {
            return None;
        }
        self.take_at_once(owner, request)
    }
}
