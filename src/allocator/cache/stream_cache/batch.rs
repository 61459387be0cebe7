//! Freed blocks of a stream cache that other streams still use: gathered in batches while nothing orders them,
//! waited for outside, and taken back.

use std::collections::HashSet;

use super::granule::{Kind, Live, Node, PAGE_GRANULES, Run};
use super::held_back::Batch;
use super::{Freed, Inner};
use crate::allocator::size::GRANULE;

/// Frees of blocks that one other stream used, and their bytes, until their batch is closed.
const BATCH_FREES: usize = 512;
const BATCH_BYTES: u64 = 2 << 20;
/// Bytes that are held back for other streams before anybody asks whether those are done.
const PENDING_BYTES: u64 = BATCH_BYTES;
/// Most requests that find nothing to be let pass before they are asked again.
const MOST_SKIPS: u32 = 64;

impl Inner {
    pub(super) fn free_shared(&mut self, node: Node, live: Live) -> Freed {
        let (true, Some(stream)) = (self.is_fast(), live.using.slot()) else {
            return Freed::NeedsHeap;
        };
        self.account_free(live);
        self.hold_back(node);
        let bytes = u64::from(live.granules) * GRANULE;
        let at = match self.batches.iter().position(|b| b.stream == stream) {
            Some(at) => at,
            None => {
                self.batches.push(Batch {
                    stream,
                    nodes: Vec::with_capacity(BATCH_FREES),
                    bytes: 0,
                });
                self.batches.len() - 1
            }
        };
        let batch = &mut self.batches[at];
        batch.nodes.push(node);
        batch.bytes += bytes;
        if batch.nodes.len() < BATCH_FREES && batch.bytes < BATCH_BYTES {
            return Freed::Done;
        }
        // It stays here until the heap takes it, so that whoever looks meanwhile finds its blocks.
        Freed::Full(stream)
    }

    /// Keeps a block that is no longer live out of use.
    pub(crate) fn hold_back(&mut self, node: Node) {
        self.runs.hold_back(node);
        self.pending_peak = self.pending_peak.max(self.pending_bytes());
    }

    /// Makes what was returned free again; with `keep` as quick runs, as far as there is room for them.
    /// False if there was nothing.
    pub(crate) fn take_back(&mut self, keep: bool) -> bool {
        let any = !self.returned.is_empty();
        for returned in std::mem::take(&mut self.returned) {
            for node in returned.nodes {
                self.runs.let_go(node, returned.over, keep);
            }
        }
        any
    }

    /// The runs of a page, those that were returned among the free ones.
    pub(crate) fn runs(&self, page: u32) -> Vec<Run> {
        let mut runs: Vec<Run> = self.runs.runs(page).collect();
        let returned = self.returned.iter().flat_map(|returned| &returned.nodes);
        let returned: HashSet<Node> = returned
            .filter(|node| node.page() == page as usize)
            .copied()
            .collect();
        for run in runs.iter_mut().filter(|run| returned.contains(&run.node)) {
            run.kind = Kind::Free;
        }
        runs
    }

    /// Bytes of freed blocks that other streams may still use.
    pub(crate) fn pending_bytes(&self) -> u64 {
        self.runs.pending_granules() * GRANULE - self.returned_bytes()
    }

    /// Bytes of blocks that were returned, and are not free again yet.
    fn returned_bytes(&self) -> u64 {
        self.returned.iter().map(|returned| returned.bytes).sum()
    }

    /// Free bytes in the pages.
    pub(crate) fn free_bytes(&self) -> u64 {
        let pages = self.runs.page_count() as u64 * u64::from(PAGE_GRANULES) * GRANULE;
        pages - self.runs.accounts.allocated.current() - self.pending_bytes()
    }

    /// All open batches, or those of one stream: they are closed by this.
    pub(crate) fn close_batches(&mut self, stream: Option<u32>) -> Vec<Batch> {
        let wanted = |batch: &mut Batch| stream.is_none_or(|s| s == batch.stream);
        let closed: Vec<Batch> = self.batches.extract_if(.., wanted).collect();
        self.waiting += closed.len() as u32;
        closed
    }

    /// Whether it is time to ask if other streams are done with what is held back for them.
    pub(crate) fn asks(&mut self) -> bool {
        if self.waiting == 0 && self.pending_bytes() < PENDING_BYTES {
            return false;
        }
        let asks = self.skips == 0;
        self.skips = self.skips.saturating_sub(1);
        asks
    }

    /// They were asked: if nothing came of it, more requests are let pass the next time.
    pub(crate) fn asked(&mut self, freed: bool) {
        self.next_skips = match freed {
            true => 0,
            false => (2 * self.next_skips + 1).min(MOST_SKIPS),
        };
        self.skips = self.next_skips;
    }

    /// Whether as much is held back as a page has: more than more memory would cost to ask for.
    pub(crate) fn holds_a_page(&self) -> bool {
        self.pending_bytes() >= u64::from(PAGE_GRANULES) * GRANULE
    }

    /// Whether enough is held back to close a batch that is not full.
    pub(crate) fn holds_much(&self) -> bool {
        self.pending_bytes() >= PENDING_BYTES
    }
}
