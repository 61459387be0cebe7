//! Freed blocks that other streams still use, on their way out of a stream cache and back.

use super::Runs;
use super::granule::Node;

/// Frees of blocks that one other stream used, which nothing orders yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Batch {
    /// Slot of the other stream.
    pub stream: u32,
    pub nodes: Vec<Node>,
    pub bytes: u64,
}

/// Blocks that were held back for other streams, which are done with them.
#[derive(Debug)]
pub(crate) struct Returned {
    pub nodes: Vec<Node>,
    pub bytes: u64,
    /// Else their own stream has come to follow the others.
    pub over: bool,
}

impl Runs {
    /// Takes back a live block that other streams may still use.
    pub(crate) fn hold_back(&mut self, node: Node) {
        let page = &mut self.pages[node.page()];
        page.ticket = self.ticket;
        let granule = &mut page.granules[node.place()];
        granule.set_pending();
        self.pending_granules += u64::from(granule.len);
    }

    /// The other streams are done with a block that was held back; or, not `over` yet, its own
    /// stream has come to follow them. With `keep` it is kept as it is if there is room.
    ///
    /// What is kept counts as freed when it is merged, and is no longer what only others waited for.
    pub(crate) fn let_go(&mut self, node: Node, over: bool, keep: bool) {
        let granule = self.granule_mut(node);
        granule.set_out();
        let granules = u32::from(granule.len);
        self.pending_granules -= u64::from(granules);
        let worn = self.is_worn_at(node);
        if keep && !worn && self.put_quick(node, granules) {
            return;
        }
        if !over {
            self.pages[node.page()].ticket = self.ticket;
        }
        if worn {
            self.spend_run(node);
        } else {
            self.merge(node);
        }
    }
}
