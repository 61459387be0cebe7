//! Freed blocks of a stream cache that other streams may still access: they are collected in batches while no marker
//! covers them, wait outside, and return.

use std::collections::HashSet;

use super::granule::{Kind, Live, Node, Run};
use super::held_back::Batch;
use super::{Freed, Inner};
use crate::allocator::size::{GRANULE, PAGE_GRANULES};

/// Number of frees of blocks used by one other stream, and their bytes, until their batch is closed.
const BATCH_FREES: usize = 512;
const BATCH_BYTES: u64 = 2 << 20;
/// Bytes held back for other streams before those are polled.
const PENDING_BYTES: u64 = BATCH_BYTES;
/// Maximum number of unsuccessful requests between two polls.
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
        // The batch stays here until the heap takes it, so that a concurrent check finds its blocks.
        Freed::Full(stream)
    }

    /// Keeps a block that is no longer live out of use.
    pub(crate) fn hold_back(&mut self, node: Node) {
        self.runs.hold_back(node);
        self.pending_peak = self.pending_peak.max(self.pending_bytes());
    }

    /// Frees the returned blocks; with `keep` as quick runs, as far as there is room for them. False if there were
    /// none.
    pub(crate) fn take_back(&mut self, keep: bool) -> bool {
        let any = !self.returned.is_empty();
        for returned in std::mem::take(&mut self.returned) {
            for node in returned.nodes {
                self.runs.return_held(node, returned.over, keep);
            }
        }
        any
    }

    /// Returns the runs of a page, with returned ones among the free ones.
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

    /// Returns the bytes of freed blocks that other streams may still access.
    pub(crate) fn pending_bytes(&self) -> u64 {
        self.runs.pending_granules() * GRANULE - self.returned_bytes()
    }

    /// Returns the bytes of returned blocks that are not free yet.
    fn returned_bytes(&self) -> u64 {
        self.returned.iter().map(|returned| returned.bytes).sum()
    }

    /// Returns the free bytes in the pages.
    pub(crate) fn free_bytes(&self) -> u64 {
        let pages = self.runs.page_count() as u64 * u64::from(PAGE_GRANULES) * GRANULE;
        pages - self.runs.accounts.allocated.current() - self.pending_bytes()
    }

    /// Closes and returns all open batches, or that of one stream.
    pub(crate) fn close_batches(&mut self, stream: Option<u32>) -> Vec<Batch> {
        let wanted = |batch: &mut Batch| stream.is_none_or(|s| s == batch.stream);
        let closed: Vec<Batch> = self.batches.extract_if(.., wanted).collect();
        self.waiting += closed.len() as u32;
        closed
    }

    /// Whether a poll of the other streams is due.
    pub(crate) fn take_poll_due(&mut self) -> bool {
        if self.waiting == 0 && self.pending_bytes() < PENDING_BYTES {
            return false;
        }
        let asks = self.skips == 0;
        self.skips = self.skips.saturating_sub(1);
        asks
    }

    /// Records a poll: after an unsuccessful one, more requests pass before the next.
    pub(crate) fn record_poll(&mut self, freed: bool) {
        self.next_skips = match freed {
            true => 0,
            false => (2 * self.next_skips + 1).min(MOST_SKIPS),
        };
        self.skips = self.next_skips;
    }

    /// Whether as many bytes are held back as a page has, so that a poll is cheaper than more memory.
    pub(crate) fn holds_a_page(&self) -> bool {
        self.pending_bytes() >= u64::from(PAGE_GRANULES) * GRANULE
    }

    /// Whether enough is held back to close a batch that is not full.
    pub(crate) fn holds_much(&self) -> bool {
        self.pending_bytes() >= PENDING_BYTES
    }
}
