//! Completion: applies observed markers to the free pieces, which other streams can then use.

use crate::allocator::extent::Extents;
use crate::allocator::extent::index::{Entry, FreeIndex};
use crate::allocator::extent::record::{COMPLETE, MIXED, SpaceId};
use crate::allocator::stats::Stats;
use crate::allocator::stream::Streams;
use crate::driver::Device;
use crate::error::Error;

impl Streams {
    /// Removes completed uses from at most `most` pieces that are pending on one stream alone, or on several. Returns
    /// the number of pieces with a completed use.
    pub(crate) fn complete_pieces(
        &self,
        extents: &mut Extents,
        stats: &mut Stats,
        space: SpaceId,
        class: u32,
        most: usize,
    ) -> usize {
        let mut pieces = std::mem::take(&mut extents.pieces);
        let index = extents.space(space).and_then(|space| space.index(class));
        let is_due = |entry: &Entry| {
            let uses = extents.records.cold(entry.id).uses.as_slice();
            uses.iter().any(|u| self.is_complete(u))
        };
        let index = index.filter(|_| most > 0).into_iter();
        pieces.extend(index.flat_map(FreeIndex::iter).filter(is_due));
        // Processed by address, so that equal states give equal results.
        pieces.sort_unstable_by_key(|e: &Entry| e.addr);
        let mut count = 0;
        for entry in pieces.drain(..) {
            if count == most {
                break;
            }
            let hot = &extents.records[entry.id];
            if hot.is_free() && hot.addr == entry.addr && hot.stream == class {
                count += usize::from(self.complete_piece(extents, stats, space, entry.id));
            }
        }
        extents.pieces = pieces;
        count
    }

    /// Removes completed uses from a piece. Returns whether there were any.
    pub(crate) fn complete_piece(
        &self,
        extents: &mut Extents,
        stats: &mut Stats,
        space: SpaceId,
        id: u32,
    ) -> bool {
        let cold = extents.records.cold(id);
        let (owner, was_mixed) = (cold.owner, extents.records[id].stream == MIXED);
        // Where memory never changes streams, the owner's tag stays, because pieces merge by it.
        let keep_owner =
            extents.space(space).is_some_and(|s| s.merge_own) && !self.is_inactive(owner);
        let Some(uses) = cold
            .uses
            .without(|u| self.is_complete(u) && !(keep_owner && u.stream == owner))
        else {
            return false;
        };
        if was_mixed && uses.as_slice().len() <= 1 {
            let bytes = extents.records[id].bytes();
            stats.on_pool(space != SpaceId::Large, |pool| pool.active.sub(bytes));
        }
        let (at, records) = extents.parts(space);
        at.retag(records, id, uses);
        true
    }
}

impl Streams {
    /// Whether the stream of a block was retired, or is about to be. Blocks of graph pools have no stream here.
    pub(crate) fn is_unnamed(&self, stream: u32) -> bool {
        stream != COMPLETE && !self[stream].named
    }

    /// Checks that a stream belongs to a device.
    pub(crate) fn check_device(&self, device: &Device, stream: u32) -> Result<(), Error> {
        let (expected, found) = (device.ordinal(), self[stream].context.device().ordinal());
        match expected == found {
            true => Ok(()),
            false => Err(Error::WrongDevice { expected, found }),
        }
    }
}
