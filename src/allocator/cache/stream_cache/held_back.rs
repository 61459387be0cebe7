//! Freed blocks that other streams may still access, as they leave a stream cache and return to it.

use super::Runs;
use super::granule::Node;

/// Frees of blocks that one other stream used and no marker covers yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Batch {
    /// Slot of the other stream.
    pub stream: u32,
    pub nodes: Vec<Node>,
    pub bytes: u64,
}

/// Blocks that were held back for other streams whose uses are complete.
#[derive(Debug)]
pub(crate) struct Returned {
    pub nodes: Vec<Node>,
    pub bytes: u64,
    /// Whether the uses are complete; otherwise the blocks' own stream is ordered behind them.
    pub over: bool,
}

impl Runs {
    /// Holds back a live block that other streams may still access.
    pub(crate) fn hold_back(&mut self, node: Node) {
        let page = &mut self.pages[node.page()];
        page.ticket = self.ticket;
        let granule = &mut page.granules[node.place()];
        granule.set_pending();
        self.pending_granules += u64::from(granule.len);
    }

    /// Returns a block that was held back. Its uses by other streams are complete, or, if not `over`, its own stream is
    /// ordered behind them. With `keep` it stays unmerged if there is room.
    ///
    /// A kept block immediately stops counting as pending on other streams. It counts as freed only when it is merged.
    pub(crate) fn return_held(&mut self, node: Node, over: bool, keep: bool) {
        let granule = self.granule_mut(node);
        granule.set_out();
        let granules = u32::from(granule.len);
        self.pending_granules -= u64::from(granules);
        if keep && self.put_quick(node, granules) {
            return;
        }
        if !over {
            self.pages[node.page()].ticket = self.ticket;
        }
        self.merge(node, None);
    }
}
